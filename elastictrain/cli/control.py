"""``elastictrain stop``, ``drain`` and ``scale``: end a run, take a node out of it, or give it another size, from any
machine that reaches its directory.

Several nodes are asked through their leader (:mod:`elastictrain.elastic.control`). Agents that have no run log are on this
machine and get SIGTERM, or a person is told where to send it.

On failure: one line. Code 2 for a directory, a name or a size that is wrong, 1 for a run that is not running, or does not
end in time, or has ended and not saved.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from elastictrain.cli.reading import reading
from elastictrain.errors import EXIT_FAILED, EXIT_FINISHED, ElasticTrainError, UsageError

if TYPE_CHECKING:
    from elastictrain.elastic.chain import Member
    from elastictrain.elastic.control import Control, Standing
    from elastictrain.rundir import RunDir

LOOK_EVERY = 0.1
Command = TypeVar("Command", bound=Callable[..., Any])


def _options(command: Command) -> Command:
    for option in (
        click.option("--rdzv-id", default="", help="The run's, where it was given one."),
        click.option("--no-wait", is_flag=True, help="Return when the run has taken the request."),
        click.option(
            "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait."
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("run_dir")
@_options
def stop(run_dir: str, rdzv_id: str, timeout: float, no_wait: bool) -> int:
    """Stop RUN_DIR's run on all nodes at one step, with a checkpoint; the same command goes on later."""
    from elastictrain.elastic.control import NoRunError
    from elastictrain.rundir import RunDir

    with reading(run_dir):
        place = RunDir(run_dir)
        control = control_of(place, rdzv_id)
        if control is not None:
            try:
                before = control.stop()
            except NoRunError as error:
                return _stop_here(place, timeout, no_wait=no_wait, why=str(error))
            click.echo(f"{_nodes(len(before.nodes))} asked to stop: {_names(before.nodes)}")
            if no_wait:
                return EXIT_FINISHED
            there, step = control.wait_until_stopped(before, seconds=timeout)
            if there:
                raise _late(timeout, _names(there))
            return _tell_the_end(place, step)
        return _stop_here(place, timeout, no_wait=no_wait, why="no node has a run log there")


@click.command()
@click.argument("run_dir")
@click.argument("node")
@_options
def drain(run_dir: str, node: str, rdzv_id: str, timeout: float, no_wait: bool) -> int:
    """Let NODE leave RUN_DIR's run in good order; the others go on.

    NODE is its name as `elastictrain status` shows it, NAME-PID with the pid of its agent, or a part that is no other's.
    """
    from elastictrain.elastic.control import NoRunError, node_called
    from elastictrain.rundir import RunDir

    with reading(run_dir):
        place = RunDir(run_dir)
        control = control_of(place, rdzv_id)
        try:
            if control is None:
                raise NoRunError("no node has a run log there; a run of one node is ended by `elastictrain stop`")
            before = control.look()
            chosen = node_called(node, before.nodes)
            before = control.drain(chosen.node)
        except NoRunError as error:
            raise ElasticTrainError(f"the run in {place} has no nodes to choose from: {error}") from error
        click.echo(f"{chosen.node} asked to leave")
        if no_wait:
            return EXIT_FINISHED
        if not control.wait_until_drained(before, chosen, seconds=timeout):
            raise _late(timeout, chosen.node)
        after = control.newest().generation
        is_in = before.generation.rank_of(chosen.node) is not None
        at = f" at step {after.boundary}" if is_in and after.boundary >= 0 and after.members else ""
        left = len(after.members)
        least = before.size.min_nodes
        if after.is_paused or left < least:
            click.echo(f"{chosen.node} has left{at}; the others wait for nodes, of which {least} are needed")
        else:
            click.echo(f"{chosen.node} has left{at}; {_nodes(left)} go on")
    return EXIT_FINISHED


@click.command()
@click.argument("run_dir")
@click.argument("size", metavar="N|MIN:MAX")
@_options
def scale(run_dir: str, size: str, rdzv_id: str, timeout: float, no_wait: bool) -> int:
    """Give RUN_DIR's run another size while it is on: MIN:MAX as in --nnodes; N alone is another MAX.

    Nodes above MAX stand by, and step in when it is raised or another one goes. With fewer than MIN all wait for nodes.
    With N alone, MIN stays as it is, or becomes N where it is more.
    """
    from elastictrain.elastic.control import NoRunError
    from elastictrain.metrics.ledger import read_ledger
    from elastictrain.metrics.status import require_begun
    from elastictrain.rundir import RunDir

    least, most = _size(size)
    with reading(run_dir):
        place = RunDir(run_dir)
        control = control_of(place, rdzv_id)
        try:
            if control is None:
                require_begun(place, read_ledger(place))
                raise NoRunError(
                    "it has no run log, as with --nnodes 1 or --rdzv-endpoint HOST:PORT; stop it, and give"
                    " the command again with another --nnodes"
                )
            taken = control.scale(least=least, most=most, seconds=timeout)
            if taken is None:
                raise ElasticTrainError(f"{size} was not written to the run log within {timeout:g} s: it may come yet")
            click.echo(f"the run's size is {taken.size} nodes; {_nodes(len(taken.nodes))} are there")
            if no_wait:
                return EXIT_FINISHED
            after = control.wait_until_settled(seconds=timeout)
        except NoRunError as error:
            raise ElasticTrainError(f"the run in {place} cannot be scaled: {error}") from error
        if after is None:
            raise ElasticTrainError(f"not done within {timeout:g} s; what was asked for stays so, `status` tells")
        click.echo(_standing(taken, after))
    return EXIT_FINISHED


def _size(text: str) -> tuple[int | None, int]:
    """``N`` or ``MIN:MAX``; None: as it is."""
    match = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,9})", text.strip())
    least, most = (int(match[1]) if match[1] else None, int(match[2])) if match else (0, 0)
    if most < 1 or (least is not None and not 1 <= least <= most):
        raise UsageError(f"{text} is no size of a run: write a number of nodes from 1 on, or MIN:MAX such as 2:8")
    return least, most


def _standing(before: Standing, after: Standing) -> str:
    """Who trains now, and since when."""
    now, size = after.generation, after.size
    since = "" if now.number == before.generation.number or now.boundary < 0 else f" since step {now.boundary}"
    out = {one.node for one in before.generation.members} - {one.node for one in now.members}
    aside = sorted(out & {one.node for one in after.nodes})
    if now.is_paused or len(now.members) < size.min_nodes:
        waits = "waits" if len(after.nodes) == 1 else "wait"
        return f"{_nodes(len(after.nodes))} {waits}{since} for others: {size.min_nodes} are needed"
    stands = f"; standing by: {', '.join(aside)}" if aside else ""
    return f"{_nodes(len(now.members))} {'trains' if len(now.members) == 1 else 'train'}{since}{stands}"


def control_of(place: RunDir, rdzv_id: str) -> Control | None:
    """None: there is no run log."""
    from elastictrain.channel import key_of
    from elastictrain.checkpoint.token import VARIABLE, has_token, read_token
    from elastictrain.elastic.control import Control
    from elastictrain.elastic.runlog import RunLog, folder_of

    folder = folder_of(rdzv_id)
    if not place.names(folder):
        return None
    if not has_token(place):
        raise ElasticTrainError(f"{place} holds no token: set {VARIABLE} to the one that the run's nodes have")
    key = key_of(read_token(place))
    return Control(RunLog(place, key, folder=folder), key)


# ---- agents that keep no log ------------------------------------------------------------------------------------------


def _stop_here(place: RunDir, timeout: float, *, no_wait: bool, why: str) -> int:
    """By SIGTERM, where all agents are on this machine."""
    from elastictrain.metrics.ledger import read_ledger
    from elastictrain.metrics.status import require_begun, status

    lines = read_ledger(place)
    require_begun(place, lines)
    found = status(lines)
    agents = [one["agent_pid"] for one in found["nodes"] if one["host"] == socket.gethostname() and _is_agent(one)]
    elsewhere = [one for one in found["nodes"] if one["host"] != socket.gethostname()]
    if found["state"] not in ("running", "starting", "silent", "changing"):
        raise ElasticTrainError(f"the run in {place} is not running: {found['state']} at step {found['step']}")
    if not found["nodes"]:
        raise ElasticTrainError(f"the run in {place} has only begun, and does not say yet who trains it: try again")
    if not agents and not elsewhere:
        pids = ", ".join(str(one["agent_pid"]) for one in found["nodes"])
        raise ElasticTrainError(f"the run in {place} is not running: no process {pids} with its workers is here; {why}")
    if elsewhere:
        them = ", ".join(f"{one['agent_pid']} on {one['host']}" for one in found["nodes"])
        raise ElasticTrainError(f"the run in {place} cannot be asked from here ({why}): send SIGTERM to process {them}")
    for pid in agents:
        os.kill(pid, signal.SIGTERM)
    click.echo(f"{_nodes(len(agents))} asked to stop: agent pid {', '.join(map(str, agents))}")
    if no_wait:
        return EXIT_FINISHED
    deadline = time.monotonic() + timeout
    while there := [pid for pid in agents if _is_alive(pid)]:
        if time.monotonic() > deadline:
            raise _late(timeout, f"agent pid {', '.join(map(str, there))}")
        time.sleep(LOOK_EVERY)
    return _tell_the_end(place, status(read_ledger(place))["step"])


def _is_agent(node: dict[str, Any]) -> bool:
    """Has that process started the workers that the ledger names? Another one may have its number by now."""
    return any(_stat(one["pid"])[1:] == [str(node["agent_pid"])] for one in node["workers"])


def _is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    """State and parent of a process; nothing where there is none, or the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return []


# ---- in words --------------------------------------------------------------------------------------------------------


def _tell_the_end(place: RunDir, step: int | None) -> int:
    """Where it has stopped and what is saved; a failure where that is not the same."""
    from elastictrain import runfile
    from elastictrain.cli.checks import newest_checkpoint

    saved = newest_checkpoint(place)
    click.echo("the run has stopped" + ("" if step is None else f" at step {step}"))
    if saved is not None:
        click.echo(f"step {saved[0]} is saved in {saved[1]}")
    if step is None or step <= 0 or not place.exists(runfile.NAME) or (saved is not None and saved[0] >= step):
        return EXIT_FINISHED
    newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is of step {saved[0]}"
    click.echo(f"elastictrain: error: step {step} was not saved, {newest}: look at what the agents say", err=True)
    return EXIT_FAILED


def _late(timeout: float, who: str) -> ElasticTrainError:
    return ElasticTrainError(f"not ended within {timeout:g} s: {who}; what was asked for stays so, `status` tells")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _names(nodes: tuple[Member, ...]) -> str:
    names = sorted(one.node for one in nodes)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
