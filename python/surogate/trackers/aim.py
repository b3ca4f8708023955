"""Aim: a repository on this machine or on a server of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..logs.stream import OPENINGS, Event
from ..storage import files
from . import samples, scalars

#: File in the run's folder that holds the name assigned by Aim.
NOTE = ".aim-run"


class Aim:
    """One run of the service per run: a resumed run continues it."""

    interval = 1.0
    wants_all = False

    def __init__(self, spec: dict[str, Any], output: Path) -> None:
        self._spec, self._note = spec, output / NOTE
        self._run: Any = None

    def take(self, events: list[Event]) -> None:
        """Tracks metrics and samples as values of the Aim run."""
        for event in events:
            if event["event"] in OPENINGS:
                self._open(event)
            step, numbers = scalars(event)
            for name, number in numbers.items():
                group, _, metric = name.partition("/")
                self._run.track(number, name=metric, step=step, epoch=event.get("epoch"), context={"subset": group})
            step, texts = samples(event)
            if texts:
                import aim

                found = [aim.Text(prompt + text) for prompt, text in texts]
                self._run.track(found, name="samples", step=step, epoch=None, context={"subset": "eval"})

    def _open(self, event: Event) -> None:
        import aim

        continues = event["event"] == "resume" and self._note.is_file()
        self._run = aim.Run(
            run_hash=self._note.read_text().strip() if continues else None,
            repo=self._spec["repo"],
            experiment=self._spec["experiment"],
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        files.replace(self._note, f"{self._run.hash}\n")
        self._run.name = self._spec["name"] or event["manifest"]["run"]
        self._run["options"] = _plain(event["options"])

    def close(self, end: Event | None) -> None:
        """Closes the Aim run if one was opened."""
        if self._run is not None:
            self._run.close()


def _plain(value: Any) -> Any:
    """Aim keeps no null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "null" if value is None else value
