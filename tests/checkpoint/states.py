"""States for the checkpoint tests: whole tensors that any process can make, and how they are spread over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from elastictrain.checkpoint import CheckpointManager, CheckpointReader
from elastictrain.config import CheckpointConfig
from elastictrain.rundir import RunDir

# The first DTensor operation of a process imports 200 modules (torch.compile's); here once, before ranks are forked.
torch.compiler.reset()

# name -> shape, dtype. Uneven on 2, 3 and 4 ranks; some ranks hold nothing of "one", "none" is empty everywhere.
SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.weight": ((17, 9), torch.float32),
    "model.half": ((5, 3, 2), torch.bfloat16),
    "model.narrow": ((7,), torch.float16),
    "model.double": ((6, 5), torch.float64),
    "model.one": ((1,), torch.float32),
    "model.none": ((0, 3), torch.float32),
    "model.ids": ((11, 2), torch.int64),
    "model.mask": ((9,), torch.bool),
    "model.bytes": ((33,), torch.uint8),
}
NUMBERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"optim.0.weight.step": ((), torch.float32)}


def whole(name: str, shape: Sequence[int], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """The same tensor in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 200, tuple(shape), generator=generator).to(dtype)


def expected(*, seed: int = 0) -> dict[str, Tensor]:
    return {name: whole(name, *spec, seed=seed) for name, spec in {**SPECS, **NUMBERS}.items()}


def spread(named: Mapping[str, Tensor], mesh: DeviceMesh | None, placements: Sequence[Placement]) -> dict[str, Tensor]:
    """Each tensor as a DTensor on the mesh; numbers stay plain, as an optimizer's step counts are."""
    if mesh is None:
        return dict(named)
    return {
        name: distribute_tensor(tensor, mesh, list(placements)) if tensor.dim() else tensor
        for name, tensor in named.items()
    }


def blank(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same layout with other values."""
    return {name: torch.full_like(tensor, 1) for name, tensor in named.items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def manager(
    url: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    generation: int = 0,
    writer_command: Sequence[str] | None = None,
    **config: Any,
) -> CheckpointManager:
    return CheckpointManager(
        RunDir(url),
        CheckpointConfig(**config),
        rank=rank,
        world_size=world_size,
        generation=generation,
        writer_command=writer_command,
    )


def load_all(url: str, *, seed: int = 0) -> CheckpointReader:
    """Load :func:`expected` whole and compare every element."""
    reader = CheckpointReader(url)
    wanted = expected(seed=seed)
    targets = blank(wanted)
    reader.load(targets)
    assert_equal(targets, wanted)
    return reader


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(full(found[name]), tensor), name
