"""The flat state: everything that can be packed comes back equal, and optimizers go on as if nothing had happened."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from elastictrain.errors import CheckpointError, UsageError
from elastictrain.state import (
    FlatState,
    TensorSpec,
    check_entries,
    load_optimizer,
    model_state,
    optimizer_state,
    optimizer_targets,
    pack,
    parameter_names,
    unpack,
)


def through_storage(flat: FlatState) -> FlatState:
    """Tensors as copies, everything else by way of JSON text: what a checkpoint does."""
    text = json.dumps({name: value for name, value in flat.items() if not isinstance(value, Tensor)}, allow_nan=False)
    return {**json.loads(text), **{name: value.clone() for name, value in flat.items() if isinstance(value, Tensor)}}


def same(one: Any, other: Any) -> bool:
    """Equal with equal types, NaN included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (float, np.floating)):
        return bool(one == other or (one != one and other != other)) and math.copysign(1, one) == math.copysign(
            1, other
        )
    return bool(one == other)


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 1 << 200],
    "floats": [0.1, -0.0, 1e-320, math.inf, -math.inf, math.nan],
    "text": ["", "ünïcode", "$", "a.b#", "\ud800"],
    "bytes": b"\x00\xff",
    "complex": [1 + 2j, complex(math.inf, -0.0)],
    "tuple": (1, (2, [3, (4,)]), ()),
    "sets": [{1, "a", None}, set(), frozenset({(1, 2)})],
    "string keys": {"a": 1, "b.c": {"d": []}, "": 2},
    "other keys": {1: "a", (1, "x"): {2.5: None}, None: 3, 0: 4},
    "tag as a key": {"$": "tensor", "name": "elsewhere"},
    "counter": Counter({30: 1, 80: 2}),
    "dtypes": [torch.bfloat16, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda", 1)],
    "paths": [Path("/a b/c"), PurePosixPath("x")],
    "numpy numbers": [np.float64(0.1), np.float32("nan"), np.int8(-3), np.bool_(True), np.complex64(1j), np.str_("s")],
    "numpy arrays": [np.arange(6).reshape(2, 3)[:, ::-1], np.array(3.5), np.zeros((0, 2), np.uint16), np.array([True])],
    "tensor": torch.arange(3),
    "tensors": {
        "a": [torch.tensor(1.5), (torch.ones(2, dtype=torch.bfloat16), torch.empty(0))],
        7: torch.tensor([True]),
    },
}


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value_comes_back_equal(name: str) -> None:
    value = VALUES[name]
    flat = pack("callback.X", value)
    assert set(flat) >= {"callback.X"} and all(entry.startswith("callback.X") for entry in flat)
    found = unpack("callback.X", through_storage(flat))
    if name == "paths":
        assert found == value and isinstance(found[0], Path) and isinstance(found[1], PurePath)
    else:
        assert same(found, value), (found, value)


def test_all_of_it_at_once() -> None:
    assert same(unpack("x", through_storage(pack("x", dict(VALUES, paths=None)))), dict(VALUES, paths=None))


def test_what_is_equal_but_of_another_type_is_accepted() -> None:
    assert unpack("x", pack("x", OrderedDict(a=1))) == {"a": 1}
    assert unpack("x", pack("x", torch.Size([2, 3]))) == (2, 3)
    big_endian = np.arange(3, dtype=">i4")
    assert np.array_equal(unpack("x", through_storage(pack("x", big_endian))), big_endian)


def test_tensors_get_names_of_their_own_even_where_paths_meet() -> None:
    value = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "c": [torch.tensor(3)], "c.0": torch.tensor(4)}
    flat = pack("x", value)
    assert sum(isinstance(entry, Tensor) for entry in flat.values()) == 4
    assert same(unpack("x", flat), value)


def test_a_packed_tensor_is_the_live_one_without_its_graph() -> None:
    parameter = nn.Parameter(torch.ones(2))
    packed = pack("x", [parameter])["x.0#"]
    assert packed.data_ptr() == parameter.data_ptr() and not packed.requires_grad


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [1, Custom()]}, "callback.X.a.1", "test_state.Custom"),
        ((len,), "callback.X.0", "builtins.builtin_function_or_method"),
        ({"when": np.datetime64("2020-01-01")}, "callback.X.when", "datetime.date"),
        ([np.longdouble(1)], "callback.X.0", "numpy.longdouble"),
        (np.array(["a"]), "callback.X", "numpy.ndarray"),
        (np.array([Custom()]), "callback.X", "numpy.ndarray"),
        (torch.Generator(), "callback.X", "torch._C.Generator"),
        ({Custom: 1}, "callback.X.0.key", "builtins.type"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_place_and_kind(value: Any, path: str, kind: str) -> None:
    with pytest.raises(UsageError, match="a checkpoint holds tensors, numbers, text") as refused:
        pack("callback.X", value)
    assert f"the state {path!r} holds a " in str(refused.value) and kind in str(refused.value)


def test_missing_entries_and_unknown_kinds_are_named() -> None:
    with pytest.raises(CheckpointError, match="the state has no entry 'x'"):
        unpack("x", {})
    flat = pack("x", [torch.ones(1)])
    del flat["x.0#"]
    with pytest.raises(CheckpointError, match="the state has no tensor 'x.0#'"):
        unpack("x", flat)
    with pytest.raises(CheckpointError, match="unknown kind 'module'"):
        unpack("x", {"x": {"$": "module", "value": "os"}})
    with pytest.raises(CheckpointError, match="dtype 'torch.load'"):
        unpack("x", {"x": {"$": "dtype", "value": "torch.load"}})


# ---- model ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)
        self.extra: Any = {"seen": (1, 2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_model_is_its_parameters_once_its_buffers_and_its_extra_state() -> None:
    model = Tied()
    flat = model_state(model)
    assert set(flat) == {"model.embed.weight", "model.kept", "model._extra_state"}
    assert flat["model.embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert unpack("model._extra_state", flat) == {"seen": (1, 2)}


# ---- optimizers ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))  # never has a gradient, so never a state

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.scale], "lr": 0.02},
        {"params": [model.first.bias, *model.second.parameters(), model.unused], "weight_decay": 0.1},
    ]


OPTIMIZERS: dict[str, Callable[[Net], list[Optimizer]]] = {
    "sgd": lambda model: [SGD(groups(model), lr=0.01)],
    "sgd momentum": lambda model: [SGD(groups(model), lr=0.01, momentum=0.9, nesterov=True)],
    "adamw": lambda model: [AdamW(groups(model), lr=0.01, betas=(0.8, 0.99))],
    "adamw one by one": lambda model: [AdamW(groups(model), lr=0.01, foreach=False)],
    "adam amsgrad": lambda model: [Adam(groups(model), lr=0.01, amsgrad=True)],
    "adam tensor lr": lambda model: [Adam(model.parameters(), lr=torch.tensor(0.01), foreach=False)],
    "adam fused": lambda model: [Adam(groups(model), lr=0.01, fused=True)],
    "adagrad": lambda model: [Adagrad(groups(model), lr=0.01, initial_accumulator_value=0.1)],
    "rmsprop": lambda model: [RMSprop(groups(model), lr=0.01, momentum=0.5, centered=True)],
    "adadelta": lambda model: [Adadelta(groups(model))],
    "nadam": lambda model: [NAdam(groups(model), lr=0.01)],
    "lbfgs": lambda model: [LBFGS([p for p in model.parameters() if p is not model.unused], lr=0.1, max_iter=3)],
    "lbfgs line search": lambda model: [LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")],
    "two": lambda model: [
        AdamW(model.first.parameters(), lr=0.01),
        SGD([*model.second.parameters(), model.scale], lr=0.1, momentum=0.9),
    ],
    "two that share": lambda model: [AdamW(model.parameters()), SGD(model.second.parameters(), lr=0.1, momentum=0.9)],
}


def train(model: Net, optimizers: list[Optimizer], first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)

        for optimizer in optimizers:

            def closure(optimizer: Optimizer = optimizer, x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss is not None
            losses.append(loss.item() if isinstance(loss, Tensor) else loss)
    return losses


def state_of(model: Net, optimizers: list[Optimizer]) -> FlatState:
    names = parameter_names(model)
    flat = model_state(model)
    for index, optimizer in enumerate(optimizers):
        flat.update(optimizer_state(index, optimizer, names))
    return flat


def restore(model: Net, optimizers: list[Optimizer], flat: FlatState) -> None:
    """As a trainer does it: empty targets, filled from storage, given to the model and the optimizers."""
    saved = through_storage(flat)
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    names = parameter_names(model)
    targets = model_state(model)
    for index, optimizer in enumerate(optimizers):
        targets.update(optimizer_targets(index, optimizer, names, specs))
    check_entries(targets, specs, of=["model.", "optim.", "pg."])
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    values = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
    for index, optimizer in enumerate(optimizers):
        load_optimizer(index, optimizer, names, {**values, **targets})


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        assert same(value.detach() if isinstance(value, Tensor) else value, other[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_exactly_where_it_was(kind: str) -> None:
    model = Net()
    optimizers = OPTIMIZERS[kind](model)
    train(model, optimizers, 0, 4)
    for optimizer in optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.05  # options that changed since the start are state too
    flat = through_storage(state_of(model, optimizers))

    fresh = Net(seed=1)
    others = OPTIMIZERS[kind](fresh)
    restore(fresh, others, flat)
    assert_same_state(state_of(fresh, others), flat)
    assert train(fresh, others, 4, 8) == train(model, optimizers, 4, 8)
    assert_same_state(state_of(fresh, others), state_of(model, optimizers))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_has_moved_on_goes_back(kind: str) -> None:
    """In the same process, with state of its own: nothing of the later state stays."""
    model = Net()
    optimizers = OPTIMIZERS[kind](model)
    start = through_storage(state_of(model, optimizers))
    losses = train(model, optimizers, 0, 3)
    restore(model, optimizers, start)
    assert_same_state(state_of(model, optimizers), start)
    assert train(model, optimizers, 0, 3) == losses


def test_groups_may_be_cut_differently_when_loading() -> None:
    model = Net()
    optimizers: list[Optimizer] = [AdamW([{"params": list(model.parameters())}], lr=0.01)]
    train(model, optimizers, 0, 3)
    fresh = Net(seed=1)
    others: list[Optimizer] = [AdamW([{"params": [parameter]} for parameter in fresh.parameters()], lr=0.5)]
    restore(fresh, others, state_of(model, optimizers))
    assert {group["lr"] for group in others[0].param_groups} == {0.01}
    assert train(fresh, others, 3, 6) == train(model, optimizers, 3, 6)


def test_a_group_of_nothing_has_the_options_of_the_others() -> None:
    """A pipeline stage in which nothing is trained reports the learning rate that the others have reached."""
    weight = nn.Parameter(torch.ones(2))
    there, here = SGD([weight], lr=0.5, momentum=0.25), SGD([{"params": []}], lr=1.0)
    load_optimizer(0, here, {}, through_storage(optimizer_state(0, there, {weight: "weight"})))
    assert (here.param_groups[0]["lr"], here.param_groups[0]["momentum"]) == (0.5, 0.25)


def test_parameters_of_no_module_have_names_too() -> None:
    loose = nn.Parameter(torch.ones(2))
    optimizer = SGD([loose], lr=0.1, momentum=0.9)
    loose.sum().backward()
    optimizer.step()
    flat = optimizer_state(0, optimizer, {})
    assert "optim.0.group0.0.momentum_buffer" in flat
    other = SGD([nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.1)
    load_optimizer(0, other, {}, flat)
    assert_same_state(optimizer_state(0, other, {}), flat)


def test_another_optimizers_state_is_refused_and_changes_nothing() -> None:
    model = Net()
    optimizers: list[Optimizer] = [SGD(model.parameters(), lr=0.01, momentum=0.9)]
    train(model, optimizers, 0, 2)
    fresh = Net(seed=1)
    adam: list[Optimizer] = [AdamW(fresh.parameters(), lr=0.5)]
    train(fresh, adam, 0, 1)
    before = through_storage(state_of(fresh, adam))
    with pytest.raises(
        CheckpointError, match=r"the checkpoint has no 'pg.0.scale.betas': saved with another optimizer\?"
    ):
        load_optimizer(0, adam[0], parameter_names(fresh), state_of(model, optimizers))
    assert_same_state(state_of(fresh, adam), before)


# ---- schedulers ----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "multi step": lambda optimizer: MultiStepLR(optimizer, [2, 4, 4]),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=20),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=5), MultiStepLR(optimizer, [1, 2])], [6]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_exactly_where_it_was(kind: str) -> None:
    def advance(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def build() -> tuple[Net, Optimizer, LRScheduler]:
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    model, optimizer, scheduler = build()
    advance(optimizer, scheduler, 4)
    flat = {**state_of(model, [optimizer]), **pack("scheduler.0", scheduler.state_dict())}
    other_model, other_optimizer, other_scheduler = build()
    restore(other_model, [other_optimizer], flat)
    other_scheduler.load_state_dict(unpack("scheduler.0", through_storage(flat)))
    assert advance(other_optimizer, other_scheduler, 8) == advance(optimizer, scheduler, 8)


# ---- comparing -----------------------------------------------------------------------------------------------------


def test_what_would_be_left_out_or_cast_is_refused() -> None:
    saved = {name: TensorSpec((2,), torch.float32) for name in ("model.a", "model.b", "ema.a")}
    targets = {"model.a": torch.ones(2), "model.b": torch.ones(2)}
    check_entries(targets, saved, of=["model."])
    with pytest.raises(CheckpointError, match="the checkpoint also holds ema.a, which this model does not have"):
        check_entries(targets, saved, of=["model.", "ema."])
    with pytest.raises(CheckpointError, match="the checkpoint lacks model.c: it is of another model"):
        check_entries({**targets, "model.c": torch.ones(1)}, saved, of=["model."])
    with pytest.raises(CheckpointError, match=r"model.b has shape \[2\] in the checkpoint and \[1, 2\] here"):
        check_entries({**targets, "model.b": torch.ones(1, 2)}, saved, of=["model."])
    with pytest.raises(CheckpointError, match="model.b is torch.float32 in the checkpoint and torch.float64 here"):
        check_entries({**targets, "model.b": torch.ones(2).double()}, saved, of=["model."])
    many = {f"model.{i}": torch.ones(2) for i in range(9)}
    with pytest.raises(CheckpointError, match="lacks model.0, model.1, model.2 and 6 more"):
        check_entries(many, {}, of=["model."])
