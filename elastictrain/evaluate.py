"""Validation, test and prediction: every batch once, over all ranks, hooks in Lightning's order.

On failure: an exception of the user's code is raised as it is. Ranks that have no batch in a round take part in a sharded
model's collectives by a ghost pass, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastictrain.compat.lightning import num_parameters
from elastictrain.compat.torch import tree_map
from elastictrain.data.evaluation import EvalLoader
from elastictrain.loop import StepRunner
from elastictrain.metrics.logbook import LogBook
from elastictrain.parallel.buffers import agree_on_buffers
from elastictrain.parallel.tensor import whole
from elastictrain.reporting import log_to_loggers
from elastictrain.session import Session


class Evaluator:
    """Runs the ``validation_step``, ``test_step`` or ``predict_step`` of the session's module."""

    def __init__(self, session: Session, runner: StepRunner) -> None:
        self._session, self._runner = session, runner

    def run(self, stage: str, loaders: Sequence[EvalLoader]) -> list[dict[str, float]]:
        """One pass over all loaders of ``stage`` ("validate" or "test").

        Returns:
            per loader, what was logged for the epoch, over all ranks.
        """
        s = self._session
        kept = s.stage, s.logbook, s.batch, s.batch_size, s.in_batch
        s.stage, s.logbook = stage, LogBook(training=False)
        s.pass_batches = 0
        self._leave_batch()
        name = "validation" if stage == "validate" else "test"
        agree_on_buffers(s.task, s.mesh)
        modes = {module: module.training for module in s.task.modules()}
        with torch.no_grad(), s.built.gathered():
            if f"on_{name}_model_eval" in s.hooks.own:
                s.hooks(f"on_{name}_model_eval")
            else:
                s.task.eval()
            s.hooks(f"on_{name}_start")
            s.hooks(f"on_{name}_epoch_start")
            of_loaders = [
                self._batches(name, loader, index if len(loaders) > 1 else None) for index, loader in enumerate(loaders)
            ]
            s.dataloader_idx = None
            s.hooks(f"on_{name}_epoch_end")
            of_all = s.publish_averages()
            log_to_loggers(s, {k: v for logged in [*reversed(of_loaders), of_all] for k, v in logged.items()})
            s.hooks(f"on_{name}_end")
            s.logbook.reset()
            if f"on_{name}_model_train" in s.hooks.own:
                s.hooks(f"on_{name}_model_train")
            else:
                for module, mode in modes.items():
                    module.training = mode
        if s.built.sharded is not None:
            s.built.sharded.settle()
        s.stage, s.logbook, s.batch, s.batch_size, s.in_batch = kept
        return [{k: v.item() for k, v in {**logged, **of_all}.items()} for logged in of_loaders]

    def _batches(self, name: str, loader: EvalLoader, dataloader_idx: int | None) -> dict[str, Tensor]:
        """All batches of one loader; what was logged for it."""
        s, step = self._session, f"{name}_step"
        takes_index = num_parameters(getattr(s.task, step)) > 1
        s.dataloader_idx = dataloader_idx
        for turn in loader.rounds():
            s.membership.beat()
            s.somebody_idles = turn.num_batches < s.mesh.dp_size
            number = s.rounds.get(dataloader_idx or 0, 0)
            s.rounds[dataloader_idx or 0] = number + 1
            if turn.batch_idx is None:
                if s.built.sharded is not None:
                    s.built.sharded.ghost(step)
                continue
            batch = self._runner.to_device(self._runner.part(turn.batch), dataloader_idx or 0)
            s.batch, s.batch_size, s.in_batch = batch, None, True
            s.pass_batches += 1
            s.epoch_batches += 1
            args: tuple[Any, ...] = (batch, turn.batch_idx)
            if dataloader_idx is not None:
                args = (*args, dataloader_idx)
            s.hooks(f"on_{name}_batch_start", *args)
            step_args = args if takes_index else (batch, *args[2:])
            output = s.hooks.within(step, self._runner.passes.compute, step, *step_args)
            s.hooks(f"on_{name}_batch_end", output, *args)
            written = s.logbook.steps(dataloader_idx)
            s.publish(written)
            log_to_loggers(s, written.log, step=number)
        self._leave_batch()
        return s.publish_averages()

    def _leave_batch(self) -> None:
        """What is logged from here on belongs to no batch."""
        s = self._session
        s.batch, s.batch_size, s.in_batch = None, None, False

    def predict(self, loaders: Sequence[EvalLoader]) -> list[Any]:
        """Outputs of ``predict_step`` for every batch, in order, on every rank; per loader where there are several."""
        s = self._session
        kept = s.stage
        s.stage = "predict"
        s.pass_batches = 0
        modes = {module: module.training for module in s.task.modules()}
        results: list[list[Any]] = []
        with torch.no_grad(), s.built.gathered():
            if "on_predict_model_eval" in s.hooks.own:
                s.hooks("on_predict_model_eval")
            else:
                s.task.eval()
            s.hooks("on_predict_start")
            s.hooks("on_predict_epoch_start")
            for index, loader in enumerate(loaders):
                results.append(self._predictions(loader, index if len(loaders) > 1 else None))
            s.hooks("on_predict_epoch_end")
            s.hooks("on_predict_end")
            for module, mode in modes.items():
                module.training = mode
        if s.built.sharded is not None:
            s.built.sharded.settle()
        s.stage = kept
        return results[0] if len(results) == 1 else results

    def _predictions(self, loader: EvalLoader, dataloader_idx: int | None) -> list[Any]:
        s = self._session
        takes_index = num_parameters(s.task.predict_step) > 1
        own: dict[int, Any] = {}
        for turn in loader.rounds():
            s.somebody_idles = turn.num_batches < s.mesh.dp_size
            if turn.batch_idx is None:
                if s.built.sharded is not None:
                    s.built.sharded.ghost("predict_step")
                continue
            batch = self._runner.to_device(turn.batch, dataloader_idx or 0)
            s.batch = batch
            s.pass_batches += 1
            s.epoch_batches += 1
            args: tuple[Any, ...] = (batch, turn.batch_idx)
            if dataloader_idx is not None:
                args = (*args, dataloader_idx)
            s.hooks("on_predict_batch_start", *args)
            step_args = args if takes_index else (batch, *args[2:])
            output = s.hooks.within("predict_step", self._runner.passes.compute, "predict_step", *step_args)
            own[turn.batch_idx] = tree_map(whole, output)
            s.hooks("on_predict_batch_end", own[turn.batch_idx], *args)
        everywhere: dict[int, Any] = {}
        for theirs in s.mesh.gather(own):
            everywhere.update(theirs)
        return [everywhere[i] for i in sorted(everywhere)]
