"""What a Python file defines, from its syntax tree: nothing of the user's runs.

Answers are "yes", "no" or "cannot tell from here", and only a certain "no" is refused. Imports no torch.

On failure: a file that cannot be read or parsed is a :class:`~elastictrain.errors.UsageError` with the line.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from elastictrain.cli.settings import UNCHECKED, Parameter, Signature
from elastictrain.errors import UsageError

TASKS = {"elastictrain.Task", "elastictrain.task.Task"}
# Never a LightningModule, nor the base of one.
PLAIN = {"torch", *sys.stdlib_module_names} - {"__main__"}


@dataclass
class Source:
    """One parsed file."""

    path: str
    tree: ast.Module = field(repr=False)

    @classmethod
    def read(cls, path: str) -> Source:
        try:
            with open(path, "rb") as file:
                return cls(path, ast.parse(file.read(), path))
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise UsageError(f"{path}{f', line {line}' if line else ''}: not valid Python: {error}") from error

    def tasks(self) -> list[str]:
        """Classes that certainly derive from Task, in the order of the file."""
        return [name for name in self._classes if self._kind(name, set()) == "task"]

    def check_class(self, name: str, *, of: str) -> None:
        """Refuse a class that is certainly not there, or certainly cannot be trained.

        Args:
            of: how the person named the file or module.

        Raises:
            UsageError
        """
        if name in self._classes:
            if self._kind(name, set()) == "neither":
                bases = ", ".join(ast.unparse(base) for base in self._classes[name].bases) or "none"
                raise UsageError(
                    f"{of}:{name} is neither a Task nor a LightningModule (its bases: {bases}):"
                    " derive it from elastictrain.Task"
                )
        elif name in self._functions:
            raise UsageError(f"{of}:{name} is a function: name a class that derives from elastictrain.Task")
        elif name not in self._other_names and not self._may_define_more:
            near = difflib.get_close_matches(name, self._classes, n=1)
            has = f"its classes are {', '.join(self._classes)}" if self._classes else "it defines none"
            raise UsageError(f"{of} has no class {name}{f'; did you mean {near[0]}?' if near else ''} ({has})")

    def signature(self, name: str) -> Signature | None:
        """The arguments of the class's ``__init__``; None where the source cannot tell."""
        node = self._classes.get(name)
        if node is None or node.decorator_list or node.keywords:
            return None
        made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if made is not None:
            return None if made.decorator_list else _signature(name, made.args)
        if any(isinstance(n, ast.Assign | ast.If | ast.Try) for n in node.body) or len(node.bases) != 1:
            return None
        base = self._origin(node.bases[0])
        if base in TASKS or _is_lightning(base):
            return Signature(name, {}, open=False)
        found = self.signature(base) if base in self._classes and base != name else None
        return found and Signature(name, found.parameters, open=found.open)

    # ---- names -----------------------------------------------------------------------------------------------------

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        """What runs when the file is loaded: the top level, and inside its if, try and with."""

        def walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
            for node in body:
                yield node
                for part in ("body", "orelse", "finalbody"):
                    if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                        yield from walk(getattr(node, part, []))
                for handler in node.handlers if isinstance(node, ast.Try) else []:
                    yield from walk(handler.body)

        return list(walk(self.tree.body))

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self._statements if isinstance(node, ast.ClassDef)}

    @cached_property
    def _functions(self) -> set[str]:
        return {node.name for node in self._statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    @cached_property
    def _imports(self) -> dict[str, str]:
        """Local name -> dotted origin."""
        names: dict[str, str] = {}
        for node in self._statements:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
                if module == "elastictrain" and any(alias.name == "*" for alias in node.names):
                    names["Task"] = "elastictrain.Task"
        return names

    @cached_property
    def _other_names(self) -> set[str]:
        assigned = {
            name.id
            for node in self._statements
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        return assigned | set(self._imports)

    @cached_property
    def _may_define_more(self) -> bool:
        calls = {
            node.func.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        return (
            bool({"exec", "globals", "vars", "setattr"} & calls)
            or "*" in self._imports
            or "__getattr__" in self._functions
        )

    def _origin(self, node: ast.expr) -> str:
        """The dotted origin of a base class: ``et.Task`` -> ``elastictrain.Task``; "" for an expression."""
        if isinstance(node, ast.Subscript):  # Base[T]
            return self._origin(node.value)
        if isinstance(node, ast.Attribute):
            owner = self._origin(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        if isinstance(node, ast.Name):
            return node.id if node.id in self._classes else self._imports.get(node.id, node.id)
        return ""

    def _kind(self, name: str, seen: set[str]) -> str:
        """ "task", "lightning", "neither" or "unknown"."""
        if name in seen:
            return "unknown"
        node, kinds = self._classes[name], set()
        for base in node.bases:
            origin = self._origin(base)
            if origin in self._classes:
                kinds.add(self._kind(origin, seen | {name}))
            elif origin in TASKS:
                kinds.add("task")
            elif _is_lightning(origin):
                kinds.add("lightning")
            elif origin.split(".")[0] in PLAIN or (hasattr(builtins, origin) and origin not in self._other_names):
                kinds.add("neither")
            else:
                kinds.add("unknown")
        if node.decorator_list or node.keywords:
            kinds.add("unknown")
        return next((kind for kind in ("task", "lightning", "unknown") if kind in kinds), "neither")


def _is_lightning(origin: str) -> bool:
    parts = origin.split(".")
    return parts[-1] == "LightningModule" and parts[0] in ("lightning", "pytorch_lightning")


# ---- signatures ----------------------------------------------------------------------------------------------------

_KNOWN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}


def _signature(cls: str, args: ast.arguments) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    parameters = {}
    defaulted = [(arg, i >= without) for i, arg in enumerate(positional)][1:]  # self
    defaulted += [(arg, default is not None) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    for arg, has_default in defaulted:
        parameters[arg.arg] = Parameter(arg.arg, _annotation(arg.annotation), required=not has_default)
    return Signature(cls, parameters, open=args.kwarg is not None)


def _annotation(node: ast.expr | None) -> Any:
    """A simple annotation as a type; UNCHECKED for everything else, which the worker knows better."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _annotation(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            return UNCHECKED
    if isinstance(node, ast.Name):
        return _KNOWN.get(node.id, UNCHECKED)
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _annotation(node.left), _annotation(node.right)
        return UNCHECKED if UNCHECKED in (left, right) else left | right
    return UNCHECKED
