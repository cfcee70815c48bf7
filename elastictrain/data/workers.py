"""What every loader process does first.

It is forked from a worker whose signals mean something else to it: a Ctrl-C or a preemption notice that goes to every
process of a job asks the run to stop at its next step boundary, for which it still needs its data. So a loader process
ends when its parent says so, or is gone, and for nobody else short of SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

from elastictrain.compat.torch import batches_ready


class Reading:
    """The iterator of a loader that somebody reads, for those who only want to know how far ahead its processes are."""

    def __init__(self) -> None:
        self._iterator: Callable[[], Any] = lambda: None

    def watch(self, iterator: Any) -> None:
        """Look at this one from now on; it is not kept alive."""
        try:
            self._iterator = weakref.ref(iterator)
        except TypeError:  # an iterator of a list or the like
            self._iterator = lambda: None

    @property
    def queued(self) -> int | None:
        """Batches that loader processes have ready; None where there are none."""
        return batches_ready(self._iterator())


def shield(worker: int) -> None:
    """Let a loader process outlive SIGINT and SIGTERM that do not come from its parent.

    Given to a DataLoader as ``worker_init_fn``. Programs that the process starts from now on inherit a blocked SIGTERM.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "only a loader process is shielded"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only sigwaitinfo tells who sent a signal, and it needs the signal blocked, in all threads: this is the first one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_obey, args=(parent.pid,), name="obey parent", daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)  # as torch's own handler of it does: anything else looks like a crash to the parent
