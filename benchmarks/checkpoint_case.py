"""One column of ``benchmarks/checkpoint.py``, measured by all its ranks; rank 0 prints JSON.

Memory that the machine has not handed out yet is asked for before each measurement, and not in it: on a virtual machine
the first touch of a GB costs up to seconds, for whoever comes first.
"""

from __future__ import annotations

import argparse
import json
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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import checkpoint_others as others
from elastictrain.checkpoint import CheckpointManager, CheckpointReader
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.config import CheckpointConfig
from elastictrain.rundir import RunDir

PART = 16 << 20
STEP = 1 << 20
State = dict[str, Tensor]


def state_of(num_bytes: int, rank: int) -> State:
    """Parameters and AdamW's moments of a transformer-like model."""
    state: State = {}
    layer = size = 0
    while size < num_bytes:
        for name, shape in {"qkv": (3072, 1024), "out": (1024, 1024), "norm": (1024,)}.items():
            for kind in ("model", "optim.0.exp_avg", "optim.0.exp_avg_sq"):
                one = torch.randn(shape)
                state[f"{kind}.layers.{layer}.{name}.{rank}"] = one
                size += one.nbytes
        layer += 1
    return state


class Case:
    """What is measured in turn, and what was found."""

    def __init__(self, folder: Path, state: State, rank: int, world_size: int) -> None:
        self.folder, self.state, self.rank, self.world_size = folder, state, rank, world_size
        self.copies = {name: torch.zeros_like(one) for name, one in state.items()}
        self.num_bytes = sum(one.nbytes for one in state.values())
        self.raw = folder / f"raw-{rank}"
        self.is_disk = not str(folder).startswith("/dev/shm")  # noqa: S108
        self.found: dict[str, list[float]] = defaultdict(list)
        self.manager = CheckpointManager(
            RunDir(str(folder / "run")), CheckpointConfig(keep_last=1), rank=rank, world_size=world_size, generation=0
        )
        self.step = 0
        self.save()  # memory and writer are there from now on

    # ---- how it is measured ------------------------------------------------------------------------------------------

    def timed(self, action: Callable[[], Any]) -> float:
        """Seconds until all ranks have done it."""
        fresh = np.empty(self.num_bytes * (2 if self.is_disk else 1), dtype=np.uint8)  # page cache, and own memory
        fresh[::4096] = 1
        del fresh
        return self.timed_as_it_is(action)

    def timed_as_it_is(self, action: Callable[[], Any]) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - started

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def limit(self, name: str, seconds: float) -> float:
        self.found[f"limit: {name}, GB/s"].append(self.num_bytes * self.world_size / seconds / 1e9)
        return seconds

    # ---- limits ------------------------------------------------------------------------------------------------------

    def memcpy(self) -> None:
        for name, one in self.state.items():
            self.copies[name].copy_(one)

    def raw_write(self) -> float:
        self.raw.unlink(missing_ok=True)

        def write() -> None:
            descriptor = os.open(self.raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for view in views(self.state):
                for start in range(0, len(view), PART):
                    part = view[start : start + PART]
                    while part:
                        part = part[os.write(descriptor, part) :]
            os.fsync(descriptor)
            os.close(descriptor)

        return self.limit("write and fsync", self.timed(write))

    def raw_read(self, name: str) -> float:
        """From the file of :meth:`raw_write`, into memory that is there."""
        return self.limit(name, self.timed(lambda: read_into(self.raw, views(self.copies), PART)))

    # ---- a round -----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        self.step += 1
        self.manager.save(self.step, self.state)

    def begin(self) -> None:
        self.step += 1
        self.manager.begin(self.step, self.state)

    def ours(self) -> None:
        self.saves()
        self.loads()
        for name, one in STEPS.items():
            quiet = self.quiet(one)
            self.begin()
            self.found[f"step while a save drains / alone: {name}"].append(self.slowest(self.busy(one) / quiet))
            self.manager.wait()

    def saves(self) -> None:
        limit = self.limit("memcpy", self.timed_as_it_is(self.memcpy))
        dist.barrier()
        self.begin()
        self.found["training blocked / memcpy"].append(self.slowest(self.manager.saves.blocked) / limit)
        self.manager.wait()
        limit = self.raw_write()
        taken = self.timed(self.save)
        self.found["save, call to COMMIT / write"].append(taken / limit)
        staged = self.slowest(self.manager.saves.blocked)
        self.found["  of it the writer, image to COMMIT / write"].append((taken - staged) / limit)

    def loads(self) -> None:
        path = self.manager.newest()
        assert path is not None
        limit = self.raw_read("read, page cache")
        self.found["verified load / read, page cache"].append(self.timed(lambda: self.load(path)) / limit)
        for name, seconds in self.parts_of_a_load().items():
            self.found[f"  CPU seconds per GB: {name}"].append(self.slowest(seconds) / self.num_bytes * 1e9)
        if self.is_disk:
            drop(self.raw)
            limit = self.raw_read("read, disk")
            for one in Path(path).iterdir():
                drop(one)
            self.found["verified load / read, disk"].append(self.timed(lambda: self.load(path)) / limit)
        self.raw.unlink()

    def load(self, path: str) -> None:
        CheckpointReader(path).load(self.copies)

    def parts_of_a_load(self) -> dict[str, float]:
        """CPU seconds of what a load does, one thing after the other on one core."""
        scratch = np.empty(self.num_bytes, dtype=np.uint8)

        def touch() -> None:
            scratch[::4096] = 1

        view = memoryview(scratch)  # type: ignore[arg-type]  # an array is a buffer
        return {
            "read alone, the limit": cpu(lambda: read_into(self.raw, views(self.copies), PART)),
            "ask for scratch memory": cpu(touch),
            "read and hash": cpu(lambda: read_into(self.raw, [view], STEP, then=Blocks.of)),
            "copy into place": cpu(self.memcpy),
        }

    # ---- training while a save drains --------------------------------------------------------------------------------

    def quiet(self, step: Callable[[], object]) -> float:
        """Seconds of a step."""
        step()
        dist.barrier()
        return statistics.fmean(timed(step) for _ in range(8))

    def busy(self, step: Callable[[], object]) -> float:
        """The same until this rank's image is written; looked after as the trainer does, after every step."""
        taken = []
        while self.manager.saves.is_writing or not taken:
            taken.append(timed(step))
            self.manager.look()
        return statistics.fmean(taken)

    # ---- others ------------------------------------------------------------------------------------------------------

    def stock(self) -> None:
        """DCP."""
        folder = self.folder / "stock"
        limit = self.raw_write()
        saved = self.timed(lambda: others.dcp_save(folder, self.state))
        self.found["DCP: save / write"].append(saved / limit)
        limit = self.raw_read("read, page cache")
        self.raw.unlink()
        self.found["DCP: load / read, page cache"].append(
            self.timed(lambda: others.dcp_load(folder, self.copies)) / limit
        )
        step = STEPS["matmul"]
        quiet = self.quiet(step)
        limit = self.timed_as_it_is(self.memcpy)
        dist.barrier()
        started = time.perf_counter()
        under_way = others.dcp_async_save(folder, self.state)
        blocked = self.slowest(time.perf_counter() - started)
        taken = []
        while not under_way.done() or not taken:
            taken.append(timed(step))
        under_way.result()
        dist.barrier()
        self.found["DCP async: training blocked / memcpy"].append(blocked / limit)
        self.found["DCP async: step / alone, matmul"].append(self.slowest(statistics.fmean(taken) / quiet))
        self.remove(folder)

    def lightning(self) -> None:
        """One process: its data parallel strategy has rank 0 write alone."""
        saved = others.LightningSaved(self.state)
        path = self.folder / "lightning.ckpt"
        limit = self.raw_write()
        taken = self.timed(lambda: saved.save(path))
        self.found["Lightning: save (no fsync) / write"].append(taken / limit)
        limit = self.raw_read("read, page cache")
        self.raw.unlink()
        self.found["Lightning: load / read, page cache"].append(self.timed(lambda: saved.load(path)) / limit)
        path.unlink()

    def remove(self, folder: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def cpu(action: Callable[[], object]) -> float:
    started = time.thread_time()
    action()
    return time.thread_time() - started


def views(state: State) -> list[memoryview]:
    return [memoryview(one.numpy()).cast("B") for one in state.values()]  # type: ignore[arg-type]


def read_into(
    path: Path, into: list[memoryview], size: int, then: Callable[[memoryview], object] | None = None
) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for view in into:
        for start in range(0, len(view), size):
            part = rest = view[start : start + size]
            while rest:
                rest = rest[os.readv(descriptor, [rest]) :]
            if then is not None:
                then(part)
    os.close(descriptor)


def drop(path: Path) -> None:
    """From the page cache; what is read next comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


_BIG, _SMALL = torch.randn(512, 512), torch.randn(16)
STEPS: dict[str, Callable[[], object]] = {
    "matmul": lambda: [_BIG @ _BIG for _ in range(4)],
    "Python operations": lambda: [_SMALL.add_(1.0) for _ in range(5_000)],
}


def memory_of(saves: int, case: Case) -> list[tuple[int, float]]:
    """Bytes of the images, of the writer and of what the worker has grown by, divided by the state's, as saves go on."""
    before = status(os.getpid(), "RssAnon")
    found = []
    for number in range(1, saves + 1):
        case.begin()
        if number in (10, saves // 4, saves // 2, saves):
            writer = case.manager.saves.writer_pid
            assert writer is not None
            images = max(status(pid, "RssShmem") for pid in (os.getpid(), writer))  # both map them all
            own = status(os.getpid(), "RssAnon") - before + status(writer, "RssAnon")
            found.append((number, (images + own) / case.num_bytes))
    case.manager.wait()
    return found


def status(pid: int, name: str) -> int:
    """A size in bytes from a process's status."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--saves", type=int, default=0)
    parser.add_argument("--ours-alone", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case(options.folder, state_of(int(options.gigabytes * 1e9) // world_size, rank), rank, world_size)
    about: dict[str, Any] = {"num_bytes": case.num_bytes}
    if options.saves:
        about["memory"] = memory_of(options.saves, case)
    else:
        started, rounds = time.monotonic(), 0
        while rounds == 0 or case.slowest(time.monotonic() - started) * (rounds + 1) / rounds < options.seconds:
            case.ours()
            if rounds % 2 == 0 and not options.ours_alone:
                case.stock()
                if world_size == 1:
                    case.lightning()
            rounds += 1
        about |= {"found": case.found, "rounds": rounds}
    case.manager.close()
    dist.barrier()
    if rank == 0:
        print(json.dumps(about), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
