"""The worker's end of the writer process: start it, hand it jobs, hear how they went.

On failure: a writer that died, for whatever reason, is noticed by the next :meth:`WriterProcess.hear`, which answers for
the jobs that it had; the next job starts another one.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.drain import Drain, whole_line
from elastictrain.machine import child_environment

COMMAND = (sys.executable, "-m", "elastictrain.checkpoint.drain_main")


class WriterProcess:
    """A process of its own, started with the first job."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._known: set[int] = set()  # arenas
        self._pending = bytearray()
        self._jobs: set[int] = set()  # that it has

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def submit(self, job: Mapping[str, Any], arena: Arena | None = None) -> None:
        """Hand over a job; with an image, which must stay as it is until the job is over."""
        self._start()
        descriptors = []
        if arena is not None:
            job = {**job, "image": arena.number, "is_new": arena.number not in self._known}
            descriptors = [arena.descriptor] if job["is_new"] else []
            self._known.add(arena.number)
        self._jobs.add(job["number"])
        self._send(job, descriptors)

    def tell(self, kind: str, number: int) -> None:
        """Something about a job that it has: "cancel", or "all written"."""
        if self._socket is not None and number in self._jobs:
            self._send({"kind": kind, "number": number})

    def forget(self, arena: Arena) -> None:
        """No more jobs will come with this one."""
        if self._socket is not None and arena.number in self._known:
            self._known.remove(arena.number)
            self._send({"kind": "forget", "image": arena.number})

    def hear(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """What it has said since; waits up to ``timeout`` seconds for the first word."""
        if self._socket is None:
            return []
        answers: list[dict[str, Any]] = []
        while select.select([self._socket], [], [], 0.0 if answers else timeout)[0]:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return answers + self._died()
            self._pending += data
            while (end := self._pending.find(b"\n")) >= 0:
                answer = json.loads(self._pending[:end])
                del self._pending[: end + 1]
                if answer["is"] in ("failed", "removed"):
                    self._jobs.discard(answer["number"])
                answers.append(answer)
        return answers

    def over(self, number: int) -> None:
        """Nothing more is to be heard of a job."""
        self._jobs.discard(number)

    def close(self) -> None:
        """No more jobs: it ends when it has done those that it has."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # loader processes have inherited it and keep it open
            self._socket.close()
            self._socket = None
        if self._process is not None:
            threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie, no waiting
            self._process = None

    def _start(self) -> None:
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            self._command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,  # whoever reads our output must not wait for the writer
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            process_group=0,  # what is sent to the worker's is not for it; in one session, so that its niceness counts
        )
        theirs.close()
        self._socket = ours
        self._known.clear()
        self._pending.clear()

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._socket is not None
        line = memoryview(whole_line(message))
        try:
            if descriptors:
                line = line[socket.send_fds(self._socket, [line[:1]], descriptors) :]
            self._socket.sendall(line)
        except OSError:  # it died: hear() says so
            pass

    def _died(self) -> list[dict[str, Any]]:
        assert self._process is not None and self._socket is not None
        self._socket.close()
        self._socket = None
        code = self._process.wait()
        jobs, self._jobs = sorted(self._jobs), set()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        said = {"is": "failed", "kind": "WriterDied", "text": f"the writer process {how}", "errno": None}
        return [{"number": number, **said} for number in jobs]


class WriterHere:
    """Does the same in this process and at once: for a run directory in its memory, which no other process sees."""

    pid = None

    def __init__(self) -> None:
        self._answers: list[dict[str, Any]] = []
        self._drain = Drain(lambda answer: self._answers.append(dict(answer)))

    def submit(self, job: Mapping[str, Any], arena: Arena | None = None) -> None:
        self._drain.do(job, None if arena is None else arena.view)

    def tell(self, kind: str, number: int) -> None:
        pass

    def forget(self, arena: Arena) -> None:
        pass

    def hear(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        answers, self._answers = self._answers, []
        return answers

    def over(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
