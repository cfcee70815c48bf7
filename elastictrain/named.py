"""Things that are named on the command line with their arguments: ``NAME[:k=v,...]``.

Values are read by the annotation of the argument (``int``, ``float``, ``bool``, ``str``, ``None`` where it is
optional), others as YAML. Commas inside of brackets or quotes do not separate. Imports no torch.

On failure: every problem is a UsageError, one line that begins with what was written and holds the remedy.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from elastictrain.errors import UsageError
from elastictrain.rundir import without_user


@dataclass(frozen=True)
class Spec:
    """Something that is named and not yet made.

    Args:
        text: as it was written, option included, without what is secret.
        module, cls: where its class is.
        arguments: as text.
    """

    text: str
    module: str
    cls: str
    arguments: Mapping[str, str]


def parse(option: str, text: str, known: Mapping[str, str], *, what: str, aliases: Mapping[str, str] = {}) -> Spec:
    """Read ``NAME[:k=v,...]`` or ``package.module:Class[:k=v,...]``.

    Args:
        option: where it was written, such as ``--callback``.
        known: ``{name: "module:Class"}``.
        what: what is named, for messages.
        aliases: more names, which are not told.

    Raises:
        UsageError: the name is unknown (lists those known, and the closest), or the arguments are not ``k=v,...``.
    """
    shown = f"{option} {_shown(text)}"
    name, _, rest = text.strip().partition(":")
    where = known.get(name) or known.get(kebab(name)) or aliases.get(kebab(name))
    if where is None:
        cls, _, after = rest.partition(":")
        if not (re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) and cls.isidentifier()):
            near = difflib.get_close_matches(kebab(name), known, n=1, cutoff=0.5)
            raise UsageError(
                f"{shown}: there is no {what} {name!r};"
                + (f" did you mean {near[0]}?" if near else "")
                + f" Known: {', '.join(sorted(known))}; or package.module:Class"
            )
        where, rest = f"{name}:{cls}", after
    module, _, cls = where.partition(":")
    return Spec(shown, module, cls.split("[")[0].strip(), _arguments(shown, rest))


def kebab(name: str) -> str:
    """One name for ``GradientClipping``, ``gradient_clipping`` and ``gradient-clipping``, for ``EMA`` and ``ema``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()


def load(spec: Spec, bases: tuple[type[Any], ...], *, wanted: str) -> type[Any]:
    """The class.

    Args:
        bases: it must be a subclass of one of them; that is ``wanted`` in words.
    """
    try:
        module = importlib.import_module(spec.module)
    except ImportError as error:
        raise UsageError(f"{spec.text}: {spec.module} cannot be imported: {error}") from error
    cls = getattr(module, spec.cls, None)
    if cls is None:
        near = difflib.get_close_matches(spec.cls, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{spec.text}: {spec.module} has no {spec.cls}{hint}")
    if not (isinstance(cls, type) and issubclass(cls, bases)):
        raise UsageError(f"{spec.text}: {spec.cls} is not a subclass of {wanted}")
    return cls


def make(spec: Spec, cls: type[Any], arguments: Mapping[str, Any]) -> Any:
    """An object of the class."""
    try:
        return cls(**arguments)
    except UsageError as error:
        raise UsageError(f"{spec.text}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{spec.text}: {cls.__name__} refuses its arguments: {error}") from error


# ---- arguments -----------------------------------------------------------------------------------------------------


_SECRET = re.compile(r"key|token|passw|secret|credential", re.IGNORECASE)  # in the name of an argument

_SECRET_INSIDE = re.compile(rf"(?:{_SECRET.pattern})\w*[\"']?\s*[:=]", re.IGNORECASE)


def _shown(text: str) -> str:
    """As it may be printed: values of arguments whose names say that they are secret are left out."""
    return ",".join(map(_shown_part, _split(text)))


def _shown_part(part: str) -> str:
    name, equals, value = part.partition("=")
    is_secret = equals and (_SECRET.search(name.rpartition(":")[2]) or _SECRET_INSIDE.search(value))
    return f"{name}=…" if is_secret else without_user(part)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _arguments(text: str, rest: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for part in _split(rest):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise UsageError(f"{text}: {_shown_part(part).strip()!r} is not NAME=VALUE; write NAME:k=v,k2=v2")
        if name in arguments:
            raise UsageError(f"{text}: {name} is given twice")
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


def convert(spec: Spec, cls: type[Any]) -> dict[str, Any]:
    """The arguments to call the class with."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    various = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, parameter in parameters.items() if parameter.kind not in various]
    try:
        hints = typing.get_type_hints(cls.__init__)
    except Exception:  # an annotation that exists for type checkers only; where it is text, values are YAML
        hints = {name: parameters[name].annotation for name in names}
    for name in spec.arguments:
        if name not in names and not takes_any:
            near = difflib.get_close_matches(name, names, n=1)
            raise UsageError(
                f"{spec.text}: {cls.__name__} has no argument {name!r};"
                + (f" did you mean {near[0]}?" if near else "")
                + f" It takes {', '.join(names) or 'none'}"
            )
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in spec.arguments]:
        example = ",".join(f"{name}=…" for name in missing)
        raise UsageError(f"{spec.text}: {cls.__name__} needs {', '.join(missing)}; add {example}")
    return {name: _value(spec, name, text, hints.get(name, Any)) for name, text in spec.arguments.items()}


def _value(spec: Spec, name: str, text: str, annotation: Any) -> Any:
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
        raise UsageError(f"{spec.text}: {_shown_part(f'{name}={text!r}')} is not {names}")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(
            f"{spec.text}: {_shown_part(f'{name}={text!r}')} is not YAML: {str(error).splitlines()[0]}"
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
