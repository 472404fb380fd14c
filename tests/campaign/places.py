"""Where a command meets a pickle: small real checkpoints with a payload in one place, and the commands that take them.

The commands are data: a new one is a line a place.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ckpttool
from tests.campaign.payloads import BROKEN, READ, REFUSED, Payload
from tests.hostile import PROTO, STOP, named, text
from tests.mutations import DATA

DEMO = Path(ckpttool.__file__).parent / "demo_data"
SHARD = "model_world_size_4_rank_1.pt"
ROOM = 1 << 20
"""Bytes that a record of a data file takes, whatever payload is in it."""

INSPECT = ("inspect", "{}", "--strict")
MERGE = ("merge-fsdp", "{}", "-o", "{}.out")
TO_HF = ("to-hf", "{}", "-o", "{}.out")
MIGRATE = ("migrate", "{}", "--mode", "copy")
DIFF = ("diff", "{}", "{}", "--all")
VERIFY = ("verify", "{}", "--values")
WATCH = ("watch", "{run}", "--once", "--callback", "tests.campaign.noting:Noting")
ALL = (DIFF, VERIFY, WATCH)
"""What takes whatever can be opened; a watch is given a run of which it is a step (`followed`)."""
Command = tuple[str, ...]


class Place(NamedTuple):
    """``base`` makes a checkpoint, ``put`` gives it a stream in the place that error messages call by
    one of its ``names``.

    ``around`` are the instructions before and after a payload. ``opening`` are the commands that read the place,
    ``passing`` those that have no use for it: there a payload changes nothing.
    """

    names: tuple[str, ...]
    base: Callable[[Path], None]
    put: Callable[[Path, bytes], None]
    opening: tuple[Command, ...] = ()
    passing: tuple[Command, ...] = ()
    around: tuple[bytes, bytes] = (b"}" + text("weight"), b"s")
    lenient: bool = False
    aside: bool = False
    """What is damaged here is a note: nothing of a conversion depends on it."""

    sound: int = 0
    """The exit code of `to-hf` where nothing is in the way but the config, which is another model's."""

    def stream(self, payload: Payload) -> bytes:
        """The stream that is put there."""
        return payload.body if payload.whole else PROTO + self.around[0] + payload.body + self.around[1] + STOP

    def allowed(self, payload: Payload, command: Command) -> set[int]:
        """The exit codes that are right."""
        if command in self.passing or command == WATCH:
            return {0}
        wanted = payload.lenient if self.lenient else payload.strict
        if wanted == REFUSED:
            return {7}
        if self.aside:
            return {self.sound if command[0] == "to-hf" else 0}
        assert wanted in (BROKEN, READ)
        return {1} if command[0] in ("inspect", "verify") else {4}

    def fires(self, payload: Payload) -> bool:
        """Tell whether a watch acts on it: on what ``inspect`` calls whole, and on nothing else."""
        return self.allowed(payload, INSPECT) == {0}


# Checkpoints


def fsdp(folder: Path) -> None:
    """Four ranks of a small model."""
    shutil.copytree(DEMO / "fsdp", folder)


def lora(folder: Path) -> None:
    """Four ranks of adapters alone."""
    shutil.copytree(DEMO / "lora", folder)


def fsdp_with(kind: str, names: str) -> Callable[[Path], None]:
    """The same with files of another kind beside the model's."""

    def make(folder: Path) -> None:
        fsdp(folder)
        for rank in range(4):
            shutil.copyfile(folder / f"model_world_size_4_rank_{rank}.pt", folder / names.format(rank))

    assert kind in names
    return make


def megatron(folder: Path) -> None:
    """A role of verl in layout v1."""
    shutil.copytree(DEMO / "megatron", folder)


def accelerate(folder: Path) -> None:
    """Four ranks as accelerate names them."""
    fsdp(folder)
    (folder / "fsdp_config.json").unlink()
    for rank in range(4):
        (folder / f"model_world_size_4_rank_{rank}.pt").rename(folder / f"pytorch_model_fsdp_0_rank{rank}.bin")


def with_common_state(folder: Path) -> None:
    """What megatron-core 0.19 writes: the common state is a record of a data file."""
    folder.mkdir()
    shutil.copytree(DATA / "megatron/mcore0.19-dense-tp2", folder / "dist_ckpt")
    shutil.copytree(DEMO / "megatron/huggingface", folder / "huggingface")
    point(folder / "dist_ckpt", "common_state/shard_0_1")


def with_record(folder: Path) -> None:
    """One of the model's tensors lies where there is room for a payload."""
    megatron(folder)
    point(folder / "dist_ckpt", "decoder.final_layernorm.weight")


def reference(folder: Path) -> None:
    """A model that ``--like`` or ``--base`` may name, beside what is converted."""
    fsdp(folder)
    (folder / "like").mkdir()
    shutil.copytree(DEMO / "megatron", folder / "role")


def hub(folder: Path) -> None:
    """A Hugging Face directory without weights yet."""
    shutil.copytree(DEMO / "fsdp/huggingface", folder)


def point(archive: Path, key: str) -> None:
    """Let the index say that this record lies behind all others of its file, and has all the room there."""
    metadata: Any = pickle.loads((archive / ".metadata").read_bytes())
    (index,) = [index for index in metadata.storage_data if index.fqn == key][:1]
    info = metadata.storage_data[index]
    info.offset, info.length = (archive / info.relative_path).stat().st_size, ROOM
    for other in [other for other in metadata.storage_data if other.fqn == key and other != index]:
        metadata.storage_data[other].offset = 0
    (archive / ".metadata").write_bytes(pickle.dumps(metadata))
    (archive / "record").write_text(info.relative_path)


# Putting


def zipped(stream: bytes, room: int = 0) -> bytes:
    """What ``torch.save`` makes of a stream, filled up to the room that there is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        archive.writestr("archive/version", "3\n")
    if not room:
        return file.getvalue()
    left = room - len(file.getvalue()) - 2 * len("archive/fill") - 76
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/fill", bytes(left))
    assert len(file.getvalue()) == room
    return file.getvalue()


def whole(name: str) -> Callable[[Path, bytes], None]:
    """The stream is the file."""
    return lambda folder, stream: _write(folder / name, stream)


def archived(name: str) -> Callable[[Path, bytes], None]:
    """The stream is in an archive of torch's."""
    return lambda folder, stream: _write(folder / name, zipped(stream))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def recorded(folder: Path, stream: bytes) -> None:
    """The stream is the record for which there is room."""
    note = folder / "dist_ckpt" / "record"
    with (folder / "dist_ckpt" / note.read_text()).open("ab") as file:
        file.write(zipped(stream, ROOM))
    note.unlink()


def pipe(name: str) -> Callable[[Path, bytes], None]:
    """Nothing at all: whoever opens it waits for ever."""

    def put(folder: Path, _: bytes) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return put


def _index() -> tuple[bytes, bytes]:
    """An index of torch's, of which the tensors are the payload."""
    made = named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81}("
    return made + text("state_dict_metadata"), text("storage_data") + b"}ub"


OPTIM, EXTRA = "optim_world_size_4_rank_{}.pt", "extra_state_world_size_4_rank_{}.pt"
LIKE, BASE = (*MERGE, "--like", "{}/like"), ("to-hf", "{}/role", "-o", "{}.out", "--like", "{}/like")
FUSE = ("merge-fsdp", "{}", "-o", "{}.out", "--lora", "adapter")

PLACES: dict[str, Place] = {
    "shard": Place((SHARD, "rank 1"), fsdp, archived(SHARD), (INSPECT, MERGE, *ALL)),
    "adapter shard": Place((SHARD, "rank 1"), lora, archived(SHARD), (INSPECT, FUSE, *ALL)),
    "accelerate": Place(
        ("pytorch_model_fsdp_0_rank2.bin", "rank 2"),
        *(
            accelerate,
            archived("pytorch_model_fsdp_0_rank2.bin"),
            (INSPECT, (*MERGE, "--hf-config", "{}/huggingface"), *ALL),
        ),
    ),
    "optimizer shard": Place((), fsdp_with("optim", OPTIM), archived(OPTIM.format(1)), (), (INSPECT, MERGE, *ALL)),
    "random state": Place((), fsdp_with("extra", EXTRA), archived(EXTRA.format(1)), (), (INSPECT, MERGE, *ALL)),
    "index": Place(
        (".metadata",),
        *(megatron, whole("dist_ckpt/.metadata"), (INSPECT, TO_HF, MIGRATE, *ALL), (), _index()),
        lenient=True,
    ),
    "common.pt": Place(
        ("common.pt",),
        *(megatron, archived("dist_ckpt/common.pt"), (INSPECT, TO_HF, MIGRATE, *ALL), (), (b"}" + text("args"), b"s")),
        lenient=True,
        aside=True,
    ),
    "common state": Place(
        ("common_state",),
        *(with_common_state, recorded, (INSPECT, TO_HF, *ALL), (), (b"}" + text("args"), b"s")),
        lenient=True,
        aside=True,
        sound=5,
    ),
    "record": Place(
        (".distcp",), with_record, recorded, (TO_HF, DIFF), (INSPECT, MIGRATE, ("verify", "{}"), WATCH), (b"", b"")
    ),
    "pytorch_model.bin": Place(("pytorch_model.bin",), hub, archived("pytorch_model.bin"), (INSPECT, *ALL)),
    "adapter_model.bin": Place(("adapter_model.bin",), hub, archived("adapter_model.bin"), (INSPECT, *ALL)),
    "reference": Place(("pytorch_model.bin",), reference, archived("like/pytorch_model.bin"), (LIKE, BASE)),
}
