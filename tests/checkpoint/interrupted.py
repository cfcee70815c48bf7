"""A writer process that is interrupted where a test says: ``python -m tests.checkpoint.interrupted POINT HOW``.

HOW is ``kill`` (SIGKILL to itself), ``kill-parent`` (to its worker, and it goes on), ``kill-both``, ``stand`` (makes the
file "at" and stays there until FLAG is gone), or the number of an OSError. Its parts are small: as S3 allows.
POINT "linger" is none: without its worker it goes on for HOW seconds, where else it is a minute.
``POINT:2`` is the third time that the point is passed, counting from when the file FLAG is there;
several points are separated by commas, each is interrupted once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from elastictrain.checkpoint import drain_main, upload
from elastictrain.checkpoint.drain import Drain

PART_BYTES = 5 << 20


def command(point: str, how: str, flag: Path) -> list[str]:
    """For ``CheckpointManager(writer_command=…)``."""
    return [sys.executable, "-m", "tests.checkpoint.interrupted", point, how, str(flag)]


def stand(flag: Path, name: str) -> None:
    """Say that this process is there, by a file beside ``flag``, and stay until that is gone."""
    (flag.parent / name).touch()
    while flag.exists():
        time.sleep(0.01)


def main() -> None:
    left = {point: int(count or 0) for point, _, count in (one.partition(":") for one in sys.argv[1].split(","))}
    how = sys.argv[2]
    flag = Path(sys.argv[3])
    worker = os.getppid()

    def reached(passed: str) -> None:
        if passed not in left or not flag.exists():
            return
        left[passed] -= 1
        if left[passed] == -1:
            if how in ("kill-parent", "kill-both"):
                with contextlib.suppress(ProcessLookupError):  # it may have ended with another rank
                    os.kill(worker, signal.SIGKILL)
            if how in ("kill", "kill-both"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stand":
                stand(flag, "at")
            if how.isdigit():
                raise OSError(int(how), os.strerror(int(how)))

    drain_main.LINGER_SECONDS = float(how) if "linger" in left else 60.0
    upload.PART_BYTES = PART_BYTES
    Drain.reached = staticmethod(reached)
    drain_main.main()


if __name__ == "__main__":
    main()
