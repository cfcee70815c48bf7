"""Whoever waits for a peer that does not come is let go, and the process meets others anew as if it were new."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from elastictrain.compat import torch as compat_torch
from elastictrain.config import MeshShape
from elastictrain.errors import GenerationOver, is_lost_peer
from elastictrain.parallel.groups import SeverableGroup
from elastictrain.parallel.mesh import SEVERABLE, abandon, join, make_mesh, making_groups, severance
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
    ranks = join(rank=rank, world_size=world_size - 1, local_rank=rank)
    make_mesh(ranks, MeshShape(dp_shard=3))
    ranks.barrier()  # the store is rank 0's
    if rank == 0:
        open(done, "w").close()
    return sums


def test_waiting_ranks_are_let_go_and_meet_without_the_other(tmp_path: Any) -> None:
    found = run_ranks(_let_go, 4, [free_port() for _ in range(3)], str(tmp_path))
    assert found == [[10.0, 6.0]] * 3 + [[10.0]]


def _half_way(rank: int, world_size: int, ports: list[int], operation: str) -> float:
    """The last rank is stopped while a large message is half received, which gloo forgets when connections are cut."""
    _meet(ports, 0, rank, world_size)
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    cut, large = severance(), torch.ones(16_000_000)

    def transfer() -> None:
        while True:
            if operation == "message":
                dist.send(large, 1) if rank == 0 else dist.recv(large, 0)
            else:
                dist.all_reduce(large) if operation == "collective" else dist.reduce_scatter_tensor(
                    large[:8_000_000], large
                )

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        cut()  # once it goes on

    if rank == 0:
        _raises(transfer)
        os.kill(pids[1], signal.SIGCONT)
    else:
        threading.Timer(0.02, stop).start()
        with pytest.raises(RuntimeError, match="gloo"):
            transfer()
    abandon()
    return _meet(ports, 1, rank, world_size)


@pytest.mark.parametrize("operation", ["message", "collective", "scattered"])
def test_ranks_are_let_go_in_the_middle_of_a_message(operation: str) -> None:
    assert run_ranks(_half_way, 2, [free_port() for _ in range(2)], operation, timeout=60) == [3.0, 3.0]


def _all_kinds(rank: int, world_size: int, port: int) -> list[float]:
    """All that torch asks of a group, in one that can be severed."""
    _meet([port], 0, rank, world_size)
    assert dist.get_backend() == SEVERABLE
    ones, parts = torch.ones(2) * (rank + 1), [torch.zeros(2) for _ in range(world_size)]
    whole, part = torch.arange(4.0), torch.zeros(2)
    found = []
    dist.all_reduce(one := ones.clone())
    found.append(one[0])
    dist.broadcast(one := ones.clone(), src=1)
    found.append(one[0])
    dist.all_gather(parts, ones)
    found.append(parts[1][0])
    dist.all_gather_into_tensor(whole.clone(), ones)
    dist.reduce_scatter_tensor(part, whole)
    found.append(part[0] - 4.0 * rank)
    dist.reduce_scatter(part, [ones, 2 * ones])
    found.append(part[0] - 3.0 * rank)
    dist.reduce(one := ones.clone(), dst=0)
    found.append(one[0] if rank == 0 else torch.tensor(3.0))
    dist.scatter(part, [whole[:2], whole[2:]] if rank == 0 else None, src=0)
    found.append(part[0] - 2.0 * rank)
    dist.all_to_all_single(one := torch.zeros(2), ones)
    found.append(one[1])
    work = dist.irecv(part, 1 - rank)
    dist.isend(ones, 1 - rank).wait()
    work.wait()
    found.append(part[0] + ones[0])
    dist.barrier()
    box = ["one" if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    assert box == ["one"]
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert dist.get_world_size(alone) == 1 and dist.get_backend(alone) == SEVERABLE
    gathered = all_gather_tensor(ones, 0, list(range(world_size)))
    found.append(gathered[-1])
    assert work.is_completed()
    return [float(one) for one in found]


def test_a_group_that_can_be_severed_does_what_every_group_does() -> None:
    assert run_ranks(_all_kinds, 2, free_port()) == [[3.0, 2.0, 2.0, 0.0, 3.0, 3.0, 0.0, 2.0, 3.0, 2.0]] * 2


def _late(rank: int, world_size: int, port: int, folder: str) -> None:
    """A wait that is told how long it may take."""
    _meet([port], 0, rank, world_size)
    done = os.path.join(folder, "done")
    if rank == 0:
        reduced = dist.all_reduce(torch.ones(1), async_op=True)
        scattered = dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), async_op=True)
        for work in (reduced, scattered, dist.irecv(torch.ones(1), 1)):
            assert work is not None
            with pytest.raises(RuntimeError, match="not ended within 0.2 s"):
                work.wait(timedelta(seconds=0.2))
            assert not work.is_completed()
        open(done, "w").close()
        dist.send(torch.ones(1), 1)
    else:
        while not os.path.exists(done):
            time.sleep(0.01)
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2))
        dist.send(torch.ones(1), 0)


def test_a_wait_with_a_limit_ends(tmp_path: Any) -> None:
    run_ranks(_late, 2, free_port(), str(tmp_path))


def _meet_one_that_is_gone() -> None:
    """Rank 0 has told where it can be reached, and does nothing more."""
    theirs, ours, is_over = dist.HashStore(), dist.HashStore(), threading.Event()

    def gone() -> None:
        with suppress(RuntimeError, dist.DistError):  # it finds nobody
            dist.ProcessGroupGloo(theirs, 0, 2, timeout=timedelta(seconds=2))

    threading.Thread(target=gone, name="gone", daemon=True).start()
    while not (keys := theirs.list_keys()):
        time.sleep(0.01)
    for key in keys:
        ours.set(key, theirs.get(key))
    _soon(is_over.set)
    SeverableGroup(ours, 1, 2, timedelta(seconds=4), is_severed=is_over.is_set)


def test_a_rank_that_is_gone_before_it_has_connected() -> None:
    """Of two ranks one connects, by their ports, and the other waits for that: no socket is there to cut."""
    with pytest.raises(RuntimeError, match="were cut") as raised:
        for _ in range(30):
            _meet_one_that_is_gone()
    assert is_lost_peer(raised.value)
    for thread in threading.enumerate():  # of such a short limit the end could fall into that of the process
        if thread.name in ("gone", "gloo begin"):
            thread.join()


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
