"""The text that Prometheus reads, and a server that strangers cannot hold up."""

from __future__ import annotations

import math
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastictrain import UsageError
from elastictrain.metrics import prometheus
from elastictrain.metrics.prometheus import Endpoint, Family, exposition, families, metric_name
from elastictrain.metrics.published import Published, Publisher, file_of

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABELS = r'\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)*\}'
SAMPLE = re.compile(rf"({NAME})({LABELS}) (\S+)")


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and labels. Whatever the format does not allow fails."""
    found: dict[tuple[str, str], float] = {}
    described: dict[str, set[str]] = {}
    current = None
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE") and word not in described.setdefault(name, set()), line
            assert word == "HELP" or rest in ("gauge", "counter"), line
            described[name].add(word)
            current = name
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == current and described[match[1]] == {"HELP", "TYPE"}, (
                f"{line}: not behind its description"
            )
            key = match[1], match[2]
            assert key not in found, f"{key} is there twice"
            found[key] = float(match[3].replace("Inf", "inf"))
    return found


def test_text_is_escaped_and_numbers_have_their_words() -> None:
    values = [({"run": 'a"b\\c\nd'}, math.nan), ({"run": "e"}, -math.inf), ({"run": "f"}, 1e-300)]
    text = exposition({"elastictrain_x": Family("one\nline \\ only", values=values)})
    assert text.splitlines() == [
        r"# HELP elastictrain_x one\nline \\ only",
        "# TYPE elastictrain_x gauge",
        r'elastictrain_x{run="a\"b\\c\nd"} NaN',
        'elastictrain_x{run="e"} -Inf',
        'elastictrain_x{run="f"} 1e-300',
    ]
    assert len(samples(text)) == 3


def test_names_are_those_of_tensorboard() -> None:
    assert metric_name("throughput/samples_per_second") == "elastictrain_throughput_samples_per_second"
    assert metric_name("time/hook/on_step") == "elastictrain_time_hook_on_step"
    assert re.fullmatch(NAME, metric_name("été 9.9/σ"))


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """Two workers have published twice."""
    published = Published()
    published.begin(str(tmp_path), generation=3, workers=2)
    for local_rank, rank in enumerate((0, 1)):
        publisher = Publisher(file_of(str(tmp_path), local_rank), rank=rank)
        run: dict[str, Any] = {"train/loss": 2.5, "elastic/recovery_seconds": 4.0, "time/step": 9.0, "bad": "text"}
        publisher.put(10, run=run if rank == 0 else {}, own={"time/step": 0.5, "throughput/mfu": 0.4})
        publisher.put(
            20,
            run={"train/loss": 1.5, "train_loss": 7.0, "z": 3.0} if rank == 0 else {},
            own={"time/step": 0.25 + rank},
        )
        publisher.close()
    return published


def told(published: Published) -> dict[tuple[str, str], float]:
    return samples(exposition(families(published, run="runs/a", node="n1")))


def test_what_workers_publish_has_labels_and_lasts(published: Published, tmp_path: Path) -> None:
    found = told(published)
    here = 'run="runs/a",node="n1"'
    assert found["elastictrain_elastic_recovery_seconds", f"{{{here}}}"] == 4.0, "logged once"
    assert found["elastictrain_time_step", f'{{{here},rank="0"}}'] == 0.25
    assert found["elastictrain_time_step", f'{{{here},rank="1"}}'] == 1.25
    assert found["elastictrain_step", f'{{{here},rank="1"}}'] == 20
    assert not any(name == "elastictrain_throughput_mfu" for name, _ in found), "what is of the run is rank 0's to tell"
    losses = {labels: value for (name, labels), value in found.items() if name == "elastictrain_train_loss"}
    assert losses == {f"{{{here}}}": 1.5, f'{{{here},tag="train_loss"}}': 7.0}, "two names that differ in signs alone"
    assert found["elastictrain_z", f"{{{here}}}"] == 3.0
    assert found["elastictrain_agent_generation", f"{{{here}}}"] == 3
    assert found["elastictrain_agent_workers", f"{{{here}}}"] == 2

    published.end()
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "next").mkdir()
    published.begin(str(tmp_path / "next"), generation=4, workers=1)
    between = told(published)
    assert between["elastictrain_train_loss", f"{{{here}}}"] == 1.5, "the last ones, until there are others"
    assert between["elastictrain_agent_restarts_total", f"{{{here}}}"] == 1
    publisher = Publisher(file_of(str(tmp_path / "next"), 0), rank=5)
    publisher.put(30, run={}, own={"time/step": 1.0})
    publisher.close()
    assert not any(name == "elastictrain_train_loss" for name, _ in told(published)), "rank 0 is elsewhere now"


# ---- the server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint("127.0.0.1", 0, lambda: "x 1\n" * 10) as endpoint:
        yield endpoint


def ask(endpoint: Endpoint, path: str = "/metrics", **more: Any) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{endpoint.port}{path}", **more)
    return urllib.request.urlopen(request, timeout=30)


def test_it_answers(endpoint: Endpoint) -> None:
    with ask(endpoint) as answer:
        assert answer.read() == b"x 1\n" * 10
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    with ask(endpoint, method="HEAD") as answer:
        assert answer.read() == b"" and int(answer.headers["Content-Length"]) == 40
    for path, method, code in (("/other", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as error:
            ask(endpoint, path, method=method)
        assert error.value.code == code
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
    with pytest.raises(UsageError, match=rf"--metrics-port {endpoint.port}: 127.0.0.1:{endpoint.port} cannot be used"):
        Endpoint("127.0.0.1", endpoint.port, str)


@pytest.mark.slow
def test_strangers_do_no_harm(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing, half of something, garbage, or too much; that go at once; more than there is room for."""
    monkeypatch.setattr(prometheus, "PATIENCE", 0.5)
    where = ("127.0.0.1", endpoint.port)
    waiting = [socket.create_connection(where) for _ in range(2 * prometheus.MAX_CLIENTS)]
    for number, one in enumerate(waiting):
        try:
            one.sendall((b"", b"GET /metr", b"\x16\x03\x01\x00\xff" * 9, b"G" * 20_000)[number % 4])
        except OSError:  # hung up on already
            pass
    for _ in range(20):
        socket.create_connection(where).close()
    with ask(endpoint) as answer:
        assert answer.status == 200
    ends = []
    for one in waiting:
        one.settimeout(30)
        try:
            ends.append(one.recv(10_000))
        except OSError:
            ends.append(b"")
        one.close()
    assert ends == [b""] * len(waiting), "all are hung up on"


def test_one_that_takes_no_answer_holds_up_nobody() -> None:
    with Endpoint("127.0.0.1", 0, lambda: "x" * 50_000_000) as endpoint:
        slow = socket.create_connection(("127.0.0.1", endpoint.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with ask(endpoint, method="HEAD") as answer:
            assert answer.status == 200
        slow.close()


def test_a_bug_in_the_text_is_told_and_survived() -> None:
    texts: Iterator[str] = iter(["x 1\n"])
    with Endpoint("127.0.0.1", 0, lambda: next(texts)) as endpoint:
        with ask(endpoint) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="500"):
            ask(endpoint)
