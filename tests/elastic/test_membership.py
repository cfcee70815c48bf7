"""Membership without our agent: what the environment says, and what signals do. No torch in these processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from elastictrain.elastic.membership import EnvMembership, StopReason, current
from elastictrain.errors import UsageError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")

LOOP = """
import sys, time
from elastictrain.elastic.membership import current
assert "torch" not in sys.modules
mine = current()
print("ready", flush=True)
step = 0
while (reason := mine.boundary(step)) is None and mine.requested is None or "stubborn" in sys.argv:
    step += 1
    time.sleep(0.01)
print(reason, mine.requested, mine.agrees, flush=True)
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def loop(*argv: str, **env: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, *argv], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_one_process_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    mine = current()
    assert isinstance(mine, EnvMembership)
    assert (mine.rank, mine.world_size, mine.local_rank, mine.local_world_size, mine.node_rank) == (0, 1, 0, 1, 0)
    assert (mine.generation, mine.target, mine.settings, mine.agrees) == (0, None, {}, True)
    assert mine.boundary(1) is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert mine.boundary(2) is StopReason.PREEMPT
    assert mine.stopped is StopReason.PREEMPT
    mine.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    for name, value in {**told, "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    mine = current()
    try:
        assert (mine.rank, mine.world_size, mine.local_rank, mine.local_world_size) == (5, 8, 1, 4)
        assert (mine.node_rank, mine.generation, mine.agrees) == (1, 2, False)
        os.kill(os.getpid(), signal.SIGINT)
        assert mine.boundary(1) is None, "it cannot speak for the other ranks"
        assert mine.requested is StopReason.INTERRUPT
    finally:
        mine.close()


@pytest.mark.parametrize("told", [{"RANK": "2"}, {"WORLD_SIZE": "many"}, {"RANK": "1", "WORLD_SIZE": "1"}])
def test_an_environment_that_contradicts_itself(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=next(iter(told))):
        current()


def test_signals_ask_and_a_second_interrupt_ends() -> None:
    """As reported in lightning#21406: saving inside of the signal handler never ended."""
    one, two = loop(), loop("stubborn")
    try:
        one.send_signal(signal.SIGINT)
        assert one.communicate(timeout=60)[0] == "interrupt interrupt True\n"
        two.send_signal(signal.SIGINT)
        time.sleep(0.1)
        assert two.poll() is None
        two.send_signal(signal.SIGINT)
        assert two.wait(timeout=60) == 130
    finally:
        one.kill()
        two.kill()


def test_forked_children_keep_out_of_it() -> None:
    """A loader process may be ended by SIGTERM and must survive the terminal's Ctrl-C; neither stops the training."""
    mine = current()
    try:
        pids = []
        for _ in range(2):
            if (pid := os.fork()) == 0:
                time.sleep(0.5)
                os._exit(0)
            pids.append(pid)
        os.kill(pids[0], signal.SIGTERM)
        os.kill(pids[1], signal.SIGINT)
        assert os.waitpid(pids[0], 0)[1] == signal.SIGTERM
        assert os.waitpid(pids[1], 0)[1] == 0
        assert mine.requested is None
    finally:
        mine.close()
