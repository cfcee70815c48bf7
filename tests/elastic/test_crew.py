"""Spares and workers between two generations, without an agent."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastictrain.elastic import crew as crews
from elastictrain.elastic.cells import ABORT, LIVES, PHASE, READY, STEP, Can, Cells, Phase
from elastictrain.elastic.crew import SPARE_DEATHS, Crew
from elastictrain.elastic.line import Assignment, Place
from elastictrain.elastic.processes import WorkerProcess
from elastictrain.elastic.stalls import START, Stalls


def crew(say: Any = print) -> Crew:
    return Crew([sys.executable, "-c", "import time; time.sleep(60)"], environment=dict, num_spares=1, say=say)


def test_a_spare_that_cannot_be_started_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(crews, "WorkerProcess", refuse)
    monkeypatch.setattr(crews, "SPARE_AFTER", -1.0)
    lines, cells = list[str](), Cells.create(str(tmp_path / "cells"), 1)
    cells.views[0][STEP] = 1
    tended = crew(lines.append)
    for _ in range(SPARE_DEATHS + 2):
        tended.tend(cells)
    assert len(lines) == 1 and "could not be started: [Errno 11]" in lines[0]


def test_a_worker_between_two_generations_may_unwind_at_a_signal(tmp_path: Path) -> None:
    class Worker:
        ended_at = None

        def poll(self) -> None:
            return None

        def over(self, generation: int) -> None:
            cells.views[0][PHASE] = Phase.CLOSED

    cells, tended = Cells.create(str(tmp_path / "cells"), 1), crew()
    cells.views[0][LIVES] = 1
    tended.workers.append(Worker())  # type: ignore[arg-type]
    assert tended.end(0, cells, seconds=0.0, keeps=True) == (1, None)
    assert cells.views[0][ABORT] == 1


LIVES_ON = """
from elastictrain.elastic.membership import current
mine = current()
while True:
    mine.can_go_on(True)
    assert mine.line.wait_until_over(mine.generation, seconds=60.0)
    mine.next_place()
"""
TOLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_a_survivor_whose_next_generation_is_over_before_it_begins_lives_on(tmp_path: Path) -> None:
    tended = Crew([sys.executable, "-c", LIVES_ON], environment=lambda: os.environ, num_spares=0, say=print)

    def begin(generation: int, run: str = "") -> Cells:
        path, cells = str(tmp_path / f"{run}{generation}.json"), str(tmp_path / f"{run}cells-{generation}")
        made = Cells.create(cells, 1)
        Assignment(agent_pid=os.getpid(), generation=generation, cells=cells, reports="").write(path)
        tended.begin([(0, Place(generation, path, TOLD))])
        return made

    def wait(cells: Cells) -> None:
        until = time.monotonic() + 60.0
        while cells.views[0][LIVES] != Can.YES:
            assert time.monotonic() < until and tended.workers[0].poll() is None
            time.sleep(0.01)

    try:
        cells = begin(0)
        (worker,) = tended.workers
        wait(cells)
        assert tended.end(0, cells, seconds=0.0, keeps=True) == (1, None)
        os.kill(worker.pid, signal.SIGSTOP)
        cells = begin(1)
        threading.Timer(0.5, lambda: os.kill(worker.pid, signal.SIGCONT)).start()
        assert cells.views[0][LIVES] == Can.UNKNOWN
        assert tended.end(1, cells, seconds=0.0, keeps=True) == (1, None)
        assert cells.views[0][PHASE] == Phase.CLOSED, "it has let go of that one, too"
        wait(cells := begin(2))
        assert tended.workers == [worker]
        assert tended.end(2, cells, seconds=0.0, keeps=True) == (1, None)
        tended.dismiss()
        assert worker.poll() is not None, "its generations are not those of another run"
        wait(cells := begin(0, "another"))
        cells.views[0][LIVES] = Can.NO
        assert tended.end(0, cells, seconds=0.0, keeps=True)[0] == 0, "this one had better not"
    finally:
        tended.stop(seconds=0.0)


def test_a_new_worker_that_has_not_begun_is_replaced(tmp_path: Path) -> None:
    """It may be in anybody's code, which knows of one place alone."""
    tended, cells = crew(), Cells.create(str(tmp_path / "cells"), 1)
    try:
        tended.begin([(0, Place(0, "", {}))])
        assert tended.end(0, cells, seconds=0.0, keeps=True)[0] == 0
    finally:
        tended.stop(seconds=0.0)


def test_who_is_watched_is_seen_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, tended = Cells.create(str(tmp_path / "cells"), 1), crew()
    monkeypatch.setattr(crews, "WATCH_SECONDS", 600.0)
    worker = WorkerProcess([sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ)
    tended.workers.append(worker)
    try:
        asked = iter([False, False, True])
        tended.watch(cells, give_up=lambda: next(asked))
        cells.views[0][READY] = 1
        tended.watch(cells, give_up=lambda: False)
        cells.views[0][READY] = 0
        worker.kill()
        tended.watch(cells, give_up=lambda: False)
        assert worker.poll() is not None
    finally:
        worker.kill()


def test_a_start_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        rank = 0

        def poll(self) -> int:
            return 0

    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    cells, stalls = Cells.create(str(tmp_path / "cells"), 1), Stalls(10.0)
    cells.views[0][PHASE] = Phase.RUNNING

    def look() -> str | None:
        return stalls.look(cells, [Worker()])  # type: ignore[list-item]

    assert look() is None
    now = START * 10.0 - 1
    assert look() is None
    cells.views[0][STEP] = 1
    assert look() is None
    now += 11.0
    assert look() == "no worker has made progress for 11 s (rank 0 at step 0)"
