"""Modules of the parity tests: as users write them, tiny, without randomness in the step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Accuracy, MeanMetric, MetricCollection, Precision, Recall

from tests.parity.data import DIM, NUM_CLASSES


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


class Simple(pl.LightningModule):
    """The least: one loss, one optimizer."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net()
        self.told: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


class Classifier(Simple):
    """torchmetrics in every way: single metrics, a collection, on steps and epochs, forward and update."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = Accuracy(task="multiclass", num_classes=NUM_CLASSES)
        self.val_accuracy = Accuracy(task="multiclass", num_classes=NUM_CLASSES)
        self.epoch_accuracy = Accuracy(task="multiclass", num_classes=NUM_CLASSES)
        self.mean_loss = MeanMetric()
        metrics = MetricCollection(
            {
                "precision": Precision(task="multiclass", num_classes=NUM_CLASSES, average="macro"),
                "recall": Recall(task="multiclass", num_classes=NUM_CLASSES, average="macro"),
            }
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self(inputs)
        loss = F.cross_entropy(outputs, targets)
        self.train_accuracy(outputs, targets)
        self.mean_loss.update(loss)
        self.epoch_accuracy.update(outputs, targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.log_dict(self.train_metrics(outputs, targets), on_step=True, on_epoch=False)
        return {"loss": loss, "outputs": outputs.detach()}

    def on_train_epoch_end(self) -> None:
        self.log("epoch_accuracy", self.epoch_accuracy.compute())
        self.epoch_accuracy.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        outputs = self(inputs)
        self.val_accuracy.update(outputs, targets)
        self.val_metrics.update(outputs, targets)
        self.log("val_loss", F.cross_entropy(outputs, targets), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.val_metrics)


class GAN(pl.LightningModule):
    """Manual optimisation: two optimizers taking turns, schedulers stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, DIM))
        self.discriminator = nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("noise", torch.randn(64, DIM))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_discriminator = self.optimizers()
        noise = self.noise[: len(real)] * (1 + batch_idx)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(of_generator)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        self.log("generator_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        if batch_idx % 2 == 0:
            self.toggle_optimizer(of_discriminator)
            loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
            fake = self.discriminator(self.generator(noise).detach())
            loss = (loss + F.binary_cross_entropy_with_logits(fake, zeros)) / 2
            self.log("discriminator_loss", loss, on_step=True, on_epoch=True)
            of_discriminator.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_discriminator, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            of_discriminator.step()
            self.untoggle_optimizer(of_discriminator)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("real", self.discriminator(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        generator = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        return [generator, discriminator], [
            torch.optim.lr_scheduler.StepLR(generator, 3),
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(discriminator, 0.9), "name": "discriminator"},
        ]


class ManualClosure(Simple):
    """Manual optimisation with closures, own accumulation, and a returned dict."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = torch.zeros(())

        def closure() -> Tensor:
            nonlocal loss
            loss = F.cross_entropy(self(batch[0]), batch[1])
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        if (batch_idx + 1) % 2 == 0:
            with optimizer.toggle_model():
                optimizer.step(closure=closure)
        else:
            closure()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True)
        return {"loss": loss, "batch": batch_idx}


class TinyLM(pl.LightningModule):
    """A language model over 11 tokens that clips its own gradients and decays only its matrices."""

    def __init__(self, dim: int = 8, length: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(11, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        hidden = self.embedding(tokens)
        mixed, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        return self.head(self.norm(hidden + mixed))

    def _loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any) -> Tensor:
        loss = self._loss(batch)
        self.log_dict({"loss": loss, "perplexity": loss.exp()}, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("val_loss", loss, batch_size=batch[0].numel())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None])
        self.log("gradient_norm", norms.norm())

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.05 * (1 + self.current_epoch), gradient_clip_algorithm="norm"
        )

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Schedulers(Simple):
    """Every interval and frequency, with plateaus on a validation metric and on a training metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss.round(decimals=1))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        lr = self.optimizers().param_groups[0]["lr"]
        self.told.append((type(scheduler).__name__, metric if metric is None else float(metric), float(lr)))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = {"factor": 0.5, "patience": 0, "threshold": 0.01}
        return [optimizer], [
            {"scheduler": schedulers.ExponentialLR(optimizer, 0.99), "interval": "step"},
            {"scheduler": schedulers.StepLR(optimizer, 2, 0.9), "interval": "step", "frequency": 3},
            schedulers.LambdaLR(optimizer, lambda epoch: 0.95**epoch),
            {"scheduler": schedulers.StepLR(optimizer, 1, 0.8), "interval": "epoch", "frequency": 2},
            {"scheduler": schedulers.ReduceLROnPlateau(optimizer, **plateau), "monitor": "val_loss"},
            {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, **plateau),
                "monitor": "loss",
                "interval": "step",
                "frequency": 2,
            },
            {"scheduler": schedulers.ReduceLROnPlateau(optimizer), "monitor": "not_logged", "strict": False},
        ]


class OwnSteps(Simple):
    """Overrides what the trainer would do: optimizer_step with warm-up, zero_grad, backward, lr_scheduler_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        if batch_idx == 2:
            return None
        if batch_idx % 2:
            return {"extra": batch_idx, "loss": loss, "outputs": [loss.detach()]}
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.hparams["lr"] * min(1.0, (self.trainer.global_step + 1) / 4)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.told.append(self.global_step)
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class SkipsEpochs(Simple):
    """Leaves an epoch early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 + self.current_epoch else None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "epoch"},
        ]


class WithLBFGS(Simple):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=3)


class Stops(Simple):
    """Asks to stop, where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _maybe(self, hook: str, at: bool = True) -> None:
        if hook == self.where and at:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._maybe("training_step", self.global_step == 3)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._maybe("on_train_batch_end", self.global_step == 3)

    def on_validation_epoch_end(self) -> None:
        self._maybe("on_validation_epoch_end", self.current_epoch == 1)

    def on_train_epoch_end(self) -> None:
        self.told.append((self.current_epoch, sorted(self.trainer.callback_metrics)))
        self._maybe("on_train_epoch_end")

    def on_train_epoch_start(self) -> None:
        self._maybe("on_train_epoch_start", self.current_epoch == 1)

    def on_train_end(self) -> None:
        self.told.append(("end", self.current_epoch, self.global_step))


class OwnTransfer(Simple):
    """The module's own batch hooks, on batches that are dicts."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"inputs": batch[0], "targets": batch[1]}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        batch["size"] = len(batch["inputs"])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch["inputs"] + batch["size"], batch["targets"]]


class Inner(pl.LightningModule):
    """A LightningModule inside another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * (1 + self.current_epoch) * (1 + self.trainer.global_step / 10)


class Nested(Simple):
    """LightningModules in a module, which look at the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()
        self.frozen = Inner().requires_grad_(False)


class BuiltLate(Simple):
    """Builds its layers in ``configure_model``, after ``setup`` has said how many."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self.width = 8

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(DIM, self.width), nn.Tanh(), nn.Linear(self.width, NUM_CLASSES))


class WithoutOptimizer(Simple):
    """``configure_optimizers`` may return None."""

    def configure_optimizers(self) -> None:
        return None


class Fails(Simple):
    """Raises in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 8:
            raise KeyError("lost")
        return super().training_step(batch, batch_idx)
