"""The learning rate beside the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from elastictrain.callback import Callback, RunInfo, StepInfo


class LearningRateMonitor(Callback):
    """Log the learning rate of every parameter group on log steps: the one that the next step uses.

    The name is ``lr/AdamW``, after the optimizer's class; ``lr/AdamW-1`` for the second optimizer of one class; with several
    groups ``lr/AdamW/decay`` after the group's own ``"name"``, or ``lr/AdamW/0`` after its number.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Mapping[str, Any]] = {}

    def on_generation_start(self, info: RunInfo) -> None:
        self._groups = dict(_named_groups(info))

    def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
        return {name: group["lr"] for name, group in self._groups.items()}


def _named_groups(info: RunInfo) -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen: Counter[str] = Counter()
    for optimizer in info.optimizers:
        kind = type(optimizer).__name__
        name = f"lr/{kind}-{seen[kind]}" if seen[kind] else f"lr/{kind}"
        seen[kind] += 1
        for number, group in enumerate(optimizer.param_groups):
            if "lr" in group:
                yield f"{name}/{group.get('name', number)}" if len(optimizer.param_groups) > 1 else name, group
