"""Event files for TensorBoard, written by its own package."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from ..logs.stream import OPENINGS, Event
from . import samples, scalars


class TensorBoard:
    """Files in the folder `tensorboard` of the run: `tensorboard --logdir` on it, or on a folder of runs."""

    interval = 1.0
    wants_all = False

    def __init__(self, output: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(output / "tensorboard"))

    def take(self, events: list[Event]) -> None:
        """Writes metrics and samples as TensorBoard summaries."""
        from tensorboard.compat.proto.event_pb2 import Event as Entry
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        for event in events:
            wall = datetime.fromisoformat(event["time"]).timestamp()
            if event["event"] in OPENINGS:
                # Steps of an earlier process after this one are repeated.
                begin = SessionLog(status=SessionLog.START)
                self._writer.add_event(Entry(wall_time=wall, step=event["step"] + 1, session_log=begin))
            step, numbers = scalars(event)
            if numbers:
                values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
                self._writer.add_event(Entry(wall_time=wall, step=step, summary=Summary(value=values)))
            step, texts = samples(event)
            if texts:
                values = [_text(f"samples/{number}", prompt, text) for number, (prompt, text) in enumerate(texts)]
                self._writer.add_event(Entry(wall_time=wall, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, end: Event | None) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def _text(tag: str, prompt: str, answer: str) -> Any:
    """A prompt with its answer, as the plugin for texts reads them."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.util.tensor_util import make_tensor_proto

    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = make_tensor_proto([prompt.encode() + answer.encode()])
    return Summary.Value(tag=tag, metadata=plugin, tensor=tensor)
