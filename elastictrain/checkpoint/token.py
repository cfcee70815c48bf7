"""The run's token: the secret by which the processes of one run know each other. Imports no torch.

``ELASTICTRAIN_TOKEN`` where it is set, the same on all nodes; otherwise the file ``token`` of the run directory, 256 random
bits, which the first start creates, for this user alone where the storage knows users. So by itself the token keeps out
those who can reach the ports of a run and cannot read its directory, where the same state lies in checkpoints.

On failure: a :class:`~elastictrain.errors.UsageError` for a token that cannot be one; storage raises its own error.
"""

from __future__ import annotations

import os
import re
import secrets

from elastictrain.checkpoint.storage import create_first, read_whole
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir

VARIABLE = "ELASTICTRAIN_TOKEN"
NAME = "token"
MIN_LENGTH = 16
_MADE = re.compile(r"[0-9a-f]{64}")


def has_token(run_dir: RunDir) -> bool:
    """Is there one already?"""
    return VARIABLE in os.environ or run_dir.exists(NAME)


def make_token(run_dir: RunDir) -> None:
    """See to it that there is one, the same for all who do this at the same moment.

    Where storage cannot say who was first, one process of a run may call it; :meth:`elastic.runlog.RunLog.probe` tells.
    """
    if has_token(run_dir):
        return
    try:
        create_first(run_dir, NAME, secrets.token_hex(32).encode(), mode=0o600, must_be_first=False)
    except FileExistsError:
        pass


def read_token(run_dir: RunDir) -> str:
    """The token; :func:`make_token` has been called before, on whichever node.

    Raises:
        UsageError: it is too short to be a secret, or the file is damaged.
    """
    given = os.environ.get(VARIABLE)
    if given is not None:
        if len(given) < MIN_LENGTH:
            raise UsageError(f"{VARIABLE} has {len(given)} characters: a secret needs {MIN_LENGTH} or more")
        return given
    found = read_whole(run_dir, NAME).decode(errors="replace").strip()
    if not _MADE.fullmatch(found):
        raise UsageError(f"{run_dir.join(NAME)} is damaged: remove it, and the next start makes another")
    return found
