"""``CheckpointConfig(on_exception=True)``: the last finished step is saved, where that is whole and all ranks are there."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastictrain import Callback, CheckpointConfig, Trainer, rescuing
from elastictrain.callback import SaveInfo, StepInfo
from elastictrain.callbacks import EMA
from elastictrain.checkpoint import CheckpointReader, resolve
from elastictrain.errors import UsageError
from elastictrain.metrics.ledger import read_ledger
from elastictrain.metrics.status import status
from elastictrain.rundir import RunDir
from tests.checkpoint.states import assert_equal
from tests.helpers import logged, run_ranks
from tests.trainer.tasks import Recorded, farthest

pytestmark = pytest.mark.filterwarnings("ignore")

ON = CheckpointConfig(every_seconds=None, keep_last=None, on_exception=True)
OFF = CheckpointConfig(every_seconds=None, keep_last=None)


class Failing(Recorded):
    """Raises once in step 8, where it is told; on one rank, or on all."""

    def __init__(self, where: str = "", *, rank: int | None = None) -> None:
        super().__init__()
        self.where, self.failing_rank = where, rank

    def _fail(self, where: str) -> None:
        if where == self.where and self.global_step == 7 and self.failing_rank in (None, self.global_rank):
            raise ValueError(f"the user's own, in {where}")

    def configure_model(self) -> None:
        super().configure_model()
        if self.where == "a step with statistics":
            self.norm = nn.BatchNorm1d(16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        if self.where == "a step that logs":
            self.log("train/mean", loss.detach(), on_epoch=True)
        if batch_idx % 8 > 1:  # the first slots of the step went well
            for where in ("a step", "a step with statistics", "a step that logs"):
                self._fail(where)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._fail("the optimizer")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._fail("the data")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.where == "after the optimizer" and self.global_step == 8:
            raise ValueError("the user's own, after the optimizer")


def _fit(run_dir: Path, task: Recorded, steps: int = 11, **options: Any) -> None:
    options = {
        "global_batch_size": 24,
        "micro_batch_size": 3,
        "log_every": 1,
        "checkpoint": ON,
        "val_every": 50,
        **options,
    }
    Trainer(run_dir=str(run_dir), max_steps=steps, **options).fit(task)


class Apart(Failing):
    """One rank raises in a forward pass, the other once it has sent its gradients: each at another collective of step 8."""

    def __init__(self, *, late: int) -> None:
        super().__init__("a step")
        self.late = late

    def _fail(self, where: str) -> None:
        if self.global_rank != self.late:
            super()._fail(where)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        left = [parameter for parameter in self.parameters() if parameter.requires_grad]

        def count(parameter: Tensor) -> None:
            left.pop()
            if not left:
                raise ValueError("the user's own, in a backward pass")

        if self.global_rank == self.late and self.global_step == 7 and batch_idx % 8 > 5:  # this rank's last slot
            for parameter in [*left]:
                parameter.register_post_accumulate_grad_hook(count)  # behind the one that sends
        return loss


class Raiser(Callback):
    """After the eighth step, before the other callbacks have seen it."""

    def on_step_end(self, info: StepInfo) -> None:
        if info.step == 8:
            raise ValueError("the user's own, in a callback")


@pytest.mark.slow
@pytest.mark.parametrize(("where", "step"), [("a step", 7), ("the data", 7), ("a callback", 8)])
def test_the_last_finished_step_is_saved_and_the_curve_goes_on(
    where: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(tmp_path / "whole", Recorded(), callbacks=[EMA(decay=0.5)])
    with pytest.raises(ValueError, match=f"the user's own, in {where}"):
        raising = [Raiser()] if where == "a callback" else []
        _fit(tmp_path / "parts", Failing(where), callbacks=[*raising, EMA(decay=0.5)])
    assert CheckpointReader(resolve(str(tmp_path / "parts"))).step == step
    assert f"elastictrain: step {step} is saved, after ValueError" in capsys.readouterr().out
    told = status(read_ledger(RunDir(str(tmp_path / "parts"))))["last_checkpoint"]
    assert (told["step"], told["path"]) == (step, resolve(str(tmp_path / "parts")))
    _fit(tmp_path / "parts", Failing(), callbacks=[EMA(decay=0.5)])
    assert farthest(*(logged(tmp_path / name, "train/loss") for name in ("whole", "parts"))) == 0.0
    ends = [CheckpointReader(resolve(str(tmp_path / name))) for name in ("whole", "parts")]
    assert ends[0].values["metrics.log"] == ends[1].values["metrics.log"]
    states = [{name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in end.tensors.items()} for end in ends]
    for end, state in zip(ends, states, strict=True):
        end.load(state)
    assert_equal(*states)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("the optimizer", "step 8 was half done, from its optimizer on"),
        ("after the optimizer", "step 8 was half done, from its optimizer on"),
        ("a step with statistics", "step 8 may have changed buffers already"),
        ("a step that logs", "step 8 had logged values of its epoch already"),
        ("off", ""),
    ],
)
def test_nothing_is_saved_that_is_not_whole_or_not_asked_for(
    where: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="the user's own"):
        _fit(tmp_path, Failing("a step" if where == "off" else where), checkpoint=OFF if where == "off" else ON)
    assert not (tmp_path / "checkpoints").exists()
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert (not why and not found) or any(
        f"no checkpoint of step 7 after the exception: {why}" in text for text in found
    )


def test_a_storage_that_fails_then_does_not_hide_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elastictrain.checkpoint.staging.Arena", fail)
    with pytest.raises(ValueError, match="the user's own") as raised:
        _fit(tmp_path, Failing("a step"))
    assert raised.value.__cause__ is None
    assert "the checkpoint of step 7, after the exception, was not written" in caplog.text


def test_a_mistake_saves_nothing(tmp_path: Path) -> None:
    class Wrong(Recorded):
        def on_train_batch_end(self, *args: Any) -> None:
            raise UsageError("a mistake")

    with pytest.raises(UsageError, match="a mistake"):
        _fit(tmp_path, Wrong())
    assert not (tmp_path / "checkpoints").exists()


def _fit_ranks(rank: int, world_size: int, run_dir: Path, task: Failing, options: dict[str, Any]) -> list[str]:
    """What is said, and which checkpoints callbacks are told of; the exception is this rank's own, or a peer's end."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    rescuing.log.addHandler(handler)
    rescuing.AGREE_SECONDS = 60.0 if task.failing_rank is None else 0.5  # in this process, which is forked
    told = Told()
    with pytest.raises(ValueError if task.failing_rank in (None, rank) else RuntimeError):
        callbacks = [*options.pop("callbacks", []), told]
        _fit(run_dir, task, log_every=5, callbacks=callbacks, **options)
    return [*said, *told.saved]


class Told(Callback):
    def __init__(self) -> None:
        self.saved: list[str] = []

    def on_save(self, info: SaveInfo) -> None:
        self.saved.append(f"step {info.step} is saved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "step"),
    [
        (Failing("a step"), {}, 7),
        (Failing(), {"mesh": "dp_shard=2", "callbacks": [Raiser()]}, 8),
    ],
)
def test_all_ranks_save_together(task: Failing, options: dict[str, Any], step: int, tmp_path: Path) -> None:
    assert run_ranks(_fit_ranks, 2, tmp_path / "all", task, options, timeout=120) == [[f"step {step} is saved"]] * 2
    reader = CheckpointReader(resolve(str(tmp_path / "all")))
    assert reader.step == step and reader.commit.world_size == 2
    _fit(tmp_path / "whole", Recorded())
    _fit(tmp_path / "all", Failing())
    curves = [logged(tmp_path / name, "train/loss") for name in ("whole", "all")]
    rest = range(step + 1, 12)
    assert curves[0].keys() == {*range(1, 12)} and all(abs(curves[0][i] - curves[1][i]) < 1e-5 for i in rest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "why"),
    [
        (Failing("a step", rank=0), {}, "it was raised on some ranks only"),
        (Failing("a step", rank=1), {}, "it was raised on some ranks only"),
        (Failing("a step"), {"mesh": "dp_shard=2"}, "step 8 had begun, and ranks may wait for each other within it"),
        (Apart(late=0), {}, "(gradients of step 8 were being summed over the ranks|rank 0 has left)"),
        (Apart(late=1), {}, "gradients of step 8 were being summed over the ranks"),
    ],
)
def test_ranks_that_may_stand_at_different_places_save_nothing(
    task: Failing, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """And nobody waits for long: the process group's timeout is half an hour."""
    said = run_ranks(_fit_ranks, 2, tmp_path, task, options, timeout=120)
    for rank in (0, 1):
        text = f"no checkpoint of step 7 after the exception: {why}" if task.failing_rank in (None, rank) else ""
        assert re.fullmatch(text, "\n".join(said[rank])), said
    assert not (tmp_path / "checkpoints").exists()
