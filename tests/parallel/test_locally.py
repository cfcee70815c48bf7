"""A step on local tensors is the optimizer's own, to the bit, and leaves an optimizer of DTensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from elastictrain.parallel import locally
from tests.helpers import run_ranks

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adam, {"lr": torch.tensor(0.1), "amsgrad": True}),
    (AdamW, {"lr": 0.1}),
    (AdamW, {"lr": 0.1, "foreach": True, "maximize": True}),
    (AdamW, {"lr": 0.1, "fused": True}),
    (NAdam, {"lr": 0.1}),
    (RAdam, {"lr": 0.1}),
    (Adamax, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    (Adadelta, {"lr": 0.1}),
    (RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
]


def test_every_kind_of_step_is_covered() -> None:
    assert {kind for kind, _ in CASES} == set(locally.ELEMENTWISE)


def test_a_step_on_local_tensors_is_the_same_to_the_bit() -> None:
    def steps(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", init_method="env://")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def make(kind: type[Optimizer], options: dict[str, Any]) -> tuple[list[nn.Parameter], Optimizer]:
            chance = torch.Generator().manual_seed(1)
            whole = [torch.randn(shape, generator=chance) for shape in ((5, 3), (1, 2), (4,), (2, 2))]
            laid = [Shard(0), Shard(0), Shard(0), Replicate()]
            params = [nn.Parameter(distribute_tensor(one, mesh, [at])) for one, at in zip(whole, laid, strict=True)]
            if not {"foreach", "fused"} & options.keys():  # stock steps cannot have both kinds at once there
                params.append(nn.Parameter(torch.ones(3)))
            params.append(nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)])))
            halves = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.01}]
            return params, kind(halves, **options)  # type: ignore[call-arg]

        for kind, options in CASES:
            (ours, mine), (theirs, stock) = make(kind, options), make(kind, options)
            groups = [group["params"] for group in mine.param_groups]
            kept: list[int] = []
            for number in range(3):
                for p, q in zip(ours[:-1], theirs[:-1], strict=True):  # the last one has no gradient
                    p.grad, q.grad = p.detach() * (number + 1), q.detach() * (number + 1)
                locally.step(mine)
                stock.step()
                kept, before = [id(v) for p in ours for v in mine.state[p].values() if isinstance(v, DTensor)], kept
                assert number == 0 or kept == before, "a state that is there stays the same tensor"
            assert [group["params"] for group in mine.param_groups] == groups
            for p, q in zip(ours, theirs, strict=True):
                assert _equal(p, q), (kind, options)
                assert list(mine.state[p]) == list(stock.state[q])
                for name, value in mine.state[p].items():
                    assert _equal(value, stock.state[q][name]), (kind, name)
            for p in itertools.chain(*groups):
                assert not isinstance(p, DTensor) or p.to_local().grad is None

    run_ranks(steps, 2)


def _equal(a: Any, b: Any) -> bool:
    assert type(a) is type(b)
    if isinstance(a, DTensor):
        assert a.placements == b.placements and a.shape == b.shape and a.stride() == b.stride()
        return torch.equal(a.to_local(), b.to_local())
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


class Scaled(AdamW):
    """It may look at all numbers of a parameter."""


def test_what_may_look_beyond_its_own_numbers_steps_as_it_is() -> None:
    def seen(rank: int, world_size: int) -> None:
        dist.init_process_group("gloo", init_method="env://")
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))

        def kinds(optimizer: Optimizer, grad: Tensor | None = None) -> set[type]:
            found: set[type] = set()
            group = optimizer.param_groups[0]["params"]
            step = type(optimizer).step

            def look(self: Any, closure: Any = None) -> Any:
                found.update(type(p) for p in self.param_groups[0]["params"])
                return step(self) if closure is None else step(self, closure)

            weight.grad = torch.ones_like(weight) if grad is None else grad
            try:
                type(optimizer).step = look  # type: ignore[method-assign]
                locally.step(optimizer)
            finally:
                type(optimizer).step = step  # type: ignore[method-assign]
            assert optimizer.param_groups[0]["params"] is group and group[0] is weight
            return found

        assert kinds(AdamW([weight])) == {Tensor}
        assert kinds(Scaled([weight])) == {type(weight)} and isinstance(weight, DTensor)
        hooked = AdamW([weight])
        hooked.register_step_post_hook(lambda *_: None)
        assert Tensor not in kinds(hooked)
        replicated = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
        assert Tensor not in kinds(SGD([weight]), replicated), "gradients lie elsewhere"
        assert LBFGS not in locally.ELEMENTWISE

    run_ranks(seen, 1)
