"""The data a user gave, wherever it stands: an argument, a datamodule, a task's datasets, a module's loaders."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from elastictrain.compat.lightning import LightningDataModule, LightningModule, flatten_loaders, is_overridden
from elastictrain.data.evaluation import dataset_loader
from elastictrain.data.map_feed import LoaderOptions
from elastictrain.errors import UnsupportedError, UsageError
from elastictrain.session import Session
from elastictrain.task import Task


def training_source(session: Session, given: Any) -> Any:
    """A dataset, a ``DataLoader`` or an iterable of batches.

    Raises:
        UsageError: there is none.
    """
    s = session
    if given is not None:
        return _single(given)
    if s.datamodule is not None and is_overridden("train_dataloader", s.datamodule, LightningDataModule):
        return _single(s.datamodule.train_dataloader())
    if isinstance(s.task, Task) and not is_overridden("train_dataloader", s.task, Task):
        return s.hooks.within("train_dataloader", s.task.train_dataset)
    if is_overridden("train_dataloader", s.task, LightningModule):
        return _single(s.hooks.within("train_dataloader", s.task.train_dataloader))
    raise UsageError(
        f"{type(s.task).__name__} has no training data: define train_dataset() or train_dataloader(), or give fit a"
        " datamodule or train_dataloaders"
    )


def _single(loader: Any) -> Any:
    if isinstance(loader, CombinedLoader):
        raise UnsupportedError(
            "a CombinedLoader for training: combine the datasets instead (torch.utils.data.StackDataset or ConcatDataset)"
        )
    return loader


def loader_options(task: LightningModule) -> LoaderOptions:
    """How a task's own datasets are loaded."""
    if not isinstance(task, Task):
        return LoaderOptions()
    num_workers = int(task.num_workers)
    other = {"persistent_workers": True} if num_workers else {}
    return LoaderOptions(num_workers=num_workers, collate_fn=task.collate_fn, other=other)


def evaluation_loaders(session: Session, given: Any, *, stage: str, batch_size: int) -> list[Any]:
    """The loaders of "val", "test" or "predict"; empty where there is nothing to evaluate.

    Args:
        batch_size: for a task's own datasets.
    """
    s = session
    step = {"val": "validation_step"}.get(stage, f"{stage}_step")
    if stage != "predict" and not is_overridden(step, s.task, LightningModule):
        return []
    name = f"{stage}_dataloader"
    if given is None:
        if s.datamodule is not None and is_overridden(name, s.datamodule, LightningDataModule):
            given = getattr(s.datamodule, name)()
        elif isinstance(s.task, Task) and not is_overridden(name, s.task, Task):
            dataset = s.hooks.within(name, getattr(s.task, f"{stage}_dataset"))
            if dataset is None:
                return []
            return [
                dataset_loader(
                    dataset, batch_size=batch_size, num_workers=s.task.num_workers, collate_fn=s.task.collate_fn
                )
            ]
        elif is_overridden(name, s.task, LightningModule):
            given = s.hooks.within(name, getattr(s.task, name))
    s.val_data = given
    return flatten_loaders(given)
