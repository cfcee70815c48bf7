"""The image of one rank's tensors: exactly the bytes of a safetensors file, wherever they are kept.

An :class:`Image` is only a layout: the header and where each piece of a tensor lies. The header's ``__metadata__`` carries
torch's distributed-checkpoint sharding info, by which stock torch
(``torch.distributed.checkpoint.HuggingFaceStorageReader``) reads and reshards the files; the format itself is
https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, raw little-endian row-major bytes).

On failure: a tensor that the format has no word for is a :class:`~elastictrain.errors.CheckpointError` from
:func:`check_tensor`, to be asked before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastictrain.checkpoint.pieces import Piece
from elastictrain.errors import CheckpointError

# The format's names of dtypes; what ``safetensors`` 0.8 and torch 2.13 both read.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ALIGNMENT = 64  # of the first tensor byte; with the widest dtypes first, every tensor is then aligned to its item size


def check_tensor(name: str, tensor: Tensor) -> None:
    """
    Raises:
        CheckpointError: ``tensor`` (local) has a dtype or memory layout that a safetensors file cannot hold.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(f"{name} is a {kind} tensor: a checkpoint holds dense tensors with values only")
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold: convert it")


def piece(name: str, tensor: Tensor, *, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Piece:
    """The box that ``tensor`` (local, any strides, any device) is of the tensor ``name``."""
    return Piece(name, DTYPE_NAMES[tensor.dtype], shape, offsets, tuple(tensor.shape))


@dataclass(frozen=True)
class Image:
    """Layout of one file: its header's bytes, and its pieces in the order of their bytes."""

    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].end if self.pieces else len(self.header)

    @classmethod
    def lay_out(cls, pieces: Iterable[Piece]) -> Image:
        """Give each piece its place. Each name at most once: a safetensors file has one entry per name."""
        ordered = sorted(pieces, key=lambda one: (-one.itemsize, one.name))
        assert len({one.name for one in ordered}) == len(ordered), "two pieces of one tensor on one rank"
        place, placed = 0, []
        for one in ordered:
            placed.append(replace(one, start=place))
            place += one.num_bytes
        header = _header(placed)
        return cls(header, tuple(replace(one, start=one.start + len(header)) for one in placed))


def local(one: Piece, resolve: Callable[[str], Tensor]) -> Tensor:
    """The local tensor of a piece, which must still be as the piece says."""
    tensor = resolve(one.name).detach()
    assert tuple(tensor.shape) == one.lengths and DTYPE_NAMES[tensor.dtype] == one.dtype, (one, tensor.shape)
    return tensor


def _header(pieces: list[Piece]) -> bytes:
    sharding = {one.name: {"saved_offsets": list(one.offsets)} for one in pieces}
    metadata = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    entries = {
        one.name: {"dtype": one.dtype, "shape": list(one.lengths), "data_offsets": [one.start, one.end]}
        for one in pieces
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)  # the format allows trailing spaces
    return len(text).to_bytes(8, "little") + text
