"""From ``kill -9`` of a worker until every rank has done a new step: ours, and stock torchrun with the same model.

    python benchmarks/recovery.py                # 5 rounds of 2 kills each, 4 ranks
    python benchmarks/recovery.py --kills 1 --rounds 2
    python benchmarks/recovery.py --nodes    # 3 nodes: leave, join, death of a member and of the leader

A round is a run of each, one after the other, so that both see the machine in the same mood; a worker is killed when the
run has been quiet for a while, so that the spare is warm and the last checkpoint is written. Ours takes a snapshot of every
step, which the other's checkpoint of every tenth does not match; torchrun gets the variable without which its restarts fail
on gloo (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). Nodes are agents of one run directory, with one worker each; a death is a
``kill -9`` of an agent with its worker and its keeper, timed from the kill; a leave (SIGTERM) and a join are timed from the
last step before to the first step after, of all ranks. Phases are those of ``elastictrain status --json``, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import read_token
from elastictrain.elastic.runlog import RunLog
from elastictrain.rundir import RunDir

MODEL = Path(__file__).with_name("recovery_model.py")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
LIMIT = 120.0

from tests.processes import children_of, listens  # noqa: E402


class Run:
    """One run, in a folder of its own."""

    def __init__(self, command: list[str], folder: Path, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": path}
        with open(folder / "output", "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env)

    def steps(self) -> list[tuple[float, int, int, int]]:
        """``(time, pid, rank, generation)`` of all steps of all ranks, in order."""
        found = []
        for file in self.folder.glob("steps-*"):
            for line in file.read_text().splitlines():
                moment, pid, rank, generation, _ = line.split()
                found.append((float(moment), int(pid), int(rank), int(generation)))
        return sorted(found)

    def wait_for_all(self, *, after: int) -> float:
        """When the last rank had finished its first step in a generation later than that."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and self.process.poll() is None:
            first: dict[int, float] = {}
            for moment, _, rank, generation in self.steps():
                if generation > after:
                    first.setdefault(rank, moment)
            if len(first) == self.num_ranks:
                return max(first.values())
            time.sleep(0.05)
        raise RuntimeError(f"it does not train: {(self.folder / 'output').read_text()[-3000:]}")

    def kill_one(self, rank: int) -> float:
        """Seconds until all ranks have done a new step."""
        generation = self.steps()[-1][3]
        pid = next(pid for _, pid, at, now in self.steps() if (at, now) == (rank, generation))
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        return self.wait_for_all(after=generation) - killed

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()


def ours(folder: Path, num_ranks: int) -> list[str]:
    options = ["--nproc-per-node", str(num_ranks), "--mesh", f"dp_shard={num_ranks}", "--run-dir", str(folder / "run")]
    options += ["--max-steps", "1000000", "--snapshot-every", "1", "--micro-batch-size", "3", "--max-restarts", "100"]
    callback = f"benchmarks.recovery_model:Steps:folder={folder}"
    return [sys.executable, "-m", "elastictrain", "run", f"{MODEL}:Toy", *options, "--callback", callback]


def stock(folder: Path, num_ranks: int) -> list[str]:
    options = [
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(num_ranks),
        "--max-restarts",
        "100",
        "--monitor-interval",
        "0.1",
    ]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(MODEL), str(folder)]


def phases(folder: Path) -> list[dict[str, float]]:
    argv = [sys.executable, "-m", "elastictrain", "status", str(folder / "run"), "--json"]
    done = subprocess.run(argv, capture_output=True, check=True, cwd=ROOT)
    found: list[dict[str, float]] = [one["seconds"] for one in json.loads(done.stdout)["recoveries"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quiet", type=float, default=25.0, help="seconds before each kill")
    parser.add_argument("--nodes", action="store_true", help="of several nodes, instead")
    options = parser.parse_args()
    if options.nodes:
        table("change of nodes, 3 ↔ 2", nodes(options.rounds, options.quiet))
        return
    seconds: dict[str, list[float]] = {"elastictrain": [], "torchrun": []}
    of_phases: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, command in (("elastictrain", ours), ("torchrun", stock)):
            folder = Path(tempfile.mkdtemp(prefix="recovery-"))
            run = Run(command(folder, options.ranks), folder, options.ranks)
            try:
                run.wait_for_all(after=-1)
                for kill in range(options.kills):
                    time.sleep(options.quiet)
                    seconds[name].append(run.kill_one(1 + kill % (options.ranks - 1)))
                    print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
            finally:
                run.stop()
            for one in phases(folder) if name == "elastictrain" else ():
                for phase, value in one.items():
                    of_phases.setdefault(phase, []).append(value)
            shutil.rmtree(folder)
    show(seconds, of_phases)


class Nodes(Run):
    """Several agents of one run directory; the first is the process of the run."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_ranks = folder, num_nodes
        self.agents: list[subprocess.Popen[bytes]] = []
        for _ in range(num_nodes):
            self.start()
        self.process = self.agents[0]

    def start(self) -> None:
        command = [*ours(self.folder, 1), "--nnodes", f"1:{self.num_ranks}", "--local-addr", "127.0.0.1"]
        command[command.index("dp_shard=1")] = "dp_shard=-1"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(self.folder / "output", "a") as out:
            self.agents.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))

    def wait_for_ranks(self, count: int) -> None:
        """Until so many train together."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            steps = self.steps()
            if steps and len({rank for _, _, rank, generation in steps if generation == steps[-1][3]}) == count:
                return
            time.sleep(0.1)
        raise RuntimeError(f"{count} nodes do not train: {(self.folder / 'output').read_text()[-3000:]}")

    def change(self, act: Callable[[], None], *, ranks: int, is_death: bool) -> float:
        """Seconds that it costs; ``ranks``: how many train afterwards."""
        before = self.steps()[-1][3]
        began = time.time()
        act()
        self.num_ranks, whole = ranks, self.num_ranks
        try:
            ended = self.wait_for_all(after=before)
        finally:
            self.num_ranks = whole
        generation = next(g for moment, _, _, g in self.steps() if moment >= ended)
        last = max(moment for moment, _, _, g in self.steps() if g < generation)
        return ended - (began if is_death else last)

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        ours = children_of(agent.pid)
        agent.kill()
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.forget(agent)
        agent.wait()

    def leave(self, agent: subprocess.Popen[bytes]) -> None:
        agent.send_signal(signal.SIGTERM)
        self.forget(agent)

    def forget(self, agent: subprocess.Popen[bytes]) -> None:
        self.agents.remove(agent)
        self.process = self.agents[0]

    def leader(self) -> subprocess.Popen[bytes]:
        run_dir = RunDir(str(self.folder / "run"))
        leader = RunLog(run_dir, key_of(read_token(run_dir))).newest().leader
        assert leader is not None
        return next(one for one in self.agents if listens(one.pid, leader.port))

    def member(self) -> subprocess.Popen[bytes]:
        leader = self.leader()
        return next(one for one in self.agents if one is not leader)

    def stop(self) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            agent.wait(LIMIT)


def nodes(rounds: int, quiet: float) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {
        name: [] for name in ("leave", "join", "death of a member", "death of the leader")
    }
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    run = Nodes(folder, 3)

    def measure(name: str, act: Callable[[], None], *, ranks: int, is_death: bool = False) -> None:
        run.wait_for_ranks(3 if name != "join" else 2)
        time.sleep(quiet)
        seconds[name].append(run.change(act, ranks=ranks, is_death=is_death))
        print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)

    try:
        for _ in range(rounds):
            measure("leave", lambda: run.leave(run.member()), ranks=2)
            measure("join", run.start, ranks=3)
            measure("death of a member", lambda: run.lose(run.member()), ranks=2, is_death=True)
            measure("join", run.start, ranks=3)
            measure("death of the leader", lambda: run.lose(run.leader()), ranks=2, is_death=True)
            measure("join", run.start, ranks=3)
    finally:
        run.stop()
    shutil.rmtree(folder)
    return seconds


def table(what: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n| {what} | median | least | most | n |\n|---|---:|---:|---:|---:|")
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} s | {min(found):.2f} | {max(found):.2f} | {len(found)} |")


def show(seconds: dict[str, list[float]], of_phases: dict[str, list[float]]) -> None:
    table("kill -9 of a worker → first new step of all ranks", seconds)
    ratio = statistics.median(seconds["torchrun"]) / statistics.median(seconds["elastictrain"])
    print(f"\ntorchrun / elastictrain: {ratio:.1f}")
    print("phases, medians: " + ", ".join(f"{name} {statistics.median(v):.3f}" for name, v in of_phases.items()))


if __name__ == "__main__":
    main()
