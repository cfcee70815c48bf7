"""The model of ``recovery.py`` as a task of ours, and the callback that writes down its steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.recovery_model import BATCH, make_data, make_model, write_step
from elastictrain import Callback, Task

REST = "rest"  # a file in the folder: each step takes so much longer while it is there
REST_SECONDS = 0.1


class Toy(Task):
    batch_size = BATCH

    def configure_model(self) -> None:
        self.net = make_model()

    def train_dataset(self) -> Any:
        return TensorDataset(*make_data())

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Steps(Callback):
    """Writes down when each step has ended."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_step_end(self, info: Any) -> None:
        rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        with open(Path(self.folder) / f"steps-{os.getpid()}", "a") as out:
            write_step(out, info.step, rank=rank, start=start)
        if os.path.exists(os.path.join(self.folder, REST)):
            time.sleep(REST_SECONDS)
