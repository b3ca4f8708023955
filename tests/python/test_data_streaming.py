"""Datasets that are streamed: from files here, from a bucket of a server that speaks S3's protocol, and from a stand-in of the
hub. The disk holds no more than a run says, a killed run goes on bit for bit, and what does not go with it is named.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import surogate
import test_data_hub
from bucket_server import Faulty, put, s3_server
from processes import descendants
from surogate.errors import ConfigError, DataError
from surogate.storage import files, shards

pytestmark = pytest.mark.xdist_group("buckets")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "stories" / "model"
SHARDS, ROWS, STEPS = 6, 40, 24


def row(shard: int, number: int) -> str:
    words = random.Random(1000 * shard + number).choices(
        "a dog ran to the big red house and saw one little bird".split(), k=30
    )
    return json.dumps({"text": f"{' '.join(words)} {shard} {number}"}) + "\n"


def shard(number: int) -> bytes:
    return "".join(row(number, of) for of in range(ROWS)).encode()


@pytest.fixture(scope="module")
def s3():
    """The address of the server, with the shards in its bucket `acme`."""
    with s3_server("acme", {f"shards/train-{number:05}.jsonl": shard(number) for number in range(SHARDS)}) as address:
        yield address


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the shards, and environment variables for streams and caches inside of it."""
    (tmp_path / "shards").mkdir()
    for number in range(SHARDS):
        (tmp_path / "shards" / f"train-{number:05}.jsonl").write_bytes(shard(number))
    monkeypatch.setenv("SUROGATE_STREAMS", str(tmp_path / "streams"))
    monkeypatch.setenv("SUROGATE_DATA_CACHE", str(tmp_path / "rows"))
    monkeypatch.setenv("SUROGATE_OBJECTS", str(tmp_path / "objects"))
    return tmp_path


@pytest.fixture
def bucket(place, s3, monkeypatch):
    """The environment variables of the server."""
    keys = {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    return "s3://acme/shards"


def options(place: Path, path: str, **changed: object) -> dict[str, object]:
    return {
        "model": str(MODEL),
        "run_name": "streamed",
        "output_dir": str(place / "run"),
        "device": "cpu",
        "datasets": [{"path": path, "type": "text"}],
        "streaming": True,
        "shuffle_buffer_size": 50,
        "sequence_len": 128,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_steps": 4,
        "learning_rate": 5e-3,
        "lora_rank": 4,
        "resume_from_checkpoint": True,
        **changed,
    }


def start(place: Path, given: dict[str, object], command: str = "sft") -> subprocess.Popen[str]:
    file = place / f"{Path(str(given['output_dir'])).name}.yaml"
    file.write_text(json.dumps(given))
    words = [sys.executable, "-m", "surogate", command, str(file)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole(place: Path, given: dict[str, object], command: str = "sft") -> str:
    with start(place, given, command) as process:
        text = process.stdout.read()
    assert process.returncode == 0, text
    return text


def losses(output: Path) -> list[tuple[str, int, float]]:
    (log,) = output.glob("log-*.json")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    last = {(e["event"], e["step"]): e["loss"] for e in events if e["event"] in ("step", "evaluation")}
    return [(*key, loss) for key, loss in sorted(last.items())]


def bytes_below(folder: Path) -> int:
    total = 0
    # Folders and files may go while they are looked at.
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).stat().st_size if name != "README" else 0
            except FileNotFoundError:
                continue
    return total


def test_a_bucket_is_streamed_within_the_limit_of_the_disk(place, bucket):
    limit = 2 * len(shard(0)) + 1000
    most, seen = 0, set()
    with start(place, options(place, bucket, streaming_disk_limit=limit, max_steps=60)) as process:
        reader = threading.Thread(target=lambda: seen.add(process.stdout.read()), daemon=True)
        reader.start()
        while process.poll() is None:
            most = max(most, bytes_below(place / "streams"))
            time.sleep(0.01)
        reader.join()
    (text,) = seen
    assert process.returncode == 0, text
    assert 0 < most <= limit < SHARDS * len(shard(0)), most
    assert "streamed from 6 files" in text, text
    assert bytes_below(place / "streams") == 0, "what was fetched is removed"
    assert not (place / "rows").exists() and not (place / "objects").exists(), "nothing is kept elsewhere"
    local = options(place, str(place / "shards"), output_dir=str(place / "local"), max_steps=60)
    whole(place, local)
    assert losses(place / "run") == losses(place / "local"), "the same rows in the same order"


def test_a_killed_run_goes_on_bit_for_bit(place, bucket):
    straight = options(place, bucket, output_dir=str(place / "straight"), max_steps=60)
    whole(place, straight)
    killed = options(place, bucket, max_steps=60)
    for after in (5, 13):
        with start(place, killed) as process:
            for line in process.stdout:
                if (
                    f"checkpoint-{after - after % 4}" in line
                    or (place / "run" / f"checkpoint-{after - after % 4}").exists()
                ):
                    process.kill()
                    break
            process.stdout.read()
        assert process.returncode == -9
    text = whole(place, killed)
    assert losses(place / "run") == losses(place / "straight"), text
    left = time.monotonic() + 20
    while bytes_below(place / "streams") and time.monotonic() < left:
        time.sleep(0.1)
    assert bytes_below(place / "streams") == 0, "a killed run leaves nothing"


SLOW = "import time, surogate.storage.shards as of; of.fetch = lambda remote, path: time.sleep(60); of.main()"


def test_a_run_that_ends_waits_for_no_file(place):
    """The process that fetches ends with the run, whatever is on its way."""
    environment = {**os.environ, "SUROGATE_STREAMS": str(place / "streams")}
    words = [sys.executable, "-c", SLOW]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        print(json.dumps({"limit": 100, "files": [[["s3://bucket/a.jsonl", 10, ""]]]}), file=process.stdin)
        print(json.dumps({"request": 1, "get": [0, 0], "next": []}), file=process.stdin, flush=True)
        left = time.monotonic() + 30
        while not list((place / "streams").rglob("0-0")) and time.monotonic() < left:
            time.sleep(0.05)
        process.stdin.close()
        assert process.wait(30) == 0
    assert bytes_below(place / "streams") == 0


def test_ranks_take_each_document_once_and_a_split_of_a_step_may_change(place):
    alone = options(place, str(place / "shards"), output_dir=str(place / "alone"), max_steps=12)
    whole(place, alone)
    ranks = options(
        place,
        str(place / "shards"),
        output_dir=str(place / "ranks"),
        max_steps=12,
        gpus=2,
        gradient_accumulation_steps=1,
    )
    whole(place, ranks)
    pairs = list(zip(losses(place / "alone"), losses(place / "ranks"), strict=True))
    assert pairs and all(abs(a[2] - b[2]) < 1e-5 for a, b in pairs), pairs


def test_evaluation_takes_a_file_of_its_own(place):
    held_out = place / "held.jsonl"
    held_out.write_bytes(shard(99))
    given = options(
        place, str(place / "shards"), validation_datasets=[{"path": str(held_out), "type": "text"}], eval_steps=8
    )
    text = whole(place, given)
    assert [step for event, step, _ in losses(place / "run") if event == "evaluation"] != []
    assert "40 documents for evaluation" in text, text


def test_datasets_are_mixed_by_their_shares(place):
    sets = [
        {"path": str(place / "shards" / "train-00000.jsonl"), "type": "text"},
        {"path": str(place / "shards"), "type": "text"},
    ]
    text = whole(place, options(place, "", datasets=sets, interleave_probs=[0.25, 0.75]))
    assert "streamed from 7 files" in text, text


def test_the_python_trainer_streams_too(place, bucket):
    given = options(place, bucket, resume_from_checkpoint=False)
    with surogate.Trainer(given) as trainer:
        steps = list(trainer)
    assert len(steps) == STEPS and all(step["loss"] > 0 for step in steps)


def test_a_row_that_is_dropped_later_is_reported_once(place):
    with (place / "shards" / "train-00003.jsonl").open("a") as file:
        file.write("nonsense\nmore nonsense\n")
    text = whole(place, options(place, str(place / "shards"), max_steps=60, shuffle_buffer_size=20, shuffle=False))
    assert text.count("dropped a row of") == 1 and "train-00003.jsonl, row 41" in text, text


def test_a_resume_with_other_files_is_refused(place):
    given = options(place, str(place / "shards"), max_steps=8)
    whole(place, given)
    shutil.copy(place / "shards" / "train-00000.jsonl", place / "shards" / "train-00009.jsonl")
    with start(place, {**given, "max_steps": 12}) as process:
        text = process.stdout.read()
    assert process.returncode == 2 and "the documents are not those of the checkpoint" in text, text


def test_a_file_that_is_gone_ends_the_run_with_its_address(place, bucket, s3):
    put(s3, "/acme/lost/train-00000.jsonl", shard(0))
    put(s3, "/acme/lost/train-00001.jsonl", shard(1))
    listed = surogate.storage.buckets.listed("s3://acme/lost", None, "train", (".jsonl",))
    assert [(name, size) for name, size, _ in listed][1] == ("s3://acme/lost/train-00001.jsonl", len(shard(1)))
    put(s3, "/acme/lost/train-00001.jsonl", shard(2) * 2)

    name, size, version = listed[1]
    with pytest.raises(surogate.errors.RunError, match=r"train-00001.jsonl.*was replaced while it was read"):
        shards.fetch(shards.Remote(name, size, version), place / "x.jsonl")


def test_files_ahead_make_room_for_those_that_are_needed(tmp_path):
    from surogate.storage.shards import Remote, Shelf

    sets = [[Remote(f"a/{n}", 10, "") for n in range(4)], [Remote(f"b/{n}", 10, "") for n in range(4)]]
    shelf = Shelf(sets, 30, tmp_path, lambda remote, path: path.write_bytes(b"x" * remote.size) and None)
    first = shelf.get((0, 0), [(0, 1), (0, 2), (0, 3)])
    assert first.read_bytes() == b"x" * 10 and set(shelf.held) == {(0, 0), (0, 1), (0, 2)}
    shelf.get((1, 0), [(1, 1)])
    assert (1, 0) in shelf.held and (0, 0) in shelf.held and len(shelf.held) == 3
    shelf.release((0, 0))
    assert not first.exists() and (0, 0) not in shelf.held


def test_the_hub_is_streamed(place, monkeypatch):
    monkeypatch.setitem(
        test_data_hub.REPOSITORIES,
        "acme/shards",
        {f"data/train-{number:05}.jsonl": shard(number) for number in range(3)},
    )
    running = ThreadingHTTPServer(("127.0.0.1", 0), test_data_hub.Hub)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_address[1]}")
    monkeypatch.setenv("HF_HOME", str(place / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    try:
        text = whole(place, options(place, "acme/shards"))
    finally:
        running.shutdown()
        running.server_close()
    assert "streamed from 3 files" in text, text
    assert not list((place / "hf").rglob("*.jsonl")), "the hub's cache gets no shard"


@pytest.mark.parametrize(
    ("changed", "option", "words"),
    [
        ({"max_steps": -1}, "max_steps", "needs `max_steps`"),
        ({"validation_split_ratio": 0.1}, "validation_split_ratio", "does not go with `streaming: true`"),
        ({"eval_strategy": "epoch"}, "eval_strategy: epoch", "cannot be combined with `streaming: true`"),
        ({"save_strategy": "epoch"}, "save_strategy: epoch", "cannot be combined with `streaming: true`"),
        (
            {"datasets": [{"path": "examples", "type": "text", "samples": 3}]},
            "datasets[0].samples",
            "`max_steps` says how long",
        ),
        ({"datasets": [{"path": "examples", "type": "text", "repeats": 2}]}, "datasets[0].repeats", "does not go with"),
        ({"datasets": [{"path": "examples", "type": "text"}] * 2}, "interleave_probs", "needs `interleave_probs`"),
        ({"distributed": {"num_nodes": 2}}, "distributed.num_nodes: 2", "is not available yet with `streaming: true`"),
        (
            {"task": "distil", "teacher": "t", "beta": 0.0, "loss_top_k": 8, "precompute_teacher": True},
            "precompute_teacher: true",
            "cannot be combined with `streaming: true`",
        ),
        ({"streaming": False}, "shuffle_buffer_size", "needs `streaming: true`"),
        (
            {"streaming": False, "shuffle_buffer_size": 8192, "streaming_disk_limit": "1GiB"},
            "streaming_disk_limit",
            "needs `streaming: true`",
        ),
    ],
)
def test_what_does_not_go_with_a_stream_is_named(place, changed, option, words):
    given = options(place, str(place / "shards"), **changed)
    with start(place, given) as process:
        text = process.stdout.read()
    assert process.returncode == 2 and f"`{option}`" in text and words in text, text


def test_a_limit_below_the_largest_file_is_refused(place, bucket):
    with start(place, options(place, bucket, streaming_disk_limit=1000)) as process:
        text = process.stdout.read()
    assert process.returncode == 2 and "streaming_disk_limit" in text and "files are fetched whole" in text, text


def test_a_set_that_is_unfit_by_its_first_rows_is_refused(place):
    with pytest.raises((ConfigError, DataError), match="the type cannot be detected"):
        surogate.Trainer(
            options(place, "", datasets=[{"path": str(odd(place)), "type": "auto"}], resume_from_checkpoint=False)
        )


def odd(place: Path) -> Path:
    file = place / "odd.jsonl"
    file.write_text('{"x": 1}\n' * 5)
    return file


def test_the_data_check_shows_the_first_rows(place):
    text = whole(place, options(place, str(place / "shards")), "tokenize")
    assert "streamed from 6 files: the table is of the first rows, which become 50 documents" in text, text


def test_environment_variables_name_the_folder(place):
    assert os.environ["SUROGATE_STREAMS"] == str(shards.root())


class Stalled(Faulty):
    """A proxy of the server at which a file of the stream does not come."""

    is_asked, is_over = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if "train-00003" in self.path and self.path.startswith("/acme/shards/"):
            self.is_asked.set()
            self.is_over.wait(120)
        self.handle_one()


@pytest.fixture
def stalled(s3, bucket, monkeypatch):
    """Streams the bucket through the proxy."""
    front = ThreadingHTTPServer(("127.0.0.1", 0), Stalled)
    front.daemon_threads = True
    Stalled.upstream, Stalled.fault = s3, None
    Stalled.is_asked.clear()
    Stalled.is_over.clear()
    threading.Thread(target=front.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{front.server_address[1]}")
    yield bucket
    Stalled.is_over.set()
    front.shutdown()
    front.server_close()


@pytest.mark.parametrize("whom", ["the run", "all its processes"])
def test_a_signal_is_answered_while_a_file_does_not_come(place, stalled, whom):
    """The run has done the steps of the files before it."""
    given = options(place, stalled, shuffle=False, shuffle_buffer_size=40, max_steps=60, save_steps=1000)
    with start(place, given) as process:
        assert Stalled.is_asked.wait(60)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        # Until it has trained on everything that came.
        before = -1
        while (now := sum("Step" in line for line in lines)) != before or now == 0:
            before = now
            time.sleep(2)
        begin = time.monotonic()
        for number in [*(descendants(process.pid) if whom != "the run" else ()), process.pid]:
            os.kill(number, signal.SIGTERM)
        try:
            assert process.wait(60) == 143, "".join(lines)
        finally:
            process.kill()
        assert time.monotonic() - begin < 30
    (saved,) = (place / "run").glob("checkpoint-*")
    assert bytes_below(place / "streams") == 0
    Stalled.is_over.set()
    whole(place, given)
    straight = options(place, str(place / "shards"), output_dir=str(place / "straight"), shuffle=False, shuffle_buffer_size=40)
    whole(place, {**straight, "max_steps": 60, "save_steps": 1000})
    assert losses(place / "run") == losses(place / "straight"), saved


def test_the_end_of_a_run_waits_for_no_file(place, stalled):
    """The next file is requested ahead, and the last step needs none of it."""
    given = options(place, stalled, shuffle=False, shuffle_buffer_size=40, max_steps=8)
    with start(place, given) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert Stalled.is_asked.is_set() and not Stalled.is_over.is_set()


def test_a_folder_that_another_process_removes_meanwhile_stops_no_one(tmp_path, monkeypatch):
    left, locked = tmp_path / ".stream.export.aaaa.tmp", files._locked
    left.mkdir()
    (left / "file").touch()

    def gone(folder):
        if folder == left:
            shutil.rmtree(left)
        return locked(folder)

    monkeypatch.setattr(files, "_locked", gone)
    with files.folder_beside(tmp_path / "stream") as folder:
        assert folder.is_dir() and not left.exists()
