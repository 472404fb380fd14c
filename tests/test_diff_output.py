"""What `diff` tells people: the verdict, the strip of heat, what differs most, what only one side has."""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.comparison.result import Cell, Comparison, Metrics, Options, Renamed, Strip
from ckpttool.errors import Problem
from ckpttool.render.comparison import show_comparison
from ckpttool.render.heat import columns, cosine, furthest, labels, log_scale, percent, scientific, ulps
from ckpttool.render.page import page as drawn
from ckpttool.render.terminal import console
from tests import compared

RNG = np.random.default_rng(3)
BLOCKS = "▁▂▃▄▅▆▇█"


class _Stream(io.StringIO):
    """Where text goes that a terminal of some encoding would show."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def printed(
    found: Comparison,
    monkeypatch: pytest.MonkeyPatch,
    *,
    width: int = 120,
    encoding: str = "utf-8",
    color: str = "never",
    quiet: bool = False,
    page: str = "",
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = _Stream(encoding)
    show_comparison(found, console(stream, color), quiet=quiet, page=page)
    return stream.getvalue()


def rows(text: str) -> dict[str, str]:
    """The rows of the strip: what stands behind each name, without the number at its end."""
    body = text.partition("\nLayers")[2].partition("\n\n")[0].splitlines()[2:]
    return {line.split()[0]: line for line in body}


def moving(by_layer: Mapping[int, float], module: str = "mlp.up_proj.weight") -> Comparison:
    """A model of one module, whose layers moved by so much."""
    return compared.comparison(
        [compared.tensor(f"model.layers.{n}.{module}", (8, 8), by, RNG) for n, by in by_layer.items()]
    )


# The verdict


def test_the_verdict_counts_tensors_and_elements_and_names_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    half = compared.tensor("a", (10, 10), 0.5, RNG)
    assert half.metrics is not None
    found = compared.comparison(
        [
            replace(half, metrics=replace(half.metrics, changed=30, max_abs=0.25)),
            compared.tensor("b", (300,), 0.0, RNG),
            compared.one_sided(compared.tensor("c", (5,), 0.0, RNG), "only in B"),
        ]
    )
    line = (
        "different: 1 of 3 tensors differs, 7.50% of the elements, 1 only in B; the largest difference is 2.50e-1, in a"
    )
    assert printed(found, monkeypatch, quiet=True) == f"{line}\n"


def test_the_same_is_told_with_what_was_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    near = replace(compared.tensor("a", (4,), 1e-6, RNG), state="close")
    found = compared.comparison([near, compared.tensor("b", (4,), 0.0, RNG)])
    found = replace(found, options=Options(ulps=2))
    expected = "same: 2 tensors of both are equal, 1 of them within the tolerance (2ulp)\n"
    assert printed(found, monkeypatch, quiet=True) == expected
    whole = printed(found, monkeypatch)
    assert "1 equal, 1 within tolerance" in whole
    assert "Next" not in whole
    assert "Layers" not in whole


def test_what_was_not_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = replace(compared.tensor("a", (4,), 0.0, RNG), metrics=None, trusted=True)
    text = printed(compared.comparison([equal, equal]), monkeypatch)
    assert "not read  2 tensors: both sides record the same checksum (--trust-crc)" in text


def test_both_sides_what_was_left_out_and_notes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared.dense(layers=2)
    side = replace(found.b, path="runs/b", root="runs/b/actor", left_out={"optimizer state": 12})
    note = Problem(code="x", message="a note", severity="note")
    text = printed(replace(found, b=side, excluded=7, plan="by Megatron's weight map", notes=(note,)), monkeypatch)
    assert "runs/a  FSDP2 shards of 8 ranks, 21 tensors\n" in text
    assert "in runs/b/actor, 21 tensors; not compared: optimizer state (12 tensors)" in text
    assert "by Megatron's weight map" in text
    monkeypatch.chdir("/")
    side = replace(side, path="runs/../runs/b/", root="/runs/b")
    assert "ranks, 21 tensors; not" in printed(replace(found, b=side), monkeypatch)
    assert "7 tensors by --include and --exclude" in text
    assert "a note" in text


# The strip


def test_a_layer_is_as_high_as_it_moved_and_unchanged_ones_are_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    found = moving({0: 0.0, 1: 1e-7, 2: 1e-4, 3: 1e-1, 4: 0.0, 5: 1.0})
    line = rows(printed(found, monkeypatch))["mlp.up_proj"]
    assert re.sub(r"(.)\1*", r"\1", line.split(maxsplit=1)[1].rpartition("  ")[0].replace(" ", "")) == "·▁▄▇·█"
    assert line.split()[-1] == scientific(found.strips[0].whole.rel_l2)


def test_every_layer_has_its_column_below_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(compared.patched(layers=24, moved=(3, 11, 20)), monkeypatch)
    ruler = text.partition("\nLayers")[2].splitlines()[1]
    line = rows(text)["all"]
    for layer in range(24):
        at = ruler.index(f" {layer}") + 1
        assert (line[at] in BLOCKS) == (layer in (3, 11, 20)), layer


def test_the_strip_is_digits_where_a_terminal_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(compared.routed(layers=18, experts=6), monkeypatch, encoding="ascii")
    assert text.isascii()
    assert set(rows(text)["mlp.experts.*.up_proj"].rpartition("  ")[0].split(maxsplit=1)[1]) <= set("12345678x. ")
    assert rows(text)["mlp.extra"].rstrip().endswith("x")
    assert ". unchanged" in text


def test_colour_adds_to_the_strip_and_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = printed(compared.dense(), monkeypatch)
    coloured = printed(compared.dense(), monkeypatch, color="always")
    assert "\x1b[38;5;" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == [line.rstrip() for line in plain.splitlines()]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("layers", [1, 8, 61, 400])
def test_a_strip_fits_the_terminal_and_no_peak_is_lost(
    monkeypatch: pytest.MonkeyPatch, layers: int, width: int
) -> None:
    peak = layers * 2 // 3
    text = printed(moving({n: 1.0 if n == peak else 1e-6 for n in range(layers)}), monkeypatch, width=width)
    strip = text.partition("\nLayers")[2].partition("\n\n")[0].splitlines()
    assert max(map(len, strip)) <= width
    lines = [line for line in strip if line.startswith(("  all ", "  mlp."))]
    assert len(lines) == 2
    assert all("█" in line for line in lines)
    if layers > 1:
        assert all("▂" in line for line in lines)


def test_modules_outside_of_layers_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(compared.dense(), monkeypatch).partition("Outside of layers\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in text.splitlines()] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_many_modules_are_counted_and_the_farthest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared.comparison(
        [compared.tensor(f"layers.0.m{i:03}", (4,), 1e-3 if i == 77 else 1e-5, RNG) for i in range(100)]
    )
    text = printed(found, monkeypatch)
    assert "m077" in rows(text)
    assert len(rows(text)) == 1 + 40 + 1
    assert "and 60 modules that moved less" in text


# The list


def test_what_differs_most_comes_first_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared.patched()
    text = printed(found, monkeypatch, width=160).partition("Furthest apart\n")[2].partition("\n\n")[0]
    lines = text.splitlines()
    known = {one.name: one.metrics.rel_l2 or 0.0 for one in found.of(["differs"]) if one.metrics}
    first = sorted(known, key=lambda name: -known[name])[:11]
    assert [line.split()[0] for line in lines[1:-1]] == ["lm_head.weight", *first]
    assert "shape [32000, 512] / [32064, 512]" in lines[1]
    assert lines[-1].strip() == "and 16 more (--json lists all)"
    assert re.split(r"\s{2,}", lines[0].strip()) == [
        *("name", "differs in", "changed", "max abs", "mean abs", "rel L2", "cosine", "ULP distance"),
    ]


def test_what_is_not_finite_comes_before_what_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    far, poisoned = compared.tensor("far", (4,), 0.9, RNG), compared.tensor("poisoned", (4,), 1e-6, RNG)
    assert poisoned.metrics is not None
    poisoned = replace(poisoned, metrics=replace(poisoned.metrics, not_finite=3))
    text = printed(compared.comparison([far, poisoned]), monkeypatch).partition("Furthest apart\n")[2]
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["poisoned", "far"]
    assert "3 not finite" in text


def test_another_dtype_is_a_difference_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compared.tensor("w", (4,), 0.0, RNG)
    assert one.b is not None
    wide = replace(one, state="differs", why="dtype", b=replace(one.b, dtype="float32"))
    assert "bfloat16 / float32" in printed(compared.comparison([wide]), monkeypatch)


def test_all_that_only_one_side_has_is_listed_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(40)] + ["model.norm.weight"]
    found = compared.comparison(
        [compared.one_sided(compared.tensor(name, (4,), 0.0, RNG), "only in A") for name in names],
        [Renamed(a="model.norm.weight", b="norm.weight")],
    )
    text = printed(found, monkeypatch)
    assert "Only in A\n  model.layers.[0-39].mlp.up_proj.weight  (40)\n  model.norm.weight\n" in text
    assert "model.norm.weight  ->  norm.weight" in text


def test_names_cannot_act_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "layers.0.\x1b[2J\u202egnp\n\r\x07.w"
    tensors = [compared.tensor(evil, (4,), 0.5, RNG), compared.tensor(f"out{evil}", (4,), 0.5, RNG)]
    tensors.append(compared.one_sided(compared.tensor(f"{evil}2", (4,), 0.5, RNG), "only in B"))
    found = compared.comparison(tensors, [Renamed(a=evil, b=evil)])
    side = replace(found.a, path=evil, root=evil, title=evil, left_out={evil: 1})
    text = printed(replace(found, a=side, b=side, plan=evil), monkeypatch, page=evil)
    assert not {"\x1b", "\u202e", "\r", "\x07"} & set(text)
    assert "\\x1b[2J\\u202egnp\\n" in text


def test_next_is_a_line_that_compares_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(include=("*norm*",), exclude=("a b",), tolerance=1e-6, role="actor", everything=True)
    found = compared.dense(layers=1)
    found = replace(found, a=replace(found.a, path="my run"), options=options)
    last = printed(found, monkeypatch).splitlines()[-1]
    assert shlex.split(last) == [
        *("ckpttool", "diff", "my run", "runs/b", "--role", "actor", "--include", "*norm*", "--exclude", "a b"),
        *("--tolerance", "1e-06", "--all", "--html", "diff.html"),
    ]
    assert "--html" not in printed(found, monkeypatch, page="there.html")


# Any result

amounts = st.sampled_from([0.0, 5e-324, 1e-310, 1e-7, 0.3, 1.0, 1.7e308]) | st.floats(0, 1e300)
found_metrics = st.builds(
    lambda elements, part, far, rel, cos, bins, lost: Metrics(
        elements=elements,
        changed=int(part * elements),
        not_finite=int(lost * part * elements),
        max_abs=far if int(part * elements) else 0.0,
        mean_abs=far / 2,
        rel_l2=rel if int(part * elements) else 0.0,
        cosine=cos,
        ulps=tuple(bins),
    ),
    st.integers(0, 10**13),
    st.floats(0, 1),
    amounts,
    st.none() | amounts,
    st.none() | st.floats(-1, 1),
    st.lists(st.integers(0, 10**12), max_size=65),
    st.floats(0, 1),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.text(max_size=12), st.integers(0, 10**9), st.none() | found_metrics), max_size=12))
def test_every_result_can_be_shown(found: list[tuple[str, int, Metrics | None]]) -> None:
    half = compared.tensor("x", (3,), 0.0, RNG)
    tensors = [
        replace(half, name=f"layers.{n}.{name}", module=name, layer=n or None, metrics=one, state="differs")
        for name, n, one in found
    ]
    result = compared.comparison(tensors)
    for encoding in ("ascii", "utf-8"):
        show_comparison(result, console(_Stream(encoding), "never"))
    text = drawn(result)
    text.encode()
    drawing = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search(r'"[^"]*(?:nan|inf)[^"]*"', re.sub(r"<(title|desc)[^>]*>.*?</", "", drawing, flags=re.DOTALL))


# Numbers


def test_levels_are_as_fine_as_the_values_allow() -> None:
    fine, coarse = log_scale([1.1e-4, 4e-4]), log_scale([1e-9, 1.0])
    assert fine.level(1.1e-4) < fine.level(2e-4) < fine.level(4e-4) == 8
    assert fine.bounds[1] / fine.bounds[0] == pytest.approx(10 ** (1 / 8))
    assert coarse.bounds == pytest.approx([10.0**n for n in range(-7, 1)])
    assert coarse.level(1e-9) == 1
    assert coarse.level(math.inf) == 8


@pytest.mark.parametrize("values", [[], [0.0], [math.inf], [5e-324], [1.7e308], [5e-324, 1.7e308]])
def test_levels_take_any_value(values: list[float]) -> None:
    scale = log_scale(values)
    assert list(scale.bounds) == sorted(scale.bounds)
    assert all(1 <= scale.level(value) <= 8 for value in values)


def test_several_layers_are_shown_as_the_largest_of_each_measure() -> None:
    cells = [
        Cell(tensors=2, elements=10, changed=9, max_abs=5.0, rel_l2=0.1),
        Cell(tensors=1, elements=10, changed=1, max_abs=3.0, rel_l2=0.2, missing=1),
        Cell(tensors=1, elements=10, changed=0, max_abs=0.0, rel_l2=0.0),
    ]
    assert furthest(cells) == Cell(tensors=4, elements=10, changed=9, max_abs=5.0, rel_l2=0.2, missing=1)
    assert furthest([cells[2], replace(cells[0], rel_l2=None)]).rel_l2 is None


def test_columns_hold_every_layer_once() -> None:
    found = moving({0: 0.0, 1: 0.0, 5: 1e-3, 900_000_000: 1e-3})
    assert columns(found, 10) == [(0,), (1,), (5,), (900_000_000,)]
    assert columns(found, 2) == [(0, 1), (5, 900_000_000)]


def test_labels_lose_only_what_all_share() -> None:
    cell = Cell(tensors=1, elements=1, changed=0, max_abs=0.0, rel_l2=0.0)
    names = ["model.q.weight", "model.q.bias", "model.k.weight", "model.k"]
    strips = [Strip(module=name, whole=cell, layers={0: cell}) for name in names]
    assert labels(strips) == ["q", "q.bias", "k.weight", "k"]
    assert labels(strips[:1]) == ["model.q"]


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    assert [percent(0, 10**9), percent(1, 10**9), percent(10**9 - 1, 10**9), percent(10**9, 10**9)] == [
        *("0%", "<0.01%", ">99.99%", "100%"),
    ]
    assert percent(1, 8) == "12.50%"
    assert percent(0, 0) == "0%"


def test_cosines_near_one_say_how_near() -> None:
    assert [cosine(1.0), cosine(1 - 3e-9), cosine(0.5), cosine(-1.0), cosine(None)] == [
        *("1", "1-3e-9", "0.500000", "-1.000000", "-"),
    ]


def test_distances_are_told_in_few_words() -> None:
    def histogram(*counts: int) -> str:
        return ulps(Metrics(elements=1000, changed=sum(counts), ulps=counts))

    assert histogram(0, 80, 15, 0, 5) == "1:80% 2:15% >2:5% up to 8"
    assert histogram(10, 0, 0) == "0:100%"
    assert histogram(0, 990, 8, 2) == "1:99% 2:1% up to 4"
    assert histogram(*[0] * 10, 6, *[0] * 9, 5) == "half<=512 all<=2^19"
    assert histogram() == "-"
    assert ulps(None) == "-"
