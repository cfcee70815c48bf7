"""What the planner is told about a module, against the module itself: optimizer state, what autograd keeps, the peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from elastictrain.compat.torch import hollow
from elastictrain.config import MeshShape
from elastictrain.parallel.build import Shaping
from elastictrain.parallel.measure import optimizer_state
from elastictrain.parallel.memory import Model, memory
from elastictrain.parallel.plans import read_plan
from elastictrain.parallel.roles import must_divide, roles
from elastictrain.planning import describe
from elastictrain.step_plan import Precision, Recompute, StepPlan
from tests.parallel.lm import DIM, LM, SEQ


def described(task: LM, plan: StepPlan | None = None) -> Model:
    plan = plan or StepPlan(micro_batch_size=4)
    return describe(task, plan, source=task.train_dataset, global_batch_size=None, num_ranks=1)


def run(task: LM, plan: StepPlan) -> None:
    """A step as the loop makes it."""
    batch = task.collate_fn(list(task.train_dataset()[:4]))
    low = plan.precision.compute == "bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        loss = task.loss(task(task.inputs(batch)), batch)
    loss.backward()


def peak(work: Callable[[], None]) -> int:
    """The most that the allocator had given out at once, of what ``work`` asked for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert len(events) > 100
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


PLANS = {
    "fp32": StepPlan(micro_batch_size=4),
    "bf16": StepPlan(micro_batch_size=4, precision=Precision("bf16")),
    "full": StepPlan(micro_batch_size=4, recompute=Recompute("full")),
    "every second": StepPlan(micro_batch_size=4, recompute=Recompute("full", every=2)),
    "patterns": StepPlan(micro_batch_size=4, recompute=Recompute("full", patterns=("blocks.*.up",))),
    "selective": StepPlan(micro_batch_size=4, recompute=Recompute("selective")),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_activations_are_what_the_allocator_gives(plan: StepPlan) -> None:
    task = LM()
    model = described(task, plan)
    assert model.knows_activations and not model.notes and model.num_slots == 2
    Shaping(task, plan).apply(task)
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run(task, plan)
    planned, real = memory(model, MeshShape()).activations, peak(lambda: run(task, plan))
    assert 0.95 * real < planned < 1.15 * real, planned / real


def test_what_is_kept_is_exact() -> None:
    task, seen, total = LM(), set(), 0
    constant = {p.untyped_storage().data_ptr() for p in task.parameters()}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        alive.append(tensor)
        if (key := tensor.untyped_storage().data_ptr()) not in seen | constant:
            seen.add(key)
            total += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch = task.collate_fn(list(task.train_dataset()[:4]))
        task.loss(task(task.inputs(batch)), batch)
    assert sum(part.saved.whole + part.saved.cut for part in described(task).parts) == total


def test_equal_blocks_are_measured_once_and_counted_each() -> None:
    assert described(LM()).parts == described(LM(differ=True)).parts


def test_attention_s_dropout_needs_no_scores() -> None:
    plain, dropping = LM(), LM()
    for block in dropping.blocks:
        block.dropout = 0.1
    grown = [sum(part.saved.whole + part.saved.cut for part in described(task).parts) for task in (plain, dropping)]
    masks = 3 * 4 * SEQ * DIM  # bytes, one for each element that is dropped; floats where torch scales in one
    assert masks <= grown[1] - grown[0] <= 5 * masks


def test_measuring_leaves_no_trace() -> None:
    task = LM()
    task.trainer = None
    before = {name: id(tensor) for name, tensor in [*task.named_parameters(), *task.named_buffers()]}
    attributes = {name: dict(module.__dict__) for name, module in task.named_modules()}
    random = torch.get_rng_state()
    task.eval()
    described(task, PLANS["full"])
    assert not task.training
    task.train()
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: id(tensor) for name, tensor in [*task.named_parameters(), *task.named_buffers()]} == before
    for name, module in task.named_modules():
        assert {key: id(value) for key, value in module.__dict__.items()} == {
            key: id(value) for key, value in attributes[name].items()
        }
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(p.grad is None for p in task.parameters())


def test_what_cannot_be_measured_is_said() -> None:
    model = described(LM(reads=True))
    assert not model.knows_activations
    assert len(model.notes) == 1 and model.notes[0].startswith("activations are not counted, the forward pass needs")

    class NoData(LM):
        def train_dataset(self) -> Any:
            raise OSError("the disk is gone")

    model = described(NoData())
    assert model.notes == ("activations are not counted, there is no batch to measure: the disk is gone",)
    assert sum(w.state for part in model.parts for w in part.weights) == 2 * model.parameter_bytes

    class Odd(LM):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    (note,) = described(Odd()).notes
    assert note.startswith("optimizer state is assumed to be two moments of each parameter: LBFGS")


def test_a_schedule_over_the_whole_training() -> None:
    class Scheduled(LM):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.trainer.estimated_stepping_batches)
            return [optimizer], [schedule]

    model = described(Scheduled())
    assert model.notes == ()
    assert all(weight.state == 0 for part in model.parts for weight in part.weights)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_state_is_the_optimizer_s_own(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    net[1].requires_grad_(False)
    copied, _ = hollow(net)
    state = optimizer_state(copied, [make([p for p in copied.parameters() if p.requires_grad])])
    assert state is not None
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    net(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    for name, parameter in net.named_parameters():
        real = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, Tensor)]
        assert sum(state.get(name, (0, 0))) == sum(t.numel() * t.element_size() for t in real), name


def test_what_tensor_parallelism_shares_out() -> None:
    task = LM()
    model = described(task)
    tokens, width = 4 * SEQ, 4 * DIM  # bytes of one residual stream
    block = model.parts[1].saved
    # whole: both norms' inputs, outputs and statistics (two floats for each token), and the way into the residual stream
    assert block.whole == tokens * (4 * width + 2 * 8)
    # shared out: query, key and value; the mixture, once as attention has it and once flattened; the sum of each row of
    # scores; the MLP's inner layer before and after its activation
    assert block.cut == tokens * (3 * width + width + 4 * 4 + 2 * 4 * width)
    assert must_divide(task, roles(task, read_plan(task, 1).styles)) == {
        "num_heads": 4,
        "qkv.out_features": 96,
        "out.in_features": 32,
        "up.out_features": 128,
        "down.in_features": 128,
    }
    half = memory(model, MeshShape(tp=2))
    whole = memory(model, MeshShape())
    assert 0.5 < half.activations / whole.activations < 0.8
    assert copy.copy(model) == model
