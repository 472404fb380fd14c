"""Dense models with rotary positions, RMS norms and a gated projection: Llama and its kin."""

from __future__ import annotations

from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import ATTENTION, MLP, MLP_BIAS, NORMS, O_BIAS, QK_NORM, QKV_BIAS
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Table


def _llama(model: Model, _layer: int) -> Table:
    attention = (*QKV_BIAS, *O_BIAS) if model.flag("attention_bias") else ()
    return (*NORMS, *ATTENTION, *attention, *MLP, *(MLP_BIAS if model.flag("mlp_bias") else ()))


def _mistral(_model: Model, _layer: int) -> Table:
    return (*NORMS, *ATTENTION, *MLP)


def _qwen2(_model: Model, _layer: int) -> Table:
    return (*NORMS, *ATTENTION, *QKV_BIAS, *MLP)


def _qwen3(model: Model, _layer: int) -> Table:
    bias = (*QKV_BIAS, *O_BIAS) if model.flag("attention_bias") else ()
    return (*NORMS, *ATTENTION, *QK_NORM, *bias, *MLP)


def _seed_oss(model: Model, _layer: int) -> Table:
    qkv = QKV_BIAS if model.flag("attention_bias", default=True) else ()
    out = O_BIAS if model.flag("attention_out_bias") else ()
    return (*NORMS, *ATTENTION, *qkv, *out, *MLP, *(MLP_BIAS if model.flag("mlp_bias") else ()))


def _internlm3(model: Model, _layer: int) -> Table:
    """Remote code and the class of transformers have names of their own for the same switches."""
    attention, mlp = (model.flag(name, default=model.flag("bias")) for name in ("attention_bias", "mlp_bias"))
    qkv = QKV_BIAS if model.flag("qkv_bias", default=attention) else ()
    return (*NORMS, *ATTENTION, *qkv, *(O_BIAS if attention else ()), *MLP, *(MLP_BIAS if mlp else ()))


LLAMA = Family(name="llama", title="Llama 2 and 3, Yi", model_types=("llama",), layer=_llama, proven=True)
MISTRAL = Family(name="mistral", title="Mistral", model_types=("mistral",), layer=_mistral, proven=True)
QWEN2 = Family(name="qwen2", title="Qwen2, Qwen2.5", model_types=("qwen2",), layer=_qwen2, proven=True)
QWEN3 = Family(name="qwen3", title="Qwen3", model_types=("qwen3",), layer=_qwen3, proven=True)
SEED_OSS = Family(name="seed_oss", title="Seed-OSS", model_types=("seed_oss",), layer=_seed_oss, proven=True)
INTERNLM3 = Family(name="internlm3", title="InternLM3", model_types=("internlm3",), layer=_internlm3)
