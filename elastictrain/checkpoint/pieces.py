"""Boxes of tensors, and the bytes that hold them. Imports no torch, so that the writer process stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The safetensors format's names of dtypes that torch has too, and the bytes of one element.
ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True)
class Piece:
    """A box of a named tensor, and the bytes of the file that hold it (row-major, without gaps).

    Args:
        dtype: a key of :data:`ITEM_BYTES`.
        shape: of the whole tensor, over all ranks.
        offsets: where the box begins in the whole tensor.
        lengths: of the box.
        start: first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int = 0

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.lengths) * self.itemsize

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


def overlap(parts: Sequence[Piece]) -> bool:
    """Whether two boxes share an element; a sweep along the dim in which the boxes differ most."""
    parts = [part for part in parts if math.prod(part.lengths)]
    if len(parts) < 2:
        return False
    dims = range(len(parts[0].shape))
    sweep = max(dims, key=lambda dim: len({part.offsets[dim] for part in parts}), default=None)
    if sweep is None:
        return True  # two pieces of one number
    reach: list[Piece] = []
    for part in sorted(parts, key=lambda part: part.offsets[sweep]):
        reach = [other for other in reach if other.offsets[sweep] + other.lengths[sweep] > part.offsets[sweep]]
        if any(all(_meet(part, other, dim) for dim in dims) for other in reach):
            return True
        reach.append(part)
    return False


def _meet(one: Piece, other: Piece, dim: int) -> bool:
    return (
        one.offsets[dim] < other.offsets[dim] + other.lengths[dim]
        and other.offsets[dim] < one.offsets[dim] + one.lengths[dim]
    )
