"""A worker that torchrun starts: says who it is, proves that it meets the others, and waits for a file."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    line = {"pid": os.getpid(), "agent": os.getppid(), "rank": dist.get_rank(), "world": dist.get_world_size(),
            "sum": total.item()}  # fmt: skip
    part = out / f".{os.getpid()}"
    part.write_text(json.dumps(line))
    part.rename(out / f"{os.getpid()}.json")
    while not (out / "stop").exists():
        if os.getppid() != line["agent"]:
            os._exit(1)
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
