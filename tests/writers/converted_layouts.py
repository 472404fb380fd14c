"""How each model is cut, and the dialects of keys that Megatron has for the same tensors."""

from __future__ import annotations

from tests.writers.converted_cpu import Layout
from tests.writers.converted_names import LAYOUTS
from tests.writers.megatron_cpu import Parallel

INDEXED = {"non_homogeneous_layers": True}
SINGLETON = {"singleton_local_shards": True}

WHOLE = Layout()

# A few words mean something else in one model than in the others.
COMMON = {
    "tp1": WHOLE,
    "tp2": Layout(Parallel(tp=2)),
    "tp4": Layout(Parallel(tp=4)),
    "pp2": Layout(Parallel(pp=2)),
    "tp2-pp2": Layout(Parallel(tp=2, pp=2)),
    "vpp": Layout(Parallel(tp=2, pp=2, vpp=2)),
    "tp2-ep2": Layout(Parallel(tp=2, ep=2)),
    "pp2-ep2": Layout(Parallel(pp=2, ep=2)),
    "ep4": Layout(Parallel(ep=4)),
    "etp": Layout(Parallel(tp=4, ep=2, etp=2)),
    "te": Layout(Parallel(tp=2, ep=2), te=True),
    "singleton": Layout(Parallel(tp=2, ep=2), SINGLETON),
    "indexed": Layout(Parallel(tp=2), INDEXED),
}
OWN = {
    ("llama", "singleton"): Layout(Parallel(tp=2), SINGLETON),
    ("llama-bias", "singleton"): Layout(Parallel(tp=2), SINGLETON),
    ("qwen3", "indexed"): Layout(Parallel(pp=2), INDEXED),
    ("qwen3-moe", "indexed"): Layout(Parallel(pp=2, ep=2), options={"moe_layer_freq": [1, 1]}),
}


def layouts(model: str) -> dict[str, Layout]:
    """How the checkpoints of one model are cut, by name."""
    return {name: OWN.get((model, name), COMMON[name]) for name in LAYOUTS[model]}
