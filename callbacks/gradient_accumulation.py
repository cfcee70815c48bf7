"""Smaller microbatches: less memory, the same global batch."""

from __future__ import annotations

import dataclasses

from elastictrain.callback import Callback
from elastictrain.errors import UsageError
from elastictrain.step_plan import StepPlan


class GradientAccumulation(Callback):
    """Cut the global batch into microbatches of ``micro_batch_size`` samples and add up their gradients.

    How many of them a rank adds up follows from the global batch and the number of ranks, so that it stays right when
    ranks come and go.

    Raises:
        UsageError: ``micro_batch_size`` is not a number of at least 1.
    """

    def __init__(self, *, micro_batch_size: int) -> None:
        if not isinstance(micro_batch_size, int) or isinstance(micro_batch_size, bool) or micro_batch_size < 1:
            raise UsageError(
                f"GradientAccumulation(micro_batch_size={micro_batch_size!r}): a microbatch has at least 1 sample;"
                " give a whole number such as 8"
            )
        self.micro_batch_size = micro_batch_size

    def configure(self, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, micro_batch_size=self.micro_batch_size)
