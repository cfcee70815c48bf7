"""How one node takes part in a run: it follows the leader, finds out that it is gone, and takes its place. Pure.

:class:`Peer` knows no socket, no clock and no storage. Whoever drives it tells it what has happened and does what it asks
for (:mod:`elastictrain.elastic.actions`): :mod:`elastictrain.elastic.node` with a real network, a simulator with a virtual
one. Every method that begins with ``on_`` returns actions, to be carried out in order. Times are seconds of a steady clock.

**Following.** A node reads the newest entry of the log, connects to the leader that it names (which may be itself), says
hello, and sends signs of life. The leader sends each new generation, to those who have the one before as a difference.

**Taking over.** A leader that refuses the connection is gone. One that is silent is asked again twice, then members of the
generation are asked whether they hear it (the *pre-vote*): one yes, and there is no claim. If nobody hears it, the node
claims the lead by writing the next entry of the log, survivors one after another, with a random delay that grows with each
attempt. Before it writes it reads: an entry that it did not know means that somebody leads. A member that reaches too few
others to form a generation never claims; a node that is no member and reaches nobody waits long before it does.

On failure: storage that does not answer delays changes of membership and nothing else. Messages of an older epoch, or that
cannot be, close the link that they came through.
"""

from __future__ import annotations

import random
from enum import Enum, auto

from elastictrain.elastic.actions import Action, Close, Connect, Create, Promise, Read, Send
from elastictrain.elastic.chain import ChainError, Entry, Generation, Member, Message
from elastictrain.elastic.election import Election, Verdict
from elastictrain.elastic.following import Following
from elastictrain.elastic.leading import Leading
from elastictrain.elastic.timing import Timing


class State(Enum):
    """What a node is waiting for."""

    READING = auto()  # the log, to follow
    CONNECTING = auto()  # the leader's welcome
    FOLLOWING = auto()
    PAUSING = auto()  # before it reads the log
    STAGGERING = auto()  # before it reads the log, to claim
    CHECKING = auto()  # the log, to claim
    CLAIMING = auto()  # its claim to be written
    VOTING = auto()  # the others' answers


class Peer:
    """One life of one node.

    Args:
        me: unique among all lives of all nodes.
        chance: all that is random here.

    Attributes:
        entry: the newest entry of the log that this node has read or written.
        leading: while it leads.
    """

    def __init__(self, me: Member, timing: Timing, *, chance: random.Random) -> None:
        self.me, self.timing = me, timing
        self.election = Election(me.node, timing, chance=chance)
        self.entry = Entry()
        self._out: list[Action] = []
        self.following = Following(me, timing, out=self._out)
        self.leading: Leading | None = None
        self.state = State.READING
        self._knows_log = False
        self._timer: float | None = None  # of the state
        self._num_links, self._ticked = 0, 0.0
        self._link: int | None = None  # to the leader
        self._claim: Entry | None = None
        self._previous: str | None = None  # who led before the claim
        self._is_reading = self._must_read = False

    # ---- what the driver asks for ------------------------------------------------------------------------------------

    def on_start(self, now: float) -> list[Action]:
        self._ticked = now
        self._seek()
        return self._done(now)

    @property
    def generation(self) -> Generation:
        """The newest one that this node knows."""
        return self.following.generation

    @property
    def step(self) -> int:
        """Finished steps, kept up to date by the driver; -1: none."""
        return self.following.step

    @step.setter
    def step(self, step: int) -> None:
        self.following.step = step

    def on_ready(self, now: float) -> list[Action]:
        """This node can be a member from now on."""
        self.following.is_ready = True
        self.following.beat(now)
        return self._done(now)

    def on_promise(self, asked: Promise, is_kept: bool, step: int, now: float) -> list[Action]:
        """The workers' answer: they will not pass that step; or they cannot promise it, and have come as far as ``step``."""
        self.following.promise(asked, is_kept=is_kept, step=step)
        return self._done(now)

    def on_leave(self, now: float) -> list[Action]:
        """Ask to be let go; :class:`~elastictrain.elastic.actions.Left` follows."""
        self.following.leave()
        return self._done(now)

    def on_failed_workers(self, number: int, now: float) -> list[Action]:
        """Workers of that generation have failed: ask for another one, with whoever is there."""
        self.following.renew(number)
        return self._done(now)

    def on_suspect(self, now: float) -> list[Action]:
        """A worker has lost a peer: whoever does not speak soon is lost."""
        self.following.suspect()
        return self._done(now)

    def on_close(self, reason: str, now: float) -> list[Action]:
        """The run is over for all."""
        self.following.close(reason)
        return self._done(now)

    @property
    def deadline(self) -> float:
        """When :meth:`on_tick` is to be called at the latest."""
        times = [self._ticked + self.timing.ttl]
        if self._timer is not None:
            times.append(self._timer)
        if self.state is State.FOLLOWING:
            times.append(self.following.deadline)
        if self.leading is not None:
            times.append(self.leading.deadline)
        return min(times)

    def on_tick(self, now: float) -> list[Action]:
        if now - self._ticked > 1.5 * self.timing.ttl:  # this process was stopped: nobody else is to blame for silence
            self.following.heard = now
            if self.leading is not None:
                self.leading.leader.thaw(now=now)
                self._must_read = True
                self._read()
        self._ticked = now
        if self.leading is not None and self.leading.retry_at is not None and now >= self.leading.retry_at:
            self._read()
        if self.state is State.FOLLOWING and self.following.is_silent(now):
            self._silent(now)
        elif self.state is State.FOLLOWING and now >= self.following.beat_at:
            self.following.beat(now)
        elif self._timer is not None and now >= self._timer:
            self._timer = None
            self._timer_rang(now)
        return self._done(now)

    # ---- the log -----------------------------------------------------------------------------------------------------

    def on_entry(self, entry: Entry, now: float) -> list[Action]:
        """The newest entry was read; an entry of number 0: there is none."""
        self._is_reading = self._must_read = False
        has_moved = entry.index > self.entry.index
        is_first, self._knows_log = not self._knows_log, True
        if has_moved:
            self.entry = entry
            self.election.somebody_leads()
            self.following.learn(entry.generation)
            if entry.closed and not is_first:
                self.following.close_down(entry.closed)
        if self.leading is not None:
            if not self.leading.look(self.entry, now):
                self._step_down(now)
        elif self._claim is not None and self.entry == self._claim:
            self._lead(now)
        elif self.state is State.CHECKING and not has_moved:
            self._claim = self.entry.claimed_by(self.me, self.following.size)
            self._previous = self.entry.leader.node if self.entry.leader is not None else None
            self._enter(State.CLAIMING)
            self._out.append(Create(self._claim))
        elif self.state in (State.READING, State.CHECKING):
            self._follow(now)
        return self._done(now)

    def on_storage_failed(self, now: float) -> list[Action]:
        """The log could not be read."""
        self._is_reading = self._must_read = False
        self.election.attempt_failed()
        if self.leading is not None and self.leading.retry_at is not None:
            self.leading.retry_at = now + self.election.delay()
        if self.state in (State.READING, State.CHECKING):
            self._enter(State.PAUSING, now + self.election.delay())
        return self._done(now)

    def on_created(self, entry: Entry, was_created: bool | None, now: float) -> list[Action]:
        """What became of ``Create``; None: storage did not say."""
        leading = self.leading
        if was_created and entry.index > self.entry.index:
            self.entry = entry
        if entry == self._claim and leading is None:
            if was_created and self.entry == entry:
                self._lead(now)
            elif self.state is State.CLAIMING:
                self.election.attempt_failed()
                if was_created is None:  # it may be there, or come yet: then it is found when the log is read
                    self._enter(State.PAUSING, now + self.election.delay())
                else:
                    self._claim = None
                    self._seek()
        elif leading is not None and entry == leading.leader.pending:
            if was_created:
                leading.committed(now)
            else:
                leading.retry_at = now + self.election.delay()
                if was_created is False:
                    self._read()
        return self._done(now)

    def _read(self, state: State | None = None) -> None:
        if state is not None:
            self._enter(state)
        if not self._is_reading:
            self._is_reading = True
            self._out.append(Read())

    def _seek(self) -> None:
        """Read the log, to follow whoever leads."""
        self._read(State.READING)

    def _lead(self, now: float) -> None:
        claim, self._claim, mine = self.entry, None, self.following
        self.leading = Leading(
            claim, self.timing, size=mine.size, job=mine.job, previous=self._previous, now=now, out=self._out
        )
        self._connect(now)

    def _step_down(self, now: float) -> None:
        assert self.leading is not None
        self._out.append(Close(self.leading.links))
        self.leading = None
        self._drop()
        self._follow(now)

    # ---- links -------------------------------------------------------------------------------------------------------

    def on_link(self, link: int, now: float) -> list[Action]:
        """A link that was asked for is there."""
        if link == self._link:
            self.following.hello(link, epoch=self.entry.epoch)
        elif self.election.asked(link):
            self._out.append(Send((link,), {"is": "heard?", "epoch": self.entry.epoch}))
        else:
            self._out.append(Close((link,)))
        return self._done(now)

    def on_link_lost(self, link: int, now: float, *, was_refused: bool = False) -> list[Action]:
        """A link has closed or could not be opened; ``was_refused``: nobody listens there any more."""
        if link == self._link:
            self._link = self.following.link = None
            if was_refused:
                self._stagger(now)
            elif self.state is State.FOLLOWING:
                self._connect(now)  # at once: where the process has ended, that is refused
            else:
                self._silent(now)
        elif self.election.asked(link):
            if was_refused:
                self.election.answer(link, "gone")
                self._count_answers(now, is_late=False)
        elif self.leading is not None:
            self.leading.link_lost(link, now)
        return self._done(now)

    def on_message(self, link: int, message: Message, now: float) -> list[Action]:
        try:
            if link == self._link:
                self._from_leader(link, message, now)
            elif self.election.asked(link):
                self.election.answer(link, "yes" if message["heard"] is True else "no")
                self._count_answers(now, is_late=False)
            elif message.get("is") == "heard?":
                heard = self.hears(int(message["epoch"]), now)
                self._out.append(Send((link,), {"is": "heard", "heard": heard}))
            elif self.leading is not None and message.get("epoch", 0) <= self.leading.epoch:
                self.leading.message(link, message, now)
            else:
                self._out.append(Send((link,), {"is": "not-leader"}))
                if self.leading is not None:  # somebody knows of a later epoch
                    self._read()
        except (ChainError, KeyError, TypeError, ValueError):
            self._out.append(Close((link,)))
            if link == self._link:
                self._wrong_leader(now)
            elif self.leading is not None:
                self.leading.link_lost(link, now)
        return self._done(now)

    def hears(self, epoch: int, now: float) -> bool:
        """Is there a leader of that epoch or a later one that this node hears?"""
        if self.leading is not None:
            return self.leading.epoch >= epoch and not self._must_read
        return self.state is State.FOLLOWING and self.following.epoch >= epoch and not self.following.is_silent(now)

    def _connect(self, now: float) -> None:
        self._drop()
        assert self.entry.leader is not None
        self._link = self._new_link()
        self._enter(State.CONNECTING, now + self.election.patience(self.generation))
        self._out.append(Connect(self._link, self.entry.leader))

    def _drop(self) -> None:
        self.following.link = None
        if self._link is not None:
            self._out.append(Close((self._link,)))
            self._link = None

    def _new_link(self) -> int:
        self._num_links += 1
        return -self._num_links  # those that others open have positive numbers

    # ---- the leader speaks -------------------------------------------------------------------------------------------

    def _from_leader(self, link: int, message: Message, now: float) -> None:
        if message.get("is") == "not-leader":
            self._wrong_leader(now)
        elif message.get("is") == "welcome" and int(message["epoch"]) >= self.entry.epoch:
            self.election.somebody_leads()
            self._enter(State.FOLLOWING)
            self.following.welcomed(link, message, now)
        elif self.state is State.FOLLOWING and self.following.epoch >= self.entry.epoch:
            self.following.message(message, now)
            if self.following.is_steady(now):
                self.election.is_steady()
        else:
            raise ChainError("a leader of an older epoch")

    # ---- the leader is silent or gone --------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        if self.entry.leader is None:
            self._stagger(now)
        elif self.entry.leader == self.me:  # a claim that was given up has come through after all
            self._lead(now)
        else:
            self._connect(now)

    def _silent(self, now: float) -> None:
        if self.election.may_retry():
            self._connect(now)
        else:
            self._vote(now)

    def _wrong_leader(self, now: float) -> None:
        """Whoever is there does not lead: somebody else does, or it does not know yet that it does."""
        self._drop()
        if self.election.may_retry():
            self._enter(State.PAUSING, now + self.election.delay())
        else:
            self._vote(now)

    def _vote(self, now: float) -> None:
        self._drop()
        self._enter(State.VOTING, now + self.timing.retry)
        asked = [Connect(self._new_link(), one) for one in self.election.voters(self.generation, self.entry)]
        self.election.ask([one.link for one in asked])
        self._out += asked
        self._count_answers(now, is_late=False)

    def _count_answers(self, now: float, *, is_late: bool) -> None:
        min_nodes = self.following.size.min_nodes
        verdict = self.election.verdict(self.generation, min_nodes=min_nodes, is_late=is_late)
        if verdict is Verdict.OPEN:
            return
        self._out.append(Close(self.election.end_vote()))
        if verdict is Verdict.CLAIM or (verdict is Verdict.ALONE and self.election.has_waited_alone(now)):
            self._stagger(now)
        else:
            self._enter(State.PAUSING, now + self.election.pause(self.following.ttl))

    def _stagger(self, now: float) -> None:
        """Claim soon, survivors one after another."""
        self._drop()
        if self.following.is_leaving and not self.following.is_member:  # it may still be saving what others begin with
            self._enter(State.PAUSING, now + self.timing.look_for(len(self.generation.members)))
        elif self.following.is_over:
            self._enter(State.PAUSING, now + self.following.ttl)
        else:
            self._enter(State.STAGGERING, now + self.election.stagger(self.generation))

    def _timer_rang(self, now: float) -> None:
        if self.state is State.PAUSING:
            self._seek()
        elif self.state is State.STAGGERING:
            self._read(State.CHECKING)
        elif self.state is State.VOTING:
            self._count_answers(now, is_late=True)
        elif self.state is State.CONNECTING:
            self._silent(now)

    def _enter(self, state: State, until: float | None = None) -> None:
        self.state, self._timer = state, until

    def _done(self, now: float) -> list[Action]:
        if self.leading is not None and not self._must_read:
            self.leading.decide(now)
        out, self._out[:] = self._out.copy(), []
        return out
