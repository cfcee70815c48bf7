"""Rounds in which all ranks do something, rank 0 draws the conclusion, and everybody learns how it went.

On failure: an exception on any rank, in its own part or in rank 0's conclusion, ends the round on every rank with one
:class:`RoundFailed`; only text crosses ranks, so that an exception that cannot be pickled hangs nobody. A rank that is
gone makes the collective itself raise on the others; that is not caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from elastictrain import exchange

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank: ``kind`` is the exception's type, ``errno`` the system's number if it gave one."""

    rank: int
    kind: str
    text: str
    errno: int | None

    @classmethod
    def of(cls, rank: int, error: Exception) -> Failure:
        text = " ".join(str(error).split()) or type(error).__name__
        return cls(rank, type(error).__name__, text, getattr(error, "errno", None))


class RoundFailed(Exception):
    """A round did not succeed on some ranks; every rank gets the same failures, in the order of ranks."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__("; ".join(f"rank {failure.rank}: {failure.text}" for failure in failures))
        self.failures = failures


class Ranks:
    """This process among all of the default process group; alone where there is one rank (no group is needed then)."""

    def __init__(self, rank: int, world_size: int) -> None:
        assert 0 <= rank < world_size, (rank, world_size)
        if world_size > 1:
            assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        self.rank = rank
        self.world_size = world_size

    def round(self, part: Callable[[], T], conclude: Callable[[list[T]], list[R]]) -> R:
        """``part()`` on every rank, ``conclude(parts)`` on rank 0; each rank gets its entry of the conclusion.

        Raises:
            RoundFailed: on every rank, once all of them have done or failed their part.
        """
        done, cause = self._try(part)
        gathered: list[Any] | None = [done]
        if self.world_size > 1:
            gathered = exchange.gather(done)
        replies: list[Any] = []
        if gathered is not None:  # rank 0
            failures = [one for one in gathered if isinstance(one, Failure)]
            if not failures:
                concluded, cause = self._try(lambda: conclude(gathered))
                failures = [concluded] if isinstance(concluded, Failure) else []
            replies = [(failures, None)] * self.world_size if failures else [([], reply) for reply in concluded]
            assert len(replies) == self.world_size
        failures, reply = self._scatter(replies)
        if failures:
            raise RoundFailed(failures) from cause
        result: R = reply
        return result

    def _scatter(self, replies: list[Any]) -> Any:
        if self.world_size == 1:
            return replies[0]
        return exchange.scatter(replies or None)

    def _try(self, action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return action(), None
        except Exception as error:
            return Failure.of(self.rank, error), error
