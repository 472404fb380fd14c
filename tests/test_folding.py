"""Many names written as few: they stand for exactly those that were given."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.formats.folding import folded

bounded = settings(max_examples=200, deadline=None, derandomize=True)

_LIST = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")


def unfolded(pattern: str) -> list[str]:
    """What a pattern stands for: text and lists of numbers in turn."""
    pieces = _LIST.split(pattern)
    choices = [numbers(piece) if count % 2 else [piece] for count, piece in enumerate(pieces)]
    return ["".join(made) for made in product(*choices)]


def numbers(text: str) -> list[str]:
    found = [part.partition("-") for part in text.split(",")]
    return [str(n) for first, _, last in found for n in range(int(first), int(last or first) + 1)]


words = st.sampled_from(["layers", "experts", "w", "q_proj", "linear_fc1", "a-3", "x2"])
count = st.integers(0, 12).map(str)
names = st.lists(st.one_of(words, count), min_size=1, max_size=5).map(".".join)
many = st.builds(
    lambda layers, experts: [f"model.layers.{a}.mlp.experts.{b}.w" for a in layers for b in experts],
    st.sets(st.integers(0, 20), min_size=1, max_size=6),
    st.sets(st.integers(0, 20), min_size=1, max_size=6),
)


def check(given_: set[str]) -> None:
    patterns = list(folded(given_))
    stood_for = [name for pattern, _ in patterns for name in unfolded(pattern)]
    assert sorted(stood_for) == sorted(given_)
    assert [len(unfolded(pattern)) for pattern, _ in patterns] == [times for _, times in patterns]


@bounded
@given(
    st.one_of(st.sets(names, max_size=25), st.tuples(many, st.sets(names, max_size=3)).map(lambda x: {*x[0], *x[1]}))
)
def test_patterns_stand_for_exactly_the_names(given_: set[str]) -> None:
    check(given_)


@bounded
@given(many, st.data())
def test_a_hole_is_not_stood_for(whole: list[str], data: st.DataObject) -> None:
    check(set(whole) - {data.draw(st.sampled_from(whole))})


def test_one_pattern_is_enough_for_a_grid() -> None:
    grid = {f"l.{a}.e.{b}.w (from d.{a}.x)" for a in range(3) for b in (0, 1, 5)}
    assert len(list(folded(f"l.{a}.e.{b}" for a in range(3) for b in (0, 1, 5)))) == 1
    assert list(folded(["l.0.e", "l.1.e", "l.3.e", "z"])) == [("l.[0-1,3].e", 3), ("z", 1)]
    assert sum(times for _, times in folded(grid)) == len(grid)


def test_the_same_name_twice_is_one() -> None:
    assert list(folded(["a.1", "a.1"])) == [("a.1", 1)]


@pytest.mark.parametrize("others", [("a.1.w", "a.01.w"), ("a.2.w", "a.\N{ARABIC-INDIC DIGIT TWO}.w")])
def test_numbers_are_told_as_they_are_written(others: tuple[str, str]) -> None:
    assert sorted(name for pattern, _ in folded(others) for name in unfolded(pattern)) == sorted(others)


@pytest.mark.parametrize("name", ["a*b", "a.*.1", "*"])
def test_a_name_may_have_an_asterisk(name: str) -> None:
    assert list(folded([name])) == [(name, 1)]
