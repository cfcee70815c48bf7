"""``StreamFeed``: a stream as global batches with an exact position.

Slot ``s`` of ``n`` reads the shards ``l`` with ``l % n == s``; a rank reads its slots, in this process or in loader
processes. The position is where every shard stands, and moves in :meth:`StreamFeed.commit` only: what was read ahead is
read again. Each loader process sends one item per step with all of its slots, so that the DataLoader's turns and the
steps agree.

On failure: an error in a loader process comes through with its traceback, a loader process that dies raises; the
position stays behind the last commit. A position of other data, another number of shards or an incomplete one is
refused when it is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from elastictrain.data.randomness import seed_slot
from elastictrain.data.slots import Slot, SlotPlan, Work, mix
from elastictrain.data.sources import check_shards
from elastictrain.data.stream import Position, SampleStream, ShardReader
from elastictrain.data.workers import Reading, shield
from elastictrain.errors import CheckpointError, UnsupportedError, UsageError

PREFIX = "data.stream."


class _Read(NamedTuple):
    """One slot of one step, read."""

    slot: int
    batch: Any
    size: int
    positions: dict[int, Position]  # behind it, of the shards it was read from


class _After(NamedTuple):
    """Where the stream stands behind one step of this rank; filled while its slots are read."""

    unread: set[int]
    positions: dict[int, Position]


class _SlotReader:
    """Reads one slot, step after step."""

    def __init__(self, feed: StreamFeed, slot: int) -> None:
        start, stop = feed.plan.span(slot, feed.plan.global_batch_size)
        self._slot, self._size, self._step = slot, stop - start, feed.step
        self._seed, self._epoch = feed.seed, feed.current_epoch
        self._collate = feed.collate_fn or default_collate
        self._draws = feed.stream.draws_random or self._collate is not default_collate
        self._shards = feed.reader(range(slot, feed.num_shards, feed.plan.num_slots))

    def read(self, step: int) -> _Read:
        assert step == self._step, f"slot {self._slot} is read at step {step}, and stands at {self._step}"
        self._step += 1
        if not self._draws:
            return self._read()
        seed_slot(mix(self._seed, self._epoch, step, self._slot))  # the step itself is seeded after this
        return self._read()

    def _read(self) -> _Read:
        samples = self._shards.take(self._size)
        batch = self._collate(samples) if samples else None
        return _Read(self._slot, batch, len(samples), self._shards.moved())


class _Steps(IterableDataset[tuple[int, list[_Read]]]):
    """What a loader process sends: for each step, all slots of its share. Empty ones when the shards have ended."""

    def __init__(self, feed: StreamFeed, slots: Sequence[int]) -> None:
        self._feed = feed
        self._slots = slots

    def __iter__(self) -> Iterator[tuple[int, list[_Read]]]:
        worker = get_worker_info()
        assert worker is not None
        readers = [_SlotReader(self._feed, slot) for slot in self._slots[worker.id :: worker.num_workers]]
        for step in itertools.count(self._feed.step):
            yield step, [reader.read(step) for reader in readers]


class StreamFeed:
    """Global batches of a stream, as one rank sees them; see :class:`~elastictrain.data.slots.Feed`.

    Args:
        stream: what to read.
        plan: how a global batch is cut into slots.
        seed: of random numbers that reading draws, and of the order where the stream has no seed of its own.
        num_workers: loader processes of this rank, at most one per slot of its; 0 reads in this process.
        collate_fn: joins a list of samples into a batch; None is torch's default.

    Raises:
        UsageError: there are more slots than shards; with the remedy.
    """

    @property
    def steps_per_epoch(self) -> int | None:
        return None  # only reading tells

    @property
    def slots_per_epoch(self) -> int | None:
        return None

    def __init__(
        self,
        stream: SampleStream,
        plan: SlotPlan,
        *,
        seed: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.stream = stream
        self.plan = plan
        self.seed = seed
        self.collate_fn = collate_fn
        self.num_shards = stream.num_shards or plan.num_slots
        self.step = 0  # committed in this epoch
        self.current_epoch = 0
        self._order_seed = seed if stream.seed is None else stream.seed
        self._num_workers = num_workers
        self._check_shards()
        self._positions = self._start_of_pass()
        self._ranks: tuple[int, int] | None = None
        self._complete = True  # every shard's position is known here, not only this rank's
        self._loader: Iterator[tuple[int, list[_Read]]] | None = None
        self._reading = Reading()

    def _check_shards(self) -> None:
        slots, shards = self.plan.num_slots, self.num_shards
        if slots > shards:
            need = -(-self.plan.global_batch_size // shards)
            raise UsageError(
                f"the stream has {shards} shards and the run {slots} slots (global batch {self.plan.global_batch_size}"
                f" in microbatches of {self.plan.micro_batch_size}): raise --micro-batch-size to {need},"
                f" or give the stream num_shards={slots} when a run begins"
            )
        check_shards(self.stream.source, shards, instead="raise --micro-batch-size for fewer slots")

    def _start_of_pass(self) -> dict[int, Position]:
        return {shard: Position(self.current_epoch, 0) for shard in range(self.num_shards)}

    def reader(self, shards: Sequence[int]) -> ShardReader:
        """Reads some shards from the committed position on."""
        positions = {shard: self._positions[shard] for shard in shards}
        return ShardReader(self.stream, positions, num_shards=self.num_shards, seed=self._order_seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None, "_reading": None}  # goes to loader processes, which start no others

    @property
    def queued(self) -> int | None:
        return self._reading.queued

    def set_accumulation(self, num_slots: int) -> None:
        raise UnsupportedError(
            f"accumulate_grad_batches={num_slots}: a stream's global batch is fixed for the life of a run"
            f" ({self.plan.global_batch_size} samples); set global_batch_size instead"
        )

    # ---- reading ---------------------------------------------------------------------------------------------------

    def start(self, *, dp_rank: int, dp_size: int) -> None:
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        assert self._complete or self._ranks == (dp_rank, dp_size), (
            "other ranks know where their shards stand: load_state"
        )
        self.close()
        self._ranks = (dp_rank, dp_size)

    def epoch(self) -> Iterator[Work]:
        assert self._ranks is not None, "start() comes first"
        slots = self.plan.local(*self._ranks)
        read_slots = self._in_processes(slots) if self._num_workers and slots else self._in_process(slots)
        num_slots = self.plan.num_slots
        epoch = self.current_epoch
        for step in itertools.count(self.step):
            after = _After(set(slots), {})
            yield Work(
                epoch=epoch,
                step_in_epoch=step,
                num_slots=num_slots,
                num_samples=self.plan.global_batch_size if self.stream.repeat else None,
                is_last=False,
                slots=self._slots(read_slots(step), step * num_slots, after),
                first_batch_idx=step * num_slots,
                after={"stream": after},
            )

    @staticmethod
    def _slots(reads: Iterator[_Read], first: int, after: _After) -> Iterator[Slot]:
        for slot, batch, size, positions in reads:
            after.unread.discard(slot)
            after.positions.update(positions)
            yield Slot(slot, first + slot, batch, size)

    def _in_process(self, slots: Sequence[int]) -> Callable[[int], Iterator[_Read]]:
        readers = [_SlotReader(self, slot) for slot in slots]
        return lambda step: (reader.read(step) for reader in readers)

    def _in_processes(self, slots: Sequence[int]) -> Callable[[int], Iterator[_Read]]:
        workers = min(self._num_workers, len(slots))
        self.close()
        loader = DataLoader(
            _Steps(self, slots),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            worker_init_fn=shield,
            generator=torch.Generator().manual_seed(0),  # else it would draw from the training process' own
        )
        self._loader = iter(loader)
        self._reading.watch(self._loader)

        def read(step: int) -> Iterator[_Read]:
            items: list[list[_Read]] = []
            for place in range(len(slots)):
                if place < workers:
                    assert self._loader is not None, "the feed was closed while it was read"
                    reached, item = next(self._loader)
                    assert reached == step, f"step {step} is read when the loader stands at {reached}"
                    items.append(item)
                yield items[place % workers][place // workers]

        return read

    def close(self) -> None:
        self._loader = None  # the last reference: its processes are told to end

    # ---- position --------------------------------------------------------------------------------------------------

    def commit(self, work: Work) -> None:
        assert (work.epoch, work.step_in_epoch) == (self.current_epoch, self.step), (work.epoch, work.step_in_epoch)
        after: _After = work.after["stream"]
        assert not after.unread, f"slots {sorted(after.unread)} were not read"
        self._positions.update(after.positions)
        self._complete = self._ranks is not None and self._ranks[1] == 1
        self.step += 1

    def end_epoch(self) -> None:
        self.close()
        self.current_epoch += 1
        self.step = 0
        if not self.stream.repeat:
            self._positions = self._start_of_pass()
            self._complete = True

    def state(self) -> dict[str, Any]:
        return {
            "data.kind": "stream",
            "data.epoch": self.current_epoch,
            "data.steps": self.step,
            "data.num_shards": self.num_shards,
            "data.seed": self._order_seed,
            "data.source": self.stream.describe(),
        }

    def local_state(self) -> dict[str, Any]:
        """``{"data.stream.{shard}": position}`` of the shards of this rank's slots."""
        assert self._ranks is not None, "start() comes first"
        slots = self.plan.local(*self._ranks)
        return {
            f"{PREFIX}{shard}": position.to_json()
            for shard, position in self._positions.items()
            if shard % self.plan.num_slots in slots
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        if values.get("data.kind") != "stream":
            raise CheckpointError(
                f"the checkpoint's data is of kind {values.get('data.kind')!r}, this run's is a stream"
            )
        self._check_same(values)
        num_shards = int(values["data.num_shards"])
        names = [f"{PREFIX}{shard}" for shard in range(num_shards)]
        if missing := [name for name in names if name not in values]:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of {num_shards} shard positions, {missing[0]} the first"
            )
        self.num_shards = num_shards
        self._check_shards()
        self._order_seed = int(values["data.seed"])
        self.current_epoch = int(values["data.epoch"])
        self.step = int(values["data.steps"])
        self._positions = {shard: Position.from_json(values[name]) for shard, name in enumerate(names)}
        self._complete = True

    def _check_same(self, values: Mapping[str, Any]) -> None:
        """Refuse positions that mean something else here."""
        was = {**values["data.source"], "num_shards": values["data.num_shards"], "seed": values["data.seed"]}
        now = {
            **self.stream.describe(),
            "num_shards": self.stream.num_shards or was["num_shards"],
            "seed": was["seed"] if self.stream.seed is None else self.stream.seed,
        }
        if changed := [name for name in {**was, **now} if was.get(name) != now.get(name)]:
            name = next((name for name in changed if name != "digest"), "digest")
            shown = f"{name}={was.get(name)!r} in the checkpoint and {now.get(name)!r} now"
            if name == "digest":
                shown = "other file names or sizes in the checkpoint than now"
            raise CheckpointError(
                f"the stream has {shown}: give it the data and settings it was saved with, or begin another run"
            )


def _as_it_is(item: Any) -> Any:
    return item
