"""A checkpoint as files that others read: whole tensors, whatever layout they were saved in.

``safetensors``: files of a bounded size with an index. ``torch``: one file for ``torch.load(…, weights_only=True)``.
``dcp``: a folder for ``torch.distributed.checkpoint.load``. One process; at most one tensor is in memory at a time. The
writers of torch want the state as a whole: they get it as mapped files, whose pages the kernel may drop, and which are gone
afterwards.

On failure: what cannot be read is a :class:`~elastictrain.checkpoint.manifest.DamagedError`; the output folder must be new,
and one that was begun is removed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from elastictrain.checkpoint.image import DTYPE_NAMES, Image
from elastictrain.checkpoint.manifest import DamagedError, shard_name
from elastictrain.checkpoint.pieces import Piece
from elastictrain.checkpoint.reader import CheckpointReader
from elastictrain.errors import UsageError

FORMATS = ("safetensors", "torch", "dcp")
FILE_BYTES = 4 << 30  # of one file of a safetensors export, unless one tensor is larger
VERIFY_BYTES = 256 << 20  # in memory at a time


def export(reader: CheckpointReader, output: Path, *, to: str, only: str = "", strip: bool = False) -> list[Path]:
    """Write the tensors whose names begin with ``only`` to the new folder ``output``; the files.

    Args:
        strip: take ``only`` off the names.

    Raises:
        UsageError: the folder is there, or no name begins so.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to} is unknown: use {', '.join(FORMATS)}")
    names = sorted(name for name in reader.tensors if name.startswith(only))
    if not names:
        some = ", ".join(sorted({name.split(".")[0] + "." for name in reader.tensors}))
        raise UsageError(f"no tensor's name begins with {only!r}; they begin with {some}")
    if output.exists():
        raise UsageError(f"{output} is there already: choose a new folder")
    output.mkdir(parents=True)
    renamed = {name: name[len(only) :] if strip else name for name in names}
    try:
        if to == "safetensors":
            return _to_safetensors(reader, output, renamed)
        return _to_torch(reader, output, renamed, as_dcp=to == "dcp")
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise


def _load(reader: CheckpointReader, name: str, into: Tensor | None = None) -> Tensor:
    spec = reader.tensors[name]
    target = torch.empty(spec.shape, dtype=spec.dtype) if into is None else into
    reader.load({name: target})
    return target


def _to_safetensors(reader: CheckpointReader, output: Path, names: dict[str, str]) -> list[Path]:
    files = list(_share_out(reader, list(names)))
    place: dict[str, str] = {}
    written = []
    for number, group in enumerate(files, start=1):
        path = output / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        origin = {names[name]: name for name in group}
        pieces = []
        for name, saved in origin.items():
            spec = reader.tensors[saved]
            box = (0,) * len(spec.shape)
            pieces.append(Piece(name, DTYPE_NAMES[spec.dtype], spec.shape, box, spec.shape))
        image = Image.lay_out(pieces)
        with open(path, "xb", buffering=0) as file:
            file.write(image.header)
            for one in image.pieces:
                if one.num_bytes:
                    flat = _load(reader, origin[one.name]).view(-1).view(torch.uint8)
                    view = memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer
                    while view:
                        view = view[file.write(view) :]
                place[one.name] = path.name
        written.append(path)
    total = sum(_bytes_of(reader, name) for name in names)
    index = output / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=1))
    return [*written, index]


def _share_out(reader: CheckpointReader, names: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        if group and size + _bytes_of(reader, name) > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += _bytes_of(reader, name)
    yield group


def _bytes_of(reader: CheckpointReader, name: str) -> int:
    spec = reader.tensors[name]
    return math.prod(spec.shape) * spec.dtype.itemsize


def _to_torch(reader: CheckpointReader, output: Path, names: dict[str, str], *, as_dcp: bool) -> list[Path]:
    """The state lies in one mapped file while it is written: the kernel may drop its pages at any time."""
    with tempfile.TemporaryDirectory(dir=output, prefix=".staging-") as folder:
        state: dict[str, Any] = {}
        for number, (name, new) in enumerate(names.items()):
            spec = reader.tensors[name]
            count = math.prod(spec.shape)
            if count:
                mapped = torch.from_file(f"{folder}/{number}", shared=True, size=count, dtype=spec.dtype)
                state[new] = _load(reader, name, mapped.view(spec.shape))
            else:
                state[new] = torch.empty(spec.shape, dtype=spec.dtype)
        if as_dcp:
            dcp.save(state, checkpoint_id=str(output), no_dist=True)
        else:
            torch.save(state, output / "state.pt")
        state.clear()
    return sorted(path for path in output.iterdir() if path.is_file())


def verify(reader: CheckpointReader) -> list[str]:
    """Read every byte and compare; the first damage of each shard, in words. Empty: all is good."""
    problems = []
    for manifest in reader.manifests:
        name, block = shard_name(manifest.rank, manifest.world_size), manifest.blocks.block_bytes
        step = max(VERIFY_BYTES // block * block, block)
        try:
            for start in range(0, manifest.num_bytes, step):
                reader.ranges.read([(name, start, min(start + step, manifest.num_bytes))])
        except DamagedError as error:
            problems.append(str(error))
    return problems
