"""The model of ``recovery.py`` under ``lightning.Trainer``: a checkpoint of every step, and on from the last one.

``python benchmarks/recovery_lightning.py FOLDER RANKS START``, with DDP, which is what Lightning has for several processes
on CPUs. ``START`` is how often the command was given before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recovery_model import BATCH, make_data, make_model, write_step


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Steps(lightning.Callback):
    """Writes down when each step has ended."""

    def __init__(self, folder: Path, start: int) -> None:
        self._folder, self._start = folder, start

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        with open(self._folder / f"steps-{os.getpid()}", "a") as out:
            write_step(out, trainer.global_step, rank=trainer.global_rank, start=self._start)


def main(folder: Path, num_ranks: int, start: int) -> None:
    torch.manual_seed(0)
    keeps = ModelCheckpoint(dirpath=folder / "checkpoints", every_n_train_steps=1, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp",
        max_epochs=-1,
        callbacks=[Steps(folder, start), keeps],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(*make_data()), batch_size=BATCH // num_ranks)
    trainer.fit(Module(), data, ckpt_path="last" if start else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
