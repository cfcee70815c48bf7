"""A checkpoint as files that others read: whole tensors, whatever layout they were saved in.

``safetensors``: files of a bounded size with an index. ``hf``: those, and the configuration of the run's model of
``transformers``, so that ``from_pretrained`` loads the folder. ``torch``: one file for
``torch.load(…, weights_only=True)``. ``dcp``: a folder for ``torch.distributed.checkpoint.load``. One process; at most one
tensor is in memory at a time. The writers of torch want the state as a whole: they get it as mapped files, whose pages the
kernel may drop, and which are gone afterwards.

On failure: what cannot be read is a :class:`~elastictrain.checkpoint.manifest.DamagedError`; the output folder must be new,
and one that was begun is removed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

FORMATS = ("safetensors", "hf", "torch", "dcp")
FILE_BYTES = 4 << 30  # of one file of a safetensors export, unless one tensor is larger
VERIFY_BYTES = 256 << 20  # in memory at a time


def export(reader: CheckpointReader, output: Path, *, to: str, only: str = "", strip: bool = False) -> list[Path]:
    """Write the tensors whose names begin with ``only`` to the new folder ``output``; the files.

    Args:
        strip: take ``only`` off the names.

    Raises:
        UsageError: the folder is there, no name begins so, or it is "hf" and the run has no model of transformers.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to} is unknown: use {', '.join(FORMATS)}")
    model = reader.about.get("transformers") if to == "hf" else None
    if model is not None:
        only, strip = only + str(model["prefix"]), True
    elif to == "hf":
        raise UsageError(
            f"--to hf is for a run whose task holds a model of transformers, and {reader.url} says of none: use"
            " --to safetensors"
        )
    names = sorted(name for name in reader.tensors if name.startswith(only))
    if not names:
        some = ", ".join(sorted({name.split(".")[0] + "." for name in reader.tensors}))
        raise UsageError(f"no tensor's name begins with {only!r}; they begin with {some}")
    if output.exists():
        raise UsageError(f"{output} is there already: choose a new folder")
    output.mkdir(parents=True)
    renamed = {name: name[len(only) :] if strip else name for name in names}
    try:
        if to in ("safetensors", "hf"):
            configs = [] if model is None else _write_configs(output, model, reader, names)
            return [*configs, *_to_safetensors(reader, output, renamed)]
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
                    del flat, view  # before the next one is read
                place[one.name] = path.name
        written.append(path)
    total = sum(_bytes_of(reader, name) for name in names)
    index = output / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=1))
    return [*written, index]


def _write_configs(
    output: Path, model: Mapping[str, Any], reader: CheckpointReader, names: Sequence[str]
) -> list[Path]:
    """``config.json`` and ``generation_config.json``; the dtype is the one that most of the weights are saved in."""
    sizes: Counter[str] = Counter()
    for name in names:
        if (dtype := reader.tensors[name].dtype).is_floating_point:
            sizes[str(dtype).removeprefix("torch.")] += _bytes_of(reader, name)
    contents = {"config.json": model["config"], "generation_config.json": model["generation"]}
    if sizes:
        contents["config.json"] = {**model["config"], "dtype": sizes.most_common(1)[0][0]}
    written = [output / name for name, content in contents.items() if content is not None]
    for path in written:
        path.write_text(json.dumps(contents[path.name], indent=2) + "\n")
    return written


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
