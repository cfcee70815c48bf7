"""The writer process: takes images from a worker through shared memory and brings them to storage. Imports no torch.

It talks with its worker over the socket that is its standard input: each job is one JSON line, a new image's descriptor
comes with it; answers are JSON lines too. It lets signals pass that are meant for training: a preemption notice must not
end the save that it asks for. It runs at low priority and in a process group of its own, but in its worker's session:
where Linux schedules by session (``sched_autogroup_enabled``), a session of its own would have half of the machine's time,
whatever its niceness.

On failure: when the worker is gone it finishes the jobs that it has, for no longer than :data:`LINGER_SECONDS`, and ends.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

from elastictrain.checkpoint.drain import Drain, whole_line
from elastictrain.machine import step_aside

LINGER_SECONDS = 120.0


class Server:
    """Jobs from the socket, to a drain, and its answers back."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._worker = connection, os.getppid()
        self._jobs: queue.SimpleQueue[tuple[dict[str, Any], memoryview | None] | None] = queue.SimpleQueue()
        self._images: dict[int, mmap.mmap] = {}
        self.drain = Drain(self._answer)

    def serve(self) -> None:
        """Until the worker is gone and all is done."""
        threading.Thread(target=self._listen, daemon=True).start()
        while (item := self._jobs.get()) is not None:
            self.drain.do(*item)

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            self._connection.sendall(whole_line(message))
        except OSError:  # the worker is gone
            pass

    def _listen(self) -> None:
        pending, descriptors = bytearray(), list[int]()
        while os.getppid() == self._worker:  # a process that the worker has forked may hold the socket open
            if not select.select([self._connection], [], [], 1.0)[0]:
                continue
            try:
                data, found, _, _ = socket.recv_fds(self._connection, 1 << 20, 8)
            except OSError:
                data, found = b"", []
            if not data:
                break
            pending += data
            descriptors += found
            while (end := pending.find(b"\n")) >= 0:
                line = bytes(pending[:end])
                del pending[: end + 1]
                self._take(json.loads(line), descriptors)
        self._jobs.put(None)
        threading.Timer(LINGER_SECONDS, os._exit, (1,)).start()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message["kind"] == "cancel":
            self.drain.cancelled.add(message["number"])
        elif message["kind"] == "all written":
            self.drain.all_written.add(message["number"])
        elif message["kind"] == "forget":
            self._images.pop(message["image"], None)  # unmapped with the last job that uses it
        else:
            self._jobs.put((message, self._map(message, descriptors) if "image" in message else None))

    def _map(self, message: Mapping[str, Any], descriptors: list[int]) -> memoryview:
        image = message["image"]
        if message["is_new"]:
            descriptor = descriptors.pop(0)
            self._images[image] = mmap.mmap(descriptor, message["num_bytes"], mmap.MAP_SHARED, mmap.PROT_READ)
            os.close(descriptor)
        return memoryview(self._images[image])


def main() -> None:
    step_aside()
    Server(socket.socket(fileno=0)).serve()
    os._exit(0)  # do not wait for a timer or for a driver's threads


if __name__ == "__main__":
    main()
