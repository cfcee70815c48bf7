"""Which feed serves what a user gave: a dataset, a ``DataLoader``, or any iterable of batches.

A sequential loader keeps its order; a shuffling one gets our seeded permutation; any other sampler is asked once per
epoch under a seed of its own. What the trainer cannot keep a position in is refused here, before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from elastictrain.data.evaluation import fetch_options
from elastictrain.data.iterable_feed import IterableFeed
from elastictrain.data.map_feed import LoaderOptions, MapFeed
from elastictrain.data.order import Drawn, Order, Sequential, Shuffled
from elastictrain.data.slots import Feed, SlotPlan
from elastictrain.data.stream import SampleStream
from elastictrain.data.stream_feed import StreamFeed
from elastictrain.errors import UnsupportedError, UsageError

DEFAULT_NUM_SLOTS = 8  # enough for eight ranks to share; fixed, so that a run is the same on any number of them


@dataclass(frozen=True)
class Sizes:
    """Batch sizes as asked for; None where they were not."""

    global_batch_size: int | None
    micro_batch_size: int | None


@dataclass(frozen=True)
class Chosen:
    """A feed and how its slots are weighted."""

    feed: Feed
    plan: SlotPlan  # of an iterable: sizes in batches
    by_microbatch: bool  # each slot counts the same, as under lightning.Trainer; else by its samples
    accumulation: int  # slots in a full global batch
    counts_batches: bool = False  # sizes are in the data's own batches, not in samples


def choose_feed(
    source: Any,
    sizes: Sizes,
    *,
    seed: int,
    dp_size: int,
    options: LoaderOptions,
    manual: bool,
) -> Chosen:
    """The feed for training data.

    Args:
        source: a map-style dataset, a :class:`SampleStream`, a ``DataLoader``, or an iterable of batches.
        dp_size: data-parallel ranks of the first start; without a global batch size each of them takes one loader batch.
        options: how a dataset is loaded; a ``DataLoader`` brings its own.
        manual: the user's code is the step (manual optimisation): a rank gets its share of a global batch as one batch.

    Raises:
        UsageError: sizes that do not fit, or data that cannot be resumed.
    """
    if isinstance(source, DataLoader):
        return _from_loader(source, sizes, seed=seed, dp_size=dp_size, manual=manual)
    if isinstance(source, SampleStream):
        return _from_stream(source, slot_plan(sizes, None, dp_size), options, seed=seed, dp_size=dp_size, manual=manual)
    if isinstance(source, IterableDataset):
        raise UnsupportedError(
            f"train_dataset() gave a {type(source).__name__}, an IterableDataset that cannot say where it stands:"
            " use elastictrain.data.SampleStream, or return a DataLoader from train_dataloader()"
        )
    if callable(getattr(source, "__getitem__", None)) and callable(getattr(source, "__len__", None)):
        if isinstance(source, (list, tuple, Mapping)):
            raise UnsupportedError(
                f"the training data is a {type(source).__name__}: for several loaders combine their datasets"
                " (torch.utils.data.StackDataset or ConcatDataset); for a list of batches give an object with __iter__"
            )
        if len(source) == 0:
            raise UsageError("the training dataset is empty")
        plan = slot_plan(sizes, None, dp_size)
        feed_ = MapFeed(
            source, order=Shuffled(len(source), seed=seed), plan=plan, seed=seed, options=options, merge=manual
        )
        return Chosen(feed_, plan, by_microbatch=False, accumulation=plan.num_slots)
    if callable(getattr(source, "__iter__", None)):
        return _from_iterable(source, sizes, seed=seed, dp_size=dp_size, batch_size=None, manual=manual)
    raise UsageError(f"the training data is a {type(source).__name__}: give a dataset, a DataLoader or an iterable")


def slot_plan(sizes: Sizes, batch_size: int | None, dp_size: int) -> SlotPlan:
    """Sizes of the global batch and of its slots."""
    micro, total = sizes.micro_batch_size, sizes.global_batch_size
    if batch_size is not None:
        total = total or (micro or batch_size) * dp_size
        micro = micro or min(batch_size, total)
    if total is None:
        raise UsageError(
            "the global batch size is not known: give --global-batch-size (Trainer(global_batch_size=…)),"
            " or set batch_size on the task"
        )
    if micro is None:
        num_slots = min(total, max(DEFAULT_NUM_SLOTS, dp_size))
        micro = math.ceil(total / num_slots)
    return SlotPlan(total, micro)


def _from_loader(loader: DataLoader[Any], sizes: Sizes, *, seed: int, dp_size: int, manual: bool) -> Chosen:
    options = LoaderOptions(
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        other={k: v for k, v in fetch_options(loader).items() if k not in ("num_workers", "collate_fn")},
    )
    dataset = loader.dataset
    if isinstance(dataset, SampleStream):
        plan = slot_plan(sizes, loader.batch_size or 1, dp_size)
        return _from_stream(dataset, plan, options, seed=seed, dp_size=dp_size, manual=manual)
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None:
        return _from_iterable(loader, sizes, seed=seed, dp_size=dp_size, batch_size=loader.batch_size, manual=manual)
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise UsageError("the training dataset is empty")
    if type(loader.batch_sampler) is not BatchSampler:
        return _from_batches(loader, options, sizes, seed=seed, dp_size=dp_size, manual=manual)
    plan = slot_plan(sizes, loader.batch_size, dp_size)
    feed_ = MapFeed(
        dataset,
        order=_order(loader, seed=seed),
        plan=plan,
        seed=seed,
        options=options,
        drop_last=loader.drop_last,
        merge=manual,
    )
    # Slots that are the loader's own batches count the same, as lightning's accumulation has it.
    is_lightning = plan.micro_batch_size == loader.batch_size and plan.global_batch_size % plan.micro_batch_size == 0
    return Chosen(feed_, plan, by_microbatch=is_lightning, accumulation=plan.num_slots)


def _from_stream(
    stream: SampleStream, plan: SlotPlan, options: LoaderOptions, *, seed: int, dp_size: int, manual: bool
) -> Chosen:
    if manual:  # one slot for each rank: the user's code is the step
        if dp_size > 1 and not stream.repeat:
            raise UnsupportedError(
                "manual optimisation on several ranks needs a share for every rank, and a stream that ends has none for"
                " some at its end: give it repeat=True and --max-steps"
            )
        plan = SlotPlan(plan.global_batch_size, math.ceil(plan.global_batch_size / dp_size))
    feed = StreamFeed(stream, plan, seed=seed, num_workers=options.num_workers, collate_fn=options.collate_fn)
    return Chosen(feed, plan, by_microbatch=False, accumulation=plan.num_slots)


def _order(loader: DataLoader[Any], *, seed: int) -> Order:
    sampler = loader.sampler
    size = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return Sequential(size)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return Shuffled(size, seed=seed)
    if isinstance(sampler, DistributedSampler):  # ranks are shared out here
        return Shuffled(size, seed=seed) if sampler.shuffle else Sequential(size)
    return Drawn(sampler, seed=seed)


def _from_batches(
    loader: DataLoader[Any], options: LoaderOptions, sizes: Sizes, *, seed: int, dp_size: int, manual: bool
) -> Chosen:
    """A batch sampler of the user's: each of its batches is one slot, each "sample" of the feed one batch."""
    _whole_batches(manual, dp_size)
    accumulation = _accumulation(sizes, getattr(loader.batch_sampler, "batch_size", None), dp_size)
    plan = SlotPlan(accumulation, 1)
    feed = MapFeed(
        _Lists(loader.dataset),
        order=Drawn(cast("Any", loader.batch_sampler), seed=seed),
        plan=plan,
        seed=seed,
        options=options,
    )
    return Chosen(feed, plan, by_microbatch=True, accumulation=accumulation, counts_batches=True)


class _Lists:
    """A dataset indexed by lists of indices: one list, one batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, lists: list[list[Any]]) -> list[Any]:
        (indices,) = lists
        if callable(many := getattr(self.dataset, "__getitems__", None)):
            return list(many(indices))
        return [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)


def _whole_batches(manual: bool, dp_size: int) -> None:
    if manual and dp_size > 1:
        raise UnsupportedError(
            "manual optimisation on several ranks shares out the samples of each global batch, and this data comes in"
            " whole batches: use a DataLoader over a map-style dataset, without a batch sampler of its own"
        )


def _from_iterable(
    source: Any, sizes: Sizes, *, seed: int, dp_size: int, batch_size: int | None, manual: bool
) -> Chosen:
    _whole_batches(manual, dp_size)
    accumulation = _accumulation(sizes, batch_size, dp_size)
    feed = IterableFeed(source, num_slots=accumulation, seed=seed)
    plan = SlotPlan(accumulation, 1)
    return Chosen(feed, plan, by_microbatch=True, accumulation=accumulation, counts_batches=True)


def _accumulation(sizes: Sizes, batch_size: int | None, dp_size: int) -> int:
    """Batches in a global batch, where the data comes in batches of its own."""
    micro = sizes.micro_batch_size or batch_size
    if sizes.global_batch_size is None:
        return dp_size
    if micro is None:
        raise UsageError(
            f"global_batch_size={sizes.global_batch_size} and batches of unknown size: give micro_batch_size as well,"
            " the samples in one batch of the data"
        )
    if batch_size is not None and micro != batch_size:
        raise UsageError(f"micro_batch_size={micro}, but the data comes in batches of {batch_size}: leave it out")
    if sizes.global_batch_size % micro:
        raise UsageError(
            f"global_batch_size={sizes.global_batch_size} is not a multiple of {micro}, the samples in one batch of the data"
        )
    return sizes.global_batch_size // micro
