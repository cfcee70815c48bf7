"""Files on any fsspec URL: which there are, how they are cut into shards, how bytes of them are read.

Uncompressed files are cut into byte ranges, so that every shard has the same number of bytes and one huge file is still
shared; compressed files cannot be entered in the middle and go to one shard whole, the largest first to the shard that
has least. A shard's bytes come in several pieces, so that there is something to shuffle.

On failure: a pattern that matches nothing, a scheme without a driver or a place that cannot be listed is a
:class:`~elastictrain.errors.UsageError` when the stream is made. A file that shrinks, is damaged or cannot be read
later is a :class:`RecordError` that names it and the byte.
"""

from __future__ import annotations

import hashlib
import heapq
import posixpath
import sys
from collections.abc import Iterator, Mapping, Sequence
from glob import has_magic
from typing import Any, NamedTuple

import fsspec
from fsspec.utils import infer_compression

from elastictrain.errors import ElasticTrainError, UsageError
from elastictrain.rundir import EXTRAS

# What a cursor means depends on these three: changing one needs another Cut version (see describe).
PIECES_PER_SHARD = 64
MIN_PIECE = 256 << 10  # below this, a read from an object store is all latency
CUT_VERSION = 1

BLOCK = 1 << 20  # bytes read at a time
OVERHANG = 64 << 10  # bytes read first beyond a range, for the record that crosses its end
WHOLE = sys.maxsize  # the end of a file that is read to its end, however long that is


class RecordError(ElasticTrainError, ValueError):
    """Data that cannot be read; names the file and the byte."""


class File(NamedTuple):
    """One file of a source."""

    url: str  # the URL or pattern it was found by: what opens its file system, in any process
    path: str  # as that file system takes it
    size: int
    splits: bool  # may be entered in the middle

    @property
    def name(self) -> str:
        scheme, separator, _ = self.url.rpartition("://")
        return f"{scheme}{separator}{self.path.lstrip('/')}" if separator and scheme != "file" else self.path


class Piece(NamedTuple):
    """The bytes ``[start, stop)`` of a file; ``stop`` is :data:`WHOLE` for a file that is read as a whole."""

    file: int
    start: int
    stop: int


def find_files(
    urls: str | Sequence[str], options: Mapping[str, Any] | None = None, *, splits: bool = True
) -> tuple[File, ...]:
    """The files that paths, URLs and glob patterns name, sorted within a pattern.

    Raises:
        UsageError: nothing matches, a folder is named, a file is named twice, all files are empty, or the place cannot
            be listed.
    """
    patterns = [urls] if isinstance(urls, str) else [str(url) for url in urls]
    if not patterns:
        raise UsageError("the stream names no files: give it at least one path, URL or pattern")
    files: dict[str, File] = {}
    for pattern in patterns:
        for path, size in _expand(pattern, dict(options or {})):
            compressed = infer_compression(path) is not None
            file = File(pattern, path, size, splits and not compressed)
            if (twice := files.get(file.name)) is not None:
                raise UsageError(f"{file.name} is named twice, by {twice.url} and by {pattern}: name each file once")
            files[file.name] = file
    if not any(file.size for file in files.values()):
        raise UsageError(f"{_shown(patterns)}: the {len(files)} files found are all empty")
    return tuple(files.values())


def _expand(pattern: str, options: dict[str, Any]) -> list[tuple[str, int]]:
    """``(path, size)`` of what a pattern names."""
    try:
        fs, path = fsspec.url_to_fs(pattern, **options)
        if has_magic(path) and not fs.exists(path):
            found = {
                str(name): info for name, info in fs.glob(path, detail=True).items() if info["type"] != "directory"
            }
        else:
            info = fs.info(path)
            if info["type"] == "directory":
                raise UsageError(f"{pattern} is a folder: name its files, for example {pattern.rstrip('/')}/*")
            found = {path: info}
    except UsageError:
        raise
    except FileNotFoundError:
        found = {}
    except ImportError as error:
        scheme = pattern.split("://", 1)[0]
        remedy = f"pip install 'elastictrain[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise UsageError(f"{pattern}: the driver for {scheme}:// is not installed; {remedy}") from error
    except Exception as error:
        raise UsageError(f"{pattern} cannot be listed ({_reason(error)}): check the URL and the credentials") from error
    if not found:
        raise UsageError(f"{pattern} matches no file: check the path or the pattern")
    for name, info in found.items():
        if info.get("size") is None:
            raise UsageError(
                f"{name} has no known size, so it cannot be shared between shards: copy it to a file first"
            )
    return [(name, int(found[name]["size"])) for name in sorted(found)]


def describe(files: Sequence[File]) -> dict[str, Any]:
    """What a checkpoint remembers of the files: whether they are the same, not where they are; data may move."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{posixpath.basename(file.path)}\0{file.size}\0".encode())
    total = sum(file.size for file in files)
    return {"files": len(files), "bytes": total, "digest": digest.hexdigest(), "cut": CUT_VERSION}


# ---- cutting -------------------------------------------------------------------------------------------------------


def cut(files: Sequence[File], num_shards: int) -> list[list[Piece]]:
    """The pieces of every shard; shards are balanced in bytes as stored."""
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    loads = [(0, shard) for shard in range(num_shards)]
    whole = [index for index, file in enumerate(files) if file.size and not file.splits]
    for index in sorted(whole, key=lambda index: (-files[index].size, index)):
        load, shard = heapq.heappop(loads)
        shards[shard].append(Piece(index, 0, WHOLE))
        heapq.heappush(loads, (load + files[index].size, shard))
    split = [index for index, file in enumerate(files) if file.size and file.splits]
    shares = _fill([load for load, _ in sorted(loads, key=lambda x: x[1])], sum(files[index].size for index in split))
    ranges = iter(split)
    index, start = next(ranges, -1), 0
    for shard, share in enumerate(shares):
        piece_size = max(MIN_PIECE, -(-share // PIECES_PER_SHARD))
        while share:
            stop = min(files[index].size, start + min(share, piece_size))
            shards[shard].append(Piece(index, start, stop))
            share -= stop - start
            index, start = (next(ranges, -1), 0) if stop == files[index].size else (index, stop)
    return shards


def _fill(loads: Sequence[int], amount: int) -> list[int]:
    """``amount`` spread over ``loads`` so that the smallest are filled up first and all end as level as can be."""
    shares = [0] * len(loads)
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    for count in range(len(order), 0, -1):
        chosen = order[:count]
        total = amount + sum(loads[i] for i in chosen)
        if total // count >= loads[chosen[-1]] or count == 1:
            for position, i in enumerate(sorted(chosen)):
                shares[i] = total * (position + 1) // count - total * position // count - loads[i]
            break
    assert sum(shares) == amount and min(shares, default=0) >= 0, (loads, amount, shares)
    return shares


# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(file: File, options: Mapping[str, Any], **kwargs: Any) -> Any:
    """The file, open for reading bytes, by a file system of this process."""
    fs, _ = fsspec.url_to_fs(file.url, **options)
    return fs.open(file.path, "rb", **kwargs)


def blocks(file: File, options: Mapping[str, Any], start: int, stop: int) -> Iterator[bytes]:
    """The bytes from ``start`` to the end of the file: in large blocks until ``stop``, beyond it as little as can be.

    Positions in a compressed file are of its contents; it is read from its beginning to get to ``start``.

    Raises:
        RecordError: the file is shorter than it was when it was found, damaged, or cannot be read.
    """
    position = start
    try:
        if not file.splits:
            yield from _whole(file, options, start)
            return
        fs, _ = fsspec.url_to_fs(file.url, **options)
        ahead = OVERHANG
        while position < file.size:
            if position < stop:
                end = min(position + BLOCK, stop, file.size)
            else:
                end, ahead = min(position + ahead, file.size), min(2 * ahead, BLOCK)
            block = fs.cat_file(file.path, start=position, end=end)
            if len(block) != end - position:
                raise EOFError(f"it had {file.size} bytes when the stream was made and is shorter now")
            yield block
            position = end
    except Exception as error:
        raise RecordError(f"{file.name} cannot be read at byte {position} ({_reason(error)})") from error


def _whole(file: File, options: Mapping[str, Any], start: int) -> Iterator[bytes]:
    with open_file(file, options, compression="infer") as stream:
        while start and (skipped := len(stream.read(min(start, BLOCK)))):
            start -= skipped
        while block := stream.read(BLOCK):
            yield block


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
