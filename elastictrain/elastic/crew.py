"""A node's worker processes over the generations of a run: those that live on, spares, and new ones.

When a generation is over, a worker that can go on in the next one (the word ``LIVES`` of its cell) is told so and lets go of
it; so does one that has come from an earlier generation and has not begun in this one. All others are stopped. A place that
has lost its worker is given to a *spare*, which has imported everything and waits, or to a new process.

On failure: a worker that should go on and has not let go of its generation in time is killed, and replaced like one that has
died. Spares that end while they start, or cannot be started, are replaced a few times, and then done without, which is said
once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from elastictrain.elastic.cells import ABORT, LIVES, LOST, PHASE, READY, Can, Cells, Phase
from elastictrain.elastic.line import Place
from elastictrain.elastic.processes import WorkerProcess, stop_all
from elastictrain.elastic.stalls import have_stacks_written

SPARE_AFTER = 5.0  # seconds of training before spares start: a start takes a core for as long, and short runs need none
SPARE_DEATHS = 3  # of spares before their first place, after which there are none
LET_GO_SECONDS = 10.0  # that a worker may take to notice that its generation is over, and to let go of it
WATCH_SECONDS = 0.5
TICK = 0.002


class Crew:
    """Of one agent.

    Args:
        command: a worker's command line.
        environment: of a worker process.
        num_spares: how many to keep.
        say: prints one line.

    Attributes:
        workers: of the running generation, by local rank; empty between two.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Callable[[], Mapping[str, str]],
        num_spares: int,
        say: Callable[[str], None],
    ) -> None:
        self._command, self._environment, self._num_spares, self._say = command, environment, num_spares, say
        self.workers: list[WorkerProcess] = []
        self._living: dict[int, WorkerProcess] = {}  # by local rank, between two generations
        self._survivors: set[int] = set()  # local ranks of those that have come to this generation from an earlier one
        self._spares: list[WorkerProcess] = []
        self._num_deaths = 0
        self._folder: str | None = None
        self._trains_since: float | None = None

    def prepare(self, count: int, *, folder: str) -> None:
        """Start so many before they have a place: nodes may take a while to meet, and a node joins when it is warm."""
        self._folder = folder
        for _ in range(count):
            self._add_spare()

    def is_warm(self) -> bool:
        """Have all spares imported everything? One that has ended will not."""
        return all(spare.is_warm or spare.poll() is not None for spare in self._spares)

    def dismiss(self) -> None:
        """Nobody lives on: what comes next is another run, and its generations are counted from the first one."""
        stop_all(list(self._living.values()), seconds=0)
        self._living = {}

    def begin(self, places: Sequence[tuple[int, Place]]) -> list[WorkerProcess]:
        """Give everybody a place: ``(rank, place)`` by local rank."""
        self._trains_since, self._survivors = None, set(self._living)
        for local_rank, (rank, place) in enumerate(places):
            worker = self._living.pop(local_rank, None)
            if worker is None or worker.poll() is not None:
                worker = self._spare() or self._new(place.environment)
                self._survivors.discard(local_rank)
            worker.place(place, rank=rank)
            self.workers.append(worker)
        return self.workers

    def tend(self, cells: Cells) -> None:
        """A look from the agent's loop: are there as many spares as there should be?"""
        if self._num_deaths >= SPARE_DEATHS or not self._num_spares:
            return
        now = time.monotonic()
        if self._trains_since is None and min(cells.steps()) >= 0:
            self._trains_since = now
        for spare in [one for one in self._spares if one.poll() is not None]:
            self._spares.remove(spare)
            self._count_death(spare.end)
            if self._num_deaths == SPARE_DEATHS:
                return
        is_time = self._trains_since is not None and now - self._trains_since > SPARE_AFTER
        if is_time and len(self._spares) < self._num_spares:
            self._add_spare()

    def watch(self, cells: Cells, *, give_up: Callable[[], bool]) -> None:
        """All stop at the step that workers have come to: until it is seen that they are done, nobody trains.

        Returns when one is, or has ended, or does not wait for that any more; or after a while.
        """
        until = time.monotonic() + WATCH_SECONDS
        while (
            time.monotonic() < until
            and not any(view[READY] or view[LOST] for view in cells.views)
            and all(worker.poll() is None for worker in self.workers)
            and not give_up()
        ):
            time.sleep(TICK)

    def over(self, generation: int, cells: Cells) -> None:
        """Tell those that can go on, at once."""
        for local_rank in self._able(cells):
            self.workers[local_rank].over(generation)

    def _able(self, cells: Cells) -> list[int]:
        """Local ranks of those that can go on in another generation."""
        able = []
        for local_rank, (worker, view) in enumerate(zip(self.workers, cells.views, strict=False)):
            can = view[LIVES]
            if worker.poll() is None and (can == Can.YES or (can == Can.UNKNOWN and local_rank in self._survivors)):
                able.append(local_rank)
        return able

    def end(self, generation: int, cells: Cells, *, seconds: float, keeps: bool) -> tuple[int, float | None]:
        """The generation is over: keep who can go on, if ``keeps``, and stop all others.

        Args:
            seconds: between SIGTERM and SIGKILL for those.

        Returns:
            how many live on, and the earliest moment at which one was found to have ended, seconds since the epoch.
        """
        living = self._able(cells) if keeps else []
        for i in living:
            self.workers[i].over(generation)
        others = [worker for i, worker in enumerate(self.workers) if i not in living]
        for i, view in enumerate(cells.views[: len(self.workers)]):
            if i not in living:
                view[ABORT] = 1
        stop_all(others, seconds=seconds)
        self._living = {i: self.workers[i] for i in self._let_go(living, cells)}
        for i in self._living:
            cells.views[i][ABORT] = 1  # until it has another place, SIGTERM means "unwind now" to it, too
        ends = [worker.ended_at for worker in self.workers if worker.ended_at is not None]
        self.workers = []
        return len(self._living), min(ends, default=None)

    def _let_go(self, living: list[int], cells: Cells) -> list[int]:
        """Those that have let go of their generation; the others are killed."""
        deadline = time.monotonic() + LET_GO_SECONDS
        waiting = set(living)
        while True:
            is_late = time.monotonic() > deadline  # a process that was stopped for long looks once more
            waiting -= {i for i in waiting if self.workers[i].poll() is not None}
            waiting -= {i for i in waiting if cells.views[i][PHASE] == Phase.CLOSED}
            if is_late or not waiting:
                break
            time.sleep(TICK)
        late = [self.workers[i] for i in sorted(waiting)]
        if late:
            ranks = ", ".join(f"rank {worker.rank} (pid {worker.pid})" for worker in late)
            self._say(f"replaced, as they have not let go of their generation within {LET_GO_SECONDS:g} s: {ranks}")
            have_stacks_written(late)
            stop_all(late, seconds=0)
        return [i for i in living if self.workers[i].poll() is None]

    def stop(self, *, seconds: float) -> None:
        """Everybody, at the end of the run."""
        stop_all([*self.workers, *self._living.values()], seconds=seconds)
        stop_all(self._spares, seconds=0)
        self.workers, self._living, self._spares = [], {}, []

    def _new(self, place: Mapping[str, str]) -> WorkerProcess:
        """``place``: what is known of it already, for whoever looks at the process from outside."""
        return WorkerProcess(self._command, env={**self._environment(), **place}, folder=self._folder)

    def _add_spare(self) -> None:
        try:
            self._spares.append(self._new({}))
        except OSError as error:  # no memory, or no process is left for it: those that train need none
            self._count_death(f"could not be started: {error}")

    def _count_death(self, how: str) -> None:
        self._num_deaths += 1
        if self._num_deaths == SPARE_DEATHS:
            self._say(f"no spare worker will be kept: {SPARE_DEATHS} have ended (the last {how})")

    def _spare(self) -> WorkerProcess | None:
        """A warm one, if there is one."""
        self._spares = [spare for spare in self._spares if spare.poll() is None]
        found = next((spare for spare in self._spares if spare.is_warm), *self._spares[:1]) if self._spares else None
        if found is not None:
            self._spares.remove(found)
        return found
