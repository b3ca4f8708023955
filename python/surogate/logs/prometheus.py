"""The metrics of a run as Prometheus text, over HTTP: what `metrics_address` asks for.

Keeps the newest value of each metric; Prometheus keeps the history. Reads events, and knows no option.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .stream import ENDS, OPENINGS, Event

#: Event → field → (metric, type, help). Shares are from 0 to 1, times seconds, sizes bytes, as Prometheus asks for.
METRICS: dict[str, dict[str, tuple[str, str, str]]] = {
    "step": {
        "epoch": ("epoch", "gauge", "Passes over the training data."),
        "loss": ("loss", "gauge", "Training loss of the newest step."),
        "grad_norm": ("grad_norm", "gauge", "Gradient norm of the newest step, before clipping."),
        "learning_rate": ("learning_rate", "gauge", "Learning rate of the newest step."),
        "seconds": ("step_seconds", "gauge", "Duration of the newest step."),
        "data_wait_seconds": ("data_wait_seconds", "gauge", "Time that the newest step waited for data."),
        "tokens_per_second": ("tokens_per_second", "gauge", "Trained tokens per second in the newest step."),
        "mfu": ("mfu_ratio", "gauge", "Model FLOPs utilization of the newest step."),
        "ceiling": ("ceiling_ratio", "gauge", "Share of the measured matrix-multiplication rate."),
        "memory": ("memory_bytes", "gauge", "Memory in use on the device."),
        "loss_scale": ("loss_scale", "gauge", "Loss scale, with float16."),
        "reward": ("reward", "gauge", "Mean reward of the newest step's answers."),
        "busiest_expert": ("busiest_expert_ratio", "gauge", "Load of the busiest expert, in even loads."),
    },
    "evaluation": {
        "loss": ("eval_loss", "gauge", "Loss of the newest evaluation."),
        "reward": ("eval_reward", "gauge", "Mean reward of the newest evaluation's answers."),
        "seconds": ("eval_seconds", "gauge", "Duration of the newest evaluation."),
    },
    "device": {
        "utilization": ("device_utilization_ratio", "gauge", "Utilization of the device."),
        "memory_utilization": ("device_memory_utilization_ratio", "gauge", "Share of time with memory traffic."),
        "power_watts": ("device_power_watts", "gauge", "Power draw of the device."),
        "temperature_celsius": ("device_temperature_celsius", "gauge", "Temperature of the device."),
        "memory_used": ("device_memory_used_bytes", "gauge", "Memory in use on the device, by its driver."),
        "memory_total": ("device_memory_total_bytes", "gauge", "Memory of the device."),
    },
    "saving": {"held_seconds": ("checkpoint_held_seconds", "gauge", "Time that training waited for the newest checkpoint.")},
    "checkpoint": {
        "step": ("checkpoint_step", "gauge", "Steps in the newest complete checkpoint."),
        "bytes": ("checkpoint_bytes", "gauge", "Bytes of tensors in the newest checkpoint."),
        "seconds": ("checkpoint_seconds", "gauge", "Duration of the newest checkpoint, copy and write."),
    },
}

#: Seconds that a client may take for its request.
TIMEOUT = 5.0

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The newest values. Thread-safe: events come from one thread, requests from others."""

    interval = 0.5
    wants_all = True

    def __init__(self, address: str, say: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, tuple[str, str, float]] = {}
        self._labels: dict[str, str] = {}
        #: None where the address cannot be used.
        self._server: ThreadingHTTPServer | None = None
        host, port = parse(address)
        try:
            self._server = _server(host, port, self.text)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            say(f"`metrics_address: {address}` cannot be used, so no metrics are served: {why}")
            return
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        say(f"metrics for Prometheus: http://{shown}:{self._server.server_address[1]}/metrics")

    def take(self, events: list[Event]) -> None:
        """Updates the served metrics from events."""
        with self._lock:
            for event in events:
                self._take(event)

    def close(self, end: Event | None) -> None:
        """Stops the server and frees its port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _take(self, event: Event) -> None:
        kind = event["event"]
        for field, (name, form, text) in METRICS.get(kind, {}).items():
            self._set(name, form, text, event.get(field))
        if kind in OPENINGS:
            manifest = event.get("manifest") or {}
            facts = {"run": manifest.get("run"), "task": manifest.get("task"), "model": manifest.get("model")}
            self._labels = {**{name: str(of) for name, of in facts.items() if of}, "version": str(manifest.get("surogate"))}
            self._set("steps_planned", "gauge", "Steps of the run.", manifest.get("steps"))
            self._set("steps_done", "gauge", "Steps that are done.", event.get("step") or 0)
            self._add("resumes_total", "Times that the run went on from a checkpoint.", kind == "resume")
            self._add("updates_suppressed_total", "Steps whose gradient was not finite, without an update.", 0)
            self._add("failures_total", "Processes of the run that ended with an error.", 0)
            self._add("tokens_total", "Trained tokens, those of repeated steps included.", 0)
        elif kind == "step":
            self._set("steps_done", "gauge", "Steps that are done.", event["step"] + 1)
            self._add("tokens_total", "Trained tokens, those of repeated steps included.", event.get("tokens") or 0)
            suppressed = event.get("applied") is False
            self._add("updates_suppressed_total", "Steps whose gradient was not finite, without an update.", suppressed)
        elif kind in ENDS:
            self._add("failures_total", "Processes of the run that ended with an error.", kind == "failed")
        if (stamp := _seconds(event.get("time"))) is not None:
            self._set("last_event_timestamp_seconds", "gauge", "Time of the newest event, in seconds since 1970.", stamp)

    def _set(self, name: str, form: str, text: str, value: Any) -> None:
        """A value that is null is not known now, so an older one does not stay."""
        if isinstance(value, (int, float)):
            self._values[name] = (form, text, float(value))
        else:
            self._values.pop(name, None)

    def _add(self, name: str, text: str, more: float) -> None:
        before = self._values.get(name, ("", "", 0.0))[2]
        self._values[name] = ("counter", text, before + more)

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        with self._lock:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in self._labels.items())
            lines = ["# HELP surogate_run_info The run.", "# TYPE surogate_run_info gauge", f"surogate_run_info{{{labels}}} 1"]
            for name, (form, text, value) in self._values.items():
                lines += [f"# HELP surogate_{name} {text}", f"# TYPE surogate_{name} {form}", f"surogate_{name} {_number(value)}"]
        return "\n".join(lines) + "\n"


def parse(address: str) -> tuple[str, int]:
    """Host and port of an address; of a port alone, the loopback."""
    host, _, port = address.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


def _server(host: str, port: int, text: Callable[[], str]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT
        server_version, sys_version = "surogate", ""

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = (text() if is_known else "see /metrics\n").encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", TYPE if is_known else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    return Server((host, port), Handler)


def _seconds(time: Any) -> float | None:
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError):
        return None


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(str(value), repr(value).removesuffix(".0"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
