"""Runs as they are read back: plain values, and curves and texts that are fetched on demand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from ttrain.core.files import JsonObject, parse_object
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Manifest
from ttrain.store.runs import MetricRow, read_rows
from ttrain.tracking.artifact_source import MlflowSource
from ttrain.tracking.calls import attempt, clean
from ttrain.tracking.uploads import local_path

Result = TypeVar("Result")

CURVES = ("metrics.jsonl", "system*.jsonl")  # under run/
TOKENS = "tokens"
MACHINE_PREFIX = "system/"  # metrics whose steps are seconds of the stage's time
LARGEST_TEXT = 4 << 20  # bytes of a file that are read as a text


class Point(NamedTuple):
    """One point of a curve. `value` is NaN if the run had none (a loss that is NaN or infinite)."""

    step: int
    tokens: float | None  # trained on up to this step; None if the run does not count them
    time: float  # seconds since 1970
    value: float


@dataclass(frozen=True)
class StageView:
    """One stage of a run. A cached stage has the values of the run that made it, `made_by`."""

    stage: str
    key: str | None
    status: str  # completed, cached, failed, interrupted, crashed, running, pending, ...
    cached: bool
    made_by: str | None  # name of the pipeline's run
    run_id: str | None  # MLflow's
    seconds: float | None  # of building it
    ended: float | None  # seconds since 1970; None if another run made it, or it has not ended
    artifact_uri: str | None = None
    record: JsonObject = field(default_factory=dict, repr=False)  # from the run's record: why, error, log, ...
    manifest: Manifest = field(default_factory=dict, repr=False)  # of its artifact; empty if that is not here


@dataclass(frozen=True)
class RunView:
    """One run of a pipeline, with its stages in their order."""

    name: str  # as `ttrain pipeline status` lists it
    run_id: str | None  # MLflow's; None if it was not tracked
    pipeline: str
    status: str  # completed, failed, interrupted, crashed, running or cached
    started: float  # seconds since 1970
    seconds: float | None
    params: Mapping[str, str]  # all settings, with dotted names
    metrics: Mapping[str, float]
    stages: Mapping[str, StageView]
    notes: tuple[str, ...]  # what could not be read, and what was read instead
    record: JsonObject = field(repr=False)  # the whole record in the home; empty if there is none
    reader: StageFiles = field(repr=False, compare=False)

    def curve(self, stage: str, metric: str) -> list[Point]:
        """A metric of a stage over its steps, each step once; empty if it was not measured."""
        return self.reader.points(self.stages[stage], metric) if stage in self.stages else []

    def curves(self, stage: str) -> list[str]:
        """Names of the metrics of a stage that are curves."""
        return self.reader.metrics(self.stages[stage]) if stage in self.stages else []

    def text(self, stage: str, path: str) -> str | None:
        """A text among the files of a stage, such as "run/samples/step-00000100.txt"; None if there is none."""
        return self.reader.text(self.stages[stage], path) if stage in self.stages else None

    def manifest(self, stage: str) -> JsonObject:
        """The manifest of a stage's artifact, from the store, else from MLflow; empty if neither has it."""
        return self.reader.manifest(self.stages[stage]) if stage in self.stages else {}

    def files(self, stage: str, under: str = "") -> Sequence[str]:
        """Paths of the files of a stage below a directory, for `text`."""
        return self.reader.files(self.stages[stage], under) if stage in self.stages else []


class StageFiles:
    """The reader behind a view: of the stages whose files are here, from them; else from MLflow, if it was asked."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self.source: MlflowSource | None = None  # the MLflow that has the stages with a `run_id`, as long as it answers
        self._histories: dict[tuple[str, str], list[tuple[int, int, float]]] = {}  # by MLflow's run and metric
        self._local_curves: dict[tuple[str, str], dict[str, list[Point]]] = {}  # by stage and key, then by metric
        self._manifests: dict[str, JsonObject] = {}  # by MLflow's run

    def points(self, stage: StageView, metric: str) -> list[Point]:
        """The curve in the order of its steps; of a step that was logged twice, the last value."""
        name = clean(metric)
        history = self._history(stage.run_id, name)
        if not history:
            return list(self._on_disk(stage).get(name, ()))
        counted = [] if metric.startswith(MACHINE_PREFIX) else self._history(stage.run_id, TOKENS)
        tokens_at = {step: value for step, _, value in counted}
        latest = {step: Point(step, tokens_at.get(step), when / 1000, value) for step, when, value in history}
        return list(latest.values())  # the history is sorted by step, and a dict key keeps its first position

    def metrics(self, stage: StageView) -> list[str]:
        """Names of the metrics that were measured at a step."""
        names = self._ask(stage, MlflowSource.curves)
        return [name for name in names or sorted(self._on_disk(stage)) if name != TOKENS]

    def text(self, stage: StageView, path: str) -> str | None:
        """A text file of the stage, from this machine's disks, else from MLflow."""
        if not _is_inside(path):
            return None
        for directory in self._directories(stage):
            with contextlib.suppress(OSError), (directory / path).open("rb") as file:
                return file.read(LARGEST_TEXT).decode("utf-8", errors="replace")
        return self._ask(stage, MlflowSource.text, f"{stage.stage}/{path}")

    def manifest(self, stage: StageView) -> JsonObject:
        """The manifest of the stage's artifact; MLflow is asked for it once."""
        if stage.manifest or not stage.run_id:
            return stage.manifest
        if stage.run_id not in self._manifests:  # a page reads it a dozen times
            self._manifests[stage.run_id] = parse_object(self.text(stage, MANIFEST) or "")
        return self._manifests[stage.run_id]

    def files(self, stage: StageView, under: str) -> list[str]:
        """Paths of the stage's files below a directory."""
        if under and not _is_inside(under):
            return []
        for directory in self._directories(stage):
            if (directory / under).is_dir():
                paths = (path for path in (directory / under).rglob("*") if path.is_file())
                return sorted(path.relative_to(directory).as_posix() for path in paths)
        listed = self._ask(stage, MlflowSource.files, f"{stage.stage}/{under}".rstrip("/"))
        return sorted(path.removeprefix(f"{stage.stage}/") for path in listed or ())

    def _ask(self, stage: StageView, question: Callable[..., Result], *arguments: str) -> Result | None:
        """What MLflow answers about the stage's run; None if it is not to be asked, or fails."""
        source, run_id = self.source, stage.run_id
        return attempt(lambda: question(source, run_id, *arguments))[0] if source is not None and run_id else None

    def _history(self, run_id: str | None, metric: str) -> list[tuple[int, int, float]]:
        source = self.source
        if source is None or run_id is None:
            return []
        if (run_id, metric) not in self._histories:
            self._histories[run_id, metric] = attempt(lambda: source.history(run_id, metric))[0] or []
        return self._histories[run_id, metric]

    def _directories(self, stage: StageView) -> Iterator[Path]:
        """Local directories of a stage's files: in the store, in its work directory, in MLflow's artifacts."""
        if stage.key:
            yield self._store.path(stage.stage, stage.key)
            yield self._store.work(stage.stage, stage.key) / "output"
        if stage.artifact_uri and (root := local_path(stage.artifact_uri)):
            yield root / stage.stage

    def _on_disk(self, stage: StageView) -> dict[str, list[Point]]:
        """All curves of the stage's own files; read once, as a long training has a hundred thousand lines."""
        stage_key = (stage.stage, stage.key or "")
        if stage_key not in self._local_curves:
            latest: dict[str, dict[int, Point]] = {}
            for row in self._rows(stage):
                tokens, when = row.get(TOKENS), float(row.get("time") or 0.0)
                tokens = None if tokens is None else float(tokens)
                for name, value in row["metrics"].items():
                    number = math.nan if value is None else float(value)  # JSON has no NaN: the trainer writes null
                    latest.setdefault(clean(name), {})[row["step"]] = Point(row["step"], tokens, when, number)
            self._local_curves[stage_key] = {name: [steps[at] for at in sorted(steps)] for name, steps in latest.items()}
        return self._local_curves[stage_key]

    def _rows(self, stage: StageView) -> Iterator[MetricRow]:
        """The rows of a stage's own curves, without torn lines."""
        for directory in self._directories(stage):
            paths = [path for name in CURVES for path in sorted((directory / "run").glob(name))]
            for path in paths:
                with contextlib.suppress(OSError):
                    yield from read_rows(path)
            if paths:
                return


def _is_inside(path: str) -> bool:
    """Whether a relative path stays inside its directory."""
    return bool(path) and "\0" not in path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
