"""The private name of torch that elastictrain.compat.torch_agent replaces."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from elastictrain.compat.torch_agent import PlacedAgent


def test_ranks_are_what_torch_would_say() -> None:
    method = SimpleElasticAgent._assign_worker_ranks
    assert list(inspect.signature(method).parameters) == ["self", "store", "group_rank", "group_world_size", "spec"]
    assert "self._assign_worker_ranks(" in inspect.getsource(SimpleElasticAgent._rendezvous)
    spec: Any = SimpleNamespace(role="trainer", local_world_size=3)
    mine: Any = SimpleNamespace(workers_by_node=lambda: [3])
    expected = method(mine, HashStore(), 0, 1, spec)
    found = PlacedAgent._assign_worker_ranks(mine, None, 0, 1, spec)
    assert [str(one) for one in found] == [str(one) for one in expected]


def test_nodes_may_have_different_numbers_of_workers() -> None:
    mine: Any = SimpleNamespace(workers_by_node=lambda: [2, 1, 3])
    spec: Any = SimpleNamespace(role="trainer", local_world_size=3)
    found = PlacedAgent._assign_worker_ranks(mine, None, 2, 3, spec)
    assert [(one.local_rank, one.global_rank, one.world_size) for one in found] == [(0, 3, 6), (1, 4, 6), (2, 5, 6)]
