"""Logged values, on their way from the training loop to the run directory.

:meth:`Recorder.log` appends a tuple and looks at the clock; everything else (JSON, protobuf, the store) happens in one
background thread. Values go to ``metrics/*.jsonl`` and to TensorBoard event files, in whole new objects whose names
sort by (generation, sequence), never by the clock. Beside them TensorBoard gets panels, which are drawn in that same
thread now and then. A line of ``metrics/g000003-000012.jsonl`` is

    {"step": 40, "samples": 960, "time": 1700000000.25, "generation": 3, "epoch": 0, "train/loss": 2.31}

with ``step`` the number of finished steps, ``time`` in seconds since the epoch (UTC), and no ``NaN`` token that a
strict reader would refuse: numbers that JSON has no word for are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``, as in protobuf's JSON mapping. ``float(...)``, ``pandas.read_json(..., lines=True)``, JavaScript's
``Number`` and :mod:`elastictrain.metrics.series` turn them back into floats. A value whose name is one of the line's
own fields (``step``, ``samples``, ``time``, ``generation``, ``epoch``) is kept under ``value/{name}``.

On failure: training goes on; see :mod:`elastictrain.metrics.courier`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastictrain.metrics.courier import LAST_INTERVAL, STORE_INTERVAL, Courier, Writer, interval
from elastictrain.rundir import RunDir, first_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from elastictrain.config import MeshShape
    from elastictrain.metrics.panels import Panel, Panels
    from elastictrain.metrics.views import RankViews

Record = tuple[int, int, float, int, Mapping[str, float]]  # step, samples, time, epoch, values


class Logged(tuple[int, int, float, int, Mapping[str, float]]):
    """A record with its line of ``metrics/``, once there is one: JSON is made once, however often it is asked for."""

    line: str | None = None


FIELDS = ("step", "samples", "time", "generation", "epoch")
FOLDER = "metrics"

MOST_CARRIED = 1_000  # records that a snapshot takes with it: what it costs does not grow with what waits
_EARLY = 250  # records, from which on a snapshot has them written rather than carry them again and again
_PANELS_EVERY = 60.0  # seconds at least between two drawings of the panels; later a tenth of the run's age
_PANELS_LAST = 600.0
_PANELS_SHARE = 0.01  # of the time of one core that drawing them may take

_log = logging.getLogger(__name__)


class Series:
    """Whole new objects in one folder, with names that sort after every name already there.

    Args:
        pattern: the name, with ``{}`` for the (generation, sequence) part.
        generation: of this process; where a later one has already written here, that one's numbers are continued.
    """

    def __init__(self, run_dir: RunDir, folder: str, *, pattern: str, generation: int) -> None:
        self._run_dir = run_dir
        self._folder = folder
        self._pattern = pattern
        self._known = re.compile(re.escape(pattern).replace(r"\{\}", r"g(\d+)-(\d+)"))
        self._generation = generation
        self._next: tuple[int, int] | None = None
        self._doubtful: list[str] = []  # paths of objects that could not be written, and may be there all the same

    def create(self, data: bytes) -> str:
        """Write one object; returns its path.

        On failure nothing is left, and its name is not used again. A store may fail after it has stored: what cannot be
        removed at once is removed before the next object is written.
        """
        self._remove_doubtful()
        while True:
            generation, sequence = self._next or self._first_free()
            self._next = generation, sequence + 1
            name = self._pattern.format(f"g{generation:06d}-{sequence:06d}")
            try:
                self._run_dir.create(data, self._folder, name)
            except FileExistsError:  # written since we looked, by a process that should be gone
                self._next = None
            except Exception:
                self._doubtful.append(self._run_dir.join(self._folder, name))
                with contextlib.suppress(Exception):
                    self._remove_doubtful()
                raise
            else:
                return self._run_dir.join(self._folder, name)

    def _remove_doubtful(self) -> None:
        while self._doubtful:
            with contextlib.suppress(FileNotFoundError):
                self._run_dir.fs.rm_file(self._doubtful[-1])
            self._doubtful.pop()

    def _first_free(self) -> tuple[int, int]:
        there = [match for name in self._run_dir.names(self._folder) if (match := self._known.fullmatch(name))]
        last = max(((int(match[1]), int(match[2])) for match in there), default=(-1, -1))
        return (last[0], last[1] + 1) if last[0] >= self._generation else (self._generation, 0)


class JsonLines:
    """``metrics/*.jsonl``: one segment per write."""

    what = "metrics"

    def __init__(self, run_dir: RunDir, *, generation: int) -> None:
        self._series = Series(run_dir, FOLDER, pattern="{}.jsonl", generation=generation)
        self._generation = generation

    def write(self, records: Sequence[Record | Panels]) -> None:
        lines = [
            getattr(record, "line", None) or encode_line(record, self._generation)
            for record in records
            if isinstance(record, tuple)
        ]
        if lines:
            self._series.create("".join(lines).encode())


def encode_line(record: Record, generation: int) -> str:
    """One line of strict JSON, newline included."""
    step, samples, seconds, epoch, values = record
    line: dict[str, Any] = {
        "step": step,
        "samples": samples,
        "time": round(seconds, 6),
        "generation": generation,
        "epoch": epoch,
    }
    for name, value in values.items():
        line[name if name not in FIELDS else f"value/{name}"] = value
    try:
        return json.dumps(line, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps({name: _strict(value) for name, value in line.items()}, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


LOOSE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _is_small_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


class Recorder(Courier["Record | Panels"]):
    """Takes logged values from the training loop (one thread of one process, rank 0).

    Args:
        generation: of this process; never lower than one that has already written to this run directory.
        start_step: finished steps at which this generation begins; what earlier ones logged after it is replayed.
        max_records: how many records wait in memory, for each writer, while the store does not take them.
        tensorboard: also write event files.
        hparams: for TensorBoard's HPARAMS tab.
        panels: draws TensorBoard's panels, by name; called in the background, about once a minute at first, more rarely
            later, and at the end where :meth:`close` is told to.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        generation: int,
        start_step: int,
        max_records: int = 50_000,
        tensorboard: bool = True,
        hparams: Mapping[str, Any] | None = None,
        panels: Callable[[], Mapping[str, Panel]] | None = None,
    ) -> None:
        writers: list[Writer[Record | Panels]] = [JsonLines(run_dir, generation=generation)]
        self._events = None
        if tensorboard:
            # Imported here and not in the thread: a loader worker forked in the middle of an import would inherit
            # that module's lock, held by a thread that it does not have.
            from elastictrain.metrics.tensorboard import EventFiles

            self._events = EventFiles(run_dir, generation=generation, start_step=start_step, hparams=hparams)
            writers.append(self._events)
        pace = partial(interval, last=LAST_INTERVAL if run_dir.is_local else STORE_INTERVAL)
        super().__init__(run_dir, writers, what="metrics", max_items=max_records, pace=pace)
        self._generation, self._start_step = generation, start_step
        self._views: RankViews | None = None
        self._refused: set[str] = set()
        self._at_last_step: list[Record] = []  # what was written of the newest step that was
        self._panels = panels if tensorboard else None
        self._panels_due, self._draws_last = 0.0, False
        self._drawn: Mapping[str, Panel] = {}
        self._last_step = start_step

    def log(self, step: int, samples: int, values: Mapping[str, float], *, epoch: int) -> None:
        """Record ``values`` at ``step`` finished steps. ``values`` is kept, not copied: do not change it afterwards."""
        self.put(Logged((step, samples, time.time(), epoch, values)))

    def log_ranks(
        self, step: int, samples: int, means: npt.NDArray[np.float32], *, epoch: int, shape: MeshShape
    ) -> None:
        """Record the times of all ranks of a mesh, (2, ranks), for TensorBoard alone: see :mod:`elastictrain.metrics.views`.

        ``means`` is kept, not copied.
        """
        if self._events is None:
            return
        from elastictrain.metrics.views import RankTimes, RankViews

        if self._views is None:
            about = {"generation": self._generation, "start_step": self._start_step}
            self._views = RankViews(self._run_dir, **about, shape=shape)
        self._views.put(RankTimes(step, samples, time.time(), epoch, means))

    def close(self, *, timeout: float = 10.0, draws: bool = False) -> None:
        """Write what is left, trying again until ``timeout`` seconds have passed, and stop. Idempotent.

        Args:
            draws: the panels once more: the run ends here, and nobody waits to go on.
        """
        self._draws_last = draws
        deadline = time.monotonic() + timeout
        super().close(timeout=timeout)
        if self._views is not None:
            self._views.close(timeout=max(0.5, deadline - time.monotonic()))

    def _prepared(self, item: Record | Panels) -> Record | Panels:
        assert isinstance(item, tuple)
        self._last_step = item[0]
        plain = Logged((*item[:4], self._numbers(item[4])))
        plain.line = self._line(item)
        return plain

    def _line(self, record: Record) -> str:
        line = getattr(record, "line", None)
        if line is None:
            line = encode_line((*record[:4], self._numbers(record[4])), self._generation)
            if isinstance(record, Logged):
                record.line = line
        return line

    # ---- another start ---------------------------------------------------------------------------------------------

    def _are_written(self, items: Sequence[Record | Panels]) -> None:
        records = [item for item in items if isinstance(item, tuple)]
        if records:
            step = records[-1][0]
            before = [record for record in self._at_last_step if record[0] == step]
            self._at_last_step = [*before, *(record for record in records if record[0] == step)]

    def unwritten(self) -> list[str]:
        """What :meth:`log` got and no object holds yet, as lines of ``metrics/``; for the memory of another start.

        Steps are whole: of the first one there is also what has been written. Of more than :data:`MOST_CARRIED` records,
        which wait only while the store does not answer, there are the newest.
        """
        if len(self._inbox) >= _EARLY:
            self.flush()
        with self._changed:
            waiting = [item for item in self.waiting(MOST_CARRIED) if isinstance(item, tuple)]
            whole = [record for record in self._at_last_step if waiting and record[0] == waiting[0][0]]
        if len(waiting) == MOST_CARRIED:  # the oldest step may be cut
            waiting, whole = [record for record in waiting if record[0] != waiting[0][0]], []
        return [self._line(record) for record in [*whole, *waiting]]

    def take_over(self, lines: Sequence[str]) -> None:
        """Record what an earlier start has logged and, for all it could tell, not written; before anything else."""
        records = [json.loads(line) for line in lines]
        if records and self._events is not None:
            self._events.begin_at(records[0]["step"] - 1)  # it may have written them after all
        for line in records:
            values = {
                name.removeprefix("value/") if name.removeprefix("value/") in FIELDS else name: LOOSE.get(value, value)
                for name, value in line.items()
                if name not in FIELDS
            }
            self.put(Logged((line["step"], line["samples"], line["time"], line["epoch"], values)))

    # ---- in the background -----------------------------------------------------------------------------------------

    def _more(self, *, closing: bool) -> Sequence[Panels]:
        """The panels, where they are due and have changed."""
        now = time.monotonic()
        if self._panels is None or not (self._draws_last if closing else now >= self._panels_due):
            return []
        from elastictrain.metrics.panels import Panels

        try:
            drawn = self._panels()
        except Exception as error:
            _log.warning("the panels of TensorBoard cannot be drawn (%s): there will be no more", first_line(error))
            self._panels = None
            return []
        done = time.monotonic()
        pause = min(max(_PANELS_EVERY, (done - self._born) / 10), _PANELS_LAST)
        self._panels_due = done + max(pause, (done - now) / _PANELS_SHARE)
        if drawn == self._drawn:
            return []
        self._drawn = drawn
        return [Panels(self._last_step, time.time(), drawn)]

    def _numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        """Plain numbers only; anything else would stop every later record as well."""
        plain: dict[str, float] = {}
        for name, value in values.items():
            try:
                plain[name] = value if type(value) is float or _is_small_int(value) else float(value)
            except Exception:
                if name not in self._refused:
                    self._refused.add(name)
                    _log.warning("%s is a %s and not a number: it is not recorded", name, type(value).__name__)
        return plain
