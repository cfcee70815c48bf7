"""What a module weighs, without weights: the description that the planner asks for.

The module is copied with tensors that have shapes and no elements. On the copy the user's own optimizers take one step,
which shows what state they keep, and the user's own forward pass and loss run once on a microbatch: what autograd keeps
for the backward pass is counted, each storage once, by the part of the model that keeps it. Attention runs as the fused
kernel that keeps no scores. Blocks that equal one already seen, on equal inputs, are not run again.

What tensor parallelism would cut is followed through the operators: outputs of column-wise layers and what is made of
them are shared out, outputs of row-wise layers are whole again (or shared out by the sequence).

No process group, no device, no change to the module. On failure: code that needs values (``.item()``), or that cannot be
copied, is described without what could not be measured, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from elastictrain.compat.torch import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves, tree_map
from elastictrain.parallel.memory import Saved
from elastictrain.parallel.roles import Role

State = dict[str, tuple[int, int]]  # name of a parameter -> bytes of its optimizer state: cut as it is, and kept whole


def optimizer_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> State | None:
    """Bytes of state that the optimizers keep of each parameter of a hollow module; None where that is not to be seen."""
    names = {id(p): name for name, p in module.named_parameters()}
    state: State = {}
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        try:
            with torch.no_grad():
                optimizer.step()
        except Exception:  # state that was made before it failed still counts
            if not all(optimizer.state.get(p) for p in parameters):
                return None
        for parameter in parameters:
            parameter.grad = None
            values = [v for v in tree_leaves(optimizer.state.get(parameter, {})) if isinstance(v, Tensor)]
            cut = sum(v.numel() * v.element_size() for v in values if v.shape == parameter.shape)
            whole = sum(v.numel() * v.element_size() for v in values if v.shape != parameter.shape)
            state[names[id(parameter)]] = (cut, whole)
    return state


# ---- activations ----------------------------------------------------------------------------------------------------


@dataclass
class Sum:
    """Bytes, added up."""

    whole: int = 0
    cut: int = 0
    casts: int = 0
    largest: int = 0
    largest_is_cut: bool = False
    attended: int = 0
    attended_cut: int = 0

    def add(self, num_bytes: int, *, is_cut: bool, is_cast: bool = False) -> None:
        if is_cast:
            self.casts += num_bytes
            return
        if is_cut:
            self.cut += num_bytes
        else:
            self.whole += num_bytes
        if num_bytes > self.largest:
            self.largest, self.largest_is_cut = num_bytes, is_cut

    def take(self, other: Sum) -> None:
        self.whole, self.cut, self.casts = self.whole + other.whole, self.cut + other.cut, self.casts + other.casts
        self.attended, self.attended_cut = self.attended + other.attended, self.attended_cut + other.attended_cut
        if other.largest > self.largest:
            self.largest, self.largest_is_cut = other.largest, other.largest_is_cut

    def frozen(self) -> Saved:
        sums = self.whole, self.cut, self.casts, self.largest, self.largest_is_cut
        return Saved(*sums, self.attended, self.attended_cut)


@dataclass
class Kept:
    """What one part keeps: all of it, what is left where modules are recomputed, and the most that comes back at once.

    And the bytes that it returns.
    """

    saved: Sum = field(default_factory=Sum)
    kept: Sum = field(default_factory=Sum)
    redone: Sum = field(default_factory=Sum)
    sent: int = 0

    def take(self, other: Kept) -> None:
        self.saved.take(other.saved)
        self.kept.take(other.kept)
        if other.redone.whole + other.redone.cut > self.redone.whole + self.redone.cut:
            self.redone = other.redone


@dataclass
class _Run:
    """One forward pass of a part, for parts that equal it.

    Args:
        inputs: what they look like.
        kept: without those of the inputs that are kept, which may be shared with other parts.
        saved_inputs: indices of inputs that are kept; ``kept_inputs`` where modules are recomputed.
        is_cut: of the outputs.
    """

    inputs: list[Any]
    kept: Kept = field(default_factory=Kept)
    saved_inputs: set[int] = field(default_factory=set)
    kept_inputs: set[int] = field(default_factory=set)
    outputs: Any = None
    is_cut: list[bool] = field(default_factory=list)


def activations(
    module: nn.Module,
    mode: FakeTensorMode,
    step: Callable[[nn.Module], Any],
    *,
    parts: Sequence[str],
    recomputed: Collection[str],
    roles: Mapping[str, Role],
    compute: torch.dtype | None,
    keeps: Callable[[Any], bool] | None = None,
) -> list[Kept]:
    """What one microbatch keeps, by part; the first part also has what is computed before it, and so on.

    Args:
        module: a hollow one.
        step: its forward pass and loss.
        parts: names, in order.
        recomputed: names of modules that would be recomputed.
        roles: what tensor parallelism does with modules, by name.
        compute: the dtype of autocast.
        keeps: operators whose results are kept in recomputed modules all the same.

    Raises:
        Exception: whatever the code raises that needs values.
    """
    watch = _Watch(module, parts, set(recomputed), roles, keeps)
    with ExitStack() as stack:
        for name in recomputed:
            watch.recompute(module.get_submodule(name), stack)
        for index, name in enumerate(parts):
            watch.enter(index, module.get_submodule(name), stack)
        for name, role in roles.items():
            watch.follow(module.get_submodule(name), role, stack)
        stack.enter_context(mode)
        if compute is not None:
            stack.enter_context(torch.autocast("cpu", dtype=compute))
        stack.enter_context(_FusedAttention(watch))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor))
        stack.enter_context(watch)
        step(module)
    return watch.by_part


class _FusedAttention(TorchFunctionMode):
    """Attention without its dropout, for which CPUs have no fused kernel."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
            for i, name in ((1, "key"), (2, "value")):
                self._watch.attended(args[i] if len(args) > i else kwargs[name])
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Counts what autograd keeps, and follows what is cut through the operators."""

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[str],
        recomputed: set[str],
        roles: Mapping[str, Role],
        keeps: Callable[[Any], bool] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_part = [Kept() for _ in parts] or [Kept()]
        self._part = self._now = self.by_part[0]
        self._run: _Run | None = None  # of the part that is running
        self._inputs: dict[int, int] = {}  # … its inputs: storage -> index
        self._again: Sum | None = None  # within a module that would be recomputed: what comes back
        self._redone: set[int] = set()  # … and its storages
        self._keeps = keeps
        self._alive: list[Any] = []  # so that no storage key is used again
        self._weights = {storage_key(p) for p in module.parameters()}
        self._constant = self._weights | {storage_key(b) for b in module.buffers()}
        self._cut: set[int] = set()
        self._casts: set[int] = set()
        self._saved: set[int] = set()
        self._kept: set[int] = set()
        self._runs: dict[Any, list[_Run]] = {}
        self._marks: dict[int, Any] = {}  # id of a module -> what is done with it
        for name, child in module.named_modules():
            self._marks[id(child)] = (name in recomputed, repr(roles.get(name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = [storage_key(t) for t in _tensors((args, kwargs))]
        made = _tensors(output)
        self._alive.append(made)
        is_cut = not self._cut.isdisjoint(inputs)
        is_cast = bool(inputs) and all(key in self._weights or key in self._casts for key in inputs)
        for key in {storage_key(t) for t in made}.difference(inputs):
            if is_cut:
                self._cut.add(key)
            if is_cast:
                self._casts.add(key)
        if self._again is not None and self._keeps is not None and self._keeps(func):
            for tensor in made:
                self._count(tensor, self._kept, self._now.kept, "kept_inputs")
        return output

    def saved(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor."""
        self._alive.append(tensor)
        key = storage_key(tensor)
        if key in self._constant:
            return tensor
        self._count(tensor, self._saved, self._now.saved, "saved_inputs")
        if self._again is None:
            self._count(tensor, self._kept, self._now.kept, "kept_inputs")
        elif key not in self._kept and (self._run is None or key not in self._inputs):
            self._count(tensor, self._redone, self._again, "")
        return tensor

    def attended(self, tensor: Tensor) -> None:
        """Attention has keys or values; with context parallelism a rank would have those of all tokens."""
        num_bytes, is_cut = tensor.numel() * tensor.element_size(), storage_key(tensor) in self._cut
        for into in (self._now.saved, self._now.kept if self._again is None else self._again):
            if is_cut:
                into.attended_cut += num_bytes
            else:
                into.attended += num_bytes

    def _count(self, tensor: Tensor, seen: set[int], into: Sum, inputs: str) -> None:
        key = storage_key(tensor)
        if self._run is not None and key in self._inputs:
            getattr(self._run, inputs).add(self._inputs[key])
        elif key not in seen | self._constant:
            seen.add(key)
            into.add(_num_bytes(tensor), is_cut=key in self._cut, is_cast=key in self._casts)

    # ---- modules ---------------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module, role: Role, stack: ExitStack) -> None:
        """What tensor parallelism does at the edges of this module."""
        parameters = dict(module.named_parameters(recurse=False))
        self._cut |= {storage_key(parameters[name]) for name in role.cuts if name in parameters}

        def before(_: nn.Module, args: Any) -> None:
            if role.gathers:
                self._cut -= {storage_key(t) for t in _tensors(args)}

        def after(_: nn.Module, args: Any, output: Any) -> None:
            keys = {storage_key(t) for t in _tensors(output)}
            if role.output_is_cut is not None:
                self._cut = self._cut | keys if role.output_is_cut else self._cut - keys

        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after).remove)

    def recompute(self, module: nn.Module, stack: ExitStack) -> None:
        """Of this module the inputs would be kept, instead of what is inside."""
        inner = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors((args, kwargs)):
                self._count(tensor, self._kept, self._now.kept, "kept_inputs")
            self._again, self._redone = Sum(), set()
            try:
                return inner(*args, **kwargs)
            finally:
                self._now.take(Kept(redone=self._again))
                self._again = None

        _stand_in(module, run, stack)

    def enter(self, index: int, module: nn.Module, stack: ExitStack) -> None:
        """Count what this part keeps as its own, by an equal part's figures where there is one."""
        inner, looks = module.forward, self._looks(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._part = self.by_part[index]
            tensors = _tensors((args, kwargs))
            inputs = [_look(value) for value in tree_leaves((args, kwargs))]
            run = next((earlier for earlier in self._runs.get(looks, []) if earlier.inputs == inputs), None)
            if run is not None:
                outputs = tree_map(_like, run.outputs)
                self._cut |= {storage_key(t) for t, cut in zip(_tensors(outputs), run.is_cut, strict=True) if cut}
            else:
                run = self._run = _Run(inputs)
                self._now, self._inputs = run.kept, {storage_key(t): i for i, t in enumerate(tensors)}
                outputs = run.outputs = inner(*args, **kwargs)
                run.is_cut = [storage_key(t) in self._cut for t in _tensors(outputs)]
                self._runs.setdefault(looks, []).append(run)
                self._run = None
            self._now = self._part
            self._part.take(run.kept)
            self._part.sent = sum(t.numel() * t.element_size() for t in _tensors(outputs))
            for i in run.saved_inputs:
                self._count(tensors[i], self._saved, self._part.saved, "")
            for i in run.kept_inputs:
                self._count(tensors[i], self._kept, self._part.kept, "")
            return outputs

        _stand_in(module, run, stack)

    def _looks(self, module: nn.Module) -> Any:
        """Equal for modules that do the same with equal inputs."""
        return tuple(
            (
                name,
                type(child),
                self._marks[id(child)],
                tuple((k, v) for k, v in child.__dict__.items() if isinstance(v, (bool, int, float, str, torch.dtype))),
                tuple((k, _look(v)) for k, v in child.named_parameters(recurse=False)),
                tuple((k, _look(v)) for k, v in child.named_buffers(recurse=False)),
            )
            for name, child in module.named_modules()
        )


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _look(value: Any) -> Any:
    """What a computation can depend on where there are no values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, (bool, int, float, str, torch.dtype, type(None))) else id(value)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, requires_grad=value.requires_grad)


def _stand_in(module: nn.Module, run: Callable[..., Any], stack: ExitStack) -> None:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    stack.callback(lambda: module.__dict__.pop("forward") if before is None else module.__dict__.update(forward=before))
