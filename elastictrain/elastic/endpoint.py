"""Where the nodes of a run find each other: a run directory, or an address; and this machine's own address."""

from __future__ import annotations

import os
import socket

from elastictrain.channel import key_of
from elastictrain.checkpoint.token import make_token, read_token
from elastictrain.elastic.address import parse_address
from elastictrain.elastic.links import listen
from elastictrain.elastic.rendezvous import LOOPBACK
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir

ENDPOINT_PORT = 29400  # torchrun's own default


def key_in(run_dir: RunDir) -> bytes:
    """Of the run's token, which is made if it is not there."""
    make_token(run_dir)
    return key_of(read_token(run_dir))


def own_address() -> str:
    """This machine's address on its way out; loopback where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of nobody; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def host_and_port(endpoint: str) -> tuple[str, int] | None:
    """None: it is a run directory."""
    if not endpoint:
        raise UsageError("--rdzv-endpoint is empty: give it a run directory that all nodes reach, or HOST:PORT")
    found = parse_address(endpoint)
    if found is None or "://" in endpoint:
        return None
    host, port = found
    if port is None and (os.path.isdir(endpoint) or host in (".", "..")):
        return None
    return host, ENDPOINT_PORT if port is None else port


def listen_if_mine(host: str, port: int, own: str) -> tuple[bool, socket.socket]:
    """Is that address this machine's, and free? Then this node leads."""
    try:
        return True, listen(host, port)
    except OSError:
        return False, listen(own)
