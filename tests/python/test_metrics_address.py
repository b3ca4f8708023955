"""`metrics_address` and `log_format`: what a scraper and a log collector get while a run goes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import REPOSITORY
from surogate.logs.prometheus import METRICS, Metrics, parse
from test_trackers import options

#: A line of Prometheus' text format.
SAMPLE = re.compile(r'[a-zA-Z_:][\w:]*(\{(\w+="(\\.|[^"\\])*",?)*\})? (NaN|[+-]Inf|-?\d+(\.\d+)?(e[+-]?\d+)?)')


def free_port() -> int:
    with socket.socket() as of:
        of.bind(("127.0.0.1", 0))
        return of.getsockname()[1]


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return answer.read().decode()


def values(text: str) -> dict[str, float]:
    for line in text.splitlines():
        assert line.startswith(("# HELP surogate_", "# TYPE surogate_")) or SAMPLE.fullmatch(line), line
    return {line.split()[0]: float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#")}


def test_a_run_is_scraped_while_it_goes(tmp_path):
    port = free_port()
    words = options(tmp_path, **{"metrics_address": str(port), "max-steps": 200, "log_gpu_util": 5, "save-steps": 20})
    run = subprocess.Popen([sys.executable, "-m", "surogate", *words, "--quiet"], stderr=subprocess.PIPE, text=True)
    seen: list[dict[str, float]] = []
    while run.poll() is None:
        try:
            seen.append(values(get(f"http://127.0.0.1:{port}/metrics")))
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.05)
    assert run.returncode == 0 and run.stderr
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics" in run.stderr.read()
    last = seen[-1]
    assert 0 < last["surogate_steps_done"] <= last["surogate_steps_planned"] == 200
    assert last["surogate_loss"] > 0 and last["surogate_tokens_per_second"] > 0 and last["surogate_tokens_total"] > 0
    assert last["surogate_failures_total"] == last["surogate_updates_suppressed_total"] == 0
    assert last["surogate_checkpoint_step"] % 20 == 0 and last["surogate_checkpoint_bytes"] > 0
    assert 0 <= last["surogate_data_wait_seconds"] < 60
    assert 0 <= last["surogate_device_utilization_ratio"] <= 1
    steps = [of["surogate_steps_done"] for of in seen]
    assert steps == sorted(steps) and len(set(steps)) > 1, "the values are of the run as it is"


def test_metrics_follow_the_log_and_forget_what_is_unknown():
    said: list[str] = []
    metrics = Metrics("0", said.append)
    address = said[0].split()[-1]
    opening = {"manifest": {"run": 'a "b"\\c', "steps": 9, "model": "m", "surogate": "1"}, "time": "2026-01-01T00:00:00Z"}
    step = {"event": "step", "loss": 2.5, "tokens": 7, "mfu": 0.5, "seconds": 0.1, "time": "2026-01-01T00:00:01Z"}
    try:
        metrics.take([{"event": "start", "step": 0, **opening}, {**step, "step": 0}, {**step, "step": 1, "applied": False}])
        first = values(get(address))
        assert 'run="a \\"b\\"\\\\c"' in get(address)
        metrics.take([{**step, "step": 2, "loss": float("nan"), "mfu": None}, {"event": "failed", "time": None}])
        metrics.take([{"event": "resume", "step": 2, **opening}])
        second = get(address)
        assert "surogate_loss NaN" in second and "surogate_mfu_ratio" not in second
        found = values(second)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address.replace("/metrics", "/"))
    finally:
        metrics.close(None)
    assert (first["surogate_steps_done"], first["surogate_tokens_total"], first["surogate_mfu_ratio"]) == (2, 14, 0.5)
    assert first["surogate_updates_suppressed_total"] == 1 and first["surogate_last_event_timestamp_seconds"] == 1767225601
    assert (found["surogate_failures_total"], found["surogate_resumes_total"], found["surogate_steps_done"]) == (1, 1, 2)


def test_a_port_alone_is_of_the_loopback():
    assert [parse("9400"), parse("0.0.0.0:1"), parse("[::]:2")] == [("127.0.0.1", 9400), ("0.0.0.0", 1), ("::", 2)]


def test_an_address_in_use_is_reported_and_the_run_goes_on(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = options(tmp_path, **{"metrics_address": address})
        done = subprocess.run([sys.executable, "-m", "surogate", *words, "--quiet"], capture_output=True, text=True)
    message = f"`metrics_address: {address}` cannot be used, so no metrics are served: Address already in use"
    assert done.returncode == 0 and message in done.stderr, done.stderr


@pytest.mark.parametrize("address", ["no-such-host.invalid:9400", "a..b:9400", "192.0.2.1:9400"])
def test_an_address_of_no_network_here_is_named_and_ends_nothing(address):
    said: list[str] = []
    metrics = Metrics(address, said.append)
    metrics.take([{"event": "failed", "time": None}])
    metrics.close(None)
    assert len(said) == 1 and f"`metrics_address: {address}` cannot be used" in said[0], said


@pytest.mark.parametrize("address", ["here", ":x", "host:", "1.2.3.4:99999"])
def test_what_is_no_address_is_refused_before_the_run(tmp_path, address):
    words = options(tmp_path, **{"metrics_address": address})
    done = subprocess.run([sys.executable, "-m", "surogate", *words], capture_output=True, text=True)
    assert done.returncode == 2 and "`metrics_address` is" in done.stderr and "host:port" in done.stderr


def test_log_format_json_prints_the_log_and_nothing_else(tmp_path):
    words = options(tmp_path, **{"log_format": "json"})
    done = subprocess.run([sys.executable, "-m", "surogate", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "output").glob("log-*.json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [json.loads(line) for line in log.read_text().splitlines()]


def test_the_dashboard_asks_for_metrics_that_a_run_serves():
    dashboard = json.loads((REPOSITORY / "deploy/grafana.json").read_text())
    source = Path(sys.modules[Metrics.__module__].__file__).read_text()
    served = {name for fields in METRICS.values() for name, _, _ in fields.values()}
    served |= set(re.findall(r'self\._(?:set|add)\("(\w+)"', source)) | {"run_info"}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for text in expressions for name in re.findall(r"surogate_(\w+)", text)}
    assert asked <= served, asked - served
    assert {"loss", "tokens_per_second", "mfu_ratio", "memory_bytes", "device_utilization_ratio", "failures_total"} <= asked
    boxes = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in boxes for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels do not overlap"
