"""The model of ``recovery.py``, about half a million parameters, and a script that trains it under stock torchrun.

``torchrun … benchmarks/recovery_model.py FOLDER`` trains it with FSDP2 and AdamW, saves with torch's own distributed
checkpoints every tenth step, and goes on from the last one after a restart. It imports torch and nothing else. Everybody
who trains this model writes a line for every step that a rank has finished: the time, the pid, the rank, and how often it
was started.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, BATCH, SAVE_EVERY = 256, 12, 10


def make_model() -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    return nn.Sequential(*(block() for _ in range(4)), nn.Linear(WIDTH, 7))


def make_data() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(50 * BATCH, WIDTH, generator=chance), torch.randint(7, (50 * BATCH,), generator=chance)


def write_step(out: TextIO, step: int, *, rank: int, start: int) -> None:
    out.write(f"{time.time():.4f} {os.getpid()} {rank} {start} {step}\n")
    out.flush()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = make_model()
    for layer in model[:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    last, step = folder / "last", 0
    if last.exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=last.read_text())
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = int(state["step"])
    inputs, targets = make_data()
    share = BATCH // world_size
    with open(folder / f"steps-{os.getpid()}", "a") as out:
        while True:
            first = step % 50 * BATCH + rank * share
            loss = nn.functional.cross_entropy(model(inputs[first : first + share]), targets[first : first + share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            write_step(out, step, rank=rank, start=start)
            if step % SAVE_EVERY == 0:
                weights, moments = get_state_dict(model, optimizer)
                where = folder / f"checkpoint-{step}"
                dcp.save({"model": weights, "optimizer": moments, "step": torch.tensor(step)}, checkpoint_id=where)
                if rank == 0:
                    (folder / "last.new").write_text(str(where))
                    os.replace(folder / "last.new", last)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
