"""``elastictrain dashboard``: TensorBoard on a run, or on a folder of runs, wherever they are.

TensorBoard is a process of its own that ends with this one, however that ends. Runs elsewhere are copied to this machine,
and what is new in them every few seconds.

On failure: a directory without runs, a port that is taken, storage that does not answer, or a TensorBoard that does not
start is one line. Storage that stops answering later is said once, and asked again.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from elastictrain.cli.options import CONTEXT
from elastictrain.errors import EXIT_FINISHED, ElasticTrainError, UsageError
from elastictrain.machine import child_environment

if TYPE_CHECKING:
    from elastictrain.metrics.mirror import Board

TABS = ("custom_scalars", "timeseries", "scalars", "text", "images", "hparams")
FIRST_PORT, NUM_PORTS = 6006, 100
_EVERY = 5.0  # seconds between two looks for what is new
_STARTING = 120.0  # seconds that TensorBoard may take to answer
_ENDING = 5.0
_MOST_OUTPUT = 1_000_000  # bytes of what it prints that are kept

# Not with ``preexec_fn``: a driver of an object store has threads by then, and one of them may hold a lock.
_PROGRAM = """
import runpy, sys
from elastictrain.elastic.signals import die_with
die_with(int(sys.argv.pop(1)))
runpy.run_module("tensorboard.main", run_name="__main__", alter_sys=True)
"""


@click.command(context_settings=CONTEXT)
@click.argument("run_dir")
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen; 0.0.0.0: everywhere. [127.0.0.1]"
)
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="[6006, or the next one that is free]")
@click.option("--tab", type=click.Choice(TABS), default=TABS[0], help="What the address opens. [custom_scalars]")
@click.option(
    "--x-axis",
    type=click.Choice(("step", "samples")),
    default="step",
    help="What values are drawn over. Wall time is a choice in TensorBoard itself. [step]",
)
@click.option("--open/--no-open", "opens", default=True, help="Open it in a browser, where there is a desktop. [open]")
def dashboard(run_dir: str, host: str, port: int | None, tab: str, x_axis: str, opens: bool) -> int:
    """Show RUN_DIR, a run or a folder of runs, in TensorBoard. Ctrl-C ends it."""
    from elastictrain.cli.reading import reading
    from elastictrain.metrics.mirror import Board, clean
    from elastictrain.rundir import RunDir

    clean(_cache())
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="elastictrain-dashboard-") as folder:
        view, output = Path(folder) / "runs", Path(folder) / "output"
        view.mkdir()
        board = Board(run_dir, view=view, cache=_cache(), by_samples=x_axis == "samples")
        with reading(run_dir):
            runs = board.update()
        if not runs:
            raise UsageError(f"{RunDir(run_dir)} holds no run: give a run's directory, or a folder of such")
        port = _free_port(host, port)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        with _tensorboard(view, output, host=host, port=port) as process:
            _wait_until_it_answers(process, output, host=host, port=port)
            url = f"http://{_in_address(host)}:{port}/#{tab}"
            click.echo(f"elastictrain: {', '.join(runs)} at {url} (Ctrl-C ends it)")
            if opens and _has_desktop():
                webbrowser.open(url)
            _follow(board, process, output)
    return EXIT_FINISHED


def _end(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _cache() -> Path:
    """Where copies of runs are kept from one time to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastictrain" / "dashboard"


def _has_desktop() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _in_address(host: str) -> str:
    """As it stands in an address that a browser on this machine can open."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound
    return f"[{host}]" if ":" in host else host


def _free_port(host: str, port: int | None) -> int:
    """``port``, or the first one from 6006 on that nobody has.

    Raises:
        UsageError: there is none, or ``host`` is not this machine.
    """
    reason = ""
    for wanted in [port] if port is not None else range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        try:
            with socket.create_server((host, wanted), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return wanted
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    which = f"port {port}" if port is not None else f"ports {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}"
    raise UsageError(f"{which} of {host} cannot be used ({reason}): give another --port or --host")


@contextmanager
def _tensorboard(view: Path, output: Path, *, host: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """TensorBoard as a child that does not hear the terminal's Ctrl-C, and ends with this process."""
    command = [sys.executable, "-c", _PROGRAM, str(os.getpid())]
    command += ["--logdir", str(view), "--host", host, "--port", str(port)]
    command += [
        "--reload_interval",
        str(_EVERY),
        "--samples_per_plugin",
        "scalars=5000",
        "--window_title",
        "elastictrain",
    ]
    with output.open("ab") as file:  # to which it appends, also when what is there has been cut away
        process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_it_answers(process: subprocess.Popen[bytes], output: Path, *, host: str, port: int) -> None:
    deadline = time.monotonic() + _STARTING
    while time.monotonic() < deadline:
        _check(process, output)
        connection = http.client.HTTPConnection(f"{_in_address(host)}:{port}", timeout=5.0)
        try:
            connection.request("GET", "/data/environment")
            if connection.getresponse().status == http.client.OK:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise ElasticTrainError(f"TensorBoard does not answer on port {port} within {_STARTING:.0f} s")


def _check(process: subprocess.Popen[bytes], output: Path) -> None:
    """Raises:
    ElasticTrainError: TensorBoard has ended; with the last line that it printed.
    """
    if process.poll() is not None:
        said = output.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ElasticTrainError(f"TensorBoard ended with code {process.returncode}: {said[-1]}")


def _follow(board: Board, process: subprocess.Popen[bytes], output: Path) -> NoReturn:
    """Show what is new, until somebody ends it."""
    from elastictrain.rundir import first_line, is_storage_error

    failing = False
    while True:
        try:
            process.wait(_EVERY)
        except subprocess.TimeoutExpired:
            pass
        _check(process, output)
        if output.stat().st_size > _MOST_OUTPUT:
            os.truncate(output, 0)
        try:
            board.update()
            failing = False
        except Exception as error:
            if not is_storage_error(error):
                raise
            if not failing:
                click.echo(f"elastictrain: warning: what is new cannot be read ({first_line(error)})", err=True)
            failing = True
