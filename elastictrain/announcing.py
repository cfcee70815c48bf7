"""What a person, callbacks and loggers are told when a generation starts, ends or fails.

On failure: what is raised while a failure is told becomes a note on the error that is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from elastictrain.checkpoint.footprint import Footprint
from elastictrain.fit import FitLoop
from elastictrain.metrics.console import Final, Startup, final_summary, make_console, print_line, startup_summary
from elastictrain.parallel.planner import size as size_of
from elastictrain.parallel.topology import placement
from elastictrain.reporting import start_loggers
from elastictrain.resuming import Resumption
from elastictrain.session import Session

log = logging.getLogger(__name__)


class Announcer:
    """Tells what happens to one session."""

    def __init__(self, session: Session, resumption: Resumption) -> None:
        self._session, self._resumption = session, resumption
        self._started = time.monotonic()
        self._first_samples = self._first_tokens = 0

    def start(self, notes: Iterable[str]) -> None:
        """Say what is about to be trained; callbacks and loggers begin."""
        s = self._session
        self._first_samples, self._first_tokens = s.counters.samples, s.counters.tokens
        host_memory = None if s.run_dir is None else self._host_memory()
        if s.ranks.is_main:
            console = make_console()
            startup_summary(replace(self._startup(), host_memory=host_memory), console=console)
            for note in notes:
                print_line(f"  note: {note}", console=console)
        start_loggers(s)
        info = s.info()
        for callback in s.callbacks:
            callback.on_fit_start(info)
        for callback in s.callbacks:
            callback.on_generation_start(info)

    def _host_memory(self) -> str:
        """What checkpoints will take of each node's, in words."""
        s = self._session
        host = Footprint(self._resumption.num_bytes // s.membership.num_nodes, has_buddy=s.membership.num_nodes > 1)
        text = f"up to {size_of(host.saves)} on each node for saves"
        if s.settings.checkpoint.snapshot_every is not None:
            text += f", {size_of(host.snapshots)} for snapshots"
            text += f", {size_of(host.copies)} for copies of another node's" if host.has_buddy else ""
        return text

    def _startup(self) -> Startup:
        s = self._session
        plan = s.chosen.plan
        return Startup(
            target=s.membership.target or type(s.task).__name__,
            run_dir=None if s.run_dir is None else str(s.run_dir),
            mesh=s.mesh.shape,
            device=s.device.type,
            precision=s.plan.precision.compute,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            num_slots=plan.num_slots,
            num_parameters=s.built.num_parameters,
            num_trainable=s.built.num_trainable,
            placement=placement(
                s.mesh.shape, s.membership.local_world_size, s.ranks.zones.zones if s.ranks.zones else None
            ),
            num_nodes=s.membership.num_nodes,
            generation=s.membership.generation,
            max_steps=s.settings.max_steps,
            max_epochs=s.settings.max_epochs,
            resumed_step=self._resumption.step,
            resumed_from=self._resumption.source,
            callbacks=tuple(type(c).__name__ for c in [*s.callbacks, *s.lightning_callbacks]),
        )

    def finish(self, loop: FitLoop) -> None:
        """Training has ended, by its limits or by a stop."""
        s = self._session
        if s.recorder is not None:
            s.recorder.flush(wait=10.0)
        self._ended(loop)
        if s.ledger is not None and s.recorder is not None:
            s.account_for_now()
            s.ledger.flush(wait=10.0)
        if s.recorder is not None:
            s.recorder.close(draws=True)  # what TensorBoard shows of the run last has its end
        info = s.info()
        for callback in s.callbacks:
            callback.on_generation_end(info)
        if loop.stopped is None:
            s.hooks("on_fit_end")
        for callback in s.callbacks:
            callback.on_fit_end(info)
        self.tear_down()
        if s.ranks.is_main and not (loop.stopped is not None and loop.stopped.goes_on):
            final_summary(self._final(loop), console=make_console())

    def _ended(self, loop: FitLoop) -> None:
        s = self._session
        if s.ledger is not None and s.ranks.is_main:
            s.ledger.ended(step=s.counters.step, outcome="finished" if loop.stopped is None else loop.stopped.value)

    def _final(self, loop: FitLoop) -> Final:
        c = self._session.counters
        outcome = {None: "finished", "interrupt": "interrupted", "preempt": "preempted"}
        return Final(
            outcome=outcome[loop.stopped.value if loop.stopped is not None else None],
            step=c.step,
            samples=c.samples,
            seconds=time.monotonic() - self._started,
            samples_here=c.samples - self._first_samples,
            tokens=c.tokens,
            tokens_here=c.tokens - self._first_tokens,
            metrics=loop.reporter.of_the_model,
            checkpoint=loop.last_saved or self._resumption.stored,
            run_dir=None if self._session.run_dir is None else str(self._session.run_dir),
        )

    def tear_down(self) -> None:
        """The last hooks, and the loggers' end."""
        s = self._session
        if s.datamodule is not None:
            s.datamodule.teardown(stage=s.purpose)
        s.hooks.everyone("teardown", stage=s.purpose)
        for logger in s.loggers if s.ranks.is_main else ():
            logger.finalize("success")

    def suspend(self, loop: FitLoop | None = None) -> None:
        """The generation is over, and this process goes on in another one; in good order, if ``loop`` has handed over."""
        s = self._session
        if loop is not None:
            self._ended(loop)
        told: list[tuple[str, Callable[[], Any]]] = []
        if s.has_data and "built" in s.__dict__:
            info = s.info()
            told += [(f"{one.name}.on_generation_end", partial(one.on_generation_end, info)) for one in s.callbacks]
        if getattr(s, "hooks", None) is not None:  # setup has been called, and will be again
            if s.datamodule is not None:
                told.append(("the data module's teardown", partial(s.datamodule.teardown, stage=s.purpose)))
            told.append(("teardown", partial(s.hooks.everyone, "teardown", stage=s.purpose)))
        for what, tell in told:
            try:
                tell()
            except Exception as error:  # another process would not have been asked
                log.warning("%s: %s: %s", what, type(error).__name__, error)

    def fail(self, error: BaseException) -> None:
        """``error`` ended the session; it is raised after this."""
        s = self._session
        told: list[Callable[[], Any]] = [partial(callback.on_exception, error) for callback in s.callbacks]
        if getattr(s, "hooks", None) is not None:
            told.append(partial(s.hooks, "on_exception", error))
            if s.datamodule is not None:
                told.append(partial(s.datamodule.on_exception, error))
        told += [partial(logger.finalize, "failed") for logger in s.loggers if s.ranks.is_main]
        for tell in told:
            try:
                tell()
            except Exception as another:  # the first error is the one that counts
                error.add_note(f"then, as that was told, {type(another).__name__}: {another}")
