"""A browser without a window, driven by its own protocol: pages are opened, read, typed into and looked at."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

#: Names of programs that speak the protocol of Chromium.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")

PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)

#: Seconds that a page may take for what is waited for.
PATIENCE = 20.0


class Browser:
    """A browser with one page."""

    def __init__(self, profile: Path) -> None:
        from websockets.sync.client import connect

        words = [str(PROGRAM), "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"]
        # Its own sandbox needs namespaces, which containers do not have; the pages are ours.
        words += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server", "about:blank"]
        # A pipe that no one reads to its end would fill up.
        said = profile.with_suffix(".log")
        with said.open("w") as log:
            self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log)
        found = None
        while found is None:
            found = re.search(r"listening on (ws://\S+)", said.read_text())
            assert self._process.poll() is None, said.read_text()
            time.sleep(0.05)
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(found[1], max_size=None, proxy=None))
        self._numbers = itertools.count(1)
        self._session: str | None = None
        #: Errors of scripts and refusals of rules that the page has reported.
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and keeps errors of the page that are reported meanwhile."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.errors.clear()

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str, is_it: Callable[[Any], bool] = bool) -> Any:
        """Waits until an expression has a value that is wanted, and gives it."""
        end = time.monotonic() + PATIENCE
        while True:
            value = self.value(expression)
            if is_it(value):
                return value
            assert time.monotonic() < end, f"{expression} stayed {value!r}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Types into what has the focus, as a keyboard does."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0, text: str = "") -> None:
        of = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **of)
        self.call("Input.dispatchKeyEvent", type="keyUp", **of)

    def click(self, selector: str) -> None:
        """Clicks on the middle of an element, where a mouse would hit what is above it."""
        box = f"JSON.stringify(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        place = json.loads(self.value(box))
        at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def look(self, width: int, scheme: str, is_small: bool) -> None:
        """Shows the page in a window of a width, with light or dark colors."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=is_small)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def close(self) -> None:
        self._open.close()
        self._process.terminate()
        self._process.wait(10)
