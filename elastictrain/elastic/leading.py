"""The leader's side of its connections: who is behind which link, what they have been told, and what is being written.

Pure, like :mod:`elastictrain.elastic.leader`, whose decisions this carries out.
"""

from __future__ import annotations

from typing import Any

from elastictrain.elastic import decisions as deciding
from elastictrain.elastic.actions import Action, Close, Create, Read, Send, Trim
from elastictrain.elastic.chain import ChainError, Entry, Message, Size, difference, member_from_json, size_from_json
from elastictrain.elastic.leader import Leader
from elastictrain.elastic.timing import Timing

TRIM_EVERY = 32  # entries
LEAVE: Message = {"is": "leave"}  # to a node that shall go


class Leading:
    """One epoch of leading, from the claim on.

    Args:
        claim: the entry that made this node the leader.
        size: of a run that begins with this node.
        previous: the node that led before.
        job: that this node has seen members of.
        out: takes actions.

    Attributes:
        retry_at: when a commit whose fate is unknown is looked for in the log.
    """

    def __init__(
        self, claim: Entry, timing: Timing, *, size: Size, previous: str | None, job: str, now: float, out: list[Action]
    ) -> None:
        self.leader = Leader(claim, timing, size=size, job=job, now=now, previous=previous)
        self.timing = timing
        self.epoch = claim.epoch
        self.retry_at: float | None = None
        self._out = out
        self._nodes: dict[int, str] = {}  # by link
        self._has: dict[int, int] = {}  # by link: number of the newest generation that it was sent
        self._ping_at, self._run = now, ""  # as it was at the last ping: it takes a look at all members

    @property
    def deadline(self) -> float:
        times = [self.leader.deadline, self._ping_at]
        if self.retry_at is not None:
            times.append(self.retry_at)
        return min(times)

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(self._nodes)

    # ---- what nodes say ----------------------------------------------------------------------------------------------

    def message(self, link: int, message: Message, now: float) -> None:
        """From a node, or from somebody who wants to be one.

        Raises:
            ChainError: nothing that a node may say here.
        """
        kind, node = message.get("is"), self._nodes.get(link)
        if kind == "hello":
            self._hello(link, message, now)
        elif kind == "control":
            self._control(link, message, now)
        elif node is None:
            raise ChainError(f"{kind!r} before hello")
        elif kind == "beat":
            self.leader.beat(node, is_ready=bool(message["ready"]), step=_int(message["step"]), now=now)
        elif kind == "promise":
            boundary, step = _int(message["boundary"]), _int(message["step"])
            self.leader.promise(node, boundary=boundary, is_kept=bool(message["kept"]), step=step, now=now)
        elif kind == "leave":
            self.leader.leave(node, now=now)
        elif kind == "renew":
            self.leader.renew(_int(message["number"]), now=now)
        elif kind == "suspect":
            self.leader.suspect(now=now)
        elif kind == "close":
            self.leader.close(str(message["reason"]), now=now)
        else:
            raise ChainError(f"{kind!r} is nothing that a node says")

    def link_lost(self, link: int, now: float) -> None:
        node = self._nodes.pop(link, None)
        self._has.pop(link, None)
        known = self.leader.nodes.get(node) if node is not None else None
        if known is not None and known.link == link:
            self.leader.lost(known.member.node, now=now)

    def _hello(self, link: int, message: Message, now: float) -> None:
        member = member_from_json(message["member"])
        before = self.leader.nodes.get(member.node)
        if before is not None and before.link != link:
            self._nodes.pop(before.link, None)
            self._has.pop(before.link, None)
            self._out.append(Close((before.link,)))
        knew_size = self.leader.knows_size
        is_ready, is_leaving = bool(message["ready"]), bool(message["leaves"])
        step = _int(message["step"])
        self.leader.hello(member, link=link, is_ready=is_ready, step=step, now=now, is_leaving=is_leaving)
        generation = self.leader.generation
        if not knew_size and self.leader.knows_size:
            self._tell_size()
        has = _int(message["has"])
        self._nodes[link], self._has[link] = member.node, generation.number
        boundary = self.leader.promised_boundary
        welcome: Message = {"is": "welcome", "epoch": self.epoch, "stop_at": boundary, **self._pace()}
        if has < generation.number:
            welcome["generation"] = generation.to_json()
        if self.leader.knows_size:
            welcome["size"] = self.leader.size.to_json()
        if self.leader.absent.told:
            welcome["lost"] = list(self.leader.absent.told)
        self._out.append(Send((link,), welcome))
        if self.leader.preparing is not None:
            self._out.append(Send((link,), self._prepare(self.leader.preparing)))
        if self.leader.is_stopping:
            self._out.append(Send((link,), LEAVE))

    def _control(self, link: int, message: Message, now: float) -> None:
        """From somebody with the run's token who is no node; asking twice is asking once.

        The nodes that are to go are told so: they remember it, whoever leads then.
        """
        wish = message["do"]
        if wish == "stop":
            self.leader.stop(now=now)
            self._out.append(Send(self.links, LEAVE))
        elif wish == "drain":
            known = self.leader.nodes.get(str(message["node"]))
            if known is not None:
                self.leader.leave(known.member.node, now=now)
                self._out.append(Send((known.link,), LEAVE))
        elif wish == "scale":
            self.leader.scale(self._wished(_int(message["min"]), _int(message["max"])), now=now)
        elif wish != "look":
            raise ChainError(f"{wish!r} is nothing that can be asked for")
        nodes = [node.member.to_json() for node in self.leader.nodes.values()]
        answer = {"is": "controlled", "nodes": nodes, "generation": self.leader.generation.to_json()}
        size, is_settled = self.leader.size.to_json(), self.leader.is_settled
        self._out.append(Send((link,), {**answer, "size": size, "settled": is_settled}))

    def _wished(self, least: int, most: int) -> Size:
        """``least`` 0: as it is, or all of them where that is more than ``most``."""
        return size_from_json([least or min(self.leader.size.min_nodes, most), most])

    def _tell_size(self) -> None:
        self._out.append(Send(self.links, {"is": "size", "size": self.leader.size.to_json()}))

    # ---- what is decided ---------------------------------------------------------------------------------------------

    def decide(self, now: float) -> None:
        for decision in self.leader.tick(now):
            match decision:
                case deciding.Commit(entry):
                    self._out.append(Create(entry))
                case deciding.Prepare(boundary):
                    self._out.append(Send(self.links, self._prepare(boundary)))
                case deciding.Cancel():
                    self._out.append(Send(self.links, {"is": "cancel"}))
                case deciding.Reread():
                    self._out.append(Read())
                case deciding.Probe():
                    self._out.append(Send(self.links, {"is": "ping", "answer": True, **self._pace()}))
                case deciding.Drop(links):
                    self._out.append(Close(links))
                    for link in links:
                        self._nodes.pop(link, None)
                        self._has.pop(link, None)
                case deciding.Bye(links):
                    self._out.append(Send(links, {"is": "bye"}))
                case deciding.Gone(nodes):
                    self._out.append(Send(self.links, {"is": "lost", "lost": list(nodes)}))
                case deciding.KeepOut(link, times, seconds):
                    self._out.append(Send((link,), {"is": "wait", "times": times, "seconds": seconds}))
        if now >= self._ping_at:
            self._ping_at = now + self.timing.beat_for(len(self._nodes))
            self._run = self.leader.run
            self._out.append(Send(self.links, {"is": "ping", **self._pace()}))

    def committed(self, now: float) -> None:
        """What was pending is in the log: tell everybody."""
        before, size = self.leader.generation, self.leader.entry.size
        self.leader.committed(now=now)
        entry = self.leader.entry
        self.retry_at = None
        if entry.closed:
            self._out.append(Send(self.links, {"is": "closed", "reason": entry.closed}))
            return
        after = entry.generation
        if entry.size != size:
            self._tell_size()
        if after == before:
            return
        near = tuple(link for link, number in self._has.items() if number == before.number and number > 0)
        far = tuple(link for link, number in self._has.items() if number != before.number or number == 0)
        if near:
            self._out.append(Send(near, {"is": "change", **difference(before, after)}))
        if far:
            self._out.append(Send(far, {"is": "generation", "generation": after.to_json()}))
        self._has = dict.fromkeys(self._has, after.number)
        if entry.index % TRIM_EVERY == 0:
            self._out.append(Trim(entry.index))

    def look(self, newest: Entry, now: float) -> bool:
        """The log was read.

        Returns:
            whether this node still leads.
        """
        if newest.epoch > self.epoch:
            return False
        pending = self.leader.pending
        if pending is not None and newest == pending:
            self.committed(now)
        elif pending is not None and self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None
            self._out.append(Create(pending))  # the same entry: should the first one land yet, it is this one
        return True

    def _prepare(self, boundary: int) -> Message:
        return {"is": "prepare", "number": self.leader.generation.number, "boundary": boundary}

    def _pace(self) -> Message:
        count = len(self._nodes)
        pace: Message = {"beat": self.timing.beat_for(count), "ttl": self.timing.ttl_for(count)}
        return {**pace, "run": self._run} if self._run else pace


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ChainError(f"{value!r} is no whole number")
    return value
