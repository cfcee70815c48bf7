"""What this trainer cannot honour, refused at the start with the reason and the remedy.

Every message is one line: what was given, why it cannot be, what to do instead. A list of what Lightning's Trainer can do
and this one does otherwise is here as well, for people who come from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim import Optimizer

from elastictrain.compat.lightning import is_overridden
from elastictrain.errors import UnsupportedError, UsageError

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

_REMOVED_HOOKS = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}

_REFUSED_CALLBACKS: dict[type, str] = {
    LearningRateFinder: "the tuner runs trainings of its own inside a run; choose the learning rate beforehand",
    BatchSizeFinder: "the global batch size is the configuration; give micro_batch_size what fits",
    ModelPruning: "masks on parameters do not survive a new layout; prune after training",
    BackboneFinetuning: "parameter groups that come later do not survive a new layout; freeze with requires_grad instead",
    BaseFinetuning: "parameter groups that come later do not survive a new layout; freeze with requires_grad instead",
    BasePredictionWriter: "ranks share out whole batches; write what trainer.predict returns",
}

_NEED_A_LOGGER: dict[type, str] = {  # they write to Lightning's loggers alone, never to self.log
    DeviceStatsMonitor: "",
    LearningRateMonitor: ", or use elastictrain.callbacks.LearningRateMonitor",
}

_OPTIONS: dict[str, str] = {
    "accelerator": "the device is found; to train on the CPU of a machine with GPUs set CUDA_VISIBLE_DEVICES to nothing",
    "accumulate_grad_batches": "give global_batch_size: accumulation follows from it on any number of ranks",
    "check_val_every_n_epoch": "give val_every in steps, or leave it out for a validation after every epoch",
    "default_root_dir": "give run_dir",
    "devices": "start as many processes: elastictrain run --nproc-per-node N",
    "enable_checkpointing": "give checkpoint=CheckpointConfig(…), or no run_dir for none",
    "enable_progress_bar": "leave it out: rank 0 shows one, and plain lines where there is no terminal",
    "gradient_clip_algorithm": "give callbacks=[GradientClipping(norm=…)] or GradientClipping(value=…)",
    "gradient_clip_val": "give callbacks=[GradientClipping(norm=…)] or GradientClipping(value=…)",
    "limit_train_batches": "give max_steps, or a shorter dataset (torch.utils.data.Subset)",
    "limit_val_batches": "give a shorter dataset (torch.utils.data.Subset)",
    "log_every_n_steps": "give log_every",
    "logger": "give loggers=[…]",
    "max_time": "give callbacks=[lightning.pytorch.callbacks.Timer(…)]",
    "min_epochs": "an early stop is the callback's or the task's own decision; leave it out",
    "min_steps": "an early stop is the callback's or the task's own decision; leave it out",
    "num_nodes": "start the same command on every node: elastictrain run --nnodes N",
    "num_sanity_val_steps": "with val_every a task is validated before its first step; leave it out",
    "plugins": "give callbacks, such as MixedPrecision",
    "precision": "give callbacks=[MixedPrecision('bf16')]",
    "reload_dataloaders_every_n_epochs": "a new loader has no position to resume from; vary the data inside the dataset by"
    " epoch",
    "strategy": 'give mesh, such as "auto" or "dp_shard=-1"',
    "sync_batchnorm": "running statistics are those of the whole global batch anyway; leave it out",
    "use_distributed_sampler": "the trainer shares out the data itself; leave it out",
    "val_check_interval": "give val_every in steps",
}


def refuse_options(options: Iterable[str]) -> None:
    """Arguments that this trainer does not have.

    Raises:
        UsageError: with what to give instead, where Lightning's Trainer has it; the message of Python otherwise.
    """
    from lightning.pytorch import Trainer

    known = inspect.signature(Trainer.__init__).parameters
    for name in options:
        if name in _OPTIONS and name in known:
            raise UsageError(f"Trainer({name}=…) is an option of lightning.Trainer: {_OPTIONS[name]}")
        if name in known:
            raise UsageError(
                f"Trainer({name}=…) is an option of lightning.Trainer that this trainer does not have: leave it out"
            )
        raise TypeError(f"Trainer.__init__() got an unexpected keyword argument {name!r}")


def check_supported(
    module: LightningModule,
    datamodule: Any,
    callbacks: Iterable[Any],
    *,
    purpose: str,
    world_size: int,
    is_sharded: bool,
    has_loggers: bool,
) -> None:
    """Refuse what this trainer cannot honour, before anything is built.

    Raises:
        UnsupportedError: with the reason and the remedy.
    """
    name = type(module).__name__
    if purpose == "fit":
        for needed, how in (("training_step", "training_step(batch, batch_idx)"), ("configure_optimizers", "it")):
            if not is_overridden(needed, module, LightningModule):
                raise UsageError(f"{name} has no {needed}: define {how}")
    for step in _STEPS:
        parameters = inspect.signature(getattr(module, step)).parameters
        if "dataloader_iter" in parameters:
            raise UnsupportedError(
                f"{name}.{step}(dataloader_iter): the trainer owns the order and position of data; take (batch, batch_idx)"
            )
        if "optimizer_idx" in parameters:
            raise UnsupportedError(
                f"{name}.{step}(…, optimizer_idx): set self.automatic_optimization = False and step the optimizers of"
                " self.optimizers() yourself"
            )
    for hook, instead in _REMOVED_HOOKS.items():
        if callable(getattr(module, hook, None)):
            raise UnsupportedError(
                f"{name}.{hook}(outputs): Lightning 2 calls it no more; rename it to {instead}() and keep the outputs in an"
                " attribute"
            )
    if is_overridden("configure_sharded_model", module, LightningModule):
        raise UnsupportedError(f"{name}.configure_sharded_model(): rename it to configure_model()")
    for path, part in module.named_modules():
        if (kind := _foreign_wrapper(part)) is not None:
            where = f"{name}.{path}" if path else name
            raise UnsupportedError(
                f"{where} is wrapped by {kind}: give the bare module; the trainer shards it (--mesh dp_shard=-1)"
            )
    for source in (module, datamodule):
        if getattr(source, "reload_dataloaders_every_n_epochs", 0):
            raise UnsupportedError(
                f"{type(source).__name__}.reload_dataloaders_every_n_epochs:"
                f" {_OPTIONS['reload_dataloaders_every_n_epochs']}"
            )
    keys: set[str] = set()
    for callback in callbacks:
        _check_callback(
            callback, world_size=world_size, is_sharded=is_sharded, has_loggers=has_loggers or purpose != "fit"
        )
        if is_overridden("state_dict", callback, Callback):
            if callback.state_key in keys:
                raise UsageError(
                    f"two callbacks {type(callback).__name__} with the same state_key {callback.state_key!r}: their states"
                    " could not be told apart; give one of them other options, or override state_key"
                )
            keys.add(callback.state_key)


def _check_callback(callback: Any, *, world_size: int, is_sharded: bool, has_loggers: bool) -> None:
    kind = type(callback).__name__
    for needy, instead in _NEED_A_LOGGER.items():
        if isinstance(callback, needy) and not has_loggers:
            raise UsageError(
                f"callback {kind} of Lightning writes to a Lightning logger and there is none:"
                f" give Trainer(loggers=[CSVLogger(…)]){instead}"
            )
    for refused, why in _REFUSED_CALLBACKS.items():
        if isinstance(callback, refused):
            raise UnsupportedError(f"callback {kind}: {why}")
    if isinstance(callback, ModelCheckpoint):
        raise UnsupportedError(f"callback {kind}: checkpoints are the trainer's; use {_checkpoint_config(callback)}")
    if isinstance(callback, Checkpoint):
        raise UnsupportedError(
            f"callback {kind}: checkpoints are the trainer's; use checkpoint=CheckpointConfig(…), whatever ends a run"
        )
    if isinstance(callback, StochasticWeightAveraging) and world_size > 1:
        raise UnsupportedError(
            f"callback {kind}: its averages do not survive a new layout; use elastictrain.callbacks.EMA"
        )
    if copies_the_model(callback) and is_sharded:
        raise UnsupportedError(f"callback {kind} copies the whole model: use elastictrain.callbacks.EMA with dp_shard")


def copies_the_model(callback: Any) -> bool:
    """Lightning's averages of weights are a copy of the whole module, which a sharded one does not have."""
    return isinstance(callback, WeightAveraging)


def _checkpoint_config(callback: ModelCheckpoint) -> str:
    """What comes nearest to a ModelCheckpoint, as code."""
    options = []
    if callback._every_n_train_steps:
        options.append(f"every_steps={callback._every_n_train_steps}")
    elif callback._train_time_interval is not None:
        options.append(f"every_seconds={callback._train_time_interval.total_seconds():g}")
    if callback.save_top_k == -1:
        options.append("keep_last=None")
    elif callback.monitor is None and callback.save_top_k > 0:
        options.append(f"keep_last={callback.save_top_k}")
    text = f"checkpoint=CheckpointConfig({', '.join(options)})"
    if callback.monitor is not None:
        text += f", which keeps the newest ones, not the best by {callback.monitor!r}"
    return text


def _foreign_wrapper(module: nn.Module) -> str | None:
    """The name of a distributed wrapper of another library, or of torch's older ones."""
    for base in type(module).__mro__:
        where = f"{base.__module__}.{base.__name__}"
        if where in (
            "torch.nn.parallel.distributed.DistributedDataParallel",
            "torch.nn.parallel.data_parallel.DataParallel",
            "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
        ):
            return base.__name__
        if base.__module__.startswith(("deepspeed.", "fairscale.")):
            return f"{base.__module__.split('.')[0]}'s {base.__name__}"
    return None


def check_optimizers(optimizers: Sequence[Optimizer], module: LightningModule, *, clips: bool, world_size: int) -> None:
    """Refuse optimizers that this step cannot be made of.

    Args:
        clips: a callback clips gradients.

    Raises:
        UnsupportedError: several optimizers with automatic optimisation, clipping with manual optimisation, LBFGS on
            several ranks.
    """
    name = type(module).__name__
    if module.automatic_optimization and len(optimizers) > 1:
        raise UnsupportedError(
            f"{name}.configure_optimizers() returned {len(optimizers)} optimizers: with automatic optimisation there is"
            " one; set self.automatic_optimization = False and step them in training_step"
        )
    if clips and not module.automatic_optimization:
        raise UnsupportedError(
            f"a callback clips gradients, and {name} steps its optimizers itself: call self.clip_gradients(optimizer,"
            " gradient_clip_val=…) in training_step instead"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) and world_size > 1:
            raise UnsupportedError(
                "LBFGS runs its closure as often as each rank's own loss asks for: on several ranks use another optimizer"
            )


def check_dataloader_idx(module: LightningModule, stage: str, *, num_loaders: int) -> None:
    """The step and batch hooks of a validation, test or prediction must take ``dataloader_idx`` where there is one.

    Args:
        stage: "validation", "test" or "predict".

    Raises:
        UsageError: names the method.
    """
    name = type(module).__name__
    for method in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        parameter = _parameter(getattr(module, method), "dataloader_idx")
        if num_loaders > 1 and parameter is None:
            raise UsageError(
                f"{name}.{method}() has no argument dataloader_idx, and there are {num_loaders} loaders: add"
                " dataloader_idx=0"
            )
        if num_loaders == 1 and parameter is not None and _is_required(parameter):
            raise UsageError(
                f"{name}.{method}() needs an argument dataloader_idx, and there is one loader: write dataloader_idx=0"
            )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _parameter(method: Callable[..., Any], name: str) -> inspect.Parameter | None:
    parameters = inspect.signature(method).parameters
    if name in parameters:
        return parameters[name]
    return next((p for p in parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
