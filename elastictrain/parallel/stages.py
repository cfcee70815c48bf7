"""One stage of a cut model: the user's own ``forward``, run from one cut point to the next.

Every stage runs the whole ``forward`` on the real inputs, with the units of other stages replaced, under their own names,
by a :class:`StandIn`. Units before the stage give back zeros of the right shape, the last of them what the previous stage
sent; behind the stage's last unit ``forward`` is left. So code between units, masks and positions made from the inputs,
and parameters outside of units are what they would be in one process, and names in the state stay what they are.

What cannot work: a value that reaches a unit past the previous one (a skip connection across a cut), units called in
another order than the row's, or twice. A stage's result then depends on what the stand-ins give back. :meth:`CutModel.run`
can be given another filling for them, and :mod:`elastictrain.parallel.pipeline` compares.

On failure: user code that reaches into another stage's module gets an AttributeError or UsageError that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.compat.torch import tree_leaves, tree_map
from elastictrain.errors import UsageError
from elastictrain.parallel.units import Cut

Filling = Callable[[Tensor], Tensor]  # an empty tensor, filled: what a stand-in gives back


@dataclass(frozen=True)
class Shape:
    """A tensor's place in a structure, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Packed(NamedTuple):
    """What a unit returned: the structure with a :class:`Shape` for each tensor, and the tensors in order."""

    structure: Any
    tensors: tuple[Tensor, ...]


_PLAIN = (type(None), bool, int, float, str)


def pack_value(value: Any, unit: str) -> Packed:
    """
    Raises:
        UsageError: ``value`` holds an object that is no tensor and no plain constant.
    """
    if type(value) is Tensor:  # what most units return; the same in the end
        return Packed(shapes_of(value), (value.contiguous(),))
    for leaf in tree_leaves(value):
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise UsageError(
                f"{unit} returns a {type(leaf).__name__}, and the model is cut behind it: between pipeline stages only"
                " tensors can pass, alone or in tuples, lists and dicts; move the cut (pipeline_units()) or return those"
            )
    value = tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, value)
    tensors = tuple(leaf.contiguous() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return Packed(shapes_of(value), tensors)


def shapes_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), value.dtype)
    return tree_map(lambda leaf: shapes_of(leaf) if isinstance(leaf, Tensor) else leaf, value)


def shapes_key(batch: Any) -> tuple[Shape, ...]:
    """The shapes of a batch's tensors, by which slots are told apart."""
    if isinstance(batch, Tensor):
        return (shapes_of(batch),)
    return tuple(leaf for leaf in tree_leaves(shapes_of(batch)) if isinstance(leaf, Shape))


def copied(value: Any) -> Any:
    """The same with tensors of its own: user code may work in place, and a stage runs ``forward`` once more."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is tuple:
        return tuple(copied(part) for part in value)
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def unpack_value(structure: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(structure, Shape):
        return tensors[0]
    rest = iter(tensors)
    return tree_map(lambda leaf: next(rest) if isinstance(leaf, Shape) else leaf, structure)


class _Left(BaseException):
    """``forward`` is left behind the stage's last unit; no user code may catch it, hence no Exception."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Run:
    """One pass through ``forward`` on behalf of one stage."""

    def __init__(self, cut: Cut, stage: int, received: Any, on_receive: Callable[[], None] | None) -> None:
        self.cut, self.stage = cut, cut.stages[stage]
        self.received, self.on_receive = received, on_receive
        self.give: Callable[[int], Any] = lambda unit: None  # what a unit before the previous stage's last gives back
        self.outputs: dict[int, Any] = {}  # shapes of what this stage's units returned, where watched
        self._called: list[int] = []

    def enter(self, unit: int) -> None:
        if self._called and unit <= self._called[-1]:
            units = self.cut.units
            raise UsageError(
                f"forward() calls {units[unit]} after {units[self._called[-1]]}: a pipeline needs each unit called once,"
                " in the order of pipeline_units(); name them in the order of the calls, or use dp_shard instead"
            )
        self._called.append(unit)

    def stand_in(self, unit: int) -> Any:
        """What a unit of another stage gives back."""
        if unit > self.stage[-1]:
            self.check_called(self.stage[-1])
        self.enter(unit)
        if unit != self.stage.start - 1:
            return self.give(unit)
        if self.on_receive is not None:
            self.on_receive()
        return self.received

    def check_called(self, unit: int) -> None:
        if unit not in self._called:
            raise UsageError(
                f"forward() does not call {self.cut.units[unit]}, and the model is cut behind it: leave it out of"
                " pipeline_units(), or use dp_shard instead"
            )


class StandIn(nn.Module):
    """Under the name of a unit that is on another stage."""

    def __init__(self, model: CutModel, unit: int) -> None:
        super().__init__()
        self.__dict__["_model"], self._unit = model, unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model: CutModel = self.__dict__["_model"]
        if model.running is None:
            raise UsageError(
                f"{model.cut.units[self._unit]} is called outside of forward(), and it is on another pipeline stage:"
                " call the whole model, self(...), there"
            )
        return model.running.stand_in(self._unit)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_model")
        if model is None or name in ("_parameters", "_buffers", "_modules"):
            return super().__getattr__(name)
        raise AttributeError(
            f"{model.cut.units[self._unit]}.{name} is asked for on a pipeline stage that does not have it: a stage can"
            " use its own modules only; keep both in one unit, or use dp_shard instead"
        )


class _Watched(nn.Module):
    """In place of a unit of the running stage: notes what it returns, and leaves ``forward`` behind the last one."""

    def __init__(self, model: CutModel, unit: int, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"], self.__dict__["_module"], self._unit = model, module, unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        running: _Run | None = self.__dict__["_model"].running
        assert running is not None
        running.enter(self._unit)
        value = self.__dict__["_module"](*args, **kwargs)
        running.outputs[self._unit] = shapes_of(value)
        if self._unit == running.stage[-1] and self._unit != len(running.cut.units) - 1:
            raise _Left(value)
        return value

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        return super().__getattr__(name) if module is None else getattr(module, name)


class CutModel:
    """The user's module with the units of other ranks replaced.

    Args:
        task: units of other ranks are replaced in it, for good.
        cut: see :func:`elastictrain.parallel.units.cut_stages`.
        pp_rank: which stages are here.

    Attributes:
        running: the pass that is under way.
        modules: this rank's units, by their indices.
    """

    def __init__(self, task: nn.Module, cut: Cut, pp_rank: int) -> None:
        self.task, self.cut = task, cut
        self.forward: Callable[..., Any] = task.forward
        self.running: _Run | None = None
        self.stages = cut.of_rank(pp_rank)
        here = [unit for stage in self.stages for unit in cut.stages[stage]]
        self.modules = {unit: task.get_submodule(cut.units[unit]) for unit in here}
        names = [unit.rpartition(".") for unit in cut.units]
        self._places = [(task.get_submodule(parent), name) for parent, _, name in names]
        self._watched: dict[int, _Watched] = {}  # each is made once: a pass puts them in and takes them out again
        self._zeros: dict[Shape, Tensor] = {}
        self._stand_ins = {unit: StandIn(self, unit) for unit in range(len(cut.units))}
        for unit in range(len(cut.units)):
            if unit not in self.modules:
                self._put(unit, self._stand_ins[unit])

    def _put(self, unit: int, module: nn.Module) -> None:
        parent, name = self._places[unit]
        if module.training != self.task.training:
            module.train(self.task.training)
        setattr(parent, name, module)

    def run(
        self,
        stage: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        received: Any,
        *,
        before: Sequence[Any] = (),
        fill: Filling | None = None,
        on_receive: Callable[[], None] | None = None,
        watched: bool = False,
    ) -> tuple[Any, dict[int, Any]]:
        """The stage's part of ``forward(*args, **kwargs)``.

        Args:
            received: what the previous stage returned; None for the first.
            before: the shapes of what the units before this stage return.
            fill: what stand-ins give back; None: zeros, always the same ones.
            on_receive: called where ``received`` enters.
            watched: note the shapes of what each unit returns, and the order of calls.

        Returns:
            what the last unit of the stage returned, for the last stage what ``forward`` did; and those shapes.
        """
        units = self.cut.stages[stage]
        is_last = stage == self.cut.num_stages - 1
        run = _Run(self.cut, stage, received, on_receive)
        run.give = lambda unit: tree_map(lambda leaf: self._filled(leaf, received, fill), before[unit])
        assert self.running is None, "a stage within a stage"
        self.running = run
        try:
            with self._swapped(units, list(units) if watched else [] if is_last else [units[-1]]):
                value = self.forward(*args, **kwargs)
        except _Left as left:
            value = left.value
        else:
            if not is_last:
                run.check_called(units[-1])
        finally:
            self.running = None
        if stage > 0:
            run.check_called(units.start - 1)
        return value, run.outputs

    def _filled(self, leaf: Any, received: Any, fill: Filling | None) -> Any:
        if not isinstance(leaf, Shape):
            return leaf
        device = next(t.device for t in tree_leaves(received) if isinstance(t, Tensor))
        if fill is not None:
            return fill(torch.empty(leaf.shape, dtype=leaf.dtype, device=device))
        if (zeros := self._zeros.get(leaf)) is None:
            zeros = self._zeros[leaf] = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return zeros

    @contextmanager
    def _swapped(self, units: range, watched: Sequence[int]) -> Iterator[None]:
        """Within, only this stage's units are real ones."""
        changed = [unit for unit in self.modules if unit not in units]
        for unit in changed:
            self._put(unit, self._stand_ins[unit])
        for unit in watched:
            if unit not in self._watched:
                self._watched[unit] = _Watched(self, unit, self.modules[unit])
            self._put(unit, self._watched[unit])
        try:
            yield
        finally:
            for unit in (*changed, *watched):
                parent, name = self._places[unit]
                setattr(parent, name, self.modules[unit])


class StageModule(nn.Module):
    """A stage as a module of its own, which schedules and FSDP work on: its units are its children.

    Args:
        units: this stage's.
        outside: parameters outside of all units, which any stage may use.

    Attributes:
        body: what a call does; whoever calls the module sets it.
    """

    def __init__(self, index: int, units: Sequence[nn.Module], outside: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.index = index
        self.units = nn.ModuleList(units)
        for number, parameter in enumerate(outside):
            self.register_parameter(f"outside_{number}", parameter)
        self.body: Callable[[int, tuple[Tensor, ...]], Any] = lambda index, received: received

    def forward(self, *received: Tensor) -> Any:
        return self.body(self.index, received)
