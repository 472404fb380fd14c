"""What the tests of LoRA share: roles of PEFT models, what PEFT wrote beside them, its models loaded again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.merged import tensors_in
from tests.writers.reading import quiet, shards

State = dict[str, torch.Tensor]

META = "lora_train_meta.json"
CONFIG = "adapter_config.json"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


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
    value = json.loads((folder / CONFIG).read_text())
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


class Outcome(Protocol):
    """What a command line did."""

    @property
    def code(self) -> int: ...

    @property
    def err(self) -> str: ...


def refused(call: Outcome, code: int, *words: str) -> None:
    """This exit code, and all of these words in what is said."""
    assert call.code == code, call.err
    assert "No such option" not in call.err
    assert [word for word in words if word not in call.err] == [], call.err


def assert_fused(out: Path, root: Path, name: str = "plain") -> None:
    """The output has the tensors that PEFT merges in float32."""
    found, expected = tensors_in(out), oracle(root, name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


def settings(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file beside the shards."""
    path.write_text(json.dumps(values))


def detached(model: Any) -> State:
    """What a rank would save; a number without dimensions cannot be cut and is left out."""
    return {key: value.detach().clone() for key, value in model.state_dict().items() if value.ndim}
