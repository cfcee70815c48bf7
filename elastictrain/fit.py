"""Epochs: when to step, log, validate, save and stop.

At the end of every step all ranks stand at one boundary. What must be decided by all is decided there: a save every N
steps by counting, a save by time and a stop under torchrun on log steps where ranks meet anyway, a stop under
``elastictrain run`` by the agents' agreement.

On failure: nothing is caught. What was committed stays; the step in progress is done again by whoever resumes.
:meth:`FitLoop.rescue` may save the last finished step afterwards.
"""

from __future__ import annotations

import math
import time
from typing import Any

from elastictrain.callback import Callback, SaveInfo, ValidationInfo
from elastictrain.checkpoint import CheckpointManager
from elastictrain.checkpoint.interval import Interval
from elastictrain.compat.lightning import is_overridden
from elastictrain.compat.transformers import description
from elastictrain.data.slots import Work
from elastictrain.elastic.membership import StopReason
from elastictrain.errors import UsageError
from elastictrain.evaluate import Evaluator
from elastictrain.keeping import collect
from elastictrain.loop import StepRunner
from elastictrain.metrics.console import make_console, print_line
from elastictrain.reporting import NOTHING, Reporter, log_to_loggers
from elastictrain.rescuing import rescue
from elastictrain.session import Session
from elastictrain.task import Task

FLUSH_SECONDS = 10.0
HAND_OVER_SECONDS = 30.0  # for snapshots to be whole and copied; then a checkpoint is saved in their place


class FitLoop:
    """Trains the session's module until its limits, a stop, or a failure.

    Args:
        manager: keeps checkpoints; None where there is no run directory.
        is_stored: the state that training goes on from is on storage.

    Attributes:
        stopped: why training ended before its limits.
        last_saved: URL of the newest checkpoint of this loop.
    """

    def __init__(
        self,
        session: Session,
        runner: StepRunner,
        evaluator: Evaluator,
        manager: CheckpointManager | None,
        *,
        is_stored: bool,
    ) -> None:
        self._session, self._runner, self._evaluator, self._manager = session, runner, evaluator, manager
        self.reporter = Reporter(session, self._save_is_due, self._has_news)
        self.stopped: StopReason | None = None
        self.last_saved: str | None = None
        self._saved_step = session.counters.step if is_stored else -1
        self._snapshot_step = -1
        self._started = self._saved_at = time.monotonic()
        self._trained_before = session.counters.seconds
        config = session.settings.checkpoint
        self._interval: Interval | None = None
        if config.every_seconds == "auto":
            self._interval = Interval(config.seconds_between_failures, session.num_cut_short, self._trained_before)
        self._validated_step = -1
        self._description = description(session.task) if manager is not None and session.ranks.is_main else None
        self._agreed = NOTHING
        self._weigh: Any = getattr(session.task, "loss_weight", None)
        self._weighs = isinstance(session.task, Task) and is_overridden("loss_weight", session.task, Task)
        self._stoppers = [c.should_stop for c in session.callbacks if type(c).should_stop is not Callback.should_stop]

    def run(self) -> None:
        """Train."""
        s = self._session
        s.task.train()
        if s.counters.step:  # resumed: a run that a callback has stopped stays so
            self._ask_stoppers()
        if self._is_done():  # a finished run, started again; a callback that wants no training
            self._end()
            return
        s.hooks("on_train_start")
        if s.counters.step == 0 and s.settings.val_every is not None and isinstance(s.task, Task):
            self._validate(0)  # where the curve begins, and a mistake in validation_step shows at once
        self.reporter.start()
        self._mark_whole()
        while not self._is_done():
            self._epoch()
        self.reporter.stop()
        if self.stopped is None:
            if s.settings.val_every is not None or s.chosen.feed.steps_per_epoch is None:
                self._validate(s.counters.step)
            self._end()
            s.hooks("on_train_end")

    def _is_done(self) -> bool:
        s, limits = self._session, self._session.settings
        return (
            self.stopped is not None
            or s.should_stop
            or (limits.max_steps is not None and s.counters.global_step >= limits.max_steps)
            or (limits.max_epochs is not None and s.counters.epoch >= limits.max_epochs)
        )

    # ---- an epoch --------------------------------------------------------------------------------------------------

    def _epoch(self) -> None:
        """An epoch, or the rest of one that was interrupted."""
        s, feed = self._session, self._session.chosen.feed
        is_new = not feed.state().get("data.steps")
        s.epoch_batches = 0
        if is_new:
            s.hooks("on_train_epoch_start")
        else:
            s.hooks.go_on_in_epoch()
        ended, is_flagged, is_empty = not s.should_stop, False, is_new
        for work in feed.epoch() if ended else ():
            if (self._weighs or work.num_samples is None) and not self._count(work):
                break
            is_empty = False
            if not self._runner.run(work):  # on_train_batch_start returned -1: no validation, but schedulers step
                is_flagged = True
                self._runner.schedules.step("step", s.batch_idx + 1)
                self._runner.schedules.step("epoch", s.counters.epoch + 1)
                break
            self._finish_step(work)
            if is_flagged := work.is_last:
                break
            if self._boundary():
                return
            if self._is_done():
                ended = False
                break
        s.is_whole = False
        if is_empty and ended:
            raise UsageError(
                f"the training data gave no batch in epoch {s.counters.epoch}: give something that can be iterated"
                " again in every epoch, and is not empty"
            )
        if ended and not is_flagged:  # only reading on told that it was the last step
            self._runner.schedules.step("epoch", s.counters.epoch + 1)
            if s.settings.val_every is None:
                self._validate(s.counters.step)
        self._end_epoch(ended=ended)
        self._mark_whole()
        self._boundary()
        s.is_whole = self.stopped is None and not self._is_done()

    def _count(self, work: Work) -> bool:
        """Ask all ranks, where only they together know, how much there is in this global batch; is it anything?"""
        s = self._session
        slots = list(work.slots)
        weights: dict[int, float] = {}
        for slot in slots:
            weight = self._weigh(slot.batch) if self._weighs and slot.size else None
            weights[slot.index] = float(slot.size if weight is None else weight)
        idles = not slots or not slots[0].size
        sums = s.mesh.sum([sum(slot.size for slot in slots), sum(weights.values()), idles])
        work.slots, work.weights = iter(slots), weights
        work.num_samples, work.total_weight, work.somebody_idles = int(sums[0]), sums[1], sums[2] > 0
        return work.num_samples > 0

    def _finish_step(self, work: Work) -> None:
        """The optimizer has stepped: count, report, validate where it is due."""
        s, number = self._session, self._session.counters.step + 1
        self.reporter.count(work)
        s.num_stepped = number
        s.chosen.feed.commit(work)
        due = work.is_last if s.settings.val_every is None else number % s.settings.val_every == 0
        try:
            self._agreed = self.reporter.step(work)
        except Exception:
            waits = work.is_last or any(one.reduce_on_plateau for one in s.schedulers)
            if self.reporter.told == number and not (due or s.should_stop or waits):
                s.counters.step = number  # a callback has raised, and nothing else is left to do in this step
                self._mark_whole()
            raise
        if due or s.should_stop:
            self._validate(number)
        if s.schedulers:
            self._runner.schedules.step("step", s.next_batch, plateau=True)
        if s.should_stop and s.ranks.is_main:
            for logger in s.loggers:
                logger.save()
        s.counters.step = number
        self._mark_whole()

    def _mark_whole(self) -> None:
        """What is in memory is the state after ``counters.step`` steps, and nothing of the next one."""
        s = self._session
        s.is_whole, s.has_begun, s.num_added = True, False, s.logbook.num_added

    def _end_epoch(self, *, ended: bool) -> None:
        """Hooks and averages of the epoch. ``ended``: it is over, not left in the middle by a limit."""
        s = self._session
        s.publish(s.logbook.steps())
        s.batch, s.batch_size, s.in_batch = None, None, False
        s.publish_averages()
        s.hooks("on_train_epoch_end")
        logged = s.publish_averages()
        s.hooks.late("on_train_epoch_end")
        if ended:
            self._runner.schedules.step("epoch", s.counters.epoch + 1, plateau=True)
        log_to_loggers(s, logged, offset=-1)
        self.reporter.values(s.counters.step, {name: value.item() for name, value in logged.items()})
        if ended:  # else another start goes on in this epoch, with what has been added up
            s.logbook.reset()
        self._ask_stoppers()
        if ended:
            s.chosen.feed.end_epoch()
            s.counters.epoch += 1
        else:
            s.epoch_left = True

    # ---- validation ------------------------------------------------------------------------------------------------

    def _validate(self, number: int) -> None:
        """Validate after ``number`` finished steps, once."""
        s = self._session
        if not s.val_loaders or self._validated_step == number:
            return
        self._validated_step = number
        with self.reporter.pausing("validation"):
            for callback in s.callbacks:
                callback.on_validation_start(s.info())
            s.publish(s.logbook.steps())
            s.stage = "validate"
            if "on_validation_model_zero_grad" in s.hooks.own:
                s.hooks("on_validation_model_zero_grad")
            else:
                s.task.zero_grad()
            s.stage = "train"
            results = self._evaluator.run("validate", s.val_loaders)
            metrics = {name: value for result in results for name, value in result.items()}
            self.reporter.values(number, metrics)
            for callback in s.callbacks:
                callback.on_validation_end(ValidationInfo(number, s.counters.samples, s.counters.epoch, metrics))
            self._ask_stoppers()

    def _ask_stoppers(self) -> None:
        answers = [should_stop() for should_stop in self._stoppers]  # ask all: they may count
        if any(answers):
            self._session.should_stop = True

    # ---- the boundary ----------------------------------------------------------------------------------------------

    def _boundary(self) -> bool:
        """All ranks stand between two steps. Save where it is due; True where all of them stop here."""
        s, step, config = self._session, self._session.counters.step, self._session.settings.checkpoint
        agreed, self._agreed = self._agreed, NOTHING
        if agreed.is_lost or (s.ranks.world_size == 1 and s.lease is not None and s.lease.lost is not None):
            self._check_lease()
        if config.snapshot_wait and self._manager is not None and self._snapshot_step == step - 1:
            with self.reporter.pausing("checkpoint"):
                self._manager.wait_for_snapshot(step - 1)
        self.stopped = s.membership.boundary(step) or agreed.stop
        every = config.every_steps
        if self.stopped is StopReason.CHANGE:
            self._hand_over()
        elif self.stopped is not None:
            self._save_now()
        elif self._manager is not None:
            if self._manager.is_busy:
                self._manager.look()
            if agreed.settle or (s.ranks.world_size == 1 and self._manager.has_news):
                self._tell(self._manager.settle())
            saves, snapshots = agreed.save or (every is not None and step % every == 0), self._snapshot_is_due(step)
            if saves or snapshots:
                self._keep(self._manager, saves=saves, snapshots=snapshots)
        return self.stopped is not None

    def _check_lease(self) -> None:
        """Where all ranks meet anyway: does this job still have the run directory? A collective.

        Raises:
            UsageError: on every rank; another job has it.
        """
        s = self._session
        lost = s.ranks.from_main(None if s.lease is None else s.lease.lost)
        if lost is not None:
            raise UsageError(lost)

    def _save_is_due(self) -> bool:
        every = self._session.settings.checkpoint.every_seconds if self._interval is None else self._interval.seconds
        assert not isinstance(every, str)
        return every is not None and time.monotonic() - self._saved_at >= every

    def _has_news(self) -> bool:
        return self._manager is not None and self._manager.has_news

    def _snapshot_is_due(self, step: int) -> bool:
        manager, every = self._manager, self._session.settings.checkpoint.snapshot_every
        return manager is not None and manager.snapshots is not None and every is not None and not step % every

    def _keep(self, manager: CheckpointManager, *, saves: bool, snapshots: bool) -> None:
        """A checkpoint of this step, a snapshot of it or both, kept while training goes on, unless there is one."""
        s, step = self._session, self._session.counters.step
        saves, snapshots = saves and self._saved_step != step, snapshots and self._snapshot_step != step
        if not (saves or snapshots):
            return
        if saves:
            self._check_lease()
        with self.reporter.pausing("checkpoint"):
            started = time.monotonic()
            content = self._content()
            if snapshots:
                self._snapshot_step = step
                if s.recorder is not None and not saves:  # a save brings these to storage
                    content["about"]["unwritten"] = s.recorder.unwritten()
            is_under_way, committed = manager.begin(step, **content, saves=saves, snapshots=snapshots)
            if saves:
                self._saved_at = started
                if is_under_way:
                    self._saved_step = step
                    if self._interval is not None:
                        self._interval.stalled = time.monotonic() - started
                self._tell(committed)
                if s.recorder is not None:
                    s.recorder.flush()

    def _save_now(self) -> None:
        """A committed checkpoint of this step."""
        s, step = self._session, self._session.counters.step
        if self._manager is None:
            return
        self._check_lease()
        with self.reporter.pausing("checkpoint"):
            if self._manager.is_busy:
                failed = self._manager.num_failed
                self._tell(self._manager.wait())
                if self._manager.num_failed > failed:
                    self._saved_step = -1  # it may have been this step's
            if self._saved_step != step:
                info = self._manager.save(step, **self._content())
                self._saved_step = step
                self._tell([info])
            if s.recorder is not None:  # the process may soon end, or the next start would write the same once more
                s.recorder.flush(wait=0.0 if self.stopped is None else FLUSH_SECONDS)

    def _hand_over(self) -> None:
        """Nodes come or go: what the next generation goes on from is a snapshot of this step that outlives any one node.

        Where there is none, it is a checkpoint.
        """
        manager, step = self._manager, self._session.counters.step
        if manager is not None and manager.snapshots is not None:
            with self.reporter.pausing("checkpoint"):
                if self._session.recorder is not None:
                    self._session.recorder.flush(wait=FLUSH_SECONDS)  # or the next start would write the same once more
                # One under way would keep this one from being copied; ranks tell how theirs are as this one is taken.
                manager.snapshots.settle(seconds=HAND_OVER_SECONDS)
            self._keep(manager, saves=False, snapshots=True)
            with self.reporter.pausing("checkpoint"):
                if self._snapshot_step == step and manager.is_safe(seconds=HAND_OVER_SECONDS):
                    return
        self._save_now()

    def rescue(self, error: Exception) -> None:
        """``error`` has ended training: save the last finished step, if that is asked for and can be. Never raises."""
        if self._manager is None or not self._session.settings.checkpoint.on_exception:
            return
        with self.reporter.pausing("checkpoint"):
            saved = rescue(self._session, self._manager, error, saved_step=self._saved_step, content=self._content)
        try:
            self._tell(saved)
        except Exception as another:  # the first error is the one that counts
            error.add_note(f"then, as a save was told, {type(another).__name__}: {another}")

    def _end(self) -> None:
        """Training is over: save if asked to, and wait for what is under way in any case."""
        if self._session.settings.checkpoint.at_end:
            self._save_now()
        elif self._manager is not None:
            with self.reporter.pausing("checkpoint"):
                self._tell(self._manager.wait())

    def _content(self) -> dict[str, Any]:
        s = self._session
        s.counters.seconds = self._trained_before + time.monotonic() - self._started
        state, local_values = collect(s)
        metrics = {name: value for name, value in self.reporter.latest.items() if math.isfinite(value)}
        about: dict[str, Any] = {
            "mesh": str(s.mesh.shape),
            "epoch": s.counters.epoch,
            "samples": s.counters.samples,
            "metrics": metrics,
        }
        if self._description is not None:
            about["transformers"] = self._description
        return {"state": state, "local_values": local_values, "about": about}

    def _tell(self, committed: list[SaveInfo]) -> None:
        for info in committed:
            self.last_saved = info.path
            self.reporter.saved(info)
            interval = self._interval
            if interval is not None and interval.has_changed(info.seconds) and self._session.ranks.is_main:
                print_line(f"elastictrain: {interval}", console=make_console())
            for callback in self._session.callbacks:
                callback.on_save(info)
