"""What torchrun, and our own command, may say of where nodes meet: ``torchrun --rdzv-backend=elastictrain`` ends here.

    torchrun --rdzv-backend=elastictrain --rdzv-endpoint=RUN_DIR --rdzv-id=ID --nnodes=MIN:MAX …

``RUN_DIR`` is any URL that all nodes reach; the nodes find each other through its run log, and any of them may die. With
``HOST:PORT`` instead, the node that has that address leads; while it is away nobody can join or be taken out. All nodes need
the run's token: the variable ``ELASTICTRAIN_TOKEN``, or the file that the first of them makes in the run directory.

``--rdzv-conf`` takes ``join_timeout`` (seconds to wait for MIN nodes, 600), ``last_call_timeout`` (seconds for more nodes
once there are MIN, 1), ``ttl`` (seconds of silence after which a node is lost, 2), ``beat`` (seconds between two signs
of life, 0.25), ``return_delay`` and ``max_return_delay`` (seconds, see :mod:`elastictrain.elastic.flapping`).

On failure: a :class:`~elastictrain.errors.UsageError` for options that cannot be, and what
:mod:`elastictrain.elastic.run_rendezvous` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastictrain.elastic.endpoint import host_and_port
from elastictrain.elastic.fit import Fit
from elastictrain.elastic.run_rendezvous import BACKEND, RunRendezvous
from elastictrain.elastic.timing import Timing
from elastictrain.errors import UsageError

__all__ = ["BACKEND", "create", "get_handler"]


def get_handler() -> Callable[[RendezvousParameters], RunRendezvous]:
    """What torchelastic's entry point asks for."""
    return create


def create(parameters: RendezvousParameters, *, fit: Fit = Fit(), **more: Any) -> RunRendezvous:  # noqa: B008 - frozen
    """A handler from torchrun's options, and what else :class:`RunRendezvous` may be given.

    Args:
        fit: what the mesh asks of the number of workers.
    """
    try:
        timing = Timing(
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            fit=fit,
            form=float(parameters.get("last_call_timeout", 1.0)),
            ttl=float(parameters.get("ttl", Timing.ttl)),
            beat=float(parameters.get("beat", Timing.beat)),
            return_delay=float(parameters.get("return_delay", Timing.return_delay)),
            max_return_delay=float(parameters.get("max_return_delay", Timing.max_return_delay)),
        )
        timing = replace(timing, probe=max(Timing.probe, timing.ttl / 5))
        join_seconds = float(parameters.get("join_timeout", parameters.get("timeout", 600.0)))
    except ValueError as error:
        raise UsageError(f"--rdzv-conf: {error}; give seconds, such as ttl=2.5") from error
    if not 0 < 2 * timing.beat <= timing.ttl:
        raise UsageError(f"--rdzv-conf: beat={timing.beat:g} and ttl={timing.ttl:g}: a node must get to speak twice")
    if not (timing.return_delay >= 0 and timing.max_return_delay > 0):
        delays = f"return_delay={timing.return_delay:g} and max_return_delay={timing.max_return_delay:g}"
        raise UsageError(f"--rdzv-conf: {delays}: the one is 0 or more, the other is more than 0")
    return RunRendezvous(
        parameters.endpoint,
        fixed=host_and_port(parameters.endpoint),
        run_id=parameters.run_id,
        timing=timing,
        local_addr=parameters.local_addr,
        join_seconds=join_seconds,
        **more,
    )
