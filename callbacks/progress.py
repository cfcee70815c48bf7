"""How training goes, for a person: a bar on a terminal, plain lines elsewhere, from rank 0 only.

Refreshed by time from the training thread itself, at most four times a second; between refreshes a step costs one look
at the clock. The loss shown is the one of the last log step, so nothing here makes the training loop wait for the
accelerator. What the user prints appears above the bar.

On failure: a terminal that went away (a closed pipe, a lost connection) ends the output and not the training. After an
exception the bar is left as it was and the terminal as it should be; the cursor is never hidden, so not even a killed
process leaves it so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch.distributed.tensor import DTensor

from elastictrain.callback import Callback, RunInfo, SaveInfo, StepInfo, ValidationInfo
from elastictrain.errors import UsageError
from elastictrain.metrics.console import (
    format_count,
    format_percent,
    format_seconds,
    format_value,
    is_terminal,
    make_console,
    print_line,
)
from elastictrain.metrics.throughput import Throughput

_LOSS = "train/loss"
_REFRESH = 0.25  # seconds between two refreshes of the bar
_SOON = 1.0  # seconds after which the first plain line may come
_MAX_BAR = 40  # columns
_MIN_BAR = 8


class ProgressBar(Callback):
    """Step, loss, the time that is left, speed, MFU and goodput where they are known, ranks and the generation, values.

    Args:
        every: seconds between two lines where the output is not a terminal.
        console: where to draw; by default what ``sys.stdout`` is when training starts.

    Raises:
        UsageError: ``every`` is not above 0.
    """

    def __init__(self, *, every: float = 10.0, console: Console | None = None) -> None:
        if not every > 0:
            raise UsageError(f"ProgressBar(every={every!r}): the seconds between two lines must be above 0")
        self._every = every
        self._given = console
        self._console = console or make_console()
        self._live: Live | None = None
        self._next = math.inf  # when to show something again; never, on other ranks and between generations
        self._born: float | None = None  # when the first step of this generation ended
        self._run: RunInfo | None = None
        self._last: StepInfo | None = None
        self._shown = -1  # step of the newest line or bar
        self._values: dict[str, float] = {}

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def on_generation_start(self, info: RunInfo) -> None:
        if info.rank != 0:
            return
        self._console = self._given or make_console()
        self._run, self._last, self._shown = info, None, info.step
        self._recent, self._overall = Throughput(window=15.0), Throughput(window=900.0)
        self._next, self._born = 0.0, None
        if is_terminal(self._console):
            self._safely(self._start)

    def on_step_end(self, info: StepInfo) -> None:
        if info.metrics is not None:
            self._values.update(info.metrics)
        self._last = info
        if time.monotonic() >= self._next:
            self._safely(self._tick)

    def on_validation_end(self, info: ValidationInfo) -> None:
        if self._run is None:
            return
        self._recent.pause()
        self._values.update(info.metrics)
        values = "  ".join(f"{name} {format_value(value)}" for name, value in info.metrics.items())
        self._say(f"step {info.step}  validation: {values}")

    def on_save(self, info: SaveInfo) -> None:
        if self._run is None:
            return
        self._recent.pause()
        size = f"{format_count(info.num_bytes)}B, {format_seconds(info.seconds)}"
        self._say(f"step {info.step}  saved {info.path} ({size})")

    def on_exception(self, error: BaseException) -> None:
        self._stop()

    def on_generation_end(self, info: RunInfo) -> None:
        self._stop()

    def on_fit_end(self, info: RunInfo) -> None:
        self._stop()

    # ---- when ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._live = Live(Text(), console=self._console, auto_refresh=False)
        self._live.start()
        self._console.show_cursor(True)

    def _tick(self) -> None:
        assert self._last is not None
        now = time.monotonic()
        for rates in (self._recent, self._overall):
            rates.mark(now, step=self._last.step, samples=self._last.samples, tokens=self._last.tokens)
        if self._live is not None:
            self._next = now + _REFRESH
            self._show()
        elif self._born is None:
            self._next, self._born = now + _SOON, now
        elif _LOSS in self._values or now >= self._born + self._every:
            self._next = now + self._every
            self._show()
        else:  # the first line waits for the first log step, to have a loss
            self._next = now + _REFRESH

    def _stop(self) -> None:
        self._next = math.inf
        if self._run is None:
            return
        if self._last is not None and self._last.step > self._shown:
            self._safely(self._show)
        live, self._live, self._run = self._live, None, None
        if live is not None:
            self._safely(live.stop)

    def _say(self, text: str) -> None:
        self._safely(lambda: print_line(text, console=self._console))

    def _safely(self, show: Callable[[], object]) -> None:
        try:
            show()
        except OSError:  # nobody is there to read
            self._next, self._run = math.inf, None

    # ---- what ------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        assert self._last is not None
        self._shown = self._last.step
        if self._live is not None:
            self._live.update(self._line(self._last, width=self._console.width), refresh=True)
        else:
            print_line("  ".join(self._pieces(self._last)), console=self._console)

    def _pieces(self, info: StepInfo) -> list[str]:
        """What there is to say, the most important first."""
        total = self._total(info)
        pieces = [f"step {info.step}" if total is None else f"step {info.step}/{total}"]
        if _LOSS in self._values:
            pieces.append(f"loss {format_value(self._values[_LOSS])}")
        if total is not None and (left := self._overall.eta(total - info.step)) is not None:
            pieces.append(f"eta {format_seconds(left)}")
        if self._recent.samples_per_second:
            pieces.append(f"{format_count(self._recent.samples_per_second)} samples/s")
        if self._recent.tokens_per_second:
            pieces.append(f"{format_count(self._recent.tokens_per_second)} tokens/s")
        if (mfu := self._values.get("throughput/mfu")) is not None:
            pieces.append(f"MFU {format_percent(100 * mfu)}")
        if (goodput := self._values.get("goodput/percent")) is not None:
            pieces.append(f"goodput {format_percent(goodput)}")
        if self._run is not None:
            ranks = f"{self._run.world_size} rank{'s' if self._run.world_size != 1 else ''}"
            pieces.append(ranks + (f" gen {self._run.generation}" if self._run.generation else ""))
        if info.epoch_steps is not None or info.epoch > 0:
            pieces.append(f"epoch {info.epoch}")
        for name, tensor in info.progress.items():
            value = self._values.get(name)  # over all ranks, where it was logged
            if (
                value is None
                and tensor.device.type == "cpu"
                and tensor.numel() == 1
                and not isinstance(tensor, DTensor)
            ):
                value = float(tensor)  # elsewhere reading it would wait for the accelerator, or for other ranks
            if value is not None and name != _LOSS:
                pieces.append(f"{name} {format_value(value)}")
        return pieces

    def _total(self, info: StepInfo) -> int | None:
        """The step at which training ends, where that is known."""
        assert self._run is not None
        ends = [] if self._run.max_steps is None else [self._run.max_steps]
        if self._run.max_epochs is not None and info.epoch_steps is not None:
            ends.append(self._run.max_epochs * info.epoch_steps)
        return max(min(ends), info.step) if ends else None

    def _line(self, info: StepInfo, *, width: int) -> Text:
        """One line that fits: the least important pieces go first, then the bar."""
        pieces = self._pieces(info)
        while len(pieces) > 1 and len("  ".join(pieces)) > width:
            pieces.pop()
        line = Text("  ".join(pieces), no_wrap=True, overflow="ellipsis")
        total = self._total(info)
        room = min(width - line.cell_len - 2, _MAX_BAR)
        if total is None or room < _MIN_BAR:
            return line
        done = room * info.step // max(total, 1)
        full, empty = ("#", "-") if self._console.options.ascii_only else ("━", "━")
        bar = Text.assemble((full * done, "green"), (empty * (room - done), "bright_black"), "  ", no_wrap=True)
        return bar.append_text(line)
