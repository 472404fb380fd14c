"""What the tests of LoRA share: roles of PEFT models, what PEFT wrote beside them, its models loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.writers.reading import quiet, shards

State = dict[str, torch.Tensor]


def whole(role: Path) -> State:
    """Every tensor of a role put together from its shards, without a process group."""
    states = shards(role)
    return {name: gathered(name, value, states) for name, value in states[0].items()}


def gathered(name: str, value: Any, states: list[dict[str, Any]]) -> torch.Tensor:
    """The parts of the ranks of one replica, in their order; here all are cut along the first dimension."""
    assert isinstance(value, DTensor)
    assert str(value.placements[-1]) in ("S(0)", "Shard(dim=0)")
    ranks = value.device_mesh.mesh.reshape(-1, value.device_mesh.mesh.shape[-1])[0].tolist()
    joined: torch.Tensor = torch.cat([states[rank][name]._local_tensor for rank in ranks])
    assert joined.shape == value.shape
    return joined


def oracle(root: Path, name: str, kind: str = "") -> State:
    """`expected/NAME.safetensors`; `exact` and `logits` are the other kinds."""
    middle = f".{kind}" if kind else ""
    tensors: State = load_file(root / "expected" / f"{name}{middle}.safetensors")
    return tensors


def adapter_of(root: Path, name: str) -> Path:
    """The directory that `PeftModel.save_pretrained` wrote."""
    return root / "expected" / f"{name}.adapter"


def base_of(root: Path, name: str) -> Path:
    """The directory of the model below the adapters."""
    return root / "expected" / f"{name}.base"


def adapter_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json` of a directory."""
    value = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(value, dict)
    return value


def load_model(folder: Path) -> Any:
    """In the class that its config names; every weight of it comes from the files."""
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    kind = getattr(transformers, config.architectures[0])
    options = {"dtype": "auto", "attn_implementation": "eager", "experts_implementation": "eager"}
    with quiet():
        model, told = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model.eval()


def load_adapter(base: Path, *folders: Path) -> Any:
    """PEFT puts the adapter directories on the base, all of them active."""
    with quiet():
        model = PeftModel.from_pretrained(load_model(base), folders[0], adapter_name="a0", autocast_adapter_dtype=False)
        for number, folder in enumerate(folders[1:], 1):
            model.load_adapter(folder, adapter_name=f"a{number}", autocast_adapter_dtype=False)
    model.base_model.set_adapter([f"a{number}" for number in range(len(folders))])
    return model.eval()


def answer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def assert_answers(model: Any, told: State) -> None:
    """The model says what the trained one said; in bfloat16 within what its own roundings come to."""
    found = answer(model, told["input_ids"])
    half = told["logits"].dtype is torch.bfloat16
    assert found.dtype is told["logits"].dtype
    torch.testing.assert_close(found, told["logits"], rtol=1e-5, atol=0.1 if half else 1e-5)
