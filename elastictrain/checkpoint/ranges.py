"""Byte ranges of a checkpoint's files, checked against their hashes, in memory that nobody else has seen.

What is asked for is widened to whole blocks, read with several requests under way, and each block is compared with its
hash as soon as it is there.

On failure: bytes that are missing or not as they were hashed are a
:class:`~elastictrain.checkpoint.manifest.DamagedError` that names file, tensors and range. A storage that cannot be
reached raises its own error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastictrain.checkpoint.image import DTYPES
from elastictrain.checkpoint.manifest import DamagedError, Manifest, shard_name
from elastictrain.checkpoint.pieces import Piece
from elastictrain.checkpoint.progress import Progress
from elastictrain.checkpoint.storage import open_local
from elastictrain.checkpoint.threads import in_threads
from elastictrain.rundir import RunDir

PART_BYTES = 8 << 20  # what one thread reads at a time: whole huge pages, so that no two make the same page
STEP_BYTES = 1 << 20  # of one local read: it is hashed while it is still in the processor's cache
REQUEST_BYTES = 16 << 20  # of one request to an object store
UNDER_WAY_BYTES = 512 << 20  # of all requests to an object store that are under way


@dataclass(frozen=True)
class Want:
    """A box of a piece: the bytes from its first element to its last, and how it lies in them."""

    file: str
    piece: Piece
    lengths: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    start: int
    end: int

    @classmethod
    def of(cls, file: str, piece: Piece, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Want:
        strides = tuple(math.prod(piece.lengths[dim + 1 :]) for dim in range(len(piece.lengths)))
        assert math.prod(lengths), "an empty box has no bytes to read"
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        start, end = (piece.start + index * piece.itemsize for index in (first, last + 1))
        assert piece.start <= start < end <= piece.end, (piece, offsets, lengths)
        return cls(file, piece, lengths, strides, start, end)

    def box(self, data: Tensor) -> Tensor:
        """The box in ``data``, the bytes from :attr:`start` to :attr:`end`."""
        flat = data.view(DTYPES[self.piece.dtype])
        box = flat.as_strided(self.lengths, self.strides)
        return box if flat.numel() == box.numel() else box.clone()  # a part of each row: not the rows with it


@dataclass(frozen=True)
class Run:
    """One contiguous range of whole blocks that serves some wants (their indices)."""

    file: str
    start: int
    end: int
    wants: tuple[int, ...]


class Ranges:
    """Reads from the shards of one checkpoint.

    Args:
        manifests: of all ranks.

    Attributes:
        progress: of all reads.
    """

    def __init__(self, folder: RunDir, manifests: Sequence[Manifest]) -> None:
        self._folder = folder
        self._take_manifests(manifests)

    def _take_manifests(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = {shard_name(one.rank, one.world_size): one for one in manifests}
        self.progress = Progress()

    def boxes(self, wants: Sequence[Want]) -> list[Tensor]:
        """The box of each want, in its dtype and shape."""
        boxes: list[Tensor | None] = [None] * len(wants)
        runs = list(self._merge(wants))
        for run, data in zip(runs, self.read([(run.file, run.start, run.end) for run in runs]), strict=True):
            for index in run.wants:
                boxes[index] = wants[index].box(data[wants[index].start - run.start : wants[index].end - run.start])
        return [box for box in boxes if box is not None]

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> list[Tensor]:
        """The bytes of each ``(file, start, end)``, whole blocks all of them.

        Raises:
            DamagedError: some are missing or damaged.
        """
        self.progress.want(sum(end - start for _, start, end in ranges))
        # numpy asks the kernel for huge pages, which saves half of the time that fresh memory costs
        scratch = [torch.from_numpy(np.empty(end - start, dtype=np.uint8)) for _, start, end in ranges]
        views = [memoryview(data.numpy()) for data in scratch]  # type: ignore[arg-type]  # an array is a buffer
        self._read_into(ranges, views)
        return scratch

    def check(self, file: str, start: int, data: memoryview) -> None:
        """
        Raises:
            DamagedError: ``data``, whole blocks from ``start`` on, is not what was hashed.
        """
        if (bad := self._manifests[file].blocks.damage(start, data)) is not None:
            raise DamagedError(f"{file} {self._name_range(file, *bad)} is not what was written: its hash differs")

    def _read_into(self, ranges: Sequence[tuple[str, int, int]], views: Sequence[memoryview]) -> None:
        parts: list[tuple[str, int, memoryview]] = []
        for (file, start, end), view in zip(ranges, views, strict=True):
            size = max(PART_BYTES if self._folder.is_local else REQUEST_BYTES, self._manifests[file].blocks.block_bytes)
            parts += [(file, place, view[place - start : place - start + size]) for place in range(start, end, size)]
        if self._folder.is_local:
            self._read_local(parts)
        else:
            for batch in _batches(parts):
                self._read_remote(batch)

    def _read_local(self, parts: Sequence[tuple[str, int, memoryview]]) -> None:
        with ExitStack() as files:
            opened: dict[str, int] = {}
            for file in dict.fromkeys(file for file, _, _ in parts):
                try:
                    opened[file] = open_local(self._folder.join(file))
                except FileNotFoundError as error:
                    raise DamagedError(f"{file} is gone") from error
                files.callback(os.close, opened[file])

            def read(part: tuple[str, int, memoryview]) -> None:
                file, start, view = part
                size = max(STEP_BYTES, self._manifests[file].blocks.block_bytes)
                for place in range(0, len(view), size):
                    step = view[place : place + size]
                    self._read_step(file, opened[file], start + place, step)
                    self.check(file, start + place, step)
                self.progress.add(len(view))

            in_threads(read, parts)

    def _read_step(self, file: str, descriptor: int, start: int, view: memoryview) -> None:
        place = 0
        while place < len(view):
            if not (got := os.preadv(descriptor, [view[place:]], start + place)):
                raise self._short(file, start, start + len(view))
            place += got

    def _read_remote(self, parts: Sequence[tuple[str, int, memoryview]]) -> None:
        paths = [self._folder.join(file) for file, _, _ in parts]
        starts = [start for _, start, _ in parts]
        ends = [start + len(view) for _, start, view in parts]
        try:
            got = self._folder.fs.cat_ranges(paths, starts, ends, on_error="raise")
        except FileNotFoundError as error:
            raise DamagedError(f"a shard is gone ({error})") from error
        for (file, start, view), data in zip(parts, got, strict=True):
            if len(data) != len(view):
                raise self._short(file, start, start + len(view))
            self.check(file, start, memoryview(data))
            view[:] = data
            self.progress.add(len(view))

    def _merge(self, wants: Sequence[Want]) -> Iterator[Run]:
        """As few runs of whole blocks as the wants allow."""
        file, start, end, run = "", 0, 0, list[int]()
        for index in sorted(range(len(wants)), key=lambda index: (wants[index].file, wants[index].start)):
            want = wants[index]
            first, last = self._manifests[want.file].blocks.around(want.start, want.end)
            if run and (want.file != file or first > end):
                yield Run(file, start, end, tuple(run))
                run = []
            if not run:
                file, start, end = want.file, first, last
            run.append(index)
            end = max(end, last)
        if run:
            yield Run(file, start, end, tuple(run))

    def _short(self, file: str, start: int, end: int) -> DamagedError:
        return DamagedError(f"{file} lacks {self._name_range(file, start, end)}")

    def _name_range(self, file: str, start: int, end: int) -> str:
        """ "bytes 0 to 65536 (model.weight and 2 more)"."""
        names = [one.name for one in self._manifests[file].pieces if one.start < end and one.end > start]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"bytes {start} to {end} ({names[0] if names else 'its header'}{more})"


def _batches(parts: Sequence[tuple[str, int, memoryview]]) -> Iterator[list[tuple[str, int, memoryview]]]:
    batch: list[tuple[str, int, memoryview]] = []
    for part in parts:
        if batch and sum(len(view) for *_, view in batch) + len(part[2]) > UNDER_WAY_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch
