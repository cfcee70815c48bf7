"""From ``--callback NAME[:k=v,...]`` to a callback.

NAME is one of

* a callback that comes with elastictrain, by its file or its class and in any spelling: ``gradient-clipping``,
  ``gradient_clipping``, ``GradientClipping``;
* an entry point of the group ``elastictrain.callbacks``, under its own name;
* ``package.module:Class``, then ``package.module:Class:k=v,...``. What follows the first colon is a class if it is an
  identifier and what stands before is no known name.

Values are read by the annotation of the argument (``int``, ``float``, ``bool``, ``str``, ``None`` where it is
optional), others as YAML. Commas inside of brackets or quotes do not separate.

On failure: every problem is a UsageError, one line with the remedy. :func:`parse_callback` finds those that need no
import (unknown name, malformed arguments) and imports no torch, so that the command line can say so at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from elastictrain.callbacks import HOME
from elastictrain.errors import UsageError

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as LightningCallback

    from elastictrain.callback import Callback

GROUP = "elastictrain.callbacks"


@dataclass(frozen=True)
class CallbackSpec:
    """A callback that is named and not yet made: where its class is, and its arguments as text."""

    text: str
    module: str
    cls: str
    arguments: Mapping[str, str]


def known_callbacks() -> dict[str, str]:
    """``{name: "module:Class"}`` of the callbacks that come with elastictrain and of installed entry points."""
    known = {_kebab(module.rpartition(".")[2]): f"{module}:{name}" for name, module in HOME.items()}
    for entry in importlib.metadata.entry_points(group=GROUP):
        known.setdefault(entry.name, entry.value)
    return known


def parse_callback(text: str) -> CallbackSpec:
    """Read ``NAME[:k=v,...]``.

    Raises:
        UsageError: the name is unknown (lists those known, and the closest), or the arguments are not ``k=v,...``.
    """
    known = known_callbacks()
    name, _, rest = text.strip().partition(":")
    aliases = {_kebab(cls): f"{module}:{cls}" for cls, module in HOME.items()}
    where = known.get(name) or known.get(_kebab(name)) or aliases.get(_kebab(name))
    if where is None:
        cls, _, after = rest.partition(":")
        if not (re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) and cls.isidentifier()):
            raise _unknown(text, name, known)
        where, rest = f"{name}:{cls}", after
    module, _, cls = where.partition(":")
    return CallbackSpec(text, module, cls.split("[")[0].strip(), _arguments(text, rest))


def resolve_callback(text: str) -> Callback | LightningCallback:
    """Make the callback that ``NAME[:k=v,...]`` names; one of Lightning's may be named by ``module:Class``.

    Raises:
        UsageError: as :func:`parse_callback`; the module or class is not there, the class is no callback, an argument
            is unknown, missing, or not of its type.
    """
    spec = parse_callback(text)
    cls = _load(spec)
    arguments = _convert(spec, cls)
    try:
        made = cls(**arguments)
    except UsageError as error:
        raise UsageError(f"--callback {text}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"--callback {text}: {cls.__name__} refuses its arguments: {error}") from error
    return typing.cast("Callback | LightningCallback", made)


# ---- names ---------------------------------------------------------------------------------------------------------


def _kebab(name: str) -> str:
    """One name for ``GradientClipping``, ``gradient_clipping`` and ``gradient-clipping``, for ``EMA`` and ``ema``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()


def _unknown(text: str, name: str, known: Mapping[str, str]) -> UsageError:
    near = difflib.get_close_matches(_kebab(name), known, n=1, cutoff=0.5)
    return UsageError(
        f"--callback {text}: there is no callback {name!r};"
        + (f" did you mean {near[0]}?" if near else "")
        + f" Known: {', '.join(sorted(known))}; or package.module:Class"
    )


def _load(spec: CallbackSpec) -> type[Any]:
    try:
        module = importlib.import_module(spec.module)
    except ImportError as error:
        raise UsageError(f"--callback {spec.text}: {spec.module} cannot be imported: {error}") from error
    cls = getattr(module, spec.cls, None)
    if cls is None:
        near = difflib.get_close_matches(spec.cls, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"--callback {spec.text}: {spec.module} has no {spec.cls}{hint}")

    from lightning.pytorch.callbacks import Callback as LightningCallback

    from elastictrain.callback import Callback

    if not (isinstance(cls, type) and issubclass(cls, (Callback, LightningCallback))):
        raise UsageError(f"--callback {spec.text}: {spec.cls} is not a subclass of elastictrain.Callback")
    return cls


# ---- arguments -----------------------------------------------------------------------------------------------------


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _arguments(text: str, rest: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for part in _split(rest):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise UsageError(f"--callback {text}: {part.strip()!r} is not NAME=VALUE; write NAME:k=v,k2=v2")
        if name in arguments:
            raise UsageError(f"--callback {text}: {name} is given twice")
        arguments[name] = value.strip()
    return arguments


def _split(text: str) -> list[str]:
    """Cut at commas that are not inside of brackets or quotes."""
    parts, start, depth, quote = [], 0, 0, ""
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts if text.strip() else []


def _convert(spec: CallbackSpec, cls: type[Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    various = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, parameter in parameters.items() if parameter.kind not in various]
    try:
        hints = typing.get_type_hints(cls.__init__)
    except Exception:  # an annotation that cannot be evaluated; values are then YAML
        hints = {}
    for name in spec.arguments:
        if name not in names and not takes_any:
            near = difflib.get_close_matches(name, names, n=1)
            raise UsageError(
                f"--callback {spec.text}: {cls.__name__} has no argument {name!r};"
                + (f" did you mean {near[0]}?" if near else "")
                + f" It takes {', '.join(names) or 'none'}"
            )
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in spec.arguments]:
        example = ",".join(f"{name}=…" for name in missing)
        raise UsageError(f"--callback {spec.text}: {cls.__name__} needs {', '.join(missing)}; add {example}")
    return {name: _value(spec, name, text, hints.get(name, Any)) for name, text in spec.arguments.items()}


def _value(spec: CallbackSpec, name: str, text: str, annotation: Any) -> Any:
    """``text`` as the annotation wants it."""
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if types.NoneType in kinds and text.lower() in ("none", "null", ""):
        return None
    wanted = [kind for kind in (bool, int, float, str) if kind in kinds]
    for kind in wanted:
        try:
            return _scalar(text, kind)
        except ValueError:
            continue
    if wanted and len(wanted) == len([kind for kind in kinds if kind is not types.NoneType]):
        names = " or ".join(_WORDS[kind] for kind in wanted)
        raise UsageError(f"--callback {spec.text}: {name}={text!r} is not {names}")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f"--callback {spec.text}: {name}={text!r} is not YAML: {str(error).splitlines()[0]}"
        ) from error


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _scalar(text: str, kind: type[Any]) -> Any:
    if kind is bool:
        if (word := text.lower()) not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            raise ValueError(text)
        return word in ("true", "yes", "on", "1")
    if kind is str and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return kind(text)
