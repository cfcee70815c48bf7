"""What a user's objects were before training: so that they can be made so again, and a generation begin anew around them.

A generation changes the module that it trains: weights become shards on a mesh, classes become FSDP's, hooks of the user
leave attributes behind. :class:`Origin` keeps what the objects were; :meth:`Origin.restore` puts it back into the same
objects, so that whoever holds them, such as the script that made them, holds the trained ones in the end.

Attributes are copied deeply. Not copied, but shared: other modules and callbacks among those objects; what is taken for data
(objects such as data sets, which are read by index and are not written by index; arrays, byte arrays, and tensors that are
neither weights nor buffers, each larger than :data:`DATA_BYTES`; Python's containers of more than :data:`MANY` things), to a
depth of a few attributes; open files, consoles and loggers. What training changes in data stays changed. Of weights only
shape, type and place are kept, since training goes on from a snapshot or checkpoint that has them:
:attr:`Origin.has_weights` says whether there were any, that a fresh start would need.

On failure: :class:`CannotCopy` says what cannot be copied: it would be what training has made of it.
"""

from __future__ import annotations

import copy
import io
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

DATA_BYTES = 1 << 20
MANY = 10_000
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, str, bytes)
_OUTSIDE = (Console, io.IOBase, logging.Logger)
_NOT_ENTERED = (type, ModuleType, FunctionType, MethodType, nn.Module)


class CannotCopy(Exception):
    """An attribute; the text names it."""


@dataclass(frozen=True)
class _Weight:
    """What a parameter was, without its elements."""

    kind: type
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    marks: dict[str, Any]

    @classmethod
    def of(cls, weight: nn.Parameter) -> _Weight:
        return cls(type(weight), weight.shape, weight.dtype, weight.device, weight.requires_grad, dict(weight.__dict__))

    def make(self) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device=self.device), self.requires_grad)
        weight.__class__ = self.kind
        weight.__dict__.update(self.marks)
        return weight


class Origin:
    """Of some objects.

    Args:
        things: modules, callbacks, data modules.

    Attributes:
        has_weights: there were weights already, with numbers in them.

    Raises:
        CannotCopy: one of their attributes cannot be copied.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self._things = list(_with_children(things))
        self._weights: dict[int, _Weight] = {}  # by the id that stands for it in the copies
        self.has_weights = False
        shared: dict[int, Any] = {id(thing): thing for thing in self._things}
        for module in (one for one in self._things if isinstance(one, nn.Module)):
            for weight in module.parameters(recurse=False):
                if isinstance(weight, nn.UninitializedParameter):
                    raise CannotCopy(f"a lazy weight of {type(module).__name__}")
                if id(weight) not in shared:
                    kept = shared[id(weight)] = _Weight.of(weight)
                    self._weights[id(kept)] = kept
                    self.has_weights = self.has_weights or not weight.is_meta
        self._kept = [(thing.__class__, _copied(thing, shared)) for thing in self._things]

    def clear(self) -> None:
        """Let go of what training has made of the objects; nobody may use them before :meth:`restore`."""
        for thing, (kind, _) in zip(self._things, self._kept, strict=True):
            thing.__class__ = kind  # FSDP makes a class of its own
            thing.__dict__.clear()

    def restore(self) -> None:
        """The same objects are what they were."""
        self.clear()
        shared: dict[int, Any] = {id(thing): thing for thing in self._things}
        shared |= {number: kept.make() for number, kept in self._weights.items()}
        for thing, (_, attributes) in zip(self._things, self._kept, strict=True):
            thing.__dict__.update({name: _copy(name, value, shared) for name, value in attributes.items()})


def why_not(loaders: Any) -> str | None:
    """What keeps loaders of the user from being read again from the beginning; None: nothing."""
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        if loader is None:
            continue
        if not isinstance(loader, DataLoader):
            return f"a {type(loader).__name__} may not begin again"
        if isinstance(loader.dataset, IterableDataset):
            return f"{type(loader.dataset).__name__}, which is read in order, may not begin again"
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if sampler is not None and type(sampler) not in (RandomSampler, SequentialSampler):
                return f"the sampler {type(sampler).__name__} may not begin again"
        if type(loader.batch_sampler) not in (BatchSampler, type(None)):
            return f"the sampler {type(loader.batch_sampler).__name__} may not begin again"
    return None


def _with_children(things: Iterable[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for thing in things:
        for one in thing.modules() if isinstance(thing, nn.Module) else [thing]:
            if id(one) not in seen and hasattr(one, "__dict__"):
                seen.add(id(one))
                yield one


def _copied(thing: Any, shared: dict[int, Any]) -> dict[str, Any]:
    attributes = {}
    for name, value in thing.__dict__.items():
        try:
            attributes[name] = _copy(name, value, shared)
        except Exception as error:
            raise CannotCopy(f"{type(thing).__name__}.{name}, a {type(value).__name__} ({error})") from error
    return attributes


def _copy(name: str, value: Any, shared: dict[int, Any]) -> Any:
    """``value``, in which what is shared stays what it is, or becomes what stands for it."""
    if name != "_buffers":
        _find_data(value, shared, depth=4)
    return copy.deepcopy(value, shared)


def _is_data(value: Any) -> bool:
    """Is it as new however often it was read, or too large to be copied?"""
    if isinstance(value, DataLoader):
        return why_not(value) is None
    if isinstance(value, (Tensor, np.ndarray)):
        return not isinstance(value, nn.Parameter) and value.nbytes > DATA_BYTES
    if isinstance(value, bytearray):
        return len(value) > DATA_BYTES
    if isinstance(value, _CONTAINERS):
        return len(value) > MANY
    kind = type(value)
    is_read = hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not hasattr(kind, "__setitem__")
    return is_read and not isinstance(value, (IterableDataset, nn.Module, type))


def _find_data(value: Any, shared: dict[int, Any], *, depth: int) -> None:
    """Add what is data to the things that are shared."""
    if id(value) in shared:
        return
    if isinstance(value, _OUTSIDE) or _is_data(value):
        shared[id(value)] = value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif not isinstance(value, _NOT_ENTERED):
        parts = list(getattr(value, "__dict__", {}).values())
    for one in parts if depth else ():
        _find_data(one, shared, depth=depth - 1)
