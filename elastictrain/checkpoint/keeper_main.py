"""The keeper's process: ``python -m elastictrain.checkpoint.keeper_main DESCRIPTOR``, started by an agent. No torch.

The descriptor is of the socket to listen on; the key comes on standard input, so that it is in no list of processes. It lets
signals pass that are meant for training: its agent ends it. It has a session of its own, because it may outlive its agent's,
and runs at low priority, as a process and as a session (``sched_autogroup_enabled``).

On failure: it ends, and what it held is lost; workers see that and say so.
"""

from __future__ import annotations

import os
import socket
import sys

from elastictrain.checkpoint.keeper import Keeper
from elastictrain.machine import NICENESS, step_aside


def main() -> None:
    step_aside()
    try:
        with open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(NICENESS))
    except OSError:  # Linux does not schedule by session here
        pass
    key, claim = sys.stdin.read().split()
    keeper = Keeper(bytes.fromhex(key), claim=claim)
    keeper.listen(socket.socket(fileno=int(sys.argv[1])))
    keeper.wait()
    os._exit(0)  # threads wait for connections


if __name__ == "__main__":
    main()
