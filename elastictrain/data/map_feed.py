"""Slots of a map-style dataset. The position is one number: samples used in this epoch.

Each slot is fetched by its index list, in this process or in loader workers, and its random numbers are seeded by (seed,
epoch, position), so that an augmentation gives the same sample on any number of ranks and workers.

On failure: an exception in ``__getitem__`` or ``collate_fn`` is raised where the slot is read, with its own traceback;
a loader worker that is killed raises as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, Dataset

from elastictrain.data.order import Order
from elastictrain.data.randomness import generators_kept, seed_slot
from elastictrain.data.slots import Slot, SlotPlan, Work, mix
from elastictrain.data.workers import Reading, shield
from elastictrain.errors import CheckpointError


@dataclass(frozen=True)
class LoaderOptions:
    """How samples are fetched: the parts of a ``DataLoader`` that are not about order."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    other: Mapping[str, Any] = field(default_factory=dict)  # pin_memory, prefetch_factor, worker_init_fn, …

    def keywords(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_workers": self.num_workers, "collate_fn": self.collate_fn, **self.other}
        if self.num_workers:
            options["worker_init_fn"] = functools.partial(_begin_worker, options.get("worker_init_fn"))
        return options


def _begin_worker(users: Callable[[int], None] | None, worker: int) -> None:
    shield(worker)
    if users is not None:
        users(worker)


class _Key(NamedTuple):
    """What a loader is asked for: some samples, under one seed."""

    seed: int
    indices: list[Any]


class _Seeded(Dataset[Any]):
    """The user's dataset, asked for one slot at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, key: _Key) -> list[Any]:
        seed_slot(key.seed)  # in the training process too, whose own step is seeded after this
        if callable(many := getattr(self.dataset, "__getitems__", None)):
            return list(many(key.indices))
        return [self.dataset[index] for index in key.indices]

    def __getitem__(self, key: _Key) -> list[Any]:
        return self.__getitems__(key)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:  # worker_init_fn may look for the user's attributes
        if name in ("dataset", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class MapFeed:
    """A :class:`~elastictrain.data.slots.Feed` over a map-style dataset.

    Args:
        order: which samples an epoch visits.
        plan: how they become global batches and slots.
        drop_last: leave out samples at the end of an epoch that do not fill a slot, as the user's loader did.
        merge: share the samples of a global batch evenly over ranks, one slot each (manual optimisation: the user's
            code is the step, and gets its share as one batch).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        order: Order,
        plan: SlotPlan,
        seed: int,
        options: LoaderOptions,
        drop_last: bool = False,
        merge: bool = False,
    ) -> None:
        self._dataset, self._order, self._plan, self._seed, self._options = dataset, order, plan, seed, options
        self._drop_last, self._merge = drop_last, merge
        self._epoch = 0
        self._consumed = 0  # samples of this epoch that were used
        self._batches = 0  # microbatches of this epoch that were used, over all ranks
        self._steps = 0
        self._dp_rank, self._dp_size = 0, 1
        self._loader: DataLoader[Any] | None = None
        self._reading = Reading()

    # ---- position --------------------------------------------------------------------------------------------------

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self._size(self._epoch) / self._plan.global_batch_size)

    @property
    def slots_per_epoch(self) -> int:
        full, rest = divmod(self._size(self._epoch), self._plan.global_batch_size)
        if self._merge:
            return full + (rest > 0)
        return full * self._plan.num_slots + math.ceil(rest / self._plan.micro_batch_size)

    @property
    def queued(self) -> int | None:
        return self._reading.queued

    def _size(self, epoch: int) -> int:
        size = self._order.size(epoch)
        return size - size % self._plan.micro_batch_size if self._drop_last else size

    def state(self) -> dict[str, Any]:
        return {
            "data.kind": "map",
            "data.size": self._order.size(self._epoch),
            "data.epoch": self._epoch,
            "data.consumed": self._consumed,
            "data.batches": self._batches,
            "data.steps": self._steps,
        }

    def local_state(self) -> dict[str, Any]:
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        if values.get("data.kind") != "map":
            raise CheckpointError(
                f"the checkpoint's data is a {values.get('data.kind')}, this run's a map-style dataset"
            )
        self._epoch = values["data.epoch"]
        if (there := values["data.size"]) != (here := self._order.size(self._epoch)):
            raise CheckpointError(
                f"the dataset has {here} samples, and had {there} when the checkpoint was saved: its position means"
                " nothing here; bring the same data, or start a new run directory"
            )
        self._consumed, self._batches, self._steps = (
            values["data.consumed"],
            values["data.batches"],
            values["data.steps"],
        )

    def set_accumulation(self, num_slots: int) -> None:
        micro = self._plan.micro_batch_size
        self._plan = SlotPlan(num_slots * micro, micro)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def start(self, *, dp_rank: int, dp_size: int) -> None:
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._loader = DataLoader(
            _Seeded(self._dataset), batch_sampler=cast("Any", _Keys(self)), **self._options.keywords()
        )

    def epoch(self) -> Iterator[Work]:
        assert self._loader is not None, "start() comes first"
        epoch, size = self._epoch, self._size(self._epoch)
        with generators_kept():  # a loader draws a base seed when it starts
            batches = iter(self._loader)
        self._reading.watch(batches)
        start, step, first_batch = self._consumed, self._steps, self._batches
        while start < size:
            stop = min(start + self._plan.global_batch_size, size)
            num_slots = 1 if self._merge else math.ceil((stop - start) / self._plan.micro_batch_size)
            yield Work(
                epoch=epoch,
                step_in_epoch=step,
                num_slots=num_slots,
                num_samples=stop - start,
                is_last=stop == size,
                slots=self._read(batches, stop - start, first_batch),
                first_batch_idx=first_batch,
                after={"consumed": stop, "batches": first_batch + num_slots, "steps": step + 1},
            )
            start, step, first_batch = stop, step + 1, first_batch + num_slots

    def _read(self, batches: Iterator[Any], num_samples: int, first_batch: int) -> Iterator[Slot]:
        for slot, (start, stop) in self._local(num_samples):
            yield Slot(slot, first_batch + slot, next(batches), stop - start)

    def _local(self, num_samples: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """This rank's slots of a global batch, with the samples of each."""
        if self._merge:
            start, stop = (num_samples * r // self._dp_size for r in (self._dp_rank, self._dp_rank + 1))
            if stop > start:
                yield self._dp_rank, (start, stop)
            return
        for slot in self._plan.local(self._dp_rank, self._dp_size):
            start, stop = self._plan.span(slot, num_samples)
            if stop > start:
                yield slot, (start, stop)

    def keys(self) -> Iterator[_Key]:
        """What the loader fetches, from the position to the end of the epoch."""
        epoch, size, start = self._epoch, self._size(self._epoch), self._consumed
        while start < size:
            stop = min(start + self._plan.global_batch_size, size)
            for _, (first, last) in self._local(stop - start):
                indices = self._order.indices(epoch, start + first, start + last)
                yield _Key(mix(self._seed, epoch, start + first), indices)
            start = stop

    def commit(self, work: Work) -> None:
        assert work.epoch == self._epoch
        self._consumed, self._batches, self._steps = (work.after[k] for k in ("consumed", "batches", "steps"))

    def end_epoch(self) -> None:
        self._epoch += 1
        self._consumed = self._batches = self._steps = 0

    def close(self) -> None:
        self._loader = None


class _Keys:
    """The batch sampler of the loader: iterated anew for every epoch."""

    def __init__(self, feed: MapFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[_Key]:
        return self._feed.keys()
