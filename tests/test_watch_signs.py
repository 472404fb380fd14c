"""Signs: which file of which producer says that a checkpoint is finished, and when that counts."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckpttool.watching import scanning
from ckpttool.watching.scanning import Anchor, Extent, measure, scan
from ckpttool.watching.signs import SETTLED, SLACK, Sign, awaited, read_tracker, sign_of

NOW = 1_800_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def fill(folder: Path, names: Iterable[str]) -> Path:
    """Next to empty files, and directories where a name ends with a slash: signs are known by names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text('{"a": 1}' if name.endswith(".json") else "")
    return folder


Find = Callable[..., Sign | None]


@pytest.fixture
def sign(run: Path) -> Find:
    def find(where: str, names: Iterable[str], beside: Iterable[str] = (), *, by_trainer: bool = False) -> Sign | None:
        checkpoint, step = fill(run / where, names), fill(run / where.split("/")[0], beside)
        number = int("".join(c for c in step.name if c.isdigit()))
        return sign_of(checkpoint, step, number, read_tracker(run), by_trainer=by_trainer)

    return find


SHARDS = ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", "huggingface/")
V2 = ("model/dist_ckpt/", "optimizer/dist_ckpt/", "extra/dist_ckpt/")
ARCHIVE = ("__0_0.distcp", ".metadata")
MODEL = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("where", "names", "beside", "what", "given"),
    [
        ("global_step_20/actor", V2, (), "ckpt_contents.json", False),
        ("global_step_20/actor", (*V2, "ckpt_contents.json"), (), "ckpt_contents.json", True),
        ("global_step_20/actor", SHARDS, (), "latest_checkpointed_iteration.txt", False),
        ("global_step_20/actor", ("dist_ckpt/metadata.json",), (), "latest_checkpointed_iteration.txt", False),
        ("global_step_20", SHARDS, (), "latest_checkpointed_iteration.txt", False),
        ("iter_0000020", ARCHIVE, (), "metadata.json", False),
        ("iter_0000020", (*ARCHIVE, "metadata.json"), (), "metadata.json", True),
        ("iter_0000020", ("mp_rank_00/model_optim_rng.pt",), (), "latest_checkpointed_iteration.txt", False),
        ("step-20", ("__0_0.distcp",), (), ".metadata", False),
        ("step-20", ARCHIVE, (), ".metadata", True),
        ("checkpoint-20", (*MODEL, "training_args.bin"), (), "trainer_state.json", False),
        ("checkpoint-20", (*MODEL, "rng_state_3.pth"), (), "trainer_state.json", False),
        ("checkpoint-20", (*MODEL, "trainer_state.json"), (), "trainer_state.json", True),
        ("checkpoint-20/pytorch_model_fsdp_0", ARCHIVE, ("optimizer.bin",), "trainer_state.json", False),
        ("checkpoint-20/pytorch_model_fsdp_0", ARCHIVE, ("trainer_state.json",), "trainer_state.json", True),
        ("step_20/policy/weights/iter_0000000", ARCHIVE, ("training_info.json",), "the name step_20", True),
    ],
)
def test_every_producer_has_its_sign(
    sign: Find, where: str, names: tuple[str, ...], beside: tuple[str, ...], what: str, given: bool
) -> None:
    found = sign(where, names, beside)
    assert found is not None
    assert (found.what, found.given) == (what, given)


@pytest.mark.parametrize("name", ["trainer_state.json", "metadata.json", "ckpt_contents.json"])
@pytest.mark.parametrize("content", ["", '{"a": {"b": 1}', "{}"])
def test_a_sign_that_is_written_just_now_is_not_given_yet(sign: Find, run: Path, name: str, content: str) -> None:
    """Not every program renames it in: it is empty for a moment, or on a remote file system for longer."""
    folder = "iter_0000020" if name == "metadata.json" else "checkpoint-20"
    fill(run / folder, ARCHIVE)
    (run / folder / name).write_text(content)
    found = sign(folder, ())
    assert found is not None
    assert (found.what, found.given) == (name, False)


@pytest.mark.parametrize(("cut", "given"), [(0, True), (1, True), (2, False), (30_000, False)])
def test_of_a_long_one_the_end_counts(sign: Find, run: Path, cut: int, given: bool) -> None:
    """The state of Hugging Face's Trainer holds every loss of the run, indented, with a line break at its end."""
    text = json.dumps({"log_history": [{"loss": n / 7} for n in range(5_000)]}, indent=2) + "\n"
    fill(run / "checkpoint-20", MODEL)
    (run / "checkpoint-20" / "trainer_state.json").write_text(text[: len(text) - cut])
    found = sign("checkpoint-20", ())
    assert found is not None
    assert found.given == given


@pytest.mark.parametrize(
    ("names", "given", "absent"),
    [((), False, True), (("train_state.pt",), False, True), (("train_state.pt", "run_config.yaml"), True, False)],
)
def test_megatron_bridge_adds_to_the_archive(
    sign: Find, run: Path, names: tuple[str, ...], given: bool, absent: bool
) -> None:
    """It tells itself by a file of the run. What lacks the sign may be of Megatron-LM, and is settled in the end."""
    fill(run, ("latest_train_state.pt", "iter_0000020/run_config.yaml"))
    (run / "iter_0000020/run_config.yaml").write_text("model: {}\n")
    if "run_config.yaml" not in names:
        (run / "iter_0000020/run_config.yaml").unlink()
    found = sign("iter_0000020", (*ARCHIVE, "metadata.json", *(name for name in names if name.endswith(".pt"))))
    assert found is not None
    assert (found.what, found.given, found.absent) == ("run_config.yaml", given, absent)


def test_no_sign_is_known_of_others(sign: Find) -> None:
    assert sign("step_20", MODEL) is None


def test_what_is_called_as_the_trainer_calls_it_is_taken_for_the_trainers(sign: Find) -> None:
    """Its weights come before anything that tells of it."""
    unsure = Sign(what="trainer_state.json", given=False, absent=True)
    assert sign("checkpoint-20", MODEL) == sign("checkpoint-30/pytorch_model_fsdp_0", ARCHIVE) == unsure
    found = sign("checkpoint-20/iter_0000020", ARCHIVE)
    assert found is not None
    assert found.what == "metadata.json"


def test_other_steps_tell_who_the_trainer_is(sign: Find) -> None:
    found = sign("checkpoint-20", MODEL, by_trainer=True)
    assert found == Sign(what="trainer_state.json", given=False)


@pytest.mark.parametrize(
    ("said", "given"), [("19", False), ("20", True), ("21", True), ("", False), ("x", False), ("٢٠", False)]
)
@pytest.mark.parametrize("tracker", ["latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt"])
def test_the_tracker_says_so(sign: Find, run: Path, tracker: str, said: str, given: bool) -> None:
    run.mkdir()
    (run / tracker).write_text(said)
    os.utime(run / tracker, (NOW, NOW))
    found = sign("global_step_20/actor", SHARDS)
    assert found is not None
    assert (found.what, found.given, found.at) == (tracker, given, NOW)
    assert found.said == ("" if given else "says 19" if said == "19" else f"holds {said!r}, not a step")


@pytest.mark.parametrize("loader", ["data.pt", "data_3.pt"])
def test_of_a_step_that_the_tracker_has_gone_past_the_data_loader_tells(sign: Find, run: Path, loader: str) -> None:
    """A trainer that died over step 20 may have gone on from step 10 to step 30."""
    fill(run / "global_step_30", (*SHARDS, loader))
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    assert sign("global_step_20/actor", SHARDS) == Sign(what="data.pt", given=False)
    (run / "global_step_20" / loader).touch()
    found = sign("global_step_20/actor", SHARDS)
    assert found is not None
    assert not found.given
    (run / "global_step_20" / loader).write_text("state")
    os.utime(run / "global_step_20" / loader, (NOW, NOW))
    found = sign("global_step_20/actor", SHARDS)
    assert found == Sign(what="latest_checkpointed_iteration.txt and data.pt", given=True, at=min(NOW, tracked(run)))


def test_an_archive_of_layout_v1_may_be_finished_after_the_data_loader(sign: Find, run: Path) -> None:
    """verl writes the data loader when an asynchronous save has begun; the training loop ends it."""
    names = tuple(f"dist_ckpt/{name}" for name in ARCHIVE)
    fill(run / "global_step_30", ("data.pt",))
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    fill(run / "global_step_20", ("data.pt",))
    (run / "global_step_20" / "data.pt").write_text("state")
    os.utime(run / "global_step_20" / "data.pt", (1000, 1000))
    assert sign("global_step_20/actor", names) == Sign(what="metadata.json", given=False)
    found = sign("global_step_20/actor", (*names, "dist_ckpt/metadata.json"))
    ended = (run / "global_step_20" / "actor" / "dist_ckpt" / "metadata.json").stat().st_mtime
    said = "latest_checkpointed_iteration.txt and data.pt"
    assert found == Sign(what=said, given=True, at=1000, ended=ended)
    assert awaited(found, newest=ended, unchanged=False, now=ended) == ""
    assert said in awaited(found, newest=ended + 5, unchanged=True, now=ended + 9)  # more was written since
    assert said in awaited(found, newest=ended, unchanged=True, now=ended, anew=ended)  # or in another save


def tracked(run: Path) -> float:
    return (run / "latest_checkpointed_iteration.txt").stat().st_mtime


def test_where_no_step_has_a_data_loader_the_tracker_has_to_do(sign: Find, run: Path) -> None:
    fill(run / "global_step_30", SHARDS)
    (run / "latest_checkpointed_iteration.txt").write_text("30")
    found = sign("global_step_20/actor", SHARDS)
    assert found == Sign(what="latest_checkpointed_iteration.txt", given=True, at=tracked(run))


def test_without_a_tracker_there_is_not_even_an_old_sign(sign: Find) -> None:
    assert sign("global_step_20/actor", SHARDS) == Sign(
        what="latest_checkpointed_iteration.txt", given=False, absent=True, said="is not there"
    )


GIVEN = Sign(what="the sign", given=True, at=NOW)


@pytest.mark.parametrize("unchanged", [False, True])
def test_a_sign_that_is_newer_than_the_data_counts_at_once(unchanged: bool) -> None:
    assert awaited(GIVEN, newest=NOW, unchanged=unchanged, now=NOW) == ""
    assert awaited(Sign(what="a name", given=True), newest=NOW, unchanged=unchanged, now=NOW) == ""


def test_a_sign_of_an_earlier_save_does_not_count_until_nothing_was_written_for_long() -> None:
    newest = NOW + SLACK + 0.1
    old = "the sign, which is older than its data, or 10 minutes without a change"
    assert awaited(GIVEN, newest=newest, unchanged=True, now=newest + SETTLED) == old
    assert awaited(GIVEN, newest=newest, unchanged=False, now=newest + 2 * SETTLED) == old
    assert awaited(GIVEN, newest=newest, unchanged=True, now=newest + 1.01 * SETTLED) == ""


def test_of_a_step_that_is_saved_anew_the_sign_is_to_be_new() -> None:
    assert awaited(GIVEN, newest=NOW + 0.01, unchanged=True, now=NOW, anew=NOW + 0.01) != ""
    assert awaited(GIVEN, newest=NOW, unchanged=True, now=NOW, anew=NOW) == ""


def test_another_rank_may_write_a_little_after_the_sign() -> None:
    """Ranks of transformers' Trainer do not wait for each other when they save their random numbers.

    It may as well be the same step that is saved again at once, as at the end of training.
    """
    for anew in (None, NOW - 5):
        assert awaited(GIVEN, newest=NOW + SLACK, unchanged=False, now=NOW + 1, anew=anew) != ""
        assert awaited(GIVEN, newest=NOW + SLACK, unchanged=True, now=NOW + 1, anew=anew) == ""


def test_half_of_each_save_is_not_finished_however_quiet_it_is() -> None:
    """The old sign of a step that a trainer died over when it saved it anew."""
    assert awaited(GIVEN, newest=NOW + 1, unchanged=True, now=NOW + 100 * SETTLED, anew=NOW + 0.5) != ""
    assert awaited(GIVEN, newest=NOW + 9, unchanged=True, now=NOW + 100 * SETTLED, anew=NOW - 5) != ""


def test_what_has_no_data_yet_is_not_finished_however_quiet_it_is() -> None:
    unsure = Sign(what="the sign", given=False, absent=True)
    assert awaited(unsure, newest=0.0, unchanged=True, now=NOW) == "the sign"


def test_a_sign_that_is_not_given_is_waited_for_however_quiet_it_is() -> None:
    sign = Sign(what="the sign", given=False, at=NOW)
    assert awaited(sign, newest=NOW, unchanged=True, now=NOW + 100 * SETTLED) == "the sign"


def test_what_a_sign_says_instead_is_told() -> None:
    sign = Sign(what="the sign", given=False, said="says 15")
    assert awaited(sign, newest=NOW, unchanged=True, now=NOW) == "the sign, which says 15"


def test_where_there_is_none_at_all_a_long_quiet_counts() -> None:
    """Asynchronous FSDP saves of verl never write the tracker."""
    sign = Sign(what="the sign", given=False, absent=True)
    assert awaited(sign, newest=NOW, unchanged=True, now=NOW + SETTLED) == "the sign"
    assert awaited(sign, newest=NOW, unchanged=False, now=NOW + 2 * SETTLED) == "the sign"
    assert awaited(sign, newest=NOW, unchanged=True, now=NOW + 1.01 * SETTLED) == ""


def test_without_a_known_sign_it_is_looked_at_twice() -> None:
    assert awaited(None, newest=NOW, unchanged=False, now=NOW).startswith("a second look")
    assert awaited(None, newest=NOW, unchanged=True, now=NOW) == ""


def test_a_scan_names_checkpoints_by_their_place(run: Path) -> None:
    for role in ("actor", "critic"):
        fill(run / "global_step_9" / role, SHARDS)
        fill(run / "global_step_10" / role, SHARDS)
    fill(run / "release", ARCHIVE)
    fill(run / "global_step_10", ("data.pt",))
    names = [candidate.name for candidate in scan(run).candidates]
    steps = ("global_step_9", "global_step_10")
    assert names == [f"{step}/{role}" for step in steps for role in ("actor", "critic")]
    assert [c.name for c in scan(run, roles=["critic"], since=10).candidates] == ["global_step_10/critic"]
    assert [c.name for c in scan(run, only=9, known={"global_step_9/actor"}).candidates] == ["global_step_9/critic"]


def test_what_cannot_be_read_waits_for_that_and_hides_nothing_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a role that cannot be listed, nor a sign that leads in a circle, is left out without a word."""
    for role in ("actor", "critic", "reward"):
        fill(run / "global_step_9" / role, V2 if role == "critic" else SHARDS)
    (run / "global_step_9" / "critic" / "ckpt_contents.json").symlink_to("ckpt_contents.json")
    (run / "latest_checkpointed_iteration.txt").write_text("9")

    def refuse(path: Path) -> tuple[Extent, Anchor | None]:
        if path.name == "actor":
            raise PermissionError(errno.EACCES, "Permission denied")
        return measure(path)

    monkeypatch.setattr(scanning, "measure", refuse)
    signs = {candidate.role: candidate.sign for candidate in scan(run).candidates}
    assert {role: sign.given for role, sign in signs.items() if sign is not None} == {
        "actor": False,
        "critic": False,
        "reward": True,
    }
    assert signs["actor"] == Sign(what="being readable (Permission denied)", given=False)
    assert signs["critic"] == Sign(what="ckpt_contents.json", given=False)


def test_a_tracker_that_cannot_be_read_is_not_absent(sign: Find, run: Path) -> None:
    """Else a long quiet would do in its place."""
    fill(run, ())
    os.mkfifo(run / "latest_checkpointed_iteration.txt")
    tracker = Sign(what="latest_checkpointed_iteration.txt", given=False, at=0.0, said="cannot be read")
    assert sign("global_step_9/actor", SHARDS) == tracker


def test_the_anchor_is_a_file_that_every_save_writes(run: Path) -> None:
    role = fill(run, ("dist_ckpt/.metadata", "dist_ckpt/__0_0.distcp", "huggingface/model.safetensors", "a.pt"))
    os.utime(role / "dist_ckpt/.metadata", ns=(5, 5))
    _, anchor = measure(role)
    assert anchor is not None
    assert (anchor.file, anchor.written) == ("dist_ckpt/.metadata", 5)
    (role / "dist_ckpt/.metadata").unlink()
    assert (anchor := measure(role)[1]) is not None
    assert anchor.file == "huggingface/model.safetensors"


def test_an_extent_counts_every_file_and_dates_data(run: Path) -> None:
    role = fill(run, SHARDS)
    (role / SHARDS[0]).write_bytes(bytes(10))
    (role / "huggingface/config.json").write_bytes(bytes(5))
    for name, at in ((SHARDS[0], 30), (SHARDS[1], 20), ("huggingface/config.json", 40)):
        os.utime(role / name, ns=(at, at))
    extent, _ = measure(role)
    assert (extent.files, extent.bytes, extent.written, extent.changed) == (3, 15, 30, 40)
