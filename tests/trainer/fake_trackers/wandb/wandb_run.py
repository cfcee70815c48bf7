from __future__ import annotations

from typing import Any

import server


class Config(dict):  # type: ignore[type-arg]
    def update(self, values: Any, allow_val_change: bool = False) -> None:
        super().update(values)


class Run:
    def __init__(self, name: str) -> None:
        self.id, self.name, self.config = name, name, Config()
        self.summary = {}
        for line in server.lines("log", name):
            self.summary.update(line["values"])

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        server.send("log", run=self.id, values=values)
