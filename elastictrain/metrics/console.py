"""What a person reads at the start, after an evaluation and at the end of a run.

Each function takes one frozen record and a console and prints: a framed table on a terminal, otherwise plain ``name:
value`` lines that keep their form from version to version and are never wrapped, so that ``grep`` finds them. Text
comes out as it is: square brackets in a path are not markup.

On failure: a stream that fails (a reader that left, a full disk, a terminal that is gone) does not end the run where the
console is one of :func:`make_console`: it prints nothing from then on. Nothing else can fail here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elastictrain.config import MeshShape

Row = tuple[str, str]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would exit

    def __exit__(self, *raised: Any) -> None:
        """Everything that is printed leaves here."""
        try:
            super().__exit__(*raised)
        except OSError:
            self.quiet = True


def make_console(stream: IO[str] | None = None) -> Console:
    """A console on ``stream``, or on whatever ``sys.stdout`` is when something is printed."""
    return _Console(file=stream)


def is_terminal(console: Console) -> bool:
    """Whether to draw: a terminal that can move its cursor. (``TERM=dumb``, pipes and files get plain lines.)"""
    return console.is_terminal and not console.is_dumb_terminal


def print_line(text: str, *, console: Console) -> None:
    """One line, as it is: no markup, no highlighting, no wrapping. What the stream cannot encode becomes ``?``."""
    text = text.encode(console.encoding, errors="replace").decode(console.encoding)
    console.print(Text(text), soft_wrap=True, highlight=False)


# ---- numbers -------------------------------------------------------------------------------------------------------


def format_value(value: float) -> str:
    """A metric with about five significant digits: ``2.3103``, ``0.00012``, ``1.5e+09``."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e5):
        return f"{int(value)}"
    return f"{value:.5g}"


def format_count(count: float) -> str:
    """``950``, ``12.3k``, ``4.56M``, ``1.2G``: three significant digits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            scaled = count / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{count:.0f}" if abs(count) >= 99.5 or count == int(count) else f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """``0.4s``, ``42s``, ``3m12s``, ``2h05m``, ``3d04h``."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


def format_percent(percent: float) -> str:
    """``97.3%``; ``<0.1%`` for what is there and would be 0."""
    return f"{percent:.1f}%" if percent >= 0.05 or percent <= 0 else "<0.1%"


def event_line(event: Mapping[str, Any]) -> str:
    """What a change of who trains has cost, in one line, from the ledger's line about it.

    Args:
        event: of kind ``recovery``, see :mod:`elastictrain.metrics.ledger`; what it does not have is left out.
    """
    facts = []
    for name, noun in (("nodes", "node"), ("ranks", "rank")):
        before, after = event.get(f"{name}_before"), event.get(name)
        if after is not None and before is not None and before != after:
            facts.append(f"{before} → {_plural(after, noun)}")
            break
        if after is not None and name == "ranks":
            facts.append(_plural(after, noun))
    if event.get("mesh"):
        facts.append(f"mesh {event['mesh']}")
    facts.append(f"paused {event['seconds']['total']:.1f} s")
    facts.append(f"{_plural(event['lost_steps'], 'step')} lost")
    if event.get("source"):
        facts.append(f"on from {event['source']}")
    return f"{event['cause'] or 'the run was stopped'}: {', '.join(facts)}"


# ---- start ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Startup:
    """What is about to be trained.

    Args:
        target: what runs, e.g. the name of the task's class.
        num_parameters: over all ranks, a tied one counted once; so is ``num_trainable``.
        precision: "fp32", "bf16", "fp16" or "fp8".
        host_memory: what checkpoints take of it on each node.
        resumed_step: finished steps that a checkpoint brought back; None for a fresh start.
        resumed_from: URL of that checkpoint.
    """

    target: str
    run_dir: str | None
    mesh: MeshShape
    device: str
    precision: str
    global_batch_size: int
    micro_batch_size: int
    num_slots: int
    num_parameters: int
    num_trainable: int
    num_nodes: int = 1
    placement: str | None = None  # which ranks are on which axis
    generation: int = 0
    max_steps: int | None = None
    max_epochs: int | None = None
    host_memory: str | None = None
    resumed_step: int | None = None
    resumed_from: str | None = None
    callbacks: tuple[str, ...] = ()


def startup_summary(about: Startup, *, console: Console) -> None:
    """Print what is about to be trained, by whom, and where it will be found."""
    ends = [f"step {about.max_steps}"] if about.max_steps is not None else []
    ends += [f"epoch {about.max_epochs}"] if about.max_epochs is not None else []
    trainable = "all" if about.num_trainable == about.num_parameters else format_count(about.num_trainable)
    rows = [
        ("run directory", about.run_dir or "none: nothing is kept"),
        ("mesh", f"{about.mesh} ({_ranks(about.mesh.world_size, about.num_nodes)}, {about.device})"),
        *([("placement", about.placement)] if about.placement is not None else []),
        ("global batch", _batch(about)),
        ("microbatches per rank", _share(about.num_slots, about.mesh.dp)),
        ("parameters", f"{format_count(about.num_parameters)}, {trainable} trainable"),
        ("precision", about.precision),
        *([("host memory", about.host_memory)] if about.host_memory is not None else []),
        ("until", " or ".join(ends) or "stopped"),
    ]
    if about.callbacks:
        rows.append(("callbacks", ", ".join(about.callbacks)))
    if about.resumed_step is not None:
        where = f" ({about.resumed_from})" if about.resumed_from else ""
        rows.append(("resumed", f"from step {about.resumed_step}{where}"))
    title = f"elastictrain {about.target}"
    _show(title if about.generation == 0 else f"{title}, generation {about.generation}", rows, console=console)


def _ranks(num_ranks: int, num_nodes: int) -> str:
    return _plural(num_ranks, "rank") + (f" on {num_nodes} nodes" if num_nodes > 1 else "")


def _plural(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def _batch(about: Startup) -> str:
    size = about.micro_batch_size
    short = about.num_slots * size - about.global_batch_size
    cut = f"{_plural(about.num_slots - bool(short), 'microbatch', 'microbatches')} of {size}"
    return f"{_plural(about.global_batch_size, 'sample')} = {cut}" + (f" and one of {size - short}" if short else "")


def _share(num_slots: int, dp: int) -> str:
    """How many microbatches a rank accumulates in a step."""
    least, rest = divmod(num_slots, dp)
    if not rest:
        return str(least)
    return f"{least + 1} on {_plural(rest, 'rank')}, {least} on {dp - rest}"


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluation_results(verb: str, results: Sequence[Mapping[str, float]], *, console: Console) -> None:
    """Print what ``validate`` or ``test`` found.

    Args:
        verb: "validate" or "test".
        results: one mapping of metrics for each loader.
    """
    results = [
        {name.removesuffix(f"/dataloader_idx_{index}"): value for name, value in result.items()}  # Lightning's suffix
        for index, result in enumerate(results)
    ]
    names = list(dict.fromkeys(name for result in results for name in result))
    if not is_terminal(console):
        for index, result in enumerate(results):
            prefix = verb if len(results) == 1 else f"{verb} loader {index}"
            for name, value in result.items():
                print_line(f"{prefix}: {name} {format_value(value)}", console=console)
        return
    if not names:
        return
    table = Table(title=verb, box=box.SIMPLE, title_justify="left")
    table.add_column("metric", overflow="fold")
    for index in range(len(results)):
        table.add_column("value" if len(results) == 1 else f"loader {index}", justify="right", overflow="fold")
    for name in names:
        values = (format_value(result[name]) if name in result else "" for result in results)
        table.add_row(Text(name), *(Text(value) for value in values))
    console.print(table)


# ---- end -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Final:
    """What was trained.

    Args:
        outcome: "finished", "interrupted", "preempted" or "stopped early".
        step: finished steps of the whole run; so are ``samples`` and ``tokens``.
        seconds: of this process' ``fit``.
        samples_here: samples used during those seconds; so are ``tokens_here``.
        metrics: the last value of each metric.
        best: ``{name: (value, step)}`` of metrics whose better direction is known.
        checkpoint: URL of the last committed checkpoint.
    """

    outcome: str
    step: int
    samples: int
    seconds: float
    samples_here: int
    tokens: int = 0
    tokens_here: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    checkpoint: str | None = None
    run_dir: str | None = None


def final_summary(about: Final, *, console: Console) -> None:
    """Print what was trained, how fast, how well, and where to look."""
    speed = [f"{format_count(about.samples_here / max(about.seconds, 1e-9))} samples/s"]
    if about.tokens_here:
        speed.append(f"{format_count(about.tokens_here / max(about.seconds, 1e-9))} tokens/s")
    trained = f"{_plural(about.step, 'step')}, {_plural(about.samples, 'sample')}"
    rows = [
        ("trained", trained + (f", {_plural(about.tokens, 'token')}" if about.tokens else "")),
        ("duration", f"{format_seconds(about.seconds)}, {', '.join(speed)}"),
    ]
    for name, value in about.metrics.items():
        text = format_value(value)
        if name in about.best:
            best, step = about.best[name]
            text += f" (best {format_value(best)} at step {step})"
        rows.append((name, text))
    if about.run_dir is not None:
        rows.append(("run directory", about.run_dir))
        rows.append(("checkpoint", about.checkpoint or "none"))
    _show(f"elastictrain {about.outcome}", rows, console=console)
    if about.run_dir is not None and (command := dashboard_command(about.run_dir)):
        print_line(f"  look: {command}", console=console)  # outside of the frame, which would get into a copy of it


def dashboard_command(run_dir: str) -> str | None:
    """The shell command that shows the run; None where another process cannot look."""
    return None if run_dir.startswith("memory://") else f"elastictrain dashboard {shlex.quote(run_dir)}"


def _show(title: str, rows: Iterable[Row], *, console: Console) -> None:
    if not is_terminal(console):
        print_line(title, console=console)
        for name, value in rows:
            print_line(f"  {name}: {value}", console=console)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    console.print(Panel(grid, title=Text(title), title_align="left", expand=False, border_style="dim"))
