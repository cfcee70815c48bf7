"""Reading a committed checkpoint into any layout, by byte ranges, on any fsspec URL.

:class:`CheckpointReader` believes nothing before it has looked: COMMIT, every manifest's size and SHA-256, every
shard's size, and that the pieces of each tensor fit together. Loading reads the ranges that this rank's targets need
into scratch memory, compares every block with its hash, and changes the targets only after all of it was there and good.
No collectives: each rank reads for itself.

On failure: not committed, damaged, missing names, another shape or dtype are
:class:`~elastictrain.errors.CheckpointError`\\ s (damage: :class:`~elastictrain.checkpoint.manifest.DamagedError`) and
leave every target as it was. A storage that cannot be reached raises its own error: that is no damage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from elastictrain.checkpoint.contents import Contents
from elastictrain.checkpoint.image import DTYPES
from elastictrain.checkpoint.manifest import DamagedError, Manifest, shard_name, tensors_of, values_of
from elastictrain.checkpoint.pieces import Piece
from elastictrain.checkpoint.ranges import Ranges, Want
from elastictrain.checkpoint.threads import in_threads
from elastictrain.errors import CheckpointError
from elastictrain.rundir import RunDir, answering
from elastictrain.state import TensorSpec

COPY_BYTES = 8 << 20  # what one thread copies at a time


class CheckpointReader(StorageReader):
    """One committed attempt.

    Also a ``torch.distributed.checkpoint.StorageReader``, so ``dcp.load(state, storage_reader=CheckpointReader(url))``
    works on any URL.

    Args:
        url: of an attempt (see :func:`elastictrain.checkpoint.resolve`).

    Attributes:
        tensors: global shape and dtype of every tensor.
        manifests: what each rank has written.
        ranges: checked bytes of the shards.
        values: the JSON values of all ranks.
        about: what the writer noted about the run.
        progress: of all that is loaded with it.

    Raises:
        CheckpointError: there is no COMMIT, or the storage does not answer.
        DamagedError: something is not what COMMIT says it is.
        UsageError: the URL's scheme is unknown or its driver is not installed.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._folder = RunDir(url)
        self.url = self._folder.url
        with answering(self._unreadable):
            contents = Contents.read(self._folder)
        self.commit = commit = contents.commit
        self._hold(contents.manifests, Ranges(self._folder, contents.manifests), step=commit.step, about=commit.about)

    def _hold(self, manifests: Sequence[Manifest], ranges: Ranges, *, step: int, about: Mapping[str, Any]) -> None:
        """What is read from here on, wherever it is."""
        self.manifests, self.ranges, self.step, self.about = manifests, ranges, step, about
        self.progress = ranges.progress
        try:
            self.tensors = {
                name: TensorSpec(shape, DTYPES[dtype]) for name, (shape, dtype) in tensors_of(self.manifests).items()
            }
            self.values: dict[str, Any] = values_of(self.manifests)
        except DamagedError as error:
            raise DamagedError(f"{self.name} is damaged: {error}") from None
        self._pieces = {  # those with bytes, by name and offsets
            (one.name, one.offsets): (shard_name(manifest.rank, manifest.world_size), one)
            for manifest in self.manifests
            for one in manifest.pieces
            if one.num_bytes
        }

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets`` in place: plain tensors whole, DTensors with what their local shard needs.

        Raises:
            CheckpointError: a name is not saved, or saved with another shape or dtype: nothing is read. Or the storage
                does not answer: no target has changed.
            DamagedError: bytes are not what was written, or gone; no target has changed.
        """
        for name, target in targets.items():
            self._check(name, target)
        saved: dict[str, list[tuple[str, Piece]]] = {}
        for file, piece in self._pieces.values():
            saved.setdefault(piece.name, []).append((file, piece))
        wants: list[Want] = []
        places: list[Tensor] = []
        known: _Offsets = {}
        for name, target in targets.items():
            local, offsets = _here(target, known)
            for file, piece in saved.get(name, ()):
                if (common := _common(local.shape, offsets, piece)) is not None:
                    starts, lengths = common
                    wants.append(Want.of(file, piece, _less(starts, piece.offsets), lengths))
                    places.append(_part(local, _less(starts, offsets), lengths))
        self._fill(places, wants)

    @property
    def name(self) -> str:
        """How it is called in messages."""
        return f"checkpoint {self.url}"

    def _unreadable(self, error: BaseException, reason: str) -> CheckpointError:
        """Storage that does not answer is no damage: another checkpoint, an older one, would be no remedy."""
        return CheckpointError(
            f"{self.name} cannot be read ({reason}): check that its storage can be reached and the"
            " credentials are right, then start again; nothing has changed"
        )

    def _check(self, name: str, target: Tensor) -> None:
        if (spec := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.name} has no tensor {name!r}")
        if spec.shape != tuple(target.shape):
            raise CheckpointError(f"{name} has shape {list(spec.shape)} in {self.url} and {list(target.shape)} here")
        if spec.dtype != target.dtype:
            raise CheckpointError(f"{name} is {spec.dtype} in {self.url} and {target.dtype} here: load it as it is")
        if target.device.type == "meta":
            raise CheckpointError(f"{name} is on the meta device: materialise it before loading")

    # ---- torch.distributed.checkpoint's protocol ---------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self.url:
            raise CheckpointError(f"this reader is of {self.url}; make another one for {os.fspath(checkpoint_id)}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {
            name: TensorStorageMetadata(TensorProperties(dtype=spec.dtype), torch.Size(spec.shape), chunks=[])
            for name, spec in self.tensors.items()
        }
        for _, one in self._pieces.values():
            chunk = ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.lengths))
            entries[one.name].chunks.append(chunk)
        return Metadata(state_dict_metadata=dict(entries))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything, then copy everything."""
        wants = [self._want(item) for item in plan.items]
        places = [planner.resolve_tensor(item).detach() for item in plan.items]
        for want, place in zip(wants, places, strict=True):
            if place.dtype != DTYPES[want.piece.dtype]:
                raise CheckpointError(f"{want.piece.name} is {want.piece.dtype} in {self.url} and {place.dtype} here")
        self._fill(places, wants)
        for item, place in zip(plan.items, places, strict=True):
            planner.commit_tensor(item, place)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, places: Sequence[Tensor], wants: Sequence[Want]) -> None:
        try:
            with answering(self._unreadable):
                boxes = self.ranges.boxes(wants)
        except DamagedError as error:
            raise DamagedError(f"{self.name} is damaged: {error}") from error.__cause__
        pairs = list(zip(places, boxes, strict=True))
        here = [part for pair in pairs if pair[0].is_cpu for part in _rows(*pair)]
        in_threads(_copy, here, num_bytes=sum(box.nbytes for _, box in here))
        for pair in pairs:
            if not pair[0].is_cpu:
                _copy(pair)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _want(self, item: ReadItem) -> Want:
        file, piece = self._pieces[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        return Want.of(file, piece, tuple(item.storage_offsets), tuple(item.lengths))


_Offsets = dict[tuple[Any, ...], tuple[int, ...]]  # by layout: many tensors have the same


def _here(target: Tensor, known: _Offsets) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank has of a target, and where that begins in the whole."""
    if not isinstance(target, DTensor):
        return target.detach(), (0,) * target.dim()
    layout = (target.shape, id(target.device_mesh), target.placements)
    if layout not in known:
        (box,) = target.__create_chunk_list__()
        known[layout] = tuple(box.offsets)
    with torch.no_grad():  # what autograd would add
        return target.to_local().detach(), known[layout]


def _common(shape: Sequence[int], offsets: Sequence[int], piece: Piece) -> tuple[list[int], tuple[int, ...]] | None:
    """Where what a target and a piece have in common begins in the whole tensor, and its size; None: it is nothing."""
    starts = list(map(max, offsets, piece.offsets))
    ends = [
        min(offset + size, first + length)
        for offset, size, first, length in zip(offsets, shape, piece.offsets, piece.lengths, strict=True)
    ]
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(length <= 0 for length in lengths) else (starts, lengths)


def _less(starts: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
    return tuple(start - offset for start, offset in zip(starts, offsets, strict=True))


def _part(local: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if length != local.shape[dim]:
            local = local.narrow(dim, offset, length)
    return local


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():  # each thread has its own such mode
        pair[0].copy_(pair[1])


def _rows(place: Tensor, box: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The same copy as several that may go at the same time."""
    if box.dim() == 0 or box.nbytes <= COPY_BYTES:
        return [(place, box)]
    rows = max(1, len(box) * COPY_BYTES // box.nbytes)
    return list(zip(place.split(rows), box.split(rows), strict=True))
