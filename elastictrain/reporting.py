"""Logged values on their way out: to the run directory, to the user's loggers, to callbacks and the progress bar.

On log steps ranks meet once, for the loss over the global batch and for what they must decide together. Between log steps
nothing leaves the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from elastictrain.accounting import Account
from elastictrain.callback import Callback, SaveInfo, StepInfo, Timings
from elastictrain.compat.lightning import logged_hparams
from elastictrain.compat.self_log import samples_in_batch
from elastictrain.data.slots import Work
from elastictrain.elastic.membership import StopReason
from elastictrain.metrics.series import ABOUT_THE_RUN
from elastictrain.metrics.throughput import count_tokens
from elastictrain.session import Session

LOSS = "train/loss"

# Lightning's hooks that run within what is timed as computing, or as the optimizer; and those that are it.
_IN_COMPUTE = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "on_after_backward")
_IN_OPTIMIZER = ("on_before_optimizer_step", "configure_gradient_clipping")
_NO_HOOKS = ("backward", "optimizer_step")


class Agreed(NamedTuple):
    """What all ranks decided on a log step."""

    save: bool
    settle: bool  # some rank knows how a save went
    stop: StopReason | None
    is_lost: bool  # another job has taken the run directory


class _Sums(NamedTuple):
    """What has been spent by a moment."""

    now: float
    step: int
    samples: int
    tokens: int
    seconds: tuple[float, ...]
    hooks: dict[str, float]


NOTHING = Agreed(save=False, settle=False, stop=None, is_lost=False)


def start_loggers(session: Session) -> None:
    """Hyperparameters and the graph to the user's loggers, as Lightning does before anything runs. Only on rank 0."""
    s = session
    if s.ranks.rank != 0:
        return
    hparams = logged_hparams(s.task, s.datamodule)
    for logger in s.loggers:
        if hparams is not None:
            logger.log_hyperparams(hparams)
        logger.log_graph(s.task)
        logger.save()


def log_to_loggers(session: Session, metrics: Mapping[str, Any], *, step: int | None = None, offset: int = 0) -> None:
    """Values to the user's loggers, with Lightning's step and epoch columns. Only on rank 0.

    Args:
        step: where the values belong; None: the running step plus ``offset``, or a metric called ``step``.
    """
    if not session.loggers or not metrics or session.ranks.rank != 0:
        return
    values = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
    if step is None:
        logged_step = values.pop("step", None)
        if logged_step is None:
            values.setdefault("epoch", session.counters.epoch)
        step = session.counters.step + offset if logged_step is None else int(logged_step)
    for logger in session.loggers:
        logger.log_metrics(metrics=values, step=step)
        logger.save()


class _Bar(Mapping[str, Tensor]):
    """The latest ``prog_bar`` values, looked up when somebody looks."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _now(self) -> dict[str, Tensor]:
        return {**self._session.bar_metrics, **self._session.logbook.steps().bar}

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class Reporter:
    """Reports training steps.

    Args:
        save_is_due: has enough time passed for a checkpoint? Asked on rank 0, on log steps.
        has_news: does this rank know how a save went? Asked on log steps.
    """

    def __init__(self, session: Session, save_is_due: Callable[[], bool], has_news: Callable[[], bool]) -> None:
        self.save_is_due, self.has_news = save_is_due, has_news
        self._session = session
        self._watchers = [c.on_step_end for c in session.callbacks if type(c).on_step_end is not Callback.on_step_end]
        self._sources = [c.on_log for c in session.callbacks if type(c).on_log is not Callback.on_log]
        self.told: int | None = None  # the step that all callbacks have seen, and one has raised in
        self._bar = _Bar(session)
        self._log_every = session.settings.log_every
        self._units: tuple[int, float] | None = None  # samples in what the data counts, tokens in a sample
        self._epoch_steps: int | None = None
        self._epoch_is_known = False
        self._watching = self._logging = self._waiting = self._paused = 0.0  # seconds
        self.latest: dict[str, float] = {}  # the last value of everything logged
        self._about_the_run: set[str] = set()  # names in it that neither the task nor its loops logged
        self.pending: dict[str, float] = {}  # what the next log step logs, too
        self._account = Account(session)
        self._ended, self._paused_then = time.perf_counter(), 0.0
        self._before = self._sums(self._ended, is_done=False)

    def start(self) -> None:
        """The next step begins; what was before does not belong to any."""
        s = self._session
        s.times.settle()
        s.times.doing = "productive" if s.plan.compilation is None else "compile"
        self._ended, self._paused_then = time.perf_counter(), self._paused  # the last step
        self._before = self._sums(self._ended, is_done=False)  # at the last log step

    # ---- a step ----------------------------------------------------------------------------------------------------

    def count(self, work: Work) -> None:
        """Add a finished global batch to the run's samples and tokens."""
        if self._units is None:
            self._units = self._measure()
        c, (samples, tokens) = self._session.counters, self._units
        used = (work.num_samples or 0) * samples
        c.samples += used
        if tokens:
            c.tokens += round(used * tokens)

    def _measure(self) -> tuple[int, float]:
        """Samples in what the data counts, and tokens in a sample: by the task, else judged by the first batch."""
        s = self._session
        tokens = getattr(s.task, "tokens_per_sample", lambda: None)()
        if tokens is None and s.batch is not None:
            tokens = count_tokens(s.batch) * s.mesh.shape.cp / self._in_batch()
        return self._in_batch() if s.chosen.counts_batches else 1, float(tokens or 0.0)

    def _in_batch(self) -> int:
        try:
            return max(1, samples_in_batch(self._session))
        except Exception:  # a batch of the user's own making: nothing but the count of samples depends on it
            return 1

    def step(self, work: Work) -> Agreed:
        """One step is done and counted, but for ``counters.step`` itself."""
        s = self._session
        c = s.counters
        number = c.step + 1
        values: dict[str, float] | None = None
        agreed = NOTHING
        if self._account.is_new:
            self.pending |= self._account.first_step(time.perf_counter() - self._ended)
        if number % self._log_every == 0 or s.should_stop:
            values, agreed = self._log_step(number, work)
        if self._watchers:
            if work.step_in_epoch == 0 or not self._epoch_is_known:
                self._epoch_steps, self._epoch_is_known = s.chosen.feed.steps_per_epoch, True
            started = time.perf_counter()
            seconds = started - self._ended - (self._paused - self._paused_then)
            self._ended, self._paused_then = started, self._paused
            info = self._info(number, values, seconds)
            try:
                self._tell(info)
            finally:
                self._account.tell()
            self._watching += time.perf_counter() - started
        else:
            self._account.tell()
        return agreed

    def _tell(self, info: StepInfo) -> None:
        """Every callback sees the step, also where one of them raises."""
        failed: Exception | None = None
        for watch in self._watchers:
            try:
                watch(info)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            self.told = info.step
            raise failed

    def _info(
        self, number: int, values: Mapping[str, float] | None, seconds: float, timings: Timings | None = None
    ) -> StepInfo:
        s, c = self._session, self._session.counters
        so_far = number, c.samples, c.tokens, c.epoch
        return StepInfo(*so_far, s.loss, values, self._bar, self._epoch_steps, s.grad_norm, seconds, timings)

    def _of_callbacks(self, number: int) -> dict[str, float | Tensor]:
        """What callbacks have to log."""
        if not self._sources:
            return {}
        started = time.perf_counter()
        timings = self._close_window(started)
        info = self._info(number, None, started - self._ended - (self._paused - self._paused_then), timings)
        values = {name: value for source in self._sources for name, value in source(info).items()}
        self._watching += time.perf_counter() - started
        return values

    def _log_step(self, number: int, work: Work) -> tuple[dict[str, float], Agreed]:
        s = self._session
        loss, mesh = s.loss, s.mesh
        started = time.perf_counter()
        share = loss.item() if loss is not None and mesh.counts else 0.0
        waited = time.perf_counter() - started
        self._waiting += waited
        if s.chosen.by_microbatch and s.task.automatic_optimization:
            share *= s.accumulation / work.num_slots  # Lightning divides a short last window by the full one's size
        requested = s.membership.requested
        account = self._account.told()
        sums = s.ranks.sum(
            [
                *account,
                share,
                float(loss is not None),
                float(s.logbook.has_synced_steps),
                float(s.ranks.is_main and self.save_is_due()),
                float(requested is not None and not s.membership.agrees),
                float(requested == StopReason.PREEMPT),
                float(self.has_news()),
                float(s.lease is not None and s.lease.lost is not None),
            ]
        )
        of_nodes, sums = sums[: len(account)], sums[len(account) :]
        values: dict[str, float] = {}
        self._logging += time.perf_counter() - started - waited
        of_callbacks = self._of_callbacks(number)
        started = time.perf_counter()
        # What callbacks log under these names is not of the model: it is in the run directory, and not given to the user's
        # loggers, which get what they get from Lightning. Whatever a task logs itself, they get.
        about = {name for name in of_callbacks if name.startswith(ABOUT_THE_RUN)}
        if s.ranks.rank == mesh.first_rank:
            logged = s.logbook.steps().log
            about -= logged.keys()
            both = {**of_callbacks, **logged}
            values = {name: value.item() if isinstance(value, Tensor) else value for name, value in both.items()}
        if mesh.first_rank != 0:  # a pipeline ends elsewhere
            values, about = mesh.from_first((values, about))
        log_to_loggers(s, {name: value for name, value in values.items() if name not in about})
        if sums[2] and s.ranks.world_size > 1:
            values.update(s.logbook.synced_steps(mesh.gather))
        if sums[1]:
            values.setdefault(LOSS, sums[0])
        spent = self._account.heard(of_nodes)
        if s.ranks.is_main:
            spent, self.pending = {**spent, **self.pending}, {}
            about |= spent.keys()
            values |= spent
        self.latest.update(values)
        self._about_the_run |= about
        if s.ledger is not None and s.accounts:
            s.ledger.account(s.times, step=number, samples=s.counters.samples, tokens=s.counters.tokens)
        if s.recorder is not None:
            s.recorder.log(number, s.counters.samples, values, epoch=s.counters.epoch)
        if s.publisher is not None:
            s.publisher.put(number, run=values if s.ranks.is_main else {}, own=of_callbacks)
        self._logging += time.perf_counter() - started
        stop = None if not sums[4] else StopReason.PREEMPT if sums[5] else StopReason.INTERRUPT
        return values, Agreed(bool(sums[3]), bool(sums[6]), stop, bool(sums[7]))

    # ---- time ------------------------------------------------------------------------------------------------------

    def _close_window(self, now: float) -> Timings:
        """Where the time since the last log step went."""
        c, sums = self._session.counters, self._sums(now)
        before, self._before = self._before, sums
        spent = [new - old for new, old in zip(sums.seconds, before.seconds, strict=True)]
        hooks = {name: s - before.hooks.get(name, 0.0) for name, s in sums.hooks.items()}
        hooks = {name: s for name, s in hooks.items() if s and name not in _NO_HOOKS}
        data, compute, optimizer, communication, callbacks, logging, device, paused = spent
        return Timings(
            num_steps=c.step + 1 - before.step,
            samples=c.samples - before.samples,
            tokens=c.tokens - before.tokens,
            total=now - before.now - paused,
            data=data,
            forward_backward=max(0.0, compute - communication - sum(hooks.get(name, 0.0) for name in _IN_COMPUTE)),
            optimizer=max(0.0, optimizer - sum(hooks.get(name, 0.0) for name in _IN_OPTIMIZER)),
            communication=communication,
            callbacks=callbacks,
            logging=logging,
            device=device,
            hooks=hooks,
            queued=self._session.chosen.feed.queued,
        )

    def _sums(self, now: float, *, is_done: bool = True) -> _Sums:
        """What has been spent since training began."""
        s, c = self._session, self._session.counters
        seconds = (*s.seconds, self._watching, self._logging, self._waiting, self._paused)
        return _Sums(now, c.step + is_done, c.samples, c.tokens, seconds, dict(s.hooks.seconds))

    @contextmanager
    def pausing(self, cause: str) -> Iterator[None]:
        """Around a validation or a save, between two steps: its time is not the steps', but has this cause."""
        self._account.settle()
        started, hooks, times = time.perf_counter(), self._session.hooks.seconds, self._session.times
        before, doing, times.doing = dict(hooks), times.doing, cause
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self._paused += spent
            times.spend(cause)
            times.doing = doing
            if cause == "checkpoint":
                self.pending["checkpoint/stall_seconds"] = spent
            hooks.clear()
            hooks.update(before)

    def saved(self, info: SaveInfo) -> None:
        """A checkpoint is committed."""
        ledger = self._session.ledger
        if ledger is None or not self._session.ranks.is_main:
            return
        self.pending |= {"checkpoint/seconds": info.seconds, "checkpoint/gib": info.num_bytes / 2**30}
        about = {"step": info.step, "path": info.path, "seconds": info.seconds, "num_bytes": info.num_bytes}
        ledger.note("checkpoint", time=time.time(), **about)

    def stop(self) -> None:
        """The last step is done."""
        self._account.settle()
        self._session.times.doing = "startup"

    # ---- epochs and validations ------------------------------------------------------------------------------------

    @property
    def of_the_model(self) -> dict[str, float]:
        """The last value of everything logged, but for what is about the run."""
        return {name: value for name, value in self.latest.items() if name not in self._about_the_run}

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Values of a whole epoch or validation, at ``step`` finished steps."""
        self.latest.update(values)
        s = self._session
        if s.recorder is not None and values:
            s.recorder.log(step, s.counters.samples, dict(values), epoch=s.counters.epoch)
