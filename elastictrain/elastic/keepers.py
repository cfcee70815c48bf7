"""The agent's care for the node's keeper of snapshots: from when a worker first asks for one, there is one.

A worker writes what it wants (the run's key and a name) beside its assignment and sets a word of its cell; the agent's loop
sees the word, and a thread starts a keeper or takes over the one that a killed agent has left, and writes where it is.
Should the keeper die, another one is started. Where the agent knows beforehand what its workers will ask for, the keeper is
there before they do (:meth:`Keepers.prepare`): a start takes a tenth of a second, for which all nodes would wait as this one
joins. Where the run is over, or this node has left and handed its state over, so is
the keeper; and where this node has stood by, if the keepers of those that train hold a newer snapshot by then, twice each
image. On every other way out the agent leaves it and says so: what it holds may be newer than storage, or what is left
of another node, and whoever starts the run again takes it over.

On failure: a keeper that cannot be had is said once, with the reason, and looked for again every few seconds; workers train
without. The agent's loop waits for none of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable

from elastictrain.checkpoint.keeper import LINGER_SECONDS
from elastictrain.checkpoint.keeper_process import KeeperProcess
from elastictrain.elastic.cells import Cells
from elastictrain.elastic.membership import ANSWER, REQUEST
from elastictrain.machine import write_whole

PAUSE = 5.0  # seconds between two tries
END_SECONDS = 5.0  # that a try may still take when the agent ends; a keeper that nobody takes ends by itself


class Keepers:
    """Of one agent.

    Args:
        host: this machine's address for other nodes; None: there are none.
        say: prints one line.
    """

    def __init__(self, host: str | None, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._process = KeeperProcess()
        self._trying: threading.Thread | None = None
        self._next = 0.0
        self._is_told = False
        self._is_unasked = False  # it was prepared, and no worker has asked for it

    def prepare(self, key: bytes, name: str) -> None:
        """Have one before a worker asks for it, in the same words; one that cannot be had is looked for once more then."""

        def ensure() -> None:
            with contextlib.suppress(OSError):
                self._process.ensure(key, name, host=self._host)

        self._is_unasked = True
        self._trying = threading.Thread(target=ensure, name="keepers", daemon=True)
        self._trying.start()

    def begin(self, folder: str) -> None:
        """A generation begins, in this folder; where there is a keeper, its workers need not wait for the answer."""
        if (self._trying is None or not self._trying.is_alive()) and self._process.is_alive:
            with contextlib.suppress(OSError):
                write_whole(os.path.join(folder, ANSWER), self._process.address)

    def tick(self, cells: Cells, folder: str) -> None:
        """A look from the agent's loop; ``folder`` is this generation's."""
        if not cells.wants_keeper() or (self._trying is not None and self._trying.is_alive()):
            return
        self._is_unasked = False
        answer = os.path.join(folder, ANSWER)
        if time.monotonic() < self._next or (self._process.is_alive and os.path.exists(answer)):
            return
        self._trying = threading.Thread(target=self._try, args=(folder, answer), name="keepers", daemon=True)
        self._trying.start()

    def _try(self, folder: str, answer: str) -> None:
        try:
            with open(os.path.join(folder, REQUEST), encoding="utf-8") as file:
                wanted = json.load(file)
            write_whole(answer, self._process.ensure(bytes.fromhex(wanted["key"]), wanted["name"], host=self._host))
        except OSError as error:
            self._next = time.monotonic() + PAUSE
            if not os.path.isdir(folder):  # the generation is over
                return
            if not self._is_told:
                self._say(f"this node has no keeper of snapshots ({error}); looking again every {PAUSE:g} s")
                self._is_told = True
            with contextlib.suppress(OSError):  # nobody is left who would read it, or the disk is full
                write_whole(answer, {"socket": None})

    def end(self, *, is_over: bool, is_out: bool = False) -> None:
        """The agent ends, and what the keeper holds is needed no more; or it stays for whoever starts the run again.

        Args:
            is_out: others train without this node: they may have what it holds.
        """
        if self._trying is not None:
            self._trying.join(END_SECONDS)
        if is_over or (self._is_unasked and self._process.is_new) or (is_out and self._process.is_replaced()):
            self._process.end()
        else:
            if self._process.is_alive:
                self._say(
                    f"the snapshots that this node keeps in memory stay for {LINGER_SECONDS / 60:.0f} minutes: the same"
                    " command goes on from them, if they are newer than the newest checkpoint"
                )
            self._process.leave()
