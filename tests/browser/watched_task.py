"""A task that logs something for every chart of the dashboard; a file says how many steps it may do by now."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from elastictrain import Task

PATIENCE = 150.0


def _data(seed: int) -> TensorDataset:
    tokens = torch.randint(16, (64, 8), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (5 * tokens + 3) % 16)


class Watched(Task):
    """
    Args:
        gate: a file with a number: steps may begin while fewer are finished.
    """

    batch_size = 8
    num_workers = 1

    def __init__(self, lr: float = 0.02, gate: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))

    def train_dataset(self) -> Dataset[Any]:
        return _data(0)

    def val_dataset(self) -> Dataset[Any]:
        return _data(1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.net(tokens)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean())
        return super().validation_step(batch, batch_idx, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.global_step >= num_open(self.hparams["gate"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.05)  # so that it is heard in some step that a save is done, and then logged

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def num_open(gate: str) -> int:
    """How many steps may be done by now."""
    return int(Path(gate).read_text())


def open_until(gate: str, step: int) -> None:
    """So many may be done from now on."""
    Path(gate + ".new").write_text(str(step))
    os.replace(gate + ".new", gate)
