"""From a checked command line to a running agent, and from its outcome to what a person reads. Imports torch."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys

import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastictrain.channel import key_of
from elastictrain.checkpoint.keeper_process import name_of
from elastictrain.checkpoint.token import has_token, read_token
from elastictrain.cli.checks import Job, check_world, newest_checkpoint
from elastictrain.cli.options import Call
from elastictrain.config import MeshConfig
from elastictrain.elastic.agent import Agent
from elastictrain.elastic.agent_config import AgentConfig, Outcome
from elastictrain.elastic.fit import Fit
from elastictrain.elastic.handler import BACKEND, create
from elastictrain.elastic.membership import StopReason
from elastictrain.elastic.rendezvous import GenerationHandler, LocalRendezvous
from elastictrain.errors import EXIT_FINISHED, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from elastictrain.metrics.presence import Presence
from elastictrain.metrics.prometheus import Endpoint, exposition, families
from elastictrain.metrics.published import Published
from elastictrain.rundir import RunDir, without_user

WORKER = [sys.executable, "-m", "elastictrain.cli.worker"]


def launch(job: Job, presence: Presence, call: Call) -> int:
    """Run the agent to its end; the exit code.

    Args:
        presence: is told what this node does.
        call: is told that it was an agent's.

    Raises:
        UsageError: what only torch could tell (the number of GPUs) does not fit.
    """
    if job.num_workers is None:
        job = dataclasses.replace(job, num_workers=max(1, torch.cuda.device_count()))
        check_world(job)
    assert job.num_workers is not None
    config = AgentConfig(
        [*WORKER, json.dumps(dataclasses.asdict(job.target))],
        local_world_size=job.num_workers,
        max_restarts=job.max_restarts,
        num_spares=_num_spares(job),
        stall_seconds=job.stall_seconds,
        grace=job.grace,
        target=job.target.recorded,
        settings=dict(job.settings),
        node=job.local_addr,
        job={
            "target": dataclasses.asdict(job.target),
            "run_dir": job.run_dir,
            "trainer": dict(job.trainer),
            "script_args": list(job.script_args),
        },
        keeper=_keeper(job),
        started=job.started,
    )
    outcome, call.has_trained = _train(job, config, presence), True
    if outcome.code == EXIT_USAGE and outcome.step < 0:
        presence.refused()
    return _tell(job, outcome)


def _train(job: Job, config: AgentConfig, presence: Presence) -> Outcome:
    if job.metrics is None:
        return Agent(config, _rendezvous(job), presence=presence).train()
    published = Published()
    node = job.local_addr or socket.gethostname()
    with Endpoint(
        *job.metrics, lambda: exposition(families(published, run=without_user(job.run_dir), node=node))
    ) as endpoint:
        _print(f"metrics are at {endpoint.url}")
        return Agent(config, _rendezvous(job), published=published, presence=presence).train()


def _num_spares(job: Job) -> int:
    if job.num_spares is not None:
        return job.num_spares
    return int(job.max_nodes > 1 or (job.num_workers or 1) > 1)  # alone, a worker that dies has nobody who waits for it


def _keeper(job: Job) -> tuple[bytes, str] | None:
    """What this node's workers will ask for; None: that is known only once they ask."""
    is_known = job.target.cls is not None and job.trainer.get("snapshot_every") is not None
    if job.endpoint is None or not is_known:
        return None
    run_dir = RunDir(job.run_dir)
    try:
        key = key_of(read_token(run_dir)) if has_token(run_dir) else None
    except (OSError, UsageError):  # the workers say so
        key = None
    return None if key is None else (key, name_of(key, str(run_dir.path)))


def _rendezvous(job: Job) -> GenerationHandler:
    assert job.num_workers is not None
    if job.endpoint is None:
        return LocalRendezvous(job.num_workers)
    token_dir = None if job.target.cls is None else job.run_dir
    options = {"local_addr": job.local_addr, **job.rdzv_conf}
    parameters = RendezvousParameters(BACKEND, job.endpoint, job.rdzv_id, job.min_nodes, job.max_nodes, **options)
    mesh = MeshConfig.parse(job.trainer.get("mesh", "auto"))  # a script's is not known
    fit = Fit(*mesh.fit, mesh=str(mesh))
    handler = create(parameters, fit=fit, num_workers=job.num_workers, has_steps=True, say=_print, token_dir=token_dir)
    many = str(job.min_nodes) if job.min_nodes == job.max_nodes else f"{job.min_nodes} to {job.max_nodes}"
    _print(f"waiting for {many} nodes at {job.endpoint}")
    return handler


def _tell(job: Job, outcome: Outcome) -> int:
    """Print how it ended."""
    report = outcome.report
    if outcome.code == EXIT_FINISHED:
        return outcome.code
    if report is not None and outcome.code == EXIT_USAGE:
        if report.message:
            _print(f"error: {' '.join(report.message.split())}")
        return outcome.code
    if report is not None and report.text:
        print((report.full if job.full_traceback else report.text).rstrip(), file=sys.stderr)
    if outcome.code != EXIT_PREEMPTED:
        _print(f"{'error: ' if outcome.reason is None else ''}{outcome.message}")
    elif outcome.message:
        _print(outcome.message)
    else:
        why = "by Ctrl-C" if outcome.reason == StopReason.INTERRUPT else "by a signal"
        _print(f"stopped {why} at step {outcome.step}")
    if (found := _newest(job)) is not None:
        _print(f"step {found[0]} is saved in {found[1]}; the same command continues from there")
    return outcome.code


def _newest(job: Job) -> tuple[int, str] | None:
    try:
        run_dir = RunDir(job.run_dir)
        return None if run_dir.is_memory or job.target.cls is None else newest_checkpoint(run_dir)
    except Exception:  # it is only a hint
        return None


def _print(line: str) -> None:
    print(f"elastictrain: {line}", file=sys.stderr, flush=True)
