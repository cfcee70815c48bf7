"""Pipeline schedules by name: which rank runs which stage, and which schedule fits a number of microbatches.

On failure: an unknown name, or microbatches that a schedule cannot work with, is a UsageError with the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from elastictrain.config import PP_SCHEDULES
from elastictrain.errors import UsageError

_CLASSES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
assert tuple(_CLASSES) == PP_SCHEDULES

# On an error each rank would print the schedule, hundreds of lines, before the error itself.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SINGLE = ("GPipe", "1F1B")  # one stage on each rank
V_SHAPED = ("ZBV", "DualPipeV")  # two stages on each rank; the last one is on the first rank
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBV", "DualPipeV")  # gradients of inputs first, those of weights later

# What runs the same stages with any number of microbatches: the last global batch of an epoch has fewer.
_ANY_NUMBER = {
    "1F1B": "GPipe",
    "Interleaved1F1B": "LoopedBFS",
    "InterleavedZeroBubble": "LoopedBFS",
    "DualPipeV": "ZBV",
}


def owners(schedule: str, *, pp: int, num_cut_points: int = 0) -> tuple[int, ...]:
    """For each stage the pp coordinate of the rank that runs it.

    Args:
        num_cut_points: as given by the user; 0: two stages a rank where the schedule has several.

    Raises:
        UsageError: cut points that do not make an equal number of stages for each rank.
    """
    num_stages = num_cut_points + 1 if num_cut_points else pp if schedule in SINGLE else 2 * pp
    wanted = f"{pp}" if schedule in SINGLE else f"{2 * pp}" if schedule in V_SHAPED else f"a multiple of {pp}"
    if (schedule in V_SHAPED and num_stages != 2 * pp) or num_stages % pp or (schedule in SINGLE and num_stages != pp):
        raise UsageError(
            f"pp_split names {num_cut_points} cut points, which make {num_stages} stages, and {schedule} on pp={pp} has"
            f" {wanted}: name one fewer than that"
        )
    if schedule in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(num_stages))


def check_microbatches(schedule: str, *, num_slots: int, num_stages: int, pp: int, dp: int) -> None:
    """Can every data-parallel rank's slots be the schedule's microbatches?

    Raises:
        UsageError: there are fewer slots than stages, or a number that the schedule cannot work with.
    """
    needed = num_stages if schedule in ("1F1B", "DualPipeV") else pp
    for count in {num_slots // dp, -(-num_slots // dp)}:
        if count < needed:
            raise UsageError(
                f"a global batch of {num_slots} slots gives a data-parallel rank {count} of them, and a pipeline of"
                f" {needed} stages needs {needed} to be busy: lower --micro-batch-size or pp, or raise"
                " --global-batch-size"
            )
        if not _fits(schedule, count, num_stages=num_stages, pp=pp):
            raise UsageError(
                f"{schedule} on pp={pp} needs a number of slots that is a multiple of its {count // pp} rounds, and a"
                f" data-parallel rank has {count}: change --micro-batch-size, or use pp_schedule=LoopedBFS"
            )


def _fits(schedule: str, count: int, *, num_stages: int, pp: int) -> bool:
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return count % max(1, count // pp) == 0
    return schedule not in ("1F1B", "DualPipeV") or count >= num_stages


def make_schedule(
    schedule: str, stages: Sequence[PipelineStage], count: int, *, pp: int, loss: Callable[..., Any]
) -> Any:
    """The schedule for ``count`` microbatches; one that runs the same stages where the named one cannot."""
    num_stages = stages[0].num_stages
    name = schedule if _fits(schedule, count, num_stages=num_stages, pp=pp) else _ANY_NUMBER[schedule]
    what = stages[0] if name in SINGLE else list(stages)
    return _CLASSES[name](what, n_microbatches=count, loss_fn=loss, scale_grads=False)
