"""Activation checkpointing: the same numbers to the bit, in less memory, under the same names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy

from elastictrain.callbacks import ActivationCheckpointing
from elastictrain.errors import UsageError
from elastictrain.parallel.build import Shaping
from elastictrain.parallel.recompute import _policy
from elastictrain.step_plan import Recompute, StepPlan
from tests.helpers import run_ranks
from tests.trainer.tasks import Recorded, train

EVERY_WAY = [
    Recompute(),
    Recompute("selective"),
    Recompute(every=2),
    Recompute(patterns=("blocks.*.net",)),
    Recompute("selective", patterns=("blocks.0", "blocks.2.net", "head")),
]


class Block(nn.Module):
    """Everything that a second forward pass could get wrong: dropout, running statistics, a buffer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Dropout(0.3))
        self.out = nn.utils.spectral_norm(nn.Linear(4 * width, width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls = self.calls + 1
        return x + scale * self.out(self.net(x)) / self.calls


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x).mean()


def _results(shape: Callable[[Net], object]) -> list[Tensor]:
    """Losses, gradients, buffers and random state of a few steps of two microbatches, with an evaluation in between."""
    torch.manual_seed(0)
    net = Net()
    shape(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    for _ in range(3):
        losses = [net(torch.randn(4, 8)) for _ in range(2)]  # both forward passes come before the first backward pass
        for loss in losses:
            loss.backward()
        found += [*losses, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        found += [b.clone() for b in net.buffers()] + [torch.get_rng_state()]
        with torch.no_grad():
            found.append(net.eval()(torch.randn(4, 8)))
        net.train()
    return found


def _shaped(plan: Recompute) -> Callable[[Net], Shaping]:
    def shape(net: Net) -> Shaping:
        shaping = Shaping(net, StepPlan(recompute=plan))
        shaping.apply(net)
        return shaping

    return shape


@pytest.mark.parametrize("plan", EVERY_WAY, ids=str)
def test_the_same_numbers_to_the_bit(plan: Recompute) -> None:
    expected, found = _results(lambda net: None), _results(_shaped(plan))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("plan", EVERY_WAY, ids=str)
def test_names_and_classes_stay_and_come_back(plan: Recompute) -> None:
    net = Net()
    names, kinds = list(net.state_dict()), [type(m) for m in net.modules()]
    shaping = _shaped(plan)(net)
    assert any("forward" in m.__dict__ for m in net.modules())
    assert list(net.state_dict()) == names
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert [type(m) for m in net.modules()] == kinds
    shaping.close()
    assert not any("forward" in m.__dict__ for m in net.modules())


def test_a_copy_of_the_model_runs_itself() -> None:
    net = Net()
    _shaped(Recompute())(net)
    twin = copy.deepcopy(net)
    twin(torch.randn(4, 8)).backward()
    assert [block.calls.item() for net in (net, twin) for block in net.blocks] == [0, 0, 0, 1, 1, 1]
    assert net.head.weight.grad is net.blocks[0].out.bias.grad is None
    assert twin.blocks[0].out.bias.grad is not None


def test_a_graph_that_is_kept_can_be_used_twice() -> None:
    gradients = []
    for plan in (None, Recompute()):
        torch.manual_seed(0)
        net = Net()
        if plan is not None:
            _shaped(plan)(net)
        loss = net(torch.randn(4, 8))
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def _kept_bytes(plan: Recompute | None) -> int:
    """What a forward pass leaves allocated: its graph."""
    torch.manual_seed(0)
    net, x = Net(64), torch.randn(256, 64)
    if plan is not None:
        _shaped(plan)(net)
    net(x).backward()  # what is made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = net(x)
    kept = sum(event.self_cpu_memory_usage for event in profiler.events())
    loss.backward()
    return int(kept)


def test_memory_is_saved() -> None:
    everything = _kept_bytes(None)
    selective, every_second, full = (_kept_bytes(p) for p in (Recompute("selective"), Recompute(every=2), Recompute()))
    inputs = 2 * 256 * 64 * 4  # of blocks 1 and 2; the first one's is not made by the forward pass
    assert full <= 2 * inputs + 200_000, "a block's input, its output, and its small buffers"
    assert full < 0.25 * everything
    assert full < selective < 0.75 * everything
    assert full < every_second < 0.6 * everything


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Recompute(patterns=("block.*",)), "'block.*' matches no module of Net; there is 'blocks."),
        (Recompute(patterns=("blocks",)), "'blocks' holds blocks and cannot be recomputed as one; use 'blocks.*'"),
        (Recompute(patterns=("blocks.*", "*")), "'blocks' holds blocks and cannot be recomputed as one"),
    ],
)
def test_patterns_that_cannot_be_meant(plan: Recompute, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Shaping(Net(), StepPlan(recompute=plan))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_blocks() -> None:
    with pytest.raises(UsageError, match=r"Sequential has no run of equal blocks; name them in pipeline_units\(\)"):
        Shaping(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), StepPlan(recompute=Recompute()))


def test_selective_refuses_what_is_changed_in_place() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu_()

    net = nn.Sequential(*(Changes() for _ in range(2)))
    Shaping(net, StepPlan(recompute=Recompute("selective"))).apply(net)
    with pytest.raises(UsageError, match="Changes changes a kept result in place"):
        net(torch.randn(2, 4)).sum().backward()


def test_attention_with_dropout_is_run_again() -> None:
    """What is kept is not run again, and would draw no random numbers; whatever follows would then draw others."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = k = v = object()
    assert _policy(None, flash, q, k, v) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, flash, q, k, v, 0.0, True) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, flash, q, k, v, 0.1, True) is CheckpointPolicy.MUST_RECOMPUTE
    assert _policy(None, flash, q, k, v, dropout_p=0.1) is CheckpointPolicy.MUST_RECOMPUTE
    assert _policy(None, torch.ops.aten.relu.default, q) is CheckpointPolicy.PREFER_RECOMPUTE


def _fit(rank: int, world_size: int, mesh: str, callbacks: list[Any]) -> Any:
    """Losses and weights of a run with dropout whose last turn has ghosts: 8 slots on 3 ranks."""
    task = Recorded()
    losses: list[float] = []
    task.on_train_batch_end = lambda outputs, *args: losses.append(outputs["loss"].item())  # type: ignore[method-assign]
    train(task, None, mesh, 3, callbacks=callbacks)
    weights = {name: _full(tensor) for name, tensor in task.state_dict().items()}
    return losses, weights


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mesh"), [(1, "auto"), (3, "dp_shard=3"), (2, "dp_replicate=2"), (4, "dp_replicate=2,dp_shard=2")]
)
def test_on_every_layout(world_size: int, mesh: str) -> None:
    ways: list[list[Any]] = [
        [ActivationCheckpointing()],
        [ActivationCheckpointing("selective")],
        [ActivationCheckpointing(patterns=["blocks.*.linear", "last"])],
    ]
    plain = run_ranks(_fit, world_size, mesh, [])
    for callbacks in ways:
        for (losses, weights), (plain_losses, plain_weights) in zip(
            run_ranks(_fit, world_size, mesh, callbacks), plain, strict=True
        ):
            assert losses == plain_losses
            assert list(weights) == list(plain_weights)
            assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)
