"""What a committed attempt holds: COMMIT and the manifests, read and checked against each other. Imports no torch.

On failure: no COMMIT is a :class:`~elastictrain.errors.CheckpointError`; anything that is not what COMMIT says it is, a
:class:`~elastictrain.checkpoint.manifest.DamagedError` that names the checkpoint and the file. A storage that cannot be
reached raises its own error: that is no damage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.checkpoint.manifest import (
    COMMIT,
    Commit,
    DamagedError,
    Manifest,
    ManifestRef,
    manifest_name,
    shard_name,
)
from elastictrain.checkpoint.storage import MAX_SMALL_BYTES, file_sizes, read_whole
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir


@dataclass(frozen=True)
class Contents:
    """COMMIT and every rank's manifest; every shard is there in full size."""

    commit: Commit
    manifests: tuple[Manifest, ...]

    @classmethod
    def read(cls, folder: RunDir) -> Contents:
        """
        Raises:
            CheckpointError: there is no COMMIT.
            DamagedError: something is not what COMMIT says it is.
        """
        try:
            return _read(folder)
        except DamagedError as error:
            raise DamagedError(f"checkpoint {folder} is damaged: {error}") from error.__cause__


def _read(folder: RunDir) -> Contents:
    sizes = file_sizes(folder)
    if COMMIT not in sizes:
        raise CheckpointError(f"{folder} is not a committed checkpoint: it has no {COMMIT}")
    commit = Commit.from_json(_read_json(folder, COMMIT, sizes))
    manifests = []
    for rank, ref in enumerate(commit.manifests):
        data = _read_json(folder, manifest_name(rank), sizes)
        if ManifestRef.of(data) != ref:
            raise DamagedError(f"{manifest_name(rank)} has not the size or the SHA-256 that {COMMIT} names")
        manifest = Manifest.from_json(data, rank=rank, world_size=commit.world_size)
        shard = shard_name(rank, commit.world_size)
        if shard not in sizes:
            raise DamagedError(f"{shard} is missing")
        if sizes[shard] != manifest.num_bytes:
            raise DamagedError(f"{shard} has {sizes[shard]} of its {manifest.num_bytes} bytes")
        manifests.append(manifest)
    return Contents(commit, tuple(manifests))


def _read_json(folder: RunDir, name: str, sizes: Mapping[str, int]) -> bytes:
    if name not in sizes or sizes[name] > MAX_SMALL_BYTES:
        raise DamagedError(f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]} bytes")
    try:
        return read_whole(folder, name, size=sizes[name])
    except FileNotFoundError as error:
        raise DamagedError(f"{name} is gone") from error
