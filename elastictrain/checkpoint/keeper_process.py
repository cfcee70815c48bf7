"""The agent's hold on its node's keeper: find one that a killed agent has left, or start one; end it. Imports no torch.

A keeper listens on a Unix socket in the abstract namespace of this machine, whose name is made of the run's key and the run
directory. A keeper whose agent lives belongs to that one (two agents on one machine): the next name is tried.

On failure: an ``OSError`` from :meth:`KeeperProcess.ensure`, where no keeper can be had.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import select
import socket
import subprocess
import sys
import threading
from typing import Any

from elastictrain.channel import Channel, ChannelError
from elastictrain.checkpoint.found import ask_afar, is_replaced, peers_of
from elastictrain.machine import child_environment

COMMAND = (sys.executable, "-m", "elastictrain.checkpoint.keeper_main")
MAX_AGENTS = 64  # on one machine, of one run
START_SECONDS = 20.0
ADOPT_SECONDS = 5.0
LIST_SECONDS = 5.0


class KeeperProcess:
    """At most one keeper, which belongs to this process."""

    command = COMMAND

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._key = b""
        self._address: dict[str, Any] = {}
        self._claim = secrets.token_hex(16)  # so that no other agent takes what this one starts before it can

    @property
    def address(self) -> dict[str, Any]:
        """Where it is: ``socket`` on this machine, ``host`` and ``port`` for other nodes (or None)."""
        return self._address

    @property
    def is_new(self) -> bool:
        """Whether this process has started it: it holds nothing but what it was given since."""
        return self._process is not None

    @property
    def is_alive(self) -> bool:
        """Whether there is one; costs a look at a socket."""
        if self._channel is not None and speaks(self._channel):  # it does so when asked, or when it ends
            self._let_go()
        return self._channel is not None

    def ensure(self, key: bytes, name: str, *, host: str | None) -> dict[str, Any]:
        """See to it that there is one.

        Args:
            name: tells runs on this machine apart.
            host: this machine's address for other nodes; None: there are none.

        Returns:
            :attr:`address`.

        Raises:
            OSError: it cannot be started.
        """
        if self.is_alive:
            return self._address
        self._key = key
        for number in range(MAX_AGENTS):
            where = f"elastictrain-{name}-{number}"
            server = socket.socket(socket.AF_UNIX)
            with server:
                try:
                    server.bind("\0" + where)
                    server.listen(128)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    if self._adopt(where, key, host=host, seconds=ADOPT_SECONDS):
                        return self._address
                    continue
                self._start(server, key)
            if self._adopt(where, key, host=host, seconds=START_SECONDS):
                return self._address
            self._let_go()
            raise OSError(errno.ECHILD, "the keeper does not answer")
        raise OSError(errno.EADDRINUSE, f"{MAX_AGENTS} keepers of this run are on this machine")

    def is_replaced(self) -> bool:
        """Do other nodes' keepers hold as much, so that nobody needs this one? Asks it, and those that it knows."""
        if self._channel is None:
            return False
        try:
            self._channel.send({"kind": "list"}, seconds=LIST_SECONDS)
            said = self._channel.receive(seconds=LIST_SECONDS).head
            here = self._address["host"], self._address["port"]
            peers = [one for one in peers_of(said.get("peers", [])) if one != here]
            return is_replaced(said.get("held", []), ask_afar(peers, self._key))
        except OSError:  # it has ended, or it or another one says what cannot be
            return False

    def end(self) -> None:
        """Its work is done."""
        if self._channel is not None:
            try:
                self._channel.send({"kind": "end"}, seconds=1.0)
            except OSError:
                pass
        self._let_go()

    def leave(self) -> None:
        """It goes on without this process, for as long as it waits for another one."""
        self._let_go()

    def _let_go(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            threading.Thread(target=self._process.wait, daemon=True).start()  # no zombie, no waiting
            self._process = None

    def _start(self, server: socket.socket, key: bytes) -> None:
        self._process = subprocess.Popen(
            [*self.command, str(server.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # whoever reads our output must not wait for the keeper
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=[server.fileno()],
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(f"{key.hex()} {self._claim}".encode())

    def _adopt(self, where: str, key: bytes, *, host: str | None, seconds: float) -> bool:
        """Become the owner of the keeper there. False: it has one, does not answer, or is somebody else's."""
        channel: Channel | None = None
        try:
            channel = connect_local(where, key, seconds=seconds)
            port, head = None, {"kind": "adopt", "claim": self._claim}
            if host is None:
                channel.send(head, seconds=seconds)
            else:
                with listen_on(host) as server:
                    port = server.getsockname()[1]
                    channel.send(head, descriptor=server.fileno(), seconds=seconds)
            if channel.receive(seconds=seconds).head.get("is") != "adopted":
                raise ChannelError("it belongs to another agent")
        except OSError:
            if channel is not None:
                channel.close()
            return False
        self._channel, self._address = channel, {"socket": where, "host": host, "port": port}
        return True


def name_of(key: bytes, path: str) -> str:
    """The name of a run's keepers, by its run directory, without telling anything of either."""
    return hashlib.sha256(key + path.encode()).hexdigest()[:24]


def speaks(channel: Channel, *, seconds: float = 0.0) -> bool:
    """Whether something has come that nobody has read yet; waits so long for it."""
    look = select.poll()  # unlike select, at any descriptor
    look.register(channel, select.POLLIN)
    return bool(look.poll(1000 * seconds))


def connect_local(where: str, key: bytes, *, seconds: float) -> Channel:
    """To a keeper on this machine.

    Raises:
        OSError: there is none, or it has another token.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect("\0" + where)
        return Channel.connect(connection, key, seconds=seconds)
    except BaseException:
        connection.close()
        raise


def listen_on(host: str) -> socket.socket:
    """A port at this address of this machine; at all of them, where the name is not one that can be listened on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError:
        return socket.create_server(("", 0), backlog=128)
