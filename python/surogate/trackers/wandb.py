"""Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..logs.stream import OPENINGS, Event
from . import samples, scalars


class Wandb:
    """One run of the service per run: a resumed run continues it."""

    interval = 1.0
    wants_all = False

    def __init__(self, spec: dict[str, Any], output: Path) -> None:
        self._spec, self._output = spec, output
        self._run: Any = None

    def take(self, events: list[Event]) -> None:
        """Logs metrics and samples to the W&B run."""
        for event in events:
            if event["event"] in OPENINGS:
                self._open(event)
            step, numbers = scalars(event)
            if numbers:
                self._run.log({**numbers, "step": step})
            step, texts = samples(event)
            if texts:
                import wandb

                rows = [[step, prompt, text] for prompt, text in texts]
                self._run.log({"samples": wandb.Table(["step", "prompt", "answer"], rows), "step": step})

    def _open(self, event: Event) -> None:
        import wandb

        manifest = event["manifest"]
        self._run = wandb.init(
            project=self._spec["project"],
            name=self._spec["name"] or manifest["run"],
            id=manifest["run_id"],
            resume="allow",
            dir=str(self._output),
            config={**event["options"], "manifest": manifest},
            settings=wandb.Settings(console="off", silent=True),
        )
        # Curves are drawn over steps, which a resumed run may repeat.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            self._spec["say"](f"wandb: {self._run.url}")

    def close(self, end: Event | None) -> None:
        """Finishes the W&B run: exit code 0 if training finished, otherwise 1."""
        if self._run is not None:
            self._run.finish(exit_code=0 if end and end["event"] == "finished" else 1)
