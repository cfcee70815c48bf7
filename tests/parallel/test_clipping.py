"""One norm for gradients that are laid out in many ways."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from elastictrain.parallel.clipping import clip_grad_norm_, grad_norm
from tests.helpers import run_ranks


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mixture(rank: int, world_size: int, max_norm: float) -> Any:
    """Tensor parallelism without sequence parallelism under FSDP: plain tensors and DTensors on three meshes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=random) for shape in ((5, 3), (3, 4), (7,), (4, 2), (3, 3), (2, 2), (5,))]
    a, b, c, d, e, f, g = (tensor.clone() for tensor in whole)
    gradients = [
        distribute_tensor(a, mesh, [Shard(0), Shard(1)]),  # uneven on both axes
        distribute_tensor(b, mesh, [Shard(1), Replicate()]),
        distribute_tensor(c, mesh["dp_shard"], [Shard(0)]),
        distribute_tensor(d, mesh["tp"], [Shard(0)]),
        distribute_tensor(e, mesh["tp"], [Replicate()]),
        DTensor.from_local(f / 2, mesh["tp"], [Partial()]),
        g,
    ]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    norm = clip_grad_norm_([*parameters, nn.Parameter(torch.ones(2))], max_norm)
    assert type(norm) is Tensor
    scaled = [_full(p.grad) for p in parameters if p.grad is not None]
    plain = [nn.Parameter(torch.zeros_like(t)) for t in whole]
    for parameter, gradient in zip(plain, whole, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(plain, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for found, parameter in zip(scaled, plain, strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-6, atol=1e-9)
    return norm.item()


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_a_mixture_on_different_meshes(max_norm: float) -> None:
    norms = run_ranks(_mixture, 4, max_norm)
    assert len(set(norms)) == 1, "every rank has the same number, to the bit"


def _stages(rank: int, world_size: int) -> Any:
    """Two stages that share a tied weight, two shards of each, and a third stage that trains nothing."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "dp_shard"))
    stage = mesh.get_local_rank("pp")
    tied = nn.Parameter(distribute_tensor(torch.zeros(4), mesh["dp_shard"], [Shard(0)]))
    tied.grad = distribute_tensor(torch.full((4,), 3.0), mesh["dp_shard"], [Shard(0)])
    own = nn.Parameter(torch.zeros(1))
    own.grad = torch.full((1,), 8.0)
    parameters = {0: [tied, own], 1: [tied], 2: []}[stage]
    stages = mesh.get_group("pp")
    norm = clip_grad_norm_(parameters, 1.0, stages=stages, counted_elsewhere=[tied] if stage == 1 else [])
    return norm.item(), [_full(p.grad).tolist() for p in parameters if p.grad is not None]


def test_a_pipeline_counts_a_tied_weight_once() -> None:
    for rank, (norm, scaled) in enumerate(run_ranks(_stages, 6)):
        assert norm == pytest.approx(10.0, rel=1e-7), "4 × 3² + 8²"
        expected = {0: [[0.3] * 4, [0.8]], 1: [[0.3] * 4], 2: []}[rank // 2]
        assert [x for part in scaled for x in part] == pytest.approx([x for part in expected for x in part], rel=1e-5)


def test_on_one_rank_it_is_torchs_to_the_bit() -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (3, 1000, 7)] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    assert torch.equal(clip_grad_norm_(ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_nothing_and_what_is_not_finite() -> None:
    assert grad_norm([]).item() == 0.0
    assert math.isnan(grad_norm([torch.tensor([1.0, float("nan")])]).item())
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([parameter], 1.0).item() == 0.0 and parameter.grad is None
