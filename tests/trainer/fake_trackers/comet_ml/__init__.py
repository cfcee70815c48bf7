"""As much of Comet's client as Lightning's logger uses."""

from __future__ import annotations

from typing import Any

import server


class ExperimentConfig:
    offline_directory = None

    def __init__(self, **options: Any) -> None:
        pass


class _Experiment:
    project_name = "project"

    def __init__(self, key: str) -> None:
        self._key = key

    def get_key(self) -> str:
        return self._key

    def log_other(self, *args: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def __internal_api__log_parameters__(self, **kwargs: Any) -> None:
        pass

    def __internal_api__set_model_graph__(self, **kwargs: Any) -> None:
        pass

    def __internal_api__log_metrics__(self, values: Any, *, step: int, **kwargs: Any) -> None:
        server.send("log", run=self._key, values={name: float(v) for name, v in values.items()}, step=step)


def start(*, experiment_key: str | None = None, **options: Any) -> _Experiment:
    key = experiment_key or f"key{len(server.lines('start'))}"
    server.send("start", run=key)
    return _Experiment(key)
