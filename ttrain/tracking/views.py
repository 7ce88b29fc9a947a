"""Runs as they are read back: plain values, and curves and texts that are fetched on demand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ttrain.core.files import JsonObject, parse_object
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Manifest
from ttrain.store.runs import MetricRow, read_rows
from ttrain.tracking.artifact_source import MlflowSource
from ttrain.tracking.calls import Result, clean
from ttrain.tracking.uploads import local_path

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
    data: Mapping[str, str] = field(default_factory=dict)  # as `StoredRun` has it
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
    decision: tuple[str, ...]  # about a night's models: (night, promoted or kept, reason); empty if there is none
    record: JsonObject = field(repr=False)  # the whole record in the home; empty if there is none
    store: ArtifactStore = field(repr=False, compare=False)
    ask: Callable[..., Any] = field(repr=False, compare=False)  # a method of MlflowSource: its answer, None if it has none
    cache: dict[tuple[str | None, ...], Any] = field(repr=False, compare=False)  # of all views that are read together

    def curve(self, stage: str, metric: str) -> list[Point]:
        """A metric of a stage over its steps, each step once with the last value; empty if it was not measured."""
        history = self._history(stage, clean(metric) if metric in self._on_disk(stage) else metric)
        if not history:
            return list(self._on_disk(stage).get(metric, ()))
        counted = [] if metric.startswith(MACHINE_PREFIX) else self._history(stage, TOKENS)
        tokens_at = {step: value for step, _, value in counted}
        latest = {step: Point(step, tokens_at.get(step), when / 1000, value) for step, when, value in history}
        return list(latest.values())  # the history is sorted by step, and a dict key keeps its first position

    def curves(self, stage: str) -> list[str]:
        """Names of the metrics of a stage that are curves."""
        originals = {clean(name): name for name in self._on_disk(stage)}
        names = self._ask(stage, MlflowSource.curves) or sorted(originals)
        return [originals.get(name, name) for name in names if name != TOKENS]

    def text(self, stage: str, path: str) -> str | None:
        """A text among the files of a stage, such as "run/samples/step-00000100.txt", from this machine's disks, else from
        MLflow; None if there is none."""
        if not _is_inside(path):
            return None
        for directory in self._directories(stage):
            with contextlib.suppress(OSError), (directory / path).open("rb") as file:
                return file.read(LARGEST_TEXT).decode("utf-8", errors="replace")
        text: str | None = self._ask(stage, MlflowSource.text, f"{stage}/{path}")
        return text

    def manifest(self, stage: str) -> JsonObject:
        """The manifest of a stage's artifact, from the store, else from MLflow; empty if neither has it."""
        view = self.stages.get(stage)
        if view is None or view.manifest or not view.run_id:
            return view.manifest if view else {}
        return self._cached(stage, "manifest", compute=lambda: parse_object(self.text(stage, MANIFEST) or ""))

    def files(self, stage: str, under: str = "") -> Sequence[str]:
        """Paths of the files of a stage below a directory, for `text`."""
        if under and not _is_inside(under):
            return []
        for directory in self._directories(stage):
            if (directory / under).is_dir():
                paths = (path for path in (directory / under).rglob("*") if path.is_file())
                return sorted(path.relative_to(directory).as_posix() for path in paths)
        listed = self._ask(stage, MlflowSource.files, f"{stage}/{under}".rstrip("/"))
        return sorted(path.removeprefix(f"{stage}/") for path in listed or ())

    def _cached(self, stage: str, *question: str, compute: Callable[[], Result]) -> Result:
        """What was computed for the stage before, also for another run that has it, else now: a page asks a dozen times, and
        the curves of a long training are large."""
        view = self.stages.get(stage)
        key = (stage, view.key if view else None, view.run_id if view else None, *question)
        if key not in self.cache:
            self.cache[key] = compute()
        value: Result = self.cache[key]
        return value

    def _ask(self, stage: str, question: Callable[..., Any], *arguments: str) -> Any:
        """What MLflow answers about the stage's run; None if it is not to be asked, or fails."""
        run_id = self.stages[stage].run_id if stage in self.stages else None
        return self.ask(question, run_id, *arguments) if run_id else None

    def _history(self, stage: str, metric: str) -> list[tuple[int, int, float]]:
        return self._cached(stage, "history", metric, compute=lambda: self._ask(stage, MlflowSource.history, metric)) or []

    def _directories(self, stage: str) -> Iterator[Path]:
        """Local directories of a stage's files: in the store, in its work directory, in MLflow's artifacts."""
        view = self.stages.get(stage)
        if view and view.key:
            yield self.store.path(stage, view.key)
            yield self.store.work(stage, view.key) / "output"
        if view and view.artifact_uri and (root := local_path(view.artifact_uri)):
            yield root / stage

    def _on_disk(self, stage: str) -> Mapping[str, list[Point]]:
        """All curves of the stage's own files; read once, as a long training has a hundred thousand lines."""
        return self._cached(stage, "curves", compute=lambda: _curves_of(self._rows(stage)))

    def _rows(self, stage: str) -> Iterator[MetricRow]:
        """The rows of a stage's own curves, without torn lines."""
        for directory in self._directories(stage):
            paths = [path for name in CURVES for path in sorted((directory / "run").glob(name))]
            for path in paths:
                with contextlib.suppress(OSError):
                    yield from read_rows(path)
            if paths:
                return


def _curves_of(rows: Iterable[MetricRow]) -> dict[str, list[Point]]:
    latest: dict[str, dict[int, Point]] = {}
    for row in rows:
        tokens, when = row.get(TOKENS), float(row.get("time") or 0.0)
        tokens = None if tokens is None else float(tokens)
        for name, value in row["metrics"].items():
            number = math.nan if value is None else float(value)  # JSON has no NaN: the trainer writes null
            latest.setdefault(name, {})[row["step"]] = Point(row["step"], tokens, when, number)
    return {name: [steps[at] for at in sorted(steps)] for name, steps in latest.items()}


def _is_inside(path: str) -> bool:
    """Whether a relative path stays inside its directory."""
    return bool(path) and "\0" not in path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
