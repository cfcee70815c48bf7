"""``Task``: what a user writes. It *is* a ``lightning.LightningModule``, with data and a loss of its own.

A task names its datasets instead of building loaders, because the trainer owns order and position: it decides which
samples make up a global batch and who computes them, and it can say at any moment which ones were used. Everything else
is Lightning's, and a task also runs under ``lightning.Trainer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from elastictrain.errors import UsageError
from elastictrain.own_plan import own_plan


class Task(LightningModule):
    """Model, data and loss of one training run.

    The least a task needs: ``configure_model`` (or modules built in ``__init__``), ``forward``, ``loss``,
    ``configure_optimizers`` and ``train_dataset``. What is built in ``configure_model`` is sharded before it gets its
    weights, so that no rank ever holds a large model whole.

    The default steps log ``val/loss`` and ``test/loss``; the trainer logs ``train/loss``. Everything else that a
    ``LightningModule`` has (``self.log``, hooks, several loaders) is here as well.

    Attributes:
        batch_size: the global batch size (samples per optimizer step, over all ranks) unless the trainer is given one.
            Under ``lightning.Trainer`` it is the batch of each rank.
        num_workers: loader processes per rank; 0 loads in the training process.
        collate_fn: joins a list of samples into a batch; None is torch's default.
    """

    batch_size: ClassVar[int | None] = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None

    # ---- data ------------------------------------------------------------------------------------------------------

    def train_dataset(self) -> Dataset[Any] | IterableDataset[Any]:
        """A map-style dataset, shuffled by the trainer, or a :class:`~elastictrain.data.SampleStream`, which has its order.

        For an order of your own return a ``DataLoader`` from ``train_dataloader()`` instead.
        """
        raise UsageError(f"{type(self).__name__} has no training data: define train_dataset() or train_dataloader()")

    def val_dataset(self) -> Dataset[Any] | None:
        """Held-out data, a dataset or a stream, read in microbatches in the order it has; None for no validation."""
        return None

    def test_dataset(self) -> Dataset[Any] | None:
        """Data of ``trainer.test``."""
        return None

    def predict_dataset(self) -> Dataset[Any] | None:
        """Data of ``trainer.predict``."""
        return None

    # ---- the step --------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> Any:
        """What ``forward`` receives of a batch: the first of a tuple or list, else the batch itself."""
        return batch[0] if isinstance(batch, (tuple, list)) else batch

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The mean loss over the samples of ``batch``, a scalar (see :meth:`loss_weight`)."""
        raise UsageError(f"{type(self).__name__} has no loss: define loss(outputs, batch) or training_step(batch)")

    def loss_weight(self, batch: Any) -> int | float | None:
        """Over how many things ``loss`` is a mean, where that is not the number of samples: unmasked tokens, say.

        The gradient of a global batch is then the mean over all of them, however they fall on microbatches and ranks.
        ``batch`` is still on the CPU. None: by samples. A batch of weight 0 counts nothing; its loss may be nan, and its
        gradient may not: divide a sum over a mask by ``mask.sum().clamp(min=1)``.
        """
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(self.inputs(batch)), batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(self(self.inputs(batch)), batch)
        weight = self.loss_weight(batch)
        self.log("val/loss", loss, prog_bar=True, batch_size=None if weight is None else int(weight))
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(self(self.inputs(batch)), batch)
        weight = self.loss_weight(batch)
        self.log("test/loss", loss, batch_size=None if weight is None else int(weight))
        return loss

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(self.inputs(batch))

    # ---- throughput ------------------------------------------------------------------------------------------------

    def tokens_per_sample(self) -> int | None:
        """Tokens in one sample, for tokens/s; None: counted from batches of token ids, else there are none."""
        return None

    def flops_per_sample(self) -> float | None:
        """Floating-point operations of one sample's forward and backward pass, for MFU.

        None: counted, where there are ``forward`` and ``loss``. What is computed again to save memory does not count.

        For a decoder about ``6 * num_parameters * tokens``, and ``12 * num_layers * dim * tokens ** 2`` more for attention
        without a mask (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); of a mixture, those experts count that a
        token goes to. A model of transformers has ``model.num_parameters()``.
        """
        return None

    # ---- layout ----------------------------------------------------------------------------------------------------

    def pipeline_units(self) -> list[str] | None:
        """Names of the modules between which the model may be cut, in order; None: the run of equal blocks that holds most
        of the model.

        Sharding wraps each of them, so that one block's weights are gathered at a time.
        """
        return None

    def tensor_parallel_plan(self) -> dict[str, Any] | None:
        """How ``tp`` splits the model: ``{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}``, by names of modules.

        A ``*`` stands for one part of a name; styles are those of ``torch.distributed.tensor.parallel``, or their names
        in :mod:`elastictrain.parallel.plans`. The default is the plan that the model brings, ``tp_plan`` of the models of
        transformers; ``{**super().tensor_parallel_plan(), "model.lm_head": "colwise_loss_parallel"}`` changes a part of
        it. None: no plan, and a mesh with ``tp`` is refused.

        Raises:
            UsageError: the model's plan has a style that is not supported.
        """
        return own_plan(self)

    def context_parallel_plan(self) -> dict[Any, int] | None:
        """Which dim of which entry of a batch is the sequence that ranks of ``cp`` share: ``{"tokens": 1, "labels": 1}``.

        Keys name entries of a mapping, or by index those of a tuple or list. All have the same number of tokens, a multiple
        of twice ``cp``, and belong together token by token: targets are shifted already. The model calls
        :func:`elastictrain.parallel.attention`. None: no plan, and a mesh with ``cp`` is refused.
        """
        return None

    # ---- under lightning.Trainer -----------------------------------------------------------------------------------

    def train_dataloader(self) -> Any:
        data = self.train_dataset()
        return self._loader(data, shuffle=not isinstance(data, IterableDataset))

    def val_dataloader(self) -> Any:
        return self._loader(self.val_dataset())

    def test_dataloader(self) -> Any:
        return self._loader(self.test_dataset())

    def predict_dataloader(self) -> Any:
        return self._loader(self.predict_dataset())

    def _loader(self, data: Any, *, shuffle: bool = False) -> Any:
        if data is None:
            return []
        return DataLoader(
            data,
            batch_size=self.batch_size or 1,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=type(self).collate_fn and self.collate_fn,
        )
