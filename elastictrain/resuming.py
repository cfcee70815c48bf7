"""What a run directory and the nodes' memory know of a run, and the state that this start goes on from.

That is the newest snapshot in memory of which every rank's part is there, if it is newer than the newest checkpoint on
storage; else that checkpoint.

On failure: a damaged one is passed over for the next older one, on all ranks, with a note; one that was asked for by name,
or whose content does not fit, is an error. Nothing is written before :meth:`Resumption.write`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from elastictrain import runfile
from elastictrain.borrowing import borrow
from elastictrain.checkpoint import CheckpointManager, CheckpointReader, DamagedError, resolve
from elastictrain.checkpoint.catalog import step_of
from elastictrain.checkpoint.footprint import state_bytes
from elastictrain.checkpoint.found import Snapshot
from elastictrain.checkpoint.lease import Lease
from elastictrain.checkpoint.token import has_token
from elastictrain.config import Weights
from elastictrain.errors import CheckpointError, ElasticTrainError, NothingKept, UsageError
from elastictrain.keeping import Restored, Telling
from elastictrain.metrics.console import make_console, print_line
from elastictrain.metrics.ledger import FOLDER as EVENTS
from elastictrain.metrics.ledger import Ledger, num_cut_short
from elastictrain.metrics.panels import ledger_panels
from elastictrain.metrics.presence import node_id
from elastictrain.metrics.reading import EVENT as READING
from elastictrain.metrics.reading import Signs
from elastictrain.metrics.record import Recorder
from elastictrain.recalling import Recalling
from elastictrain.restoring import Restoring, silently
from elastictrain.rundir import cannot_be_used, first_line, is_storage_error
from elastictrain.session import Session

T = TypeVar("T")

_Problem = tuple[str, type[ElasticTrainError], bool]  # what all ranks raise; and whether rank 0 raises its own instead
_Answer = tuple[Any, _Problem | None]


def _given(answer: _Answer, cause: Exception | None) -> Any:
    value, problem = answer
    if problem is not None:
        text, kind, is_own = problem
        raise cause if cause is not None and is_own else kind(text)
    return value


class Resumption:
    """One start of a run.

    Attributes:
        manager: keeps the run's checkpoints; None without a run directory.
        recorded: what run.json says; None where this is the first start.
        source: what is restored, in words: the URL of a checkpoint, or a snapshot; None where training begins.
        stored: URL of the checkpoint on storage that is there for it; None where there is none.
        step: finished steps in it, once it is restored.
        num_bytes: of the state that is kept, of all ranks together; known once it has begun to write.
        notes: for the start-up summary.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.manager: CheckpointManager | None = None
        self.recorded: dict[str, Any] | None = None
        self.source: str | None = None
        self.stored: str | None = None
        self._recalling: Recalling | None = None
        self._telling: Telling = silently
        self._unwritten: list[str] = []  # what had been logged in it, and was lost with its process
        self._snapshots: list[Snapshot] = []  # newer than what is stored; the first one is the source
        self.step: int | None = None
        self.num_bytes = 0
        self.notes: list[str] = []

    def look(self) -> None:
        """Read run.json, and find where to resume from; every rank gets rank 0's answer.

        Raises:
            UsageError: the directory belongs to another run.
            NothingKept: on all ranks: some of them have nothing to begin with.
        """
        self._look()
        s = self._session
        if self.source is None and s.ranks.sum([s.needs_state])[0]:
            raise NothingKept("nothing is kept of this run yet, and the weights that the module was made with are gone")

    def _look(self) -> None:
        s = self._session
        resume = s.settings.resume
        takes_snapshots = Recalling.wanted(s, self.notes)
        self._telling = Restoring().of if s.ranks.is_main else silently
        if s.run_dir is None:
            self.source = self.stored = self._named(resume)
            return
        run_dir = s.run_dir
        self.manager = CheckpointManager(
            run_dir,
            s.settings.checkpoint,
            rank=s.ranks.rank,
            world_size=s.ranks.world_size,
            generation=s.membership.generation,
        )
        self.manager.saves.beat = s.membership.beat
        if s.ranks.is_main:
            say = partial(print_line, console=make_console())
            s.lease = Lease(run_dir, job=s.membership.job_id, say=lambda line: say(f"elastictrain: {line}"))
        manager = self.manager
        self.recorded, newest, has_snapshots, flops = self.ask_main(  # at once: each question waits for all ranks
            lambda: (
                self._read_run_file(),
                manager.newest(),
                takes_snapshots and has_token(run_dir),
                s.counted_flops,
            )
        )
        if flops is not None:  # a process that is new need not count them once more
            s.counted_flops = flops
        if s.ranks.is_main and self.recorded is not None:
            self._telling = Restoring(Signs(run_dir, generation=self._next_generation)).of
        if newest is not None:
            if resume == "never" and s.membership.generation == 0:
                raise UsageError(
                    f"--resume never, but {run_dir} holds checkpoints ({newest}): choose another --run-dir"
                )
            self.stored = newest
        else:
            self.stored = self._named(resume)
        if self.stored is not None:
            self.manager.protect(self.stored)
        if takes_snapshots:
            self._recalling = Recalling(s, self.notes, ask_main=self.ask_main)
        if self._recalling is not None and has_snapshots:
            step = None if newest is None else step_of(newest)
            self._snapshots = self._recalling.find(self.recorded, newer_than=step)
        self._choose()

    def _choose(self) -> None:
        self.source = self._snapshots[0].label if self._snapshots else self.stored

    @property
    def is_new(self) -> bool:
        """Whether this run directory has seen no start before; without one, every start is new."""
        return self.recorded is None

    @property
    def is_stored(self) -> bool:
        """Whether the state that was restored is on storage."""
        return self.source is not None and not self._snapshots

    def _open(self) -> CheckpointReader:
        if self._snapshots:
            assert self._recalling is not None
            reader: CheckpointReader = self._recalling.reader(self._snapshots[0])
            return reader
        assert self.stored is not None
        return CheckpointReader(self.stored)

    def restore_model(self) -> Restored | None:
        """The newest checkpoint that is good, its model loaded; None where a run begins."""
        while self.source is not None:
            try:
                restored = Restored(self._session, self._open, telling=self._telling)
                restored.load_model()
                return restored
            except DamagedError as error:
                self._fall_back(error)
        if isinstance(weights := self._session.settings.resume, Weights):
            url = self.ask_main(lambda: resolve(weights.checkpoint))
            self.notes += borrow(self._session, url, weights, telling=self._telling)
        return None

    def restore_rest(self, restored: Restored | None) -> None:
        """Everything but the model: optimizers, counters, callbacks, the position in the data."""
        while restored is not None:
            try:
                restored.load_rest()
                self.step = self._session.counters.step
                self._unwritten = restored.reader.about.get("unwritten", [])
                return
            except DamagedError as error:
                self._fall_back(error)
                restored = self.restore_model()

    def _fall_back(self, error: DamagedError) -> None:
        """Take the next older one, and say so. What was asked for by name has no stand-in."""
        assert self.source is not None
        if self._snapshots:
            assert self._recalling is not None
            self._recalling.reject(self._snapshots.pop(0))
            self._choose()
            if self.source is None:  # the model has been given weights already
                raise CheckpointError(f"{error}; there is no other snapshot or checkpoint: start again") from error
            self.notes.append(f"{error}; going on from {self.source}")
            return
        assert self.stored is not None
        if self.manager is None or not self.manager.holds(self.stored):
            raise error
        self.manager.reject(self.stored)
        older = self.ask_main(self.manager.newest)
        if older is None:
            raise CheckpointError(f"{error}; there is no other checkpoint in {self.manager.run_dir}") from error
        self.notes.append(f"{error}; going on from the older {older}")
        self.manager.protect(older)
        self.source = self.stored = older

    def ask_main(self, question: Callable[[], Any]) -> Any:
        """Rank 0's answer on every rank: storage may answer each of them differently. A collective.

        Raises:
            UsageError: on every rank, what rank 0's was.
            CheckpointError: on every rank: the storage did not answer rank 0. Another start may be luckier.
            ElasticTrainError: on the other ranks, in the words of whatever else rank 0 raises.
        """
        answer, cause = self._answer(question)
        return _given(self._session.ranks.from_main(answer), cause)

    def ask_main_and_tell(self, question: Callable[[], Any], mine: T) -> tuple[Any, list[T]]:
        """The same, and what every rank has to say. One collective."""
        answer, cause = self._answer(question)
        parts = self._session.ranks.gather((answer, mine))
        return _given(parts[0][0], cause), [told for _, told in parts]

    def _answer(self, question: Callable[[], Any]) -> tuple[_Answer, Exception | None]:
        """And what went wrong, on rank 0."""
        if not self._session.ranks.is_main:
            return (None, None), None
        try:
            return (question(), None), None
        except Exception as error:
            return (None, self._problem(error)), error

    def _problem(self, error: Exception) -> _Problem:
        """What all ranks raise instead of an error of rank 0's; and whether rank 0 raises its own."""
        for kind in (DamagedError, CheckpointError, UsageError):
            if isinstance(error, kind):
                return str(error), kind, True
        if not is_storage_error(error):  # a bug, or a disk that is full of something else: no rank may wait for rank 0
            return f"rank 0 could not go on: {first_line(error)}", ElasticTrainError, True
        return cannot_be_used(self._session.run_dir, first_line(error)), CheckpointError, False

    def _read_run_file(self) -> dict[str, Any] | None:
        s = self._session
        assert s.run_dir is not None
        if s.lease is not None:
            s.lease.look()
        if (content := runfile.read(s.run_dir)) is None:
            s.run_dir.check_writable()
            return None
        runfile.check(s.run_dir, content, self._identity())
        return content

    def _identity(self) -> dict[str, Any]:
        """What this start asks for, among the things that make a run the same run."""
        s = self._session
        target = s.membership.target or ""
        is_script = ":" not in target  # the same run, whether python or elastictrain run starts it
        return {
            "target": runfile.target_of(s.task) if is_script else target,
            "settings": None if is_script else s.membership.settings,
            "global_batch_size": s.settings.global_batch_size,
            "micro_batch_size": s.plan.micro_batch_size,
            "seed": s.settings.seed,
        }

    def write(self) -> None:
        """Now that everything works: hold the run directory, record what runs, begin to record values. A collective.

        Raises:
            UsageError: another job holds it.
            CheckpointError: it cannot be written.
        """
        if self._session.run_dir is not None:
            s, mine = self._session, self._session.membership
            part = state_bytes(s.task, s.optimizers) / s.mesh.shape.dp_replicate
            about = (mine.node_rank, s.ranks.rank, os.getpid(), part)
            (run, start), told = self.ask_main_and_tell(self._write, about)
            self.num_bytes = int(sum(part for *_, part in told))
            self._open_ledger(start, [(node, rank, pid) for node, rank, pid, _ in told])
            if self._recalling is not None:
                assert self.manager is not None
                base = self._snapshots[0] if self._snapshots else None
                self._recalling.begin(self.manager, run=run, start=start, base=base)

    def _write(self) -> tuple[str, int]:
        """The run's id, and the number of this start."""
        s = self._session
        assert s.run_dir is not None and s.lease is not None
        s.lease.take()
        if self.recorded is not None:
            run = runfile.id_of(self.recorded)
        else:
            micro = None if s.chosen.counts_batches else s.chosen.plan.micro_batch_size
            sizes = {"global_batch_size": s.settings.global_batch_size, "micro_batch_size": s.plan.micro_batch_size}
            if not s.chosen.counts_batches:
                sizes = {"global_batch_size": s.chosen.plan.global_batch_size, "micro_batch_size": micro}
            hparams = dict(s.task.hparams)
            run = runfile.write(s.run_dir, {**self._identity(), **sizes, "hparams": hparams})
        events = s.run_dir.names(EVENTS)
        generation = self._next_generation(events)
        shown = {**s.task.hparams, "seed": s.settings.seed, "precision": s.plan.precision.compute}
        if not s.chosen.counts_batches:
            shown["global_batch_size"] = s.chosen.plan.global_batch_size
        s.recorder = Recorder(
            s.run_dir,
            generation=generation,
            start_step=s.counters.step,
            hparams=shown,
            panels=ledger_panels(s.run_dir),
        )
        s.num_cut_short, s.is_first_start = num_cut_short(events), not events
        s.recorder.take_over(self._unwritten)
        return run, generation

    def _open_ledger(self, generation: int, workers: list[tuple[int, int, int]]) -> None:
        """Every node begins its account.

        Args:
            workers: of all nodes: node, rank, pid.
        """
        s, mine = self._session, self._session.membership
        assert s.run_dir is not None
        if not (s.accounts or s.ranks.is_main):
            return
        host, number = socket.gethostname(), mine.node_rank
        node = node_id(mine.node, mine.agent_pid)

        def counts() -> tuple[int, int, int]:
            return max(s.counters.step, s.num_stepped), s.counters.samples, s.counters.tokens

        s.ledger = Ledger(
            s.run_dir, generation=generation, number=number, node=node, counts=counts if s.accounts else None
        )
        if s.ranks.is_main:
            s.ledger.started(step=s.counters.step, world_size=s.ranks.world_size, mesh=str(s.mesh.shape))
            if (was := s.recovery) is not None:
                for lost_host, pid in was.lost:
                    s.ledger.note("gone", time=was.ended, host=lost_host, agent_pid=pid)
        if s.accounts:
            about = {"name": mine.node or host, "host": host, "agent_pid": mine.agent_pid}
            about["workers"] = [{"rank": rank, "pid": pid} for where, rank, pid in workers if where == number]
            reached = -1 if s.recovery is None else s.recovery.reached
            s.times.settle()
            s.begun = s.ledger.opened(s.times, step=s.counters.step, reached=reached, **about)
            mine.opened_ledger(s.run_dir.path if s.run_dir.is_local else s.run_dir.url)

    def _named(self, resume: str | Weights) -> str | None:
        """The checkpoint whose whole state a new run begins with."""
        if isinstance(resume, Weights) or resume in ("auto", "never"):
            return None
        url: str = self.ask_main(lambda: resolve(resume))
        return url

    def _next_generation(self, events: list[str] | None = None) -> int:
        """One more than any generation that has logged here, so that its values sort after theirs."""
        s = self._session
        assert s.run_dir is not None
        there = [*s.run_dir.names("metrics"), *(s.run_dir.names(EVENTS) if events is None else events)]
        names = [n for n in there if n.startswith("g") and n[1:7].isdigit() and f"-{READING}-" not in n]
        return max([int(name[1:7]) + 1 for name in names] + [s.membership.generation])
