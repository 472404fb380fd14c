"""Whether a family ties its head to its embeddings where the config does not say.

Both generations of transformers leave ``tie_word_embeddings`` out of ``config.json`` when it is what the family's
configuration class has anyway. These are the defaults of transformers 5.24, by ``model_type``; a family that is in
neither list (one of its own code, or one whose outer and text configuration disagree) is judged by its tensors.
"""

from __future__ import annotations

_TIED = """
aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small blip blip-2
bloom camembert canary cohere cohere2 cohere2_moe cohere2_vision cohere_compass_text cpmant ctrl data2vec-text
diffusion_gemma electra encoder-decoder ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe falcon falcon_mamba
florence2 fun_asr_nano gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified
gemma4_unified_assistant gemma4_unified_text got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese
granite_docling granite_swa hunyuan_vl instructblip instructblipvideo jetmoe kosmos-2 kosmos-2.5 lara_mini led
lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl longt5 m2m_100 mamba marian mbart megatron-bert minicpm3 modernbert-decoder
moonshine mpt mt5 mvp nllb-moe openai-gpt opt paddleocr_vl paligemma pegasus pegasus_x plbart pop2piano
pp_chart2table prophetnet qwen2_5_omni qwen3_asr recurrent_gemma roberta roberta-prelayernorm roc_bert roformer
seamless_m4t seamless_m4t_v2 shieldgemma2 smollm3 speech-encoder-decoder speech_to_text speecht5 starcoder2
switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 vaultgemma vision-encoder-decoder voxtral_realtime
whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya
"""

_UNTIED = """
afmoe apertus apertus1p5 apertus1p5_text arcee aria aria_text audioflamingo3 axk1 axk2 bailing_hybrid bamba beam
bitnet blt chameleon codegen cohere_asr cosmos3_edge cosmos3_omni cwm dbrx deepseek_ocr2 deepseek_v2 deepseek_v3
deepseek_v32 deepseek_v4 diffllama doge dory dots1 dots3_note dots3_note_text emu3 evolla exaone exaone4
exaone4_5 exaone_moe falcon_h1 fast_vlm flex_olmo flint fsmt fuyu git glm glm4 glm46v glm4_moe glm4_moe_lite
glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmga gpt_neox gpt_oss gptj granite granite4_vision granitemoe
granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
hy_v4_vl hyperclovax idefics idefics2 idefics3 internlm3 iquestcoder jais2 jamba kimi_linear kolibri1
kyutai_speech_to_text laguna llama llama4 llama4_text llava llava_next llava_next_video llava_onevision
longcat_flash mamba2 mellum mimo_v2_flash minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl
minimax_m3_vl_text ministral ministral3 mistral mistral4 mistral_large4 mixtral mllama molmo2
moonshine_streaming moshi muse_glimmer muse_spark musicflamingo musicgen musicgen_melody nanochat nemo_speechlm
nemotron nemotron_h nemotron_h_omni olmo olmo2 olmo3 olmo_hybrid olmoe omniasr perception_lm persimmon phi phi3
phi4_multimodal phimoe pix2struct pp_formulanet qianfan_ocr qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl
qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl
qwen4_exp qwen4_exp_text reformer rembert rwkv sarvam_mla sarvam_moe seed_oss smolvlm solar_open stablelm
step3p7 unlimited_ocr vibevoice vibevoice_asr video_llama_3 video_llava vipllava voxtral xlstm
"""

TIED = frozenset(_TIED.split())
"""Model types that tie by default."""

UNTIED = frozenset(_UNTIED.split())
"""Model types that do not tie by default."""
