"""What can go wrong, by who must act on it, and the exit code that says so.

A :class:`UsageError` is one clear line for a person: what is wrong, the values, the remedy. The command line prints it
without a traceback and exits with :data:`EXIT_USAGE`; nothing has been written by then. Invariants of our own are
``assert``\\ s, never one of these.
"""

from __future__ import annotations

import sys

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: run me again; what is kept in memory alone is said
EXIT_CHANGED = 76  # a worker's alone: it has stopped for nodes that come or go, and the next generation may begin
IN_ORDER = (EXIT_FINISHED, EXIT_PREEMPTED, EXIT_CHANGED)  # a worker has done what it was to do


class ElasticTrainError(Exception):
    """Base of every error that elastictrain raises on purpose."""


class UsageError(ElasticTrainError, ValueError):
    """Input that cannot work: one line with what is wrong, the values, and the remedy."""


class UnsupportedError(UsageError):
    """A module or callback asks for something that this trainer cannot honour; says why and what to do instead."""


class CheckpointError(ElasticTrainError):
    """A checkpoint is not committed, damaged, or does not fit the state it should be loaded into."""


class GenerationOver(ElasticTrainError):
    """The generation that this worker was in has ended, by no fault of its own."""


class NothingKept(GenerationOver):
    """There is no state from which this process could go on: another one must begin."""


# Texts by which torch's backends say that a peer or the network is gone; they raise plain RuntimeErrors.
_LOST_PEER = ("gloo", "NCCL", "Connection reset by peer", "Connection closed by peer", "connectFullMesh", "Broken pipe")


def is_lost_peer(error: BaseException) -> bool:
    """Does it say that another rank, or the network, is gone?"""
    distributed = sys.modules.get("torch.distributed")
    kinds: tuple[type[BaseException], ...] = (GenerationOver,)
    if distributed is not None:
        kinds += (distributed.DistError,)
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, kinds):
            return True
        if isinstance(chain, RuntimeError) and any(text in str(chain) for text in _LOST_PEER):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False
