from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastictrain.callback import RunInfo, StepInfo
from elastictrain.callbacks import EMA
from elastictrain.config import MeshShape
from elastictrain.errors import UsageError
from tests.helpers import run_ranks


def run_info(task: nn.Module, *, rank: int = 0, world_size: int = 1, step: int = 0) -> RunInfo:
    return RunInfo(task, None, rank, world_size, 0, MeshShape(dp_shard=world_size), step, step, 0, 10, None, 1, 1, 1)


def step_info(step: int) -> StepInfo:
    return StepInfo(step, step, 0, 0, None, None, {}, None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)
        self.b = nn.Linear(3, 5)
        self.tied = nn.Linear(5, 3)
        self.tied.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.tied(x) + self.a(x))


def train(task: nn.Module, ema: EMA, steps: range) -> None:
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    for step in steps:
        torch.manual_seed(step)
        task(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.on_step_end(step_info(step))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("decay", "every"), [(0.9, 1), (0.0, 1), (0.9, 3)])
def test_it_is_the_exponential_average(decay: float, every: int) -> None:
    torch.manual_seed(0)
    task, ema = Net(), EMA(decay=decay, every=every)
    ema.on_generation_start(run_info(task))
    names = [name for name, parameter in task.named_parameters() if parameter.requires_grad]
    assert list(ema.state_dict()) == names
    expected = {name: parameter.detach().double() for name, parameter in task.named_parameters()}
    for step in range(1, 10):
        train(task, ema, range(step, step + 1))
        if step % every == 0:
            kept = decay**every
            for name in names:
                expected[name] = kept * expected[name] + (1 - kept) * task.get_parameter(name).detach().double()
        for name, average in ema.state_dict().items():
            torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-6)


def test_a_restart_changes_nothing() -> None:
    torch.manual_seed(0)
    straight = Net()
    other = copy.deepcopy(straight)
    one = EMA(decay=0.9, every=2)
    one.on_generation_start(run_info(straight))
    train(straight, one, range(1, 11))

    two = EMA(decay=0.9, every=2)
    two.on_generation_start(run_info(other))
    train(other, two, range(1, 6))
    saved = {name: tensor.clone() for name, tensor in two.state_dict().items()}
    for again in (two, EMA(decay=0.9, every=2)):  # a new generation in the same process, and in a new one
        task = copy.deepcopy(other)
        again.load_state_dict({name: tensor.clone() for name, tensor in saved.items()})
        again.on_generation_start(run_info(task))
        train(task, again, range(6, 11))
        for name, average in again.state_dict().items():
            assert torch.equal(average, one.averages[name]), name


def test_a_weight_without_saved_average_starts_at_its_value() -> None:
    task, ema = Net(), EMA()
    ema.load_state_dict({"a.bias": torch.full((3,), 7.0)})
    ema.on_generation_start(run_info(task))
    assert torch.equal(ema.averages["a.bias"], torch.full((3,), 7.0))
    assert torch.equal(ema.averages["a.weight"], task.a.weight)
    assert ema.averages["a.weight"].data_ptr() != task.a.weight.data_ptr()


def test_averages_of_half_precision_weights_move() -> None:
    task, ema = nn.Linear(4, 4).to(torch.bfloat16), EMA(decay=0.999)
    ema.on_generation_start(run_info(task))
    before = ema.averages["weight"].clone()
    with torch.no_grad():
        task.weight.add_(1.0)
    ema.on_step_end(step_info(1))
    assert ema.averages["weight"].dtype == torch.float32
    moved = ema.averages["weight"] - before
    assert torch.allclose(moved, 0.001 * (task.weight.float() - before), atol=1e-6)
    assert moved.abs().min() > 5e-4


def test_applied_gives_the_weights_back_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        task, ema = Net(), EMA(decay=0.5)
        ema.on_generation_start(run_info(task))
        train(task, ema, range(1, 4))
        task = task.to(dtype)
        ema.load_state_dict(ema.state_dict())
        ema.on_generation_start(run_info(task))
        own = copy.deepcopy(task.state_dict())
        averages = copy.deepcopy(ema.averages)
        with pytest.raises(KeyError), ema.applied():
            for name, average in averages.items():
                assert torch.equal(task.get_parameter(name), average.to(dtype))
            assert not torch.equal(task.a.weight, own["a.weight"])
            raise KeyError("validation failed")
        for name, tensor in task.state_dict().items():
            assert torch.equal(tensor, own[name])
        assert all(torch.equal(ema.averages[name], average) for name, average in averages.items())


def test_sharded_averages_equal_whole_ones() -> None:
    torch.manual_seed(0)
    task, ema = Net(), EMA(decay=0.9)
    ema.on_generation_start(run_info(task))
    train(task, ema, range(1, 6))
    with ema.applied():
        out = task(torch.ones(1, 5)).detach()
    for found, found_out in run_ranks(_sharded, 2):
        assert torch.allclose(found_out, out, atol=1e-6)
        for name, average in ema.averages.items():
            assert torch.allclose(found[name], average, atol=1e-6), name


def _sharded(rank: int, world_size: int) -> Any:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    task, ema = Net(), EMA(decay=0.9)
    fully_shard(task, mesh=mesh)
    ema.on_generation_start(run_info(task, rank=rank, world_size=world_size))
    train(task, ema, range(1, 4))

    saved = ema.state_dict()
    assert all(isinstance(average, DTensor) for average in saved.values())
    for name, average in saved.items():
        weight = task.get_parameter(name)
        assert isinstance(weight, DTensor)
        assert average.placements == weight.placements
        assert average.to_local().shape == weight.to_local().shape
    again = EMA(decay=0.9)
    again.load_state_dict({name: average.clone() for name, average in saved.items()})
    again.on_generation_start(run_info(task, rank=rank, world_size=world_size))
    train(task, again, range(4, 6))
    with again.applied():
        out = task(torch.ones(1, 5)).detach()
    return {name: full(average) for name, average in again.averages.items()}, out


@pytest.mark.parametrize("arguments", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"every": 1.5}])
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"EMA.{next(iter(arguments))}="):
        EMA(**arguments)
