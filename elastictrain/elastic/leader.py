"""What the leader of a run decides: who is in the next generation, and when it begins. Pure: no sockets, no clock.

* A node whose connection has closed, or that was silent for :attr:`Timing.ttl`, is **lost**: the others go on without it at
  once. Losses within :attr:`Timing.settle` are one change, and so are joins within :attr:`Timing.gather`.
* A change that nobody was forced into (a node joins or leaves) is **planned**: the leader proposes a step a little ahead,
  by :attr:`Timing.ahead`, each member promises not to pass it (or says that it is too late, and a later one is proposed,
  further ahead each time), and only then is the change committed. A loss meanwhile needs no step and wins.
* Where none of the members stays, the others begin once the last of them has ended: what they begin with is what those
  have saved at the step where they stop. The log names them, so that a later leader waits for those it has not heard of yet.
* Survivors keep their order; newcomers come behind them. Nodes above the maximum stand by. Below the minimum nothing is
  formed; where that is planned, because nodes leave, those that stay are paused together, and nobody trains.
* A loss takes nobody out who could train on: what the lost node had, its neighbours may be the only ones to hold now. So
  those above a new maximum step aside at the next planned step, when the state is whole elsewhere; and where the mesh has no
  place for all, the neighbours of those that are lost are kept rather than others.
* The **size** (minimum and maximum) is the run's, and handed on with it. Another one is in the log before anything comes of
  it; then members above its maximum, or all where they are below its minimum, stop at a planned step.

Times are seconds of one steady clock, handed in. What is decided comes out of :meth:`Leader.tick`, which is to be called
after each event and at :attr:`Leader.deadline`.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastictrain.elastic.absent import Absent
from elastictrain.elastic.chain import Entry, Generation, Loss, Member, Size
from elastictrain.elastic.decisions import (
    Bye,
    Cancel,
    Commit,
    Decision,
    Drop,
    Gone,
    KeepOut,
    Prepare,
    Probe,
    Reread,
    in_words,
)
from elastictrain.elastic.flapping import Flapping
from elastictrain.elastic.nodes import LONGEST_WRITE, Node, Silence, boundary_for
from elastictrain.elastic.timing import Timing
from elastictrain.elastic.wanted import choose_members


class Leader:
    """The leader of one epoch.

    Args:
        entry: the claim.
        size: of a run that begins with this node.
        previous: the node that led before.
        job: that this node has seen members of.

    Attributes:
        absent: nodes that are gone.
    """

    def __init__(
        self, entry: Entry, timing: Timing, *, size: Size, now: float, previous: str | None, job: str = ""
    ) -> None:
        self.entry, self.timing, self.epoch = entry, timing, entry.epoch
        self._own_size, self._resize, self._is_scaled, self._job = size, False, False, job
        self.flapping = Flapping(entry.losses, entry.generation.members, timing, now=now)
        self._again_at: float | None = None  # when somebody may be let in, or need not be waited for any more
        self.nodes: dict[str, Node] = {}
        self.pending: Entry | None = None
        self.preparing: int | None = None
        self.absent = Absent(previous, entry.generation)
        self._losses_since: float | None = None if not entry.generation.members else now
        self._joins_since: float | None = None
        self._grace_until = now + timing.grace
        self._unheard = entry.generation.leaving  # who may hand over still, and look for this leader
        self._unheard_until = now + 4 * timing.look_for(len(entry.generation.members))
        self._is_due_again: float | None = None
        self._is_touched = True  # something has happened since the last decision; a sign of life is nothing
        self._promised = 0
        self._ahead = timing.lead
        self._pending_since = self._write_seconds = 0.0  # how long the last entry took to be written
        self._renew = False
        self.is_stopping = False
        self._closing = ""
        self._silence = Silence(self.nodes, timing, now=now)
        self._reread_at = now + 2 * timing.ttl

    @property
    def generation(self) -> Generation:
        return self.entry.generation

    @property
    def is_handed_on(self) -> bool:
        """Is somebody here who has been in the run? Else what is asked of it may be of nodes that are gone."""
        members = self.generation.members
        return not members or any(one.node in self.nodes for one in members)

    @property
    def run(self) -> str:
        """What nodes of the run do that are here: "training", or "waiting" for others to train with; empty: none is here."""
        here = [one for one in self.generation.members if one.node in self.nodes]
        is_waiting = self.generation.is_paused or not self.timing.is_enough(here, self.size)
        return ("waiting" if is_waiting else "training") if here else ""

    @property
    def knows_size(self) -> bool:
        """Is the size more than what this node's own command says?"""
        return self.is_handed_on or self._is_scaled

    @property
    def size(self) -> Size:
        """The run's."""
        written = self.entry.size if self.is_handed_on else None
        return self._own_size if self._resize or written is None else written

    @property
    def is_settled(self) -> bool:
        """There is nothing to do."""
        is_idle = self.pending is None and self.preparing is None and not self._resize
        return is_idle and self._losses_since is None and self._joins_since is None

    @property
    def promised_boundary(self) -> int | None:
        """What all members have promised and may be in the log at any moment."""
        if self.pending is None or self.pending.generation == self.generation:
            return None
        boundary = self.pending.generation.boundary
        return boundary if boundary >= 0 else None

    # ---- events ------------------------------------------------------------------------------------------------------

    def hello(
        self, member: Member, *, link: int, is_ready: bool, step: int, now: float, is_leaving: bool = False
    ) -> None:
        """A node has connected."""
        before = self.nodes.get(member.node)
        is_leaving = is_leaving or self.is_stopping or (before is not None and before.is_leaving)
        self.nodes[member.node] = Node(member, link, now, is_ready, step, is_leaving, counted=(now, step))
        if before is not None:
            self._promised -= self.preparing is not None and before.promised == self.preparing
        self.absent.came(member.node)
        self._joins(now)

    def beat(self, node: str, *, is_ready: bool, step: int, now: float) -> None:
        known = self.nodes.get(node)
        if known is not None:
            known.reached(step, now)
            if is_ready != known.is_ready:
                known.is_ready = is_ready
                self._joins(now)

    def leave(self, node: str, *, now: float) -> None:
        """A node wants to go, in good order."""
        known = self.nodes.get(node)
        if known is not None and not known.is_leaving:
            known.is_leaving = True
            self._joins(now)

    def stop(self, *, now: float) -> None:
        """All nodes shall go, also those that come while some are still there."""
        self.is_stopping = True
        for node in self.nodes:
            self.leave(node, now=now)

    def scale(self, size: Size, *, now: float) -> None:
        """The run has this size from now on."""
        if size != self.size or size != self.entry.size:
            self._own_size, self._resize, self._is_scaled = size, True, True
            self._losses(now)

    def lost(self, node: str, *, now: float) -> None:
        known = self.nodes.pop(node, None)
        if known is not None:
            self._losses(now)
            if self.generation.rank_of(node) is None:
                self.absent.let_down(node)
        self.absent.went(node, with_notice=known is not None and known.is_leaving)

    def renew(self, number: int, *, now: float) -> None:
        """The workers of that generation have failed somewhere: all start again, with whoever is there."""
        if number == self.generation.number and number > 0:
            self._renew = True
            self._losses(now)

    def suspect(self, *, now: float) -> None:
        """A worker has lost a peer: whoever does not answer soon is lost."""
        self._silence.suspect(now=now)

    def promise(self, node: str, *, boundary: int, is_kept: bool, step: int, now: float) -> None:
        """The answer to :class:`Prepare`."""
        self.beat(node, is_ready=True, step=step, now=now)
        if boundary != self.preparing or node not in self.nodes:
            return
        self._is_touched = True
        if is_kept:
            self._promised += self.nodes[node].promised != boundary
            self.nodes[node].promised = boundary
        else:
            self.preparing = None  # it may be past that step: the next tick proposes a later one
            self._ahead *= 2  # so that short steps cannot outrun the question for ever
            self._joins_since = self._joins_since if self._joins_since is not None else now

    def close(self, reason: str, *, now: float) -> None:
        """The run is over for all."""
        self._closing = reason or "closed"
        self._losses(now)

    def committed(self, *, now: float) -> None:
        assert self.pending is not None
        self._write_seconds = min(now - self._pending_since, LONGEST_WRITE)
        before = {one.node for one in self.generation.members}
        self.entry, self.pending = self.pending, None
        if self.generation.boundary >= 0:
            for node in sorted(before - {one.node for one in self.generation.members} - self.nodes.keys()):
                self.absent.let_down(node)  # lost as that was written
        self._job = self.generation.job if self.generation.members else self._job
        self._resize = self._resize and self._own_size != self.entry.size
        self.flapping.committed(self.entry.losses, self.generation.members, now=now)
        self._losses(now)  # whatever has happened since

    def thaw(self, *, now: float) -> None:
        """This process was stopped for a while: nobody else is to blame for silence."""
        self._silence.thaw(now=now)

    # ---- decisions ---------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to do, if nothing happens before."""
        times = [self._reread_at, self._silence.deadline]
        if self._is_due_again is not None and self.pending is None:
            times.append(self._is_due_again)
        if self._again_at is not None:
            times.append(self._again_at)
        if self._unheard:
            times.append(self._unheard_until)
        return min(times)

    def tick(self, now: float) -> list[Decision]:
        out: list[Decision] = []
        if now >= self._reread_at:  # an idle leader may have been replaced without noticing
            self._reread_at = now + 2 * self.timing.ttl
            out.append(Reread())
        late, asks = self._silence.look(now=now)
        out += [Probe()] if asks else []
        out += [Drop(tuple(self.nodes[name].link for name in late))] if late else []
        for name in late:
            self.lost(name, now=now)
        if self._unheard and now >= self._unheard_until:
            self._miss(now)
        told = self.absent.untold()
        out += [] if told is None else [Gone(told)]
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self._joins(now)
        is_due = self._is_touched or (self._is_due_again is not None and now >= self._is_due_again)
        has_changed = self._losses_since is not None or self._joins_since is not None
        if is_due and has_changed and self.pending is None and not self.entry.closed:
            self._is_touched, self._pending_since = False, now
            self._decide(now, out)
        return out

    def _wanted(
        self, losses: tuple[Loss, ...], now: float, out: list[Decision], *, is_forced: bool
    ) -> tuple[Member, ...]:
        """Who should be in the next generation; those that may not come in yet are told."""
        found = choose_members(
            self.generation,
            self.nodes,
            self.size,
            timing=self.timing,
            flapping=self.flapping,
            losses=losses,
            now=now,
            is_forced=is_forced,
        )
        self._again_at = min((now + seconds for _, seconds in found.kept_out.values()), default=None)
        for name, (times, seconds) in found.kept_out.items():
            if not self.nodes[name].waits:
                self.nodes[name].waits = True
                out.append(KeepOut(self.nodes[name].link, times, seconds))
        return found.members

    def _losses_of(self, here: list[str], now: float) -> tuple[Loss, ...]:
        """What the log is to say of hosts, with those members that are lost now."""
        hosts = {self.nodes[name].member.host for name in here}
        gone = [one for one in self.generation.members if one.node not in self.nodes]
        fallen = {one.host for one in gone if not self.absent.gave_notice(one.node)} - hosts
        return self.flapping.after(fallen, now=now)

    def _decide(self, now: float, out: list[Decision]) -> None:
        members = self.generation.members
        if self._closing:
            self._commit(self.entry.with_closed(self._closing), out)
            return
        self._resize = self._resize and self._own_size != self.entry.size
        if self._resize:  # what is being prepared goes on, and so does what else is to be done
            self.pending = self.entry.with_size(self._own_size)
            out.append(Commit(self.pending))
            return
        if self.preparing is not None and self._losses_since is None and self._promised < len(members):
            self._is_due_again = None
            return
        here = [one.node for one in members if one.node in self.nodes]
        if self._unaccounted(one.node for one in members) and now < self._grace_until:
            self._is_due_again = self._grace_until
            return
        losses = self._losses_of(here, now) if here else ()
        is_forced = (len(here) < len(members) or self._renew) and not self.generation.is_paused
        wanted, size = self._wanted(losses, now, out, is_forced=is_forced), self.size
        if self._may_not_begin(here, now):
            wanted = ()
        if not here:  # the first generation, or nobody of the last one is left
            due = 0.0 if len(wanted) in (0, size.max_nodes) else self._since() + self.timing.form
        elif self._losses_since is not None:
            due = self._losses_since + self.timing.settle
        else:
            due = self._since() + self.timing.gather
        if now < due:
            self._is_due_again = due
            return
        self._is_due_again = None
        is_enough, is_paused = self.timing.is_enough(wanted, size), self.generation.is_paused
        nobody_trains = not members or is_paused
        is_sudden = is_forced or nobody_trains
        must_form = self._renew or (bool(members) and is_paused == is_enough)
        if [one.node for one in wanted] == [one.node for one in members] and not must_form:
            self._rest(out)
            self._let_go(out, everybody=False)
        elif is_sudden and not is_enough:
            self._rest(out)
            self._let_go(out, everybody=True)
            out.append(Reread())  # a leader that cannot form anything had better still be one
        elif is_sudden:
            self._form(wanted, -1, losses, self._why(here, wanted), out)
        elif self.preparing is None:
            ahead = self.timing.ahead + self._write_seconds
            self.preparing = boundary_for([self.nodes[name] for name in here], least=self._ahead, at=now + ahead)
            self._promised = 0
            for name in here:
                self.nodes[name].promised = -1
            self._joins_since, self._losses_since = self._since(), None
            out.append(Prepare(self.preparing))
        elif self._promised == len(here):
            self._form(wanted, self.preparing, losses, self._why(here, wanted), out)

    def _unaccounted(self, names: Iterable[str]) -> list[str]:
        """Those of them that are neither here nor known to be gone."""
        return [name for name in names if name not in self.nodes and name not in self.absent]

    def _miss(self, now: float) -> None:
        """Those that have not come by now were lost with the leader before, or have ended."""
        for name in self._unaccounted(self._unheard):
            self.absent.went(name, with_notice=True)
            self.absent.let_down(name)
            self._joins(now)
        self._unheard = ()

    def _may_not_begin(self, here: list[str], now: float) -> bool:
        """Is the state that those nodes would begin with still in the hands of some that leave?"""
        if not here:  # they have been let go, and stay connected until their workers have ended
            is_awaited = self._was_left and bool(self._unaccounted(self._unheard))
            return is_awaited or any(node.is_leaving for node in self.nodes.values())
        is_sudden = len(here) < len(self.generation.members) or self._renew
        return not is_sudden and all(self.nodes[name].is_leaving for name in here)

    @property
    def _was_left(self) -> bool:
        """All members have gone in good order, this node was there then, and the others go on with it."""
        old = self.generation
        return not old.members and bool(old.job) and old.job == self._job

    def _form(
        self, wanted: tuple[Member, ...], boundary: int, losses: tuple[Loss, ...], reason: str, out: list[Decision]
    ) -> None:
        old, number, size = self.generation, self.generation.number + 1, self.size
        if self._was_left or any(one.node in self.nodes for one in old.members):
            job, first = old.job, old.first
        else:  # nobody is left who could go on with it
            job, first = f"{wanted[0].node}/{number}", number
        is_paused = not self.timing.is_enough(wanted, size)
        leaving = tuple(one.node for one in old.members if one.node in self.nodes and self.nodes[one.node].is_leaving)
        generation = Generation(number, self.epoch, wanted, boundary, reason, job, first, is_paused, size, leaving)
        self._commit(self.entry.with_generation(generation, losses), out)

    def _commit(self, entry: Entry, out: list[Decision]) -> None:
        self.pending = entry
        self._renew, self._losses_since, self._joins_since, self._is_due_again = False, None, None, None
        self.preparing, self._ahead = None, self.timing.lead
        out.append(Commit(entry))

    def _rest(self, out: list[Decision]) -> None:
        """Nothing to change."""
        self._losses_since = self._joins_since = None
        self._ahead = self.timing.lead
        if self.preparing is not None:
            self.preparing = None
            out.append(Cancel())

    def _let_go(self, out: list[Decision], *, everybody: bool) -> None:
        """Tell nodes that want to leave and are not, or need not be, members any more."""
        members = {one.node for one in self.generation.members}
        free = [
            node
            for name, node in self.nodes.items()
            if node.is_leaving and not node.was_told and (everybody or name not in members)
        ]
        if free:
            for node in free:
                node.was_told = True
            out.append(Bye(tuple(node.link for node in free)))

    def _why(self, here: list[str], wanted: tuple[Member, ...]) -> str:
        leaving = {name for name in here if self.nodes[name].is_leaving}
        return in_words(self.generation, wanted, here=here, leaving=leaving, size=self.size, renew=self._renew)

    def _since(self) -> float:
        """The first event that nothing was done about yet."""
        return min(one for one in (self._losses_since, self._joins_since) if one is not None)

    def _losses(self, now: float) -> None:
        self._is_touched = True
        self._losses_since = now if self._losses_since is None else self._losses_since

    def _joins(self, now: float) -> None:
        self._is_touched = True
        self._joins_since = now if self._joins_since is None else self._joins_since
