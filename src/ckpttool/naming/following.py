"""Give tensors the names and the form that a reference has, by rules; say what was done and what does not match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.errors import Problem
from ckpttool.formats.findings import Findings
from ckpttool.naming import experts
from ckpttool.naming.experts import Packed
from ckpttool.naming.reference import Reference
from ckpttool.naming.rules import TURNED_IN_MEMORY, TURNED_ON_HUB, Candidate, Move, candidates, moves_for, style_of
from ckpttool.plan import Arrangement, Rows, Target, whole
from ckpttool.tensors import Index, TensorInfo

ONE_BY_ONE, PACKED, TURNED, RENAMED = "experts-one-by-one", "experts-packed", "experts-turned", "experts-renamed"

STATED = {
    ONE_BY_ONE: "packed [E, 2I, H]: rows of the gate, then of up; [E, H, I]: down",
    PACKED: "to [E, 2I, H]: rows of the gate, then of up; to [E, H, I]: down",
    TURNED: "the last two axes exchanged, as the reference has them",
}
"""How experts are taken to lie, in words."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a configuration says of a model: its types, its width, how wide and how many experts are.

    Empty where it says nothing; several where it says several things.
    """

    types: tuple[str, ...] = ()
    hidden: frozenset[int] = frozenset()
    inner: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()


@dataclass(slots=True)
class Followed:
    """Targets under the names of a reference. ``pairs`` are the sources and targets that each rule has led to."""

    targets: list[Target] = field(default_factory=list)
    pairs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def follow(tensors: Mapping[str, TensorInfo], reference: Reference, sizes: Sizes) -> Followed:
    """Make the targets that these tensors become in a reference; what it does not have keeps its form."""
    return _Follower(tensors, reference, sizes).run()


class _Misfit(Exception):
    """Shapes that a rule does not allow: what is wrong, in words."""


class _Follower:
    def __init__(self, tensors: Mapping[str, TensorInfo], reference: Reference, sizes: Sizes) -> None:
        self._tensors, self._reference, self._sizes = tensors, reference, sizes
        self._moves: Sequence[Move] = moves_for(sizes.types)
        self._found = Followed()
        self._misfits = Findings(most=1 << 30)
        self._strangers: list[str] = []

    def run(self) -> Followed:
        groups = experts.by_prefix(self._tensors)
        for prefix, group in groups.items():
            self._singles(prefix, group)
        for name, tensor in self._tensors.items():
            packed = experts.packed(name) if len(tensor.shape) == 3 else None
            if packed is not None:
                self._packed(tensor, packed)
            elif experts.single(name) is None:
                self._plain(tensor)
        for name in self._strangers:
            fallback = self._fallback(name)
            self._add(name, whole(self._tensors[name], fallback.name), fallback.rules)
        order = {name: place for place, name in enumerate(self._tensors)}
        self._found.targets.sort(key=lambda target: order[target.parts[0].source])
        self._found.problems += self._misfits.all()
        return self._found

    def _candidates(self, name: str) -> Iterator[Candidate]:
        return candidates(name, self._moves)

    def _fallback(self, name: str) -> Candidate:
        """Return the name of a tensor that the reference does not have: by the rules which its fellows followed."""
        used = self._found.pairs.keys()
        usual = [c for c in self._candidates(name) if c.rules and used >= set(c.rules)]
        forward = [c for c in usual if c.name in {move.forward(name) for move in self._moves}]
        return next(iter([*forward, Candidate(name)]))

    def _add(self, source: str, target: Target, rules: Sequence[str]) -> None:
        self._found.targets.append(target)
        for rule in rules:
            self._found.pairs.setdefault(rule, []).append((source, target.name))

    def _plain(self, tensor: TensorInfo) -> None:
        found = next((c for c in self._candidates(tensor.name) if self._reference.has(c.name)), None)
        if found is None:
            self._strangers.append(tensor.name)
        else:
            self._add(tensor.name, whole(tensor, found.name), found.rules)

    def _packed(self, tensor: TensorInfo, name: Packed) -> None:
        for candidate in self._candidates(tensor.name):
            there = experts.packed(candidate.name)
            naming = experts.naming_of(there.prefix, self._reference.tensors) if there is not None else None
            try:
                if self._reference.has(candidate.name):
                    self._as_packed(tensor, candidate)
                    return
                if there is not None and naming is not None:
                    self._one_by_one(tensor, there, naming, candidate.rules)
                    return
            except _Misfit as misfit:
                self._misfits.group("shapes-disagree", str(misfit), tensor.name)
                self._add(tensor.name, whole(tensor, candidate.name), candidate.rules)
                return
        self._strangers.append(tensor.name)

    def _as_packed(self, tensor: TensorInfo, candidate: Candidate) -> None:
        """Packed here and there: with the last two axes as the reference has them."""
        target, rules = whole(tensor, candidate.name), candidate.rules
        if self._is_turned(tensor.name, tensor.shape, candidate.name):
            e, rows, columns = tensor.shape
            how = Arrangement((e, rows, columns), (0, 2, 1), 1)
            target = replace(target, shape=(e, columns, rows), arrangement=how)
            rules = (*rules, TURNED)
        self._add(tensor.name, target, rules)

    def _is_turned(self, mine: str, shape: Index, theirs: str) -> bool:
        """Tell whether packed experts of this shape lie the other way round in the reference.

        Square ones do not show it: the other projection of the same layer does, which is not square then.
        """
        if not any(kind in TURNED_ON_HUB for kind in self._sizes.types):
            return False  # another shape is told as one that disagrees
        known = self._reference.shape(theirs)
        if known is not None and known not in (shape, (shape[0], shape[2], shape[1])):
            return False
        if known is None:
            raise _Misfit(f"{self._sizes.types[0]}: whether experts are turned is not in an index; headers are needed")
        here = self._is_upright(mine, lambda name: self._tensors[name].shape if name in self._tensors else None)
        there = self._is_upright(theirs, self._reference.shape)
        if here is None:
            here = self._sizes.hidden.issuperset(shape[2:])
        if there is None:
            raise _Misfit("whether experts are turned in the reference does not show in its shapes")
        return here != there

    def _is_upright(self, name: str, shape_of: Callable[[str], Index | None]) -> bool | None:
        """Tell whether packed experts lie ``[E, 2I, H]`` and ``[E, H, I]``, by the width of the model; ``None`` if not.

        Both projections of a layer have to say the same; square ones say nothing.
        """
        packed = experts.packed(name)
        assert packed is not None
        said = set()
        for projection, axis in ((experts.GATE_UP, 2), (experts.DOWN, 1)):
            shape = shape_of(f"{packed.prefix}{projection}")
            if shape is not None and len(shape) == 3 and shape[1] != shape[2]:
                said |= {shape[axis] in self._sizes.hidden} if self._sizes.hidden.intersection(shape[1:]) else set()
        return said.pop() if len(said) == 1 else None

    def _one_by_one(
        self, tensor: TensorInfo, name: Packed, naming: tuple[str, str, str], rules: tuple[str, ...]
    ) -> None:
        """Packed here, one by one there."""
        e, rows, columns = tensor.shape
        self._check_upright(tensor.shape, name)
        count = rows // name.halves
        one = self._reference.shape(name.single(naming, 0, 0))
        if one is not None and one != (count, columns):
            text = f"{list(tensor.shape)} here, each {list(one)} in the reference"
            self._misfits.group("shapes-disagree", text, tensor.name)
        for expert in range(e):
            for half in range(name.halves):
                part = Rows(tensor.name, half * count, count, (expert,))
                new = name.single(naming, expert, half)
                self._add(tensor.name, Target(new, tensor.dtype, (count, columns), (part,)), (*rules, ONE_BY_ONE))

    def _check_upright(self, shape: Index, name: Packed) -> None:
        """Raise unless packed experts lie as the rule says, as far as the configuration shows."""
        kind = self._sizes.types[0] if self._sizes.types else "this model"
        if any(kind in TURNED_IN_MEMORY for kind in self._sizes.types):
            raise _Misfit(f"{kind} packs experts [E, H, 2I]; by halves of rows they are not taken apart")
        if shape[1] % name.halves:
            raise _Misfit(f"{list(shape)}: an odd number of rows is no gate and up")
        width = shape[2] if name.projection == experts.GATE_UP else shape[1]
        inner = shape[1] // 2 if name.projection == experts.GATE_UP else shape[2]
        for what, found, said in (
            ("a width of", width, self._sizes.hidden),
            ("experts of width", inner, self._sizes.inner),
            ("experts, as many as", shape[0], self._sizes.experts),
        ):
            if said and found not in said:
                numbers = " and ".join(map(str, sorted(said)))
                raise _Misfit(f"{list(shape)}, but config.json has {what} {numbers}")
        style = style_of(self._sizes.types)
        if shape[1] == shape[2] and (style is None or style.experts is None):
            raise _Misfit(f"{list(shape)}: of {kind} it is not known which axis is which")

    def _singles(self, prefix: str, group: Mapping[int, list[str]]) -> None:
        """One by one here: renamed, or packed."""
        naming = next(one.naming for names in group.values() for one in map(experts.single, names) if one)
        for candidate in self._candidates(f"{prefix}{experts.GATE_UP}"):
            there = experts.packed(candidate.name)
            if there is None:
                continue
            theirs = experts.naming_of(there.prefix, self._reference.tensors)
            if theirs is not None:
                self._renamed(group, there.prefix, naming, theirs, candidate.rules)
                return
            if self._reference.has(candidate.name):
                self._pack(prefix, group, there.prefix, naming, candidate.rules)
                return
        self._strangers += [name for names in group.values() for name in names]

    def _renamed(
        self,
        group: Mapping[int, list[str]],
        prefix: str,
        naming: tuple[str, str, str],
        theirs: tuple[str, str, str],
        rules: tuple[str, ...],
    ) -> None:
        rules = (*rules, RENAMED) if naming != theirs else rules
        for name in (name for names in group.values() for name in names):
            one = experts.single(name)
            assert one is not None
            self._add(name, whole(self._tensors[name], one.called(prefix, theirs)), rules)

    def _pack(
        self,
        prefix: str,
        group: Mapping[int, list[str]],
        there: str,
        naming: tuple[str, str, str],
        rules: tuple[str, ...],
    ) -> None:
        """One by one here, packed there."""
        for projection in (experts.GATE_UP, experts.DOWN):
            mine = Packed(prefix, projection)
            names = [mine.single(naming, e, half) for e in range(len(group)) for half in range(mine.halves)]
            present = _of(projection, group)
            try:
                target = self._joined(names, mine, f"{there}{projection}")
            except _Misfit as misfit:
                if str(misfit):
                    self._misfits.group("shapes-disagree", str(misfit), f"{prefix}{projection}")
                for name in present:
                    self._add(name, whole(self._tensors[name]), ())
                continue
            self._found.targets.append(target)
            turned = [TURNED] if target.arrangement is not None and target.arrangement.moves else []
            for rule in (*rules, PACKED, *turned):
                self._found.pairs.setdefault(rule, []).extend((name, target.name) for name in names)

    def _joined(self, names: list[str], name: Packed, new: str) -> Target:
        """Return the packed target of experts; raises :class:`_Misfit` where one lacks or is of another shape."""
        lacking = [one for one in names if one not in self._tensors]
        for one in lacking:
            self._misfits.group("expert-missing", "cannot be packed without it", one)
        parts = [self._tensors[one] for one in names if one in self._tensors]
        (shape_, dtype), _ = Counter((part.shape, part.dtype) for part in parts).most_common(1)[0]
        others = [part for part in parts if (part.shape, part.dtype) != (shape_, dtype)]
        for part in others:
            text = f"{list(part.shape)} {part.dtype}, where the other experts are {list(shape_)} {dtype}"
            self._misfits.group("shapes-disagree", text, part.name)
        if lacking or others or len(shape_) != 2:
            raise _Misfit
        rows, columns = shape_
        shape = (len(names) // name.halves, name.halves * rows, columns)
        self._check_upright(shape, name)
        order: Index = (0, 1, 2)
        if self._is_turned(f"{name.prefix}{name.projection}", shape, new):
            order = (0, 2, 1)
        how = Arrangement(shape, order, 2)
        rows_of = tuple(Rows(part.name, 0, rows) for part in parts)
        return Target(new, dtype, tuple(shape[axis] for axis in order), rows_of, how)


def _of(projection: str, group: Mapping[int, list[str]]) -> list[str]:
    """Return the names of a projection among those of experts that are there one by one."""
    there = (name for names in group.values() for name in names)
    return [name for name in there for one in (experts.single(name),) if one and one.projection == projection]
