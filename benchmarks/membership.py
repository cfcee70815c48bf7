"""How soon everybody knows that a node has gone, and what a sign of life costs. Real sockets, MACs and run log; no workers.

    python benchmarks/membership.py                                # 4 processes, killed with SIGKILL
    python benchmarks/membership.py --nodes 100 1000               # and so many nodes of one leader
    python benchmarks/membership.py --run-dir s3://bucket/bench    # any run directory that a run may have

**Processes**: each node is one; the time is from ``kill`` until the last survivor has the generation without the one that
was killed, by one clock of this machine. **Many nodes**: the leader has a process of its own, all others share another one,
with a connection each. One connection is closed; the time is until the last of the others has checked and read the change,
so most of it is the other process' work for all of them. A sign of life costs the leader what its process' CPU time rises by
in a quiet second, divided by the signs of life in it: reading one, checking its MAC, and its share of the leader's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from elastictrain.channel import key_of
from elastictrain.elastic.chain import Generation, Member
from elastictrain.elastic.links import Link, listen
from elastictrain.elastic.node import RunNode
from elastictrain.elastic.runlog import FixedLog, RunLog
from elastictrain.elastic.timing import Timing
from elastictrain.rundir import RunDir

KEY = key_of("a token for benchmarks")
LIMIT = 120.0


# ---- processes ---------------------------------------------------------------------------------------------------------


def be_node(name: str, url: str) -> None:
    """One node; a line for each generation."""

    def say(generation: Generation) -> None:
        members = [member.node for member in generation.members]
        print(json.dumps({"time": time.time(), "members": members}), flush=True)

    server = listen("127.0.0.1")
    me = Member(name, "127.0.0.1", server.getsockname()[1])
    timing = Timing(min_nodes=1, max_nodes=8, ttl=10.0)  # only a closed connection tells, not silence
    node = RunNode(me, server, run_log=RunLog(RunDir(url), KEY), key=KEY, timing=timing, on_formed=say)
    node.start()
    node.ready()
    node.wait(lambda: False, seconds=1e6)


class Process:
    def __init__(self, name: str, url: str, folder: Path) -> None:
        self.name, self._path = name, folder / f"{name}-{uuid.uuid4().hex[:8]}"
        with open(self._path, "wb") as out:
            command = [sys.executable, __file__, "--be-node", name, url]
            self._process = subprocess.Popen(command, stdout=out)

    def newest(self) -> dict[str, Any]:
        lines = self._path.read_text().split("\n")[:-1]
        return json.loads(lines[-1]) if lines else {"members": [], "time": 0.0}

    def kill(self) -> float:
        moment = time.time()
        self._process.kill()
        self._process.wait()
        return moment


def wait_for_members(nodes: dict[str, Process]) -> float:
    """Until all of them are members in everybody's eyes; when the last one saw it."""
    deadline = time.time() + LIMIT
    while True:
        newest = [node.newest() for node in nodes.values()]
        if all(set(one["members"]) == set(nodes) for one in newest):
            return max(float(one["time"]) for one in newest)
        if time.time() > deadline:
            raise TimeoutError(f"members after {LIMIT:g} s: {newest}")
        time.sleep(0.005)


def kill_one(url: str, folder: Path, *, leader: bool) -> float:
    run_dir = RunDir(f"{url.rstrip('/')}/{uuid.uuid4().hex[:8]}")
    nodes = {name: Process(name, run_dir.url, folder) for name in "abcd"}
    try:
        wait_for_members(nodes)
        time.sleep(1.0)
        leading = RunLog(run_dir, KEY).newest().leader
        assert leading is not None
        victim = leading.node if leader else next(name for name in nodes if name != leading.node)
        moment = nodes.pop(victim).kill()
        return wait_for_members(nodes) - moment
    finally:
        for node in nodes.values():
            node.kill()


# ---- many nodes --------------------------------------------------------------------------------------------------------


def be_leader(count: int) -> None:
    """The leader; answers each line of its input with its CPU seconds."""
    raise_limit(count)
    server = listen("127.0.0.1")
    me = Member("leader", "127.0.0.1", server.getsockname()[1])
    timing = Timing(min_nodes=1, max_nodes=count, ttl=60.0, form=LIMIT, grace=0.0)
    RunNode(me, server, run_log=FixedLog(me, is_mine=True), key=KEY, timing=timing).start()
    print(me.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


class Follower:
    """One of many, as small as it can be: it says what a node says and reads what it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.num_members, self.knows_at = name, 0, 0.0
        self.beat_every = 0.25
        self.link = Link(
            KEY, is_client=True, on_open=self._opened, on_message=self._told,
            on_closed=lambda _link: None, on_refused=lambda _link, why: print(why),
        )  # fmt: skip

    def _opened(self, link: Link) -> None:
        member = [self.name, "", 0, 0, 0]
        hello = {"is": "hello", "member": member, "epoch": 0, "ready": True, "step": -1, "has": 0, "leaves": False}
        self._say(hello)

    def _told(self, _link: Link, message: dict[str, Any]) -> None:
        self.beat_every = message.get("beat", self.beat_every)
        if message["is"] == "generation":
            self.num_members = len(message["generation"]["members"])
        elif message["is"] == "change":
            self.num_members += len(message["come"]) - len(message["gone"])
        else:
            return
        self.knows_at = time.perf_counter()

    async def beat(self) -> None:
        while self.link.is_open:
            await asyncio.sleep(self.beat_every)
            self._say({"is": "beat", "ready": True, "step": -1})

    def _say(self, message: dict[str, Any]) -> None:
        self.link.send(json.dumps(message, separators=(",", ":")).encode())


async def many(count: int, rounds: int) -> None:
    raise_limit(count)
    command = [sys.executable, __file__, "--be-leader", str(count)]
    leader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert leader.stdin is not None and leader.stdout is not None
    port = int(leader.stdout.readline())

    def cpu() -> float:
        assert leader.stdin is not None and leader.stdout is not None
        leader.stdin.write("\n")
        leader.stdin.flush()
        return float(leader.stdout.readline())

    async def until_all_know(num_members: int) -> None:
        deadline = time.perf_counter() + LIMIT
        while any(one.num_members != num_members for one in followers):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{num_members} members were not known to all within {LIMIT:g} s")
            await asyncio.sleep(0.005)

    loop, followers, beats = asyncio.get_running_loop(), [Follower(f"n{number}") for number in range(count)], []
    try:
        started = time.perf_counter()
        for one in followers:
            await loop.create_connection(lambda one=one: one.link, "127.0.0.1", port)  # type: ignore[misc]
            while not one.link.is_open:
                await asyncio.sleep(0.0005)
            beats.append(asyncio.create_task(one.beat()))
        await until_all_know(count)
        formed = time.perf_counter() - started
        await asyncio.sleep(2.0)
        before, began = cpu(), time.perf_counter()
        await asyncio.sleep(5.0)
        spent, passed = cpu() - before, time.perf_counter() - began
        num_beats = passed * count / followers[0].beat_every
        times = []
        for _ in range(rounds):
            await asyncio.sleep(0.5)
            gone, moment = followers.pop(), time.perf_counter()
            gone.link.close()
            await until_all_know(len(followers))
            times.append(max(one.knows_at for one in followers) - moment)
        print(
            f"{count} nodes: loss → all know {spread(times)} ms; formed within {formed:.1f} s; a sign of life every"
            f" {followers[0].beat_every:g} s costs the leader {spent / num_beats * 1e6:.0f} µs of CPU,"
            f" {spent / passed:.0%} of a core in all"
        )
    finally:
        for task in beats:
            task.cancel()
        leader.kill()
        leader.wait()


def raise_limit(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 1000), hard))


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.0f} ({ordered[0] * 1e3:.0f} to {ordered[-1] * 1e3:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--run-dir")
    parser.add_argument("--be-node", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--be-leader", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.be_node:
        be_node(*chosen.be_node)
    elif chosen.be_leader:
        be_leader(chosen.be_leader)
    else:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        with tempfile.TemporaryDirectory() as folder:
            url = chosen.run_dir or str(Path(folder) / "run")
            for who, leader in (("a member", False), ("the leader", True)):
                times = [kill_one(url, Path(folder), leader=leader) for _ in range(chosen.rounds)]
                print(f"4 processes, {who} is killed: the last survivor knows after {spread(times)} ms, n={len(times)}")
        for count in chosen.nodes:
            asyncio.run(many(count, chosen.rounds))


if __name__ == "__main__":
    main()
