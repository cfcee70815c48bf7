"""The agent's care for the node's keeper of snapshots: from when a worker first asks for one, there is one.

A worker writes what it wants (the run's key and a name) beside its assignment and sets a word of its cell; the agent's loop
sees the word, starts a keeper or takes over the one that a killed agent has left, and writes where it is. Should the keeper
die, the loop starts another one. With the agent's orderly end the keeper ends too.

On failure: a keeper that cannot be had is said once, with the reason, and looked for again every few seconds; workers train
without.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from elastictrain.checkpoint.keeper_process import KeeperProcess
from elastictrain.elastic.cells import Cells
from elastictrain.elastic.membership import ANSWER, REQUEST, write_whole

PAUSE = 5.0  # seconds between two tries


class Keepers:
    """Of one agent.

    Args:
        host: this machine's address for other nodes; None: there are none.
        say: prints one line.
    """

    def __init__(self, host: str | None, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._process = KeeperProcess()
        self._next = 0.0
        self._is_told = False

    def tick(self, cells: Cells, folder: str) -> None:
        """A look from the agent's loop; ``folder`` is this generation's."""
        if not cells.wants_keeper():
            return
        answer = os.path.join(folder, ANSWER)
        if time.monotonic() < self._next or (self._process.is_alive and os.path.exists(answer)):
            return
        try:
            with open(os.path.join(folder, REQUEST), encoding="utf-8") as file:
                wanted = json.load(file)
            found: dict[str, Any] = self._process.ensure(bytes.fromhex(wanted["key"]), wanted["name"], host=self._host)
        except OSError as error:
            found = {"socket": None}
            self._next = time.monotonic() + PAUSE
            if not self._is_told:
                self._say(f"this node has no keeper of snapshots ({error}); looking again every {PAUSE:g} s")
                self._is_told = True
        write_whole(answer, found)

    def end(self) -> None:
        """The agent ends in good order."""
        self._process.end()
