"""How fast training goes, how much of the hardware that is, and where the time of a step goes. On unless told otherwise.

Everything comes from the timings that the trainer takes anyway; on log steps they become values to log, and in between a
step costs an addition to a list. Nothing here makes the training loop wait for the accelerator. Between log steps the host
runs ahead of an accelerator: there, what is called the duration of a step is the mean since the last log step, where host
and device meet, and ``time/device`` is what the host waited at that meeting.

On failure: FLOPs that cannot be counted, or a device whose peak nobody knows, leave out the values that need them.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastictrain.callback import Callback, RunInfo, StepInfo, Timings
from elastictrain.errors import UsageError
from elastictrain.metrics.devices import peak_flops

GIB = 2.0**30
_WARM_UP = 2  # steps that count in no rate: the first makes everything ready, and FLOPs are counted during the second
_MEMORY_EVERY = 1.0  # seconds: asking an allocator costs a tenth of a millisecond


class _Window(NamedTuple):
    """The steps between two log steps."""

    steps: int
    samples: int
    tokens: int
    seconds: float


class ThroughputMonitor(Callback):
    """Log samples/s, tokens/s, TFLOP/s and MFU; the parts and percentiles of the step time; memory; the loader's queue.

    Model FLOPs utilisation is model FLOP/s as a share of what all devices could do at most in the precision of the run,
    without sparsity; FLOPs are the task's ``flops_per_sample()``, else counted once.

    Args:
        window: steps over which rates and percentiles are taken.
        every: seconds between two reports, but for the first and the last log step: what is in between becomes part of the
            next one. So short steps are not spent on telling how short they are.
        peak_tflops: what a device can do at most, for devices that are not in the table.
        enabled: False logs nothing; there is a monitor unless you give your own.

    Raises:
        UsageError: ``window`` is below 1, ``every`` below 0, or ``peak_tflops`` not above 0.
    """

    def __init__(
        self, *, window: int = 100, every: float = 0.5, peak_tflops: float | None = None, enabled: bool = True
    ) -> None:
        if window < 1:
            raise UsageError(f"ThroughputMonitor(window={window}) must be at least 1 step")
        if not every >= 0:
            raise UsageError(f"ThroughputMonitor(every={every}) must be at least 0 seconds")
        if peak_tflops is not None and not peak_tflops > 0:
            raise UsageError(f"ThroughputMonitor(peak_tflops={peak_tflops}) must be above 0, or None")
        self._size, self._every, self._enabled = window, every, enabled
        self.needs_flops = enabled
        self._given = None if peak_tflops is None else peak_tflops * 1e12
        self._run: RunInfo | None = None

    def on_generation_start(self, info: RunInfo) -> None:
        self._run = info if self._enabled else None
        self._durations: deque[float] = deque(maxlen=self._size)
        self._windows: deque[_Window] = deque()
        self._warm: list[StepInfo] = []
        self._flops: float | None = None
        self._due = self._memory_due = 0.0
        self._held: list[Timings] = []  # since the last report
        self._peak = self._given
        self._is_async = info.device != "cpu"
        if self._peak is None and self._is_async:
            self._peak = peak_flops(torch.device(info.device, torch.accelerator.current_device_index()), info.precision)

    def on_step_end(self, info: StepInfo) -> None:
        if self._run is None:
            return
        if len(self._warm) == _WARM_UP:
            if not self._is_async:
                self._durations.append(info.seconds)
            return
        self._warm.append(info)
        if len(self._warm) == 1:
            self._flops = self._run.flops_per_sample()

    def on_log(self, info: StepInfo) -> Mapping[str, float | Tensor]:
        if self._run is None or info.timings is None:
            return {}
        self._held.append(info.timings)
        if (now := time.monotonic()) < self._due and info.step != self._run.max_steps:
            return {}
        self._due = now + self._every
        timings, self._held = joined(self._held), []
        values: dict[str, float | Tensor] = {
            **split(timings, is_async=self._is_async),
            **self._memory(now),
            "elastic/world_size": self._run.world_size,
            "elastic/generation": self._run.generation,
        }
        if timings.queued is not None:
            values["throughput/loader_queue"] = timings.queued
        self._add(timings, info)
        values.update(self._rates(self._run))
        if self._durations:
            values.update({f"time/step_{name}": value for name, value in percentiles(self._durations).items()})
        return values

    def _add(self, timings: Timings, info: StepInfo) -> None:
        """Take the steps since the last log step into the window, but for those that warm up."""
        window = _Window(timings.num_steps, timings.samples, timings.tokens, timings.total)
        if len(self._warm) < _WARM_UP:
            return
        if cold := [step for step in self._warm if step.step > info.step - timings.num_steps]:
            samples = cold[-1].samples - (info.samples - timings.samples)
            tokens = round(timings.tokens * samples / max(1, timings.samples))
            left = window.steps - len(cold), window.samples - samples, window.tokens - tokens
            window = _Window(*left, window.seconds - sum(step.seconds for step in cold))
        if window.steps > 0 and window.seconds > 0:
            self._windows.append(window)
            if self._is_async:
                self._durations.append(window.seconds / window.steps)
        steps = sum(one.steps for one in self._windows)
        while len(self._windows) > 1 and steps - self._windows[0].steps >= self._size:
            steps -= self._windows.popleft().steps

    def _rates(self, run: RunInfo) -> dict[str, float]:
        if not self._windows:
            return {}
        seconds = sum(window.seconds for window in self._windows)
        samples = sum(window.samples for window in self._windows) / seconds
        tokens = sum(window.tokens for window in self._windows) / seconds
        rates = {"throughput/samples_per_second": samples}
        if tokens:
            rates["throughput/tokens_per_second"] = tokens
        if self._flops is not None:
            rates["throughput/tflops"] = samples * self._flops / 1e12
        rates |= {f"{name}_per_device": value / run.world_size for name, value in rates.items()}
        if self._flops is not None and self._peak is not None:
            rates["throughput/mfu"] = samples * self._flops / (self._peak * run.world_size)
        return rates

    def _memory(self, now: float) -> dict[str, float]:
        """GiB of this rank's process and device, at most once a second."""
        if now < self._memory_due:
            return {}
        self._memory_due = now + _MEMORY_EVERY
        unit = 1 if sys.platform == "darwin" else 1024
        values = {"memory/host_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
        if self._is_async:
            found = torch.accelerator.memory_stats()
            for name, key in (("allocated", "current"), ("peak", "peak")):
                values[f"memory/{name}_gib"] = found.get(f"allocated_bytes.all.{key}", 0) / GIB
            values["memory/reserved_gib"] = found.get("reserved_bytes.all.current", 0) / GIB
        return values


def joined(parts: Sequence[Timings]) -> Timings:
    """Of all their steps, which follow each other."""
    if len(parts) == 1:
        return parts[0]
    hooks: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.hooks.items():
            hooks[name] = hooks.get(name, 0.0) + seconds
    sums: list[Any] = [sum(values) for values in zip(*(part[:-2] for part in parts), strict=True)]
    return Timings._make([*sums, hooks, parts[-1].queued])


def split(timings: Timings, *, is_async: bool) -> dict[str, float]:
    """Seconds of a mean step and of its parts, which add up; single hooks are within ``time/hooks``."""
    parts = {
        "data": timings.data,
        "forward_backward": timings.forward_backward,
        "communication": timings.communication,
        "optimizer": timings.optimizer,
        "hooks": sum(timings.hooks.values()),
        "callbacks": timings.callbacks,
        "logging": timings.logging,
    }
    if is_async:
        parts["device"] = timings.device
    parts["other"] = max(0.0, timings.total - sum(parts.values()))
    values = {"time/step": timings.total} | {f"time/{name}": seconds for name, seconds in parts.items()}
    values |= {f"time/hook/{name}": seconds for name, seconds in timings.hooks.items()}
    return {name: seconds / timings.num_steps for name, seconds in values.items()}


def percentiles(durations: Sequence[float] | deque[float]) -> dict[str, float]:
    """The 10th, 50th, 90th and 99th percentile by nearest rank, and the largest."""
    ordered = sorted(durations)
    ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (10, 50, 90, 99)}
    return {**ranks, "max": ordered[-1]}
