"""Workers die at every moment of a run; the others keep their processes, and training goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrain import lives
from elastictrain.elastic import crew
from tests import forked
from tests.checkpoint.nodes import wait_until
from tests.cli.lives_task import NUM_SAMPLES, workers_of
from tests.cli.test_run import ROOT, Command, logged
from tests.helpers import apart
from tests.processes import is_running, is_stopped

TASK = str(Path(__file__).with_name("lives_task.py"))
STEPS = 18


def command(
    folder: Path,
    *more: str,
    deaths: str = "",
    early: bool = False,
    workers: int = 2,
    mesh: str = "auto",
    before: Callable[[], None] = forked.install,
) -> Command:
    folder.mkdir(exist_ok=True)
    options = ["--run-dir", str(folder / "run"), "--max-steps", str(STEPS), "--snapshot-every", "1", "--log-every", "1"]
    options += ["--val-every", "6", "--micro-batch-size", "2", "--nproc-per-node", str(workers), "--mesh", mesh]
    settings = [f"folder={folder}", f"early={early}", *([f"deaths={deaths}"] if deaths else [])]
    options += [*more, *[part for one in settings for part in ("--set", one)]]
    return Command(folder, f"{TASK}:Lives", *options, before=before)


def curve(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, what was logged there last."""
    found: dict[int, dict[str, float]] = {}
    for row in logged(run_dir):
        for name in ("train/loss", "val/loss"):
            if name in row:
                found.setdefault(row["step"], {})[name] = row[name]
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    folder = tmp_path_factory.mktemp("whole")
    run = command(folder, workers=1)
    assert run.wait() == 0, run.text
    return curve(folder / "run")


class Notes:
    """What the workers have written down, by rank."""

    def __init__(self, folder: Path) -> None:
        self.states: dict[tuple[int, int], dict[int, str]] = {}  # (rank, step): {generation: digest}
        self.pids: dict[int, list[int]] = {}  # by rank, one after another
        self.drawn = [line.split() for line in (folder / "drawn").read_text().splitlines()]
        self.torn_down = Counter((folder / "torn-down").read_text().splitlines())
        self.samples: dict[tuple[int, int, int], list[int]] = {}  # (generation, step, rank)
        for file in folder.glob("states-*"):
            rank = int(file.name.split("-")[1])
            for line in file.read_text().splitlines():
                generation, step, pid, digest = line.split()
                self.states.setdefault((rank, int(step)), {}).setdefault(int(generation), digest)
                if int(pid) not in self.pids.setdefault(rank, []):
                    self.pids[rank].append(int(pid))
        for file in folder.glob("samples-*"):
            rank = int(file.name.split("-")[1])
            for line in file.read_text().splitlines():
                generation, step, *samples = map(int, line.split())
                self.samples.setdefault((generation, step, rank), []).extend(samples)

    def check_samples(self, *, dp: int) -> None:
        """What counts of a step is what the last generation that came there has done."""
        used: Counter[int] = Counter()
        for step in range(STEPS):
            last = max(generation for generation, at, _ in self.samples if at == step)
            shares = {
                rank: sorted(s)
                for (generation, at, rank), s in self.samples.items()
                if (generation, at) == (last, step)
            }
            distinct = {tuple(share) for share in shares.values()}  # ranks of tp and pp have the same
            assert len(distinct) == dp, shares
            used.update(sample for share in distinct for sample in share)
        assert used == dict.fromkeys(range(NUM_SAMPLES), STEPS * 8 // NUM_SAMPLES)

    def check_states(self) -> int:
        """A state that was restored is the one that was there; how many of them were compared."""
        twice = {where: set(digests.values()) for where, digests in self.states.items() if len(digests) > 1}
        assert all(len(digests) == 1 for digests in twice.values()), twice
        return len(twice)

    def check_setups(self, workers: int) -> None:
        """Whether a process is new or not, it draws the same in ``setup``; one that lives on is torn down in between."""
        assert len(self.drawn) > workers and len({tuple(drawn) for _, *drawn in self.drawn}) == 1, self.drawn
        assert max(self.torn_down.values()) > 1, self.torn_down


def check_curve(folder: Path, uninterrupted: dict[int, dict[str, float]]) -> None:
    found = curve(folder / "run")
    assert sorted(found) == sorted(uninterrupted)
    for step, values in uninterrupted.items():
        for name, value in values.items():
            assert apart(found[step][name], value) < 1e-6, (step, name)


CASES = {
    "dp_shard=2": (2, 2, "1:3:forward,0:6:backward,1:12:validation,0:14:optimizer"),
    "tp=2": (2, 1, "1:3:backward,0:5:save,0:*:restore"),
    "pp=2": (2, 1, "0:4:forward,1:8:backward"),
    "dp_replicate=2,dp_shard=2": (4, 4, "3:4:optimizer,0:*:build"),
    "pp=2,tp=2": (4, 1, "2:5:backward"),
}
# With workers that are new programs, as a run's are; elsewhere they are forked, to save their imports.
EXECUTED = "pp=2"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", CASES)
def test_survivors_go_on_in_their_processes(
    mesh: str, tmp_path: Path, uninterrupted: dict[int, dict[str, float]]
) -> None:
    """As reported in torchft#276: after one interruption models differed between nodes."""
    workers, dp, deaths = CASES[mesh]
    before = (lambda: None) if mesh == EXECUTED else forked.install
    run = command(tmp_path, deaths=deaths, workers=workers, mesh=mesh, before=before)
    assert run.wait() == 0, run.text
    died = Counter(int(death.split(":")[0]) for death in deaths.split(","))
    assert len(list(tmp_path.glob("death-*"))) == sum(died.values()), run.text
    check_curve(tmp_path, uninterrupted)
    notes = Notes(tmp_path)
    notes.check_samples(dp=dp)
    assert notes.check_states() >= 1
    assert {rank: len(pids) for rank, pids in notes.pids.items()} == {r: 1 + died[r] for r in range(workers)}
    notes.check_setups(workers)
    found = recoveries(tmp_path / "run")
    lost = sum(one["lost_steps"] for one in found)
    assert lost <= deaths.count("save"), "the step in progress is no loss, but a snapshot may be"


WAYS = {
    # name: deaths, early, new processes by rank, what is said
    "a worker is stopped": ("1:3:forward:stop", False, {1: 1}, "no worker has made progress for"),
    "a worker sleeps": ("0:3:forward:sleep", False, {0: 1}, "no worker has made progress for"),
    "nobody dies": ("1:3:forward:lose", False, {}, "restarting 0 of 2 workers"),
    "a spare is there": ("1:3:forward:spare", False, {1: 1}, "restarting 1 of 2 workers"),
    "nothing is kept": ("1:0:forward", True, {0: 1, 1: 1}, "nothing is kept of this run yet"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_lose_a_worker(
    way: str, tmp_path: Path, uninterrupted: dict[int, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths, early, new, said = WAYS[way]
    monkeypatch.setattr(crew, "LET_GO_SECONDS", 3.0)
    monkeypatch.setattr(crew, "SPARE_AFTER", 0.0)
    more = ["--spares", str(int(way == "a spare is there")), *(["--stall-after", "10"] if "progress" in said else [])]
    run = command(tmp_path, *more, deaths=deaths, early=early)
    assert run.wait() == 0, run.text
    assert said in run.text, run.text
    assert ("most recent call first" in run.text) == ("progress" in said), "a hang shows where it hangs"
    notes = Notes(tmp_path)
    notes.check_samples(dp=2)
    notes.check_states()
    assert {rank: len(pids) - 1 for rank, pids in notes.pids.items()} == {0: 0, 1: 0} | new, run.text
    if not early:  # weights of __init__ are drawn from another stream
        check_curve(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_worker_waits_for_the_word_of_a_frozen_agent_and_not_for_ever(
    tmp_path: Path, uninterrupted: dict[int, dict[str, float]]
) -> None:
    """It has lost the others, and only its agent could say what comes next."""

    def begin() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            lives.ANSWER_SECONDS = 1.0

    deaths = "1:3:forward:frozen,1:9:forward:frozen"
    run = command(tmp_path, "--spares", "0", deaths=deaths, before=lambda: forked.install(begin))

    def left() -> int:
        return sum(map(is_running, workers_of(run.pid)))

    try:
        wait_until(lambda: (tmp_path / "death-0").exists() and is_stopped(run.pid) and not left())
        os.kill(run.pid, signal.SIGCONT)
        wait_until(lambda: (tmp_path / "death-1").exists() and is_stopped(run.pid) and left() == 1)
        time.sleep(2.0)  # longer than the first one has waited
        assert left() == 1
        os.kill(run.pid, signal.SIGCONT)
    except BaseException:
        os.kill(run.pid, signal.SIGKILL)  # what is stopped would be left
        raise
    assert run.wait() == 0, run.text
    assert "restarting all 2 workers" in run.text and "restarting 1 of 2 workers" in run.text, run.text
    assert "Traceback" not in run.text, run.text
    check_curve(tmp_path, uninterrupted)
    notes = Notes(tmp_path)
    notes.check_samples(dp=2)
    assert notes.check_states() >= 1
    assert {rank: len(pids) for rank, pids in notes.pids.items()} == {0: 2, 1: 3}
    assert sum(one["lost_steps"] for one in recoveries(tmp_path / "run")) == 0


def recoveries(run_dir: Path) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "elastictrain", "status", str(run_dir), "--json"]
    found: list[dict[str, Any]] = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)["recoveries"]
    return found


SCRIPT = """
import os, sys
from pathlib import Path
from elastictrain import CheckpointConfig, Trainer
from tests.cli.lives_task import Lives

folder = sys.argv[1]
task = Lives(folder, "1:3:forward")
every = {"snapshot_every": 1} if sys.argv[2] == "live" else {"every_steps": 1}
trainer = Trainer(run_dir=folder + "/run", max_steps=18, val_every=6, log_every=1, micro_batch_size=2,
                  checkpoint=CheckpointConfig(**every))
trainer.fit(task)
Path(folder, "end-" + os.environ["RANK"]).write_text(f"{task.global_step} {float(task.head.weight.sum())}")
"""


@pytest.mark.slow
def test_a_script_lives_on(tmp_path: Path, uninterrupted: dict[int, dict[str, float]]) -> None:
    """The task that it has made is the trained one in the end, in the process that lived on as in the new one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--nproc-per-node", "2", "--spares", "0"]
    run = Command(tmp_path, str(tmp_path / "train.py"), *options, "--", str(tmp_path), "live")
    assert run.wait() == 0, run.text
    check_curve(tmp_path, uninterrupted)
    notes = Notes(tmp_path)
    notes.check_samples(dp=2)
    assert {rank: len(pids) for rank, pids in notes.pids.items()} == {0: 1, 1: 2}
    ends = [(tmp_path / f"end-{rank}").read_text() for rank in range(2)]
    assert ends[0] == ends[1] and ends[0].startswith("18 ")


@pytest.mark.slow
def test_the_same_script_under_torchrun_is_started_anew(
    tmp_path: Path, uninterrupted: dict[int, dict[str, float]]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*argv, str(tmp_path / "train.py"), str(tmp_path), "stored"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_curve(tmp_path, uninterrupted)
    notes = Notes(tmp_path)
    notes.check_samples(dp=2)
    assert {rank: len(pids) for rank, pids in notes.pids.items()} == {0: 2, 1: 2}
