"""Nodes of a run as processes of their own: ``python -m tests.elastic.fleet NAME RUN_DIR MIN MAX`` is one.

It prints a line of JSON for each generation, trains by counting, leaves at SIGTERM, and is told nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastictrain.channel import key_of
from elastictrain.elastic.chain import Generation, Member
from elastictrain.elastic.links import listen
from elastictrain.elastic.node import RunNode
from elastictrain.elastic.runlog import RunLog
from elastictrain.elastic.timing import Timing
from elastictrain.rundir import RunDir

ROOT = Path(__file__).parents[2]
TOKEN = "a token for tests only"


def make_node(name: str, url: str, timing: Timing, *, token: str = TOKEN, **more: Any) -> RunNode:
    """A node on the loopback, whose workers promise anything, if nothing else is said."""
    server = listen("127.0.0.1")
    me = Member(name, "127.0.0.1", server.getsockname()[1])
    key = key_of(token)
    more = {"on_asked": lambda asked: node.promise(asked, is_kept=True, step=-1), **more}
    node = RunNode(me, server, run_log=RunLog(RunDir(url), key), key=key, timing=timing, **more)
    return node


class NodeProcess:
    """One node, and what it has said."""

    def __init__(self, name: str, url: str, *, num: tuple[int, int], out: Path, timing: str = "") -> None:
        self.name, self._path = name, out / f"{name}.jsonl"
        command = [sys.executable, "-m", "tests.elastic.fleet", name, url, str(num[0]), str(num[1])]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "ELASTICTRAIN_TOKEN": TOKEN, "TIMING": timing}
        with open(self._path, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, cwd=ROOT, env=env)

    def said(self) -> list[dict[str, Any]]:
        lines = self._path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def newest(self) -> dict[str, Any]:
        said = self.said()
        return said[-1] if said else {"members": [], "number": 0, "leads": False}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def wait_for(is_met: Any, *, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.01)


def main() -> None:
    name, url, num_min, num_max = sys.argv[1:]
    extra = json.loads(os.environ.get("TIMING") or "{}")
    timing = Timing(min_nodes=int(num_min), max_nodes=int(num_max), **extra)

    def say(generation: Generation) -> None:
        members = [member.node for member in generation.members]
        line = {"number": generation.number, "epoch": generation.epoch, "members": members,
                "boundary": generation.boundary, "time": time.time(), "leads": node._peer.leading is not None}  # fmt: skip
        print(json.dumps(line), flush=True)

    node = make_node(name, url, timing, token=os.environ["ELASTICTRAIN_TOKEN"], on_formed=say, on_asked=None)
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: leaving.append(number))
    node.start()
    node.ready()
    step, answered = 0, None
    while node.error is None and not node.has_left:
        time.sleep(0.05)
        if leaving:
            leaving.clear()
            node.notice()
        asked = node.asked
        if asked is not None and asked is not answered:
            answered = asked
            node.promise(asked, is_kept=step < asked.boundary, step=step)
        if (asked is None or step < asked.boundary) and node.generation.rank_of(name) is not None:
            step += 1
            node.steps(step)
    if node.has_left:
        sys.exit(0)
    print(node.error, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    socket.setdefaulttimeout(None)
    main()
