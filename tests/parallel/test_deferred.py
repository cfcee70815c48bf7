"""Weights that are made later are the weights that the code makes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_  # bound before anything could replace it

from elastictrain.parallel.deferred import NotDeferrable, Recipe, record


def _record(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Recipe]:
    holder = nn.Module()

    def configure() -> None:
        holder.net = build()

    recipe = record(configure, holder, seed=seed)
    return holder.net, recipe


def _made(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    _, recipe = _record(build, seed)
    return {name.removeprefix("net."): recipe.make(name) for name in recipe.names}


class Zoo(nn.Module):
    """One of every way in which a tensor of a model comes about."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=0)
        self.linear = nn.Linear(5, 4)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(3, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.from_data = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.new_from_data = nn.Parameter(self.linear.weight.new_tensor([4.0, 5.0]))
        self.computed = nn.Parameter(torch.randn(300) * 0.02)
        self.stacked = nn.Parameter(torch.stack([torch.eye(2), torch.full((2, 2), 3.0)]).half())
        self.view = nn.Parameter(torch.linspace(0, 1, 4)[1:].clone())
        frequencies = 1.0 / (10000 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("table", torch.outer(torch.arange(4).float(), frequencies).cos(), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.orthogonal = nn.Linear(6, 6)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(60, 60)
        trunc_normal_(self.truncated.weight, std=0.02)
        self.dirac = nn.Conv1d(3, 3, 3)
        nn.init.dirac_(self.dirac.weight)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.padded = nn.Linear(3, 3)
        self.padded.bias.data = nn.functional.pad(self.padded.bias.data, (0, 2))  # becomes another storage
        self.teacher = copy.deepcopy(self.linear)
        self.apply(self._init)
        with torch.no_grad():
            self.linear.bias.copy_(torch.arange(4))
            self.linear.weight[0].zero_()
            self.head.weight.mul_(2)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            module.weight.data.normal_(0, 0.02)
            nn.init.constant_(module.bias, 0.5)


def test_values_that_are_no_matter_of_chance_are_exact() -> None:
    real, made = Zoo(), _made(Zoo)
    exact = (
        "from_data",
        "new_from_data",
        "stacked",
        "view",
        "table",
        "mask",
        "dirac.weight",
        "linear.bias",
        "conv.bias",
    )
    exact += ("norm.weight", "norm.running_var", "norm.num_batches_tracked", "attention.out_proj.bias")
    expected = {**dict(real.named_parameters()), **dict(real.named_buffers())}
    for name in exact:
        assert torch.equal(made[name], expected[name].detach()), name
        assert made[name].dtype == expected[name].dtype
    assert made.keys() == expected.keys()
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }


def test_a_module_that_is_converted_while_it_is_built() -> None:
    def half() -> nn.Module:
        net = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
        nn.init.normal_(net[0].weight, std=0.5)
        nn.init.constant_(net[0].bias, 0.25)
        return net.half()

    made = _made(half)
    assert {name: value.dtype for name, value in made.items() if value.dtype != torch.half} == {
        "1.num_batches_tracked": torch.int64
    }
    assert made["0.weight"].float().std() == pytest.approx(0.5, rel=0.02)
    assert (made["0.bias"] == 0.25).all() and (made["1.running_var"] == 1.0).all()


def test_random_values_follow_the_code() -> None:
    made = _made(Zoo)
    assert made["embedding.weight"][0].count_nonzero() == 0  # padding_idx, and doubling keeps it
    assert 1.0 < made["embedding.weight"][1:].std() < 3.0  # N(0, 1), times two through the tied head
    assert made["linear.weight"][0].count_nonzero() == 0
    assert made["conv.weight"].std() < 0.04
    assert 0.015 < made["computed"].std() < 0.025
    assert torch.allclose(made["orthogonal.weight"] @ made["orthogonal.weight"].T, torch.eye(6), atol=1e-5)
    assert 0.01 < made["truncated.weight"].std() < 0.03
    assert torch.equal(made["teacher.weight"][1:], made["linear.weight"][1:]), "a copy has the values of its original"


def test_a_tied_weight_is_one_tensor() -> None:
    net, recipe = _record(Zoo)
    assert isinstance(net.embedding, nn.Module)
    assert net.get_parameter("head.weight") is net.get_parameter("embedding.weight")
    assert "net.head.weight" not in recipe.names
    assert recipe.name_of(net.get_parameter("head.weight")) == "net.embedding.weight"


def test_weights_depend_on_seed_and_name_alone() -> None:
    def alone() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(3, 3)})

    def with_another() -> nn.Module:
        return nn.ModuleDict({"b": nn.Linear(9, 9), "a": nn.Linear(3, 3)})

    torch.manual_seed(1)
    first = _made(alone)
    torch.rand(100)
    second = _made(with_another)
    assert torch.equal(first["a.weight"], second["a.weight"])
    assert not torch.equal(first["a.weight"], _made(alone, seed=1)["a.weight"])
    assert not torch.equal(second["a.weight"], second["b.weight"][:3, :3])


def test_making_leaves_the_generator_alone() -> None:
    _, recipe = _record(lambda: nn.Linear(3, 3))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again = recipe.make("net.weight"), recipe.make("net.weight")
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert first.data_ptr() != again.data_ptr()


def test_only_what_a_tensor_needs_is_made() -> None:
    _, recipe = _record(lambda: nn.ModuleDict({"small": nn.Linear(2, 2), "large": nn.Linear(2000, 2000)}))
    with torch.profiler.profile(profile_memory=True) as profile:
        recipe.make("net.small.weight")
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < 2000 * 2000


def test_the_default_dtype_while_building_counts() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return nn.Linear(2, 2)
        finally:
            torch.set_default_dtype(torch.float32)

    assert _made(build)["weight"].dtype == torch.float64


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Linear(3, int(torch.ones(2).sum().item())), "meta"),
        (lambda: nn.ParameterList([nn.Parameter(torch.from_numpy(torch.ones(3).numpy()))]), "numpy"),
        (lambda: nn.ParameterList([nn.Parameter(torch.rand(3, generator=torch.Generator()))]), "generator"),
    ],
)
def test_code_that_needs_values_is_told_apart(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotDeferrable, match=reason):
        _record(build)


def test_values_from_outside_stay_real() -> None:
    table = np.arange(4.0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.from_numpy(table))

    net, recipe = _record(Net)
    assert net.get_buffer("table").device.type == "cpu"
    assert recipe.names == ["net.linear.weight", "net.linear.bias"]
