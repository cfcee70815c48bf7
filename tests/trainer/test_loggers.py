"""Loggers over two starts with a rollback between them, and trackers that fail: each with the failure injected.

W&B, MLflow and Comet are stood for by modules with as much of their clients' public interface as Lightning's loggers use
(``fake_trackers``). Where the real packages of W&B and MLflow are installed, they are tested too, without a server.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastictrain import CheckpointConfig, Trainer, UsageError
from elastictrain import loggers as loggers_module
from elastictrain.loggers import Loggers, given_loggers, parse_logger
from elastictrain.metrics.ledger import start_steps
from elastictrain.rundir import RunDir
from tests.helpers import run_ranks
from tests.records import read_records
from tests.trainer.tasks import Recorded

pytestmark = pytest.mark.filterwarnings("ignore")

FAKES = str(Path(__file__).with_name("fake_trackers"))


class Logs(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(run_dir: Path, steps: int, loggers: Any, **options: Any) -> None:
    """State of every fifth step is kept, and not that of the end: another start does the rest again."""
    checkpoint = CheckpointConfig(every_steps=5, every_seconds=None, at_end=False)
    options = {"global_batch_size": 24, "log_every": 1, "checkpoint": checkpoint, **options}
    Trainer(run_dir=str(run_dir), max_steps=steps, loggers=loggers, **options).fit(Logs())


def two_starts(run_dir: Path, make: Callable[[], Any]) -> None:
    """Seven steps, and from the fifth on ten."""
    fit(run_dir, 7, make())
    fit(run_dir, 10, make())
    assert sorted(start_steps(RunDir(run_dir), after=-1).values()) == [0, 5], "the second start is none from nothing"


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def losses(found: list[dict[str, str]]) -> dict[int, float]:
    """By step; one that is there twice fails."""
    values: dict[int, float] = {}
    for row in found:
        if row["loss"]:
            assert int(row["step"]) not in values, row
            values[int(row["step"])] = float(row["loss"])
    return values


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("made", ["text", "object"])
def test_csv_goes_on_in_the_same_version_without_duplicates(made: str, tmp_path: Path) -> None:
    place = tmp_path / "run" if made == "text" else tmp_path / "csv"
    two_starts(tmp_path / "run", lambda: "csv:name=logs" if made == "text" else [CSVLogger(place, name="logs")])
    assert [path.name for path in (place / "logs").iterdir()] == ["version_0"]
    found = losses(rows(place / "logs" / "version_0"))
    assert list(found) == list(range(10)), "Lightning counts from 0"
    recorded = logged_last(tmp_path / "run", "loss")
    assert found == {step - 1: pytest.approx(value, rel=1e-4) for step, value in recorded.items()}


def logged_last(run_dir: Path, name: str) -> dict[int, float]:
    """By step, of what was done twice the later one."""
    return {row["step"]: row[name] for row in read_records(RunDir(run_dir)) if name in row}


@pytest.mark.slow
def test_a_crash_while_the_csv_file_is_rewritten_loses_nothing(tmp_path: Path) -> None:
    fit(tmp_path, 7, "csv")
    folder = tmp_path / "csv" / "version_0"
    before = losses(rows(folder))
    (folder / "metrics.csv").rename(folder / "metrics.csv.before")  # Lightning has deleted it, and then came the end
    fit(tmp_path, 10, "csv")
    after = losses(rows(folder))
    assert list(after) == list(range(10)) and {step: after[step] for step in range(5)} == {
        step: before[step] for step in range(5)
    }
    assert not (folder / "metrics.csv.before").exists()


@pytest.mark.slow
def test_tensorboard_forgets_what_is_done_again(tmp_path: Path) -> None:
    two_starts(tmp_path, lambda: ["tensorboard:name=tb"])
    (version,) = (tmp_path / "tb").iterdir()
    events = EventAccumulator(str(version))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(10))


# ---- trackers ------------------------------------------------------------------------------------------------------


def start(place: Path, loggers: Any, steps: int, *, env: Mapping[str, str] = {}, **options: Any) -> list[str]:
    """One start in a process of its own, whose trackers are the fakes; the warnings."""

    def train(rank: int, world_size: int) -> list[str]:
        sys.path.insert(0, FAKES)
        for name in ("wandb", "mlflow", "comet"):  # what Lightning has found before is of the parent's packages
            module = sys.modules[f"lightning.pytorch.loggers.{name}"]
            setattr(module, f"_{name.upper()}_AVAILABLE", True)
        warnings: list[str] = []
        loggers_module.log.warning = lambda text, *args: warnings.append(text % args)  # type: ignore[method-assign]
        fit(place / "run", steps, loggers, **options)
        return warnings

    place.mkdir(exist_ok=True)
    (found,) = run_ranks(train, 1, env={"FAKE_TRACKER": str(place), **env})
    return list(found)


def sent(place: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (place / "lines").read_text().splitlines()) if line["kind"] == kind]


@pytest.mark.slow
def test_wandb_resumes_its_run_and_is_not_told_twice(tmp_path: Path) -> None:
    for steps in (7, 10):
        assert start(tmp_path, "wandb:project=lm", steps) == []
    begun = sent(tmp_path, "init")
    assert [(one["run"], one["project"]) for one in begun] == [("generated0", "lm"), ("generated0", "lm")]
    assert begun[1]["resume"] == "allow" and begun[0]["dir"] == str(tmp_path / "run")
    steps_sent = [one["values"]["trainer/global_step"] for one in sent(tmp_path, "log") if "loss" in one["values"]]
    assert steps_sent == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9], "the last one might have been half told"


@pytest.mark.slow
def test_mlflow_resumes_its_run_and_is_not_told_twice(tmp_path: Path) -> None:
    for steps in (7, 10):
        assert start(tmp_path, ["mlflow:prefix=a"], steps) == []
    assert [one["run"] for one in sent(tmp_path, "create")] == ["run0"]
    steps_sent = [one["steps"]["a-loss"] for one in sent(tmp_path, "log") if "a-loss" in one["steps"]]
    assert steps_sent == list(range(10))
    assert [one["status"] for one in sent(tmp_path, "status")] == ["FINISHED", "RUNNING", "FINISHED"]


@pytest.mark.slow
def test_comet_resumes_its_experiment(tmp_path: Path) -> None:
    for steps in (7, 10):
        assert start(tmp_path, ["comet"], steps) == []
    assert [one["run"] for one in sent(tmp_path, "start")] == ["key0", "key0"]
    assert {one["step"] for one in sent(tmp_path, "log")} >= set(range(10))


@pytest.mark.slow
def test_a_run_of_ones_own_choice_wins(tmp_path: Path) -> None:
    start(tmp_path, "wandb", 7)
    start(tmp_path, "wandb:id=mine", 10)
    assert [one["run"] for one in sent(tmp_path, "init")] == ["generated0", "mine"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet"])
def test_a_tracker_that_does_not_answer_is_said_before_anything_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "DOWN").touch()
    with pytest.raises(AssertionError, match=r"UsageError: .*cannot be used \(ConnectionError: the server does not"):
        start(tmp_path, name, 7)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "comet"])
def test_one_that_does_not_answer_when_workers_start_again_is_left_out(name: str, tmp_path: Path) -> None:
    start(tmp_path, name, 7)
    (tmp_path / "DOWN").touch()
    (warning, *more) = start(tmp_path, name, 10, env={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert "cannot be used (ConnectionError: the server does not answer): training goes on" in warning
    assert sum("calls of the wandb logger were in vain" in line for line in more) == (name == "wandb")
    assert max(logged_last(tmp_path / "run", "loss")) == 10


# ---- failing later -------------------------------------------------------------------------------------------------


class Fails(Logger):
    """From the third value on."""

    name = version = "fails"

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.num_calls += 1
        if self.num_calls > 2:
            raise OSError("no route")

    def finalize(self, status: str) -> None:
        raise ValueError("nor now")


@pytest.mark.slow
def test_a_logger_that_fails_later_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = Fails()
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, 7, [logger, CSVLogger(tmp_path, name="logs")])
    assert logger.num_calls == 3, "it is left alone for a while"
    assert caplog.text.count("the fails logger fails (OSError: no route): training goes on") == 1
    assert "7 calls of the fails logger were in vain" in caplog.text, "steps 3 to 7, an epoch, and its end"
    assert list(losses(rows(tmp_path / "logs" / "version_0"))) == list(range(7)), "the others are told everything"


def test_one_call_that_fails_costs_only_itself_and_is_counted_through_generations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Half(Fails):
        num_values = 0

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("refused")

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.num_values += 1

    logger = Half()
    for step in range(3):  # a process that lives on connects the same object again
        given = Loggers([logger], run_dir=None, must_work=True)
        given.prepare(lambda ask: ask())
        given.connect(lambda ask: ask(), step=step)
        logger.log_hyperparams({"a": 1})
        logger.log_metrics({"loss": 1.0}, step)
    given._trackers[0][1].has_hparams = True
    logger.log_hyperparams({"a": 2})  # the run has others, and would refuse these
    logger.finalize("success")
    assert logger.num_values == 3
    assert caplog.text.count("the half logger fails (OSError: refused)") == 1
    assert "4 calls of the half logger were in vain" in caplog.text


@pytest.mark.slow
def test_a_logger_that_works_again_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_module, "_REST", 0.0)
    monkeypatch.setattr(loggers_module, "_SHARE", 0.0)
    logger = Fails()
    fit(tmp_path, 7, logger)
    assert logger.num_calls == 8, "every step and an epoch"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "wand",
            "--logger wand: there is no logger 'wand'; did you mean wandb? Known: comet, csv, mlflow, tensorboard, wandb",
        ),
        ("csv:name", "--logger csv:name: 'name' is not NAME=VALUE"),
        ("csv:nam=x", "--logger csv:nam=x: CSVLogger has no argument 'nam'; did you mean name?"),
        ("csv:flush-logs-every-n-steps=x", "flush_logs_every_n_steps='x' is not a whole number"),
        ("nowhere.at:All", "--logger nowhere.at:All: nowhere.at cannot be imported"),
        ("elastictrain.callbacks:EMA", "EMA is not a subclass of lightning.pytorch.loggers.Logger"),
    ],
)
def test_text_that_names_no_logger(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="^--logger") as error:
        Trainer(max_steps=1, loggers=[text])
    assert says in str(error.value)


def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"wandb is not installed: pip install 'elastictrain\[wandb\]'"):
        parse_logger("wandb:project=a")


@pytest.mark.parametrize(
    "text",
    [
        "comet:api_key=hidden,project=a",
        "my.module:Logger:project=a,API-TOKEN='hid,den'",
        "csv:save_dir=a,password=hidden",
        "csv:version={secret=hidden},save_dir=ftp://me:hidden@host/a",
        "csv:my key=hidden",
        "csv:nokey,client_secret=hidden",
    ],
)
def test_secrets_are_not_said(text: str) -> None:
    try:
        told = given_loggers(text)[0].spec.text
    except UsageError as error:
        told = str(error)
    assert "hidden" not in told and "hid,den" not in told and told.startswith(f"--logger {text[:6]}")


def test_a_run_directory_elsewhere_has_no_place_for_files() -> None:
    with pytest.raises(UsageError, match="the run directory is not a local one: add save_dir=FOLDER"):
        Trainer(run_dir="memory://loggers", max_steps=1, loggers="csv", global_batch_size=24).fit(Logs())


# ---- the real ones, where they are installed -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_mlflow_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    two_starts(tmp_path / "run", lambda: f"mlflow:save_dir={tmp_path / 'ml'}")
    client = mlflow.MlflowClient(f"file:{tmp_path / 'ml'}")
    experiment = client.get_experiment_by_name("lightning_logs")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert [one.step for one in client.get_metric_history(run.info.run_id, "loss")] == list(range(10))


@pytest.mark.slow
def test_the_real_wandb_without_a_server(tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    def train(rank: int, world_size: int, steps: int) -> None:
        os.environ |= {"WANDB_SILENT": "true", "WANDB_MODE": "offline"}
        fit(tmp_path / "run", steps, "wandb:project=a,offline=true")
        import wandb

        assert wandb.run is not None
        wandb.finish()

    for steps in (7, 10):
        run_ranks(train, 1, steps)
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1, folders
