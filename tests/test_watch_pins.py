"""A pin holds the files of a checkpoint, costs nothing, and leaves nothing, whatever its trainer does meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpttool.errors import BrokenCheckpoint, CannotWrite, CkpttoolError, NotACheckpoint
from ckpttool.inspection import inspect
from ckpttool.layout import numbered
from ckpttool.watching.pins import PINS, clear_pins, is_pinned, pinned
from tests.killing import pin_killed

NAME = "global_step_20/actor"
MOST = 300
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    """A run with one step of two roles, a file beside them and a tracker."""
    run = tmp_path / "run"
    shutil.copytree(data / "fsdp/torch2.13-fsdp2", run / NAME)
    (run / "global_step_20/critic").mkdir()
    (run / "global_step_20/critic/model.pt").write_bytes(b"critic")
    (run / "global_step_20/data.pt").write_bytes(b"dataloader")
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    return run


@pytest.fixture
def role(run: Path) -> Path:
    """The role that is pinned."""
    return run / NAME


def content(folder: Path) -> dict[str, bytes]:
    """Every regular file by its path, links followed to files only."""
    return {
        os.path.relpath(Path(at, name), folder): Path(at, name).read_bytes()
        for at, _, names in os.walk(folder)
        for name in names
        if Path(at, name).is_file()
    }


def nothing_left(run: Path) -> bool:
    return not os.path.lexists(run / PINS)


def at_link(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Let something happen right before the link of this number."""
    link, done = os.link, 0

    def counted(*arguments: object, **options: object) -> None:
        nonlocal done
        done += 1
        if done == number:
            act()
        link(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", counted)


# What is pinned


def test_it_is_the_checkpoint_under_its_own_names(run: Path, role: Path) -> None:
    with pinned(run, role) as pin:
        found, original = inspect(pin), inspect(role)
        assert (pin.name, pin.parent.name, numbered(pin)) == ("actor", "global_step_20", 20)
        assert pin.is_relative_to(run / PINS)
        assert (found.kind, found.state, found.faults) == (original.kind, "complete", ())
        assert content(pin) == content(role)
    assert nothing_left(run)


def test_no_byte_is_copied(run: Path, role: Path) -> None:
    with pinned(run, role) as pin:
        files = [path for path in pin.rglob("*") if path.is_file()]
        assert files
        assert all(path.samefile(role / path.relative_to(pin)) for path in files)


def test_the_trainer_may_delete_it_meanwhile(run: Path, role: Path) -> None:
    before = content(role)
    with pinned(run, role) as pin:
        shutil.rmtree(role.parent)
        assert content(pin) == before
        assert inspect(pin).state == "complete"
    assert (os.listdir(run), nothing_left(run)) == (["latest_checkpointed_iteration.txt"], True)


def test_the_files_beside_the_role_are_there_and_no_other_role(run: Path, role: Path) -> None:
    with pinned(run, role) as pin:
        assert sorted(os.listdir(pin.parent)) == ["actor", "data.pt"]
        assert (pin.parent / "data.pt").samefile(role.parent / "data.pt")


def test_a_step_without_roles_is_pinned_whole(tmp_path: Path, data: Path) -> None:
    step = tmp_path / "iter_0000100"
    shutil.copytree(data / "megatron/mcore0.16-dense-tp2", step)
    with pinned(tmp_path, step) as pin:
        assert (pin.name, numbered(pin), content(pin)) == ("iter_0000100", 100, content(step))
        assert inspect(pin).state == inspect(step).state == "complete"
    assert nothing_left(tmp_path)


def test_a_checkpoint_deeper_in_its_step(tmp_path: Path) -> None:
    """As NeMo-RL has it: the step is the directory with a number, and what lies on the way is there, too."""
    deep = tmp_path / "step_5/policy/weights/iter_0000000"
    deep.mkdir(parents=True)
    (deep / ".metadata").write_bytes(b"index")
    (tmp_path / "step_5/policy/info.json").write_text("{}")
    with pinned(tmp_path, deep) as pin:
        assert numbered(pin) == 5
        assert content(pin.parents[2]) == {"policy/info.json": b"{}", "policy/weights/iter_0000000/.metadata": b"index"}


def test_a_run_with_its_steps_farther_below(run: Path, role: Path) -> None:
    with pinned(run.parent, role) as pin:
        assert sorted(os.listdir(pin.parent)) == ["actor", "data.pt"]
        assert is_pinned(run.parent, "global_step_20")
    assert nothing_left(run.parent)


def test_a_release_has_no_number(tmp_path: Path) -> None:
    (tmp_path / "release/mp_rank_00").mkdir(parents=True)
    (tmp_path / "release/mp_rank_00/model.pt").write_bytes(b"x")
    with pinned(tmp_path, tmp_path / "release") as pin:
        assert (pin.name, content(pin)) == ("release", {"mp_rank_00/model.pt": b"x"})


def test_a_run_is_no_step_of_itself(run: Path) -> None:
    with pytest.raises(CannotWrite, match="the run itself"), pinned(run, run):
        pass


def test_rights_are_those_of_the_original(run: Path, role: Path) -> None:
    """Neither is a closed directory opened to others, nor an open one closed."""
    run.chmod(0o710)
    role.parent.chmod(0o750)
    role.chmod(0o500)
    with pinned(run, role) as pin:
        modes = [path.stat().st_mode & 0o777 for path in (pin, pin.parent, pin.parent.parent)]
    assert modes == [0o700, 0o750, 0o710]
    assert nothing_left(run)


def test_many_files(tmp_path: Path) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    for number in range(1_500):
        (step / f"{number}.pt").touch()
    with pinned(tmp_path, step) as pin:
        assert len(os.listdir(pin)) == 1_500
    assert nothing_left(tmp_path)


# Links and special files


def test_a_link_to_a_file_holds_the_file(run: Path, role: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"blob")
    (role / "tokenizer.json").symlink_to(tmp_path / "blob")
    with pinned(run, role) as pin:
        (tmp_path / "blob").unlink()
        assert ((pin / "tokenizer.json").is_symlink(), (pin / "tokenizer.json").read_bytes()) == (False, b"blob")


def test_a_link_inside_leads_inside_the_pin(run: Path, role: Path) -> None:
    """As migrate makes them: ``model/huggingface`` is a link to ``../huggingface``."""
    for name in ("huggingface", "model"):
        (role / name).mkdir()
    (role / "huggingface/config.json").write_text("{}")
    (role / "model/again").symlink_to("../huggingface")
    with pinned(run, role) as pin:
        assert os.readlink(pin / "model/again") == "../huggingface"  # noqa: PTH115
        shutil.rmtree(role)
        assert content(pin / "model/again") == content(pin / "huggingface") != {}


def test_an_absolute_link_inside_leads_inside_the_pin_too(run: Path, role: Path) -> None:
    (role / "huggingface").mkdir()
    (role / "huggingface/config.json").write_text("{}")
    (role / "again").symlink_to(role / "huggingface")
    with pinned(run, role) as pin:
        shutil.rmtree(role)
        assert content(pin / "again") == content(pin / "huggingface") != {}


def test_a_link_to_a_directory_elsewhere_is_followed_once(run: Path, role: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "sub/a").write_bytes(b"a")
    (tmp_path / "farther").mkdir()
    (outside / "on").symlink_to(tmp_path / "farther")
    (role / "one").symlink_to(outside)
    (role / "two").symlink_to(outside)
    with pinned(run, role) as pin:
        links = [name for name in ("one", "two") if (pin / name).is_symlink()]
        assert len(links) == 1
        assert os.readlink(pin / links[0]) in ("one", "two")  # noqa: PTH115
        assert (pin / "one/on").resolve() == tmp_path / "farther"
        shutil.rmtree(outside)
        assert content(pin / "one") == content(pin / "two") == {"sub/a": b"a"}
    assert (tmp_path / "farther").is_dir()


@pytest.mark.parametrize("to", [".", "..", "../..", "../../.ckpttool-pins", "/"])
def test_loops_end(run: Path, role: Path, to: str) -> None:
    (role / "loop").symlink_to(to)
    with pinned(run, role) as pin:
        assert (pin / "loop").is_symlink()
        assert content(pin) == content(role)
    assert nothing_left(run)


def test_a_link_that_leads_nowhere_stays_one(run: Path, role: Path) -> None:
    (role / "lost").symlink_to("nowhere")
    (role / "itself").symlink_to("itself")
    with pinned(run, role) as pin:
        assert [os.readlink(pin / name) for name in ("lost", "itself")] == ["nowhere", "itself"]  # noqa: PTH115


def test_a_role_that_is_a_link(run: Path, role: Path, tmp_path: Path) -> None:
    shutil.move(role, tmp_path / "elsewhere")
    role.symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    with pinned(run, role) as pin:
        shutil.rmtree(tmp_path / "elsewhere")
        assert content(pin) == before


def test_pipes_and_sockets_are_left_out(run: Path, role: Path) -> None:
    """Nobody waits for a writer of a pipe."""
    os.mkfifo(role / "pipe")
    os.mkfifo(role.parent / "pipe")
    (role / "to pipe").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()  # noqa: PTH109
        os.chdir(role)  # a path of a socket is short
        server.bind("socket")
        os.chdir(here)
        with pinned(run, role) as pin:
            assert not {"pipe", "socket", "to pipe"} & {*os.listdir(pin), *os.listdir(pin.parent)}


# What is refused


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on another file system."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system here")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_on_another_disk_cannot_be_pinned(run: Path, role: Path, other_disk: Path, as_folder: bool) -> None:
    (other_disk / "blob").write_bytes(b"blob")
    (role / "there").symlink_to(other_disk if as_folder else other_disk / "blob")
    with (
        pytest.raises(CannotWrite, match="lies on another file system, and cannot be pinned") as raised,
        pinned(run, role),
    ):
        pytest.fail("it was pinned")
    named = role / ("there/blob" if as_folder else "there")
    assert (str(named) in raised.value.message, "--pin" in raised.value.hint) == (True, True)
    assert (raised.value.code, raised.value.exit_code, nothing_left(run)) == ("link-refused", 6, True)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EMLINK, "as many names as a file can have"),
        (errno.EPERM, "EPERM"),
        (errno.EOPNOTSUPP, "cannot be pinned"),
        (errno.ENOSPC, "No space left"),
        (errno.EROFS, "Read-only"),
        (errno.EIO, "EIO"),
    ],
)
def test_a_link_that_the_system_refuses(
    run: Path, role: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    at_link(monkeypatch, 4, refuse)
    before = content(run)
    with pytest.raises(CannotWrite, match=said) as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (str(role) in raised.value.message, "--pin" in raised.value.hint) == (True, True)
    assert (nothing_left(run), content(run)) == (True, before)


_AS_NOBODY = """
import os, sys
from pathlib import Path
from ckpttool.errors import CkpttoolError
from ckpttool.watching.pins import PINS, pinned
run = Path(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with pinned(run, run / sys.argv[2]) as pin:
        sys.stdout.write("pinned")
except CkpttoolError as error:
    sys.stdout.write(f"{error.exit_code} {error}")
sys.stdout.write(f" {os.path.lexists(run / PINS)}")
"""


def as_nobody(run: Path) -> str:
    """Pin in a child that has dropped root; what came of it, and whether something is left."""
    command = [sys.executable, "-c", _AS_NOBODY, str(run), NAME]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=60).stdout


@pytest.fixture
def shared_run(open_folder: Path, run: Path) -> Path:
    """A run in which everyone may write, with files of root that everyone may read."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    shutil.copytree(run, open_folder / "run")
    for path in ((open_folder / "run"), *(open_folder / "run").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    return open_folder / "run"


def test_files_of_another_user(shared_run: Path) -> None:
    guard = Path("/proc/sys/fs/protected_hardlinks")
    if not guard.exists() or guard.read_text().strip() != "1":
        pytest.skip("this system lets everybody link everything")
    answer = as_nobody(shared_run)
    assert answer.startswith("6 ")
    assert "(EPERM): it cannot be pinned" in answer
    assert answer.endswith(" False")


def test_files_of_ones_own(shared_run: Path) -> None:
    for path in shared_run.rglob("*"):
        os.chown(path, 65534, 65534)
    assert as_nobody(shared_run) == "pinned False"


def test_a_directory_that_is_closed(shared_run: Path) -> None:
    os.chown(shared_run / "global_step_20/data.pt", 65534, 65534)
    (shared_run / NAME).chmod(0o700)
    answer = as_nobody(shared_run)
    assert (answer[:2], f"{NAME}: Permission denied" in answer, answer[-6:]) == ("3 ", True, " False")


def test_a_run_that_one_may_not_write_to(shared_run: Path) -> None:
    shared_run.chmod(0o755)
    answer = as_nobody(shared_run)
    assert (answer[:2], f"{PINS}: Permission denied" in answer, answer[-6:]) == ("6 ", True, " False")


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_has_the_name_of_the_pins_stays(run: Path, role: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "precious/global_step_20-1234abcd").mkdir(parents=True)
    (run / PINS).symlink_to(tmp_path / "precious") if what == "link" else (run / PINS).write_text("precious")
    with pytest.raises(CannotWrite, match="nothing can be pinned"), pinned(run, role):
        pytest.fail("it was pinned")
    assert (clear_pins(run), is_pinned(run, "global_step_20")) == ([], False)
    assert (os.path.lexists(run / PINS), os.listdir(tmp_path / "precious")) == (True, ["global_step_20-1234abcd"])


# Deleted or saved anew meanwhile


def test_a_checkpoint_that_is_gone(run: Path, role: Path) -> None:
    shutil.rmtree(role)
    with pytest.raises(NotACheckpoint, match="deleted while it was pinned") as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (raised.value.code, "--interval" in raised.value.hint, nothing_left(run)) == ("gone", True, True)


def test_a_run_that_is_gone(run: Path, role: Path) -> None:
    shutil.rmtree(run)
    with pytest.raises(NotACheckpoint) as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (raised.value.code, run.exists()) == ("gone", False)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_step_that_is_deleted_while_it_is_linked(
    run: Path, role: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    at_link(monkeypatch, number, lambda: shutil.rmtree(role.parent))
    with pytest.raises(NotACheckpoint, match="is gone") as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (raised.value.code, os.listdir(run)) == ("gone", ["latest_checkpointed_iteration.txt"])


def files_of(role: Path) -> list[Path]:
    return [path for path in role.rglob("*") if path.is_file()]


def test_a_file_that_is_deleted_after_it_was_linked(run: Path, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is linked last is not all: the deletion has begun elsewhere."""
    linked: list[str] = []
    link = os.link

    def noted(name: str, *arguments: object, **options: object) -> None:
        link(name, *arguments, **options)  # type: ignore[arg-type]
        linked.append(name)
        if len(linked) == 1 + len(files_of(role)):
            next(path for path in files_of(role) if path.name == linked[1]).unlink()

    monkeypatch.setattr(os, "link", noted)
    with pytest.raises(NotACheckpoint, match="is gone") as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (raised.value.code, nothing_left(run)) == ("gone", True)


def test_a_file_that_is_saved_anew(run: Path, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin is of one save."""

    def save() -> None:
        for path in files_of(role):
            (role / "new").write_bytes(path.read_bytes())
            (role / "new").replace(path)

    at_link(monkeypatch, 3, save)
    with pytest.raises(BrokenCheckpoint, match="written anew while it was pinned") as raised, pinned(run, role):
        pytest.fail("it was pinned")
    assert (raised.value.code, nothing_left(run)) == ("changed-meanwhile", True)


def test_a_trainer_that_deletes_while_it_is_pinned(run: Path, role: Path, tmp_path: Path) -> None:
    """At any moment: the pin is whole, or is seen not to be, or there is none."""
    shutil.move(role.parent, tmp_path / "step")
    before = content(tmp_path / "step/actor")
    for attempt in range(40):
        shutil.copytree(tmp_path / "step", role.parent)
        trainer = threading.Timer(attempt * 0.0001, shutil.rmtree, (role.parent,))
        trainer.start()
        with suppress(NotACheckpoint), pinned(run, role) as pin:
            trainer.join()
            if pin_is_whole(pin):
                weights = {name: value for name, value in before.items() if name.startswith("model")}
                assert weights.items() <= content(pin).items()
        trainer.join()
        assert nothing_left(run)


def pin_is_whole(pin: Path) -> bool:
    try:
        return inspect(pin).state == "complete"
    except CkpttoolError:
        return False


# It ends


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_leaves_nothing(run: Path, role: Path, error: type[BaseException]) -> None:
    before = content(run)
    with pytest.raises(error, match="why"), pinned(run, role):
        raise error("why")
    assert (nothing_left(run), content(run)) == (True, before)


def test_an_interrupt_while_it_is_linked_leaves_nothing(run: Path, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_link(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGINT))
    before = content(run)
    with pytest.raises(KeyboardInterrupt), pinned(run, role):
        pytest.fail("it was pinned")
    assert (nothing_left(run), content(run)) == (True, before)


def test_what_an_action_left_in_it_goes_too(run: Path, role: Path) -> None:
    before = content(run)
    with pinned(run, role) as pin:
        (pin / "deep/er").mkdir(parents=True)
        (pin / "deep/er/file").write_text("left")
        (pin / "out").symlink_to(role)
        (pin / "deep").chmod(0o500)
    assert (nothing_left(run), content(run)) == (True, before)


def test_two_pins_of_one_step(run: Path, role: Path) -> None:
    with pinned(run, role) as one:
        with pinned(run, role) as two, pinned(run, role.parent / "critic") as three:
            assert len({one, two, three}) == 3
        assert (one.is_dir(), two.exists(), three.exists()) == (True, False, False)
        assert (is_pinned(run, "global_step_20"), content(one)) == (True, content(role))
    assert nothing_left(run)


def test_it_is_known_which_steps_are_pinned(run: Path, role: Path) -> None:
    assert not is_pinned(run, "global_step_20")
    with pinned(run, role):
        assert is_pinned(run, "global_step_20")
        assert not any(is_pinned(run, name) for name in ("global_step_2", "global_step_200", "global_step", "actor"))
        assert clear_pins(run) == []
        assert is_pinned(run, "global_step_20")
    assert not is_pinned(run, "global_step_20")


_HOLD = """
import sys, time
from pathlib import Path
from ckpttool.watching.pins import pinned
with pinned(Path(sys.argv[1]), Path(sys.argv[1], sys.argv[2])):
    print("pinned", flush=True)
    time.sleep(600)
"""


def test_the_pin_of_another_process(run: Path, role: Path) -> None:
    """It counts while that lives; what a killed one left is cleared, and nothing else."""
    before = content(run)
    child = subprocess.Popen([sys.executable, "-c", _HOLD, str(run), NAME], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"pinned\n"
        assert (is_pinned(run, "global_step_20"), clear_pins(run)) == (True, [])
        with pinned(run, role):
            pass
        assert is_pinned(run, "global_step_20")
    finally:
        child.kill()
        child.communicate()
    assert not is_pinned(run, "global_step_20")
    assert len([name for name in os.listdir(run / PINS) if not name.endswith(".lock")]) == 1
    (run / PINS / "notes").mkdir()
    assert len(clear_pins(run)) == 1
    assert os.listdir(run / PINS) == ["notes"]
    shutil.rmtree(run / PINS)
    assert content(run) == before


def test_without_locks_a_pin_counts_as_long_as_it_is_there(
    run: Path, role: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pinned(run, role):
        assert (is_pinned(run, "global_step_20"), clear_pins(run)) == (True, [])
        assert is_pinned(run, "global_step_20")
    assert nothing_left(run)


def test_a_pin_without_its_lock_is_a_dead_ones(run: Path) -> None:
    (run / PINS / "global_step_20-1234abcd/global_step_20").mkdir(parents=True)
    (run / PINS / "global_step_30-1234abcd.lock").touch()
    assert not any(is_pinned(run, name) for name in ("global_step_20", "global_step_30"))
    assert len(os.listdir(run / PINS)) == 2
    assert clear_pins(run) == ["global_step_20-1234abcd", "global_step_30-1234abcd"]
    assert nothing_left(run)


def test_a_lock_that_is_a_pipe_holds_nobody_up(run: Path, role: Path) -> None:
    (run / PINS / "global_step_20-1234abcd").mkdir(parents=True)
    os.mkfifo(run / PINS / "global_step_20-1234abcd.lock")
    assert (is_pinned(run, "global_step_20"), clear_pins(run)) == (True, [])
    with pinned(run, role):
        pass


def test_looks_of_others_do_not_hinder_a_pin(run: Path, role: Path) -> None:
    """To look whether a pin is held is to hold its lock for a moment."""
    until = time.monotonic() + 0.3

    def look() -> None:
        while time.monotonic() < until:
            is_pinned(run, "global_step_20")

    def clear() -> None:
        while time.monotonic() < until:
            clear_pins(run)
            time.sleep(0.001)

    threads = [threading.Thread(target=target) for target in (look, clear)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        with pinned(run, role.parent / "critic") as path:
            assert content(path) == {"model.pt": b"critic"}
            assert is_pinned(run, "global_step_20")
    for thread in threads:
        thread.join()
    clear_pins(run)
    assert nothing_left(run)


def test_the_end_of_one_pin_does_not_hinder_the_beginning_of_another(run: Path, role: Path) -> None:
    """The directory around them is made and removed by both."""
    errors: list[BaseException] = []
    until = time.monotonic() + 0.3

    def pin() -> None:
        try:
            while time.monotonic() < until:
                with pinned(run, role.parent / "critic") as path:
                    assert content(path) == {"model.pt": b"critic"}
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=pin) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, nothing_left(run)) == ([], True)


# Killed


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_killed_at_every_call(tmp_path: Path, before: bool) -> None:
    """What is left is known as a dead one's, and is cleared; the checkpoint has all that it had."""
    run = tmp_path / "run"
    (run / NAME / "sub").mkdir(parents=True)
    for name in ("actor/a", "actor/sub/b", "data.pt"):
        (run / "global_step_20" / name).write_text(name)
    (run / NAME / "again").symlink_to("sub")
    was = content(run)
    for at in range(1, MOST):
        if not pin_killed(run, NAME, at, before=before):
            break
        assert not is_pinned(run, "global_step_20")
        clear_pins(run)
        assert (nothing_left(run), content(run)) == (True, was)
    assert 12 < at < MOST
