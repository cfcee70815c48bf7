"""The same state saved and loaded by stock torch (DCP) and by Lightning, as their documentation says."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

State = dict[str, Tensor]


def dcp_save(folder: Path, state: State) -> None:
    dcp.save(dict(state), checkpoint_id=folder)


def dcp_load(folder: Path, state: State) -> None:
    dcp.load(dict(state), checkpoint_id=folder)


def dcp_async_save(folder: Path, state: State) -> Future[Any]:
    under_way = dcp.async_save(dict(state), checkpoint_id=folder)
    assert isinstance(under_way, Future)
    return under_way


class _Module(LightningModule):
    """Has the state's tensors themselves as parameters and as AdamW's moments."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.moments: dict[nn.Parameter, State] = {}
        for name, one in state.items():
            if name.startswith("model."):
                weight = nn.Parameter(one)
                self.weights.append(weight)
                rest = name.removeprefix("model.")
                kinds = ("exp_avg", "exp_avg_sq")
                self.moments[weight] = {kind: state[f"optim.0.{kind}.{rest}"] for kind in kinds}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.weights)
        for weight, moments in self.moments.items():
            optimizer.state[weight] = {"step": torch.tensor(1.0), **moments}
        return optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None  # nothing to learn: no optimizer step changes the state

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.zeros(1)])  # type: ignore[arg-type]


class LightningSaved:
    """A trainer that has trained, and may save."""

    def __init__(self, state: State) -> None:
        self.trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(_Module(state))

    def save(self, path: Path) -> None:
        self.trainer.save_checkpoint(path)

    def load(self, path: Path) -> None:
        """What a resumed ``fit`` does with the file's tensors."""
        strategy = self.trainer.strategy
        checkpoint = strategy.load_checkpoint(path, weights_only=True)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)
