"""The file of the run's token: one for all who start at once, whole or not there, for this user alone."""

from __future__ import annotations

import os
import stat
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from elastictrain.checkpoint.storage import create_first
from elastictrain.checkpoint.token import NAME, make_token, read_token
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICTRAIN_TOKEN", raising=False)


def start_at_once(url: str, *, number: int) -> list[Any]:
    """What so many nodes read as the token, or what went wrong."""
    start, found = threading.Barrier(number), []

    def begin() -> None:
        run_dir = RunDir(url)
        start.wait()
        try:
            make_token(run_dir)
            found.append(read_token(run_dir))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=begin) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_nodes_that_start_at_once_read_one_token(tmp_path: Path) -> None:
    for attempt in range(20):
        url = tmp_path / f"{attempt}"
        found = start_at_once(str(url), number=6)
        assert len(found) == 6 and len(set(found)) == 1 and isinstance(found[0], str), found
        assert os.listdir(url) == [NAME], "a start left something"
        assert stat.S_IMODE((url / NAME).stat().st_mode) == 0o600


def test_nodes_that_start_at_once_read_one_token_in_a_store() -> None:
    for _ in range(20):
        found = start_at_once(f"memory://{uuid.uuid4().hex}", number=6)
        assert len(found) == 6 and len(set(found)) == 1 and isinstance(found[0], str), found


@pytest.mark.slow
def test_nodes_that_start_at_once_read_one_token_on_s3(s3_url: str) -> None:
    found = start_at_once(s3_url, number=4)
    assert len(found) == 4 and len(set(found)) == 1 and isinstance(found[0], str), found


def test_a_start_that_dies_on_the_way_leaves_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half of one, and not an empty file: the next start makes one."""
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: os.stat(tmp_path / "nothing"))
        with pytest.raises(FileNotFoundError):
            make_token(RunDir(tmp_path))
    assert os.listdir(tmp_path) == []
    make_token(RunDir(tmp_path))
    assert len(read_token(RunDir(tmp_path))) == 64


@pytest.mark.parametrize("trouble", [1, 95])
def test_a_disk_without_links_has_a_token_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: int
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(trouble, "not here")

    monkeypatch.setattr(os, "link", no_links)
    run_dir = RunDir(tmp_path)
    make_token(run_dir)
    first = read_token(run_dir)
    make_token(run_dir)
    assert read_token(run_dir) == first and os.listdir(tmp_path) == [NAME]
    with pytest.raises(OSError, match="not here"):
        create_first(run_dir, "other", b"x")


def test_a_damaged_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with pytest.raises(UsageError, match="is damaged: remove it"):
        read_token(RunDir(tmp_path))
