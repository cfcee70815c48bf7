"""What a snapshot of every step costs a model of 50 million parameters: steps with and without, in the same processes.

    python benchmarks/snapshot_overhead.py [--blocks 12] [--samples 8] [--length 256] [--folder DIR]

A decoder of 12 layers, width 512, in fp32 with AdamW, on two ranks of FSDP2 (600 MB of state in all): once on one node,
with its keeper, and once on two, where each keeper also copies its half to the other one's. Blocks of six steps with a
snapshot of each and of six without take turns; the first two steps of a block are left out, so that what the block before
has left in the background is over. What is printed is the median of the ratios of each block with snapshots to the mean
of the two without around it, so that a machine, or a model, that becomes slower and slower does not count.

A step is ``--samples`` times ``--length`` tokens over both ranks, 2,048 by default: few for such a model, and still seconds
on two CPU cores. A GPU needs far less time for far more: then compare with the milliseconds for which training stands still.
They are one copy of the local state at the speed of memory (measured beside it, both ranks at once), and what comes before
it: naming the state, and one meeting of the ranks. Beside that, keepers hash and copy at low priority; where ranks and
keepers have to share cores, that is in the ratio too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastictrain import Callback, Task
from elastictrain.fit import FitLoop

ROOT = Path(__file__).parents[1]
VOCAB, WIDTH, LAYERS, HEADS = 24_000, 512, 12, 8
BLOCK, LEFT_OUT = 6, 2  # steps
WARM = 2  # blocks


def has_snapshots(step: int) -> bool:
    """Of the step after ``step`` finished ones."""
    return step // BLOCK % 2 == 1


class Decoder(Task):
    def __init__(self, samples: int = 8, length: int = 256) -> None:
        super().__init__()
        self.batch_size, self.length = samples, length

    def configure_model(self) -> None:
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)  # it is the head's, too: with 1.0 most probabilities are subnormal
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def train_dataset(self) -> Any:
        chance = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(VOCAB, (4 * self.batch_size, self.length + 1), generator=chance))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, mask = batch[0][:, :-1], nn.Transformer.generate_square_subsequent_mask(self.length)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Timing(Callback):
    """Has snapshots taken in every other block, and writes down on each rank how long things took."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_start(self, info: Any) -> None:
        self.ends: list[float] = []
        self.stood: list[float] = []
        self.num_bytes, self.manager = 0, None
        due, keep = FitLoop._snapshot_is_due, FitLoop._keep

        def timed(loop: FitLoop, manager: Any, **what: bool) -> None:
            began = time.perf_counter()
            keep(loop, manager, **what)
            if what["snapshots"]:
                self.stood.append(time.perf_counter() - began)
                self.manager = manager

        FitLoop._snapshot_is_due = lambda loop, step: has_snapshots(step) and due(loop, step)  # type: ignore[method-assign]
        FitLoop._keep = timed  # type: ignore[method-assign,assignment]

    def on_step_end(self, info: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_fit_end(self, info: Any) -> None:
        assert self.manager is not None and self.manager.snapshots is not None
        snapshots, image = self.manager.snapshots, self.manager.snapshots._kept[-1].arena.image
        found = {
            "ends": self.ends,
            "stood": self.stood[BLOCK:],
            "num_bytes": image.num_bytes,
            "copies": self._copies(image.num_bytes),
        }
        found |= {"taken": snapshots.num_taken, "failed": snapshots.num_failed, "behind": snapshots.num_behind}
        Path(self.folder, f"rank-{info.rank}.json").write_text(json.dumps(found))

    @staticmethod
    def _copies(num_bytes: int) -> list[float]:
        """Seconds that one copy of so many bytes in memory takes, with memory that is there already."""
        one, other = (torch.ones(num_bytes // 4) for _ in range(2))
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            other.copy_(one)
            seconds.append(time.perf_counter() - began)
        return seconds


def run(folder: Path, *, nodes: int, blocks: int, samples: int, length: int) -> list[dict[str, Any]]:
    """What the two ranks have written down."""
    folder.mkdir()
    options = [
        "--run-dir",
        str(folder / "run"),
        "--max-steps",
        str(2 * BLOCK * (blocks + WARM) + BLOCK),
        "--mesh",
        "dp_shard=2",
    ]
    options += ["--snapshot-every", "1", "--log-every", "1000000", "--micro-batch-size", str(max(1, samples // 2))]
    options += ["--set", f"samples={samples}", "--set", f"length={length}", "--spares", "0", "--max-restarts", "0"]
    options += ["--callback", f"benchmarks.snapshot_overhead:Timing:folder={folder}"]
    options += ["--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes), "--local-addr", "127.0.0.1"]
    argv = [sys.executable, "-m", "elastictrain", "run", "benchmarks.snapshot_overhead:Decoder", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outputs = [folder / f"output-{node}" for node in range(nodes)]
    agents = []
    for output in outputs:
        with open(output, "w") as out:
            agents.append(subprocess.Popen(argv, stdout=out, stderr=out, env=env, cwd=ROOT))
    try:
        codes = [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
    if any(codes):
        raise SystemExit("it has failed:\n" + "\n".join(output.read_text()[-3000:] for output in outputs))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def show(name: str, ranks: list[dict[str, Any]]) -> None:
    ends = ranks[0]["ends"]
    firsts = range(2 * BLOCK * WARM, len(ends) - BLOCK + 1, BLOCK)  # what follows a step is in the next one's time
    blocks = [[ends[i] - ends[i - 1] for i in range(first + LEFT_OUT, first + BLOCK)] for first in firsts]
    medians = [statistics.median(block) for block in blocks]
    around = [(before + after) / 2 for before, after in itertools.pairwise(medians[::2])]
    pairs = list(zip(around, medians[1::2], strict=True))
    ratios = [with_it / without for without, with_it in pairs]
    ratio = statistics.median(ratios)
    without, with_it = (1000 * statistics.median(one[k] for one in pairs) for k in (0, 1))
    stood, copies = ([1000 * statistics.median(one[what]) for one in ranks] for what in ("stood", "copies"))
    sizes = [one["num_bytes"] / 1e6 for one in ranks]
    speeds = [size / copy for size, copy in zip(sizes, copies, strict=True)]
    print(f"\n{name}: {len(pairs)} blocks of {BLOCK} steps with snapshots")
    print(f"  a step without snapshots {without:.0f} ms, with one of each {with_it:.0f} ms: {ratio:.3f}×")
    print(f"  ratios of the blocks: {', '.join(f'{one:.3f}' for one in sorted(ratios))}")
    print(f"  training stands still for {stood[0]:.0f} and {stood[1]:.0f} ms a snapshot (ranks 0 and 1)")
    print(f"  images of {sizes[0]:.0f} and {sizes[1]:.0f} MB; one copy of as much in memory takes", end="")
    print(f" {copies[0]:.0f} and {copies[1]:.0f} ms ({speeds[0]:.1f} and {speeds[1]:.1f} GB/s)")
    counts = ranks[0]
    print(
        f"  {counts['taken']} taken, {counts['failed']} failed, {counts['behind']} not copied to the buddy", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="with snapshots, that are measured")
    parser.add_argument("--samples", type=int, default=8, help="of each step, over both ranks")
    parser.add_argument("--length", type=int, default=256, help="tokens of each sample")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="snapshots-"))
    folder.mkdir(exist_ok=True)
    how = {"blocks": options.blocks, "samples": options.samples, "length": options.length}
    for nodes in options.nodes:
        name = "two ranks on one node" if nodes == 1 else "two nodes of one rank, each copied to the other"
        show(name, run(folder / f"nodes-{nodes}", nodes=nodes, **how))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
