"""``run.json``: what runs in a run directory. Written once, by rank 0, when everything is built; read by every later start.

What makes two runs different ones (the target, its ``--set`` values, the batch sizes, the seed) must be the same in every
start; the rest (limits, mesh, intervals) may change.

On failure: a file that is damaged, or of another run, is a :class:`~elastictrain.errors.UsageError` with both values and the
remedy; nothing is written. Storage that does not answer raises its own error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir

NAME = "run.json"
_FIXED = {
    "target": "it belongs to",
    "settings": "it was started with --set",
    "global_batch_size": "it was started with global_batch_size",
    "micro_batch_size": "it was started with micro_batch_size",
    "seed": "it was started with seed",
}


def read(run_dir: RunDir) -> dict[str, Any] | None:
    """The file's content; None where the run has not started yet.

    Raises:
        UsageError: it is there and is not a run's.
    """
    try:
        content = run_dir.read_json(NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UsageError(f"{run_dir.join(NAME)} is damaged ({error}): choose another --run-dir") from error
    if not isinstance(content, dict):
        raise UsageError(f"{run_dir.join(NAME)} is not a run's: choose another --run-dir")
    return content


def check(run_dir: RunDir, content: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a start that would make this another run. ``None`` among ``wanted`` leaves a value open.

    Raises:
        UsageError: names the value there and the value here.
    """
    for key, words in _FIXED.items():
        there, here = content.get(key), wanted.get(key)
        same = is_same_target if key == "target" else _same
        if here is not None and there is not None and not same(there, here):
            raise UsageError(
                f"run directory {run_dir}: {words} {_shown(there)}, now {_shown(here)}; choose another --run-dir"
                + ("" if key == "target" else f", with --resume {run_dir} to go on from its newest checkpoint")
            )


def target_of(task: Any) -> str:
    """How the command line would name the class of a task that a script or an import has made."""
    module, name = type(task).__module__, type(task).__qualname__
    file = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    return f"{os.path.basename(file) if file else module}:{name}"


def is_same_target(one: Any, other: Any) -> bool:
    """``train.py:Net``, run as a file or as a script, is the ``train:Net`` or ``package.train:Net`` that is imported."""
    if one == other or not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    (where, _, cls), (other_where, _, other_cls) = one.rpartition(":"), other.rpartition(":")
    is_file = where.endswith(".py"), other_where.endswith(".py")
    names = {_file_of(where), _file_of(other_where)}
    return cls == other_cls and any(is_file) and len(names) == 1


def _file_of(where: str) -> str:
    return where if where.endswith(".py") else f"{where.rpartition('.')[2]}.py"


def id_of(content: dict[str, Any]) -> str:
    """What tells a run apart from all others, by its file."""
    return str(content.get("id") or hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())


def write(run_dir: RunDir, content: dict[str, Any]) -> str:
    """Create the file; the run's id."""
    content = {
        "id": uuid.uuid4().hex,
        **content,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions("elastictrain", "torch", "lightning")},
    }
    run_dir.create((json.dumps(content, indent=2, default=repr) + "\n").encode(), NAME)
    return id_of(content)


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            from elastictrain import __version__

            found[name] = __version__
    return found


def _same(there: Any, here: Any) -> bool:
    """Is a value of now the one in the file? NaN is itself here."""
    here = json.loads(json.dumps(here, default=repr))
    return bool(there == here) or json.dumps(there, sort_keys=True) == json.dumps(here, sort_keys=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or "nothing"
    return str(value)
