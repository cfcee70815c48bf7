"""What a whole run shows under tensor parallelism: metrics, predictions, a second call, manual optimisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from elastictrain import Trainer
from elastictrain.callbacks import GradientClipping
from tests.helpers import run_ranks
from tests.parallel.llama import SEQ, Llama, Options, Tokens, variant, whole

pytestmark = pytest.mark.filterwarnings("ignore")


class Watched(Llama):
    """Counts what it sees in every way there is; a BatchNorm on whole activations."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.seen, self.right = torchmetrics.SumMetric(), torchmetrics.MeanMetric()

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            self.build()
            self.positions = nn.BatchNorm1d(SEQ)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen(len(batch))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("synced", float(batch[0, 0]), sync_dist=True)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss: Tensor = super().validation_step(batch, batch_idx, dataloader_idx)
        self.right(whole(loss), weight=len(batch))
        self.log("right", self.right)
        return loss

    def predict_dataset(self) -> Tokens:
        return Tokens(self.options.vocab)


def _watch(rank: int, world_size: int, plan: str, mesh: str, run_dir: Path) -> Any:
    task = Watched(variant(plan=plan))
    options: dict[str, Any] = {"global_batch_size": 10, "micro_batch_size": 2, "log_every": 1, "mesh": mesh}
    found = {}
    for steps in (4, 8):  # an epoch has six steps; the second call goes on with a module that is laid out
        trainer = Trainer(
            run_dir=str(run_dir), max_steps=steps, val_every=4, callbacks=[GradientClipping(norm=0.3)], **options
        )
        trainer.fit(task)
        found[steps] = {name: float(value) for name, value in task.trainer.callback_metrics.items()}
    evaluated = Trainer(**options).validate(task)
    predicted = torch.cat(Trainer(**options).predict(task))
    buffers = {name: buffer.clone() for name, buffer in task.named_buffers() if "running" in name}
    return found, evaluated, predicted, buffers, task.norms


@pytest.mark.parametrize(
    ("world_size", "mesh", "plan"),
    [
        (2, "tp=2", "plain"),
        pytest.param(2, "tp=2", "split", marks=pytest.mark.slow),
        pytest.param(4, "dp_shard=2,tp=2", "plain", marks=pytest.mark.slow),
        pytest.param(4, "dp_replicate=2,tp=2", "split", marks=pytest.mark.slow),
    ],
)
def test_a_run_shows_what_it_shows_on_one_rank(world_size: int, mesh: str, plan: str, tmp_path: Path) -> None:
    ((found, evaluated, predicted, buffers, norms),) = run_ranks(_watch, 1, "plain", "auto", tmp_path / "one")
    ranks = run_ranks(_watch, world_size, plan, mesh, tmp_path / "mesh", timeout=150)
    for theirs in ranks:
        assert theirs[0].keys() == found.keys()
        for steps, values in found.items():
            assert theirs[0][steps].keys() == values.keys()
            skipped = {"synced"} if world_size > 2 else set()  # a rank's own last slot, until a log step sums them
            mine = {name: value for name, value in theirs[0][steps].items() if name not in skipped}
            assert mine == pytest.approx({name: values[name] for name in mine}, abs=2e-6)
            assert values.keys() >= {"seen", "samples", "right", "val/loss"}
        assert theirs[1] == [pytest.approx(one, abs=2e-6) for one in evaluated]
        torch.testing.assert_close(theirs[2], predicted, rtol=1e-4, atol=1e-5)
        assert theirs[4] == pytest.approx(norms, abs=2e-6)
        for name, buffer in buffers.items():
            torch.testing.assert_close(theirs[3][name], buffer, rtol=1e-4, atol=1e-5, msg=name)
    assert found[8]["seen"] == found[8]["samples"] == 20, "two steps of the second epoch"


class ByHand(Llama):
    """Manual optimisation, a step that works on all of the rank's samples at once."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _by_hand(rank: int, world_size: int, plan: str, mesh: str) -> Any:
    task = ByHand(variant(plan=plan))
    Trainer(global_batch_size=8, max_steps=4, mesh=mesh).fit(task)
    return task.norms, {name: whole(p).detach().clone() for name, p in task.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "mesh"), [(2, "tp=2"), pytest.param(4, "dp_shard=2,tp=2", marks=pytest.mark.slow)]
)
def test_manual_optimisation(world_size: int, mesh: str) -> None:
    ((norms, weights),) = run_ranks(_by_hand, 1, "plain", "auto")
    for theirs, mine in run_ranks(_by_hand, world_size, "sequence", mesh, timeout=150):
        assert theirs == pytest.approx(norms, abs=2e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=2e-5, msg=name)
