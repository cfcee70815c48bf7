"""The same action on many things, on a few threads; for actions that spend their time outside of Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from elastictrain.machine import usable_cores

T = TypeVar("T")

MAX_THREADS = 4  # that move bytes in memory: more than these are limited by the memory
FEW_BYTES = 4 << 20  # are moved sooner than a thread is there


def in_threads(action: Callable[[T], object], things: Iterable[T], *, num_bytes: int | None = None) -> None:
    """Returns when all is done. The calling thread is one of the threads.

    Args:
        num_bytes: that are moved in memory, by all of it together; None: it takes longer than that.

    Raises:
        BaseException: what an action has raised; what had not been begun by then is left.
    """
    left = deque(things)

    def work() -> None:
        try:
            while left:
                try:
                    thing = left.popleft()
                except IndexError:  # another thread was faster
                    return
                action(thing)
        except BaseException:
            left.clear()
            raise

    others = min(MAX_THREADS, usable_cores(), len(left)) - 1
    if others < 1 or (num_bytes is not None and num_bytes <= FEW_BYTES):
        work()
        return
    with ThreadPoolExecutor(others) as pool:
        working = [pool.submit(work) for _ in range(others)]
        work()
    for one in working:
        one.result()
