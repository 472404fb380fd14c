"""verl's directories: what a save of which contents leaves, and which names are steps."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.formats.dcpkeys import part_of
from ckpttool.layout import (
    EXTRA,
    HUGGINGFACE,
    MODEL,
    OPTIMIZER,
    TRANSFORMER_CONFIG,
    TREE_OF_PART,
    Illegal,
    expected_trees,
    step_of,
)

BOTH = "model hf_model"

# bridge, dist checkpointing, save_contents: where the weights lie (verl's manual, "contents matrix")
MATRIX: list[tuple[bool, bool, str, set[str]]] = [
    (True, False, "model", {HUGGINGFACE}),
    (True, False, "hf_model", {HUGGINGFACE}),
    (True, False, BOTH, {HUGGINGFACE}),
    (False, True, "model", {MODEL}),
    (True, True, "model", {MODEL}),
    (True, True, "hf_model", {HUGGINGFACE}),
    (True, True, BOTH, {HUGGINGFACE, MODEL}),
]
ILLEGAL: list[tuple[bool, bool, str, str]] = [
    (False, True, "hf_model", "hf_model needs a bridge"),
    (False, True, BOTH, "hf_model needs a bridge"),
    (False, False, "hf_model", "hf_model needs a bridge"),
    (False, False, BOTH, "hf_model needs a bridge"),
    (False, False, "model", "nothing could hold the weights"),
]


def paths(contents: str, **flags: Any) -> set[str]:
    """Paths of the trees that are expected."""
    trees = expected_trees(contents.split(), **flags)
    assert not isinstance(trees, Illegal), trees
    found = {tree.path for tree in trees}
    assert len(found) == len(trees)
    return found


def test_the_matrix_is_whole() -> None:
    rows = {row[:3] for row in (*MATRIX, *ILLEGAL)}
    assert rows == {(b, d, c) for b in (True, False) for d in (True, False) for c in ("model", "hf_model", BOTH)}


@pytest.mark.parametrize(("bridge", "dist", "contents", "wanted"), MATRIX)
def test_where_the_weights_lie(bridge: bool, dist: bool, contents: str, wanted: set[str]) -> None:
    assert paths(contents, use_mbridge=bridge, use_dist_checkpointing=dist) == wanted


@pytest.mark.parametrize(("bridge", "dist", "contents", "reason"), ILLEGAL)
def test_why_it_is_illegal(bridge: bool, dist: bool, contents: str, reason: str) -> None:
    verdict = expected_trees(contents.split(), use_mbridge=bridge, use_dist_checkpointing=dist)
    assert isinstance(verdict, Illegal)
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, {HUGGINGFACE}),
        ({"use_mbridge": True}, {HUGGINGFACE}),
        ({"use_mbridge": False}, {MODEL}),
        ({"use_dist_checkpointing": True}, {MODEL}),
        ({"use_dist_checkpointing": False}, {HUGGINGFACE}),
    ],
)
def test_a_flag_that_is_not_given_is_the_negation_of_the_other(flags: dict[str, bool], wanted: set[str]) -> None:
    assert paths("model", **flags) == wanted


def test_dist_checkpointing_alone_means_no_bridge() -> None:
    assert isinstance(expected_trees(["hf_model"], use_dist_checkpointing=True), Illegal)
    assert isinstance(expected_trees(["hf_model"], use_mbridge=False), Illegal)


@pytest.mark.parametrize(("bridge", "dist", "contents", "wanted"), MATRIX)
def test_optimizer_and_extra_lie_apart(bridge: bool, dist: bool, contents: str, wanted: set[str]) -> None:
    flags = {"use_mbridge": bridge, "use_dist_checkpointing": dist}
    everything = {*wanted, OPTIMIZER, EXTRA, TRANSFORMER_CONFIG}
    assert paths(f"{contents} optimizer extra", **flags) == everything
    assert paths("optimizer", **flags) == {OPTIMIZER}
    assert paths("extra", **flags) == {EXTRA, TRANSFORMER_CONFIG}


def test_state_needs_neither_bridge_nor_dist_checkpointing() -> None:
    assert paths("optimizer extra", use_mbridge=False, use_dist_checkpointing=False) == {
        *(EXTRA, OPTIMIZER, TRANSFORMER_CONFIG)
    }


@pytest.mark.parametrize("contents", ["model", "hf_model", BOTH])
def test_adapters_lie_beside_the_base_weights(contents: str) -> None:
    assert paths(contents, peft=True) == {HUGGINGFACE, MODEL}
    trees = expected_trees(contents.split(), peft=True)
    assert not isinstance(trees, Illegal)
    assert {tree.path: tree.holds for tree in trees} == {HUGGINGFACE: "model weights", MODEL: "adapters"}


def test_adapters_do_not_come_without_a_model() -> None:
    assert paths("optimizer", peft=True) == {OPTIMIZER}
    assert paths("model", peft=True, use_dist_checkpointing=True) == {MODEL}


def test_megatron_fsdp_has_one_archive() -> None:
    assert paths("model optimizer extra", megatron_fsdp=True) == {MODEL}
    assert paths("optimizer", megatron_fsdp=True) == {MODEL}
    assert paths("", megatron_fsdp=True) == set()


def test_nothing_saved_is_nothing_expected() -> None:
    assert paths("") == set()


@pytest.mark.parametrize("flags", [{}, {"megatron_fsdp": True}])
def test_unknown_words_are_named(flags: dict[str, bool]) -> None:
    verdict = expected_trees(["model", "weights", "hf"], **flags)
    assert verdict == Illegal("save_contents has hf, weights; known are model, hf_model, optimizer, extra")


@pytest.mark.parametrize(
    ("key", "tree"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", MODEL),
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", MODEL),
        ("chained_0.optimizer.state.exp_avg.embedding.word_embeddings.weight", OPTIMIZER),
        ("opt_param_scheduler", OPTIMIZER),
        ("rng_state/shard_0.0_1.2", EXTRA),
    ],
)
def test_keys_of_a_mixed_archive_have_a_tree(key: str, tree: str) -> None:
    assert TREE_OF_PART[part_of(key)] == tree


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step_100", 100),
        ("global_steps_7", 7),
        ("step_3", 3),
        ("step-12", 12),
        ("checkpoint-500", 500),
        ("iter_0000010", 10),
        *((name, None) for name in ("global_step_", "global_step_1a", "xstep_1", "step 1", "epoch_1", "10", "")),
        *((name, None) for name in ("global_step_-1", "step_1.tmp", "step_1\n", "step_\u00b2")),
    ],
)
def test_steps_of_directory_names(name: str, step: int | None) -> None:
    assert step_of(name) == step
