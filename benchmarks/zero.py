"""What each rank holds with each stage of ZeRO, measured, beside what the planner says.

    python benchmarks/zero.py [--ranks 4] [--dim 256] [--layers 8] [--microbatches 2]

A byte-level transformer trains two steps of AdamW on ``--ranks`` local processes in each layout. The second step is
watched: gradients are counted from the tensors themselves, when there are most of them, and the peak is the most that a
step has allocated at one time over what was there before it (gradients, gathered weights and activations), from the
allocator's own events. Nothing here is a time, so that a busy machine does no harm.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Subset

from elastictrain import MeshConfig, Trainer
from elastictrain.parallel.memory import memory
from elastictrain.planning import describe
from elastictrain.step_plan import StepPlan
from examples.byte_lm import ByteLM, Windows

MIB = 1 << 20


class Watched(ByteLM):
    """Counts what a rank holds in its second step."""

    step = gradients = peak = 0
    watch: Any = None

    def train_dataset(self) -> Any:
        return Subset(Windows(torch.arange(1 << 20).to(torch.uint8), seq_len=self.seq_len), range(256))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.step == 1 and self.watch is None:  # the first step learns and allocates once
            self.watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.watch.__enter__()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.step == 1:
            self.watch.__exit__(None, None, None)
            self.peak = peak_of(self.watch)
        self.count()
        self.step += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count()

    def count(self) -> None:
        self.gradients = max(self.gradients, sum(local_bytes(p.grad) for p in self.parameters() if p.grad is not None))


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def peak_of(watch: profile) -> int:
    """The most that was allocated at one time, in bytes, over what there was at the start."""
    assert watch.profiler is not None
    events = [event for event in watch.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def train(rank: int, port: int, mesh: str, arguments: argparse.Namespace, results: Any) -> None:
    """One rank of one layout."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(arguments.ranks),
        LOCAL_WORLD_SIZE=str(arguments.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    task = task_of(arguments)
    batch = arguments.ranks * arguments.microbatches
    Trainer(max_steps=2, global_batch_size=batch, micro_batch_size=1, mesh=mesh).fit(task)
    state = [
        v for values in task.trainer.optimizers[0].state.values() for v in values.values() if isinstance(v, Tensor)
    ]
    parameters, optimizer = sum(map(local_bytes, task.parameters())), sum(map(local_bytes, state))
    results.put((rank, parameters, task.gradients, optimizer, task.peak))


def task_of(arguments: argparse.Namespace) -> Watched:
    return Watched(dim=arguments.dim, num_layers=arguments.layers, seq_len=arguments.seq_len)


def measure(mesh: str, arguments: argparse.Namespace) -> tuple[int, ...]:
    """What the fullest rank holds: parameters, gradients, optimizer state, peak of a step; in bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(train, (port, mesh, arguments, results), nprocs=arguments.ranks, join=False)
    found = [results.get() for _ in range(arguments.ranks)]
    while not context.join():
        pass
    return max((held[1:] for held in found), key=lambda held: held[0] + held[2] + held[3])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 4), ("dim", 256), ("layers", 8), ("seq-len", 64), ("microbatches", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    task = task_of(arguments)
    task.configure_model()
    num_ranks, batch = arguments.ranks, arguments.ranks * arguments.microbatches
    plan = StepPlan(micro_batch_size=1)
    model = describe(task, plan, source=task.train_dataset, global_batch_size=batch, num_ranks=num_ranks)
    print(
        f"{model.parameter_bytes / MIB:.1f} MiB of fp32 parameters, AdamW, {num_ranks} ranks; MiB on the fullest rank"
    )
    print("| mesh | parameters | gradients | optimizer | peak of a step | in all | planned |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for mesh in (f"dp_replicate={num_ranks}", *(f"dp_shard={num_ranks},zero={stage}" for stage in (1, 2, 3))):
        parameters, gradients, optimizer, peak = measure(mesh, arguments)
        planned = memory(model, MeshConfig.parse(mesh).resolve(num_ranks)).total
        sizes = (parameters, gradients, optimizer, peak, parameters + optimizer + peak, planned)
        print(f"| {mesh} | {' | '.join(f'{held / MIB:.1f}' for held in sizes)} |")


if __name__ == "__main__":
    main()
