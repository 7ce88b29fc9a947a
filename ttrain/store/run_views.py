"""Runs read back from the home: a record with artifacts, curves and texts, read on demand."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ttrain.config import flatten
from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.core.redact import masked
from ttrain.store import name_syntax, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Manifest
from ttrain.store.registry import Registry

CURVES = ("metrics.jsonl", "system*.jsonl")  # under run/
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
    made_by: str | None  # name of the pipeline's run
    seconds: float | None  # of building it
    record: JsonObject = field(
        default_factory=dict, repr=False
    )  # from the run's record: why, error, log, ...
    manifest: Manifest = field(
        default_factory=dict, repr=False
    )  # of its artifact; empty if that is not here


@dataclass(frozen=True)
class RunView:
    """One run of a pipeline, with its stages in their order."""

    name: str  # as `ttrain pipeline status` lists it
    pipeline: str
    status: str  # completed, failed, interrupted, crashed, running or cached
    started: float  # seconds since 1970
    seconds: float | None
    params: Mapping[str, Any]  # all settings, with dotted names
    metrics: Mapping[str, float]
    stages: Mapping[str, StageView]
    notes: tuple[str, ...]  # what could not be read
    decision: tuple[
        str, ...
    ]  # about a night's models: (night, promoted or kept, reason); empty if there is none
    record: JsonObject = field(repr=False)
    store: ArtifactStore = field(repr=False, compare=False)
    cache: dict[tuple[str, str | None], Any] = field(
        repr=False, compare=False
    )  # of all views that are read together

    def curve(self, stage: str, metric: str) -> list[Point]:
        """A metric of a stage, each step once with the last value; empty if it was not measured."""
        return list(self._curves(stage).get(metric, ()))

    def curves(self, stage: str) -> list[str]:
        return sorted(self._curves(stage))

    def text(self, stage: str, path: str) -> str | None:
        """A text file of a stage, such as "run/samples/step-00000100.txt", or None."""
        for directory in self._directories(stage):
            with contextlib.suppress(OSError), (directory / path).open("rb") as file:
                return file.read(LARGEST_TEXT).decode("utf-8", errors="replace")
        return None

    def manifest(self, stage: str) -> JsonObject:
        view = self.stages.get(stage)
        return view.manifest if view else {}

    def files(self, stage: str, under: str = "") -> Sequence[str]:
        """Paths of a stage's files below a directory, for `text`."""
        for directory in self._directories(stage):
            if (directory / under).is_dir():
                paths = (path for path in (directory / under).rglob("*") if path.is_file())
                return sorted(path.relative_to(directory).as_posix() for path in paths)
        return []

    def _directories(self, stage: str) -> Iterator[Path]:
        view = self.stages.get(stage)
        if view and view.key:
            yield self.store.path(stage, view.key)
            yield self.store.work(stage, view.key) / "output"

    def _curves(self, stage: str) -> Mapping[str, list[Point]]:
        view = self.stages.get(stage)
        key = (stage, view.key if view else None)
        if key not in self.cache:
            latest: dict[str, dict[int, Point]] = {}
            for row in self._rows(stage):
                tokens = row.get("tokens")
                when = float(row.get("time") or 0.0)
                tokens = None if tokens is None else float(tokens)
                for name, value in row["metrics"].items():
                    number = (
                        math.nan if value is None else float(value)
                    )  # JSON has no NaN: the trainer writes null
                    latest.setdefault(name, {})[row["step"]] = Point(
                        row["step"], tokens, when, number
                    )
            self.cache[key] = {name: sorted(steps.values()) for name, steps in latest.items()}
        curves: Mapping[str, list[Point]] = self.cache[key]
        return curves

    def _rows(self, stage: str) -> Iterator[runs.MetricRow]:
        for directory in self._directories(stage):
            paths = [path for name in CURVES for path in sorted((directory / "run").glob(name))]
            for path in paths:
                with contextlib.suppress(OSError):
                    yield from runs.read_rows(path)
            if paths:
                return


def read_run(home: Path, text: str) -> RunView:
    """The run that `text` names, as `read_runs` does."""
    return read_runs(home, [text])[0]


def read_runs(home: Path, texts: Sequence[str]) -> list[RunView]:
    """The runs that these texts name (`need_run`), in this order; shared stages are read once."""
    home = home.resolve()
    cache: dict[tuple[str, str | None], Any] = {}
    return [_view(home, need_run(home, text), cache) for text in texts]


def find_run(home: Path, text: str) -> JsonDict | None:
    """The record of the run that a text names; None if there is none. Raises UsageError for
    several.

    A name is that of `ttrain pipeline status` or a part of it (`store.name_syntax`), a registered
    model for the run that made it, MLflow's id of the run, or a night.
    """
    if name := name_syntax.matching(text, runs.names(home)):
        return runs.read(home, name)
    if model := name_syntax.registered(text):
        return runs.read(home, Registry(home).resolve(model).run)
    named = (
        record
        for record in (runs.newest_first(home) if text else ())
        if text in ((record.get("tracking") or {}).get("run_id"), record.get("night"))
    )
    return next(named, None)


def need_run(home: Path, text: str) -> JsonDict:
    """As `find_run`, but raises UsageError if there is none."""
    if record := find_run(home, text):
        return record
    raise name_syntax.unknown("run", text, runs.names(home))


def _view(home: Path, record: JsonObject, cache: dict[tuple[str, str | None], Any]) -> RunView:
    store = ArtifactStore(home)
    settings = masked(dict(flatten(record["settings"])))
    stages = {entry["name"]: _stage(store, record, entry) for entry in record["stages"]}
    gone = [
        name
        for name, stage in stages.items()
        if stage.status in (*runs.BUILT, "cached") and not stage.manifest
    ]
    notes = (f"the artifacts of {', '.join(gone)} are no longer in {home}",) if gone else ()
    decision = record.get("decision")
    night = record.get("night")
    words = (
        (str(night), "promoted" if decision["promote"] else "kept", str(decision["reason"]))
        if decision and night
        else ()
    )
    return RunView(
        name=record["run"],
        pipeline=record["pipeline"],
        status=record["outcome"],
        started=record["started_unix"],
        seconds=record.get("seconds"),
        params=settings,
        metrics={
            **(record.get("metrics") or {}),
            **(decision_metrics(decision) if decision else {}),
        },
        stages=stages,
        notes=notes,
        decision=words,
        record=record,
        store=store,
        cache=cache,
    )


def _stage(store: ArtifactStore, record: JsonObject, entry: JsonObject) -> StageView:
    name = entry["name"]
    key = entry.get("key")
    is_cached = entry["outcome"] == "cached"
    manifest = read_object(store.path(name, key) / MANIFEST) if key else {}
    maker = (
        record["run"]
        if entry["outcome"] in runs.BUILT
        else manifest.get("provenance", {}).get("run")
    )
    return StageView(
        stage=name,
        key=key,
        status=entry["outcome"],
        made_by=maker,
        seconds=manifest.get("seconds") if is_cached else entry.get("seconds"),
        record=entry,
        manifest=manifest,
    )


def decision_metrics(decision: JsonObject) -> dict[str, float]:
    """The values of a decision, as metrics of the run whose models it was about."""
    low, high = decision["interval"] or (None, None)
    values = {key: decision[key] for key in ("challenger", "champion", "difference", "samples")}
    values |= {
        "interval_low": low,
        "interval_high": high,
        "smallest_difference": decision.get("smallest_difference"),
    }
    return {f"promotion/{key}": value for key, value in values.items() if value is not None}
