"""fp16 scales its loss; what it finds in the gradients must be the same on every rank, whatever a rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastictrain import Task, Trainer
from elastictrain.callbacks import MixedPrecision
from tests.helpers import logged, run_ranks
from tests.parallel.llama import whole


class Line(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def train_dataset(self) -> Dataset[Any]:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(task: Task, steps: int, **options: Any) -> Trainer:
    trainer = Trainer(max_steps=steps, log_every=1, callbacks=[MixedPrecision("fp16")], **options)
    trainer.fit(task)
    return trainer


def _idle(rank: int, world_size: int, run_dir: str, mesh: str) -> None:
    _fit(Line(), 6, run_dir=run_dir, global_batch_size=4, micro_batch_size=2, mesh=mesh)


@pytest.mark.parametrize("mesh", ["dp_replicate=3", "dp_shard=3"])
def test_a_rank_without_a_slot(mesh: str, tmp_path: Path) -> None:
    run_ranks(_idle, 1, str(tmp_path / "one"), "auto")
    run_ranks(_idle, 3, str(tmp_path / "three"), mesh)
    one, three = (logged(tmp_path / name, "train/loss") for name in ("one", "three"))
    assert list(three) == list(range(1, 7))
    assert all(abs(one[step] - three[step]) < 5e-3 for step in one)


class Overflowing(Line):
    """Manual optimisation; in the eighth step the gradients of the first rank are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss * (torch.inf if self.global_step == 7 and self.global_rank == 0 else 1.0))
        optimizer.step()
        self.weights.append(self.net.weight.detach().clone())


def _overflow(rank: int, world_size: int) -> list[Tensor]:
    task = Overflowing()
    _fit(task, 10, global_batch_size=8)
    return task.weights


def test_ranks_agree_on_an_overflow() -> None:
    first, second = run_ranks(_overflow, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[6], first[5]), "the scale has settled"
    assert torch.equal(first[7], first[6]), "the step with an overflow is skipped"
    assert not torch.equal(first[8], first[7])


class Skipping(Line):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset(), batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


def test_a_step_without_a_loss() -> None:
    task = Skipping()
    trainer = _fit(task, 5)
    assert trainer.metrics["train/loss"] > 0
    assert all(p.isfinite().all() for p in task.parameters())


class Split(Line):
    """Cut by tensor parallelism, beside a weight that is whole; in the sixth step one rank's part overflows."""

    def __init__(self, overflows: bool) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.gain, self.overflows = nn.Parameter(torch.ones(4)), overflows
        self.weights: dict[int, Tensor] = {}

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net": "colwise", "out": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.out(self.net(batch[0] * self.gain).relu()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def on_after_backward(self) -> None:
        gradient: Any = self.net.weight.grad
        if self.overflows and self.global_step == 5 and self.global_rank == 0:
            gradient.to_local()[0, 0] = torch.inf

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights[self.global_step] = torch.cat([whole(p).detach().flatten().clone() for p in self.parameters()])


def _split(rank: int, world_size: int, run_dir: Path) -> list[dict[int, Tensor]]:
    found = []
    for mesh in ("dp_shard=2,tp=2", "tp=4") if world_size > 1 else ("auto",):
        for overflows in (False, world_size > 1):
            where = str(run_dir / f"{mesh} {overflows}") if not overflows else None
            torch.manual_seed(1)
            task = Split(overflows)
            _fit(task, 8, run_dir=where, global_batch_size=4, micro_batch_size=2, mesh=mesh)
            found.append(task.weights)
    return found


@pytest.mark.slow
def test_tensor_parallelism_scales_and_agrees_on_an_overflow(tmp_path: Path) -> None:
    run_ranks(_split, 1, tmp_path)
    first, *others = run_ranks(_split, 4, tmp_path)
    one = logged(tmp_path / "auto False", "train/loss")
    for mesh, overflowing in (("dp_shard=2,tp=2", first[1]), ("tp=4", first[3])):
        losses = logged(tmp_path / f"{mesh} False", "train/loss")
        assert losses == pytest.approx(one, abs=1e-2), mesh
        assert torch.equal(overflowing[6], overflowing[5]), "no rank steps"
        assert not torch.equal(overflowing[7], overflowing[6])
    for theirs in others:
        for mine, other in zip(first, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
