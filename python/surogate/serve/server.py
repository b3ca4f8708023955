"""HTTP of `surogate serve`: limits, the token, whole answers and streams.

Knows no model.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import queue
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from . import protocol
from .engine import Done, Engine, Job
from .protocol import BadRequest

#: Connections at a time, and seconds that a client may take to send its request or to take a piece of the answer.
CONNECTIONS, TIMEOUT = 256, 30.0

#: Seconds between looks at a client that waits.
LOOK = 0.5

#: Seconds that a new connection has to send its request when the server ends.
FIRST = 1.0

PAGE = Path(__file__).with_name("chat.html").read_text(encoding="utf-8")


#: Paths of POST, and whether they take conversations.
COMPLETIONS = {"/v1/chat/completions": True, "/v1/completions": False}

#: Paths of GET.
PAGES = ("/", "/health", "/v1/models")


@dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    #: Bytes of a request.
    body: int
    #: Seconds from a request to the end of its answer.
    seconds: int
    #: Tokens of an answer.
    tokens: int
    #: Answers of a request, which is also the size of a batch.
    sequences: int


class Server(ThreadingHTTPServer):
    """The endpoints over one engine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], engine: Engine, limits: Limits, token: str | None) -> None:
        self.engine, self.limits, self.token, self.host = engine, limits, token, address[0]
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        #: Connections that have sent no request yet, and the number of requests that have no whole answer yet.
        self._new: set[Any] = set()
        self._open, self._closed = 0, threading.Condition()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for the connection, or closes it if there are too many."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._closed:
            self._new.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection, and makes room for another when it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._begun(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of the server."""

    @contextmanager
    def answering(self, connection: Any) -> Iterator[None]:
        """Counts a request of a connection until its answer is sent."""
        with self._closed:
            self._open += 1
        self._begun(connection)
        try:
            yield
        finally:
            with self._closed:
                self._open -= 1
                self._closed.notify_all()

    def _begun(self, connection: Any) -> None:
        with self._closed:
            self._new.discard(connection)
            self._closed.notify_all()

    def finish(self, seconds: float) -> None:
        """Waits until every request has its answer, for this time at most: threads of connections end with the process. Takes up
        connections that were made before the end, which have a second to send their request."""
        while select.select([self], [], [], 0)[0]:
            self.handle_request()
        with self._closed:
            self._closed.wait_for(lambda: not self._new, FIRST)
            self._closed.wait_for(lambda: self._open == 0, seconds)

    def end(self) -> None:
        """Ends `serve_forever`, from any thread."""
        threading.Thread(target=self.shutdown, daemon=True).start()


class Arriving(io.RawIOBase):
    """Bytes of a client, which has `TIMEOUT` for a whole request: a byte now and then keeps no connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._until = connection, 0.0

    def begin(self) -> None:
        """Begins the time of a request."""
        self._until = time.monotonic() + TIMEOUT

    def readable(self) -> bool:
        """Says that bytes come from here."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads what is there. Raises TimeoutError where the time is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(TIMEOUT)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "surogate", ""
    timeout = TIMEOUT

    def setup(self) -> None:
        """Reads from the connection within limits of time."""
        super().setup()
        self.rfile.close()
        self._arriving = Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        """Reads and answers a request."""
        self._arriving.begin()
        super().handle_one_request()

    def log_message(self, *_: object) -> None:
        """Logs nothing: requests may hold private text."""
        pass

    def do_GET(self) -> None:
        """Answers a GET request; exceptions become error responses."""
        self._guarded(self._get)

    def do_HEAD(self) -> None:
        """Answers as a GET request is answered, without the body."""
        self._guarded(self._get)

    def do_PUT(self) -> None:
        """Refuses a request of a method that no path has."""
        self._guarded(self._refuse)

    do_DELETE = do_PATCH = do_OPTIONS = do_PUT

    def do_POST(self) -> None:
        """Answers a POST request; exceptions become error responses."""
        self._guarded(self._post)

    def _guarded(self, call: Any) -> None:
        with self.server.answering(self.connection):
            try:
                self._check_host()
                self._check_body()
                call()
            except BadRequest as error:
                # The rest of the body would be read as the next request.
                self.close_connection = True
                self._send(error.status, error.body(), error.headers)

    def _check_host(self) -> None:
        """A page of another site whose name leads to this machine sends its own name."""
        host = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]").lower()
        if self.server.token is None and host not in ("localhost", "127.0.0.1", "::1", self.server.host):
            raise BadRequest(f"the request is for the host `{host}`, expected {self.server.host}", status=403)

    def _check_body(self) -> None:
        """Refuses a request of which a part would be read as the next one."""
        if "Transfer-Encoding" in self.headers:
            raise BadRequest("`Transfer-Encoding` is not supported, expected `Content-Length`", status=411)
        if len(self.headers.get_all("Content-Length", [])) > 1:
            raise BadRequest("`Content-Length` stands there several times, expected once")
        if self.command in ("GET", "HEAD") and self.headers.get("Content-Length", "0") != "0":
            raise BadRequest("the request has a body, expected none")

    def _check_token(self) -> None:
        expected, given = self.server.token, self.headers.get("Authorization", "")
        if expected is not None and not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            raise BadRequest("the token is missing or wrong", status=401, code="invalid_api_key")

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            return self._send(200, {"status": "ok"})
        if path == "/":
            return self._send_page()
        if path != "/v1/models":
            raise self._no_place(path)
        self._check_token()
        engine = self.server.engine
        self._send(200, protocol.models(engine.names(), engine.started))

    def _post(self) -> None:
        path = self.path.partition("?")[0]
        if path not in COMPLETIONS:
            raise self._no_place(path)
        self._check_token()
        limits = self.server.limits
        request = protocol.read(self._body(limits.body), COMPLETIONS[path], limits.tokens, limits.sequences)
        job = self.server.engine.submit(request)
        try:
            events = self._events(job)
            # A prompt that cannot be answered has the status of an error, in a stream too.
            first = next(events)
            if request.streams:
                self._stream(job, first, events)
            else:
                self._whole(job, first, events)
        finally:
            job.is_cancelled.set()

    def _refuse(self) -> None:
        raise self._no_place(self.path.partition("?")[0])

    def _no_place(self, path: str) -> BadRequest:
        """The error of a path that this method does not have."""
        other = "POST" if path in COMPLETIONS else "GET"
        if other != self.command and (path in COMPLETIONS or path in PAGES):
            return BadRequest(f"{path} takes {other}, not {self.command}", status=405, Allow=other)
        return BadRequest(f"there is no {path}", status=404)

    def _body(self, most: int) -> bytes:
        if self.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise BadRequest("`Content-Type` is not application/json", status=415)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise BadRequest("`Content-Length` is missing", status=411)
        if len(length) > 18 or int(length) > most:
            raise BadRequest(f"the body has {length[:18]} bytes, expected at most {most}", status=413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise BadRequest("the body ends early")
        return body

    def _events(self, job: Job) -> Iterator[Any]:
        """Yields the events of a request, to its end. Raises BadRequest, also if the time is over or the client has
        gone."""
        until = time.monotonic() + self.server.limits.seconds
        while True:
            # Also where the events are there, and the client takes its time for each.
            if time.monotonic() > until:
                raise BadRequest(f"the answer took longer than {self.server.limits.seconds} s", status=504)
            try:
                event = job.events.get(timeout=LOOK)
            except queue.Empty:
                if self._has_gone():
                    raise ConnectionAbortedError from None
                continue
            if isinstance(event, BadRequest):
                raise event
            yield event
            if isinstance(event, Done):
                return

    def _has_gone(self) -> bool:
        """True if the client has closed the connection."""
        # A socket with a timeout would wait for bytes, whatever its flags say.
        looks = select.poll()
        looks.register(self.connection, select.POLLIN)
        try:
            return bool(looks.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _whole(self, job: Job, first: Any, events: Iterator[Any]) -> None:
        count = len(job.request.prompts)
        texts, ends, event = [""] * count, [""] * count, first
        while not isinstance(event, Done):
            index, text, end = event
            texts[index] += text
            ends[index] = end or ends[index]
            event = next(events)
        tokens = protocol.usage(event.prompt_tokens, event.answer_tokens)
        self._send(200, protocol.answer(job.request, texts, ends, tokens))

    def _stream(self, job: Job, first: Any, events: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        if self._takes_chunks():
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        make, event = protocol.pieces(job.request), first
        try:
            while not isinstance(event, Done):
                for chunk in make(*event):
                    self._send_chunk(chunk)
                event = next(events)
            if job.request.reports_usage:
                tokens = protocol.usage(event.prompt_tokens, event.answer_tokens)
                self._send_chunk(protocol.usage_chunk(job.request, tokens))
            self._write(b"data: [DONE]\n\n")
        except BadRequest as error:
            # The status is sent already: clients read an error in the stream.
            self.close_connection = True
            self._send_chunk(error.body())
        if self._takes_chunks():
            self.wfile.write(b"0\r\n\r\n")

    def _send_chunk(self, value: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self._takes_chunks() else data)

    def _takes_chunks(self) -> bool:
        """True unless the client is an older one, such as a proxy: its answer ends with the connection."""
        return self.request_version != "HTTP/1.0"

    def _send(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        self._send_bytes(status, "application/json; charset=utf-8", body, headers or {})

    def _send_page(self) -> None:
        """The chat page, which may load nothing from elsewhere and send nothing there."""
        rules = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
        for tag, name in (("script", "script-src"), ("style", "style-src")):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
            rules.append(f"{name} 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        headers = {"Content-Security-Policy": "; ".join(rules), "Referrer-Policy": "no-referrer"}
        self._send_bytes(200, "text/html; charset=utf-8", PAGE.encode(), headers)

    def _send_bytes(self, status: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if self.close_connection:
            # Otherwise a client sends its next request here, and gets no answer.
            self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
