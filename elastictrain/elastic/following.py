"""A node's side of its connection to the leader: what it says of itself, what it is told, what it promises. Pure."""

from __future__ import annotations

from elastictrain.elastic.actions import (
    Action,
    Closed,
    Dismissed,
    Formed,
    Gone,
    KeptOut,
    Left,
    Promise,
    Release,
    Resized,
    Send,
)
from elastictrain.elastic.chain import (
    ChainError,
    Generation,
    Member,
    Message,
    Size,
    changed,
    generation_from_json,
    size_from_json,
)
from elastictrain.elastic.timing import Timing


class Following:
    """One node's, over all leaders that it follows.

    Args:
        out: takes actions.

    Attributes:
        generation: the newest one that this node knows.
        job: of the newest one with members: what this node has been there for.
        size: the run's, by the last leader's word; the command's own until there was one.
        run: what nodes of the run do, by the newest leader's word: "training", "waiting", or nothing, as none is there.
        step: finished steps, kept up to date by the driver; -1: none.
        asked: what the leader wants this node's workers to promise, until it is void or the generation ends.
        link: to a leader that has said welcome.
        epoch: of that leader.
    """

    def __init__(self, me: Member, timing: Timing, *, out: list[Action]) -> None:
        self._me, self._out = me, out
        self.generation, self.size, self.job = Generation(), timing.size, ""
        self.step = -1
        self.asked: Promise | None = None
        self.is_ready = self.is_leaving = self.is_over = False
        self.run = ""
        self._failed_number = 0  # the generation whose workers have failed here
        self._closing = ""
        self.link: int | None = None
        self.epoch = 0
        self.beat_at = self.heard = self._welcomed = 0.0
        self._beat, self.ttl = timing.beat, timing.ttl

    @property
    def is_member(self) -> bool:
        return self.generation.rank_of(self._me.node) is not None

    @property
    def deadline(self) -> float:
        return min(self.beat_at, self.heard + self.ttl)

    def is_silent(self, now: float) -> bool:
        return now >= self.heard + self.ttl

    def is_steady(self, now: float) -> bool:
        """The leader has been there for a while."""
        return self.link is not None and now - self._welcomed > self.ttl

    # ---- what this node says -----------------------------------------------------------------------------------------

    def hello(self, link: int, *, epoch: int) -> None:
        hello = {"is": "hello", "member": self._me.to_json(), "epoch": epoch, "ready": self.is_ready,
                 "step": self.step, "has": self.generation.number, "leaves": self.is_leaving}  # fmt: skip
        self._out.append(Send((link,), hello))

    def beat(self, now: float) -> None:
        self.beat_at = now + self._beat
        self._say({"is": "beat", "ready": self.is_ready, "step": self.step})

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        """The workers' answer; one that nobody waits for any more is nothing."""
        if asked is self.asked:
            self.step = step
            self._say({"is": "promise", "boundary": asked.boundary, "kept": is_kept, "step": step})

    def leave(self) -> None:
        self.is_leaving = True
        self._say({"is": "leave"})

    def renew(self, number: int) -> None:
        self._failed_number = number
        self._say({"is": "renew", "number": number})

    def suspect(self) -> None:
        self._say({"is": "suspect"})

    def close(self, reason: str) -> None:
        self._closing = reason or "closed"
        self._say({"is": "close", "reason": self._closing})

    def _say(self, message: Message) -> None:
        if self.link is not None:
            self._out.append(Send((self.link,), message))

    # ---- what it is told ---------------------------------------------------------------------------------------------

    def welcomed(self, link: int, message: Message, now: float) -> None:
        """By a leader of an epoch that is not too old."""
        self.link, self.epoch, self._welcomed, self.beat_at = link, int(message["epoch"]), now, now
        if "generation" in message:  # what was promised for it is not given back, but kept
            self.learn(generation_from_json(message["generation"]))
        if self.asked is not None and self.asked.boundary != message["stop_at"]:
            self._release()  # another leader had prepared it, and not committed
        if self.is_leaving:  # it may have asked since it said hello
            self.leave()
        if self._closing:
            self.close(self._closing)
        if self._failed_number:
            self.renew(self._failed_number)
        self.message(message, now)

    def message(self, message: Message, now: float) -> None:
        """From the leader.

        Raises:
            ChainError: nothing that it may say here; or ``KeyError``, ``TypeError``, ``ValueError``.
        """
        kind = message.get("is")
        self.heard = now
        if "beat" in message:
            self._beat, self.ttl = float(message["beat"]), float(message["ttl"])
            self.beat_at = min(self.beat_at, now + self._beat)
            self.run = str(message.get("run", ""))
        if "generation" in message:
            self.learn(generation_from_json(message["generation"]))
        if "size" in message:
            self._resize(size_from_json(message["size"]))
        if "lost" in message:
            self._out.append(Gone(tuple(map(str, message["lost"]))))
        if kind == "change":
            self.learn(changed(self.generation, message))
        elif kind == "wait":
            self._out.append(KeptOut(int(message["times"]), float(message["seconds"])))
        elif kind == "prepare":
            self._ask(int(message["number"]), int(message["boundary"]))
        elif kind == "cancel":
            self._release()
        elif kind == "ping" and message.get("answer"):
            self.beat(now)
        elif kind == "leave":
            if not self.is_leaving:
                self._out.append(Dismissed())
                self.leave()  # and again to each leader that comes
        elif kind == "bye":
            self.is_over = True
            self._out.append(Left())
        elif kind == "closed":
            self.close_down(str(message["reason"]))
        elif kind not in ("ping", "welcome", "generation", "size", "lost"):
            raise ChainError(f"{kind!r} is nothing that a leader says")

    def learn(self, generation: Generation) -> None:
        """From the leader or from the log."""
        if generation.number > self.generation.number:
            self.generation = generation
            self.job = generation.job if generation.members else self.job
            self._failed_number = 0
            self.asked = None
            self._out.append(Formed(generation))

    def _resize(self, size: Size) -> None:
        """By a leader's word alone: what the log says may be of nodes that are gone."""
        if size != self.size:
            self.size = size
            self._out.append(Resized(size))

    def close_down(self, reason: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._out.append(Closed(reason))

    def _ask(self, number: int, boundary: int) -> None:
        if number == self.generation.number and self.is_member:
            self.asked = Promise(number, boundary)
            self._out.append(self.asked)

    def _release(self) -> None:
        if self.asked is not None:
            self.asked = None
            self._out.append(Release())
