"""``self.log`` of a LightningModule, with Lightning's signature and rules, into a :class:`LogBook`.

A call costs a few microseconds: options are checked once per name, values stay on their device.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from elastictrain.compat.lightning import LightningModule, default_levels, extract_batch_size
from elastictrain.errors import UsageError
from elastictrain.metrics.logbook import REDUCTIONS, Key, Meta


def make_log(session: Any) -> Callable[..., None]:
    """The ``log`` of the session's module, with Lightning's signature.

    A plain function: copying a module that has it (weight averaging does) must not copy the trainer.
    """
    known: dict[tuple[Any, ...], tuple[Meta, Key]] = {}
    fields = session.task.__dict__

    def log(
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        options = (
            *(fields["_current_fx_name"], name, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist),
            *(rank_zero_only, session.dataloader_idx, add_dataloader_idx),
        )
        found = known.get(options)
        if found is None:
            meta = _meta(session, value, metric_attribute, options)
            found = known[options] = meta, (str(options[0]), name, meta.suffix)
        meta, key = found
        if rank_zero_only and session.ranks.rank != session.mesh.first_rank:
            return
        if type(value) is Tensor and value.numel() == 1:
            entry = session.logbook.entries.get(key)
            is_known = entry is not None and entry.meta is meta and not meta.on_epoch
            if is_known and value.is_cpu and value.dtype is torch.float32:
                entry.number = value.item()  # the common case, a step value that was logged before; no copy of a tensor
                return
            value = value.detach().clone()  # user code may go on changing it in place
            if value.ndim or value.dtype is not torch.float32:
                value = _plain(value)
            if is_known:
                entry.last = value
                return
        elif isinstance(value, Metric):
            session.logbook.add(key, meta, value, 1)
            return
        else:
            value = _scalar(name, value, session.device)
        size = 1
        if meta.on_epoch and meta.reduce == "mean":
            size = batch_size if batch_size is not None else samples_in_batch(session)
        session.logbook.add(key, meta, value, size)

    return log


def _meta(session: Any, value: Any, attribute: str | None, options: tuple[Any, ...]) -> Meta:
    """The options of one name, checked once."""
    hook, name, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only, *index = options
    dataloader_idx, is_added = index
    if is_added and "/dataloader_idx_" in name:
        raise UsageError(f"self.log({name!r}, …): leave the loader's index out, it is added")
    if hook is None:
        raise UsageError(f"self.log({name!r}, …) was called outside of the hooks that the trainer runs")
    if session.stage == "predict":
        raise UsageError(f"self.log({name!r}, …) in {hook}: prediction does not log")
    at_step, at_epoch = default_levels(hook, on_step, on_epoch)
    if not at_step and not at_epoch:
        raise UsageError(f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing")
    return Meta(
        name=name,
        on_step=at_step,
        on_epoch=at_epoch,
        prog_bar=prog_bar,
        logger=logger is None or logger,
        reduce=_reduction(name, reduce_fx),
        sync_dist=sync_dist,
        rank_zero_only=rank_zero_only,
        dataloader_idx=dataloader_idx,
        suffix="" if dataloader_idx is None or not is_added else f"/dataloader_idx_{dataloader_idx}",
        metric=_attribute(session.task, name, value, attribute) if isinstance(value, Metric) else None,
    )


def samples_in_batch(session: Any) -> int:
    """Samples in the running batch, as Lightning finds them."""
    if session.batch_size is None:
        session.batch_size = 1 if session.batch is None else extract_batch_size(session.batch)
    return int(session.batch_size)


def _scalar(name: str, value: Any, device: torch.device) -> Tensor:
    """Any loggable value as a detached tensor without dimensions."""
    if isinstance(value, DTensor):  # a loss over sharded parameters
        value = value.full_tensor()
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"self.log({name!r}, …) got a tensor of shape {list(value.shape)}: log one number, such as its mean()"
            )
        return _plain(value.detach().clone())
    if isinstance(value, (numbers.Number, bool)):
        return torch.tensor(value, device=device, dtype=torch.float32)
    raise UsageError(
        f"self.log({name!r}, …) got a {type(value).__name__}: log a number, a tensor of one element or a torchmetrics object"
    )


def _plain(value: Tensor) -> Tensor:
    value = value.squeeze()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _reduction(name: str, reduce_fx: Any) -> str:
    text = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", repr(reduce_fx))
    text = {"avg": "mean"}.get(text.lower(), text.lower())
    if text not in REDUCTIONS:
        raise UsageError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): use mean, sum, max or min, or log a torchmetrics object"
        )
    return text


def _attribute(module: LightningModule, name: str, metric: Metric, given: str | None) -> str:
    if given is not None:
        return given
    found: str | None = next((path for path, part in module.named_modules() if part is metric), None)
    if found is None:
        raise UsageError(
            f"self.log({name!r}, {type(metric).__name__}()): keep the metric as an attribute of the module"
            " (self.accuracy = …), so that its state can be kept"
        )
    return found
