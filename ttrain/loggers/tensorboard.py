"""Event files for TensorBoard under `run/tensorboard`, with the figures of the metrics file as the fp32 that it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


@final
class EventFiles:
    """A new event file; a continued training writes it from its first row again, so that no step is there twice."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.steps: dict[str, int] = {}
        directory = Path(task["directory"]) / "tensorboard"
        shutil.rmtree(directory, ignore_errors=True)
        self._writer = EventFileWriter(str(directory))

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=seconds, step=step, summary=summary))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Nothing: its files hold figures only, the texts are in `run/samples` beside them."""

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


open_run = EventFiles
