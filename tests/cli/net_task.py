"""A small task for tests of the command line; ``--set`` makes it misbehave."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from elastictrain import Task


class Net(Task):
    batch_size = 8

    def __init__(
        self,
        dim: int = 4,
        lr: float = 0.1,
        pace: float = 0.0,
        fail_at: int = -1,
        die_at: int = -1,
        broken: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if broken:
            raise KeyError("no such column")
        self.steps = 0

    def configure_model(self) -> None:
        self.net = nn.Linear(self.hparams["dim"], 1)

    def train_dataset(self) -> Dataset[Any]:
        data = torch.randn(64, self.hparams["dim"], generator=torch.Generator().manual_seed(0))
        return TensorDataset(data, data.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.hparams["pace"])
        if self.global_step == self.hparams["fail_at"]:
            self.fail(batch)
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if self.global_step == self.hparams["die_at"] and self.global_rank == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, batch: Any) -> None:
        raise ValueError(f"a bad batch of {len(batch[0])}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
