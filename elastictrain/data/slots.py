"""Slots: what is computed, in which order, whoever computes it.

A global batch is a fixed list of logical microbatches, the *slots*. Data order and random numbers belong to slots, never
to ranks: slot ``k`` of step ``s`` holds the same samples and draws the same dropout on one rank or on five. Ranks share
the slots round-robin, so a rank may have one more than another, or none; nothing is padded.

A :class:`Feed` turns a source of samples into :class:`Work`, one global batch at a time, as one rank sees it. Its
position moves only in :meth:`Feed.commit`, after the optimizer has stepped; whatever was prefetched beyond that is
thrown away when a generation ends and read again by whoever owns those slots next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from elastictrain.errors import UsageError


@dataclass(frozen=True)
class SlotPlan:
    """How a global batch is cut into slots.

    Args:
        global_batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per slot; the last slot takes what is left.

    Raises:
        UsageError: a size below 1, or a global batch smaller than the microbatch.
    """

    global_batch_size: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1")
        if self.global_batch_size < self.micro_batch_size:
            raise UsageError(
                f"global_batch_size={self.global_batch_size} is smaller than micro_batch_size={self.micro_batch_size}:"
                f" raise the first to {self.micro_batch_size}, or lower the second"
            )

    @property
    def num_slots(self) -> int:
        return -(-self.global_batch_size // self.micro_batch_size)

    def span(self, slot: int, num_samples: int) -> tuple[int, int]:
        """The samples ``[start, stop)`` of a slot within a global batch of ``num_samples`` samples."""
        start = slot * self.micro_batch_size
        return min(start, num_samples), min(start + self.micro_batch_size, num_samples)

    def local(self, dp_rank: int, dp_size: int) -> range:
        """The slots of one data-parallel rank."""
        return range(dp_rank, self.num_slots, dp_size)


class Slot(NamedTuple):
    """One microbatch, read."""

    index: int  # type: ignore[assignment]  # within its global batch; nobody asks a slot for tuple.index
    batch_idx: int  # within its epoch, counted over all ranks: the same on any number of ranks
    batch: Any
    size: int  # samples in it; 0: this slot has nothing (the end of a stream), its batch is None
    is_seeded: bool = False  # it was read just now under a seed of its own: its step goes on with what that left


@dataclass
class Work:
    """One global batch as one rank sees it."""

    epoch: int
    step_in_epoch: int
    num_slots: int  # in this global batch, over all ranks; fewer at the end of an epoch
    num_samples: int | None  # over all ranks; None: known only to all ranks together, once the slots are read
    is_last: bool  # the last global batch of its epoch; False where only the next read can tell
    slots: Iterator[Slot]  # this rank's, in order; read lazily
    first_batch_idx: int = 0  # batch_idx of slot 0
    weights: Mapping[int, float] | None = None  # of this rank's slots, where samples do not all count the same
    total_weight: float | None = None  # over all ranks
    somebody_idles: bool = False  # a rank has nothing to compute in the first turn
    after: Mapping[str, Any] = field(default_factory=dict)  # the feed's own: where it stands once this is committed


class Feed(Protocol):
    """A source of global batches with an exact position."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in one epoch, where known."""

    @property
    def slots_per_epoch(self) -> int | None:
        """Microbatches in one epoch over all ranks, where known."""

    @property
    def queued(self) -> int | None:
        """Microbatches that loader processes have ready; None where there are none, or it cannot be known."""

    def set_accumulation(self, num_slots: int) -> None:
        """From the next epoch on a global batch has so many slots."""

    def start(self, *, dp_rank: int, dp_size: int) -> None:
        """Begin reading at the position, as one of ``dp_size`` ranks; called once per generation."""

    def epoch(self) -> Iterator[Work]:
        """The rest of the current epoch. A feed that only finds its end by reading yields work whose slots are all
        empty on every rank; the trainer, which can ask all ranks, then ends the epoch."""

    def commit(self, work: Work) -> None:
        """``work`` was used: the position moves behind it."""

    def end_epoch(self) -> None:
        """The epoch is over: the position moves to the start of the next one."""

    def state(self) -> dict[str, Any]:
        """``data.*`` JSON values that are equal on all ranks."""

    def local_state(self) -> dict[str, Any]:
        """``data.*`` JSON values that only this rank knows (the cursors of its shards)."""

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Take back the position from the ``data.*`` values of all ranks; before :meth:`start`.

        Raises:
            CheckpointError: the state is of another dataset or another cut.
        """

    def close(self) -> None:
        """Stop loader processes."""


# ---- random numbers ------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A 63-bit seed from integers, well spread and the same everywhere (splitmix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def named_seed(seed: int, name: str) -> int:
    """A 63-bit seed for something that has a name, such as a parameter."""
    return mix(seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


# ---- order ---------------------------------------------------------------------------------------------------------


class Permutation:
    """A seeded permutation of ``range(size)`` with O(1) memory and O(1) seek.

    A 6-round Feistel network over the next even power of two, walked until the value falls into the range (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Computed on whole arrays.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        assert size >= 1, size
        bits = max(2, (size - 1).bit_length())
        self._size = size
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(mix(seed, epoch, round_)) for round_ in range(6)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The values at ``positions``, int64 of the same shape."""
        values = positions.astype(np.uint64)
        out = self._shuffle(values)
        while (outside := out >= self._size).any():
            out[outside] = self._shuffle(out[outside])
        return out.astype(np.int64)

    def _shuffle(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            scrambled = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            scrambled ^= scrambled >> np.uint64(29)
            scrambled *= np.uint64(0xBF58476D1CE4E5B9)
            scrambled ^= scrambled >> np.uint64(32)
            left, right = right, left ^ (scrambled & self._mask)
        return (left << self._half) | right
