"""The progress of a run in the status of a TrainJob: what a server of Kubeflow Trainer receives, and that none ends a run."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from surogate.logs import kubeflow
from test_trackers import options

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/stories/status"


class Status(BaseHTTPRequestHandler):
    """Keeps the reports."""

    received: list[tuple[float, str, str, dict]] = []
    answer = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).received.append((time.monotonic(), self.path, self.headers["Authorization"], body))
        self.send_response(type(self).answer)
        if type(self).answer == 307:
            self.send_header("Location", f"https://127.0.0.1:{self.server.server_address[1]}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate for 127.0.0.1 and its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trainer")])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = made.add_extension(names, False).add_extension(x509.BasicConstraints(True, None), True)
    folder = tmp_path_factory.mktemp("certificate")
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "ca.crt").write_bytes(pem)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(key.private_bytes(*form))
    return folder


@pytest.fixture
def server(certificate, tmp_path, monkeypatch):
    """The server of a controller, whose variables this process has; gives the file of its token."""
    front = ThreadingHTTPServer(("127.0.0.1", 0), Status)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "ca.crt", certificate / "key")
    front.socket = context.wrap_socket(front.socket, server_side=True)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    Status.received, Status.answer = [], 200
    token = tmp_path / "token"
    token.write_text("first\n")
    monkeypatch.setenv(kubeflow.URL, f"https://127.0.0.1:{front.server_address[1]}{PATH}")
    monkeypatch.setenv(kubeflow.CERTIFICATE, str(certificate / "ca.crt"))
    monkeypatch.setenv(kubeflow.TOKEN, str(token))
    yield token
    front.shutdown()
    front.server_close()


def step(number: int, **fields: object) -> dict:
    return {"event": "step", "step": number, "loss": 2.0, "seconds": 0.5, "time": "2026-01-01T00:00:00Z", **fields}


OPENING = {"event": "start", "step": 0, "manifest": {"steps": 10}}


def test_a_run_reports_its_progress_at_most_every_five_seconds(server, tmp_path):
    words = options(tmp_path, **{"max-steps": 5, "save-steps": 100})
    done = subprocess.run([sys.executable, "-m", "surogate", *words, "--quiet"], capture_output=True, text=True)
    assert done.returncode == 0 and "Kubeflow" not in done.stderr, done.stderr
    times = [time for time, *_ in Status.received]
    assert times and all(later - earlier >= 4.9 for earlier, later in zip(times, times[1:], strict=False))
    assert {(path, token) for _, path, token, _ in Status.received} == {(PATH, "Bearer first")}
    status = Status.received[-1][3]["trainerStatus"]
    assert status["progressPercentage"] == 100 and status["estimatedRemainingSeconds"] == 0
    assert datetime.datetime.fromisoformat(status["lastUpdatedTime"])
    metrics = {of["name"]: of["value"] for of in status["metrics"]}
    assert all(isinstance(value, str) for value in metrics.values()) and float(metrics["train/loss"]) > 0


def test_a_report_has_the_newest_values_and_a_new_token(server, monkeypatch):
    said: list[str] = []
    progress = kubeflow.Progress(said.append)
    progress.take([OPENING, step(0), step(1, loss=1.5)])
    progress.take([step(2)])
    assert len(Status.received) == 1, "five seconds have not passed"
    status = Status.received[0][3]["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (20, 4)
    assert {"name": "train/loss", "value": "1.5"} in status["metrics"]
    server.write_text("second")
    monkeypatch.setattr(kubeflow, "INTERVAL", 0.0)
    progress.close(None)
    assert Status.received[1][2] == "Bearer second" and Status.received[1][3]["trainerStatus"]["progressPercentage"] == 30
    assert said == []


@pytest.mark.parametrize(
    "fault", ["refused", "untrusted", "no token", "no certificate", "two lines", "elsewhere", "redirect", "no HTTP", "no URL"]
)
def test_no_failure_ends_a_run_and_each_is_reported_once(server, monkeypatch, fault):
    monkeypatch.setattr(kubeflow, "INTERVAL", 0.0)
    if fault == "refused":
        Status.answer = 403
    elif fault == "untrusted":
        monkeypatch.delenv(kubeflow.CERTIFICATE)
    elif fault == "no token":
        server.unlink()
    elif fault == "no certificate":
        monkeypatch.setenv(kubeflow.CERTIFICATE, "/no/such/file")
    elif fault == "two lines":
        server.write_text("secret\nsecret")
    elif fault == "no HTTP":
        monkeypatch.setenv(kubeflow.URL, f"http://127.0.0.1:{speaking(b'SSH-2.0-OpenSSH')}/status")
    elif fault == "no URL":
        monkeypatch.setenv(kubeflow.URL, "https://127.0.0.1:port/status")
    elif fault == "redirect":
        Status.answer = 307
    else:
        monkeypatch.setenv(kubeflow.URL, "https://127.0.0.1:9/status")
    said: list[str] = []
    progress = kubeflow.Progress(said.append)
    progress.take([OPENING, step(0)])
    progress.take([step(1)])
    progress.close(None)
    assert len(said) == 1 and "was not reported to Kubeflow Trainer" in said[0] and "the run goes on" in said[0], said
    assert "secret" not in said[0] and (fault != "no certificate" or "/no/such/file" in said[0])
    assert not any(path == "/elsewhere" for _, path, *_ in Status.received), "a token goes to no other server"


def speaking(answer: bytes) -> int:
    """The port of a server that does not speak HTTP, for three connections."""
    listener = socket.create_server(("127.0.0.1", 0))

    def speak() -> None:
        with listener:
            for _ in range(3):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer + b"\r\n")

    threading.Thread(target=speak, daemon=True).start()
    return listener.getsockname()[1]


def test_without_the_variables_nothing_is_reported(monkeypatch):
    monkeypatch.delenv(kubeflow.URL, raising=False)
    assert not kubeflow.is_requested()
