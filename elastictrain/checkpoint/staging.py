"""Staging: the state of one step, planned once for a layout and copied once into shared memory, for all who take it.

Those who take it are :class:`~elastictrain.checkpoint.saves.Saves`, which bring it to storage, and
:class:`~elastictrain.checkpoint.snapshots.Snapshots`, which give it to the node's keeper. They share the memory: where both
want the same step, there is one copy. Memory is used again as soon as none of them needs it, and they need no more than
each of them has bounded.

On failure: what goes wrong while planning is a :class:`~elastictrain.checkpoint.ranks.RoundFailed` on every rank, and
nothing has been staged. What goes wrong while staging is told to those who wanted it, on this rank alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from elastictrain.checkpoint.arena import Arena
from elastictrain.checkpoint.image import Image
from elastictrain.checkpoint.plan import Key, Planner, key_of, local_tensors
from elastictrain.checkpoint.ranks import Ranks
from elastictrain.errors import CheckpointError
from elastictrain.state import FlatState


@dataclass(frozen=True)
class Content:
    """What is kept, the same on every rank but for local shards and values."""

    step: int
    state: FlatState
    local_values: Mapping[str, Any]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Staged:
    """A content that has been staged; ``values`` are the JSON values that this rank writes."""

    content: Content
    values: Mapping[str, Any]
    arena: Arena


class Taker(Protocol):
    """Somebody who takes staged states. What is called ``decided`` is its own entry of what rank 0 has concluded."""

    def part(self) -> Any:
        """What this rank brings to the round; may raise, which ends the round on all ranks."""

    def decide(self, parts: list[Any]) -> Any:
        """On rank 0, from what all have brought: what is to be done; None: this state is left out."""

    def make_room(self, decided: Any) -> None:
        """Let go of memory, so that there is some to stage into. May wait."""

    def take(self, decided: Any, staged: Staged) -> None:
        """It is there. Raises nothing."""

    def failed(self, decided: Any, content: Content, error: Exception) -> None:
        """It could not be staged on this rank. Raises nothing."""

    def holds(self, arena: Arena) -> bool:
        """Whether it still needs what is in there."""

    def forget(self, arena: Arena) -> None:
        """It is about to be closed."""


class Staging:
    """Of one generation.

    Args:
        takers: all who ever take what is staged here; more may be appended.
    """

    def __init__(self, ranks: Ranks, takers: list[Taker]) -> None:
        self._ranks, self.takers = ranks, takers
        self._plan: tuple[Key, Image] | None = None
        self._arenas: list[Arena] = []

    def begin(self, content: Content, takers: Sequence[Taker]) -> list[Any]:
        """Stage this state for those of ``takers`` that want it. Collective.

        Returns:
            What was decided for each of them.

        Raises:
            RoundFailed: on every rank; nothing has been staged.
        """
        tensors = {name: value for name, value in content.state.items() if isinstance(value, Tensor)}
        local = local_tensors(tensors)
        values = {name: value for name, value in content.state.items() if name not in tensors}
        is_main = self._ranks.rank == 0
        key: Key = ()

        def ready() -> tuple[bool, Mapping[str, Any], list[Any]]:
            nonlocal key
            for group in (values, content.local_values, {"about": content.about}):
                check_values(group)
            key = key_of(tensors, local)
            is_known = self._plan is not None and self._plan[0] == key
            return is_known, content.local_values, [taker.part() for taker in takers]

        def decide(ranks: list[tuple[bool, Mapping[str, Any], list[Any]]]) -> list[tuple[bool, list[Any]]]:
            _check_local_values([values, *(local_values for _, local_values, _ in ranks)])  # rank 0's own values
            wanted = [taker.decide([parts[i] for *_, parts in ranks]) for i, taker in enumerate(takers)]
            return [(all(is_known for is_known, *_ in ranks), wanted)] * len(ranks)

        is_known, decided = self._ranks.round(ready, decide)
        wanting = [(taker, one) for taker, one in zip(takers, decided, strict=True) if one is not None]
        if wanting and not is_known:
            planner = Planner()
            self._plan = None
            plan = self._ranks.round(lambda: planner.local_plan(tensors, is_main=is_main), planner.global_plan)
            self._plan = (key, planner.image(plan, local))
        if wanting:
            self._stage(content, {**(values if is_main else {}), **content.local_values}, local, wanting)
        return decided

    def _stage(
        self,
        content: Content,
        values: Mapping[str, Any],
        local: Mapping[str, Tensor],
        wanting: Sequence[tuple[Taker, Any]],
    ) -> None:
        """What goes wrong here is told when ranks meet, as what goes wrong later is."""
        assert self._plan is not None
        try:
            for taker, one in wanting:
                taker.make_room(one)
            arena = self._free_arena(self._plan[1], pin=any(tensor.is_cuda for tensor in local.values()))
            arena.stage(local.__getitem__)
        except Exception as error:
            for taker, one in wanting:
                taker.failed(one, content, error)
            return
        for taker, one in wanting:
            taker.take(one, Staged(content, values, arena))

    def _free_arena(self, image: Image, *, pin: bool) -> Arena:
        for arena in [one for one in self._arenas if not any(taker.holds(one) for taker in self.takers)]:
            if arena.image == image:
                return arena
            self._close(arena)
        self._arenas.append(Arena(image, pin=pin))
        return self._arenas[-1]

    def _close(self, arena: Arena) -> None:
        for taker in self.takers:
            taker.forget(arena)
        self._arenas.remove(arena)
        arena.close()

    def close(self) -> None:
        """The memory goes, once the other processes that map it let it go too."""
        for arena in list(self._arenas):
            arena.close()
        self._arenas.clear()


_PLAIN = (bool, int, str, type(None))


def check_values(values: Mapping[str, Any]) -> None:
    """Everything that is no tensor must come back from JSON as it is.

    Raises:
        CheckpointError: names the entry that would not.
    """
    values = {
        name: value for name, value in values.items() if type(value) not in _PLAIN
    }  # thousands are, of optimizers
    if not _is_kept(values):
        name = next(name for name, value in values.items() if not _is_kept(value))
        raise CheckpointError(
            f"the state's {name} is a {type(values[name]).__name__} that JSON cannot hold as it is:"
            " pack it (elastictrain.state.pack)"
        )


def _is_kept(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _check_local_values(all_values: Sequence[Mapping[str, Any]]) -> None:
    merged: dict[str, Any] = {}
    for values in all_values:
        for name, value in values.items():
            if merged.setdefault(name, value) != value:
                raise CheckpointError(f"two ranks give different values for {name}: name local values by rank or shard")
