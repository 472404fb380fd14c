"""Classes of transformers with a head that classifies: for which models there is one, and what its head is made of.

Read off the ``state_dict`` of every class in the auto mappings for the classification of tokens and of sequences in
transformers 5.24; 4.57 has the same heads for the models that it knows. Each model type stands before the beginning of
the names of its classes. Classes whose head depends on more than the model type (perceiver, xlm, modernbert, ...) are
not here: what is not known is not contradicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EACH, ALL = "ForTokenClassification", "ForSequenceClassification"
"""How the names of classes end: a value for each token, one for all of a sequence."""

BIAS = "score.bias"
"""What a class of tokens does not make where the config says ``token_classification_bias: false`` (transformers 5)."""

_SCORE_EACH = """
apertus:Apertus arcee:Arcee axk1:AXK1 axk2:AXK2 beam:Beam deepseek_v3:DeepseekV3 diffllama:DiffLlama esmc:Esmc
exaone4:Exaone4 gemma:Gemma gemma2:Gemma2 glm:Glm glm4:Glm4 gpt_oss:GptOss helium:Helium llama:Llama minimax:MiniMax
ministral:Ministral ministral3:Ministral3 mistral:Mistral mistral4:Mistral4 mixtral:Mixtral nemotron:Nemotron
openai_privacy_filter:OpenAIPrivacyFilter persimmon:Persimmon phi:Phi phi3:Phi3 qwen2:Qwen2 qwen2_moe:Qwen2Moe
qwen3:Qwen3 qwen3_5:Qwen3_5 qwen3_moe:Qwen3Moe qwen3_next:Qwen3Next seed_oss:SeedOss smollm3:SmolLM3
stablelm:StableLm starcoder2:Starcoder2
"""

_CLASSIFIER_EACH = """
albert:Albert bert:Bert big_bird:BigBird biogpt:BioGpt bloom:Bloom bros:Bros camembert:Camembert canine:Canine
convbert:ConvBert data2vec-text:Data2VecText deberta:Deberta deberta-v2:DebertaV2 distilbert:DistilBert
electra:Electra ernie:Ernie esm:Esm eurobert:EuroBert falcon:Falcon flaubert:Flaubert fnet:FNet funnel:Funnel
gpt-sw3:GPT2 gpt2:GPT2 gpt_bigcode:GPTBigCode gpt_neo:GPTNeo gpt_neox:GPTNeoX gte:Gte ibert:IBert
jina_embeddings_v3:JinaEmbeddingsV3 layoutlm:LayoutLM layoutlmv3:LayoutLMv3 lilt:Lilt longformer:Longformer
luke:Luke markuplm:MarkupLM megatron-bert:MegatronBert mobilebert:MobileBert mpnet:MPNet mpt:Mpt mra:Mra mt5:MT5
nomic_bert:NomicBert nystromformer:Nystromformer rembert:RemBert roberta:Roberta
roberta-prelayernorm:RobertaPreLayerNorm roc_bert:RoCBert roformer:RoFormer squeezebert:SqueezeBert t5:T5
ultrabert:Ultrabert ultravbert:UltraVBert umt5:UMT5 xlm:XLM xlm-roberta:XLMRoberta xlm-roberta-xl:XLMRobertaXL
xlnet:XLNet xmod:Xmod yoso:Yoso
"""

_SCORE_ALL = """
arcee:Arcee axk1:AXK1 axk2:AXK2 biogpt:BioGpt bloom:Bloom deepseek_v2:DeepseekV2 deepseek_v3:DeepseekV3
diffllama:DiffLlama doge:Doge exaone4:Exaone4 falcon:Falcon gemma:Gemma gemma2:Gemma2 gemma3:Gemma3
gemma3_text:Gemma3Text glm:Glm glm4:Glm4 gpt-sw3:GPT2 gpt2:GPT2 gpt_bigcode:GPTBigCode gpt_neo:GPTNeo
gpt_neox:GPTNeoX gpt_oss:GptOss gptj:GPTJ helium:Helium hunyuan_v1_dense:HunYuanDenseV1 hunyuan_v1_moe:HunYuanMoEV1
jamba:Jamba jetmoe:JetMoe llama:Llama minicpm3:MiniCPM3 minimax:MiniMax ministral:Ministral ministral3:Ministral3
mistral:Mistral mistral4:Mistral4 mixtral:Mixtral mpt:Mpt nemotron:Nemotron olmo:Olmo olmo2:Olmo2 olmo3:Olmo3
openai-gpt:OpenAIGPT opt:OPT persimmon:Persimmon phi:Phi phi3:Phi3 phimoe:Phimoe qwen2:Qwen2 qwen2_moe:Qwen2Moe
qwen3:Qwen3 qwen3_5:Qwen3_5 qwen3_5_text:Qwen3_5Text qwen3_moe:Qwen3Moe qwen3_next:Qwen3Next seed_oss:SeedOss
smollm3:SmolLM3 stablelm:StableLm starcoder2:Starcoder2 zamba:Zamba zamba2:Zamba2
"""

_CLASSIFIER_ALL = """
albert:Albert bert:Bert canine:Canine ernie:Ernie fnet:FNet gte:Gte layoutlm:LayoutLM luke:Luke markuplm:MarkupLM
megatron-bert:MegatronBert mobilebert:MobileBert nomic_bert:NomicBert rembert:RemBert roc_bert:RoCBert
squeezebert:SqueezeBert tapas:Tapas ultrabert:Ultrabert ultravbert:UltraVBert
"""

_DENSE_ALL = """
big_bird:BigBird camembert:Camembert convbert:ConvBert data2vec-text:Data2VecText electra:Electra esm:Esm esmc:Esmc
ibert:IBert jina_embeddings_v3:JinaEmbeddingsV3 layoutlmv3:LayoutLMv3 lilt:Lilt longformer:Longformer mpnet:MPNet
mra:Mra nystromformer:Nystromformer reformer:Reformer roberta:Roberta roberta-prelayernorm:RobertaPreLayerNorm
roformer:RoFormer xlm-roberta:XLMRoberta xlm-roberta-xl:XLMRobertaXL xmod:Xmod yoso:Yoso
"""

_BART_ALL = """
bart:Bart bigbird_pegasus:BigBirdPegasus mbart:MBart mt5:MT5 mvp:Mvp plbart:PLBart t5:T5 umt5:UMT5
"""


@dataclass(frozen=True, slots=True)
class HeadClass:
    """A class by its name, the tensors of its head, and the beginning of its name, which its relatives share."""

    name: str
    tensors: frozenset[str]
    stem: str

    def holds(self, stored: frozenset[str]) -> bool:
        """Tell whether the head can be loaded from what is stored with nothing made up and nothing passed over."""
        return stored == self.tensors or (self.name.endswith(EACH) and stored == self.tensors - {BIAS})


def _linear(*modules: str) -> frozenset[str]:
    return frozenset(f"{module}.{part}" for module in modules for part in ("weight", "bias"))


_FORMS = (
    (EACH, _linear("score"), _SCORE_EACH),
    (EACH, _linear("classifier"), _CLASSIFIER_EACH),
    (ALL, frozenset({"score.weight"}), _SCORE_ALL),
    (ALL, _linear("classifier"), _CLASSIFIER_ALL),
    (ALL, _linear("classifier.dense", "classifier.out_proj"), _DENSE_ALL),
    (ALL, _linear("classification_head.dense", "classification_head.out_proj"), _BART_ALL),
)


def every() -> Iterator[tuple[str, HeadClass]]:
    """Yield every class with its model type, those that classify tokens first."""
    for end, tensors, models in _FORMS:
        for model in models.split():
            model_type, _, stem = model.partition(":")
            yield model_type, HeadClass(f"{stem}{end}", tensors, stem)


_EVERY = tuple(every())


def find(name: str) -> HeadClass | None:
    """Return the class of a name, where its head is known."""
    return next((known for _, known in _EVERY if known.name == name), None)


def of_model(model_types: tuple[str, ...], stem: str) -> tuple[HeadClass, ...]:
    """Return the classes of a model by its type or, where that is not known, by the beginning of its class's name."""
    by_type = tuple(known for model_type, known in _EVERY if model_type in model_types[:1])
    return by_type or tuple(dict.fromkeys(known for _, known in _EVERY if stem and known.stem == stem))
