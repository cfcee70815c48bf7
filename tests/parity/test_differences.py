"""Where ours differs from ``lightning.Trainer`` on purpose; each test states both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.errors import UsageError
from tests.parity import modules as m
from tests.parity.data import loader
from tests.parity.harness import Case, Seen, run_lightning, run_ours

VAL = loader(10, 4, seed=1)


def both(case: Case, folder: Path) -> tuple[Seen, Seen]:
    return run_lightning(case, folder / "lightning"), run_ours(case, folder / "ours")


def logged(seen: Seen, name: str) -> list[float]:
    return [call[1][name] for call in seen.logger_calls if call[0] == "log_metrics" and name in call[1]]


def test_no_value_is_forgotten(tmp_path: Path) -> None:
    """Within the first batch of an epoch Lightning drops what a hook has logged when another hook has logged since."""

    class Counts(m.GAN):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            self.log("before", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

        def on_after_backward(self) -> None:
            self.log("after", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    theirs, ours = both(Case(Counts, loader(23, 4), VAL), tmp_path)
    passes = 6 + 3  # every batch has one backward pass, every second one another
    assert logged(ours, "before") == logged(ours, "after") == [passes, passes]
    assert logged(theirs, "before") == logged(theirs, "after") == [passes - 1, passes - 1]


def test_a_stop_waits_for_the_step(tmp_path: Path) -> None:
    """A global batch is never left half done: Lightning stops behind the batch, ours behind the optimizer step."""

    class Stops(m.Simple):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                self.trainer.should_stop = True
            self.told.append(batch_idx)
            return super().training_step(batch, batch_idx)

    theirs, ours = both(Case(Stops, loader(23, 4), VAL, accumulate=4), tmp_path)
    assert (theirs.told, theirs.trainer.global_step) == ([0, 1], 0)
    assert (ours.told, ours.module.trainer.global_step) == ([0, 1, 2, 3], 1)


def test_validation_at_the_end(tmp_path: Path) -> None:
    """With an interval that does not divide the run, the weights that it ends with are validated as well."""
    theirs, ours = both(Case(m.Simple, loader(24, 4), VAL, epochs=1, val_every=4), tmp_path)
    assert len(logged(theirs, "val_loss")) == 1
    assert len(logged(ours, "val_loss")) == 2
    assert logged(ours, "val_loss")[0] == logged(theirs, "val_loss")[0]


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    """Lightning says so in a log line and returns."""
    case = Case(m.Simple, loader(3, 4, drop_last=True), VAL, hooks=False)
    assert run_lightning(case, tmp_path / "lightning").trainer.global_step == 0
    with pytest.raises(UsageError, match="gave no batch in epoch 0"):
        run_ours(case, tmp_path / "ours")


def test_manual_optimisation_takes_the_global_batch(tmp_path: Path) -> None:
    """Lightning refuses to accumulate there; here the global batch is what a step gets."""
    case = Case(m.ManualClosure, loader(24, 4), VAL, accumulate=3, hooks=False)
    with pytest.raises(Exception, match="accumulation is not supported for manual optimization"):
        run_lightning(case, tmp_path / "lightning")
    whole = run_lightning(Case(m.ManualClosure, loader(24, 12), VAL, hooks=False), tmp_path / "whole")
    ours = run_ours(case, tmp_path / "ours")
    assert ours.csv == whole.csv
    assert all(torch.equal(value, ours.weights[name]) for name, value in whole.weights.items())
