"""``elastictrain status``: how a run stands, from its run directory, whether it runs or not.

The run log, whose token this machine may not have, adds the size of a run that is on, and which hosts are kept out.

On failure: a directory that holds no run is one line and code 2. A run log that cannot be read adds nothing. While it
watches, storage that does not answer is said, and tried again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from elastictrain.cli.reading import reading
from elastictrain.errors import EXIT_FINISHED

if TYPE_CHECKING:
    from elastictrain.metrics.lines import Folder
    from elastictrain.rundir import RunDir

_UNDER_WAY = ("running", "starting", "changing", "silent")  # states after which there may come more


@click.command()
@click.argument("run_dir")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; with --watch, one on each line.")
@click.option("--rdzv-id", default="", help="The run's, where it was given one.")
@click.option("--watch", is_flag=True, help="Look again and again, until the run has ended or Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
def status(run_dir: str, as_json: bool, rdzv_id: str, watch: bool, interval: float) -> int:
    """How far RUN_DIR's run is, who trains it, and where its time went."""
    from elastictrain.metrics.ledger import ledger_folder
    from elastictrain.rundir import RunDir

    with reading(run_dir):
        place = RunDir(run_dir)
        folder = ledger_folder(place)
        found = _look(folder, place, rdzv_id)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
            _watch(lambda: _look(folder, place, rdzv_id), found, as_json=as_json, interval=interval)
    else:
        click.echo(json.dumps(found, indent=2) if as_json else "\n".join(rows(found)))
    return EXIT_FINISHED


def _look(folder: Folder, place: RunDir, rdzv_id: str) -> dict[str, Any]:
    from elastictrain.metrics.status import require_begun
    from elastictrain.metrics.status import status as status_of

    lines = folder.read()
    require_begun(place, lines)
    found = status_of(lines) | {"num_damaged": folder.num_damaged}
    return found | (_of_log(place, rdzv_id) if found["state"] in _UNDER_WAY else {})


def _of_log(place: RunDir, rdzv_id: str) -> dict[str, Any]:
    """``size`` (``min``, ``max``) and ``kept_out`` (``host``, ``losses``, ``until``: since the epoch), where known."""
    from elastictrain.cli.control import control_of

    try:
        control = control_of(place, rdzv_id)
        entry, away = (None, []) if control is None else (control.newest(), control.kept_out())
    except Exception:  # without the token, or while storage does not answer
        return {}
    if entry is None or entry.size is None:
        return {}
    now = time.time()
    return {
        "size": {"min": entry.size.min_nodes, "max": entry.size.max_nodes},
        "kept_out": [{"host": loss.host, "losses": loss.times, "until": until} for loss, until in away if until > now],
    }


def _watch(look: Callable[[], dict[str, Any]], found: dict[str, Any], *, as_json: bool, interval: float) -> None:
    """Show ``found``, and what is found then, until the run has ended. Only objects that are new are read."""
    from rich.live import Live
    from rich.text import Text

    from elastictrain.metrics.console import is_terminal, make_console
    from elastictrain.rundir import first_line, is_storage_error

    console = make_console()
    if as_json or not is_terminal(console):
        live = None
    else:
        live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        live.start()
    trouble = ""
    try:
        while True:
            text = json.dumps(found) if as_json else "\n".join([*rows(found), *([trouble] if trouble else [])])
            if live is None:
                click.echo(text)
            else:
                live.update(Text(text), refresh=True)
            if found["state"] not in _UNDER_WAY:
                return
            time.sleep(interval)
            try:
                found, trouble = look(), ""
            except Exception as error:
                if not is_storage_error(error):
                    raise
                trouble = f"  cannot be read now ({first_line(error)}); tried again"
    finally:
        if live is not None:
            live.stop()


def rows(found: Mapping[str, Any]) -> Iterator[str]:
    """A status as lines for a person."""
    from elastictrain.metrics.console import format_count, format_percent, format_seconds
    from elastictrain.metrics.status import doing_in_words, silence

    age = format_seconds(max(0.0, time.time() - found["seen"]))
    yield f"{found['state']}: step {found['step']}, generation {found['generation']}, last seen {age} ago"
    if found["state"] == "silent":
        yield f"  note: {silence(age)}"
    if (doing := doing_in_words(found, now=time.time())) is not None:
        yield f"  now: {doing}"
    if "samples" in found:
        tokens = f", {format_count(found['tokens'])} tokens" if found["tokens"] else ""
        yield f"  trained: {format_count(found['samples'])} samples{tokens}"
    yield f"  ranks: {found['world_size']} ({found['mesh']})"
    for node in found["nodes"]:
        workers = ", ".join(f"rank {one['rank']} pid {one['pid']}" for one in node["workers"])
        yield f"  node: {node['name']}, agent pid {node['agent_pid']}, {workers}"
    if "size" in found:
        yield "  size: {min}:{max} nodes".format(**found["size"])
    for one in found.get("kept_out", ()):
        left = format_seconds(max(0.0, one["until"] - time.time()))
        yield f"  kept out: {one['host']}, lost {one['losses']} times in short, for another {left}"
    saved = found["last_checkpoint"]
    yield f"  checkpoint: {'none' if saved is None else '{path} (step {step})'.format(**saved)}"
    account = found["goodput"]
    if account["percent"] is not None:
        total = format_seconds(account["total_seconds"])
        yield f"  goodput: {format_percent(account['percent'])} of {total} on all nodes"
        for cause, seconds in sorted(account["lost_seconds"].items(), key=lambda item: -item[1]):
            if seconds >= 0.05:
                yield f"    {cause}: {format_seconds(seconds)}"
    for one in found["recoveries"]:
        took = format_seconds(one["seconds"]["total"])
        what = "planned change" if one["planned"] else "recovery"
        source = f", on from {one['source']}" if one["source"] else ""
        yield f"  {what}: {one['cause']}; {one['lost_steps']} steps done again, {took}{source}"
    if found["num_damaged"]:
        yield f"  note: {found['num_damaged']} damaged lines were passed over"
