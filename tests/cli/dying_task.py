"""A task whose process ends as told, once a snapshot is where it should be; in the first generation only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from elastictrain.channel import Channel, key_of
from elastictrain.checkpoint.keeper_process import connect_local
from elastictrain.checkpoint.marked import Marked
from elastictrain.elastic.membership import current
from tests.cli.net_task import Net

DIES_AT = 12  # the step that never ends; the snapshots of steps 5 and 10 are there
LAST = 10  # nodes die with what has been copied by then, which may be the one before


class Dying(Net):
    def __init__(self, folder: str, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.how = Path(folder), how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.global_step == DIES_AT and self._is_chosen() and not (self.folder / "died").exists():
            self._die()

    def _is_chosen(self) -> bool:
        return os.environ.get("TEST_NODE", "one") == "two" if self.how == "node" else os.environ["RANK"] == "1"

    def _die(self) -> None:
        mine = current().find_keeper()
        assert mine is not None
        where = mine["socket"]
        if self.how == "node":  # its images must be at the other one
            where = where[:-1] + str(1 - int(where[-1]))
            self._wait_for(where, copies=True)
        else:
            channel = self._wait_for(where, copies=False)
            if self.how == "agent":
                self._damage(channel)
        (self.folder / "died.part").write_text(f"{os.getppid()} {self.step}")
        os.rename(self.folder / "died.part", self.folder / "died")
        if self.how == "node":
            time.sleep(1000)  # until somebody kills the node
        os.kill(os.getppid() if self.how == "agent" else os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def _wait_for(self, where: str, *, copies: bool) -> Channel:
        """Until both ranks' images of the last snapshot are there; of any, where one of them is a copy."""
        token = (self.folder / "run" / "token").read_text()
        assert (self.folder / "run" / "token").stat().st_mode & 0o777 == 0o600
        channel = connect_local(where, key_of(token), seconds=20.0)
        while True:
            channel.send({"kind": "list"})
            held = channel.receive().head["held"]
            there: dict[int, set[tuple[int, bool]]] = {}
            for one in held:
                there.setdefault(one["about"]["step"], set()).add((one["about"]["rank"], one["is_copy"]))
                self.snapshot = one["about"]["snapshot"]
            for self.step in (LAST, LAST - 5)[: 2 if copies else 1]:
                ranks = there.get(self.step, set())
                if len(ranks) == 2 and copies == any(is_copy for _, is_copy in ranks):
                    return channel
            time.sleep(0.01)

    def _damage(self, channel: Channel) -> None:
        channel.send({"kind": "map", "id": self.snapshot, "rank": 0})
        answer = channel.receive()
        assert answer.descriptor is not None
        image = Marked(answer.descriptor, answer.head["num_bytes"], writable=True)
        image.view[len(image.view) - 1] ^= 1
