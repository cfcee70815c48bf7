"""Sources of rows: parquet files, and Hugging Face datasets.

Both need the ``hf`` extra, and import it only when they are used. The contract is in :mod:`elastictrain.data.sources`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from elastictrain.compat import datasets as compat
from elastictrain.data.files import RecordError, describe, find_files, open_file
from elastictrain.data.slots import Permutation
from elastictrain.data.sources import Cursor, Source, in_order
from elastictrain.errors import UsageError

BATCH = 64  # rows converted to Python at a time; part of what a cursor of a streaming dataset means
THREADS = 16  # that read the footers of parquet files


def _imported(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UsageError(f"{what} need {package}, which is not installed: pip install 'elastictrain[hf]'") from error


# ---- parquet -------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows ``[start, stop)`` of a row group."""

    file: int
    group: int
    start: int
    stop: int


class ParquetSource(Source):
    """Rows of parquet files on fsspec, each a dict of Python values.

    Shards have the same number of rows, give or take one; a piece is a row group, or a part of one where two shards
    share it. Only footers are read to cut. The cursor is ``[piece, rows]``: the place of the piece in this pass and the
    rows of it that were read.

    Args:
        columns: read these columns only.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._parquet = _imported("pyarrow.parquet", "parquet files")
        self._options = dict(options or {})
        self._files = find_files(urls, self._options, splits=False)
        self._columns = None if columns is None else list(columns)
        with ThreadPoolExecutor(THREADS) as pool:  # a footer is a few round trips to an object store
            self._groups = list(pool.map(self._footer, range(len(self._files))))
        self._num_rows = sum(map(sum, self._groups))
        if not self._num_rows:
            raise UsageError(f"the {len(self._files)} parquet files, {self._files[0].name} the first, have no rows")
        self._cut: tuple[int, list[list[_Rows]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parquet": None}  # a module cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _parquet=_imported("pyarrow.parquet", "parquet files"))

    def describe(self) -> dict[str, Any]:
        return {"kind": "parquet", "rows": self._num_rows, **describe(self._files)}

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        pieces = in_order(self._pieces(num_shards)[shard], order, shard)
        first, done = cursor or (0, 0)
        for place in range(first, len(pieces)):
            for row, sample in enumerate(self._rows(pieces[place], done), done + 1):
                yield sample, [place, row]
            done = 0

    def _rows(self, piece: _Rows, done: int) -> Iterator[dict[str, Any]]:
        """The rows of a piece but for the first ``done``."""
        file = self._files[piece.file]
        try:
            with ExitStack() as stack:
                parquet = self._open(piece.file, stack)
                begin, position = piece.start + done, 0
                for batch in parquet.iter_batches(
                    batch_size=1024, row_groups=[piece.group], columns=self._columns, use_threads=False
                ):
                    low, high = max(begin - position, 0), min(piece.stop - position, len(batch))
                    position += len(batch)
                    for start in range(low, high, BATCH):
                        yield from batch.slice(start, min(BATCH, high - start)).to_pylist()
                    if position >= piece.stop:
                        return
        except Exception as error:
            raise RecordError(
                f"{file.name}: row group {piece.group} cannot be read ({type(error).__name__}: {error})"
            ) from error

    def _open(self, file: int, stack: ExitStack) -> Any:
        local = "://" not in self._files[file].url
        # Column chunks are read exactly once each: a read-ahead would fetch many megabytes for nothing.
        options = {} if local else {"cache_type": "none"}
        stream = stack.enter_context(open_file(self._files[file], self._options, **options))
        return self._parquet.ParquetFile(stream, pre_buffer=not local)

    def _footer(self, file: int) -> list[int]:
        """Rows of each row group of a file."""
        name = self._files[file].name
        try:
            with ExitStack() as stack:
                metadata = self._open(file, stack).metadata
                schema = metadata.schema.to_arrow_schema()
        except Exception as error:
            raise UsageError(
                f"{name} cannot be read as parquet ({type(error).__name__}: {str(error).splitlines()[0]}):"
                " leave it out, or write it again"
            ) from error
        if missing := [c for c in self._columns or () if c not in schema.names and c.split(".")[0] not in schema.names]:
            raise UsageError(f"{name} has no column {missing[0]!r}: it has {', '.join(map(repr, schema.names))}")
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def _pieces(self, num_shards: int) -> list[list[_Rows]]:
        if self._cut is None or self._cut[0] != num_shards:
            self._cut = (num_shards, self._cut_rows(num_shards))
        return self._cut[1]

    def _cut_rows(self, num_shards: int) -> list[list[_Rows]]:
        shards: list[list[_Rows]] = []
        groups = ((f, g, rows) for f, counts in enumerate(self._groups) for g, rows in enumerate(counts) if rows)
        file, group, rows = next(groups)
        start = 0
        for shard in range(num_shards):
            share = self._num_rows * (shard + 1) // num_shards - self._num_rows * shard // num_shards
            shards.append([])
            while share:
                if start == rows:
                    (file, group, rows), start = next(groups), 0
                stop = min(rows, start + share)
                shards[-1].append(_Rows(file, group, start, stop))
                share, start = share - (stop - start), stop
        return shards


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def dataset_source(dataset: Any) -> Source:
    """The source of a ``datasets.Dataset`` or ``datasets.IterableDataset``.

    Raises:
        UsageError: it is something else, or a pipeline that cannot be resumed exactly; with the remedy.
    """
    datasets = _imported("datasets", "Hugging Face datasets")
    if isinstance(dataset, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise UsageError(
            f"the dataset has the splits {', '.join(dataset)}: choose one, for example dataset[{next(iter(dataset))!r}]"
        )
    if isinstance(dataset, datasets.IterableDataset):
        return StreamingSource(dataset)
    if isinstance(dataset, datasets.Dataset):
        return TableSource(dataset)
    raise UsageError(
        f"SampleStream.datasets takes a datasets.Dataset or IterableDataset, not a {type(dataset).__name__}:"
        " use .text, .jsonl or .parquet for files, or return a map-style dataset as it is"
    )


def _fingerprint(columns: Sequence[str] | None) -> str:
    return hashlib.blake2b("\0".join(columns or ()).encode(), digest_size=8).hexdigest()


class TableSource(Source):
    """Rows of a ``datasets.Dataset``: shard ``k`` of ``n`` has the rows ``k, k + n, ...``, shuffled completely.

    The cursor is the number of rows read in this pass.
    """

    shard_remedy = "it has no more rows"

    def __init__(self, dataset: Any) -> None:
        if not len(dataset):
            raise UsageError("the dataset has no rows")
        self._dataset = dataset
        self.max_shards = len(dataset)
        # A transform runs when a row is read, perhaps with random numbers, which belong to the slot the row is for.
        self.draws_random = dataset.format["type"] == "custom"

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "datasets",
            "rows": len(self._dataset),
            "columns": _fingerprint(self._dataset.column_names),
        }

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        count = len(range(shard, len(self._dataset), num_shards))
        batch = 1 if self.draws_random else BATCH
        places = None if order is None or not count else Permutation(count, seed=order, epoch=shard)
        for start in range(cursor or 0, count, batch):
            rows = np.arange(start, min(start + batch, count))
            rows = shard + num_shards * (rows if places is None else places(rows))
            for done, sample in enumerate(self._dataset.__getitems__(rows.tolist()), start + 1):
                yield sample, done


class StreamingSource(Source):
    """Samples of a ``datasets.IterableDataset``; its own shards (files, mostly) are the pieces.

    The cursor is ``[piece, state, rows]``: the place of the piece in this pass, the piece's own ``state_dict()`` at the
    last of its batches, and the rows read since.
    """

    shard_remedy = "a streaming dataset has as many as files; try dataset.reshard(), or SampleStream.parquet or .jsonl"
    draws_random = True

    def __init__(self, dataset: Any) -> None:
        if (reason := compat.not_exact(dataset)) is not None:
            raise UsageError(reason)
        self._dataset = dataset
        self.max_shards = int(dataset.num_shards)

    def describe(self) -> dict[str, Any]:
        columns = self._dataset.column_names
        return {"kind": "datasets stream", "shards": self.max_shards, "columns": _fingerprint(columns), "batch": BATCH}

    def read(
        self, shard: int, num_shards: int, *, order: int | None, cursor: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        assert self.max_shards is not None
        pieces = in_order(range(shard, self.max_shards, num_shards), order, shard)
        first, state, done = cursor or (0, None, 0)
        for place in range(first, len(pieces)):
            piece = self._dataset.shard(num_shards=self.max_shards, index=pieces[place])
            if state is not None:
                piece.load_state_dict(state)
            # iter(), unlike __iter__(), does not deal a piece out once more to the processes of a DataLoader
            for batch in piece.iter(batch_size=BATCH):
                columns = list(batch)
                rows = zip(*batch.values(), strict=True)
                for row, values in enumerate(rows, 1):
                    if row > done:
                        yield dict(zip(columns, values, strict=True)), [place, state, row]
                state, done = piece.state_dict(), 0
            state, done = None, 0
