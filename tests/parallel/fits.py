"""Trainings of many tasks in one run of ranks, and what they must have in common with those of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastictrain import Callback, Task, Trainer, UsageError
from elastictrain.callback import StepInfo
from elastictrain.callbacks import GradientClipping
from tests.helpers import apart, run_ranks
from tests.parallel.piped import whole

STEPS = 5
Case = tuple[str, str]  # the name of a task, and a mesh


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    norms: list[float]  # of all gradients, before clipping; none with manual optimisation
    state: dict[str, Tensor]  # weights and statistics that this rank holds, in full


class _Watch(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step_end(self, info: StepInfo) -> None:
        assert info.metrics is not None
        self.losses.append(info.metrics["train/loss"])
        if info.grad_norm is not None:
            self.norms.append(float(info.grad_norm))


def fit(task: Task, mesh: str, num_slots: int) -> Seen:
    """Five steps on this rank. SGD with momentum in the tasks, as Adam would hide a gradient of the wrong scale."""
    watch = _Watch()
    Trainer(
        max_steps=STEPS,
        global_batch_size=4 * num_slots,
        micro_batch_size=4,
        mesh=mesh,
        log_every=1,
        callbacks=[watch, GradientClipping(norm=1.0)] if task.automatic_optimization else [watch],
    ).fit(task)
    return Seen(watch.losses, watch.norms, {name: whole(tensor) for name, tensor in task.state_dict().items()})


def _all(rank: int, world_size: int, cases: Sequence[Case], make: Callable[[str], Task], num_slots: int) -> Any:
    found: dict[Case, Any] = {}
    for name, mesh in cases:
        try:
            found[name, mesh] = fit(make(name), mesh, num_slots)
        except UsageError as error:
            found[name, mesh] = str(error)
        except Exception as error:
            error.add_note(f"({name} on {mesh})")
            raise
    return found


def check(world_size: int, cases: Sequence[Case], make: Callable[[str], Task], *, timeout: float = 150.0) -> None:
    """Every case has the losses, gradient norms and weights of one process, within rounding."""
    names = list(dict.fromkeys(name for name, _ in cases))
    (alone,) = run_ranks(_all, 1, [(name, "auto") for name in names], make, world_size, timeout=timeout)
    on_ranks = run_ranks(_all, world_size, cases, make, world_size, timeout=timeout)
    for name, mesh in cases:
        expected, where = alone[name, "auto"], f"{name} on {mesh}"
        assert isinstance(expected, Seen), expected
        assert len(expected.losses) >= STEPS // 2 and min(expected.norms, default=1.0) > 1e-2, where
        assert abs(expected.losses[-1] - expected.losses[0]) > 1e-2, f"{where}: nothing is trained"
        held: set[str] = set()
        for seen in (found[name, mesh] for found in on_ranks):
            assert isinstance(seen, Seen), f"{where}: {seen}"
            for mine, theirs in ((seen.losses, expected.losses), (seen.norms, expected.norms)):
                differences = [apart(a, b) for a, b in zip(mine, theirs, strict=True)]
                assert max(differences, default=0.0) <= 1e-6, f"{where}: {mine} instead of {theirs}"
            for key, tensor in seen.state.items():
                message = f"{where}: {key}"
                torch.testing.assert_close(tensor, expected.state[key], rtol=1e-4, atol=1e-5, msg=message)
            held |= seen.state.keys()
        assert held == expected.state.keys(), where


def refusals(world_size: int, cases: Sequence[Case], make: Callable[[str], Task]) -> dict[Case, list[str]]:
    """What each rank says of each case: one line."""
    ranks = run_ranks(_all, world_size, cases, make, world_size)
    said: dict[Case, list[str]] = {case: [found[case] for found in ranks] for case in cases}
    for case, texts in said.items():
        assert all(isinstance(text, str) and "\n" not in text for text in texts), f"{case}: {texts}"
    return said
