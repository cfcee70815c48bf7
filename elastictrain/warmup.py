"""What a worker pays for once, paid before it has a place in the run: imports, and the first use of everything.

A spare trains a toy model for one step, sharded over a mesh of this process alone, and then forgets that mesh, exactly as a
worker does whose generation is over. None of that touches a GPU, whose memory belongs to those who train. A spare also
imports the user's file: what its top level does to a GPU is done in every spare.

On failure: whatever is raised leaves no process group behind; the spare is then a cold one.
"""

from __future__ import annotations

import gc
import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastictrain.metrics.tensorboard  # what rank 0 imports as it begins: whoever waits may become it
import elastictrain.metrics.views
import elastictrain.trainer  # noqa: F401 - all that training imports
from elastictrain.callbacks.registry import resolve_callback
from elastictrain.compat.lightning import LightningModule, call_hook
from elastictrain.parallel.mesh import abandon
from elastictrain.rundir import RunDir


def warm_up() -> None:
    """Takes seconds, and leaves nothing but warm caches."""
    _use_once()
    try:
        _train_a_step()
    finally:
        abandon()
    gc.collect()
    gc.freeze()  # the imports: who looks for garbage later need not look at them


def _use_once() -> None:
    """What is imported, or looked up, by the first one that needs it."""
    resolve_callback("throughput-monitor")
    call_hook(LightningModule(), "configure_callbacks")
    RunDir(os.curdir)
    socket.getaddrinfo("127.0.0.1", None)


def _train_a_step() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.detach().zero_()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
