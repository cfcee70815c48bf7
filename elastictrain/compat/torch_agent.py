"""The one private method of torch's elastic agent that ours replaces; pinned by tests/compat/test_torch_agent.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker


class PlacedAgent(SimpleElasticAgent):
    """An agent that knows the ranks of its workers.

    Torch's asks the store of the first node for them, and waits with it should that node die just then.
    """

    def workers_by_node(self) -> Sequence[int]:
        """How many workers each node of this generation has, by rank of the node."""
        raise NotImplementedError

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        counts = self.workers_by_node()
        assert len(counts) == group_world_size and counts[group_rank] == spec.local_world_size, (counts, group_rank)
        first, total = sum(counts[:group_rank]), sum(counts)
        return [
            Worker(i, global_rank=first + i, role_rank=first + i, world_size=total, role_world_size=total)
            for i in range(spec.local_world_size)
        ]
