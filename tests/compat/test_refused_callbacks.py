"""Callbacks, and ways to use the trainer, that are refused, each with its whole message."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks import BasePredictionWriter as PredictionWriter
from lightning.pytorch.tuner import Tuner

from elastictrain import Callback, Trainer
from elastictrain.compat.supported import _OPTIONS
from elastictrain.errors import UsageError
from tests.compat.refusals import on_two_ranks, raised_by, refused, stepping
from tests.parity.data import loader
from tests.parity.modules import Simple

# ---- callbacks -----------------------------------------------------------------------------------------------------


class Writes(PredictionWriter):
    pass


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


_GROUPS = "parameter groups that come later do not survive a new layout; freeze with requires_grad instead"


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            lambda: LearningRateFinder(),
            "LearningRateFinder: the tuner runs trainings of its own inside a run; choose the learning rate beforehand",
        ),
        (
            lambda: BatchSizeFinder(),
            "BatchSizeFinder: the global batch size is the configuration; give micro_batch_size what fits",
        ),
        (
            lambda: ModelPruning("l1_unstructured"),
            "ModelPruning: masks on parameters do not survive a new layout; prune after training",
        ),
        (
            lambda: LearningRateMonitor(),
            "LearningRateMonitor of Lightning writes to a Lightning logger and there is none: give"
            " Trainer(loggers=[CSVLogger(…)]), or use elastictrain.callbacks.LearningRateMonitor",
        ),
        (
            lambda: DeviceStatsMonitor(),
            "DeviceStatsMonitor of Lightning writes to a Lightning logger and there is none: give"
            " Trainer(loggers=[CSVLogger(…)])",
        ),
        (lambda: BackboneFinetuning(), f"BackboneFinetuning: {_GROUPS}"),
        (lambda: Unfreezes(), f"Unfreezes: {_GROUPS}"),
        (lambda: Writes(), "Writes: ranks share out whole batches; write what trainer.predict returns"),
        (
            lambda: OnExceptionCheckpoint("folder"),
            "OnExceptionCheckpoint: checkpoints are the trainer's; use checkpoint=CheckpointConfig(…), whatever ends a run",
        ),
    ],
)
def test_callbacks(callback: Any, message: str, tmp_path: Path) -> None:
    assert refused(Simple(), tmp_path, trainer={"callbacks": [callback()]}) == f"callback {message}"


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, "keep_last=1"),
        ({"every_n_train_steps": 100, "save_top_k": 3}, "every_steps=100, keep_last=3"),
        ({"every_n_train_steps": 5, "save_top_k": -1}, "every_steps=5, keep_last=None"),
    ],
)
def test_model_checkpoint_has_a_translation(options: dict[str, Any], config: str, tmp_path: Path) -> None:
    options = {"monitor": "step" if options.get("save_top_k", 1) > 1 else None, **options}
    message = refused(Simple(), tmp_path, trainer={"callbacks": [ModelCheckpoint(**options)]})
    prefix = "callback ModelCheckpoint: checkpoints are the trainer's; use checkpoint=CheckpointConfig"
    if options["monitor"] is None:
        assert message == f"{prefix}({config})"
    else:
        assert message == f"{prefix}(every_steps=100), which keeps the newest ones, not the best by 'step'"


def test_model_checkpoint_by_time(tmp_path: Path) -> None:
    from datetime import timedelta

    callback = ModelCheckpoint(train_time_interval=timedelta(minutes=10), monitor="val_loss", dirpath=tmp_path)

    class Brings(Simple):
        def configure_callbacks(self) -> Any:
            return callback

    assert refused(Brings(), tmp_path) == (
        "callback ModelCheckpoint: checkpoints are the trainer's; use checkpoint=CheckpointConfig(every_seconds=600), which"
        " keeps the newest ones, not the best by 'val_loss'"
    )


def test_callbacks_on_several_ranks() -> None:
    swa = on_two_ranks(Simple, callbacks=[StochasticWeightAveraging(0.1)])
    assert swa == (
        "callback StochasticWeightAveraging: its averages do not survive a new layout; use elastictrain.callbacks.EMA"
    )
    average = on_two_ranks(Simple, callbacks=[EMAWeightAveraging()], mesh="dp_shard=2")
    assert average == (
        "callback EMAWeightAveraging copies the whole model: use elastictrain.callbacks.EMA with dp_shard"
    )


def test_callbacks_that_cannot_be_told_apart(tmp_path: Path) -> None:
    twice = [EarlyStopping("loss"), EarlyStopping("loss")]
    key = twice[0].state_key
    assert refused(Simple(), tmp_path, trainer={"callbacks": twice}) == (
        f"two callbacks EarlyStopping with the same state_key {key!r}: their states could not be told apart; give one of"
        " them other options, or override state_key"
    )


def test_something_that_is_no_callback(tmp_path: Path) -> None:
    assert refused(Simple(), tmp_path, trainer={"callbacks": ["progress"]}) == (
        "callbacks: 'progress' is a str; give elastictrain.Callback or lightning.pytorch.Callback objects"
    )


def test_a_module_may_bring_our_callbacks(tmp_path: Path) -> None:
    class Counts(Callback):
        steps = 0

        def on_step_end(self, info: Any) -> None:
            self.steps += 1

    counts, replaced = Counts(), Counts()

    class Brings(Simple):
        def configure_callbacks(self) -> Any:
            return [counts]

    Trainer(max_epochs=1, callbacks=[replaced]).fit(Brings(), train_dataloaders=loader(8, 4)())
    assert (counts.steps, replaced.steps) == (2, 0)


# ---- the trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("devices", "start as many processes: elastictrain run --nproc-per-node N"),
        ("accumulate_grad_batches", "give global_batch_size: accumulation follows from it on any number of ranks"),
        ("precision", "give callbacks=[MixedPrecision('bf16')]"),
        ("strategy", 'give mesh, such as "auto" or "dp_shard=-1"'),
        (
            "reload_dataloaders_every_n_epochs",
            "a new loader has no position to resume from; vary the data inside the dataset by epoch",
        ),
    ],
)
def test_options_of_lightnings_trainer(option: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1, **{option: 1})  # type: ignore[arg-type]
    assert str(raised.value) == f"Trainer({option}=…) is an option of lightning.Trainer: {message}"


def test_every_option_with_a_counterpart_is_lightnings() -> None:
    known = inspect.signature(pl.Trainer.__init__).parameters
    assert _OPTIONS.keys() <= known.keys()
    ours = inspect.signature(Trainer.__init__).parameters
    assert not _OPTIONS.keys() & ours.keys()


def test_options_without_a_counterpart_and_unknown_ones() -> None:
    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1, profiler="simple")  # type: ignore[arg-type]
    assert str(raised.value) == (
        "Trainer(profiler=…) is an option of lightning.Trainer that this trainer does not have: leave it out"
    )
    with pytest.raises(TypeError) as unknown:
        Trainer(max_epochs=1, max_epoch=2)  # type: ignore[arg-type]
    assert str(unknown.value) == "Trainer.__init__() got an unexpected keyword argument 'max_epoch'"


def test_the_tuner() -> None:
    with pytest.raises(UsageError) as raised:
        Tuner(Trainer(max_epochs=1)).lr_find(Simple(), loader(8, 4)())  # type: ignore[arg-type]
    assert str(raised.value) == (
        "elastictrain.Trainer has no 'callbacks': what lightning.Trainer has beyond fit, validate, test and predict is"
        " self.trainer's within a run; Lightning's Tuner works with lightning.Trainer alone"
    )
    assert not hasattr(Trainer(max_epochs=1), "nothing_of_the_kind")


def _asking(name: str) -> Any:
    def ask(self: Any, batch: Any) -> Any:
        value = self.trainer
        for part in name.split("."):
            value = getattr(value, part)
        return value()

    return stepping(ask)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fit_loop.epoch_loop",
            "self.trainer.fit_loop is a part of Lightning's Trainer that this one does not have; the documented attributes"
            " (current_epoch, global_step, callback_metrics, world_size, …) are there",
        ),
        (
            "strategy.model_to_device",
            "self.trainer.strategy.model_to_device: there is no Lightning strategy here; the mesh lays out the model"
            " (--mesh)",
        ),
        (
            "save_checkpoint",
            "self.trainer.save_checkpoint(): the trainer saves by CheckpointConfig (--checkpoint-every), on all ranks at one"
            " step",
        ),
    ],
)
def test_reaching_into_the_trainer(name: str, message: str) -> None:
    assert raised_by(_asking(name)) == message


def test_an_error_is_not_hidden_by_those_who_are_told_of_it() -> None:
    class Worse(Callback):
        def on_exception(self, error: BaseException) -> None:
            raise ZeroDivisionError("again")

    with pytest.raises(KeyError, match="first") as raised:
        Trainer(max_epochs=1, callbacks=[Worse()]).fit(
            stepping(lambda self, batch: {}["first"]), train_dataloaders=loader(8, 4)()
        )
    assert raised.value.__notes__ == ["then, as that was told, ZeroDivisionError: again"]
