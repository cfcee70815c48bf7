"""Why a node waits, in words for the person who looks at its agent. Pure, but for the time of day."""

from __future__ import annotations

import time

from elastictrain.elastic.chain import Generation, Size


def why_it_waits(
    generation: Generation, size: Size, *, is_member: bool, has_trained: bool, kept_out: tuple[int, float]
) -> str:
    """One line; empty: nothing that is worth saying.

    Args:
        generation: the newest one.
        size: the run's.
        is_member: this node is, of that one.
        has_trained: its workers have, in an earlier one.
        kept_out: how often its host was lost, and until when it is not let in, by :func:`time.monotonic`.
    """
    there, (times, until) = len(generation.members), kept_out
    left = until - time.monotonic()
    if there >= size.max_nodes and not is_member:
        return f"{there} nodes train, which is MAX of this run's {size}: standing by until one goes"
    if left > 0 and not is_member:
        when = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        return f"this host was lost {times} times in short: it is let in again at {when}"
    if has_trained:
        return f"waiting for nodes, of which at least {size.min_nodes} are needed; what this node keeps in memory stays"
    return ""


def size_in_words(size: Size, own: Size) -> str:
    """The run's, for a node whose command says ``own``."""
    return f"this run's size is {size} nodes" + ("" if size == own else f": --nnodes {own} of this node does not count")
