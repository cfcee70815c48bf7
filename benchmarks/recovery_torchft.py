"""The model of ``recovery.py`` under torchft: a replica in each process, and one that has died is started again at once.

``python benchmarks/recovery_torchft.py FOLDER RANKS`` serves the lighthouse and starts the replicas, which are this script
with two more arguments: the rank, and how often that one was started before. A new replica gets its weights from the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.recovery_model import BATCH, make_data, make_model, write_step

JOIN_MS, SILENT_MS = 100, 1000  # for replicas to come to a quorum; without a sign of life, after which one is gone


def supervise(folder: Path, num_ranks: int) -> None:
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS, heartbeat_timeout_ms=SILENT_MS
    )
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": house.address()}
    me = [sys.executable, __file__, str(folder), str(num_ranks)]
    starts = [-1] * num_ranks
    replicas: list[subprocess.Popen[bytes] | None] = [None] * num_ranks
    while True:
        for rank, replica in enumerate(replicas):
            if replica is None or replica.poll() is not None:
                starts[rank] += 1
                replicas[rank] = subprocess.Popen([*me, str(rank), str(starts[rank])], env=env)
        time.sleep(0.02)


def train(folder: Path, num_ranks: int, rank: int, start: int) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica-{rank}",
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    inputs, targets = make_data()
    share = BATCH // num_ranks
    with open(folder / f"steps-{os.getpid()}", "a") as out:
        while True:
            step = manager.current_step()
            first = step % 50 * BATCH + rank * share
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(inputs[first : first + share]), targets[first : first + share])
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                write_step(out, manager.current_step(), rank=rank, start=start)


if __name__ == "__main__":
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) == 3:
        supervise(folder, num_ranks)
    train(folder, num_ranks, int(sys.argv[3]), int(sys.argv[4]))
