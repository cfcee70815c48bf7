"""Compiled blocks: ``torch.compile`` on each block's ``forward``, inside of FSDP's hooks and around recomputation.

All blocks of one class share one compiled function, so that a model of eighty equal blocks is compiled once. Random numbers
are those of eager code: the compiler is told to draw from torch's own generators, so compiling changes no dropout mask.

On failure: what the machine lacks to compile is said in one line before training starts (:func:`missing_to_compile`).
Gradients that differ from eager ones are found by :mod:`elastictrain.comparing` before anything is trained with them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastictrain.parallel.forwards import Forward, Forwards, forward_of
from elastictrain.step_plan import Compilation


def compile_blocks(task: nn.Module, names: Sequence[str], plan: Compilation, forwards: Forwards) -> None:
    """Compile those of the named blocks that are there, each with what its ``forward`` is now."""
    modules = dict(task.named_modules())
    blocks = [modules[name] for name in names if name in modules]
    made: dict[Forward, Forward] = {}
    for block in blocks:
        inner = forward_of(block)
        if inner not in made:
            compiled = torch.compile(  # type: ignore[call-overload] # its overloads lack recompile_limit
                inner,
                fullgraph=plan.fullgraph,
                dynamic=plan.dynamic,
                backend=plan.backend,
                options={"fallback_random": True} if plan.backend == "inductor" else None,
                recompile_limit=8
                * len(blocks),  # blocks that differ in a number are compiled apart; 8 is torch's for one
            )
            made[inner] = _entered(compiled)
        forwards.replace(block, made[inner])


def _entered(compiled: Forward) -> Forward:
    """What enters compiled code is a plain tensor.

    An embedding that tensor parallelism splits hands over a tensor whose sum over ranks is still under way. Compiled code
    that starts with one gives the embedding a wrong gradient, silently. A product is plain, and autograd knows it.
    """

    def entered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(module, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})

    return entered


def _plain(value: Any) -> Any:
    is_plain = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter) or isinstance(value, DTensor)
    return value if is_plain else value * 1


def missing_to_compile(plan: Compilation, device_type: str) -> str | None:
    """What this machine lacks to compile for a device, with the remedy; None: nothing."""
    if plan.backend != "inductor":
        return None
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    default, variable = ("g++", "CXX") if device_type == "cpu" else ("gcc", "CC")
    command = shlex.split(os.environ.get(variable) or default)[0]
    if shutil.which(command) is None:
        return f"there is no compiler {command!r}: install g++, or name yours in {variable}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's C headers are not installed: install python3-dev, or a Python that has Python.h"
    return None
