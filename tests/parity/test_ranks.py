"""Lightning's habits on several ranks: what one rank decides, all decide."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from elastictrain import Trainer
from tests.helpers import run_ranks
from tests.parity import modules as m
from tests.parity import talkative
from tests.parity.data import loader


class Plateau(m.Classifier):
    """A learning rate that follows the loss of single steps, which every rank sees differently."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        config = {"scheduler": scheduler, "monitor": "loss_step", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append((self.global_step, self.optimizers().param_groups[0]["lr"]))

    def on_train_epoch_end(self) -> None:
        self.log("epoch_accuracy", self.train_accuracy.compute())
        self.epoch_accuracy.reset()


def _fit(rank: int, world_size: int, folder: Path, module: Any) -> Any:
    torch.manual_seed(7)
    task = module()
    logger = CSVLogger(folder, name=None, version="")
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.02)
    trainer = Trainer(
        max_epochs=5,
        global_batch_size=8,
        micro_batch_size=4,
        log_every=1,
        loggers=logger,
        callbacks=[stopping, LearningRateMonitor("step")],
    )
    val = (
        [loader(10, 4, seed=1)(), loader(7, 3, seed=2)()]
        if issubclass(module, talkative.SeveralLoaders)
        else loader(10, 4, seed=1)()
    )
    trainer.fit(task, train_dataloaders=loader(24, 4)(), val_dataloaders=val)
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights, task.told, (stopping.stopped_epoch, task.trainer.current_epoch), metrics


def _rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def test_a_plateau_of_single_steps(tmp_path: Path) -> None:
    (first, told, stopped, _), (second, told_too, stopped_too, _) = run_ranks(_fit, 2, tmp_path, Plateau)
    lrs = dict(told)
    assert lrs == dict(told_too)
    assert len(set(lrs.values())) > 2
    assert stopped == stopped_too
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("module", [m.Classifier, pytest.param(talkative.SeveralLoaders, marks=pytest.mark.slow)])
def test_epoch_values_and_stops_are_those_of_one_rank(module: Any, tmp_path: Path) -> None:
    """Only step values are a rank's own; rank 0 alone writes them."""
    if module is talkative.SeveralLoaders:  # monitored names carry the loader's index there

        class Monitored(talkative.SeveralLoaders):
            def on_validation_epoch_end(self) -> None:
                self.log("val_loss", self.trainer.callback_metrics["val_loss/dataloader_idx_0"])

        module = Monitored
    one = run_ranks(_fit, 1, tmp_path / "one", module)[0]
    two = run_ranks(_fit, 2, tmp_path / "two", module)
    for weights, _, stopped, metrics in two:
        assert stopped == one[2]
        for name, value in one[0].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
        own = ["train_precision", "train_recall"]  # logged on steps alone, as the loss of that module
        own += ["loss"] if issubclass(module, talkative.SeveralLoaders) else []
        shared = {name: value for name, value in one[3].items() if "step" not in name and name not in own}
        assert {name: metrics[name] for name in shared} == pytest.approx(shared, rel=1e-6, abs=1e-6)
    one_rows, two_rows = _rows(tmp_path / "one"), _rows(tmp_path / "two")
    names = [
        name for name in one_rows[0] if name.endswith("_epoch") or (name.startswith("val_") and "step" not in name)
    ]
    assert len(names) > 3
    for name in names:
        of_one, of_two = (
            [(row["step"], float(row[name])) for row in rows if row[name]] for rows in (one_rows, two_rows)
        )
        assert [step for step, _ in of_one] == [step for step, _ in of_two], name
        assert [value for _, value in of_one] == pytest.approx([value for _, value in of_two], rel=1e-6, abs=1e-6), name
