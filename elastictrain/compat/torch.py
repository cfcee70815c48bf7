"""The only file that touches private names of torch; each one is pinned by a test in tests/compat/.

On failure: a torch release that renames one of them fails that test, not a run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "argument_names",
    "batches_ready",
    "empty_optimizers",
    "hollow",
    "init_call",
    "is_random",
    "is_view",
    "on_meta",
    "scale_",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "written_arguments",
]

Operator = Any  # torch._ops.OpOverload


def storage_key(tensor: Tensor) -> int:
    """What two tensors share when one is a view of the other; valid while either is alive.

    A meta tensor's ``data_ptr()`` is 0, so the address of the storage object itself is the only identity there is.
    """
    return int(tensor.untyped_storage()._cdata)


def batches_ready(iterator: Any) -> int | None:
    """Batches that loader processes have ready for an iterator of a ``DataLoader``; None where it has no processes.

    Its own queue is asked, and not emptied.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return None
    early = sum(len(info) > 1 for info in iterator._task_info.values())  # came before their turn
    try:
        return early + int(iterator._data_queue.qsize())
    except NotImplementedError:  # macOS
        return None


@contextmanager
def empty_optimizers() -> Iterator[None]:
    """Within, an optimizer may be made of no parameters at all: it has one group, with nothing in it.

    Torch refuses that, and a pipeline stage in which nothing is trained has nothing else to give.
    """
    original: Any = torch.optim.Optimizer.__init__

    def init(self: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        given = params if isinstance(params, Tensor) else list(params)  # a Tensor is refused with torch's own words
        original(self, [{"params": []}] if isinstance(given, list) and not given else given, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]


def is_random(op: Operator) -> bool:
    """Does this operator draw from a generator?"""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def is_view(tensor: Tensor) -> bool:
    """Does autograd know the tensor as a view? Such a one cannot be detached in place."""
    return tensor._is_view()


def argument_names(op: Operator) -> list[str]:
    """Names of the operator's arguments, in the order of its schema; none for an ordinary function."""
    schema = getattr(op, "_schema", None)
    return [argument.name for argument in schema.arguments] if schema is not None else []


def written_arguments(op: Operator) -> list[bool]:
    """For each argument of the operator's schema: is it written in place?"""
    return [bool(a.alias_info is not None and a.alias_info.is_write) for a in op._schema.arguments]


def init_call(frame: FrameType | None) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The function of ``torch.nn.init`` that ``frame`` runs, with its arguments; None for any other code.

    ``trunc_normal_``, ``orthogonal_`` and others return at once where ``tensor.is_meta``; whoever answers that question
    learns here what was asked for.
    """
    if frame is None or frame.f_globals.get("__name__") != torch.nn.init.__name__:
        return None
    function = frame.f_globals.get(frame.f_code.co_name)
    if not callable(function):
        return None
    names = inspect.getargvalues(frame)
    return function, {name: names.locals[name] for name in names.args}


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by one number, in as few kernels as there are devices."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, there in by_device.items():
        torch._foreach_mul_(there, factor.to(device))


def hollow(module: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """A copy of the modules with tensors without elements; other attributes are shared with the original."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return _copied(module, mode, "cpu"), mode


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of the modules on the meta device, with lists, dicts and sets of its own, the hooks among them.

    Cheaper to run than :func:`hollow`, for code that makes its tensors where its inputs are.
    """
    copied = _copied(module, nullcontext(), "meta")
    for one in copied.modules():
        for name, value in one.__dict__.items():
            if isinstance(value, (list, dict, set)) and name not in ("_parameters", "_buffers", "_modules"):
                one.__dict__[name] = copy.copy(value)
    return copied


def _copied(module: nn.Module, mode: AbstractContextManager[Any], device: str) -> nn.Module:
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor | None] = {id(None): None}

    def tensor(old: Tensor | None) -> Tensor | None:
        if old is not None and id(old) not in tensors:
            with mode:
                new = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                    new.__dict__.update(old.__dict__)  # marks that user code left on it
            tensors[id(old)] = new
        return tensors[id(old)]

    def one(old: nn.Module) -> nn.Module:
        if id(old) not in modules:
            new = modules[id(old)] = copy.copy(old)
            new.__dict__["_parameters"] = {name: tensor(p) for name, p in old._parameters.items()}
            new.__dict__["_buffers"] = {name: tensor(b) for name, b in old._buffers.items()}
            new.__dict__["_modules"] = {name: c if c is None else one(c) for name, c in old._modules.items()}
        return modules[id(old)]

    return one(module)
