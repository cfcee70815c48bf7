"""Who counts, who shares slots with whom, and exchanges in which every data rank is there once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from elastictrain.compat.torchmetrics import load_metric_state, metric_state, share_metrics
from elastictrain.config import MeshShape
from elastictrain.parallel.buffers import RunningStats, agree_on_buffers
from elastictrain.parallel.mesh import join, leave, make_mesh
from elastictrain.state import unpack
from tests.helpers import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = [
    MeshShape(tp=2),
    MeshShape(pp=2),
    MeshShape(dp_replicate=2, tp=2),
    MeshShape(dp_shard=2, pp=2),
    pytest.param(MeshShape(dp_replicate=2, dp_shard=2, tp=2), marks=pytest.mark.slow),
    pytest.param(MeshShape(dp_replicate=2, cp=2, tp=2), marks=pytest.mark.slow),
]


def _exchange(rank: int, world_size: int, shape: MeshShape, last_stage: int | None) -> Any:
    mesh = make_mesh(join(rank=rank, world_size=world_size, local_rank=rank), shape, last_stage=last_stage)
    value = float(10 * mesh.dp_rank + 1) if mesh.counts else 1e9
    places = (mesh.pp_rank, mesh.coordinate("dp_replicate"), mesh.coordinate("dp_shard"), mesh.cp_rank, mesh.tp_rank)
    found = mesh.sum([value, 1.0]), mesh.gather(value), mesh.from_first(rank), mesh.first_rank
    kept = torch.tensor([rank])
    mesh.broadcast_(kept)
    leave(mesh.ranks)
    return places, mesh.dp_rank, mesh.counts, kept.item(), found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_data_rank_is_there_once(shape: MeshShape) -> None:
    for last_stage in (None, 0) if shape.pp > 1 else (None,):
        ranks = run_ranks(_exchange, shape.world_size, shape, last_stage)
        at = {places: rank for rank, (places, *_) in enumerate(ranks)}
        assert sorted(at) == list(at), "tensor-parallel ranks are neighbours, pipeline stages are farthest apart"
        stage = shape.pp - 1 if last_stage is None else last_stage
        counting = [dp_rank for _, dp_rank, counts, *_ in ranks if counts]
        assert counting == [dp_rank for dp_rank in range(shape.dp) for _ in range(shape.cp)]
        values = [10.0 * dp_rank + 1 for dp_rank in counting]
        first = at[stage, 0, 0, 0, 0]
        for places, dp_rank, counts, kept, found in ranks:
            assert counts == ((places[0], places[4]) == (stage, 0))
            assert dp_rank == places[1] * shape.dp_shard + places[2]
            assert found == ([sum(values) / shape.cp, float(shape.dp)], values, first, first)
            assert kept == at[places[0], 0, 0, 0, 0], "the first rank of the same stage"


def _statistics(rank: int, world_size: int, shape: MeshShape) -> Any:
    mesh = make_mesh(join(rank=rank, world_size=world_size, local_rank=rank), shape)
    norm = nn.BatchNorm1d(3)
    stats = RunningStats(norm, mesh)
    for step in range(2):
        data = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(step))
        if stats:
            stats.start(5)
        for slot in range(mesh.dp_rank, 5, mesh.dp_size):
            if stats:
                stats.before(slot)
            norm(data[slot])
            if stats:
                stats.after(slot)
        if stats:
            stats.finish()
    found = [buffer.clone() for buffer in norm.buffers()]
    assert norm.running_mean is not None
    norm.running_mean += rank
    agree_on_buffers(norm, mesh)
    agreed = norm.running_mean.clone()
    leave(mesh.ranks)
    return found, agreed


@pytest.mark.parametrize("shape", [MeshShape(tp=2), MeshShape(dp_replicate=2, tp=2)], ids=str)
def test_running_statistics_count_slots_once(shape: MeshShape) -> None:
    ((one, _),) = run_ranks(_statistics, 1, MeshShape())
    for found, agreed in run_ranks(_statistics, shape.world_size, shape):
        for mine, expected in zip(found, one, strict=True):
            torch.testing.assert_close(mine, expected)
        torch.testing.assert_close(agreed, one[0])


def _metrics(rank: int, world_size: int, shape: MeshShape) -> Any:
    mesh = make_mesh(join(rank=rank, world_size=world_size, local_rank=rank), shape)
    module = nn.ModuleDict({"total": torchmetrics.SumMetric()})
    share_metrics(module, mesh.data_group)
    total = module["total"]
    assert isinstance(total, torchmetrics.SumMetric)
    total.update(mesh.dp_rank + 1)  # tensor-parallel ranks compute the same
    value = total.compute().item()
    flat = metric_state(module, world_size=world_size)
    saved = float(unpack("metrics.total", flat)["states"]["sum_value"])
    load_metric_state(module, flat, is_main=mesh.dp_rank == 0)
    total.update(1)
    again = total.compute().item()
    leave(mesh.ranks)
    return value, saved, again


def test_metric_objects_count_slots_once() -> None:
    assert run_ranks(_metrics, 4, MeshShape(dp_replicate=2, tp=2)) == [(3.0, 3.0, 5.0)] * 4
