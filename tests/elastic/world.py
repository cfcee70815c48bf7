"""A world with a virtual clock for :class:`elastictrain.elastic.protocol.Peer`: network, storage, faults, and their rules.

``World(seed).run()`` breaks nodes, links and storage at random and checks every invariant at every event; the same seed does
the same again. ``python -m tests.elastic.many_worlds FIRST LAST`` runs many.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elastictrain.elastic.actions import (
    Action,
    Close,
    Connect,
    Create,
    Dismissed,
    Formed,
    Gone,
    KeptOut,
    Left,
    Promise,
    Read,
    Release,
    Resized,
    Send,
    Trim,
)
from elastictrain.elastic.chain import Entry, Generation, Member, Size
from elastictrain.elastic.protocol import Peer
from elastictrain.elastic.timing import Timing
from tests.elastic.virtual_storage import Storage

TIMING = Timing(
    min_nodes=2, max_nodes=4, ttl=1.0, beat=0.25, isolation=1.5, form=0.5, return_delay=0.7, max_return_delay=2.5
)
OTHER_SIZES = [(1, 2), (2, 6), (3, 3)]  # what some commands say that join a run: it has its own
NONE = Generation()
LOST = object()  # in a pipe: the other side has closed


@dataclass
class Pipe:
    """One direction of a link; what is in it comes out in order, once the way is free."""

    to: Node
    link: int
    sender: Node
    queue: deque[Any] = field(default_factory=deque)
    is_moving: bool = False


@dataclass
class Node:
    """One life of one node, and the worker that it pretends to have."""

    peer: Peer
    timing: Timing
    is_alive: bool = True
    is_dark: bool = False  # died without its kernel closing anything
    frozen_until: float = 0.0
    held: list[Callable[[], None]] = field(default_factory=list)
    pipes: dict[int, Pipe] = field(default_factory=dict)  # own link → where it leads
    num_accepted: int = 0
    wake_at: float = float("inf")
    is_leaving: bool = False
    has_left: bool = False
    comes_back: bool = False  # an earlier node of its host was lost
    ending: float = 0.0  # seconds that its workers take to save at a step where all stop
    size: Size | None = None  # told by a leader
    gone: set[str] = field(default_factory=set)  # what it was told of nodes that were members no more
    kept_out: list[tuple[int, float]] = field(default_factory=list)  # what it was told of that: times, seconds
    current: Generation = NONE  # in which the worker trains
    coming: Generation | None = None  # agreed on, behind a boundary
    asked: Promise | None = None  # to promise; at its next boundary the worker answers
    limit: int | None = None  # promised
    pace: float = 0.1  # seconds for its shortest step
    before: tuple[int, int, int] = (0, 0, 0)

    @property
    def name(self) -> str:
        return self.peer.me.node


class World:
    """Nodes, links, storage.

    Args:
        make: builds a peer; a negative control hands in a broken one.
    """

    def __init__(
        self, seed: int, *, num_nodes: int = 5, num_faults: int = 14, timing: Timing = TIMING,
        make: Callable[..., Peer] = Peer,
    ) -> None:  # fmt: skip
        self.chance = random.Random(seed)
        self.timing, self.make, self.num_faults = timing, make, num_faults
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.nodes: dict[str, Node] = {}
        self.storage = Storage(self)
        self.generations: dict[int, Generation] = {}
        self.sides: dict[str, int] = {}  # a partition
        self.cut: set[frozenset[str]] = set()  # single ways that are cut
        self.num_fenced = 0
        self._agreed_since = float("inf")
        for _ in range(num_nodes):
            self.spawn()
        moment = 2.0 if num_faults else float("inf")
        for _ in range(num_faults):
            moment += self.chance.choice([0.0, 0.01, 0.1, 0.5, 1.5])
            self.at(moment, self.fault)
        self._quiet_from = moment + 1.0
        if num_faults:
            self.at(self._quiet_from, self.heal)
        self.end = self._quiet_from + 30.0

    @property
    def log(self) -> list[Entry]:
        return self.storage.log

    @property
    def size(self) -> Size:
        """The run's, by the log."""
        return self.log[-1].size or self.timing.size

    @property
    def leader(self) -> Node:
        """Who leads by the log."""
        claimed = self.log[-1].leader
        assert claimed is not None
        return self.nodes[claimed.node]

    # ---- time --------------------------------------------------------------------------------------------------------

    def at(self, moment: float, do: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (moment, self._order, do, arguments))

    def run(self) -> World:
        """To the end: everybody alive agrees for a while; or ``AssertionError``, with what does not hold."""
        while self._heap and self.now < self.end:
            self.now, _, do, arguments = heapq.heappop(self._heap)
            do(*arguments)
            self.num_events += 1
            if self.now > self._quiet_from and self._is_settled():
                return self
        raise AssertionError(f"no progress {self.end - self._quiet_from:g} s after the last fault: {self._describe()}")

    def until(self, is_met: Callable[[], bool], *, seconds: float = 30.0) -> float:
        """Go on until something is so; how long that took.

        Raises:
            AssertionError: it never was.
        """
        start, limit = self.now, self.now + seconds
        while not is_met():
            assert self._heap and self._heap[0][0] <= limit, f"not within {seconds:g} s: {self._describe()}"
            self.now, _, do, arguments = heapq.heappop(self._heap)
            do(*arguments)
        return self.now - start

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        self.at(end, lambda: None)
        self.until(lambda: self.now >= end, seconds=seconds)

    def _is_settled(self) -> bool:
        if not self.agree():
            self._agreed_since = float("inf")
        self._agreed_since = min(self._agreed_since, self.now)
        return self.now - self._agreed_since > 2.0

    def agree(self) -> bool:
        living = [node for node in self.nodes.values() if node.is_alive and not node.has_left and not node.is_leaving]
        most = min(self.size.max_nodes, len(living))
        num_wanted = most - most % self.timing.fit.unit
        leading = [node.peer.leading.leader.size for node in living if node.peer.leading is not None]
        # Where all of a run's nodes have gone, the size of those who begin anew is their leader's own.
        least = max(size.min_nodes for size in [self.size, *leading])
        if not living or num_wanted < least:
            return True
        newest = self.log[-1].generation
        members = {member.node for member in newest.members}
        names = {node.name for node in living}
        return (
            all(node.peer.generation.number == newest.number for node in living)
            and members <= names
            and len(members) == num_wanted
            and all(node.peer.following.size == self.size for node in living)
            and all(node.limit is None for node in living)
            and all(not node.is_leaving or node.has_left for node in self.nodes.values() if node.is_alive)
        )

    def _describe(self) -> str:
        rows = [
            f"{node.name} {node.peer.state.name} left={node.has_left} leads={node.peer.leading is not None}"
            f" generation={node.peer.generation.number} limit={node.limit}"
            for node in self.nodes.values()
            if node.is_alive
        ]
        return f"{self.log[-1]}\n" + "\n".join(rows)

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def spawn(self, *, host: str = "", timing: Timing | None = None) -> Node:
        """A new node; on the host of one that was lost, if that is given."""
        name, timing = f"n{len(self.nodes)}", timing or self.timing
        me = Member(name, host or f"host of {name}", 1, workers=1)
        peer = self.make(me, timing, chance=random.Random(self.chance.random()))
        node = Node(peer, timing)
        self.nodes[name] = node
        self.at(self.now + self.chance.random() * 0.1, self.tell, node, peer.on_start)
        self.at(self.now + self.chance.choice([0.0, 0.2, 1.5]), self.tell, node, peer.on_ready)
        self.at(self.now + 0.2, self._train, node)
        return node

    def tell(self, node: Node, how: Callable[..., list[Action]], *arguments: Any, **named: Any) -> None:
        """Let a node see an event; a stopped one sees it when it runs again."""
        if not node.is_alive:
            return
        if node.frozen_until > self.now:
            node.held.append(lambda: self.tell(node, how, *arguments, **named))
            if len(node.held) == 1:
                self.at(node.frozen_until, self._thaw, node)
            return
        was_leading = node.peer.leading
        actions = how(*arguments, now=self.now, **named)
        self.num_fenced += was_leading is not None and node.peer.leading is None
        for action in actions:
            self._do(node, action)
        self._check(node)
        self._set_timer(node)

    def _thaw(self, node: Node) -> None:
        if node.frozen_until > self.now:
            self.at(node.frozen_until, self._thaw, node)
            return
        held, node.held = node.held, []
        for one in held:
            one()

    def _set_timer(self, node: Node) -> None:
        due = max(node.peer.deadline, self.now + 0.001)
        if due < node.wake_at - 1e-9 and node.is_alive:
            node.wake_at = due
            self.at(due, self._wake, node, due)

    def _wake(self, node: Node, due: float) -> None:
        if due == node.wake_at:
            node.wake_at = float("inf")
            if node.frozen_until > self.now or node.peer.deadline <= self.now + 1e-9:
                self.tell(node, node.peer.on_tick)
            else:
                self._set_timer(node)

    def _train(self, node: Node) -> None:
        """A step, if there is a generation to train in and it may begin."""
        if not node.is_alive or node.has_left:
            return
        self.at(self.now + node.pace * (1 + 2 * self.chance.random()), self._train, node)
        if node.frozen_until > self.now or node.current.rank_of(node.name) is None:
            return
        if node.coming is not None:
            if node.peer.step >= node.coming.boundary:
                node.current, node.coming = node.coming, None
            else:
                node.peer.step += 1
            return
        asked, node.asked = node.asked, None
        if asked is not None and asked.number == node.current.number:
            is_kept = node.peer.step < asked.boundary
            node.limit = asked.boundary if is_kept else None
            self.tell(node, node.peer.on_promise, asked, is_kept, node.peer.step)
        if self._may_step(node):
            node.peer.step += 1

    def _may_step(self, node: Node) -> bool:
        return not node.current.is_paused and (node.limit is None or node.peer.step < node.limit)

    # ---- what a node asks for ----------------------------------------------------------------------------------------

    def _do(self, node: Node, action: Action) -> None:
        match action:
            case Read():
                self.storage.ask_newest(node)
            case Create(entry):
                self.storage.ask_create(node, entry)
            case Connect(link, to):
                self.at(self.now + self._hop(), self._connect, node, link, to.node)
            case Send(links, message):
                for link in links:
                    self._push(node, link, message)
            case Close(links):
                for link in links:
                    self._push(node, link, LOST)
                    node.pipes.pop(link, None)
            case Formed(generation):
                node.asked = node.limit = None
                self._formed(node, generation)
            case Promise():
                node.asked = action
            case Release():
                node.asked = node.limit = None
            case Resized(size):
                node.size = size
            case KeptOut(times, seconds):
                node.kept_out.append((times, seconds))
            case Gone(names):
                node.gone = set(names)
            case Dismissed():
                node.is_leaving = True
            case Left():
                node.has_left = True
                self.at(self.now + 0.05 + node.ending, self.crash, node)
            case Trim():
                pass

    def _formed(self, node: Node, generation: Generation) -> None:
        known = self.generations.setdefault(generation.number, generation)
        assert known == generation, f"two generations of one number: {known} and {generation}"
        trains = node.current.number > 0 and node.current.rank_of(node.name) is not None
        if generation.boundary >= 0 and node.current.number == generation.number - 1 and trains:
            assert node.peer.step <= generation.boundary, f"{node.name} went past {generation.boundary}"
            node.coming = generation
        else:
            if generation.boundary >= 0 and not trains:  # it comes in, and takes over the others' state
                node.peer.step = max(node.peer.step, generation.boundary)
            node.current, node.coming = generation, None

    def _check(self, node: Node) -> None:
        peer = node.peer
        after = (peer.entry.index, peer.generation.number, peer.entry.epoch)
        assert all(old <= new for old, new in zip(node.before, after, strict=True)), f"{node.name} went back"
        node.before = after

    # ---- network -----------------------------------------------------------------------------------------------------

    def _hop(self) -> float:
        return 0.001 + self.chance.random() * 0.01

    def _is_cut(self, one: Node, other: Node) -> bool:
        if one is other:
            return False
        if self.sides.get(one.name, 0) != self.sides.get(other.name, 0):
            return True
        return frozenset((one.name, other.name)) in self.cut

    def _connect(self, node: Node, link: int, name: str) -> None:
        other = self.nodes[name]
        if self._is_cut(node, other) or other.is_dark or (other.is_alive and other.frozen_until > self.now):
            return  # nothing answers
        if not other.is_alive:
            self.tell(node, node.peer.on_link_lost, link, was_refused=True)
            return
        if not node.is_alive:
            return
        other.num_accepted += 1
        theirs = other.num_accepted
        node.pipes[link] = Pipe(other, theirs, node)
        other.pipes[theirs] = Pipe(node, link, other)
        self.tell(node, node.peer.on_link, link)

    def _push(self, node: Node, link: int, what: Any) -> None:
        pipe = node.pipes.get(link)
        if pipe is not None:
            pipe.queue.append(what)
            self._move(pipe)

    def _move(self, pipe: Pipe) -> None:
        if not pipe.is_moving and pipe.queue and not self._is_cut(pipe.sender, pipe.to):
            pipe.is_moving = True
            self.at(self.now + self._hop(), self._arrive, pipe)

    def _arrive(self, pipe: Pipe) -> None:
        pipe.is_moving = False
        if self._is_cut(pipe.sender, pipe.to):
            return
        what = pipe.queue.popleft()
        node = pipe.to
        if pipe.link in node.pipes or what is LOST:
            if what is not LOST:
                self.tell(node, node.peer.on_message, pipe.link, what)
            elif node.pipes.pop(pipe.link, None) is not None:
                self.tell(node, node.peer.on_link_lost, pipe.link)
        self._move(pipe)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        living = [node for node in self.nodes.values() if node.is_alive and not node.has_left]
        leaders = [node for node in living if node.peer.leading is not None]
        kind = self.chance.choice(
            ["crash", "crash", "dark", "freeze", "freeze", "part", "cut", "heal", "leave", "spawn", "spawn", "fail",
             "drain", "restart", "restart", "restart", "scale", "scale", "storage", "storage", "suspect"]
        )  # fmt: skip
        among = leaders if leaders and self.chance.random() < 0.5 else living
        if not among:
            return
        node = self.chance.choice(among)
        again = [one for one in living if one.comes_back]
        if kind == "restart" and again:
            node = self.chance.choice(again)  # the same host again and again
        can_lose = len([one for one in living if not one.is_leaving]) > self.size.min_nodes + 1
        if kind in ("crash", "dark", "restart") and can_lose:
            node.is_dark = kind == "dark"
            self.crash(node)
            if kind == "restart":
                self.spawn(host=node.peer.me.host).comes_back = True
        elif kind == "freeze":
            node.frozen_until = max(node.frozen_until, self.now + self.chance.choice([0.3, 1.3, 4.0]))
        elif kind == "part":
            self.sides = {name: self.chance.randint(0, 1) for name in self.nodes}
        elif kind == "cut":
            self.cut.add(frozenset((node.name, self.chance.choice(living).name)))
        elif kind == "heal":
            self._join_ways()
        elif kind == "leave" and can_lose:
            node.is_leaving = True
            self.tell(node, node.peer.on_leave)
        elif kind == "drain" and can_lose and leaders:
            self.control(self.chance.choice(leaders), {"do": "drain", "node": node.name})
        elif kind == "spawn" and len(living) < 8:
            least, most = self.chance.choice([*OTHER_SIZES, (self.timing.min_nodes, self.timing.max_nodes)])
            self.spawn(timing=replace(self.timing, min_nodes=least, max_nodes=most))
        elif kind == "scale" and leaders:
            least = self.chance.randint(0, 3)
            self.control(
                self.chance.choice(leaders), {"do": "scale", "min": least, "max": self.chance.randint(max(least, 1), 6)}
            )
        elif kind == "fail":
            self.tell(node, node.peer.on_failed_workers, node.peer.generation.number)
        elif kind == "suspect":
            self.tell(node, node.peer.on_suspect)
        elif kind == "storage":
            self.storage.mood = self.chance.choice(["fast", "slow", "lossy", "down"])

    def control(self, leader: Node, wish: dict[str, Any]) -> None:
        """Somebody with the token asks for something, over a connection of their own."""
        leader.num_accepted += 1
        message = {"is": "control", "epoch": leader.peer.entry.epoch, **wish}
        self.tell(leader, leader.peer.on_message, leader.num_accepted, message)

    def crash(self, node: Node) -> None:
        if not node.is_alive:
            return
        node.is_alive = False
        if not node.is_dark:
            for link in list(node.pipes):
                self._push(node, link, LOST)

    def heal(self) -> None:
        self.storage.mood = "fast"
        self._join_ways()

    def _join_ways(self) -> None:
        self.sides, self.cut = {}, set()
        for node in self.nodes.values():
            for pipe in node.pipes.values():
                self._move(pipe)
