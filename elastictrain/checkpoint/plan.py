"""Which rank writes which piece of the state, by torch's planner, each replicated tensor once.

A plan depends on names, dtypes, shapes and placements alone, never on the tensors' memory, so it is made once for a layout
and used until that changes: then every rank finds its tensors by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.tensor import DTensor

from elastictrain.checkpoint.image import Image, check_tensor, piece

Key = tuple[Any, ...]


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank holds of each."""
    with torch.no_grad():  # what autograd adds to each is most of the time that this takes
        return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors.items()}


def key_of(tensors: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> Key:
    """Equal as long as a plan holds.

    Raises:
        CheckpointError: a tensor that a checkpoint cannot hold.
    """
    key = []
    for name, tensor in tensors.items():
        here = local[name]
        check_tensor(name, here)
        place = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        key.append((name, here.dtype, tensor.shape, here.shape, here.is_cuda, place))
    return tuple(key)


class Planner:
    """Torch's planner, as two halves between which ranks exchange what they have."""

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def local_plan(self, tensors: Mapping[str, Tensor], *, is_main: bool) -> SavePlan:
        """On every rank."""
        self._planner.set_up_planner(dict(tensors), is_coordinator=is_main)
        return self._planner.create_local_plan()

    def global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: who writes what."""
        made: list[SavePlan] = self._planner.create_global_plan(plans)[0]
        return made

    def image(self, plan: SavePlan, local: Mapping[str, Tensor]) -> Image:
        """On every rank: its file."""
        pieces = []
        for item in self._planner.finish_plan(plan).items:
            assert item.type != WriteItemType.BYTE_IO and item.tensor_data is not None, item
            name, box = item.index.fqn, item.tensor_data.chunk
            assert local[name].shape == box.sizes, (name, box)
            pieces.append(piece(name, local[name], shape=tuple(item.tensor_data.size), offsets=tuple(box.offsets)))
        return Image.lay_out(pieces)
