"""How a run stands, from its ledger alone. Only what is known is there.

A run that was killed leaves nothing that says so: without a sign of life for :data:`SILENT` seconds it is "silent". Nodes
write more often than that, also within a long step, a validation or a compilation, and while a start reads its state.

On failure: :func:`require_begun` refuses a directory without a run; nothing else here can fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastictrain import runfile
from elastictrain.errors import UsageError
from elastictrain.metrics.console import format_count, format_seconds
from elastictrain.metrics.goodput import Goodput, goodput
from elastictrain.metrics.reading import in_words, newest_sign
from elastictrain.rundir import RunDir, without_user

SILENT = 120.0

_OUTCOMES = {"interrupt": "interrupted", "preempt": "preempted", "change": "changing", "store": "changing"}
_GO_ON = ("running", "changing")  # states that last only as long as somebody is heard


def status(
    lines: Sequence[Mapping[str, Any]], *, now: float | None = None, account: Goodput | None = None
) -> dict[str, Any]:
    """A run's status as JSON has it.

    Args:
        lines: of :func:`~elastictrain.metrics.ledger.read_ledger`; there is a start among them.
        now: seconds since the epoch.
        account: where it is known already, else it is made from the lines.

    Returns:
        ``state`` ("running", "silent", "finished", "interrupted", "preempted", "changing": nodes come or go, "starting":
        another start reads the state), ``seen``
        (seconds since the epoch of the last sign of life), ``doing`` (where a sign of life is newer than all else: the
        cause of what goes on, and ``since`` when there was no new step), ``reading`` (of that start: ``source``, ``step``,
        ``num_bytes`` of all; of ``what``, the bytes that are ``wanted`` and ``done`` on rank 0; else None),
        ``generation``, ``world_size``, ``mesh``,
        ``step``, ``samples``, ``tokens``, ``nodes``, ``last_checkpoint`` (step, path) or None, ``goodput`` (``percent``,
        ``lost_seconds`` by cause, ``total_seconds``, both over all nodes), and ``recoveries``, of which those that are
        ``planned`` are changes in good order.
    """
    start = max(_of(lines, "start"), key=lambda line: line["generation"])
    here = [line for line in lines if line["generation"] == start["generation"] and line["event"] != "agent"]
    end = next(_of(here, "end"), None)
    seen = max(line.get("to", line.get("time", 0.0)) for line in here)
    account = goodput(lines) if account is None else account
    now = time.time() if now is None else now
    state = "running" if end is None else _OUTCOMES.get(end["outcome"], end["outcome"])
    sign = newest_sign(lines, after=start["generation"])
    if sign is not None and (sign["time"] < seen or now - sign["time"] >= SILENT):
        sign = None
    if sign is not None:
        state, seen = "starting", sign["time"]
    is_heard = now - seen < SILENT
    found: dict[str, Any] = {
        "state": state if is_heard or state not in _GO_ON else "silent",
        "seen": seen,
        "generation": start["generation"],
        "world_size": start["world_size"],
        "mesh": start.get("mesh", ""),
        "step": start["step"],
    }
    counted = [line for line in here if line["event"] in ("time", "alive") and "samples" in line]
    if counted:
        newest = max(counted, key=lambda line: (_step(line), line.get("to", line.get("time"))))
        found |= {"step": _step(newest), "samples": newest["samples"], "tokens": newest["tokens"]}
    alive = max(_of(here, "alive"), key=lambda line: line["time"], default=None)
    is_newest = alive is not None and alive["time"] >= seen and found["state"] == "running"
    found["doing"] = {"cause": alive["doing"], "since": alive["since"]} if alive is not None and is_newest else None
    about = ("source", "step", "num_bytes", "what", "wanted", "done")
    found["reading"] = None if sign is None else {name: sign[name] for name in about}
    found["nodes"] = [
        {name: line[name] for name in ("name", "host", "agent_pid", "workers")} for line in _of(here, "node")
    ]
    saved = max(_of(lines, "checkpoint"), key=lambda line: line["time"], default=None)
    found["last_checkpoint"] = None if saved is None else {"step": saved["step"], "path": without_user(saved["path"])}
    found["goodput"] = {"percent": account.percent, "lost_seconds": account.lost, "total_seconds": account.total}
    fields = ("time", "cause", "generation", "from_step", "resumed_step", "lost_steps", "seconds")
    found["recoveries"] = [
        {name: line[name] for name in fields} | {"planned": is_planned(line), "source": line.get("source", "")}
        for line in _of(lines, "recovery")
    ]
    return found


def silence(age: str) -> str:
    """What "silent" may mean, in words."""
    return (
        f"nothing was heard for {age}; it was killed, and then the same command goes on with it, or a start prepares data"
        " or builds a large model, or its storage does not answer"
    )


_DOING = {"productive": "in step {}", "compile": "compiling", "validation": "validating", "checkpoint": "saving"}


def doing_in_words(found: Mapping[str, Any], *, now: float) -> str | None:
    """``in step 8, 3m12s after the last step``, of a status; None where a log step was heard of last."""
    if (sign := found["reading"]) is not None:
        return f"reading {sign['source']}, {format_count(sign['num_bytes'])}B; {in_words(sign)}"
    doing = found["doing"]
    if doing is None:
        return None
    what = _DOING.get(doing["cause"], "starting or ending").format(found["step"] + 1)
    return f"{what}, {format_seconds(max(0.0, now - doing['since']))} after the last step"


def is_planned(change: Mapping[str, Any]) -> bool:
    """Whether a line about a recovery tells of nodes that joined or left in good order, and not of a failure."""
    return change.get("planned") is True


def require_begun(run_dir: RunDir, lines: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a directory whose ledger tells of no start.

    Raises:
        UsageError: with the remedy.
    """
    if any(line["event"] == "start" for line in lines):
        return
    if run_dir.exists(runfile.NAME):
        raise UsageError(f"the run in {run_dir} has not begun to train: look again when its first step is done")
    raise UsageError(f"{run_dir} holds no run: give the directory that `elastictrain run --run-dir` was given")


def _step(line: Mapping[str, Any]) -> int:
    step: int = line["steps"][1] if "steps" in line else line["step"]
    return step


def _of(lines: Iterable[Mapping[str, Any]], event: str) -> Any:
    return (line for line in lines if line["event"] == event)
