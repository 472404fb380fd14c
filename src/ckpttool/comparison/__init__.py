"""``diff``: two checkpoints of any kinds, name by name and value by value, in memory that depends on neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckpttool.comparison.finding import find
from ckpttool.comparison.measure import Sums
from ckpttool.comparison.pairing import Laid, Pairing, pair
from ckpttool.comparison.renaming import suggest
from ckpttool.comparison.result import Comparison, Half, Options, Renamed, TensorDiff
from ckpttool.comparison.rolling import Place, layers, places, strips
from ckpttool.comparison.sides import open_side
from ckpttool.comparison.trusting import Ledger, are_recorded_equal
from ckpttool.comparison.values import Found, Stream, compare_values
from ckpttool.crew import Crew, Ready
from ckpttool.errors import NotACheckpoint, UsageError
from ckpttool.export.writing import give_back
from ckpttool.unpickle import collector_paused

__all__ = ["Comparison", "Options", "compare", "prove"]


def compare(a: str, b: str, options: Options, ready: Ready = lambda _total: lambda _bytes: None) -> Comparison:
    """Compare two checkpoints; nothing is written, no more is held than a few bands a thread.

    ``ready`` is told how many bytes are to be read and returns what is told of each part. Raises
    :class:`NotACheckpoint`, :class:`~ckpttool.errors.BrokenCheckpoint` for a side that is not whole,
    :class:`~ckpttool.errors.Unmapped` where no weight map fits, :class:`~ckpttool.errors.UsageError` for a choice.
    """
    started = time.monotonic()
    try:
        with collector_paused():
            sides = [open_side(find(Path(given), options.step, options.role), given, options) for given in (a, b)]
            pairing = pair(sides[0], sides[1], options)
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", code="unreadable") from error
    give_back()
    work = _Work(pairing, options)
    work.run(ready)
    tensors = work.told()
    renamed: tuple[Renamed, ...] = ()
    only = {state: [tensor.name for tensor in tensors if tensor.state == state] for state in ("only in A", "only in B")}
    if only["only in A"] and only["only in B"]:
        renamed, read = suggest(pairing.a, pairing.b, only["only in A"], only["only in B"])
        work.read += read
    for side in sides:
        side.check()
    return Comparison(
        a=sides[0].side,
        b=sides[1].side,
        tensors=tensors,
        strips=strips(tensors, work.sums),
        layers=layers(tensors, work.sums),
        plan=pairing.plan,
        renamed=renamed,
        excluded=work.excluded,
        notes=(*(note for side in sides for note in side.notes), *pairing.notes),
        bytes_read=work.read,
        seconds=time.monotonic() - started,
        options=options,
    )


def prove(source: str, output: str, options: Options, ready: Ready = lambda _total: lambda _bytes: None) -> Comparison:
    """Compare a checkpoint with what was converted from it: every tensor as a conversion to that dtype writes it.

    They are the same where every bit is; ``--ignore-dtype`` of ``diff`` would not see a value that was rounded twice.
    Raises what :func:`compare` raises.
    """
    return compare(source, output, replace(options, as_written=True), ready)


Streams = tuple[Stream, Stream]


class _Work:
    """All names of both sides in order, and what is known of each."""

    def __init__(self, pairing: Pairing, options: Options) -> None:
        self.a, self.b, self.options = pairing.a, pairing.b, options
        names = list(dict.fromkeys((*self.a.targets, *self.b.targets)))
        for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UsageError(f"{option} {pattern}: no tensor has such a name")
        self.names = [name for name in names if _is_wanted(name, options)]
        if names and not self.names:
            raise UsageError("--include and --exclude leave no tensor to compare")
        self.excluded = len(names) - len(self.names)
        self.sums: dict[str, Sums] = {}
        self.read = 0
        self._places = places(self.names)
        self._found: dict[str, Found | None] = {}
        self._trusted: set[str] = set()
        self._aliases = {**self.a.aliases, **self.b.aliases}

    def run(self, ready: Ready) -> None:
        """Compare the values of all tensors that both sides have in one shape."""
        names = [name for name in self.names if self._is_comparable(name)]
        if self.options.trust_crc:
            self._trusted = self._recorded_equal(names)
        names = [name for name in names if name not in self._trusted]
        progress = ready(sum(self.a.targets[name].nbytes + self.b.targets[name].nbytes for name in names))
        crew: Crew[Streams] = Crew(self.options.threads, self._open, progress)

        def compare_one(streams: Streams, name: str) -> Found | None:
            a, b = self.a.targets[name], self.b.targets[name]
            found = compare_values((streams[0], a), (streams[1], b), self.options)
            crew.advance(a.nbytes + b.nbytes)
            return found

        for name, found in zip(names, crew.run(compare_one, names), strict=True):
            self._found[name] = found
            if found is not None:
                self.read += found.read
                self.sums[name] = found.sums

    def _open(self) -> tuple[Streams, Callable[[], None]]:
        """Open both sides for one thread; returns how to close them, too."""
        streams = Stream(self.a.stock), Stream(self.b.stock)

        def close() -> None:
            for stream in streams:
                stream.close()

        return streams, close

    def _recorded_equal(self, names: Iterable[str]) -> set[str]:
        """Return those of which both sides record the same checksums."""
        a, b = self.a, self.b
        with closing(Ledger(a.stock)) as mine, closing(Ledger(b.stock)) as theirs:
            return {n for n in names if are_recorded_equal((mine, a.targets[n]), (theirs, b.targets[n]))}

    def _is_comparable(self, name: str) -> bool:
        a, b = self.a.targets.get(name), self.b.targets.get(name)
        return a is not None and b is not None and a.shape == b.shape

    def told(self) -> tuple[TensorDiff, ...]:
        """Return what has become of every tensor, in the order of A, then of B."""
        return tuple(self._told(name, self._places[name]) for name in self.names)

    def _told(self, name: str, place: Place) -> TensorDiff:
        a, b = _half(self.a, name), _half(self.b, name)
        told = TensorDiff(name=name, state="equal", a=a, b=b, layer=place.layer, module=place.module)
        if a is None or b is None:
            return replace(told, state="only in B" if a is None else "only in A")
        alias = [f"tied to {self._aliases[name]}"] if name in self._aliases else []
        if name in self._trusted:
            return replace(told, trusted=True, why=", ".join(alias))
        other = [what for what in ("shape", "dtype") if getattr(a, what) != getattr(b, what)]
        why, found = ", ".join([*other, *alias]), self._found.get(name)
        if found is None:
            return replace(told, state="differs", why=why)
        decides = "dtype" in other and not self.options.ignore_dtype and not self.options.as_written
        return replace(told, state="differs" if decides else found.state, why=why, metrics=found.metrics)


def _is_wanted(name: str, options: Options) -> bool:
    taken = not options.include or any(fnmatchcase(name, pattern) for pattern in options.include)
    return taken and not any(fnmatchcase(name, pattern) for pattern in options.exclude)


def _half(side: Laid, name: str) -> Half | None:
    target = side.targets.get(name)
    return None if target is None else Half(dtype=target.dtype, shape=target.shape)
