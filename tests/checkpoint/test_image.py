"""An image is a safetensors file: the format's own library reads every dtype, shape and layout back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.image import ALIGNMENT, DTYPES, Image, check_tensor, piece
from elastictrain.checkpoint.marked import whole_bytes
from elastictrain.checkpoint.pieces import Piece
from elastictrain.errors import CheckpointError


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made: dict[str, Tensor] = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 120, (5 * 3 * dtype.itemsize,), generator=generator)
        made[f"of.{name}"] = raw.to(torch.uint8).view(dtype).view(5, 3)
    base = torch.randn(6, 8, generator=generator)
    made["transposed"] = base.t()
    made["strided"] = base[::2, 1::3]
    made["expanded"] = base[:1].expand(4, 8)
    made["number"] = torch.tensor(3.5, dtype=torch.float64)
    made["one byte"] = torch.tensor(True)
    made["none"] = torch.empty(0, 3)
    made["none of many"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    made["conjugated"] = torch.complex(base, base + 1).conj()
    made['ünïcode "quoted"'] = torch.arange(3)
    return made


def file_of(named: dict[str, Tensor]) -> bytes:
    """What a save of these would write."""
    arena = Arena(lay_out(named), pin=False)
    arena.stage(named.__getitem__)
    data = bytes(arena.view)
    assert len(data) == arena.image.num_bytes
    return data


def lay_out(named: dict[str, Tensor]) -> Image:
    return Image.lay_out(
        piece(name, tensor, shape=tuple(tensor.shape), offsets=(0,) * tensor.dim()) for name, tensor in named.items()
    )


def bits(tensor: Tensor) -> list[int]:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()


def test_safetensors_reads_every_dtype_and_layout_bit_for_bit(tmp_path: Path) -> None:
    named = tensors()
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_of(named))
    with safe_open(str(file), framework="pt") as opened:
        assert set(opened.keys()) == set(named)
        for name, tensor in named.items():
            found = opened.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name
        assert opened.metadata()["DCP_VERSION"] == "1.0"


def test_an_arena_is_filled_again_in_place() -> None:
    named = {"a": torch.arange(5.0), "b": torch.arange(3)}
    arena = Arena(lay_out(named), pin=False)
    arena.stage(named.__getitem__)
    first = bytes(arena.view)
    named["a"].add_(1)
    arena.stage({"a": named["a"], "b": torch.arange(3).flip(0)}.__getitem__)  # other memory, the same layout
    assert bytes(arena.view) == file_of({"a": named["a"], "b": torch.arange(3).flip(0)}) != first
    assert os.fstat(arena.descriptor).st_size == whole_bytes(arena.image.num_bytes)
    assert len(arena.view) == arena.image.num_bytes
    with pytest.raises(AssertionError):
        arena.stage({"a": named["a"], "b": torch.arange(4)}.__getitem__)


def test_every_tensor_is_aligned_and_follows_the_one_before() -> None:
    image = lay_out(tensors())
    end = len(image.header)
    assert end % ALIGNMENT == 0
    for one in image.pieces:
        assert one.start == end and one.start % one.itemsize == 0, one
        end = one.end
    assert end == image.num_bytes


def test_the_layout_depends_on_names_and_not_on_their_order() -> None:
    named = tensors()
    assert lay_out(named) == lay_out(dict(reversed(named.items())))


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(file_of({}))
    with safe_open(str(file), framework="pt") as opened:
        assert list(opened.keys()) == []


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "w is a torch.sparse_coo tensor: a checkpoint holds dense tensors"),
        (torch.empty(3, device="meta"), "w is a meta tensor: a checkpoint holds dense tensors with values"),
        (torch.zeros(3, dtype=torch.complex128), "w is torch.complex128, which a safetensors file cannot hold"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tensor: Tensor, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_tensor("w", tensor)


def test_two_pieces_of_one_tensor_are_not_laid_into_one_file() -> None:
    with pytest.raises(AssertionError, match="two pieces"):
        Image.lay_out([Piece("w", "F32", (4,), (0,), (2,)), Piece("w", "F32", (4,), (2,), (2,))])
