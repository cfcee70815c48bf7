"""``self.log`` with every option in every hook that allows it, and what ``self.trainer`` says in every hook."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain import Trainer
from tests.parity import data, talkative
from tests.parity import modules as m
from tests.parity.data import loader
from tests.parity.harness import Case, compare

VAL = loader(10, 4, seed=1)


@pytest.mark.parametrize(
    ("accumulate", "size"),
    [(4, 23), *(pytest.param(a, s, marks=pytest.mark.slow) for a, s in ((1, 23), (1, 24), (4, 24), (5, 24)))],
)
def test_every_option_in_every_hook(accumulate: int, size: int, tmp_path: Path) -> None:
    case = Case(talkative.LogEverywhere, loader(size, 4), VAL, accumulate=accumulate)
    theirs, _ = compare(case, tmp_path)
    header = theirs.csv.splitlines()[0].split(",")
    assert {"min_torch_epoch", "sized", "zero", "dict_a", "on_before_zero_grad_step", "everywhere"} <= set(header)
    assert "bar_step" not in header
    assert "bar_step" in theirs.metrics["progress_bar_metrics"]


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_callbacks_log_and_monitor(accumulate: int, tmp_path: Path) -> None:
    """A monitor sees what another callback logs at the end of the epoch, wherever it stands in the list."""
    case = Case(
        m.Simple,
        loader(23, 4),
        VAL,
        accumulate=accumulate,
        epochs=4,
        callbacks=lambda: [m.pl.callbacks.EarlyStopping("epochs", patience=1), talkative.Noisy()],
    )
    compare(case, tmp_path)


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_what_the_trainer_says(accumulate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = compare(Case(talkative.Asks, loader(23, 4), VAL, accumulate=accumulate), tmp_path)
    said = dict(entry for entry in theirs.told if isinstance(entry, tuple))
    assert said["on_train_epoch_end"]["callback_metrics"].keys() >= {"loss", "loss_step", "loss_epoch", "epochs"}
    printed = capsys.readouterr().out
    assert printed.count("training starts on 2 epochs\n") == 3  # Lightning, ours, and ours without recording
    assert printed.count("and goes on\n") == 3  # Lightning, ours, and ours without recording
    assert ours.trainer.callback_metrics.keys() == theirs.trainer.callback_metrics.keys()
    for name, value in theirs.trainer.callback_metrics.items():
        assert value == ours.trainer.callback_metrics[name]


def test_hyperparameters_of_module_and_datamodule(tmp_path: Path) -> None:
    class WithMore(m.Simple):
        def __init__(self, lr: float = 0.05, words: tuple[str, ...] = ("a", "b")) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    theirs, _ = compare(Case(WithMore, datamodule=data.Data), tmp_path)
    assert theirs.hparams.splitlines() == [
        "batch_size: 4",
        "lr: 0.05",
        "size: 23",
        "words: !!python/tuple",
        "- a",
        "- b",
    ]


def test_graph_of_the_module_is_offered_to_loggers(tmp_path: Path) -> None:
    _, ours = compare(Case(m.Simple, loader(8, 4), VAL), tmp_path)
    assert ours.logger_calls[:3] == [("log_hyperparams", {"lr": 0.05}), ("log_graph", "Simple"), ("save",)]


def test_a_value_without_a_batch_counts_once(tmp_path: Path) -> None:
    """Outside of a batch nothing has a batch size, whatever the last batch was."""

    class Late(m.Simple):
        def on_validation_epoch_end(self) -> None:
            for value in (1.0, 2.0, 4.0):
                self.log("late", value)

        def on_train_epoch_end(self) -> None:
            for value in (0.1, 0.2, 0.7):
                self.log("later", value, reduce_fx="mean")

    theirs, _ = compare(Case(Late, loader(23, 4), VAL), tmp_path)
    assert float(theirs.metrics["callback_metrics"]["late"]) == pytest.approx(7 / 3)


def test_a_graph_in_tensorboard(tmp_path: Path) -> None:
    """The example goes through the datamodule's batch hooks."""

    class Example(m.Simple):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = (torch.zeros(2, data.DIM), torch.zeros(2))

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            outputs: torch.Tensor = self.net(inputs)
            return outputs

    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer = Trainer(max_epochs=1, loggers=logger)
    trainer.fit(Example(), data.Data())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["graph"]
    assert events.Scalars("val_loss")[0].step == 5
