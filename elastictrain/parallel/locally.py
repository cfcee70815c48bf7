"""An optimizer's step on what this rank has of each parameter, without DTensor in between.

DTensor asks for every operator how its arguments are laid out, in Python, and for the first time in a generation at length:
the first step of a small model's AdamW takes ten times what its arithmetic takes. Where every number of a step depends on
the numbers at the same place alone, the step on the local tensors is the same one, to the bit, and needs none of that.

That is so for the optimizers in :data:`ELEMENTWISE`, themselves and not classes made of them, whose gradients and state lie
as the parameters do. All others step as they are. The optimizer is the same before and after: its parameters, and its state
of DTensors.

On failure: what the step raises is raised, with the optimizer's parameters and state in their places; numbers may be those
of half a step, as with any optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from elastictrain.compat.torch import has_step_hooks
from elastictrain.state import of_local

ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop)

State = dict[str, Any]


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``."""
    if type(optimizer) not in ELEMENTWISE or has_step_hooks(optimizer):  # a hook may look at what the optimizer has
        optimizer.step()
        return
    with torch.no_grad():  # within, the local tensor of a DTensor is the one it has, and not a new one
        here = _Here.of(optimizer)
        if here is not None:
            here.step()
    if here is None:
        optimizer.step()


class _Here:
    """What this rank has of an optimizer.

    Args:
        params: of each group, in place of the parameters.
        of: by such a tensor, the DTensor that it is of.
        state: by the same, what the optimizer keeps.
    """

    def __init__(self, optimizer: Optimizer, params: list[list[Tensor]], of: dict[Tensor, DTensor]) -> None:
        self._optimizer, self._params, self._of = optimizer, params, of
        self._state: defaultdict[Tensor, State] = defaultdict(dict)

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Here | None:
        """None: there is no DTensor, or something does not lie as its parameter does."""
        params: list[list[Tensor]] = []
        of: dict[Tensor, DTensor] = {}
        here = cls(optimizer, params, of)
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                return None
            params.append([])
            for whole in group["params"]:
                local = whole
                if isinstance(whole, DTensor):
                    if not whole.dim():  # such state would look like a count of steps
                        return None
                    local = whole.to_local().detach()
                    of[local] = whole
                    if whole.grad is not None:
                        local.grad = _alike(whole.grad, whole, local)
                        if local.grad is None:
                            return None
                params[-1].append(local)
                if not here._take(whole, local):
                    return None
        return here if of else None

    def _take(self, whole: Tensor, local: Tensor) -> bool:
        """The state of a parameter. False: some of it lies in another way."""
        if whole not in self._optimizer.state:
            return True
        kept: State = self._optimizer.state[whole]
        state = self._state[local] = dict(kept)
        for name, value in kept.items() if local is not whole else ():
            if isinstance(value, DTensor):
                state[name] = mine = _alike(value, whole, local)
                if mine is None:
                    return False
        return True

    def step(self) -> None:
        optimizer = self._optimizer
        groups, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        try:
            for group, params in zip(optimizer.param_groups, self._params, strict=True):
                group["params"] = params
            optimizer.state = self._state
            optimizer.step()
        finally:
            optimizer.state = state
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
        for local, found in self._state.items():
            whole = self._of.get(local, local)
            kept = state[whole]
            for name, value in found.items():
                kept[name] = value if whole is local else self._as_kept(value, kept.get(name), whole)

    @staticmethod
    def _as_kept(value: Any, before: Any, whole: Any) -> Any:
        """A value of the state, as the optimizer would have it."""
        if isinstance(before, DTensor) and before.to_local() is value:
            return before
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return of_local(value, whole)


def _alike(value: Any, whole: Tensor, local: Tensor) -> Tensor | None:
    """What this rank has of a value that lies as its parameter does; None: it does not."""
    assert isinstance(whole, DTensor)
    if not isinstance(value, DTensor) or value.placements != whole.placements:
        return None
    if value.device_mesh is not whole.device_mesh and value.device_mesh != whole.device_mesh:
        return None
    mine = value.to_local()
    return mine if mine.shape == local.shape else None
