"""A task that writes down when things happened, from where no account is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.cli.net_task import Net


class Measured(Net):
    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)

    def note(self, what: str) -> None:
        line = {"what": what, "time": time.time(), "rank": int(os.environ["RANK"]), "agent": os.getppid()}
        with open(self.folder / f"{os.getpid()}.notes", "a") as file:
            file.write(json.dumps({**line, "generation": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}) + "\n")

    def tokens_per_sample(self) -> float:
        return 4.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("batch")
        super().on_train_batch_start(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("step")

    def teardown(self, stage: str) -> None:
        self.note("teardown")


def notes(folder: Path) -> list[dict[str, Any]]:
    """In order of time."""
    found = [json.loads(line) for path in folder.glob("*.notes") for line in path.read_text().splitlines()]
    return sorted(found, key=lambda note: note["time"])
