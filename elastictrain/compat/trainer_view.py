"""The trainer as a LightningModule sees it: ``module.trainer``, with Lightning's public names.

:class:`TrainerView` is what modules get. It answers the documented attributes and refuses the rest with the remedy,
rather than with a ``None`` that is wrong. Lightning's own callbacks get a little more:
:mod:`elastictrain.compat.callback_view`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor

from elastictrain.compat.lightning import LightningModule
from elastictrain.compat.strategy_view import Precision, Strategy, UnsupportedAttribute


class TrainerView:
    """See the module's docstring.

    Args:
        session: what is shown.
        backward, step, clip: the loop's, for manual optimisation.
    """

    barebones = sanity_checking = fast_dev_run = received_sigterm = interrupted = False
    overfit_batches = 0.0
    limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = 1.0
    num_sanity_val_steps = 0
    reload_dataloaders_every_n_epochs = 0
    num_nodes = 1
    min_epochs = 0
    min_steps: int | None = None
    max_time = None
    enable_validation = True
    checkpoint_callback = None
    ckpt_path = None
    num_sanity_val_batches: tuple[int, ...] = ()

    def __init__(
        self, session: Any, *, backward: Callable[..., None], step: Callable[..., Any], clip: Callable[..., None]
    ) -> None:
        self._session = session
        self.strategy = Strategy(self, backward, step)
        self.precision_plugin = Precision(clip)
        self.checkpoint_callbacks: list[Any] = []
        self.profiler = PassThroughProfiler()
        self._results = None  # Lightning's own self.log is never reached
        # For example_input_array: summaries and graphs run it through the batch hooks.
        self._data_connector = SimpleNamespace(_datahook_selector=_DataHookSelector(session.task, session.datamodule))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedAttribute(
            f"self.trainer.{name} is a part of Lightning's Trainer that this one does not have;"
            " the documented attributes (current_epoch, global_step, callback_metrics, world_size, …) are there"
        )

    # ---- where the run stands --------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        return int(self._session.counters.epoch + self._session.epoch_left)

    @property
    def global_step(self) -> int:
        return int(self._session.counters.global_step)

    @property
    def max_epochs(self) -> int:
        value = self._session.settings.max_epochs
        return -1 if value is None else int(value)

    @property
    def max_steps(self) -> int:
        value = self._session.settings.max_steps
        return -1 if value is None else int(value)

    @property
    def should_stop(self) -> bool:
        return bool(self._session.should_stop)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._session.should_stop = value

    @property
    def training(self) -> bool:
        return bool(self._session.stage == "train")

    @property
    def validating(self) -> bool:
        return bool(self._session.stage == "validate")

    @property
    def testing(self) -> bool:
        return bool(self._session.stage == "test")

    @property
    def predicting(self) -> bool:
        return bool(self._session.stage == "predict")

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing

    @property
    def state(self) -> TrainerState:
        fn = {"fit": "FITTING", "validate": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}
        stage = {"train": "TRAINING", "validate": "VALIDATING", "test": "TESTING", "predict": "PREDICTING"}
        return TrainerState(
            status=TrainerStatus.RUNNING,
            fn=TrainerFn[fn[self._session.purpose]],
            stage=RunningStage[stage[self._session.stage]],
        )

    @property
    def num_training_batches(self) -> int | float:
        slots = self._session.chosen.feed.slots_per_epoch if self._session.has_data else None
        return math.inf if slots is None else slots

    @property
    def is_last_batch(self) -> bool:
        return bool(self._session.is_last_step and self._session.batch_idx + 1 == self._session.next_batch)

    @property
    def train_dataloader(self) -> Any:
        return self._session.train_data

    @property
    def val_dataloaders(self) -> Any:
        return self._session.val_data

    test_dataloaders = predict_dataloaders = val_dataloaders

    @property
    def num_val_batches(self) -> list[int | float]:
        return [math.inf if v.num_batches is None else v.num_batches for v in self._session.val_loaders]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self.num_val_batches

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self.num_val_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run, for schedulers."""
        self._session.load_data()
        steps = self._session.chosen.feed.steps_per_epoch
        in_epochs = math.inf if steps is None or self.max_epochs == -1 else steps * self.max_epochs
        return min(in_epochs, math.inf if self.max_steps == -1 else self.max_steps)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        return 1 if self._session.settings.val_every is None else None

    @property
    def val_check_interval(self) -> int | float:
        every = self._session.settings.val_every
        return 1.0 if every is None else every * self.accumulate_grad_batches

    @property
    def accumulate_grad_batches(self) -> int:
        self._session.load_data()
        return int(self._session.accumulation)

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._session.set_accumulation(value)

    @property
    def gradient_clip_val(self) -> float | None:
        """What our callback clips at; user code that clips itself passes its own value."""
        value: float | None = self._session.plan.clipping[0]
        return value

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        algorithm = self._session.plan.clipping[1]
        return None if algorithm is None else GradClipAlgorithmType(algorithm)

    # ---- who is here -----------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return int(self._session.ranks.rank)

    @property
    def local_rank(self) -> int:
        return int(self._session.ranks.local_rank)

    @property
    def node_rank(self) -> int:
        return int(self._session.membership.node_rank)

    @property
    def world_size(self) -> int:
        return int(self._session.ranks.world_size)

    @property
    def num_devices(self) -> int:
        return int(self._session.membership.local_world_size)

    @property
    def device_ids(self) -> list[int]:
        index = self._session.device.index
        return list(range(self.num_devices)) if index is None else [index]

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    # ---- what belongs to it ----------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> LightningModule:
        module: LightningModule = self._session.task
        return module

    model = lightning_module

    @property
    def datamodule(self) -> Any:
        return self._session.datamodule

    @property
    def callbacks(self) -> list[Any]:
        return [*self._session.lightning_callbacks, *self._session.callbacks]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        return next((c for c in self._session.lightning_callbacks if isinstance(c, ProgressBar)), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [c for c in self._session.lightning_callbacks if isinstance(c, EarlyStopping)]

    @property
    def optimizers(self) -> list[Any]:
        return list(self._session.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        schedulers: list[Any] = self._session.schedulers
        return schedulers

    @property
    def loggers(self) -> list[Any]:
        return list(self._session.loggers)

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        logger = self.logger
        if logger is None:
            return self.default_root_dir
        folder: str | None = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir
        return folder

    @property
    def default_root_dir(self) -> str:
        run_dir = self._session.run_dir
        return os.getcwd() if run_dir is None else str(run_dir.url)

    @property
    def log_every_n_steps(self) -> int:
        return int(self._session.settings.log_every)

    @property
    def precision(self) -> str:
        names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed"}
        return names[self._session.plan.precision.compute]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    # ---- metrics ---------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        self._update()
        metrics: dict[str, Tensor] = self._session.callback_metrics
        return metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        self._update()
        metrics: dict[str, Tensor] = self._session.logged_metrics
        return metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        self._update()
        return {name: float(value) for name, value in self._session.bar_metrics.items()}

    def _update(self) -> None:
        """Within a batch the latest step values count, outside of batches those of the epoch so far.

        On several ranks epoch values are merged at the end of the epoch alone, where all ranks meet.
        """
        s = self._session
        if s.in_batch:
            s.publish(s.logbook.steps(s.dataloader_idx))
        elif s.ranks.world_size == 1:
            s.publish(s.logbook.averages(s.task, s.ranks.gather, world_size=1, dataloader_idx=s.dataloader_idx))

    # ---- refused ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedAttribute(
            "self.trainer.save_checkpoint(): the trainer saves by CheckpointConfig (--checkpoint-every), on all ranks at"
            " one step"
        )
