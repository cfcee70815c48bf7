"""A checkpoint of the last finished step, after an exception has ended training: ``CheckpointConfig(on_exception=True)``.

What is in memory is that step's only until the optimizer steps again, and collectives are possible only where no rank has
left one of the step's own that another has begun: gradients that are being summed, or passes through a module that is cut.
So this asks first: each rank for itself whether its state is whole and no such collective can be under way, then all of
them through the process group's store, which needs no rank to take part. Only then do they save together.

On failure: the exception goes on being raised in any case; what stands in the way of a checkpoint is one line. It takes no
longer than twice :data:`AGREE_SECONDS` to find that not all ranks are there, and :data:`WRITE_SECONDS` each until there is
memory to stage in and until what was staged is on storage; after that the writer processes finish it on their own, as they
do for workers that have died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed import DistError, PrefixStore

from elastictrain.callback import SaveInfo
from elastictrain.checkpoint import CheckpointManager
from elastictrain.compat.torchmetrics import has_updates
from elastictrain.elastic.membership import AgentMembership
from elastictrain.errors import ElasticTrainError, is_lost_peer
from elastictrain.metrics.console import make_console, print_line
from elastictrain.parallel.mesh import Ranks
from elastictrain.session import Session

log = logging.getLogger(__name__)

AGREE_SECONDS = 3.0
WRITE_SECONDS = 120.0
_HERE, _TAKEN, _GONE = "here", "taken", "gone"


def rescue(
    session: Session,
    manager: CheckpointManager,
    error: Exception,
    *,
    saved_step: int,
    content: Callable[[], Mapping[str, Any]],
) -> list[SaveInfo]:
    """Save the last finished step, if that can be. Never raises.

    Args:
        error: what has ended training.
        saved_step: of which there is a checkpoint, or one under way.
        content: what ``CheckpointManager.begin`` takes; collective.

    Returns:
        Checkpoints that have been committed meanwhile, the same on every rank.
    """
    s, step = session, session.counters.step
    is_over = isinstance(s.membership, AgentMembership) and s.membership.is_over
    if isinstance(error, ElasticTrainError) or is_lost_peer(error) or is_over:
        return []  # nothing that a later start could go on from better than from the last checkpoint
    if step in (0, saved_step):
        return []
    try:
        doubt = _agree(s.ranks, step, _doubt(s))
        if doubt is not None:
            log.warning("no checkpoint of step %d after the exception: %s", step, doubt)
            return []
        committed = manager.save_last(step, seconds=WRITE_SECONDS, **content())
        if all(info.step != step for info in committed):
            log.warning("the checkpoint of step %d, after the exception, was not written", step)
        elif s.ranks.is_main:
            print_line(f"elastictrain: step {step} is saved, after {type(error).__name__}", console=make_console())
        return committed
    except Exception as another:
        log.warning("no checkpoint of step %d after the exception: %s: %s", step, type(another).__name__, another)
        return []


def _doubt(session: Session) -> str | None:
    """Why what this rank has in memory is not the state after the last finished step, or cannot be saved together."""
    s = session
    if not s.is_whole:
        return f"step {s.counters.step + 1} was half done, from its optimizer on"
    if s.has_begun and s.built.is_cut:  # also where ranks share tokens: FSDP lays out the parameters there
        return f"step {s.counters.step + 1} had begun, and ranks may wait for each other within it"
    if s.built.gradients is not None and s.built.gradients.is_under_way:
        return f"gradients of step {s.counters.step + 1} were being summed over the ranks"
    if s.has_begun and s.logbook.num_added != s.num_added:
        return f"step {s.counters.step + 1} had logged values of its epoch already"
    if s.has_begun and has_updates(s.task):
        return f"step {s.counters.step + 1} may have updated metrics already"
    if s.has_begun and not all(isinstance(one, nn.Parameter) for one in s.task.state_dict(keep_vars=True).values()):
        return f"step {s.counters.step + 1} may have changed buffers already, such as the statistics of BatchNorm"
    return None if s.lease is None else s.lease.lost


def _agree(ranks: Ranks, step: int, doubt: str | None) -> str | None:
    """Do all ranks stand here without a doubt? None: yes, on all that ask.

    Rank 0 decides. It takes a rank into account only by taking what that rank has put there, and a rank that has waited
    too long takes its own away: so no rank is counted on that has gone on.
    """
    if ranks.world_size == 1:
        return doubt
    if ranks.store is None:
        return "the process group is not the trainer's own"
    store = PrefixStore(f"rescue/{step}", ranks.store)
    mine, others = str(ranks.rank), [str(rank) for rank in range(1, ranks.world_size)]
    store.set(mine, _HERE if doubt is None else doubt)
    if ranks.is_main:
        deadline = time.monotonic() + AGREE_SECONDS
        while not (are_there := store.check(others)) and time.monotonic() < deadline:
            time.sleep(0.01)
        verdict = doubt or ("" if are_there else "it was raised on some ranks only")
        for other in others if not verdict else ():
            if (found := store.compare_set(other, _HERE, _TAKEN).decode()) != _TAKEN:
                verdict = "it was raised on some ranks only" if found == _GONE else found
        store.set("verdict", verdict)
        return verdict or None
    if doubt is not None:  # whatever rank 0 may say
        return doubt
    try:
        told = _verdict(store, 2 * AGREE_SECONDS)
        if told is None and store.compare_set(mine, _HERE, _GONE).decode() == _TAKEN:  # rank 0 is deciding right now
            told = _verdict(store, AGREE_SECONDS)
    except DistError:  # the store is rank 0's, which stays where all shall save
        return "rank 0 has left"
    return "it was raised on some ranks only" if told is None else told or None


def _verdict(store: PrefixStore, seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return store.get("verdict").decode()
