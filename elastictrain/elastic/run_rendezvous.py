"""Where the agents of several nodes meet: torchelastic's rendezvous over a run's own membership.

:class:`RunRendezvous` is one node's, between torch's loop or our agent on one side and
:class:`~elastictrain.elastic.node.RunNode`, which follows or leads the run, on the other. What may be said to it is in
:mod:`elastictrain.elastic.handler`. A generation's workers meet by the store of its first member; where the generation was
agreed on, nodes ask for it before workers have stopped.
``num_nodes_waiting`` tells of any newer generation, so that under torchrun a loss restarts workers like a join.

On failure: torch's ``RendezvousTimeoutError``, ``RendezvousClosedError`` and ``RendezvousConnectionError``; a
:class:`~elastictrain.errors.UsageError` for an endpoint, a store or a token that cannot work.
"""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastictrain.checkpoint.storage import is_exclusive
from elastictrain.checkpoint.token import VARIABLE
from elastictrain.elastic.actions import Promise
from elastictrain.elastic.chain import Generation, Member, Size
from elastictrain.elastic.endpoint import key_in, listen_if_mine, own_address
from elastictrain.elastic.links import listen
from elastictrain.elastic.node import RunNode
from elastictrain.elastic.rendezvous import GenerationHandler, LeftError, Meeting, free_port
from elastictrain.elastic.runlog import FixedLog, Log, RunLog, folder_of
from elastictrain.elastic.timing import Timing
from elastictrain.elastic.waiting import Change, size_in_words, why_it_stands_by, why_it_waits
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir

BACKEND = "elastictrain"
MASTER = "master"
LEAVE_SECONDS = 5.0
WARM_SECONDS = 120.0  # for a new node's workers to import everything, after which it joins as it is
PATIENCE = 3.0  # seconds before it is said that there is something to wait for
STORE_TIMEOUT = timedelta(seconds=30)
GONE_SECONDS = 60.0  # after one that hands over is gone, perhaps since it was done: for others to be done as well


class RunRendezvous(GenerationHandler):
    """One node's.

    Args:
        endpoint: a run directory.
        fixed: the address of the node that leads, in its place.
        run_id: tells jobs at one endpoint apart.
        local_addr: this node's address for the others; None: the one on its way out.
        join_seconds: how long to wait for enough nodes.
        num_workers: of this node; 0: only the agent knows, and tells the others itself.
        has_steps: the agent answers :attr:`asked`, and where a change is agreed on, its workers stop at that step. Else all
            changes are the same to it: ``num_nodes_waiting`` is not 0.
        say: prints one line.
        token_dir: the run directory with the run's token, where ``endpoint`` is none.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: str,
        timing: Timing,
        fixed: tuple[str, int] | None = None,
        local_addr: str | None = None,
        join_seconds: float = 600.0,
        num_workers: int = 0,
        has_steps: bool = False,
        say: Callable[[str], None] = lambda line: None,
        token_dir: str | None = None,
    ) -> None:
        self._run_id, self._has_steps, self._say = run_id, has_steps, say
        self._join_seconds, self._timing = join_seconds, timing
        self.loss_seconds = 2 * timing.ttl + 5.0
        self._agreed: Generation | None = None
        self._agreed_at = 0.0
        self._reasons: list[str] = []  # of all generations since the current one
        self._told = ""
        self._current = Generation()
        self._meeting: Meeting | None = None  # begun before it is asked for
        host = local_addr or own_address()
        leads, server = (False, None) if fixed is None else listen_if_mine(*fixed, host)
        if leads:
            assert fixed is not None
            host = fixed[0]  # where the others look for it, whatever else this machine's addresses are
        # The store is bound to one address: its own listener would take every one that this machine has.
        store_socket = listen(host)
        self._store_server = TCPStore(
            host,
            store_socket.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=store_socket.detach(),
        )
        self._host = self.address = host
        run_log, key, leader = self._log_at(endpoint, fixed, token_dir)
        server = listen(host) if server is None else server
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"  # control.labels_of and agent_of read it
        me = Member(name, host, server.getsockname()[1], self._store_server.port, num_workers)
        if run_log is None:
            run_log = FixedLog(me if leads else leader, is_mine=leads)
        self._node = RunNode(
            me,
            server,
            run_log=run_log,
            key=key,
            timing=timing,
            on_formed=self._formed,
            on_asked=self._was_asked,
            on_resized=self._resized,
        )
        self._node.start()

    def _log_at(
        self, endpoint: str, fixed: tuple[str, int] | None, token_dir: str | None
    ) -> tuple[Log | None, bytes, Member]:
        """The run log, if there is one, the key of the run's token, and who leads where there is none.

        Raises:
            UsageError: nodes cannot meet there.
        """
        if fixed is not None:
            if VARIABLE not in os.environ and (token_dir is None or not is_exclusive(RunDir(token_dir))):
                raise UsageError(
                    f"--rdzv-endpoint {endpoint}: set {VARIABLE} to the same secret on all nodes,"
                    " or name a run directory instead"
                )
            return None, key_in(RunDir("memory://" if token_dir is None else token_dir)), Member("the endpoint", *fixed)
        run_dir = RunDir(endpoint)
        if run_dir.is_memory:
            raise UsageError(f"--rdzv-endpoint {endpoint}: other processes do not see it")
        key = key_in(run_dir)
        run_log = RunLog(run_dir, key, folder=folder_of(self._run_id))
        run_log.probe()
        return run_log, key, Member("")

    # ---- torch's side ------------------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting, self.began, self.stood_by = True, time.time(), None
        self._looks_whether_it_stands_by(self._node.generation)
        try:
            return self._next(time.monotonic() + self._join_seconds)
        finally:
            self.waiting, self.formed = False, time.time()

    def is_closed(self) -> bool:
        return bool(self._node.closed)

    def set_closed(self) -> None:
        self._node.close(f"closed by {self._node.me.node}")

    def num_nodes_waiting(self) -> int:
        """Not 0: there is a newer generation, which begins at once."""
        return int(self.is_superseded or self._node.error is not None)

    def shutdown(self) -> bool:
        """Leave; the others go on."""
        if self._has_steps:  # it has given notice, or has failed: then nobody is here who could promise anything
            has_left = self._node.has_left
        else:
            has_left = self._node.leave(seconds=LEAVE_SECONDS)
        self._node.stop()
        return has_left

    # ---- the agent's side --------------------------------------------------------------------------------------------

    @property
    def asked(self) -> Promise | None:
        asked = self._node.asked
        return asked if asked is not None and asked.number == self._current.number else None

    @property
    def agreed(self) -> Generation | None:
        agreed = self._agreed
        return agreed if agreed is not None and agreed.number == self._current.number + 1 else None

    @property
    def is_superseded(self) -> bool:
        newest, agreed = self._node.generation, self.agreed
        if agreed is None:
            return newest.number > self._current.number
        if self._is_left_waiting(agreed):
            return True
        # One that leaves is superseded like those that stay: without them its workers would wait until they are killed.
        stay = {one.node for one in self._current.members} & {one.node for one in agreed.members}
        return newest.number > agreed.number and not stay <= {one.node for one in newest.members}

    def _is_left_waiting(self, agreed: Generation) -> bool:
        """One that was to hand over at the agreed step is gone, and its connections may say nothing of its end.

        A node that leaves, or stops with all others, has its own time for that.
        """
        if not agreed.members or self._node.me.node in agreed.leaving:
            return False
        gone = [self._node.gone.get(one.node, math.inf) for one in self._current.members]
        return any(self._agreed_at <= since < time.monotonic() - GONE_SECONDS for since in gone)

    @property
    def has_news(self) -> bool:
        return self._node.generation.number > self._current.number

    @property
    def num_known(self) -> int:
        return len(self._node.generation.members)

    @property
    def is_out(self) -> bool:
        return not self.is_in(self._node.generation)

    @property
    def closed(self) -> str:
        return self._node.closed

    @property
    def is_dismissed(self) -> bool:
        return self._node.is_dismissed

    def is_in(self, generation: Generation) -> bool:
        return generation.rank_of(self._node.me.node) is not None

    def promise(self, asked: Promise, *, is_kept: bool, step: int) -> None:
        self._node.promise(asked, is_kept=is_kept, step=step)

    def notice(self) -> None:
        self._node.notice()

    def lost_a_peer(self) -> None:
        self._node.suspect()

    def end(self, reason: str) -> None:
        self._node.close(reason)
        self._node.wait(lambda: bool(self._node.closed), seconds=LEAVE_SECONDS)

    def reached(self, step: int) -> None:
        self._node.steps(step)

    def workers_failed(self) -> None:
        self._node.failed(self._current.number)

    # ---- ours --------------------------------------------------------------------------------------------------------

    def _formed(self, generation: Generation) -> None:
        """In the node's thread."""
        self._reasons.append(generation.reason)
        self._looks_whether_it_stands_by(generation)
        if self._has_steps and generation.boundary >= 0 and generation.number == self._current.number + 1:
            self._agreed, self._agreed_at = generation, time.monotonic()
            if self.is_in(generation) and not generation.is_paused:  # so that nobody waits for it while nobody trains
                self._meeting = Meeting(generation, lambda: self._ask_first(generation, math.inf))

    def _looks_whether_it_stands_by(self, generation: Generation) -> None:
        """Others train without it, or they are too few: that time is not the price of what has ended the last generation."""
        is_done_without = generation.is_paused or not self.is_in(generation)
        if self.waiting and self.stood_by is None and generation.number > self._current.number and is_done_without:
            self.stood_by = time.time()

    def _resized(self, size: Size) -> None:
        """The same: by `elastictrain scale`, or since other nodes were there before this one."""
        self._say(size_in_words(size, self._timing.size))

    def _was_asked(self, asked: Promise) -> None:
        """The same. Workers without steps may promise anything: they begin anew."""
        if not self._has_steps:
            self._node.promise(asked, is_kept=True, step=-1)

    def _wait_until_warm(self) -> None:
        """A run that is under way does not wait for a new node's imports: the node joins once it could train at once."""
        until = time.monotonic() + WARM_SECONDS
        while not self.is_warm() and not self._is_over and time.monotonic() < until:
            if self._node.is_settled and not self._node.generation.members:
                return  # nobody trains yet
            self.check()
            time.sleep(0.02)

    def _next(self, deadline: float) -> RendezvousInfo:
        if not self._current.number:
            self._wait_until_warm()
        self._node.ready()
        if 0 < self._node.generation.number == self._current.number:
            self._node.failed(self._current.number)  # workers have failed here: the others are to start again too
        after = self._current.number
        while True:
            generation = self._wait_for_generation(after, deadline)
            info = self._meet(generation, time.monotonic() + self._join_seconds)
            if info is not None:
                change = Change.between(self._current, generation, self.agreed)
                self.is_planned, self.lost = change.is_planned, tuple(map(agent_of, change.lost))
                is_enough = change.is_planned or self._timing.is_enough(change.stay, generation.size)
                if self._current.members and self.stood_by is None and not is_enough:
                    self.stood_by = self.began  # those that were left could not have gone on alone
                self._current, self.job_id, self.members = generation, generation.job, generation.members
                self.rank = info.rank
                self.reason = "; ".join(dict.fromkeys(self._reasons))
                self._reasons.clear()
                self._agreed = None
                self.generation = generation.number - generation.first
                return info
            after = generation.number  # its first member has gone before it was there: there will be another one
            self._node.failed(after)

    def _wait_for_generation(self, after: int, deadline: float) -> Generation:
        def is_there() -> bool:
            generation = self._node.generation
            is_in = generation.number > after and self.is_in(generation) and not generation.is_paused
            return is_in or self._node.has_left

        self.check()
        is_met = self._node.wait(is_there, seconds=min(PATIENCE, max(0.0, deadline - time.monotonic())))
        could_wait_on = False
        while not is_met and not self._is_over:
            could_wait_on, before = self._may_wait_on, could_wait_on
            if could_wait_on or before:  # once it may not, others need their time to let this node in
                deadline = time.monotonic() + self._join_seconds
            elif time.monotonic() >= deadline:
                break
            self.check()
            self._tell_that_it_waits()
            is_met = self._node.wait(is_there, seconds=min(1.0, max(0.1, deadline - time.monotonic())))
        self._told = ""
        if isinstance(self._node.error, UsageError):
            raise self._node.error
        if self._node.error is not None:
            raise RendezvousConnectionError(str(self._node.error)) from self._node.error
        if self._node.closed:
            raise RendezvousClosedError(self._node.closed)
        if self._node.has_left:
            raise LeftError("this node was asked to leave; it waited for others, and no worker was running")
        if not is_met:
            raise RendezvousTimeoutError(f"no generation with this node within {self._join_seconds:g} s")
        return self._node.generation

    @property
    def _is_over(self) -> bool:
        return self._node.error is not None or bool(self._node.closed) or self._node.has_left

    @property
    def _may_wait_on(self) -> bool:
        """Not only for the run's first nodes: for others to come back, or to go, or to come to a step."""
        is_kept_out = time.monotonic() < self._node.kept_out[1]
        return self._has_steps and (self._current.number > 0 or self._node.is_under_way or is_kept_out)

    @property
    def _stands_by(self) -> str:
        """Why nodes train, and this one does not; empty: it does, or may soon, or nobody does."""
        node = self._node
        if not node.is_under_way or node.is_waiting:
            return ""
        return why_it_stands_by(node.generation, node.size, me=node.me, timing=self._timing)

    def _tell_that_it_waits(self) -> None:
        node, has_trained = self._node, self._current.number > 0
        line = self._stands_by or why_it_waits(
            node.size,
            is_member=self.is_in(node.generation),
            has_trained=has_trained,
            is_paused=node.is_waiting,
            kept_out=node.kept_out,
            needs=self._timing.fit.needs,
        )
        if line and line != self._told:
            self._told = line
            self._say(line)

    def _meet(self, generation: Generation, deadline: float) -> RendezvousInfo | None:
        """Agree on where the workers meet; None: there is a newer generation, or the first member does not answer.

        A first member that is dead is tried for half a minute, and one that is stopped may be waited for without end, so
        that is for another thread, which is left alone once there is a newer generation.
        """
        begun, self._meeting = self._meeting, None
        if begun is None or begun.generation is not generation or begun.has_failed:
            begun = Meeting(generation, lambda: self._ask_first(generation, deadline))
        while begun.is_alive() and not self._is_past(generation, deadline):
            begun.join(0.01)
        return begun.info

    def _is_past(self, generation: Generation, deadline: float) -> bool:
        return self._node.generation.number > generation.number or time.monotonic() > deadline

    def _ask_first(self, generation: Generation, deadline: float) -> RendezvousInfo | None:
        rank = generation.rank_of(self._node.me.node)
        assert rank is not None
        first = generation.members[0]
        try:
            client = TCPStore(first.host, first.store, is_master=False, timeout=STORE_TIMEOUT)
            store: Store = PrefixStore(f"{generation.epoch}/{generation.number}", client)
            if rank == 0:
                # where it is asked twice, the first answer counts
                store.compare_set(MASTER, "", f"{self._host} {free_port()}")
            while not store.check([MASTER]):
                if self._is_past(generation, deadline):
                    return None
                time.sleep(0.01)
            host, port = store.get(MASTER).decode().split()
        except (DistError, RuntimeError, OSError):
            return None
        return RendezvousInfo(store, rank, len(generation.members), RendezvousStoreInfo(host, int(port)))


def agent_of(member: Member) -> tuple[str, int]:
    """Its host's name and its process."""
    host, pid, _ = member.node.rsplit("-", 2)
    return host, int(pid)
