"""One worker process: ``python -m elastictrain.cli.worker``, started by the agent and by nobody else.

It learns its place from :mod:`elastictrain.elastic.membership`, loads the target, and trains. A spare imports everything and
takes one small step meanwhile. Whatever is raised goes
into a report for the agent, which shows it once; nothing is printed here. Exit codes are the command's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from elastictrain.cli.target import Target, load_class
from elastictrain.elastic.membership import AgentMembership, current
from elastictrain.elastic.report import guarded
from elastictrain.elastic.stalls import STACKS
from elastictrain.errors import EXIT_USAGE

log = logging.getLogger(__name__)


def main() -> int:
    mine = current(idle=_warm_up)  # first of all: from here on the worker ends with its agent
    if not isinstance(mine, AgentMembership):
        print("elastictrain: error: workers are started by `elastictrain run TARGET`", file=sys.stderr)
        return EXIT_USAGE
    faulthandler.register(STACKS)
    try:
        return _work(mine)
    finally:
        mine.leave()


def _warm_up() -> None:
    """What takes seconds the first time, so that a spare can train at once. To be cold is no error."""
    try:
        from elastictrain import warmup

        warmup.warm_up()
    except Exception:
        log.debug("a spare could not warm up", exc_info=True)
    target = Target(**json.loads(sys.argv[1]))
    if target.cls is not None:
        with contextlib.suppress(Exception):  # whatever it is, it is raised again once there is somebody to tell
            _classes.append(load_class(target))


_classes: list[type[Any]] = []  # the target's, where a spare has loaded it


def _work(mine: AgentMembership) -> int:
    job = mine.assignment.job
    target = Target(**job["target"])
    if target.cls is None:
        return guarded(mine, lambda: _run_script(target, job))
    trainings: list[Callable[[], None]] = []
    # An error in loading the target is there on every attempt.
    code = guarded(mine, lambda: trainings.append(_load(mine, target, job)), retry=False)
    if not trainings:
        return code
    mine.run()
    return guarded(mine, trainings[0])


def _load(mine: AgentMembership, target: Target, job: dict[str, Any]) -> Callable[[], None]:
    """Import everything and make the task and its trainer; returns what trains."""
    from elastictrain.callbacks.registry import resolve_callback
    from elastictrain.cli.settings import Signature
    from elastictrain.config import CheckpointConfig, MeshConfig
    from elastictrain.data.randomness import seed_slot
    from elastictrain.data.slots import named_seed

    cls = _classes[0] if _classes else load_class(target)
    values = Signature.of(cls).convert(mine.settings)
    mine.settings = {key: _plain(value) for key, value in values.items()}
    options = dict(job["trainer"])
    mesh = MeshConfig.parse(options.pop("mesh", "auto"))
    more = {name: options.pop(name, None) for name in ("topology", "device_memory")}
    options["mesh"] = dataclasses.replace(mesh, **more)
    how: dict[str, Any] = {}
    if "checkpoint_every" in options:
        every = options.pop("checkpoint_every")
        how = {"every_seconds": "auto"} if every == "auto" else {"every_steps": every}
    how |= {name: options.pop(name) for name in ("snapshot_every", "snapshot_wait") if name in options}
    options["checkpoint"] = CheckpointConfig(**how)
    options["callbacks"] = [resolve_callback(text) for text in options["callbacks"]]
    from elastictrain.trainer import Trainer

    trainer = Trainer(run_dir=job["run_dir"], **options)
    seed_slot(named_seed(options.get("seed", 0), "task"))  # weights that its __init__ makes are the seed's
    task = cls(**values)
    return lambda: trainer.fit(task)


def _run_script(target: Target, job: dict[str, Any]) -> None:
    assert target.file is not None
    folder = os.path.dirname(target.file)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    sys.argv = [target.file, *job["script_args"]]
    runpy.run_path(target.file, run_name="__main__")


def _plain(value: Any) -> Any:
    """A setting as ``run.json`` can hold it."""
    try:
        return json.loads(json.dumps(value, default=list))
    except TypeError:
        return str(value)


if __name__ == "__main__":
    sys.exit(main())
