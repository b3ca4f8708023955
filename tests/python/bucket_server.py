"""A server on this machine that speaks S3's protocol, for tests of buckets. Needs `moto`, no network."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
