"""The stages of one rank with their weights: made, moved to the device, sharded over data-parallel ranks.

FSDP wraps each unit, and each stage around its units. Under a pipeline a stage's weights are gathered once a step and its
gradients reduced once, by the schedule, so that ranks with unequal numbers of slots make the same collectives.

On failure: as with any FSDP model, a rank that leaves a collective out makes the others wait until the backend gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage

from elastictrain.parallel.mesh import Mesh
from elastictrain.parallel.shard import DTYPES
from elastictrain.parallel.sharing import Names
from elastictrain.parallel.stages import CutModel, StageModule
from elastictrain.step_plan import Precision


class Placed:
    """This rank's stages.

    Args:
        make: gives a part of the model its weights.

    Attributes:
        modules: the stages, by their indices.
        is_sharded: does FSDP lay out their weights?
        loose: trainable weights that FSDP leaves alone, whose gradients are still to be summed over data-parallel ranks.
    """

    def __init__(
        self, model: CutModel, names: Names, mesh: Mesh, make: Callable[[nn.Module], None], precision: Precision
    ) -> None:
        assert mesh.device_mesh is not None
        self._model, self._names, self._mesh, self._precision = model, names, mesh, precision
        self.is_sharded = mesh.is_sharded
        task, device = model.task, mesh.ranks.device
        for unit in model.modules.values() if self.is_sharded else ():
            make(unit)
            self._shard(unit)
        make(task)
        task.to(device)
        outside = [task.get_parameter(name) for name in names.outside]
        self.modules: dict[int, StageModule] = {}
        for stage in model.stages:
            units = [model.modules[unit] for unit in model.cut.stages[stage]]
            self.modules[stage] = module = StageModule(stage, units, outside).train(task.training)
            if self.is_sharded:
                self._shard(module)
        self.loose = [p for p in self._find_loose() if p.requires_grad] if self.is_sharded else []

    def _find_loose(self) -> list[nn.Parameter]:
        """Weights of several stages of this rank: FSDP has one owner for each, so it leaves these alone."""
        ranks = {name: [self._model.cut.owners[stage] for stage in found] for name, found in self._names.stages.items()}
        loose = {
            name for name, owners in ranks.items() if len(set(owners)) < len(owners) or name in self._names.outside
        }
        parameters = self._model.task.named_parameters(remove_duplicate=False)
        return list({id(p): p for name, p in parameters if self._names.first(name) in loose}.values())

    def _shard(self, module: nn.Module) -> None:
        assert self._mesh.device_mesh is not None
        low = DTYPES[self._precision.compute] if self._precision.compute != "fp32" else None
        policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        )
        fully_shard(
            module,
            mesh=self._mesh.device_mesh[self._mesh.shard_axes],
            mp_policy=policy,
            reshard_after_forward=False,  # else every microbatch would gather again
            ignored_params=set(self._find_loose()),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # see Sharded
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)

    def _parts(self) -> list[FSDPModule]:
        return [part for stage in self.modules.values() for part in stage.modules() if isinstance(part, FSDPModule)]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, no pass through a stage is a collective; a collective of the data-parallel ranks itself."""
        for part in self._parts():
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts():
                part.reshard()

    def idle(self) -> None:
        """Take part in one gathering and one reduction, with nothing to add."""
        for module in self.modules.values():
            module.body = lambda index, received: None
            module()  # FSDP makes itself ready in a first pass
        for part in self._parts():
            part.unshard()
        group = self._mesh.device_mesh
        assert group is not None
        for stage, module in reversed(self.modules.items()):
            num_stages, device = self._model.cut.num_stages, self._mesh.ranks.device
            PipelineStage(module, stage, num_stages, device, group=group.get_group("pp")).perform_reduce_grad(1)
