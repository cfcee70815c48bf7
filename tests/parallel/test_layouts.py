"""A model on any mesh: the same numbers, ghost passes that nobody notices, running statistics of all slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.config import MeshConfig
from elastictrain.errors import UsageError
from elastictrain.parallel.build import Built, configure, lay_out
from elastictrain.parallel.mesh import join, leave
from elastictrain.parallel.replicate import GradientSum
from elastictrain.parallel.shard import shard_units
from elastictrain.parallel.units import equal_blocks
from elastictrain.step_plan import StepPlan
from tests.helpers import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).relu())


class Net(nn.Module):
    """Blocks, a tied weight, a frozen layer in front, an unused method; weights made or given."""

    def configure_model(self) -> None:
        self.frozen = Block(6)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.out.weight = self.into.weight
        self.register_buffer("table", torch.arange(6).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(self.frozen(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x) + self.table

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) ** 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) ** 2).mean()


class Plain(Net):
    """Blocks that get the data as it is, which needs no gradients: FSDP reduces the first one's at the very end."""

    def configure_model(self) -> None:
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.into = self.out = nn.Linear(6, 6, bias=False)
        self.register_buffer("table", torch.arange(6).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        value = self.blocks[0](x) + self.blocks[1](x)
        return self.out(self.blocks[2](x=value)) + self.table


def _build(rank: int, world_size: int, mesh: MeshConfig, *, made: bool, kind: type[Net] = Net) -> tuple[Net, Built]:
    torch.manual_seed(0 if rank == 0 else 99)  # other ranks' own weights must not count
    net = kind()
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    recipe, notes = configure(net, net.configure_model, defer=made, seed=3)
    assert (recipe is not None) == made and not notes
    built = lay_out(net, recipe, ranks=ranks, mesh=mesh, local_world_size=world_size, plan=StepPlan(), weights=True)
    return net, built


def _step(net: Net, built: Built, step: int, num_slots: int) -> Tensor:
    """One training step, with the calls that the loop makes; the mean loss of this rank's slots."""
    data = torch.randn(num_slots, 4, 6, generator=torch.Generator().manual_seed(step))
    mesh, sharded = built.mesh, built.sharded
    mine = range(mesh.dp_rank, num_slots, mesh.dp_size)
    turns = max(1, -(-num_slots // mesh.dp_size) if sharded else len(mine))
    total = torch.zeros(())
    if built.running_stats:
        built.running_stats.start(num_slots)
    for turn in range(turns):
        is_last = turn == turns - 1
        if sharded is not None:
            sharded.last_pass(is_last)
        if turn < len(mine):
            slot = mine[turn]
            if built.running_stats:
                built.running_stats.before(slot)
            if sharded is None:
                loss = net.training_step(data[slot], 0)
            elif sharded.knows("training_step"):
                loss = sharded("training_step", data[slot], 0)
            else:
                loss = sharded.learn("training_step", data[slot], 0, publish=num_slots < mesh.dp_size)
            loss = loss / num_slots
            if built.running_stats:
                built.running_stats.after(slot)
            if built.gradients is not None and is_last:
                built.gradients.arm()
            loss.backward()
            total += loss.detach()
        elif sharded is not None:
            sharded.ghost("training_step").backward()
    if built.gradients is not None:
        built.gradients.finish()
    if built.running_stats:
        built.running_stats.finish()
    return total


def _train(rank: int, world_size: int, mesh: MeshConfig, num_slots: int, made: bool, kind: type[Net] = Net) -> Any:
    net, built = _build(rank, world_size, mesh, made=made, kind=kind)
    # SGD with momentum: Adam would hide a gradient of the wrong scale
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    losses = []
    for step in range(5):
        total = _step(net, built, step, num_slots)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(built.mesh.ranks.sum([total.item()])[0])
    assert net.out.weight is net.into.weight
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    full = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}
    sharded = sorted(n for n, t in tensors.items() if isinstance(t, DTensor))
    leave(built.mesh.ranks)
    return losses, full, sharded


@pytest.fixture(scope="module")
def one_rank() -> Any:
    return {
        (num_slots, made): run_ranks(_train, 1, MeshConfig("auto"), num_slots, made)[0]
        for num_slots in (5, 2)
        for made in (True, False)
    }


@pytest.mark.parametrize("made", [True, False], ids=["made", "given"])
@pytest.mark.parametrize("num_slots", [5, 2])
@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [
        (2, MeshConfig(dp_shard=2)),
        (3, MeshConfig(dp_replicate=3)),
        (4, MeshConfig(dp_replicate=2, dp_shard=2)),
        pytest.param(3, MeshConfig(dp_shard=-1), marks=pytest.mark.slow),
        pytest.param(2, MeshConfig("auto"), marks=pytest.mark.slow),
        pytest.param(5, MeshConfig(dp_shard=5), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_changes_nothing(world_size: int, mesh: MeshConfig, num_slots: int, made: bool, one_rank: Any) -> None:
    losses, tensors, _ = one_rank[num_slots, made]
    for theirs, full, sharded in run_ranks(_train, world_size, mesh, num_slots, made):
        assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) <= 1e-5 * max(losses)
        assert full.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
        expected = [n for n, t in tensors.items() if n != "table" and "running" not in n and "tracked" not in n]
        assert sharded == (sorted(expected) if mesh.dp_shard != 1 else [])


@pytest.mark.parametrize("num_slots", [2, 4])
def test_blocks_whose_inputs_need_no_gradients(num_slots: int) -> None:
    """With 2 slots one of three ranks never has any."""
    ((losses, tensors, _),) = run_ranks(_train, 1, MeshConfig("auto"), num_slots, True, Plain)
    for theirs, full, _ in run_ranks(_train, 3, MeshConfig(dp_shard=3), num_slots, True, Plain):
        assert max(abs(a - b) for a, b in zip(theirs, losses, strict=True)) <= 1e-5 * max(losses)
        for name, tensor in tensors.items():
            torch.testing.assert_close(full[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def _weights(rank: int, world_size: int, mesh: MeshConfig) -> Any:
    net, built = _build(rank, world_size, mesh, made=True)
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in net.named_parameters()}
    leave(built.mesh.ranks)
    return full


def test_initial_weights_do_not_depend_on_the_mesh() -> None:
    (reference,) = run_ranks(_weights, 1, MeshConfig("auto"))
    for world_size, mesh in ((3, MeshConfig(dp_shard=3)), (2, MeshConfig(dp_replicate=2))):
        for full in run_ranks(_weights, world_size, mesh):
            assert full.keys() == reference.keys()
            assert all(torch.equal(full[name], reference[name]) for name in reference)


def _evaluate(rank: int, world_size: int) -> Any:
    net, built = _build(rank, world_size, MeshConfig(dp_shard=world_size), made=True)
    assert built.sharded is not None
    data = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))
    net.eval()
    values = []
    with torch.no_grad():  # four batches for three ranks: in the second round two of them have none
        for first in (0, 3):
            if first + rank < 4:
                call = built.sharded if built.sharded.knows("validation_step") else None
                arguments = ("validation_step", data[first + rank], 0)
                values.append(call(*arguments) if call else built.sharded.learn(*arguments, publish=False))
            else:
                built.sharded.ghost("validation_step")
    leave(built.mesh.ranks)
    return [value.item() for value in values]


def test_ghost_passes_in_an_evaluation() -> None:
    by_rank = run_ranks(_evaluate, 3)
    assert [len(values) for values in by_rank] == [2, 1, 1]


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.some, self.never = (nn.Parameter(torch.ones(3)) for _ in range(3))


def _gradients(rank: int, world_size: int) -> Any:
    ranks = join(rank=rank, world_size=world_size, local_rank=rank)
    model = Uneven()
    gradients = GradientSum(model.parameters(), bucket_bytes=12)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = (model.used * (rank + 1)).sum() + (model.some.sum() if rank == 1 else 0.0)
        gradients.arm()
        loss.backward()
        gradients.finish()
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    gradients.close()
    leave(ranks)
    return found


def test_gradients_that_only_some_ranks_have() -> None:
    for found in run_ranks(_gradients, 3):
        assert found == 2 * [[[6.0] * 3, [1.0] * 3, None]]


def test_units_are_equal_blocks() -> None:
    net = Net()
    net.configure_model()
    assert equal_blocks(net) == ["blocks.0", "blocks.1", "blocks.2"]
    assert equal_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    shared = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    shared[2].weight = shared[1].weight
    assert shard_units(shared) == ["0"], "a block whose weight lives elsewhere too stays with the root"


def test_pipeline_units_that_are_not_there() -> None:
    class Wrong(Net):
        def pipeline_units(self) -> list[str]:
            return ["blocks.0", "block.1"]

    net = Wrong()
    net.configure_model()
    with pytest.raises(UsageError, match=r"pipeline_units\(\) names 'block.1', which is no module of Wrong"):
        shard_units(net)
