"""Snapshots: the staged state, given to the node's keeper instead of to storage.

A rank has :data:`~elastictrain.checkpoint.held.MAX_OWN` images: two snapshots that are kept, and one that is filled anew.
Which one that is, all ranks decide alike, by what all of them know to be whole: never the newest snapshot that is whole on
all ranks (where there are several nodes: and copied to all buddies), and never the one that is being copied. Of what is
left, the newest that is whole is taken last, copied or not. So at any moment, whoever dies, there is a snapshot of which
every rank's image is somewhere. A copy is begun when the one before has ended; where copies take longer than the interval,
the snapshots in between are not copied. So what a node's death costs at most is the interval and the steps of one copy, or
the steps of two copies where they take longer than the interval; that is said once it is the rule. Whoever wants less waits
(:meth:`Snapshots.settle`).

On failure: nothing is raised and training goes on. A snapshot that one rank could not take is of no use on any; it is
counted, said once, and the next one is tried.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.held import MAX_OWN, About
from elastictrain.checkpoint.keeper_link import Address, KeeperLink
from elastictrain.checkpoint.manifest import tensors_json
from elastictrain.checkpoint.ranks import Ranks
from elastictrain.checkpoint.staging import Content, Staged

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.02  # between two looks whether the generation is over, where the keeper says nothing
MANY = 20  # snapshots that were not copied, before it is said


@dataclass(frozen=True)
class Identity:
    """Whose snapshots they are.

    Args:
        run, job: see :class:`~elastictrain.checkpoint.held.About`.
        start: the number of this start among all of the run.
        base: the snapshot that it has gone on from. What else earlier starts have left is of no use any more.
    """

    run: str
    job: str
    start: int
    base: str | None = None


@dataclass(frozen=True)
class Order:
    """What all ranks do at one snapshot.

    Args:
        copies: it goes to the buddies.
        has_buddy: there are several nodes, each with a buddy.
        durable: an earlier one of this start outlives any one node.
        protected: earlier ones whose images are not filled anew.
        newest: the newest one that is whole on all ranks: not filled anew either, unless all others are protected. Then one
            that is being copied is there, and that one is whole as well.
        ring: all keepers, each the buddy of the one before; None: as it was.
    """

    snapshot: str
    copies: bool
    has_buddy: bool
    durable: bool
    protected: tuple[str, ...]
    newest: str | None
    ring: tuple[Address, ...] | None


@dataclass(frozen=True)
class _State:
    """How far one snapshot of one rank is."""

    snapshot: str
    is_whole: bool
    is_copied: bool
    is_uncopied: bool


@dataclass
class _Kept:
    snapshot: str
    step: int
    arena: Arena
    is_whole: bool = False
    is_copied: bool = False
    is_uncopied: bool = False  # the buddy could not be reached
    copies: bool = False  # the buddy is to get it
    has_buddy: bool = False

    @property
    def is_safe(self) -> bool:
        return self.is_whole and (self.is_copied or not self.has_buddy)

    @property
    def is_under_way(self) -> bool:
        return not self.is_whole or (self.copies and not self.is_copied and not self.is_uncopied)


class Snapshots:
    """Of one generation; takes what is staged, see :class:`~elastictrain.checkpoint.staging.Taker`.

    Args:
        is_over: the generation has ended, and nothing is worth waiting for.

    Attributes:
        num_taken: snapshots that were given to this node's keeper.
        num_failed: those that were not taken, on this rank.
        num_uncopied: those that this node's buddy did not get.
        num_behind: those that were not copied because an earlier one still was; rank 0 knows.
        blocked: seconds that training stood still for the last one.
    """

    def __init__(
        self,
        link: KeeperLink,
        ranks: Ranks,
        identity: Identity,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link, self._ranks, self._identity = link, ranks, identity
        self.is_over = is_over
        self._kept: list[_Kept] = []  # oldest first
        self._given: set[int] = set()  # numbers of arenas that the keeper has
        self._issued: list[str] = []  # rank 0: snapshots in order, those that anybody may still hold
        self._copying: str | None = None  # rank 0
        self._ring: tuple[Address, ...] = ()  # rank 0
        self._buddy: Mapping[str, Any] | None = None  # that this node's keeper is still to be told
        self._marks = 0
        self._told: set[str] = set()
        self._started = 0.0
        self.num_taken = self.num_failed = self.num_uncopied = self.num_behind = 0
        self.blocked = 0.0

    def reached(self, point: str) -> None:
        """Called as a snapshot passes "room", "staged", "given"; a test's way to interrupt there."""

    def part(self) -> tuple[Address | None, list[_State]]:
        self._started = time.monotonic()
        self._hear()
        was_open = self._link.is_open
        if not self._link.open():
            self._miss(self._link.trouble)
        elif not was_open:
            self._meet_again()
        address = self._link.address if self._link.is_open else None
        return address, [_State(k.snapshot, k.is_whole, k.is_copied, k.is_uncopied) for k in self._kept]

    def decide(self, parts: list[tuple[Address | None, list[_State]]]) -> Order | None:
        ring: list[Address] = []
        for address, _ in parts:
            if address is None:
                return None
            if address not in ring:
                ring.append(address)
        is_new, self._ring = tuple(ring) != self._ring, tuple(ring)
        has_buddy = len(ring) > 1
        ranks = [{state.snapshot: state for state in states} for _, states in parts]
        held = set.union(*map(set, ranks))
        self._issued = [one for one in self._issued if one in held]

        def is_done(snapshot: str, *, copied: bool) -> bool:
            states = [states.get(snapshot) for states in ranks]
            return all(one is not None and (one.is_copied if copied else one.is_whole) for one in states)

        durable = next((one for one in reversed(self._issued) if is_done(one, copied=has_buddy)), None)
        newest = next((one for one in reversed(self._issued) if is_done(one, copied=False)), None)
        if self._copying is not None:
            states = [states.get(self._copying) for states in ranks]
            if all(one is None or one.is_copied or one.is_uncopied for one in states):
                self._copying = None
        copies = has_buddy and self._copying is None
        if has_buddy and not copies:
            self._fall_behind(durable)
        protected = tuple(one for one in (durable, self._copying) if one is not None)
        named = uuid.uuid4().hex
        order = Order(named, copies, has_buddy, durable is not None, protected, newest, self._ring if is_new else None)
        self._issued.append(order.snapshot)
        if copies:
            self._copying = order.snapshot
        return order

    def _fall_behind(self, durable: str | None) -> None:
        """On rank 0: this snapshot is not copied."""
        self.num_behind += 1
        at = next((one.step for one in self._kept if one.snapshot == durable), None)
        if self.num_behind >= MANY and at is not None:
            lost = self._kept[-1].step - at
            self._say_once(
                "behind",
                f"copies of snapshots take longer than the steps between two of them: if a node died now, {lost} steps would"
                " be lost, and a few more at other moments; --snapshot-wait has training wait for copies",
            )

    def make_room(self, decided: Order) -> None:
        if decided.ring is not None and self._link.address in decided.ring:  # each rank: its image must not come first
            ring = decided.ring
            buddy = ring[(ring.index(self._link.address) + 1) % len(ring)]
            where = {"host": buddy["host"], "port": buddy["port"]} if len(ring) > 1 else {"host": None}
            others = [{"host": one["host"], "port": one["port"]} for one in ring if one["host"] is not None]
            self._buddy = {"kind": "buddy", **where, "ring": others}
        if self._buddy is not None:
            self._link.try_to_send(self._buddy)
            if self._link.is_open:
                self._buddy = None
        if len(self._kept) >= MAX_OWN:
            free = [one for one in self._kept if one.snapshot not in decided.protected]
            victim = next((one for one in free if one.snapshot != decided.newest), free[0])
            self._kept.remove(victim)
            self._link.try_to_send({"kind": "drop", "id": victim.snapshot, "rank": self._ranks.rank})
        self.reached("room")

    def take(self, decided: Order, staged: Staged) -> None:
        arena, identity = staged.arena, self._identity
        is_main = self._ranks.rank == 0
        about = About(
            decided.snapshot,
            staged.content.step,
            identity.start,
            identity.run,
            identity.job,
            self._ranks.rank,
            self._ranks.world_size,
            arena.image.num_bytes,
            staged.content.about if is_main else {},
        )
        self._marks += 1
        said = {"kind": "snapshot", "about": about.to_json(), "image": arena.number, "mark": self._marks}
        try:
            self.reached("staged")
            self._give(arena)
            arena.mark = self._marks
            whole = {"whole": decided.durable, "base": identity.base, "copies": decided.copies}
            self._link.send({**said, **whole, "values": dict(staged.values)})
            kept = _Kept(decided.snapshot, staged.content.step, arena)
            kept.copies, kept.has_buddy = decided.copies, decided.has_buddy
            self._kept.append(kept)
            self.num_taken += 1
            self._told.discard("keeper")
            self.reached("given")
        except Exception as error:
            self.failed(decided, staged.content, error)
        self.blocked = time.monotonic() - self._started

    def failed(self, decided: Order, content: Content, error: Exception) -> None:
        self._miss(f"{type(error).__name__}: {error}")

    def settle(self, *, seconds: float) -> bool:
        """Wait so long until nothing is under way, or the generation is over.

        Returns:
            whether this rank's newest image is whole, and where there are several nodes, on another one too.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._hear()
            is_late = not self._link.is_open or time.monotonic() > deadline or self.is_over()
            if is_late or not any(one.is_under_way for one in self._kept):
                return bool(self._kept) and self._kept[-1].is_safe
            self._link.wait(LOOK_SECONDS)

    def holds(self, arena: Arena) -> bool:
        return any(one.arena is arena for one in self._kept)

    def forget(self, arena: Arena) -> None:
        if arena.number in self._given:
            self._given.remove(arena.number)
            self._link.try_to_send({"kind": "forget", "image": arena.number})

    def close(self) -> None:
        """The keeper goes on holding what it has."""
        self._link.close()

    def left_out(self) -> None:
        """This one was not taken on any rank, because some rank has no keeper."""
        if self._link.is_open:
            self._miss("another node's keeper is not there")

    def _give(self, arena: Arena) -> None:
        """The memory itself, once."""
        if arena.number not in self._given:
            image = {"image": arena.number, "num_bytes": arena.image.num_bytes}
            tensors = tensors_json(arena.image.pieces)
            self._link.send({"kind": "image", **image, "tensors": tensors}, descriptor=arena.descriptor)
            self._given.add(arena.number)

    def _hear(self) -> None:
        for said in self._link.hear():
            kept = next((one for one in self._kept if one.snapshot == said.get("id")), None)
            if said.get("is") == "uncopied":
                self.num_uncopied += 1
                self._say_once("copy", f"snapshots are not copied: {said.get('text')}; each later one is tried again")
            elif said.get("is") == "copied":
                self._told.discard("copy")
            if kept is not None:
                self._note(kept, said)

    def _meet_again(self) -> None:
        """The link was lost, and is there again: a keeper that has lived on still holds snapshots, a new one does not.

        Until that is known, no memory that it may hold is filled anew.
        """
        self._given.clear()
        if not self._kept:
            return
        self._link.try_to_send({"kind": "list"})
        listed = self._link.answer().get("held", [])
        if self._link.is_open:
            own = [one["about"] for one in listed if not one["is_copy"]]
            whole = {one["snapshot"] for one in own if one["rank"] == self._ranks.rank}
            self._kept = [one for one in self._kept if one.snapshot in whole]
        for one in self._kept:  # what it would have said of them is lost
            one.is_whole, one.is_uncopied = True, not one.is_copied

    @staticmethod
    def _note(kept: _Kept, said: Mapping[str, Any]) -> None:
        if said["is"] == "whole":
            kept.is_whole = True
        elif said["is"] == "copied":
            kept.is_copied = True
        elif said["is"] == "uncopied":
            kept.is_uncopied = True

    def _miss(self, why: str) -> None:
        self.num_failed += 1
        self._say_once("keeper", f"no snapshot was taken: {why}; training goes on, and it is tried again")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("rank %d: %s", self._ranks.rank, text)
