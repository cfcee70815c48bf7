"""What keepers say that they hold, put together: which snapshots can be restored, and from whom. Imports no torch.

On failure: a list that cannot be true is a :class:`~elastictrain.channel.ChannelError`. A keeper that is asked from afar and
does not answer is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastictrain.channel import ChannelError
from elastictrain.checkpoint.copies import connect
from elastictrain.checkpoint.held import MAX_MANIFEST_BYTES, About, count, text

Address = Mapping[str, Any]

AFAR_SECONDS = 2.0  # to reach a keeper of a node that is not in this generation: its machine may be gone
ANSWER_SECONDS = 10.0  # for one that is there to answer: it may alone hold something
MAX_AFAR = 64  # of them that are asked, at once
MAX_PEERS = 1 << 16


@dataclass(frozen=True)
class Holder:
    """One keeper that has an image: its index, and the manifest's size and SHA-256."""

    keeper: int
    manifest_bytes: int
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """One that can be restored; ``holders`` are by rank, the best first."""

    about: About  # rank 0's
    holders: tuple[tuple[Holder, ...], ...]

    @property
    def step(self) -> int:
        return self.about.step

    @property
    def label(self) -> str:
        return f"the snapshot of step {self.step} in memory"


class Lists:
    """Of as many keepers as have been added.

    Attributes:
        keepers: their addresses, in order; each once.
    """

    def __init__(self) -> None:
        self.keepers: list[Address] = []
        self._images: dict[str, dict[int, list[tuple[bool, Holder, About]]]] = {}

    @property
    def newest(self) -> int:
        """The step of the newest image, whether or not all of its snapshot is there; -1: there is none."""
        return max((held[0][2].step for one in self._images.values() for held in one.values()), default=-1)

    def add(self, address: Address, listed: Iterable[Mapping[str, Any]] = ()) -> None:
        if address not in self.keepers:
            self.keepers.append(address)
        for one in listed:
            about = About.from_json(one.get("about"))
            manifest = one.get("manifest")
            if not isinstance(manifest, dict) or not re.fullmatch("[0-9a-f]{64}", str(manifest.get("sha256"))):
                raise ChannelError("a keeper lists an image without its manifest")
            size = count(manifest, "bytes", below=MAX_MANIFEST_BYTES)
            holder = Holder(self.keepers.index(address), size, manifest["sha256"])
            self._images.setdefault(about.snapshot, {}).setdefault(about.rank, []).append(
                (one.get("is_copy") is True, holder, about)
            )

    def whole(self) -> list[Snapshot]:
        """Those of which every rank's image is somewhere."""
        found = []
        for by_rank in self._images.values():
            first = next(iter(by_rank.values()))[0][2]
            is_one = all(
                (about.step, about.start, about.run, about.world_size)
                == (first.step, first.start, first.run, first.world_size)
                for held in by_rank.values()
                for _, _, about in held
            )
            if is_one and by_rank.keys() == set(range(first.world_size)):
                ordered = [sorted(by_rank[rank], key=lambda one: one[0]) for rank in range(first.world_size)]
                found.append(Snapshot(ordered[0][0][2], tuple(tuple(one for _, one, _ in held) for held in ordered)))
        return found


def is_replaced(
    held: Iterable[Mapping[str, Any]], others: Iterable[tuple[Address, Iterable[Mapping[str, Any]]]]
) -> bool:
    """Is what one keeper holds of no use any more?

    Args:
        held: what it lists.
        others: the other keepers that answer, and what they list.

    Returns:
        whether these hold a snapshot that is as new, each image twice where there are several of them: then the death of
        one of their nodes costs them nothing either.
    """
    mine = [About.from_json(one.get("about")) for one in held]
    if not mine:
        return True
    lists = Lists()
    for address, listed in others:
        lists.add(address, listed)
    runs, newest = {one.run for one in mine}, max((one.start, one.step) for one in mine)
    least = min(2, len(lists.keepers))
    return any(
        runs <= {one.about.run}
        and (one.about.start, one.about.step) >= newest
        and all(len({holder.keeper for holder in holders}) >= least for holders in one.holders)
        for one in lists.whole()
    )


def peers_of(said: object) -> list[tuple[str, int]]:
    """Where other keepers are, as one of them says.

    Raises:
        ChannelError: that cannot be.
    """
    if not isinstance(said, list) or len(said) > MAX_PEERS or not all(isinstance(one, dict) for one in said):
        raise ChannelError("a list of peers that is none")
    return [(text(one, "host"), count(one, "port", below=65536)) for one in said]


def ask_afar(peers: Sequence[tuple[str, int]], key: bytes) -> list[tuple[Address, list[dict[str, Any]]]]:
    """What the keepers there hold, of those that answer soon."""

    def ask(peer: tuple[str, int]) -> tuple[Address, list[dict[str, Any]]] | None:
        try:
            channel = connect(*peer, key, seconds=AFAR_SECONDS, answer_seconds=ANSWER_SECONDS)
            try:
                channel.send({"kind": "list"}, seconds=ANSWER_SECONDS)
                held: list[dict[str, Any]] = channel.receive(seconds=ANSWER_SECONDS).head["held"]
            finally:
                channel.close()
        except (OSError, KeyError):
            return None
        return {"socket": None, "host": peer[0], "port": peer[1]}, held

    asked = peers[:MAX_AFAR]
    if not asked:
        return []
    with ThreadPoolExecutor(len(asked)) as pool:
        return [answer for answer in pool.map(ask, asked) if answer is not None]
