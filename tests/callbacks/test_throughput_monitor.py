"""The monitor: rates, MFU, the split of a step, and that its figures are those that one counts by hand."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastictrain import Callback, Trainer, UsageError
from elastictrain.callback import RunInfo, StepInfo, Timings
from elastictrain.callbacks import ThroughputMonitor
from elastictrain.config import MeshShape
from tests.callbacks.test_flops import Chain
from tests.helpers import logged
from tests.trainer.tasks import Recorded

pytestmark = pytest.mark.filterwarnings("ignore")


def run_info(world_size: int = 1, **more: Any) -> RunInfo:
    values: dict[str, Any] = {
        "task": nn.Identity(),
        "run_dir": None,
        "rank": 0,
        "generation": 0,
        "step": 0,
        "samples": 0,
    }
    values |= {"epoch": 0, "max_steps": 10, "max_epochs": None, "global_batch_size": 8, "micro_batch_size": 1}
    shape = MeshShape(dp_replicate=world_size)
    return RunInfo(world_size=world_size, mesh=shape, num_slots=8, **{**values, **more})


def drive(monitor: ThroughputMonitor, seconds: list[float], *, log_every: int, step: int = 0) -> dict[str, float]:
    """Steps of 8 samples and 80 tokens that take so long; what was logged last."""
    values: dict[str, float] = {}
    for start in range(0, len(seconds), log_every):
        part = seconds[start : start + log_every]
        for i, spent in enumerate(part):
            step += 1
            info = StepInfo(step, 8 * step, 80 * step, 0, None, None, {}, None, seconds=spent)
            if i == log_every - 1:
                n, total = len(part), sum(part)
                timings = Timings(n, 8 * n, 80 * n, total, 0.25 * total, 0.5 * total, 0, 0, 0, 0, 0, {}, None)
                values = dict(monitor.on_log(info._replace(timings=timings)))  # type: ignore[arg-type]
            monitor.on_step_end(info)
    return values


@pytest.mark.parametrize("log_every", [1, 2, 5, 10])
def test_rates_are_of_the_window_without_the_steps_that_warm_up(log_every: int) -> None:
    monitor = ThroughputMonitor(window=10, every=0)
    monitor.on_generation_start(run_info(world_size=4, flops_per_sample=lambda: 3e9))
    values = drive(monitor, [100.0, 7.0] + 8 * [0.5], log_every=log_every)
    assert values["throughput/samples_per_second"] == pytest.approx(16.0)
    assert values["throughput/tokens_per_second"] == pytest.approx(160.0)
    assert values["throughput/tokens_per_second_per_device"] == pytest.approx(40.0)
    assert values["throughput/tflops"] == pytest.approx(16 * 3e9 / 1e12)
    assert "throughput/mfu" not in values, "nobody knows the peak of a CPU"
    values = drive(monitor, 20 * [0.25], log_every=log_every, step=10)
    assert values["throughput/samples_per_second"] == pytest.approx(32.0), "the slower ones are forgotten"
    assert values["elastic/world_size"] == 4


def test_reports_that_would_come_too_often_become_part_of_the_next_one() -> None:
    """The first and the last log step always have one, and no step is left out of the means."""
    monitor = ThroughputMonitor(every=3600.0)
    monitor.on_generation_start(run_info())
    hooks = {"on_train_batch_start": 0.5}
    reports = {}
    for step in range(1, 11):
        info = StepInfo(step, 8 * step, 0, 0, None, None, {}, None, seconds=step)
        timings = Timings(1, 8, 0, step, 0.25 * step, 0, 0, 0, 0, 0, 0, hooks, queued=step)
        reports[step] = monitor.on_log(info._replace(timings=timings))
        monitor.on_step_end(info)
    assert [step for step, values in reports.items() if values] == [1, 10]
    last = reports[10]
    assert last["time/step"] == pytest.approx(sum(range(2, 11)) / 9)
    assert last["time/data"] == pytest.approx(0.25 * sum(range(2, 11)) / 9)
    assert last["time/hooks"] == last["time/hook/on_train_batch_start"] == 0.5
    assert last["throughput/loader_queue"] == 10
    assert last["throughput/samples_per_second"] == pytest.approx(8 * 8 / sum(range(3, 11)))


def test_percentiles_are_of_single_steps() -> None:
    monitor = ThroughputMonitor(window=100)
    monitor.on_generation_start(run_info())
    durations = [i / 100 for i in range(1, 101)]
    random.Random(0).shuffle(durations)
    values = drive(monitor, [9.0, 9.0, *durations, 5.0], log_every=103)
    assert "time/step_p50" in values and values["time/step"] == pytest.approx((18 + 50.5 + 5) / 103)
    assert [values[f"time/step_{name}"] for name in ("p10", "p50", "p90", "p99", "max")] == [0.1, 0.5, 0.9, 0.99, 1.0]


def test_mfu_is_a_share_of_the_given_peak() -> None:
    monitor = ThroughputMonitor(peak_tflops=2.0)
    monitor.on_generation_start(run_info(world_size=2, flops_per_sample=lambda: 1e11))
    values = drive(monitor, [1.0, 1.0, 0.8, 0.8], log_every=4)
    assert values["throughput/mfu"] == pytest.approx(10 * 1e11 / (2 * 2e12))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="window=0"):
        ThroughputMonitor(window=0)
    with pytest.raises(UsageError, match="every=-1"):
        ThroughputMonitor(every=-1)
    with pytest.raises(UsageError, match="peak_tflops=-1"):
        ThroughputMonitor(peak_tflops=-1)


# ---- in a run ------------------------------------------------------------------------------------------------------


class Slow(TensorDataset):
    """Each sample takes 5 ms."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


class Waits(Chain):
    def train_dataset(self) -> Any:
        return Slow(torch.randn(64, 8))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        time.sleep(0.03)


def test_a_step_is_split_into_parts_that_add_up(tmp_path: Path) -> None:
    Trainer(
        run_dir=str(tmp_path), max_steps=6, global_batch_size=4, micro_batch_size=2, log_every=3, callbacks=[Tells()]
    ).fit(Waits())
    parts = ("data", "forward_backward", "communication", "optimizer", "hooks", "callbacks", "logging", "other")
    for step in (3, 6):
        value = {name: logged(tmp_path, f"time/{name}")[step] for name in ("step", *parts)}
        assert sum(value[name] for name in parts) == pytest.approx(value["step"])
        assert value["data"] >= 0.018, "four samples of 5 ms"
        assert value["hooks"] >= 0.027 and value["hooks"] == logged(tmp_path, "time/hook/on_before_zero_grad")[step]
        assert value["callbacks"] >= 0.006, "what callbacks do on the log step itself belongs to the next one"
        assert min(value.values()) >= 0
    assert logged(tmp_path, "time/step_p50")[6] >= 0.055
    assert logged(tmp_path, "memory/host_peak_gib")[3] > 0.01
    assert logged(tmp_path, "throughput/samples_per_second")[6] < 4 / 0.055
    assert logged(tmp_path, "elastic/generation")[6] == 0
    assert not list(logged(tmp_path, "throughput/loader_queue"))


class Tells(Callback):
    def on_step_end(self, info: StepInfo) -> None:
        time.sleep(0.01)


@pytest.mark.slow
def test_validations_and_saves_are_not_the_steps_time(tmp_path: Path) -> None:
    class Pauses(Recorded):
        def on_validation_start(self) -> None:
            time.sleep(1.0)

    Trainer(run_dir=str(tmp_path), max_steps=4, global_batch_size=24, log_every=2, val_every=1).fit(Pauses())
    steps = logged(tmp_path, "time/step")
    assert sorted(steps) == [2, 4]
    assert 2 * sum(steps.values()) < 4 * 1.0, "four steps take less than one of the four validations between them"
    assert not logged(tmp_path, "time/hook/on_validation_start")


def test_turned_off(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_dir": str(tmp_path), "max_steps": 2, "global_batch_size": 24, "log_every": 1}
    Trainer(callbacks=[ThroughputMonitor(enabled=False)], **options).fit(Recorded())
    assert sorted(logged(tmp_path, "train/loss")) == [1, 2]
    assert not logged(tmp_path, "time/step") and not logged(tmp_path, "elastic/world_size")


def test_the_loaders_queue_is_told(tmp_path: Path) -> None:
    class Loads(Waits):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=2, num_workers=1, prefetch_factor=3)

    monitor = ThroughputMonitor(every=0)
    Trainer(run_dir=str(tmp_path), max_steps=6, log_every=1, callbacks=[monitor]).fit(Loads())
    queued = logged(tmp_path, "throughput/loader_queue")
    assert sorted(queued) == [1, 2, 3, 4, 5, 6]
    assert all(0 <= value <= 3 for value in queued.values())
