"""Handwritten digits with a plain LightningModule: nothing in the two classes knows of elastictrain.

The data is scikit-learn's (1,797 images of 8×8, shipped with it): nothing is downloaded.

    python examples/digits.py                     # the same classes under both trainers
    elastictrain run examples/digits.py:Digits --nproc-per-node 2 --max-epochs 5
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

Batch = list[Tensor]  # images float32 (batch, 64) in [0, 1], labels int64 (batch,)


class DigitsData(L.LightningDataModule):
    """A quarter of the images is held out, the same ones every time."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
        train_images, val_images, train_labels, val_labels = (torch.from_numpy(part) for part in parts)
        self.train = TensorDataset(train_images.float(), train_labels.long())
        self.val = TensorDataset(val_images.float(), val_labels.long())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=self.batch_size)


class Digits(L.LightningModule):
    """A small convolutional classifier. Brings its own data where no DataModule is given."""

    def __init__(self, width: int = 32, lr: float = 2e-3, batch_size: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(width * 16, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.data = DigitsData(batch_size)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def setup(self, stage: str) -> None:
        self.data.setup(stage)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.data.train_dataloader()

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.data.val_dataloader()


if __name__ == "__main__":
    import elastictrain

    L.Trainer(max_epochs=5, logger=False, enable_checkpointing=False).fit(Digits(), DigitsData())
    elastictrain.Trainer(max_epochs=5).fit(Digits(), DigitsData())
