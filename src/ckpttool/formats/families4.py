"""What transformers 4 takes where a config does not say it in the form that it reads, by ``model_type``.

The names and defaults are those of its last release, 4.57.6, of models that write text, with or without pictures or
sound, and that 5.24 knows, too. Left out: what only encodes, detects, or makes pictures or sound, and of what 5 moved
in these the parts of DBRX and of vision towers that 4 has as constants.
"""

from __future__ import annotations

from typing import Any

_KNOWN = """
albert apertus arcee aria aria_text aya_vision bamba bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet
blenderbot blenderbot-small blip blip-2 bloom blt camembert canine chameleon codegen cohere cohere2 cohere2_vision
colpali colqwen2 convbert cpmant ctrl data2vec-text dbrx deberta deberta-v2 deepseek_v2 deepseek_v3 deepseek_vl
deepseek_vl_hybrid diffllama distilbert doge dots1 electra emu3 encoder-decoder ernie ernie4_5 ernie4_5_moe esm evolla
exaone4 falcon falcon_h1 falcon_mamba flaubert flex_olmo florence2 fnet fsmt funnel fuyu gemma gemma2 gemma3
gemma3_text gemma3n gemma3n_text git glm glm4 glm4_moe glm4v glm4v_moe glm4v_moe_text glm4v_text got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_speech granitemoe granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe ibert idefics idefics2 idefics3 instructblip instructblipvideo
internvl jamba janus jetmoe kosmos-2 kosmos-2.5 layoutlm layoutlmv2 layoutlmv3 led lfm2 lfm2_vl lilt llama llama4
llama4_text llava llava_next llava_next_video llava_onevision longcat_flash longformer longt5 luke m2m_100 mamba
mamba2 marian markuplm mbart megatron-bert minimax ministral mistral mistral3 mixtral mllama mobilebert modernbert
modernbert-decoder mpnet mpt mra mt5 mvp nemotron nllb-moe nystromformer olmo olmo2 olmo3 olmoe openai-gpt opt ovis2
paligemma pegasus pegasus_x perceiver perception_lm persimmon phi phi3 phi4_multimodal phimoe pix2struct pixtral
plbart prophetnet qwen2 qwen2_5_omni qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3
qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text recurrent_gemma reformer
rembert roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss shieldgemma2 smollm3 smolvlm squeezebert stablelm
starcoder2 switch_transformers t5 t5gemma tapas trocr udop umt5 vaultgemma video_llava vipllava vision-encoder-decoder
voxtral whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yoso zamba zamba2
"""
KNOWN = frozenset(_KNOWN.split())
"""Models that transformers 4 loads."""

_THETA = {
    10000.0: """
    arcee aria_text bamba blt_patcher chameleon cohere cohere2 deepseek_v2 deepseek_v3 diffllama doge dots1 exaone4
    falcon gemma gemma2 glm glm4 glm4_moe glm4v_moe_text glm4v_text gpt_neox gpt_neox_japanese granite granitemoe
    granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jetmoe llama llama4_vision_model ministral
    mistral nemotron olmo olmo2 olmoe phi phi3 phi4_multimodal pixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
    qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text recurrent_gemma seed_oss stablelm starcoder2
    t5_gemma_module vaultgemma zamba2
    """,
    25000.0: """
    persimmon
    """,
    100000.0: """
    falcon_h1 helium
    """,
    150000.0: """
    gpt_oss
    """,
    500000.0: """
    bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder ernie4_5 ernie4_5_moe flex_olmo llama4_text
    mllama_text_model
    """,
    1000000.0: """
    emu3_text_model lfm2 minimax mixtral phimoe qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text
    qwen3_omni_moe_text
    """,
    2000000.0: """
    smollm3
    """,
    5000000.0: """
    qwen3_vl_moe_text qwen3_vl_text
    """,
    10000000.0: """
    longcat_flash
    """,
    12000000.0: """
    apertus
    """,
}
THETA = {kind: theta for theta, kinds in _THETA.items() for kind in kinds.split()}
"""What ``rope_theta`` is where it is not said."""

_PARTIAL = {
    0.25: "gpt_neox qwen3_next stablelm",
    0.5: "bamba glm glm4 glm4_moe glm4v_moe_text nemotron persimmon phi recurrent_gemma",
}
PARTIAL = {kind: factor for factor, kinds in _PARTIAL.items() for kind in kinds.split()}
"""What ``partial_rotary_factor`` is where it is not said and not 1."""

DEFAULT_SCALING: dict[str, dict[str, Any]] = {
    "apertus": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "gpt_oss": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "qwen2_5_omni_text": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}
"""What ``rope_scaling`` is where it is not said and not nothing."""

_GEMMA = (("rope_theta", 1000000.0), ("rope_local_base_freq", 10000.0), True)
_MODERN = (("global_rope_theta", 160000.0), ("local_rope_theta", 10000.0), False)
LAYERED = {
    "gemma3_text": _GEMMA,
    "gemma3n_text": _GEMMA,
    "modernbert": _MODERN,
    "modernbert-decoder": _MODERN,
    "olmo3": (("rope_theta", 10000.0), ("rope_theta", 10000.0), True),
}
"""Models with parameters a type of layers: names and defaults for full and sliding attention, whether any scale."""

ALIASES: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "qwen3_moe": (("num_experts", "num_local_experts", 128),),
    "qwen3_vl_moe_text": (("num_experts", "num_local_experts", 60),),
    "qwen3_omni_moe_talker_text": (("num_experts", "num_local_experts", 128),),
    "vipllava": (("vision_feature_layers", "vision_feature_layer", [-2, -5, -8, -11, 6]),),
}
"""Fields by their old and their new name, with the default."""

SCALINGS: dict[str, tuple[str, ...]] = {
    "chameleon": (),
    "llama4_text": ("llama3",),
    "llama4_vision_model": (),
    "nemotron": (),
    "olmo": (),
    "olmo2": (),
    "phi3": (),
    "phi4_multimodal": (),
    "phimoe": ("longrope",),
    "pixtral": (),
    "recurrent_gemma": (),
}
"""The scalings that models have of which not every one is read: those of Phi-3 have a form of their own."""

NEEDING = frozenset(
    ("mllama_text_model", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "qwen3_omni_moe_talker_text")
)
"""Models that cannot do without a ``rope_scaling``, even where nothing is scaled."""
