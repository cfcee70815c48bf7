"""State saved in any layout loads in any other, to the bit, and training goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from elastictrain import Callback, CheckpointConfig, Trainer
from elastictrain.callback import RunInfo
from elastictrain.callbacks import EMA
from elastictrain.keeping import collect
from tests.helpers import apart, run_ranks
from tests.parallel.llama import Llama, Losses, Options, variant, whole

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-6
SAVED, END = 1, 3  # steps: of the checkpoint, and of the run that goes on from it
LAYOUTS = {
    "one": (1, "auto"),
    "dp2": (2, "dp_replicate=2"),
    "dp3": (3, "dp_replicate=3"),
    "shard4": (4, "dp_shard=4"),
    "hsdp2x2": (4, "dp_replicate=2,dp_shard=2"),
    "tp2": (2, "tp=2"),
    "tp4": (4, "tp=4"),
    "pp2": (2, "pp=2"),
    "pp4": (4, "pp=4"),
    "pp2 interleaved": (2, "pp=2,pp_schedule=Interleaved1F1B"),
    "tp2 pp2": (4, "tp=2,pp=2"),
    "dp2 tp2": (4, "dp_replicate=2,tp=2"),
    "shard2 tp2": (4, "dp_shard=2,tp=2"),
    "dp2 pp2": (4, "dp_shard=2,pp=2"),
    "dp2 tp2 pp2": (8, "dp_replicate=2,tp=2,pp=2"),
}
PLAIN = variant(optimizer="adamw", units=True, plan="plain")
HARD = variant(optimizer="adamw", units=True, plan="loss", vocab=65, tied=True, frozen=("n1",))

State = dict[str, Any]  # name -> tensor in full | value


class Held(Callback):
    """The flat state of this rank in full, where training begins or where it ends."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self.state: State = {}

    def on_generation_start(self, info: RunInfo) -> None:
        if not self._at_end:
            self._look(info)

    def on_generation_end(self, info: RunInfo) -> None:
        if self._at_end:
            self._look(info)

    def _look(self, info: RunInfo) -> None:
        session: Any = info.task.trainer._session  # type: ignore[union-attr]
        flat, local = collect(session)
        tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
        kept = {**(flat if session.ranks.is_main else tensors), **local}
        self.state = {name: whole(v).clone() if isinstance(v, Tensor) else v for name, v in kept.items()}


def _train(options: Options, mesh: str, steps: int, **more: Any) -> tuple[dict[int, float], State]:
    losses, held = Losses(), Held(at_end="resume" not in more)
    trainer = Trainer(
        max_steps=steps,
        mesh=mesh,
        callbacks=[losses, EMA(decay=0.9), held],
        checkpoint=CheckpointConfig(every_seconds=None),
        **{"global_batch_size": 8, "micro_batch_size": 2, "log_every": 1, **more},
    )
    trainer.fit(Llama(options))
    return losses.values, held.state


def _save(rank: int, world_size: int, options: Options, names: list[str], folder: Path) -> Any:
    """By layout: the losses, and what this rank held in the end."""
    found = {}
    for name in names:
        found[name] = _train(options, LAYOUTS[name][1], SAVED, run_dir=str(folder / name))
    return found


def _load(
    rank: int, world_size: int, options: Options, pairs: list[tuple[str, str]], saved: dict[str, State], folder: Path
) -> Any:
    """For each pair of layouts: the losses, the names of what this rank was given, and those that differ."""
    found = []
    for source, target in pairs:
        losses, state = _train(options, LAYOUTS[target][1], END, resume=str(folder / source))
        wrong = [name for name, value in state.items() if not same(saved[source].get(name), value)]
        found.append((losses, set(state), wrong))
    return found


def same(a: Any, b: Any) -> bool:
    return a.equal(b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and bool(a == b)


def by_size(names: list[str]) -> dict[int, list[str]]:
    sizes: dict[int, list[str]] = {}
    for name in names:
        sizes.setdefault(LAYOUTS[name][0], []).append(name)
    return sizes


def check_pairs(options: Options, pairs: list[tuple[str, str]], folder: Path) -> None:
    """Save in each first layout, go on in each second one; the ranks are started once for each number of them."""
    uninterrupted, _ = run_ranks(lambda *_: _train(dataclasses.replace(options, plan="plain"), "auto", END), 1)[0]
    saved: dict[str, State] = {}
    for world_size, names in by_size(sorted({source for source, _ in pairs})).items():
        for found in run_ranks(_save, world_size, options, names, folder, timeout=250):
            for name, (losses, state) in found.items():
                check_losses(losses, uninterrupted, list(range(1, SAVED + 1)), name)
                together = saved.setdefault(name, {})
                assert not [key for key in state if key in together and not same(together[key], state[key])], name
                together |= state
    for state in saved.values():
        assert len({key.partition(".")[0] for key in state} & {"model", "optim", "pg", "ema", "trainer", "data"}) == 6
        assert sum(isinstance(value, Tensor) for value in state.values()) > 80
    for world_size, names in by_size(sorted({target for _, target in pairs})).items():
        mine = [pair for pair in pairs if pair[1] in names]
        ranks = run_ranks(_load, world_size, options, mine, saved, folder, timeout=250)
        for pair, *found in zip(mine, *ranks, strict=True):
            for losses, _, wrong in found:
                assert not wrong, (pair, wrong)
                check_losses(losses, uninterrupted, list(range(SAVED + 1, END + 1)), pair)
            assert set().union(*(names for _, names, _ in found)) == saved[pair[0]].keys(), pair


def check_losses(losses: dict[int, float], expected: dict[int, float], steps: list[int], where: Any) -> None:
    assert sorted(losses) == steps, where
    assert max(apart(losses[step], expected[step]) for step in steps) <= TOLERANCE, where


def further_on(*distances: int) -> list[tuple[str, str]]:
    """Ordered pairs of layouts, each layout with those so many places further on."""
    names = list(LAYOUTS)
    return [(name, names[(i + d) % len(names)]) for d in distances for i, name in enumerate(names)]


@pytest.mark.slow
def test_a_few(tmp_path: Path) -> None:
    check_pairs(PLAIN, [("tp2", "pp2"), ("pp2", "one"), ("one", "tp2")], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_to_any(tmp_path: Path) -> None:
    eight_ranks = "dp2 tp2 pp2"  # one load of it will do: it is the dearest
    pairs = [*further_on(1), *((source, target) for source, target in further_on(4, 7) if target != eight_ranks)]
    assert len(set(pairs)) == len(pairs) >= 40
    assert all(source != target for source, target in pairs)
    assert {name for pair in pairs for name in pair} == LAYOUTS.keys()
    check_pairs(HARD, pairs, tmp_path)
