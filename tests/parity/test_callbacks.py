"""Lightning's stock callbacks under both trainers: what they log, when they stop, what they do to the weights."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from torch import nn

from tests.parity import data
from tests.parity import modules as m
from tests.parity.data import loader
from tests.parity.harness import Case, assert_equal, compare, run_lightning, run_ours

VAL = loader(10, 4, seed=1)


class WithoutBatchNorm(m.Simple):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(data.DIM, 8), nn.Tanh(), nn.Linear(8, data.NUM_CLASSES))


class Groups(m.Simple):
    """Named parameter groups and schedulers, for what is logged about them."""

    def configure_optimizers(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        groups = [
            {"params": self.net[0].parameters(), "name": "first"},
            {"params": self.net[3].parameters(), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [
            {"scheduler": schedulers.ExponentialLR(optimizer, 0.9), "interval": "step", "name": "mine"},
            schedulers.StepLR(optimizer, 1),
        ]


class OneScheduler(WithoutBatchNorm):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Example(m.OwnTransfer):
    """Is run on an example before training, through its own batch hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = [torch.zeros(2, data.DIM), torch.zeros(2)]

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        with self.trainer.profiler.profile("forward"):
            return self.net(inputs)


class EpochLoss(m.Simple):
    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", self.trainer.callback_metrics["loss"])


def _lambda() -> LambdaCallback:
    return LambdaCallback(
        on_train_start=lambda trainer, module: module.told.append(trainer.num_training_batches),
        on_train_epoch_end=lambda trainer, module: module.log("lambda", float(trainer.global_step)),
        setup=lambda trainer, module, stage: module.told.append(stage),
    )


CASES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "average": (m.Simple, lambda: EMAWeightAveraging(decay=0.7)),
    "average-later": (
        WithoutBatchNorm,
        lambda: EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_step=3, use_buffers=False),
    ),
    "timer": (m.Simple, lambda: Timer(duration=timedelta(hours=1))),
    "timer-at-once": (m.Simple, lambda: Timer(duration=timedelta(seconds=0), interval="epoch")),
    "lambda": (m.Simple, _lambda),
    "learning-rate": (Groups, LearningRateMonitor),
    "learning-rate-steps": (Groups, lambda: LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)),
    "learning-rate-epochs": (m.Simple, lambda: LearningRateMonitor("epoch", log_momentum=True)),
    "early-stopping": (m.Simple, lambda: EarlyStopping("val_loss", patience=1, min_delta=0.02)),
    "early-stopping-threshold": (
        m.Simple,
        lambda: EarlyStopping("loss", stopping_threshold=1.0, check_on_train_epoch_end=True),
    ),
    "early-stopping-epochs": (
        EpochLoss,
        lambda: EarlyStopping("epoch_loss", stopping_threshold=1.1, check_on_train_epoch_end=True),
    ),
    "summary": (m.Simple, lambda: ModelSummary(2)),
    "summary-example": (Example, lambda: ModelSummary(-1)),
    "rich-summary": (m.Simple, lambda: RichModelSummary(2)),
    "swa": (WithoutBatchNorm, lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)),
    "swa-scheduler": (OneScheduler, lambda: StochasticWeightAveraging(swa_lrs=[0.02], swa_epoch_start=0.5)),
}
FAST = {"average", "lambda", "learning-rate-steps", "early-stopping", "swa-scheduler"}


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CASES])
def test_callbacks(name: str, accumulate: int, tmp_path: Path) -> None:
    module, make = CASES[name]
    case = Case(module, loader(23, 4), VAL, accumulate=accumulate, epochs=5, callbacks=lambda: [make()])
    theirs, _ = compare(case, tmp_path)
    if name.startswith("early-stopping"):
        assert theirs.trainer.current_epoch < 5
    if name.startswith("learning-rate"):
        assert "lr-" in theirs.csv.splitlines()[0] or "mine" in theirs.csv.splitlines()[0]


def test_accumulation_scheduler(tmp_path: Path) -> None:
    """On one rank the loader's batches are the slots, and their number per step may change between epochs."""
    case = Case(
        m.Simple,
        loader(23, 4),
        VAL,
        epochs=5,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})],
    )
    theirs, _ = compare(case, tmp_path)
    assert theirs.trainer.global_step == 6 + 2 + 2 + 3 + 3


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars(bar: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(m.Simple):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("shown", loss, prog_bar=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.print("epoch", self.current_epoch, "is over")

    case = Case(Prints, loader(23, 4), VAL, callbacks=lambda: [bar()], lightning={"enable_progress_bar": True})
    compare(case, tmp_path)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("epoch 1 is over") == 3  # Lightning, ours, and ours without recording


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_averages_with_batch_norm(accumulate: int, tmp_path: Path) -> None:
    """A last epoch for the running statistics alone.

    Lightning calls the optimizer once more in it, with whatever gradients are left; ours does not, so hooks differ there.
    """
    for options in ({"swa_epoch_start": 2}, {"swa_epoch_start": 0.5, "annealing_strategy": "linear"}):
        case = Case(
            m.Simple,
            loader(23, 4),
            VAL,
            accumulate=accumulate,
            epochs=5,
            callbacks=lambda options=options: [StochasticWeightAveraging(swa_lrs=0.02, **options)],
            hooks=False,
        )
        name = str(options["swa_epoch_start"])
        theirs, ours = run_lightning(case, tmp_path / name / "lightning"), run_ours(case, tmp_path / name / "ours")
        assert_equal(theirs, ours)
        assert int(theirs.weights["net.1.num_batches_tracked"]) == 6


def test_throughput(tmp_path: Path) -> None:
    """The same rows and counts; times are each trainer's own."""
    case = Case(
        m.Simple,
        loader(23, 4),
        VAL,
        epochs=3,
        callbacks=lambda: [ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)],
        hooks=False,
    )
    theirs, ours = run_lightning(case, tmp_path / "lightning"), run_ours(case, tmp_path / "ours")

    def rows(seen: Any) -> list[dict[str, str]]:
        found = list(csv.DictReader(seen.csv.splitlines()))
        return [{k: bool(v) if k.endswith(("/time", "_per_sec")) else v for k, v in row.items()} for row in found]

    assert rows(ours) == rows(theirs)
    assert any(row["train/samples"] == "23" for row in rows(theirs))
    assert any(row["validate/batches"] == "2" for row in rows(theirs))
    for name, value in theirs.weights.items():
        assert torch.equal(value, ours.weights[name])
