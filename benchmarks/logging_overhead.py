"""What logging 20 scalars on every step costs: ours and Lightning's TensorBoardLogger, interleaved in one run.

    python benchmarks/logging_overhead.py [--repeats 7] [--steps 2000] [--training]

"elastictrain" hands the values to the recorder, which writes TensorBoard's event files and ``metrics/*.jsonl``, and to the
progress bar, drawn to a terminal that goes nowhere. "log_metrics" is Lightning's logger alone, without a bar and without a
second format; "log_metrics, save" is what Lightning's Trainer calls for every step that it logs. A step is a sleep of a
millisecond, in which the background thread has the interpreter, as it has while an accelerator works.

What is printed are medians over repeats: the time of the training thread per step (the mean of a repeat, and its 99th
percentile), and the CPU time of all threads per step, with what is written at the end, over that of the same loop without
any logging.

``--training`` measures whole trainers instead, on a tiny model: CPU time of all threads per step with 20 ``self.log`` on it,
all steps being logged, over that of the same trainer that logs nothing and never. That has in it ``self.log`` itself, and
the values of throughput and goodput that ours adds on log steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import lightning.pytorch as pl
import step_overhead
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch import Tensor

from elastictrain import CheckpointConfig, Trainer
from elastictrain.callback import RunInfo, StepInfo
from elastictrain.callbacks import ProgressBar
from elastictrain.config import MeshShape
from elastictrain.metrics.record import Recorder
from elastictrain.rundir import RunDir

NAMES = [f"train/metric_{i:02d}" for i in range(20)]
Log = Callable[[int, dict[str, float]], None]


class Cost(NamedTuple):
    """Microseconds per step."""

    thread: float
    p99: float
    cpu: float


def nothing(folder: str) -> tuple[Log, Callable[[], None]]:
    return lambda step, values: None, lambda: None


def ours(folder: str) -> tuple[Log, Callable[[], None]]:
    recorder = Recorder(RunDir(folder), generation=0, start_step=0)
    bar = ProgressBar(console=Console(file=io.StringIO(), force_terminal=True, width=120))
    bar.on_generation_start(_run_info())

    def log(step: int, values: dict[str, float]) -> None:
        recorder.log(step, 8 * step, values, epoch=0)
        bar.on_step_end(StepInfo(step, 8 * step, 0, 0, None, values, {}, None, None, 0.001, None))

    def end() -> None:
        recorder.close()
        bar.on_fit_end(_run_info())

    return log, end


def _run_info() -> RunInfo:
    return RunInfo(
        task=None,  # type: ignore[arg-type]
        run_dir=None,
        rank=0,
        world_size=1,
        generation=0,
        mesh=MeshShape(),
        step=0,
        samples=0,
        epoch=0,
        max_steps=1_000_000,
        max_epochs=None,
        global_batch_size=8,
        micro_batch_size=8,
        num_slots=1,
        optimizers=(),
        device="cpu",
        precision="fp32",
        flops_per_sample=lambda: None,
    )


def log_metrics(folder: str, *, saves: bool = False) -> tuple[Log, Callable[[], None]]:
    logger = TensorBoardLogger(folder)

    def log(step: int, values: dict[str, float]) -> None:
        logger.log_metrics(values, step=step)
        if saves:
            logger.save()

    return log, lambda: logger.finalize("success")


def log_metrics_and_save(folder: str) -> tuple[Log, Callable[[], None]]:
    return log_metrics(folder, saves=True)


def run(way: Callable[[str], tuple[Log, Callable[[], None]]], steps: int) -> tuple[list[float], float]:
    """Seconds that each step's logging took of this thread's time, and CPU seconds of all threads."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        log, end = way(folder)
        log(0, dict.fromkeys(NAMES, 0.0))  # whatever is made at the first one
        begin = time.process_time()
        for step in range(1, steps + 1):
            values = {name: step / (i + 1) for i, name in enumerate(NAMES)}
            time.sleep(0.001)
            started = time.perf_counter()
            log(step, values)
            took.append(time.perf_counter() - started)
        end()
        cpu = time.process_time() - begin
    return took, cpu


WAYS = {
    "nothing": nothing,
    "elastictrain": ours,
    "log_metrics": log_metrics,
    "log_metrics, save": log_metrics_and_save,
}


def measure(*, repeats: int, steps: int) -> dict[str, list[Cost]]:
    """Every repeat's cost of every way."""
    found: dict[str, list[Cost]] = {name: [] for name in WAYS if name != "nothing"}
    for repeat in range(repeats + 1):
        results = {}
        for name in random.Random(repeat).sample(list(WAYS), len(WAYS)):
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                results[name] = run(WAYS[name], steps)
        for name, costs in found.items() if repeat else ():  # the first round warms up
            took, cpu = results[name]
            extra = (cpu - results["nothing"][1]) / steps
            costs.append(Cost(1e6 * statistics.fmean(took), 1e6 * sorted(took)[int(0.99 * steps)], 1e6 * extra))
    return found


# ---- whole trainers ------------------------------------------------------------------------------------------------


class Talkative(step_overhead.Module):
    """Logs ``num`` values on every step."""

    def __init__(self, num: int) -> None:
        super().__init__("tiny")
        self.num = num

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        for i, name in enumerate(NAMES[: self.num]):
            self.log(name, batch_idx / (i + 1), prog_bar=i == 0)
        return torch.nn.functional.mse_loss(self.net(x), y)


def fit_ours(num: int, data: step_overhead.Batches, folder: str) -> None:
    bar = ProgressBar(console=Console(file=io.StringIO(), force_terminal=True, width=120))
    every = 1 if num else len(data) + 1
    at_end = CheckpointConfig(at_end=False)
    trainer = Trainer(run_dir=folder, max_epochs=1, callbacks=[bar], log_every=every, checkpoint=at_end)
    trainer.fit(Talkative(num), train_dataloaders=data)


def fit_lightning(num: int, data: step_overhead.Batches, folder: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=TensorBoardLogger(folder),
        log_every_n_steps=1 if num else len(data) + 1,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Talkative(num), data)


def measure_training(*, repeats: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of CPU time per step that logging adds, of every repeat."""
    found: dict[str, list[float]] = {"elastictrain": [], "lightning": []}
    ways = [(name, num) for name in found for num in (0, len(NAMES))]
    for repeat in range(repeats + 1):
        spent = {}
        for name, num in random.Random(repeat).sample(ways, len(ways)):
            data = step_overhead.Batches("tiny", steps)
            with (
                tempfile.TemporaryDirectory() as folder,
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                (fit_ours if name == "elastictrain" else fit_lightning)(num, data, folder)
            spent[name, num] = data.microseconds()[0]
        for name, extra in found.items() if repeat else ():
            extra.append(spent[name, len(NAMES)] - spent[name, 0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--training", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.training:
        for name, extra in measure_training(repeats=arguments.repeats, steps=arguments.steps).items():
            print(f"{name:20}  {statistics.median(extra):10.0f} µs of CPU time per step")
        return
    print(f"{'µs per step':20}  {'training thread':>15}  {'99 %':>7}  {'CPU in all':>10}")
    for name, costs in measure(repeats=arguments.repeats, steps=arguments.steps).items():
        thread, p99, cpu = (statistics.median(column) for column in zip(*costs, strict=True))
        print(f"{name:20}  {thread:15.1f}  {p99:7.1f}  {cpu:10.1f}")


if __name__ == "__main__":
    main()
