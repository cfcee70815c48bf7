"""What a run directory's URL shows of itself."""

from __future__ import annotations

import pytest

from elastictrain import UsageError
from elastictrain.rundir import RunDir, without_user


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:secret@host/run", "ftp://host/run"),
        ("ftp://me:se@cret@host:21/run@2", "ftp://host:21/run@2"),
        ("https://token@host/run", "https://host/run"),
        ("simplecache::sftp://me:secret@host/run", "simplecache::sftp://host/run"),
        ("abfs://container@account.dfs.core.windows.net/run", "abfs://container@account.dfs.core.windows.net/run"),
        ("s3://bucket/me@home", "s3://bucket/me@home"),
        ("/runs/me@home", "/runs/me@home"),
    ],
)
def test_a_url_is_shown_without_user_and_password(url: str, shown: str) -> None:
    assert without_user(url) == shown


def test_neither_a_run_directory_nor_its_errors_show_a_password() -> None:
    assert str(RunDir("memory://me:secret@host/run")) == "memory://host/run"
    with pytest.raises(UsageError, match="run directory nope://host/run: unknown URL scheme") as error:
        RunDir("nope://me:secret@host/run")
    assert "secret" not in str(error.value)
