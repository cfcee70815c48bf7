"""May this node take the lead, and when? What it has seen of a leader that refuses, is silent, or leads no more. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum, auto

from elastictrain.elastic.chain import Entry, Generation, Member
from elastictrain.elastic.timing import Timing

MAX_ASKED = 8  # peers in a pre-vote
MAX_DOUBLINGS = 6
MAX_RETRIES = 2  # of a leader that is silent


class Verdict(Enum):
    """What a pre-vote comes to."""

    OPEN = auto()  # some have not answered yet
    CLAIM = auto()
    WAIT = auto()  # the leader is well, or this node reaches too few to form anything
    ALONE = auto()  # no member, and reaches none: only after a long time


class Election:
    """One node's.

    Args:
        me: the node.
    """

    def __init__(self, me: str, timing: Timing, *, chance: random.Random) -> None:
        self._me, self._timing, self._chance = me, timing, chance
        self._silences = self._attempts = self._isolations = 0
        self._isolated_until: float | None = None
        self._answers: dict[int, str] = {}  # by link: "" none yet, "yes", "no", "gone"

    # ---- what was seen -----------------------------------------------------------------------------------------------

    def somebody_leads(self) -> None:
        """The log has moved, or a leader has said welcome."""
        self._silences, self._isolated_until = 0, None

    def is_steady(self) -> None:
        """There has been a leader for a while."""
        self._attempts = self._isolations = 0

    def attempt_failed(self) -> None:
        """A claim, or reading the log, came to nothing."""
        self._attempts += 1

    def may_retry(self) -> bool:
        """The leader was silent; shall it be asked again?"""
        self._silences += 1
        return self._silences <= MAX_RETRIES

    # ---- the pre-vote ------------------------------------------------------------------------------------------------

    def voters(self, generation: Generation, entry: Entry) -> list[Member]:
        """Whom to ask: some members."""
        self._silences = 0
        known = {self._me, entry.leader.node if entry.leader is not None else ""}
        others = [member for member in generation.members if member.node not in known]
        return self._chance.sample(others, min(MAX_ASKED, len(others)))

    def ask(self, links: Sequence[int]) -> None:
        self._answers = dict.fromkeys(links, "")

    def asked(self, link: int) -> bool:
        return link in self._answers

    def answer(self, link: int, answer: str) -> None:
        """``yes``: it hears the leader; ``no``: it does not; ``gone``: nobody is there any more."""
        self._answers[link] = answer

    def verdict(self, generation: Generation, *, min_nodes: int, is_late: bool) -> Verdict:
        answers = list(self._answers.values())
        if "yes" in answers:
            return Verdict.WAIT
        if "" in answers and not is_late:
            return Verdict.OPEN
        num_deaf, num_silent = answers.count("no"), answers.count("")
        reaches_enough = 1 + num_deaf >= min_nodes or num_silent == 0
        if generation.rank_of(self._me) is not None:
            return Verdict.CLAIM if reaches_enough else Verdict.WAIT
        return Verdict.CLAIM if num_deaf > 0 and reaches_enough else Verdict.ALONE

    def end_vote(self) -> tuple[int, ...]:
        """The links that were used."""
        links, self._answers = tuple(self._answers), {}
        return links

    def has_waited_alone(self, now: float) -> bool:
        """For :attr:`Verdict.ALONE`: long enough to claim? Twice as long each time."""
        if self._isolated_until is None:
            wait = self._timing.isolation * (1 << min(self._isolations, MAX_DOUBLINGS))
            self._isolated_until = now + wait * (1 + self._chance.random())
        if now < self._isolated_until:
            return False
        self._isolations += 1
        self._isolated_until = None
        return True

    # ---- how long to wait --------------------------------------------------------------------------------------------

    def patience(self, generation: Generation) -> float:
        """Seconds that the leader has to answer a connection; many connect at once to a new one."""
        if generation.rank_of(self._me) is None:
            return self._timing.isolation
        return max(self._timing.retry, len(generation.members) / 1000)

    def stagger(self, generation: Generation) -> float:
        """Seconds until a claim: survivors one after another."""
        rank = generation.rank_of(self._me)
        place = len(generation.members) if rank is None else rank
        return self._timing.stagger * min(place, 10) + self.delay() / 2

    def delay(self) -> float:
        """Random, and longer with each attempt that came to nothing: or two nodes could go on taking turns."""
        return self._timing.stagger * float(1 << min(self._attempts, MAX_DOUBLINGS)) * (0.5 + self._chance.random())

    def pause(self, ttl: float) -> float:
        """Seconds until a leader that others hear, or that cannot be replaced, is tried again."""
        return ttl / 2 * (1 + self._chance.random())
