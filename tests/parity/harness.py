"""One module and its data in ``lightning.Trainer`` and in ours: everything that a user can see of a run, side by side.

    compare(Case(module=Classifier, train=loader(23, 4), val=loader(10, 4), epochs=2, accumulate=4), tmp_path)

A :class:`Case` makes everything anew for each trainer, from one seed. What is compared, with ``==`` and to the last bit:
weights and buffers, states of optimizers and schedulers, every call of every hook of module, callback and datamodule with
its arguments and with what ``self.trainer`` said at that moment, every call of a logger, the logger's CSV and YAML files,
and the trainer's metrics after the run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor
from torch.optim import Optimizer

import elastictrain

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@dataclass
class Case:
    """What is run. Factories are called once for each trainer, under one seed."""

    module: Callable[[], pl.LightningModule]
    train: Callable[[], Any] | None = None
    val: Callable[[], Any] | None = None
    datamodule: Callable[[], Any] | None = None
    callbacks: Callable[[], Sequence[Any]] = list
    epochs: int | None = 2
    max_steps: int | None = None
    accumulate: int = 1
    log_every: int = 2
    val_every: int | None = None  # batches under Lightning
    lightning: Mapping[str, Any] = field(default_factory=dict)  # more arguments, for one trainer alone
    ours: Mapping[str, Any] = field(default_factory=dict)
    our_callbacks: Callable[[], Sequence[Any]] = list
    loader_batch: int | None = None  # where the loader does not say
    raises: type[Exception] | None = None  # by the module, during the fit
    hooks: bool = True  # record them: every hook of the module is then overridden

    def batch_size(self) -> int:
        """Samples in a batch of the training loader."""
        if self.loader_batch is not None:
            return self.loader_batch
        if self.train is not None:
            return int(self.train().batch_size)
        source = self.datamodule() if self.datamodule is not None else self.module()
        source.setup("fit")
        return int(source.train_dataloader().batch_size)


@dataclass
class Seen:
    """What there is to see of one run."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    logger_calls: list[tuple[Any, ...]] = field(default_factory=list)
    csv: str = ""
    hparams: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)  # what the module chose to write down, in its own list ``told``
    module: Any = None
    trainer: Any = None
    returned: Any = None


def compare(case: Case, folder: Path) -> tuple[Seen, Seen]:
    """Run the case in both trainers and fail where they differ. Returns Lightning's run and ours.

    Ours runs twice: with every hook recorded, and with none but the module's own, where the trainer takes shorter ways.
    """
    theirs, ours = run_lightning(case, folder / "lightning"), run_ours(case, folder / "ours")
    assert_equal(theirs, ours)
    if case.hooks:
        plain = run_ours(replace(case, hooks=False), folder / "plain")
        plain.calls = theirs.calls
        assert_equal(theirs, plain)
    return theirs, ours


def run_lightning(case: Case, folder: Path) -> Seen:
    """Fit in ``lightning.Trainer``."""
    seen = Seen()
    module, datamodule, callbacks = _make(case, seen)
    loggers = _loggers(folder, seen)
    every = {} if case.val_every is None else {"val_check_interval": case.val_every, "check_val_every_n_epoch": None}
    trainer = lightning_trainer(
        folder,
        max_epochs=case.epochs,
        max_steps=-1 if case.max_steps is None else case.max_steps,
        accumulate_grad_batches=case.accumulate,
        log_every_n_steps=case.log_every,
        logger=loggers,
        callbacks=callbacks,
        **every,
        **case.lightning,
    )
    with quiet(), _raising(case.raises):
        trainer.fit(module, _made(case.train), _made(case.val), datamodule=datamodule)
    return _collect(seen, module, trainer, loggers)


def run_ours(case: Case, folder: Path) -> Seen:
    """Fit in ``elastictrain.Trainer``."""
    seen = Seen()
    module, datamodule, callbacks = _make(case, seen)
    loggers = _loggers(folder, seen)
    trainer = elastictrain.Trainer(
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        global_batch_size=None if case.accumulate == 1 else case.accumulate * case.batch_size(),
        log_every=case.log_every,
        val_every=None if case.val_every is None else case.val_every // case.accumulate,
        loggers=loggers,
        callbacks=[*callbacks, *case.our_callbacks()],
        **case.ours,
    )
    with quiet(), _raising(case.raises):
        trainer.fit(module, datamodule, train_dataloaders=_made(case.train), val_dataloaders=_made(case.val))
    return _collect(seen, module, trainer, loggers)


def lightning_trainer(folder: Path, **options: Any) -> pl.Trainer:
    """A trainer without what would only print."""
    fixed: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    with quiet():
        return pl.Trainer(**{**fixed, **options})


def _raising(error: type[Exception] | None) -> Any:
    return nullcontext() if error is None else pytest.raises(error)


class quiet(warnings.catch_warnings):
    """Lightning's advice is not what is tested here."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def assert_equal(theirs: Seen, ours: Seen) -> None:
    """Fail with the first difference, Lightning's side first."""
    _equal_lists("call", theirs.calls, ours.calls)
    _equal_lists("entry of told", theirs.told, ours.told)
    assert list(ours.weights) == list(theirs.weights)
    for name, value in theirs.weights.items():
        assert same(value, ours.weights[name]), f"{name}: {value} and {ours.weights[name]}"
    for what in ("optimizers", "schedulers"):
        assert same(getattr(theirs, what), getattr(ours, what)), (
            f"{what}: {getattr(theirs, what)}\nand {getattr(ours, what)}"
        )
    _equal_lists("line of the CSV file", theirs.csv.splitlines(), ours.csv.splitlines())
    assert ours.hparams == theirs.hparams
    _equal_lists("call of a logger", theirs.logger_calls, ours.logger_calls)
    for name, value in theirs.metrics.items():
        assert same(value, ours.metrics[name]), f"{name}: {value}\nand {ours.metrics[name]}"


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, whatever is inside."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _equal_lists(what: str, theirs: list[Any], ours: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            a, b = _narrowed(a, b)
            before = "\n".join(f"  {str(line)[:300]}" for line in theirs[max(0, i - 4) : i])
            raise AssertionError(f"{what} {i} differs; before it\n{before}\nLightning: {a}\nours:      {b}")
    if len(theirs) != len(ours):
        longer, whose = (theirs, "Lightning") if len(theirs) > len(ours) else (ours, "ours")
        rest = "\n".join(f"  {line}" for line in longer[min(len(theirs), len(ours)) :][:5])
        raise AssertionError(f"{len(theirs)} of Lightning and {len(ours)} of ours; only {whose} has\n{rest}")


def _narrowed(a: Any, b: Any) -> tuple[Any, Any]:
    """What differs inside two dicts or lists of one length."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if a.get(key, "absent") != b.get(key, "absent")]
        return {key: a.get(key, "absent") for key in keys}, {key: b.get(key, "absent") for key in keys}
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = [_narrowed(x, y) if x != y else (x, y) for x, y in zip(a, b, strict=True)]
        return [x for x, _ in pairs], [y for _, y in pairs]
    return a, b


# ---- making and collecting -----------------------------------------------------------------------------------------


def _make(case: Case, seen: Seen) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(7)
    module = case.module()
    datamodule = case.datamodule() if case.datamodule is not None else None
    callbacks = list(case.callbacks())
    if case.hooks:
        record_hooks(module, "module", seen.calls)
        if datamodule is not None:
            record_hooks(datamodule, "datamodule", seen.calls)
        callbacks.insert(0, recording_callback(seen.calls))
    return module, datamodule, callbacks


def _made(factory: Callable[[], Any] | None) -> Any:
    return None if factory is None else factory()


def _loggers(folder: Path, seen: Seen) -> list[Logger]:
    return [CSVLogger(folder, name=None, version=""), ListLogger(seen.logger_calls)]


def _collect(seen: Seen, module: Any, trainer: Any, loggers: list[Logger]) -> Seen:
    view = module.trainer
    seen.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    seen.optimizers = [optimizer.state_dict() for optimizer in view.optimizers]
    seen.schedulers = [_plain(config.scheduler.state_dict()) for config in view.lr_scheduler_configs]
    assert isinstance(loggers[0], CSVLogger)
    folder = Path(loggers[0].log_dir)
    for name, attribute in (("metrics.csv", "csv"), ("hparams.yaml", "hparams")):
        if (path := folder / name).exists():
            setattr(seen, attribute, path.read_text())
    seen.metrics = {
        name: dict(getattr(view, name)) for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    }
    seen.told = getattr(module, "told", [])
    seen.module, seen.trainer = module, trainer
    return seen


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Without the functions and optimizers that a scheduler's state drags along."""
    return {k: v for k, v in state.items() if not callable(v) and not isinstance(v, Optimizer)}


# ---- recording -----------------------------------------------------------------------------------------------------

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_ONLY_IF_DEFINED = (*_STEPS, *_LOADERS, "configure_model", "prepare_data")
_MODULE_HOOKS = [
    *(n for base in (ModelHooks, DataHooks, CheckpointHooks) for n, f in vars(base).items() if inspect.isfunction(f)),
    *(n for n in vars(pl.LightningModule) if n.startswith("configure_")),
    *_STEPS,
    "backward",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
]
_DATAMODULE_HOOKS = [n for n, f in vars(DataHooks).items() if inspect.isfunction(f)]
_DATAMODULE_HOOKS += ["on_exception", "state_dict", "load_state_dict"]


def record_hooks(owner: Any, name: str, calls: list[tuple[Any, ...]]) -> None:
    """Give the object a class of its own that overrides all hooks and writes each call down."""
    base = type(owner)
    is_module = isinstance(owner, pl.LightningModule)
    methods: dict[str, Any] = {}
    for hook in dict.fromkeys(_MODULE_HOOKS if is_module else _DATAMODULE_HOOKS):
        if hook.startswith("__") or hook == "configure_sharded_model":
            continue
        root = pl.LightningModule if is_module else pl.LightningDataModule
        defined = getattr(base, hook, None) is not getattr(root, hook, None)
        if hook in _ONLY_IF_DEFINED and not defined:
            continue
        methods[hook] = _recorded(getattr(base, hook), hook, name, calls, keep_signature=hook in _STEPS)
    owner.__class__ = type(base.__name__, (base,), {**methods, "__module__": base.__module__})


def _recorded(
    function: Callable[..., Any], hook: str, owner: str, calls: list[tuple[Any, ...]], *, keep_signature: bool
) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer if isinstance(self, pl.LightningModule) else self.trainer
        calls.append((owner, hook, *map(described, args), described(kwargs), moment(trainer)))
        return function(self, *args, **kwargs)

    # Lightning looks through functools.wraps and would not see that a hook is overridden.
    return functools.wraps(function)(method) if keep_signature else method


def recording_callback(calls: list[tuple[Any, ...]]) -> Callback:
    """A Lightning callback that overrides every hook."""

    def make(hook: str) -> Callable[..., Any]:
        def method(self: Any, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(("callback", hook, *map(described, args), described(kwargs), moment(trainer)))

        return method

    names = [n for n in vars(Callback) if n.startswith("on_") or n in ("setup", "teardown")]
    made: Callback = type("RecordingCallback", (Callback,), {name: make(name) for name in names})()
    return made


def moment(trainer: Any) -> tuple[Any, ...]:
    """What the trainer says about itself at a call."""
    if trainer is None:
        return ()
    stages = ("training", "validating", "testing", "predicting")
    stage = [name for name in stages if getattr(trainer, name)]
    return trainer.current_epoch, trainer.global_step, *stage, trainer.should_stop


def described(value: Any) -> Any:
    """A value as something that can be compared and read."""
    if isinstance(value, Tensor):
        content = value.detach()
        if value.numel() > 4:
            digest = hashlib.blake2b(content.contiguous().numpy().tobytes(), digest_size=4).hexdigest()
            return f"tensor{list(value.shape)} {digest}"
        return f"tensor{content.tolist()}"
    if isinstance(value, Mapping):
        return {key: described(item) for key, item in value.items() if key != "state_dict"}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, str):
        return str(getattr(value, "value", value))
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, LightningOptimizer):
        return f"LightningOptimizer({type(value.optimizer).__name__})"
    if isinstance(value, torch.device):
        return str(value)
    return "function" if inspect.isroutine(value) or type(value).__name__ == "Closure" else type(value).__name__


class ListLogger(Logger):
    """Writes down what a logger is told."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._calls = calls

    @property
    def name(self) -> str:
        return "list"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._calls.append(("log_metrics", dict(metrics), step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._calls.append(("log_hyperparams", described(params)))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self._calls.append(("log_graph", type(model).__name__))

    def save(self) -> None:
        self._calls.append(("save",))

    def finalize(self, status: str) -> None:
        self._calls.append(("finalize", status))


def evaluate(case: Case, folder: Path, calls: Sequence[tuple[str, Callable[[], Any] | None]], *, ours: bool) -> Seen:
    """Calls such as ``("fit", None), ("test", loader)`` on one trainer, one module; ``returned`` has what each gave."""
    seen = Seen()
    module, datamodule, callbacks = _make(case, seen)
    loggers = _loggers(folder, seen)
    options: dict[str, Any] = {"max_epochs": case.epochs, "logger": loggers, "callbacks": callbacks}
    if ours:
        trainer: Any = elastictrain.Trainer(
            max_epochs=case.epochs, log_every=case.log_every, loggers=loggers, callbacks=callbacks
        )
    else:
        trainer = lightning_trainer(folder, log_every_n_steps=case.log_every, **options)
    seen.returned = []
    with quiet():
        for name, data in calls:
            if name == "fit" and ours:
                loaders = {"train_dataloaders": _made(case.train), "val_dataloaders": _made(case.val)}
                trainer.fit(module, datamodule, **loaders)
            elif name == "fit":
                trainer.fit(module, _made(case.train), _made(case.val), datamodule=datamodule)
            else:
                mine = None if data is not None else datamodule
                returned = getattr(trainer, name)(module, datamodule=mine, dataloaders=_made(data))
                seen.returned.append((name, returned))
    seen = _collect(seen, module, trainer, loggers)
    seen.optimizers = seen.schedulers = []  # ours are those of the last call, Lightning's those of the last fit
    return seen


def compare_evaluation(
    case: Case, folder: Path, calls: Sequence[tuple[str, Callable[[], Any] | None]]
) -> tuple[Seen, Seen]:
    """:func:`evaluate` in both trainers; fail where they differ, in what they return as well."""
    theirs = evaluate(case, folder / "lightning", calls, ours=False)
    ours = evaluate(case, folder / "ours", calls, ours=True)
    assert_equal(theirs, ours)
    plain = evaluate(replace(case, hooks=False), folder / "plain", calls, ours=True)
    plain.calls = theirs.calls
    assert_equal(theirs, plain)
    for (name, a), (_, b) in zip(theirs.returned, ours.returned, strict=True):
        assert same(a, b), f"{name} returned\nLightning: {a}\nours:      {b}"
    return theirs, ours
