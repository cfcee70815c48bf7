"""docs/callbacks.md: its callback runs as it stands there, and its tables have what there is."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from elastictrain import Callback, Trainer, UsageError
from elastictrain.callbacks import HOME, MixedPrecision
from elastictrain.callbacks.registry import parse_callback, resolve_callback
from elastictrain.step_plan import StepPlan
from tests.helpers import ROOT, logged
from tests.trainer.tasks import Recorded

TEXT = (ROOT / "docs" / "callbacks.md").read_text()


@pytest.fixture
def frugal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    start = "import dataclasses"
    (tmp_path / "frugal.py").write_text(start + TEXT.split(f"```python\n{start}", 1)[1].split("```", 1)[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("frugal").Frugal
    sys.modules.pop("frugal")


def test_the_example_shapes_the_step_watches_and_remembers(
    frugal: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = resolve_callback("frugal:Frugal:norm=0.5")
    assert isinstance(made, frugal)
    plan = made.configure(StepPlan())
    assert (plan.precision.compute, plan.clip_norm) == ("bf16", 0.5)
    assert plan.recompute is not None and plan.recompute.mode == "full"
    options: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "global_batch_size": 4, "log_every": 1}
    Trainer(max_steps=3, callbacks=[made], **options).fit(Recorded())
    again = frugal()
    with pytest.raises(UsageError, match="Frugal and MixedPrecision both set precision"):
        Trainer(max_steps=3, callbacks=[again, MixedPrecision("fp16")], **options).fit(Recorded())
    Trainer(max_steps=5, callbacks=[again], **options).fit(Recorded())
    losses, lowest = (logged(tmp_path / "run", name) for name in ("train/loss", "train/lowest"))
    assert sorted(lowest) == [2, 3, 4, 5]
    assert lowest == {step: min(losses[s] for s in range(1, step)) for step in lowest}
    assert again.lowest == min(losses.values())
    assert "frugal from step 3 on: one rank" in capfd.readouterr().out
    with pytest.raises(UsageError, match="must be above 0"):
        frugal(norm=0)


def test_tables_are_complete() -> None:
    hooks = {name for name in vars(Callback) if name.startswith("on_")} | {"should_stop"}
    assert {name for name in hooks if f"`{name}(" not in TEXT} == set()
    assert {name for name in HOME if f"| `{name}(" not in TEXT} == set()
    assert {field.name for field in dataclasses.fields(StepPlan) if f"`{field.name}`" not in TEXT} == set()
    for row in TEXT.split("| class |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]:
        cls, name = (cell.strip().strip("`") for cell in row.split("|")[1:3])
        assert parse_callback(name).cls == cls.split("(")[0]
        resolve_callback(name)
