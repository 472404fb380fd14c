"""A family of models: which of its configurations are known, and the tables that map its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Block, Copy, Table, Vocabulary, Weight
from ckpttool.errors import Unmapped

Fields = Mapping[str, tuple[str, ...]]

SIZES: Fields = MappingProxyType(
    {
        "layers": ("num_hidden_layers",),
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "groups": ("num_key_value_heads", "num_attention_heads"),
        "ffn": ("intermediate_size",),
        "vocab": ("vocab_size",),
    }
)
"""Sizes that every family has, and the fields they are read from: the first one that a configuration has."""

OPTIONAL: Fields = MappingProxyType({"mtp": ("num_nextn_predict_layers",)})
"""Sizes that are 0 where a configuration does not have them."""

TOP: Table = (
    Weight("model.embed_tokens.weight", Vocabulary("embedding.word_embeddings.weight"), ("vocab", "hidden")),
    Weight("model.norm.weight", Copy("decoder.final_layernorm.weight"), ("hidden",)),
)
HEAD = Weight("lm_head.weight", Vocabulary("output_layer.weight"), ("vocab", "hidden"))


MOST = 1 << 31
"""Sizes from here on are no sizes of a model."""


def no_blocks(_model: Model) -> Iterator[Block]:
    """Yield nothing: the family has nothing beside its layers."""
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family as data.

    ``layer`` returns the table of a layer for a configuration; ``more`` yields blocks beside the layers (multi-token
    prediction). ``sizes`` adds to the fields that sizes are read from, ``optional`` to those that may be missing,
    ``products`` and ``sums`` are those that follow from others. ``groups_rows`` is whether rows of
    attention lie by query groups. ``predicts`` is how many blocks of multi-token prediction transformers takes where
    the configuration does not say. ``proven`` is whether a checkpoint that megatron-core wrote was converted and gave
    the logits of the model that wrote it.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    layer: Callable[[Model, int], Table]
    more: Callable[[Model], Iterator[Block]] = no_blocks
    sizes: Fields = field(default_factory=dict)
    optional: Fields = field(default_factory=dict)
    products: Fields = field(default_factory=dict)
    sums: Fields = field(default_factory=dict)
    gated_attention: bool = False
    groups_rows: bool = True
    predicts: int = 0
    proven: bool = False

    def blocks(self, model: Model) -> Iterator[Block]:
        """Yield every block that a model of this configuration has, but for its head."""
        yield Block("", "", TOP)
        for n in range(model.size("layers")):
            yield Block(f"decoder.layers.{n}.", f"model.layers.{n}.", self.layer(model, n))
        yield from self.more(model)

    def read(self, config: Mapping[str, Any], where: str) -> tuple[dict[str, int], dict[str, str]]:
        """Return the sizes that the configuration at ``where`` gives, and the field of each.

        Raises :class:`Unmapped` with all fields that are missing or no whole numbers.
        """
        sizes: dict[str, int] = {}
        fields: dict[str, str] = {}
        lacking = []
        optional = {**OPTIONAL, **self.optional}
        for name, places in {**SIZES, **self.sizes, **optional}.items():
            least = 0 if name in optional else 1
            place = next((place for place in places if config.get(place) is not None), None)
            if place is not None and not _is_size(config[place], least):
                lacking.append(f"{place} that makes sense (it is {repr(config[place])[:40]})")
            elif place is not None:
                sizes[name], fields[name] = config[place], place
            elif name in optional:
                sizes[name], fields[name] = 0, places[0]
            else:
                lacking.append(" or ".join(places))
        _add_head_dim(config, sizes, fields, lacking)
        if lacking:
            raise Unmapped(
                f"{where}: no {', no '.join(lacking)}, which the weight map {self.name} needs",
                hint="Is it the config.json of this model? Give the directory of the right one: --hf-config DIR.",
                code="config-lacks",
            )
        for name, parts in self.products.items():
            sizes[name] = math.prod(sizes[part] for part in parts)
            fields[name] = " * ".join(fields[part] for part in parts)
        for name, parts in self.sums.items():
            sizes[name] = sum(sizes[part] for part in parts)
            fields[name] = " + ".join(fields[part] for part in parts)
        return sizes, fields


def _is_size(value: object, least: int) -> bool:
    return type(value) is int and least <= value < MOST


def _add_head_dim(config: Mapping[str, Any], sizes: dict[str, int], fields: dict[str, str], lacking: list[str]) -> None:
    said = config.get("head_dim")
    if said is None:
        sizes["head_dim"] = sizes.get("hidden", 0) // max(sizes.get("heads", 0), 1)
        fields["head_dim"] = "hidden_size / num_attention_heads"
    elif _is_size(said, 1):
        sizes["head_dim"], fields["head_dim"] = said, "head_dim"
    else:
        lacking.append(f"head_dim that makes sense (it is {repr(said)[:40]})")
