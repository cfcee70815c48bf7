"""``elastictrain run``: the options, and what happens with them.

Everything that can be checked without torch is checked before it is imported, and before anything is written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from elastictrain.cli.options import CONTEXT, POSITIVE, option, shared


def _read_config(context: click.Context, _parameter: click.Parameter, path: str | None) -> None:
    if path is not None:
        from elastictrain.cli import config_file

        context.default_map, context.meta["settings"] = config_file.read(path, context.command)


class StepsOrAuto(click.ParamType):  # type: ignore[type-arg]  # newer clicks make it generic
    """A positive whole number, or ``auto``."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "auto" if value == "auto" else POSITIVE.convert(value, param, ctx)


@click.command(context_settings=CONTEXT)
@click.argument("target", metavar="TARGET")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS OF A SCRIPT]")
@shared("--nnodes")
@shared("--nproc-per-node", help="Workers on this node; auto: one for each GPU, or one. [auto]")
@option(
    "--rdzv-endpoint",
    pet="RDZV_ENDPOINT",
    metavar="HOST[:PORT]|URL",
    help="Where nodes find each other; the same on all of them. HOST is the node that leads. [the run directory]",
)
@option(
    "--rdzv-backend",
    pet="RDZV_BACKEND",
    default="elastictrain",
    metavar="NAME",
    help="How nodes find each other. [elastictrain]",
)
@option("--rdzv-id", pet="RDZV_ID", metavar="ID", help="Tells runs at one endpoint apart. [none]")
@option(
    "--rdzv-conf",
    pet="RDZV_CONF",
    default="",
    metavar="NAME=SECONDS,…",
    help="How long nodes wait: ttl=2 (silence after which one is lost), beat=0.25, join_timeout=600, last_call_timeout=1,"
    " return_delay=10 and max_return_delay=300 (how long a host that is lost again and again is kept out).",
)
@option("--local-addr", pet="LOCAL_ADDR", metavar="ADDRESS", help="This node's address for the others. [found]")
@option(
    "--max-restarts",
    pet="MAX_RESTARTS",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Restarts of the workers without progress in between before the run fails. [3]",
)
@option(
    "--spares",
    type=click.IntRange(min=0),
    default=None,
    metavar="N",
    help="Processes on this node that have imported everything and wait for the place of a worker that dies."
    " [1; 0 with one worker on one node]",
)
@option(
    "--stall-after",
    type=click.FloatRange(min=0),
    default=900.0,
    metavar="SECONDS",
    help="Without a step, or a batch of an evaluation, for so long, workers are taken to hang; before the first step of a"
    " start, four times as long; 0: never. [900]",
)
@option(
    "--grace",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    help="How long workers may take to finish a step and save when the run is stopped. [600]",
)
@option(
    "--run-dir",
    metavar="PATH|URL",
    help="Where checkpoints and metrics go; any URL that fsspec knows. [runs/<name of the target>]",
)
@option(
    "--resume",
    metavar="auto|never|PATH",
    help="auto: from the run directory's newest checkpoint; never: only a new run; PATH: a new run begins from a"
    " checkpoint, or from another run's newest. [auto]",
)
@option("--max-steps", type=POSITIVE, metavar="N", help="Stop after so many steps. This or --max-epochs is needed.")
@option("--max-epochs", type=POSITIVE, metavar="N", help="Stop after so many passes over the data.")
@shared("--global-batch-size")
@shared("--micro-batch-size")
@shared("--mesh")
@option(
    "--topology",
    metavar="FILE",
    help="The zone or switch of each node, as YAML or JSON: 'node: zone'. Shards then stay within a zone. [none]",
)
@option(
    "--device-memory",
    metavar="SIZE",
    help="What --mesh auto may reckon with for each worker, such as 40GiB. [its GPU's, or its part of this machine's]",
)
@option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of weights, order and dropout. [0]")
@option("--log-every", type=POSITIVE, metavar="N", help="Log every N steps. [10]")
@option("--val-every", type=POSITIVE, metavar="N", help="Validate every N steps. [after every epoch]")
@option(
    "--checkpoint-every",
    type=StepsOrAuto(),
    metavar="N|auto",
    help="Save every N steps, beside every 5 minutes; or as often as saves and failures make best. [off]",
)
@option(
    "--snapshot-every",
    type=POSITIVE,
    metavar="N",
    help="Keep the state in memory, here and on another node, every N steps; a restart goes on from there. [off]",
)
@option(
    "--snapshot-wait",
    is_flag=True,
    default=None,
    help="Wait until a snapshot is on another node: no node's death costs more than N steps. [go on meanwhile]",
)
@shared("--callback")
@option(
    "--logger",
    "loggers",
    multiple=True,
    metavar="NAME[:k=v,…]",
    help="Log to csv, wandb, mlflow, comet or tensorboard too, each a logger of Lightning; may be repeated.",
)
@option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Answer Prometheus at this port of each node; 0: any free one. [off]",
)
@option(
    "--metrics-host",
    default="0.0.0.0",  # noqa: S104 - what a scraper on another machine needs
    metavar="ADDRESS",
    help="At this address alone, such as 127.0.0.1. [all of the node's]",
)
@shared("--set")
@click.option(
    "--config",
    metavar="FILE.yaml",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    envvar="ELASTICTRAIN_CONFIG",
    help="Options by name; the command line wins.",
)
@option("--full-traceback", is_flag=True, help="Show the frames of torch, lightning and elastictrain too.")
@click.pass_context
def run(context: click.Context, /, target: str, script_args: tuple[str, ...], **options: Any) -> int:
    """Train TARGET: file.py:Class, package.module:Class, or file.py.

    The class is a Task or a LightningModule. file.py alone is the one Task in it; a file without any runs as a script,
    and its own Trainer.fit is elastic.

    Options are also read from ELASTICTRAIN_<OPTION>, and those of torchrun from PET_<OPTION>.

    Ctrl-C finishes the step, saves and exits with code 75; the same command then continues. A second one exits at once.
    """
    from elastictrain.cli import checks
    from elastictrain.metrics.presence import Presence

    job = checks.prepare(target, script_args, options, from_config=context.meta.get("settings", {}))
    job = dataclasses.replace(job, started=context.obj.began)
    run_dir = None if job.target.cls is None else job.run_dir  # a script has its own: its workers tell
    with Presence(name=job.local_addr, began=job.started, run_dir=run_dir, num_nodes=job.min_nodes) as presence:
        from elastictrain.cli.launch import launch  # torch

        return launch(job, presence, context.obj)
