"""Activation checkpointing: blocks whose activations are computed again in the backward pass instead of being kept.

The repetition is the forward pass once more, to the bit: it draws the random numbers that the forward pass drew, it
starts from the buffers that the forward pass found, and it leaves none of them changed (BatchNorm's running statistics
count a batch once). It happens inside of a block, where FSDP has gathered the block's weights, so that ranks make the
same collectives with and without it, ghost passes included.

On failure: names that match nothing are refused while the model is built. With "selective", code that changes a kept
result in place (``relu_`` after a convolution) is refused in the first backward pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastictrain.compat.torch import argument_names, is_random
from elastictrain.errors import UsageError
from elastictrain.parallel.forwards import Forward, Forwards, forward_of
from elastictrain.step_plan import Recompute

_CHANGING = "_elastictrain_changing"  # on a module: names of the buffers that its forward pass changes, once known

# What "selective" keeps: matrix products, convolutions, attention, and sums over ranks. By name, as not every build of
# torch has every one of them.
_DEAR = {
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._scaled_mm_v2", "aten.convolution"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce"),
}


# ---- which modules -------------------------------------------------------------------------------------------------


def recomputed_modules(task: nn.Module, blocks: Sequence[str], plan: Recompute) -> list[str]:
    """Names of the modules to recompute, in the model's order.

    Args:
        blocks: see :func:`~elastictrain.parallel.shard.block_names`.

    Raises:
        UsageError: a pattern matches nothing, or something that cannot be recomputed as one; there are no blocks.
    """
    if not plan.patterns:
        if not blocks:
            raise UsageError(
                f"ActivationCheckpointing: {type(task).__name__} has no run of equal blocks; name them in"
                ' pipeline_units(), or give patterns=["name.of.module", …]'
            )
        return list(blocks[:: plan.every])
    modules = dict(task.named_modules())
    chosen: set[str] = set()
    for pattern in plan.patterns:
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern, [name for name in modules if name], n=1, cutoff=0.4)
            raise UsageError(
                f"ActivationCheckpointing(patterns={list(plan.patterns)}): {pattern!r} matches no module of"
                f" {type(task).__name__}" + (f"; there is {near[0]!r}" if near else "")
            )
        chosen.update(found)
    outermost = [name for name in modules if name in chosen and not any(_inside(name, other) for other in chosen)]
    for name in outermost:
        if any(_inside(block, name) for block in blocks) or type(modules[name]).forward is nn.Module.forward:
            raise UsageError(
                f"ActivationCheckpointing(patterns={list(plan.patterns)}): {name!r} holds blocks and cannot be recomputed"
                f" as one; use {name + '.*'!r}"
            )
    return outermost


def _matches(name: str, pattern: str) -> bool:
    """``*`` stands for one part of a name, as in tensor-parallel plans."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


# ---- how -----------------------------------------------------------------------------------------------------------


def recompute(task: nn.Module, names: Sequence[str], plan: Recompute, forwards: Forwards) -> None:
    """Make those of the named modules that are there (a pipeline stage has some) recompute their activations."""
    modules = dict(task.named_modules())
    made: dict[Forward, Forward] = {}
    for module in (modules[name] for name in names if name in modules):
        inner = forward_of(module)
        if inner not in made:
            made[inner] = _selective(inner) if plan.mode == "selective" else _full(inner)
        forwards.replace(module, made[inner])


def _full(inner: Forward) -> Forward:
    def full(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(module, *args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler itself knows what a repetition must not do twice
            return checkpoint(inner, module, *args, use_reentrant=False, **kwargs)
        return checkpoint(inner, module, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)

    return full


def _selective(inner: Forward) -> Forward:
    keep = partial(create_selective_checkpoint_contexts, _policy)

    def explained(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(module, *args, **kwargs)
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise UsageError(
                f'ActivationCheckpointing("selective"): {type(module).__name__} changes a kept result in place (such as'
                ' ReLU(inplace=True) after a convolution); use inplace=False, or "full"'
            ) from error

    def selective(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(inner, module, *args, use_reentrant=False, context_fn=keep, **kwargs)
        contexts = partial(_contexts, module, keep)
        return checkpoint(explained, module, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return selective


def is_dear(op: Any) -> bool:
    """Does "selective" keep what this operator returns?"""
    return str(getattr(op, "overloadpacket", op)) in _DEAR


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not is_dear(op):
        return CheckpointPolicy.PREFER_RECOMPUTE
    # What is kept is not run again and draws no random numbers then: whatever draws after it would draw others.
    if is_random(op) and dict(zip(argument_names(op), args, strict=False) | kwargs.items()).get("dropout_p"):
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


# ---- buffers -------------------------------------------------------------------------------------------------------

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(module: nn.Module, more: Callable[[], _Contexts] | None = None) -> _Contexts:
    """Contexts of a forward pass and of its repetitions: the buffers' own, around those that ``more`` gives."""
    inner = more() if more is not None else (nullcontext(), nullcontext())
    if module.__dict__.get(_CHANGING) == []:
        return inner
    before: dict[str, Tensor] = {}
    return _Noting(module, before, inner[0]), _StartingFrom(module, before, inner[1])


class _Noting(AbstractContextManager[None]):
    """Keeps what the forward pass finds in the buffers that it changes. Which those are is seen in the first one."""

    def __init__(self, module: nn.Module, before: dict[str, Tensor], inner: AbstractContextManager[Any]) -> None:
        self._module, self._before, self._inner = module, before, inner

    def __enter__(self) -> None:
        known: list[str] | None = self._module.__dict__.get(_CHANGING)
        names = [name for name, _ in self._module.named_buffers()] if known is None else known
        self._before.update({name: self._module.get_buffer(name).detach().clone() for name in names})
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
        if exc[0] is None and _CHANGING not in self._module.__dict__:
            for name in list(self._before):
                if torch.equal(self._before[name], self._module.get_buffer(name)):
                    del self._before[name]
            self._module.__dict__[_CHANGING] = list(self._before)


class _StartingFrom(AbstractContextManager[None]):
    """Buffers as the forward pass found them; afterwards the very tensors that are there now."""

    def __init__(self, module: nn.Module, before: dict[str, Tensor], inner: AbstractContextManager[Any]) -> None:
        self._module, self._before, self._inner = module, before, inner
        self._now: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        for name, tensor in self._before.items():
            path, _, leaf = name.rpartition(".")
            owner = self._module.get_submodule(path)
            self._now.append((owner, leaf, self._module.get_buffer(name)))
            setattr(owner, leaf, tensor.clone())
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
        for owner, leaf, tensor in self._now:
            setattr(owner, leaf, tensor)
        self._now.clear()
