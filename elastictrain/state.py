"""The flat named state: everything that must survive, keyed by name.

One flat dict holds it all: ``model.{fqn}``, ``optim.{i}.{fqn}.{key}``, ``pg.{i}.{fqn}.{option}``, ``scheduler.{i}``,
``trainer.*``, ``data.*``, ``metrics.*``, ``callback.{name}``, ``ema.{fqn}``. A value is a tensor (DTensor where it is
sharded) or a JSON value. Names never carry a rank or a shard index, so any layout saves it and any layout loads it.

Nested Python (a scheduler's or callback's ``state_dict``) becomes flat through :func:`pack` and comes back, equal,
through :func:`unpack`: tensors get names of their own, the rest is JSON with a tag where JSON has no word for the type.
Nothing here executes what it reads; an object of another type is refused when it is packed.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastictrain.errors import CheckpointError, UsageError

FlatState = dict[str, Any]  # name -> Tensor | JSON value

_TAG = "$"


def pack(name: str, value: Any) -> FlatState:
    """Nested Python as flat entries: the structure under ``name``, each tensor under ``name`` plus its path.

    Raises:
        UsageError: ``value`` holds an object that is neither a tensor, a number, text, bytes, None, nor a list, tuple,
            set or dict of those.
    """
    flat: FlatState = {}
    flat[name] = _encode(value, name, flat)
    return flat


def unpack(name: str, flat: Mapping[str, Any]) -> Any:
    """What :func:`pack` was given. Tensors are those of ``flat``, not copies.

    Raises:
        CheckpointError: ``name`` or one of its tensors is missing from ``flat``.
    """
    if name not in flat:
        raise CheckpointError(f"the state has no entry {name!r}")
    return _decode(flat[name], flat)


def _encode(value: Any, path: str, flat: FlatState) -> Any:
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # before float: np.float64 is one
        return {_TAG: "numpy", "dtype": value.dtype.str, "value": _encode(value.item(), path, flat)}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Tensor):
        name = path + "#"  # the entry without it is the structure that refers to this tensor
        while name in flat:  # {"a": {"b": …}, "a.b": …}
            name += "#"
        flat[name] = value.detach()
        return {_TAG: "tensor", "name": name}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.dtype.itemsize <= 16:
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
        return {_TAG: "array", "of": _encode(torch.from_numpy(native), path, flat)}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TAG: type(value).__name__, "value": str(value)}
    if isinstance(value, PurePath):
        return {_TAG: "Path" if isinstance(value, Path) else "PurePath", "value": str(value)}
    if isinstance(value, list):
        return [_encode(item, f"{path}.{i}", flat) for i, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind)).__name__
        return {_TAG: kind, "items": [_encode(item, f"{path}.{i}", flat) for i, item in enumerate(items)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value and not isinstance(value, Counter):
            return {key: _encode(item, f"{path}.{key}", flat) for key, item in value.items()}
        pairs = [
            [_encode(key, f"{path}.{i}.key", flat), _encode(item, f"{path}.{i}", flat)]
            for i, (key, item) in enumerate(value.items())
        ]
        return {_TAG: "Counter" if isinstance(value, Counter) else "dict", "items": pairs}
    raise UsageError(
        f"the state {path!r} holds a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds tensors,"
        " numbers, text, lists, tuples, sets and dicts only; store its parts, or rebuild it when loading"
    )


def _decode(value: Any, flat: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, flat) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _decode(item, flat) for key, item in value.items()}
    if kind == "tensor":
        if value["name"] not in flat:
            raise CheckpointError(f"the state has no tensor {value['name']!r}")
        return flat[value["name"]]
    if kind == "float":
        return float(value["value"])
    if kind == "numpy":
        return np.dtype(value["dtype"]).type(_decode(value["value"], flat))
    if kind == "array":
        return _decode(value["of"], flat).numpy()
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind == "complex":
        return complex(float(value["value"][0]), float(value["value"][1]))
    if kind == "dtype":
        return _dtype(value["value"])
    if kind == "device":
        return torch.device(value["value"])
    if kind in ("Path", "PurePath"):
        return {"Path": Path, "PurePath": PurePath}[kind](value["value"])
    if kind in ("tuple", "set", "frozenset"):
        items = [_decode(item, flat) for item in value["items"]]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind in ("dict", "Counter"):
        pairs = {_decode(key, flat): _decode(item, flat) for key, item in value["items"]}
        return Counter(pairs) if kind == "Counter" else pairs
    raise CheckpointError(f"the state holds an entry of unknown kind {kind!r}: written by a newer version?")


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the state names a dtype {text!r} that this torch does not have")
    return dtype


# ---- model ---------------------------------------------------------------------------------------------------------


def model_state(module: nn.Module) -> FlatState:
    """``model.{fqn}`` for every parameter and persistent buffer; a tied weight is there under its first name only."""
    seen: set[int] = set()
    flat: FlatState = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            flat[f"model.{name}"] = tensor.detach()
        else:  # get_extra_state
            flat.update(pack(f"model.{name}", tensor))
    return flat


# ---- optimizers ----------------------------------------------------------------------------------------------------


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """The first name of every parameter; the same in every layout."""
    return {parameter: name for name, parameter in module.named_parameters()}


def _named_parameters(
    optimizer: Optimizer, names: Mapping[Tensor, str]
) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield group, parameter, names.get(parameter, f"group{g}.{p}")  # a parameter outside of the module


def optimizer_state(index: int, optimizer: Optimizer, names: Mapping[Tensor, str]) -> FlatState:
    """``optim.{index}.{fqn}.{key}`` for each parameter's state, ``pg.{index}.{fqn}.{option}`` for its group's options.

    Options are stored per parameter, so that groups may be cut differently by another layout.
    """
    flat: FlatState = {}
    options: dict[
        int, tuple[FlatState, dict[str, Any]]
    ] = {}  # of groups: a snapshot of every step has thousands of them
    for group, parameter, name in _named_parameters(optimizer, names):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):  # detaching a DTensor takes as long as an operation on it
                flat[f"optim.{index}.{name}.{key}"] = value.detach() if value.requires_grad else value
            else:
                flat.update(pack(f"optim.{index}.{name}.{key}", value))
        if id(group) not in options:
            options[id(group)] = _packed_options(group)
        packed, others = options[id(group)]
        for option, value in packed.items():
            flat[f"pg.{index}.{name}.{option}"] = value
        for option, value in others.items():
            flat.update(pack(f"pg.{index}.{name}.{option}", value))
    return flat


def _packed_options(group: Mapping[str, Any]) -> tuple[FlatState, dict[str, Any]]:
    """A group's options as they are stored under any name; and those that hold tensors, which are named after that."""
    flat: FlatState = {}
    others: dict[str, Any] = {}
    for option, value in group.items():
        if option not in ("params", "param_names"):
            packed = pack(option, value)
            (flat if len(packed) == 1 else others)[option] = packed[option] if len(packed) == 1 else value
    return flat, others


@dataclass(frozen=True)
class TensorSpec:
    """Global shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def optimizer_targets(
    index: int, optimizer: Optimizer, names: Mapping[Tensor, str], saved: Mapping[str, TensorSpec]
) -> FlatState:
    """Empty tensors, laid out as this generation needs them, for every saved ``optim.{index}.*`` and ``pg.*`` tensor.

    State of the parameter's own shape is sharded as the parameter is; anything else (a step count) is kept whole. Both
    are on the parameter's device, but for step counts and options, which are where torch keeps them.

    Raises:
        CheckpointError: the saved state has a shape that cannot be laid out for a sharded parameter.
    """
    targets: FlatState = {}
    owned = _entries_by_owner(f"optim.{index}.", saved, optimizer, names)
    options = _entries_by_owner(f"pg.{index}.", saved, optimizer, names)
    for group, parameter, name in _named_parameters(optimizer, names):
        for key, entry in options.get(name, {}).items():
            live = group.get(key.rstrip("#"))
            device = live.device if isinstance(live, Tensor) else torch.device("cpu")
            targets[entry] = torch.zeros(saved[entry].shape, dtype=saved[entry].dtype, device=device)
        for key, entry in owned.get(name, {}).items():
            spec = saved[entry]
            if spec.shape == tuple(parameter.shape) and spec.shape:
                targets[entry] = _zeros_like(parameter, spec.dtype)
            elif isinstance(parameter, DTensor) and math.prod(spec.shape) > 1:
                raise CheckpointError(
                    f"{entry} has shape {list(spec.shape)} and its sharded parameter {list(parameter.shape)}:"
                    " optimizers whose state has a shape of its own are kept whole; use dp_replicate"
                )
            else:
                on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
                device = torch.device("cpu") if on_host else parameter.device
                targets[entry] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return targets


def _zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Laid out as the parameter is. DTensor's own takes longer than reading a small state: it asks how operators lay out."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            return torch.zeros_like(parameter, dtype=dtype)
        return of_local(torch.zeros_like(parameter.to_local(), dtype=dtype), parameter)


def of_local(local: Tensor, like: DTensor) -> DTensor:
    """The whole of which this rank has ``local``, laid out as ``like``."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, tuple(like.stride())
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _entries_by_owner(
    prefix: str, entries: Iterable[str], optimizer: Optimizer, names: Mapping[Tensor, str]
) -> dict[str, dict[str, str]]:
    """``{fqn: {key: entry}}`` of the entries under ``prefix``; the longest parameter name that fits owns an entry."""
    known = {name for *_, name in _named_parameters(optimizer, names)}
    owned: dict[str, dict[str, str]] = {}
    for entry in entries:
        if entry.startswith(prefix):
            parts = entry[len(prefix) :].split(".")
            for cut in range(len(parts) - 1, 0, -1):
                if (owner := ".".join(parts[:cut])) in known:
                    owned.setdefault(owner, {})[".".join(parts[cut:])] = entry
                    break
    return owned


def load_optimizer(index: int, optimizer: Optimizer, names: Mapping[Tensor, str], flat: Mapping[str, Any]) -> None:
    """Give the optimizer the state and group options of ``flat`` (the inverse of :func:`optimizer_state`).

    A parameter without saved state has none afterwards. Nothing is changed when this raises.

    Raises:
        CheckpointError: an option of a group is not in ``flat``, or a part of a structure is missing.
    """
    owned = _entries_by_owner(f"optim.{index}.", flat, optimizer, names)
    saved = _entries_by_owner(f"pg.{index}.", flat, optimizer, names)
    states: dict[Tensor, dict[str, Any]] = {}
    options: list[dict[str, Any]] = []
    for _, parameter, name in _named_parameters(optimizer, names):
        states[parameter] = _structures(owned.get(name, {}), flat)
    for g, group in enumerate(optimizer.param_groups):
        first = next((name for other, _, name in _named_parameters(optimizer, names) if other is group), None)
        if (
            first is None and len(optimizer.param_groups) == 1
        ):  # a pipeline stage where nothing is trained: as elsewhere
            options.append(_options_of_any(f"pg.{index}.", group, flat))
            continue
        options.append({} if first is None else _structures(saved.get(first, {}), flat))
        lacking = [option for option in group if option not in ("params", "param_names") and option not in options[g]]
        if lacking and first is not None:
            raise CheckpointError(
                f"the checkpoint has no {f'pg.{index}.{first}.{lacking[0]}'!r}: saved with another optimizer?"
            )
    for parameter, state in states.items():
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)
    for group, found in zip(optimizer.param_groups, options, strict=True):
        group.update(found)


def _options_of_any(prefix: str, group: Mapping[str, Any], flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, as any parameter has them that some other rank trains."""
    saved = {entry.rpartition(".")[2]: entry for entry in flat if entry.startswith(prefix)}
    return _structures({option: entry for option, entry in saved.items() if option in group}, flat)


def _structures(entries: Mapping[str, str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{key: value}`` of ``{key: entry}``; tensors that belong to a structure come with it."""
    return {
        key: flat[entry] if isinstance(flat[entry], Tensor) else unpack(entry, flat)
        for key, entry in entries.items()
        if not key.endswith("#")
    }


# ---- comparing what is asked with what is there --------------------------------------------------------------------


def check_entries(targets: Mapping[str, Tensor], saved: Mapping[str, TensorSpec], *, of: Iterable[str]) -> None:
    """Refuse a load that would leave something out: every target must be saved, every saved name must be asked for.

    Args:
        of: the prefixes of names to compare, e.g. ``["model."]``.

    Raises:
        CheckpointError: missing, surplus, wrong shape or wrong dtype, with the first names and the remedy.
    """
    prefixes = tuple(of)
    wanted = {name: tensor for name, tensor in targets.items() if name.startswith(prefixes)}
    there = {name: spec for name, spec in saved.items() if name.startswith(prefixes)}
    if missing := sorted(wanted.keys() - there.keys()):
        raise CheckpointError(f"the checkpoint lacks {some(missing)}: it is of another model")
    if surplus := sorted(there.keys() - wanted.keys()):
        raise CheckpointError(f"the checkpoint also holds {some(surplus)}, which this model does not have")
    for name, tensor in wanted.items():
        spec = there[name]
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"{name} has shape {list(spec.shape)} in the checkpoint and {list(tensor.shape)} here"
            )
        if tensor.dtype != spec.dtype:
            raise CheckpointError(f"{name} is {spec.dtype} in the checkpoint and {tensor.dtype} here")


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
