"""Builds one generation around a user's module, in Lightning's order of hooks, and takes it down again.

    ranks → set up data and module → configure_model → lay out → optimizers → restore → data → run.json

Nothing is written to the run directory before all of that has worked.

On failure: :meth:`Builder.fail` tells callbacks and loggers; :meth:`Builder.close` gives back processes, threads and the
process group on every path.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from elastictrain import given
from elastictrain.announcing import Announcer
from elastictrain.checkpoint import CheckpointReader, resolve
from elastictrain.compat.lightning import (
    LightningDataModule,
    LightningModule,
    attach_log,
    configure_optimizers,
    count_steps,
    is_overridden,
    wrap_optimizer,
)
from elastictrain.compat.supported import check_dataloader_idx, check_optimizers
from elastictrain.compat.torch import empty_optimizers
from elastictrain.compat.torchmetrics import share_metrics
from elastictrain.counting import FlopsPerSample
from elastictrain.data.choose import Sizes, choose_feed
from elastictrain.data.evaluation import EvalLoader
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.keeping import Restored
from elastictrain.loggers import Loggers
from elastictrain.loop import StepRunner
from elastictrain.opening import attach
from elastictrain.parallel.build import Built, configure, lay_out
from elastictrain.parallel.context import check_context
from elastictrain.parallel.mesh import leave
from elastictrain.piping import check_piped
from elastictrain.planning import describe
from elastictrain.reporting import start_loggers
from elastictrain.resuming import Resumption
from elastictrain.rundir import without_user
from elastictrain.session import Session
from elastictrain.task import Task

_BUILT = "_elastictrain_built"  # on a task: how an earlier call has laid it out


class Builder:
    """Makes a session ready, and ends it.

    Attributes:
        runner: runs its steps.
        resumption: what it goes on from.
        announcer: tells of its start and end.
        notes: for the start-up summary.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.runner = StepRunner(session)
        self.resumption = Resumption(session)
        self.announcer = Announcer(session, self.resumption)
        self.notes = self.resumption.notes
        self._has_failed = False
        self._loggers = Loggers(session.loggers, run_dir=session.run_dir, must_work=session.membership.generation == 0)

    # ---- build -----------------------------------------------------------------------------------------------------

    def build_for_fit(self, train_data: Any, val_data: Any) -> None:
        """Everything that training needs.

        Raises:
            UsageError: something cannot work.
            CheckpointError: the checkpoint does not fit.
        """
        s = self._session
        self.resumption.look()
        self._loggers.prepare(self.resumption.ask_main)
        attach(s, self.runner)
        self._set_up_module(train_data, weights=self.resumption.source is None)
        s.times.settle()
        restored = self.resumption.restore_model()
        if restored is not None:
            s.times.spend("restore")
        s.load_data = lambda: self._choose_data(train_data)
        self._make_optimizers()
        clips = s.plan.clipping[0] is not None
        check_optimizers(s.optimizers, s.task, clips=clips, world_size=s.ranks.world_size)
        s.wrapped_optimizers = [wrap_optimizer(optimizer, s.view.strategy) for optimizer in s.optimizers]
        if not s.task.automatic_optimization:
            for optimizer in s.wrapped_optimizers:
                count_steps(optimizer, self._count_step)
        if s.plan.precision.scale_loss:
            s.scaler = torch.amp.GradScaler(s.device.type)
            s.scaler.scale(torch.zeros((), device=s.device))  # or it begins with the first loss: idle ranks have none
        s.hooks("on_fit_start")
        self._choose_data(train_data)
        s.stage = "validate"
        loaders = given.evaluation_loaders(s, val_data, stage="val", batch_size=s.chosen.plan.micro_batch_size)
        s.val_loaders = self._deal(loaders, "validation")
        s.stage = "train"
        if restored is not None:
            s.times.settle()
            self.resumption.restore_rest(restored)
            s.times.spend("restore")
            s.source = without_user(self.resumption.source or "")
        mesh = s.mesh
        s.chosen.feed.start(dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
        self.runner.bind()
        self._loggers.connect(self.resumption.ask_main, step=None if self.resumption.is_new else s.counters.step)
        self.resumption.write()
        if s.ranks.is_main:
            self._loggers.keep()

    def build_for_evaluation(self, data: Any, checkpoint: str | None) -> list[EvalLoader]:
        """A model with weights, and loaders, for "validate", "test" or "predict".

        Raises:
            UsageError: there is nothing to evaluate, or no weights.
        """
        s = self._session
        url = None if checkpoint is None else self.resumption.ask_main(lambda: resolve(checkpoint))
        self._loggers.prepare(self.resumption.ask_main)
        attach(s, self.runner)
        self._set_up_module(None, weights=url is None)
        if url is not None:
            Restored(s, lambda: CheckpointReader(url)).load_model()
        stage = {"validate": "val"}.get(s.purpose, s.purpose)
        micro = s.plan.micro_batch_size or getattr(s.task, "batch_size", None) or 32
        loaders = given.evaluation_loaders(s, data, stage=stage, batch_size=micro)
        if not loaders:
            raise UsageError(
                f"{type(s.task).__name__} has nothing to {s.purpose}: define {stage}_dataset() or {stage}_dataloader()"
            )
        self.runner.bind()
        s.val_loaders = self._deal(loaders, {"validate": "validation"}.get(s.purpose, s.purpose))
        self._loggers.connect(self.resumption.ask_main, step=None)
        start_loggers(s)
        return s.val_loaders

    def _set_up_module(self, train_data: Any, *, weights: bool) -> None:
        """Data and module set up, the model built and laid out over the mesh."""
        s = self._session
        for owner, base in ((s.datamodule, LightningDataModule), (s.task, LightningModule)):
            if owner is not None and is_overridden("prepare_data", owner, base):
                if s.ranks.local_rank == 0 and (owner.prepare_data_per_node or s.ranks.is_main):
                    s.hooks.within("prepare_data", owner.prepare_data)
                s.ranks.barrier()
        if s.datamodule is not None:
            s.datamodule.setup(stage=s.purpose)
        s.hooks.everyone("setup", stage=s.purpose)
        if isinstance(earlier := s.task.__dict__.get(_BUILT), Built) and earlier.mesh.ranks is s.ranks:
            s.built = earlier  # laid out by an earlier call in this process, over the same ranks
            s.built.reshape(s.task, s.plan)
            self._check_layout()
            return
        recipe = None
        if is_overridden("configure_model", s.task, LightningModule) and _BUILT not in s.task.__dict__:
            build = lambda: s.hooks.within("configure_model", s.task.configure_model)  # noqa: E731
            recipe, notes = configure(s.task, build, defer=isinstance(s.task, Task), seed=s.settings.seed)
            self.notes += notes
        if s.purpose == "fit":
            s.flops_per_sample = FlopsPerSample(s)
        s.built = lay_out(
            s.task,
            recipe,
            ranks=s.ranks,
            mesh=s.settings.mesh,
            local_world_size=s.membership.local_world_size,
            plan=s.plan,
            weights=weights,
            measure=lambda: describe(
                s.task,
                s.plan,
                source=lambda: given.training_source(s, train_data),
                global_batch_size=s.settings.global_batch_size,
                num_ranks=s.ranks.world_size,
                callbacks=s.lightning_callbacks,
            ),
        )
        s.ranks.barrier()  # groups are made through rank 0's store: it must not be refused, and leave, before all have them
        self._check_layout()
        self.notes += s.built.notes
        if s.mesh.has_peers:
            share_metrics(s.task, s.mesh.data_group)
        s.task.__dict__[_BUILT] = s.built if s.built.is_cut else None

    def _check_layout(self) -> None:
        """Again, where the planner or an earlier call has chosen it."""
        s = self._session
        if s.built.pipeline is not None and s.purpose == "fit":
            check_piped(s)
        if s.built.context is not None:
            check_context(s.task, s.plan, cp=s.mesh.shape.cp, purpose=s.purpose)

    def _make_optimizers(self) -> None:
        s = self._session
        ask = partial(s.hooks.within, "configure_optimizers", s.task.configure_optimizers)
        if s.built.pipeline is None:
            s.optimizers, s.schedulers = configure_optimizers(s.task, ask)
            return
        with empty_optimizers():  # a stage may be frozen as a whole
            s.optimizers, s.schedulers = configure_optimizers(s.task, ask)
        trained = sum(len(group["params"]) for optimizer in s.optimizers for group in optimizer.param_groups)
        if not s.ranks.sum([trained])[0]:
            raise UsageError(
                f"{type(s.task).__name__}.configure_optimizers() gives the optimizer no parameter, on any stage: give"
                " it those that shall be trained"
            )

    def _count_step(self) -> None:
        self._session.counters.global_step += 1

    # ---- data ------------------------------------------------------------------------------------------------------

    def _choose_data(self, train_data: Any) -> None:
        """The training data: when it is needed, or when configure_optimizers asks how long training will be."""
        s, settings = self._session, self._session.settings
        if s.has_data:
            return
        source = s.train_data = given.training_source(s, train_data)
        asked = settings.global_batch_size
        if asked is None and isinstance(s.task, Task):
            asked = s.task.batch_size
        then = self.resumption.recorded or {}
        sizes = Sizes(asked or then.get("global_batch_size"), s.plan.micro_batch_size or then.get("micro_batch_size"))
        manual = not s.task.automatic_optimization
        dp_size = s.mesh.dp_size
        s.chosen = choose_feed(
            source, sizes, seed=settings.seed, dp_size=dp_size, options=given.loader_options(s.task), manual=manual
        )
        feed, plan = s.chosen.feed, s.chosen.plan
        if s.built.pipeline is not None:
            s.built.pipeline.check(plan, num_slots=s.chosen.accumulation)
        if manual and dp_size > 1 and 0 < (rest := feed.state().get("data.size", 0) % plan.global_batch_size) < dp_size:
            raise UnsupportedError(
                f"the last global batch of an epoch would have {rest} samples for {dp_size} ranks: with manual optimisation"
                " every rank needs a share; use drop_last=True in the DataLoader, or another --global-batch-size"
            )

    def _deal(self, loaders: list[Any], stage: str) -> list[EvalLoader]:
        check_dataloader_idx(self._session.task, stage, num_loaders=len(loaders))
        mesh, seed = self._session.mesh, self._session.settings.seed
        return [EvalLoader(loader, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, seed=seed) for loader in loaders]

    # ---- the end --------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """``error`` ended the session; it is raised after this."""
        self._has_failed = True
        self.announcer.fail(error)

    def close(self) -> None:
        """Give back what the session holds, on every path."""
        s = self._session
        if s.recorder is not None:
            s.recorder.close()
        if s.publisher is not None:
            s.publisher.close()
        if s.earlier is not None:
            s.earlier.close()
        if s.ledger is not None:
            s.account_for_now()
            s.ledger.close()
        if self.resumption.manager is not None:
            self.resumption.manager.close()
        if s.lease is not None:
            s.lease.release()
        attach_log(s.task, None)
        if (chosen := getattr(s, "chosen", None)) is not None:
            chosen.feed.close()
        if (built := getattr(s, "built", None)) is not None:
            built.close()
        s.membership.close()
        if self._has_failed:
            leave(s.ranks)
