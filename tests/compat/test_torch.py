"""The private names of torch that elastictrain.compat.torch touches: each with the shape that is relied on."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from elastictrain.compat.torch import (
    REDUCE_SCATTERS,
    TorchDispatchMode,
    argument_names,
    batches_ready,
    empty_optimizers,
    gloo_operations,
    has_step_hooks,
    hollow,
    init_call,
    is_random,
    is_view,
    on_meta,
    scale_,
    storage_key,
    tree_leaves,
    tree_map,
    written_arguments,
)

aten = torch.ops.aten
HAS_CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_a_storage(device: str) -> None:
    tensor = torch.zeros(4, 3, device=device)
    other = torch.zeros(4, 3, device=device)
    for view in (tensor[1:], tensor.T, tensor.view(12), tensor.detach()):
        assert storage_key(view) == storage_key(tensor)
    assert storage_key(other) != storage_key(tensor)
    assert storage_key(tensor.clone()) != storage_key(tensor)


def test_views_that_autograd_knows() -> None:
    tensor = torch.zeros(4, 3, requires_grad=True) * 2
    assert is_view(tensor[1:]) and is_view(tensor.T)
    assert not is_view(tensor) and not is_view(tensor.clone())


def test_operators_that_draw_random_numbers() -> None:
    for op in (aten.normal_.default, aten.uniform_.default, aten.bernoulli.default, aten.randperm.default):
        assert is_random(op), op
    for op in (aten.add.Tensor, aten.zero_.default, aten.sort.default):
        assert not is_random(op), op
    assert not is_random(len)


def test_arguments_of_an_operator() -> None:
    assert argument_names(aten.normal_.default) == ["self", "mean", "std", "generator"]
    assert written_arguments(aten.normal_.default) == [True, False, False, False]
    assert written_arguments(aten.add.Tensor) == [False, False, False]
    assert written_arguments(aten.add.out)[-1] is True
    assert argument_names(len) == []


def test_a_mode_sees_every_operator() -> None:
    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Counts() as mode:
        torch.zeros(2).add_(1)
    assert mode.seen == [aten.zeros.default, aten.add_.Tensor]


def test_trees() -> None:
    tree = {"a": [1, (2, {"b": 3})], "c": None}
    assert tree_leaves(tree) == [1, 2, 3, None]
    assert tree_map(lambda leaf: leaf and leaf * 2, tree) == {"a": [2, (4, {"b": 6})], "c": None}


class _WhoAsks(TorchFunctionMode):
    """Notes who asks whether a tensor is meta."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            self.calls.append(init_call(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (nn.init.trunc_normal_, {"mean": 0.0, "std": 0.5, "a": -2.0, "b": 2.0}),
        (nn.init.orthogonal_, {"gain": 2.0}),
        (nn.init.sparse_, {"sparsity": 0.5}),
    ],
)
def test_who_asks_whether_a_tensor_is_meta(function: Any, options: dict[str, float]) -> None:
    """Functions of torch.nn.init that do nothing for a meta tensor: their frame tells which and with what."""
    tensor = torch.empty(4, 4, device="meta")
    with _WhoAsks() as mode:
        function(tensor, **options)
    called, given = next(call for call in mode.calls if call is not None)
    name = called.__name__
    assert called is getattr(torch.nn.init, name)
    assert name.removeprefix("_no_grad_") == function.__name__
    assert given["tensor"] is tensor
    assert {key: given[key] for key in options} == options


def test_code_outside_of_nn_init_is_not_taken_for_it() -> None:
    with _WhoAsks() as mode:
        assert torch.empty(2, device="meta").is_meta
    assert mode.calls == [None]
    assert init_call(None) is None
    assert init_call(inspect.currentframe()) is None


def test_many_tensors_are_scaled_in_place() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.ones(2, dtype=torch.bfloat16), torch.empty(0)]
    scale_(tensors, torch.tensor(0.5))
    assert [t.tolist() for t in tensors] == [[0.5] * 3, [[1.0, 1.0]] * 2, [0.5, 0.5], []]
    scale_([], torch.tensor(0.5))


def test_a_hollow_copy_has_shapes_and_no_elements() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    net[2].weight = nn.Parameter(torch.zeros(4, 3))
    net[0].bias.requires_grad_(False)
    net[0].bias.mark = "kept"
    net.register_buffer("whole", net[1].running_mean)
    net.extra = given = [1]
    copied, mode = hollow(net)
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in copied.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in net.named_parameters()
    ]
    assert all(isinstance(p, nn.Parameter) for p in copied.parameters())
    assert copied[0].bias.mark == "kept" and copied.extra is given
    assert copied.whole is copied[1].running_mean
    huge = nn.Linear(1 << 20, 1 << 20, device="meta")
    with mode:
        output = copied(torch.empty(7, 4))
        assert (output.shape, output.device.type) == ((7, 4), "cpu")
    copied, mode = hollow(huge)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        output = copied(torch.empty(3, 1 << 20))
    assert (output.shape, output.dtype) == ((3, 1 << 20), torch.bfloat16)
    assert output.untyped_storage().nbytes() == 3 * (1 << 20) * 2
    assert storage_key(output[1]) == storage_key(output) != storage_key(copied.weight)
    assert net[0].weight.grad is None and not any(m.training != copied.training for m in copied.modules())


def test_a_copy_on_meta_shares_no_lists_and_no_hooks() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    net.seen, net.other = [], object()
    net.register_forward_hook(lambda module, args, output: module.seen.append(output))
    copied = on_meta(net)
    net[0].register_forward_pre_hook(lambda module, args: 1 / 0)
    output = copied(torch.empty(7, 4, device="meta"))
    output.sum().backward()
    assert (output.device.type, copied[0].weight.grad.shape) == ("meta", (3, 4))
    assert (len(copied.seen), net.seen) == (1, [])
    assert net[0].weight.grad is None and not net[0].weight.is_meta
    with pytest.raises(TypeError, match="a object is used"):
        copied.other()


def test_what_a_group_is_asked_for_is_there_in_gloo() -> None:
    ours = gloo_operations()
    for name, gloos in ours.items():
        assert callable(getattr(dist.ProcessGroupGloo, gloos)) and callable(getattr(dist.ProcessGroup, name)), name
    operations = {name for name in dir(dist.ProcessGroupGloo) if "reduce" in name or "gather" in name or "all" in name}
    others = {"__reduce__", "__reduce_ex__", "allocate_tensor", "mem_allocator", "supports_tensor_alloc"}
    scatters = {"reduce_scatter", "_reduce_scatter_base"}  # these are made of an allreduce
    assert operations - others - scatters <= set(ours.values()), "what gloo can do since"
    assert all(callable(getattr(dist.ProcessGroup, name)) for name in REDUCE_SCATTERS)


class Bank:
    """Keeps features, as contrastive losses do."""

    def __init__(self) -> None:
        self.count, self.features = 0, torch.zeros(5, 3)
        self.kept: deque[Any] = deque(maxlen=4)

    def push(self, features: torch.Tensor) -> None:
        self.count += 1
        self.kept.append(features)
        self.features[0] = features[0]


@dataclass
class Config:
    width: int = 3


def test_a_copy_on_meta_shares_nothing_that_changes() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    bank = net.bank = Bank()
    net.push, net.others = bank.push, [{"bank": bank}]
    object.__setattr__(net, "itself", net)
    net.itself_too = (net, 1)
    net.config, net.scale, net.act = Config(), torch.ones(()), partial(F.gelu, approximate="tanh")
    net.generator = torch.Generator()
    net.locked = {"lock": threading.Lock()}
    net.hidden = lambda features: bank.push(features)
    copied = on_meta(net, without=("scale",))
    copied.push(copied.act(copied(torch.empty(7, 4, device="meta"))))
    assert (bank.count, len(bank.kept), bank.features.sum()) == (0, 0, 0.0)
    assert (copied.bank.count, len(copied.others[0]["bank"].kept), copied.bank.features.is_meta) == (1, 1, True)
    assert copied.itself is copied and copied.itself_too == (copied, 1) and copied.scale is None
    assert copied.config == net.config and copied.config is not net.config
    for use in (
        lambda: copied.generator.seed(),
        lambda: torch.randn(2, generator=copied.generator),
        lambda: copied.locked["lock"].acquire(),
        lambda: copied.hidden(torch.empty(1, 3, device="meta")),
        lambda: bool(copied.generator),
    ):
        with pytest.raises(TypeError):
            use()
    assert not bank.kept and not net.locked["lock"].locked()


@pytest.mark.parametrize(
    "pin", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_CUDA, reason="pins no memory"))]
)
def test_batches_that_loader_processes_have_ready(pin: bool) -> None:
    loader = DataLoader(torch.arange(20).unsqueeze(1), num_workers=2, prefetch_factor=2, pin_memory=pin)
    iterator = iter(loader)
    deadline = time.monotonic() + 60
    while batches_ready(iterator) != 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert next(iterator).item() == 0
    list(iterator)
    assert batches_ready(iterator) == 0
    assert batches_ready(iter(DataLoader(torch.arange(3)))) is None and batches_ready(None) is None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_an_optimizer_of_nothing(optimizer: Any) -> None:
    with empty_optimizers():
        made = optimizer((p for p in ()), lr=0.5)
        assert made.step() is None
        assert [(group["params"], group["lr"]) for group in made.param_groups] == [([], 0.5)]
        weight = nn.Parameter(torch.ones(2))
        assert optimizer([weight]).param_groups[0]["params"] == [weight]
        with pytest.raises(TypeError, match="argument given to the optimizer should be an iterable"):
            optimizer(weight)
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizer([])


def test_hooks_around_an_optimizers_step_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not has_step_hooks(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        optimizers.register_optimizer_step_pre_hook,
        optimizers.register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert has_step_hooks(optimizer)
        handle.remove()
        assert not has_step_hooks(optimizer)
