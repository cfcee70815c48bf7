"""What an agent tells Prometheus: the newest value of everything logged, as text over HTTP.

A value keeps its name in TensorBoard: ``throughput/samples_per_second`` is ``elastictrain_throughput_samples_per_second``.
Values have the labels ``run`` and ``node``; those of one rank have ``rank`` too. Values of the run come from the node of
rank 0 alone. The format is version 0.0.4 of Prometheus's text exposition format.

One thread serves everybody, and waits for nobody: who does not ask within :data:`PATIENCE` seconds, asks at length, or does
not take the answer is hung up on, and above :data:`MAX_CLIENTS` of them the oldest is.

On failure: an address that cannot be used is a UsageError from :class:`Endpoint`; afterwards nothing reaches the agent.
"""

from __future__ import annotations

import contextlib
import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from elastictrain.errors import UsageError
from elastictrain.metrics.published import Published

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "elastictrain_"
PATIENCE = 5.0  # seconds from a connection to the end of its answer
MAX_CLIENTS = 64
_MAX_REQUEST = 8192  # bytes
_TICK = 0.5

# What a name means, by its beginning; the longest that fits.
_MEANING = {
    "throughput/": "how fast training goes, over the last steps",
    "throughput/mfu": "model FLOP/s as a share of what the devices can do at most",
    "throughput/loader_queue": "microbatches that loader processes have ready",
    "time/": "seconds of a mean step",
    "memory/": "GiB of this rank",
    "elastic/world_size": "ranks that train",
    "elastic/generation": "starts of the workers before this one",
    "elastic/recovery_seconds": "seconds from the last failure to the end of the first step after it",
    "goodput/percent": "useful share of the time of all nodes",
    "goodput/lost/": "node-seconds lost so far",
    "checkpoint/": "the last save",
}

Labels = Mapping[str, str]


@dataclass
class Family:
    """All values of one name."""

    help: str
    kind: str = "gauge"
    values: list[tuple[Labels, float]] = field(default_factory=list)


def metric_name(tag: str) -> str:
    """The name of what is logged as ``tag``."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", tag)


def exposition(families: Mapping[str, Family]) -> str:
    """The text; ``families`` by name."""
    lines: list[str] = []
    for name, family in families.items():
        text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.values:
            shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{shown}}} {_number(value)}")
    return "".join(line + "\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def families(published: Published, *, run: str, node: str) -> dict[str, Family]:
    """Everything that a node has to tell."""
    here = {"run": run, "node": node}
    found: dict[str, Family] = {}
    newest = published.values()
    for name, text, kind, value in (
        ("generation", "starts of the workers before this one, in this command", "gauge", published.generation),
        ("restarts_total", "times that this node's workers were started again", "counter", published.restarts),
        ("workers", "workers of this node that run", "gauge", published.workers),
    ):
        found[f"{PREFIX}agent_{name}"] = Family(text, kind, [(here, value)])
    for one in newest:
        mine = {**here, "rank": str(one["rank"])}
        about = {
            "step": ("finished steps", one["step"]),
            "logged_timestamp_seconds": ("of its last log step", one["time"]),
        }
        for name, (text, value) in about.items():
            found.setdefault(f"{PREFIX}{name}", Family(text)).values.append((mine, value))
    tags: dict[str, str] = {}  # what a name stands for
    for one in newest:
        for values, labels in ((one["run"], here), (one["own"], {**here, "rank": str(one["rank"])})):
            for tag, value in values.items():
                name = metric_name(tag)
                is_taken = name in found and name not in tags  # by one of the agent's own
                is_other = tags.setdefault(name, tag) != tag  # two that differ in signs alone
                shown = {**labels, "tag": tag} if is_taken or is_other else labels
                found.setdefault(name, Family(_meaning(tag))).values.append((shown, value))
    return found


def _meaning(tag: str) -> str:
    fits = max((name for name in _MEANING if tag.startswith(name)), key=len, default=None)
    return f"logged as {tag}" + ("" if fits is None else f": {_MEANING[fits]}")


# ---- the server ----------------------------------------------------------------------------------------------------


@dataclass
class _Client:
    deadline: float
    request: bytes = b""
    answer: bytes = b""


class Endpoint:
    """Answers ``GET /metrics``, from when it is entered until it is left.

    Args:
        port: 0: any that is free.
        render: the text, whenever somebody asks; in this object's thread.

    Attributes:
        url: where it answers.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, render: Callable[[], str]) -> None:
        self._render = render
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise UsageError(
                f"--metrics-port {port}: {host}:{port} cannot be used ({error.strerror or error}): choose another port,"
                " 0 for any that is free, or another --metrics-host"
            ) from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)  # noqa: S104
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/metrics"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="elastictrain-metrics", daemon=True)

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._thread.join(2 * _TICK + 1.0)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(_TICK):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._clients:
                        assert isinstance(key.fileobj, socket.socket)
                        self._serve(key.fileobj, self._clients[key.fileobj])
                self._hang_up(s for s, one in [*self._clients.items()] if time.monotonic() > one.deadline)
        finally:
            self._hang_up([*self._clients])
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone, or there are no descriptors left
            time.sleep(0.01)
            return
        client.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS:
            self._hang_up([next(iter(self._clients))])
        self._clients[client] = _Client(time.monotonic() + PATIENCE)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket, about: _Client) -> None:
        """Take what has come, or send what fits."""
        try:
            if not about.answer:
                data = client.recv(_MAX_REQUEST)
                about.request += data
                if not data or len(about.request) > _MAX_REQUEST:
                    self._hang_up([client])
                    return
                if b"\r\n\r\n" not in about.request and b"\n\n" not in about.request:
                    return
                about.answer = self._answer(about.request)
                self._selector.modify(client, selectors.EVENT_WRITE)
            about.answer = about.answer[client.send(about.answer) :]
            if not about.answer:
                client.shutdown(socket.SHUT_WR)
                self._hang_up([client])
        except BlockingIOError:
            return
        except OSError:
            self._hang_up([client])

    def _hang_up(self, clients: Iterable[socket.socket]) -> None:
        for client in clients:
            self._clients.pop(client, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(client)
            client.close()

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.split(b"\n", 1)[0].decode("latin-1").strip().partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        status, text = "200 OK", ""
        if method not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "GET /metrics\n"
        elif path not in ("/metrics", "/"):
            status, text = "404 Not Found", "GET /metrics\n"
        else:
            try:
                text = self._render()
            except Exception as error:  # a bug of ours must not end the thread
                status, text = "500 Internal Server Error", f"{type(error).__name__}\n"
        body = text.encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        )
        return head.encode() + b"\r\n" + (b"" if method == "HEAD" else body)
