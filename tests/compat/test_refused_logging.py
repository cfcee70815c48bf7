"""``self.log`` used in ways that cannot work, each with its whole message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import Accuracy

from elastictrain import Trainer
from elastictrain.errors import UsageError
from tests.compat.refusals import raised_by, stepping
from tests.parity.data import loader
from tests.parity.modules import Simple

# ---- self.log ------------------------------------------------------------------------------------------------------


def _logging(*args: Any, **options: Any) -> Any:
    return stepping(lambda self, batch: self.log(*args, **options))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            _logging("x", "text"),
            "self.log('x', …) got a str: log a number, a tensor of one element or a torchmetrics object",
        ),
        (
            _logging("x", torch.zeros(2, 3)),
            "self.log('x', …) got a tensor of shape [2, 3]: log one number, such as its mean()",
        ),
        (
            _logging("x", 1.0, on_step=False, on_epoch=False),
            "self.log('x', on_step=False, on_epoch=False) would log nothing",
        ),
        (
            _logging("x", 1.0, reduce_fx="median"),
            "self.log('x', reduce_fx='median'): use mean, sum, max or min, or log a torchmetrics object",
        ),
        (
            _logging("x/dataloader_idx_0", 1.0),
            "self.log('x/dataloader_idx_0', …): leave the loader's index out, it is added",
        ),
        (
            stepping(lambda self, batch: (self.log("x", 1.0), self.log("x", 1.0, prog_bar=True))),
            "self.log('x', …) was called twice in training_step with different options: use one name each",
        ),
        (
            _logging("x", Accuracy(task="binary")),
            "self.log('x', BinaryAccuracy()): keep the metric as an attribute of the module (self.accuracy = …), so that its"
            " state can be kept",
        ),
        (
            type("Early", (Simple,), {"on_fit_start": lambda self: self.log("x", 1.0)})(),
            "You can't `self.log()` inside `on_fit_start`. HINT: You can still log directly to the logger by using"
            " `self.logger.experiment`.",
        ),
        (
            type("Level", (Simple,), {"on_train_epoch_end": lambda self: self.log("x", 1.0, on_step=True)})(),
            "You can't `self.log(on_step=True)` inside `on_train_epoch_end`, must be one of (False,).",
        ),
    ],
)
def test_logging(module: Any, message: str) -> None:
    assert raised_by(module) == message


def test_logging_where_nothing_runs() -> None:
    class Predicts(Simple):
        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", 1.0)

    with pytest.raises(UsageError) as raised:
        Trainer().predict(Predicts(), dataloaders=loader(8, 4)())
    assert str(raised.value) == "self.log('x', …) in predict_step: prediction does not log"

    class Keeps(Simple):
        def on_train_start(self) -> None:
            self.told.append(self.log)

    module = Keeps()
    Trainer(max_epochs=1).fit(module, train_dataloaders=loader(8, 4)())
    with pytest.raises(UsageError) as raised:
        module.told[0]("x", 1.0)
    assert str(raised.value) == "self.log('x', …) was called outside of the hooks that the trainer runs"
