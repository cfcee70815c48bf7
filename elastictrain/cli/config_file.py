"""``--config FILE.yaml``: options by their names, for the command line to override.

Keys are option names with dashes or underscores, a mapping ``set:``, a list ``callback:``, and ``mesh:`` as text or as
a mapping. Values become click's defaults, so they are checked like the options themselves.

On failure: :class:`~elastictrain.errors.UsageError`, with the line for what is not YAML.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from typing import Any

import click
import yaml

from elastictrain.errors import UsageError
from elastictrain.yamlfile import reading


class _Loader(yaml.SafeLoader):
    """Refuses what plain YAML lets pass: a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read(path: str, command: click.Command) -> tuple[dict[str, Any], dict[str, Any]]:
    """Click's defaults by parameter name, and the mapping of ``set:``."""
    with reading(f"--config {path}"), open(path, encoding="utf-8") as file:
        content = yaml.load(file, _Loader)  # noqa: S506 - a SafeLoader
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} holds {_kind(content)}: it must be options, one 'name: value' a line")
    options = {
        _spelled(parameter).replace("-", "_"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in ("config", "help")
    }
    defaults: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            known = [_spelled(option) for option in options.values()]
            near = difflib.get_close_matches(str(key).replace("_", "-"), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--config {path}: unknown key {key!r}; {hint}Keys are option names: {', '.join(known)}")
        if name in names:
            raise UsageError(f"--config {path}: {names[name]} and {key} are one option: keep one of them")
        names[name] = str(key)
        if value is None:
            continue
        if name == "set":
            settings = _settings(path, value)
        else:
            defaults[str(options[name].name)] = _default(path, str(key), value, options[name])
    return defaults, settings


def _settings(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"--config {path}: set holds {_kind(value)}: it must be arguments, one 'name: value' a line")
    return value


def _default(path: str, key: str, value: Any, option: click.Option) -> Any:
    """As click would find it on the command line: text, so that 3.5 is no whole number and yes is none either."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"--config {path}: {key} is {value!r}: it must be true or false")
        return value
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise UsageError(f"--config {path}: {key} is {value!r}: it must be a list of texts, as --{key} takes them")
        return values
    if key == "mesh" and isinstance(value, dict):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    if isinstance(value, list | dict):
        raise UsageError(f"--config {path}: {key} holds {_kind(value)}: it must be one value, as --{key} takes it")
    return str(value)


def _spelled(option: click.Option) -> str:
    return max(option.opts, key=len).lstrip("-")


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else f"the value {value!r}"
