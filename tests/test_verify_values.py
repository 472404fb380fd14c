"""`verify --values` against what NumPy counts, and `--read-subset`: everything once, in as many runs as parts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttool.elements import dtype_of
from ckpttool.verification import values, work
from ckpttool.verification.result import Subset
from ckpttool.verification.subset import choose
from ckpttool.verification.values import Count
from tests import builders
from tests.conftest import Call
from tests.verifying import all_records, check, faults, notes

FLOATS = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_bits_is_what_numpy_says(dtype: str) -> None:
    """All of 8 and 16 bits; of more, those around every exponent."""
    kind = dtype_of(dtype)
    bits = kind.itemsize * 8
    if bits <= 16:
        raw = np.arange(1 << bits, dtype=f"u{kind.itemsize}")
    else:
        mantissa = 23 if bits == 32 else 52
        highs = np.arange(1 << (bits - mantissa), dtype=f"u{kind.itemsize}") << mantissa
        raw = np.concatenate([highs, highs | 1, highs | ((1 << mantissa) - 1)])
    elements = raw.view(kind)
    with np.errstate(invalid="ignore"):
        wide = elements.astype(np.float64)
    count = Count(dtype)
    count.add(elements)
    assert (count.nan, count.inf) == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    assert count.elements == elements.size


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "uint8", "bool", "complex64"])
def test_zeros_are_zeros_whatever_their_sign(dtype: str) -> None:
    kind = dtype_of(dtype)
    count = Count(dtype)
    count.add(np.zeros(7, kind))
    assert (count.zero, count.nan, count.inf) == (True, 0, 0)
    if dtype in ("float32", "bfloat16", "complex64"):
        count.add(-np.zeros(7, kind))
        assert count.zero
    count.add(np.array([0, 0, 1], kind))
    assert not count.zero


def test_dtypes_that_have_neither_are_moved_only() -> None:
    assert ml_dtypes.finfo(ml_dtypes.float8_e8m0fnu).bits == 8
    count = Count("int32")
    count.add(np.array([-1, 0x7F80_0001], np.int32))
    assert (count.nan, count.inf, count.zero) == (0, 0, False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face model with every kind of finding."""
    torch.manual_seed(1)
    tensors = {
        "sound.weight": torch.randn(300, 40),
        "bad.weight": torch.randn(300, 40).to(torch.bfloat16),
        "layers.0.norm": torch.zeros(40),
        "layers.1.norm": torch.zeros(40, dtype=torch.int64),
        "half.weight": torch.randn(40).to(torch.float16),
        "empty": torch.zeros(0),
    }
    tensors["bad.weight"][299, 39] = float("nan")
    tensors["bad.weight"][0, 0] = float("-inf")
    tensors["bad.weight"][7] = float("nan")
    tensors["half.weight"][0] = float("inf")
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    (tmp_path / "model/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return tmp_path / "model"


@pytest.mark.parametrize("part", [values.PART, 128])
def test_what_is_no_number_is_a_fault(
    ckpttool: Callable[..., Call], model: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PART", part)
    call = ckpttool("verify", model, "--values", "--json")
    found = {told["name"]: told for told in call.json["data"]["values"]}
    assert call.code == 1
    assert sorted(code for code, _ in faults(call)) == ["infinite", "infinite", "not-a-number"]
    assert (found["bad.weight"]["nan"], found["bad.weight"]["inf"]) == (41, 1)
    assert (found["half.weight"]["nan"], found["half.weight"]["inf"]) == (0, 1)
    assert {name for name, told in found.items() if told["zero"]} == {"layers.0.norm", "layers.1.norm"}
    assert notes(call) == ["all-zero"]
    assert "layers.[0-1].norm" in call.json["problems"][-1]["message"]
    assert sum(told["elements"] for told in found.values()) == 300 * 40 * 2 + 120
    assert ckpttool("verify", model).code == 0


def test_shards_and_archives_are_looked_into(ckpttool: Callable[..., Call], data: Path) -> None:
    for name in ("fsdp/torch2.13-fsdp2-hsdp", "fsdp/torch2.6-fsdp1-mesh"):
        call = ckpttool("verify", data / name, "--values", "--json")
        assert (call.code, notes(call)) == (0, ["all-zero"])  # the biases of norms as they are initialised
        assert sum(told["elements"] for told in call.json["data"]["values"]) == 309
    call = ckpttool("verify", data / "megatron/mcore0.16-moe-tp1-ep2", "--values", "--json")
    assert (call.code, check(call, "values")["state"]) == (0, "sound")


def test_what_is_here_of_shards_is_looked_into(ckpttool: Callable[..., Call], data: Path, tmp_path: Path) -> None:
    root = builders.copy(data / "fsdp/torch2.9-fsdp2", tmp_path / "role")
    builders.drop_rank(root, 1)
    call = ckpttool("verify", root, "--values", "--json")
    assert faults(call) == [("rank-missing", "")]
    assert 0 < sum(told["elements"] for told in call.json["data"]["values"]) < 309


def test_without_it_nothing_is_said_of_values(ckpttool: Callable[..., Call], model: Path) -> None:
    call = ckpttool("verify", model, "--json")
    assert (check(call, "values")["state"], call.json["data"]["values"]) == ("not asked", [])


# A part of it


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 12))
def test_parts_have_everything_once(sizes: list[int], parts: int) -> None:
    chosen = [choose(Subset(text="", part=part, parts=parts), sizes) for part in range(1, parts + 1)]
    assert all(sum(column) == 1 for column in zip(*chosen, strict=True))
    if sizes:
        most = sum(max(size, 1) for size in sizes) / parts + max(*sizes, 1)
        assert all(sum(max(s, 1) for s in itertools.compress(sizes, one)) <= most for one in chosen)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 100))
def test_a_share_is_as_large_as_asked_for(sizes: list[int], percent: int) -> None:
    total = sum(max(size, 1) for size in sizes)
    taken = sum(max(s, 1) for s in itertools.compress(sizes, choose(Subset(text="", percent=percent), sizes)))
    assert total * percent / 100 <= taken <= total * percent / 100 + max(*sizes, 1)
    taken = sum(max(s, 1) for s in itertools.compress(sizes, choose(Subset(text="", bytes=500), sizes)))
    assert min(total, 500) <= taken < 500 + max(*sizes, 1)


@pytest.mark.parametrize("kind", ["fsdp/torch2.13-fsdp2", "megatron/mcore0.19-dense-tp2"])
def test_ten_runs_read_every_record_once(
    ckpttool: Callable[..., Call], data: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[str, int, int]] = Counter()
    real = work.Plan.cut

    def cut(plan: work.Plan, subset: Subset) -> None:
        real(plan, subset)
        seen.update((w.entry.shown, unit.begin, unit.end) for w in plan.works.values() for unit in w.units)

    monkeypatch.setattr(work.Plan, "cut", cut)
    records = bytes_ = 0
    for part in range(1, 11):
        call = ckpttool("verify", data / kind, "--read-subset", f"{part}/10", "--json", "--values")
        assert (call.code, call.json["data"]["subset"]) == (0, f"{part}/10")
        records += sum(file["records"] for file in call.json["data"]["files"])
        bytes_ += check(call, "values")["bytes"]
    assert set(seen.values()) == {1}
    assert records == len(all_records(data / kind))
    assert bytes_ == check(ckpttool("verify", data / kind, "--json", "--values"), "values")["bytes"]


def test_a_subset_of_files_is_hashed(ckpttool: Callable[..., Call], data: Path, tmp_path: Path) -> None:
    root = builders.copy(data / "fsdp/torch2.9-fsdp2", tmp_path / "role")
    assert ckpttool("verify", root, "--write-integrity").code == 0
    calls = [ckpttool("verify", root, "--read-subset", f"{part}/3", "--json") for part in (1, 2, 3)]
    hashed = [check(call, "integrity")["files"] for call in calls]
    assert sum(hashed) == len(list(root.iterdir())) - 1
    assert max(hashed) < sum(hashed)


@pytest.mark.parametrize("share", ["1%", "1KB", "2/10"])
def test_what_was_not_read_is_said(ckpttool: Callable[..., Call], data: Path, share: str) -> None:
    call = ckpttool("verify", data / "fsdp/torch2.9-fsdp2", "--read-subset", share)
    assert call.code == 0
    assert "sound, as far as it was read" in call.out
    assert f"--read-subset {share}" in call.out
