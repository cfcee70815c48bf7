"""A keeper that is interrupted where a test says: ``python -m tests.checkpoint.hooked_keeper POINT HOW FLAG DESCRIPTOR``.

POINT is "hash" (before an image is hashed) or "part" (before each part of a copy is sent), and HOW is ``kill`` (SIGKILL to
itself), ``wait`` (until FLAG is gone; the file "at" beside it says so) or a number of seconds, for which it sleeps; it
happens while the file FLAG is there. Or POINT is "linger", and an agent that was killed is waited for HOW seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elastictrain.checkpoint import keeper, keeper_main
from elastictrain.checkpoint.blocks import Blocks
from elastictrain.checkpoint.copies import Copier
from tests.checkpoint.interrupted import stand


def main() -> None:
    point, how, flag = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    del sys.argv[1:4]

    def reached(passed: str) -> None:
        if passed == point and flag.exists():
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "wait":
                stand(flag, "at")
            else:
                time.sleep(float(how))

    class Hooked:
        @staticmethod
        def of(data: memoryview) -> Blocks:
            reached("hash")
            return Blocks.of(data)

    keeper.Blocks = Hooked  # type: ignore[misc,assignment]
    Copier.reached = staticmethod(reached)
    if point == "linger":
        keeper.LINGER_SECONDS = float(how)
    keeper_main.main()


if __name__ == "__main__":
    main()
