"""A topology file: the order of ranks that follows from it, on real ranks too, and what is refused about it."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastictrain import Callback, MeshConfig, Trainer, opening
from elastictrain.callback import RunInfo
from elastictrain.config import MeshShape
from elastictrain.errors import UsageError
from elastictrain.parallel.mesh import join, leave, make_mesh
from elastictrain.parallel.topology import crosses_zones, members, placement
from elastictrain.parallel.zones import Zones, in_order, node_names, read_zones
from tests.helpers import ROOT, free_port, logged, run_ranks
from tests.parallel.llama import Llama, Losses, variant

ZONES = {"n0": "a", "n1": "b", "n2": "a", "n3": "b"}


@pytest.mark.parametrize(
    ("nodes", "zones", "block", "expected"),
    [
        ("0 1 2 3", "a b a b", 1, [0, 2, 1, 3]),
        ("0 1 2 3", "a b a b", 2, [0, 2, 1, 3]),
        ("0 0 1 1 2 2 3 3", "a b a b", 4, [0, 1, 4, 5, 2, 3, 6, 7]),
        ("0 1 2", "a a a", 1, [0, 1, 2]),
        ("0 1 2 3", "a b b c", 2, [0, 3, 1, 2]),  # the pair stays together, and rank 0 the first
        ("0 1 2 3 4 5", "a b a b a b", 2, [0, 2, 1, 3, 4, 5]),
        ("0 0 0 1 1 1", "a b", 2, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_order(nodes: str, zones: str, block: int, expected: list[int]) -> None:
    zone_of = dict(zip(sorted(set(nodes.split())), zones.split(), strict=True))
    assert in_order(nodes.split(), zone_of, block=block) == expected


def test_no_order_keeps_more_blocks_within_a_zone() -> None:
    """Against every order of up to six nodes; and the node of rank 0 comes first, a node's ranks stay together."""

    def whole(order: Any, zones: list[str], block: int) -> int:
        return sum(len({zones[i] for i in group}) == 1 for group in zip(*[iter(order)] * block, strict=True))

    generator = random.Random(0)
    for _ in range(60):
        count = generator.choice((2, 4, 6))
        zones = [generator.choice("abc") for _ in range(count)]
        block = generator.choice([b for b in (1, 2, 3) if count % b == 0])
        order = in_order([str(i) for i in range(count)], {str(i): z for i, z in enumerate(zones)}, block=block)
        assert order[0] == 0 and sorted(order) == list(range(count))
        best = max(whole(other, zones, block) for other in itertools.permutations(range(count)))
        assert whole(order, zones, block) == best, (zones, block)


def test_the_placement_tells_of_zones() -> None:
    shape = MeshShape(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    zones = [*"aaaabbbb", *"aaaabbbb"]
    crossing = [axis for axis in ("pp", "dp_replicate", "dp_shard", "tp") if crosses_zones(shape, axis, zones)]
    assert crossing == ["dp_replicate"]
    told = placement(shape, 2, zones)
    assert told is not None
    assert [part.partition(":")[0] for part in told.split(" (")[1:]] == [
        "in a node",
        "in a zone",
        "across zones",
        "in a zone",
    ]
    assert str(Zones(("n0", "n0", "n1", "n2"), ("a", "a", "b", "a"), ("n7",))) == (
        "a: n0, n2 (ranks 0-1, 3); b: n1 (ranks 2); not here: n7"
    )


# ---- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["n0: a\nn1: 1\n", json.dumps({"n0": "a", "n1": 1}), "{n0: a, n1: '1'}"])
def test_yaml_and_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "zones").write_text(text)
    assert read_zones(str(tmp_path / "zones")) == {"n0": "a", "n1": "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"topology .*zones cannot be read \(No such file or directory\): check the path"),
        ("", "names no node: write one 'node: zone' a line"),
        ("[n0, n1]", "names no node: write one 'node: zone' a line"),
        ("n0: a\nn1: [b]", "line 2: write the name of one zone for each node"),
        ("n0: a\nn1:", "line 2: write the name of one zone for each node"),
        ("n0: a\nn0: b", "line 2: n0 is named twice: keep one of them"),
        ("n0: a\nn0: a", "n0 is named twice"),
        ("n0: a\n  n1: b", "line 2: .*: correct the YAML or JSON"),
    ],
)
def test_a_file_that_cannot_be_used(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "zones").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_zones(str(tmp_path / "zones"))
    assert "\n" not in str(caught.value)


def test_a_node_is_known_by_its_address_and_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node0.cluster")
    assert node_names("10.0.0.1") == ["10.0.0.1", "node0.cluster", "node0"]
    assert node_names(None) == ["node0.cluster", "node0"]


# ---- real ranks ----------------------------------------------------------------------------------------------------


def _joined(rank: int, world_size: int, path: str) -> Any:
    mesh = MeshConfig(dp_replicate=2, dp_shard=2, topology=path)
    node = ["n0", "n1", "n2", "n3"][rank]
    try:
        ranks = join(rank=rank, world_size=world_size, local_rank=0, mesh=mesh, nodes=["elsewhere", node])
    except UsageError as error:
        return str(error)
    shape = MeshShape(dp_replicate=2, dp_shard=2)
    made = make_mesh(ranks, shape)
    assert made.coordinate("dp_shard") == ranks.rank % 2
    shards = ranks.gather(node)
    found = dist.get_rank(), ranks.rank, str(ranks.zones), shards
    group = members(shape, "dp_shard", ranks.rank)
    assert {ZONES[shards[member]] for member in group} == {ZONES[node]}, "a shard group is within a zone"
    leave(ranks)
    return found


def test_ranks_are_numbered_zone_by_zone(tmp_path: Path) -> None:
    path = tmp_path / "zones.yaml"
    path.write_text("".join(f"{node}: {zone}\n" for node, zone in {**ZONES, "n9": "c"}.items()))
    told = "a: n0, n2 (ranks 0-1); b: n1, n3 (ranks 2-3); not here: n9"
    nodes = ["n0", "n2", "n1", "n3"]
    assert run_ranks(_joined, 4, str(path)) == [(i, i, told, nodes) for i in (0, 2, 1, 3)]


@pytest.mark.parametrize("text", ["n0: a\nn1: b\nn2: a\n", "n0: [\n"])
def test_every_rank_is_refused_alike(text: str, tmp_path: Path) -> None:
    path = tmp_path / "zones.yaml"
    path.write_text(text)
    found = run_ranks(_joined, 4, str(path))
    assert len(set(found)) == 1 and isinstance(found[0], str)
    assert re.search(r"no zone for the node elsewhere \(also known as n3\): add|correct the YAML or JSON", found[0])


class _Where(Callback):
    def on_generation_start(self, info: RunInfo) -> None:
        self.rank = info.rank


def _trained(rank: int, world_size: int, path: str | None, mesh: str) -> Any:
    opening.node_names = lambda given: [f"n{rank}"]  # type: ignore[assignment]
    losses, where = Losses(), _Where()
    config = MeshConfig(dp_shard=2, **{mesh: 2}, topology=path)
    trainer = Trainer(max_steps=2, mesh=config, log_every=1, micro_batch_size=2, callbacks=[losses, where])
    trainer.fit(Llama(variant(plan="plain")))
    return where.rank, losses.values


@pytest.mark.slow
def test_the_numbers_stay_what_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zones.json"
    path.write_text(json.dumps(ZONES))
    for mesh in ("dp_replicate", "pp"):
        plain, placed = run_ranks(_trained, 4, None, mesh), run_ranks(_trained, 4, str(path), mesh)
        assert [rank for rank, _ in placed] == [0, 2, 1, 3]
        assert [losses for _, losses in placed] == [losses for _, losses in plain]
        out = " ".join(capfd.readouterr().out.split())
        assert "note: topology: a: n0, n2 (ranks 0-1); b: n1, n3 (ranks 2-3)" in out


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_agents(tmp_path: Path) -> None:
    """Three nodes on the loopback, told apart by their addresses, in two zones."""
    (tmp_path / "zones.yaml").write_text("127.0.0.1: a\n127.0.0.2: b\n127.0.0.3: a\n")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "elastictrain",
        "run",
        "tests/cli/net_task.py:Net",
        "--nnodes",
        "3",
        "--max-steps",
        "2",
    ]
    command += ["--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--mesh", "dp_shard=3"]
    command += ["--topology", str(tmp_path / "zones.yaml"), "--run-dir", str(tmp_path / "run"), "--log-every", "1"]
    nodes = [
        subprocess.Popen(
            [*command, "--local-addr", f"127.0.0.{node}"],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in (1, 2, 3)
    ]
    outputs = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0], outputs
    told = " ".join(" ".join(outputs).split())
    found = re.search(r"note: topology: (\w): ([\d., ]+) \(ranks ([\d-]+)\); (\w): ([\d., ]+) \(ranks ([\d-]+)\)", told)
    assert found is not None, told
    by_zone = {found[1]: (found[2].split(", "), found[3]), found[4]: (found[5].split(", "), found[6])}
    assert sorted(by_zone["a"][0]) == ["127.0.0.1", "127.0.0.3"] and by_zone["b"][0] == ["127.0.0.2"]
    assert sorted(ranks for _, ranks in by_zone.values()) in (["0", "1-2"], ["0-1", "2"]), "zones stand together"
    assert "dp_shard (across zones: ranks 0, 1, 2)" in told or "mesh: dp_shard=3 (3 ranks on 3 nodes" in told
    assert sorted(logged(tmp_path / "run", "train/loss")) == [1, 2]
