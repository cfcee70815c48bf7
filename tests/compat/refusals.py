"""Runs that are refused, and what they say: one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastictrain import Trainer
from elastictrain.errors import UsageError
from tests.helpers import run_ranks
from tests.parity.data import loader
from tests.parity.modules import Simple


def refused(module: Any, folder: Path, *args: Any, trainer: dict[str, Any] | None = None, **data: Any) -> str:
    """The message of a ``fit`` that is refused before anything is written."""
    run_dir = folder / "run"
    data.setdefault("train_dataloaders", loader(8, 4)())
    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1, run_dir=str(run_dir), **(trainer or {})).fit(module, *args, **data)
    assert not run_dir.exists(), "something was written"
    return _one_line(str(raised.value))


def raised_by(module: Any, **data: Any) -> str:
    """The message of a ``fit`` that fails while it runs, for what only shows then."""
    data.setdefault("train_dataloaders", loader(8, 4)())
    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1).fit(module, **data)
    return _one_line(str(raised.value))


def on_two_ranks(make: Any, **options: Any) -> str:
    """The message that each of two ranks gives."""
    messages = run_ranks(fit_on_a_rank, 2, make, options)
    assert messages[0] == messages[1]
    return _one_line(messages[0])


def fit_on_a_rank(rank: int, world_size: int, make: Any, options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1, **options).fit(make(), train_dataloaders=loader(8, 4)())
    return str(raised.value)


def _one_line(message: str) -> str:
    assert "\n" not in message
    return message


def stepping(value: Any, **others: Any) -> Any:
    return type("Steps", (Simple,), {"training_step": lambda self, batch, batch_idx: value(self, batch), **others})()
