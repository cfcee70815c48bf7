"""``elastictrain report``: what a run did, from its run directory, whether it runs or not.

On failure: a directory that holds no run, or a file that cannot be written, is one line and code 2; a file that is there is
replaced only by a whole one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from elastictrain.errors import EXIT_FINISHED, UsageError


@click.command()
@click.argument("run_dir")
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML file instead of printing."
)
def report(run_dir: str, output: Path | None) -> int:
    """What RUN_DIR's run did: loss, speed, where its time went, its nodes over time, recoveries, checkpoints."""
    from elastictrain.cli.reading import reading
    from elastictrain.metrics.console import make_console
    from elastictrain.reports.facts import read_report
    from elastictrain.rundir import RunDir

    with reading(run_dir):
        found = read_report(RunDir(run_dir))
    if output is None:
        from elastictrain.reports.terminal import show

        show(found, console=make_console())
    else:
        from elastictrain.reports.page import page

        _write(page(found), output)
        click.echo(str(output))
    return EXIT_FINISHED


def _write(text: str, path: Path) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A name that came from bytes which are no text may be in it.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(
            f"{path} cannot be written ({reason}): give --output a file in a folder that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
