"""The context in which a stage's process runs: all that it gets apart from its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import Runtime
from ttrain.core.files import ProgressWriter

Figures = dict[str, Any]  # of a stage, as JSON for its manifest
Inputs = Mapping[str, Path]  # outputs of other stages, by the names of the inputs


@dataclass(frozen=True)
class StageContext:
    """Inputs, output and surroundings of one stage. A stage writes under `output` only."""

    inputs: Inputs
    files: Mapping[str, list[str]]
    arguments: Mapping[str, str]
    output: Path
    runtime: Runtime
    progress: ProgressWriter
    stop_requested: Callable[[], bool]
    groups: Mapping[str, list[int]] = field(
        default_factory=dict
    )  # which weighted source each of `files` belongs to
    weights: Sequence[float] = ()  # of those sources; empty: all rows alike
    labels: Mapping[str, str] = field(
        default_factory=dict
    )  # stage, run and experiment, for loggers of other services
    home: Path | None = None  # where what is measured of this machine is remembered; None: nowhere
    reuse: tuple[
        str, ...
    ] = ()  # earlier outputs of the stage, parts of which may be taken as they are

    @property
    def run_directory(self) -> Path:
        """Directory of logs, curves and quarantine: part of the artifact, but of no key."""
        directory = self.output / "run"
        directory.mkdir(parents=True, exist_ok=True)
        return directory
