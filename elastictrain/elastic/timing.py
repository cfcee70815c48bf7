"""How long the nodes of a run wait for what, and how many they are to be: numbers that all parts of the protocol share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastictrain.elastic.chain import Member, Size
from elastictrain.elastic.fit import Fit


@dataclass(frozen=True)
class Timing:
    """How long things may take, and how many nodes a run has that begins with this node.

    Args:
        min_nodes, max_nodes: see :attr:`size`.
        fit: nodes that the mesh has no place for stand by, and where no mesh can be formed, nothing is.
        beat: seconds between two signs of life; more with many nodes, see :meth:`beat_for`.
        ttl: seconds of silence after which a node, or the leader, is taken for lost.
        settle, gather: seconds that losses, and joins, wait for others like them.
        form: seconds that the first generation waits for more nodes once there are enough.
        grace: seconds that a new leader waits for the members it has inherited.
        probe: seconds that everybody has to answer when somebody suspects a loss.
        retry: seconds that a leader that does not answer has to answer again.
        stagger: seconds between the claims of two survivors.
        isolation: seconds that a node that reaches nobody, and belongs to nobody, waits before it claims; doubled each time.
        lead: steps between the newest known one and a proposed boundary, at least.
        ahead: seconds of training between a proposal and its boundary: what is agreed on by then keeps nobody waiting there.
            What the last entry of the log took to be written comes on top.
        return_delay: seconds that a node whose host was lost twice is kept out; doubled with each loss; 0: none is.
        max_return_delay: that it is kept out at most; who stays in for so long has a loss forgotten.
    """

    min_nodes: int = 1
    max_nodes: int = 1 << 20
    fit: Fit = Fit()  # noqa: RUF009 - frozen
    beat: float = 0.25
    ttl: float = 2.0
    settle: float = 0.02
    gather: float = 0.3
    form: float = 1.0
    grace: float = 1.0
    probe: float = 0.4
    retry: float = 0.3
    stagger: float = 0.03
    isolation: float = 5.0
    lead: int = 2
    ahead: float = 0.3
    return_delay: float = 10.0
    max_return_delay: float = 300.0

    @property
    def size(self) -> Size:
        """What this node's command says: that of a run which begins with it."""
        return Size(self.min_nodes, self.max_nodes)

    def is_enough(self, members: Sequence[Member], size: Size) -> bool:
        """Can these train together, in a run of that size?"""
        return len(members) >= size.min_nodes and self.fit.holds([one.workers for one in members])

    def choose(
        self, members: Sequence[Member], size: Size, *, rather: Collection[str] = frozenset()
    ) -> tuple[Member, ...]:
        """Those of them who train, if they are enough; the first rather than the last. Else all of them, who then wait.

        Args:
            rather: names of those that are chosen before any others.
        """
        there = members[: size.max_nodes]
        order = sorted(range(len(there)), key=lambda place: there[place].node not in rather)
        places = [order[index] for index in self.fit.choose([there[place].workers for place in order])]
        chosen = tuple(there[place] for place in sorted(places))
        return chosen if self.is_enough(chosen, size) else tuple(there)

    def beat_for(self, num_nodes: int) -> float:
        """So that the leader of a large run reads about 2,500 signs of life a second and no more."""
        return max(self.beat, num_nodes / 2500)

    def look_for(self, num_nodes: int) -> float:
        """Seconds between two looks for a new leader by a node that leaves; all of a large run's may leave at once."""
        return max(self.grace / 2, num_nodes / 100)

    def ttl_for(self, num_nodes: int) -> float:
        return max(self.ttl, 4 * self.beat_for(num_nodes))
