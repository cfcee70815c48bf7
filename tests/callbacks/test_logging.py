"""What callbacks log: learning rates, the gradient norm, a user's own values."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from elastictrain import Callback, Trainer
from elastictrain.callback import StepInfo
from elastictrain.callbacks import GradientClipping, LearningRateMonitor
from elastictrain.reporting import ABOUT_THE_RUN
from tests.helpers import logged, run_ranks
from tests.trainer.tasks import Recorded, train


class Groups(Recorded):
    """Two groups, one with a name, and a schedule that halves both rates after every step."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.first.parameters(), "lr": 0.1, "name": "first"},
            {"params": [*self.blocks.parameters(), *self.last.parameters()]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watches(Callback):
    """Every hook that sees a norm, and values of its own."""

    def __init__(self) -> None:
        self.norms: list[Tensor | None] = []
        self.metrics: list[Mapping[str, float] | None] = []

    def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
        assert info.metrics is None
        return {"own/twice": 2.0 * info.step, "own/tensor": torch.tensor(info.step), "train/loss_of_task": -1.0}

    def on_step_end(self, info: StepInfo) -> None:
        self.norms.append(info.grad_norm)
        self.metrics.append(info.metrics)


def test_rates_norm_and_own_values_are_logged_on_log_steps(tmp_path: Path) -> None:
    watches = Watches()
    callbacks = [LearningRateMonitor(), GradientClipping(norm=0.01), watches]
    train(Groups(), tmp_path / "run", "auto", 4, callbacks=callbacks, log_every=2)  # type: ignore[arg-type]
    assert logged(tmp_path / "run", "lr/SGD/first") == pytest.approx({2: 0.025, 4: 0.00625})
    assert logged(tmp_path / "run", "lr/SGD/1") == pytest.approx({2: 0.0025, 4: 0.000625})
    assert logged(tmp_path / "run", "own/twice") == {2: 4.0, 4: 8.0}
    assert logged(tmp_path / "run", "own/tensor") == {2: 2.0, 4: 4.0}
    norms = logged(tmp_path / "run", "train/grad_norm")
    assert sorted(norms) == [2, 4] and all(value > 0.01 for value in norms.values()), "before clipping"
    assert all(type(norm) is Tensor for norm in watches.norms), "nobody has waited for its value"
    assert [norms.get(step) for step in (2, 4)] == [watches.norms[i].item() for i in (1, 3)]  # type: ignore[union-attr]
    assert [m is None for m in watches.metrics] == [True, False, True, False]
    assert watches.metrics[1] is not None and watches.metrics[1]["own/twice"] == 4.0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"lr/SGD/first", "lr/SGD/1", "train/grad_norm", "own/twice"} <= set(events.Tags()["scalars"])


def test_what_the_task_logs_under_a_name_stays(tmp_path: Path) -> None:
    class Logs(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train/loss_of_task", 1.0)
            return super().training_step(batch, batch_idx)

    train(Logs(), tmp_path / "run", "auto", 1, callbacks=[Watches()])
    assert logged(tmp_path / "run", "train/loss_of_task") == {1: 1.0}


def test_what_a_task_logs_reaches_its_loggers_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Logs(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("memory/mine", 3.0)
            self.log("time/other", -1.0)  # the monitor has one, too
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    Trainer(run_dir=str(tmp_path / "run"), max_steps=2, global_batch_size=24, log_every=1, loggers=[logger]).fit(Logs())
    header, *rows = csv.reader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    about = [name for name in header if name.startswith(ABOUT_THE_RUN)]
    assert sorted(about) == ["memory/mine", "time/other"]
    assert [float(row[header.index("time/other")]) for row in rows] == [-1.0, -1.0]
    assert logged(tmp_path / "run", "time/step").keys() == {1, 2}
    shown = capsys.readouterr().out.split("finished")[-1]
    assert "memory/mine" in shown and "time/other" in shown and "time/step" not in shown and "goodput" not in shown


def test_one_group_has_the_name_of_its_optimizer(tmp_path: Path) -> None:
    train(Recorded(), tmp_path / "run", "auto", 2, callbacks=[LearningRateMonitor()])
    assert logged(tmp_path / "run", "lr/AdamW") == pytest.approx({1: 0.002, 2: 0.003})


def _norms(rank: int, world_size: int, run_dir: Path, mesh: str) -> None:
    train(Recorded(), run_dir, mesh, 3, callbacks=[GradientClipping(norm=0.1), LearningRateMonitor()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mesh"), [(3, "dp_shard=3"), (2, "dp_replicate=2"), (4, "dp_replicate=2,dp_shard=2")]
)
def test_the_norm_is_the_same_on_every_layout(tmp_path: Path, world_size: int, mesh: str) -> None:
    run_ranks(_norms, 1, tmp_path / "one", "auto")
    run_ranks(_norms, world_size, tmp_path / "many", mesh)
    one, many = (logged(tmp_path / name, "train/grad_norm") for name in ("one", "many"))
    assert len(one) == 3 and one.keys() == many.keys()
    assert all(math.isclose(one[step], many[step], rel_tol=1e-5) for step in one)
    assert logged(tmp_path / "one", "lr/AdamW") == logged(tmp_path / "many", "lr/AdamW")
