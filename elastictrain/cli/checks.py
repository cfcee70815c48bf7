"""Everything about ``elastictrain run`` that can be said to be wrong before torch is imported or a worker started.

On failure: :class:`~elastictrain.errors.UsageError`, one line with the remedy; nothing has been written.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from elastictrain.cli import target as targets
from elastictrain.cli.target import Target
from elastictrain.config import MeshConfig
from elastictrain.elastic.address import parse_address
from elastictrain.errors import UsageError
from elastictrain.loggers import parse_logger
from elastictrain.parallel.zones import read_zones
from elastictrain.rundir import RunDir, first_line, without_user
from elastictrain.runfile import is_same_target

RDZV_CONF = ("join_timeout", "last_call_timeout", "ttl", "beat", "return_delay", "max_return_delay")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# What a script gives to its own Trainer.
OF_CLASSES = (
    "run_dir",
    "max_steps",
    "max_epochs",
    "global_batch_size",
    "micro_batch_size",
    "mesh",
    "topology",
    "device_memory",
    "seed",
    "log_every",
    "val_every",
    "checkpoint_every",
    "snapshot_every",
    "snapshot_wait",
    "resume",
    "callbacks",
    "loggers",
    "settings",
)


@dataclass(frozen=True)
class Job:
    """One checked command line.

    Args:
        num_workers: on this node; None: one for each GPU, which only torch can count.
        endpoint: where nodes find each other, a run directory or HOST:PORT; None for one node alone.
        trainer: the trainer's options that were given.
        metrics: address and port at which Prometheus is answered; None: nowhere.
        settings: text, or values from a config file, by argument of the target's ``__init__``.
        started: when the command began, seconds since the epoch; None: not known.
    """

    target: Target
    run_dir: str
    min_nodes: int
    max_nodes: int
    num_workers: int | None
    endpoint: str | None
    rdzv_id: str
    rdzv_conf: Mapping[str, str]
    local_addr: str | None
    max_restarts: int
    num_spares: int | None
    stall_seconds: float
    grace: float
    full_traceback: bool
    metrics: tuple[str, int] | None = None
    script_args: Sequence[str] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    started: float | None = None


def prepare(
    text: str, script_args: Sequence[str], options: Mapping[str, Any], *, from_config: Mapping[str, Any]
) -> Job:
    """Check a command line.

    Args:
        options: by parameter name, as click read them; None where not given.
        from_config: the ``set:`` of the config file.
    """
    target, source = targets.resolve(text)
    _check_script(target, script_args, options, from_config)
    min_nodes, max_nodes = parse_nnodes(options["nnodes"])
    num_workers = parse_workers(options["nproc_per_node"])
    run_dir = target.default_run_dir if options["run_dir"] is None else options["run_dir"]
    endpoint = _endpoint(options, max_nodes, run_dir=None if target.cls is None else run_dir)
    trainer = {
        name: options[name]
        for name in OF_CLASSES
        if name not in ("settings", "callbacks", "loggers", "run_dir") and options[name] is not None
    }
    trainer["callbacks"], trainer["loggers"] = list(options["callbacks"]), list(options["loggers"])
    if target.cls is not None:
        if "max_steps" not in trainer and "max_epochs" not in trainer:
            raise UsageError("how long to train is not known: give --max-steps or --max-epochs")
        check_sizes(trainer)
    settings = {**from_config, **parse_settings(options["settings"])}
    if source is not None and target.cls is not None and (signature := source.signature(target.cls)) is not None:
        signature.convert(settings)
    _check_names(trainer)
    job = Job(
        target=target,
        run_dir=run_dir,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        num_workers=num_workers,
        endpoint=endpoint,
        rdzv_id=options["rdzv_id"] or "",
        rdzv_conf=parse_rdzv_conf(options["rdzv_conf"]),
        local_addr=options["local_addr"],
        max_restarts=options["max_restarts"],
        num_spares=options["spares"],
        stall_seconds=options["stall_after"],
        grace=options["grace"],
        full_traceback=options["full_traceback"],
        metrics=None if options["metrics_port"] is None else (options["metrics_host"], options["metrics_port"]),
        script_args=list(script_args),
        trainer=trainer,
        settings=settings,
    )
    check_world(job)
    if target.cls is not None:
        check_run_dir(job)
    return job


# ---- nodes and processes -------------------------------------------------------------------------------------------


def parse_nnodes(text: str) -> tuple[int, int]:
    """``MIN[:MAX]``."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if least < 1 or most < least:
        raise UsageError(f"--nnodes {text}: write a number of nodes, or MIN:MAX such as 1:4")
    return least, most


def parse_workers(text: str) -> int | None:
    """``N``, or None for ``auto``."""
    if text in ("auto", "gpu"):
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text}: write a number of workers, or auto for one per GPU")
    return int(text)


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """``k=v,…``, seconds all of them."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in RDZV_CONF:
            raise UsageError(f"--rdzv-conf {part}: write NAME=SECONDS, where NAME is one of {', '.join(RDZV_CONF)}")
        found[name] = value
    return found


def _endpoint(options: Mapping[str, Any], max_nodes: int, *, run_dir: str | None) -> str | None:
    backend, given = options["rdzv_backend"], options["rdzv_endpoint"]
    if backend not in ("elastictrain", "c10d"):
        raise UsageError(
            f"--rdzv-backend {backend}: it is elastictrain, or c10d, as torchrun's environment has it, where"
            " --rdzv-endpoint is HOST:PORT; leave the option out"
        )
    is_place = bool(given) and parse_address(given) is not None
    if given and not is_place and "/" not in given and ":" in given:
        raise UsageError(f"--rdzv-endpoint {given}: write HOST:PORT, or a directory or URL that all nodes reach")
    if max_nodes == 1:
        return None
    if backend == "c10d" and not is_place:
        raise UsageError("--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT: add it, or leave both out")
    endpoint = given
    if not endpoint and run_dir is not None:
        where = RunDir(run_dir)
        endpoint = os.path.abspath(where.path) if where.is_local else where.url  # a name alone would be a host's
    if not endpoint:
        raise UsageError(
            f"--nnodes {options['nnodes']}: several nodes need a place to meet, and a script's run directory is not known"
            " here: add --rdzv-endpoint with a directory or URL that all of them reach, or HOST:PORT"
        )
    return str(endpoint)


def check_world(job: Job) -> None:
    """What depends on the number of workers; again once the GPUs are counted."""
    if job.num_workers is None:
        return
    if RunDir(job.run_dir).is_memory and (job.max_nodes > 1 or job.num_workers > 1):
        count = f"{job.num_workers} workers" if job.max_nodes == 1 else f"{job.max_nodes} nodes"
        raise UsageError(
            f"--run-dir {without_user(job.run_dir)}: memory:// is inside of one process and there are {count}:"
            " use --nproc-per-node 1, or a directory"
        )
    if job.min_nodes == job.max_nodes and "mesh" in job.trainer:
        MeshConfig.parse(job.trainer["mesh"]).resolve(job.num_workers * job.max_nodes)


# ---- the trainer's options -----------------------------------------------------------------------------------------


def _check_script(
    target: Target, script_args: Sequence[str], options: Mapping[str, Any], from_config: Mapping[str, Any]
) -> None:
    if target.cls is not None and script_args:
        raise UsageError(
            f"{target.recorded} takes no arguments, but got {' '.join(script_args)}: give them as --set k=v"
        )
    given = [name for name in OF_CLASSES if options[name] not in (None, ())] + (["settings"] if from_config else [])
    if target.cls is None and given:
        shown = {"callbacks": "--callback", "loggers": "--logger", "settings": "--set"}.get(
            given[0], f"--{given[0].replace('_', '-')}"
        )
        raise UsageError(
            f"{target.recorded} defines no Task, so it runs as a script and {shown} cannot reach its Trainer:"
            f" set it there, pass it on after --, or name a class ({target.recorded}:MyTask)"
        )


def check_sizes(trainer: Mapping[str, Any]) -> None:
    """The global batch has room for a microbatch."""
    whole, micro = trainer.get("global_batch_size"), trainer.get("micro_batch_size")
    if whole is not None and micro is not None and whole < micro:
        raise UsageError(
            f"--global-batch-size {whole} is smaller than --micro-batch-size {micro}: a step is made of whole"
            " microbatches; lower the second"
        )


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """``["k=v", …]`` by key."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--set {text}: write --set NAME=VALUE")
        if key in settings:
            raise UsageError(f"--set {key} is given twice ({settings[key]} and {value}): keep one of them")
        settings[key] = value
    return settings


def _check_names(trainer: dict[str, Any]) -> None:
    from elastictrain.callbacks.registry import parse_callback

    for text in trainer["callbacks"]:
        parse_callback(text)
    for text in trainer["loggers"]:
        parse_logger(text)
    memory = trainer.get("device_memory")
    if memory is not None:
        memory = trainer["device_memory"] = parse_size(memory)
    dataclasses.replace(MeshConfig.parse(trainer.get("mesh", "auto")), device_memory=memory)
    if "topology" in trainer:
        read_zones(trainer["topology"])
        trainer["topology"] = os.path.abspath(trainer["topology"])


def parse_size(text: str) -> int:
    """``80GiB``, ``80GB``, ``80G`` (as GiB, the way devices are sold), ``512MiB``, or bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] == "i" or float(match[1]) <= 0:
        raise UsageError(f"--device-memory {text}: write a size, such as 80GiB")
    unit = match[2] if text.strip().lower().endswith("b") or not match[2] else match[2][0] + "i"
    return int(float(match[1]) * _UNITS[unit])


# ---- the run directory ---------------------------------------------------------------------------------------------


def check_run_dir(job: Job) -> None:
    """It belongs to this target, fits ``--resume``, and can be written."""
    run_dir = RunDir(job.run_dir)
    with _reading(f"run directory {run_dir}"):
        try:
            record = run_dir.read_json("run.json") if run_dir.exists("run.json") else None
        except ValueError as error:
            raise UsageError(
                f"run directory {run_dir}: its run.json is damaged ({error}): restore it, or choose another --run-dir"
            ) from error
    owner = record.get("target") if isinstance(record, dict) else None
    if owner is not None and not is_same_target(owner, job.target.recorded):
        raise UsageError(
            f"run directory {run_dir} belongs to {owner}, not to {job.target.recorded}: choose another --run-dir"
        )
    resume = job.trainer.get("resume", "auto")
    if resume == "never" and (found := newest_checkpoint(run_dir)) is not None:
        raise UsageError(
            f"--resume never: {run_dir} already holds checkpoints, up to step {found[0]}; choose another --run-dir,"
            " or leave --resume out to continue"
        )
    if not resume:
        raise UsageError("--resume is empty: name a run directory or a checkpoint, or leave it out")
    if resume not in ("auto", "never"):
        shown = without_user(resume)
        with _reading(f"--resume {shown}"):
            is_there = RunDir(resume).exists()
        if not is_there:
            raise UsageError(f"--resume {shown} does not exist: name a run directory or a checkpoint, or leave it out")
    run_dir.check_writable()


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Every storage has errors of its own."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} cannot be read ({first_line(error)}): check the path, permissions and credentials"
        ) from error


def newest_checkpoint(run_dir: RunDir) -> tuple[int, str] | None:
    """Step and path, as it is shown, of the newest committed checkpoint, by its COMMIT alone."""
    for name in sorted(run_dir.names("checkpoints"), reverse=True):
        if match := re.fullmatch(r"step-(\d+)", name):
            for attempt in run_dir.names("checkpoints", name):
                if run_dir.exists("checkpoints", name, attempt, "COMMIT"):
                    return int(match[1]), f"{str(run_dir).rstrip('/')}/checkpoints/{name}"
    return None
