"""A trainer that writes while a command reads: an error comes of it, or the whole of one version, never a mixture."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.campaign.children import End, Log, held, run
from tests.campaign.subjects import Content, Migration, archive, content, said, shards
from tests.migrating import STAGING

CHANGED = frozenset({3, 4})
"""Exit codes of a command whose source changes under its hands."""

Mutation = Callable[[Path, Path, random.Random], None]
"""What a trainer does to a checkpoint, given the one that it saves next and a choice."""


# A trainer that writes while a command reads


def _data(role: Path) -> list[Path]:
    return sorted(path for path in role.rglob("*") if path.suffix in (".pt", ".distcp"))


def _files(role: Path) -> list[Path]:
    return sorted(path for path in role.rglob("*") if path.is_file())


def rewritten(live: Path, other: Path, _rng: random.Random) -> None:
    """The next save writes into the files of the one before."""
    for path in _files(other):
        (live / path.relative_to(other)).write_bytes(path.read_bytes())


def replaced(live: Path, other: Path, _rng: random.Random, names: Sequence[Path] | None = None) -> None:
    """The next save is renamed over the one before, file by file."""
    for path in names if names is not None else _files(other):
        new = live.parent / "renamed"
        shutil.copyfile(path, new)
        new.replace(live / path.relative_to(other))


def one_replaced(live: Path, other: Path, rng: random.Random) -> None:
    """Only one rank has come so far as to save."""
    replaced(live, other, rng, [rng.choice(_data(other))])


def one_rewritten(live: Path, other: Path, rng: random.Random) -> None:
    """The same, into the file that is there."""
    path = rng.choice(_data(other))
    (live / path.relative_to(other)).write_bytes(path.read_bytes())


def grown(live: Path, _other: Path, rng: random.Random) -> None:
    """Something is appended to a file."""
    with rng.choice(_data(live)).open("ab") as file:
        file.write(bytes(rng.randrange(1, 5000)))


def cut(live: Path, _other: Path, rng: random.Random) -> None:
    """A file is cut, as one is that is about to be written anew."""
    path = rng.choice(_data(live))
    os.truncate(path, rng.choice((0, path.stat().st_size // 2)))


def removed(live: Path, _other: Path, rng: random.Random) -> None:
    """A file of tensors is removed."""
    rng.choice(_data(live)).unlink()


def cleared(live: Path, _other: Path, _rng: random.Random) -> None:
    """The checkpoint is removed: the run keeps the last three of them."""
    shutil.rmtree(live)


def side_files(live: Path, other: Path, rng: random.Random) -> None:
    """Only what lies beside the weights is replaced so far."""
    replaced(live, other, rng, [path for path in _files(other) if path.parent.name == "huggingface"])


MUTATIONS: Mapping[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (*(rewritten, replaced, one_replaced, one_rewritten, grown, cut, removed, cleared, side_files),)
}


@dataclass(frozen=True, eq=False)
class Reading:
    """A command that reads a checkpoint of which there are two versions.

    In ``words``, ``LIVE`` stands for the checkpoint, ``STILL`` for its first version, ``OUT`` for the output. ``codes``
    are the exit codes of an answer.
    """

    words: tuple[str, ...]
    versions: tuple[Path, Path]
    codes: tuple[int, ...] = (0,)

    @property
    def command(self) -> str:
        """Its name."""
        return self.words[0]

    @property
    def makes(self) -> bool:
        """Whether it writes something."""
        return "OUT" in self.words

    def line(self, live: Path, output: Path) -> list[str]:
        """The command line."""
        places = {"LIVE": str(live), "STILL": str(self.versions[0]), "OUT": str(output)}
        return [places.get(word, word) for word in self.words]

    @cached_property
    def results(self) -> tuple[Content, ...]:
        """The answers about each version when it lies still."""
        return tuple(map(self._result, self.versions))

    def _result(self, version: Path) -> Content:
        here = version.with_name(f"{version.name} by {self.command}")
        here.mkdir()
        end = run(self.line(version, here / "out"), here, here / "text")
        assert end.code in self.codes, end.text
        return self._answer(here, end)

    def _answer(self, here: Path, end: End) -> Content:
        """What can be held against another answer: an output, the states of tensors."""
        if self.makes:
            return content(here / "out")
        if self.command != "diff":
            return {}
        return {tensor["name"]: tensor["state"].encode() for tensor in json.loads(end.text)["data"]["tensors"]}

    def reads(self, folder: Path) -> list[str]:
        """The label of everything that the command reads when nobody disturbs it."""
        here = folder / "still"
        live = self._arrange(here)
        run(self.line(live, here / "out"), live, folder / "text", [Log(str(folder / "log"), "read")])
        labels = (folder / "log").read_text().splitlines()
        (folder / "log").unlink()
        shutil.rmtree(here)
        return labels

    def moments(self, folder: Path) -> range:
        """The numbers of the reads that a change may come before: while the kind is found out, nothing is read yet."""
        labels = self.reads(folder)
        first = next(at for at, label in enumerate(labels, 1) if not label.endswith("/metadata.json"))
        return range(first, len(labels) + 1)

    def _arrange(self, here: Path) -> Path:
        live = here / "live" / self.versions[0].name
        shutil.copytree(self.versions[0], live)
        return live

    def play(self, folder: Path, at: int, mutation: Mutation, rng: random.Random) -> tuple[End, list[str]]:
        """Change the checkpoint right before a read; return the end, and what is wrong with it."""
        here = folder / "here"
        live, output = self._arrange(here), here / "out"
        begun = held(self.line(live, output), live, folder / "text", at, "read")
        if begun.reached() is not None:
            mutation(live, self.versions[1], rng)
        end = begun.end()
        found = list(self.wrong(here, end, live))
        shutil.rmtree(here)
        return end, found

    def wrong(self, here: Path, end: End, live: Path) -> Iterator[str]:
        """Say what may not be, given how it ended."""
        yield from said(end, {*self.codes, *CHANGED}, live, here)
        if strangers := {path.name for path in here.iterdir()} - {"live", *(["out"] if self.makes else [])}:
            yield f"files beside the output: {strangers}"
        if end.code in self.codes and self._answer(here, end) not in self.results:
            yield "a mixture of two versions"
        if end.code not in self.codes and (here / "out").exists():
            yield f"it failed, and there is an output: {end.text}"


def readings(folder: Path) -> list[Reading]:
    """Commands that read, as data; each is tried with shards or an archive."""
    saves = shards(folder / "0" / "shards", 0), shards(folder / "1" / "shards", 1)
    archives = archive(folder / "0" / "archive", 0), archive(folder / "1" / "archive", 1)
    made = ("LIVE", "-o", "OUT", "--max-shard-size", "16KB")
    return [
        Reading(("merge-fsdp", *made), saves),
        Reading(("to-hf", *made), archives),
        *(
            Reading(words, versions, (0, 1))
            for versions in (saves, archives)
            for words in (("inspect", "LIVE"), ("verify", "LIVE"), ("diff", "LIVE", "STILL", "--json"))
        ),
    ]


# A trainer that writes while a migration copies


def _flipped(archive: Path) -> None:
    for path in archive.glob("*.distcp"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def _renamed(archive: Path) -> None:
    for path in archive.glob("*.distcp"):
        new = path.with_suffix(".new")
        new.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        new.replace(path)


def _longer(archive: Path) -> None:
    for path in archive.glob("*.distcp"):
        path.write_bytes(path.read_bytes() + b"more")


def _shorter(archive: Path) -> None:
    for path in archive.glob("*.distcp"):
        os.truncate(path, path.stat().st_size - 10)


CHANGES: Mapping[str, Callable[[Path], None]] = {
    "rewritten": _flipped,
    "renamed": _renamed,
    "longer": _longer,
    "shorter": _shorter,
}
"""What a trainer does to an archive that a migration links or copies."""

ARCHIVES = ("model/dist_ckpt", "optimizer/dist_ckpt")


def copied_meanwhile(
    migration: Migration, folder: Path, at: int, change: Callable[[Path], None]
) -> tuple[End, list[str]]:
    """Change the archive of a role before a write of a migration; return the end, and what is wrong.

    All trees are then what the archive was, or all are what it is: others would be of two saves. There are none where
    it changed while they were built aside; then the migration can be run again, if the archive still is one.
    """
    here = folder / "here"
    words = migration.arrange(here)
    role = Path(words[1])
    before = content(role / "dist_ckpt")
    begun = held(words, here, folder / "text", at, "write")
    label = begun.reached()
    builds = label is not None and STAGING in label and not any((role / tree).exists() for tree in ARCHIVES)
    if label is not None:
        change(role / "dist_ckpt")
    end = begun.end()
    after = content(role / "dist_ckpt")
    trees = {tree: content(role / tree) for tree in ARCHIVES if (role / tree).exists()}
    found = [*said(end, {0, 4}, here)]
    if not any(all(files == save for files in trees.values()) for save in (before, after)):
        found.append(f"{' and '.join(trees)} are of two saves")
    if end.code and trees and builds and not str(label).startswith("rename "):
        found.append(f"{' and '.join(trees)} were made of an archive that had changed")
    if not end.code and set(map(str, trees)) != set(ARCHIVES):
        found.append("it says that all is done, and it is not")
    if left := migration.left(here):
        found.append(f"it left {left}: {end.text}")
    if not trees:
        again = run(words, here, folder / "text")
        if not again.code and any(content(role / tree) != after for tree in ARCHIVES):
            found.append("a tree is not what the archive is, then")
    shutil.rmtree(here)
    return end, found
