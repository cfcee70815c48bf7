"""When another attempt is worth it."""

from __future__ import annotations

from elastictrain.elastic.restarts import Failure, RestartBudget

KILLED = Failure(step=10)


def test_progress_refills_the_budget() -> None:
    budget = RestartBudget(2)
    assert [budget.may_restart(KILLED, reached=10) for _ in range(3)] == [True, True, False]
    budget = RestartBudget(1)
    for reached in range(10, 20):
        assert budget.may_restart(Failure(step=reached), reached=reached)
        assert budget.used == 1
    assert not budget.may_restart(KILLED, reached=15), "behind what was reached before"


def test_without_restarts() -> None:
    assert not RestartBudget(0).may_restart(KILLED, reached=10)


def test_the_same_exception_twice_in_a_row() -> None:
    def error(step: int, text: str = "bad") -> Failure:
        return Failure(step, ("ValueError", text))

    budget = RestartBudget(100)
    assert budget.may_restart(error(10), reached=10)
    assert budget.may_restart(error(11), reached=11), "at another step"
    assert budget.may_restart(error(11, "worse"), reached=11), "another text"
    assert budget.may_restart(KILLED, reached=11)
    assert budget.may_restart(error(11, "worse"), reached=11), "not in a row"
    assert not budget.may_restart(error(11, "worse"), reached=11)
    assert budget.repeated
    assert not RestartBudget(9).may_restart(Failure(3, ("KeyError", ""), retry=False), reached=3)
