"""``SampleStream``: samples from many files or a streaming dataset, read in shards, resumed exactly.

A stream is a fixed number of logical shards. Where each of them stands is one small JSON value (its position), and
there is nothing else to remember: a run may continue on any number of ranks and loader processes, and every sample of a
pass is read exactly once. The number of shards is fixed for the life of a run; which rank reads which shard is not.

On failure: data that is not there, and pipelines that cannot be resumed exactly, are
:class:`~elastictrain.errors.UsageError`\\ s when the stream is made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

from torch.utils.data import IterableDataset, get_worker_info

from elastictrain.data.packing import PackedSource
from elastictrain.data.slots import mix
from elastictrain.data.sources import Cursor, DocumentSource, JsonLineSource, LineSource, Source, check_shards
from elastictrain.data.tables import ParquetSource, dataset_source
from elastictrain.errors import UsageError


class StreamOptions(TypedDict, total=False):
    """What every stream can be told; see :class:`SampleStream`."""

    num_shards: int | None
    seed: int | None
    shuffle: bool
    repeat: bool
    transform: Callable[[Any], Any] | None


class Position(NamedTuple):
    """Where a shard stands."""

    epoch: int  # the pass it is in
    taken: int  # samples read: of this pass, or of all passes where the stream repeats
    cursor: Cursor = None  # the source's own, within the pass

    def to_json(self) -> dict[str, Any]:
        return {"pass": self.epoch, "taken": self.taken, "at": self.cursor}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        return cls(int(value["pass"]), int(value["taken"]), value["at"])


class SampleStream(IterableDataset[Any]):
    """A stream of samples in shards that a run can leave and continue anywhere.

    Return one from ``Task.train_dataset()``. Make one of text, JSON lines, parquet or a Hugging Face dataset by the
    methods below, or of a :class:`~elastictrain.data.sources.Source` of your own.

    Args:
        source: where samples come from.
        num_shards: logical shards, fixed for the life of a run; None: as many as the run has slots when it starts. A
            run continues with any number of slots up to ``num_shards``; slots have equally much to read where it is a
            multiple of theirs.
        seed: of the order; None: the trainer's seed (0 without a trainer).
        shuffle: read the pieces of each shard (byte ranges, files, row groups) in another order in each pass; rows
            within a piece keep theirs. Each step reads from all slots' shards at once, so a global batch is a mixture
            of places far apart. There is no shuffle buffer: its contents would have to be saved and moved with the
            state, and where they are not, a resumed run loses or repeats the samples in it. Data that is sorted should
            be shuffled once, when it is written.
        repeat: start each shard again when it ends, so that every slot is always full; otherwise an epoch is one pass,
            at whose end batches get smaller.
        transform: is applied to each sample. Random numbers that it draws from ``random``, ``numpy.random`` or
            ``torch`` in training are the same on any number of ranks and loader processes.

    As a plain ``IterableDataset`` (in a DataLoader of your own, under ``lightning.Trainer``) it yields one pass over
    all shards in turn, or endlessly with ``repeat``. Loader processes share the shards; ranks do not, each reads all.

    Raises:
        UsageError: a shuffle buffer is asked for, or there are fewer shards than asked for.
    """

    def __init__(
        self,
        source: Source,
        *,
        num_shards: int | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        repeat: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise UsageError(
                f"SampleStream takes a Source, not a {type(source).__name__}: use SampleStream.text, .jsonl, .parquet"
                " or .datasets"
            )
        if not isinstance(shuffle, bool):
            raise UsageError(
                f"shuffle={shuffle!r} asks for a shuffle buffer, which cannot be resumed exactly: use shuffle=True,"
                " which reads files and parts of files in another order in each pass"
            )
        if num_shards is not None and num_shards < 1:
            raise UsageError(f"num_shards={num_shards} must be at least 1, or None for the number of slots")
        if num_shards is not None:
            check_shards(source, num_shards, instead="lower num_shards")
        self.source = source
        self.num_shards = num_shards
        self.seed = seed
        self.shuffle = shuffle
        self.repeat = repeat
        self.transform = transform
        self._epoch = 0

    # ---- sources ---------------------------------------------------------------------------------------------------

    @classmethod
    def text(
        cls,
        urls: str | Sequence[str],
        *,
        each: str = "line",
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[StreamOptions],
    ) -> SampleStream:
        """Lines of UTF-8 text files, without line end; blank ones are skipped. Samples are ``str``.

        Args:
            urls: paths, fsspec URLs or glob patterns. Files ending in .gz, .bz2, .xz or .zst are decompressed; they are
                read from their beginning when a run continues within one, and cannot be shared between shards.
            each: "line", or "file" for one sample per file, as it is stored.
            storage_options: of the fsspec driver.
        """
        if each not in ("line", "file"):
            raise UsageError(f'each={each!r} must be "line" or "file"')
        source = LineSource if each == "line" else DocumentSource
        return cls(source(urls, options=storage_options), **options)

    @classmethod
    def jsonl(
        cls,
        urls: str | Sequence[str],
        *,
        field: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[StreamOptions],
    ) -> SampleStream:
        """JSON values, one per line of files (see :meth:`text`): the objects, or of each object one ``field``."""
        return cls(JsonLineSource(urls, field=field, options=storage_options), **options)

    @classmethod
    def parquet(
        cls,
        urls: str | Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[StreamOptions],
    ) -> SampleStream:
        """Rows of parquet files, each a dict; ``columns`` reads only those. Needs the ``hf`` extra."""
        return cls(ParquetSource(urls, columns=columns, options=storage_options), **options)

    @classmethod
    def datasets(cls, dataset: Any, **options: Unpack[StreamOptions]) -> SampleStream:
        """Rows of a Hugging Face ``datasets.Dataset`` or ``datasets.IterableDataset``, each a dict.

        A ``Dataset`` is shuffled completely, row by row. Of an ``IterableDataset``, whole shards (files, mostly) are;
        its own ``map`` and ``filter`` run, but ones that draw random numbers do not draw the same again when a run
        continues: use ``transform`` for those.

        Raises:
            UsageError: it has a shuffle buffer, or is cut by ``take``, ``skip`` or by node; with the remedy.
        """
        return cls(dataset_source(dataset), **options)

    def packed(
        self,
        length: int,
        *,
        tokenize: Callable[[Any], Any],
        eos: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> SampleStream:
        """This stream's samples as documents, joined into rows of ``length`` tokens: int64 tensors of ``[length]``.

        For a language model that needs inputs and targets of ``n`` tokens, pack ``n + 1`` and slice. Documents run on
        from one row into the next; what is left at the end of a shard's pass (less than a row) is dropped.

        Args:
            tokenize: one document to its token ids: a sequence or array of integers, ``bytes``, or what a tokenizer of
                transformers returns. It must always return the same for the same document.
            eos: a token put behind each document.
            transform: is applied to each row.
        """
        source = PackedSource(self.source, length, tokenize=tokenize, transform=self.transform, eos=eos)
        return SampleStream(
            source,
            num_shards=self.num_shards,
            seed=self.seed,
            shuffle=self.shuffle,
            repeat=self.repeat,
            transform=transform,
        )

    # ---- reading ---------------------------------------------------------------------------------------------------

    @property
    def draws_random(self) -> bool:
        """Reading may draw random numbers: code of the user runs."""
        return self.transform is not None or self.source.draws_random

    def describe(self) -> dict[str, Any]:
        """JSON values that a position depends on."""
        return {**self.source.describe(), "shuffle": self.shuffle, "repeat": self.repeat}

    def set_epoch(self, epoch: int) -> None:
        """The pass that ``iter()`` reads next: its number is in the order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        num_shards = self.num_shards or min(count, self.source.max_shards or count)
        start = {shard: Position(self._epoch, 0) for shard in range(index, num_shards, count)}
        reader = ShardReader(self, start, num_shards=num_shards, seed=self.seed or 0)
        while samples := reader.take(1):
            yield samples[0]


class ShardReader:
    """Samples of some shards of a stream, always of the one of which fewest were read.

    That is round-robin over the shards that still have samples, and follows from their positions alone.
    """

    def __init__(self, stream: SampleStream, positions: Mapping[int, Position], *, num_shards: int, seed: int) -> None:
        self._stream = stream
        self._num_shards = num_shards
        self._seed = seed
        self._positions = dict(positions)
        self._queue = [(position.taken, shard) for shard, position in positions.items()]
        heapq.heapify(self._queue)
        self._open: dict[int, Iterator[tuple[Any, Cursor]]] = {}
        self._moved: set[int] = set()

    def moved(self) -> dict[int, Position]:
        """Where the shards stand that were read since this was asked last."""
        positions = {shard: self._positions[shard] for shard in self._moved}
        self._moved.clear()
        return positions

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples; fewer, or none, at the end of the pass."""
        samples: list[Any] = []
        transform = self._stream.transform
        while len(samples) < count and self._queue:
            shard = self._queue[0][1]
            sample, cursor = self._next(shard)
            if cursor is None:
                heapq.heappop(self._queue)
                continue
            epoch, read, _ = self._positions[shard]
            self._positions[shard] = Position(epoch, read + 1, cursor)
            self._moved.add(shard)
            heapq.heapreplace(self._queue, (read + 1, shard))
            samples.append(sample if transform is None else transform(sample))
        if len(samples) < count and self._stream.repeat and self._positions:
            shown = ", ".join(map(str, sorted(self._positions)[:5]))
            raise UsageError(
                f"the shards {shown} of {self._num_shards} have no samples, and repeat=True needs some in each: the"
                " data is too small for so many shards; raise --micro-batch-size, or set a lower num_shards"
            )
        return samples

    def _next(self, shard: int) -> tuple[Any, Cursor]:
        """The next sample of a shard with the cursor behind it; the cursor is None where there are no more."""
        while True:
            position = self._positions[shard]
            if shard not in self._open:
                order = mix(self._seed, position.epoch) if self._stream.shuffle else None
                self._open[shard] = self._stream.source.read(
                    shard, self._num_shards, order=order, cursor=position.cursor
                )
            for sample, cursor in self._open[shard]:
                assert cursor is not None, "a cursor behind a sample is never the start of a pass"
                return sample, cursor
            del self._open[shard]
            if not self._stream.repeat or position.cursor is None:  # a whole pass without a sample: it has none
                return None, None
            self._positions[shard] = Position(position.epoch + 1, position.taken)
