"""Event files for TensorBoard, with the figures of the metrics file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ttrain.errors import UsageError
from ttrain.store import remove_tree
from ttrain.train.callbacks import Callback, LogRecord


class TensorBoard(Callback):
    """Writes under `directory` what the metrics file says, in fp32, as TensorBoard keeps it.

    A run that continues writes the events anew from the metrics file, so that no step is there twice; so the callback of
    that file comes before this one. A figure that is no number is left out.
    """

    def __init__(self, directory: Path, metrics: Path) -> None:
        """Raises UsageError where TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise UsageError(
                "runtime.tensorboard is true, but TensorBoard is not installed; "
                "run: pip install 'ttrain[tb]', or set runtime.tensorboard=false"
            )
        self._directory, self._metrics = directory, metrics
        self._writer: Any = None

    def start(self, step: int, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        remove_tree(self._directory)
        self._writer = SummaryWriter(str(self._directory))
        for line in self._metrics.read_text().splitlines():
            row = json.loads(line)
            self._add(row["metrics"], row["step"], row["time"])

    def log(self, record: LogRecord) -> None:
        self._add(record.metrics, record.step, None)

    def saved(self, step: int) -> None:
        self._writer.flush()

    def end(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()

    def failed(self, error: BaseException) -> None:
        self.end(0)

    def _add(self, metrics: Mapping[str, float | None], step: int, seconds: float | None) -> None:
        for name, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, step, walltime=seconds)
