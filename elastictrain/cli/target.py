"""What TARGET means, and how it is loaded.

``file.py:Class``, ``package.module:Class``, or ``file.py``: the only Task defined in it, and with none the script
itself. :func:`resolve` answers from the source text alone, so that the command line is fast and runs nothing of the
user's; :func:`load_class` runs in a worker. What the source cannot tell (a base class from somewhere else) is left to
the worker. Imports no torch.

On failure: :class:`~elastictrain.errors.UsageError`. What the user's own module raises while it loads is passed on.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from elastictrain.cli.source import Source
from elastictrain.errors import UsageError


@dataclass(frozen=True)
class Target:
    """What runs.

    Args:
        recorded: how ``run.json`` names it: ``file.py:Class``, ``package.module:Class`` or ``file.py``.
        file: absolute path of the source; None for a module without one.
        module: dotted name, for the ``package.module:Class`` form.
        cls: None for a script.
    """

    recorded: str
    file: str | None
    module: str | None
    cls: str | None

    @property
    def default_run_dir(self) -> str:
        """``runs/`` and the name of the class, or of the script, in lower case."""
        return f"runs/{(self.cls or os.path.basename(self.recorded).removesuffix('.py')).lower()}"


def resolve(text: str) -> tuple[Target, Source | None]:
    """Find what ``text`` names, without running it; with its source, where there is one.

    Raises:
        UsageError: the file, module or class is not there, or is certainly not what can be trained.
    """
    where, colon, cls = text.rpartition(":")
    if not colon:
        where, cls = text, ""
    elif not cls.isidentifier() or not where:
        raise UsageError(f"{text}: after the colon comes the name of a class, for instance train.py:MyTask")
    if where.endswith(".py") or os.sep in where or os.path.exists(where):
        return _resolve_file(where, cls)
    if not all(part.isidentifier() for part in where.split(".")):
        raise UsageError(f"{text}: TARGET is file.py, file.py:Class or package.module:Class")
    if not cls:
        raise UsageError(f"{text}: there is no such file; name the class of a module, for instance {where}:MyTask")
    file = _find_module(where)
    target = Target(f"{where}:{cls}", file, where, cls)
    source = Source.read(file) if file is not None and file.endswith(".py") else None
    if source is not None:
        source.check_class(cls, of=where)
    return target, source


def _resolve_file(path: str, cls: str) -> tuple[Target, Source | None]:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a directory: name a file in it, for instance {os.path.join(path, 'train.py')}")
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        names = [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(path), names, n=1)
        hint = f"; did you mean {os.path.join(os.path.dirname(path), near[0])}?" if near else ": check the path"
        raise UsageError(f"{path} does not exist{hint}")
    source, name = Source.read(path), os.path.basename(path)
    if cls:
        source.check_class(cls, of=path)
    else:
        tasks = source.tasks()
        if len(tasks) > 1:
            raise UsageError(
                f"{path} defines {len(tasks)} Tasks, {', '.join(tasks[:-1])} and {tasks[-1]}: name one,"
                f" for instance {path}:{tasks[0]}"
            )
        cls = tasks[0] if tasks else ""
    return Target(f"{name}:{cls}" if cls else name, os.path.abspath(path), None, cls or None), source


def _find_module(name: str) -> str | None:
    """The file of a module, without importing its packages; None where it has none (a namespace, a built-in)."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    where = "on the import path (here, and PYTHONPATH)"
    for part in rest:
        if spec is None:
            break
        inside = list(spec.submodule_search_locations or [])
        where = f"in {first}"
        first = part
        spec = importlib.machinery.PathFinder.find_spec(part, inside)
    if spec is None:
        raise UsageError(f"{name}: there is no module {first} {where}; install it or check the spelling")
    return spec.origin if spec.has_location else None


# ---- loading, in a worker ------------------------------------------------------------------------------------------


class _NoCache(importlib.machinery.SourceFileLoader):
    """Leaves no ``__pycache__`` beside the file, as running it as a script would not."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


def load_class(target: Target) -> type[Any]:
    """Import the module and take the class.

    A file becomes a module under its own name, in ``sys.modules`` and with its directory first on ``sys.path``: what it
    defines can then be pickled, and found again by loader processes that start afresh.

    Raises:
        UsageError: there is no such class, or it is neither a Task nor a LightningModule.
    """
    assert target.cls is not None
    module = _load_file(target.file) if target.module is None else _import(target)
    cls = getattr(module, target.cls, None)
    if cls is None:
        raise UsageError(f"{target.recorded}: {target.cls} is not defined when the module is loaded")

    from lightning.pytorch import LightningModule

    if not (isinstance(cls, type) and issubclass(cls, LightningModule)):
        kind = "a class" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise UsageError(
            f"{target.recorded} is {kind} that is neither a Task nor a LightningModule:"
            " derive it from elastictrain.Task"
        )
    return cls


def _import(target: Target) -> ModuleType:
    assert target.module is not None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(target.module)


def _load_file(path: str | None) -> ModuleType:
    assert path is not None
    folder, name = os.path.dirname(path), os.path.basename(path).removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"elastictrain_target_{name}"  # never take the place of another module
    loader = _NoCache(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except ImportError as error:
        del sys.modules[name]
        if "attempted relative import" in str(error):
            raise UsageError(
                f"{path} imports relative to its package ({error}): name it as package.module:Class"
            ) from error
        raise
    except BaseException:
        del sys.modules[name]
        raise
    return module
