"""The ``elastictrain`` command: finds the subcommand, and turns errors into one line and an exit code.

Exit codes: 0 finished, 1 failed, 2 usage, 75 stopped with everything saved (run it again), 130 interrupted at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import click

from elastictrain import __version__
from elastictrain.cli.checkpoint import checkpoint
from elastictrain.cli.control import drain, scale, stop
from elastictrain.cli.dashboard import dashboard
from elastictrain.cli.options import Call
from elastictrain.cli.plan import plan
from elastictrain.cli.report import report
from elastictrain.cli.run import run
from elastictrain.cli.status import status
from elastictrain.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE, ElasticTrainError, UsageError
from elastictrain.machine import process_began

INTERRUPTED = 130


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elastictrain")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train PyTorch and Lightning modules on machines that come and go."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(run)
cli.add_command(checkpoint)
cli.add_command(plan)
cli.add_command(status)
cli.add_command(dashboard)
cli.add_command(report)
cli.add_command(stop)
cli.add_command(drain)
cli.add_command(scale)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    call = Call(process_began())
    code = _main(argv, call)
    if call.has_trained:  # it has said when it ends: taking torch apart would take most of a second, for nothing
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads on, or it is closed
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _main(argv: Sequence[str] | None, call: Call | None = None) -> int:
    call = Call(time.time()) if call is None else call
    try:
        code = cli.main(args=argv, prog_name="elastictrain", standalone_mode=False, obj=call)
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        return _refuse(_explain(error))
    except UsageError as error:
        return _refuse(str(error))
    except ElasticTrainError as error:
        _refuse(str(error))
        return EXIT_FAILED
    return code if isinstance(code, int) else EXIT_FINISHED


def _refuse(message: str) -> int:
    print(f"elastictrain: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return EXIT_USAGE


def _explain(error: click.ClickException) -> str:
    """Click's message on one line, with the way out."""
    message = error.format_message().rstrip(".")
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "elastictrain"
    if isinstance(error, click.NoSuchOption) and error.ctx and error.ctx.command is run:
        return f"{message}; {command} --help lists the options, and arguments for a script go after --"
    if isinstance(error, click.MissingParameter) and error.ctx and error.ctx.command is run:
        return f"{message}; write {command} TARGET, for instance {command} train.py:MyTask"
    return f"{message}; see {command} --help"
