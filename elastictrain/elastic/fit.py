"""With which nodes a mesh can be formed: their workers add up to a number of ranks that it can have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """What a run's mesh asks of the number of ranks.

    Args:
        unit: it has a multiple of so many.
        is_fixed: it has ``unit`` of them, and no more.
        mesh: in words, as the command has it.
    """

    unit: int = 1
    is_fixed: bool = False
    mesh: str = ""

    @property
    def needs(self) -> str:
        """In words; empty where any number will do."""
        if self.unit == 1 and not self.is_fixed:
            return ""
        return f"--mesh {self.mesh} needs {'' if self.is_fixed else 'a multiple of '}{self.unit} ranks"

    def holds(self, workers: Sequence[int]) -> bool:
        """Do nodes with so many workers each make a mesh, all of them?"""
        total = sum(workers)
        return (total == self.unit if self.is_fixed else total % self.unit == 0) and (total > 0 or self.unit == 1)

    def choose(self, workers: Sequence[int]) -> list[int]:
        """The places of those who make the largest mesh, the first rather than the last; empty where there is none."""
        if self.holds(workers):
            return list(range(len(workers)))
        if len(set(workers)) == 1:  # as nearly always; a run may have thousands of them
            most = min(len(workers), self.unit // workers[0]) if self.is_fixed else len(workers)
            return next((list(range(n)) for n in range(most, 0, -1) if self.holds(workers[:n])), [])
        return self._just_enough(workers) if self.is_fixed else self._all_but_the_surplus(workers)

    def _just_enough(self, workers: Sequence[int]) -> list[int]:
        reached: dict[int, list[int]] = {0: []}  # by number of ranks, the first nodes that make it
        for place, count in enumerate(workers):
            for total, chosen in list(reached.items()):
                if total + count <= self.unit:
                    reached.setdefault(total + count, [*chosen, place])
        return reached.get(self.unit, [])

    def _all_but_the_surplus(self, workers: Sequence[int]) -> list[int]:
        surplus: dict[int, tuple[int, frozenset[int]]] = {0: (0, frozenset())}  # by remainder: fewest ranks, whose
        for place in reversed(range(len(workers))):
            for rest, (total, left_out) in list(surplus.items()):
                key, more = (rest + workers[place]) % self.unit, total + workers[place]
                if key not in surplus or more < surplus[key][0]:
                    surplus[key] = more, left_out | {place}
        total, left_out = surplus.get(sum(workers) % self.unit, (sum(workers), frozenset()))
        return [place for place in range(len(workers)) if place not in left_out] if total < sum(workers) else []
