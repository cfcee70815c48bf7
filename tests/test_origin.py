"""What a user's objects were before training comes back into the same objects; what could not come back is found before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from elastictrain import Callback, Task
from elastictrain.origin import DATA_BYTES, MANY, CannotCopy, Origin, why_not


class Counting(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.best = {"loss": 3.0}


class History:
    def __init__(self) -> None:
        self.items = {0: "first"}
        self.corpus = torch.arange(DATA_BYTES)
        self.note = np.zeros(3)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> str:
        return self.items[at]

    def __setitem__(self, at: int, item: str) -> None:
        self.items[at] = item


class Model(Task):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(DATA_BYTES, dtype=torch.float32))
        self.weights = [self.inner.weight]
        self.history: list[Any] = [1]
        self.corpus = torch.arange(DATA_BYTES)
        self.averages, self.states = np.zeros(3), bytearray(3)
        self.large = np.zeros(DATA_BYTES)
        self.log_book = History()
        self.samples = TensorDataset(torch.arange(4))
        self.rows = [[number] for number in range(MANY + 1)]
        self.inner.register_forward_hook(self.note)

    def note(self, *_: Any) -> None:
        self.history.append("forward")


class Wrapped(nn.Linear):
    """What FSDP makes of a layer."""


def test_the_same_objects_are_what_they_were() -> None:
    task, callback = Model(), Counting()
    inner, corpus, samples, rows, norm = task.inner, task.corpus, task.samples, task.rows, task.norm
    large, log_book = task.large, task.log_book
    names = set(task.__dict__)
    origin = Origin([task, callback])
    assert origin.has_weights
    for _ in range(2):  # as often as a generation ends
        callback.seen.append(7)
        callback.best["loss"] = 1.0
        task.history.append(2)
        task.configured = True
        task.add_module("more", nn.Linear(1, 1))
        inner.__class__ = Wrapped
        shard = nn.Parameter(torch.zeros(1))
        inner._parameters["weight"] = shard
        inner.register_forward_hook(lambda *_: pytest.fail("a hook of the generation before"))
        table: Any = task.table
        table.zero_()
        task.train()
        task.norm(torch.randn(4, 3))
        task.corpus[0] = -1
        task.averages += 1
        task.states[0] = 7
        task.log_book[1] = "second"
        task.log_book.note += 1

        origin.restore()
        assert (callback.seen, callback.best, task.history) == ([], {"loss": 3.0}, [1])
        assert set(task.__dict__) == names and "more" not in dict(task.named_children())
        assert task.inner is inner and type(inner) is nn.Linear and task.norm is norm
        assert inner.weight is not shard and inner.weight.shape == (3, 3)
        assert inner.weight is task.tied.weight is task.weights[0]
        restored: Any = task.table
        assert torch.equal(restored, torch.arange(DATA_BYTES, dtype=torch.float32))
        assert torch.equal(task.norm.running_mean, torch.zeros(3)) and task.norm.num_batches_tracked == 0
        assert task.corpus is corpus and task.samples is samples and task.rows is rows, "data is shared"
        assert not task.averages.any() and task.states == bytearray(3) and task.large is large
        assert task.log_book is not log_book and task.log_book.items == {0: "first"} and not task.log_book.note.any()
        assert task.log_book.corpus is log_book.corpus, "data is shared wherever it is"
        task.inner(torch.ones(1, 3))
        assert task.history == [1, "forward"], "the hook is the module's own, and sees it"
        task.history.remove("forward")


def test_without_weights_nothing_is_missing() -> None:
    with torch.device("meta"):
        origin = Origin([nn.Linear(2, 2)])
    assert not origin.has_weights and not Origin([nn.Module()]).has_weights


def test_what_cannot_be_copied_is_named() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"lock": threading.Lock()}

    with pytest.raises(CannotCopy, match=r"Guarded\.parts, a dict \(cannot pickle '_thread\.lock' object\)"):
        Origin([nn.Sequential(Guarded())])
    with pytest.raises(CannotCopy, match="a lazy weight of LazyLinear"):
        Origin([nn.LazyLinear(3)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([])


def test_loaders_that_may_not_begin_again() -> None:
    data = TensorDataset(torch.arange(4))
    assert why_not(None) is None and why_not([DataLoader(data), DataLoader(data, shuffle=True)]) is None
    assert why_not(iter([1])) == "a list_iterator may not begin again"
    assert why_not(DataLoader(Stream())) == "Stream, which is read in order, may not begin again"
    sampler = WeightedRandomSampler([1.0] * 4, 4)
    assert why_not([DataLoader(data, sampler=sampler)]) == "the sampler WeightedRandomSampler may not begin again"
