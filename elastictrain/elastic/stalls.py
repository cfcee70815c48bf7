"""Workers that live and make no progress, or do not exit: a hang, which this turns into a death.

Progress is a boundary passed, a batch of an evaluation done, or a look at a save that training waits for, by any worker of
the node; ranks work in lockstep, so one that hangs stops them all. Before the first boundary of a generation there is little
that could tell of progress (data are prepared, kernels compiled, the state is read), so that may take :data:`START` times as
long. When nothing has moved for too long, every worker writes its stacks to stderr, and the generation is over. Those who
only waited for another are let go, and live on; the one that hangs does not notice, and is killed in the end
(:data:`elastictrain.elastic.crew.LET_GO_SECONDS`). A worker that was stopped and goes on in time is left alone.

On failure: a step, a batch or a start that takes longer than its limit is taken for a hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from elastictrain.elastic.cells import Cells, Phase
from elastictrain.elastic.processes import WorkerProcess
from elastictrain.elastic.report import Report

STACKS = (
    signal.SIGUSR2
)  # a worker answers with the stacks of its threads, on stderr, also where it waits for a collective
START = 4  # times the limit, for a generation that has not come to its first boundary
WRITE_SECONDS = 0.5  # for them to do so, before they are let go and are somewhere else


class Stalls:
    """Of one generation.

    Args:
        seconds: without progress; 0: any time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: tuple[int, ...] = ()
        self._since = time.monotonic()

    def look(self, cells: Cells, workers: Sequence[WorkerProcess]) -> str | None:
        """From the agent's loop. What has happened, in words, once it has; then stacks have been written."""
        seen = cells.progress()
        now = time.monotonic()
        if seen != self._seen or Phase.RUNNING not in cells.phases():
            self._seen, self._since = seen, now
        stalled = now - self._since
        if not self._seconds or stalled < self._seconds * (START if max(cells.steps()) < 0 else 1):
            return None
        pairs = zip(workers, cells.phases(), strict=True)
        have_stacks_written(
            [one for one, phase in pairs if phase == Phase.RUNNING]
        )  # before, it does not know the signal
        ranks = ", ".join(
            f"rank {worker.rank} at step {step}" for worker, step in zip(workers, cells.steps(), strict=True)
        )
        return f"no worker has made progress for {stalled:.0f} s ({ranks})"


def have_stacks_written(workers: Sequence[WorkerProcess]) -> None:
    """Returns when they have had the time for it; a worker that is stopped writes nothing."""
    for worker in workers:
        if worker.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, STACKS)
    time.sleep(WRITE_SECONDS)


class Lingering:
    """Workers of one generation that have reported their error and do not exit.

    Args:
        reports: where reports are.
        seconds: that they may take.
    """

    def __init__(self, reports: str, seconds: float) -> None:
        self._reports, self._seconds = reports, seconds
        self._since: dict[int, float] = {}  # by rank
        self._looked_at = 0.0

    def look(self, workers: Sequence[WorkerProcess]) -> bool:
        """Is there one that has taken too long? Looks once a second."""
        now = time.monotonic()
        if now - self._looked_at < 1.0:
            return False
        self._looked_at = now
        for worker in workers:
            if worker.rank not in self._since and Report.read(self._reports, worker.rank) is not None:
                self._since[worker.rank] = now
        return any(now - since > self._seconds for since in self._since.values())
