"""Why a generation has failed, from what is left of its workers: reports, exit codes, and how far each has come."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from elastictrain.elastic.cells import LOST, Cells
from elastictrain.elastic.processes import WorkerProcess
from elastictrain.elastic.report import Report, root_cause
from elastictrain.elastic.restarts import Failure
from elastictrain.errors import IN_ORDER

TICK = 0.01


def find_cause(
    workers: Sequence[WorkerProcess],
    cells: Cells,
    reports: str,
    *,
    seconds: float,
    give_up: Callable[[], bool],
) -> tuple[Report, int] | None:
    """The root cause of a failure, and the pid it happened in; waits for a better one than a lost peer.

    Args:
        workers: by local rank; one of them has failed.
        seconds: how long to wait at most while somebody runs who may still explain it.
        give_up: it is known by now that another node explains it.

    Returns:
        None: another node explains it.
    """
    deadline = time.monotonic() + seconds
    pids = {worker.rank: worker.pid for worker in workers}
    while True:
        silent = [i for i, one in enumerate(workers) if one.poll() is None and not cells.views[i][LOST]]
        cause = root_cause(_causes(workers, cells, reports))
        if cause is not None and (not cause.lost_peer or not silent or time.monotonic() > deadline):
            return cause, pids[cause.rank]
        if give_up():
            return None
        time.sleep(TICK)


def told(cause: Report, pid: int) -> tuple[str, Failure]:
    """A worker's failure, in words, and as it is held against the run."""
    where = f" at step {cause.step}" if cause.step >= 0 else " before its first step"
    raised = f"raised {cause.line}" if cause.kind == "exception" else cause.message
    signature = (cause.error, cause.message) if cause.kind == "exception" and not cause.lost_peer else None
    return f"worker rank {cause.rank} (pid {pid}) {raised}{where}", Failure(cause.step, signature, cause.retry)


def is_anothers(workers: Sequence[WorkerProcess], cells: Cells, reports: str) -> bool:
    """Do those workers that have failed say no more than that they have lost others?"""
    cause = root_cause(_causes(workers, cells, reports))
    return cause is not None and cause.lost_peer


def _causes(workers: Sequence[WorkerProcess], cells: Cells, reports: str) -> list[Report]:
    causes = []
    for worker, step in zip(workers, cells.steps(), strict=True):
        report = Report.read(reports, worker.rank)
        if report is not None:
            causes.append(report)
        elif worker.code not in (None, *IN_ORDER):
            secondary = worker.code == -signal.SIGABRT  # gloo calls std::terminate when its peers vanish
            ended = worker.ended_at or 0.0
            causes.append(Report("died", worker.rank, step, message=worker.end, lost_peer=secondary, time=ended))
    return causes
