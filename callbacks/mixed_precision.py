"""Compute in low precision, keep weights and reductions in fp32."""

from __future__ import annotations

import dataclasses
import difflib

from elastictrain.callback import Callback
from elastictrain.errors import UsageError
from elastictrain.step_plan import Precision, StepPlan

_KNOWN = ("bf16", "fp16", "fp8", "fp32")


class MixedPrecision(Callback):
    """Run forward and backward passes in ``compute``; weights, their updates and gradient reductions stay fp32.

    Args:
        compute: "bf16"; "fp16" (with a gradient scaler, whose scale is part of the state); "fp8" (bf16, with the matrix
            products of linear layers within blocks in 8-bit floats, on GPUs that have them); or "fp32".

    Raises:
        UsageError: another ``compute``; when the trainer starts: fp8 without such a GPU, or with nothing to compute in it.
    """

    def __init__(self, compute: str) -> None:
        if compute not in _KNOWN:
            near = difflib.get_close_matches(str(compute), _KNOWN, n=1, cutoff=0.4)
            raise UsageError(
                f"MixedPrecision({compute!r}) is not known: use {', '.join(_KNOWN)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        self.compute = compute

    def configure(self, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, precision=Precision(self.compute, scale_loss=self.compute == "fp16"))
