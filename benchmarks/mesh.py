"""What a step costs on two ranks beside the same layout written by hand on bare torch, interleaved in one run.

    python benchmarks/mesh.py [--repeats 9] [--steps 30] [--layouts fsdp tp pp] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/mesh.py

Three layouts: FSDP2 (``fully_shard`` on each block), tensor parallelism (``parallelize_module``), and a pipeline
(``torch.distributed.pipelining``, 1F1B, four microbatches). By hand there is nothing but these calls, a ``DataLoader``
and AdamW. Ours is a whole run: logging, the progress bar (into nothing), metrics and TensorBoard files.

Both train the same model on the same samples in the same processes. A run is short and there are many of them, in random
order within each repeat; what counts is the median time between two optimizer steps after a warm-up fifth, on rank 0,
which waits for the other in every step. Printed are medians over repeats; the ratio is the median of the ratios of pairs
that ran in the same repeat, which is what a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import logging
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastictrain import CheckpointConfig, Task, Trainer
from elastictrain.callbacks import ProgressBar
from elastictrain.parallel.mesh import join

DIM, HEADS, LAYERS, VOCABULARY, LENGTH = 192, 4, 4, 512, 64
GLOBAL_BATCH = 8
MICRO_BATCH = {"fsdp": 4, "tp": 8, "pp": 2}  # samples
MESHES = {"fsdp": "dp_shard=2", "tp": "tp=2", "pp": "pp=2"}
BAR = 1.03


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def plan(prefix: str = "") -> dict[str, Any]:
    return {
        f"{prefix}embed": RowwiseParallel(input_layouts=Replicate()),
        f"{prefix}blocks.*.[qkv]": ColwiseParallel(),
        f"{prefix}blocks.*.out": RowwiseParallel(),
        f"{prefix}blocks.*.up": ColwiseParallel(),
        f"{prefix}blocks.*.down": RowwiseParallel(),
        f"{prefix}head": ColwiseParallel(output_layouts=Replicate()),
    }


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Samples(Dataset[Tensor]):
    """Made before; an epoch is one run."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randint(VOCABULARY, (steps * GLOBAL_BATCH, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


class Marks:
    """Wall and CPU time after each step of an optimizer."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(lambda *_: self.times.append((time.perf_counter(), time.process_time())))
        return optimizer

    def seconds(self) -> tuple[float, float]:
        """(median wall, mean CPU) of a step, without a warm-up fifth."""
        times = self.times[max(1, len(self.times) // 5) :]
        wall = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(times))
        return wall, (times[-1][1] - times[0][1]) / (len(times) - 1)


# ---- ours ----------------------------------------------------------------------------------------------------------


class LM(Task):
    def __init__(self, data: Samples, marks: Marks) -> None:
        super().__init__()
        self.data, self.marks, self.model = data, marks, Model()

    def pipeline_units(self) -> list[str]:
        return [f"model.blocks.{i}" for i in range(LAYERS)]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return plan("model.")

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(tokens)
        return out

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return loss_of(outputs, batch[:, 1:])

    def train_dataset(self) -> Samples:
        return self.data

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.marks.watch(torch.optim.AdamW(self.parameters(), lr=1e-3))


def ours(layout: str, data: Samples, marks: Marks, folder: str) -> None:
    bar = ProgressBar(console=Console(file=io.StringIO(), force_terminal=True, width=120))
    Trainer(
        run_dir=folder,
        max_epochs=1,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH[layout],
        mesh=MESHES[layout],
        callbacks=[bar],
        checkpoint=CheckpointConfig(at_end=False, every_seconds=None),
    ).fit(LM(data, marks))


# ---- by hand -------------------------------------------------------------------------------------------------------


def by_hand(layout: str, data: Samples, marks: Marks, folder: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = DeviceMesh(device.type, torch.arange(2), mesh_dim_names=(layout,))
    {"fsdp": _fsdp, "tp": _tp, "pp": _pp}[layout](data, marks, device, mesh)


def _fsdp(data: Samples, marks: Marks, device: torch.device, mesh: DeviceMesh) -> None:
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sampler = DistributedSampler(data, shuffle=True)
    _train(model, DataLoader(data, MICRO_BATCH["fsdp"], sampler=sampler), marks, device)


def _tp(data: Samples, marks: Marks, device: torch.device, mesh: DeviceMesh) -> None:
    model = parallelize_module(Model().to(device), mesh, plan())
    _train(model, _all_of(data), marks, device)


def _train(model: nn.Module, loader: DataLoader[Tensor], marks: Marks, device: torch.device) -> None:
    optimizer = marks.watch(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in loader:
        batch = batch.to(device)
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class First(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed, self.blocks = model.embed, model.blocks[: LAYERS // 2]

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[LAYERS // 2 :], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _pp(data: Samples, marks: Marks, device: torch.device, mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    part = (First if rank == 0 else Last)(Model()).to(device)
    stage = PipelineStage(part, rank, 2, device, group=mesh.get_group())
    schedule = Schedule1F1B(stage, GLOBAL_BATCH // MICRO_BATCH["pp"], loss_fn=loss_of)
    optimizer = marks.watch(torch.optim.AdamW(part.parameters(), lr=1e-3))
    for batch in _all_of(data):
        batch = batch.to(device)
        if rank == 0:
            schedule.step(batch[:, :-1], return_outputs=False)
        else:
            losses: list[Tensor] = []
            schedule.step(target=batch[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()


def _all_of(data: Samples) -> DataLoader[Tensor]:
    """Both ranks get the same, in a shuffled order."""
    return DataLoader(data, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


# ---- measuring -----------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[str, Samples, Marks, str], None]] = {"by hand": by_hand, "elastictrain": ours}


def measure(layout: str, *, repeats: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds per step of every repeat."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    data = Samples(steps)
    for repeat in range(repeats + 1):
        for name in random.Random(repeat).sample(list(WAYS), len(WAYS)):
            marks = Marks()
            box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
            dist.broadcast_object_list(box)
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                WAYS[name](layout, data, marks, box[0])
            assert len(marks.times) == steps, (name, len(marks.times))
            if repeat:  # the first round warms up
                found[name].append(marks.seconds())
            gc.collect()
            dist.barrier()
    return found


def summary(layout: str, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    def median(name: str, k: int) -> float:
        return 1000 * statistics.median(run[k] for run in found[name])

    def ratio(k: int) -> float:
        pairs = zip(found["elastictrain"], found["by hand"], strict=True)
        return statistics.median(mine[k] / bare[k] for mine, bare in pairs)

    return {
        "layout": layout,
        "mesh": MESHES[layout],
        "runs": len(found["by hand"]),
        "ms": {name: {"wall": median(name, 0), "cpu": median(name, 1)} for name in found},
        "ratio": {"wall": ratio(0), "cpu": ratio(1)},
        "bar": BAR,
        "met": ratio(0) <= BAR,
    }


def report(results: list[dict[str, Any]], path: str | None) -> None:
    print(f"{'layout':8s}{'by hand':>22s}{'elastictrain':>22s}{'ratio (bar ' + str(BAR) + ')':>26s}")
    for one in results:
        ms, ratio = one["ms"], one["ratio"]
        cells = [f"{ms[name]['wall']:8.2f} ms, cpu {ms[name]['cpu']:6.2f}" for name in WAYS]
        print(f"{one['layout']:8s}{cells[0]:>22s}{cells[1]:>22s}{ratio['wall']:>15.3f}, cpu {ratio['cpu']:.3f}")
    text = json.dumps(results)
    print(text)
    if path is not None:
        with open(path, "w") as file:
            file.write(text + "\n")


def work(arguments: argparse.Namespace) -> None:
    """One of the two ranks."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    join(rank=rank, world_size=2, local_rank=local_rank)
    results = [
        summary(layout, measure(layout, repeats=arguments.repeats, steps=arguments.steps))
        for layout in arguments.layouts
    ]
    if rank == 0:
        report(results, arguments.json)
    dist.barrier()


def _rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    work(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layouts", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        work(arguments)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, port, arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
