"""How far a read is. Imports no torch.

Nothing here can fail.
"""

from __future__ import annotations

import threading


class Progress:
    """Bytes that are wanted, and those of them that are there; any thread may count.

    Attributes:
        wanted: bytes of all that was asked for so far.
        done: of them, those that were read and compared with their hashes; more, where some had to be read again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = self.done = 0

    def want(self, num_bytes: int) -> None:
        with self._lock:
            self.wanted += num_bytes

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
