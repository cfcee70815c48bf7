"""Build a model without its weights, and make any one of its tensors later, as its own code would have made it.

:func:`record` runs the user's ``configure_model`` under the meta device and notes every operator that creates or changes
a tensor there: the default initialisation of each layer, ``self.apply(init)`` with the user's own, a table of positions,
a teacher copied from a student. :meth:`Recipe.make` replays just the operators that one tensor depends on, at full size,
on the CPU. So a model larger than one device is built a tensor at a time, sharded as it comes, and its weights are what
the code says.

Random operators are seeded by the name of the tensor that they fill and by the run's seed. Initial weights therefore do
not depend on the mesh, on the device, or on other layers.

On failure: code that needs a value while it builds (``.item()``, numpy) cannot run without weights; :func:`record`
raises :class:`NotDeferrable`, and the caller builds the model the ordinary way. (The idea is torchdistX's
``deferred_init``.)
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastictrain.compat.torch import (
    TorchDispatchMode,
    argument_names,
    init_call,
    is_random,
    storage_key,
    tree_leaves,
    tree_map,
    written_arguments,
)
from elastictrain.data.slots import mix, named_seed


class NotDeferrable(Exception):
    """The code needs real values while it builds."""


@dataclass(frozen=True)
class _Like:
    """What a meta tensor was when it was used; ``.data`` may give it another storage later."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Call(NamedTuple):
    function: Any
    args: tuple[Any, ...]  # with a _Like for each meta tensor
    kwargs: dict[str, Any]
    output: Any
    reads: tuple[int, ...]  # storages of the meta tensors among its arguments
    writes: tuple[int, ...]  # storages that it creates or changes
    is_random: bool


_LEAVES = (Tensor, int, float, str, type(None), torch.dtype, torch.device, torch.layout)


def _leaves(value: Any) -> list[Any]:
    """Torch's ``tree_leaves``, which for what operators take spends most of the time of a recording on asking what it is."""
    kind = type(value)
    if kind is tuple or kind is list:
        return [leaf for one in value for leaf in _leaves(one)]
    if kind is dict:
        return [leaf for one in value.values() for leaf in _leaves(one)]
    return [value] if isinstance(value, _LEAVES) else tree_leaves(value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same of ``tree_map``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_mapped(function, one) for one in value])
    if kind is dict:
        return {key: _mapped(function, one) for key, one in value.items()}
    return function(value) if isinstance(value, _LEAVES) else tree_map(function, value)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


class Recipe:
    """How each tensor of a recorded model came about."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._calls: list[_Call] = []
        self._storages: dict[int, Any] = {}  # by their keys, kept alive, hence the keys unique
        self._writers: dict[int, list[int]] = defaultdict(list)  # storage -> calls that create or change it
        self._names: dict[int, str] = {}  # storage -> its first name in the model
        self._tensors: dict[str, _Like] = {}
        self._of: dict[int, tuple[Tensor, str]] = {}  # id of the module's own tensor -> it, kept alive, and its name

    @property
    def names(self) -> list[str]:
        """Every parameter and buffer that was built without its values, parameters first."""
        return list(self._tensors)

    def name_of(self, tensor: Tensor) -> str:
        """The name under which a tensor of the recorded model is made."""
        return self._of[id(tensor)][1]

    def rename(self, new: Tensor, old: Tensor) -> None:
        """A tensor of the model has become another one, still without values, that stands for the same."""
        self._of[id(new)] = (new, self.name_of(old))

    def make(self, name: str) -> Tensor:
        """The tensor at full size on the CPU, as the recorded code would have made it."""
        wanted = self._tensors[name]
        real: dict[int, Tensor] = {}  # storage -> a real tensor over the same elements
        state = torch.default_generator.get_state()
        try:
            with torch.no_grad(), torch.device("cpu"):
                for index in self._needed(wanted.storage):
                    self._replay(index, real)
        finally:
            torch.default_generator.set_state(state)
        return _view(wanted, real).clone()

    def note(self, function: Any, args: Any, kwargs: Any, output: Any, changed: list[Any], *, is_random: bool) -> None:
        """One call while recording; ``changed`` are the arguments that it writes."""
        made = [value for value in _leaves((output, changed)) if _is_meta(value)]
        if not made:
            return
        given = _leaves((args, kwargs))
        if any(isinstance(value, torch.Generator) for value in given):
            raise NotDeferrable("a random generator of the code's own")
        reads = {storage_key(value) for value in given if _is_meta(value)}
        writes = {storage_key(value) for value in made}
        for key in writes:
            self._writers[key].append(len(self._calls))
        args, kwargs, output = _mapped(self._like, (tuple(args), dict(kwargs), output))
        self._calls.append(_Call(function, args, kwargs, output, tuple(reads), tuple(writes), is_random))

    def _like(self, value: Any) -> Any:
        if not _is_meta(value):
            return value
        key = storage_key(value)
        self._storages[key] = value.untyped_storage()
        return _Like(key, value.size(), value.stride(), value.storage_offset(), value.dtype)

    def finish(self, module: nn.Module) -> None:
        """The model is built: remember which storage each of its tensors has, before anything is sharded.

        Raises:
            NotDeferrable: a tensor without a value did not come from the recorded code.
        """
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if _is_meta(tensor):
                key = storage_key(tensor)
                if key not in self._writers:
                    raise NotDeferrable(f"{name} has no values and was not made in configure_model")
                self._names.setdefault(key, name)
                self._tensors[name] = self._like(tensor)
                self._of[id(tensor)] = (tensor, name)

    def _needed(self, storage: int) -> list[int]:
        """Calls that the storage depends on, in the order they were made."""
        needed, todo, seen = set(), [storage], {storage}
        while todo:
            for index in self._writers[todo.pop()]:
                needed.add(index)
                for key in (*self._calls[index].reads, *self._calls[index].writes):
                    if key not in seen:
                        seen.add(key)
                        todo.append(key)
        return sorted(needed)

    def _replay(self, index: int, real: dict[int, Tensor]) -> None:
        call = self._calls[index]

        def as_real(value: Any) -> Any:
            if isinstance(value, _Like):
                return _view(value, real)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args, kwargs = tree_map(as_real, call.args), tree_map(as_real, call.kwargs)
        if not call.reads and "dtype" in argument_names(call.function):
            kwargs["dtype"] = tree_leaves(call.output)[0].dtype  # the default dtype may have been another one then
        if call.is_random:
            key = call.writes[0]
            name = self._names.get(key, f"call {index}")
            nth = self._writers[key].index(index)  # a tensor filled twice draws new numbers the second time
            torch.default_generator.manual_seed(mix(named_seed(self._seed, name), nth))
        output = call.function(*args, **kwargs)
        for meta, made in zip(tree_leaves(call.output), tree_leaves(output), strict=True):
            if isinstance(meta, _Like):
                real.setdefault(meta.storage, made)


def _view(like: _Like, real: Mapping[int, Tensor]) -> Tensor:
    base = real[like.storage]
    if base.dtype != like.dtype:
        base = base.view(like.dtype)
    return torch.as_strided(base, like.size, like.stride, like.offset)


class _Operators(TorchDispatchMode):
    """Notes every operator that makes or changes a meta tensor."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recipe = recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        values = [*args, *(kwargs.get(name) for name in argument_names(func)[len(args) :])]
        changed = [value for value, written in zip(values, written_arguments(func), strict=True) if written]
        self._recipe.note(func, args, kwargs, output, changed, is_random=is_random(func))
        return output


class _Functions(TorchFunctionMode):
    """Catches what operators do not show: values given as Python data, and the question whether a tensor is meta."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_DATA and kwargs.get("device") is None and not isinstance(args[0], Tensor):
            if isinstance(args[0], (list, tuple)) and not args[0]:
                # transformers asks ``torch.tensor([]).device`` whether weights are made at all, and would leave out its
                # own initialisation; a tensor without values needs no meta device.
                return func(*args, **{**kwargs, "device": "cpu"})
            return self._constant(func(*args, **{**kwargs, "device": "cpu"}))
        if func is Tensor.new_tensor and _is_meta(args[0]) and kwargs.get("device") is None:
            return self._constant(torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs, "device": "cpu"}))
        if func == _IS_META and _is_meta(args[0]):
            # torch.nn.init does nothing where a tensor is meta: note the whole call as one operator. All others hear
            # that it is a tensor like any other; what then needs a value fails, and the model is built with weights.
            call = init_call(sys._getframe(1))
            if call is not None:
                self._recipe.note(call[0], (), call[1], args[0], [args[0]], is_random=True)
            return call is not None
        return func(*args, **kwargs)

    def _constant(self, value: Tensor) -> Tensor:
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        self._recipe.note(Tensor.copy_, (meta, value), {}, meta, [meta], is_random=False)
        return meta


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


def record(build: Callable[[], Any], module: nn.Module, *, seed: int) -> Recipe:
    """Run ``build``, which gives ``module`` its submodules, without making any weights.

    Raises:
        NotDeferrable: the code needs real values while it builds; ``module`` may hold half of its submodules.
    """
    recipe = Recipe(seed=seed)
    try:
        with torch.device("meta"), _Functions(recipe), _Operators(recipe):
            build()
        recipe.finish(module)
    except NotDeferrable:
        raise
    except Exception as error:  # whatever it is: if it is the code's own fault, the ordinary way shows it again
        raise NotDeferrable((str(error) or type(error).__name__).splitlines()[0]) from error
    return recipe
