"""From ``kill -9`` of a worker until every rank has done a new step: ours, stock torchrun, torchft, and Lightning.

    python benchmarks/recovery.py                      # 2 rounds of 5 kills each, 4 ranks
    python benchmarks/recovery.py --only elastictrain
    python benchmarks/recovery.py --nodes              # 3 nodes: 10 leaves, 10 + 10 deaths of members and leaders, 30 joins

A round is a run of each, one after the other, so that all see the machine in the same mood.

* elastictrain: FSDP2, a snapshot of every step; a worker is killed when a spare is warm.
* torchrun: FSDP2, a checkpoint of every tenth step. It gets the variable without which its restarts fail on gloo
  (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).
* torchft, where it is installed: replicated; a replica that is killed is started again at once, and gets its weights from
  the others. The time until those have done a step without it is in a line of its own.
* Lightning: DDP, a checkpoint of every step. All processes are killed, and the command is given again at once.

Nodes are agents of one run directory, with one worker each and no spares, which do nothing for another node; a death is a
``kill -9`` of an agent with its worker and its keeper, timed from the kill; a leave (SIGTERM) and a join are timed from the
last step before to the first step after, of all ranks. Phases are those of ``elastictrain status --json``, in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.recovery_runs import ROOT, Nodes, Run  # noqa: E402

Seconds = dict[str, list[float]]
Phases = dict[str, dict[str, list[float]]]  # of each event, by phase


def ours(folder: Path, num_ranks: int) -> list[str]:
    options = ["--nproc-per-node", str(num_ranks), "--mesh", "dp_shard=-1", "--run-dir", str(folder / "run")]
    options += ["--max-steps", "1000000", "--snapshot-every", "1", "--micro-batch-size", "3", "--max-restarts", "1000"]
    options += ["--callback", f"benchmarks.recovery_task:Steps:folder={folder}"]
    return [sys.executable, "-m", "elastictrain", "run", f"{HERE / 'recovery_task.py'}:Toy", *options]


def stock(folder: Path, num_ranks: int) -> list[str]:
    options = [
        "--nnodes",
        "1",
        "--nproc-per-node",
        str(num_ranks),
        "--max-restarts",
        "1000",
        "--monitor-interval",
        "0.1",
    ]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(HERE / "recovery_model.py"), str(folder)]


def torchft(folder: Path, num_ranks: int) -> list[str]:
    return [sys.executable, str(HERE / "recovery_torchft.py"), str(folder), str(num_ranks)]


def lightning(folder: Path, num_ranks: int, start: int) -> list[str]:
    return [sys.executable, str(HERE / "recovery_lightning.py"), str(folder), str(num_ranks), str(start)]


# ---- a worker dies ---------------------------------------------------------------------------------------------------


def of_elastictrain(run: Run, kill: int) -> dict[str, float]:
    run.wait_for_spare()
    return {"elastictrain": run.kill_one(1 + kill % (run.num_ranks - 1))}


def of_torchrun(run: Run, kill: int) -> dict[str, float]:
    return {"torchrun": run.kill_one(1 + kill % (run.num_ranks - 1))}


def of_torchft(run: Run, kill: int) -> dict[str, float]:
    """Each of its replicas counts its own starts."""
    steps, (turn, rank) = run.steps, divmod(kill, run.num_ranks - 1)
    rank += 1
    steps.look()
    os.kill(steps.pids[turn, rank], signal.SIGKILL)
    killed = steps.mark()
    run.wait(lambda: (turn + 1, rank) in steps.first, "the new replica does not train")
    left = max(steps.next[one] for one in range(run.num_ranks) if one != rank)
    return {"torchft": steps.first[turn + 1, rank] - killed, "torchft, those that are left": left - killed}


def of_lightning(run: Run, kill: int) -> dict[str, float]:
    """From the death of all its processes; they are children of one that has a session of its own."""
    os.killpg(run.process.pid, signal.SIGKILL)
    killed = time.time()
    run.process.wait()
    run.process = run.launch(lightning(run.folder, run.num_ranks, kill + 1))
    return {"lightning": run.began(run.wait_for_all(after=kill)) - killed}


LOSES: dict[str, Callable[[Run, int], dict[str, float]]] = {
    "elastictrain": of_elastictrain,
    "torchrun": of_torchrun,
    "torchft": of_torchft,
    "lightning": of_lightning,
}


def begin(name: str, folder: Path, num_ranks: int) -> Run:
    if name == "elastictrain":
        return Run([*ours(folder, num_ranks), "--spares", "1"], folder, num_ranks)
    if name == "torchrun":
        return Run(stock(folder, num_ranks), folder, num_ranks, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    if name == "torchft":
        return Run(torchft(folder, num_ranks), folder, num_ranks)
    return Run(lightning(folder, num_ranks, 0), folder, num_ranks)


def workers(names: list[str], *, rounds: int, kills: int, num_ranks: int, quiet: float) -> tuple[Seconds, Phases]:
    seconds: Seconds = {}
    phases: Phases = {}
    for _ in range(rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="recovery-"))
            run = begin(name, folder, num_ranks)
            try:
                run.wait_for_all(after=-1)
                for kill in range(kills):
                    time.sleep(quiet)
                    for what, found in LOSES[name](run, kill).items():
                        seconds.setdefault(what, []).append(found)
                        print(f"{what}: {found:.2f} s", flush=True)
            finally:
                run.stop()
            if name == "elastictrain":
                take_phases(folder, ["a worker dies"] * kills, phases)
            shutil.rmtree(folder)
    return seconds, phases


# ---- nodes come and go -----------------------------------------------------------------------------------------------


def nodes(rounds: int, quiet: float) -> tuple[Seconds, Phases]:
    names = ("a node leaves", "a node joins", "a member dies", "the leader dies")
    seconds: Seconds = {name: [] for name in names}
    phases: Phases = {}
    happened: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    command = [*ours(folder, 1), "--nnodes", "1:3", "--local-addr", "127.0.0.1", "--spares", "0"]
    command += ["--rdzv-conf", "return_delay=0"]  # all nodes are one host, which is lost again and again
    run = Nodes(command, folder, 3)

    def measure(name: str, act: Callable[[], None], *, ranks: int, is_death: bool = False) -> None:
        time.sleep(quiet)
        seconds[name].append(run.change(act, ranks=ranks, is_death=is_death))
        happened.append(name)
        print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)

    def refill() -> None:
        measure("a node joins", run.join, ranks=3)

    try:
        run.wait_for_all(after=-1)
        for number in range(rounds):
            measure("a node leaves", lambda number=number: run.leave(run.member(number)), ranks=2)  # type: ignore[misc]
            refill()
            measure("a member dies", lambda number=number: run.lose(run.member(number)), ranks=2, is_death=True)  # type: ignore[misc]
            refill()
            measure("the leader dies", lambda: run.lose(run.leader()), ranks=2, is_death=True)
            refill()
    finally:
        run.stop()
    take_phases(folder, happened, phases)
    shutil.rmtree(folder)
    return seconds, phases


# ---- what is shown ---------------------------------------------------------------------------------------------------


def take_phases(folder: Path, happened: list[str], phases: Phases) -> None:
    """As the run's ledger has them, of each event; none where it does not have one for each."""
    argv = [sys.executable, "-m", "elastictrain", "status", str(folder / "run"), "--json"]
    done = subprocess.run(argv, capture_output=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout)["recoveries"]
    if len(found) != len(happened):
        print(f"{len(happened)} events, and the ledger has {len(found)}: their phases are left out")
        return
    for name, one in zip(happened, found, strict=True):
        for phase, value in one["seconds"].items():
            phases.setdefault(name, {}).setdefault(phase, []).append(value)


def show(what: str, seconds: Seconds, phases: Phases) -> None:
    print(f"\n| {what} | median | least | most | n |\n|---|---:|---:|---:|---:|")
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} s | {min(found):.2f} | {max(found):.2f} | {len(found)} |")
    if phases:
        columns = list(dict.fromkeys(phase for one in phases.values() for phase in one))
        print(f"\n| phases, medians in seconds | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, one in phases.items():
        print(f"| {name} | {' | '.join(f'{statistics.median(one[phase]):.3f}' for phase in columns)} |")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is stopped on every way out
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="2, or 10 with --nodes")
    parser.add_argument("--kills", type=int, default=5, help="in each round")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quiet", type=float, default=1.5, help="seconds before each event")
    parser.add_argument("--only", nargs="+", choices=LOSES, default=list(LOSES))
    parser.add_argument("--nodes", action="store_true", help="of several nodes, instead")
    options = parser.parse_args()
    if options.nodes:
        show("change of nodes, 3 ↔ 2", *nodes(options.rounds or 10, options.quiet))
        return
    how = {"rounds": options.rounds or 2, "kills": options.kills, "num_ranks": options.ranks, "quiet": options.quiet}
    names = options.only
    if "torchft" in names and importlib.util.find_spec("torchft") is None:
        print("torchft is left out: it is not installed (pip install torchft-nightly)")
        names.remove("torchft")
    seconds, phases = workers(names, **how)
    show("kill -9 of a worker → first new step of all ranks", seconds, phases)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name in medians.keys() - {"elastictrain"} if "elastictrain" in medians else ():
        print(f"{name} / elastictrain: {medians[name] / medians['elastictrain']:.1f}")


if __name__ == "__main__":
    main()
