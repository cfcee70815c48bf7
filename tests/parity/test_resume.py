"""A run that was stopped and went on in a fresh module is the run that never stopped: ``lightning.Trainer``'s, at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from torchmetrics import (
    AUROC,
    CatMetric,
    ConcordanceCorrCoef,
    F1Score,
    MaxMetric,
    MetricCollection,
    PearsonCorrCoef,
    Precision,
    Recall,
)

from elastictrain.errors import UnsupportedError
from tests.parity import data, talkative
from tests.parity import modules as m
from tests.parity.data import loader, tokens
from tests.parity.harness import Case, Seen, run_lightning, run_ours, same

VAL = loader(10, 4, seed=1)


class Interrupted(Callback):
    """Ctrl-C after so many optimizer steps."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def in_parts(case: Case, folder: Path, stops: Sequence[int | str]) -> list[Seen]:
    """The case in a run directory: stopped at each of ``stops``, and each time continued by a fresh module.

    A stop is a number of optimizer steps, at which Ctrl-C is pressed, or "epochs": a limit of 2 epochs that is lifted later.
    """
    case = replace(case, hooks=False, ours={**case.ours, "run_dir": str(folder / "run")})
    seen = []
    for i, stop in enumerate(stops):
        if stop == "epochs":
            part = replace(case, epochs=2)
        else:
            part = replace(case, callbacks=lambda stop=stop: [*case.callbacks(), Interrupted(int(stop))])
        seen.append(run_ours(part, folder / str(i)))
        assert (seen[-1].trainer.stopped is None) == (stop == "epochs")
    seen.append(run_ours(case, folder / "last"))
    return seen


def assert_continued(whole: Seen, parts: list[Seen]) -> None:
    """The last part has ended where the whole has, and together they have logged what the whole has."""
    last = parts[-1]
    for name, value in whole.weights.items():
        assert same(value, last.weights[name]), name
    assert same(whole.optimizers, last.optimizers)
    assert same(whole.schedulers, last.schedulers)
    logged = [call for part in parts for call in part.logger_calls if call[0] == "log_metrics"]
    for i, call in enumerate(call for call in whole.logger_calls if call[0] == "log_metrics"):
        assert logged[i] == call, f"{i} of what is logged"
    assert len(logged) == sum(call[0] == "log_metrics" for call in whole.logger_calls)
    assert len(last.csv.splitlines()) > 1


class Everywhere(talkative.LogEverywhere):
    """Without what a second start does a second time."""

    def on_train_start(self) -> None:
        pass


class Gathers(m.Simple):
    """Metrics that gather over an epoch and that nobody logs until it ends: sums, lists, groups that share their states."""

    def __init__(self) -> None:
        super().__init__()
        kinds: Any = {"task": "multiclass", "num_classes": data.NUM_CLASSES}
        metrics = [Precision(**kinds, average="macro"), Recall(**kinds, average="macro"), F1Score(**kinds)]
        self.metrics = MetricCollection(metrics)
        self.correlations = MetricCollection([PearsonCorrCoef(), ConcordanceCorrCoef()])
        self.curve = AUROC(**kinds)
        self.values = CatMetric()
        self.largest = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.metrics.update(outputs, batch[1])
        self.correlations.update(outputs[:, 0].detach(), batch[1].float())
        self.curve.update(outputs.detach().softmax(1), batch[1])
        self.values.update(loss.detach())
        self.largest.update(loss.detach())
        self.log("early", self.largest) if batch_idx == 0 else None
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.log_dict(self.correlations.compute())
        self.log("curve", self.curve.compute())
        self.log("values", self.values.compute().std())
        for metric in (self.metrics, self.correlations, self.curve, self.values):
            metric.reset()


MODULES: dict[str, Case] = {
    "classifier": Case(m.Classifier, loader(23, 4), VAL, epochs=4),
    "classifier-4": Case(m.Classifier, loader(23, 4), VAL, epochs=4, accumulate=4),
    "gathers": Case(Gathers, loader(23, 4), VAL, epochs=4),
    "gan": Case(m.GAN, loader(23, 4), VAL, epochs=4),
    "manual-closure": Case(m.ManualClosure, loader(24, 4), VAL, epochs=4),
    "schedulers": Case(m.Schedulers, loader(23, 4), VAL, epochs=4),
    "everywhere": Case(Everywhere, loader(23, 4), VAL, epochs=4),
    "lm": Case(m.TinyLM, tokens(23, 4), tokens(10, 4, seed=3), epochs=4, accumulate=5),
    "lbfgs": Case(m.WithLBFGS, loader(23, 4), VAL, epochs=4),
    "own-steps": Case(m.OwnSteps, loader(23, 4), VAL, epochs=4),
    "datamodule": Case(m.Simple, datamodule=data.Data, epochs=4),
    "iterable": Case(m.Classifier, lambda: data.Batches(23, 4, sized=False), VAL, epochs=4),
}
STOPS: dict[str, list[list[int | str]]] = {
    "classifier": [["epochs"], [3], [9, 14]],
    "classifier-4": [["epochs"], [1], [3, 4]],
    "gathers": [[2, 9], [23]],
    "gan": [["epochs"], [5, 17]],  # one and a half optimizer steps a batch
    "manual-closure": [[2, 7]],
    "schedulers": [["epochs"], [3, 6, 13]],
    "everywhere": [[9], ["epochs"], [3, 20]],
    "lm": [[3], [1, 2]],
    "lbfgs": [[8]],
    "own-steps": [[10], ["epochs"]],
    "datamodule": [[8]],
    "iterable": [[8], ["epochs"]],
}
SLOW = {"everywhere", "classifier-4", "lbfgs", "own-steps", "datamodule", "manual-closure", "iterable"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODULES])
def test_modules_go_on(name: str, tmp_path: Path) -> None:
    case = MODULES[name]
    whole = run_lightning(replace(case, hooks=False), tmp_path / "whole")
    for i, stops in enumerate(STOPS[name]):
        assert_continued(whole, in_parts(case, tmp_path / str(i), stops))


CALLBACKS: dict[str, tuple[list[Any], list[list[int | str]]]] = {
    "early-stopping": (
        [lambda: EarlyStopping("val_loss", patience=1, min_delta=0.02), lambda: EarlyStopping("loss", patience=9)],
        [[3], [6], [9]],
    ),
    "average": ([lambda: EMAWeightAveraging(decay=0.7)], [["epochs"], [9, 22]]),
    "accumulation": ([lambda: GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})], [["epochs"], [3, 7]]),
    "swa": ([lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)], [[3, 16], [9, 26, 29], [18]]),
    "learning-rate": ([lambda: LearningRateMonitor(log_momentum=True)], [["epochs"], [9]]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "early-stopping" else []) for n in CALLBACKS]
)
def test_states_of_lightnings_callbacks_go_on(name: str, tmp_path: Path) -> None:
    made, many = CALLBACKS[name]
    module = m.Schedulers if name == "learning-rate" else m.Simple
    case = Case(module, loader(23, 4), VAL, epochs=5, callbacks=lambda: [make() for make in made], hooks=False)
    whole = run_lightning(case, tmp_path / "whole")
    for i, stops in enumerate(many):
        assert_continued(whole, in_parts(case, tmp_path / str(i), stops))


def test_a_limit_in_the_middle_of_an_epoch_and_on(tmp_path: Path) -> None:
    """max_steps leaves the epoch: its hooks run, as under Lightning. Whoever goes on finishes the same epoch."""
    case = Case(m.Classifier, loader(23, 4), VAL, epochs=None, max_steps=9, hooks=False)
    case = replace(case, ours={"run_dir": str(tmp_path / "run")})
    left = run_ours(case, tmp_path / "left")
    assert left.module.trainer.current_epoch == 2
    on = run_ours(replace(case, epochs=3, max_steps=None), tmp_path / "on")
    whole = run_lightning(replace(case, epochs=3, max_steps=None), tmp_path / "whole")
    assert all(same(value, on.weights[name]) for name, value in whole.weights.items())

    def epochs(seen: Seen) -> list[Any]:
        rows = [call[1] for call in seen.logger_calls if call[0] == "log_metrics" and "mean_loss" in call[1]]
        return [{k: v for k, v in row.items() if k != "epoch_accuracy"} for row in rows]  # the module resets that one

    assert epochs(on) == epochs(whole)[1:]  # the mean is over the whole second epoch


# ---- hooks of checkpoints ------------------------------------------------------------------------------------------


class Keeps(m.Simple):
    """Adds to the checkpoint, and looks at it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"numbers": torch.arange(3), "step": self.global_step, "words": ("a", "b")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told.append((checkpoint["mine"], checkpoint["epoch"], checkpoint["global_step"], sorted(checkpoint)))
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        assert checkpoint["hyper_parameters"] == {"lr": 0.05}


class StatefulData(data.Data):
    served = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.served += 1
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.served = 100 + state["served"]


def test_on_save_and_on_load_checkpoint(tmp_path: Path) -> None:
    first, last = in_parts(Case(Keeps, loader(23, 4), VAL, epochs=3), tmp_path, [8])
    assert first.told == []
    (mine, epoch, global_step, keys), *rest = last.told
    assert not rest
    assert (epoch, global_step) == (1, 8)
    assert mine["step"] == 8
    assert mine["words"] == ("a", "b")
    assert torch.equal(mine["numbers"], torch.arange(3))
    assert keys == ["epoch", "global_step", "hyper_parameters", "mine", "pytorch-lightning_version", "state_dict"]


def test_the_datamodule_has_a_state(tmp_path: Path) -> None:
    case = Case(m.Simple, datamodule=StatefulData, epochs=3)
    _, last = in_parts(case, tmp_path, ["epochs"])
    per_epoch = 6 + 3
    assert last.module.trainer.datamodule.served == 100 + 3 * per_epoch


def test_order_of_hooks_on_resume(tmp_path: Path) -> None:
    """As under Lightning: weights and callbacks come back before configure_optimizers, the module's hook first."""
    case = replace(Case(Keeps, loader(23, 4), VAL, epochs=3), ours={"run_dir": str(tmp_path / "run")})
    run_ours(replace(case, epochs=2), tmp_path / "first")
    last = run_ours(case, tmp_path / "last")
    order = [(owner, hook) for owner, hook, *_ in last.calls]
    assert order[: order.index(("module", "on_train_epoch_start"))] == [
        ("module", "configure_callbacks"),
        ("callback", "setup"),
        ("module", "setup"),
        ("module", "on_load_checkpoint"),
        ("callback", "on_load_checkpoint"),
        ("module", "configure_optimizers"),
        ("callback", "on_fit_start"),
        ("module", "on_fit_start"),
        ("callback", "on_train_start"),
        ("module", "on_train_start"),
        ("callback", "on_train_epoch_start"),
    ]


def test_weights_that_hooks_put_in_place(tmp_path: Path) -> None:
    class Replaces(m.Simple):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            name = "net.0.weight"
            checkpoint["state_dict"][name] = torch.full_like(checkpoint["state_dict"][name], 7.0)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert bool((checkpoint["state_dict"]["net.0.weight"] == 7.0).all())
            checkpoint["state_dict"]["net.0.bias"] = torch.ones(8)

        def on_fit_start(self) -> None:
            self.told.append((self.net[0].weight.detach().clone(), self.net[0].bias.detach().clone()))

    _, last = in_parts(Case(Replaces, loader(23, 4), VAL, epochs=3), tmp_path, ["epochs"])
    weight, bias = last.told[0]
    assert bool((weight == 7.0).all())
    assert bool((bias == 1.0).all())


def test_weights_cannot_be_left_out(tmp_path: Path) -> None:
    class Removes(m.Simple):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["net.0.weight"]

    with pytest.raises(UnsupportedError) as raised:
        in_parts(Case(Removes, loader(23, 4), VAL, epochs=3), tmp_path, ["epochs"])
    assert str(raised.value) == (
        "on_save_checkpoint removed net.0.weight from checkpoint['state_dict']: a checkpoint holds the whole model, so that"
        " any layout can load it; filter when you export instead"
    )


def test_parts_of_a_checkpoint_that_hooks_do_not_see(tmp_path: Path) -> None:
    class Looks(m.Simple):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert "optimizer_states" not in checkpoint
            checkpoint["optimizer_states"][0]["lr"] = 1

    with pytest.raises(UnsupportedError) as raised:
        in_parts(Case(Looks, loader(23, 4), VAL, epochs=3), tmp_path, ["epochs"])
    assert str(raised.value) == (
        "checkpoint['optimizer_states'] is not in the checkpoint that hooks see: it is restored by name, once the optimizers"
        " are there"
    )
