"""Compiled code is compared with eager code, and a model on parts of sequences with the whole, before anything is trained.

Compilers are wrong now and then, silently: a gradient that is off by a factor still trains, only worse. So before the first
step of a generation one slot (in a pipeline: all of them) is computed twice more, compiled and eager, with the same
weights, batch and random numbers, and the gradients of both are compared, parameter by parameter. Nothing of it is kept:
gradients, buffers, metrics, logged values and random numbers are afterwards what they were. ``training_step`` runs two more
times for that slot.

On failure: a difference is a UsageError on every rank, which names the parameter that differs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.compat.torch import tree_map
from elastictrain.compat.torchmetrics import metrics_kept
from elastictrain.data.randomness import generators_kept
from elastictrain.data.slots import Slot
from elastictrain.errors import UsageError
from elastictrain.metrics.logbook import LogBook
from elastictrain.parallel.context import Context
from elastictrain.passes import Passes
from elastictrain.session import Session


def compare_with_eager(session: Session, run: Callable[[], None]) -> None:
    """Refuse compiled blocks whose gradients are not those of eager code; a collective.

    Args:
        run: forward and backward passes of one slot, or of all in a pipeline; leaves gradients in ``.grad``.

    Raises:
        UsageError: they differ by more than rounding.
    """
    s, batch = session, session.batch

    def compute() -> None:
        s.batch = tree_map(lambda leaf: leaf, batch)  # user code may take things out of its batch
        run()

    if (found := _disagreement(s, compute, compute, s.built.shaping.eager())) is not None:
        raise UsageError(
            f"Compile: compiled blocks and eager code disagree on gradients, by {found[1]:.1%} on {found[0]}: leave out"
            " Compile, or compile other parts of the model yourself (self.part.compile() in configure_model)"
        )


def compare_with_whole(
    session: Session, context: Context, passes: Passes, slot: Slot | None, *, to_device: Callable[[Any], Any]
) -> None:
    """Refuse a model that computes other gradients from parts of a sequence than from all of it; a collective.

    Some tokens of one slot are computed both ways, without dropout.

    Args:
        slot: None where this rank has none.

    Raises:
        UsageError: the gradients differ by more than rounding.
    """
    s, name = session, type(session.task).__name__
    weigh = getattr(s.task, "loss_weight", lambda batch: None)
    whole = None if slot is None else context.shortened(slot.batch, weigh)

    def in_parts() -> None:
        factor = 1.0 / context.size
        if whole is not None:
            part = context.part(whole)
            weight, total = weigh(part), weigh(whole)
            factor = factor if total is None else weight / max(total, 1e-9)
            s.batch = to_device(part)
        passes.apart(slot, factor=factor)

    def as_a_whole() -> None:
        s.batch = None if whole is None else to_device(whole)
        passes.apart(slot, factor=1.0 / context.size)

    modes = {module: module.training for module in s.task.modules()}
    s.task.eval()
    try:
        found = _disagreement(s, in_parts, as_a_whole, context.off())
    finally:
        for module, mode in modes.items():
            module.training = mode
    never = s.ranks.gather(slot is not None and context.num_calls == 0)
    if any(never):
        raise UsageError(
            f"mesh axis cp={context.size}: {name} never calls elastictrain.parallel.attention: a rank would attend to its"
            " own tokens only; call it instead of F.scaled_dot_product_attention, or use no cp"
        )
    if found is not None:
        raise UsageError(
            f"mesh axis cp={context.size}: {name} computes other gradients from parts of a sequence than from all of it, by"
            f" {found[1]:.1%} on {found[0]}: every attention must be elastictrain.parallel.attention, positions those of"
            " elastictrain.parallel.positions, and a loss that leaves tokens out needs loss_weight(batch); or use no cp"
        )


def _disagreement(
    session: Session, first: Callable[[], None], second: Callable[[], None], around: AbstractContextManager[None]
) -> tuple[str, float] | None:
    """Where the gradients of two ways to compute differ most, the second one within ``around``; a collective."""
    s = session
    with _nothing_kept(s):
        with generators_kept(s.device):
            first()
        mine = _taken(s.task)
        with around, generators_kept(s.device):
            second()
        expected = _taken(s.task)
    is_rounded = s.plan.precision.compute != "fp32" or torch.get_float32_matmul_precision() != "highest"
    wrong = [found for found in s.ranks.gather(worst(mine, expected, tolerance=0.1 if is_rounded else 1e-3)) if found]
    return max(wrong, key=lambda found: found[1]) if wrong else None


def worst(compiled: dict[str, Tensor], eager: dict[str, Tensor], *, tolerance: float) -> tuple[str, float] | None:
    """The parameter whose gradient differs most from the eager one, and by which part of it; None if all agree.

    A gradient that is small beside the others may be nothing but rounding (a bias before a normalisation): it may differ
    by a tenth of ``tolerance`` of the whole.
    """
    norms = {name: gradient.double().norm() for name, gradient in eager.items()}
    whole = torch.stack([*norms.values(), torch.zeros((), dtype=torch.float64)]).norm().item() if norms else 0.0
    found: tuple[str, float] | None = None
    for name in eager | compiled:
        if name not in eager or name not in compiled:
            return name, 1.0
        norm, difference = norms[name].item(), (compiled[name].double() - eager[name].double()).norm().item()
        if norm != norm or norm == float("inf"):  # eager code overflows as well
            continue
        if not difference <= max(tolerance * norm, 0.1 * tolerance * whole):
            part = difference / norm if norm else float("inf")
            found = (name, part) if found is None or part > found[1] else found
    return found


def _taken(module: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of the gradients, which the parameters no longer have."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if (gradient := parameter.grad) is not None:
            gradients[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        parameter.grad = None
    return gradients


@contextmanager
def _nothing_kept(session: Session) -> Iterator[None]:
    s = session
    batch, gradients = s.batch, [(parameter, parameter.grad) for parameter in s.task.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in s.task.buffers()]
    logbook, s.logbook = s.logbook, LogBook(training=True)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with metrics_kept(s.task):
            yield
    finally:
        s.logbook, s.batch = logbook, batch
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for parameter, gradient in gradients:
            parameter.grad = gradient
