"""``elastictrain plan``: the layouts that fit, and the one ``auto`` would take, without starting anything.

The task is built without weights and measured on a copy without elements; there is no process group and no run
directory. On failure: bad input is one line and exit code 2, before torch is imported where that can be told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from elastictrain.cli.options import CONTEXT, option, shared
from elastictrain.config import AXES
from elastictrain.errors import UsageError

if TYPE_CHECKING:
    from elastictrain.checkpoint.footprint import Footprint
    from elastictrain.cli.target import Target
    from elastictrain.config import MeshConfig, MeshShape
    from elastictrain.parallel.memory import Model
    from elastictrain.parallel.planner import Devices, Layout, Plan

SHOWN = 12  # layouts of the table, unless all are asked for


@click.command(context_settings=CONTEXT)
@click.argument("target", metavar="TARGET")
@shared("--nnodes", metavar="N", help="How many nodes. [1]")
@shared("--nproc-per-node")
@option("--device-memory", metavar="SIZE", help="Memory of each worker's device, such as 80GiB. [this machine's]")
@shared("--global-batch-size")
@shared("--micro-batch-size")
@shared("--mesh", help="Look at this layout only. [auto]")
@shared("--callback")
@shared("--set")
@click.option("--all", "show_all", is_flag=True, help=f"Every layout, also those that do not fit; else {SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, sizes in bytes.")
def plan(target: str, **options: Any) -> int:
    """Show which parallel layouts of TARGET fit so many devices, and the one that --mesh auto would take.

    Nothing is started and no weights are made: shapes are counted, and the forward pass runs once without values.
    """
    question = _check(target, options)

    from elastictrain.parallel.planner import Devices, plan  # torch

    devices = Devices(question.num_ranks, question.ranks_per_node, question.device_bytes)
    model = _measure(question)
    shape = _only(question, devices.num_ranks)
    made = plan(model, devices, only=shape)
    if options["as_json"]:
        click.echo(json.dumps(_as_json(question, model, devices, made), indent=1))
    else:
        _print(question, model, devices, made, show_all=options["show_all"])
    return 0


# ---- the question ---------------------------------------------------------------------------------------------------


@dataclass
class _Question:
    target: Target
    settings: dict[str, Any]
    callbacks: tuple[str, ...]
    mesh: MeshConfig
    num_nodes: int
    ranks_per_node: int
    device_bytes: int
    global_batch_size: int | None
    micro_batch_size: int | None

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


def _check(text: str, options: dict[str, Any]) -> _Question:
    """Everything that can be told without torch, then what only torch knows: the GPUs here."""
    from elastictrain.callbacks.registry import parse_callback
    from elastictrain.cli import target as targets
    from elastictrain.cli.checks import check_sizes, parse_nnodes, parse_settings, parse_size, parse_workers
    from elastictrain.config import MeshConfig

    target, source = targets.resolve(text)
    if target.cls is None:
        raise UsageError(f"{target.recorded} defines no Task: name a class, for instance {target.recorded}:MyTask")
    least, most = parse_nnodes(options["nnodes"])
    if least != most:
        raise UsageError(f"--nnodes {options['nnodes']}: plan looks at one number of nodes; call it once for each")
    workers = parse_workers(options["nproc_per_node"])
    memory = None if options["device_memory"] is None else parse_size(options["device_memory"])
    check_sizes(options)
    settings = parse_settings(options["settings"])
    if source is not None and (signature := source.signature(target.cls)) is not None:
        signature.convert(settings)
    for callback in options["callbacks"]:
        parse_callback(callback)
    mesh = MeshConfig.parse(options["mesh"] or "auto")
    if workers is not None and mesh.preset is None:
        mesh.resolve(workers * most)
    if workers is None or memory is None:
        import torch

        from elastictrain.parallel.mesh import device_bytes

        workers = workers or max(1, torch.cuda.device_count())
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        memory = memory or device_bytes(device, workers)
    sizes = options["global_batch_size"], options["micro_batch_size"]
    return _Question(target, settings, options["callbacks"], mesh, most, workers, memory, *sizes)


def _only(question: _Question, num_ranks: int) -> MeshShape | None:
    return None if question.mesh.preset == "auto" else question.mesh.resolve(num_ranks)


def _measure(question: _Question) -> Model:
    """Build the task without weights and describe it."""
    from elastictrain.callback import Callback
    from elastictrain.callbacks.registry import resolve_callback
    from elastictrain.cli.settings import Signature
    from elastictrain.cli.target import load_class
    from elastictrain.compat.lightning import split_callbacks
    from elastictrain.planning import build_hollow, describe, task_source
    from elastictrain.step_plan import StepPlan, apply_plan

    cls = load_class(question.target)
    values = Signature.of(cls).convert(question.settings)
    ours, lightnings = split_callbacks([resolve_callback(text) for text in question.callbacks], Callback)
    micro = question.micro_batch_size
    step = apply_plan(StepPlan(micro_batch_size=micro), [(c.name, c.configure) for c in ours])
    task = build_hollow(lambda: cls(**values))
    return describe(
        task,
        step,
        source=lambda: task_source(task),
        global_batch_size=question.global_batch_size,
        num_ranks=question.num_ranks,
        callbacks=lightnings,
    )


# ---- the answer -----------------------------------------------------------------------------------------------------


def _as_json(question: _Question, model: Model, devices: Devices, made: Plan) -> dict[str, Any]:
    def layout(one: Layout) -> dict[str, Any]:
        return {
            "mesh": dict(zip(AXES, one.shape.sizes, strict=True)),
            "zero": one.shape.zero if one.shape.pp == 1 else 1,
            "bytes": {**asdict(one.memory), "total": one.memory.total},
            "fits": one.fits,
            "problem": one.problem,
            "idle_ranks": one.idle,
        }

    host = _host(question, made)
    return {
        "target": question.target.recorded,
        "ranks": devices.num_ranks,
        "ranks_per_node": devices.ranks_per_node,
        "device_bytes": devices.num_bytes,
        "usable_bytes": made.room,
        "parameter_bytes": model.parameter_bytes,
        "slots": model.num_slots,
        "chosen": layout(made.chosen),
        "why": made.why,
        "host_bytes": {"saves": host.saves, "snapshots": host.snapshots, "copies": host.copies},
        "notes": list(model.notes),
        "layouts": [layout(one) for one in made.layouts],
    }


def _host(question: _Question, made: Plan) -> Footprint:
    """What checkpoints take of each node's own memory, in the layout that was chosen."""
    from elastictrain.checkpoint.footprint import Footprint

    one = made.chosen
    image = -(-(one.memory.parameters + one.memory.optimizer) // one.shape.dp_replicate)
    return Footprint(image * question.ranks_per_node, has_buddy=question.num_nodes > 1)


def _print(question: _Question, model: Model, devices: Devices, made: Plan, *, show_all: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from elastictrain.metrics.console import is_terminal, make_console, print_line
    from elastictrain.parallel.memory import KINDS
    from elastictrain.parallel.planner import size

    console = make_console()

    def say(text: str) -> None:
        print_line(text, console=console)

    nodes = f" on {question.num_nodes} nodes" if question.num_nodes > 1 else ""
    say(
        f"{question.target.recorded}: {devices.num_ranks} ranks{nodes}, {size(devices.num_bytes)} each"
        f" ({size(made.room)} usable), {size(model.parameter_bytes)} of parameters"
        + (f", {model.num_slots} microbatches in a step" if model.num_slots is not None else "")
    )
    for note in model.notes:
        say(f"note: {note}")
    shown = rows(made, show_all=show_all)
    head = ["mesh", *KINDS, "total", ""]
    body = [[str(one.shape), *sizes(one), _remark(one, made)] for one in shown]
    if is_terminal(console):
        table = Table(box=box.SIMPLE)
        for name in head:
            table.add_column(name, justify="left" if name in ("mesh", "") else "right", overflow="fold")
        for one, row in zip(shown, body, strict=True):
            table.add_row(*map(Text, row), style="bold" if one is made.chosen else "" if one.fits else "dim")
        console.print(table)
    else:
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        for row in (head, *body):
            cells = [
                cell.ljust(w) if i in (0, len(row) - 1) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            say("  ".join(cells).rstrip())
    host = _host(question, made)
    copies = f", and {size(host.copies)} for copies of another node's" if host.has_buddy else ""
    say(
        f"host memory of a node: saves take up to {size(host.saves)};"
        f" --snapshot-every up to {size(host.snapshots)} more{copies}"
    )
    fitting = sum(one.fits and one.can_be_chosen for one in made.layouts)
    hidden = len(made.layouts) - len(shown)
    say(f"{fitting} of {len(made.layouts)} layouts fit" + (f"; --all shows {hidden} more" if hidden else ""))
    verb = "auto takes" if question.mesh.preset == "auto" else "this is"
    say(f"{verb} {made.chosen.shape}: {made.why}")


def rows(made: Plan, *, show_all: bool) -> list[Layout]:
    """The chosen layout, and the least sharded that fits for each degree of tensor, context and pipeline parallelism."""
    if show_all:
        return list(made.layouts)
    best: dict[tuple[int, ...], Layout] = {}
    for one in made.layouts:
        if one.fits and one.can_be_chosen and not one.idle:
            best.setdefault((one.shape.tp, one.shape.cp, one.shape.pp), one)
    return [made.chosen, *(one for one in best.values() if one is not made.chosen)][:SHOWN]


def sizes(one: Layout) -> list[str]:
    from elastictrain.parallel.memory import KINDS
    from elastictrain.parallel.planner import size

    return [*(size(getattr(one.memory, kind)) for kind in KINDS), size(one.memory.total)]


def _remark(one: Layout, made: Plan) -> str:
    if one.problem is not None:
        return one.problem
    words = ["auto" if one is made.chosen and len(made.layouts) > 1 else "", "" if one.fits else "does not fit"]
    words += [f"{one.idle} ranks idle" if one.idle else ""]
    return ", ".join(word for word in words if word)
