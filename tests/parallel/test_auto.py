"""``MeshConfig("auto")`` at the start of a run: every rank takes the same layout, chosen for the smallest device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from elastictrain import Callback, Trainer
from elastictrain.callback import RunInfo
from elastictrain.compat.lightning import LightningCallback
from elastictrain.config import MeshShape
from elastictrain.parallel import build
from elastictrain.parallel.memory import Model, memory
from elastictrain.parallel.planner import Devices, plan
from elastictrain.planning import describe
from elastictrain.step_plan import Precision, StepPlan
from tests.helpers import run_ranks
from tests.parallel.lm import LM


class Saw(Callback):
    def on_generation_start(self, info: RunInfo) -> None:
        self.mesh = info.mesh


def _fit(rank: int, world_size: int, mesh: str, devices: list[int]) -> Any:
    build.device_bytes = lambda device, local_world_size: devices[rank]  # type: ignore[assignment]
    task, saw = LM(), Saw()
    trainer = Trainer(max_steps=2, micro_batch_size=4, mesh=mesh, log_every=1, callbacks=[saw])
    trainer.fit(task)
    return saw.mesh, trainer.metrics, task.training, task.seen


@pytest.mark.slow
def test_the_smallest_device_decides(capfd: pytest.CaptureFixture[str]) -> None:
    task = LM()
    model = describe(task, StepPlan(micro_batch_size=4), source=task.train_dataset, global_batch_size=8, num_ranks=2)
    whole, shared = (memory(model, shape).total for shape in (MeshShape(dp_replicate=2), MeshShape(dp_shard=2)))
    assert shared < whole
    small = int((whole + shared) / 2 / 0.9)
    found = run_ranks(_fit, 2, "auto", [100 * whole, small])
    assert [mesh for mesh, *_ in found] == 2 * [MeshShape(dp_shard=2)]
    assert "note: mesh auto: ranks share the state: " in capfd.readouterr().out
    named = run_ranks(_fit, 2, "dp_shard=2", [100 * whole, small])
    losses = [[metrics["train/loss"] for _, metrics, *_ in results] for results in (named, found)]
    assert losses[0] == losses[1], "measuring leaves no trace"
    large = run_ranks(_fit, 2, "auto", [100 * whole, 100 * whole])
    assert [mesh for mesh, *_ in large] == 2 * [MeshShape(dp_replicate=2)]
    assert "note: mesh auto: every rank keeps the whole state: " in capfd.readouterr().out


# ---- where a pipeline cannot be ------------------------------------------------------------------------------------


class Deep(LM):
    """Two stages need less than two shards of everything."""

    def __init__(self) -> None:
        super().__init__(num_layers=8)

    def tensor_parallel_plan(self) -> Any:
        return None

    def context_parallel_plan(self) -> Any:
        return None


class OwnStep(Deep):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self(self.inputs(batch)), batch)


class Manual(Deep):
    automatic_optimization = False


class OwnBackward(Deep):
    def on_after_backward(self) -> None:
        pass


class Hooked(LightningCallback):
    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        pass


FP16 = StepPlan(micro_batch_size=1, precision=Precision("fp16", scale_loss=True))


def describe_deep(task: LM, step: StepPlan = StepPlan(micro_batch_size=1), callbacks: Any = ()) -> Model:  # noqa: B008
    return describe(task, step, source=task.train_dataset, global_batch_size=8, num_ranks=2, callbacks=callbacks)


def between() -> tuple[Devices, Model]:
    """Two devices on which ``Deep`` fits as a pipeline and not otherwise."""
    model = describe_deep(Deep())
    need = {
        shape: max(memory(model, shape, stage=stage).total for stage in range(shape.pp))
        for shape in (MeshShape(pp=2), MeshShape(dp_shard=2), MeshShape(dp_replicate=2))
    }
    least, *others = sorted(need.values())
    assert need[MeshShape(pp=2)] == least
    return Devices(2, 2, int((least + others[0]) / 2 / 0.9)), model


@pytest.mark.parametrize(
    ("task", "step", "callbacks", "why"),
    [
        (OwnStep(), None, (), "OwnStep.training_step() is its own"),
        (Manual(), None, (), "Manual has manual optimisation"),
        (OwnBackward(), None, (), "OwnBackward.on_after_backward() is overridden"),
        (Deep(), None, (Hooked(),), "Hooked.on_before_backward() is overridden"),
        (Deep(), FP16, (), "fp16 needs a gradient scaler"),
        (Deep(), StepPlan(micro_batch_size=3), (), "micro_batch_size=3 does not divide 8"),
        (Deep(), None, (WeightAveraging(),), "WeightAveraging copies the whole model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pipeline_is_not_planned_where_it_would_be_refused(
    task: LM, step: StepPlan | None, callbacks: Any, why: str
) -> None:
    devices, free = between()
    assert plan(free, devices).chosen.shape == MeshShape(pp=2)
    found = describe_deep(task, step or StepPlan(micro_batch_size=1), callbacks)
    assert found.refused["pp"] == why
    made = plan(replace(free, refused=found.refused), devices)
    assert made.chosen.shape.pp == 1
    assert made.why.endswith(f"; without pp: {why}")
    assert "without" not in plan(replace(free, refused=found.refused), replace(devices, num_bytes=1 << 40)).why


def _fit_deep(rank: int, world_size: int, num_bytes: int) -> Any:
    build.device_bytes = lambda device, local_world_size: num_bytes  # type: ignore[assignment]
    found = []
    for task in (Deep(), OwnStep()):
        saw = Saw()
        Trainer(max_steps=1, global_batch_size=8, micro_batch_size=1, callbacks=[saw]).fit(task)
        found.append(saw.mesh)
    return found


@pytest.mark.slow
def test_auto_trains_without_a_pipeline_where_none_can_be(capfd: pytest.CaptureFixture[str]) -> None:
    devices, _ = between()
    for found in run_ranks(_fit_deep, 2, devices.num_bytes):
        assert found == [MeshShape(pp=2), MeshShape(dp_shard=2)]
    assert "without pp: OwnStep.training_step() is its own" in " ".join(capfd.readouterr().out.split())
