"""A sharded model: FSDP2 around the user's module, and ranks that take part in a step without a slot of their own.

The user's module keeps its class and its names. One wrapper, :class:`StepRoot`, is what FSDP shards, and every step
method (``training_step``, ``validation_step``, …) is called through it, so that weights are gathered and released around
user code wherever it runs.

How much of the state is shared is the mesh's ``zero``. With 3 a unit's weights are gathered for its forward pass, let go,
and gathered again for its backward pass. With 2 and 1 they stay from the first forward pass of a step to the last backward
pass, so they are gathered once a step. With 1 gradients stay whole until then too, and are reduced once.

Every forward and backward pass of a sharded model is a sequence of collectives in which all ranks must take part. When
slots do not divide evenly, some ranks have one pass fewer. They join the others in a *ghost* pass: the same units in the
same order, around no data, with gradients that are exactly zero. No user code runs in it and no sample is used twice.
The order is learned from the first real pass of the same step method. A rank that has not had one yet follows rank 0,
which publishes the order as it goes.

On failure: a rank whose units run in another order than its peers' (data-dependent layers) makes the collectives differ;
the backend then raises on every rank. This is FSDP's own condition, not one of ghost passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastictrain.parallel.forwards import Forwards
from elastictrain.parallel.mesh import Mesh
from elastictrain.parallel.units import block_names
from elastictrain.parallel.unused import Unused
from elastictrain.step_plan import Precision

IDLE = "_elastictrain_idle"  # on a module: it runs without data, for the sake of FSDP's collectives
# By precision, the numbers of a forward pass; with fp8 of all but some products.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Way(StrEnum):
    """How a unit takes part in a pass. FSDP reduces gradients of a unit whose inputs need none at the very end."""

    FORWARD = "forward"  # no backward pass
    THROUGH = "through"  # the backward pass goes on to its inputs
    FROM_HERE = "from-here"  # it has weights that train, and nothing before it does


class StepRoot(nn.Module):
    """Calls a method of the user's module as a forward pass of its own."""

    def __init__(self, task: nn.Module) -> None:
        super().__init__()
        self.task = task

    def forward(self, method: str, *args: Any) -> Any:
        return getattr(self.task, method)(*args)


def shard_units(task: nn.Module) -> list[str]:
    """Names of the submodules that are gathered one at a time, in the module's order.

    The blocks, without those that share a weight with another part of the model, which stay with the root.

    Raises:
        UsageError: ``pipeline_units()`` names a module that is not there.
    """
    names, modules = block_names(task), dict(task.named_modules())
    uses: Counter[int] = Counter()
    for module in task.modules():
        uses.update(id(p) for p in module.parameters(recurse=False))
    inside = {
        name: Counter(id(p) for m in modules[name].modules() for p in m.parameters(recurse=False)) for name in names
    }
    return [name for name in names if all(uses[key] == count for key, count in inside[name].items())]


class Sharded:
    """The user's module under FSDP2.

    Args:
        task: its parameters become DTensors.
        mesh: its ``dp_shard`` and ``cp`` axes shard, its ``dp_replicate`` axis replicates.
        units: see :func:`shard_units`.
        before: called with each part of the model before it is cut, to give it its weights.
    """

    def __init__(
        self,
        task: nn.Module,
        *,
        mesh: Mesh,
        units: Sequence[str],
        precision: Precision,
        before: Callable[[nn.Module], None] = lambda part: None,
    ) -> None:
        assert mesh.device_mesh is not None
        self.root = StepRoot(task)
        self._store = mesh.ranks.store
        self._rank = mesh.ranks.rank
        self._units = {f"task.{name}": task.get_submodule(name) for name in units}
        self._orders: dict[str, list[tuple[str, Way]]] = {}  # step method -> units, as they run
        self._has_replicas, self._zero = mesh.shape.dp_replicate > 1, mesh.shape.zero
        self._is_last = True
        axes = mesh.shard_axes
        low = DTYPES[precision.compute] if precision.compute != "fp32" else None
        policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        )
        for unit in self._units.values():
            before(unit)
            fully_shard(unit, mesh=mesh.device_mesh[axes], mp_policy=policy, reshard_after_forward=self._zero == 3)
        before(task)
        fully_shard(self.root, mesh=mesh.device_mesh[axes], mp_policy=policy)
        self._parts = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            # Losses are already divided by the global batch, so gradients are summed. gloo needs the second call: it has
            # no pre-multiplied sum.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)  # ranks may use different weights
        self._unused = Unused([self.root], mesh)

    def __call__(self, method: str, *args: Any) -> Any:
        """Call a step method of the user's module."""
        return self.root(method, *args)

    def learn(self, method: str, *args: Any, publish: bool) -> Any:
        """As a call, and note the order of units; ``publish`` it while going, for ranks that have nothing to run."""
        order: list[tuple[str, Way]] = []
        store = self._store if publish and self._rank == 0 else None

        def entered(name: str) -> Any:
            def hook(unit: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
                way = Way.FORWARD
                if torch.is_grad_enabled():
                    if _needs_gradient((*inputs, *named.values())):
                        way = Way.THROUGH
                    elif any(p.requires_grad for p in unit.parameters()):
                        way = Way.FROM_HERE
                if store is not None:
                    store.set(f"order/{method}/{len(order)}", f"{name} {way}")
                order.append((name, way))

            return hook

        # Before FSDP's own hook: rank 0 says what comes next, and only then waits for the others to gather it.
        handles = [
            unit.register_forward_pre_hook(entered(name), prepend=True, with_kwargs=True)
            for name, unit in self._units.items()
        ]
        try:
            output = self(method, *args)
        finally:
            for handle in handles:
                handle.remove()
        if store is not None:
            store.set(f"order/{method}/{len(order)}", "end")
        self._orders[method] = order
        return output

    def knows(self, method: str) -> bool:
        return method in self._orders

    def ghost(self, method: str) -> Tensor:
        """A pass without data; returns a zero whose backward pass takes part in the reductions."""
        grad = torch.is_grad_enabled()
        zero = torch.zeros((), device=_device(self.root), requires_grad=grad)
        order: list[tuple[str, Way]] = []

        def run(_method: str) -> Tensor:
            value = zero
            for name, way in self._order(method):
                order.append((name, way))
                with torch.set_grad_enabled(way is not Way.FORWARD and grad):
                    out = self._units[name](value if way is Way.THROUGH else value.detach())
                value = out if way is Way.THROUGH else value + out
            return value * 1

        with _stand_ins(self.root, run, self._units.values(), zero):
            output = self.root(method)
        self._orders.setdefault(method, order)
        assert isinstance(output, Tensor)
        return output

    def _order(self, method: str) -> Iterator[tuple[str, Way]]:
        """The units of a pass: as learned, else as rank 0 publishes them."""
        if method in self._orders:
            yield from self._orders[method]
            return
        assert self._store is not None
        index = 0
        while (entry := self._store.get(f"order/{method}/{index}").decode()) != "end":
            name, way = entry.split(" ")
            yield name, Way(way)
            index += 1

    def settle(self) -> None:
        """Let go of gathered weights: what was gathered for an evaluation must not serve a later pass.

        The root's weights stay gathered after a forward pass until a backward pass, and with ``zero`` below 3 all do; if
        the shards change in between, as an average swapped in for validation does, the next pass would still use the old
        ones.
        """
        for part in self._parts:
            part.reshard()

    def finish(self) -> None:
        """The last backward pass of a step is done; may be a collective."""
        self._unused.finish()

    def last_pass(self, is_last: bool) -> None:
        """Is the next backward pass the last of the step?

        Gradients are reduced to shards in every pass, which keeps them small; over replicas, and with ``zero=1`` at all,
        only in the last. With ``zero`` below 3 weights are let go only then.
        """
        if is_last == self._is_last:
            return
        self._is_last = is_last
        for part in self._parts:
            if self._zero < 3:
                part.set_reshard_after_backward(is_last, recurse=False)
            if self._zero == 1:
                part.set_requires_gradient_sync(is_last, recurse=False)
            elif self._has_replicas:
                part.set_requires_all_reduce(is_last, recurse=False)


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _needs_gradient(output: Any) -> bool:
    if isinstance(output, Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        output = list(output.values())
    return isinstance(output, (list, tuple)) and any(_needs_gradient(item) for item in output)


class _stand_ins:
    """Within, modules run these instead of the user's code. FSDP's hooks around them stay, tensor parallelism's sleep."""

    def __init__(self, root: nn.Module, run: Any, units: Any, zero: Tensor) -> None:
        self._forwards = Forwards()
        self._root, self._run, self._units, self._zero = root, run, list(units), zero

    def __enter__(self) -> None:
        self._forwards.replace(self._root, lambda root, method: self._run(method))
        for unit in self._units:
            self._forwards.replace(unit, lambda unit, value: value * 1 if value.requires_grad else value + self._zero)
            unit.__dict__[IDLE] = True

    def __exit__(self, *exc: object) -> None:
        self._forwards.restore()
        for unit in self._units:
            unit.__dict__.pop(IDLE, None)
