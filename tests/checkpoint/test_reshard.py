"""Any layout saves it, any layout loads it, bit for bit: real ranks, real FSDP2 models and optimizers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

from elastictrain.checkpoint import CheckpointReader
from elastictrain.checkpoint.manifest import Manifest, manifest_name
from elastictrain.rundir import RunDir
from elastictrain.state import (
    FlatState,
    check_entries,
    load_optimizer,
    model_state,
    optimizer_state,
    optimizer_targets,
    parameter_names,
)
from tests.checkpoint.states import assert_equal, blank, expected, full, load_all, manager, spread, whole
from tests.helpers import run_ranks

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "one": ((1,), [Shard(0)]),
    "shard2": ((2,), [Shard(0)]),
    "shard3": ((3,), [Shard(0)]),
    "shard4": ((4,), [Shard(0)]),
    "replicate3": ((3,), [Replicate()]),
    "hsdp2x2": ((2, 2), [Replicate(), Shard(0)]),
    "columns3": ((3,), [Shard(1)]),
    "grid2x2": ((2, 2), [Shard(0), Shard(1)]),
}


def mesh_of(layout: str, rank: int) -> tuple[DeviceMesh, list[Placement]]:
    shape, placements = LAYOUTS[layout]
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", shape), placements


def size_of(layout: str) -> int:
    return int(torch.Size(LAYOUTS[layout][0]).numel())


def save_spread(rank: int, world_size: int, url: str, layout: str) -> str:
    mesh, placements = mesh_of(layout, rank)
    named = expected()
    if "columns" in layout or "grid" in layout:  # only where there is a second dim
        named = {name: tensor for name, tensor in named.items() if tensor.dim() != 1}
    state = {**spread(named, mesh, placements), "trainer.step": 1, "trainer.best": None}
    info = manager(url, rank=rank, world_size=world_size).save(1, state, local_values={f"data.shard.{rank}": rank})
    return info.path


def load_spread(rank: int, world_size: int, path: str, layout: str) -> None:
    mesh, placements = mesh_of(layout, rank)
    reader = CheckpointReader(path)
    wanted = {name: tensor for name, tensor in expected().items() if name in reader.tensors}
    if "columns" in layout or "grid" in layout:
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.dim() != 1}
    targets = blank(spread(wanted, mesh, placements))
    reader.load(targets)
    assert_equal({name: full(tensor) for name, tensor in targets.items()}, wanted)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one", "shard3"),
        ("shard2", "shard3"),
        ("shard3", "one"),
        ("hsdp2x2", "shard3"),
        ("shard4", "replicate3"),
        ("replicate3", "hsdp2x2"),
        ("shard3", "columns3"),
        ("columns3", "grid2x2"),
        ("grid2x2", "shard3"),
    ],
)
def test_every_dtype_and_uneven_shape_from_layout_to_layout(tmp_path: Path, first: str, second: str) -> None:
    paths = run_ranks(save_spread, size_of(first), str(tmp_path), first)
    assert len(set(paths)) == 1
    reader = CheckpointReader(paths[0])
    shards = {f"data.shard.{rank}": rank for rank in range(size_of(first))}
    assert reader.values == {"trainer.step": 1, "trainer.best": None, **shards}
    run_ranks(load_spread, size_of(second), paths[0], second)


def test_replicated_tensors_are_written_once_and_shared_out(tmp_path: Path) -> None:
    path = run_ranks(save_spread, 3, str(tmp_path), "replicate3")[0]
    sizes = [Path(path, f"shard-{rank:05d}-of-00003.safetensors").stat().st_size for rank in range(3)]
    content = sum(tensor.nbytes for tensor in expected().values())
    assert sum(sizes) < content + 3 * 2000  # headers
    pieces = [
        {
            one.name
            for one in Manifest.from_json(Path(path, manifest_name(rank)).read_bytes(), rank=rank, world_size=3).pieces
        }
        for rank in range(3)
    ]
    assert all(pieces) and sum(len(names) for names in pieces) == len(expected())
    load_all(path)


@pytest.mark.parametrize("storage", ["local", pytest.param("s3", marks=pytest.mark.slow)])
def test_each_rank_reads_no_more_than_it_needs(
    storage: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks, of a state whose tensors are of an ordinary model's size: 5% at most beside what is asked for."""
    url = str(tmp_path) if storage == "local" else request.getfixturevalue("s3_url")
    named = {f"w{i}": whole(f"w{i}", (1536, 1024), torch.float32) for i in range(4)} | {"b": torch.zeros(1024)}

    def save(rank: int, world_size: int) -> str:
        mesh, placements = mesh_of("shard2", rank)
        return manager(url, rank=rank, world_size=2).save(1, dict(spread(named, mesh, placements))).path

    path = run_ranks(save, 2)[0]

    def count(rank: int, world_size: int) -> tuple[int, int]:
        mesh, placements = mesh_of("shard3", rank)
        reader = CheckpointReader(path)
        read = counted_reads(RunDir(path), monkeypatch)
        targets = blank(spread(named, mesh, placements))
        reader.load(targets)
        assert_equal({name: full(tensor) for name, tensor in targets.items()}, named)
        return sum(read), sum(tensor.to_local().nbytes for tensor in targets.values())  # type: ignore[attr-defined]

    for read, needed in run_ranks(count, 3):
        assert needed <= read <= 1.05 * needed


def counted_reads(folder: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read from now on: of the system's, or of the driver's requests."""
    sizes: list[int] = []
    if folder.is_local:
        preadv = os.preadv

        def counted_preadv(*args: Any) -> int:
            sizes.append(preadv(*args))
            return sizes[-1]

        monkeypatch.setattr(os, "preadv", counted_preadv)
    else:
        request = type(folder.fs)._cat_file

        async def counted_request(*args: Any, **kwargs: Any) -> bytes:
            data: bytes = await request(*args, **kwargs)
            sizes.append(len(data))
            return data

        monkeypatch.setattr(type(folder.fs), "_cat_file", counted_request)
    return sizes


def test_stock_torch_reshards_a_checkpoint_of_two_ranks_on_three(tmp_path: Path) -> None:
    path = run_ranks(save_spread, 2, str(tmp_path), "shard2")[0]

    def stock(rank: int, world_size: int, ours: bool) -> None:
        mesh, placements = mesh_of("shard3", rank)
        targets = blank(spread(expected(), mesh, placements))
        dcp.load(targets, storage_reader=CheckpointReader(path) if ours else HuggingFaceStorageReader(path))
        assert_equal({name: full(tensor) for name, tensor in targets.items()}, expected())

    run_ranks(stock, 3, False)
    run_ranks(stock, 3, True)


# ---- a model that trains ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 9)
        self.norm = nn.BatchNorm1d(9)  # buffers, one of them an integer
        self.second = nn.Linear(9, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x))) * self.scale
        return out


def hop(rank: int, world_size: int, url: str, mesh_shape: tuple[int, ...]) -> tuple[FlatState, FlatState]:
    """Resume on this layout, train a step, save. Returns the whole state as loaded and as saved."""
    torch.manual_seed(world_size)  # other weights than the checkpoint's
    model = Model()
    if world_size > 1:
        dist.init_process_group("gloo")
        names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names_of = parameter_names(model)
    checkpoints = manager(url, rank=rank, world_size=world_size)
    loaded: FlatState = {}
    step = 0
    if newest := checkpoints.newest():
        reader = CheckpointReader(newest)
        targets = {**model_state(model), **optimizer_targets(0, optimizer, names_of, reader.tensors)}
        check_entries(targets, reader.tensors, of=["model.", "optim."])
        reader.load(targets)
        load_optimizer(0, optimizer, names_of, {**reader.values, **targets})
        step = reader.step
        loaded = whole_state(model, optimizer)
    torch.manual_seed(rank)
    model(torch.randn(4, 17)).square().sum().backward()
    optimizer.step()
    for buffer in model.buffers():  # equal on all ranks, as a checkpoint asks
        if world_size > 1:
            dist.broadcast(buffer, 0)
    state = {**model_state(model), **optimizer_state(0, optimizer, names_of), "trainer.step": step + 1}
    checkpoints.save(step + 1, state)
    return loaded, whole_state(model, optimizer)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> FlatState:
    state = {**model_state(model), **optimizer_state(0, optimizer, parameter_names(model))}
    return {name: full(value).clone() if isinstance(value, Tensor) else value for name, value in state.items()}


@pytest.mark.slow
def test_a_training_state_goes_through_many_layouts_unchanged(tmp_path: Path) -> None:
    before: FlatState = {}
    for mesh_shape in [(1,), (2,), (3,), (1,), (2, 2), (3,), (4,)]:
        results = run_ranks(hop, int(torch.Size(mesh_shape).numel()), str(tmp_path), mesh_shape)
        for loaded, saved in results:
            assert set(loaded) == set(before)
            for name, value in before.items():
                same = torch.equal(value, loaded[name]) if isinstance(value, Tensor) else value == loaded[name]
                assert same, (mesh_shape, name)
            assert any(name.endswith("exp_avg_sq") for name in saved)
        before = results[0][1]
    assert len(before) > 20
