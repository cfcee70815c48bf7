"""Why a node waits, in words for the person who looks at its agent, and between which generations.

Pure, but for the time of day.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from elastictrain.elastic.chain import Generation, Member, Size
from elastictrain.elastic.timing import Timing


@dataclass(frozen=True)
class Change:
    """What lies between two generations that a node trains in.

    Args:
        stay: members of both.
        lost: members of the first one that are not in the second, though nobody had planned that.
        is_planned: all had agreed on the step at which the first one ended. They may then have waited for more nodes.
    """

    stay: tuple[Member, ...]
    lost: tuple[Member, ...]
    is_planned: bool

    @classmethod
    def between(cls, last: Generation, new: Generation, agreed: Generation | None) -> Self:
        """``agreed``: the one that was to follow ``last`` at a step that its members had agreed on, if they had."""
        paused = agreed if agreed is not None and agreed.is_paused else None
        end = paused or new
        stay = tuple(one for one in last.members if one in new.members)
        away = tuple(one for one in last.members if one not in new.members and one.node not in end.leaving)
        was_agreed = end.boundary >= 0 and end.number == last.number + 1
        is_planned = was_agreed and not (paused and away)  # one of those that waited was lost
        return cls(stay, () if is_planned else away, is_planned)


def why_it_stands_by(generation: Generation, size: Size, *, me: Member, timing: Timing) -> str:
    """Why nodes train, and this one does not, in one line; empty: it does, or may soon, or nobody does.

    Args:
        generation: the newest one.
        size: the run's.
    """
    there = generation.members
    if not there or generation.is_paused or me in there:
        return ""
    if len(there) >= size.max_nodes:
        return f"{len(there)} nodes train, which is MAX of this run's {size}: standing by until one goes"
    if me in timing.choose([*there, me], size):
        return ""
    return f"{len(there)} nodes train, and {timing.fit.needs}: standing by until there is a place"


def why_it_waits(
    size: Size, *, is_member: bool, has_trained: bool, is_paused: bool, kept_out: tuple[int, float], needs: str
) -> str:
    """One line; empty: nothing that is worth saying.

    Args:
        size: the run's.
        is_member: this node is, of the newest generation.
        has_trained: this node's workers have, in an earlier generation.
        is_paused: other nodes have, and wait as well.
        kept_out: how often its host was lost, and until when it is not let in, by :func:`time.monotonic`.
        needs: what the mesh does, in words.
    """
    times, until = kept_out
    left = until - time.monotonic()
    if left > 0 and not is_member:
        when = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return f"this host was lost {times} times in short: it is let in again at {when}"
    if not (has_trained or is_paused or needs):
        return ""
    line = f"waiting for nodes, of which at least {size.min_nodes} are needed" + (f"; {needs}" if needs else "")
    if has_trained:
        return line + "; what this node keeps in memory stays"
    return line + ("; the run is paused until then, and this node waits with the others" if is_paused else "")


def size_in_words(size: Size, own: Size) -> str:
    """The run's, for a node whose command says ``own``."""
    return f"this run's size is {size} nodes" + ("" if size == own else f": --nnodes {own} of this node does not count")
