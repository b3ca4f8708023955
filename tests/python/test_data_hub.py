"""Datasets on the hub: a local stand-in speaks the hub's protocol, and huggingface_hub believes it.

Needs no network. The engine's part, choosing files among names, is tested next to its code.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

ROWS = "".join(json.dumps({"input_ids": [i % 90, 1, 2, 3]}) + "\n" for i in range(50_000)).encode() * 16
REPOSITORIES = {
    "acme/tokens": {
        "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/tr*.jsonl\n"
        b"  - split: test\n    path: main/te*.jsonl\n- config_name: other\n  data_files: other.csv\n---\n",
        "main/tr-0.jsonl": ROWS,
        "main/te-0.jsonl": b'{"input_ids": [7, 8]}\n',
        "other.csv": b"text\nhello\n",
    },
    "acme/private": {"train.jsonl": b'{"input_ids": [5, 6]}\n'},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub: metadata of a dataset, its tree, its files with ranges. Cuts the first long answer short."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, str | None]] = []
    cuts = 0

    def log_message(self, *_: object) -> None:
        pass

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        type(self).seen.append((self.command, path, self.headers.get("Range")))
        parts = path.removeprefix("/api").removeprefix("/datasets/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        files = REPOSITORIES.get(name)
        if name == "acme/gated":
            return self.refuse(403, "GatedRepo")
        allowed = self.headers.get("Authorization") == "Bearer hf_secret"
        if files is None or (name == "acme/private" and not allowed):
            return self.refuse(401, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if path.startswith("/api"):
            siblings = [{"rfilename": file, "size": len(files[file]), "blobId": "0" * 40} for file in files]
            tree = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self.answer(
                200,
                json.dumps(tree if rest and rest[0] == "tree" else info).encode(),
                {"Content-Type": "application/json"},
            )
        return self.file(files.get("/".join(rest[2:])))

    def file(self, content: bytes | None) -> None:
        if content is None:
            return self.refuse(404, "EntryNotFound")
        etag = hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        if self.command == "GET" and len(body) > 1_000_000 and type(self).cuts == 0:
            type(self).cuts += 1
            self.answer(200, body[: len(body) // 2], headers, len(body))
            self.close_connection = True
            return None
        return self.answer(206 if begin else 200, body, headers)


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.seen, Hub.splits = [], 0
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch_all(sets: list[tuple[str, str | None, str]], **variables: str) -> list:
        """Files of sets as a process of its own sees them: huggingface_hub reads its variables when it is imported."""
        program = (
            "import sys, json; from surogate.storage import hub; from surogate.errors import SurogateError\n"
            "for path, subset, split in json.loads(sys.argv[1]):\n"
            "    try: print(json.dumps([str(f) for f in hub.data_files(path, subset, split)]))\n"
            "    except SurogateError as error: print(json.dumps({type(error).__name__: str(error)}))"
        )
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **variables,
        }
        words = [sys.executable, "-c", program, json.dumps(sets)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
        found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
        assert len(found) == len(sets), done.stdout + done.stderr
        return found

    def fetch(path: str, subset: str | None = None, split: str = "train", **variables: str):
        return fetch_all([(path, subset, split)], **variables)[0]

    fetch.all = fetch_all
    yield fetch
    server.shutdown()
    server.server_close()


def content(files: list[str]) -> bytes:
    return b"".join(open(file, "rb").read() for file in files)


def test_only_the_files_of_subset_and_split_are_fetched_and_a_cut_connection_is_resumed(hub):
    files = hub("acme/tokens", "main")
    assert content(files) == ROWS and Hub.cuts == 1
    got = [(path, wanted) for method, path, wanted in Hub.seen if method == "GET" and "resolve" in path]
    assert not any("te-0" in path or "other" in path for path, _ in got)
    assert any(wanted for path, wanted in got if "tr-0" in path), "the second request asks for the rest only"
    assert content(hub("acme/tokens@v1", "main", "test")) == b'{"input_ids": [7, 8]}\n'


def test_what_was_fetched_is_found_offline(hub):
    first = hub("acme/tokens", "main", "test")
    count = len(Hub.seen)
    second = hub("acme/tokens", "main", "test", HF_HUB_OFFLINE="1")
    assert second == first
    assert len(Hub.seen) == count
    reported = hub("acme/tokens", "main", "train", HF_HUB_OFFLINE="1")["RunError"]
    assert "not in the cache" in reported, "a split that was never fetched is not silently empty"
    # The hub is away, but no option says so: the cache serves, with a note.
    assert hub("acme/tokens", "main", "test", HF_ENDPOINT="http://127.0.0.1:1") == first
    reported = hub("acme/private", HF_HUB_OFFLINE="1")["RunError"]
    assert "not in the cache" in reported and "unset HF_HUB_OFFLINE" in reported


def test_refusals_say_what_to_do(hub):
    refused = [
        ("acme/private", None, "train", "private one needs HF_TOKEN"),
        ("acme/absent", None, "train", "check the name"),
        ("acme/gated", None, "train", "access to it must be granted"),
        ("acme/tokens@v9", None, "train", "not this revision"),
        ("acme/tokens", None, "train", "set `subset`; subsets here: main, other"),
        ("acme/tokens", "main", "dev", "splits here: test, train"),
    ]
    for found, (path, _, _, said) in zip(hub.all([of[:3] for of in refused]), refused, strict=True):
        ((error, text),) = found.items()
        assert error == ("DataError" if path == "acme/tokens" else "RunError") and said in text, text
    assert content(hub("acme/private", HF_TOKEN="hf_secret")) == b'{"input_ids": [5, 6]}\n'
