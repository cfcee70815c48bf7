"""The only file that touches private names of torch; each one is pinned by a test in tests/compat/.

On failure: a torch release that renames one of them fails that test, not a run.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed import device_mesh as device_meshes
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _collective_utils as collective_utils
from torch.distributed.tensor import _redistribute as redistribute
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = [
    "REDUCE_SCATTERS",
    "FakeTensorMode",
    "TorchDispatchMode",
    "abort_groups",
    "argument_names",
    "batches_ready",
    "compiled_frames",
    "empty_optimizers",
    "forget_meshes",
    "gloo_operations",
    "has_step_hooks",
    "hollow",
    "init_call",
    "is_compiled",
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


_aborting = threading.Lock()


def abort_groups() -> None:
    """No process group is left, and the next ones get the names that a new process would give them.

    From any thread: whoever comes second finds them aborted, and does not abort them again. Also where making one has failed
    half-way: what that has left would make the next one wait for ever.
    """
    with _aborting:
        if dist.is_initialized():
            c10d._abort_process_group()
        world = c10d._world
        for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
                      world.tags_to_pg, world.pg_coalesce_state):  # fmt: skip
            known.clear()
        c10d._unregister_all_process_groups()
        world.group_count = 0


def gloo_operations() -> dict[str, str]:
    """What torch asks a process group for, and what gloo calls it; all but ``reduce_scatter`` and its like."""
    plain = ("allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
             "broadcast", "gather", "recv", "recv_anysource", "reduce", "scatter", "send", "_allgather_base")  # fmt: skip
    return {name: name for name in plain} | {
        "all_gather_single": "_allgather_base",
        "all_to_all_single": "alltoall_base",
    }


REDUCE_SCATTERS = ("reduce_scatter_single", "_reduce_scatter_base")  # what torch asks for, of one tensor


def compiled_frames() -> int:
    """How many functions ``torch.compile`` has looked at in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def is_compiled(module: nn.Module) -> bool:
    """Is the module, or one within it, to be compiled by ``torch.compile(module)`` or ``module.compile()``?"""
    return any("_orig_mod" in one._modules or one._compiled_call_impl is not None for one in module.modules())


def forget_meshes() -> None:
    """What DTensor keeps of device meshes that are gone: a new mesh that looks like an old one would be taken for it, and
    numbers would silently be wrong."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # this thread's
    redistribute._gen_transform_infos.cache_clear()
    redistribute.clear_redistribute_planner_cache()
    collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    device_meshes._mesh_resources.mesh_stack.clear()


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


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Is anything called around the optimizer's ``step``, of its own or of all optimizers?"""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)


@cache  # operators are asked again and again, and live as long as torch
def is_random(op: Operator) -> bool:
    """Does this operator draw from a generator?"""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def is_view(tensor: Tensor) -> bool:
    """Does autograd know the tensor as a view? Such a one cannot be detached in place."""
    return tensor._is_view()


def argument_names(op: Operator) -> list[str]:
    """Names of the operator's arguments, in the order of its schema; none for an ordinary function."""
    return [name for name, _ in _arguments(op)]


def written_arguments(op: Operator) -> list[bool]:
    """For each argument of the operator's schema: is it written in place?"""
    return [is_written for _, is_written in _arguments(op)]


@cache
def _arguments(op: Operator) -> tuple[tuple[str, bool], ...]:
    schema = getattr(op, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple((a.name, bool(a.alias_info is not None and a.alias_info.is_write)) for a in arguments)


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
    return _Copies(mode, "cpu").module(module), mode


def on_meta(module: nn.Module, *, without: Collection[str] = ()) -> nn.Module:
    """A copy of the modules on the meta device that shares nothing with the original that code could change through it.

    Attributes are copied with all that they hold, other modules and tensors on the meta device. What cannot be copied
    raises a TypeError when it is used. Cheaper to run than :func:`hollow`, for code that makes its tensors where its inputs
    are.

    Args:
        without: names of attributes that are None in the copy.

    Raises:
        Exception: there is a tensor that the meta device cannot have, such as a sparse one.
    """
    return _CopiesApart(without).module(module)


class _Copies:
    """Copies modules and their tensors, each of them once."""

    def __init__(self, mode: AbstractContextManager[Any], device: str) -> None:
        self._mode, self._device = mode, device
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor | None] = {id(None): None}

    def tensor(self, old: Tensor | None) -> Tensor | None:
        if old is not None and id(old) not in self._tensors:
            with self._mode:
                new = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=self._device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
                    new.__dict__.update(old.__dict__)  # marks that user code left on it
            self._tensors[id(old)] = new
        return self._tensors[id(old)]

    def module(self, old: nn.Module) -> nn.Module:
        if id(old) not in self._modules:
            new = self._modules[id(old)] = copy.copy(old)
            new.__dict__["_parameters"] = {name: self.tensor(p) for name, p in old._parameters.items()}
            new.__dict__["_buffers"] = {name: self.tensor(b) for name, b in old._buffers.items()}
            new.__dict__["_modules"] = {name: c if c is None else self.module(c) for name, c in old._modules.items()}
        return self._modules[id(old)]


# What cannot be changed, or belongs to nobody.
_FREE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, Enum, PurePath, type, ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_MANY = 10_000  # things in a list or dict: more of them are data, not a part of a model


class _CopiesApart(_Copies):
    """Copies everything that modules hold, too."""

    def __init__(self, without: Collection[str]) -> None:
        super().__init__(nullcontext(), "meta")
        self._without = without
        self._made: dict[int, Any] = {}

    def module(self, old: nn.Module) -> nn.Module:
        if id(old) not in self._modules:
            new = super().module(old)
            for name, value in old.__dict__.items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                new.__dict__[name] = None if name in self._without else self._value(value)
        return self._modules[id(old)]

    def _value(self, old: Any) -> Any:
        if isinstance(old, Tensor):
            return self.tensor(old)
        if isinstance(old, nn.Module):
            return self.module(old)
        if isinstance(old, _FREE):
            return old
        if id(old) not in self._made:
            self._made[id(old)] = old  # where it holds itself
            self._made[id(old)] = self._copy(old)
        return self._made[id(old)]

    def _copy(self, old: Any) -> Any:
        kind: Any = type(old)
        if isinstance(old, FunctionType):
            return old if self._all_free([*_cells(old), *(old.__defaults__ or ())]) else _Uncopied(kind)
        if isinstance(old, BuiltinFunctionType):
            return old if old.__self__ is None or isinstance(old.__self__, _FREE) else _Uncopied(kind)
        if isinstance(old, MethodType):
            return MethodType(old.__func__, self._value(old.__self__))
        if kind is partial:
            return partial(self._value(old.func), *map(self._value, old.args), **self._of(old.keywords))
        if isinstance(old, tuple):
            values = [self._value(value) for value in old]
            if all(new is value for new, value in zip(values, old, strict=True)):
                return old
            return kind(*values) if hasattr(old, "_fields") else kind(values)
        if isinstance(old, (list, deque, dict, set, frozenset)):
            return self._container(old)
        is_plain = kind.__new__ is object.__new__ and not any(vars(one).get("__slots__") for one in kind.__mro__)
        if not is_plain or not hasattr(old, "__dict__"):
            return _Uncopied(kind)
        new = self._made[id(old)] = object.__new__(kind)
        new.__dict__.update(self._of(vars(old)))
        return new

    def _container(self, old: Any) -> Any:
        if len(old) > _MANY or getattr(old, "__dict__", None):
            return _Uncopied(type(old))
        if isinstance(old, (set, frozenset)):
            return copy.copy(old) if self._all_free(old) else _Uncopied(type(old))
        new = self._made[id(old)] = copy.copy(old)
        if isinstance(old, dict):
            if not self._all_free(old):
                return _Uncopied(type(old))
            new.update(self._of(old))
        else:
            new.clear()
            new.extend(map(self._value, old))
        return new

    def _of(self, old: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: self._value(value) for name, value in old.items()}

    def _all_free(self, values: Iterable[Any]) -> bool:
        """Need none of them be copied?"""
        return all(self._value(value) is value for value in values)


def _cells(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


class _Uncopied:
    """Stands for what could not be copied."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind.__name__

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"a {self.__dict__['kind']} is used, which cannot be copied")

    __getattr__ = __setattr__ = __call__ = __bool__ = __len__ = __iter__ = __contains__ = _refuse
    __getitem__ = __setitem__ = __eq__ = __enter__ = __exit__ = __next__ = _refuse
    __hash__ = None  # type: ignore[assignment]
