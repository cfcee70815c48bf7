"""The user's loggers over all starts of a run: made, connected, and kept from ending it.

``Trainer(loggers=[…])`` takes Lightning's loggers, and text as ``--logger NAME[:k=v,…]`` has it. What names a logger's run
in its tracker is kept in the run directory, ``loggers/wandb.json``, whole new objects that are created once; so another
start goes on with the same run. What a rollback does again is not sent a second time where the tracker lets it
(:mod:`elastictrain.compat.loggers`).

On failure: a logger that is not installed, a bad option, or a tracker that does not answer is a
:class:`~elastictrain.errors.UsageError` before the run is begun, in the first generation of a command. After that no
logger ends training: the first failure is a warning, a logger that has failed is left alone for a while, and how many calls
were in vain is told at the end. Importing this imports no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastictrain.errors import UsageError
from elastictrain.named import Spec, convert, load, make, parse
from elastictrain.rundir import RunDir, first_line

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from elastictrain.compat.loggers import Tracker

log = logging.getLogger(__name__)

FOLDER = "loggers"
OPTION = "--logger"
_PLACE = "lightning.pytorch.loggers"
KNOWN = {
    "comet": f"{_PLACE}:CometLogger",
    "csv": f"{_PLACE}:CSVLogger",
    "mlflow": f"{_PLACE}:MLFlowLogger",
    "tensorboard": f"{_PLACE}:TensorBoardLogger",
    "wandb": f"{_PLACE}:WandbLogger",
}
_NEEDS = {  # by class: what must be installed, and how
    "CometLogger": ("comet_ml", "pip install comet-ml"),
    "MLFlowLogger": ("mlflow", "pip install 'elastictrain[mlflow]'"),
    "WandbLogger": ("wandb", "pip install 'elastictrain[wandb]'"),
}
_CALLS = ("log_metrics", "log_hyperparams", "log_graph", "save", "after_save_checkpoint", "finalize")
_OFTEN = ("log_metrics", "save")  # come with every log step
_REST = 30.0  # seconds in which a logger that has failed is left alone
_SLOW = 1.0  # seconds that a failure of any call may take; those that come with every log step count in any case
_SHARE = 10.0  # and so many times as long as the failure took: it costs a tenth of the time at most


def parse_logger(text: str) -> Spec:
    """Read ``NAME[:k=v,…]``.

    Raises:
        UsageError: the name is unknown, the arguments are not ``k=v,…``, or the package is not installed.
    """
    aliases = {where.rpartition(":")[2].lower().removesuffix("logger") + "-logger": where for where in KNOWN.values()}
    spec = parse(OPTION, text, KNOWN, what="logger", aliases=aliases)
    if spec.module.startswith("lightning.") and spec.cls in _NEEDS:
        package, remedy = _NEEDS[spec.cls]
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{spec.text}: {package} is not installed: {remedy}")
    return spec


class _Named:
    """A logger that text names: its class and arguments are checked, and it is made once its run is known."""

    def __init__(self, text: str) -> None:
        from lightning.pytorch.loggers import Logger

        self.spec = parse_logger(text)
        self.cls = load(self.spec, (Logger,), wanted="lightning.pytorch.loggers.Logger")
        self._at_home = {"CSVLogger": "csv", "TensorBoardLogger": "lightning_logs"}.get(self.cls.__name__)
        given = self.spec.arguments
        if self._at_home is not None and "save_dir" not in given:
            given = {**given, "save_dir": ""}
        self.arguments = convert(Spec(self.spec.text, self.spec.module, self.spec.cls, given), self.cls)

    def make(self, run_dir: RunDir | None, known: str | int | None) -> Logger:
        """Files go into a local run directory where nothing else is said."""
        arguments, name = dict(self.arguments), self.cls.__name__
        home = run_dir.path if run_dir is not None and run_dir.is_local else None
        if self._at_home is not None and "save_dir" not in self.spec.arguments:
            if home is None:
                raise UsageError(f"{self.spec.text}: the run directory is not a local one: add save_dir=FOLDER")
            arguments = {"name": self._at_home, **arguments, "save_dir": home}
        if name == "WandbLogger" and home is not None and not {"save_dir", "dir"} & arguments.keys():
            arguments["save_dir"] = home
        if name == "CometLogger" and known is not None:  # it opens its run when it is made
            arguments.setdefault("experiment_key", str(known))
        made: Logger = make(self.spec, self.cls, arguments)
        return made

    def finalize(self, status: str) -> None:
        """It ends before it was made: what came first has failed."""


class Loggers:
    """Those of one session.

    Args:
        given: loggers, or text. What is made of it takes its place there.
        must_work: a tracker that does not answer is an error.
    """

    def __init__(self, given: list[Any], *, run_dir: RunDir | None, must_work: bool) -> None:
        self._given, self._run_dir, self._must_work = given, run_dir, must_work
        self._trackers: list[tuple[str, Tracker]] = []  # with the name of its object in the run directory

    def prepare(self, ask_main: Callable[[Callable[[], Any]], Any]) -> None:
        """Make what text names, and let every logger know its run. A collective.

        Args:
            ask_main: gives rank 0's answer to every rank.
        """
        if not self._given:
            return
        known: dict[str, str | int] = ask_main(self._read_and_make)
        self._make(known)  # on the other ranks; where a process lives on, all of them are there already
        self._look(known)

    def _read_and_make(self) -> dict[str, str | int]:
        known = self._read()
        self._make(known)
        return known

    def _read(self) -> dict[str, str | int]:
        """By object, the name of the run that it holds."""
        from elastictrain.compat.loggers import decode

        if self._run_dir is None:
            return {}
        there = {name: decode(self._run_dir.read(FOLDER, name)) for name in self._run_dir.names(FOLDER)}
        return {name: value for name, value in there.items() if value is not None}

    def _make(self, known: Mapping[str, str | int]) -> None:
        """What text names; one that cannot be made leaves a place where nothing happens."""
        from lightning.pytorch.loggers.logger import DummyLogger

        for place, one in enumerate(self._given):
            if isinstance(one, _Named):
                key = self._key(one.cls.__name__, place)
                try:
                    self._given[place] = one.make(self._run_dir, known.get(key))
                except UsageError:
                    raise
                except Exception as error:
                    self._refuse(one.spec.text, error, key)
                    self._given[place] = DummyLogger()

    def _key(self, cls: str, place: int) -> str:
        """Of the object for the logger at a place: by its class, and which one of those it is."""
        before = sum(_class_of(one) == cls for one in self._given[:place])
        name = cls.removesuffix("Logger").lower() or "logger"
        return f"{name}.json" if not before else f"{name}-{before}.json"

    def _look(self, known: Mapping[str, str | int]) -> None:
        from elastictrain.compat.loggers import tracker_of

        self._trackers = []
        for place, logger in enumerate(self._given):
            tracker, key = tracker_of(logger), self._key(type(logger).__name__, place)
            if tracker.given is None and key in known:
                tracker.adopt(known[key])
            self._trackers.append((key, tracker))

    def connect(self, ask_main: Callable[[Callable[[], Any]], Any], *, step: int | None) -> None:
        """Open every logger's run, on rank 0, and guard it from now on. A collective.

        Args:
            step: finished steps that training goes on from; None: it begins.

        Raises:
            UsageError: a tracker does not answer.
        """
        if not self._given:
            return
        names: list[str | int | None] = ask_main(lambda: self._connect(step))
        for (_, tracker), name in zip(self._trackers, names, strict=True):
            if tracker.name is None and name is not None:
                tracker.adopt(name)
            _guard(tracker)

    def _connect(self, step: int | None) -> list[str | int | None]:
        names: list[str | int | None] = []
        for key, tracker in self._trackers:
            try:
                tracker.connect(step)
                names.append(tracker.name)
            except Exception as error:
                self._refuse(f"the {tracker.kind} logger", error, key)
                names.append(None)
        return names

    def _refuse(self, what: str, error: Exception, key: str) -> None:
        """Say so, as an error or as a warning."""
        text = f"{what} cannot be used ({first_line(error)})"
        if self._must_work:
            remedy = "check its address, credentials and options, or leave it out"
            if self._run_dir is not None and self._run_dir.exists(FOLDER, key):
                remedy += f"; its run is named in {str(self._run_dir).rstrip('/')}/{FOLDER}/{key}"
            raise UsageError(f"{text}: {remedy}") from error
        log.warning("%s: training goes on without what it would be told now", text)

    def keep(self) -> None:
        """Write what names the loggers' runs, for other starts; on rank 0."""
        from elastictrain.compat.loggers import encode

        for key, tracker in self._trackers if self._run_dir is not None else ():
            assert self._run_dir is not None
            try:
                if tracker.name is not None and not self._run_dir.exists(FOLDER, key):
                    self._run_dir.create(encode(tracker), FOLDER, key)
            except FileExistsError:
                continue
            except Exception as error:  # only another start depends on it
                log.warning("the run of the %s logger cannot be written down (%s)", tracker.kind, first_line(error))


def _class_of(one: Any) -> str:
    return one.cls.__name__ if isinstance(one, _Named) else type(one).__name__


def given_loggers(loggers: Any) -> list[Any]:
    """One logger or several, as a list; text is checked.

    Raises:
        UsageError: text that names no logger, or a bad option.
    """
    found = [loggers] if isinstance(loggers, str) or not isinstance(loggers, Sequence) else list(loggers)
    return [_Named(one) if isinstance(one, str) else one for one in found]


# ---- a logger that fails -------------------------------------------------------------------------------------------


class _Guard:
    """Between whoever calls a logger and the logger: nothing it raises comes through."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._resting_until = 0.0
        self.num_failed = 0

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name == "log_metrics" and (args := self._unsent(*args, **kwargs)) is None:
                return None
            if name == "log_hyperparams" and self._tracker.has_hparams:
                return None
            kwargs = {} if name == "log_metrics" else kwargs
            return self._try(call, name, *args, **kwargs)

        guarded._elastictrain_guard = self  # type: ignore[attr-defined]
        return guarded

    def _unsent(self, metrics: Mapping[str, Any], step: int | None = None, **_: Any) -> Any:
        """The arguments of ``log_metrics``; None: all of it is there."""
        left = self._tracker.unsent(metrics, step)
        return (left, step) if left or not metrics else None

    def _try(self, call: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        is_last = name == "finalize"
        started = time.monotonic()
        if started < self._resting_until and not is_last:
            self.num_failed += name != "save"
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            ended = time.monotonic()
            if name in _OFTEN or ended - started > _SLOW:
                self._resting_until = ended + max(_REST, _SHARE * (ended - started))
            self.num_failed += 1
            if self.num_failed == 1:
                log.warning(
                    "the %s logger fails (%s): training goes on; what is logged is in the run directory",
                    *(self._tracker.kind, first_line(error)),
                )
            return None
        finally:
            if is_last and self.num_failed:
                log.warning("%d calls of the %s logger were in vain", self.num_failed, self._tracker.kind)
                self.num_failed = 0


def _guard(tracker: Tracker) -> None:
    """From now on the logger raises nothing, whoever calls it."""
    logger, guard = tracker.logger, _Guard(tracker)
    for name in _CALLS:
        call = getattr(logger, name, None)
        if call is not None:
            earlier = getattr(call, "_elastictrain_guard", None)  # of an earlier generation in this process
            inner = call if earlier is None else call.__wrapped__
            guard.num_failed = guard.num_failed if earlier is None else earlier.num_failed
            setattr(logger, name, guard.around(inner, name))
