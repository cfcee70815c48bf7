"""What ``self.log`` wrote: step values, epoch averages, torchmetrics objects, with Lightning's rules for names.

Values stay tensors on their device; nothing here synchronises until somebody asks for numbers. A step value is the last
one logged, on rank 0 (with ``sync_dist``: reduced over ranks, when it is written). An epoch value is always over all
ranks: each rank adds up its own, and :meth:`LogBook.close` merges the sums, so that the result does not depend on how
batches were dealt out. The rules are those of ``lightning.pytorch``'s result collection (2.6); a test compares the two.

On failure: a rank whose task logs other names than its peers' still takes part in the merge; names logged anywhere count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from elastictrain.compat.torchmetrics import last_value
from elastictrain.errors import UsageError
from elastictrain.state import FlatState, pack, unpack

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


Key = tuple[str, str, str]  # (hook, name, loader suffix)

_OVER_RANKS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
}


@dataclass(frozen=True, slots=True)
class Meta:
    """How one name is logged in one hook."""

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce: str
    sync_dist: bool
    rank_zero_only: bool
    dataloader_idx: int | None  # where a validation has several loaders
    suffix: str  # /dataloader_idx_1, unless the task wants none
    metric: str | None  # the attribute of the module that holds the torchmetrics object

    def forked(self, on_step: bool) -> str:
        """The name it is written under: with ``_step`` or ``_epoch`` where it is both."""
        if self.on_step and self.on_epoch:
            return f"{self.name}_{'step' if on_step else 'epoch'}{self.suffix}"
        return self.name + self.suffix


class Entry:
    """One logged name."""

    __slots__ = ("_last", "count", "meta", "metric", "number", "total")

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self._last: Tensor | None = None
        self.number: float | None = None  # the latest step value, where reading it cost nothing; float32
        self.total: Tensor | None = None  # for the epoch: sum of value × batch size, or the running sum, max or min
        self.count = 0  # for the epoch: sum of batch sizes
        self.metric: Metric | None = None

    @property
    def last(self) -> Tensor | None:
        """The latest step value."""
        return self._last if self.number is None else torch.tensor(self.number, dtype=torch.float32)

    @last.setter
    def last(self, value: Tensor | None) -> None:
        self._last, self.number = value, None

    def add(self, value: Tensor, batch_size: int) -> None:
        meta = self.meta
        if meta.on_step:
            self.last = value
        if meta.on_epoch:
            if meta.reduce == "mean":
                value = value * batch_size if batch_size else torch.zeros_like(value)  # a mean over nothing may be nan
                self.count += batch_size
            self.total = value if self.total is None else REDUCTIONS[meta.reduce](self.total, value)

    def average(self) -> Tensor | None:
        """The epoch value of this rank alone."""
        if self.metric is not None:
            value = self.metric.compute()
            return value.detach() if isinstance(value, Tensor) else None
        if self.total is None:
            return None
        if self.meta.reduce in ("max", "min"):
            return self.total
        total = self.total + 0.0  # a sum that begins at zero is never -0.0
        return total / self.count if self.meta.reduce == "mean" else total


@dataclass
class Written:
    """Names with values, by who wants them."""

    log: dict[str, Tensor]  # loggers
    bar: dict[str, Tensor]  # the progress bar
    callback: dict[str, Tensor]  # monitors: plain and forked names

    def on_host(self) -> Written:
        """The same in the host's memory, as other processes can take it."""
        return Written(
            *({name: value.cpu() for name, value in of.items()} for of in (self.log, self.bar, self.callback))
        )


class LogBook:
    """All names logged in one stage (training, or one validation)."""

    def __init__(self, *, training: bool) -> None:
        self.training = training
        self.entries: dict[Key, Entry] = {}
        self.num_added = 0  # to values of an epoch

    def add(self, key: Key, meta: Meta, value: Tensor | Metric, batch_size: int) -> None:
        """Raises:
        UsageError: the name was logged in this hook before, with other options.
        """
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(meta)
        elif entry.meta is not meta and entry.meta != meta:
            raise UsageError(
                f"self.log({meta.name!r}, …) was called twice in {key[0]} with different options: use one name each"
            )
        self.num_added += meta.on_epoch
        if isinstance(value, Tensor):
            entry.add(value, batch_size)
            return
        entry.metric = value
        if meta.on_step:
            last = last_value(value)
            entry.last = last.detach() if isinstance(last, Tensor) else None

    def steps(self, dataloader_idx: int | None = None) -> Written:
        """Step values as they stand now, of this rank; in a validation those of one loader."""
        written = Written({}, {}, {})
        for entry in self.entries.values():
            meta = entry.meta
            if meta.on_step and entry.last is not None and meta.dataloader_idx == dataloader_idx:
                self._put(written, meta, entry.last, on_step=True)
        return written

    def _put(self, written: Written, meta: Meta, value: Tensor, *, on_step: bool) -> None:
        name = meta.forked(on_step)
        if meta.logger:
            written.log[name] = value
        if meta.prog_bar:
            written.bar[name] = value
        if self.training or not on_step:
            written.callback[meta.name + meta.suffix] = value
            written.callback[name] = value

    def averages(
        self,
        module: nn.Module,
        gather: Callable[[Any], list[Any]],
        *,
        world_size: int,
        dataloader_idx: int | None = None,
        counts: bool = True,
    ) -> Written:
        """Epoch values over all ranks, as they stand now. A collective on several ranks.

        Args:
            module: holds torchmetrics objects that only other ranks logged.
            gather: gives the values of all ranks that count to every rank.
            dataloader_idx: whose values, in a validation that has several loaders; None: what belongs to none.
            counts: False on a rank that repeats another one's work: it then has no values of torchmetrics objects.
        """
        mine = {key: entry for key, entry in self.entries.items() if entry.meta.dataloader_idx == dataloader_idx}
        entries = mine if world_size == 1 else self._merged(mine, module, gather, counts)
        written = Written({}, {}, {})
        for entry in entries.values():
            if entry.meta.on_epoch and (value := entry.average()) is not None:
                self._put(written, entry.meta, value, on_step=False)
        return written

    def synced_steps(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Step values logged with ``sync_dist``, reduced over ranks. A collective."""
        own = {
            e.meta.forked(on_step=True): (e.meta.reduce, e.last.item())
            for e in self.entries.values()
            if e.meta.on_step and e.meta.sync_dist and e.last is not None
        }
        values: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for theirs in gather(own):
            for name, (reduce, value) in theirs.items():
                values.setdefault(name, []).append(value)
                kinds[name] = reduce
        return {name: _OVER_RANKS[kinds[name]](found) for name, found in values.items()}

    @property
    def has_synced_steps(self) -> bool:
        return any(e.meta.on_step and e.meta.sync_dist for e in self.entries.values())

    def reset(self) -> None:
        """A new epoch: forget everything."""
        for entry in self.entries.values():
            if entry.metric is not None:
                entry.metric.reset()
        self.entries = {}

    def _merged(
        self, mine: Mapping[Key, Entry], module: nn.Module, gather: Callable[[Any], list[Any]], counts: bool
    ) -> dict[Key, Entry]:
        """What one rank would hold had it done all the work."""
        own = {
            key: (e.meta, None if e.total is None else e.total.double().item(), e.count, e.metric is not None)
            for key, e in mine.items()
            if e.meta.on_epoch
        }
        merged: dict[Key, Entry] = {}
        for rank, theirs in enumerate(gather(own)):
            for key, (meta, total, count, is_metric) in theirs.items():
                if meta.rank_zero_only and rank != 0:
                    continue
                entry = merged.setdefault(key, Entry(meta))
                if is_metric and not counts:
                    entry.metric = None
                elif is_metric:
                    held = self.entries[key].metric if key in self.entries else module.get_submodule(meta.metric or "")
                    assert isinstance(held, Metric)
                    entry.metric = held
                elif total is not None:
                    value = torch.tensor(total, dtype=torch.float64)
                    entry.total = value if entry.total is None else REDUCTIONS[meta.reduce](entry.total, value)
                    entry.count += count
        for entry in merged.values():
            if entry.total is not None:
                entry.total = (entry.total / entry.count if entry.meta.reduce == "mean" else entry.total).float()
                entry.count = 1
        return merged

    # ---- state -----------------------------------------------------------------------------------------------------

    def state(self, gather: Callable[[Any], list[Any]]) -> FlatState:
        """``metrics.log``: sums over all ranks of what the running epoch has so far, and step values. A collective."""
        own = [
            (key, asdict(e.meta), _number(e.total), e.count, _number(e.last), _is_double(e.total, e.last))
            for key, e in self.entries.items()
        ]
        totals: dict[Any, Any] = {}
        for theirs in gather(own):
            for key, meta, total, count, last, is_double in theirs:
                if key not in totals:
                    totals[key] = [meta, total, count, last, is_double]
                elif total is not None:
                    before = totals[key][1]
                    if before is not None:
                        total = {"max": max, "min": min}.get(meta["reduce"], lambda a, b: a + b)(before, total)
                    totals[key][1:3] = [total, totals[key][2] + count]
        return pack("metrics.log", [[list(key), *rest] for key, rest in totals.items()])

    def load_state(self, flat: Mapping[str, Any], module: nn.Module, *, is_main: bool) -> None:
        """Take the sums back: the first data-parallel rank has them all, the others start from nothing.

        Args:
            module: holds the torchmetrics objects; their own state is kept apart.
        """
        self.entries = {}
        if "metrics.log" not in flat or not is_main:
            return
        for key, meta, total, count, last, is_double in unpack("metrics.log", flat):
            entry = self.entries[tuple(key)] = Entry(Meta(**meta))
            dtype = torch.float64 if is_double else torch.float32
            entry.total = None if total is None else torch.tensor(total, dtype=dtype)
            entry.last = None if last is None else torch.tensor(last, dtype=dtype)
            entry.count = count
            if entry.meta.metric is not None:
                metric = module.get_submodule(entry.meta.metric)
                assert isinstance(metric, Metric)
                entry.metric = metric


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value.double().item())


def _is_double(*values: Tensor | None) -> bool:
    return any(value is not None and value.dtype is torch.float64 for value in values)
