"""Adapters on Megatron's own layers, wrapped and saved as Megatron Bridge does it: base keys stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from tests.writers.adapted_names import ALPHA, RANK


class Adapter(torch.nn.Module):  # type: ignore[misc]
    """A and B of one module, each cut over tensor ranks; `rows` of B where it is not as many as the module has."""

    def __init__(self, base: Any, name: str, config: Any, rows: int | None = None, *, magnitude: bool = False) -> None:
        super().__init__()
        options = {"config": config, "bias": False, "init_method": torch.nn.init.zeros_}
        options["is_expert"] = getattr(base, "is_expert", False)
        self.gated, self.across = "linear_fc1" in name, isinstance(base, RowParallelLinear)
        inside, outside = sizes(base)
        if self.across:
            self.linear_in = RowParallelLinear(inside, RANK, input_is_parallel=True, skip_bias_add=True, **options)
        else:
            self.linear_in = ColumnParallelLinear(inside, RANK, gather_output=True, **options)
        self.linear_out = ColumnParallelLinear(RANK, rows or outside, gather_output=self.across, **options)
        if magnitude:
            self.weight_magnitude = torch.nn.Parameter(torch.ones(base.weight.shape[0]))

    def forward(self, values: Any) -> Any:
        return self.linear_out(self.linear_in(values)[0])[0] * (ALPHA / RANK)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", sharded_offsets, metadata)
        state |= self.linear_out.sharded_state_dict(f"{prefix}linear_out.", sharded_offsets, metadata)
        key = f"{prefix}linear_out.weight"
        if self.gated:
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        if hasattr(self, "weight_magnitude"):
            key = f"{prefix}weight_magnitude"
            make = make_sharded_tensor_for_checkpoint if self.across else make_tp_sharded_tensor_for_checkpoint
            axis = {} if self.across else {"tp_axis": 0}
            state[key] = make(self.weight_magnitude, key, prepend_offsets=sharded_offsets, **axis)
        return state


def sizes(base: Any) -> tuple[int, int]:
    """Columns and rows of the whole weight."""
    if isinstance(base, TopKRouter):
        return base.weight.shape[1], base.weight.shape[0]
    return base.input_size, base.output_size


class Several(torch.nn.ModuleDict):  # type: ignore[misc]
    """Adapters of one module under names of their own."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, adapter in self.items():
            state |= adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state


class Wrapped(torch.nn.Module):  # type: ignore[misc]
    """A module with what is added to its answer; neither the class nor an attribute of it shows in a key."""

    def __init__(self, base: Any, adapter: Any) -> None:
        super().__init__()
        self.to_wrap, self.adapter = base, adapter

    def forward(self, values: Any, *args: Any, **options: Any) -> Any:
        answer, bias = self.to_wrap(values, *args, **options)
        return answer + self.added(values), bias

    def added(self, values: Any) -> Any:
        return self.adapter(values)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        state |= self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return state


class WithMagnitude(Wrapped):
    """DoRA: rows of the sum as long as the magnitude says. On one tensor rank alone."""

    def forward(self, values: Any, *args: Any, **options: Any) -> Any:
        answer, bias = super().forward(values, *args, **options)
        low = self.adapter.linear_out.weight @ self.adapter.linear_in.weight
        length = torch.linalg.norm(self.to_wrap.weight + ALPHA / RANK * low, dim=1)
        return answer * (self.adapter.weight_magnitude / length), bias


class WrappedRouter(Wrapped):
    """A router that asks other experts."""

    def forward(self, values: Any, *args: Any, **options: Any) -> Any:
        gating = type(self.to_wrap).gating
        self.to_wrap.gating = lambda inputs: gating(self.to_wrap, inputs) + self.adapter(inputs)
        return self.to_wrap(values, *args, **options)


class WrappedGroups(Wrapped):
    """Queries, keys and values with an adapter each, put together group by group."""

    def added(self, values: Any) -> Any:
        config = self.to_wrap.config
        groups, width = config.num_query_groups, config.kv_channels
        parts = [self.adapter[f"adapter_{name}"](values) for name in "qkv"]
        cut = [part.unflatten(-1, (groups, -1, width)) for part in parts]
        return torch.cat(cut, dim=-2).flatten(-3)


class WrappedHalves(Wrapped):
    """Gate and up with an adapter each."""

    def added(self, values: Any) -> Any:
        return torch.cat([self.adapter[f"adapter_{name}"](values) for name in ("gate", "up")], dim=-1)


def wrap(chunk: Any, config: Any, kind: str, targets: tuple[str, ...]) -> None:
    """Put adapters on every module of these names; `kind` is lora, dora or canonical."""
    for path, module in list(chunk.named_modules()):
        name = path.rpartition(".")[2]
        if name in targets and not isinstance(module, Wrapped):
            parent = chunk.get_submodule(path.rpartition(".")[0])
            setattr(parent, name, wrapped(module, path, config, kind))


def wrapped(base: Any, path: str, config: Any, kind: str) -> Wrapped:
    """One module with its adapter."""
    if isinstance(base, TopKRouter):
        return WrappedRouter(base, Adapter(base, path, config))
    if kind == "dora":
        return WithMagnitude(base, Adapter(base, path, config, magnitude=True))
    if kind == "canonical" and path.endswith("linear_qkv"):
        width = config.kv_channels
        rows = {"q": config.num_attention_heads * width} | dict.fromkeys("kv", config.num_query_groups * width)
        return WrappedGroups(base, Several({f"adapter_{n}": Adapter(base, path, config, r) for n, r in rows.items()}))
    if kind == "canonical" and path.endswith("linear_fc1"):
        half = base.output_size // 2
        parts = {f"adapter_{name}": Adapter(base, path, config, half) for name in ("up", "gate")}
        return WrappedHalves(base, Several(parts))
    return Wrapped(base, Adapter(base, path, config))
