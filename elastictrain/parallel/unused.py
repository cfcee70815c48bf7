"""Weights without a gradient under FSDP: one process has none for them either.

Where ranks use different weights (experts that no token of this rank goes to), FSDP must reduce the same ones on all of
them. So a weight that a rank has not used counts as a gradient of zero (``set_reduce_scatter_unused_params``). Were that
all, a weight that nothing ever uses would be decayed, and have a state in the optimizer, as it would not in one process.

Hooks tell which weights got a gradient on this rank; each is gone after its first call. As long as there are weights that no
rank has used yet, a step ends with one small reduction, and those lose their gradient again. A weight that was used before
and is not in this step has a gradient of zero, where one process has none: momentum and weight decay go on.

On failure: a peer that dies makes the reduction raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastictrain.parallel.mesh import Mesh


class Unused:
    """Which weights have been used on any rank that shares the data.

    Args:
        roots: modules around all that FSDP wraps, on every rank alike.
    """

    def __init__(self, roots: Iterable[nn.Module], mesh: Mesh) -> None:
        self._mesh = mesh
        self._never: dict[int, Tensor] = {}  # by the order of the weights
        self._used: set[int] = set()
        self._handles: dict[int, Any] = {}
        seen: set[int] = set()
        for root in roots:
            wrapped = [module for module in root.modules() if isinstance(module, FSDPModule)]
            for outer in reversed(wrapped):  # a weight belongs to the innermost
                assert isinstance(outer, nn.Module)
                own: list[tuple[int, nn.Module, str]] = []
                for module in outer.modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        if id(parameter) not in seen and isinstance(parameter, DTensor) and parameter.requires_grad:
                            seen.add(id(parameter))
                            own.append((len(seen), module, name))
                            self._never[len(seen)] = parameter
                self._watch(outer, own)

    def _watch(self, outer: nn.Module, own: list[tuple[int, nn.Module, str]]) -> None:
        def entered(outer: nn.Module, inputs: Any) -> None:  # behind FSDP's own hook: the weights are whole
            for entry in list(own):
                key, module, name = entry
                parameter = module.get_parameter(name)
                if parameter.requires_grad:  # another optimizer's turn (toggle_optimizer): it is looked for again
                    self._handles[key] = parameter.register_post_accumulate_grad_hook(partial(self._saw, key))
                    own.remove(entry)
            if not own:
                handle.remove()

        handle = outer.register_forward_pre_hook(entered)

    def _saw(self, key: int, parameter: Tensor) -> None:
        self._used.add(key)
        self._handles.pop(key).remove()

    @torch.no_grad()
    def finish(self) -> None:
        """The last backward pass of a step is done; a collective of the data-parallel ranks, where one is needed."""
        if not self._never:
            return
        keys = list(self._never)
        used = torch.tensor([key in self._used for key in keys], dtype=torch.int32, device=self._mesh.ranks.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._mesh.data_group)
        for key, somewhere in zip(keys, used.tolist(), strict=True):
            if somewhere:
                del self._never[key]
            else:
                self._never[key].grad = None
