"""Sources: where the samples of a stream come from, and the cursors that say how far they were read.

A :class:`Source` is cut into a fixed number of logical shards. One shard, read from a cursor, yields each sample with
the cursor behind it; a cursor is a small JSON value, and it is everything there is to know. There is no other state, so
a source may be left at any moment and read on in another process, on another machine, among another number of readers.

Shuffling changes the order of a shard's pieces (byte ranges, files, row groups) from pass to pass; a shuffle buffer
would have to be part of the cursor.

On failure: a record that cannot be understood is a :class:`~elastictrain.data.files.RecordError` that names the file
and the byte at which the record starts.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from elastictrain.data.files import (
    WHOLE,
    File,
    Piece,
    RecordError,
    blocks,
    cut,
    describe,
    find_files,
)
from elastictrain.data.slots import Permutation
from elastictrain.errors import UsageError

Cursor = Any  # a small JSON value; None is the start of a pass

_T = TypeVar("_T")


class Source(ABC):
    """Samples in logical shards. Subclass it to stream from somewhere else.

    Attributes:
        max_shards: into how many shards it can be cut at most; None for any number.
        shard_remedy: what its user can do to get more.
        draws_random: reading a sample may draw random numbers (it runs code of the user).
    """

    max_shards: int | None = None
    shard_remedy: str = ""
    draws_random: bool = False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON values that differ for other data or another cut: a checkpoint is refused where they do."""

    @abstractmethod
    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        """One pass over a shard from ``cursor`` on: each sample with the cursor behind it.

        Args:
            order: seeds the order of the shard's pieces in this pass; None keeps them as they are stored.

        The samples of all shards together are all samples, each once, whatever ``order`` is.
        """


def in_order(pieces: Sequence[_T], order: int | None, shard: int) -> list[_T]:
    """A shard's pieces as one pass reads them."""
    if order is None or len(pieces) < 2:
        return list(pieces)
    places = Permutation(len(pieces), seed=order, epoch=shard)(np.arange(len(pieces)))
    return [pieces[place] for place in places]


# ---- lines ---------------------------------------------------------------------------------------------------------


def lines(
    file: File, options: Mapping[str, Any], start: int, stop: int, *, aligned: bool
) -> Iterator[tuple[int, int, bytes]]:
    """The lines that start in ``[start, stop)``: ``(offset, offset of the next line, bytes without the line end)``.

    Args:
        aligned: a line starts at ``start``. Otherwise the line that ``start`` is in belongs to whoever reads before it.
    """
    if start >= stop:
        return
    skip = start > 0 and not aligned
    offset = position = start - skip  # one byte back: a line end there means that a line starts at ``start``
    rest: list[bytes] = []  # of a line that goes on in the next block
    for block in blocks(file, options, offset, stop):
        position += len(block)
        parts = block.split(b"\n")
        if len(parts) > 1:
            parts[0] = b"".join([*rest, parts[0]])
            rest = [parts.pop()]
            for part in parts:
                end = offset + len(part) + 1
                if not skip:
                    if offset >= stop:
                        return
                    yield offset, end, part
                skip, offset = False, end
        else:
            rest.append(block)
        if (position if skip else offset) >= stop:
            return
    if not skip and offset < stop and (part := b"".join(rest)):
        yield offset, offset + len(part), part


class FileSource(Source):
    """Samples out of files; what text, JSON lines and documents have in common."""

    kind: str
    remedy = "compressed files cannot be split: store them uncompressed, or as more files"

    def __init__(
        self, urls: str | Sequence[str], *, options: Mapping[str, Any] | None = None, splits: bool = True
    ) -> None:
        self._options = dict(options or {})
        self._files = find_files(urls, self._options, splits=splits)
        if not any(file.splits for file in self._files):
            self.max_shards = sum(file.size > 0 for file in self._files)
            self.shard_remedy = self.remedy
        self._cut: tuple[int, list[list[Piece]]] | None = None

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, **describe(self._files)}

    def _pieces(self, num_shards: int) -> list[list[Piece]]:
        if self._cut is None or self._cut[0] != num_shards:
            self._cut = (num_shards, cut(self._files, num_shards))
        return self._cut[1]


class LineSource(FileSource):
    """Lines of UTF-8 text files on fsspec; blank ones are skipped.

    A line ends with LF or CRLF and belongs to the range in which it starts. Its cursor is ``[piece, offset]``: the
    place of the piece in this pass, and the byte at which the next line starts.
    """

    kind = "text"

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        pieces = in_order(self._pieces(num_shards)[shard], order, shard)
        first, offset = cursor or (0, None)
        for place in range(first, len(pieces)):
            piece = pieces[place]
            file = self._files[piece.file]
            begin = piece.start if offset is None else offset
            for start, end, line in lines(file, self._options, begin, piece.stop, aligned=offset is not None):
                text = _decoded(line, file, start)
                if text and not text.isspace():
                    yield self._sample(text, file, start), [place, end]
            offset = None

    def _sample(self, line: str, file: File, start: int) -> Any:
        return line


def _decoded(line: bytes, file: File, start: int) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{file.name}: the record at byte {start} is not UTF-8 ({error.reason} at byte {start + error.start}):"
            " convert the file"
        ) from None
    if start == 0:
        text = text.removeprefix("\ufeff")
    return text.removesuffix("\r")


class JsonLineSource(LineSource):
    """One JSON value per line of text files; with ``field``, that field of the object."""

    kind = "jsonl"

    def __init__(
        self, urls: str | Sequence[str], *, field: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(urls, options=options)
        self._field = field

    def _sample(self, line: str, file: File, start: int) -> Any:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RecordError(
                f"{file.name}: the record at byte {start} is not JSON ({error}): {_excerpt(line)}"
            ) from None
        if self._field is None:
            return record
        try:
            return record[self._field]
        except (TypeError, KeyError):
            has = (
                f"the fields {', '.join(map(repr, record))}"
                if isinstance(record, dict)
                else f"a {type(record).__name__}"
            )
            raise RecordError(
                f"{file.name}: the record at byte {start} has no field {self._field!r}, it has {has}: {_excerpt(line)}"
            ) from None


def _excerpt(line: str) -> str:
    return line if len(line) <= 80 else line[:77] + "..."


# ---- whole files ---------------------------------------------------------------------------------------------------


class DocumentSource(FileSource):
    """Whole UTF-8 text files on fsspec, one sample each, as they are stored; empty ones are skipped.

    Its cursor is the number of files read in this pass.
    """

    kind = "documents"
    remedy = "a file is one sample"

    def __init__(self, urls: str | Sequence[str], *, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(urls, options=options, splits=False)

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        pieces = in_order(self._pieces(num_shards)[shard], order, shard)
        for place in range(cursor or 0, len(pieces)):
            file = self._files[pieces[place].file]
            data = b"".join(blocks(file, self._options, 0, WHOLE))
            if data:
                try:
                    text = data.decode("utf-8-sig")
                except UnicodeDecodeError as error:
                    raise RecordError(
                        f"{file.name} is not UTF-8 ({error.reason} at byte {error.start}): convert the file"
                    ) from None
                yield text, place + 1


def check_shards(source: Source, num_shards: int, *, instead: str) -> None:
    """Refuse ``num_shards`` where the source cannot be cut into so many; ``instead`` is another way out.

    Raises:
        UsageError: with both remedies.
    """
    if source.max_shards is not None and num_shards > source.max_shards:
        raise UsageError(
            f"the stream can be cut into at most {source.max_shards} shards and {num_shards} are asked for:"
            f" {instead}, or change the data ({source.shard_remedy})"
        )
