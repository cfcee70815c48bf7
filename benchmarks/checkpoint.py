"""What a checkpoint costs, each figure beside its physical limit measured in the same run, stock DCP's and Lightning's.

    python benchmarks/checkpoint.py [--minutes 9] [--ranks 1 2] [--gigabytes 0.8 2.4] [--folders /dev/shm /var/tmp]

One table: a column for each number of ranks, size of the state (of all ranks together) and folder. Every cell is the
median of the rounds' ratios. In a round what is compared is measured one after the other, so that neighbours in time meet
the same load of the machine (``benchmarks/checkpoint_case.py``). Slower programs are measured every other round.

Limits: copying the local state in memory; writing it with ``write`` and ``fsync``; reading it with ``read`` into memory that
is already there, from the page cache and (on a disk) from the disk itself; a training step with nothing else going on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COPIES = 7  # of the state, at most: itself, a copy, two images; on tmpfs also three files

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, shared out by size")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.8, 2.4])
    parser.add_argument("--folders", nargs="+", default=["/dev/shm", "/var/tmp"])  # noqa: S108 - a benchmark of them
    parser.add_argument("--saves", type=int, default=200, help="of the measurement of memory; 0: leave it out")
    parser.add_argument("--ours-alone", action="store_true", help="without stock DCP and Lightning")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and what was written is removed
    cases = [
        (ranks, size, folder) for folder in options.folders for size in options.gigabytes for ranks in options.ranks
    ]
    seconds = 60 * options.minutes - 12 * len(cases) - 0.15 * options.saves  # without starts
    share = seconds / sum(size for _, size, _ in cases)
    results = []
    for ranks, size, folder in cases:
        if lacking := not_enough(folder, size):
            print(f"left out: {size} GB in {folder}: {lacking}", flush=True)
            continue
        more = ["--seconds", str(max(10.0, share * size)), *(["--ours-alone"] if options.ours_alone else [])]
        results.append(run(ranks, size, folder, more))
    print(
        f"\n{os.cpu_count()} cores; {cpu_model()}; medians of rounds; every ratio is to the limit in the same column\n"
    )
    print_table(results)
    if options.saves:
        found = run(1, 0.2, options.folders[0], ["--saves", str(options.saves)])
        print(f"\nHost memory of {options.saves} saves of {found['num_bytes'] / 1e9:.2f} GB, two under way at a time,")
        print("images, writer process and what the worker has grown by, divided by the local state:")
        print(", ".join(f"{share:.3f} after {saves}" for saves, share in found["memory"]))


def not_enough(folder: str, gigabytes: float) -> str | None:
    """What is missing for a state of this size; None: nothing."""
    free = shutil.disk_usage(folder).free / 1e9
    with open("/proc/meminfo") as file:
        about = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e9 for line in file}
    memory = about["MemAvailable"]
    if free < 4 * gigabytes:
        return f"{4 * gigabytes:.1f} GB are needed there and {free:.1f} are free"
    if memory < COPIES * gigabytes:
        return f"{COPIES * gigabytes:.1f} GB of memory are needed and {memory:.1f} are free"
    return None


def run(ranks: int, gigabytes: float, folder: str, more: list[str]) -> Result:
    """One column, measured in processes of its own."""
    place = tempfile.mkdtemp(prefix="elastictrain-bench-", dir=folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint_case.py"), place, str(gigabytes), *more]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    running = []
    try:
        for rank in range(ranks):
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            running.append(subprocess.Popen(command, stdout=out, env={**common, "RANK": str(rank)}, text=True))
        said = running[0].communicate()[0]
        if any(one.wait() for one in running):
            sys.exit(f"{ranks} ranks, {gigabytes} GB, {folder}: a rank failed")
    finally:
        for one in running:
            one.kill()
        shutil.rmtree(place, ignore_errors=True)
    found: Result = json.loads(said.splitlines()[-1])
    print(f"{ranks} ranks, {gigabytes} GB, {folder}: {found.get('rounds', '')} rounds", flush=True)
    return {**found, "name": f"{ranks} × {gigabytes / ranks:.2g} GB, {folder}"}


def print_table(results: list[Result]) -> None:
    names = list(dict.fromkeys(name for one in results for name in one["found"]))
    width = max(map(len, names))
    heads = [one["name"] for one in results]
    print(f"| {'':{width}} | " + " | ".join(heads) + " |")
    print("|-" + "-" * width + "-|" + "".join("-" * (len(head) + 1) + ":|" for head in heads))
    rounds = [str(one["rounds"]).rjust(len(head)) for one, head in zip(results, heads, strict=True)]
    print(f"| {'rounds':{width}} | " + " | ".join(rounds) + " |")
    for name in names:
        cells = []
        for one, head in zip(results, heads, strict=True):
            values = one["found"].get(name)
            cells.append(("" if not values else f"{statistics.median(values):.2f}").rjust(len(head)))
        print(f"| {name:{width}} | " + " | ".join(cells) + " |")


def cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
