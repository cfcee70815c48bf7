"""The run log of a virtual world: one object to a number, in any mood, and the rules of what may be in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastictrain.elastic.chain import ChainError, Entry, check_follows

if TYPE_CHECKING:
    from tests.elastic.world import Node, World


class Storage:
    """Exclusive creation, as :class:`elastictrain.elastic.runlog.RunLog` does it.

    Attributes:
        mood: ``fast``; ``slow``; ``lossy``: some answers never come, and some writes come late; ``down``.
    """

    def __init__(self, world: World) -> None:
        self._world, self._chance = world, world.chance
        self.log: list[Entry] = [Entry()]
        self.mood = "fast"
        self._lost_at: dict[str, float] = {}  # by host, when its newest loss was written

    def ask_newest(self, node: Node) -> None:
        self._world.at(self._soon(), self._read, node)

    def ask_create(self, node: Node, entry: Entry) -> None:
        if self.mood == "down" or (self.mood == "lossy" and self._chance.random() < 0.4):
            if self.mood == "lossy" and self._chance.random() < 0.7:  # it arrives, now or much later: nobody says so
                late = self._world.now + self._chance.choice([0.01, 0.5, 3.0])
                self._world.at(late, self._write, node, entry, False)
            self._world.at(self._soon(), self._world.tell, node, node.peer.on_created, entry, None)
        else:
            self._world.at(self._soon(), self._write, node, entry, True)

    def _soon(self) -> float:
        typical = {"fast": 0.005, "lossy": 0.02, "slow": 0.6, "down": 0.1}[self.mood]
        return self._world.now + typical * (0.5 + self._chance.random())

    def _read(self, node: Node) -> None:
        if self.mood == "down" or (self.mood == "lossy" and self._chance.random() < 0.3):
            self._world.tell(node, node.peer.on_storage_failed)
        else:
            self._world.at(self._soon(), self._world.tell, node, node.peer.on_entry, self.log[-1])

    def _write(self, node: Node, entry: Entry, answers: bool) -> None:
        was_created = entry.index > self.log[-1].index
        if was_created:
            self._check(node, entry)
            self._check_hosts(entry)
            self.log.append(entry)
        elif entry == self.log[entry.index]:
            was_created = True  # its own, of a request that was thought to be lost
        if answers:
            self._world.at(self._soon(), self._world.tell, node, node.peer.on_created, entry, was_created)

    def _check(self, node: Node, entry: Entry) -> None:
        last = self.log[-1]
        try:
            check_follows(last, entry)
        except ChainError as error:
            raise AssertionError(f"{node.name} wrote what must not be: {error}") from error
        assert entry.leader == node.peer.me, f"{node.name} wrote for {entry.leader}"
        if entry.generation.boundary >= 0 and entry.generation != last.generation:
            for member in last.generation.members:
                one = self._world.nodes[member.node]
                if one.current == last.generation:
                    assert one.peer.step <= entry.generation.boundary, f"{one.name} went past the boundary"
        assert entry.index < 60 + 12 * self._world.num_faults, f"the log has grown to {entry.index} entries"

    def _check_hosts(self, entry: Entry) -> None:
        """Nobody is let in too early, but for the run's least number of nodes."""
        old, new = self.log[-1], entry.generation
        self._lost_at |= {loss.host: self._world.now for loss in entry.losses if loss not in old.losses}
        before = {member.node for member in old.generation.members}
        hosts = {member.host for member in old.generation.members if member in new.members}
        until = {loss.host: self._lost_at[loss.host] + loss.seconds for loss in entry.losses}
        early = [
            one.node
            for one in new.members
            if one.node not in before and one.host not in hosts and until.get(one.host, 0.0) > self._world.now
        ]
        if new != old.generation and new.first != new.number:
            assert len(new.members) - len(early) < new.size.min_nodes or not early, f"{early} should still be kept out"
