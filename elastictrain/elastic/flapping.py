"""Which hosts are kept out for a while, because nodes are lost with them again and again. Pure: no clock.

A node that is lost and comes back makes all others stop, meet and go on from a snapshot, twice. One that does so again and
again would cost more than it gives. So the second return of a host waits, and each later one twice as long
(:attr:`Timing.return_delay`, up to :attr:`Timing.max_return_delay`); a host that has stayed in for that longest time has one
loss forgotten. The first return is let in at once, and so is whoever is needed for the run's least number of nodes: without
it nobody trains, and there is nobody to protect.

A host is an address: an agent that is started again has another name and another process. As long as another member on the
same address is there, the host is, and nothing is counted. Nodes that leave with notice are not lost.

The losses are part of every entry of the log. Times are the leader's own, and begin anew with another one: a host is kept
out no shorter than it should be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastictrain.elastic.chain import Loss, Member
from elastictrain.elastic.timing import Timing

MAX_HOSTS = 128  # that are remembered


class Flapping:
    """What one leader knows.

    Args:
        losses: by the log.
        members: of the newest generation.

    Attributes:
        losses: by the log.
    """

    def __init__(self, losses: tuple[Loss, ...], members: Iterable[Member], timing: Timing, *, now: float) -> None:
        self.losses, self._timing = losses, timing
        self._lost_at = {loss.host: now for loss in losses}  # or before
        self._here_since = {member.host: now for member in members}  # or before

    def after(self, fallen: Collection[str], *, now: float) -> tuple[Loss, ...]:
        """The losses, once these hosts are lost."""
        found = {loss.host: loss for loss in self.losses if self._times(loss, now) > 0}
        for host in sorted(fallen):
            before = found.pop(host, None)
            times = 1 + (self._times(before, now) if before is not None else 0)
            found[host] = Loss(host, times, self._seconds(times))
        return tuple(found.values())[-MAX_HOSTS:]

    def wait(self, host: str, losses: Iterable[Loss], *, now: float) -> tuple[int, float]:
        """How often it was lost, and seconds until it is let in, by :meth:`after`; (0, 0.0): it may come."""
        loss = next((one for one in losses if one.host == host), None)
        if loss is None:
            return 0, 0.0
        since = self._lost_at.get(host, now) if loss in self.losses else now
        left = since + loss.seconds - now
        return (loss.times, left) if left > 0 else (0, 0.0)

    def committed(self, losses: tuple[Loss, ...], members: Iterable[Member], *, now: float) -> None:
        """That is what the log says now."""
        self._lost_at |= {loss.host: now for loss in losses if loss not in self.losses}
        self.losses = losses
        self._here_since = {one.host: self._here_since.get(one.host, now) for one in members}

    def _times(self, loss: Loss, now: float) -> int:
        """Losses that are not forgotten."""
        since = self._here_since.get(loss.host, now)
        return loss.times - int((now - since) / self._timing.max_return_delay)

    def _seconds(self, times: int) -> float:
        doubled = self._timing.return_delay * 2.0 ** min(times - 2, 60)
        return 0.0 if times < 2 else min(doubled, self._timing.max_return_delay)
