"""Tensor-parallel plans: how the layers of a model are cut, by the names of its modules.

A plan is ``{pattern of module names: style}``. A pattern is a module's name in which ``*`` stands for one part
(``blocks.*.up``); a style is one of torch's (``torch.distributed.tensor.parallel``), its name in :data:`STYLES`, or
:data:`SUMMED`. It is what the task's ``tensor_parallel_plan()`` returns; a module without that method has the plan that
its model brings (:func:`elastictrain.own_plan.own_plan`).

Everything that a plan can get wrong before a batch is there is refused by :func:`read_plan`, which needs no process group.

On failure: :class:`~elastictrain.errors.UsageError` naming the pattern, the module and the remedy, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from elastictrain.errors import UsageError
from elastictrain.own_plan import own_plan
from elastictrain.parallel.roles import head_counts

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_loss_parallel": lambda: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
STYLES["colwise_rep"] = STYLES["colwise_gather_output"]  # transformers' older names
STYLES["rowwise_rep"] = STYLES["rowwise_split_input"]

# Whole on every rank, and works on split activations: gradients are summed. The name is transformers'.
SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Plan:
    """A plan that fits its module."""

    styles: Mapping[str, ParallelStyle]  # by module name
    summed: tuple[str, ...] = ()  # names of modules whose gradients are summed over the ranks

    @property
    def splits_loss(self) -> bool:
        """Do logits stay split over the classes until the loss?"""
        return any(
            isinstance(style, ColwiseParallel) and not style.use_local_output and _last(style.output_layouts[0])
            for style in self.styles.values()
        )


def _last(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == -1


# ---- the plan, checked ---------------------------------------------------------------------------------------------


def read_plan(task: nn.Module, tp: int) -> Plan:
    """The task's ``tensor_parallel_plan()``, looked up and checked against ``tp`` ranks. Needs no process group.

    Raises:
        UsageError: there is none, a pattern names no module, two name the same, a style is unknown or does not fit its
            module, or ``tp`` does not divide what must be cut evenly.
    """
    name = type(task).__name__
    told = told_plan(task)
    if not told:
        raise UsageError(
            f"mesh axis tp={tp}: {name} has no tensor-parallel plan; define {name}.tensor_parallel_plan() to return"
            ' {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", …}, or use dp_shard'
        )
    modules = dict(task.named_modules())
    styles: dict[str, ParallelStyle] = {}
    owner: dict[str, str] = {}
    for pattern, given in told.items():
        style = None if given == SUMMED else _style(name, pattern, given)
        for path in _found(task, pattern, modules):
            if path in owner:
                raise UsageError(
                    f"{name}.tensor_parallel_plan(): {owner[path]!r} and {pattern!r} both name {path}: keep one of them"
                )
            owner[path] = pattern
            if style is None:
                continue
            _check_module(path, modules[path], style, tp)
            if isinstance(style, ColwiseParallel) and _last(style.output_layouts[0]):
                _check_heads(path.rpartition(".")[0], modules, tp)
            styles[path] = style
    _check_ties(task, styles)
    return Plan(styles, tuple(path for path in owner if path not in styles))


def told_plan(task: nn.Module) -> Mapping[str, Any] | None:
    """What the task says, else what its model brings; None or nothing where there is no plan.

    Raises:
        UsageError: the model's own plan has a style that is not supported.
    """
    tell: Any = getattr(task, "tensor_parallel_plan", None)
    told: Mapping[str, Any] | None = tell() if callable(tell) else own_plan(task)
    return told


def _style(name: str, pattern: str, given: Any) -> ParallelStyle:
    if isinstance(given, ParallelStyle):
        return given
    if isinstance(given, str) and given in STYLES:
        return STYLES[given]()
    raise UsageError(
        f"{name}.tensor_parallel_plan(): {pattern!r} has the style {given!r}: use one of {', '.join(STYLES)}, {SUMMED}, or"
        " a style of torch.distributed.tensor.parallel"
    )


def _found(task: nn.Module, pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules that a pattern names.

    Raises:
        UsageError: there are none.
    """
    if found := [path for path in modules if path and _matches(path, pattern)]:
        return found
    where = f"{type(task).__name__}.tensor_parallel_plan(): {pattern!r}"
    if parameter := next((path for path, _ in task.named_parameters() if _matches(path, pattern)), None):
        raise UsageError(
            f"{where} names a parameter, {parameter}: only whole modules can be cut; leave it out of the plan, and it"
            " stays whole on every rank"
        )
    raise UsageError(f"{where} names no module; {_nearest(pattern, modules)}")


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def _nearest(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    """What there is where the pattern stops to match."""
    parts = pattern.split(".")
    for cut in range(len(parts) - 1, -1, -1):
        parents = [
            path for path in modules if (cut == 0 and not path) or (path and _matches(path, ".".join(parts[:cut])))
        ]
        if parents:
            there = [child for child, _ in modules[parents[0]].named_children()]
            return f"{parents[0] or 'the task'} has {', '.join(there[:8]) or 'no modules'}{', …' if there[8:] else ''}"
    raise AssertionError("the task itself is always there")


def _check_module(path: str, module: nn.Module, style: ParallelStyle, tp: int) -> None:
    """
    Raises:
        UsageError: the style cannot cut this module, or not into ``tp`` equal parts where they must be equal.
    """
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    kind = "colwise" if isinstance(style, ColwiseParallel) else "rowwise"
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise UsageError(
            f"{path} is a {type(module).__name__}, planned {kind}: only nn.Linear and nn.Embedding can be cut;"
            " leave it out of the plan, and it stays whole on every rank"
        )
    width: tuple[str, int] | None = None
    if isinstance(style, ColwiseParallel) and style.use_local_output and _last(style.output_layouts[0]):
        width = ("embedding_dim", module.embedding_dim) if isinstance(module, nn.Embedding) else None
        width = ("out_features", module.out_features) if isinstance(module, nn.Linear) else width
    elif isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear) and _last(style.input_layouts[0]):
        width = ("in_features", module.in_features)
    if width is not None and width[1] % tp:
        raise UsageError(f"{path} is planned {kind}, and its {width[0]}={width[1]} is {not_a_multiple(width[1], tp)}")


def _check_heads(path: str, modules: Mapping[str, nn.Module], tp: int) -> None:
    """
    Raises:
        UsageError: the module that uses a split output would cut through one of its heads.
    """
    for key, value in head_counts(modules[path]).items():
        if value % tp:
            where = f"{path}.{key}" if path else key
            raise UsageError(f"{where}={value} is {not_a_multiple(value, tp)}: a head stays on one rank")


def not_a_multiple(size: int, tp: int) -> str:
    fitting = [str(degree) for degree in range(2, min(size, 64) + 1) if size % degree == 0]
    other = f", or a tp that divides it ({', '.join(fitting[:6])})" if fitting else ""
    return f"not a multiple of tp={tp}: use {-(-size // tp) * tp}{other}"


def _check_ties(task: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Modules that share a weight must cut it in the same way.

    Raises:
        UsageError: names both.
    """
    first: dict[int, tuple[str, str | None]] = {}
    for path, module in task.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            here = f"{path}.{name}", _cut(module, styles.get(path))
            there = first.setdefault(id(parameter), here)
            if there[1] != here[1]:
                raise UsageError(
                    f"{there[0]} and {here[0]} are one weight, and the tensor-parallel plan cuts one of them"
                    f" {there[1] or 'not at all'} and the other {here[1] or 'not at all'}: plan both alike"
                    " (an embedding rowwise and its head colwise)"
                )


def _cut(module: nn.Module, style: ParallelStyle | None) -> str | None:
    """How a style cuts the weight of a module; None where it does not."""
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return None if style is None else type(style).__name__
    return "by rows" if isinstance(style, RowwiseParallel) == isinstance(module, nn.Embedding) else "by columns"
