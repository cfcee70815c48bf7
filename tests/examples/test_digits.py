"""The digits: the same unmodified classes under ``lightning.Trainer``, ``elastictrain.Trainer`` and the command."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest

import elastictrain
from examples.digits import Digits, DigitsData
from tests.helpers import elastictrain_command, logged


def test_the_module_knows_nothing_of_elastictrain() -> None:
    assert not issubclass(Digits, elastictrain.Task)
    source = Path(__file__).parents[2].joinpath("examples", "digits.py").read_text()
    module, main = source.split('if __name__ == "__main__":')
    assert "import elastictrain" not in module
    assert "import elastictrain" in main


@pytest.mark.slow
def test_both_trainers_teach_it(tmp_path: Path) -> None:
    theirs = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    lightning.seed_everything(0)
    theirs.fit(Digits(), DigitsData())
    assert float(theirs.callback_metrics["val/accuracy"]) > 0.9
    ours = elastictrain.Trainer(max_epochs=5, run_dir=str(tmp_path / "run"))
    ours.fit(Digits(), DigitsData())
    accuracy = logged(tmp_path / "run", "val/accuracy")
    assert len(accuracy) == 5
    assert accuracy[max(accuracy)] > 0.9


@pytest.mark.slow
def test_two_processes_learn_it_from_the_command(tmp_path: Path) -> None:
    target = ("examples/digits.py:Digits", "--nproc-per-node", "2", "--max-epochs", "5")
    elastictrain_command("run", *target, "--run-dir", tmp_path / "run")
    accuracy = logged(tmp_path / "run", "val/accuracy")
    assert accuracy[max(accuracy)] > 0.9
