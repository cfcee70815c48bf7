"""What ``/proc`` says of other processes, for tests. No torch: light workers import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

FORKED = "forkedworker"  # how the name of a forked worker begins, with its rank behind: its command line is its agent's


def is_running(pid: int) -> bool:
    """It is there, and no zombie."""
    try:
        return _fields(pid)[0] != "Z"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """It is there, and SIGSTOP has frozen it."""
    try:
        return _fields(pid)[0] == "T"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """
    Raises:
        OSError: it has ended.
    """
    return int(_fields(pid)[1])


def began_at(pid: int) -> float:
    """When the kernel started it, seconds since the epoch.

    Raises:
        OSError: it has ended.
    """
    after_boot = int(_fields(pid)[19]) / os.sysconf("SC_CLK_TCK")
    return after_boot + (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))  # nothing slow between the two clocks


def children_of(pid: int, *, running: str = "") -> list[int]:
    """Its children, oldest number first; ``running``: only those with this in their command line, or in their name."""
    found = []
    for child in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        try:
            if int(_fields(child)[1]) != pid:
                continue
            if any(running in Path(f"/proc/{child}/{where}").read_text() for where in ("cmdline", "comm")):
                found.append(child)
        except OSError:  # it has just ended
            continue
    return found


def listens(pid: int, port: int) -> bool:
    """Does it listen on that port, at some IPv4 address?"""
    try:
        sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return False
    return any(
        f"socket:[{line[9]}]" in sockets for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")
    )


def _fields(pid: int) -> list[str]:
    """Its state, its parent, …: what follows its name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
