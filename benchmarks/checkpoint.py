"""What a checkpoint costs, each figure beside its physical limit measured in the same run, and beside stock DCP.

    python benchmarks/checkpoint.py [--gigabytes 0.8] [--folder /dev/shm/bench] [--rounds 5]
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py

Limits: copying the local state in memory; writing its bytes with ``write`` and ``fsync``; reading them with ``read``; a
training step with nothing else going on. All are measured in turn in every round, and what is printed is the median of
the rounds' ratios: on a machine that others use too, neighbours in time meet the same load.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from elastictrain.checkpoint import CheckpointManager, CheckpointReader
from elastictrain.config import CheckpointConfig
from elastictrain.rundir import RunDir

PART = 16 << 20


def state_of(num_bytes: int) -> dict[str, Tensor]:
    """Parameters and AdamW's moments of a transformer-like model."""
    state: dict[str, Tensor] = {}
    layer = 0
    while sum(one.nbytes for one in state.values()) < num_bytes:
        for name, shape in {"qkv": (3072, 1024), "out": (1024, 1024), "norm": (1024,)}.items():
            for kind in ("model", "optim.0.exp_avg", "optim.0.exp_avg_sq"):
                state[f"{kind}.layers.{layer}.{name}"] = torch.randn(shape)
        layer += 1
    return state


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def raw_write(folder: Path, data: memoryview) -> float:
    def write() -> None:
        descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for start in range(0, len(data), PART):
            part = data[start : start + PART]
            while part:
                part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
        os.close(descriptor)

    (folder / "raw").unlink(missing_ok=True)
    return timed(write)


def raw_read(folder: Path, into: memoryview) -> float:
    def read() -> None:
        descriptor = os.open(folder / "raw", os.O_RDONLY)
        for start in range(0, len(into), PART):
            part = into[start : start + PART]
            while part:
                part = part[os.readv(descriptor, [part]) :]
        os.close(descriptor)

    return timed(read)


def matmul_step(a: Tensor) -> float:
    return timed(lambda: [a @ a for _ in range(4)])


def python_step(small: Tensor) -> float:
    return timed(lambda: [small.add_(1.0) for _ in range(20_000)])


def steps_while(step: Callable[[], float], is_busy: Callable[[], bool]) -> list[float]:
    taken = []
    while is_busy():
        taken.append(step())
    return taken


def stock_save(folder: str, state: dict[str, Tensor]) -> None:
    dcp.save(state, checkpoint_id=f"{folder}/stock", no_dist=not dist.is_initialized())


def stock_load(folder: str, state: dict[str, Tensor]) -> None:
    dcp.load(state, checkpoint_id=f"{folder}/stock", no_dist=not dist.is_initialized())


def rank_bytes() -> int:
    """What this process and its writer hold that is not the state's own memory: shared pages."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))


def bench(options: argparse.Namespace, rank: int, world_size: int) -> None:
    folder = Path(options.folder) / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(str(Path(options.folder) / "run"))
    state = {f"{name}.{rank}": one for name, one in state_of(int(options.gigabytes * 1e9) // world_size).items()}
    num_bytes = sum(one.nbytes for one in state.values())
    copies = {name: torch.empty_like(one) for name, one in state.items()}
    data = memoryview(bytearray(num_bytes))
    big, small = torch.randn(512, 512), torch.randn(16)
    manager = CheckpointManager(run, CheckpointConfig(keep_last=1), rank=rank, world_size=world_size, generation=0)
    found: dict[str, list[float]] = defaultdict(list)
    memcpy = lambda: [copies[name].copy_(one) for name, one in state.items()]  # noqa: E731
    memcpy()
    manager.save(0, state)  # memory and writer are there from now on
    for step in range(1, options.rounds + 1):
        if world_size > 1:
            dist.barrier()
        limit = timed(memcpy)
        manager.begin(step, state)
        found["training blocked / memcpy"].append(manager.saves.blocked / limit)
        manager.wait()
        limit = raw_write(folder, data)
        found["save, committed / raw write + fsync"].append(timed(lambda step=step: manager.save(step, state)) / limit)
        path = manager.newest()
        assert path is not None
        limit = raw_read(folder, data)
        reader = CheckpointReader(path)
        found["verified load / raw read"].append(timed(lambda reader=reader: reader.load(copies)) / limit)
        for name, one in (("matmul", lambda: matmul_step(big)), ("Python ops", lambda: python_step(small))):
            quiet = statistics.median(one() for _ in range(5))

            def busy() -> bool:
                manager.look()
                return manager.saves.is_writing

            manager.begin(step, state)
            busy_steps = steps_while(one, busy) or [quiet]
            manager.wait()
            found[f"step while a save drains ({name}) / alone"].append(statistics.median(busy_steps) / quiet)
        if not options.skip_dcp:
            limit = raw_write(folder, data)
            found["stock DCP: save / raw write + fsync"].append(
                timed(lambda: stock_save(options.folder, state)) / limit
            )
            limit = raw_read(folder, data)
            found["stock DCP: load / raw read"].append(timed(lambda: stock_load(options.folder, copies)) / limit)
    if rank == 0:
        print(f"{num_bytes / 1e9:.2f} GB on each of {world_size} ranks, {options.folder}, {options.rounds} rounds")
        for name, ratios in found.items():
            print(f"  {name:50} {statistics.median(ratios):5.2f}   (best {min(ratios):.2f}, worst {max(ratios):.2f})")
        print(f"  {'images in shared memory / local state':50} {rank_bytes() / num_bytes:5.2f}")
    manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.8)
    parser.add_argument("--folder", default="/dev/shm/elastictrain-bench")  # noqa: S108 - a benchmark of it
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-dcp", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    try:
        bench(options, rank, world_size)
    finally:
        if world_size > 1:
            dist.barrier()
        if rank == 0:
            shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
