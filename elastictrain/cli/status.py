"""``elastictrain status``: how a run stands, from its run directory, whether it runs or not.

On failure: a directory that holds no run is one line and code 2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from elastictrain.errors import EXIT_FINISHED, UsageError


@click.command()
@click.argument("run_dir")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def status(run_dir: str, as_json: bool) -> int:
    """How far RUN_DIR's run is, who trains it, and where its time went."""
    from elastictrain.metrics.ledger import read_ledger
    from elastictrain.metrics.status import status as status_of
    from elastictrain.rundir import RunDir, answering

    with answering(
        lambda error, line: UsageError(f"{run_dir} cannot be read ({line}): check the path and credentials")
    ):
        lines = read_ledger(RunDir(run_dir))
    if not any(line["event"] == "start" for line in lines):
        raise UsageError(f"{run_dir} holds no run that has begun to train: give the run's directory")
    found = status_of(lines)
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_rows(found)))
    return EXIT_FINISHED


def _rows(found: Mapping[str, Any]) -> Iterator[str]:
    from elastictrain.metrics.console import format_count, format_seconds

    age = format_seconds(max(0.0, time.time() - found["seen"]))
    yield f"{found['state']}: step {found['step']}, generation {found['generation']}, last seen {age} ago"
    if "samples" in found:
        tokens = f", {format_count(found['tokens'])} tokens" if found["tokens"] else ""
        yield f"  trained: {format_count(found['samples'])} samples{tokens}"
    yield f"  ranks: {found['world_size']} ({found['mesh']})"
    for node in found["nodes"]:
        workers = ", ".join(f"rank {one['rank']} pid {one['pid']}" for one in node["workers"])
        yield f"  node: {node['name']}, agent pid {node['agent_pid']}, {workers}"
    saved = found["last_checkpoint"]
    yield f"  checkpoint: {'none' if saved is None else '{path} (step {step})'.format(**saved)}"
    account = found["goodput"]
    if account["percent"] is not None:
        total = format_seconds(account["total_seconds"])
        yield f"  goodput: {account['percent']:.1f}% of {total} on all nodes"
        for cause, seconds in sorted(account["lost_seconds"].items(), key=lambda item: -item[1]):
            if seconds >= 0.05:
                yield f"    {cause}: {format_seconds(seconds)}"
    for one in found["recoveries"]:
        took = format_seconds(one["seconds"]["total"])
        yield f"  recovery: {one['cause']}; {one['lost_steps']} steps done again, {took}"
