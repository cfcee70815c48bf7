"""A run to look at: two nodes, of which a third one joins, the first leaves and the next is killed, with saves in between.

Rank 0 is on another node after the leave, and on yet another one after the kill.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from elastictrain.metrics.ledger import read_ledger
from elastictrain.metrics.status import status
from elastictrain.rundir import RunDir
from tests.browser.watched_task import open_until
from tests.cli.test_run import Command, workers_of
from tests.cli.test_snapshots import keeper_of

TASK = str(Path(__file__).with_name("watched_task.py"))
STEPS, SAVE_EVERY, VAL_EVERY, SNAPSHOT_EVERY = 48, 6, 6, 3
OPTIONS = f"""--nnodes 1:3 --nproc-per-node 1 --spares 0 --rdzv-conf ttl=60 --micro-batch-size 2 --log-every 1
    --max-steps {STEPS} --checkpoint-every {SAVE_EVERY} --val-every {VAL_EVERY} --snapshot-every {SNAPSHOT_EVERY}
    --callback throughput-monitor:peak_tflops=1 --callback learning-rate-monitor --callback gradient-clipping:norm=1"""
PATIENCE = 150.0
SLOWLY, SOON = 3.0, 0.5  # seconds for a step, while a process is waited for that has to start; and something else


class Node(Command):
    limit = 500.0  # the first one sees almost all of the run


class Watched:
    """The run, in ``folder / "run"``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gate, self.num_open = folder, str(folder / "gate"), 0
        self.nodes: dict[str, Node] = {}
        self.text = ""

    def run(self) -> None:
        """All of it, to its last step."""
        try:
            self._open(1)
            for number in (1, 2):
                self._start(number)
            self._until(2)
            self._start(3)
            self._until(3, pace=SLOWLY)
            leaving = self.nodes.pop(self._first())
            os.kill(leaving.pid, signal.SIGTERM)
            self._until(2)
            assert leaving.wait() == 75, leaving.text
            self._reach(self.num_open + (SNAPSHOT_EVERY - 1 - self.num_open) % SNAPSHOT_EVERY)
            killed = self.nodes.pop(self._first())
            for pid in filter(None, [killed.pid, *workers_of(killed.pid).values(), keeper_of(killed.pid)]):
                os.kill(pid, signal.SIGKILL)
            killed.wait()
            self._until(1)
            self._open(STEPS)
            (last,) = self.nodes.values()
            assert last.wait() == 0, last.text
            self.text = leaving.text + killed.text + last.text
        except BaseException:
            print("\n".join(run.text for run in self.nodes.values()))
            raise
        finally:
            for run in self.nodes.values():
                try:
                    os.killpg(run.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def _start(self, number: int) -> None:
        """A node, which has an address of its own on the loopback."""
        name = f"127.0.0.{number}"
        (self.folder / name).mkdir()
        options = [TASK, "--run-dir", str(self.folder / "run"), "--local-addr", name, "--set", f"gate={self.gate}"]
        self.nodes[name] = Node(self.folder / name, *options, *OPTIONS.split())

    def _open(self, step: int) -> None:
        self.num_open = step
        open_until(self.gate, step)

    def _status(self) -> dict[str, Any] | None:
        lines = read_ledger(RunDir(self.folder / "run"))
        return status(lines) if any(line["event"] == "start" for line in lines) else None

    def _first(self) -> str:
        """The node that has rank 0 now."""
        found = self._status()
        assert found is not None
        return next(str(one["name"]) for one in found["nodes"] if any(w["rank"] == 0 for w in one["workers"]))

    def _reach(self, step: int) -> None:
        """So far, and no farther: with steps since the last snapshot, which a kill then loses."""
        self._open(step)
        deadline = time.monotonic() + PATIENCE
        while (found := self._status()) is None or found["step"] < step:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def _until(self, num_nodes: int, *, pace: float = SOON) -> None:
        """Until so many train together, which takes steps; as few as it can."""
        deadline, due = time.monotonic() + PATIENCE, 0.0
        while (found := self._status()) is None or not found["world_size"] == len(found["nodes"]) == num_nodes:
            assert time.monotonic() < deadline, found
            if found is not None and time.monotonic() > due and self.num_open < STEPS - SAVE_EVERY:
                self._open(self.num_open + 1)
                due = time.monotonic() + pace
            time.sleep(0.1)
        self._open(self.num_open + 4)
