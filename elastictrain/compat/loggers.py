"""Lightning's loggers where a run has several starts: the same run of the tracker is gone on with, and what a rollback does
again is not there twice, as far as the tracker lets it.

Lightning's loggers have no such thing, and what names their run is private to each of them: all of it is here, pinned by
``tests/trainer/test_loggers.py``. It is not in :mod:`elastictrain.compat.lightning` because these are private names of five
classes, each of which stands for a tracker's library of its own, and nothing is done with them
that the trainer needs.
What a logger of another class does is its own.

| logger | its run is | steps that are done again |
|---|---|---|
| ``CSVLogger`` | ``version`` | replace the earlier ones |
| ``TensorBoardLogger`` | ``version`` | replace the earlier ones (TensorBoard's ``purge_step``) |
| ``WandbLogger`` | ``id`` | are not sent again, where W&B tells how far it was (online) |
| ``MLFlowLogger`` | ``run_id`` | are not sent again |
| ``CometLogger`` | ``experiment_key`` | are there twice |

On failure: whatever the tracker raises, from :meth:`Tracker.connect` and the logger's own methods.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from typing import Any, cast

import fsspec
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger


class Tracker:
    """What is known of the tracker behind a logger.

    Attributes:
        kind: what it is called.
        given: what names its run there, if whoever made the logger chose it; a string or a number.
        has_hparams: the run has hyperparameters already, and refuses others.
    """

    kind = ""
    has_hparams = False

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.kind = self.kind or type(logger).__name__.removesuffix("Logger").lower() or "logger"
        self.given = self._name()

    def _name(self) -> str | int | None:
        """What names the run, where that is known."""
        return None

    def adopt(self, name: str | int) -> None:
        """Go on with this run; before it is connected."""

    def connect(self, step: int | None) -> None:
        """Open it. The step that training goes on from, or None where it begins."""
        _ = getattr(self.logger, "experiment", None)

    @property
    def name(self) -> str | int | None:
        """What names the run, once it is connected."""
        return self._name()

    def unsent(self, metrics: Mapping[str, Any], step: int | None) -> Mapping[str, Any]:
        """Those that are not there already."""
        return metrics


class _Files(Tracker):
    """A logger that has a folder for each version."""

    logger: CSVLogger | TensorBoardLogger

    def _name(self) -> str | int | None:
        return self.logger._version

    def adopt(self, name: str | int) -> None:
        self.logger._version = name

    @property
    def name(self) -> str | int | None:
        return self.logger.version


class _Csv(_Files):
    kind = "csv"

    def connect(self, step: int | None) -> None:
        """Lightning deletes the file that is there: what it has from before ``step`` is in the new one.

        Meanwhile it is in a second file, from which another start takes it, should this one end here.
        """
        if step is None:
            return super().connect(step)
        assert isinstance(self.logger, CSVLogger)
        fs, folder = fsspec.url_to_fs(self.logger.log_dir)
        path, aside = os.path.join(folder, "metrics.csv"), os.path.join(folder, "metrics.csv.before")
        source = aside if fs.exists(aside) else path
        if not fs.exists(source):
            return super().connect(step)
        with fs.open(source, "r", newline="") as file:
            rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
        kept = [row for row in rows if _stays(row, step)]
        if source == path:
            fs.copy(path, aside + ".part")
            fs.mv(aside + ".part", aside)
        self.logger._experiment = None  # of an earlier generation in this process
        super().connect(step)
        writer = self.logger.experiment
        writer.metrics = cast("list[dict[str, float]]", kept)
        writer.save()
        fs.rm_file(aside)
        return None


def _stays(row: Mapping[str, str], step: int) -> bool:
    """Is it from before ``step``? Rows without an epoch count something else, such as batches of a validation."""
    try:
        return "epoch" not in row or int(row["step"]) < step
    except (KeyError, ValueError):  # cut by a crash
        return False


class _TensorBoard(_Files):
    kind = "tensorboard"
    logger: TensorBoardLogger

    def connect(self, step: int | None) -> None:
        if step is not None:
            if self.logger._experiment is not None:  # of an earlier generation in this process
                self.logger._experiment.close()
                self.logger._experiment = None
            self.logger._kwargs["purge_step"] = step
        super().connect(step)


class _Wandb(Tracker):
    kind = "wandb"
    logger: WandbLogger
    _last = -1  # step that is there

    def _name(self) -> str | None:
        return self.logger.version

    def adopt(self, name: str | int) -> None:
        if self.logger._experiment is None:
            self.logger._id = self.logger._wandb_init["id"] = str(name)

    def connect(self, step: int | None) -> None:
        super().connect(step)
        if step is not None and (summary := getattr(self.logger.experiment, "summary", None)) is not None:
            last = summary.get("trainer/global_step")
            self._last = int(last) if isinstance(last, int | float) else -1

    def unsent(self, metrics: Mapping[str, Any], step: int | None) -> Mapping[str, Any]:
        if step is None or "epoch" not in metrics or step >= self._last:
            return metrics
        return {}


class _MLflow(Tracker):
    kind = "mlflow"
    logger: MLFlowLogger
    _last: Mapping[str, int] = {}

    def __init__(self, logger: Logger) -> None:
        # Its own patience is minutes for each call, in which training would stand still.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        super().__init__(logger)

    def _name(self) -> str | None:
        return self.logger._run_id

    def adopt(self, name: str | int) -> None:
        if not self.logger._initialized:
            self.logger._run_id = str(name)

    def connect(self, step: int | None) -> None:
        going_on = self.logger._run_id is not None
        client, run_id = self.logger.experiment, self.logger.run_id
        if going_on and run_id is not None:
            client.update_run(run_id, status="RUNNING")
            if step is not None:
                there = client.get_run(run_id).data.to_proto()
                self._last = {metric.key: int(metric.step) for metric in there.metrics}
                self.has_hparams = bool(there.params)

    def unsent(self, metrics: Mapping[str, Any], step: int | None) -> Mapping[str, Any]:
        if step is None or not self._last:
            return metrics
        prefix = f"{self.logger._prefix}{self.logger.LOGGER_JOIN_CHAR}" if self.logger._prefix else ""
        return {name: value for name, value in metrics.items() if step > self._last.get(prefix + name, -1)}


class _Comet(Tracker):
    kind = "comet"
    logger: CometLogger

    def _name(self) -> str | None:
        return self.logger._experiment_key


_KINDS: dict[type[Logger], type[Tracker]] = {
    CSVLogger: _Csv,
    TensorBoardLogger: _TensorBoard,
    WandbLogger: _Wandb,
    MLFlowLogger: _MLflow,
    CometLogger: _Comet,
}


def tracker_of(logger: Logger) -> Tracker:
    """What is known of a logger's tracker."""
    for cls, kind in _KINDS.items():
        if isinstance(logger, cls):
            return kind(logger)
    return Tracker(logger)


def encode(tracker: Tracker) -> bytes:
    """What another start has to know, as JSON."""
    return json.dumps({"logger": type(tracker.logger).__name__, "name": tracker.name}).encode() + b"\n"


def decode(data: bytes) -> str | int | None:
    """The name in it; None where there is none."""
    try:
        name = json.loads(data)["name"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str | int) else None
