"""The checkpoints of served models are what they claim to be, by the judgement of torch and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.merged import tensors_in, unequal
from tests.served import ALL, HUBS, KEPT, RENAMED, TRANSPOSED, answers, load, silent, trained
from tests.writers.reading import shards
from tests.writers.served_models import MODELS

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(checkpoints: Path, name: str) -> dict[str, torch.Tensor]:
    return tensors_in(checkpoints / "expected" / name)


def test_every_model_is_of_one_kind() -> None:
    assert sorted(ALL) == sorted(MODELS)


@pytest.mark.parametrize("name", ALL)
def test_shards_are_those_of_the_model_in_memory(served_checkpoints: Path, name: str) -> None:
    expected = trained(served_checkpoints, name)
    ranks = shards(served_checkpoints / name)
    assert len(ranks) == 4
    for state in ranks:
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            key: tuple(value.shape) for key, value in expected.items()
        }
        assert all(isinstance(state[key], DTensor) for key in state if not key.endswith("e_score_correction_bias"))


@pytest.mark.parametrize("name", RENAMED)
def test_other_names_are_saved(served_checkpoints: Path, name: str) -> None:
    kept = trained(served_checkpoints, name).keys()
    assert kept - saved(served_checkpoints, name).keys()
    assert saved(served_checkpoints, name).keys() - kept


@pytest.mark.parametrize("name", [*KEPT, *TRANSPOSED])
def test_the_same_is_saved(served_checkpoints: Path, name: str) -> None:
    alias = {"lm_head.weight"} if name == "qwen2-tied" else set()
    assert unequal(saved(served_checkpoints, name), trained(served_checkpoints, name)) == alias


@pytest.mark.parametrize("name", ALL)
def test_what_is_saved_is_the_model(served_checkpoints: Path, name: str) -> None:
    """Every tensor has values of its own: none could take the place of another."""
    model = load(served_checkpoints / "expected" / name)
    assert unequal(model.state_dict(), trained(served_checkpoints, name)) == set()
    torch.testing.assert_close(*answers(model, served_checkpoints, name), rtol=1e-5, atol=1e-5)
    values = [value.numpy().tobytes() for value in saved(served_checkpoints, name).values()]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_answers_depend_on_the_tower(served_checkpoints: Path, name: str) -> None:
    model = load(served_checkpoints / "expected" / name)
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.zero_()
    found, told = answers(model, served_checkpoints, name)
    assert not torch.allclose(found, told, atol=1e-3)


@pytest.mark.parametrize("name", HUBS[:-1])
def test_the_form_of_the_hub_is_the_same_model(served_checkpoints: Path, name: str) -> None:
    model = load(served_checkpoints / "expected" / f"{name}-hub")
    assert unequal(model.state_dict(), trained(served_checkpoints, name)) == set()


@pytest.mark.parametrize("name", ["gemma3", "llava", "llava-next", "qwen3.5"])
def test_a_model_from_the_hub_is_saved_as_on_the_hub(served_checkpoints: Path, name: str, tmp_path: Path) -> None:
    """What was lost in loading comes back in saving."""
    hub = saved(served_checkpoints, f"{name}-hub")
    assert hub.keys() - saved(served_checkpoints, name).keys()
    with silent():
        load(served_checkpoints / "expected" / f"{name}-hub").save_pretrained(tmp_path / "again")
    assert unequal(tensors_in(tmp_path / "again"), hub) == set()


def test_square_experts_of_the_hub_are_more_than_transformers_can_tell(served_checkpoints: Path) -> None:
    """It looks at the shape alone, and takes gate and up as they lie there."""
    state = load(served_checkpoints / "expected" / "qwen3-vl-moe-square-hub").state_dict()
    layers = range(2)
    wrong = {f"model.language_model.layers.{n}.mlp.experts.gate_up_proj" for n in layers}
    assert unequal(state, trained(served_checkpoints, "qwen3-vl-moe-square")) == wrong


def test_an_index_without_weights(served_checkpoints: Path) -> None:
    folder = served_checkpoints / "expected" / "mixtral-index"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors.index.json"}
    assert not list(folder.glob("*.safetensors"))


def test_a_reference_in_bf16(served_checkpoints: Path) -> None:
    half = {name: value.bfloat16() for name, value in saved(served_checkpoints, "qwen3-moe").items()}
    assert unequal(saved(served_checkpoints, "qwen3-moe-bf16"), half) == set()
