"""Slots of any iterable of batches: a DataLoader over an IterableDataset, one with batches of its own, a generator class.

Each item is one slot. Every rank iterates over all of them and computes its own, because nothing says how the iterable
could be cut. The position is the number of items used in the epoch; to come back there, items are read and dropped. All
generators are seeded before each item is read, so that an iterable that shuffles gives the same items on every rank and
every time. One that depends on anything else (a clock, a generator of its own that it goes on drawing from) cannot be
resumed exactly; only a :class:`~elastictrain.data.SampleStream` can.

On failure: an exception of the iterable is raised where the slot is read. One that ends before its ``len()`` ends the
epoch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elastictrain.data.randomness import seed_slot
from elastictrain.data.slots import Slot, Work, mix
from elastictrain.data.workers import Reading
from elastictrain.errors import CheckpointError

_END = object()


class IterableFeed:
    """A :class:`~elastictrain.data.slots.Feed` over an iterable of batches.

    Args:
        num_slots: items in a global batch.
    """

    def __init__(self, iterable: Iterable[Any], *, num_slots: int, seed: int) -> None:
        self._iterable, self._seed = iterable, seed
        self.num_slots = num_slots
        self._epoch = self._consumed = self._steps = 0
        self._dp_rank, self._dp_size = 0, 1
        self._reading = Reading()
        try:
            self._length: int | None = len(iterable)  # type: ignore[arg-type]
        except TypeError:
            self._length = None

    @property
    def steps_per_epoch(self) -> int | None:
        return None if self._length is None else math.ceil(self._length / self.num_slots)

    @property
    def slots_per_epoch(self) -> int | None:
        return self._length

    def state(self) -> dict[str, Any]:
        return {
            "data.kind": "iterable",
            "data.epoch": self._epoch,
            "data.consumed": self._consumed,
            "data.steps": self._steps,
        }

    @property
    def queued(self) -> int | None:
        return self._reading.queued

    def local_state(self) -> dict[str, Any]:
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        if values.get("data.kind") != "iterable":
            raise CheckpointError(
                f"the checkpoint's data is a {values.get('data.kind')}, this run's an iterable of batches"
            )
        self._epoch, self._consumed, self._steps = (values[f"data.{k}"] for k in ("epoch", "consumed", "steps"))

    def set_accumulation(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def start(self, *, dp_rank: int, dp_size: int) -> None:
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def epoch(self) -> Iterator[Work]:
        epoch, consumed, step = self._epoch, self._consumed, self._steps
        for name in ("sampler", "batch_sampler", "dataset"):
            if callable(set_epoch := getattr(getattr(self._iterable, name, None), "set_epoch", None)):
                set_epoch(epoch)
        items = self._items(epoch)
        for _ in range(consumed):
            if next(items, _END) is _END:
                raise CheckpointError(
                    f"the training data ended after fewer than the {consumed} batches that were used of this epoch:"
                    " it is not the data that the checkpoint was made with"
                )
        # One item is read ahead where the length is unknown: only so can a batch be known to be the last one.
        ahead = next(items, _END) if self._length is None else None
        # Where nothing is read between an item and its step, one seed serves both, on any number of ranks.
        is_seeded = self._length is not None and self.num_slots == 1
        while True:
            mine: list[Slot] = []
            count = 0
            while count < self.num_slots and (self._length is None or consumed + count < self._length):
                if self._length is None:
                    item, ahead = ahead, next(items, _END) if ahead is not _END else _END
                else:
                    item = next(items, _END)
                if item is _END:
                    break
                if count % self._dp_size == self._dp_rank:
                    mine.append(Slot(count, consumed + count, item, 1, is_seeded))
                count += 1
            if count == 0:
                return
            stop = consumed + count
            yield Work(
                epoch=epoch,
                step_in_epoch=step,
                num_slots=count,
                num_samples=count,
                is_last=stop == self._length if self._length is not None else ahead is _END,
                slots=iter(mine),
                first_batch_idx=consumed,
                after={"consumed": stop, "steps": step + 1},
            )
            consumed, step = stop, step + 1

    def _items(self, epoch: int) -> Iterator[Any]:
        """The items of an epoch, each read under a seed of its own."""
        seed_slot(mix(self._seed, epoch))
        items = iter(self._iterable)
        self._reading.watch(items)
        for number in itertools.count():
            seed_slot(mix(self._seed, epoch, number))
            if (item := next(items, _END)) is _END:
                return
            yield item

    def commit(self, work: Work) -> None:
        assert work.epoch == self._epoch
        self._consumed, self._steps = work.after["consumed"], work.after["steps"]

    def end_epoch(self) -> None:
        self._epoch += 1
        self._consumed = self._steps = 0

    def close(self) -> None:
        pass
