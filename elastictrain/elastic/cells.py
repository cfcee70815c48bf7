"""Words shared by an agent and its workers: one small cell of memory per worker, in a file that both map.

A cell has one writer per word, every word is an aligned 64-bit integer, and no rule needs two words to become visible
in the order in which they were written, except that a worker's last STEP is there before its CLOSED.
:mod:`elastictrain.elastic.membership` is the worker's side and :mod:`elastictrain.elastic.agreement` the agent's.

| word | writer | meaning |
|---|---|---|
| ``PHASE`` | worker | how far the worker is, see :class:`Phase` |
| ``STEP`` | worker | 1 + finished steps at its last boundary; 0 before the first |
| ``ASKED`` | worker | code of the reason for which the worker itself was asked to stop by a signal; 0: not asked |
| ``ACKED`` | worker | 1 + the limit that the worker promised not to pass; 0: none |
| ``LIMIT`` | agent | 1 + the step at which all shall stop; 0: nothing asked, or no more |
| ``VERDICT`` | agent | (1 + limit) * 8 + code of the reason, once every worker has acked that limit; 0: none |
| ``ABORT`` | agent | 1: this generation is over, and SIGTERM means "unwind now" |
| ``KEEPER`` | worker | 1: the worker has written down how it wants a keeper, see :mod:`elastictrain.elastic.keepers` |
| ``LIVES`` | worker | whether the worker can go on in the next generation, see :class:`Can` |
| ``LOST`` | worker | 1: the worker has lost the others, and waits to hear what comes next |
| ``BEATS`` | worker | grows with what it does between boundaries |
| ``READY`` | worker | 1: the worker has stopped for a change, and waits to hear what comes next |

A missing or short file is an ``OSError`` or ``ValueError`` from the constructor.
"""

from __future__ import annotations

import mmap
from enum import IntEnum, StrEnum

WORDS = 16  # whole cache lines per worker: no false sharing
PHASE, STEP, ASKED, ACKED, LIMIT, VERDICT, ABORT, KEEPER, LIVES, LOST, BEATS, READY = range(12)


class StopReason(StrEnum):
    """Why workers stop before the run's end."""

    INTERRUPT = "interrupt"  # a person pressed Ctrl-C
    PREEMPT = "preempt"  # the scheduler takes the machine back
    CHANGE = "change"  # nodes come or go: what the next generation goes on from is to be there, and the run goes on
    STORE = "store"  # the same, where it is to be on storage: memory may not outlive so many nodes, or for so long

    @property
    def code(self) -> int:
        """From 1 to 7."""
        return _REASONS.index(self) + 1

    @property
    def goes_on(self) -> bool:
        """Another generation of the run follows."""
        return self in (StopReason.CHANGE, StopReason.STORE)


_REASONS = list(StopReason)


def reason_of(code: int) -> StopReason | None:
    """The reason a word stands for; None for 0."""
    return _REASONS[code - 1] if code else None


class Can(IntEnum):
    """Go on in the next generation as it is, see :mod:`elastictrain.lives`."""

    UNKNOWN = 0  # the worker has not begun in this one
    YES = 1
    NO = 2


class Phase(IntEnum):
    """How far a worker is."""

    STARTING = 0  # importing; it has touched nothing, so it may be killed at any moment
    RUNNING = 1
    CLOSED = 2  # its training is over: it will not pass any boundary again


class Cells:
    """All cells of one generation on one node.

    Args:
        path: the file; :meth:`create` makes it.
        count: number of workers on this node.
    """

    def __init__(self, path: str, count: int) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), count * WORDS * 8)
        whole = memoryview(self._map).cast("q")
        self.views = [whole[i * WORDS : (i + 1) * WORDS] for i in range(count)]
        self._whole = whole

    @classmethod
    def create(cls, path: str, count: int) -> Cells:
        """Make the file, all words 0; it must not be there yet."""
        with open(path, "xb") as file:
            file.write(bytes(count * WORDS * 8))  # allocated now: a full disk is an error here and no SIGBUS later
        return cls(path, count)

    def steps(self) -> list[int]:
        """Finished steps of each worker; -1 before its first boundary."""
        return [view[STEP] - 1 for view in self.views]

    def phases(self) -> list[Phase]:
        return [Phase(view[PHASE]) for view in self.views]

    def progress(self) -> tuple[int, ...]:
        """Equal as long as no worker has done anything."""
        return tuple(view[word] for view in self.views for word in (PHASE, STEP, BEATS))

    def asked(self) -> StopReason | None:
        """The reason for which any worker was asked to stop behind the agent's back."""
        return reason_of(max(view[ASKED] for view in self.views))

    def wants_keeper(self) -> bool:
        return any(view[KEEPER] for view in self.views)

    def write(self, word: int, value: int) -> None:
        """Write one of the agent's words in every cell."""
        for view in self.views:
            view[word] = value

    def close(self) -> None:
        for view in self.views:
            view.release()
        self._whole.release()
        self._map.close()


def one_cell(path: str, index: int, count: int) -> memoryview:
    """The cell of the worker with that local rank: :data:`WORDS` 64-bit words."""
    return Cells(path, count).views[index]
