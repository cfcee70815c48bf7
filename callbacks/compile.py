"""Faster blocks, by ``torch.compile``."""

from __future__ import annotations

import dataclasses

import torch

from elastictrain.callback import Callback
from elastictrain.errors import UsageError
from elastictrain.step_plan import Compilation, StepPlan


class Compile(Callback):
    """Compile each block of the model; the rest runs as it is written.

    Blocks are what the task's ``pipeline_units()`` names, else its run of equal blocks. Before the first step, the
    gradients of one slot are compared with those of eager code, and training does not start if they differ.

    Args:
        fullgraph: refuse a block that cannot be compiled as a whole, instead of running parts of it eagerly.
        dynamic: True compiles for any shape, False for each shape anew, None once more when a shape changes.
        backend: of ``torch.compile``. On CPUs "inductor" needs a C++ compiler.

    Raises:
        UsageError: ``backend`` is unknown; when the trainer starts: there is no compiler, the module has manual
            optimisation, or gradients differ.
    """

    def __init__(self, *, fullgraph: bool = False, dynamic: bool | None = None, backend: str = "inductor") -> None:
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise UsageError(f"Compile(backend={backend!r}) is not known: use one of {known}")
        self.compilation = Compilation(fullgraph, dynamic, backend)

    def configure(self, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, compilation=self.compilation)
