"""An HTTP proxy before the S3 server that misbehaves as told: 503s, refusals, slow and cut connections."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


@dataclass
class Proxy:
    """Answers for the server at ``upstream``; what :attr:`fault` says comes first.

    Attributes:
        fault: given method and path (with query): None, or "503", "403 CODE", "cut" (the connection ends in the middle
            of the request), "lost" (it is done, and the connection ends instead of an answer), "slow" (:attr:`pause` before
            the answer), "stuck" (no answer until :attr:`is_over` is set).
        pause: seconds that "slow" takes; and for each MB of the request as much again.
        seen: methods and paths of all requests.
        uploaded: bytes in the bodies of all requests that were passed on.
    """

    upstream: str
    fault: Callable[[str, str], str | None] = lambda method, path: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    uploaded: int = 0
    pause: float = 0.5
    is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Proxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        method, path = request.command, request.path
        self.seen.append((method, path))
        fault = self.fault(method, path)
        if fault == "cut":
            request.close_connection = True
            request.connection.close()
            return
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.send_response_only(100)
            request.end_headers()
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        if fault == "slow":
            time.sleep(self.pause * (1 + length / 1e6))
        if fault == "stuck":
            self.is_over.wait()
            request.close_connection = True
            return
        if fault in (None, "slow", "lost"):
            self.uploaded += length
            self._forward(request, method, path, body, answers=fault != "lost")
            return
        assert fault is not None
        status, _, code = fault.partition(" ")
        code = code or "SlowDown"
        answer = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to say {code}</Message></Error>".encode()
        )
        self._answer(request, int(status), {"Content-Type": "application/xml"}, b"" if method == "HEAD" else answer)

    def _forward(self, request: BaseHTTPRequestHandler, method: str, path: str, body: bytes, *, answers: bool) -> None:
        server = urlsplit(self.upstream)
        assert server.hostname is not None
        connection = http.client.HTTPConnection(server.hostname, server.port, timeout=30)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
            if not answers:
                request.close_connection = True
                request.connection.close()
                return
            kept = {k: v for k, v in response.getheaders() if k.lower() not in HOP_BY_HOP}
            if method == "HEAD":
                kept["Content-Length"] = response.getheader("Content-Length") or "0"
            self._answer(request, response.status, kept, content)
        finally:
            connection.close()

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
        request.send_response_only(status)
        for name, value in headers.items():
            request.send_header(name, value)
        if "Content-Length" not in headers:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
