"""A task that logs something for every chart of the dashboard; its second worker dies once, later it waits for a save."""

from __future__ import annotations

import glob
import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from elastictrain import Task


def _data(seed: int) -> TensorDataset:
    tokens = torch.randint(16, (64, 8), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, tokens.flip(1))


class Watched(Task):
    batch_size = 8
    num_workers = 1

    def __init__(self, lr: float = 0.05, die_at: int = -1, until: str = "", wait_at: int = -1) -> None:
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
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        deadline = time.monotonic() + 60.0
        while self.global_step == self.hparams["wait_at"] and not glob.glob(self.hparams["until"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if self.global_step >= self.hparams["wait_at"] > 0:
            time.sleep(0.05)  # in these steps it is heard that the save is done, and then logged
        if self.global_step == self.hparams["die_at"] and self.global_rank == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
