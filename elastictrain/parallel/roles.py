"""What a tensor-parallel plan means for sizes: which dims it cuts, what is whole and what is shared out at its edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

# What models call their numbers of heads.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")
# What an attention layer of transformers has, whose numbers of heads are in its config.
_OF_HEADS = ("head_dim", "head_size", "num_key_value_groups")


@dataclass(frozen=True)
class Role:
    """What tensor parallelism does with one module.

    Args:
        cuts: parameter -> the dim that is shared out.
        gathers: its inputs are whole while it runs, though they were shared out before.
        output_is_cut: its output is shared out; None: as what it was made of.
        divides: what the degree must divide here, by name.
    """

    cuts: Mapping[str, int] = field(default_factory=dict)
    gathers: bool = False
    output_is_cut: bool | None = None
    divides: Mapping[str, int] = field(default_factory=dict)


def roles(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, Role]:
    """By the names of the modules that a plan names."""
    found = {name: _role(module.get_submodule(name), style) for name, style in styles.items()}
    return {name: role for name, role in found.items() if role is not None}


def must_divide(module: nn.Module, found: Mapping[str, Role]) -> dict[str, int]:
    """Numbers that the degree has to divide, as far as the modules tell: widths that are cut evenly, and heads."""
    numbers: dict[str, int] = {}
    for name, role in found.items():
        path, _, leaf = name.rpartition(".")
        numbers |= {f"{leaf}.{key}": value for key, value in role.divides.items()}
        if role.cuts and role.output_is_cut:
            numbers |= head_counts(module.get_submodule(path))
    return {key: value for key, value in numbers.items() if value > 0}


def head_counts(module: nn.Module) -> dict[str, int]:
    """How many heads an attention layer has, by the names of its attributes; nothing for other layers."""
    own: dict[str, Any] = vars(module)
    counts = {key: own[key] for key in _HEADS if isinstance(own.get(key), int)}
    config = own.get("config")
    if config is not None and any(key in own for key in _OF_HEADS):
        of_config = {key: getattr(config, key, None) for key in _HEADS}
        counts |= {f"config.{key}": value for key, value in of_config.items() if isinstance(value, int)}
    return counts


def _role(module: nn.Module, style: ParallelStyle) -> Role | None:
    is_embedding = isinstance(module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        is_cut = _shards(style.output_layouts)
        divides = {"out_features": module.out_features} if isinstance(module, nn.Linear) and is_cut else {}
        if not style.use_local_output:  # logits that stay split for the loss may be split unevenly
            divides = {}
        return Role({"weight": 1} if is_embedding else {"weight": 0, "bias": 0}, True, is_cut, divides)
    if isinstance(style, RowwiseParallel):
        divides = {} if not isinstance(module, nn.Linear) else {"in_features": module.in_features}
        return Role({"weight": 0 if is_embedding else 1}, False, _shards(style.output_layouts), divides)
    if isinstance(style, SequenceParallel):
        return Role(output_is_cut=True)
    if isinstance(style, PrepareModuleInput):
        return Role(gathers=any(isinstance(one, Replicate) for one in _layouts(style.desired_input_layouts)))
    return None


def _shards(layouts: Any) -> bool:
    return any(isinstance(layout, Shard) for layout in _layouts(layouts))


def _layouts(layouts: Any) -> list[Any]:
    return list(layouts) if isinstance(layouts, (list, tuple)) else [layouts]
