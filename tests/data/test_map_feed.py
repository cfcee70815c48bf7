"""Map-style data: every sample once an epoch, in one order, on any number of ranks and loader workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, WeightedRandomSampler

from elastictrain.data.map_feed import LoaderOptions, MapFeed
from elastictrain.data.order import Drawn, Sequential, Shuffled
from elastictrain.data.slots import Permutation, SlotPlan, mix, named_seed
from elastictrain.errors import CheckpointError, UsageError


class Numbers(Dataset[Any]):
    """Sample i is (i, one random number of each generator)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def _feed(size: int = 103, *, workers: int = 0, shuffle: bool = True, **options: Any) -> MapFeed:
    order: Any = Shuffled(size, seed=5) if shuffle else Sequential(size)
    plan = options.pop("plan", SlotPlan(24, 5))
    loading = LoaderOptions(num_workers=workers, collate_fn=list)
    return MapFeed(Numbers(size), order=options.pop("order", order), plan=plan, seed=5, options=loading, **options)


def _run(dp_size: int, steps: int, state: dict[str, Any], *, workers: int = 0, **options: Any) -> tuple[Any, Any]:
    """So many steps on ``dp_size`` ranks from ``state``; {(epoch, batch_idx): samples} and the state after."""
    feeds = [_feed(workers=workers, **options) for _ in range(dp_size)]
    for rank, feed in enumerate(feeds):
        if state:
            feed.load_state(state)
        feed.start(dp_rank=rank, dp_size=dp_size)
    seen: dict[tuple[int, int], Any] = {}
    epochs = [feed.epoch() for feed in feeds]
    for _ in range(steps):
        works = [next(epoch) for epoch in epochs]
        assert len({(w.epoch, w.step_in_epoch, w.num_slots, w.num_samples, w.is_last) for w in works}) == 1
        for work in works:
            for slot in work.slots:
                assert len(slot.batch) == slot.size
                assert seen.setdefault((work.epoch, slot.batch_idx), slot.batch) is slot.batch
        for feed, work in zip(feeds, works, strict=True):
            feed.commit(work)
        if works[0].is_last:
            assert [next(epoch, None) for epoch in epochs] == [None] * dp_size
            for feed in feeds:
                feed.end_epoch()
            epochs = [feed.epoch() for feed in feeds]
    states = [feed.state() for feed in feeds]
    assert all(s == states[0] for s in states)
    for feed in feeds:
        feed.close()
    return seen, states[0]


REFERENCE_STEPS = 12  # 103 samples are 5 steps of 24 an epoch


def test_every_sample_once_an_epoch() -> None:
    seen, state = _run(1, REFERENCE_STEPS, {})
    for epoch in (0, 1):
        used = [sample[0] for (e, _), batch in sorted(seen.items()) if e == epoch for sample in batch]
        assert sorted(used) == list(range(103))
        assert used != sorted(used)
    assert [len(batch) for (e, i), batch in sorted(seen.items()) if e == 0 and i < 6] == [5, 5, 5, 5, 4, 5]
    assert state == {
        "data.kind": "map",
        "data.size": 103,
        "data.epoch": 2,
        "data.consumed": 48,
        "data.batches": 10,
        "data.steps": 2,
    }


@pytest.mark.parametrize(
    ("chain", "workers"), [([(4, 3), (3, 2), (1, 1), (2, 4), (5, 2)], 0), ([(4, 3), (3, 2), (2, 4), (1, 3)], 2)]
)
def test_ranks_come_and_go(chain: list[tuple[int, int]], workers: int) -> None:
    reference, end = _run(1, REFERENCE_STEPS, {})
    together: dict[Any, Any] = {}
    state: dict[str, Any] = {}
    for dp_size, steps in chain:
        seen, state = _run(dp_size, steps, state, workers=workers)
        assert not together.keys() & seen.keys()
        together |= seen
    assert together == reference, "the same samples, and the same random numbers in them"
    assert state == end


def test_what_was_not_committed_is_read_again() -> None:
    feed = _feed()
    feed.start(dp_rank=0, dp_size=1)
    works = feed.epoch()
    first = [slot.batch for slot in next(works).slots]
    _ = [slot.batch for slot in next(works).slots]
    again = _feed()
    again.load_state(feed.state())
    again.start(dp_rank=0, dp_size=1)
    assert [slot.batch for slot in next(again.epoch()).slots] == first


def test_a_user_order_is_kept() -> None:
    seen, _ = _run(2, 5, {}, shuffle=False)
    assert [s[0] for _, batch in sorted(seen.items()) for s in batch] == list(range(103))


def test_a_sampler_is_drawn_once_and_the_same_everywhere() -> None:
    def sampler() -> Any:
        return Drawn(WeightedRandomSampler([1.0] * 50 + [3.0] * 53, num_samples=60), seed=1)

    reference, _ = _run(1, 6, {}, order=sampler())
    seen, _ = _run(3, 6, {}, order=sampler())
    assert seen == reference
    first, second = ([s[0] for (e, _), b in sorted(seen.items()) if e == epoch for s in b] for epoch in (0, 1))
    assert len(first) == 60 and first != second


def test_drop_last_leaves_out_what_fills_no_slot() -> None:
    seen, _ = _run(1, 5, {}, drop_last=True)
    assert sum(len(batch) for batch in seen.values()) == 100
    assert _feed(drop_last=True).slots_per_epoch == 21  # four global batches of five slots, and one slot


def test_a_share_for_every_rank() -> None:
    seen: list[list[int]] = []
    for rank in range(3):
        feed = _feed(merge=True, shuffle=False)
        feed.start(dp_rank=rank, dp_size=3)
        (slot,) = next(feed.epoch()).slots
        seen.append([sample[0] for sample in slot.batch])
    assert seen == [list(range(8)), list(range(8, 16)), list(range(16, 24))]


def test_other_data_is_refused() -> None:
    state = _feed(103).state()
    with pytest.raises(CheckpointError, match="the dataset has 104 samples, and had 103 when the checkpoint was saved"):
        _feed(104).load_state(state)
    with pytest.raises(CheckpointError, match="the checkpoint's data is a stream, this run's a map-style dataset"):
        _feed(103).load_state({"data.kind": "stream"})


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise RuntimeError(f"cannot decode sample {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_dataset_comes_through(workers: int) -> None:
    options = LoaderOptions(num_workers=workers, collate_fn=list)
    feed = MapFeed(Broken(20), order=Sequential(20), plan=SlotPlan(4, 2), seed=0, options=options)
    feed.start(dp_rank=0, dp_size=1)
    with pytest.raises(RuntimeError, match="cannot decode sample 7"):
        [list(work.slots) for work in feed.epoch()]


@pytest.mark.parametrize("size", [1, 2, 3, 24, 103, 1000, 4096, 4097])
def test_permutations(size: int) -> None:
    orders = []
    for epoch in range(3):
        permutation = Permutation(size, seed=1, epoch=epoch)
        order = permutation(np.arange(size)).tolist()
        assert sorted(order) == list(range(size))
        assert permutation(np.array([size - 1])).tolist() == [order[-1]]
        orders.append(tuple(order))
    assert size < 24 or len(set(orders)) == 3


def test_a_permutation_of_a_billion_costs_nothing() -> None:
    order = Permutation(10**9, seed=0, epoch=0)(np.arange(10**9 - 5, 10**9))
    assert len(set(order.tolist())) == 5


def test_permutations_are_fair() -> None:
    """Where each of 10 elements lands over 5,000 seeds: chi-square over the 100 cells, 81 degrees of freedom."""
    counts = np.zeros((10, 10))
    for seed in range(5000):
        counts[np.arange(10), Permutation(10, seed=seed, epoch=0)(np.arange(10))] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 150


def test_seeds_are_spread_and_fixed() -> None:
    assert mix(0, 1, 2) == mix(0, 1, 2) != mix(0, 2, 1)
    assert len({mix(0, step, slot) for step in range(100) for slot in range(100)}) == 10_000
    assert named_seed(0, "a.weight") == named_seed(0, "a.weight") != named_seed(0, "b.weight")
    # Order, dropout and weights of every run hang on these: a change is a change of everybody's numbers.
    assert (mix(1, 2, 3), named_seed(1, "w")) == (3851293329796251419, 3075193292013971818)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 8), "global_batch_size=4 is smaller than micro_batch_size=8: raise the first to 8, or lower the second"),
        ((0, 1), "global_batch_size=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SlotPlan(*sizes)
