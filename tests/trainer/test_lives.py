"""One process over many generations: nothing of an old one is left in it. A thread says what an agent would."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from elastictrain import Callback, CheckpointConfig, Trainer
from elastictrain import lives as lives_module
from elastictrain.elastic import membership as membership_module
from elastictrain.elastic.cells import LOST, PHASE, Cells, Phase, one_cell
from elastictrain.elastic.line import Assignment, Line, Place, Speaker
from elastictrain.elastic.membership import AgentMembership
from elastictrain.parallel.mesh import abandon
from tests.checkpoint.nodes import memory_of
from tests.cli.lives_task import Lives as Task
from tests.helpers import free_port, run_ranks

SETTLED = 4  # generations after which everything that is made once has been made


class Breaking(Callback):
    """Loses the others after three steps of every generation but the last; what it counts begins anew in each."""

    def __init__(self, last: int, run_dir: str) -> None:
        self.last, self.run_dir, self.count = last, run_dir, 0

    def on_step_end(self, info: Any) -> None:
        self.count += 1
        if self.count == 3 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < self.last:
            while not list(Path(self.run_dir).glob("checkpoints/*/*/COMMIT")):
                time.sleep(0.01)
            raise RuntimeError("gloo: Connection reset by peer")


class Measuring(Callback):
    found: list[dict[str, int]] = []  # noqa: RUF012 - of the process, and not put back

    def on_generation_start(self, info: Any) -> None:
        gc.collect()
        objects = gc.get_objects()
        meshes = sum(isinstance(one, DeviceMesh) for one in objects)
        modules = sum(isinstance(one, FSDPModule) for one in objects)
        fds, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        images = memory_of("self")
        Measuring.found.append({"fds": fds, "threads": threads, "meshes": meshes, "modules": modules, "images": images})


def places(folder: Path, rank: int, world_size: int, ports: list[int]) -> list[Place]:
    """Of all generations; rank 0 makes what they share."""
    found = []
    for generation, port in enumerate(ports):
        assignment = folder / f"assignment-{generation}.json"
        if rank == 0:
            cells = str(folder / f"cells-{generation}")
            Cells.create(cells, world_size).close()
            Assignment(os.getppid(), generation, cells, str(folder), job_id="one").write(str(assignment) + ".new")
            os.rename(str(assignment) + ".new", assignment)
        environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        environment |= {"GROUP_RANK": 0, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": generation}
        found.append(Place(generation, str(assignment), {name: str(value) for name, value in environment.items()}))
    while not Path(found[-1].assignment).exists():
        time.sleep(0.01)
    return found


def be_agent(speaker: Speaker, rank: int, world_size: int, places: list[Place]) -> None:
    for place, following in itertools.pairwise(places):
        cell = one_cell(str(Path(place.assignment).parent / f"cells-{place.generation}"), rank, world_size)
        while not cell[LOST]:
            time.sleep(0.002)
        speaker.over(place.generation)
        speaker.over(place.generation)  # agents may say it twice
        while cell[PHASE] != Phase.CLOSED:
            time.sleep(0.002)
        speaker.place(following)


def _endure(rank: int, world_size: int, folder: str, ports: list[int], mesh: str, early: bool) -> Any:
    mine = places(Path(folder), rank, world_size, ports)
    speaker = Speaker()
    lives_module._has_trained = False  # by a test before this one, in the process that was forked
    membership_module._mine = AgentMembership(Line(speaker.descriptor), mine[0])
    threading.Thread(target=be_agent, args=(speaker, rank, world_size, mine), daemon=True).start()
    task = Task(folder, early=early)
    last = len(ports) - 1
    run_dir = os.path.join(folder, "run")
    trainer = Trainer(
        run_dir=run_dir,
        max_steps=3 * len(ports) + 3,
        mesh=mesh,
        micro_batch_size=2,
        checkpoint=CheckpointConfig(every_steps=1, at_end=False),
        callbacks=[Measuring(), Breaking(last, run_dir)],
    )
    inner, hook = task.blocks if early else None, sys.excepthook
    trainer.fit(task)
    assert inner is None or task.blocks is inner
    dist.barrier()
    abandon()
    assert sys.excepthook is hook, "torch has wrapped it once more in each generation"
    return Measuring.found, membership_module._mine.places


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "early"), [("dp_shard=2", False), ("tp=2", True)])
def test_nothing_of_an_old_generation_is_left(mesh: str, early: bool, tmp_path: Path) -> None:
    ports = [free_port() for _ in range(12)]
    for found, num_places in run_ranks(_endure, 2, str(tmp_path), ports, mesh, early):
        assert num_places == len(found) == len(ports)
        first, last = found[SETTLED], found[-1]
        assert last["meshes"] <= first["meshes"] and last["modules"] <= first["modules"], found
        assert all(one["images"] == found[0]["images"] for one in found), "of saves and snapshots"
        assert last["fds"] <= first["fds"] + 4 and last["threads"] <= first["threads"] + 2, found
