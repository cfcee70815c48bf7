"""Run directories of runs that never were, as the trainer would have written them, in a moment.

Time is made up, so that hours of a run take none: lines of the ledger are written in its form (a test compares it with what
:class:`~elastictrain.metrics.ledger.Ledger` writes), and metrics by the trainer's own encoder.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.metrics.record import encode_line

BEGAN = 1_800_000_000.0
_SEGMENT = 5000  # records in an object


@dataclass
class Made:
    """A run of several nodes, generation after generation.

    Args:
        step_seconds: of a step; there are no others on the clock but those of starts.
        account_every: steps between two lines of each node's account.
        num_more: values of a record beside the loss, the rate and the learning rate.
    """

    path: Path
    step_seconds: float = 0.5
    log_every: int = 10
    account_every: int = 10
    num_more: int = 0
    checkpoint_every: int = 50
    now: float = BEGAN
    step: int = 0
    generation: int = -1
    num_nodes: int = 0
    source: random.Random = field(default_factory=lambda: random.Random(0))
    events: list[dict[str, Any]] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)  # by node, how far its account goes

    def run(self, nodes: list[str], *, until: int, resumed: int | None = None, cause: str = "") -> Made:
        """One more generation, up to ``until`` finished steps; ``resumed`` after a failure with that ``cause``."""
        self.generation += 1
        reached, died, before = self.step, self.now, self.num_nodes
        first = {node: node not in self.ends for node in nodes}
        self.step = reached if resumed is None else resumed
        phases = {"detect": 1.0, "rendezvous": 2.0, "rebuild": 4.0, "restore": 1.0}
        self.now += 8.0
        mesh = f"dp_replicate={2 * len(nodes)}"
        self._note("start", time=self.now, step=self.step, world_size=2 * len(nodes), mesh=mesh)
        for number, node in enumerate(nodes):
            begin = self.now - 8.0
            at = begin if first[node] else self.ends[node]
            member = {"name": node.rpartition("-")[0], "host": "h", "agent_pid": 1000 + number}
            workers = [{"rank": 2 * number + i, "pid": 2000 + 2 * number + i} for i in range(2)]
            known = -1 if first[node] else reached
            self._note("node", node=node, time=self.now, reached=known, **member, workers=workers)
            spent = {"startup": 8.0} if first[node] or resumed is None else phases
            self._note("time", node=node, steps=[self.step, self.step], **{"from": at, "to": at}, seconds={})
            self._account(node, at, self.now, [self.step, self.step], {**spent, "waiting": begin - at})
        if resumed is not None:
            seconds = {**phases, "first_step": self.step_seconds, "total": 8.0 + self.step_seconds}
            about: dict[str, Any] = {"from_step": reached, "resumed_step": resumed, "lost_steps": reached - resumed}
            about |= {"ranks": 2 * len(nodes), "nodes": len(nodes), "nodes_before": before, "mesh": mesh}
            self._note("recovery", node=nodes[0], time=died + seconds["total"], cause=cause, **about, seconds=seconds)
        self.num_nodes = len(nodes)
        while self.step < until:
            self.go_on(nodes, min(self.account_every, until - self.step))
        return self

    def go_on(self, nodes: list[str], count: int) -> None:
        """So many steps more, and a line of each node's account."""
        before, begin = self.step, self.now
        for _ in range(count):
            self.step += 1
            self.now += self.step_seconds
            if self.step % self.log_every == 0:
                self._log_step()
            if self.step % self.checkpoint_every == 0:
                self.save(nodes[0])
        for node in nodes:
            waited = self.source.uniform(0, 0.1) * count * self.step_seconds
            spent = {"data": waited, "productive": count * self.step_seconds - waited}
            self._account(node, begin, self.now, [before, self.step], spent)

    def _log_step(self) -> None:
        loss = 4.0 * 0.999 ** (self.step / self.log_every) + 1.0 + self.source.gauss(0, 0.05)
        rate = 8 / self.step_seconds * self.source.uniform(0.9, 1.1)
        values = {"train/loss": loss, "throughput/samples_per_second": rate, "lr/sgd": 0.1}
        self.log(**values, **{f"time/part{i}": self.source.random() for i in range(self.num_more)})
        if self.step % (5 * self.log_every) == 0:
            self.log(**{"val/loss": loss + 0.1})

    def log(self, **values: float) -> None:
        self.records.append(encode_line((self.step, 8 * self.step, self.now, 0, values), self.generation))

    def save(self, node: str) -> None:
        folder = f"checkpoints/step-{self.step:08d}/000000-abc"
        (self.path / folder).mkdir(parents=True)
        (self.path / folder / "COMMIT").write_text("{}")
        about = {"path": str(self.path / folder), "seconds": 1.5, "num_bytes": 1_000_000}
        self._note("checkpoint", node=node, time=self.now, step=self.step, **about)

    def spend(self, node: str, spent: dict[str, float]) -> Made:
        """No step: so many seconds of these causes."""
        begin, self.now = self.now, self.now + sum(spent.values())
        self._account(node, begin, self.now, [self.step, self.step], spent)
        return self

    def end(self, outcome: str = "finished") -> Made:
        self._note("end", time=self.now, step=self.step, outcome=outcome)
        return self

    def write(self) -> Path:
        """What is in the run directory."""
        (self.path / "run.json").write_text(json.dumps({"id": "x", "target": "net.py:Net", "seed": 0}))
        for folder, pieces in (("metrics", self._metrics()), ("events", self._ledger())):
            (self.path / folder).mkdir(exist_ok=True)
            for name, text in pieces:
                (self.path / folder / name).write_text(text)
        return self.path

    def _note(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, "generation": self.generation, **values})

    def _account(self, node: str, begin: float, end: float, steps: list[int], spent: dict[str, float]) -> None:
        used = {"samples": 8 * steps[1], "tokens": 0}
        seconds = {cause: seconds for cause, seconds in spent.items() if seconds}
        self._note("time", node=node, steps=steps, **used, **{"from": begin, "to": end}, seconds=seconds)
        self.ends[node] = end

    def _metrics(self) -> Iterator[tuple[str, str]]:
        for number, begin in enumerate(range(0, len(self.records), _SEGMENT)):
            yield f"g{0:06d}-{number:06d}.jsonl", "".join(self.records[begin : begin + _SEGMENT])

    def _ledger(self) -> Iterator[tuple[str, str]]:
        segments: dict[tuple[int, str], list[str]] = {}
        for line in self.events:
            if line["event"] in ("start", "end"):
                yield f"g{line['generation']:06d}-{line['event']}.jsonl", json.dumps(line) + "\n"
            else:
                segments.setdefault((line["generation"], line["node"]), []).append(json.dumps(line) + "\n")
        numbers = {node: number for number, node in enumerate(sorted({node for _, node in segments}))}
        for (generation, node), lines in segments.items():
            for piece, begin in enumerate(range(0, len(lines), 500)):
                yield f"g{generation:06d}-{piece:06d}-n{numbers[node]:03d}.jsonl", "".join(lines[begin : begin + 500])


def changing(path: Path) -> Made:
    """Four nodes; one is killed; three go on; one comes back as another agent, and all end."""
    made = Made(path).run(["node-1-11", "node-2-12", "node-3-13", "node-10-14"], until=137)
    made.run(
        ["node-1-11", "node-2-12", "node-10-14"],
        until=220,
        resumed=100,
        cause="node-3 was killed by SIGKILL at step 137",
    )
    return made.run(["node-1-11", "node-2-12", "node-3-99", "node-10-14"], until=400).end()
