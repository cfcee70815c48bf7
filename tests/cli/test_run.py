"""``elastictrain run`` with the real trainer and real signals: what a person sees, the exit code, what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain.cli import launch as launch_module
from elastictrain.cli import main as main_module
from elastictrain.metrics.goodput import stretches
from elastictrain.metrics.ledger import read_ledger
from elastictrain.rundir import RunDir
from tests import forked
from tests.helpers import begin_fork
from tests.processes import FORKED, children_of, is_running

ROOT = Path(__file__).parents[2]
NET = str(Path(__file__).with_name("net_task.py"))
TOO_LONG = 120.0


class Command:
    """The command in a forked process, which has torch already, in a session of its own.

    Args:
        before: called there first.
    """

    limit = TOO_LONG

    def __init__(self, folder: Path, *argv: str, before: Callable[[], None] = lambda: None) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.chdir(folder)
                os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
                for number, file in ((1, self.out), (2, self.err)):
                    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                begin_fork(self.limit - 5.0)
                before()
                main_module.main(["run", *argv])
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code if isinstance(end.code, int) else 99)
            finally:
                os._exit(98)

    def wait(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + self.limit
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(done[1])

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + TOO_LONG
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < deadline, self.text
            assert os.waitpid(self.pid, os.WNOHANG)[0] == 0, self.text
            time.sleep(0.02)
        return found

    def press_ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)  # what a terminal does

    @property
    def text(self) -> str:
        return "".join(file.read_text() for file in (self.out, self.err) if file.exists())


def workers_of(agent: int) -> dict[int, int]:
    """{rank: pid} of the agent's workers."""
    found = {}
    for pid in children_of(agent):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            env = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if item)
            found[int(name.removeprefix(f"{FORKED}-") if name.startswith(FORKED) else env["RANK"])] = pid
        except (OSError, KeyError, ValueError):
            continue
    return found


def logged(run_dir: Path) -> Iterator[dict[str, Any]]:
    for file in sorted((run_dir / "metrics").iterdir()):
        yield from map(json.loads, file.read_text().splitlines())


@pytest.mark.slow
def test_killed_interrupted_and_continued(tmp_path: Path) -> None:
    """kill -9 of a worker: from the checkpoint; Ctrl-C: everything is saved; the same command on one worker ends it."""
    options = [NET, "--run-dir", "r", "--max-steps", "45", "--checkpoint-every", "5", "--log-every", "1"]
    options += ["--set", "pace=0.05", "--set", "lr=1e-2", "--micro-batch-size", "4"]
    run = Command(tmp_path, *options, "--nproc-per-node", "2", before=forked.install)
    run.wait_for(r"step 10 +saved")
    before = workers_of(run.pid)
    os.kill(before[1], signal.SIGKILL)
    killed = run.wait_for(
        r"elastictrain: worker rank 1 \(pid \d+\) was killed by SIGKILL at step (\d+): restarting 1 of 2 workers"
        r" \(the others live on\) from the newest checkpoint or snapshot \(restart 1 of 3\)\n"
    )
    run.wait_for(r"generation 1")
    run.wait_for(rf"step {5 * (int(killed[1]) // 5) + 10} +saved")
    pids = workers_of(run.pid)
    assert pids[0] == before[0] and pids[1] != before[1]
    run.press_ctrl_c()
    assert run.wait() == 75
    assert "all workers finish the step, save and exit; press Ctrl-C again to stop at once" in run.text
    stopped = re.search(
        r"elastictrain: stopped by Ctrl-C at step (\d+)\nelastictrain: step (\d+) is saved in r/", run.text
    )
    assert stopped is not None, run.text
    assert stopped[1] == stopped[2]
    assert "Traceback" not in run.text
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())

    record = json.loads((tmp_path / "r" / "run.json").read_text())
    assert record["target"] == "net_task.py:Net"
    assert record["settings"] == {"pace": 0.05, "lr": 0.01}

    again = Command(tmp_path, *options, "--nproc-per-node", "1", before=forked.install)
    assert again.wait() == 0, again.text
    events = sorted(path.name.removesuffix(".jsonl") for path in (tmp_path / "r" / "events").glob("*-[se]*.jsonl"))
    assert events == ["g000000-start", "g000001-end", "g000001-start", "g000002-end", "g000002-start"]
    rows = [row for row in logged(tmp_path / "r") if "train/loss" in row]
    assert {row["step"] for row in rows} == set(range(1, 46))
    by_step: dict[int, list[float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row["train/loss"])
    assert all(max(losses) - min(losses) < 1e-6 for losses in by_step.values()), "what was done twice came out the same"
    assert min(row["step"] for row in rows if row["generation"] == rows[-1]["generation"]) == int(stopped[1]) + 1


@pytest.mark.slow
@pytest.mark.parametrize("nth", [1, 3])
def test_an_agent_that_is_killed_costs_no_more_than_the_steps_since_the_last_save(nth: int, tmp_path: Path) -> None:
    """kill -9 of the agent in the middle of saves: what was committed is good, and the same command goes on at once."""
    options = [NET, "--run-dir", "r", "--max-steps", "60", "--checkpoint-every", "1", "--log-every", "1"]
    run = Command(tmp_path, *options, "--nproc-per-node", "2", before=forked.install)
    run.wait_for(rf"step {7 * nth} +saved")
    workers, killed = workers_of(run.pid), time.time()
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    told = [one for one in stretches(read_ledger(RunDir(tmp_path / "r"))) if one.node.endswith(f"-{run.pid}")]
    assert killed - 1.0 < told[-1].stop < time.time(), "until then it was there"
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and is_running(pid) for pid in workers.values()):
        assert time.monotonic() < deadline, "workers outlive their agent"
        time.sleep(0.02)
    again = Command(tmp_path, *options, "--nproc-per-node", "1", before=forked.install)
    assert again.wait() == 0, again.text
    assert "for a sign of life" not in again.text
    found = re.search(r"resumed: from step (\d+)", again.text)
    assert found is not None and int(found[1]) >= 7 * nth, again.text
    rows = [row for row in logged(tmp_path / "r") if "train/loss" in row and row["step"] > int(found[1])]
    assert {row["step"] for row in rows} == set(range(int(found[1]) + 1, 61))


@pytest.mark.slow
def test_a_second_job_in_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    options = [NET, "--run-dir", str(tmp_path / "r"), "--max-steps", "9999", "--set", "pace=0.05", "--log-every", "1"]
    first = Command(tmp_path / "first", *options, before=forked.install)
    first.wait_for(r"step \d+/9999")
    second = Command(tmp_path / "second", *options, before=forked.install)
    assert second.wait() == 2
    pid = workers_of(first.pid)[0]
    line = rf"elastictrain: error: run directory .*/r is in use by process {pid} on .*: stop that job first, or choose .*\n"
    assert re.search(line, second.err.read_text()), second.text
    assert "Traceback" not in second.text
    assert [f"-{first.pid}-" in name for name in os.listdir(tmp_path / "r" / "agents")] == [True]
    first.press_ctrl_c()
    assert first.wait() == 75, first.text


@pytest.mark.slow
def test_a_users_error_is_shown_once(tmp_path: Path) -> None:
    run = Command(
        tmp_path,
        NET,
        "--max-steps",
        "9",
        "--set",
        "fail_at=2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
        before=forked.install,
    )
    assert run.wait() == 1
    errors = run.err.read_text()
    assert errors.count("Traceback") == 1
    assert re.search(
        r"^Traceback \(most recent call last\):\n"
        r"  … \d+ frames in elastictrain; --full-traceback shows them\n"
        r'  File ".*net_task.py", line \d+, in on_train_batch_start\n'
        r"    self.fail\(batch\)\n"
        r'  File ".*net_task.py", line \d+, in fail\n'
        r'    raise ValueError\(f"a bad batch of .*\n'
        r"ValueError: a bad batch of 1\n"
        r"elastictrain: error: worker rank \d \(pid \d+\) raised ValueError: a bad batch of 1 \(net_task.py:\d+\) at step"
        r" 2\n$",
        errors,
        re.MULTILINE,
    ), errors
    assert "Traceback" not in run.out.read_text()


@pytest.mark.slow
def test_what_only_the_trainer_can_refuse_is_one_line_too(tmp_path: Path) -> None:
    run = Command(tmp_path, NET, "--max-steps", "9", "--set", "lr=nan", before=forked.install)
    assert run.wait() == 2
    assert re.fullmatch(r"elastictrain: error: .*lr=nan.*\n", run.text), run.text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["err", "out"]


@pytest.mark.slow
def test_an_error_in_making_the_task_is_not_tried_again(tmp_path: Path) -> None:
    run = Command(tmp_path, NET, "--max-steps", "9", "--set", "broken=yes", "--full-traceback", before=forked.install)
    assert run.wait() == 1
    assert run.text.count("KeyError: 'no such column'\n") == 1
    assert "elastictrain/cli/worker.py" in run.text
    assert "restarting" not in run.text


@pytest.mark.slow
def test_a_script(tmp_path: Path) -> None:
    """The whole command, in a process of its own."""
    (tmp_path / "tool.py").write_text("VALUE = 3\n")
    (tmp_path / "script.py").write_text(
        "import os, sys\nfrom tool import VALUE\n"
        "print(__name__, sys.argv[1:], VALUE, os.environ['RANK'], os.environ['WORLD_SIZE'])\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    argv = ["script.py", "--nproc-per-node", "2", "--"]
    command = [sys.executable, "-m", "elastictrain", "run", *argv, "0", "--lr", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"__main__ ['0', '--lr', '1'] 3 {rank} 2" for rank in range(2)]

    failing = Command(tmp_path, *argv, "3")
    assert failing.wait() == 1
    line = r"elastictrain: error: worker rank \d \(pid \d+\) sys\.exit\(3\) before its first step\n"
    assert re.fullmatch(line, failing.err.read_text()), failing.text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_script_and_its_class_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "net_task.py").write_text(Path(NET).read_text())
    (tmp_path / "train.py").write_text(
        "from elastictrain import Trainer\nfrom net_task import Net\n"
        "Trainer(run_dir='runs/net', max_steps=3).fit(Net())\n"
    )
    script = Command(tmp_path, "train.py", "--nproc-per-node", "2", before=forked.install)
    assert script.wait() == 0, script.text
    by_class = Command(tmp_path, "net_task.py:Net", "--run-dir", "runs/net", "--max-steps", "6", before=forked.install)
    assert by_class.wait() == 0, by_class.text
    steps = sorted(path.name for path in (tmp_path / "runs" / "net" / "checkpoints").iterdir())
    assert steps == ["step-00000003", "step-00000006"]
    assert json.loads((tmp_path / "runs" / "net" / "run.json").read_text())["target"] == "net_task:Net"


def test_a_signal_in_the_middle_of_a_workers_exit_prints_nothing(tmp_path: Path) -> None:
    """Rank 0 is in its interpreter's exit when rank 1 is killed and the agent ends the generation with SIGTERM."""
    (tmp_path / "script.py").write_text(
        "import atexit, os, signal, time, weakref\n"
        "class Thing: pass\n"
        "def slowly():\n"
        "    open('leaving', 'x').close()\n"
        "    time.sleep(1.5)\n"
        "thing = Thing()\n"
        "if os.environ['RANK'] == '0':\n"
        "    weakref.finalize(thing, slowly)\n"
        "else:\n"
        "    while not os.path.exists('leaving'): time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = Command(tmp_path, "script.py", "--nproc-per-node", "2", "--max-restarts", "0")
    assert run.wait() == 1
    assert "was killed by SIGKILL" in run.text
    assert "Traceback" not in run.text, run.text


def test_nothing_but_an_agent_starts_a_worker() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch_module.WORKER, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "elastictrain: error: workers are started by `elastictrain run TARGET`\n"
