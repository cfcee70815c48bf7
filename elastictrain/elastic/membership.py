"""A worker's place in the run, and the one local look per step by which all ranks stop together.

This is the only module where agent and trainer meet. It imports no torch. :func:`current` answers from the environment:

* started by ``elastictrain run``: :class:`AgentMembership`; :meth:`~Membership.boundary` speaks for all ranks. It may
  have a place in one generation after another (:mod:`elastictrain.elastic.line`);
* started by torchrun, or by hand: :class:`EnvMembership`; with several ranks it does not speak for all
  (``agrees`` is False) and the trainer asks them where they meet anyway.

On failure: an environment that contradicts itself is a :class:`~elastictrain.errors.UsageError`. A worker whose agent
is gone is killed by the kernel (Linux) or kills itself within a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from elastictrain.elastic.cells import (
    ABORT,
    ACKED,
    ASKED,
    BEATS,
    KEEPER,
    LIMIT,
    LIVES,
    LOST,
    PHASE,
    READY,
    STEP,
    VERDICT,
    Can,
    Phase,
    StopReason,
    one_cell,
    reason_of,
)
from elastictrain.elastic.line import WARM, Assignment, Line, Place
from elastictrain.elastic.signals import Handlers, die_with
from elastictrain.errors import GenerationOver, UsageError
from elastictrain.machine import write_whole
from elastictrain.metrics.published import file_of

__all__ = ["AgentMembership", "EnvMembership", "Membership", "StopReason", "current"]

REQUEST, ANSWER = "keeper-request.json", "keeper.json"  # beside the assignment, in the agent's private directory
RUN_DIR = "run-dir.json"  # beside them, once the run's ledger is open
EXIT_INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C
SPARE_SECONDS = 0.5  # after which a worker without a place is a spare; others are given theirs as they start
SAME_KEYPRESS = 1.0  # seconds: torchrun passes a Ctrl-C on to workers that the terminal has already told

_IMPORTED = uuid.uuid4().hex


class Membership:
    """One process's place in the run.

    Attributes:
        rank, world_size, local_rank, local_world_size, node_rank: as torchrun counts them.
        num_nodes: of which some may have more workers than others.
        generation: how often the workers were started before, in this call of ``elastictrain run``.
        target: what ``run.json`` records as the thing that runs; None where only the script knows.
        settings: the ``--set`` values.
        node: the name that this node was given; None: its host's.
        job_id: what tells this job apart from another one that uses the same run directory.
        has_agent: ``elastictrain run`` has started it.
        agrees: :meth:`boundary` gives all ranks the same answer at the same step.
        requested: the reason for which a signal asked *this* process to stop.
        stopped: what :meth:`boundary` has answered; None while it has answered None.
        agent_pid: the agent's, or this process' own where there is none.
        history, cause, lost: what an agent knows of the time before, see :class:`Assignment`; whoever accounts for it
            empties the first.
    """

    generation: int = 0
    target: str | None = None
    node: str | None = None
    job_id: str = ""
    has_agent: bool = False
    agrees: bool = True
    requested: StopReason | None = None
    stopped: StopReason | None = None

    def __init__(self) -> None:
        self.rank = _number("RANK", 0)
        self.world_size = _number("WORLD_SIZE", 1)
        self.local_rank = _number("LOCAL_RANK", self.rank)
        self.local_world_size = _number("LOCAL_WORLD_SIZE", self.world_size)
        self.node_rank = _number("GROUP_RANK", 0)
        self.num_nodes = _number("GROUP_WORLD_SIZE", max(1, self.world_size // max(1, self.local_world_size)))
        self.settings: dict[str, Any] = {}
        self.agent_pid = os.getpid()
        self.history: dict[str, float] = {}
        self.lost: Sequence[tuple[str, int]] = ()
        self.cause = ""
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                f"the environment says RANK={self.rank} of WORLD_SIZE={self.world_size} and LOCAL_RANK="
                f"{self.local_rank} of LOCAL_WORLD_SIZE={self.local_world_size}: set all four, or none"
            )

    @property
    def is_over(self) -> bool:
        """This generation has ended: what goes wrong from now on is of no interest."""
        return False

    def boundary(self, step: int) -> StopReason | None:
        """Between two steps: shall all ranks stop here?

        Every rank calls this with the number of finished steps, after each step. Costs less than a microsecond when
        nothing is asked. At the step that the agents agree on it may wait for the ranks that are one step behind. There
        may be several boundaries after one step, on all ranks alike: they stop at the first or at none of them.

        Returns:
            The reason, on every rank at the same step; None: go on.
        """
        raise NotImplementedError

    def beat(self) -> None:
        """Something was done that is no boundary."""

    def ask_for_keeper(self, key: bytes, name: str) -> bool:
        """Have this node's agent see to it that there is a keeper of snapshots, now and whenever it should die.

        Args:
            key: by which processes of this run know each other.
            name: tells this run apart from others on this machine.

        Returns:
            False: there is no agent that could.
        """
        return False

    def find_keeper(self, *, seconds: float = 0.0) -> dict[str, Any] | None:
        """Where it is: ``socket``, ``host`` and ``port``; waits so long for it. None: there is none."""
        return None

    def opened_ledger(self, run_dir: str) -> None:
        """Workers account for this node's time there from now on."""

    @property
    def publishes_to(self) -> str | None:
        """The file in which the agent looks for the newest values; None: nobody asks for them."""
        return None

    def close(self) -> None:
        """This process will come to no further boundary; gives the signal handlers back."""
        raise NotImplementedError


class AgentMembership(Membership):
    """A worker of ``elastictrain run``. There is one per process; :func:`current` always returns it.

    Attributes:
        line: what the agent says.
        assignment: of the generation that this worker is in.
        places: how many generations this process has been in.
    """

    has_agent = True

    def __init__(self, line: Line, place: Place) -> None:
        self.line, self.places = line, 0
        self.settings = {}
        self._take(place)
        # For the life of the process: a scheduler that signals every process must not kill a worker in mid-step.
        Handlers().install(self._on_signal)

    def _take(self, place: Place) -> None:
        """Be in that generation from now on, and in no other."""
        os.environ.update(place.environment)  # libraries look there
        settings = self.settings
        super().__init__()
        self.assignment = assignment = Assignment.read(place.assignment)
        self.settings = settings if self.places else dict(assignment.settings)
        self.generation, self.target, self.node = assignment.generation, assignment.target, assignment.node
        self.job_id, self.agent_pid = assignment.job_id, assignment.agent_pid
        self.history, self.cause, self.lost = dict(assignment.history), assignment.cause, assignment.lost
        self._cell = one_cell(assignment.cells, self.local_rank, self.local_world_size)
        self.stopped = None
        self.places += 1
        if self.requested is not None:
            self._cell[ASKED] = self.requested.code

    # ---- one generation after another ------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return bool(self._cell[ABORT]) or self.line.is_over(self.generation)

    def can_go_on(self, can: bool) -> None:
        """Whether this process could be in the next generation as it is."""
        self._cell[LIVES] = Can.YES if can else Can.NO

    def lost_others(self, error: BaseException) -> None:
        """By ``error``: the agent finds out who is gone, and says what comes next."""
        from elastictrain.elastic.report import describe  # it knows this module

        with contextlib.suppress(FileNotFoundError):  # the generation has just ended
            describe(error, rank=self.rank, step=self.step).write(self.assignment.reports)
            self._cell[LOST] = 1

    def handed_over(self) -> None:
        """It has stopped for nodes that come or go: the agent says what comes next."""
        self._cell[READY] = 1

    def next_place(self) -> None:
        """This process has let go of everything of its generation; returns when it has a place in another one.

        One that is over again by then is let go of as well, and the agent sees that it is.

        Raises:
            SystemExit: the agent has no place for it.
        """
        while self.is_over:
            self._cell[PHASE] = Phase.CLOSED
            place = self.line.take()
            assert place is not None
            self._take(place)
        self.run()

    def run(self) -> None:
        """Imports are done; from here on the worker is asked to stop, not killed, when it shall end."""
        self._cell[PHASE] = Phase.RUNNING

    @property
    def step(self) -> int:
        """Finished steps at the last boundary; -1 before the first."""
        return int(self._cell[STEP]) - 1

    def boundary(self, step: int) -> StopReason | None:
        """See :meth:`Membership.boundary`.

        Raises:
            GenerationOver: there will be no other boundary in this generation.
        """
        if self.line.is_over(self.generation):
            raise GenerationOver(f"generation {self.generation} is over")
        cell = self._cell
        again = cell[STEP] == step + 1
        cell[STEP] = step + 1
        if not cell[LIMIT]:
            return None
        return self._agree(step, again)

    def _agree(self, step: int, again: bool) -> StopReason | None:
        """See :mod:`elastictrain.elastic.agreement` for the rule and why it ends."""
        cell, pause = self._cell, 0.0002
        while self.stopped is None:
            limit = cell[LIMIT] - 1
            if limit < 0:  # it was given back
                return None
            if step < limit:
                cell[ACKED] = limit + 1
                return None
            if (step > limit or again) and cell[ACKED] != limit + 1:
                return None  # left that boundary before the limit was seen: the agent reads STEP and raises it
            cell[ACKED] = limit + 1
            verdict = cell[VERDICT]
            if verdict >> 3 == limit + 1:
                self.stopped = reason_of(verdict & 7)
            elif self.is_over:
                raise GenerationOver(f"generation {self.generation} is over")
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.01)
        return self.stopped

    def beat(self) -> None:
        self._cell[BEATS] += 1

    def ask_for_keeper(self, key: bytes, name: str) -> bool:
        write_whole(self._keeper_path(REQUEST), {"key": key.hex(), "name": name})
        self._cell[KEEPER] = 1
        return True

    def find_keeper(self, *, seconds: float = 0.0) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with open(self._keeper_path(ANSWER), encoding="utf-8") as file:
                    found: dict[str, Any] = json.load(file)
                if found["socket"] is not None or time.monotonic() > deadline:
                    return None if found["socket"] is None else found
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    return None
            if self.is_over:
                return None
            time.sleep(0.01)

    def opened_ledger(self, run_dir: str) -> None:
        with contextlib.suppress(OSError):  # the generation has just ended, or there is no room: training goes on
            write_whole(os.path.join(self._folder, RUN_DIR), {"run_dir": run_dir})

    @property
    def publishes_to(self) -> str | None:
        return file_of(self._folder, self.local_rank) if self.assignment.publishes else None

    def _keeper_path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    @property
    def _folder(self) -> str:
        return os.path.dirname(self.assignment.cells)

    def close(self) -> None:
        self._cell[PHASE] = Phase.CLOSED

    def leave(self) -> None:
        """Only the interpreter's own exit is left: a signal could do no more than raise in the middle of it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int) -> None:
        if self._cell[ABORT]:
            raise SystemExit(128 + number)  # the agent ends this generation: unwind, close files, go
        if self.requested is None:
            self.requested = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.PREEMPT
            self._cell[ASKED] = self.requested.code


class EnvMembership(Membership):
    """A process of torchrun, or one started by hand.

    SIGINT and SIGTERM set a flag; a second SIGINT ends the process at once with code 130.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generation = _number("TORCHELASTIC_RESTART_COUNT", 0)
        self.job_id = f"{_IMPORTED}-{os.getpid()}"  # this process: nobody knows better
        self.agrees = self.world_size == 1
        self._interrupted_at: float | None = None
        self._handlers = Handlers()
        self._handlers.install(self._on_signal)

    def boundary(self, step: int) -> StopReason | None:
        if self.requested is not None and self.agrees:
            self.stopped = self.requested
            return self.requested
        return None

    def close(self) -> None:
        self._handlers.restore()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif self.agrees or now - self._interrupted_at > SAME_KEYPRESS:
                os._exit(EXIT_INTERRUPTED)
        if self.requested is None:
            self.requested = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.PREEMPT


_mine: AgentMembership | None = None


def current(*, idle: Callable[[], None] = lambda: None) -> Membership:
    """This process's membership, from its environment. A spare waits for its first place.

    Args:
        idle: what a spare does before that.

    Raises:
        UsageError: the environment contradicts itself.
    """
    global _mine
    if _mine is None or _mine.assignment.agent_pid != os.getppid():
        if (line := Line.of_this_process()) is None:
            return EnvMembership()  # also a process that a worker started, with the worker's environment
        die_with(os.getppid())
        place = line.take(seconds=SPARE_SECONDS)
        if place is None:
            idle()
            if WARM in os.environ:
                with contextlib.suppress(OSError):
                    open(os.environ[WARM], "x").close()
            place = line.take()
        assert place is not None
        _mine = AgentMembership(line, place)
    elif _mine.stopped is None:
        _mine.run()  # a script that trains twice
    return _mine


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"the environment says {name}={text!r}: it must be a whole number") from None
