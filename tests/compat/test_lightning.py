"""The private names of lightning that elastictrain.compat touches: each with the shape that is relied on.

A release that renames one, or changes what it takes or gives, fails here and says which.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.core import optimizer as lightning_optimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elastictrain.compat.callback_view import CallbackView
from elastictrain.compat.lightning import (
    NOT_OF_THE_MODEL,
    Hooks,
    attach_log,
    configure_optimizers,
    count_steps,
    current_hook,
    default_levels,
    is_overridden,
    logged_hparams,
    num_parameters,
    set_main_rank,
    wrap_optimizer,
)
from elastictrain.compat.self_log import make_log
from elastictrain.compat.trainer_view import TrainerView
from elastictrain.errors import UsageError
from tests.parity.data import Data, loader
from tests.parity.harness import lightning_trainer
from tests.parity.modules import Simple


def names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


# ---- core.optimizer ------------------------------------------------------------------------------------------------


def test_signatures_of_what_reads_configure_optimizers() -> None:
    assert names(lightning_optimizer._configure_optimizers) == ["optim_conf"]
    assert names(lightning_optimizer._configure_schedulers_automatic_opt) == ["schedulers", "monitor"]
    assert names(lightning_optimizer._configure_schedulers_manual_opt) == ["schedulers"]
    assert names(lightning_optimizer._validate_scheduler_api) == ["lr_scheduler_configs", "model"]
    assert names(lightning_optimizer._validate_optimizers_attached) == ["optimizers", "lr_scheduler_configs"]
    assert [field.name for field in dataclasses.fields(LRSchedulerConfig)] == [
        *("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")
    ]


def _shapes(o: Any, step: Any, plateau: Any) -> dict[str, tuple[Any, int, list[Any]]]:
    """Every return shape that Lightning documents, with the optimizers and schedulers in it."""
    config = {"scheduler": step, "interval": "step", "frequency": 3, "name": "mine"}
    watched = {"scheduler": plateau, "monitor": "val_loss", "strict": False}
    return {
        "optimizer": (o, 1, []),
        "list": ([o], 1, []),
        "tuple": ((o,), 1, []),
        "two lists": (([o], [step]), 1, [("epoch", 1, None)]),
        "two lists of configs": (([o], [config, watched]), 1, [("step", 3, None), ("epoch", 1, "val_loss")]),
        "a scheduler alone": (([o], step), 1, [("epoch", 1, None)]),
        "dict": ({"optimizer": o}, 1, []),
        "dict with scheduler": ({"optimizer": o, "lr_scheduler": step}, 1, [("epoch", 1, None)]),
        "dict with config": ({"optimizer": o, "lr_scheduler": config}, 1, [("step", 3, None)]),
        "dict with monitor": (
            {"optimizer": o, "lr_scheduler": plateau, "monitor": "val_loss"},
            1,
            [("epoch", 1, "val_loss")],
        ),
        "dicts": (({"optimizer": o, "lr_scheduler": config}, {"optimizer": o}), 2, [("step", 3, None)]),
        "none": (None, 1, []),
    }


@pytest.mark.parametrize("shape", _shapes(None, None, None))
def test_every_return_shape(shape: str) -> None:
    module = Simple()
    module.automatic_optimization = True
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step, plateau = StepLR(optimizer, 1), ReduceLROnPlateau(optimizer)
    returned, count, expected = _shapes(optimizer, step, plateau)[shape]
    optimizers, configs = configure_optimizers(module, lambda: returned)
    assert len(optimizers) == count
    assert shape == "none" or all(found is optimizer for found in optimizers)
    assert [(c.interval, c.frequency, c.monitor) for c in configs] == expected
    assert all(c.reduce_on_plateau == (c.scheduler is plateau) for c in configs)


def test_schedulers_of_manual_optimisation_need_no_monitor() -> None:
    module = Simple()
    module.automatic_optimization = False
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    returned = ([optimizer], [ReduceLROnPlateau(optimizer), {"scheduler": StepLR(optimizer, 1)}])
    _, configs = configure_optimizers(module, lambda: returned)
    assert [config.interval for config in configs] == ["epoch", "epoch"]


def test_the_optimizer_that_does_nothing() -> None:
    """What None from configure_optimizers becomes: it has a state that is empty, and runs its closure."""
    (optimizer,), _ = configure_optimizers(Simple(), lambda: None)
    ran = []
    optimizer.step(lambda: ran.append(1))  # type: ignore[arg-type, return-value]
    optimizer.zero_grad()
    assert ran == [1]
    assert optimizer.state_dict() == {}
    assert optimizer.param_groups == []


class _Strategy:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        self.calls.append((optimizer, kwargs))
        return closure()


def test_the_wrapped_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    strategy, steps = _Strategy(), []
    wrapped = wrap_optimizer(optimizer, strategy)
    assert isinstance(wrapped, LightningOptimizer)
    assert wrapped.optimizer is optimizer
    assert wrapped.param_groups is optimizer.param_groups
    count_steps(wrapped, lambda: steps.append(1))
    assert wrapped.step(lambda: "closed", option=1) == "closed"
    assert strategy.calls == [(optimizer, {"option": 1})]
    assert steps == [1]
    del strategy
    gc.collect()
    with pytest.raises(ReferenceError):  # it is a weak reference: whoever wraps keeps the strategy
        wrapped.step()


# ---- hooks ---------------------------------------------------------------------------------------------------------


def test_the_name_of_the_running_hook() -> None:
    module = Simple()
    assert module.__dict__["_current_fx_name"] is None
    assert current_hook(module) is None
    assert module.__dict__["_metric_attributes"] is None

    class Looks(Simple):
        def on_fit_start(self) -> None:
            self.told.append((self._current_fx_name, current_hook(self)))

    looks = Looks()
    Hooks(looks, (), None)("on_fit_start")
    assert looks.told == [("on_fit_start", "on_fit_start")]
    assert current_hook(looks) is None


def test_hooks_are_those_of_lightning() -> None:
    """What a module may override is found by itself; these are the ones that the trainer knows how to call."""
    known = {n for n in dir(pl.LightningModule) if n.startswith(("on_", "configure_"))}
    assert known - {"on_gpu"} == {
        *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
        *(
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
        ),
        *("on_before_optimizer_step", "on_before_batch_transfer", "on_after_batch_transfer"),
        *(f"on_{stage}_{what}" for stage in ("validation", "test", "predict") for what in ("start", "end")),
        *(f"on_{stage}_epoch_{what}" for stage in ("validation", "test", "predict") for what in ("start", "end")),
        *(f"on_{stage}_batch_{what}" for stage in ("validation", "test", "predict") for what in ("start", "end")),
        *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train"),
        *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval"),
        *("on_save_checkpoint", "on_load_checkpoint"),
        *("configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers"),
        "configure_sharded_model",
    }
    callbacks = {n for n in dir(pl.Callback) if n.startswith("on_")}
    assert callbacks - known == {"on_exception", "on_sanity_check_start", "on_sanity_check_end"}


def test_overriding_and_parameters() -> None:
    module = Simple()
    assert is_overridden("training_step", module, pl.LightningModule)
    assert not is_overridden("test_step", module, pl.LightningModule)
    module.test_step = lambda batch: None  # type: ignore[method-assign, assignment, misc]
    assert is_overridden("test_step", module, pl.LightningModule)
    assert num_parameters(module.training_step) == 2
    assert num_parameters(module.test_step) == 1
    assert num_parameters(Simple().predict_step) > 2


def test_where_values_go_by_default() -> None:
    """Every hook of Lightning's table; what it does not allow is refused."""
    for hook, options in _FxValidator.functions.items():
        if options is None:
            with pytest.raises(UsageError, match=rf"You can't `self.log\(\)` inside `{hook}`"):
                default_levels(hook, None, None)
        else:
            expected = options["default_on_step"], options["default_on_epoch"]
            assert default_levels(hook, None, None) == expected
    assert default_levels("training_step", None, None) == (True, False)
    assert default_levels("validation_step", None, None) == (False, True)
    assert default_levels("validation_step", True, None) == (True, True)
    with pytest.raises(UsageError, match="Logging inside `no_hook` is not implemented"):
        default_levels("no_hook", None, None)
    with pytest.raises(MisconfigurationException):
        _FxValidator.check_logging_and_get_default_levels("on_fit_start", on_step=None, on_epoch=None)


# ---- self.log, hyperparameters, loaders, ranks ---------------------------------------------------------------------


def test_log_has_lightnings_signature() -> None:
    class Session:
        task = Simple()

    ours = inspect.signature(make_log(Session()))
    theirs = inspect.signature(pl.LightningModule.log)
    assert list(ours.parameters) == list(theirs.parameters)[1:]
    for name, parameter in ours.parameters.items():
        assert parameter.default == theirs.parameters[name].default, name
        assert parameter.kind == theirs.parameters[name].kind, name


def test_log_of_nested_modules_is_taken_and_given_back() -> None:
    class Outer(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Simple()

    outer, calls = Outer(), []
    attach_log(outer, lambda name, value, **options: calls.append((name, value)))
    outer.log("a", 1)
    outer.inner.log_dict({"b": 2, "c": 3})  # log_dict is Lightning's own, and ends in log
    assert calls == [("a", 1), ("b", 2), ("c", 3)]
    attach_log(outer, None)
    assert "log" not in outer.__dict__
    assert "log" not in outer.inner.__dict__


def test_hyperparameters_that_are_logged() -> None:
    module, data = Simple(), Data()
    assert module._log_hyperparams is True
    assert logged_hparams(module, None) == {"lr": 0.05}
    assert logged_hparams(module, data) == {"lr": 0.05, "size": 23, "batch_size": 4}

    class Quiet(pl.LightningModule):
        def __init__(self, size: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    assert logged_hparams(Quiet(), None) is None
    assert logged_hparams(Quiet(), data) == {"size": 23, "batch_size": 4}


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # Lightning's own, of its tree functions
def test_combined_loaders() -> None:
    one = loader(8, 4)()
    assert CombinedLoader([one], "sequential")._mode == "sequential"
    assert CombinedLoader([one], "max_size")._mode == "max_size"
    assert CombinedLoader({"a": one, "b": [one]}, "sequential").flattened == [one, one]


def test_the_size_of_a_batch() -> None:
    assert extract_batch_size([torch.zeros(3, 2), torch.zeros(3)]) == 3
    assert extract_batch_size({"a": {"b": torch.zeros(5)}}) == 5


def test_what_leads_out_of_a_module() -> None:
    module = pl.LightningModule()
    attach_log(module, lambda *args, **kwargs: None)
    assert set(NOT_OF_THE_MODEL) <= module.__dict__.keys()
    assert module._trainer is module._fabric is None, "as a copy has them"


def test_the_rank_that_speaks() -> None:
    before = rank_zero_only.rank  # type: ignore[attr-defined]
    try:
        set_main_rank(3)
        assert pl.utilities.rank_zero_only.rank == 3  # the one that loggers ask
        assert rank_zero_only(lambda: 1)() is None
        set_main_rank(0)
        assert rank_zero_only(lambda: 1)() == 1
    finally:
        rank_zero_only.rank = before  # type: ignore[attr-defined]


def test_what_a_checkpoint_callback_says_about_itself() -> None:
    callback = ModelCheckpoint(every_n_train_steps=7, save_top_k=-1)
    assert (callback._every_n_train_steps, callback._train_time_interval) == (7, None)
    assert (callback.save_top_k, callback.monitor) == (-1, None)
    assert ModelCheckpoint(train_time_interval=timedelta(1))._train_time_interval == timedelta(1)
    assert not ModelCheckpoint()._every_n_train_steps


# ---- the trainer's side --------------------------------------------------------------------------------------------


def test_states() -> None:
    assert [fn.name for fn in TrainerFn] == ["FITTING", "VALIDATING", "TESTING", "PREDICTING"]
    assert {"TRAINING", "VALIDATING", "TESTING", "PREDICTING"} <= {stage.name for stage in RunningStage}
    assert names(TrainerState) == ["status", "fn", "stage"]
    assert TrainerStatus.RUNNING == "running"
    assert TrainerFn.FITTING == "fit"
    assert RunningStage.TRAINING.value == "train"


def test_what_lightnings_modules_reach_for() -> None:
    """The parts of self.trainer that LightningModule's own methods use: all of them are in the view."""
    source = inspect.getsource(pl.LightningModule)
    for part in (
        "trainer.strategy._lightning_optimizers",
        "trainer.strategy.backward(",
        "trainer.strategy.all_gather",
        "trainer.precision_plugin.clip_gradients(",
        "trainer.lr_scheduler_configs",
        "trainer.progress_bar_callback",
        "trainer.gradient_clip_val",
        "trainer.gradient_clip_algorithm",
    ):
        assert f"self.{part}" in source, part
    assert hasattr(Precision, "precision")


@pytest.mark.parametrize(
    "path",
    [
        "_logger_connector.should_update_logs",
        "_logger_connector.log_metrics",
        "fit_loop.max_epochs",
        "fit_loop.max_batches",
        "fit_loop.total_batch_idx",
        "fit_loop._should_accumulate",
        "fit_loop._skip_backward",
        "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop.global_step",
        "fit_loop.epoch_loop._should_check_val_epoch",
        "predict_loop.batch_progress.total.ready",
    ],
)
def test_internals_that_callbacks_reach_for(path: str) -> None:
    """Both trainers have them under these names."""
    theirs: Any = lightning_trainer(".", max_epochs=1, logger=False)
    ours: Any = CallbackView(_session(), log=print, backward=print, step=print, clip=print)
    for part in path.split("."):
        theirs, ours = getattr(theirs, part), getattr(ours, part)
    assert callable(theirs) == callable(ours)


def _session() -> Any:
    """As much of a session as the view asks for before anything runs."""
    from types import SimpleNamespace

    counters = SimpleNamespace(step=0, global_step=0, epoch=0)
    return SimpleNamespace(
        task=None,
        datamodule=None,
        counters=counters,
        epoch_left=0,
        stage="train",
        settings=SimpleNamespace(log_every=1, max_epochs=1),
        should_stop=False,
        skip_backward=False,
        has_data=False,
        batch_idx=0,
        epoch_batches=0,
        lightning_callbacks=[],
    )


def test_documented_attributes_are_in_the_view() -> None:
    """Public properties of Lightning's Trainer: answered by the view, or left out on purpose."""
    theirs = {n for n, v in vars(pl.Trainer).items() if isinstance(v, property) and not n.startswith("_")}
    left_out = {
        *("accelerator", "distributed_sampler_kwargs", "num_sanity_val_batches", "scaler"),
        *("fit_loop", "validate_loop", "test_loop", "predict_loop"),
    }
    missing = {name for name in theirs if name not in left_out and not hasattr(TrainerView, name)}
    given_in_init = {"strategy", "precision_plugin", "checkpoint_callbacks"}
    assert missing == given_in_init


def test_who_has_a_hook_of_batches() -> None:
    """The datamodule's, where it has one; what example_input_array goes through."""
    module, data = Simple(), Data()
    selector = _DataHookSelector(module, data)
    assert selector.get_instance("on_before_batch_transfer") is data
    assert _DataHookSelector(module, None).get_instance("on_before_batch_transfer") is module
    with PassThroughProfiler().profile("part"):
        pass


def test_callbacks_that_set_up_an_epoch_at_its_start() -> None:
    """The two that must be told when training goes on in the middle of one."""
    import lightning.pytorch.callbacks as stock

    found = {
        kind
        for kind in vars(stock).values()
        if inspect.isclass(kind)
        and issubclass(kind, pl.Callback)
        and is_overridden("on_train_epoch_start", object.__new__(kind), pl.Callback)
    }
    assert {GradientAccumulationScheduler, StochasticWeightAveraging} <= found
    others = {kind.__name__ for kind in found} - {"GradientAccumulationScheduler", "StochasticWeightAveraging"}
    assert others <= {
        *("BaseFinetuning", "BackboneFinetuning", "LambdaCallback", "LearningRateMonitor", "RichProgressBar"),
        *("TQDMProgressBar", "Timer", "BatchSizeFinder", "LearningRateFinder"),
    }, "a new one: should it be told too?"
