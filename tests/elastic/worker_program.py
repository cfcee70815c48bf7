"""A worker without torch, for tests of the agent: trains in lockstep over real sockets and misbehaves as told.

The job says what happens: {"steps": N, "pace": seconds, "log": folder, "events": {"GENERATION/RANK": [step, what]}}.
A step writes "generation rank step" to the log; training starts from the log's newest "checkpoint" (every 10 steps).
With {"ending": {"RANK": seconds}} a rank takes so long where all stop. With {"lives": true} a process goes on in the next
generation, as a trainer's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastictrain.elastic.membership import AgentMembership, current
from elastictrain.elastic.report import guarded
from elastictrain.errors import GenerationOver, NothingKept, UsageError


class Ring:
    """One byte from every rank to rank 0 and back stands for a step's collectives."""

    def __init__(self, rank: int, world_size: int) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers: list[socket.socket] = []
        if rank == 0:
            with socket.create_server(address) as server:
                server.settimeout(20)
                self.peers = [server.accept()[0] for _ in range(world_size - 1)]
        else:
            deadline = time.monotonic() + 20
            while not self.peers:
                try:
                    self.peers = [socket.create_connection(address, timeout=20)]
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
        for peer in self.peers:
            peer.settimeout(20)
        self.first = rank == 0

    def step(self) -> None:
        try:
            if not self.first:
                self.peers[0].sendall(b"x")
            for peer in self.peers:
                if not peer.recv(1):
                    raise ConnectionResetError("end of stream")
            if self.first:
                for peer in self.peers:
                    peer.sendall(b"x")
        except OSError as error:
            raise RuntimeError(f"[pair.cc:534] Connection closed by peer: {error}") from error


def misbehave(what: str, mine: AgentMembership) -> None:
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
        time.sleep(0.1)
    elif what == "exception":
        raise ValueError(f"bad sample on rank {mine.rank}")
    elif what == "other exception":
        raise ValueError(f"bad sample in process {os.getpid()}")
    elif what == "usage":
        raise UsageError("lr=nan cannot train: choose a finite --set lr=…")
    elif what == "nothing kept":
        raise NothingKept("nothing is kept of this run yet")
    elif what == "exit":
        sys.exit(3)
    elif what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    elif what == "hang at exit":
        import atexit

        atexit.register(time.sleep, 60)
        raise ValueError("then it hangs")
    elif what == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(mine.assignment.job["log"], "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)


def save(checkpoint: Path, step: int) -> None:
    """Whole or not at all: workers are killed at any moment."""
    new = checkpoint.with_name("checkpoint-new")
    new.write_text(str(step))
    new.replace(checkpoint)


def train(mine: AgentMembership) -> None:
    job: dict[str, Any] = mine.assignment.job
    log = Path(job["log"])
    checkpoint = log / "checkpoint"
    at, what = job["events"].get(f"{mine.generation}/{mine.rank}", (None, ""))
    if mine.rank == 0:
        (log / f"cause-{mine.generation}").write_text(mine.cause)
    mine.run()
    if at == -1:
        misbehave(what, mine)
    ring = Ring(mine.rank, mine.world_size)
    # Once all have met, as a trainer: a newcomer has its place while the others still go on to the step where they stop.
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    (log / f"pid-{mine.generation}-{mine.rank}").write_text(str(os.getpid()))
    for step in range(first + 1, job["steps"] + 1):
        time.sleep(job["pace"])
        if step - 1 == at:
            misbehave(what, mine)
        ring.step()
        if mine.rank == 0 and step % 10 == 0:
            save(checkpoint, step)
        with open(log / "steps", "a") as file:
            file.write(f"{mine.generation} {mine.rank} {step}\n")
        if mine.boundary(step) is not None:
            time.sleep(job.get("ending", {}).get(str(mine.rank), 0.0))
            (log / f"ended-{mine.generation}-{mine.rank}").touch()
            if mine.rank == 0:
                save(checkpoint, step)
            break
    mine.close()


def live(mine: AgentMembership) -> None:
    """In one generation after another."""
    while True:
        mine.can_go_on(True)
        try:
            return train(mine)
        except GenerationOver:
            mine.next_place()


def main() -> int:
    mine = current()
    assert isinstance(mine, AgentMembership)
    time.sleep(mine.assignment.job.get("import", 0.0))
    work = live if mine.assignment.job.get("lives") else train
    code = guarded(mine, lambda: work(mine))
    mine.leave()
    return code


if __name__ == "__main__":
    sys.exit(main())
