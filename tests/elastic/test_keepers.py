"""The agent's care for its keeper: it waits for nothing, and ends the keeper only where nobody needs it any more."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastictrain.checkpoint.found import is_replaced
from elastictrain.checkpoint.held import About
from elastictrain.elastic import agent as agents
from elastictrain.elastic.agent import Agent
from elastictrain.elastic.agent_config import AgentConfig, Outcome
from elastictrain.elastic.agreement import Agreement
from elastictrain.elastic.chain import Generation
from elastictrain.elastic.keepers import Keepers
from elastictrain.elastic.membership import ANSWER, REQUEST, write_whole
from elastictrain.elastic.notices import Interrupted
from elastictrain.elastic.rendezvous import LocalRendezvous

SECONDS = 60.0


class Cells:
    def wants_keeper(self) -> bool:
        return True


class SlowProcess:
    """A keeper that takes its time."""

    def __init__(self) -> None:
        self.may_come = threading.Event()
        self.is_alive = self.is_new = False
        self.is_replaced = lambda: False
        self.address = dict[str, Any]()
        self.said = list[str]()

    def ensure(self, key: bytes, name: str, *, host: str | None) -> dict[str, Any]:
        assert self.may_come.wait(SECONDS)
        self.is_alive, self.address = True, {"socket": name, "host": host, "port": None}
        return self.address

    def end(self) -> None:
        self.said.append("end")

    def leave(self) -> None:
        self.said.append("leave")


def tended(folder: Path) -> tuple[Keepers, SlowProcess, list[str]]:
    lines = list[str]()
    keepers, process = Keepers(None, lines.append), SlowProcess()
    keepers._process = process  # type: ignore[assignment]
    write_whole(str(folder / REQUEST), {"key": "00" * 32, "name": "a name"})
    return keepers, process, lines


def test_the_agents_loop_waits_for_no_keeper(tmp_path: Path) -> None:
    keepers, process, lines = tended(tmp_path)
    for _ in range(3):
        keepers.tick(Cells(), str(tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / ANSWER).exists()
    process.may_come.set()
    assert keepers._trying is not None
    keepers._trying.join(SECONDS)
    assert json.loads((tmp_path / ANSWER).read_text())["socket"] == "a name"
    assert lines == []


def test_a_generation_that_is_over_meanwhile_is_no_failure(tmp_path: Path) -> None:
    folder = tmp_path / "generation-0"
    folder.mkdir()
    keepers, process, lines = tended(folder)
    keepers.tick(Cells(), str(folder))  # type: ignore[arg-type]
    (folder / REQUEST).rename(tmp_path / "gone")
    folder.rmdir()
    process.may_come.set()
    keepers.end(is_over=True)
    assert keepers._trying is not None and not keepers._trying.is_alive()
    assert lines == [] and process.said == ["end"]


@pytest.mark.parametrize(("is_new", "said"), [(True, "end"), (False, "leave")])
def test_a_keeper_that_is_there_before_it_is_asked_for(tmp_path: Path, is_new: bool, said: str) -> None:
    """Its address is known as a generation begins. Unasked, it ends with its agent, unless it is one that was left."""
    keepers, process, _ = tended(tmp_path)
    process.is_new = is_new
    keepers.prepare(bytes(32), "a name")
    keepers.begin(str(tmp_path))
    assert not (tmp_path / ANSWER).exists(), "it waits for nothing"
    process.may_come.set()
    assert keepers._trying is not None
    keepers._trying.join(SECONDS)
    keepers.begin(str(tmp_path))
    assert json.loads((tmp_path / ANSWER).read_text())["socket"] == "a name"
    keepers.end(is_over=False)
    assert process.said == [said]


@pytest.mark.parametrize(("is_out", "is_replaced", "said"), [(1, 1, "end"), (1, 0, "leave"), (0, 1, "leave")])
def test_the_keeper_of_a_node_that_has_stood_by_ends_with_it_where_others_hold_as_much(
    tmp_path: Path, is_out: bool, is_replaced: bool, said: str
) -> None:
    keepers, process, _ = tended(tmp_path)
    process.is_alive, process.is_replaced = True, lambda: bool(is_replaced)
    keepers.end(is_over=False, is_out=bool(is_out))
    assert process.said == [said]


def listed(*ranks: int, start: int = 1, step: int = 10, is_copy: bool = False) -> list[dict[str, Any]]:
    """What a keeper of a run with two ranks lists."""
    about = [About(f"{start}/{step}", step, start, "run", "job", rank, 2, 100, {}) for rank in ranks]
    manifest = {"bytes": 10, "sha256": "0" * 64}
    return [{"about": one.to_json(), "is_copy": is_copy, "manifest": manifest} for one in about]


def test_when_what_a_keeper_holds_is_of_no_use_any_more() -> None:
    a, b = {"host": "a", "port": 1}, {"host": "b", "port": 1}

    def whole_at(**when: int) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        return [(at, listed(own, **when) + listed(1 - own, is_copy=True, **when)) for own, at in enumerate((a, b))]

    mine = listed(0, step=8) + listed(1, step=10, is_copy=True)
    assert is_replaced(mine, whole_at(step=10)) and is_replaced(mine, whole_at(step=11))
    assert not is_replaced(mine, whole_at(step=9)), "it is newer"
    assert is_replaced(mine, whole_at(start=2, step=9)), "a later start has gone on from before"
    assert not is_replaced(mine, [(a, listed(0, 1)), (b, [])]), "one node's death would cost it"
    assert is_replaced(mine, [(a, listed(0, 1))]), "there is only one"
    assert not is_replaced(mine, [(a, listed(0)), (b, listed(0, is_copy=True))]), "a part is nowhere else"
    assert not is_replaced(mine, []) and is_replaced([], [])


def _raises(error: BaseException) -> Any:
    def run(agent: Agent) -> Any:
        raise error

    return run


def _all_end_with(code: int) -> Any:
    def run(agent: Agent) -> Any:
        agent._agreement = Agreement(agent._cells, agent._handler, why=agent._why)  # type: ignore[arg-type]
        agent._all_ended([code])

    return run


@pytest.mark.parametrize(
    ("run", "code", "said"),
    [
        (_all_end_with(0), 0, "end"),
        (_all_end_with(75), 75, "end"),
        (_raises(agents._End(Outcome(75, 3))), 75, "leave"),
        (_raises(Interrupted()), 75, "leave"),
        (_raises(agents._End(Outcome(2, 3))), 2, "leave"),
        (_raises(agents._End(Outcome(130, 3))), 130, "leave"),
        (_raises(agents._End(Outcome(1, 3))), 1, "leave"),
        (_raises(RendezvousConnectionError("its node has died")), 1, "leave"),
    ],
    ids=["finished", "saved", "suddenly", "while nodes meet", "usage", "interrupted", "failed", "rendezvous"],
)
def test_a_keeper_ends_where_all_is_saved_and_else_it_is_left_and_that_is_said(
    run: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds may be newer than storage, and its copies may be all that is left of another node."""
    monkeypatch.setattr(Agent, "run", run)
    lines, rendezvous = list[str](), LocalRendezvous()
    rendezvous._only.agreed = Generation(boundary=3, is_paused=True)
    agent = Agent(AgentConfig(["true"]), rendezvous, say=lines.append)
    agent._keepers._process = process = SlowProcess()  # type: ignore[assignment]
    process.is_alive = True
    assert agent.train().code == code
    assert process.said == [said]
    assert ["in memory stay for 5 minutes" in line for line in lines] == [True] * (said == "leave")
