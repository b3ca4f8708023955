"""The progress of a run for Kubeflow Trainer (KEP-2779): percentage, time left and metrics in the status of its TrainJob.

The controller sets the variables that say where to. Reports at most every `INTERVAL` seconds; no failure ends anything.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..trackers import scalars
from .stream import OPENINGS, Event

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))

#: Seconds between reports, at least.
INTERVAL = 5.0

#: Seconds that the server may take.
TIMEOUT = 5.0

#: Weight of the newest step in the mean time of a step.
NEWEST = 0.1


def is_requested() -> bool:
    """True if the process is in a TrainJob whose controller takes reports."""
    return bool(os.environ.get(URL))


class Progress:
    """Sends what is newest."""

    interval = 1.0
    wants_all = False

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._total: int | None = None
        self._done = 0
        self._step_seconds: float | None = None
        self._metrics: dict[str, float] = {}
        self._sent = float("-inf")
        self._is_new = False
        self._has_failed = False

    def take(self, events: list[Event]) -> None:
        """Updates progress and metrics from events, and sends them when the interval has passed."""
        for event in events:
            kind = event["event"]
            if kind in OPENINGS:
                self._total = (event.get("manifest") or {}).get("steps")
                self._done = event.get("step") or 0
            elif kind == "step":
                self._done = event["step"] + 1
                seconds, before = event["seconds"], self._step_seconds
                self._step_seconds = seconds if before is None else before + NEWEST * (seconds - before)
            self._metrics |= scalars(event)[1]
            self._is_new = True
        # The events in between are left out: the status has only the newest values.
        if self._is_new and time.monotonic() >= self._sent + INTERVAL:
            self._send()

    def close(self, end: Event | None) -> None:
        """The last values, as soon as they may be sent."""
        if self._is_new:
            time.sleep(max(0.0, self._sent + INTERVAL - time.monotonic()))
            self._send()

    def status(self) -> dict[str, Any]:
        """The body of a report."""
        found: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if self._total:
            found["progressPercentage"] = min(100, 100 * self._done // self._total)
            if self._step_seconds is not None:
                found["estimatedRemainingSeconds"] = round(max(0, self._total - self._done) * self._step_seconds)
        found["metrics"] = [{"name": name, "value": f"{value:.8g}"} for name, value in self._metrics.items()]
        return {"trainerStatus": found}

    def _send(self) -> None:
        self._sent, self._is_new = time.monotonic(), False
        try:
            # The token expires, and the system replaces its file.
            token = Path(os.environ[TOKEN]).read_text(encoding="ascii").strip()
            if not token.isprintable():
                raise ValueError(f"the token in {os.environ[TOKEN]} is not one line")
            request = urllib.request.Request(
                os.environ[URL],
                data=json.dumps(self.status()).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                method="POST",
            )
            context = _trusting(os.environ.get(CERTIFICATE))
            opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects())
            with opener.open(request, timeout=TIMEOUT):
                self._has_failed = False
        except (OSError, KeyError, ValueError, http.client.HTTPException) as error:
            if not self._has_failed:
                reason = f"{TOKEN} is not set" if isinstance(error, KeyError) else f"{error}"
                self._say(f"the progress was not reported to Kubeflow Trainer: {reason}; the run goes on")
            # Once for each row of failures; the next report has newer values.
            self._has_failed, self._is_new = True, True


def _trusting(certificate: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificate)
    except OSError as error:
        raise OSError(f"the certificate {certificate} cannot be read: {error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token goes to no other server."""

    def redirect_request(self, *_: Any) -> None:
        return None
