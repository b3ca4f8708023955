"""Runs that write to a bucket: what is there while they go, how they go on elsewhere, and what a failure leaves.

Needs `moto` and `obstore`, no network; the server stands in for Google's as in test_data_buckets.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from bucket_server import Faulty, s3_server
from conftest import REPOSITORY
from processes import descendants
from surogate.errors import RunError
from surogate.storage import outputs
from surogate.storage.remote import MARK, Remote, digest
from surogate.storage.uploads import Uploads, unsent
from test_data_buckets import keys
from test_trackers import options

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.xdist_group("buckets")


@pytest.fixture(scope="module")
def s3():
    with s3_server("runs") as address:
        yield address


def unused() -> str:
    """A folder of the bucket that no other test has; names of folders of tests that passed come again."""
    return uuid.uuid4().hex


@pytest.fixture
def proxy(s3):
    front = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    Faulty.upstream, Faulty.fault = s3, None
    threading.Thread(target=front.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{front.server_address[1]}"
    front.shutdown()
    front.server_close()


@pytest.fixture
def bucket(s3, monkeypatch):
    """Opens an address as this process, with the server's keys."""
    for name, value in keys(s3).items():
        monkeypatch.setenv(name, value)
    return Remote


def environment(machine: Path, **variables: str) -> dict[str, str]:
    """The variables of a process on a machine of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_"))}
    return {**kept, "SUROGATE_RUNS": str(machine), **variables}


def start(folder: Path, address: str, machine: Path, variables: dict[str, str], **changes: object) -> subprocess.Popen[str]:
    words = options(folder, **{"output-dir": address, **changes})
    return subprocess.Popen(
        [sys.executable, "-m", "surogate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(machine, **variables),
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, error = process.communicate(timeout=180)
    return process.returncode, out + error


def losses_of(text: bytes) -> list[float]:
    events = [json.loads(line) for line in text.decode().splitlines()]
    return list({event["step"]: event["loss"] for event in events if event["event"] == "step"}.values())


def log_of(remote: Remote) -> bytes:
    (name,) = [name for name in remote.names() if name.startswith("log-")]
    return remote.read(name)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_run_is_in_the_bucket_and_goes_on_where_there_is_no_copy(s3, bucket, tmp_path, scheme):
    address = f"{scheme}://runs/{unused()}"
    variables = keys(s3) if scheme == "s3" else {"GOOGLE_BASE_URL": s3, "GOOGLE_BEARER_TOKEN": "token"}
    code, text = ended(start(tmp_path, address, tmp_path / "one", variables))
    assert code == 0 and f"Uploaded: {address}" in text, text
    remote = bucket(address.replace("gs://", "s3://"))
    names = remote.names()
    assert {"manifest.json", "resolved.yaml", "report.html", "trainer_state.json"} <= set(names)
    assert set(remote.marks(names)) == {"checkpoint-2", "checkpoint-4", "adapter"}
    (local,) = (path for path in (tmp_path / "one").iterdir() if path.is_dir())
    for folder in remote.marks(names):
        for file in (local / folder).iterdir():
            assert remote.read(f"{folder}/{file.name}") == file.read_bytes()
    more = {"max-steps": 6, "resume-from-checkpoint": "true"}
    code, text = ended(start(tmp_path, address, tmp_path / "two", variables, **more))
    assert code == 0 and "fetching checkpoint-4" in text, text
    assert set(remote.marks(remote.names())) == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "adapter"}
    code, text = ended(start(tmp_path, str(tmp_path / "whole"), tmp_path, {}, **{"max-steps": 4}))
    assert code == 0, text
    (log,) = (tmp_path / "whole").glob("log-*.json")
    found = losses_of(log_of(remote))
    assert found[:4] == losses_of(log.read_bytes()) and len(found) == 6
    code, text = ended(start(tmp_path, address, tmp_path / "three", variables))
    assert code == 2 and "holds another run" in text, text


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(s3, bucket, tmp_path):
    address, variables = f"s3://runs/{unused()}", keys(s3)
    code, text = ended(start(tmp_path, address, tmp_path / "one", variables))
    assert code == 0, text
    remote = bucket(address)
    name = max((of for of in remote.names() if of.startswith("checkpoint-4/")), key=remote.names().__getitem__)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(remote.names()[name]))
    remote.put(name, damaged)
    more = {"max-steps": 6, "resume-from-checkpoint": "true"}
    code, text = ended(start(tmp_path, address, tmp_path / "two", variables, **more))
    assert code == 0 and "checkpoint-4 of" in text and "is damaged" in text and "fetching checkpoint-2" in text, text
    assert len(losses_of(log_of(remote))) == 6
    damaged.write_bytes(bytes(remote.names()[name.replace("-4/", "-2/")]))
    remote.remove([of for of in remote.names() if of.startswith(("checkpoint-4/", "checkpoint-6/"))])
    remote.put(name.replace("-4/", "-2/"), damaged)
    code, text = ended(start(tmp_path, address, tmp_path / "three", variables, **more))
    assert code == 1 and "every checkpoint there is damaged: checkpoint-2" in text, text


@pytest.mark.parametrize("whom", ["the run", "all its processes"])
def test_a_signal_leaves_a_checkpoint_in_the_bucket(s3, bucket, tmp_path, whom):
    """Batch systems send it to the processes that a run has started, too."""
    address = f"s3://runs/{unused()}"
    run = start(tmp_path, address, tmp_path / "one", keys(s3), **{"max-steps": 100_000, "save-steps": 100_000})
    assert run.stdout
    for line in run.stdout:
        if line.startswith("Step 2/"):
            break
    for number in [*(descendants(run.pid) if whom != "the run" else ()), run.pid]:
        os.kill(number, signal.SIGTERM)
    code, text = ended(run)
    assert code == 143 and "receives no more data" not in text, text
    remote = bucket(address)
    (name,) = remote.marks(remote.names())
    step = int(name.removeprefix("checkpoint-"))
    more = {"max-steps": step + 2, "save-steps": 100_000, "resume-from-checkpoint": "true"}
    code, text = ended(start(tmp_path, address, tmp_path / "two", keys(s3), **more))
    assert code == 0 and f"fetching {name}" in text and f"Step {step + 1}/{step + 2}" in text, text


@pytest.mark.parametrize("mark", ["{", "[]", '{"files": []}', '{"files": {}}', "[" * 100_000], ids=range(5))
def test_marks_that_no_run_has_written_are_none(s3, bucket, tmp_path, mark):
    remote = bucket(f"s3://runs/{unused()}")
    remote.put_text(f"checkpoint-2/{MARK}", mark)
    assert remote.marks(remote.names()) == {}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text("{}")
    (tmp_path / "run/checkpoint-2").mkdir()
    (tmp_path / "run/checkpoint-2/state.json").write_text("{}")
    Uploads({"address": remote.address, "limit": 3, "say": pytest.fail}, tmp_path / "run").close(None)
    assert set(remote.marks(remote.names())) == {"checkpoint-2"}


@pytest.mark.parametrize("manifest", ["[]", "{", "[" * 100_000], ids=range(3))
def test_a_manifest_that_no_run_has_written_is_an_error(s3, bucket, tmp_path, manifest):
    remote = bucket(f"s3://runs/{unused()}")
    remote.put_text("manifest.json", manifest)
    more = {"resume-from-checkpoint": "true"}
    code, text = ended(start(tmp_path, remote.address, tmp_path / "one", keys(s3), **more))
    assert code == 1 and "the run there cannot be read" in text and "Traceback" not in text, text


def test_a_signal_before_the_first_step_leaves_nothing_to_upload(s3, bucket, tmp_path):
    address = f"s3://runs/{unused()}"
    program = "import os, signal, sys; from surogate import _native; from surogate.cli import commands; run = _native.run\n"
    program += "_native.run = lambda *of: (os.kill(os.getpid(), signal.SIGTERM), run(*of))[1]\nsys.exit(commands.main())"
    remote = bucket(address)
    # The object of a process that was killed while it tried to write.
    remote.put_text("trial", "trial")
    words = [sys.executable, "-c", program, *options(tmp_path, **{"output-dir": address})]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(tmp_path / "one", **keys(s3)), timeout=120)
    assert done.returncode == 143 and "not everything was uploaded" not in done.stderr, done.stderr
    assert "nothing was saved" in done.stdout + done.stderr and list(remote.names()) == []
    code, text = ended(start(tmp_path, address, tmp_path / "one", keys(s3), **{"resume-from-checkpoint": "true"}))
    assert code == 0 and f"Uploaded: {address}" in text, text


def test_an_upload_that_outlasts_the_grace_period_is_named_and_made_by_the_next_start(proxy, bucket, tmp_path):
    address = f"s3://runs/{tmp_path.name}"
    Faulty.fault = "slow"
    more = {"max-steps": 100_000, "save-steps": 100_000, "save-grace-seconds": 8}
    run = start(tmp_path, address, tmp_path / "one", keys(proxy), **more)
    assert run.stdout
    out = ""
    for line in run.stdout:
        out += line
        if line.startswith("Step 2/"):
            break
    assert f"`save_grace_seconds` is for the upload to {address}, too" in out
    begun = time.monotonic()
    run.send_signal(signal.SIGTERM)
    code, text = ended(run)
    (place,) = (path for path in (tmp_path / "one").glob("[!.]*") if path.is_dir())
    (name,) = (path.name for path in place.glob("checkpoint-*"))
    told = f"`save_grace_seconds: 8` have passed since SIGTERM: {name} is not in {address}, but in {place}; the same command"
    assert code == 143 and told in text and 7 < time.monotonic() - begun < 20, text
    remote = bucket(address)
    assert remote.marks(remote.names()) == {}
    Faulty.fault = None
    step = int(name.removeprefix("checkpoint-"))
    more |= {"max-steps": step + 1, "resume-from-checkpoint": "true"}
    code, text = ended(start(tmp_path, address, tmp_path / "one", keys(proxy), **more))
    assert code == 0 and f"Step {step}/{step + 1}" in text and "fetching" not in text, text
    assert name in remote.marks(remote.names())
    assert list((tmp_path / "one").glob(".*.upload")) == []


def test_a_checkpoint_and_its_upload_are_held_against_the_grace_period(s3, bucket, tmp_path):
    output, said = tmp_path / "output", []
    (output / "checkpoint-1").mkdir(parents=True)
    (output / "checkpoint-1" / "state.json").write_text("{}")
    (output / "manifest.json").write_text("{}")
    address = f"s3://runs/{tmp_path.name}"
    sender = Uploads({"address": address, "limit": 5, "say": said.append, "grace": 9}, output)
    sender.take([{"event": "checkpoint", "seconds": 9.5}])
    assert len(said) == 1 and "checkpoint-1 took 9.5 s to be written and 0." in said[0], said
    assert "more than `save_grace_seconds: 9`" in said[0]
    assert unsent(output) == "the end of the log is"
    (output / "checkpoint-2").mkdir()
    assert unsent(output) == "checkpoint-2 is"


def test_old_checkpoints_leave_the_bucket_as_they_leave_the_run(s3, bucket, tmp_path):
    address = f"s3://runs/{unused()}"
    more = {"save-steps": 1, "max-steps": 5, "save-total-limit": 2}
    code, text = ended(start(tmp_path, address, tmp_path / "one", keys(s3), **more))
    assert code == 0, text
    names = bucket(address).names()
    assert {name.partition("/")[0] for name in names if "/" in name} == {"checkpoint-4", "checkpoint-5", "adapter"}


def test_wrong_credentials_and_no_bucket_are_reported_before_anything_is_loaded(s3, proxy, tmp_path):
    Faulty.fault = "refused"
    for address, variables, words in [
        ("s3://absent/run", keys(s3), "nothing can be written there: there is no such bucket"),
        ("s3://runs/run", keys(proxy), "access is refused"),
        ("s3://runs", keys(s3), "expected `s3://bucket/path`"),
    ]:
        code, text = ended(start(tmp_path, address, tmp_path / "one", variables))
        assert code in (1, 2) and words in text and address in text and "Compiling" not in text, text


@pytest.mark.parametrize("fault", ["cut", "full"])
def test_a_failing_bucket_is_reported_and_gets_everything_later(proxy, bucket, tmp_path, monkeypatch, fault):
    """A folder as a run writes it, and its uploads: the bucket fails, then works again."""
    from surogate.storage import uploads

    monkeypatch.setattr(uploads, "PAUSE", 0.1)
    for name, value in keys(proxy).items():
        monkeypatch.setenv(name, value)
    output, said = tmp_path / "output", []
    (output / "checkpoint-1").mkdir(parents=True)
    (output / "checkpoint-1" / "state.json").write_text("{}")
    (output / "manifest.json").write_text("{}")
    address = f"s3://runs/{unused()}"
    sender = Uploads({"address": address, "limit": 5, "say": said.append}, output)
    Faulty.fault = fault
    sender.take([{"event": "checkpoint"}])
    assert len(said) == 1 and "failed" in said[0] and "tried again" in said[0]
    assert fault != "full" or "full" in said[0] or "403" in said[0], said
    assert bucket(address).marks(bucket(address).names()) == {}, "nothing unfinished looks complete"
    Faulty.fault = None
    sender.close(None)
    remote = bucket(address)
    assert remote.marks(remote.names())["checkpoint-1"]["digest"] == digest(output / "checkpoint-1")
    assert "goes on" in said[1] and uploads.left_behind(output) is None


def test_a_bucket_that_stays_away_ends_in_an_error_that_says_where_everything_is(proxy, tmp_path, monkeypatch):
    from surogate.storage import uploads

    monkeypatch.setattr(uploads, "PAUSE", 0.05)
    monkeypatch.setattr(uploads, "AFTERWARDS", 0.2)
    for name, value in keys(proxy).items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "output"
    output.mkdir()
    (output / "manifest.json").write_text("{}")
    Faulty.fault = "full"
    sender = Uploads({"address": f"s3://runs/{unused()}", "limit": 5, "say": lambda text: None}, output)
    with pytest.raises(OSError, match="not everything is in s3://runs/.*all of it is in"):
        sender.close(None)
    assert str(output) in (uploads.left_behind(output) or "")


def test_an_unfinished_folder_is_not_resumed_from(s3, bucket, tmp_path):
    address = f"s3://runs/{unused()}"
    remote = bucket(address)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for name in ("state.json", "adapter.bin"):
        (folder / name).write_text(name)
    remote.put_folder(folder, "checkpoint-3", digest(folder), [])
    assert set(remote.marks(remote.names())) == {"checkpoint-3"}
    remote.remove(["checkpoint-3/adapter.bin"])
    assert remote.marks(remote.names()) == {}, "a file that the mark names is not there"
    remote.put_text("checkpoint-4/state.json", "{}")
    assert MARK not in remote.names() and remote.marks(remote.names()) == {}


def test_names_that_lead_out_of_the_folder_are_refused(s3, bucket, tmp_path):
    remote = bucket(f"s3://runs/{unused()}")
    with pytest.raises(RunError, match="expected a file of the folder"):
        remote.get_folder("checkpoint-1", {"files": {"../../x": 1}}, tmp_path / "here" / "checkpoint-1")


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_checkpoint_that_cannot_be_fetched(s3, bucket, tmp_path, monkeypatch, failure):
    """Starts of twenty processes that are killed while they fetch would fill the disk."""
    address, folder, place = f"s3://runs/{unused()}", tmp_path / "checkpoint-3", tmp_path / "place"
    (place / ".fetched/checkpoint-1").mkdir(parents=True)
    (place / ".fetched/checkpoint-1/weights").write_text("of a process that was killed")
    folder.mkdir()
    for name in ("a.safetensors", "state.json"):
        (folder / name).write_text(name)
    remote = bucket(address)
    remote.put_folder(folder, "checkpoint-3", digest(folder), [])
    remote.put_text("manifest.json", '{"run_id": "1"}')
    get = Remote.get

    def cut(self, name, path):
        if name.endswith("state.json"):
            raise failure
        get(self, name, path)

    with monkeypatch.context() as broken, pytest.raises((RunError, KeyboardInterrupt)):
        broken.setattr(Remote, "get", cut)
        outputs._take_up(remote, place, True)
    assert list(place.iterdir()) == []
    # These files are no checkpoint.
    monkeypatch.setattr(outputs._native, "checkpoint_fault", lambda folder: None)
    outputs._take_up(remote, place, True)
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint-3", "manifest.json"]
    assert (place / "checkpoint-3/state.json").read_text() == "state.json"


def test_a_trainer_and_a_checkpoint_dir_are_refused(s3, tmp_path):
    import surogate
    from surogate.errors import ConfigError

    with pytest.raises(ConfigError, match="writes to a local folder alone"):
        surogate.Trainer({"model": str(REPOSITORY / "examples/stories/model"), "output_dir": "s3://runs/x"})
    run = start(tmp_path, "s3://runs/x", tmp_path / "one", keys(s3), **{"checkpoint-dir": str(tmp_path / "c")})
    code, text = ended(run)
    assert code == 2 and "`checkpoint_dir: " in text and "does not go with" in text


@pytest.mark.parametrize(
    ("changes", "variables", "message"),
    [
        ({"output-dir": "s3://runs/a//b"}, {}, "expected `s3://bucket/path`, no part of it empty"),
        ({"output-dir": "s3://runs/../b"}, {}, "expected `s3://bucket/path`, no part of it empty"),
        ({"output-dir": "gs://"}, {}, "expected `gs://bucket/path`"),
        ({"output-dir": "S3://runs/a"}, {}, "expected a folder, `s3://bucket/path`"),
        ({"output-dir": "s3:/runs/a"}, {}, "expected a folder, `s3://bucket/path`"),
        ({"output-dir": "az://runs/a"}, {}, "expected a folder, `s3://bucket/path`"),
        ({"output-dir": "out", "checkpoint-dir": "s3://runs/a"}, {}, "set `output_dir` to an address"),
        ({"output-dir": "s3://runs/a"}, {"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "AWS_ENDPOINT_URL is `127.0.0.1:9000`, expected"),
        ({"output-dir": "s3://runs/a"}, {"AWS_ENDPOINT_URL": "http://a:b"}, "AWS_ENDPOINT_URL is `http://a:b`, expected"),
    ],
)
def test_what_is_no_address_is_refused_and_makes_no_folder(tmp_path, monkeypatch, changes, variables, message):
    monkeypatch.chdir(tmp_path)
    words = options(tmp_path, **changes)
    variables = environment(tmp_path / "one", **{**keys("http://127.0.0.1:9"), **variables})
    done = subprocess.run([sys.executable, "-m", "surogate", *words], capture_output=True, text=True, env=variables)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(":")]


def test_a_local_folder_that_cannot_be_made_is_named(s3, tmp_path):
    (tmp_path / "file").write_text("")
    code, text = ended(start(tmp_path, f"s3://runs/{unused()}", tmp_path / "file", keys(s3)))
    assert code == 1 and "the local folder cannot be made" in text and "SUROGATE_RUNS" in text and "Traceback" not in text, text


def test_the_log_of_its_steps_is_in_the_bucket_before_a_checkpoint(s3, bucket, tmp_path, monkeypatch):
    """Otherwise a run that goes on elsewhere has a gap in its log."""
    output = tmp_path / "output"
    output.mkdir()
    for name in ("manifest.json", "log-a.json"):
        (output / name).write_text("1")
    address = f"s3://runs/{unused()}"
    sender = Uploads({"address": address, "limit": 5, "say": lambda text: None}, output)
    sender.take([{"event": "start"}])
    (output / "checkpoint-1").mkdir()
    (output / "checkpoint-1" / "state.json").write_text("{}")
    for name in ("manifest.json", "log-a.json"):
        (output / name).write_text("12")
    found: list[bytes] = []
    send = Remote.put_folder

    def noted(self, *all_of_it):
        found.extend(self.read(name) for name in ("manifest.json", "log-a.json"))
        send(self, *all_of_it)

    monkeypatch.setattr(Remote, "put_folder", noted)
    sender.take([{"event": "checkpoint"}])
    assert found == [b"12", b"12"] and set(bucket(address).marks(bucket(address).names())) == {"checkpoint-1"}


def test_uploads_do_not_miss_a_checkpoint_that_the_run_removes(s3, bucket, tmp_path, monkeypatch):
    """The snapshot of a folder is sent whole though the folder is gone."""
    output = tmp_path / "output"
    (output / "checkpoint-1").mkdir(parents=True)
    (output / "checkpoint-1" / "state.json").write_text("{}")
    (output / "manifest.json").write_text("{}")
    address = f"s3://runs/{unused()}"
    sender = Uploads({"address": address, "limit": 5, "say": lambda text: None}, output)
    send = Remote.put_folder

    def removed_meanwhile(self, folder, *more):
        (output / "checkpoint-1" / "state.json").unlink()
        time.sleep(0)
        send(self, folder, *more)

    monkeypatch.setattr(Remote, "put_folder", removed_meanwhile)
    sender.take([{"event": "checkpoint"}])
    assert bucket(address).read("checkpoint-1/state.json") == b"{}"
    assert list(output.parent.glob(".*.upload")) == []


def test_a_run_that_ended_before_its_first_checkpoint_does_not_stand_in_the_way(s3, bucket, tmp_path):
    address = f"s3://runs/{unused()}"
    for machine in ("one", "two"):
        more = {"max-steps": 100_000, "save-steps": 100_000, "resume-from-checkpoint": "true"}
        run = start(tmp_path, address, tmp_path / machine, keys(s3), **more)
        assert run.stdout
        next(line for line in run.stdout if line.startswith("Step 1/"))
        time.sleep(1)
        run.kill()
        run.wait()
    code, text = ended(start(tmp_path, address, tmp_path / "three", keys(s3), **{"resume-from-checkpoint": "true"}))
    assert code == 0, text
    code, text = ended(start(tmp_path, address, tmp_path / "two", keys(s3), **{"resume-from-checkpoint": "true", "max-steps": 6}))
    assert code == 0 and "fetching checkpoint-4" in text and "what was here is in" in text, text
    names = bucket(address).names()
    assert {"checkpoint-4", "checkpoint-6"} <= set(bucket(address).marks(names))
