"""The ranks of one generation: process group, device and named mesh, and the few exchanges the trainer makes on it.

A run on one rank has no process group at all. Exchanges of small values go over gloo on the CPU, so that asking "how
many samples were there?" never waits for a device.

On failure: a peer that dies makes any exchange raise ``RuntimeError`` here or on the next one; the generation ends.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastictrain import exchange
from elastictrain.compat.torch import abort_groups, forget_meshes
from elastictrain.config import AXES, MeshConfig, MeshShape
from elastictrain.errors import UsageError
from elastictrain.parallel.meeting import meet
from elastictrain.parallel.severing import Connections
from elastictrain.parallel.zones import Zones, number

T = TypeVar("T")

# What the device mesh is made of. FSDP knows one axis over which it cuts parameters: the ranks that share a sample's tokens
# share the state as well, so that gradients are summed over both.
DIMS = ("pp", "dp_replicate", "dp_shard_cp", "tp")


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the generation."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store | None  # None on one rank
    owns_group: bool
    zones: Zones | None = None  # where the ranks are, if a topology file says so

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, float64; a collective."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place, on the tensor's own device; a collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
        """The values of the first rank of ``group`` (all ranks), in place, of any dtype and layout; a collective."""
        if self.world_size == 1:
            return
        plain = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # gloo has no bool
        sent = plain.contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not plain:
            plain.copy_(sent)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank; small Python objects only; a collective."""
        if self.world_size == 1:
            return [value]
        return exchange.all_gather(value)

    def from_main(self, value: T, *, main: int = 0) -> T:
        """The value of rank 0, or of ``main``, on every rank; a collective."""
        if self.world_size == 1:
            return value
        found: T = exchange.broadcast(value, src=main)
        return found

    def barrier(self) -> None:
        if self.world_size > 1:
            self.sum([0.0])


def join(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
    nodes: Sequence[str] = (),
    timeout: timedelta = timedelta(minutes=30),
    is_over: Callable[[], bool] = lambda: False,
    has_agent: bool = False,
) -> Ranks:
    """Meet the other ranks at ``MASTER_ADDR:MASTER_PORT``; a group that the script made already is used as it is.

    Args:
        rank, world_size, local_rank: as the launcher counts; with a topology file the group counts in its order.
        mesh: its topology file, and the axes that shall be within a zone.
        nodes: by which this machine may be called in that file.
        is_over: whether there is anybody left to meet.
        has_agent: ``elastictrain run`` has chosen the address, which is one of rank 0's machine.

    Raises:
        GenerationOver: there is not.
        UsageError: several ranks and no address to meet at, a process group of another size, or the topology file
            cannot be used.
    """
    global _store, _num_groups, _joined, _leaves_at_exit, _hook
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if dist.is_initialized():
        if mesh.topology is not None and (_joined is None or _joined.zones is None):
            raise UsageError(
                f"topology {mesh.topology} orders ranks when the process group is made, and it was made without"
                " this one: leave that to the trainer, give every trainer of a process the topology, or leave it out"
            )
        return _joined or Ranks(dist.get_rank(), dist.get_world_size(), local_rank, device, None, owns_group=False)
    if world_size == 1:
        return Ranks(0, 1, local_rank, device, None, owns_group=False)
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UsageError(
            f"WORLD_SIZE={world_size} but {missing[0]} is not set: start the script with elastictrain run or torchrun"
        )
    with making_groups():
        if _store is None:  # one per generation: its port cannot be bound a second time
            _store = meet(rank, world_size, timeout=timeout, is_over=is_over, binds=has_agent)
    _num_groups += 1
    store = PrefixStore(f"elastictrain/{_num_groups}", _store)
    zones: Zones | None = None
    if mesh.topology is not None:
        shape = None if mesh.preset == "auto" else mesh.resolve(world_size)  # auto looks at the devices of a made group
        block = 1 if shape is None else shape.dp_shard * shape.cp * shape.tp
        rank, zones = number(
            PrefixStore("zones", store), mesh.topology, rank=rank, world_size=world_size, names=nodes, block=block
        )
    # nothing but an agent severs groups; NCCL has its own way, and gloo's part is small beside it
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else SEVERABLE if has_agent else "gloo"
    _hook = _hook or sys.excepthook
    with making_groups():
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=rank, world_size=world_size, timeout=timeout
        )
        _joined = Ranks(rank, world_size, local_rank, device, store, owns_group=True, zones=zones)
        _joined.barrier()  # one that is refused next must not take the store from those that still make their connections
    if not _leaves_at_exit:
        _leaves_at_exit = True
        atexit.register(lambda: leave(_joined) if _joined is not None else None)
    return _joined


_connections = Connections()  # of the groups of this process
SEVERABLE = "severable_gloo"  # the name of the backend
dist.Backend.register_backend(SEVERABLE, lambda *what: _connections.group(*what), devices=["cpu"])


def making_groups() -> AbstractContextManager[None]:
    """Around whatever makes process groups, so that :func:`sever` knows them."""
    return _connections.noting()


def sever() -> None:
    """Let go whoever waits in a collective, with an error; from any thread."""
    _connections.sever()


def severance() -> Callable[[], None]:
    """:func:`sever`, of the groups of this generation alone: it does nothing when they are gone, and others are there."""
    return _connections.sever


_store: Store | None = None
_num_groups = 0
_joined: Ranks | None = None
_leaves_at_exit = False
_hook: Any = None  # what torch wraps again with every group


def leave(ranks: Ranks) -> None:
    """End the process group that :func:`join` made.

    It is left alive after training, because a sharded module's weights can be read only through it, and the next
    :func:`join` in this process uses it again.
    """
    global _joined, _connections
    if ranks.owns_group and dist.is_initialized():
        dist.destroy_process_group()
        _connections.close()
        _joined, _connections = None, Connections()


def abandon() -> None:
    """The other ranks are gone: forget them, their groups, their meshes and their store.

    Nothing that was laid out over them can be used after this.
    """
    global _store, _num_groups, _joined, _connections
    if _hook is not None:
        sys.excepthook = _hook
    sever()
    abort_groups()
    forget_meshes()
    _connections.close()
    _store, _num_groups, _joined, _connections = None, 0, None, Connections()


@dataclass(frozen=True)
class Mesh:
    """The ranks with names: who shares slots with whom, who shares shards with whom, and who counts.

    Ranks that differ in ``tp``, ``cp`` or ``pp`` alone read the same slots and work on them together. Of a slot, the ranks
    of ``cp`` have different tokens: together with the data-parallel ranks they are the *data ranks*. Those of ``tp`` and
    ``pp`` have the same. What is exchanged about data (losses, logged values) must count those once: one of them *counts*,
    the one with ``tp`` 0 that holds the last stage of the pipeline, where losses are. :meth:`sum`, :meth:`gather` and
    :meth:`from_first` know all that, and give every rank of the mesh the same answer.
    """

    ranks: Ranks
    shape: MeshShape
    device_mesh: DeviceMesh | None  # of DIMS, size 1 included; None on one rank
    last_stage: int = 0  # the pp coordinate of the last stage of the pipeline
    data_group: dist.ProcessGroup | None = None  # the data ranks with the same tp and pp as this one; None: all ranks
    cp_group: dist.ProcessGroup | None = (
        None  # the ranks that share the tokens of this one's slots; None: this one alone
    )
    coordinates: tuple[int, ...] = (0,) * len(AXES)

    def coordinate(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self.coordinates[AXES.index(axis)]

    @property
    def dp_rank(self) -> int:
        return self.coordinate("dp_replicate") * self.shape.dp_shard + self.coordinate("dp_shard")

    @property
    def dp_size(self) -> int:
        return self.shape.dp

    @property
    def data_size(self) -> int:
        """How many data ranks there are."""
        return self.shape.dp * self.shape.cp

    @property
    def data_rank(self) -> int:
        return self.dp_rank * self.shape.cp + self.cp_rank

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes of the device mesh that FSDP works on."""
        return ("dp_replicate", "dp_shard_cp") if self.shape.dp_replicate > 1 else ("dp_shard_cp",)

    @property
    def pp_rank(self) -> int:
        return self.coordinate("pp")

    @property
    def cp_rank(self) -> int:
        return self.coordinate("cp")

    @property
    def tp_rank(self) -> int:
        return self.coordinate("tp")

    @property
    def has_peers(self) -> bool:
        """Do several ranks work on the same slots?"""
        return self.shape.world_size > self.shape.dp

    @property
    def counts(self) -> bool:
        """Are this rank's loss, samples and logged values those of its data rank?"""
        return (self.pp_rank, self.tp_rank) == (self.last_stage, 0)

    @property
    def first_rank(self) -> int:
        """Among those that count, the rank with ``data_rank`` 0: step values are its own."""
        return 0 if self.device_mesh is None else int(self.device_mesh.mesh[self.last_stage, 0, 0, 0])

    @property
    def is_sharded(self) -> bool:
        """Does FSDP lay out the parameters? Also where they are replicated, and split along other axes as well."""
        return self.shape.dp_shard > 1 or self.shape.cp > 1 or (self.shape.dp > 1 and self.has_peers)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over data-parallel ranks, float64, on every rank; a collective of all ranks.

        For what belongs to slots: the ranks of ``cp`` have theirs together.
        """
        return self.ranks.sum(values if self.counts and self.cp_rank == 0 else [0.0] * len(values))

    def gather(self, value: T) -> list[T]:
        """One value for each data rank, in their order, on every rank; a collective of all ranks."""
        if self.data_size == self.shape.world_size:
            return self.ranks.gather(value)
        return [found[0] for found in self.ranks.gather((value,) if self.counts else ()) if found]

    def from_first(self, value: T) -> T:
        """The value of :attr:`first_rank`, on every rank; a collective of all ranks."""
        return self.ranks.from_main(value, main=self.first_rank)

    def broadcast_(self, tensor: Tensor) -> None:
        """In place, what the first data rank of the same pipeline stage has; a collective of all ranks."""
        if self.data_size > 1:
            self.ranks.broadcast_(tensor, group=self.data_group)
        if self.device_mesh is not None and self.shape.tp > 1:
            self.ranks.broadcast_(tensor, group=self.device_mesh.get_group("tp"))


def make_mesh(ranks: Ranks, shape: MeshShape, *, last_stage: int | None = None) -> Mesh:
    """Name the ranks; a collective.

    Args:
        last_stage: the pp coordinate that holds the last stage of the pipeline; None: the last one.
    """
    assert shape.world_size == ranks.world_size, (shape, ranks.world_size)
    if ranks.world_size == 1:
        return Mesh(ranks, shape, None)
    sizes = (shape.pp, shape.dp_replicate, shape.dp_shard * shape.cp, shape.tp)
    with making_groups():
        device_mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=DIMS)
    last_stage = shape.pp - 1 if last_stage is None else last_stage
    every = torch.arange(shape.world_size).view(shape.sizes)
    coordinates = tuple(int(place) for place in (every == ranks.rank).nonzero()[0])
    cp_group = _group(every.transpose(3, 4).reshape(-1, shape.cp)) if shape.cp > 1 else None
    return Mesh(ranks, shape, device_mesh, last_stage, _data_group(device_mesh, shape), cp_group, coordinates)


def _data_group(device_mesh: DeviceMesh, shape: MeshShape) -> dist.ProcessGroup | None:
    """The group over the axes of data ranks together; None where it is the default group."""
    size = shape.dp * shape.cp
    if size == shape.world_size:
        return None
    if shape.dp_replicate in (1, size):
        return device_mesh.get_group("dp_shard_cp" if shape.dp_replicate == 1 else "dp_replicate")
    return _group(device_mesh.mesh.permute(0, 3, 1, 2).reshape(-1, size))


def _group(rows: Tensor) -> dist.ProcessGroup | None:
    """The group of the row that this rank is in; every rank makes every group, in one order."""
    mine: dist.ProcessGroup | None = None
    with making_groups():
        for members in rows.tolist():
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
    return mine


def device_bytes(device: torch.device, local_world_size: int) -> int:
    """Memory of the device, or this process' part of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, local_world_size)
