"""What a checkpoint says about itself: one manifest per rank, and the COMMIT that makes them a checkpoint.

``checkpoints/step-00001000/<attempt>/`` holds ``shard-00000-of-00002.safetensors``, ``manifest-00000.json`` and so on
for each rank, and COMMIT, which is written last and lists the manifests with their sizes and SHA-256; a manifest has the
hashes of its shard's blocks. So COMMIT vouches for every byte. All is JSON. Imports no torch.

On failure: what is read here may come from anywhere, so nothing is believed: a name that is not exactly the expected
one, a number that is not one, a range outside of its file, pieces that overlap or leave a gap are a
:class:`DamagedError` that says which file and what; nothing has been loaded by then.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastictrain.checkpoint.blocks import HASH, Blocks
from elastictrain.checkpoint.pieces import ITEM_BYTES, Piece, overlap
from elastictrain.errors import CheckpointError

FORMAT = 1
COMMIT = "COMMIT"
STEP = re.compile(r"step-(\d{8,})")


class DamagedError(CheckpointError):
    """A committed checkpoint whose files are not what they were: another one has to be taken."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def manifest_name(rank: int) -> str:
    return f"manifest-{rank:05d}.json"


@dataclass(frozen=True)
class Manifest:
    """One rank's shard: its hashes, its pieces, and the JSON values that this rank brings."""

    rank: int
    world_size: int
    blocks: Blocks
    pieces: tuple[Piece, ...]
    values: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return self.blocks.num_bytes

    def to_json(self) -> bytes:
        return manifest_json(self.rank, self.world_size, self.blocks, tensors_json(self.pieces), self.values)

    @classmethod
    def from_json(cls, data: bytes, *, rank: int, world_size: int) -> Manifest:
        """
        Raises:
            DamagedError: it is not the manifest of this rank, or names bytes that its file cannot have.
        """
        where = manifest_name(rank)
        found = _load(data, where)
        file, tensors, values = (_dict(found, key, where) for key in ("file", "tensors", "values"))
        if found.get("rank") != rank or file.get("name") != shard_name(rank, world_size):
            raise DamagedError(f"{where} is of rank {found.get('rank')!r} and file {str(file.get('name'))[:100]!r}")
        num_bytes, block_bytes = (_count(file, key, where) for key in ("bytes", "block_bytes"))
        blocks = Blocks.parse(num_bytes, block_bytes, file.get("hashes"))
        if blocks is None or file.get("hash") != HASH:
            raise DamagedError(f"{where} has no {HASH} hashes for {num_bytes} bytes in blocks of {block_bytes}")
        pieces = tuple(_piece(name, tensors, where) for name in tensors)
        end = 0
        for start, stop, name in sorted((one.start, one.end, one.name) for one in pieces):
            if start < end or stop > num_bytes:
                raise DamagedError(f"{where}: the bytes of {name} overlap others or lie outside of the file")
            end = stop
        return cls(rank, world_size, blocks, pieces, values)


def tensors_json(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Pieces as a manifest lists them."""
    return {
        one.name: {
            "shape": one.shape,
            "dtype": one.dtype,
            "offsets": one.offsets,
            "lengths": one.lengths,
            "bytes": (one.start, one.end),
        }
        for one in pieces
    }


def manifest_json(
    rank: int, world_size: int, blocks: Blocks, tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> bytes:
    """A manifest; ``tensors`` are of :func:`tensors_json`."""
    hashes = {"hash": HASH, "block_bytes": blocks.block_bytes, "hashes": blocks.text}
    file = {"name": shard_name(rank, world_size), "bytes": blocks.num_bytes, **hashes}
    return _dump({"format": FORMAT, "rank": rank, "file": file, "tensors": tensors, "values": values})


@dataclass(frozen=True)
class ManifestRef:
    """How COMMIT names a manifest."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> ManifestRef:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Commit:
    """Makes an attempt a checkpoint. ``manifests`` are by rank; ``time`` is seconds since the epoch, ``num_bytes`` of
    all shards."""

    step: int
    generation: int
    time: float
    num_bytes: int
    manifests: tuple[ManifestRef, ...]
    about: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return len(self.manifests)

    def to_json(self) -> bytes:
        listed = [
            {"name": manifest_name(rank), "bytes": ref.num_bytes, "sha256": ref.sha256}
            for rank, ref in enumerate(self.manifests)
        ]
        head = {"format": FORMAT, "step": self.step, "generation": self.generation, "time": self.time}
        return seal(_dump({**head, "num_bytes": self.num_bytes, "manifests": listed, "about": self.about}))

    @classmethod
    def from_json(cls, data: bytes) -> Commit:
        """
        Raises:
            DamagedError: it is not a COMMIT, or of a format that this version does not know.
        """
        found = _load(data, COMMIT)
        if seal(data.rsplit(_SEAL, 1)[0] + b"}") != data:
            raise DamagedError(f"{COMMIT} is not what was written: its own SHA-256 differs")
        listed, time, about = found.get("manifests"), found.get("time"), _dict(found, "about", COMMIT)
        if not isinstance(listed, list) or not listed or not isinstance(time, (int, float)):
            raise DamagedError(f"{COMMIT} lists no manifests, or no time")
        refs = []
        for rank, ref in enumerate(listed):
            if not isinstance(ref, dict) or ref.get("name") != manifest_name(rank):
                raise DamagedError(f"{COMMIT}: entry {rank} of its manifests is not {manifest_name(rank)}")
            refs.append(ManifestRef(_count(ref, "bytes", COMMIT), str(ref.get("sha256"))))
        step, generation, num_bytes = (_count(found, key, COMMIT) for key in ("step", "generation", "num_bytes"))
        return cls(step, generation, float(time), num_bytes, tuple(refs), about)


# ---- all ranks together --------------------------------------------------------------------------------------------


def tensors_of(manifests: Iterable[Manifest]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Global shape of every tensor, and its dtype in the format's words.

    Raises:
        DamagedError: ranks disagree about a tensor, or its pieces overlap or leave a gap.
    """
    pieces: dict[str, list[Piece]] = {}
    for manifest in manifests:
        for one in manifest.pieces:
            pieces.setdefault(one.name, []).append(one)
    for name, parts in pieces.items():
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise DamagedError(f"the manifests disagree about the shape or dtype of {name}")
        if math.prod(parts[0].shape) != sum(math.prod(part.lengths) for part in parts) or overlap(parts):
            raise DamagedError(f"the pieces of {name} overlap or leave a gap")
    return {name: (parts[0].shape, parts[0].dtype) for name, parts in pieces.items()}


def values_of(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """The JSON values of all ranks in one dict.

    Raises:
        DamagedError: two ranks give one name different values.
    """
    merged: dict[str, Any] = {}
    for manifest in manifests:
        for name, value in manifest.values.items():
            if name in merged and merged[name] != value:
                raise DamagedError(f"the manifests disagree about the value of {name}")
            merged[name] = value
    return merged


# ---- JSON that is not believed -------------------------------------------------------------------------------------


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


_SEAL = b',"sha256":"'


def seal(content: bytes) -> bytes:
    """A JSON object with one more entry: the SHA-256 of everything before that entry."""
    return content[:-1] + _SEAL + hashlib.sha256(content[:-1]).hexdigest().encode() + b'"}'


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{where} is not a JSON object")
    if found.get("format") != FORMAT:
        raise DamagedError(f"{where} has format {found.get('format')!r} and this version reads {FORMAT}")
    return found


def _dict(found: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = found.get(key)
    if not isinstance(value, dict):
        raise DamagedError(f"{where} has no {key}")
    return value


def _count(found: Mapping[str, Any], key: str, where: str) -> int:
    return _counts([found.get(key)], f"{where}: {key}")[0]


def _counts(values: Any, where: str) -> tuple[int, ...]:
    if isinstance(values, list):
        for value in values:  # a start reads thousands of such lists
            if type(value) is not int or not 0 <= value < 1 << 63:
                break
        else:
            return tuple(values)
    raise DamagedError(f"{where} is {str(values)[:100]} instead of counts")


def _piece(name: str, tensors: Mapping[str, Any], where: str) -> Piece:
    found, where = _dict(tensors, name, where), f"{where}: {name}"
    dtype = found.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DamagedError(f"{where} has unknown dtype {str(dtype)[:100]!r}")
    shape, offsets, lengths, place = (
        _counts(found.get(key), f"{where} {key}") for key in ("shape", "offsets", "lengths", "bytes")
    )
    inside = len(shape) == len(offsets) == len(lengths) and all(
        offset + length <= size for offset, length, size in zip(offsets, lengths, shape, strict=True)
    )
    if not inside or len(place) != 2:
        raise DamagedError(f"{where} is a box outside of its tensor")
    one = Piece(name, dtype, shape, offsets, lengths, place[0])
    if one.end != place[1] or one.start % one.itemsize:
        raise DamagedError(f"{where} has {place[1] - place[0]} bytes at {place[0]} and needs {one.num_bytes}, aligned")
    return one
