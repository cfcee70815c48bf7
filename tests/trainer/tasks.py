"""A task whose every source of randomness and every sample can be checked from outside."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastictrain import CheckpointConfig, Task, Trainer
from elastictrain.data import SampleStream
from tests.helpers import apart

NUM_SAMPLES = 100


def sample(index: int) -> tuple[Tensor, Tensor]:
    """Input and target of a sample; its index can be told from neither."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, generator=generator)
    return x, x.mean().reshape(1) + 1


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *sample(index), index


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).relu())


class Recorded(Task):
    """Remembers what each microbatch was made of: ``seen[(epoch, batch_idx)]`` is a list of sample indices."""

    def __init__(self, *, num_workers: int = 0) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.seen: dict[tuple[int, int], list[int]] = {}

    def configure_model(self) -> None:
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        key = (self.current_epoch, batch_idx)
        assert key not in self.seen, f"microbatch {key} twice on one rank"
        self.seen[key] = batch[2].tolist()
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss

    def train_dataset(self) -> Any:
        return Samples()

    def val_dataset(self) -> Any:
        return Samples()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Streamed(Recorded):
    """The same samples from JSONL files of unequal length, as an endless stream."""

    def __init__(self, folder: Path, *, num_workers: int = 0, repeat: bool = True) -> None:
        super().__init__(num_workers=num_workers)
        self.folder, self.repeat = folder, repeat

    def train_dataset(self) -> Any:
        return SampleStream.jsonl(
            f"{self.folder}/*.jsonl", num_shards=24, repeat=self.repeat, transform=lambda r: (*sample(r["i"]), r["i"])
        )


def write_files(folder: Path, count: int = NUM_SAMPLES) -> None:
    """``count`` records in files of 1, 2, 3, … lines."""
    folder.mkdir(parents=True, exist_ok=True)
    start = number = 0
    while start < count:
        number += 1
        stop = min(count, start + number)
        lines = (json.dumps({"i": i, "pad": "x" * (i % 7)}) + "\n" for i in range(start, stop))
        (folder / f"{number:03d}.jsonl").write_text("".join(lines))
        start = stop


def train(
    task: Recorded, run_dir: Path | None, mesh: str, steps: int, **options: Any
) -> dict[tuple[int, int], list[int]]:
    """Train to ``steps`` on this rank; what it has seen."""
    options = {"global_batch_size": 24, "micro_batch_size": 3, "log_every": 1, "val_every": 20, **options}
    checkpoint = CheckpointConfig(every_seconds=None, keep_last=None)
    trainer = Trainer(
        run_dir=None if run_dir is None else str(run_dir), max_steps=steps, mesh=mesh, checkpoint=checkpoint, **options
    )
    trainer.fit(task)
    return task.seen


def merged(by_rank: Iterable[dict[tuple[int, int], list[int]]]) -> dict[tuple[int, int], list[int]]:
    """What all ranks have seen together; a microbatch that two ranks computed fails."""
    together: dict[tuple[int, int], list[int]] = {}
    for seen in by_rank:
        assert not (twice := together.keys() & seen.keys()), f"computed twice: {sorted(twice)}"
        together |= seen
    return together


def farthest(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest distance of two curves over the same steps, as :func:`~tests.helpers.apart` counts it."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max(apart(a[step], b[step]) for step in a)
