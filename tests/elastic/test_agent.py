"""The agent with real worker processes and real signals: restarts, stops, and what is left afterwards (nothing)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousInfo

from elastictrain.elastic.agent import Agent
from elastictrain.elastic.agent_config import AgentConfig
from elastictrain.elastic.private import PrivateDir
from elastictrain.elastic.rendezvous import GenerationHandler, LocalRendezvous
from tests.checkpoint.nodes import wait_until
from tests.helpers import begin_fork
from tests.processes import is_running

WORKER = [sys.executable, str(Path(__file__).with_name("worker_program.py"))]
TOO_LONG = 120.0
SIGNALS = [(signal.SIGINT, "interrupt"), (signal.SIGTERM, "preempt"), (signal.SIGHUP, "preempt")]


class Run:
    """An agent in a process of its own."""

    def __init__(
        self,
        log: Path,
        *,
        workers: int = 2,
        steps: int = 30,
        pace: float = 0.002,
        events: dict[str, Any] | None = None,
        rendezvous: Callable[[int], GenerationHandler] = LocalRendezvous,
        name: str = "agent",
        job: dict[str, Any] | None = None,
        hangup: signal.Handlers = signal.SIG_DFL,
        **config: Any,
    ) -> None:
        log.mkdir(exist_ok=True)
        self.log, self.name = log, name
        work = {"steps": steps, "pace": pace, "log": str(log), "events": events or {}, **(job or {})}
        self.config = AgentConfig(WORKER, local_world_size=workers, job=work, kill_after=0.5, settle=1.0, **config)
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
                os.dup2(os.open(log / f"{name}.err", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
                sys.stderr = os.fdopen(2, "w")  # pytest's own goes elsewhere
                begin_fork(TOO_LONG - 5.0)
                signal.signal(signal.SIGHUP, hangup)  # the tests themselves may run under nohup
                outcome = Agent(self.config, rendezvous(workers)).train()
                (log / f"{name}.json").write_text(json.dumps(asdict(outcome)))
                code = outcome.code
            finally:
                os._exit(code)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, *, is_last: bool = True) -> dict[str, Any]:
        """The outcome, once the agent has ended; checks that it left nothing, if no other agent is there."""
        deadline = time.monotonic() + TOO_LONG
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, f"the agent does not end:\n{self.stderr}"
            time.sleep(0.01)
        result = self.log / f"{self.name}.json"
        assert result.exists(), f"the agent ended with {os.waitstatus_to_exitcode(done[1])}:\n{self.stderr}"
        outcome: dict[str, Any] = json.loads(result.read_text())
        assert os.waitstatus_to_exitcode(done[1]) == outcome["code"]
        for file in self.log.glob("pid-*") if is_last else ():
            assert not is_running(int(file.read_text())), f"worker {file.name} was left behind"
        return outcome

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + TOO_LONG
        while not any(done >= step for *_, done in self.steps):
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.01)

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """(generation, rank, step), in the order in which steps were finished."""
        file = self.log / "steps"
        return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def stderr(self) -> str:
        return read(self.log / f"{self.name}.err")


HOMES = [Path("/dev/shm"), Path(tempfile.gettempdir())]


def private_dirs() -> set[Path]:
    return {folder for home in HOMES if home.exists() for folder in home.glob("elastictrain-*")}


def is_mine(folder: Path, tmp_path: Path) -> bool:
    """Was it made by an agent of the test with that directory? Other tests run at the same time."""
    told = [read(file) for file in folder.glob("*/assignment.json")]
    return any(str(tmp_path) in text for text in told) or (not told and not is_locked(folder / "lock"))


def is_locked(lock: Path) -> bool:
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # it is being made, or removed
        return True
    return False


def read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    before = private_dirs()
    yield
    assert not [folder for folder in private_dirs() - before if is_mine(folder, tmp_path)], (
        "private directories are left"
    )


def test_finishes(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=3, steps=20)
    assert run.wait() == {"code": 0, "step": 20, "reason": None, "report": None, "message": ""}
    assert sorted(run.steps) == [(0, rank, step) for rank in range(3) for step in range(1, 21)]
    assert run.stderr == ""


def test_a_killed_worker_is_replaced_from_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=30, events={"0/1": [15, "SIGKILL"]})
    outcome = run.wait()
    assert outcome["code"] == 0
    assert {step for generation, _, step in run.steps if generation == 1} == set(range(11, 31))
    assert re.fullmatch(
        r"elastictrain: worker rank 1 \(pid \d+\) was killed by SIGKILL at step 15: restarting all 2 workers from the"
        r" newest checkpoint or snapshot \(restart 1 of 3\)\n",
        run.stderr,
    )


def test_every_restart_has_its_own_cause(tmp_path: Path) -> None:
    class NodesCome(LocalRendezvous):
        def num_nodes_waiting(self) -> int:
            return int(self.generation in (1, 2) and read(tmp_path / f"cause-{self.generation}") != "")

    run = Run(tmp_path, workers=1, steps=30, events={"0/0": [5, "SIGKILL"]}, rendezvous=NodesCome)
    assert run.wait()["code"] == 0
    causes = [(tmp_path / f"cause-{generation}").read_text() for generation in range(4)]
    assert causes[0] == "" and "was killed by SIGKILL at step 5" in causes[1]
    assert causes[2:] == ["nodes came or went"] * 2


def test_a_stopped_worker_does_not_wake_up_in_another_run(tmp_path: Path) -> None:
    """Nobody was left of its run but its agent, which has come to the next one: the generations have the same numbers."""
    stopped = tmp_path / "stopped"

    class Anew(LocalRendezvous):
        def num_nodes_waiting(self) -> int:
            return int(not stopped.exists() and read(tmp_path / "steps").count("\n") > 3)

        def next_rendezvous(self) -> RendezvousInfo:
            if self.generation == 0:  # its worker has let go, and waits for its place
                os.kill(pid := int(read(tmp_path / "pid-0-0")), signal.SIGSTOP)
                stopped.write_text(str(pid))
                self.job_id, self.generation = "another", -1
            return super().next_rendezvous()

    run = Run(tmp_path, workers=1, steps=40, pace=0.01, job={"lives": True}, rendezvous=Anew)
    wait_until(lambda: read(stopped) and read(tmp_path / "pid-0-0") != read(stopped))
    old = int(read(stopped))
    assert not is_running(old)
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGCONT)
    assert run.wait()["code"] == 0


def test_the_budget_refills_with_progress_only(tmp_path: Path) -> None:
    crashes = {f"{generation}/0": [12 * (generation + 1), "SIGKILL"] for generation in range(5)}
    run = Run(tmp_path, workers=1, steps=70, events=crashes, max_restarts=1)
    assert run.wait()["code"] == 0
    assert run.stderr.count("(restart 1 of 1)") == 5

    stuck = Run(tmp_path / "stuck", workers=1, events={f"{g}/0": [5, "SIGKILL"] for g in range(9)}, max_restarts=2)
    outcome = stuck.wait()
    assert outcome["code"] == 1
    assert re.fullmatch(
        r"worker rank 0 \(pid \d+\) was killed by SIGKILL at step 5; 2 restarts made no progress", outcome["message"]
    )
    assert stuck.stderr.count("restarting") == 2


def test_the_same_exception_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=3, events={f"{g}/1": [15, "exception"] for g in range(9)})
    outcome = run.wait()
    assert outcome["code"] == 1
    report = outcome["report"]
    assert (report["rank"], report["step"], report["error"]) == (1, 15, "ValueError"), "not the ranks that lost it"
    assert report["message"] == "bad sample on rank 1"
    assert "in misbehave" in report["text"]
    assert outcome["message"].endswith("at step 15, as before its restart")
    assert run.stderr.count("\n") == 1
    assert re.search(
        r"rank 1 \(pid \d+\) raised ValueError: bad sample on rank 1 \(worker_program.py:\d+\) at step 15", run.stderr
    )


def test_an_exception_with_another_text_uses_the_budget(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=1, events={f"{g}/0": [15, "other exception"] for g in range(9)}, max_restarts=2)
    assert run.wait()["code"] == 1
    assert run.stderr.count("restarting the worker from") == 2


def test_workers_that_have_nothing_to_go_on_from_are_replaced_for_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, events={f"0/{rank}": [5, "nothing kept"] for rank in range(2)}, max_restarts=0)
    assert run.wait()["code"] == 0, run.stderr
    assert run.stderr == "elastictrain: nothing is kept of this run yet: other processes begin\n"
    assert max(generation for generation, *_ in run.steps) == 1


@pytest.mark.parametrize(("what", "code"), [("usage", 2), ("exit", 1)])
def test_what_no_attempt_can_mend_is_not_tried_again(tmp_path: Path, what: str, code: int) -> None:
    run = Run(tmp_path, events={"0/0": [-1, what], "0/1": [-1, what]})
    outcome = run.wait()
    assert outcome["code"] == code
    assert (
        outcome["report"]["message"]
        == {"usage": "lr=nan cannot train: choose a finite --set lr=…", "exit": "sys.exit(3)"}[what]
    )
    assert run.stderr == ""


@pytest.mark.parametrize(("number", "reason"), SIGNALS)
def test_a_signal_stops_all_at_one_step(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    """As reported in ray#63968: a notice was ignored."""
    run = Run(tmp_path, workers=3, steps=100_000, pace=0.003)
    run.wait_for_step(5)
    run.signal(number)
    outcome = run.wait()
    assert (outcome["code"], outcome["reason"]) == (75, reason)
    last = {rank: max(step for _, r, step in run.steps if r == rank) for rank in range(3)}
    assert set(last.values()) == {outcome["step"]}
    assert (tmp_path / "checkpoint").read_text() == str(outcome["step"])
    assert run.stderr.startswith(f"elastictrain: stopping ({reason})")

    again = Run(tmp_path, workers=2, steps=outcome["step"] + 5)
    assert again.wait()["code"] == 0
    assert again.steps[-1][2] == outcome["step"] + 5


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=1, steps=60, pace=0.01, hangup=signal.SIG_IGN)
    run.wait_for_step(5)
    run.signal(signal.SIGHUP)
    assert run.wait()["code"] == 0
    assert run.steps[-1][2] == 60


def test_a_signal_to_a_worker_stops_all(tmp_path: Path) -> None:
    """Schedulers that signal every process of a job do not tear a worker out of its step.

    As reported in KempnerForge#177: SIGTERM to every process killed the workers before they had saved.
    """
    run = Run(tmp_path, workers=2, steps=100_000)
    run.wait_for_step(3)
    os.kill(int((tmp_path / "pid-0-1").read_text()), signal.SIGTERM)
    outcome = run.wait()
    assert (outcome["code"], outcome["reason"]) == (75, "preempt")


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=100, events={"0/1": [4, "hang"]})
    run.wait_for_step(4)
    run.signal(signal.SIGINT)
    time.sleep(0.4)
    start = time.monotonic()
    run.signal(signal.SIGINT)
    outcome = run.wait()
    assert time.monotonic() - start < 60.0  # and not after the ten minutes of grace
    assert outcome["code"] == 130
    assert "killed at once" in outcome["message"]


def test_one_keypress_that_arrives_twice_is_one(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=100_000)
    run.wait_for_step(3)
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)
    assert run.wait()["code"] == 75


def test_an_interrupt_while_workers_import_ends_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, job={"import": 120.0})
    time.sleep(1.0)
    start = time.monotonic()
    run.signal(signal.SIGINT)
    outcome = run.wait()
    assert time.monotonic() - start < 60.0  # and not after the 120 s of the import
    assert outcome["code"] == 75
    assert outcome["message"] == "stopped before training went on: nothing is lost"


def test_workers_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=100, events={"0/1": [4, "hang"]}, grace=0.5)
    run.wait_for_step(4)
    run.signal(signal.SIGTERM)
    outcome = run.wait()
    assert outcome["code"] == 1
    assert "did not stop within 0.5 s and were killed" in outcome["message"]


def test_a_worker_that_dies_while_stopping_is_not_restarted(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=100, pace=1.0)
    run.wait_for_step(1)
    run.signal(signal.SIGTERM)
    while "stopping" not in run.stderr:
        time.sleep(0.005)
    os.kill(int((tmp_path / "pid-0-1").read_text()), signal.SIGKILL)
    outcome = run.wait()
    assert outcome["code"] == 1
    assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL at step \d while stopping: what is", outcome["message"])
    assert "restarting" not in run.stderr


def test_a_worker_that_hangs_after_its_error(tmp_path: Path) -> None:
    run = Run(
        tmp_path, workers=1, events={f"{g}/0": [2, "hang at exit"] for g in range(2)}, max_restarts=0, exit_within=0.5
    )
    outcome = run.wait()
    assert outcome["code"] == 1
    assert outcome["report"]["message"] == "then it hangs"


def test_what_a_dead_worker_started_ends_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=1, steps=20, events={"0/0": [3, "child"]})
    assert run.wait()["code"] == 0
    assert not is_running(int((tmp_path / "child").read_text()))


def test_workers_end_with_their_agent(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=2, steps=100_000)
    run.wait_for_step(3)
    run.signal(signal.SIGKILL)
    os.waitpid(run.pid, 0)
    deadline = time.monotonic() + 5
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)

    left = [folder for folder in private_dirs() if is_mine(folder, tmp_path)]
    assert len(left) == 1, "the killed agent could not remove it"
    living = Run(tmp_path / "next", workers=1, steps=100_000)
    living.wait_for_step(1)
    assert not left[0].exists(), "the next one does"
    PrivateDir().remove()
    assert living.stderr == ""
    living.wait_for_step(5)  # the one that lives keeps its own
    living.signal(signal.SIGTERM)
    assert living.wait()["code"] == 75


def test_what_torch_asks_of_an_agent() -> None:
    """The methods that torch's loop calls: a release that asks for more must be noticed here."""
    asked = {"_start_workers", "_stop_workers", "_monitor_workers", "_shutdown"}
    assert SimpleElasticAgent.__abstractmethods__ == asked
