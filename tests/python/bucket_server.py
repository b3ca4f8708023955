"""A server on this machine that speaks S3's protocol, for tests of buckets. Needs `moto`, no network."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import quote


@contextmanager
def s3_server(bucket: str, objects: Mapping[str, bytes] | None = None) -> Iterator[str]:
    """The address of a server with one bucket and its objects by their keys."""
    from moto import server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    address = f"http://127.0.0.1:{port}"
    put(address, f"/{bucket}", b"")
    for key, content in (objects or {}).items():
        put(address, f"/{bucket}/{quote(key)}", content)
    yield address
    running.stop()


def put(address: str, path: str, content: bytes) -> None:
    """Makes a bucket or an object."""
    headers = {"Content-Type": "application/octet-stream", "Authorization": "Bearer x"}
    urllib.request.urlopen(urllib.request.Request(address + path, method="PUT", data=content, headers=headers))


class Faulty(BaseHTTPRequestHandler):
    """A proxy of the server that can fail."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    #: `cut`: the connection ends within a request that writes; `full`: no room; `refused`: unknown keys; `slow`: checkpoints take
    #: a minute.
    fault: str | None = None

    def log_message(self, *_: object) -> None:
        pass

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_write = self.command in ("PUT", "POST") and not self.path.endswith("?delete")
        if is_write and type(self).fault == "cut":
            self.close_connection = True
            return
        for _ in range(600):
            if is_write and "/checkpoint-" in self.path and type(self).fault == "slow":
                time.sleep(0.1)
        if is_write and type(self).fault == "full":
            return self.answer(403, b"<Error><Code>QuotaExceeded</Code><Message>the bucket is full</Message></Error>", {})
        if type(self).fault == "refused":
            return self.answer(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", {})
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        headers.setdefault("Content-Type", "application/octet-stream")
        request = urllib.request.Request(type(self).upstream + self.path, body or None, headers, method=self.command)
        try:
            found = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            found = error
        self.answer(found.status, found.read(), dict(found.headers))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
