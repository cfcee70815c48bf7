"""The tensor-parallel plan that a model brings along: ``tp_plan`` of the models of ``transformers``.

It is said in the words of transformers 5, where a key may also name a parameter, or layers that this model does not have,
and where the experts of a mixture have styles of their own. What is left of it are modules and styles that
:mod:`elastictrain.parallel.plans` knows. Experts are left whole on every rank: right, and without saving memory.

On failure: a style that would have to be done in another way is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from elastictrain.errors import UsageError

_SAME = frozenset(
    {
        *("colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep"),
        *("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce"),
    }
)
_EXPERTS = frozenset({"moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts"})  # of a module, all of it
_WHOLE = _EXPERTS | {"replicate", "packed_colwise", "packed_rowwise", "grouped_gemm"}


def own_plan(task: nn.Module) -> dict[str, str] | None:
    """The plans of all models within ``task``, by names of modules that begin there; None where no model has one.

    Raises:
        UsageError: a style that is not supported.
    """
    names = [_general(name) for name, _ in task.named_modules()]
    parameters = [_general(name) for name, _ in task.named_parameters()]
    plan: dict[str, str] = {}
    for prefix, model, told in _told(task):
        experts = [key for key, style in told.items() if style in _EXPERTS]
        for key, style in told.items():
            full = f"{prefix}.{key}" if prefix else key
            general = _general(full)
            is_there = general in names or general in parameters  # else it is of a kind of layer that this model lacks
            if style in _WHOLE or _inside(key, experts) or not is_there:
                continue
            if style not in _SAME:
                raise UsageError(
                    f"{type(model).__name__}.tp_plan has the style {style!r} for {full}, which is not supported: define"
                    f" {type(task).__name__}.tensor_parallel_plan(), or use dp_shard instead of tp"
                )
            plan[full] = style
    return plan or None


def _told(task: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """The outermost models with a plan: theirs holds the plans of what is inside."""
    found: list[str] = []
    for name, module in task.named_modules():
        told = getattr(module, "tp_plan", None)
        if module is not task and isinstance(told, Mapping) and told and not _inside(name, found):
            found.append(name)
            yield name, module, told


def _inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{one}.") for one in outer)


def _general(name: str) -> str:
    """The name with ``*`` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
