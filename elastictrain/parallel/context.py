"""Context parallelism: the ranks of the ``cp`` axis share the tokens of each sample.

Each rank has a part of every sequence, and computes on it alone all that works on one token at a time. Attention is the one
place where tokens meet: :func:`attention` gathers the keys and values of the whole sequence, and the queries stay where they
are (as Llama 3 does; Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). In long sequences that costs little beside
the attention itself, less with grouped heads; masks are exact by position, and every backend can do it. Torch's own ring
attention is for CUDA's kernels alone.

A sequence is cut into twice as many pieces as ranks; rank *r* has the piece *r* from the front and the piece *r* from the
back, so that under a causal mask all ranks have the same amount of work.

On failure: what cannot be cut is a UsageError in the first step, before any gradient; a peer that dies makes the gathering
raise. A model that is not the same in parts as it is whole is found by :mod:`elastictrain.comparing` before it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from elastictrain.errors import UsageError
from elastictrain.parallel.buffers import NORMS
from elastictrain.parallel.mesh import Mesh
from elastictrain.step_plan import StepPlan

PROBED = 256  # tokens of a sequence that are computed in parts and as a whole, to be compared


# ---- what a model calls --------------------------------------------------------------------------------------------


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of a sequence with itself, also where ranks share its tokens.

    Args:
        query, key, value: (…, heads, tokens, head_dim), of the tokens that this rank has.
        attn_mask: only where no ranks share the tokens.

    Returns:
        the outputs of this rank's tokens, in the shape of ``query`` with the head_dim of ``value``.

    Raises:
        UsageError: with ``cp``: a mask, or queries and keys of different lengths.
    """
    here = _current
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if here is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **options)
    if attn_mask is not None:
        raise UsageError("attention(attn_mask=…) with mesh axis cp: only is_causal=True or no mask; use no cp")
    num = query.shape[-2]
    if key.shape[-2] != num or num % 2:
        raise UsageError(
            f"attention() with mesh axis cp: {num} queries and {key.shape[-2]} keys are not the tokens of one sequence on"
            " this rank; attend to another one that is not cut by F.scaled_dot_product_attention"
        )
    here.num_calls += 1
    key, value = here.gather(key, value)
    if not is_causal:
        return F.scaled_dot_product_attention(query, key, value, **options)
    outputs = []
    for part, piece in zip(query.chunk(2, dim=-2), here.pieces, strict=True):
        end = (piece + 1) * (num // 2)  # a piece sees all before it, and of itself what is not later
        mask: Any = causal_lower_right(num // 2, end)
        seen = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        outputs.append(F.scaled_dot_product_attention(part, *seen, attn_mask=mask, **options))
    return torch.cat(outputs, dim=-2)


def positions(num: int, *, device: torch.device | None = None) -> Tensor:
    """Where the ``num`` tokens that this rank has stand in their sequence: int64 of shape (num,); 0, 1, … without ``cp``.

    For rotary or learned positions: ``self.position(positions(x.shape[1], device=x.device))``.
    """
    if _current is None:
        return torch.arange(num, device=device)
    size = num // 2
    return torch.cat([torch.arange(piece * size, (piece + 1) * size, device=device) for piece in _current.pieces])


# ---- what the trainer does -----------------------------------------------------------------------------------------


class Context:
    """The ranks that share the tokens of this rank's samples.

    Args:
        dims: which dim of which entry of a batch is the sequence.
        group, rank, size: the ``cp`` axis.

    Attributes:
        num_calls: of :func:`attention`.
    """

    def __init__(self, dims: Mapping[Any, int], *, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._dims, self._group, self.rank, self.size = dims, group, rank, size
        self.pieces = (rank, 2 * size - 1 - rank)
        self.num_calls = 0
        self._is_off = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around forward and backward passes on a part."""
        global _current
        before, _current = _current, None if self._is_off else self
        try:
            yield
        finally:
            _current = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, passes are on whole sequences."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def part(self, batch: Any) -> Any:
        """This rank's tokens of a batch, in memory of their own.

        Raises:
            UsageError: the batch has no such entries, or not of one length, or of one that cannot be cut.
        """
        size = self._length(batch) // (2 * self.size)

        def cut(tensor: Tensor, dim: int) -> Tensor:
            return torch.cat([tensor.narrow(dim, piece * size, size) for piece in self.pieces], dim=dim)

        return self._changed(batch, cut)

    def shortened(self, batch: Any, weigh: Callable[[Any], Any]) -> Any:
        """Some tokens of a batch, enough to see whether a model works in parts: of all such stretches the heaviest, as a
        long prompt that does not count would show nothing."""
        length = self._length(batch)
        num = min(length, max(1, PROBED // (2 * self.size)) * 2 * self.size)

        def stretch(start: int) -> Any:
            return self._changed(batch, lambda tensor, dim: tensor.narrow(dim, start, num))

        return max(map(stretch, range(0, length - num + 1, num)), key=lambda one: weigh(one) or 0)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Of all ranks, in the order of the sequence; a collective, and another one in the backward pass."""
        if key.shape == value.shape and key.dtype == value.dtype:
            both = self._whole(torch.stack([key, value]))
            return both[0], both[1]
        return self._whole(key), self._whole(value)

    def _whole(self, part: Tensor) -> Tensor:
        gathered: Tensor = _Gather.apply(part, self._group, self.size)  # type: ignore[no-untyped-call]
        front, back = gathered.chunk(2, dim=-2)
        return torch.cat([*front.unbind(0), *reversed(back.unbind(0))], dim=-2)

    def _length(self, batch: Any) -> int:
        found = {key: self._entry(batch, key).shape[dim] for key, dim in self._dims.items()}
        if len(set(found.values())) > 1:
            raise UsageError(
                f"context_parallel_plan(): the entries of a batch have different numbers of tokens, {found}: give inputs and"
                " targets the same, token by token (shift the targets in collate_fn)"
            )
        num = next(iter(found.values()))
        if num % (2 * self.size):
            raise UsageError(
                f"a batch has {num} tokens in a sequence, not a multiple of {2 * self.size}, twice mesh axis cp={self.size}:"
                f" pad to {-(-num // (2 * self.size)) * 2 * self.size}, or use another cp"
            )
        return num

    def _entry(self, batch: Any, key: Any) -> Tensor:
        try:
            entry = batch[key] if isinstance(batch, (Mapping, tuple, list)) else None
        except (KeyError, IndexError, TypeError):
            entry = None
        if not isinstance(entry, Tensor) or not -entry.ndim <= self._dims[key] < entry.ndim:
            there = f"a {type(batch).__name__}"
            if isinstance(batch, Mapping):
                there = f"a mapping of {', '.join(map(str, batch))}"
            elif isinstance(batch, (tuple, list)):
                there = f"a {type(batch).__name__} of {len(batch)}"
            raise UsageError(
                f"context_parallel_plan() names {key!r} with dim {self._dims[key]}, and the batch is {there} without such a"
                " tensor: name entries of a tuple, list or mapping by index or key"
            )
        return entry

    def _changed(self, batch: Any, change: Any) -> Any:
        new = {key: change(self._entry(batch, key), dim) for key, dim in self._dims.items()}
        if isinstance(batch, Mapping):
            return type(batch)({**batch, **new})  # type: ignore[call-arg]
        entries = list(batch)
        for key, tensor in new.items():
            entries[key] = tensor
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)


_current: Context | None = None


class _Gather(torch.autograd.Function):
    """All ranks' tensors, stacked; the gradient of a rank's own is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty(size * len(tensor), *tensor.shape[1:])  # gloo knows no other shape
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered.view(size, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        own = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return own, None, None


# ---- what is refused -----------------------------------------------------------------------------------------------


def context_trouble(task: nn.Module, plan: StepPlan) -> str | None:
    """Why ranks cannot share the tokens of this task's samples; None where they can."""
    name = type(task).__name__
    if not _told(task):
        return f"{name} has no context_parallel_plan()"
    if not getattr(task, "automatic_optimization", True):
        return f"{name} has manual optimisation"
    if plan.compilation is not None:
        return "Compile cannot compile an attention that exchanges keys and values"
    norms = [path for path, module in task.named_modules() if isinstance(module, NORMS)]
    return f"{norms[0]} would have the statistics of a part of each sequence" if norms else None


def check_context(task: nn.Module, plan: StepPlan, *, cp: int, purpose: str = "fit") -> None:
    """
    Raises:
        UsageError: ranks cannot share the tokens of this task's samples; says what to do.
    """
    if purpose == "predict":
        raise UsageError(f"mesh axis cp={cp}: predictions would be of parts of sequences; predict without cp")
    if (trouble := context_trouble(task, plan)) is None:
        return
    remedy = "use no cp"
    if not _told(task):
        remedy = (
            f'define {type(task).__name__}.context_parallel_plan() to return {{0: 1, 1: 1}} or {{"tokens": 1, …}}, the dim'
            " of the sequence in each entry of a batch, and call elastictrain.parallel.attention, or use dp_shard"
        )
    raise UsageError(f"mesh axis cp={cp}: {trouble}: {remedy}")


def make_context(task: nn.Module, mesh: Mesh) -> Context:
    assert mesh.cp_group is not None
    return Context(_told(task), group=mesh.cp_group, rank=mesh.cp_rank, size=mesh.shape.cp)


def num_tokens(task: nn.Module, batch: Any) -> int | None:
    """In a sequence of the batch, as the task's plan has it; None where there is no plan, or it does not fit."""
    for key, dim in _told(task).items():
        try:
            return int(batch[key].shape[dim])
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return None


def _told(task: nn.Module) -> Mapping[Any, int]:
    tell: Any = getattr(task, "context_parallel_plan", None)
    return (tell() if callable(tell) else None) or {}
