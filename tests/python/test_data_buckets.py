"""Datasets in buckets: a server that speaks S3's protocol is started, and obstore believes it.

The same server stands in for Google's, whose XML interface (the one that obstore uses) is the same but for the
signature: a bearer token instead of keys. Needs `moto` and `obstore`, no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bucket_server import put, s3_server

pytestmark = pytest.mark.xdist_group("buckets")

ROWS = "".join(json.dumps({"input_ids": [i % 90, 1, 2, 3]}) + "\n" for i in range(20_000)).encode() * 8
OBJECTS = {
    "sets/words/train-00000.jsonl": b'{"text": "one"}\n',
    "sets/words/test-00000.jsonl": b'{"text": "two"}\n',
    "sets/words/notes.md": b"no data",
    "sets/carded/README.md": b"---\nconfigs:\n- config_name: main\n  data_files: rows/*.csv\n---\n",
    "sets/carded/rows/a b=1%.csv": b"text\nhello\n",
    "sets/carded/other.csv": b"text\nbye\n",
    "sets/big.jsonl": ROWS,
}

PROGRAM = """
import sys, json
from surogate.storage import buckets, hub
from surogate.errors import SurogateError
path, subset, split = json.loads(sys.argv[1])
try:
    print(json.dumps([str(f) for f in buckets.data_files(path, subset, split, hub.FILES)]))
except SurogateError as error:
    print(json.dumps({type(error).__name__: str(error)}))
"""


class Cutting(BaseHTTPRequestHandler):
    """Hands everything on to its server; cuts the first long answers short."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    cuts = 0
    ranges: list[str | None] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.endswith("big.jsonl") and self.command == "GET":
            type(self).ranges.append(self.headers.get("Range"))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        request = urllib.request.Request(type(self).upstream + self.path, method=self.command, headers=headers)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            answer = error
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        if len(body) > 1_000_000 and type(self).cuts:
            type(self).cuts -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def s3():
    """The address of the server, with the objects in its bucket `acme`."""
    with s3_server("acme", OBJECTS) as address:
        yield address


@pytest.fixture
def proxy(s3):
    front = ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    Cutting.upstream, Cutting.cuts, Cutting.ranges = s3, 2, []
    threading.Thread(target=front.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{front.server_address[1]}"
    front.shutdown()
    front.server_close()


def fetch(place: Path, path: str, subset: str | None = None, split: str = "train", **variables: str):
    """Files of a set as a process of its own sees them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_"))}
    environment = {**kept, "HOME": str(place), "SUROGATE_OBJECTS": str(place / "objects"), **variables}
    words = [sys.executable, "-c", PROGRAM, json.dumps([path, subset, split])]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def keys(address: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


def content(files: list[str]) -> list[bytes]:
    return [Path(file).read_bytes() for file in files]


def test_objects_folders_and_patterns_are_fetched_once(s3, tmp_path):
    first = fetch(tmp_path, "s3://acme/sets/words", **keys(s3))
    assert content(first) == [b'{"text": "one"}\n'] and first[0].endswith("/train-00000.jsonl")
    stamp = os.stat(first[0]).st_mtime_ns
    assert fetch(tmp_path, "s3://acme/sets/words/", **keys(s3)) == first
    assert os.stat(first[0]).st_mtime_ns == stamp
    assert content(fetch(tmp_path, "s3://acme/sets/words", split="test", **keys(s3))) == [b'{"text": "two"}\n']
    both = fetch(tmp_path, "s3://acme/sets/words/*.jsonl", **keys(s3))
    assert content(both) == [b'{"text": "two"}\n', b'{"text": "one"}\n']
    assert content(fetch(tmp_path, "s3://acme/sets/carded", **keys(s3))) == [b"text\nhello\n"]
    assert content(fetch(tmp_path, "s3://acme/sets/carded/rows/a b=1%.csv", **keys(s3))) == [b"text\nhello\n"]


def test_an_object_that_changed_is_fetched_again(s3, tmp_path):
    put(s3, "/acme/changing.jsonl", b'{"text": "old"}\n')
    old = fetch(tmp_path, "s3://acme/changing.jsonl", **keys(s3))
    put(s3, "/acme/changing.jsonl", b'{"text": "new"}\n')
    new = fetch(tmp_path, "s3://acme/changing.jsonl", **keys(s3))
    assert content(old) == [b'{"text": "old"}\n'] and content(new) == [b'{"text": "new"}\n']


@pytest.mark.skipif(os.geteuid() != 0, reason="only the system's owner gives files to others")
def test_what_others_wrote_or_can_write_is_not_believed(s3, tmp_path):
    """Objects of the right size and version, put there by another user of the machine; folders in which one can put them."""
    path = "s3://acme/sets/words"
    (file,) = map(Path, fetch(tmp_path, path, **keys(s3)))
    right, folders = file.read_bytes(), [*file.parents][: len(file.relative_to(tmp_path).parts) - 1]
    forged = right.replace(b"one", b"bad")

    file.write_bytes(forged)
    os.chown(file, 12345, 12345)
    assert content(fetch(tmp_path, path, **keys(s3))) == [right]
    file.write_bytes(forged)
    file.chmod(0o666)
    assert content(fetch(tmp_path, path, **keys(s3))) == [right]
    file.unlink()
    (tmp_path / "forged").write_bytes(forged)
    file.symlink_to(tmp_path / "forged")
    assert content(fetch(tmp_path, path, **keys(s3))) == [right]

    for folder in folders:
        folder.chmod(0o777)
    assert content(fetch(tmp_path, path, **keys(s3))) == [right]
    assert not [folder for folder in folders if folder.stat().st_mode & 0o022]
    for folder in folders:
        os.chown(folder, 12345, 12345)
        refused = fetch(tmp_path, path, **keys(s3))["RunError"]
        assert f"{folder} is a link or belongs to another user" in refused, refused
        os.chown(folder, 0, 0)
    elsewhere = tmp_path / "elsewhere"
    folders[0].rename(elsewhere)
    folders[0].symlink_to(elsewhere)
    assert "is a link" in fetch(tmp_path, path, **keys(s3))["RunError"]


def test_a_transfer_that_breaks_is_taken_up_where_it_ended(proxy, tmp_path):
    files = fetch(tmp_path, "s3://acme/sets/big.jsonl", **keys(proxy))
    assert content(files) == [ROWS] and Cutting.cuts == 0
    assert len(Cutting.ranges) > 1 and any(asked and not asked.startswith("bytes=0-") for asked in Cutting.ranges)
    left = [file for file in (tmp_path / "objects").rglob("*") if file.is_file()]
    assert [file.name for file in left] == ["big.jsonl"], "nothing unfinished stays"


def test_keys_of_a_profile_are_used(s3, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[work]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = us-east-1\n")
    variables = {"AWS_ENDPOINT_URL": s3, "AWS_PROFILE": "work"}
    assert len(fetch(tmp_path, "s3://acme/sets/words", **variables)) == 1


def test_google_buckets_are_read_with_a_token_or_without(s3, tmp_path):
    variables = {"GOOGLE_BASE_URL": s3, "GOOGLE_BEARER_TOKEN": "token"}
    assert content(fetch(tmp_path, "gs://acme/sets/words", **variables)) == [b'{"text": "one"}\n']
    assert content(fetch(tmp_path, "gs://acme/sets/big.jsonl", **variables)) == [ROWS]


@pytest.mark.parametrize(
    ("path", "subset", "split", "words"),
    [
        ("s3://acme/sets/none.jsonl", None, "train", "there is no such object"),
        ("s3://missing/sets", None, "train", "there is no such bucket"),
        ("s3://acme/sets/words", None, "dev", "there is no split `dev` (splits here: test, train)"),
        ("s3://acme/sets/words/*.parquet", None, "train", "no object matches this pattern"),
        ("s3://acme/sets/big.jsonl", "main", "train", "a file has no subset `main`"),
        ("s3://acme/nothing", None, "train", "there are no data files"),
        ("s3://", None, "train", "an address has the form `s3://bucket/path`"),
    ],
)
def test_what_is_not_there_is_said(s3, tmp_path, path, subset, split, words):
    (said,) = fetch(tmp_path, path, subset, split, **keys(s3)).values()
    assert words in said and path in said and "\n" not in said, said


def test_without_the_extra_the_command_is_said(tmp_path, monkeypatch):
    from surogate.errors import RunError
    from surogate.storage import buckets

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(RunError, match=r"pip install 'surogate\[cloud\]'"):
        buckets.data_files("s3://acme/a.jsonl", None, "train", (".jsonl",))
