"""Validation, test and prediction data: the user's batches as they are, dealt out to ranks one by one.

Every batch is computed exactly once, whole, by one rank. Ranks take turns, in *rounds* of one batch each; in the last
round some have none, which :meth:`EvalLoader.rounds` says, so that a sharded model's collectives stay in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from elastictrain.data.order import Drawn
from elastictrain.data.randomness import generators_kept

_END = object()


class Round(NamedTuple):
    """One batch for each rank, or for fewer at the end."""

    batch_idx: int | None  # this rank's batch, counted over all ranks; None: this rank has none in this round
    batch: Any
    num_batches: int  # over all ranks


class EvalLoader:
    """One loader of a validation, seen from one rank.

    Args:
        loader: a ``DataLoader`` or any iterable of batches. One that shuffles gives the same order every time.
    """

    def __init__(self, loader: Any, *, dp_rank: int, dp_size: int, seed: int) -> None:
        self._dp_rank, self._dp_size, self._seed = dp_rank, dp_size, seed
        self._loader = loader
        self._is_cut = False  # does the loader yield this rank's batches only?
        try:
            self.num_batches: int | None = len(loader)
        except TypeError:
            self.num_batches = None
        is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if is_map_style and loader.batch_sampler is not None:
            is_shuffled = (
                type(loader.sampler) is not SequentialSampler or type(loader.batch_sampler) is not BatchSampler
            )
            if dp_size > 1 or is_shuffled:
                self._is_cut = True
                batches = Drawn(loader.batch_sampler, seed=seed) if is_shuffled else loader.batch_sampler
                self._loader = DataLoader(loader.dataset, batch_sampler=_Dealt(self, batches), **fetch_options(loader))

    def is_mine(self, batch_idx: int) -> bool:
        return batch_idx % self._dp_size == self._dp_rank

    def rounds(self) -> Iterator[Round]:
        with generators_kept():
            items = iter(self._loader)
        if self._is_cut:
            assert self.num_batches is not None
            for first in range(0, self.num_batches, self._dp_size):
                num_batches = min(self._dp_size, self.num_batches - first)
                has_one = self._dp_rank < num_batches
                yield Round(first + self._dp_rank if has_one else None, next(items) if has_one else None, num_batches)
            return
        first = 0
        while True:
            mine, count = None, 0
            while count < self._dp_size and (item := next(items, _END)) is not _END:
                mine = item if count == self._dp_rank else mine
                count += 1
            if count == 0:
                return
            yield Round(first + self._dp_rank if self._dp_rank < count else None, mine, count)
            if count < self._dp_size:
                return
            first += count

    @property
    def num_rounds(self) -> int | None:
        return None if self.num_batches is None else math.ceil(self.num_batches / self._dp_size)


class _Dealt:
    """Every ``dp_size``-th list of indices of the user's batch sampler."""

    def __init__(self, owner: EvalLoader, batches: Any) -> None:
        self._owner, self._batches = owner, batches

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches.drawn(0) if isinstance(self._batches, Drawn) else self._batches
        return (batch for i, batch in enumerate(batches) if self._owner.is_mine(i))


def fetch_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a loader that are not about order."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["prefetch_factor", "persistent_workers"] if loader.num_workers > 0 else []
    return {name: getattr(loader, name) for name in names}


def dataset_loader(dataset: Dataset[Any], *, batch_size: int, num_workers: int, collate_fn: Any) -> DataLoader[Any]:
    """The loader of a task's ``val_dataset()`` and the like: in order, in microbatches."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=False, num_workers=num_workers, collate_fn=collate_fn)
