"""The gradient of a global batch is the mean over all of it, however it falls on slots and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastictrain import CheckpointConfig, Task, Trainer, UsageError
from elastictrain.data import SampleStream
from tests.helpers import RankError, logged, run_ranks
from tests.trainer.tasks import Recorded, Streamed, farthest, merged, train, write_files

pytestmark = pytest.mark.filterwarnings("ignore")


class Masked(Dataset[Any]):
    """Sequences of 6 of which the first 1 to 6 tokens count."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        mask = torch.arange(6) < 1 + index % 6
        return torch.randn(6, 3, generator=generator), mask


class PerToken(Task):
    """The loss is a mean over the tokens that count, so microbatches must be weighted by them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        nn.init.constant_(self.net.weight, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        errors = (outputs.squeeze(-1) - 1).square()
        return errors[batch[1]].mean()

    def loss_weight(self, batch: Any) -> int:
        return int(batch[1].sum())

    def train_dataset(self) -> Any:
        return Masked()

    def val_dataset(self) -> Any:
        return Masked()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Sparse(Masked):
    """In every third sequence nothing counts."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, mask = super().__getitem__(index)
        return x, mask & bool(index % 3)


class SomeNothing(PerToken):
    def train_dataset(self) -> Any:
        return Sparse()

    def val_dataset(self) -> Any:
        return Sparse()


def test_batches_in_which_nothing_counts(tmp_path: Path) -> None:
    """Their mean is nan, in training and in a validation."""
    for name, size in (("whole", 13), ("cut", 1)):
        torch.manual_seed(0)
        trainer = Trainer(
            run_dir=str(tmp_path / name), max_epochs=1, global_batch_size=13, micro_batch_size=size, log_every=1
        )
        trainer.fit(SomeNothing())
    for name in ("train/loss", "val/loss"):
        assert farthest(logged(tmp_path / "cut", name), logged(tmp_path / "whole", name)) <= 1e-6, name


def _fit(rank: int, world_size: int, run_dir: Path, mesh: str, micro: int) -> Any:
    task = PerToken()
    trainer = Trainer(
        run_dir=str(run_dir), max_epochs=2, global_batch_size=12, micro_batch_size=micro, log_every=1, mesh=mesh,
        checkpoint=CheckpointConfig(at_end=False, every_seconds=None),
    )  # fmt: skip
    trainer.fit(task)
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in task.named_parameters()}


@pytest.mark.parametrize(
    ("world_size", "mesh", "micro"), [(1, "auto", 5), (1, "auto", 1), (3, "dp_replicate=3", 2), (2, "dp_shard=2", 5)]
)
def test_tokens_count_the_same_in_any_microbatch(world_size: int, mesh: str, micro: int, tmp_path: Path) -> None:
    (whole,) = run_ranks(_fit, 1, tmp_path / "whole", "auto", 12)  # one slot: nothing to weigh
    weights, *_ = run_ranks(_fit, world_size, tmp_path / "cut", mesh, micro)
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert farthest(logged(tmp_path / "cut", "train/loss"), logged(tmp_path / "whole", "train/loss")) <= 1e-6
    assert farthest(logged(tmp_path / "cut", "val/loss"), logged(tmp_path / "whole", "val/loss")) <= 1e-6


# ---- the end of a finite stream ------------------------------------------------------------------------------------


def _finite(rank: int, world_size: int, run_dir: Path, mesh: str, files: Path, workers: int) -> Any:
    task = Streamed(files, num_workers=workers, repeat=False)
    return train(task, run_dir, mesh, 10_000, max_epochs=2, val_every=None)


@pytest.mark.parametrize(
    ("world_size", "mesh", "workers"),
    [(2, "dp_shard=2", 0), pytest.param(3, "dp_replicate=3", 2, marks=pytest.mark.slow)],
)
def test_a_finite_stream_ends_for_all_ranks_together(world_size: int, mesh: str, workers: int, tmp_path: Path) -> None:
    files = tmp_path / "files"
    write_files(files)
    one = merged(run_ranks(_finite, 1, tmp_path / "one", "auto", files, 0))
    for epoch in (0, 1):
        assert sorted(i for (e, _), s in one.items() if e == epoch for i in s) == list(range(100))
    many = merged(run_ranks(_finite, world_size, tmp_path / "many", mesh, files, workers, timeout=120))
    assert many == one
    losses = logged(tmp_path / "one", "train/loss")
    assert farthest(logged(tmp_path / "many", "train/loss"), losses) <= 1e-6
    assert len(logged(tmp_path / "many", "val/loss")) == 2


# ---- more ranks than slots -----------------------------------------------------------------------------------------


def _few_slots(rank: int, world_size: int, run_dir: Path, mesh: str) -> Any:
    return train(Recorded(), run_dir, mesh, 6, global_batch_size=6, micro_batch_size=3, val_every=3)


@pytest.mark.parametrize("mesh", ["dp_replicate=3", "dp_shard=3"])
def test_a_rank_without_a_slot_takes_part(mesh: str, tmp_path: Path) -> None:
    one = merged(run_ranks(_few_slots, 1, tmp_path / "one", "auto"))
    by_rank = run_ranks(_few_slots, 3, tmp_path / "three", mesh)
    assert by_rank[2] == {}
    assert merged(by_rank) == one
    assert farthest(logged(tmp_path / "three", "train/loss"), logged(tmp_path / "one", "train/loss")) <= 1e-6


# ---- BatchNorm -----------------------------------------------------------------------------------------------------


class Normalised(Recorded):
    def configure_model(self) -> None:
        super().configure_model()
        # No shift in front of a normalisation: its gradient is zero but for rounding, which Adam would amplify.
        self.first = nn.Linear(8, 16, bias=False)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.average = nn.BatchNorm1d(16, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.average(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def _normalised(rank: int, world_size: int, run_dir: Path, mesh: str) -> Any:
    task = Normalised()
    train(task, run_dir, mesh, 12, val_every=6, micro_batch_size=4)
    return {name: buffer.clone() for name, buffer in task.named_buffers()}


def test_running_statistics_are_those_of_one_rank(tmp_path: Path) -> None:
    (one,) = run_ranks(_normalised, 1, tmp_path / "one", "auto")
    for mesh, world_size in (("dp_replicate=3", 3), ("dp_shard=2", 2)):
        for buffers in run_ranks(_normalised, world_size, tmp_path / mesh, mesh):
            for name, buffer in one.items():
                torch.testing.assert_close(buffers[name], buffer, rtol=1e-4, atol=1e-5, msg=f"{mesh} {name}")
        assert farthest(logged(tmp_path / mesh, "val/loss"), logged(tmp_path / "one", "val/loss")) <= 2e-6


# ---- manual optimisation -------------------------------------------------------------------------------------------


class Manual(Task):
    """Two optimizers stepped by hand, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        for optimizer, loss in (
            (first, lambda: self.b(self.a(batch[0])).square().mean()),
            (second, lambda: self._second(batch)),
        ):
            with self.toggled_optimizer(optimizer):
                value = loss()
                optimizer.zero_grad()
                self.manual_backward(value)
                optimizer.step()

    def _second(self, batch: Any) -> Tensor:
        return (self.b(self.a(batch[0]).detach()) - 1).square().mean()

    def train_dataset(self) -> Any:
        return TensorDataset(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.a.parameters(), lr=0.1),
            torch.optim.SGD(self.b.parameters(), lr=0.1, momentum=0.9),
        ]


def _manual(rank: int, world_size: int, mesh: str, global_batch_size: int = 24) -> Any:
    task = Manual()
    trainer = Trainer(max_epochs=3, global_batch_size=global_batch_size, mesh=mesh)
    trainer.fit(task)
    assert task.trainer.global_step == 2 * 3 * -(-50 // global_batch_size)
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in task.named_parameters()}


@pytest.mark.parametrize(("world_size", "mesh"), [(2, "dp_replicate=2"), (2, "dp_shard=2")])
def test_manual_optimisation_shares_the_global_batch(world_size: int, mesh: str) -> None:
    (one,) = run_ranks(_manual, 1, "auto")
    for weights in run_ranks(_manual, world_size, mesh):
        for name, tensor in one.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_share_for_every_rank_is_checked_at_start() -> None:
    with pytest.raises(RankError, match="the last global batch of an epoch would have 2 samples for 3 ranks"):
        run_ranks(_manual, 3, "dp_replicate=3")


# ---- data that cannot be trained on --------------------------------------------------------------------------------


def test_a_one_shot_iterator_is_told_apart() -> None:
    def batches() -> Iterator[Any]:
        yield [torch.zeros(2, 4)]

    class Net(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            pass

    with pytest.raises(
        UsageError, match="the training data gave no batch in epoch 1: give something that can be iterated"
    ):
        Trainer(max_epochs=3).fit(Net(), train_dataloaders=batches())


def test_an_unequal_stream_through_a_loader(tmp_path: Path) -> None:
    write_files(tmp_path, 30)
    stream = SampleStream.jsonl(
        f"{tmp_path}/*.jsonl", num_shards=4, transform=lambda r: torch.full((4,), float(r["i"]))
    )

    seen: list[float] = []

    class Net(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[:, 0].tolist())

    Trainer(max_epochs=1).fit(Net(), train_dataloaders=DataLoader(stream, batch_size=4))
    assert sorted(seen) == list(range(30))
