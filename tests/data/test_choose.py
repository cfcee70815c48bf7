"""Which feed serves what a user gave, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastictrain.data import SampleStream
from elastictrain.data.choose import Chosen, Sizes, choose_feed
from elastictrain.data.evaluation import EvalLoader
from elastictrain.data.iterable_feed import IterableFeed
from elastictrain.data.map_feed import LoaderOptions, MapFeed
from elastictrain.data.slots import SlotPlan
from elastictrain.data.stream_feed import StreamFeed
from elastictrain.errors import CheckpointError, UsageError

DATA = TensorDataset(torch.arange(20))


def _choose(source: Any, total: int | None = None, micro: int | None = None, **options: Any) -> Chosen:
    wanted: dict[str, Any] = {"seed": 0, "dp_size": 1, "options": LoaderOptions(), "manual": False, **options}
    return choose_feed(source, Sizes(total, micro), **wanted)


def _epoch(chosen: Chosen, *, dp_rank: int = 0, dp_size: int = 1) -> list[list[list[int]]]:
    """The samples of an epoch: per global batch, per slot of this rank."""
    chosen.feed.start(dp_rank=dp_rank, dp_size=dp_size)
    steps = []
    for work in chosen.feed.epoch():
        steps.append([slot.batch[0].tolist() for slot in work.slots])
        chosen.feed.commit(work)
    chosen.feed.end_epoch()
    return steps


def _flat(steps: list[list[list[int]]]) -> list[int]:
    return [value for step in steps for slot in step for value in slot]


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "micro", "dp_size", "expected"),
    [
        (24, None, 1, (24, 3)),  # eight slots, on any number of ranks
        (24, None, 5, (24, 3)),
        (24, 5, 1, (24, 5)),
        (4, None, 1, (4, 1)),
        (64, None, 16, (64, 4)),  # more ranks than that: a slot for each
    ],
)
def test_sizes_of_a_dataset(total: int, micro: int | None, dp_size: int, expected: tuple[int, int]) -> None:
    chosen = _choose(DATA, total, micro, dp_size=dp_size)
    assert isinstance(chosen.feed, MapFeed)
    assert chosen.plan == SlotPlan(*expected)
    assert not chosen.by_microbatch


@pytest.mark.parametrize(
    ("total", "micro", "dp_size", "expected", "as_lightning"),
    [
        (None, None, 1, (4, 4), True),
        (None, None, 3, (12, 4), True),  # a loader's batch for each rank of the first start
        (16, None, 1, (16, 4), True),  # accumulation 4
        (18, None, 1, (18, 4), False),
        (16, 2, 1, (16, 2), False),
        (2, None, 1, (2, 2), False),
    ],
)
def test_sizes_of_a_loader(
    total: int | None, micro: int | None, dp_size: int, expected: tuple[int, int], as_lightning: bool
) -> None:
    chosen = _choose(DataLoader(DATA, batch_size=4), total, micro, dp_size=dp_size)
    assert chosen.plan == SlotPlan(*expected)
    assert chosen.by_microbatch == as_lightning
    assert chosen.accumulation == chosen.plan.num_slots


# ---- order ---------------------------------------------------------------------------------------------------------


def test_a_sequential_loader_keeps_its_order() -> None:
    chosen = _choose(DataLoader(DATA, batch_size=4), 8)
    assert _epoch(chosen) == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]], [[16, 17, 18, 19]]]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(DATA)},
        {"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)},
        {"sampler": WeightedRandomSampler([1.0] * 20, 20, replacement=False)},
        {"sampler": RandomSampler(DATA, generator=torch.Generator().manual_seed(3), num_samples=20)},
    ],
    ids=["shuffle", "random", "distributed", "weighted", "generator"],
)
def test_a_shuffled_epoch_is_the_same_everywhere(options: Any) -> None:
    one = _choose(DataLoader(DATA, batch_size=4, **options), 8)
    first, second = _flat(_epoch(one)), _flat(_epoch(one))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    shared = [_choose(DataLoader(DATA, batch_size=4, **options), 8) for _ in range(3)]
    ranks = [_epoch(chosen, dp_rank=rank, dp_size=3) for rank, chosen in enumerate(shared)]
    assert sorted(_flat(ranks[0]) + _flat(ranks[1]) + _flat(ranks[2])) == list(range(20))
    assert ranks[0][0][0] == first[:4]
    assert ranks[1][0][0] == first[4:8]


def test_sampling_with_replacement_stays_so() -> None:
    chosen = _choose(DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True, num_samples=400)), 8)
    assert len(_flat(_epoch(chosen))) == 400


def test_a_batch_sampler_of_the_user() -> None:
    class Pairs(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 19], [1, 18, 17], [2]])

    loader = DataLoader(DATA, batch_sampler=Pairs(SequentialSampler(DATA), 2, False))
    chosen = _choose(loader)
    assert chosen.by_microbatch and chosen.counts_batches
    assert _epoch(chosen) == [[[0, 19]], [[1, 18, 17]], [[2]]]
    assert _epoch(_choose(loader, 4), dp_rank=1, dp_size=2) == [[[1, 18, 17]], []]


# ---- iterables -----------------------------------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


class Unsized:
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((torch.tensor([i]),) for i in range(7))


class Sized(Unsized):
    def __len__(self) -> int:
        return 7


@pytest.mark.parametrize("source", [Unsized(), Sized()])
def test_an_iterable_of_batches(source: Any) -> None:
    chosen = _choose(source, 3, 1)
    assert isinstance(chosen.feed, IterableFeed)
    assert _epoch(chosen) == [[[0], [1], [2]], [[3], [4], [5]], [[6]]] == _epoch(chosen)
    chosen.feed.start(dp_rank=0, dp_size=1)
    assert [(w.num_slots, w.is_last) for w in chosen.feed.epoch()] == [(3, False), (3, False), (1, True)]
    assert _epoch(_choose(source, 3, 1), dp_rank=1, dp_size=2) == [[[1]], [[4]], []]


def test_an_iterable_goes_on_where_it_was() -> None:
    chosen = _choose(Unsized(), 3, 1)
    chosen.feed.start(dp_rank=0, dp_size=1)
    chosen.feed.commit(next(chosen.feed.epoch()))
    again = _choose(Unsized(), 3, 1)
    again.feed.load_state(chosen.feed.state())
    assert _epoch(again) == [[[3], [4], [5]], [[6]]]


def test_an_iterable_that_got_shorter() -> None:
    chosen = _choose(Sized(), 3, 1)
    chosen.feed.load_state({"data.kind": "iterable", "data.epoch": 0, "data.consumed": 9, "data.steps": 3})
    chosen.feed.start(dp_rank=0, dp_size=1)
    with pytest.raises(CheckpointError, match="ended after fewer than the 9 batches that were used"):
        next(chosen.feed.epoch())


def test_a_loader_over_an_iterable_dataset() -> None:
    chosen = _choose(DataLoader(Counting(), batch_size=4), 8)
    assert isinstance(chosen.feed, IterableFeed)
    assert chosen.accumulation == 2
    chosen.feed.start(dp_rank=0, dp_size=1)
    assert [[slot.batch.tolist() for slot in work.slots] for work in chosen.feed.epoch()] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10]],
    ]


def test_streams(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    stream = SampleStream.text(str(tmp_path / "a.txt"))
    assert isinstance(_choose(stream, 4, 2).feed, StreamFeed)
    chosen = _choose(DataLoader(stream, batch_size=2), 6)
    assert isinstance(chosen.feed, StreamFeed)
    assert chosen.plan == SlotPlan(6, 2)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "total", "micro", "message"),
    [
        (DATA, None, None, r"the global batch size is not known: give --global-batch-size"),
        (DATA, 4, 8, r"global_batch_size=4 is smaller than micro_batch_size=8"),
        (TensorDataset(torch.empty(0)), 4, None, "the training dataset is empty"),
        (DataLoader(TensorDataset(torch.empty(0)), sampler=[]), 4, None, "the training dataset is empty"),
        ([DataLoader(DATA), DataLoader(DATA)], 4, None, r"the training data is a list: for several loaders combine"),
        ({"a": DataLoader(DATA)}, 4, None, r"the training data is a dict"),
        (Counting(), 4, None, r"train_dataset\(\) gave a Counting, an IterableDataset that cannot say where it stands"),
        (3, 4, None, "the training data is a int"),
        (Unsized(), 4, None, "global_batch_size=4 and batches of unknown size: give micro_batch_size as well"),
        (DataLoader(Counting(), batch_size=4), 6, None, "global_batch_size=6 is not a multiple of 4"),
        (DataLoader(Counting(), batch_size=4), 8, 2, "micro_batch_size=2, but the data comes in batches of 4"),
    ],
)
def test_what_cannot_work(source: Any, total: int | None, micro: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        _choose(source, total, micro)
    assert "\n" not in str(refused.value)


def test_whole_batches_cannot_be_shared_by_manual_optimisation() -> None:
    with pytest.raises(UsageError, match="manual optimisation on several ranks shares out the samples"):
        _choose(Sized(), 2, 1, manual=True, dp_size=2)
    assert _choose(Sized(), 1, 1, manual=True).accumulation == 1


# ---- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "loader",
    [DataLoader(DATA, batch_size=3), DataLoader(DATA, batch_size=3, shuffle=True), Sized(), Unsized()],
    ids=["loader", "shuffled", "sized", "unsized"],
)
def test_every_evaluation_batch_is_dealt_once(loader: Any, dp_size: int) -> None:
    ranks = [list(EvalLoader(loader, dp_rank=r, dp_size=dp_size, seed=0).rounds()) for r in range(dp_size)]
    assert len({len(rounds) for rounds in ranks}) == 1, "every rank takes part in every round"
    dealt = {turn.batch_idx: turn.batch for rounds in ranks for turn in rounds if turn.batch_idx is not None}
    assert sorted(dealt) == list(range(7))
    for turns in zip(*ranks, strict=True):
        assert sum(turn.batch_idx is not None for turn in turns) == turns[0].num_batches
    alone = {turn.batch_idx: turn.batch for turn in EvalLoader(loader, dp_rank=0, dp_size=1, seed=0).rounds()}
    assert {i: b[0].tolist() for i, b in dealt.items()} == {i: b[0].tolist() for i, b in alone.items() if i is not None}


class Shuffling(IterableDataset[Any]):
    """Shuffles when iteration begins and adds noise to each item, as a generator does: late, and in the caller's process."""

    def __iter__(self) -> Iterator[Any]:
        items = list(range(12))
        random.shuffle(items)
        for item in items:
            yield item, torch.rand(()).item(), np.random.rand()


def test_an_iterable_that_shuffles_is_the_same_everywhere_and_again() -> None:
    def run(dp_rank: int, dp_size: int, skip: int = 0) -> list[Any]:
        chosen = _choose(DataLoader(Shuffling(), batch_size=None), 3, 1)
        if skip:
            state = {"data.kind": "iterable", "data.epoch": 0, "data.consumed": skip, "data.steps": skip // 3}
            chosen.feed.load_state(state)
        chosen.feed.start(dp_rank=dp_rank, dp_size=dp_size)
        found = []
        for work in chosen.feed.epoch():
            found += [slot.batch for slot in work.slots]
            random.seed(dp_rank + 77)  # the step draws whatever it draws
            torch.manual_seed(dp_rank)
        return found

    alone = run(0, 1)
    assert sorted(item for item, *_ in alone) == list(range(12))
    assert sorted(run(0, 2) + run(1, 2)) == sorted(alone)
    assert run(0, 1, skip=6) == alone[6:]
