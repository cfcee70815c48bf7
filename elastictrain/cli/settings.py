"""``--set k=v`` and the ``set:`` of a config file, as the arguments of a class's ``__init__``.

Text is read by the argument's annotation: int, float, bool, str, None, unions, Literal, enums, paths, lists, tuples,
sets and mappings of those; without one by the type of its default; everything else as YAML. Values of a config file
come with YAML's types and are held to the same annotations. Imports no torch.

On failure: :class:`~elastictrain.errors.UsageError`: an unknown key names the closest and all valid ones, a wrong value
names the key, the value and what is expected, a missing argument says which ``--set`` is needed.
"""

from __future__ import annotations

import collections.abc
import difflib
import enum
import inspect
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from elastictrain.errors import UsageError

UNCHECKED = object()  # an annotation that is not known here

# Their __init__ takes (*args, **kwargs) and refuses all of them.
_FRAMEWORKS = ("lightning", "pytorch_lightning", "torch", "elastictrain", "builtins")


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: Any
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a class takes.

    Args:
        open: it has ``**kwargs``: any other key is taken too.
    """

    cls: str
    parameters: Mapping[str, Parameter]
    open: bool

    @classmethod
    def of(cls, kind: type[Any]) -> Signature:
        """Of a loaded class; with ``**kwargs`` the arguments of its bases count too."""
        parameters: dict[str, Parameter] = {}
        is_open = True
        for base in kind.__mro__:
            made = vars(base).get("__init__")
            if made is None:
                continue
            if not is_open or base.__module__.split(".")[0] in _FRAMEWORKS:
                break
            is_open = False
            try:
                hints = typing.get_type_hints(made)
            except Exception:  # a name that exists for type checkers only
                hints = {}
            for name, parameter in list(inspect.signature(made).parameters.items())[1:]:
                if parameter.kind is parameter.VAR_KEYWORD:
                    is_open = True
                elif parameter.kind is not parameter.VAR_POSITIONAL:
                    required = parameter.default is parameter.empty
                    annotation = hints.get(name, _of_default(parameter))
                    parameters.setdefault(name, Parameter(name, annotation, required))
        return cls(kind.__name__, parameters, open=is_open and bool(parameters or _own_init(kind)))

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to call the class with.

        Args:
            given: text from the command line, or values from YAML.

        Raises:
            UsageError: see the module.
        """
        values = {key: self._value(key, value) for key, value in given.items()}
        if missing := [p.name for p in self.parameters.values() if p.required and p.name not in given]:
            needed = " ".join(f"--set {name}=…" for name in missing)
            raise UsageError(f"{self.cls} needs {', '.join(missing)}: add {needed}")
        return values

    def _value(self, key: str, value: Any) -> Any:
        shown = f"--set {key}={value}"
        if key not in self.parameters and not self.open:
            near = difflib.get_close_matches(key, self.parameters, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ";"
            takes = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes no arguments"
            raise UsageError(f"{shown}: {self.cls} has no argument {key}{hint} {takes}")
        annotation = self.parameters[key].annotation if key in self.parameters else Any
        if annotation is UNCHECKED:
            return value
        try:
            return _read(value, annotation)
        except ValueError as error:
            reason = f" ({error})" if str(error) else ""
            raise UsageError(f"{shown}: {self.cls} wants {key} to be {describe(annotation)}{reason}") from None


def _own_init(kind: type[Any]) -> bool:
    made = next(base for base in kind.__mro__ if "__init__" in vars(base))
    return made.__module__.split(".")[0] not in _FRAMEWORKS


def _of_default(parameter: inspect.Parameter) -> Any:
    """Without an annotation, the default says the type; a whole number may stand for any number."""
    default = parameter.default
    if default is parameter.empty or default is None:
        return Any
    return int | float if type(default) is int else type(default) if type(default) in _SCALARS else Any


# ---- reading -------------------------------------------------------------------------------------------------------


def _read(value: Any, annotation: Any) -> Any:
    """``value`` as the annotation wants it; ValueError if it is not."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _read(value, args[0])
    if annotation in (Any, object, inspect.Parameter.empty):
        return _yaml(value)
    if origin in (typing.Union, types.UnionType):
        return _read_union(value, args)
    if annotation in (None, types.NoneType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "~", "")):
            return None
        raise ValueError
    if origin is typing.Literal:
        for choice in args:
            if value == choice or (isinstance(value, str) and value == str(choice)):
                return choice
        raise ValueError
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    kind = origin or annotation
    if isinstance(kind, type):
        if issubclass(kind, enum.Enum):
            return _read_enum(value, kind)
        if issubclass(kind, pathlib.PurePath) and isinstance(value, str):
            return kind(value)
        if kind is tuple:
            return _read_tuple(value, args)
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](_read(item, args[0] if args else Any) for item in _items(value))
        if kind in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
            return _read_mapping(value, args)
    raise ValueError("it cannot be given on the command line")


def _read_union(value: Any, members: Sequence[Any]) -> Any:
    # "none" means None, then numbers before text, which fits everything
    last = [member for member in members if member is str]
    first = [member for member in members if member is types.NoneType]
    for member in [*first, *(m for m in members if m not in (str, types.NoneType)), *last]:
        try:
            return _read(value, member)
        except ValueError:
            continue
    raise ValueError


def _read_bool(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    if word in (True, "true", "yes", "on", "1") and not isinstance(word, float):
        return True
    if word in (False, "false", "no", "off", "0") and not isinstance(word, float):
        return False
    raise ValueError


def _read_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _read_float(value)  # 1e6
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    if not isinstance(value, int | float):
        raise ValueError
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    try:
        return float(value)
    except ValueError:
        raise ValueError from None


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("put it in quotes")
    return value


_SCALARS: dict[Any, Any] = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str}
_COLLECTIONS: dict[Any, Any] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
}


def _read_enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if value in (member.name, member.value) or (isinstance(value, str) and value == str(member.value)):
            return member
    raise ValueError


def _read_tuple(value: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    items = _items(value)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_read(item, args[0]) for item in items)
    if not args:
        return tuple(_read(item, Any) for item in items)
    if len(items) != len(args):
        raise ValueError(f"{len(items)} values")
    return tuple(_read(item, arg) for item, arg in zip(items, args, strict=True))


def _read_mapping(value: Any, args: Sequence[Any]) -> dict[Any, Any]:
    value = _yaml(value)
    if not isinstance(value, dict):
        raise ValueError
    key_kind, item_kind = args or (Any, Any)
    return {_read(key, key_kind): _read(item, item_kind) for key, item in value.items()}


def _items(value: Any) -> list[Any]:
    """A YAML list, or text cut at commas."""
    if isinstance(value, str):
        text = value.strip()
        value = _yaml(text) if text.startswith("[") else [part.strip() for part in text.split(",")] if text else []
    if not isinstance(value, list):
        raise ValueError
    return value


def _yaml(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for number in (int, float):  # YAML 1.1 takes 1e-3 for text
        try:
            return number(value)
        except ValueError:
            continue
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from error


def describe(annotation: Any) -> str:
    """An annotation in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in words:
        return words[annotation]
    if annotation in (None, types.NoneType):
        return "none"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return f"one of {', '.join(member.name for member in annotation)}"
    if origin in _COLLECTIONS and args:
        return f"a list, each {describe(args[0])}: 1,2 or [1, 2]"
    if origin is tuple and args:
        kinds = [describe(arg) if arg is not Ellipsis else "…" for arg in args]
        return f"a list of {', '.join(kinds)}"
    return getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else str(annotation)
