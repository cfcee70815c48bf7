"""``elastictrain checkpoint``: what a run directory holds, whether it is good, and what to do with it.

On failure: one line and a code: 1 where a checkpoint is damaged, 2 where the command line cannot work.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elastictrain.errors import EXIT_FAILED, EXIT_FINISHED, UsageError

if TYPE_CHECKING:
    from elastictrain.checkpoint.catalog import Entry


@click.group()
def checkpoint() -> None:
    """Look at a run's checkpoints, check them, take them elsewhere, delete them."""


@checkpoint.command("list")
@click.argument("run_dir")
def list_(run_dir: str) -> int:
    """Every checkpoint of RUN_DIR, newest first: step, age, size, layout, state, where."""
    from elastictrain.checkpoint import catalog
    from elastictrain.checkpoint.contents import Contents
    from elastictrain.checkpoint.manifest import DamagedError
    from elastictrain.rundir import RunDir

    found = list(catalog.entries(RunDir(run_dir)))
    if not found:
        raise UsageError(f"{RunDir(run_dir)} holds no checkpoints: give the run's directory")
    rows = [("STEP", "AGE", "SIZE", "RANKS", "LAYOUT", "STATE", "WHERE")]
    for entry in found:
        state, commit = "not committed", entry.commit
        if entry.damage is not None:
            state = "damaged"
        elif commit is not None:
            try:
                Contents.read(RunDir(entry.url))
                state = "whole"
            except DamagedError:
                state = "damaged"
        age = _duration(time.time() - commit.time) if commit else "-"
        size = _size(commit.num_bytes) if commit else "-"
        layout = str(commit.about.get("mesh", "-")) if commit else "-"
        ranks = str(commit.world_size) if commit else "-"
        rows.append((str(entry.step), age, size, ranks, layout, state, entry.folder))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]))
    return EXIT_FINISHED


@checkpoint.command()
@click.argument("run_dir")
@click.option("--step", type=int, help="Only this step.")
def verify(run_dir: str, step: int | None) -> int:
    """Read every byte of RUN_DIR's checkpoints (or of one checkpoint) and compare it with its hash."""
    from elastictrain.checkpoint import CheckpointReader
    from elastictrain.checkpoint.export import verify as verify_all
    from elastictrain.checkpoint.manifest import DamagedError
    from elastictrain.checkpoint.retention import reading
    from elastictrain.rundir import RunDir

    num_damaged = 0
    for entry in _committed(run_dir, step):
        started = time.perf_counter()
        try:
            if entry.damage is not None:
                raise DamagedError(entry.damage)
            with reading(entry.run_dir, entry.path):
                reader = CheckpointReader(entry.url)
                problems = verify_all(reader)
        except DamagedError as error:
            problems = [str(error)]
        seconds = time.perf_counter() - started
        num_damaged += bool(problems)
        for problem in problems:
            click.echo(f"step {entry.step}: DAMAGED: {problem} ({RunDir(entry.url)})")
        if not problems:
            size = reader.commit.num_bytes
            click.echo(f"step {entry.step}: good, {_size(size)} at {size / seconds / 1e9:.2f} GB/s")
    return EXIT_FAILED if num_damaged else EXIT_FINISHED


@checkpoint.command()
@click.argument("run_dir")
@click.option(
    "--to", type=click.Choice(["safetensors", "hf", "torch", "dcp"]), default="safetensors", show_default=True
)
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="A new local folder.")
@click.option("--step", type=int, help="This step instead of the newest.")
@click.option(
    "--prefix", default="model.", show_default=True, help="Tensors whose names begin so, without it; '' for all."
)
def export(run_dir: str, to: str, output: Path, step: int | None, prefix: str) -> int:
    """The newest checkpoint of RUN_DIR as files that others read; the memory of one process, a tensor at a time."""
    from elastictrain.checkpoint import CheckpointReader, resolve
    from elastictrain.checkpoint.export import export as export_to
    from elastictrain.checkpoint.retention import reading
    from elastictrain.rundir import RunDir

    url = resolve(run_dir) if step is None else _committed(run_dir, step)[0].url
    with reading(RunDir(run_dir), RunDir(url).path):
        files = export_to(CheckpointReader(url), output, to=to, only=prefix, strip=True)
    for file in files:
        click.echo(f"{file}  {_size(file.stat().st_size)}")
    return EXIT_FINISHED


@checkpoint.command()
@click.argument("run_dir")
@click.option("--keep-last", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep steps that are a multiple of this, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(run_dir: str, keep_last: int, keep_every: int | None, dry_run: bool) -> int:
    """Delete old checkpoints of RUN_DIR, and attempts that nobody finished."""
    from elastictrain.checkpoint import catalog, retention
    from elastictrain.rundir import RunDir

    place = RunDir(run_dir)
    going = retention.surplus(place, retention.Keep(last=keep_last, every=keep_every))
    for what, entries in (("old", going), ("abandoned", retention.abandoned(place))):
        for entry in entries:
            size = _size(entry.commit.num_bytes) if entry.commit else "no COMMIT"
            click.echo(f"{'would delete' if dry_run else 'deleting'} {entry.folder} ({what}, {size})")
            if not dry_run:
                catalog.delete(entry)
    for upload in retention.abandoned_uploads(place):
        click.echo(
            f"{'would abort' if dry_run else 'aborting'} the upload of {upload['Bucket']}/{upload['Key']} (abandoned)"
        )
    if not dry_run:
        retention.sweep(place)
    return EXIT_FINISHED


def _committed(run_dir: str, step: int | None) -> list[Entry]:
    from elastictrain.checkpoint import catalog
    from elastictrain.rundir import RunDir

    found = [
        entry for entry in catalog.entries(RunDir(run_dir)) if entry.commit is not None or entry.damage is not None
    ]
    found = [entry for entry in found if step is None or entry.step == step]
    if not found:
        what = "committed checkpoint" if step is None else f"committed checkpoint of step {step}"
        raise UsageError(
            f"{RunDir(run_dir)} holds no {what}: elastictrain checkpoint list {RunDir(run_dir)} shows what there is"
        )
    return found


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
