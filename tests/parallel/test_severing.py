"""Whoever waits for a peer that does not come is let go, and the process meets others anew as if it were new."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elastictrain.compat import torch as compat_torch
from elastictrain.config import MeshShape
from elastictrain.errors import GenerationOver, is_lost_peer
from elastictrain.parallel.mesh import abandon, join, make_mesh, making_groups, severance
from tests.helpers import free_port, run_ranks

SECONDS = 20.0  # no test waits for so long; a group's timeout is half an hour


def _soon(act: Any) -> None:
    threading.Timer(0.3, act).start()


def _raises(wait: Any) -> BaseException:
    _soon(severance())  # of these groups: others may already have been met when it is due
    began = time.monotonic()
    with pytest.raises((RuntimeError, dist.DistError)) as raised:
        wait()
    assert time.monotonic() - began < SECONDS
    assert is_lost_peer(raised.value), raised.value
    return raised.value


def _meet(ports: list[int], number: int, rank: int, world_size: int) -> float:
    os.environ["MASTER_PORT"] = str(ports[number])
    ranks = join(rank=rank, world_size=world_size, local_rank=rank, has_agent=True)
    found = ranks.sum([1.0 + rank])[0]
    if rank == 0:
        assert _listeners(ports[number]) == ["0100007F"], "not on the network"
    return found


def _listeners(port: int) -> list[str]:
    """The addresses on which somebody listens at that port, as the kernel writes them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return [address for address, at in places if int(at, 16) == port]


def _let_go(rank: int, world_size: int, ports: list[int], folder: str) -> list[float]:
    """The last rank sleeps: in a collective of the world's, in one of a subgroup, and while a group is made."""
    sums = [_meet(ports, 0, rank, world_size)]
    mesh = make_mesh(join(rank=rank, world_size=world_size, local_rank=rank), MeshShape(dp_replicate=2, tp=2))
    done = os.path.join(folder, "done")
    if rank == world_size - 1:
        while not os.path.exists(done):
            time.sleep(0.01)
        return sums
    assert mesh.device_mesh is not None
    group = mesh.device_mesh.get_group("tp") if rank == 2 else None
    _raises(lambda: dist.all_reduce(torch.ones(1), group=group))
    abandon()
    assert not dist.is_initialized()
    _raises(lambda: _meet(ports, 1, rank, world_size))  # the last rank does not come
    abandon()
    sums.append(_meet(ports, 2, rank, world_size - 1))
    make_mesh(join(rank=rank, world_size=world_size - 1, local_rank=rank), MeshShape(dp_shard=3))
    if rank == 0:
        open(done, "w").close()
    return sums


def test_waiting_ranks_are_let_go_and_meet_without_the_other(tmp_path: Any) -> None:
    found = run_ranks(_let_go, 4, [free_port() for _ in range(3)], str(tmp_path))
    assert found == [[10.0, 6.0]] * 3 + [[10.0]]


def test_nobody_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    over = threading.Event()
    _soon(over.set)
    with pytest.raises(GenerationOver, match="over before its ranks have met"):
        join(rank=1, world_size=2, local_rank=1, is_over=over.is_set)


def _swapped(rank: int, world_size: int, ports: list[int]) -> list[float]:
    """The same ops on a mesh of the same shape, in which the ranks have changed places."""
    found = []
    for number, place in enumerate((rank, world_size - 1 - rank)):
        _meet(ports, number, place, world_size)
        ranks = join(rank=place, world_size=world_size, local_rank=place)
        device_mesh = make_mesh(ranks, MeshShape(tp=world_size)).device_mesh
        assert device_mesh is not None
        whole = torch.arange(8.0).view(4, 2)
        shard = distribute_tensor(whole, device_mesh["tp"], [Shard(0)], src_data_rank=None)
        halves = shard.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])
        found.append(float((halves.to_local() != whole).sum()))
        abandon()
    return found


def test_a_mesh_is_not_taken_for_one_that_is_gone() -> None:
    ports = [free_port() for _ in range(2)]
    assert run_ranks(_swapped, 2, ports) == [[0.0, 0.0]] * 2


def test_severing_late_does_nothing_to_the_next_generation() -> None:
    late = severance()
    abandon()
    assert severance() != late
    here, there = socket.socketpair()
    with here, there:
        with making_groups():
            again = socket.socket(fileno=os.dup(here.fileno()))
        late()
        there.sendall(b"1")
        assert again.recv(1) == b"1"
        severance()()
        assert again.recv(1) == b"", "it is cut by its own"
        again.close()
    abandon()


def test_names_of_groups_are_those_of_a_new_process() -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = dist.distributed_c10d._get_default_group().group_name
        dist.new_group([0])
        compat_torch.abort_groups()
        assert name == "0" and not dist.is_initialized()
    compat_torch.forget_meshes()
