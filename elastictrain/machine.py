"""What this process may use of the machine it runs on, and what the processes beside training have in common there."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

NICENESS = 12  # of processes beside training: the fifteenth part of a core where training needs all of them


def usable_cores() -> int:
    """Processor cores that this process may run on: fewer than there are under ``taskset`` or in a container's set."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def process_began() -> float:
    """When this process was started, by the kernel, in seconds since the epoch; now, where it does not say."""
    now = time.time()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(age, 0.0)


def child_environment() -> dict[str, str]:
    """This process' own environment, in which a Python that it starts finds the same elastictrain."""
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def step_aside() -> None:
    """Run at low priority from now on, and let signals pass that are meant for training."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)


def write_whole(path: str, content: dict[str, Any]) -> None:
    """A small file of this machine that nobody sees half written, for another process."""
    part = f"{path}.{os.getpid()}"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(part, path)
