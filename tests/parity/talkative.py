"""Modules and callbacks that log in every way, and ask the trainer about everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.modules import Schedulers, Simple


class SeveralLoaders(Simple):
    """Two validation loaders: with their index in the name, without it, on steps, and one in one loader alone."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("val_both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"val_own_{dataloader_idx}", loss + 1, add_dataloader_idx=False)
        self.log(f"val_own_step_{dataloader_idx}", loss + 2, on_step=True, on_epoch=False, add_dataloader_idx=False)
        if dataloader_idx == 1:
            self.log("val_only_second", loss * 2)
        return loss

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_output", outputs)

    def on_validation_epoch_end(self) -> None:
        seen = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.told.append(("validation", sorted(seen.items()), self.trainer.num_val_batches))
        self.log("val_mean", (seen["val_own_0"] + seen["val_own_1"]) / 2)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)
        self.log("test_step", float(batch_idx), on_step=True)

    def on_test_epoch_end(self) -> None:
        self.log("test_done", 1)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0]) + dataloader_idx


_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "backward",
)


_EPOCH_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)


class LogEverywhere(Simple):
    """``self.log`` in every hook that allows it, with every option."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def number(self) -> float:
        self.count += 1
        return int(self.count) / 7

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = self.number()
        self.log("int", batch_idx)
        self.log("bool", batch_idx % 2 == 0, on_epoch=True)
        self.log("tensor_int", torch.tensor([[batch_idx]]), on_epoch=True)
        self.log("double", torch.tensor(number, dtype=torch.float64), on_epoch=True)
        self.log("half", torch.tensor(number, dtype=torch.float16), on_epoch=True)
        self.log("bar", number, prog_bar=True, logger=False, on_epoch=True)
        self.log("no_logger", number, logger=False)
        self.log("graph", loss * 2, enable_graph=True, on_epoch=True)
        for reduce_fx in (
            "mean",
            "sum",
            "max",
            "min",
            torch.mean,
            torch.sum,
            torch.max,
            torch.min,
            max,
            min,
            sum,
            "avg",
        ):
            name = getattr(reduce_fx, "__name__", reduce_fx)
            kind = "" if isinstance(reduce_fx, str) else reduce_fx.__module__
            self.log(f"{name}_{kind}", -number if batch_idx % 3 else number, on_epoch=True, reduce_fx=reduce_fx)
        self.log("sized", number, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("zero", -0.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("rank_zero", number, rank_zero_only=True)
        self.log("synced", number, sync_dist=True, on_epoch=True)
        self.log_dict({"dict_a": number, "dict_b": torch.tensor(number)}, on_step=False, on_epoch=True, prog_bar=True)
        self.log("rare", number) if batch_idx == 1 else None
        in_place = torch.tensor(number)
        self.log("in_place", in_place, on_epoch=True)
        in_place.mul_(1000)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_step", self.number(), on_step=True, on_epoch=False)
        self.log("val_both", self.number(), on_step=True, on_epoch=True)
        self.log("val_max", self.number(), reduce_fx="max")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("on_validation_batch_start", self.number(), on_step=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("on_validation_batch_end", self.number())


def _logging(hook: str, **options: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log(hook, self.number(), **options)
        self.log("everywhere", self.number(), on_step=False, on_epoch=True)
        return getattr(super(LogEverywhere, self), hook)(*args, **kwargs)

    return method


for _hook in _STEP_HOOKS:
    setattr(LogEverywhere, _hook, _logging(_hook, on_epoch=True))

for _hook in _EPOCH_HOOKS:
    setattr(LogEverywhere, _hook, _logging(_hook))


class Noisy(pl.Callback):
    """A callback that logs in every way."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("from_callback", outputs["loss"] * 3, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("validations", float(trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("epochs", trainer.callback_metrics["loss"] + 1)


class Asks(Simple):
    """Writes down what ``self.trainer`` says, in many hooks."""

    names = (
        "accumulate_grad_batches",
        "barebones",
        "check_val_every_n_epoch",
        "current_epoch",
        "enable_validation",
        "estimated_stepping_batches",
        "fast_dev_run",
        "global_rank",
        "global_step",
        "gradient_clip_algorithm",
        "gradient_clip_val",
        "interrupted",
        "is_global_zero",
        "is_last_batch",
        "local_rank",
        "log_every_n_steps",
        "max_epochs",
        "max_steps",
        "min_epochs",
        "min_steps",
        "node_rank",
        "num_devices",
        "num_nodes",
        "num_training_batches",
        "num_val_batches",
        "overfit_batches",
        "predicting",
        "precision",
        "received_sigterm",
        "sanity_checking",
        "should_stop",
        "testing",
        "training",
        "val_check_interval",
        "validating",
        "world_size",
    )

    def ask(self, hook: str) -> None:
        trainer = self.trainer
        said = {name: getattr(trainer, name) for name in self.names}
        said["state"] = (str(trainer.state.fn), str(trainer.state.stage), str(trainer.state.status))
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            said[name] = {key: float(value) for key, value in getattr(trainer, name).items()}
        said["kinds"] = {type(value).__name__ for value in trainer.callback_metrics.values()}
        said["callbacks"] = len(trainer.early_stopping_callbacks), len(trainer.checkpoint_callbacks)
        said["logger"] = type(trainer.logger).__name__, len(trainer.loggers), trainer.log_dir == self.logger.log_dir
        said["device"] = str(trainer.strategy.root_device), str(self.device), trainer.device_ids
        said["modules"] = trainer.lightning_module is self, trainer.model is self, trainer.datamodule
        loaders = trainer.train_dataloader, trainer.val_dataloaders
        said["loaders"] = [type(loader).__name__ for loader in loaders]
        said["optimizers"] = [type(o).__name__ for o in trainer.optimizers], len(trainer.lr_scheduler_configs)
        self.told.append((hook, said))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epochs", loss * 2, on_step=False, on_epoch=True)
        self.ask("training_step")
        gathered = self.all_gather({"loss": loss.detach(), "number": 2})
        self.told.append({key: value.tolist() for key, value in gathered.items()})
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ask("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ask("on_train_batch_end")

    def on_train_start(self) -> None:
        self.print("training starts on", self.trainer.max_epochs, "epochs")
        self.trainer.print("and goes on")
        self.ask("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.ask("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.ask("on_train_epoch_end")

    def on_validation_start(self) -> None:
        self.ask("on_validation_start")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ask("on_validation_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.ask("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        self.ask("on_validation_end")

    def on_train_end(self) -> None:
        self.ask("on_train_end")

    def on_fit_end(self) -> None:
        self.ask("on_fit_end")


class OwnCallbacks(Schedulers):
    """Brings callbacks of its own, one of which takes the place of the trainer's."""

    def configure_callbacks(self) -> Any:
        self.told.append(self.trainer.max_epochs)
        return [Noisy(), pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02)]
