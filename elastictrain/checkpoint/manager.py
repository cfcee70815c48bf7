"""What the trainer talks to: save the state, hear how it went, find the newest checkpoint, keep as many as configured.

:meth:`CheckpointManager.begin` stops training for one copy of the local state and :meth:`CheckpointManager.settle` tells
what became of it; :meth:`CheckpointManager.save` is both, and waits in between. All of these are collective.

On failure: a save either is committed or leaves things as they were: the partial attempt is removed, older checkpoints are
untouched, and saving may be tried again. ``save`` raises one :class:`~elastictrain.errors.CheckpointError` on every rank,
with step, rank, cause and remedy; what fails in the background is a warning with the same words, or that error where
``on_failure="raise"`` asks for it. Old checkpoints that cannot be deleted are a warning. A rank that dies makes the
collectives raise on the others.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastictrain.callback import SaveInfo
from elastictrain.checkpoint import catalog
from elastictrain.checkpoint.ranks import Failure, Ranks, RoundFailed
from elastictrain.checkpoint.retention import Keep
from elastictrain.checkpoint.saves import Outcome, Saves
from elastictrain.checkpoint.snapshots import Snapshots
from elastictrain.checkpoint.staging import Content, Staging, Taker
from elastictrain.config import CheckpointConfig
from elastictrain.errors import CheckpointError, UsageError
from elastictrain.rundir import RunDir, first_line
from elastictrain.state import FlatState

log = logging.getLogger(__name__)

COPY_SECONDS = 30.0
UNWAITED = 20


class CheckpointManager:
    """Checkpoints of one generation. Uses the default process group where there is more than one rank.

    Args:
        writer_command: what to run as the writer process; None: the ordinary one.

    Attributes:
        saves: those that are under way.
        snapshots: in memory; None: none are taken.
        num_committed: saves that are on storage.
        num_failed: saves that are not.

    Raises:
        UsageError: a run directory in memory with more than one rank.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: CheckpointConfig,
        *,
        rank: int,
        world_size: int,
        generation: int,
        writer_command: Sequence[str] | None = None,
    ) -> None:
        if run_dir.is_memory and world_size > 1:
            raise UsageError(f"run directory {run_dir}: memory:// is for one process, not for {world_size} ranks")
        self.run_dir = run_dir
        self.config = config
        self.generation = generation
        self._ranks = Ranks(rank, world_size)
        self.saves = Saves(
            run_dir, self._ranks, generation=generation, skips=config.when_busy == "skip", command=writer_command
        )
        self._staging = Staging(self._ranks, [self.saves])
        self.snapshots: Snapshots | None = None
        self.num_committed = self.num_failed = 0
        self._wait_from = 0  # the step from which on snapshots are waited for
        self._mine: list[str] = []  # paths committed by this generation, oldest first
        self._protected: set[str] = set()  # paths
        self._rejected: set[str] = set()  # paths

    # ---- saving ------------------------------------------------------------------------------------------------------

    def take_snapshots(self, snapshots: Snapshots) -> None:
        """From now on :meth:`begin` can take snapshots."""
        self.snapshots = snapshots
        self._staging.takers.append(snapshots)

    def begin(
        self,
        step: int,
        state: FlatState,
        *,
        local_values: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        saves: bool = True,
        snapshots: bool = False,
    ) -> tuple[bool, list[SaveInfo]]:
        """Stage the state after ``step`` finished steps, to be kept in the background. Collective.

        Args:
            state: names to tensors (DTensors where sharded, otherwise equal on all ranks) and JSON values (rank 0's).
            local_values: JSON values that this rank alone has, under names of their own.
            about: notes of rank 0, for people and tools; not part of the state.
            saves: write it as a checkpoint.
            snapshots: keep it in memory; staged once, should both be asked for.

        Returns:
            Whether a checkpoint is under way, and earlier ones that have been committed since.

        Raises:
            CheckpointError: it cannot be saved, or an earlier one could not, and ``on_failure`` is "raise".
        """
        committed = self.settle() if saves else []
        self.saves.must = False
        takers: list[Taker] = [
            *([self.saves] if saves else []),
            *([self.snapshots] if snapshots and self.snapshots else []),
        ]
        try:
            decided = self._staging.begin(Content(step, state, local_values or {}, about or {}), takers)
        except RoundFailed as failed:
            if saves:
                self._fail(step, failed.failures, "Correct the state", failed.__cause__)
            elif self._ranks.rank == 0:
                log.warning("no snapshot of step %d: %s", step, failed)
            return False, committed
        if snapshots and self.snapshots is not None and decided[-1] is None:
            self.snapshots.left_out()
        if saves and decided[0] is None:
            self.saves.num_skipped += 1
            log.warning(
                "no checkpoint of step %d: an earlier one is still being written (%d left out so far)",
                step,
                self.saves.num_skipped,
            )
        return saves and decided[0] is not None, committed

    def save(
        self,
        step: int,
        state: FlatState,
        *,
        local_values: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> SaveInfo:
        """The same, and wait until it is committed. Collective.

        Raises:
            CheckpointError: on every rank: nothing was committed.
        """
        self.wait()
        self._stage(Content(step, state, local_values or {}, about or {}))
        (outcome,) = self.saves.wait()
        if outcome.failures:
            self.num_failed += 1
            self.saves.finish_errands()
            raise self._error(step, outcome.failures, _remedy(outcome.failures[0]))
        info = self._take([outcome])[0]
        self.saves.finish_errands()
        return info

    def save_last(
        self,
        step: int,
        state: FlatState,
        *,
        local_values: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
        seconds: float,
    ) -> list[SaveInfo]:
        """The same where nothing comes afterwards: waits only so long, and deletes no older checkpoint. Collective.

        Args:
            seconds: how long to wait at most for memory to stage in, and then for the commit.

        Returns:
            What has been committed; where this step is not among it, it has failed, or the writers go on.

        Raises:
            CheckpointError: on every rank: it cannot be saved.
        """
        self.saves.patience = seconds
        self._stage(Content(step, state, local_values or {}, about or {}))
        outcomes = self.saves.wait(seconds=seconds)
        for outcome in outcomes if self._ranks.rank == 0 else ():
            if outcome.failures:
                log.warning("%s", self._error(outcome.step, outcome.failures, _remedy(outcome.failures[0])))
        return [self._committed(outcome) for outcome in outcomes if not outcome.failures]

    def _stage(self, content: Content) -> None:
        """For a save that must be; raises what stands in its way on every rank."""
        self.saves.must = True
        try:
            self._staging.begin(content, [self.saves])
        except RoundFailed as failed:
            raise self._error(content.step, failed.failures, "Correct the state") from failed.__cause__

    def is_safe(self, *, seconds: float) -> bool:
        """Wait so long until the newest snapshot is whole on all ranks and outlives any one node; is it? Collective."""

        return self._settled(seconds)[0]

    def _settled(self, seconds: float) -> tuple[bool, bool]:
        """Is it? And was all of that time waited for in vain, on any rank?"""

        def part() -> tuple[bool, bool]:
            until = time.monotonic() + seconds
            is_safe = self.snapshots is not None and self.snapshots.settle(seconds=seconds)
            return is_safe, not is_safe and time.monotonic() >= until

        def both(parts: list[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
            return [(all(is_safe for is_safe, _ in parts), any(is_late for _, is_late in parts))] * len(parts)

        return self._ranks.round(part, both)

    def wait_for_snapshot(self, step: int) -> None:
        """That of ``step``, the newest; then the step after it may count. Collective.

        Should a node die before, no more is lost than what came after the snapshot before that. It waits in vain for
        :data:`COPY_SECONDS` at most, and then not for the next :data:`UNWAITED` snapshots: a keeper hangs, and training
        need not. Where this one is not copied because an older one was, the older one is waited for: the next is copied.
        """
        if self.snapshots is None or step < self._wait_from:
            return
        if self._settled(COPY_SECONDS)[1]:
            self._wait_from = step + UNWAITED * (self.config.snapshot_every or 1)
            if self._ranks.rank == 0 and not self.snapshots.is_over():
                text = (
                    "the snapshot of step %d is on no other node: training goes on, and waits for none before step %d"
                )
                log.warning(text, step, self._wait_from)

    def look(self) -> None:
        """Say what this rank's writer has failed to do. No collective: after every step."""
        self.saves.look()
        failed, self.saves.failed_here = self.saves.failed_here, []
        if self._ranks.world_size > 1:  # one process settles at once, with more words
            for text in failed:
                log.warning("rank %d could not write its part of the checkpoint of %s", self._ranks.rank, text)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self.saves.is_busy

    @property
    def has_news(self) -> bool:
        """Whether ranks should settle, for all that this one knows."""
        return self.saves.has_news

    def settle(self) -> list[SaveInfo]:
        """What has been committed since; what has failed is reported. Collective.

        Raises:
            CheckpointError: on every rank, where ``on_failure`` is "raise".
        """
        return self._take(self.saves.settle())

    def wait(self) -> list[SaveInfo]:
        """The same, once all that is under way is over. Collective."""
        return self._take(self.saves.wait())

    def close(self) -> None:
        """No more saves; those that are under way are finished by the writer on its own."""
        self.saves.close()
        if self.snapshots is not None:
            self.snapshots.close()
        self._staging.close()

    def _take(self, outcomes: list[Outcome]) -> list[SaveInfo]:
        committed = [self._committed(outcome) for outcome in outcomes if not outcome.failures]
        if committed and self._ranks.rank == 0:
            self._retain()
        for outcome in outcomes:
            if outcome.failures:
                self._fail(outcome.step, outcome.failures, _remedy(outcome.failures[0]), None)
        return committed

    def _committed(self, outcome: Outcome) -> SaveInfo:
        self.num_committed += 1
        self._mine.append(self.run_dir.join(outcome.folder))
        url = catalog.attempt_url(self.run_dir, outcome.folder)
        return SaveInfo(outcome.step, url, outcome.seconds, outcome.num_bytes)

    def _fail(self, step: int, failures: Sequence[Failure], remedy: str, cause: BaseException | None) -> None:
        self.num_failed += 1
        error = self._error(step, failures, remedy)
        if self.config.on_failure == "raise":
            raise error from cause
        if self._ranks.rank == 0:
            log.warning("%s; training goes on, %d failed so far", error, self.num_failed)

    def _error(self, step: int, failures: Sequence[Failure], remedy: str) -> CheckpointError:
        causes = "; ".join(f"rank {one.rank}: {one.kind}: {one.text}" for one in failures[:3])
        more = f" and {len(failures) - 3} more ranks" if len(failures) > 3 else ""
        return CheckpointError(
            f"no checkpoint of step {step} was written to {self.run_dir}: {causes}{more}. {remedy};"
            " older checkpoints are untouched"
        )

    # ---- what is there -----------------------------------------------------------------------------------------------

    def newest(self) -> str | None:
        """URL of the newest checkpoint that is committed and whole, for all that this rank sees; None if there is none.

        Raises:
            CheckpointError: storage does not say.
        """
        try:
            return catalog.newest(self.run_dir, but=self._rejected)
        except Exception as error:
            raise CheckpointError(f"checkpoints of {self.run_dir} cannot be listed: {first_line(error)}") from error

    def protect(self, url: str) -> None:
        """Never delete this one while this manager lives: it is the one that the run was resumed from."""
        self._protected.add(RunDir(url).path)

    def reject(self, url: str) -> None:
        """This one turned out to be damaged: :meth:`newest` passes it over, and it does not count as one that is kept."""
        log.warning("checkpoint %s is not used", url)
        self._rejected.add(RunDir(url).path)

    def holds(self, url: str) -> bool:
        """Whether it is one of this run directory's."""
        return RunDir(url).path.startswith(self.run_dir.join(catalog.FOLDER) + "/")

    def _retain(self) -> None:
        """Let the writer delete what may go."""
        c = self.config
        keep = Keep(c.keep_last, c.keep_every, c.keep_best, c.best_metric, c.best_mode)
        protected = [*self._protected, *self._rejected, self._mine[-1]]
        self.saves.tidy({"keep": keep.to_json(), "newest": self._mine, "protected": protected})


def _remedy(failure: Failure) -> str:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space there, lower keep_last, or choose another run directory"
    if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS) or failure.kind == "PermissionError":
        return "Make the run directory writable, correct the credentials, or choose another one"
    return "Check that the run directory can be reached and written, then save again"
