"""Workers of a real agent that are forked from it: they have imported everything already, so that a start takes no seconds.

In the agent's process, before its command runs: ``forked.install()``; or, where the agent is a program of its own,
``python -m tests.forked COMMAND`` in place of ``python -m elastictrain COMMAND``. All but the exec is as ever: a session of
their own, the environment, the line to the agent, and that the kernel ends them with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastictrain import lives
from elastictrain.cli import worker
from elastictrain.elastic import membership, processes
from tests.processes import FORKED

TOO_LONG = 600


def install(before: Callable[[], None] = lambda: None) -> None:
    """From now on workers of this process's agent are forked.

    Args:
        before: called in each of them first; its place is in the environment.
    """

    def popen(command: Sequence[str], **options: Any) -> _Forked:
        return _Forked(command, before, **options)

    processes.subprocess = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class _Forked:
    """What an agent uses of ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        before: Callable[[], None],
        *,
        env: Mapping[str, str],
        stdin: int,
        start_new_session: bool,
        pass_fds: Sequence[int],
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", worker.__name__] and start_new_session
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code: object = 98
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the agent's own handlers
                    signal.signal(number, signal.SIG_DFL)
                sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
                os.environ.clear()
                os.environ.update(env)
                sys.argv = ["worker", *command[3:]]
                membership._mine, lives._has_trained = None, False  # as in a new process
                Path("/proc/self/comm").write_text(f"{FORKED}-{env.get('RANK', '')}")
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(TOO_LONG)  # faulthandler's watch would wait here for its thread, which is the agent's
                before()
                code = worker.main()
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code if isinstance(code, int) else 1)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


if __name__ == "__main__":
    import elastictrain.trainer
    import elastictrain.warmup  # noqa: F401 - all that a worker imports
    from elastictrain.cli.main import main

    install()
    main()
