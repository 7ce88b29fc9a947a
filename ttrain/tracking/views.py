"""Runs as they are read back: plain values, and curves and texts that are fetched when they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ttrain.core.files import parse_json


class Point(NamedTuple):
    """One value of a curve. Where the run had no number (a loss that is NaN or infinite) `value` is NaN."""

    step: int
    tokens: float | None  # trained on up to this step; None where the run does not count them
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
class Tracked:
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
    """Where curves and files of a stage come from."""

    def points(self, stage: StageView, metric: str) -> list[Point]:
        """The curve in the order of its steps, each once."""

    def metrics(self, stage: StageView) -> list[str]:
        """Names of its metrics that are curves."""

    def text(self, stage: StageView, path: str) -> str | None:
        """A text among its files; None where there is none."""

    def files(self, stage: StageView, under: str) -> list[str]:
        """Paths of its files below a directory."""


@dataclass(frozen=True)
class StageView:
    """One stage of a run. That of a cached stage tells of the run that made it, which `made_by` names."""

    stage: str
    key: str | None
    status: str  # completed, cached, failed, interrupted, crashed, running, pending, ...
    cached: bool
    made_by: str | None  # name of the pipeline's run
    run_id: str | None  # MLflow's
    seconds: float | None  # that making it took
    ended: float | None  # seconds since 1970; None where another run made it, or it has not ended
    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, float] = field(default_factory=dict, repr=False)
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)
    inputs: tuple[InputView, ...] = ()
    artifact_uri: str | None = None
    noted: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what is on record of it: why, error, log, ...
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of its artifact; empty where that is not here


@dataclass(frozen=True)
class RunView:
    """One run of a pipeline, with its stages in their order."""

    name: str  # as `ttrain pipeline status` lists it
    run_id: str | None  # MLflow's; None where it was not tracked
    pipeline: str
    status: str  # completed, failed, interrupted, crashed, running or cached
    started: float  # seconds since 1970
    seconds: float | None
    tags: Mapping[str, str]
    params: Mapping[str, str]  # all settings, with dotted names
    metrics: Mapping[str, float]
    stages: Mapping[str, StageView]
    inputs: tuple[InputView, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be read, and what was read instead
    noted: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the rest of what is on record of it
    reader: Reader | None = field(default=None, repr=False, compare=False)
    fetched: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)  # manifests, by stage

    def curve(self, stage: str, metric: str) -> list[Point]:
        """A metric of a stage over its steps, each step once; empty where it was not measured."""
        return self.reader.points(self.stages[stage], metric) if self.reader and stage in self.stages else []

    def curves(self, stage: str) -> list[str]:
        """Names of the metrics of a stage that are curves."""
        return self.reader.metrics(self.stages[stage]) if self.reader and stage in self.stages else []

    def text(self, stage: str, path: str) -> str | None:
        """A text among the files of a stage, such as "run/samples/step-00000100.txt"; None where there is none."""
        return self.reader.text(self.stages[stage], path) if self.reader and stage in self.stages else None

    def manifest(self, stage: str) -> Mapping[str, Any]:
        """The manifest of a stage's artifact, from the store, else from MLflow; empty where neither has it."""
        if stage in self.stages and self.stages[stage].manifest:
            return self.stages[stage].manifest
        if stage not in self.fetched:  # a page asks a dozen times
            found: object = None
            with contextlib.suppress(ValueError):
                found = parse_json(self.text(stage, "manifest.json") or "{}")
            self.fetched[stage] = found if isinstance(found, dict) else {}
        return self.fetched[stage]

    def files(self, stage: str, under: str = "") -> Sequence[str]:
        """Paths of the files of a stage below a directory, for `text`."""
        return self.reader.files(self.stages[stage], under) if self.reader and stage in self.stages else []
