"""A proxy on 127.0.0.1 in front of an S3 server that does what bad buckets do: refuse, answer 503, hide new objects, break uploads.

Requests are passed on as they came (the Host header too, so that signatures stay right). `Faults` may be changed while it runs; `counts`
says how many requests of each kind arrived, `refused` how many of them a fault answered.
"""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass
class Faults:
    """What goes wrong. Operations: list, get, put, delete, bucket. `keys` limits every fault to keys that match this pattern."""

    deny: frozenset[str] = frozenset()
    busy_puts: float = 0.0  # this share of puts is answered 503
    hide_new_s: float = 0.0  # a new object is neither listed nor found for so long
    fail_parts_from: int | None = None  # parts of a multipart upload with this number or a higher one fail
    keys: str = ""
    seed: int = 0


@dataclass
class ProxyState:
    """Shared by the handler threads, under `lock`."""

    upstream: int
    faults: Faults = field(default_factory=Faults)
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    keys: Counter[tuple[str, str]] = field(default_factory=Counter)  # (operation, key)
    born: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def reset(self, faults: Faults) -> None:
        with self.lock:
            self.faults, self.random = faults, random.Random(faults.seed)
            self.counts.clear()
            self.refused.clear()
            self.keys.clear()
            self.born.clear()

    def judge(self, operation: str, key: str, part: int | None) -> tuple[int, str] | None:
        """The status and S3 code to answer with instead of passing the request on."""
        with self.lock:
            self.counts[operation] += 1
            self.keys[operation, key] += 1
            verdict = self._verdict(operation, key, part)
            if verdict:
                self.refused[operation] += 1
            return verdict

    def _verdict(self, operation: str, key: str, part: int | None) -> tuple[int, str] | None:
        faults = self.faults
        if faults.keys and not re.search(faults.keys, key):
            return None
        if operation in faults.deny:
            return 403, "AccessDenied"
        if part is not None and faults.fail_parts_from is not None and part >= faults.fail_parts_from:
            return 500, "InternalError"
        if operation == "put" and self.random.random() < faults.busy_puts:
            return 503, "SlowDown"
        if operation == "get" and key in self.hidden():
            return 404, "NoSuchKey"
        return None

    def hidden(self) -> set[str]:
        """`bucket/key` of the objects that are too new to be seen."""
        now = time.monotonic()
        return {key for key, born in self.born.items() if now - born < self.faults.hide_new_s}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ProxyState

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        key = unquote(url.path).lstrip("/")
        query = parse_qs(url.query, keep_blank_values=True)
        part = int(query["partNumber"][0]) if "partNumber" in query else None
        operation = _operation(self.command, key, query)
        verdict = self.state.judge(operation, key, part)
        if verdict:
            self._refuse(*verdict)
            return
        status, headers, answer = self._pass_on(body)
        if operation == "put" and status < 300 and part is None:
            with self.state.lock:
                self.state.born.setdefault(key, time.monotonic())
        if operation == "list" and status == 200:
            answer = self._without_hidden(key.split("/")[0], answer)
        self._answer(status, headers, answer)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.state.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in {"expect", "connection"}}
            connection.request(self.command, self.path, body=body or None, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} by the test</Message></Error>"
        self._answer(status, [("Content-Type", "application/xml")], text.encode())

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _without_hidden(self, bucket: str, listing: bytes) -> bytes:
        with self.state.lock:
            hidden = {key.removeprefix(f"{bucket}/").encode() for key in self.state.hidden()}
        pattern = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
        return pattern.sub(lambda match: b"" if match.group(1) in hidden else match.group(0), listing)


def _operation(method: str, key: str, query: dict[str, list[str]]) -> str:
    inside = "/" in key.rstrip("/")
    if method in ("GET", "HEAD"):
        return "get" if inside else ("list" if method == "GET" else "bucket")
    if method == "PUT":
        return "put" if inside else "bucket"
    if method == "POST":
        return "delete" if "delete" in query else "put"
    return "delete"


@contextmanager
def fault_proxy(upstream: int) -> Iterator[tuple[int, ProxyState]]:
    """A proxy in front of the S3 server at this port: its own port and its state."""
    state = ProxyState(upstream)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="fault-proxy", daemon=True)
    thread.start()
    try:
        yield server.server_address[1], state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
