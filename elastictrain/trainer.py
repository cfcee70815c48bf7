"""``Trainer``: from a user's module to a finished run.

``fit`` builds one generation after another, in one order: meet the other ranks, set up the module and its data, lay the
model out, restore what the newest checkpoint has, then train. Every rank runs the same code; rank 0 alone writes
``run.json``, metrics and what a person sees.

On failure: input that cannot work is a :class:`~elastictrain.errors.UsageError` before anything is written. An exception
while training reaches callbacks' ``on_exception``, flushes what was logged, and is raised, unless it is a consequence of the
end of another worker, and this process goes on in the next generation (:mod:`elastictrain.lives`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Never, NoReturn

from lightning.pytorch.loggers import Logger
from torch import Tensor

from elastictrain.building import Builder
from elastictrain.compat.lightning import LightningModule
from elastictrain.compat.strategy_view import UnsupportedAttribute
from elastictrain.compat.supported import refuse_options
from elastictrain.config import CheckpointConfig, MeshConfig, Weights
from elastictrain.elastic.membership import Membership, StopReason, current
from elastictrain.errors import EXIT_CHANGED, UsageError, is_lost_peer
from elastictrain.evaluate import Evaluator
from elastictrain.fit import FitLoop
from elastictrain.lives import Lives, forget_frames
from elastictrain.loggers import given_loggers
from elastictrain.metrics.console import evaluation_results, make_console
from elastictrain.opening import open_session
from elastictrain.session import Counters, Session, Settings


class Trainer:
    """Trains a :class:`~elastictrain.Task` or any ``LightningModule``, on one process or on many that come and go.

    Args:
        run_dir: path or fsspec URL where everything about the run is kept; None keeps nothing.
        max_steps: optimizer steps after which training ends.
        max_epochs: epochs after which training ends. One of the two is needed.
        global_batch_size: samples per optimizer step over all ranks. The configuration: accumulation and per-rank batch
            are derived from it. None: the task's ``batch_size``, or a loader's batch for each rank of the first start.
        micro_batch_size: samples per slot, the part of a global batch that is computed at once. None: the loader's
            batch, else an eighth of the global batch, or one slot for each rank where there are more than eight.
        mesh: the parallel layout: ``"auto"``, ``"dp_shard=2"``, or a :class:`~elastictrain.MeshConfig`.
        callbacks: :class:`~elastictrain.Callback` objects, and Lightning's.
        checkpoint: when state goes to storage; needs a ``run_dir``.
        loggers: Lightning loggers, or text as ``--logger`` has it (``"wandb:project=lm"``); another start goes on with the
            same run of each (:mod:`elastictrain.loggers`). Metrics and TensorBoard files in the run directory are written
            anyway.
        seed: of order, dropout and initial weights.
        val_every: steps between two validations; None: at the end of every epoch.
        log_every: steps between two log steps.
        resume: ``"auto"`` goes on from the newest checkpoint of the run directory; ``"never"`` refuses a directory that
            has one; a path or URL of a checkpoint, or of another run directory, is where a new run begins, with all of its
            state; :class:`~elastictrain.Weights` takes the weights alone. Once the run directory has a checkpoint of its
            own, it goes on from that.

    Raises:
        UsageError: a value that cannot work, with the remedy.
    """

    def __init__(
        self,
        *,
        run_dir: str | None = None,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        mesh: MeshConfig | str = "auto",
        callbacks: Sequence[Any] = (),
        checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008 - frozen
        loggers: Sequence[Any] = (),
        seed: int = 0,
        val_every: int | None = None,
        log_every: int = 10,
        resume: str | Weights = "auto",
        **others: Never,
    ) -> None:
        refuse_options(others)
        for name, value, least in (
            ("max_steps", max_steps, 0),
            ("max_epochs", max_epochs, 0),
            ("global_batch_size", global_batch_size, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("val_every", val_every, 1),
            ("log_every", log_every, 1),
            ("seed", seed, 0),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"{name}={value!r} must be a whole number of at least {least}")
        _check_kinds(
            {
                "run_dir": run_dir,
                "resume": resume,
                "mesh": mesh,
                "checkpoint": checkpoint,
                "callbacks": callbacks,
                "loggers": loggers,
            }
        )
        if global_batch_size and micro_batch_size and global_batch_size < micro_batch_size:
            raise UsageError(
                f"global_batch_size={global_batch_size} is smaller than micro_batch_size={micro_batch_size}:"
                f" raise the first to {micro_batch_size}, or lower the second"
            )
        self._settings = Settings(
            run_dir=run_dir,
            max_steps=max_steps,
            max_epochs=max_epochs,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            mesh=MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh,
            checkpoint=checkpoint,
            seed=seed,
            val_every=val_every,
            log_every=log_every,
            resume=resume,
        )
        self._callbacks = list(callbacks)
        self._loggers = given_loggers(loggers)
        self._reached = Counters()  # by the last fit: where what a later validate or test logs belongs
        self.stopped: StopReason | None = None
        """Why the last ``fit`` ended before its limits: a Ctrl-C, a notice; None: it finished."""
        self.metrics: dict[str, float] = {}
        """The last value of everything that the last call logged, on rank 0."""
        self.callback_metrics: dict[str, Tensor] = {}
        """What the last call logged by ``self.log``, as ``lightning.Trainer`` has it."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedAttribute(
            f"elastictrain.Trainer has no {name!r}: what lightning.Trainer has beyond fit, validate, test and predict is"
            " self.trainer's within a run; Lightning's Tuner works with lightning.Trainer alone"
        )

    def fit(
        self,
        task: LightningModule,
        datamodule: Any = None,
        *,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
    ) -> None:
        """Train until ``max_steps`` or ``max_epochs``, from the newest checkpoint if there is one.

        On Ctrl-C or SIGTERM it finishes the step, saves (where there is a ``run_dir``) and returns; ``stopped`` then says
        why, and the same call goes on. Where nodes come or go under ``elastictrain run``, this goes on in the same process,
        or leaves by ``SystemExit``, and the process that takes its place calls it again.

        Args:
            task: a ``Task`` or ``LightningModule``.
            datamodule: a ``LightningDataModule``, where the data is not the task's.
            train_dataloaders: a ``DataLoader`` or iterable of batches instead; so ``val_dataloaders``, or a list of them.

        Raises:
            UsageError: something that cannot work; nothing has been written.
            CheckpointError: the checkpoint does not fit this run.
        """
        if self._settings.max_steps is None and self._settings.max_epochs is None:
            raise UsageError("how long to train is not known: give max_steps or max_epochs")
        membership = current()
        lives = Lives(membership, [task, datamodule, *self._callbacks], loaders=[train_dataloaders, val_dataloaders])
        try:
            while not self._train(lives, membership, task, datamodule, (train_dataloaders, val_dataloaders)):
                lives.begin_again()
        except Exception as error:
            lives.gave_up(error)
            raise
        finally:
            lives.close()
        if self.stopped is not None and self.stopped.goes_on:  # this process cannot, and is not to do anything else
            raise SystemExit(EXIT_CHANGED)

    def _train(
        self, lives: Lives, membership: Membership, task: LightningModule, datamodule: Any, data: tuple[Any, Any]
    ) -> bool:
        """One generation. False: it is over, and this process goes on in another one."""
        session: Session | None = None
        builder: Builder | None = None
        loop: FitLoop | None = None
        try:
            lives.enter()
            session = self._open(task, datamodule, purpose="fit", membership=membership)
            session.needs_state, session.counted_flops = lives.needs_state, lives.counted_flops
            lives.draw_alike(session.ranks.device)
            builder = Builder(session)
            builder.build_for_fit(*data)
            lives.check(session)
            evaluator = Evaluator(session, builder.runner)
            resumption = builder.resumption
            loop = FitLoop(session, builder.runner, evaluator, resumption.manager, is_stored=resumption.is_stored)
            builder.announcer.start([*builder.notes, *lives.notes])
            loop.run()
            self.stopped = loop.stopped
            if self.stopped is not None and self.stopped.goes_on and lives.goes_on_after_change():
                builder.announcer.suspend(loop)
                return False
            lives.leave()
            builder.announcer.finish(loop)
            return True
        except BaseException as error:
            if session is not None:
                session.times.broke_off(is_lost_peer=is_lost_peer(error))
            if loop is not None and isinstance(error, Exception):
                loop.rescue(error)
            if lives.goes_on(error):
                if builder is not None:
                    builder.announcer.suspend()
                forget_frames(error)
                return False
            if builder is not None:
                builder.fail(error)
            raise
        finally:
            self.metrics = dict(loop.reporter.latest) if loop is not None else {}
            if session is not None and builder is not None:
                self.callback_metrics = dict(session.callback_metrics)
                self._reached = session.reached()
                lives.counted_flops = session.counted_flops
                builder.close()

    def validate(
        self, task: LightningModule, datamodule: Any = None, *, dataloaders: Any = None, checkpoint: str | None = None
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data.

        Args:
            checkpoint: path or URL of a checkpoint to take the weights from; None: the task's own.

        Returns:
            per loader, what was logged, over all ranks.
        """
        return self._evaluate(task, datamodule, dataloaders, checkpoint, stage="validate")

    def test(
        self, task: LightningModule, datamodule: Any = None, *, dataloaders: Any = None, checkpoint: str | None = None
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data; see :meth:`validate`."""
        return self._evaluate(task, datamodule, dataloaders, checkpoint, stage="test")

    def predict(
        self, task: LightningModule, datamodule: Any = None, *, dataloaders: Any = None, checkpoint: str | None = None
    ) -> list[Any]:
        """Run ``predict_step`` over the prediction data.

        Returns:
            its outputs in the order of the batches, on every rank; a list of lists where there are several loaders.
        """
        session = self._open(task, datamodule, purpose="predict")
        builder = Builder(session)
        try:
            loaders = builder.build_for_evaluation(dataloaders, checkpoint)
            predictions = Evaluator(session, builder.runner).predict(loaders)
            builder.announcer.tear_down()
            return predictions
        except BaseException as error:
            builder.fail(error)
            raise
        finally:
            builder.close()

    def _evaluate(
        self, task: LightningModule, datamodule: Any, dataloaders: Any, checkpoint: str | None, *, stage: str
    ) -> list[dict[str, float]]:
        session = self._open(task, datamodule, purpose=stage)
        builder = Builder(session)
        try:
            loaders = builder.build_for_evaluation(dataloaders, checkpoint)
            results = Evaluator(session, builder.runner).run(stage, loaders)
            self.metrics = {name: value for result in results for name, value in result.items()}
            self.callback_metrics = dict(session.callback_metrics)
            if session.ranks.is_main:
                evaluation_results(stage, results, console=make_console())
            builder.announcer.tear_down()
            return results
        except BaseException as error:
            builder.fail(error)
            raise
        finally:
            builder.close()

    def _open(
        self, task: LightningModule, datamodule: Any, *, purpose: str, membership: Membership | None = None
    ) -> Session:
        settings = replace(self._settings, run_dir=self._settings.run_dir if purpose == "fit" else None)
        session = open_session(
            settings,
            task,
            datamodule,
            callbacks=self._callbacks,
            loggers=self._loggers,
            purpose=purpose,
            membership=membership or current(),
        )
        if purpose != "fit":
            session.counters = replace(self._reached)
        return session


def _check_kinds(options: Mapping[str, Any]) -> None:
    """Refuse options of the wrong kind, which would fail far from here."""
    kinds: dict[str, tuple[Any, str]] = {
        "run_dir": (str | os.PathLike | None, "a path or URL, or None"),
        "resume": (str | os.PathLike | Weights, '"auto", "never", a path or URL, or Weights(…)'),
        "mesh": (str | MeshConfig, '"auto", axes such as "dp_shard=2", or a MeshConfig'),
        "checkpoint": (CheckpointConfig, "a CheckpointConfig"),
        "callbacks": (Sequence, "a list of callbacks"),
        "loggers": (Sequence | Logger, "a list of Lightning loggers"),
    }
    for name, (kind, wanted) in kinds.items():
        if not isinstance(options[name], kind):
            raise UsageError(f"{name}={options[name]!r} must be {wanted}")
