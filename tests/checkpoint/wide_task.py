"""A task whose state is more than one part of an upload, and which stands still after the first step of a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from elastictrain.elastic.membership import current
from elastictrain.machine import write_whole
from tests.checkpoint.interrupted import stand
from tests.cli.net_task import Net

WIDTH = 1000


class Wide(Net):
    """``folder`` is where the file ``hold`` makes it stand."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**{"dim": WIDTH, "lr": 1e-3, **options})
        self.folder = Path(folder)
        self.first: int | None = None

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 1500), nn.Linear(1500, WIDTH), nn.Linear(WIDTH, 1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        hold = self.folder / "hold"
        if self.first is None:
            self.first = self.global_step
            if self.global_rank == 0 and (keeper := current().find_keeper()) is not None:
                write_whole(str(self.folder / "keeper.json"), keeper)
        elif self.global_step > self.first and hold.exists():
            stand(hold, f"worker-{self.global_rank}")
