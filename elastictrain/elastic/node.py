"""A node of a run: :class:`~elastictrain.elastic.protocol.Peer` with real sockets, a real clock and real storage.

Everything runs in one thread with an event loop; storage is asked in another one, so that it may take its time. Methods of
:class:`RunNode` may be called from any thread and return at once, except where they say how long they wait.

On failure: storage that does not answer and connections that break are the protocol's business. A log that was written with
another token, or a bug, ends the node: :attr:`RunNode.error` says why, and every wait returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastictrain.elastic import actions
from elastictrain.elastic.chain import Entry, Generation, Member, Message, Size
from elastictrain.elastic.links import MAX_STRANGERS, Link
from elastictrain.elastic.protocol import Peer, State
from elastictrain.elastic.runlog import Log, RunLogError
from elastictrain.elastic.timing import Timing
from elastictrain.errors import UsageError

log = logging.getLogger(__name__)


class RunNode:
    """One node.

    Args:
        me: who it is; the port of ``server``.
        server: listens already.
        run_log: where the run's nodes agree.
        key: of the run's token.
        on_formed: called in the node's thread with each new generation.
        on_asked: the same, with what the leader wants the workers to promise; :meth:`promise` is the answer.
        on_resized: the same, when a leader says that the run has another size than this node knew.

    Attributes:
        generation: the newest one that this node knows.
        size: the run's; the command's own until a leader has said it.
        gone: nodes that are lost and were members no more, and since when, by :func:`time.monotonic`.
        kept_out: how often this node's host was lost, and until when it is not let in, by :func:`time.monotonic`.
        asked: what the leader wants the workers of that one to promise; None: nothing, or no more.
        closed: why the run is over for all; empty: it is not.
        error: what has ended this node.
        is_dismissed: somebody has asked for this node to go.
        has_left: the run does without it now.
        num_refused: connections that did not have the token.
    """

    def __init__(
        self,
        me: Member,
        server: socket.socket,
        *,
        run_log: Log,
        key: bytes,
        timing: Timing,
        on_formed: Callable[[Generation], None] | None = None,
        on_asked: Callable[[actions.Promise], None] | None = None,
        on_resized: Callable[[Size], None] | None = None,
    ) -> None:
        self.me, self._server, self._log, self._key = me, server, run_log, key
        self._on_formed, self._on_asked, self._on_resized = on_formed, on_asked, on_resized
        self._peer = Peer(me, timing, chance=random.Random())  # seeded by the system
        self.generation, self.size, self.kept_out = Generation(), timing.size, (0, 0.0)
        self.gone: dict[str, float] = {}
        self.asked: actions.Promise | None = None
        self.closed = ""
        self.error: BaseException | None = None
        self.is_dismissed = self.has_left = False
        self.num_refused = 0
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._numbers: dict[Link, int] = {}
        self._num_accepted = 0
        self._strangers: set[Link] = set()  # have come to us and not yet proved to have the key
        self._has_room = asyncio.Event()
        self._warned: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._storage = ThreadPoolExecutor(1, thread_name_prefix="elastictrain-log")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="elastictrain-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- from any thread ---------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """It leads, or hears who does: what :attr:`generation` says is how things are."""
        return self._peer.leading is not None or self._peer.state is State.FOLLOWING

    @property
    def is_under_way(self) -> bool:
        """The newest leader has said that nodes are there which have trained together, and hand the run on."""
        return bool(self._peer.following.run)

    @property
    def is_waiting(self) -> bool:
        """These wait for others to train with."""
        return self._peer.following.run == "waiting"

    def ready(self) -> None:
        """It can be a member from now on."""
        self._ask(self._peer.on_ready)

    def failed(self, number: int) -> None:
        """Workers of that generation have failed here: there shall be another one."""
        self._ask(self._peer.on_failed_workers, number)

    def suspect(self) -> None:
        """A worker has lost a peer."""
        self._ask(self._peer.on_suspect)

    def close(self, reason: str) -> None:
        """The run is over for all."""
        self._ask(self._peer.on_close, reason)

    def steps(self, step: int) -> None:
        """So many steps are finished."""
        self._peer.step = step

    def promise(self, asked: actions.Promise, *, is_kept: bool, step: int) -> None:
        """The workers' answer, and how far they have come."""
        self._ask(self._peer.on_promise, asked, is_kept, step)

    def wait(self, is_met: Callable[[], bool], *, seconds: float) -> bool:
        """Until something about this node is so, it has ended, or the run is closed; whether it is so."""
        with self._changed:
            self._changed.wait_for(lambda: is_met() or self.error is not None or bool(self.closed), timeout=seconds)
            return is_met()

    def notice(self) -> None:
        """Ask to be let go; :attr:`has_left` says when."""
        self._ask(self._peer.on_leave)

    def leave(self, *, seconds: float) -> bool:
        """Ask to be let go, and wait for it; whether the others know."""
        self.notice()
        return self.wait(lambda: self.has_left, seconds=seconds)

    def stop(self) -> None:
        """End the thread and close everything; the others see a node that has gone."""
        if self._thread.is_alive():
            self._call(self._loop.stop)
            self._thread.join()
        self._storage.shutdown(wait=False, cancel_futures=True)

    def _ask(self, how: Callable[..., list[actions.Action]], *arguments: Any) -> None:
        self._call(self._tell, how, *arguments)

    def _call(self, what: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:  # the loop is closed
            pass

    # ---- in the node's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            door = self._loop.create_task(self._accept())
            self._tell(self._peer.on_start)
            self._loop.run_forever()
            self._loop.run_until_complete(self._shut(door))
        except BaseException as error:
            self._end(error)
        finally:
            self._loop.close()

    async def _shut(self, door: asyncio.Task[None]) -> None:
        door.cancel()
        await asyncio.wait([door])
        self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for link in [*self._numbers, *self._strangers]:
            link.close()
        self._numbers.clear()
        await asyncio.sleep(0.01)  # the last words go out
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _tell(self, how: Callable[..., list[actions.Action]], *arguments: Any, **named: Any) -> None:
        """Let the protocol see an event, and do what it asks for."""
        if self.error is not None:
            return
        try:
            for action in how(*arguments, now=self._loop.time(), **named):
                self._do(action)
        except BaseException as error:  # a bug: better no node than one that has lost its way
            log.exception("this node's part in the run has ended")
            self._end(error)
            return
        self._set_timer()

    def _end(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        for link in list(self._numbers):
            link.close()

    def _set_timer(self) -> None:
        due = self._peer.deadline
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() >= self._peer.deadline:
            self._tell(self._peer.on_tick)
        else:
            self._set_timer()

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.Send(links, message):
                text = json.dumps(message, separators=(",", ":")).encode()
                for number in links:
                    if (link := self._links.get(number)) is not None:
                        link.send(text)
            case actions.Connect(number, to):
                self._loop.create_task(self._connect(number, to))
            case actions.Close(links):
                for number in links:
                    if (link := self._links.pop(number, None)) is not None:
                        self._numbers.pop(link, None)
                        link.close()
            case actions.Read():
                self._in_storage(self._log.newest, self._was_read)
            case actions.Create(entry):
                self._in_storage(lambda: self._log.create(entry), lambda done: self._was_written(entry, done))
            case actions.Trim(index):
                self._in_storage(lambda: self._log.trim(index), lambda _done: None)
            case actions.Formed(generation):
                if self._on_formed is not None:
                    self._on_formed(generation)
                self._notify(generation=generation, asked=None)
            case actions.Promise():
                self._notify(asked=action)
                if self._on_asked is not None:
                    self._on_asked(action)
            case actions.Release():
                self._notify(asked=None)
            case actions.Resized(size):
                if self._on_resized is not None:
                    self._on_resized(size)
                self._notify(size=size)
            case actions.KeptOut(times, seconds):
                self._notify(kept_out=(times, time.monotonic() + seconds))
            case actions.Gone(nodes):
                self._notify(gone={name: self.gone.get(name, time.monotonic()) for name in nodes})
            case actions.Dismissed():
                self._notify(is_dismissed=True)
            case actions.Left():
                self._notify(has_left=True)
            case actions.Closed(reason):
                self._notify(closed=reason)

    def _notify(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self._changed.notify_all()

    # ---- storage -----------------------------------------------------------------------------------------------------

    def _in_storage(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def ask() -> None:
            try:
                done: Any = work()
            except Exception as error:
                done = error
            self._call(then, done)

        try:
            self._storage.submit(ask)
        except RuntimeError:  # it is shut down
            pass

    def _was_read(self, done: Any) -> None:
        if isinstance(done, Entry):
            self._tell(self._peer.on_entry, done)
        elif isinstance(done, (RunLogError, UsageError)):
            self._end(done)
        else:
            log.warning("the run log cannot be read: %s", done)
            self._tell(self._peer.on_storage_failed)

    def _was_written(self, entry: Entry, done: Any) -> None:
        if isinstance(done, (RunLogError, UsageError)):
            self._end(done)
            return
        if isinstance(done, Exception):
            log.warning("the run log cannot be written: %s", done)
            done = None
        self._tell(self._peer.on_created, entry, done)

    # ---- connections -------------------------------------------------------------------------------------------------

    def _new_link(self, *, number: int | None) -> Link:
        is_client = number is not None
        link = Link(
            self._key,
            is_client=is_client,
            on_open=self._opened,
            on_message=self._heard,
            on_closed=self._was_closed,
            on_refused=self._refused,
        )
        if number is not None:
            self._links[number], self._numbers[link] = link, number
        return link

    async def _accept(self) -> None:
        """Let strangers in, so many at a time. The others wait at the door, in the system's queue: after a takeover all
        nodes come at once, and none of them is to be turned away."""
        self._server.setblocking(False)
        try:
            while True:
                while len(self._strangers) >= MAX_STRANGERS:
                    self._has_room.clear()
                    await self._has_room.wait()
                try:
                    connection, _ = await self._loop.sock_accept(self._server)
                except ConnectionAbortedError:
                    continue
                except OSError as error:  # no descriptor is left, or no memory
                    log.warning("no connection can be taken for a second: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                await self._let_in(connection)
        except Exception as error:
            log.exception("this node's part in the run has ended")
            self._end(error)

    async def _let_in(self, connection: socket.socket) -> None:
        link = self._new_link(number=None)
        self._strangers.add(link)
        try:
            await self._loop.connect_accepted_socket(lambda: link, connection)
        except OSError:  # it has gone already
            connection.close()
            self._is_no_stranger(link)

    def _is_no_stranger(self, link: Link) -> None:
        """It has the key, or has gone."""
        self._strangers.discard(link)
        self._has_room.set()

    async def _connect(self, number: int, to: Member) -> None:
        link = self._new_link(number=number)
        try:
            await self._loop.create_connection(lambda: link, to.host, to.port)
        except OSError as error:
            if self._links.pop(number, None) is not None:
                self._numbers.pop(link, None)
                self._tell(self._peer.on_link_lost, number, was_refused=isinstance(error, ConnectionRefusedError))
            return
        if number not in self._links:  # it was given up meanwhile
            link.close()

    def _opened(self, link: Link) -> None:
        number = self._numbers.get(link)
        if number is None:
            self._is_no_stranger(link)
            self._num_accepted += 1
            number = self._num_accepted
            self._links[number], self._numbers[link] = link, number
        else:
            self._tell(self._peer.on_link, number)

    def _heard(self, link: Link, message: Message) -> None:
        number = self._numbers.get(link)
        if number is not None:
            self._tell(self._peer.on_message, number, message)

    def _was_closed(self, link: Link) -> None:
        self._is_no_stranger(link)
        number = self._numbers.pop(link, None)
        if number is not None:
            self._links.pop(number, None)
            self._tell(self._peer.on_link_lost, number)

    def _refused(self, link: Link, why: str) -> None:
        self.num_refused += 1
        if link.address not in self._warned and len(self._warned) < 1000:
            self._warned.add(link.address)
            log.warning("refused a connection with %s: %s; said once for each address", link.address, why)
