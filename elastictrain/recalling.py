"""Snapshots in memory, as one start sees them: those of the run's past that it may go on from, and its own.

A snapshot is of this run's past if it carries the run's id, and no later start of the run has begun before its step: that
one has trained other steps in their place. A start with ``resume="never"`` looks at none but those of its own job.

On failure: what is missing for snapshots, or cannot be had, is a note of the start-up summary, and training goes on
without. A token that cannot be one is a :class:`~elastictrain.errors.UsageError`. Where snapshots are there and the run
directory does not say whether they are the run's past, that is a :class:`~elastictrain.errors.CheckpointError` on all
ranks: another start may be luckier, and going on without them would throw steps away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastictrain import runfile
from elastictrain.channel import key_of
from elastictrain.checkpoint import CheckpointManager
from elastictrain.checkpoint.found import Snapshot
from elastictrain.checkpoint.held import About
from elastictrain.checkpoint.keeper_process import name_of
from elastictrain.checkpoint.memory import Memory
from elastictrain.checkpoint.ranks import Ranks, RoundFailed
from elastictrain.checkpoint.snapshots import Identity
from elastictrain.checkpoint.token import make_token, read_token
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.metrics.ledger import start_steps
from elastictrain.rundir import answering, cannot_be_used
from elastictrain.session import Session

Ask = Callable[[Callable[[], Any]], Any]  # rank 0's answer on every rank


class Recalling:
    """Of one start, where snapshots are asked for and can be had; see :meth:`wanted`."""

    def __init__(self, session: Session, notes: list[str], *, ask_main: Ask) -> None:
        s, membership = session, session.membership
        self._session, self._notes, self._ask_main = session, notes, ask_main
        self._memory = Memory(
            Ranks(s.ranks.rank, s.ranks.world_size),
            first=membership.local_rank == 0,
            ask=lambda key: membership.ask_for_keeper(key, name_of(key, str(self._run_dir.path))),
            find=lambda seconds: membership.find_keeper(seconds=seconds),
            is_over=lambda: membership.is_over,
        )
        self._has_met = False

    @staticmethod
    def wanted(session: Session, notes: list[str]) -> bool:
        """Does this start take snapshots? A note, where it should and cannot."""
        s, every = session, session.settings.checkpoint.snapshot_every
        missing = None
        if s.run_dir is None:
            missing = "without a run directory nothing is kept"
        elif s.run_dir.is_memory:
            missing = f"{s.run_dir} ends with its process"
        elif not s.membership.has_agent:
            missing = "snapshots are kept by elastictrain run: start it with that"
        if every is not None and missing is not None:
            notes.append(f"snapshot_every={every} does nothing here: {missing}")
        return every is not None and missing is None

    def find(self, recorded: dict[str, Any] | None, *, newer_than: int | None) -> list[Snapshot]:
        """What this start can go on from, the newest first; the same on all ranks. There is a token. A collective.

        Args:
            recorded: the content of run.json.
            newer_than: the step that storage has.
        """
        found = self._meet(recorded, newer_than=newer_than)
        return [one for one in found if newer_than is None or one.step > newer_than]

    def reader(self, snapshot: Snapshot) -> Any:
        """See :meth:`elastictrain.checkpoint.memory.Memory.open`."""
        return self._memory.open(snapshot)

    def reject(self, snapshot: Snapshot) -> None:
        """It could not be restored: where it is damaged, nobody shall find it again. A collective."""
        self._memory.reject(snapshot)

    def begin(self, manager: CheckpointManager, *, run: str, start: int, base: Snapshot | None) -> None:
        """Restoring is over, from ``base`` if it was a snapshot; from now on snapshots can be taken. A collective."""
        if not self._has_met:
            self._ask_main(lambda: make_token(self._run_dir))
            self._meet(None)
        self._memory.hang_up()
        if self._memory.link is not None:
            restored = None if base is None else base.about.snapshot
            identity = Identity(run, self._session.membership.job_id, start, restored)
            manager.take_snapshots(self._memory.taker(identity))

    @property
    def _run_dir(self) -> Any:
        assert self._session.run_dir is not None
        return self._session.run_dir

    def _meet(self, recorded: dict[str, Any] | None, *, newer_than: int | None = None) -> list[Snapshot]:
        self._has_met = True
        try:
            found = self._memory.meet(
                lambda: key_of(read_token(self._run_dir)),
                lambda abouts: self._are_past(abouts, recorded),
                newer_than=newer_than,
            )
        except RoundFailed as failed:
            for kind in (CheckpointError, UsageError):
                for one in failed.failures:
                    if one.kind == kind.__name__:
                        raise kind(one.text) from failed
            self._notes.append(f"snapshots in memory cannot be looked for: {failed}")
            return []
        if missing := self._memory.missing:
            self._notes.append(f"{missing} ranks have no keeper on their node: snapshots are taken once they have")
        return found

    def _are_past(self, abouts: list[About], recorded: dict[str, Any] | None) -> list[bool]:
        """On rank 0: which of them are of this run's past."""
        s = self._session
        if recorded is None or not abouts:
            return [False] * len(abouts)
        with answering(self._unreadable):
            starts = start_steps(self._run_dir, after=min(one.start for one in abouts))
        job = s.membership.job_id if s.settings.resume == "never" else None
        return [is_past(one, run=runfile.id_of(recorded), job=job, starts=starts) for one in abouts]

    def _unreadable(self, _error: BaseException, reason: str) -> CheckpointError:
        return CheckpointError(cannot_be_used(self._run_dir, reason))


def is_past(about: About, *, run: str, job: str | None, starts: Mapping[int, int]) -> bool:
    """Whether a snapshot is of a run's past.

    Args:
        job: only what this job has taken counts; None: what any has.
        starts: by their number, the finished steps at which later starts have begun.
    """
    is_replaced = any(number > about.start and step < about.step for number, step in starts.items())
    return about.run == run and job in (None, about.job) and not is_replaced
