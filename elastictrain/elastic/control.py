"""Stops a run, takes a node out of it, or gives it another size, from outside: for whoever reaches its run log and has its
token. No torch.

:class:`Control` reads in the log who leads, connects to it as a node would (:mod:`elastictrain.channel`: both sides prove
that they have the token, and no frame can be forged or said again), and asks. The leader treats the nodes that are to go as
if they had asked for it, and tells them; they remember it and ask every later leader too. So what was taken is done even if
the leader dies then, and asking twice is asking once. A size is taken once it is in the log.

On failure: :class:`NoRunError` where nobody is there to ask; a :class:`~elastictrain.errors.UsageError` for a name that is
no node's; what the run log raises. A leader that dies before it answers, or has told nobody yet, is followed by the next
one, which is asked again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elastictrain.channel import HANDSHAKE_SECONDS, Channel, RefusedError
from elastictrain.elastic.chain import (
    ChainError,
    Entry,
    Generation,
    Loss,
    Member,
    Size,
    generation_from_json,
    members_from_json,
    size_from_json,
)
from elastictrain.errors import ElasticTrainError, UsageError

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
TAKEOVER_SECONDS = 15.0  # within which a leader that is gone is followed by another one
LOOK_EVERY = 0.3


class NoRunError(ElasticTrainError):
    """No node of the run is there."""


class Log(Protocol):
    """What is asked of a run log."""

    def newest(self) -> Entry: ...
    def history(self) -> Iterator[tuple[Entry, float]]: ...


@dataclass(frozen=True)
class Standing:
    """What the leader answers.

    Args:
        nodes: all that are connected to it, those that stand by too.
        generation: the newest one.
        size: the run's.
        is_settled: the leader has nothing to do: no change is under way.
    """

    nodes: tuple[Member, ...]
    generation: Generation
    size: Size
    is_settled: bool


class Control:
    """Of one run.

    Args:
        key: of the run's token.
    """

    def __init__(self, run_log: Log, key: bytes) -> None:
        self._log, self._key = run_log, key
        self._taken_by: Member | None = None

    def look(self) -> Standing:
        return self._ask({"do": "look"})

    def stop(self) -> Standing:
        """All nodes shall stop at one step, with a checkpoint. Does not wait for it."""
        return self._ask({"do": "stop"})

    def drain(self, node: str) -> Standing:
        """This node shall go, and the others go on. Does not wait for it.

        Args:
            node: the whole name.
        """
        return self._ask({"do": "drain", "node": node})

    def scale(self, *, least: int | None, most: int, seconds: float) -> Standing | None:
        """The run shall have that size; waits until its log says so, whoever leads.

        Args:
            least: None: as it is, or ``most`` where that is less.

        Returns:
            what there is then, with the generation that there was before; None: it was not so in time.
        """
        deadline, before = time.monotonic() + seconds, None
        while True:
            standing = self._ask({"do": "scale", "min": least or 0, "max": most})
            before = standing.generation if before is None else before
            if self._log.newest().size == standing.size:
                return replace(standing, generation=before)
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY)

    def wait_until_settled(self, *, seconds: float) -> Standing | None:
        """Until no change is under way; None: one still is.

        Raises:
            NoRunError: the run has ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not (standing := self.look()).is_settled:
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY)
        return standing

    def wait_until_stopped(self, before: Standing, *, seconds: float) -> tuple[tuple[Member, ...], int | None]:
        """Until the nodes of ``before`` have ended.

        Returns:
            those that are still there, and the step at which all have stopped; None where none was agreed on.
        """
        return self._wait(before, before.nodes, {"do": "stop"}, seconds=seconds)

    def wait_until_drained(self, before: Standing, node: Member, *, seconds: float) -> bool:
        """Until it has ended; whether it has."""
        there, _ = self._wait(before, (node,), {"do": "drain", "node": node.node}, seconds=seconds)
        return not there

    def newest(self) -> Entry:
        return self._log.newest()

    def kept_out(self) -> list[tuple[Loss, float]]:
        """Hosts that the run does not let in, and until when, seconds since the epoch; perhaps such as are let in by now.

        A leader counts from the loss, and one that came later from when it came.
        """
        newest, since = Entry(), dict[Loss, float]()
        for entry, written in self._log.history():
            newest = newest if newest.index else entry
            here = {member.host for member in newest.generation.members}
            there = [one for one in newest.losses if one in entry.losses and one.seconds > 0 and one.host not in here]
            is_over = written + max((one.seconds for one in there), default=0.0) <= time.time()
            if entry.epoch != newest.epoch or is_over:  # earlier ones say no later end
                break
            since |= dict.fromkeys(there, written)
        return [(loss, written + loss.seconds) for loss, written in since.items()]

    def _wait(
        self, before: Standing, nodes: Sequence[Member], wish: dict[str, Any], *, seconds: float
    ) -> tuple[tuple[Member, ...], int | None]:
        deadline, step = time.monotonic() + seconds, None
        there = tuple(nodes)
        while True:
            entry = self._log.newest()
            after = entry.generation
            is_over = after.number > before.generation.number and not after.members
            if is_over:
                step = after.boundary if after.boundary >= 0 else step
            there = tuple(one for one in there if self._is_there(one))
            if not there or time.monotonic() > deadline:
                return there, step
            # Another job is the same command given again: it was not asked to stop.
            is_same = before.generation.job in ("", after.job)
            if entry.leader != self._taken_by and is_same and not is_over and not entry.closed:
                try:
                    self._ask(wish)
                except NoRunError:
                    pass  # those that are there will say so by going
            time.sleep(min(LOOK_EVERY, max(0.01, deadline - time.monotonic())))

    def _ask(self, wish: dict[str, Any]) -> Standing:
        """The leader's answer; one that is gone is waited out.

        Raises:
            NoRunError: there is none, and none comes.
        """
        deadline = time.monotonic() + TAKEOVER_SECONDS
        while True:
            entry = self._log.newest()
            if entry.leader is None:
                raise NoRunError("no node has ever led it")
            if entry.closed:
                raise NoRunError(f"it has ended: {entry.closed}")
            answer = self._ask_once(entry.leader, {"is": "control", "epoch": entry.epoch, **wish})
            if answer is not None:
                self._taken_by = entry.leader
                return answer
            members = [one for one in (*entry.generation.members, entry.leader) if self._is_there(one)]
            if not members:
                raise NoRunError("none of its nodes answers")
            if time.monotonic() > deadline:
                names = ", ".join(one.node for one in members[:4])
                raise NoRunError(f"nobody leads it, though {names} can be reached: look at what the agents there say")
            time.sleep(LOOK_EVERY)

    def _ask_once(self, leader: Member, message: dict[str, Any]) -> Standing | None:
        """None: it is not there, or does not lead, or does not answer."""
        try:
            with _connected(leader) as connection:
                channel = Channel.connect(connection, self._key, seconds=HANDSHAKE_SECONDS)
                channel.send(message, seconds=ANSWER_SECONDS)
                said = channel.receive(seconds=ANSWER_SECONDS).head
        except OSError:
            return None
        if said.get("is") != "controlled":
            return None
        try:
            nodes = members_from_json(said["nodes"])
            size, is_settled = size_from_json(said["size"]), said["settled"] is True
            return Standing(nodes, generation_from_json(said["generation"]), size, is_settled)
        except (ChainError, KeyError, TypeError, ValueError):
            return None

    def _is_there(self, node: Member) -> bool:
        """Does it have the token? A node that is stopped is there, and does not say so."""
        try:
            connection = _connected(node)
        except OSError:
            return False
        with connection:
            try:
                Channel.connect(connection, self._key, seconds=HANDSHAKE_SECONDS)
            except RefusedError:
                return False  # another program has its port now
            except TimeoutError:
                return True
            except OSError:
                return False
        return True


def _connected(to: Member) -> socket.socket:
    return socket.create_connection((to.host, to.port), timeout=CONNECT_SECONDS)


def labels_of(member: Member) -> tuple[str, str]:
    """The names by which a node may be called: its own, and the one with its address for its host's name."""
    _, *rest = member.node.rsplit("-", 2)
    return member.node, "-".join([member.host, *rest])


def node_called(text: str, nodes: Sequence[Member]) -> Member:
    """The node of that name: the whole of it, else how one begins up to a ``-`` (``HOST``, ``HOST-PID``), else any part.

    Raises:
        UsageError: there is none, or more than one.
    """
    tests = (
        lambda label: label == text,
        lambda label: label.startswith(f"{text}-"),
        lambda label: bool(text) and text in label,
    )
    names = ", ".join(sorted(one.node for one in nodes)) or "none"
    for test in tests:
        found = [one for one in nodes if any(test(label) for label in labels_of(one))]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(sorted(one.node for one in found))
            raise UsageError(f"{text} may be any of {several}: write more of the name")
    raise UsageError(f"no node is called {text}; there are: {names}")
