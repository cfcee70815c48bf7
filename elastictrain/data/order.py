"""In which order an epoch visits the samples of a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elastictrain.data.randomness import generators_kept, seed_slot
from elastictrain.data.slots import Permutation, mix

_BLOCK = 4096  # positions computed at once: the permutation is arithmetic on whole arrays


class Order(Protocol):
    """The samples of one epoch: how many, and which stand at ``[start, stop)``."""

    def size(self, epoch: int) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> list[int]: ...


class Sequential:
    """As the dataset has them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self, epoch: int) -> int:
        return self._size

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        return list(range(start, stop))


class Shuffled:
    """Another seeded permutation in each epoch; nothing is stored but one block of it."""

    def __init__(self, size: int, *, seed: int) -> None:
        self._size, self._seed = size, seed
        self._epoch, self._first = -1, 0
        self._permutation: Permutation | None = None
        self._block: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def size(self, epoch: int) -> int:
        return self._size

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if epoch != self._epoch or self._permutation is None:
            self._permutation = Permutation(self._size, seed=self._seed, epoch=epoch)
            self._epoch, self._block = epoch, self._block[:0]
        if not (self._first <= start and stop <= self._first + len(self._block)):
            self._first = start
            self._block = self._permutation(np.arange(start, min(max(stop, start + _BLOCK), self._size)))
        values: list[int] = self._block[start - self._first : stop - self._first].tolist()
        return values


class Drawn:
    """What a sampler of the user's draws, once per epoch, under a seed of its own: the same on every rank.

    A sampler that keeps a generator gets that one seeded. Its epoch's indices are held in memory.
    """

    def __init__(self, sampler: Iterable[Any], *, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._epoch = -1
        self._drawn: list[Any] = []

    def drawn(self, epoch: int) -> list[Any]:
        if epoch != self._epoch:
            number = mix(self._seed, epoch)
            inner = [self._sampler, getattr(self._sampler, "sampler", None)]
            for sampler in inner:
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(epoch)
                if (generator := getattr(sampler, "generator", None)) is not None:
                    generator.manual_seed(number)
            with generators_kept():
                seed_slot(number)
                self._drawn = list(self._sampler)
            self._epoch = epoch
        return self._drawn

    def size(self, epoch: int) -> int:
        return len(self.drawn(epoch))

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        return self.drawn(epoch)[start:stop]
