"""The run log on local disk, in memory and on S3: one winner, whole entries, this token's only."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastictrain.channel import key_of
from elastictrain.elastic.chain import (
    ChainError,
    Entry,
    Generation,
    Loss,
    Member,
    Size,
    check_follows,
    entry_from_json,
    generation_from_json,
)
from elastictrain.elastic.runlog import KEEP, RunLog, RunLogError
from elastictrain.errors import UsageError
from elastictrain.rundir import RunDir

KEY = key_of("a token for tests")
ANY = Size()


def open_log(url: str | Path, *, key: bytes = KEY) -> RunLog:
    return RunLog(RunDir(url), key)


def claim(node: str, after: Entry | None = None) -> Entry:
    return (after or Entry()).claimed_by(Member(node, "127.0.0.1", 1), ANY)


def race(url: str | Path, *, writers: int, rounds: int) -> None:
    """Who believes to have won must be one, and the one who is there."""
    entry = Entry()
    for _ in range(rounds):
        start, won = threading.Barrier(writers), []

        def write(number: int, before: Entry, start: Any = start, won: Any = won) -> None:
            mine, log = claim(f"writer-{number}", before), open_log(url)
            start.wait()
            if log.create(mine):
                won.append(mine)

        threads = [threading.Thread(target=write, args=(number, entry)) for number in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        entry = open_log(url).newest()
        assert entry == won[0]


def test_one_of_many_wins_on_a_disk(tmp_path: Path) -> None:
    race(tmp_path, writers=6, rounds=15)
    assert all(name.isdigit() for name in os.listdir(tmp_path / "log")), "a writer left something"


def test_one_of_many_wins_in_memory() -> None:
    race(f"memory://{uuid.uuid4().hex}", writers=6, rounds=15)


@pytest.mark.slow
def test_one_of_many_wins_on_s3(s3_url: str) -> None:
    open_log(s3_url).probe()
    race(s3_url, writers=4, rounds=3)


def test_an_empty_log_is_entry_0(tmp_path: Path) -> None:
    assert open_log(tmp_path).newest() == Entry()


def test_what_comes_out_is_what_went_in(tmp_path: Path) -> None:
    first = claim("a")
    members = (Member("a", "10.0.0.1", 4000, 4001, 8), Member("ü-2", "::1", 4002))
    second = first.with_generation(
        Generation(1, 1, members, 17, "joined a, ü-2", size=Size(1, 3)), (Loss("host", 3, 20.0),)
    )
    third = second.with_closed("done")
    log = open_log(tmp_path)
    for entry in (first, second, third):
        assert log.create(entry)
        assert open_log(tmp_path).newest() == entry


def test_a_put_that_is_repeated_after_a_lost_answer_has_won(tmp_path: Path) -> None:
    log, entry = open_log(tmp_path), claim("a")
    assert log.create(entry) and log.create(entry)
    assert not log.create(claim("b"))


@pytest.mark.slow
def test_a_put_on_s3_whose_answer_is_lost_has_won(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(s3_url)
    log, put = RunLog(run_dir, KEY), run_dir.fs.pipe_file

    def twice(path: str, data: bytes, **more: Any) -> None:
        put(path, data, **more)
        put(path, data, **more)  # the client's own retry

    monkeypatch.setattr(run_dir.fs, "pipe_file", twice)
    assert log.create(claim("a"))


def test_a_writer_that_slept_while_its_number_was_written_and_removed_has_lost(tmp_path: Path) -> None:
    log, entry = open_log(tmp_path), Entry()
    sleeper = claim("sleeper")
    for _ in range(KEEP + 3):
        entry = claim("a", entry)
        assert log.create(entry)
    log.trim(entry.index)
    assert not (tmp_path / "log" / "00000001").exists()
    assert not log.create(sleeper)
    assert log.newest() == entry


def test_the_log_stays_small(tmp_path: Path) -> None:
    log, entry = open_log(tmp_path), Entry()
    (tmp_path / "log").mkdir()
    stale, fresh = tmp_path / "log" / ".new-old", tmp_path / "log" / ".new-fresh"
    stale.touch()
    fresh.touch()
    os.utime(stale, (1, 1))
    for _ in range(KEEP + 20):
        entry = claim("a", entry)
        log.create(entry)
    log.trim(entry.index)
    names = os.listdir(tmp_path / "log")
    assert len(names) == KEEP + 2 and fresh.name in names and stale.name not in names
    assert log.newest() == entry


# ---- what does not belong there ---------------------------------------------------------------------------------------


def test_another_token_reads_nothing_and_changes_nothing(tmp_path: Path) -> None:
    entry = claim("a")
    open_log(tmp_path).create(entry)
    stranger = open_log(tmp_path, key=key_of("another token"))
    with pytest.raises(RunLogError, match="was not written with this run's token"):
        stranger.newest()
    with pytest.raises(RunLogError):
        stranger.create(claim("evil"))
    assert open_log(tmp_path).newest() == entry and os.listdir(tmp_path / "log") == ["00000001"]


def test_an_entry_of_another_version_is_no_question_of_the_token(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.create(claim("a"))
    said = json.loads((tmp_path / "log" / "00000001").read_text())
    del said["mac"], said["entry"]["size"]
    (tmp_path / "log" / "00000001").write_text(json.dumps({**said, "mac": log._mac(said)}))
    with pytest.raises(RunLogError, match="is of another version of elastictrain"):
        open_log(tmp_path).newest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"a"', b'"b"'),
        lambda data: data[:-20],
        lambda data: b"",
        lambda data: b"[" * 100_000,
        lambda data: b"[]",
        lambda data: b'{"mac": 1, "entry": {}}',
        lambda data: b"\xff\x00",
    ],
)
def test_an_entry_that_was_changed_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    log = open_log(tmp_path)
    log.create(claim("a"))
    path = tmp_path / "log" / "00000001"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunLogError):
        log.newest()


def test_an_old_entry_does_not_pass_for_a_newer_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.create(claim("a"))
    (tmp_path / "log" / "00000009").write_bytes((tmp_path / "log" / "00000001").read_bytes())
    with pytest.raises(RunLogError):
        log.newest()


# ---- storage that cannot ----------------------------------------------------------------------------------------------


def test_a_good_store_passes_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"memory://{uuid.uuid4().hex}"):
        open_log(url).probe()
        assert RunDir(url).names("log") == []


def test_a_store_that_overwrites_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(f"memory://{uuid.uuid4().hex}")
    put = run_dir.fs.pipe_file
    monkeypatch.setattr(run_dir.fs, "pipe_file", lambda path, data, mode="overwrite": put(path, data))
    with pytest.raises(UsageError, match=r"overwrites.*--rdzv-endpoint HOST:PORT"):
        RunLog(run_dir, KEY).probe()
    assert run_dir.names("log") == []


def test_a_disk_without_links_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UsageError, match=r"only if it is not there.*--rdzv-endpoint HOST:PORT"):
        open_log(tmp_path).probe()
    assert os.listdir(tmp_path / "log") == []


def test_a_kind_of_store_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(f"memory://{uuid.uuid4().hex}")
    monkeypatch.setattr(type(run_dir.fs), "protocol", "ftp")
    with pytest.raises(UsageError, match=r"ftp://.*--rdzv-endpoint HOST:PORT"):
        RunLog(run_dir, KEY).probe()


# ---- the chain --------------------------------------------------------------------------------------------------------


def test_what_may_follow_what() -> None:
    first = claim("a")
    formed = first.with_generation(Generation(1, 1, (Member("a"),), first=1, size=Size(1, 2)), (Loss("x", 2, 10.0),))
    scaled = formed.with_size(Size(1, 1))
    two = Generation(2, 1, (Member("a"), Member("b")), first=1, size=Size(1, 1))
    check_follows(Entry(), first)
    check_follows(first, formed)
    check_follows(formed, claim("b", formed))
    check_follows(formed, formed.with_closed("done"))
    check_follows(formed.with_closed("done"), claim("b", formed.with_closed("done")))
    check_follows(formed, scaled)
    check_follows(scaled, claim("b", scaled))
    assert (claim("b", scaled).size, claim("b", scaled).losses) == (Size(1, 1), formed.losses), "the run's, not its own"
    assert claim("b", formed.with_closed("done")).size == ANY, "nobody is left whose run it is"
    left = replace(two, number=3)
    smaller = formed.with_generation(replace(two, size=Size(1, 2)), ()).with_size(Size(1, 1))
    check_follows(smaller, smaller.with_generation(left, ()))  # what a loss has left is more than the run's most
    for before, after in [
        (smaller, smaller.with_generation(replace(left, boundary=9), ())),  # the same, planned
        (smaller, smaller.with_generation(replace(left, members=(Member("a"), Member("c"))), ())),  # one came
        (Entry(), formed),  # a hole
        (first, replace(claim("b", first), epoch=3)),  # an epoch left out
        (first, first.with_generation(Generation(2, 1, (Member("a"),)), ())),  # a generation left out
        (claim("b", first), claim("b", first).with_generation(Generation(1, 1, (), is_paused=True), ())),  # deposed
        (
            formed.with_closed("done"),
            formed.with_closed("done").with_generation(Generation(2, 1, (), is_paused=True), ()),
        ),
        (scaled, scaled.with_generation(two, ())),  # more than the run's most
        (scaled, scaled.with_generation(replace(two, size=Size(1, 2)), ())),  # its own size
        (scaled, replace(claim("b", scaled), size=Size(1, 2))),  # a claim that changes the size
        (scaled, replace(scaled, index=4)),
        (formed.with_closed("done"), formed.with_closed("done").with_size(Size(1, 1))),
        (first, replace(first, index=2)),  # says nothing
    ]:
        with pytest.raises(ChainError):
            check_follows(before, after)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        {"index": -1},
        {**Entry().to_json(), "epoch": True},
        {**Entry().to_json(), "leader": [1]},
        {**Entry().to_json(), "size": [3, 2]},
        {**Entry().to_json(), "size": [0, 2]},
        {**Entry().to_json(), "size": 4},
        {**Entry().to_json(), "generation": {**Generation().to_json(), "leaving": 1}},
        {**Entry().to_json(), "losses": [["host", -1, 0.0]]},
    ],
)
def test_an_entry_that_is_none(bad: Any) -> None:
    with pytest.raises(ChainError):
        entry_from_json(bad)
    with pytest.raises(ChainError):
        generation_from_json(bad)
