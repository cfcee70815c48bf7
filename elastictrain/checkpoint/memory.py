"""Snapshots in the memory of the nodes' keepers, found and read by a start, in any layout.

:class:`Memory` is this rank's way to all keepers. Ranks meet once (:meth:`Memory.meet`) and tell each other what the keeper
of each node holds; a snapshot of which every rank's image is somewhere, in whatever keeper, can be restored. Where only
parts are there, the keepers of nodes that took part before and do not now are asked as well: such a node may stand by, or
its agent alone may have died. Each rank then reads the ranges that it needs, through shared memory from its own node's
keeper, through the network from others, and compares every block with its hash; if one keeper's image is not good, another
one's of the same bytes is taken.

On failure: an image that is damaged, or that no keeper gives any more, is a
:class:`~elastictrain.checkpoint.manifest.DamagedError`, and no target has changed. A keeper that cannot be had is said.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastictrain.channel import Channel, ChannelError, GoneError
from elastictrain.checkpoint.copies import PART_SECONDS, connect, receive_parts, receive_parts_into
from elastictrain.checkpoint.found import Address, Holder, Lists, Snapshot, ask_afar, peers_of
from elastictrain.checkpoint.held import About
from elastictrain.checkpoint.keeper_link import KeeperLink
from elastictrain.checkpoint.keeper_process import connect_local
from elastictrain.checkpoint.manifest import DamagedError, Manifest, shard_name
from elastictrain.checkpoint.marked import Marked
from elastictrain.checkpoint.ranges import PART_BYTES, STEP_BYTES, Ranges
from elastictrain.checkpoint.ranks import Ranks, RoundFailed
from elastictrain.checkpoint.reader import CheckpointReader
from elastictrain.checkpoint.snapshots import Identity, Snapshots
from elastictrain.checkpoint.threads import in_threads

START_SECONDS = 20.0  # for the agent to start a keeper
MEET_SECONDS = 30.0  # for a keeper to answer a start; nothing trains meanwhile, and all progress may depend on it
CONNECT_SECONDS = 5.0
BUSY_SECONDS = 20.0  # for a keeper that has too many connections


_Part = tuple[Address | None, list[dict[str, Any]], list[tuple[str, int]]]  # a rank's keeper, what it holds, its peers


@dataclass(frozen=True)
class _Meeting:
    keepers: tuple[Address, ...]
    here: int | None  # the index of this node's
    snapshots: tuple[Snapshot, ...]


class Memory:
    """Of one start, on one rank.

    Args:
        first: this is the rank that speaks for its node.
        ask: has the agent start a keeper.
        find: where it is, waiting so many seconds for it.

    Attributes:
        link: to this node's keeper, whether or not it is open; on all ranks, or, before they have met, on none.
        num_keepers: of all nodes together, once met.
        missing: nodes without one.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        first: bool,
        ask: Callable[[bytes], bool],
        find: Callable[[float], Address | None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks, self._first, self._ask, self._find, self._is_over = ranks, first, ask, find, is_over
        self._meeting = _Meeting((), None, ())
        self._channels: dict[int, Channel] = {}
        self._out_of_reach: dict[int, str] = {}  # keepers, and why
        self._damaged: set[str] = set()  # snapshots, as this rank has seen
        self.link: KeeperLink | None = None
        self.missing = 0

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def num_keepers(self) -> int:
        return len(self._meeting.keepers)

    def meet(
        self, key: Callable[[], bytes], fits: Callable[[list[About]], list[bool]], *, newer_than: int | None = None
    ) -> list[Snapshot]:
        """Find all keepers, and what they hold. Collective.

        Args:
            key: by which this run's processes know each other.
            fits: on rank 0: which of these snapshots are this run's past.
            newer_than: the step that storage has.

        Returns:
            What can be restored, the newest first; the same on all ranks.

        Raises:
            RoundFailed: on every rank: some rank has no key.
        """

        link: KeeperLink | None = None

        def look() -> _Part:
            nonlocal link
            secret = key()
            is_there = not self._first or self._ask(secret)
            link = KeeperLink(lambda: self._find(0.0), secret)
            if is_there:
                self._find(START_SECONDS)
            answer: dict[str, Any] = {}
            if link.open(seconds=MEET_SECONDS) and self._first:
                link.try_to_send({"kind": "list"})
                answer = link.answer(seconds=MEET_SECONDS)
            address = link.address if link.is_open else None
            return address, answer.get("held", []), peers_of(answer.get("peers", []))

        def conclude(parts: list[_Part]) -> list[tuple[_Meeting, int]]:
            """On rank 0: the keepers in the order of ranks, and the snapshots of which everything is there."""
            assert link is not None
            lists = Lists()
            for address, listed, _ in parts:
                if address is not None:
                    lists.add(address, listed)
            found, stored = past(lists), -1 if newer_than is None else newer_than
            if lists.newest > stored and not any(one.step > stored for one in found):  # part of something is here
                here = {(one["host"], one["port"]) for one in lists.keepers}
                gone = dict.fromkeys(peer for *_, peers in parts for peer in peers if peer not in here)
                answers = ask_afar(list(gone), link.key)
                for afar, listed in answers:
                    lists.add(afar, listed)
                found = past(lists) if answers else found
            return _meetings(parts, lists, found)

        def past(lists: Lists) -> list[Snapshot]:
            whole = lists.whole()
            return [one for one, is_past in zip(whole, fits([one.about for one in whole]), strict=True) if is_past]

        try:
            self._meeting, self.missing = self._ranks.round(look, conclude)
        except RoundFailed:  # on every rank: then no rank has a link, whichever of them it was that failed
            if link is not None:
                link.close()
            raise
        self.link = link
        return list(self._meeting.snapshots)

    def open(self, snapshot: Snapshot) -> SnapshotReader:
        """
        Raises:
            DamagedError: its manifests are not what they were, or cannot be had.
        """
        self._out_of_reach.clear()
        return SnapshotReader(self, snapshot)

    def taker(self, identity: Identity) -> Snapshots:
        """What takes this start's own snapshots."""
        assert self.link is not None
        return Snapshots(self.link, self._ranks, identity, is_over=self._is_over)

    def damaged(self, snapshot: Snapshot) -> None:
        """This rank has read all images of one rank, and each of them differs from its hash."""
        self._damaged.add(snapshot.about.snapshot)

    def reject(self, snapshot: Snapshot) -> None:
        """It could not be restored: if it is damaged, nobody shall find it again. Collective."""
        is_damaged = self._ranks.round(
            lambda: snapshot.about.snapshot in self._damaged, lambda parts: [any(parts)] * len(parts)
        )
        if is_damaged and self._first and self.link is not None:
            self.link.open()
            self.link.try_to_send({"kind": "reject", "id": snapshot.about.snapshot})

    def hang_up(self) -> None:
        """Reading is over; the link to this node's keeper stays."""
        for keeper in list(self._channels):
            self._close(keeper)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def is_here(self, holder: Holder) -> bool:
        return holder.keeper == self._meeting.here

    def ordered(self, holders: Sequence[Holder]) -> list[Holder]:
        """This node's first."""
        return sorted(holders, key=lambda one: not self.is_here(one))

    def request(self, holder: Holder, head: Mapping[str, Any]) -> tuple[Channel, dict[str, Any], int | None]:
        """Ask the keeper; its answer, and the descriptor that came with it.

        At most one connection to another node is open, so that many ranks are not too many for a keeper.

        Raises:
            OSError: it does not answer, or no longer has the image.
        """
        if holder.keeper not in self._channels:
            for keeper in [one for one in self._channels if one != self._meeting.here]:
                self._close(keeper)
            linked = self.link.channel if self.link is not None and self.is_here(holder) else None
            self._channels[holder.keeper] = linked or self._connect(holder)
        channel = self._channels[holder.keeper]
        try:
            channel.send(head, seconds=PART_SECONDS)
            message = channel.receive(seconds=PART_SECONDS)
        except OSError:
            self.drop(holder)
            raise
        if message.head.get("is") != "there":
            raise ChannelError("the keeper no longer has it")
        return channel, message.head, message.descriptor

    def _connect(self, holder: Holder) -> Channel:
        """To a keeper that is there, even if others take all of its connections for a while."""
        assert self.link is not None
        if holder.keeper in self._out_of_reach:
            raise ChannelError(self._out_of_reach[holder.keeper])
        address, deadline = self._meeting.keepers[holder.keeper], time.monotonic() + BUSY_SECONDS
        while True:
            try:
                if self.is_here(holder):
                    return connect_local(address["socket"], self.link.key, seconds=CONNECT_SECONDS)
                return connect(address["host"], address["port"], self.link.key)
            except OSError as error:
                is_busy = isinstance(error, GoneError | ConnectionResetError | BrokenPipeError | BlockingIOError)
                if not is_busy or time.monotonic() > deadline:
                    self._out_of_reach[holder.keeper] = str(error)
                    raise
                time.sleep(random.uniform(0.05, 0.5))

    def drop(self, holder: Holder) -> None:
        """The connection is of no use any more."""
        if self.link is not None and self.link.channel is self._channels.get(holder.keeper):
            self.link.close()
        self._close(holder.keeper)

    def _close(self, keeper: int) -> None:
        channel = self._channels.pop(keeper, None)
        if channel is not None and (self.link is None or channel is not self.link.channel):
            channel.close()


def _meetings(parts: Sequence[_Part], lists: Lists, found: Sequence[Snapshot]) -> list[tuple[_Meeting, int]]:
    """What each rank is told: what there is, and how many ranks have no keeper."""
    keepers, missing = tuple(lists.keepers), sum(address is None for address, *_ in parts)
    ordered = tuple(sorted(found, key=lambda one: (one.step, one.about.start), reverse=True))
    return [
        (_Meeting(keepers, None if address is None else keepers.index(address), ordered), missing)
        for address, *_ in parts
    ]


class SnapshotReader(CheckpointReader):
    """A :class:`CheckpointReader` of a snapshot: the same checks, the same layouts.

    Raises:
        DamagedError: it cannot be read.
    """

    def __init__(self, memory: Memory, snapshot: Snapshot) -> None:
        self.url = snapshot.label
        count = len(snapshot.holders)
        order = [(memory.rank + i) % count for i in range(count)]  # ranks do not ask one keeper all at once
        by_rank = {rank: _manifest(memory, snapshot, rank, memory.ordered(snapshot.holders[rank])) for rank in order}
        manifests = [by_rank[rank][0] for rank in range(count)]
        notes = by_rank[0][1]
        self._hold(manifests, _MemoryRanges(memory, snapshot, manifests), step=snapshot.step, about=notes)

    @property
    def name(self) -> str:
        return self.url


def _manifest(
    memory: Memory, snapshot: Snapshot, rank: int, holders: Sequence[Holder]
) -> tuple[Manifest, Mapping[str, Any]]:
    """And what that rank has noted."""
    head = {"kind": "read", "what": "manifest", "id": snapshot.about.snapshot, "rank": rank, "start": 0}
    trouble, is_damaged = "", True
    for holder in holders:
        try:
            channel, answer, _ = memory.request(holder, {**head, "end": holder.manifest_bytes})
            data = receive_parts(channel, holder.manifest_bytes)
            if hashlib.sha256(data).hexdigest() != holder.sha256:
                raise DamagedError("its manifest is not what it was")
            notes = answer.get("notes")
            if not isinstance(notes, dict):
                raise ChannelError("an image without notes")
            return Manifest.from_json(data, rank=rank, world_size=snapshot.about.world_size), notes
        except (OSError, DamagedError) as error:
            memory.drop(holder)
            trouble = str(error)
            is_damaged = is_damaged and isinstance(error, DamagedError)
    if is_damaged:
        memory.damaged(snapshot)
    raise DamagedError(f"{snapshot.label} cannot be read: rank {rank}'s image: {trouble}")


class _MemoryRanges(Ranges):
    """Ranges of images in keepers."""

    def __init__(self, memory: Memory, snapshot: Snapshot, manifests: Sequence[Manifest]) -> None:
        self._take_manifests(manifests)
        self._memory, self._snapshot = memory, snapshot
        self._ranks = {shard_name(one.rank, one.world_size): one.rank for one in manifests}
        self._maps: dict[int, Marked] = {}  # this node's images, by rank

    def _read_into(self, ranges: Sequence[tuple[str, int, int]], views: Sequence[memoryview]) -> None:
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for (file, start, end), view in zip(ranges, views, strict=True):
            size = max(PART_BYTES, self._manifests[file].blocks.block_bytes)
            by_file.setdefault(file, []).extend(
                (place, view[place - start : place - start + size]) for place in range(start, end, size)
            )
        for file, parts in by_file.items():
            self._read_file(file, parts)

    def _read_file(self, file: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        rank = self._ranks[file]
        trouble, is_damaged = "", True
        for holder in self._memory.ordered(self._snapshot.holders[rank]):
            try:
                if self._memory.is_here(holder):
                    self._read_here(file, rank, holder, parts)
                else:
                    self._read_there(file, rank, holder, parts)
                return
            except (OSError, DamagedError) as error:
                self._memory.drop(holder)
                trouble = str(error)
                is_damaged = is_damaged and isinstance(error, DamagedError)
        if is_damaged:
            self._memory.damaged(self._snapshot)
        raise DamagedError(f"rank {rank}'s image: {trouble}")

    def _read_here(self, file: str, rank: int, holder: Holder, parts: Sequence[tuple[int, memoryview]]) -> None:
        if rank not in self._maps:
            head = {"kind": "map", "id": self._snapshot.about.snapshot, "rank": rank}
            _, _, descriptor = self._memory.request(holder, head)
            if descriptor is None:
                raise ChannelError("the keeper gave no memory")
            self._maps[rank] = Marked(descriptor, self._manifests[file].num_bytes)
        image = self._maps[rank].view

        def read(part: tuple[int, memoryview]) -> None:
            start, view = part
            size = max(STEP_BYTES, self._manifests[file].blocks.block_bytes)
            for place in range(0, len(view), size):  # compared while it is still in the processor's cache
                step = view[place : place + size]
                step[:] = image[start + place : start + place + len(step)]
                self.check(file, start + place, step)
            self.progress.add(len(view))

        in_threads(read, parts, num_bytes=sum(len(view) for _, view in parts))

    def _read_there(self, file: str, rank: int, holder: Holder, parts: Sequence[tuple[int, memoryview]]) -> None:
        head = {"kind": "read", "what": "image", "id": self._snapshot.about.snapshot, "rank": rank}
        for start, view in parts:
            channel, _, _ = self._memory.request(holder, {**head, "start": start, "end": start + len(view)})
            receive_parts_into(channel, view, first=start)
            self.check(file, start, view)
            self.progress.add(len(view))
