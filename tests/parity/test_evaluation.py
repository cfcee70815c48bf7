"""``validate``, ``test`` and ``predict`` in ``lightning.Trainer`` and in ours: hooks, logs, and what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from tests.parity import data, talkative
from tests.parity import modules as m
from tests.parity.data import loader
from tests.parity.harness import Case, compare_evaluation

ONE = loader(10, 4, seed=1)


def two() -> list[Any]:
    return [loader(10, 4, seed=1)(), loader(7, 3, seed=2)()]


def nested() -> dict[str, Any]:
    return {"a": ONE(), "b": [ONE(), loader(5, 5)()]}


class EverySteps(m.Simple):
    """Steps without and with an index, of batches that the datamodule changes."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        self.log("test_mean", batch[0].mean(), on_step=True, on_epoch=True)
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("test_loss", outputs["loss"])

    def predict_step(self, batch: Any) -> Any:
        return {"outputs": self(batch[0]), "classes": self(batch[0]).argmax(1)}


CASES: dict[str, tuple[Case, list[tuple[str, Any]]]] = {
    "after-fit": (
        Case(talkative.SeveralLoaders, loader(23, 4), two),
        [("fit", None), ("validate", two), ("test", two), ("predict", two), ("test", two)],
    ),
    "alone": (Case(talkative.SeveralLoaders, loader(23, 4), two), [("test", ONE), ("predict", ONE)]),
    "datamodule": (
        Case(EverySteps, datamodule=data.Data),
        [("validate", None), ("fit", None), ("test", None), ("predict", None)],
    ),
    "torchmetrics": (Case(m.Classifier, loader(23, 4), ONE), [("validate", ONE), ("fit", None), ("validate", ONE)]),
    "nested-loaders": (Case(talkative.SeveralLoaders, loader(23, 4), nested), [("validate", nested), ("test", two)]),
}


@pytest.mark.parametrize("name", CASES)
def test_evaluation(name: str, tmp_path: Path) -> None:
    case, calls = CASES[name]
    theirs, _ = compare_evaluation(case, tmp_path, calls)
    assert len(theirs.returned) == len([call for call, _ in calls if call != "fit"])
    assert all(returned for _, returned in theirs.returned)


def test_training_mode_comes_back(tmp_path: Path) -> None:
    """Parts that were in evaluation mode before stay so; the module's own hooks take the place of it."""

    class Frozen(m.Simple):
        def on_train_start(self) -> None:
            self.net[1].eval()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.told.append([part.training for part in self.modules()])

        def on_validation_start(self) -> None:
            self.told.append([part.training for part in self.modules()])

    class OwnModes(Frozen):
        def on_validation_model_eval(self) -> None:
            self.net[0].eval()

        def on_validation_model_train(self) -> None:
            self.net[0].train()

    for module in (Frozen, OwnModes):
        case = Case(module, loader(23, 4), ONE, hooks=False)
        theirs, _ = compare_evaluation(case, tmp_path / module.__name__, [("fit", None), ("validate", ONE)])
        assert [True, True, True, False, True, True] in theirs.told


def test_no_gradients_are_kept(tmp_path: Path) -> None:
    class Looks(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = m.net()
            self.told: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.told.append((self(batch[0]).requires_grad, torch.is_grad_enabled()))

        def forward(self, inputs: Any) -> Any:
            return self.net(inputs)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.told.append(torch.is_grad_enabled())
            return self(batch[0])

    theirs, _ = compare_evaluation(Case(Looks), tmp_path, [("validate", ONE), ("predict", ONE)])
    assert (False, False) in theirs.told
