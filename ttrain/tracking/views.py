"""Runs as they are read back: plain values, and curves and texts that are fetched on demand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, Protocol, TypeVar, final

import orjson

from ttrain.core.files import parse_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.tracking.calls import attempt, clean
from ttrain.tracking.uploads import local_path


class Point(NamedTuple):
    """One point of a curve. `value` is NaN if the run had none (a loss that is NaN or infinite)."""

    step: int
    tokens: float | None  # trained on up to this step; None if the run does not count them
    time: float  # seconds since 1970
    value: float


@dataclass(frozen=True)
class InputView:
    """A data set that a run read, as MLflow lists it."""

    name: str
    digest: str
    context: str  # training, validation, ...
    source: str
    counts: Mapping[str, Any]  # the profile: documents, tokens, bytes


@dataclass(frozen=True)
class StoredRun:
    """One MLflow run as it is stored."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    started: float  # seconds since 1970
    ended: float | None
    artifact_uri: str
    experiment_id: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]  # last values
    tags: Mapping[str, str]
    inputs: tuple[InputView, ...] = ()


class Reader(Protocol):
    """Reads curves and files of a stage."""

    def points(self, stage: StageView, metric: str) -> list[Point]:
        """The curve in the order of its steps, each once."""

    def metrics(self, stage: StageView) -> list[str]:
        """Names of its metrics that are curves."""

    def text(self, stage: StageView, path: str) -> str | None:
        """The text of one of its files; None if there is none."""

    def files(self, stage: StageView, under: str) -> list[str]:
        """Paths of its files below a directory."""


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
    inputs: tuple[InputView, ...] = ()  # those that MLflow lists, if the stage's manifest is not here
    artifact_uri: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)  # from the run's record: why, error, log, ...
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of its artifact; empty if that is not here


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
    notes: tuple[str, ...] = ()  # what could not be read, and what was read instead
    record: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # the whole record in the home; empty if there is none
    reader: Reader | None = field(default=None, repr=False, compare=False)
    fetched: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)  # manifests, by stage

    def curve(self, stage: str, metric: str) -> list[Point]:
        """A metric of a stage over its steps, each step once; empty if it was not measured."""
        return self.reader.points(self.stages[stage], metric) if self.reader and stage in self.stages else []

    def curves(self, stage: str) -> list[str]:
        """Names of the metrics of a stage that are curves."""
        return self.reader.metrics(self.stages[stage]) if self.reader and stage in self.stages else []

    def text(self, stage: str, path: str) -> str | None:
        """A text among the files of a stage, such as "run/samples/step-00000100.txt"; None if there is none."""
        return self.reader.text(self.stages[stage], path) if self.reader and stage in self.stages else None

    def manifest(self, stage: str) -> Mapping[str, Any]:
        """The manifest of a stage's artifact, from the store, else from MLflow; empty if neither has it."""
        if stage in self.stages and self.stages[stage].manifest:
            return self.stages[stage].manifest
        if stage not in self.fetched:  # a page reads it a dozen times
            parsed: object = None
            with contextlib.suppress(ValueError):
                parsed = parse_json(self.text(stage, "manifest.json") or "{}")
            self.fetched[stage] = parsed if isinstance(parsed, dict) else {}
        return self.fetched[stage]

    def files(self, stage: str, under: str = "") -> Sequence[str]:
        """Paths of the files of a stage below a directory, for `text`."""
        return self.reader.files(self.stages[stage], under) if self.reader and stage in self.stages else []


Result = TypeVar("Result")

CURVES: Final = ("metrics.jsonl", "system*.jsonl")  # under run/

TOKENS: Final = "tokens"

MACHINE_PREFIX: Final = "system/"  # metrics whose steps are seconds of the stage's time

LARGEST_TEXT: Final = 4 << 20  # bytes of a file that are read as a text


class RunSource(Protocol):
    """An MLflow to read curves and files from; any method may raise."""

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds, value) of a metric."""

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step."""

    def text(self, run_id: str, path: str) -> str:
        """The text of one of the run's files."""

    def files(self, run_id: str, under: str) -> list[str]:
        """Paths of the run's files below a directory."""


@final
class StageFiles:
    """The reader behind a view: of the stages whose files are here, from them; else from MLflow, if it was asked."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self.source: RunSource | None = None  # the MLflow that has the stages with a `run_id`, as long as it answers
        self._tokens: dict[str, dict[int, float]] = {}  # by id of the tracked run, then by step
        self._curves: dict[tuple[str, str, str], list[Point]] = {}  # by stage, run or key, and metric
        self._disk: dict[tuple[str, str], dict[str, list[Point]]] = {}  # by stage and key

    def points(self, stage: StageView, metric: str) -> list[Point]:
        """The curve in the order of its steps; of a step that was logged twice, the last value."""
        curve_key = (stage.stage, stage.run_id or stage.key or "", clean(metric))
        if curve_key not in self._curves:
            self._curves[curve_key] = self._tracked(stage.run_id, metric) or self._on_disk(stage).get(clean(metric), [])
        return list(self._curves[curve_key])

    def metrics(self, stage: StageView) -> list[str]:
        """Names of the metrics that were measured at a step."""
        run_id = stage.run_id
        names = self._ask(lambda source: source.curves(run_id)) if run_id else None
        return [name for name in names or sorted(self._on_disk(stage)) if name != TOKENS]

    def text(self, stage: StageView, path: str) -> str | None:
        """A text file of the stage, from this machine's disks, else from MLflow."""
        if not _is_inside(path):
            return None
        for directory in self._directories(stage):
            with contextlib.suppress(OSError):
                with (directory / path).open("rb") as file:
                    return file.read(LARGEST_TEXT).decode("utf-8", errors="replace")
        run_id = stage.run_id
        return self._ask(lambda source: source.text(run_id, f"{stage.stage}/{path}")) if run_id else None

    def files(self, stage: StageView, under: str) -> list[str]:
        """Paths of the stage's files below a directory."""
        if under and not _is_inside(under):
            return []
        for directory in self._directories(stage):
            if (directory / under).is_dir():
                paths = (path for path in (directory / under).rglob("*") if path.is_file())
                return sorted(path.relative_to(directory).as_posix() for path in paths)
        run_id = stage.run_id
        listed = self._ask(lambda source: source.files(run_id, f"{stage.stage}/{under}".rstrip("/"))) if run_id else None
        return sorted(path.removeprefix(f"{stage.stage}/") for path in listed or ())

    def _ask(self, question: Callable[[RunSource], Result]) -> Result | None:
        source = self.source
        return attempt(lambda: question(source))[0] if source is not None else None

    def _directories(self, stage: StageView) -> Iterator[Path]:
        """Local directories of a stage's files: in the store, in its work directory, in MLflow's artifacts."""
        if stage.key:
            yield self._store.path(stage.stage, stage.key)
            yield self._store.work(stage.stage, stage.key) / "output"
        if stage.artifact_uri and (root := local_path(stage.artifact_uri)):
            yield root / stage.stage

    def _tracked(self, run_id: str | None, metric: str) -> list[Point]:
        history = self._ask(lambda source: source.history(run_id, clean(metric))) if run_id else None
        if not history or not run_id:
            return []
        tokens_at: dict[int, float] = {}
        if not metric.startswith(MACHINE_PREFIX):
            if run_id not in self._tokens:
                tokens = self._ask(lambda source: source.history(run_id, TOKENS)) or []
                self._tokens[run_id] = {step: value for step, _, value in tokens}
            tokens_at = self._tokens[run_id]
        latest = {step: Point(step, tokens_at.get(step), when / 1000, value) for step, when, value in history}
        return list(latest.values())  # `history` is sorted by step, and a dict key keeps its first position

    def _on_disk(self, stage: StageView) -> dict[str, list[Point]]:
        """All curves of the stage's own files; read once, as a long training has a hundred thousand lines."""
        disk_key = (stage.stage, stage.key or "")
        if disk_key not in self._disk:
            latest: dict[str, dict[int, Point]] = {}
            for row in self._rows(stage):
                tokens, when = row.get(TOKENS), float(row.get("time") or 0.0)
                tokens = None if tokens is None else float(tokens)
                for name, value in row["metrics"].items():
                    number = math.nan if value is None else float(value)  # JSON has no NaN: the trainer writes null
                    latest.setdefault(clean(name), {})[row["step"]] = Point(row["step"], tokens, when, number)
            self._disk[disk_key] = {name: [steps[at] for at in sorted(steps)] for name, steps in latest.items()}
        return self._disk[disk_key]

    def _rows(self, stage: StageView) -> Iterator[dict[str, Any]]:
        """The rows of a stage's own curves, without torn lines."""
        for directory in self._directories(stage):
            paths = [path for name in CURVES for path in sorted((directory / "run").glob(name))]
            for path in paths:
                with contextlib.suppress(OSError):
                    yield from _rows_of(path)
            if paths:
                return


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            row = orjson.loads(line)
            if isinstance(row, dict) and isinstance(row.get("metrics"), dict) and isinstance(row.get("step"), int):
                yield row


def _is_inside(path: str) -> bool:
    """Whether a relative path stays inside its directory."""
    return bool(path) and "\0" not in path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
