"""What a training step costs beside the model: ours, a bare PyTorch loop's, Lightning's, interleaved in one run.

    python benchmarks/step_overhead.py [--repeats 30] [--steps 400]

"unwatched" is ours without the ThroughputMonitor that is there otherwise.

The same module trains on the same pre-made batches. Ours and Lightning's log three values every step, with the progress
bar drawn (to a terminal that goes nowhere) and TensorBoard files written. A run is short and there are many of them,
interleaved in random order, because a shared machine changes its speed from second to second; each gives the mean CPU
time per step after a warm-up fifth, all threads counted. What is printed is the median over repeats; differences and
ratios are medians too, of the pairs with the bare loop's run of the same repeat.

The allocator is told to keep what is freed. Otherwise the layout of the heap decides, run by run, whether each step's
gradients are given back to the kernel and faulted in again, which costs more than all that is measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch import Tensor, nn

from elastictrain import Callback, CheckpointConfig, Trainer
from elastictrain.callbacks import ProgressBar

SIZES = {"tiny": (8, 4, 1), "10ms": (512, 64, 5)}  # width, batch, layers


def network(size: str) -> nn.Module:
    width, _, layers = SIZES[size]
    torch.manual_seed(0)
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


class Batches:
    """One pre-made batch, many times; notes wall and CPU time as each is taken."""

    def __init__(self, size: str, steps: int) -> None:
        width, batch, _ = SIZES[size]
        self.batch = torch.randn(batch, width), torch.randn(batch, 1)
        self.steps = steps
        self.marks: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.marks = []
        for _ in range(self.steps):
            self.marks.append((time.perf_counter(), time.process_time()))
            yield self.batch

    def microseconds(self) -> tuple[float, float]:
        """(CPU, wall) per step after a warm-up fifth."""
        marks = self.marks[self.steps // 5 :]
        wall, cpu = (1e6 * (marks[-1][k] - marks[0][k]) / (len(marks) - 1) for k in (0, 1))
        return cpu, wall


class Module(pl.LightningModule):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.net = network(size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("a", loss, prog_bar=True)
        self.log("b", loss)
        self.log("c", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def bare(size: str, data: Batches, folder: str) -> None:
    model = network(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for x, y in data:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class NoThroughputMonitor(Callback):
    """Stands where the monitor would be, and does nothing at all."""


def ours(size: str, data: Batches, folder: str, *more: Callback) -> None:
    bar = ProgressBar(console=Console(file=io.StringIO(), force_terminal=True, width=120))
    trainer = Trainer(run_dir=folder, max_epochs=1, callbacks=[bar, *more], checkpoint=CheckpointConfig(at_end=False))
    trainer.fit(Module(size), train_dataloaders=data)


def unwatched(size: str, data: Batches, folder: str) -> None:
    ours(size, data, folder, NoThroughputMonitor())


def lightning(size: str, data: Batches, folder: str) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=TensorBoardLogger(folder),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(size), data)


def measure(size: str, *, repeats: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) microseconds per step of every repeat."""
    ways: dict[str, Callable[[str, Batches, str], None]] = {
        "bare": bare,
        "elastictrain": ours,
        "unwatched": unwatched,
        "lightning": lightning,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample(list(ways), len(ways)):
            data = Batches(size, steps)
            with (
                tempfile.TemporaryDirectory() as folder,
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                ways[name](size, data, folder)
            if repeat:  # the first round warms up
                found[name].append(data.microseconds())
    return found


def report(size: str, found: dict[str, list[tuple[float, float]]], *, steps: int) -> None:
    print(f"{size}: {steps} steps, medians of {len(found['bare'])} runs")
    for name, runs in found.items():
        columns = []
        for k, label in enumerate(("cpu", "wall")):
            mine, bare = [run[k] for run in runs], [run[k] for run in found["bare"]]
            more = statistics.median(a - b for a, b in zip(mine, bare, strict=True))
            ratio = statistics.median(a / b for a, b in zip(mine, bare, strict=True))
            columns.append(f"{label} {statistics.median(mine):7.0f} µs ({more:+6.0f} µs, {ratio:6.3f}×)")
        print(f"  {name:13s} " + "   ".join(columns))
    pairs = zip(found["elastictrain"], found["unwatched"], strict=True)
    more = statistics.median(with_it[0] - without[0] for with_it, without in pairs)
    print(f"  the monitor   cpu {more:+.1f} µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 1 << 30)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for size in SIZES:
        steps = arguments.steps if size == "tiny" else max(20, arguments.steps // 10)
        report(size, measure(size, repeats=arguments.repeats, steps=steps), steps=steps)


if __name__ == "__main__":
    main()
