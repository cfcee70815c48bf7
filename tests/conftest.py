"""What every test shares: one thread per process, and a real S3 server on the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a forked child of a process with OpenMP threads hangs
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from tests.checkpoint.proxy import Proxy
from tests.helpers import free_port

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server of its own process, so that forked ranks and commands reach it too."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60.0
        while True:
            assert server.poll() is None, f"the S3 server ended with {server.returncode}"
            assert time.monotonic() < deadline, "the S3 server did not start"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh ``s3://bucket/prefix``; fsspec finds the server through the environment, which children inherit."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/run"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def proxy(s3_url: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between all that follows and the server."""
    import s3fs

    with Proxy(s3_server) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield between
        s3fs.S3FileSystem.clear_instance_cache()
