"""What a run's log says: a chain of entries, each of which holds the whole state, so that the newest one is enough.

An entry is either a *claim* (another node leads: the epoch rises by one) or the leader's word under its own epoch: the
next *generation* of members, another *size* of the run, or that it is *closed*.
Nobody may write an entry without having read the one before it,
and a leader only under the epoch that it has claimed: that is the whole fence against leaders that were deposed and do not
know it yet. There is no lease time and no clock in it.

On failure: :class:`ChainError` for entries that cannot follow each other, or that no program of ours wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]


class ChainError(ValueError):
    """An entry or message is not one that this protocol writes."""


@dataclass(frozen=True)
class Member:
    """One life of one node's agent.

    Args:
        node: tells it apart from every other node, and from its own earlier lives.
        host, port: where it listens.
        store: port of the store that it keeps for its workers, on the same host; 0: none.
        workers: how many it has; 0: it did not say.
    """

    node: str
    host: str = ""
    port: int = 0
    store: int = 0
    workers: int = 0

    def to_json(self) -> list[Any]:
        return [self.node, self.host, self.port, self.store, self.workers]


@dataclass(frozen=True)
class Size:
    """How many nodes a run has, ``MIN:MAX``.

    Args:
        min_nodes: with fewer nobody trains.
        max_nodes: all others stand by.
    """

    min_nodes: int = 1
    max_nodes: int = 1 << 20

    def __str__(self) -> str:
        return f"{self.min_nodes}:{self.max_nodes}"

    def to_json(self) -> list[int]:
        return [self.min_nodes, self.max_nodes]


@dataclass(frozen=True)
class Loss:
    """What is remembered of a host that a node was lost with, see :mod:`elastictrain.elastic.flapping`.

    Args:
        times: losses of it, less those that are forgotten.
        seconds: how long it is kept out after the last one.
    """

    host: str
    times: int
    seconds: float

    def to_json(self) -> list[Any]:
        return [self.host, self.times, self.seconds]


@dataclass(frozen=True)
class Generation:
    """Who trains together; a member's rank is its place.

    Args:
        number: 0: none yet.
        epoch: of the leader that formed it.
        boundary: the step up to which the members of the one before go on, if they all agreed on one; -1: stop at once.
        reason: for people.
        job: the same as long as one member after another hands it on, and another one once nobody was left.
        first: the number of the job's first generation.
        is_paused: its members are fewer than the run needs: they wait together, and nobody trains.
        size: the run's as it was formed.
        leaving: of the members of the one before, the names of those that leave in good order; they may still be saving.
            Others that are not in this one are lost, or stand by.
    """

    number: int = 0
    epoch: int = 0
    members: tuple[Member, ...] = ()
    boundary: int = -1
    reason: str = ""
    job: str = ""
    first: int = 0
    is_paused: bool = False
    size: Size = Size()
    leaving: tuple[str, ...] = ()

    def rank_of(self, node: str) -> int | None:
        """The rank of a node; None: it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.node == node), None)

    def to_json(self) -> Message:
        members = [member.to_json() for member in self.members]
        return {"number": self.number, "epoch": self.epoch, "members": members, "boundary": self.boundary,
                "reason": self.reason, "job": self.job, "first": self.first, "paused": self.is_paused,
                "size": self.size.to_json(), "leaving": list(self.leaving)}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The state of a run after one entry of its log. Number 0 stands for an empty log.

    Args:
        closed: why, for people; empty: it is not.
        size: the run's from now on, for as long as one member after another hands it on; None: nobody has said it yet.
        losses: hosts that nodes were lost with, the newest last.
    """

    index: int = 0
    epoch: int = 0
    leader: Member | None = None
    generation: Generation = Generation()
    closed: str = ""
    size: Size | None = None
    losses: tuple[Loss, ...] = ()

    @property
    def may_go_on(self) -> bool:
        """It is not known yet that nobody is left who could."""
        return bool(self.generation.members) and not self.closed

    def claimed_by(self, node: Member, size: Size) -> Entry:
        """The next entry, by which a node takes the lead; it opens what was closed, and then the size is the node's."""
        size = self.size if self.may_go_on and self.size is not None else size
        losses = self.losses if self.may_go_on else ()
        return Entry(self.index + 1, self.epoch + 1, node, self.generation, size=size, losses=losses)

    def with_generation(self, generation: Generation, losses: tuple[Loss, ...]) -> Entry:
        return replace(self, index=self.index + 1, generation=generation, size=generation.size, losses=losses)

    def with_size(self, size: Size) -> Entry:
        return replace(self, index=self.index + 1, size=size)

    def with_closed(self, reason: str) -> Entry:
        return replace(self, index=self.index + 1, closed=reason)

    def to_json(self) -> Message:
        return {
            "index": self.index,
            "epoch": self.epoch,
            "leader": None if self.leader is None else self.leader.to_json(),
            "generation": self.generation.to_json(),
            "closed": self.closed,
            "size": None if self.size is None else self.size.to_json(),
            "losses": [loss.to_json() for loss in self.losses],
        }


def entry_from_json(data: Any) -> Entry:
    """The other way.

    Raises:
        ChainError: it is none.
    """
    try:
        leader = None if data["leader"] is None else _member(data["leader"])
        generation = generation_from_json(data["generation"])
        size = None if data["size"] is None else size_from_json(data["size"])
        losses = tuple(Loss(_text(host), _count(times), float(s)) for host, times, s in data["losses"])
        index, epoch = _count(data["index"]), _count(data["epoch"])
        return Entry(index, epoch, leader, generation, _text(data["closed"]), size, losses)
    except (KeyError, TypeError, ValueError) as error:
        raise ChainError(f"not an entry of a run log: {error!r}") from error


def generation_from_json(data: Any) -> Generation:
    """The other way.

    Raises:
        ChainError: it is none.
    """
    try:
        members = members_from_json(data["members"])
        boundary, is_paused = data["boundary"], data["paused"]
        if (
            type(boundary) is not int
            or type(is_paused) is not bool
            or len({member.node for member in members}) != len(members)
        ):
            raise ValueError("boundary or members")
        number, epoch, first = (_count(data[name]) for name in ("number", "epoch", "first"))
        reason, job, leaving = _text(data["reason"]), _text(data["job"]), _texts(data["leaving"])
        size = size_from_json(data["size"])
        return Generation(number, epoch, members, boundary, reason, job, first, is_paused, size, leaving)
    except (KeyError, TypeError, ValueError) as error:
        raise ChainError(f"not a generation: {error!r}") from error


def members_from_json(data: Any) -> tuple[Member, ...]:
    """The other way; raises ``TypeError`` or ``ValueError``."""
    return tuple(_member(one) for one in data)


def member_from_json(data: Any) -> Member:
    """The other way.

    Raises:
        ChainError: it is none.
    """
    try:
        return _member(data)
    except (TypeError, ValueError) as error:
        raise ChainError(f"not a member: {error!r}") from error


def size_from_json(data: Any) -> Size:
    """The other way.

    Raises:
        ChainError: it is none.
    """
    try:
        least, most = map(_count, data)
    except (TypeError, ValueError) as error:
        raise ChainError(f"not a size: {error!r}") from error
    if not 1 <= least <= most:
        raise ChainError(f"{least}:{most} is no MIN:MAX")
    return Size(least, most)


def check_follows(before: Entry, after: Entry) -> None:
    """May ``after`` be the next entry?

    Raises:
        ChainError: it may not.
    """
    old, new = before.generation, after.generation
    if after.index != before.index + 1:
        good = False
    elif after.epoch == before.epoch + 1:  # a claim changes nothing else, where anybody may be left
        same = (after.size, after.losses) == (before.size, before.losses)
        good = after.leader is not None and new == old and not after.closed and (same or not before.may_go_on)
    else:
        is_next = new.number == old.number + 1 and new.epoch == after.epoch and not after.closed and _fits(old, new)
        is_next = is_next and new.size == after.size and (after.size == before.size or new.first == new.number)
        is_closing = new == old and bool(after.closed) and after.size == before.size
        is_resized = new == old and not after.closed and after.size not in (None, before.size)
        good = (
            after.epoch == before.epoch
            and after.leader == before.leader
            and not before.closed
            and (is_next or is_closing or is_resized)
        )
    if not good:
        raise ChainError(f"entry {after} cannot follow {before}")


def _fits(old: Generation, new: Generation) -> bool:
    """Are its members as many as its own size says? Enough of them may be paused as well, where they make no mesh; and what
    a loss has left of the one before may be too many."""
    is_too_few = len(new.members) < new.size.min_nodes
    is_left = new.boundary < 0 and set(new.members) <= set(old.members)
    return (len(new.members) <= new.size.max_nodes or is_left) and (new.is_paused or not is_too_few)


def difference(before: Generation, after: Generation) -> Message:
    """What :func:`changed` needs to make the one from the other, for runs of thousands of nodes."""
    old, new = {one.node for one in before.members}, {one.node for one in after.members}
    return {
        "number": after.number,
        "epoch": after.epoch,
        "gone": [one.node for one in before.members if one.node not in new],
        "come": [one.to_json() for one in after.members if one.node not in old],
        "boundary": after.boundary,
        "reason": after.reason,
        "job": after.job,
        "first": after.first,
        "paused": after.is_paused,
        "size": after.size.to_json(),
        "leaving": list(after.leaving),
    }


def changed(before: Generation, message: Message) -> Generation:
    """The generation that a :func:`difference` leads to; ``before`` where it is no newer.

    Raises:
        ChainError: another one lies between.
    """
    number = int(message["number"])
    if number <= before.number:
        return before
    if number != before.number + 1:
        raise ChainError(f"generation {before.number + 1} is missing")
    gone = set(message["gone"])
    stay = tuple(member for member in before.members if member.node not in gone)
    members = stay + members_from_json(message["come"])
    epoch, boundary, first = (int(message[name]) for name in ("epoch", "boundary", "first"))
    reason, job, leaving = str(message["reason"]), str(message["job"]), _texts(message["leaving"])
    size = size_from_json(message["size"])
    return Generation(number, epoch, members, boundary, reason, job, first, message["paused"] is True, size, leaving)


def _member(data: Any) -> Member:
    node, host, *numbers = data
    port, store, workers = map(_count, numbers)
    return Member(_text(node), _text(host), port, store, workers)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise TypeError("not a list")
    return tuple(map(_text, value))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("not a text")
    return value
