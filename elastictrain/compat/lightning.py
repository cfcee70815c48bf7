"""The only file that touches private names of lightning; each one is pinned by a test in tests/compat/.

What a LightningModule and Lightning's own callbacks need to run in a loop that is not Lightning's: reading every return
shape of ``configure_optimizers``, calling hooks in Lightning's order, and finding out what a user has overridden.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback as LightningCallback
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.core import optimizer as lightning_optimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer

from elastictrain.errors import UnsupportedError, UsageError

__all__ = [
    "NOT_OF_THE_MODEL",
    "Hooks",
    "LRSchedulerConfig",
    "LightningCallback",
    "LightningDataModule",
    "LightningModule",
    "LightningOptimizer",
    "attach_log",
    "call_hook",
    "configure_optimizers",
    "current_hook",
    "default_levels",
    "extract_batch_size",
    "flatten_loaders",
    "is_overridden",
    "logged_hparams",
    "set_main_rank",
    "wrap_optimizer",
]


NOT_OF_THE_MODEL = ("_trainer", "_fabric", "log")  # attributes of a module that lead out of it


# ---- what is overridden --------------------------------------------------------------------------------------------


def is_overridden(name: str, instance: Any, base: type) -> bool:
    """Does the instance, or its class below ``base``, bring this method itself?"""
    if name in getattr(instance, "__dict__", {}):
        return True
    return getattr(type(instance), name, None) is not getattr(base, name, None)


def num_parameters(method: Callable[..., Any]) -> int:
    """Positional parameters a bound method takes; a ``*args`` counts as many."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 9
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


# ---- hooks ---------------------------------------------------------------------------------------------------------


@functools.cache
def _hook_names() -> tuple[frozenset[str], frozenset[str]]:
    """Of all hooks that begin with on_; and of all methods of a module."""
    names = {n for base in (LightningModule, LightningCallback) for n in dir(base) if n.startswith("on_")}
    own = {n for n in dir(LightningModule) if not n.startswith("__") and callable(getattr(LightningModule, n, None))}
    return frozenset(names), frozenset(own)


class Hooks:
    """Calls the hooks that somebody has overridden: callbacks first, then the module, as Lightning does.

    A hook that nobody overrides costs one dictionary look-up. ``seconds`` adds up the time spent in each.
    """

    def __init__(self, module: LightningModule, callbacks: Sequence[LightningCallback], trainer: Any) -> None:
        self._module, self._all = module, callbacks
        self.trainer = trainer  # what callbacks get
        self.seconds: dict[str, float] = {}
        names, own = _hook_names()
        # Monitors come last where metrics logged by the module at the end of an epoch should be seen by them.
        late = [c for c in callbacks if isinstance(c, (EarlyStopping, Checkpoint))]
        early = [c for c in callbacks if c not in late]

        def overriding(name: str, among: Sequence[LightningCallback]) -> list[Callable[..., Any]]:
            return [getattr(c, name) for c in among if is_overridden(name, c, LightningCallback)]

        self._callbacks = {
            name: overriding(name, early if name == "on_train_epoch_end" else callbacks) for name in names
        }
        self._late = {"on_train_epoch_end": overriding("on_train_epoch_end", late)}
        self.own: dict[str, Callable[..., Any]] = {
            name: getattr(module, name) for name in own if is_overridden(name, module, LightningModule)
        }
        self.anyone = {
            name
            for name in {*names, *self.own}
            if self._callbacks.get(name) or self._late.get(name) or name in self.own
        }

    def __contains__(self, name: str) -> bool:
        return name in self.anyone

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The callbacks' hooks, then the module's; the module's answer."""
        if name not in self.anyone:
            return None
        started = time.perf_counter()
        fields = self._module.__dict__
        previous, fields["_current_fx_name"] = fields["_current_fx_name"], name
        try:
            for method in self._callbacks.get(name, ()):
                method(self.trainer, self._module, *args, **kwargs)
            return self.own[name](*args, **kwargs) if name in self.own else None
        finally:
            fields["_current_fx_name"] = previous
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def callbacks(self, name: str, *args: Any) -> None:
        """The callbacks' hooks alone."""
        for method in self._callbacks.get(name, ()):
            self.within(name, method, self.trainer, self._module, *args)

    def module(self, name: str, *args: Any) -> None:
        """The module's own hook alone."""
        if name in self.own:
            self.within(name, self.own[name], *args)

    def go_on_in_epoch(self) -> None:
        """Training goes on in the middle of an epoch: for callbacks that only then know what to do in it."""
        for callback in self._all:
            if isinstance(callback, (GradientAccumulationScheduler, StochasticWeightAveraging)):
                self.within("on_train_epoch_start", callback.on_train_epoch_start, self.trainer, self._module)

    def everyone(self, name: str, **kwargs: Any) -> None:
        """``setup`` and ``teardown``: hooks of callbacks and module that do not begin with on_."""
        for callback in self._all:
            self.within(name, getattr(callback, name), self.trainer, self._module, **kwargs)
        self.within(name, getattr(self._module, name), **kwargs)

    def late(self, name: str) -> None:
        """The hooks of callbacks that monitor what the module's own hook has just logged."""
        for method in self._late.get(name, ()):
            self.within(name, method, self.trainer, self._module)

    def within(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as if it were the module's hook ``name``: what it logs belongs to that hook."""
        fields = self._module.__dict__
        previous, fields["_current_fx_name"] = fields["_current_fx_name"], name
        try:
            return function(*args, **kwargs)
        finally:
            fields["_current_fx_name"] = previous


def call_hook(module: LightningModule, name: str) -> Any:
    """A hook of the module that runs before there are any :class:`Hooks`."""
    return Hooks(module, (), None).within(name, getattr(module, name))


def current_hook(module: LightningModule) -> str | None:
    """The hook that is running, or None outside of all hooks."""
    name: str | None = module.__dict__["_current_fx_name"]
    return name


def attach_log(module: LightningModule, log: Callable[..., None] | None) -> None:
    """Send ``self.log`` of the module, and of LightningModules inside it, to ``log``; None gives it back."""
    for part in module.modules():
        if isinstance(part, LightningModule):
            if log is None:
                part.__dict__.pop("log", None)
                part.__dict__["_metric_attributes"] = None
            else:
                part.__dict__["log"] = log  # an instance attribute: nn.Module.__setattr__ is slow


def default_levels(hook: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Where a value logged in this hook goes, as Lightning documents it.

    Raises:
        UsageError: the hook does not allow logging, or not at this level.
    """
    try:
        return _FxValidator.check_logging_and_get_default_levels(hook, on_step=on_step, on_epoch=on_epoch)
    except (MisconfigurationException, RuntimeError) as error:
        raise UsageError(" ".join(str(error).split())) from error


def flatten_loaders(given: Any) -> list[Any]:
    """The loaders of a validation, test or prediction one after another, as Lightning takes nested lists and dicts.

    Raises:
        UnsupportedError: a ``CombinedLoader`` that reads several of them at once.
    """
    if given is None:
        return []
    if isinstance(given, CombinedLoader):
        if given._mode != "sequential":
            raise UnsupportedError(
                f'a CombinedLoader with mode="{given._mode}" for evaluation: ranks take whole batches in turns; use'
                ' mode="sequential", or combine the datasets (torch.utils.data.StackDataset)'
            )
        return list(given.flattened)
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        return [loader for part in given for loader in flatten_loaders(part)]
    return [given]


def logged_hparams(module: LightningModule, datamodule: LightningDataModule | None) -> dict[str, Any] | None:
    """What loggers are told: the hyperparameters that module and datamodule saved with ``logger=True``.

    Raises:
        UsageError: both have one under the same name, with different values.
    """
    parts = [part.hparams_initial for part in (module, datamodule) if part is not None and part._log_hyperparams]
    if not parts:
        return None
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name in merged and name != "_class_path" and _differs(merged[name], value):
                raise UsageError(
                    f"hyperparameter {name!r} is {merged[name]!r} in the module and {value!r} in the datamodule: rename one,"
                    " or leave one out (save_hyperparameters(ignore=…))"
                )
            merged[name] = value
    merged.pop("_class_path", None)  # LightningCLI's own
    return merged


def _differs(a: Any, b: Any) -> bool:
    return type(a) is not type(b) or (a is not b if isinstance(a, torch.Tensor) else bool(a != b))


# ---- optimizers ----------------------------------------------------------------------------------------------------


def configure_optimizers(
    module: LightningModule, configure: Callable[[], Any]
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Optimizers and schedulers from any shape that ``configure_optimizers`` may return.

    Raises:
        UsageError: an unknown shape, a learning rate that is no number, or arguments that torch's optimizer refuses.
    """
    try:
        returned = configure()
    except ValueError as error:
        if not _is_of_torch_optim(error):
            raise
        raise UsageError(
            f"{type(module).__name__}.configure_optimizers(): {' '.join(str(error).split())}: correct what the"
            " optimizer or scheduler is given there"
        ) from error
    if returned is None:  # as Lightning documents it: training without an optimizer
        returned = lightning_optimizer._MockOptimizer()
    try:
        optimizers, schedulers, monitor = lightning_optimizer._configure_optimizers(returned)
        if module.automatic_optimization:
            configs = lightning_optimizer._configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            configs = lightning_optimizer._configure_schedulers_manual_opt(schedulers)
        lightning_optimizer._validate_scheduler_api(configs, module)
        lightning_optimizer._validate_optimizers_attached(optimizers, configs)
    except (MisconfigurationException, TypeError) as error:
        raise UsageError(f"{type(module).__name__}.configure_optimizers(): {' '.join(str(error).split())}") from error
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for option in ("lr", "weight_decay"):
                value = group.get(option)
                if isinstance(value, float | torch.Tensor) and not math.isfinite(value):
                    raise UsageError(
                        f"{type(optimizer).__name__} has {option}={float(value)}: give {option} a number in"
                        f" configure_optimizers (or --set {option}=…)"
                    )
    return optimizers, configs


def _is_of_torch_optim(error: BaseException) -> bool:
    """Raised by torch.optim itself, about its arguments."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith("torch.optim.")


def wrap_optimizer(optimizer: Optimizer, strategy: Any) -> LightningOptimizer:
    """The optimizer as user code gets it: its ``step`` goes through ``strategy.optimizer_step``."""
    return LightningOptimizer._to_lightning_optimizer(optimizer, strategy)


def set_main_rank(rank: int) -> None:
    """Tell lightning's loggers and warnings which rank this is; they speak on rank 0 only."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def count_steps(optimizer: LightningOptimizer, after: Callable[[], None]) -> None:
    """Call ``after`` when user code has stepped this optimizer."""
    optimizer._on_after_step = after


# ---- callbacks --------------------------------------------------------------------------------------------------------


def split_callbacks(callbacks: Iterable[Any], ours: type) -> tuple[list[Any], list[LightningCallback]]:
    """Our callbacks and Lightning's.

    Raises:
        UsageError: something that is neither.
    """
    mine, theirs = [], []
    for callback in callbacks:
        if isinstance(callback, ours):
            mine.append(callback)
        elif isinstance(callback, LightningCallback):
            theirs.append(callback)
        else:
            raise UsageError(
                f"callbacks: {callback!r} is a {type(callback).__name__}; give elastictrain.Callback or"
                " lightning.pytorch.Callback objects"
            )
    return mine, theirs
