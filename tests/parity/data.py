"""Data of the parity tests: loaders in order, iterables with and without a length, a datamodule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

NUM_CLASSES = 3
DIM = 5


def samples(size: int, *, seed: int = 0) -> TensorDataset:
    """``size`` points of 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, DIM, generator=generator)
    targets = torch.randint(NUM_CLASSES, (size,), generator=generator)
    return TensorDataset(inputs, targets)


def loader(size: int, batch_size: int, *, seed: int = 0, **options: Any) -> Callable[[], DataLoader[Any]]:
    """Makes a loader in order."""
    return lambda: DataLoader(samples(size, seed=seed), batch_size=batch_size, **options)


def tokens(
    size: int, batch_size: int, *, length: int = 6, seed: int = 1, **options: Any
) -> Callable[[], DataLoader[Any]]:
    """Makes a loader of token sequences."""
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randint(11, (size, length), generator=generator))
    return lambda: DataLoader(data, batch_size=batch_size, **options)


class Batches:
    """An iterable of batches: with a length or without."""

    def __init__(self, size: int, batch_size: int, *, sized: bool) -> None:
        self._loader = loader(size, batch_size)()
        self.batch_size = batch_size
        if sized:
            self.__class__ = SizedBatches

    def __iter__(self) -> Any:
        return iter(self._loader)


class SizedBatches(Batches):
    def __len__(self) -> int:
        return len(self._loader)


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, size: int) -> None:
        self._data = samples(size)

    def __iter__(self) -> Any:
        return iter(self._data[i] for i in range(len(self._data)))


class Data(pl.LightningDataModule):
    """A datamodule with everything that one may have."""

    def __init__(self, size: int = 23, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        self.data = samples(self.hparams["size"])

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.hparams["batch_size"])

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=10)

    def test_dataloader(self) -> Any:
        return [DataLoader(self.data, batch_size=10), DataLoader(self.data, batch_size=6)]

    def predict_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=10)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device([batch[0] + 1, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / 3, batch[1]]
