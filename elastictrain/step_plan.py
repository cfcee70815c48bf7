"""What a training step is made of, as callbacks may change it before anything is built. Frozen; more than one room reads it.

On failure: callbacks that contradict each other are a :class:`~elastictrain.errors.UsageError` that names both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from elastictrain.errors import UsageError


@dataclass(frozen=True)
class Precision:
    """What numbers a step computes in. ``compute`` is "fp32", "bf16", "fp16" or "fp8"; gradients are reduced in fp32."""

    compute: str = "fp32"
    scale_loss: bool = False  # fp16: a gradient scaler, whose scale is part of the state


@dataclass(frozen=True)
class Recompute:
    """Activations that are computed again in the backward pass instead of being kept (activation checkpointing).

    Args:
        mode: "full" keeps a block's inputs alone; "selective" also keeps what is dear to compute, such as matrix products.
        every: the first block of every so many.
        patterns: names of modules, ``*`` for one part between dots, instead of blocks.
    """

    mode: str = "full"
    every: int = 1
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compilation:
    """How blocks are compiled; see ``torch.compile`` for the three."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"


@dataclass(frozen=True)
class StepPlan:
    """What a training step is made of. Callbacks change it in ``configure`` before anything is built.

    Args:
        micro_batch_size: samples per slot; None leaves it to the data.
        precision: numbers of the forward and backward pass.
        clip_norm: largest total norm of the gradients, over all ranks; None does not clip.
        clip_value: largest absolute value of a gradient element; None does not clip.
        recompute: which activations are not kept; None keeps all.
        compilation: how blocks are compiled; None runs them eagerly.
    """

    micro_batch_size: int | None = None
    precision: Precision = Precision()
    clip_norm: float | None = None
    clip_value: float | None = None
    recompute: Recompute | None = None
    compilation: Compilation | None = None

    @property
    def clipping(self) -> tuple[float | None, str | None]:
        """How much, and "norm" or "value"; None for no clipping."""
        if self.clip_norm is not None:
            return self.clip_norm, "norm"
        return self.clip_value, None if self.clip_value is None else "value"


def apply_plan(plan: StepPlan, makers: list[tuple[str, Any]]) -> StepPlan:
    """Let each ``(name, configure)`` change the plan; two that set the same thing differently are refused.

    Raises:
        UsageError: two callbacks disagree on one field; names both and their values.
    """
    owner: dict[str, str] = {}
    for name, configure in makers:
        changed = configure(plan)
        if not isinstance(changed, StepPlan):
            raise UsageError(f"{name}.configure(plan) returned {type(changed).__name__}: it must return a StepPlan")
        for one in dataclasses.fields(StepPlan):
            before, after = getattr(plan, one.name), getattr(changed, one.name)
            if before == after:
                continue
            if one.name in owner:
                raise UsageError(
                    f"callbacks {owner[one.name]} and {name} both set {one.name} ({before!r} and {after!r}):"
                    " keep one of them"
                )
            owner[one.name] = name
        plan = changed
    return plan
