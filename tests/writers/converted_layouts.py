"""How each model is cut, and the dialects of keys that Megatron has for the same tensors."""

from __future__ import annotations

from tests.writers.converted_cpu import Layout
from tests.writers.megatron_cpu import Parallel

INDEXED = {"non_homogeneous_layers": True}
SINGLETON = {"singleton_local_shards": True}

WHOLE = Layout()
EXPERTS = {
    "tp1": WHOLE,
    "tp2-ep2": Layout(Parallel(tp=2, ep=2)),
    "pp2-ep2": Layout(Parallel(pp=2, ep=2)),
}

LAYOUTS: dict[str, dict[str, Layout]] = {
    "llama": {
        "tp1": WHOLE,
        "tp2-pp2": Layout(Parallel(tp=2, pp=2)),
        "tp4": Layout(Parallel(tp=4)),
        "indexed": Layout(Parallel(tp=2), INDEXED),
    },
    "llama-mha": {"tp1": WHOLE, "tp4": Layout(Parallel(tp=4))},
    "qwen2": {"tp1": WHOLE, "tp2": Layout(Parallel(tp=2)), "pp2": Layout(Parallel(pp=2))},
    "qwen3": {
        "tp1": WHOLE,
        "tp2-pp2": Layout(Parallel(tp=2, pp=2)),
        "tp4": Layout(Parallel(tp=4)),
        "indexed": Layout(Parallel(pp=2), INDEXED),
        "vpp": Layout(Parallel(tp=2, pp=2, vpp=2)),
    },
    "qwen3-moe": {
        **EXPERTS,
        "ep4": Layout(Parallel(ep=4)),
        "etp": Layout(Parallel(tp=4, ep=2, etp=2)),
        "singleton": Layout(Parallel(tp=2, ep=2), SINGLETON),
        "indexed": Layout(Parallel(pp=2, ep=2), options={"moe_layer_freq": [1, 1]}),
    },
    "mixtral": {**EXPERTS, "singleton": Layout(Parallel(ep=2), SINGLETON)},
    "qwen2-moe": {**EXPERTS, "singleton": Layout(Parallel(tp=2, ep=2), SINGLETON)},
    "deepseek-v3": {**EXPERTS, "singleton": Layout(Parallel(tp=2, ep=2), SINGLETON)},
    "moonlight": {"tp1": WHOLE, "tp2-ep2": EXPERTS["tp2-ep2"]},
}
