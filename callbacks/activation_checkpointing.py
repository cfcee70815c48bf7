"""Less memory for activations, for a second forward pass."""

from __future__ import annotations

import dataclasses
import difflib

from elastictrain.callback import Callback
from elastictrain.errors import UsageError
from elastictrain.step_plan import Recompute, StepPlan

_MODES = ("full", "selective")


class ActivationCheckpointing(Callback):
    """Compute the activations of blocks again in the backward pass instead of keeping them.

    Losses and gradients are the same to the bit, dropout included. Blocks are what the task's ``pipeline_units()`` names,
    else its run of equal blocks.

    Args:
        mode: "full" keeps the inputs of a block alone, and computes all of it again; "selective" also keeps matrix
            products, convolutions and attention, and computes the cheap rest again.
        every: only every so many blocks, beginning with the first.
        patterns: names of modules instead of blocks, such as ``["blocks.*.mlp"]``; ``*`` is one part of a name.

    Raises:
        UsageError: another ``mode``, ``every`` below 1, or both ``every`` and ``patterns``; when the model is built: a
            pattern matches nothing.
    """

    def __init__(self, mode: str = "full", *, every: int = 1, patterns: list[str] | None = None) -> None:
        if mode not in _MODES:
            near = difflib.get_close_matches(str(mode), _MODES, n=1, cutoff=0.4)
            raise UsageError(
                f"ActivationCheckpointing({mode!r}) is not known: use {' or '.join(_MODES)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"ActivationCheckpointing(every={every!r}) must be a whole number of blocks, at least 1")
        chosen = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
        if patterns is not None and not (chosen and all(isinstance(name, str) and name for name in chosen)):
            raise UsageError(
                f"ActivationCheckpointing(patterns={patterns!r}) must be names of modules, such as ['blocks.*.mlp']"
            )
        if chosen and every != 1:
            raise UsageError(
                f"ActivationCheckpointing(every={every}, patterns={list(chosen)}): every counts blocks; give one of them"
            )
        self.recompute = Recompute(mode, every, chosen)

    def configure(self, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, recompute=self.recompute)
