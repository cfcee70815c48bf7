"""What the leader of a run decides, as it says it, and why, in words for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastictrain.elastic.chain import Entry, Generation, Member, Size


@dataclass(frozen=True)
class Commit:
    """Write this to the log; the leader is told by ``committed`` once it is there."""

    entry: Entry


@dataclass(frozen=True)
class Prepare:
    """Ask every member to promise not to pass a step."""

    boundary: int


@dataclass(frozen=True)
class Cancel:
    """Give the promises back."""


@dataclass(frozen=True)
class Reread:
    """Look at the log: somebody may have taken the lead."""


@dataclass(frozen=True)
class Probe:
    """Ask everybody for a sign of life."""


@dataclass(frozen=True)
class Drop:
    """These were silent for too long: close their connections."""

    links: tuple[int, ...]


@dataclass(frozen=True)
class Bye:
    """These may go: the run does without them."""

    links: tuple[int, ...]


@dataclass(frozen=True)
class Gone:
    """Tell everybody which nodes are lost that were members no more: they may have had something to hand over still."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class KeepOut:
    """Tell this node that it is let in later, and why."""

    link: int
    times: int
    seconds: float


Decision = Commit | Prepare | Cancel | Reread | Probe | Drop | Bye | Gone | KeepOut


# ---- in words --------------------------------------------------------------------------------------------------------


def in_words(
    old: Generation,
    wanted: Sequence[Member],
    *,
    here: Collection[str],
    leaving: Collection[str],
    size: Size,
    renew: bool,
) -> str:
    """Why there is another generation.

    Args:
        wanted: its members.
        here: members of the old one that are still there, by name; ``leaving``: those of them that have asked to go.
        renew: workers have failed.
    """
    before, after = {one.node for one in old.members}, {one.node for one in wanted}
    gone = sorted(before - after)
    surplus = [name for name in gone if name in here and name not in leaving]
    why = f"MAX is {size.max_nodes}: " if len(wanted) >= size.max_nodes else ""  # else the mesh has no place
    parts = [
        _listed("lost", [name for name in gone if name not in here]),
        _listed("left", [name for name in gone if name in leaving]),
        _listed("joined", sorted(after - before)),
        _listed(f"{why}standing by", surplus),
        f"{size.min_nodes} nodes are needed" if len(wanted) < size.min_nodes else "",
    ]
    return "; ".join(part for part in parts if part) or ("workers failed" if renew else "enough nodes")


def _listed(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what} {shown}" if names else ""


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """So that node10 comes after node9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)], name
