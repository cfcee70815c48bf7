"""Limit the gradients before the optimizer sees them, and log their norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from torch import Tensor

from elastictrain.callback import Callback, StepInfo
from elastictrain.errors import UsageError
from elastictrain.step_plan import StepPlan


class GradientClipping(Callback):
    """Scale gradients down to a total norm, or cut each element.

    Args:
        norm: largest L2 norm of all gradients together, over the whole mesh. The norm before clipping is logged as
            ``train/grad_norm`` on log steps.
        value: largest absolute value of one element.

    Raises:
        UsageError: both or neither are given, or the one given is not a number above 0.
    """

    def __init__(self, *, norm: float | None = None, value: float | None = None) -> None:
        if (norm is None) == (value is None):
            raise UsageError(f"GradientClipping(norm={norm!r}, value={value!r}): give one of them, such as norm=1.0")
        name, limit = ("norm", norm) if norm is not None else ("value", value)
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 < limit < math.inf:
            raise UsageError(f"GradientClipping({name}={limit!r}): the limit must be a number above 0, such as 1.0")
        self.norm = norm
        self.value = value

    def configure(self, plan: StepPlan) -> StepPlan:
        if self.norm is not None:
            return dataclasses.replace(plan, clip_norm=float(self.norm))
        assert self.value is not None
        return dataclasses.replace(plan, clip_value=float(self.value))

    def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
        return {} if info.grad_norm is None else {"train/grad_norm": info.grad_norm}
