from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import server


class MlflowClient:
    def __init__(self, uri: str) -> None:
        pass

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(lifecycle_stage="active", experiment_id="0")

    def create_run(self, experiment_id: str, tags: Any) -> Any:
        name = f"run{len(server.lines('create'))}"
        server.send("create", run=name)
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def get_run(self, run_id: str) -> Any:
        last: dict[str, Any] = {}
        for line in server.lines("log", run_id):
            for key, step in line["steps"].items():
                last[key] = SimpleNamespace(key=key, step=max(step, last[key].step if key in last else 0))
        params = [key for line in server.lines("log", run_id) for key in line["params"]]
        data = SimpleNamespace(to_proto=lambda: SimpleNamespace(metrics=list(last.values()), params=params))
        return SimpleNamespace(info=SimpleNamespace(experiment_id="0"), data=data)

    def update_run(self, run_id: str, status: str) -> None:
        server.send("status", run=run_id, status=status)

    def set_terminated(self, run_id: str, status: str) -> None:
        server.send("status", run=run_id, status=status)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        values, steps = {m.key: m.value for m in metrics}, {m.key: m.step for m in metrics}
        server.send("log", run=run_id, values=values, steps=steps, params={p.key: p.value for p in params})
