"""Modules, optimizers, steps and loaders that are refused, each with its whole message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from elastictrain import Trainer
from elastictrain.callbacks import GradientClipping
from elastictrain.errors import UsageError
from tests.compat.refusals import fit_on_a_rank, on_two_ranks, raised_by, refused, stepping
from tests.helpers import run_ranks
from tests.parity.data import Data, loader
from tests.parity.modules import GAN, Simple, WithLBFGS

# ---- modules -------------------------------------------------------------------------------------------------------


def test_hooks_that_are_needed(tmp_path: Path) -> None:
    class Bare(pl.LightningModule):
        pass

    class Steps(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    assert refused(Bare(), tmp_path) == "Bare has no training_step: define training_step(batch, batch_idx)"
    assert refused(Steps(), tmp_path) == "Steps has no configure_optimizers: define it"
    assert refused(nn.Linear(1, 1), tmp_path) == (
        "Linear is neither an elastictrain.Task nor a lightning.pytorch.LightningModule: derive it from one of them"
    )
    assert refused(torch.compile(Simple()), tmp_path) == (
        "the task is a compiled Simple: give the module itself, and compile its parts (self.net.compile()) in"
        " configure_model"
    )


@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step", "predict_step"])
def test_steps_that_read_the_loader_themselves(step: str, tmp_path: Path) -> None:
    def method(self: Any, dataloader_iter: Any) -> None: ...

    assert refused(type("Reads", (Simple,), {step: method})(), tmp_path) == (
        f"Reads.{step}(dataloader_iter): the trainer owns the order and position of data; take (batch, batch_idx)"
    )


def test_optimizer_idx(tmp_path: Path) -> None:
    class Old(Simple):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> None: ...  # type: ignore[override]

    assert refused(Old(), tmp_path) == (
        "Old.training_step(…, optimizer_idx): set self.automatic_optimization = False and step the optimizers of"
        " self.optimizers() yourself"
    )


@pytest.mark.parametrize("name", ["training", "validation", "test"])
def test_hooks_that_lightning_does_not_call_any_more(name: str, tmp_path: Path) -> None:
    hook = f"{name}_epoch_end"
    instead = {"training": "on_train_epoch_end"}.get(name, f"on_{hook}")
    module = type("Old", (Simple,), {hook: lambda self, outputs: None})()
    assert refused(module, tmp_path) == (
        f"Old.{hook}(outputs): Lightning 2 calls it no more; rename it to {instead}() and keep the outputs in an attribute"
    )


def test_configure_sharded_model(tmp_path: Path) -> None:
    class Old(Simple):
        def configure_sharded_model(self) -> None: ...

    assert refused(Old(), tmp_path) == "Old.configure_sharded_model(): rename it to configure_model()"


class FSDP1(FullyShardedDataParallel):
    """Only the class counts: wrapping really needs a process group and a GPU."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module


class Engine(nn.Module):
    """As deepspeed's, which is not installed."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [(nn.DataParallel, "DataParallel"), (FSDP1, "FullyShardedDataParallel"), (Engine, "deepspeed's Engine")],
)
def test_parts_that_others_have_wrapped(wrap: Any, kind: str, tmp_path: Path) -> None:
    module = Simple()
    module.net[0] = wrap(module.net[0])
    assert refused(module, tmp_path) == (
        f"Simple.net.0 is wrapped by {kind}: give the bare module; the trainer shards it (--mesh dp_shard=-1)"
    )


def test_a_part_in_ddp() -> None:
    def make() -> Any:
        module = Simple()
        module.net = nn.parallel.DistributedDataParallel(module.net)
        return module

    def fit(rank: int, world_size: int) -> str:
        torch.distributed.init_process_group("gloo")
        return fit_on_a_rank(rank, world_size, make, {})

    assert run_ranks(fit, 1) == [
        "Simple.net is wrapped by DistributedDataParallel: give the bare module; the trainer shards it (--mesh dp_shard=-1)"
    ]


def test_loaders_that_are_made_anew(tmp_path: Path) -> None:
    class Reloads(Simple):
        reload_dataloaders_every_n_epochs = 1

    class ReloadingData(Data):
        reload_dataloaders_every_n_epochs = 2

    why = "a new loader has no position to resume from; vary the data inside the dataset by epoch"
    assert refused(Reloads(), tmp_path) == f"Reloads.reload_dataloaders_every_n_epochs: {why}"
    message = refused(Simple(), tmp_path, ReloadingData(), train_dataloaders=None)
    assert message == f"ReloadingData.reload_dataloaders_every_n_epochs: {why}"


def test_a_loader_in_the_place_of_the_datamodule(tmp_path: Path) -> None:
    assert refused(Simple(), tmp_path, loader(8, 4)()) == (
        "datamodule is a DataLoader, not a LightningDataModule: give loaders by name (train_dataloaders=…,"
        " val_dataloaders=…, dataloaders=…)"
    )


def test_hyperparameters_that_clash(tmp_path: Path) -> None:
    class Clashes(Simple):
        def __init__(self, size: int = 7) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(UsageError) as raised:
        Trainer(max_epochs=1).fit(Clashes(), Data(size=8))
    assert str(raised.value) == (
        "hyperparameter 'size' is 7 in the module and 8 in the datamodule: rename one, or leave one out"
        " (save_hyperparameters(ignore=…))"
    )


# ---- optimizers ----------------------------------------------------------------------------------------------------


def _returning(value: Any) -> Any:
    return type("Returns", (Simple,), {"configure_optimizers": lambda self: value(self)})()


def _sgd(self: Any) -> Any:
    return torch.optim.SGD(self.parameters(), lr=0.1)


def test_several_optimizers(tmp_path: Path) -> None:
    assert refused(_returning(lambda self: [_sgd(self), _sgd(self)]), tmp_path) == (
        "Returns.configure_optimizers() returned 2 optimizers: with automatic optimisation there is one; set"
        " self.automatic_optimization = False and step them in training_step"
    )


def test_shapes_that_are_none(tmp_path: Path) -> None:
    prefix = "Returns.configure_optimizers(): "
    unknown = refused(_returning(lambda self: 3), tmp_path)
    assert unknown.startswith(f"{prefix}Unknown configuration for model optimizers.")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    without = refused(_returning(lambda self: ([o := _sgd(self)], [plateau(o)])), tmp_path)
    assert without.startswith(
        f"{prefix}`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler"
    )
    step = torch.optim.lr_scheduler.StepLR
    stranger = refused(_returning(lambda self: ([_sgd(self)], [step(_sgd(self), 1)])), tmp_path)
    assert stranger == (
        f"{prefix}Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`."
    )


def test_clipping_where_the_module_steps_itself(tmp_path: Path) -> None:
    assert refused(GAN(), tmp_path, trainer={"callbacks": [GradientClipping(norm=1.0)]}) == (
        "a callback clips gradients, and GAN steps its optimizers itself: call self.clip_gradients(optimizer,"
        " gradient_clip_val=…) in training_step instead"
    )


def test_lbfgs_on_several_ranks() -> None:
    assert on_two_ranks(WithLBFGS) == (
        "LBFGS runs its closure as often as each rank's own loss asks for: on several ranks use another optimizer"
    )


def test_a_monitor_that_is_not_logged() -> None:
    def plateau(self: Any) -> Any:
        optimizer = _sgd(self)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_los"}

    assert raised_by(_returning(plateau), val_dataloaders=loader(4, 4)()) == (
        "a ReduceLROnPlateau scheduler monitors 'val_los', which is not logged; there are: loss, val_loss"
    )


# ---- steps ---------------------------------------------------------------------------------------------------------


def test_what_a_step_may_return() -> None:
    assert raised_by(stepping(lambda self, batch: "loss")) == (
        "training_step returned a str: return the loss, a dict with 'loss', or None"
    )
    assert raised_by(stepping(lambda self, batch: {"los": 1})) == (
        "training_step returned a dict without 'loss': add it, or return the loss itself"
    )
    assert raised_by(stepping(lambda self, batch: 1.0, automatic_optimization=False)) == (
        "training_step returned a float: with manual optimisation return None, a tensor or a dict"
    )


def test_an_optimizer_step_without_its_closure() -> None:
    class Skips(Simple):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.optimizer.step()

    assert raised_by(Skips()) == (
        "Skips.optimizer_step() did not run the closure, which is the training step: call"
        " optimizer.step(closure=optimizer_closure), or optimizer_closure() where the optimizer should not step"
    )


def test_no_loss_on_several_ranks() -> None:
    class Sometimes(Simple):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    messages = run_ranks(fit_on_a_rank, 2, Sometimes, {"global_batch_size": 8})
    for rank, message in enumerate(messages):
        assert message == (
            f"training_step returned None for batch {rank}: on several ranks every slot needs a loss; return a loss of zero"
            " (outputs.sum() * 0)"
        )


def test_skipping_an_epoch_on_several_ranks() -> None:
    class Skips(Simple):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    assert on_two_ranks(Skips) == (
        "on_train_batch_start returned -1 (skip the epoch): each rank sees other batches, so they cannot agree; set"
        " self.trainer.should_stop instead, or run on one rank"
    )


# ---- loaders -------------------------------------------------------------------------------------------------------


def two() -> list[Any]:
    return [loader(8, 4)(), loader(4, 4)()]


def test_the_index_of_the_loader(tmp_path: Path) -> None:
    class Needs(Simple):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    class Ends(Simple):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    class Any_(Simple):
        def validation_step(self, *args: Any) -> None: ...

    assert refused(Simple(), tmp_path, val_dataloaders=two()) == (
        "Simple.validation_step() has no argument dataloader_idx, and there are 2 loaders: add dataloader_idx=0"
    )
    assert refused(Ends(), tmp_path, val_dataloaders=two()) == (
        "Ends.on_validation_batch_end() has no argument dataloader_idx, and there are 2 loaders: add dataloader_idx=0"
    )
    assert refused(Needs(), tmp_path, val_dataloaders=loader(8, 4)()) == (
        "Needs.validation_step() needs an argument dataloader_idx, and there is one loader: write dataloader_idx=0"
    )
    Trainer(max_steps=1).fit(Any_(), train_dataloaders=loader(8, 4)(), val_dataloaders=two())


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # Lightning's own, of its tree functions
def test_loaders_read_at_once(tmp_path: Path) -> None:
    assert refused(Simple(), tmp_path, train_dataloaders=CombinedLoader(two(), "max_size")) == (
        "a CombinedLoader for training: combine the datasets instead (torch.utils.data.StackDataset or ConcatDataset)"
    )
    assert refused(Simple(), tmp_path, val_dataloaders=CombinedLoader(two(), "min_size")) == (
        'a CombinedLoader with mode="min_size" for evaluation: ranks take whole batches in turns; use mode="sequential", or'
        " combine the datasets (torch.utils.data.StackDataset)"
    )
    assert refused(Simple(), tmp_path, train_dataloaders=two()) == (
        "the training data is a list: for several loaders combine their datasets (torch.utils.data.StackDataset or"
        " ConcatDataset); for a list of batches give an object with __iter__"
    )
