"""Curves and texts of a stage: from MLflow, else from its artifact in the store or the work that it left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol, TypeVar, final

import orjson

from ttrain.store.artifacts import Store
from ttrain.tracking.atomic_files import local_path
from ttrain.tracking.calls import clean, outcome
from ttrain.tracking.views import Point, StageView, Tracked

Result = TypeVar("Result")

CURVES: Final = ("metrics.jsonl", "system*.jsonl")  # under run/
TOKENS: Final = "tokens"
OF_MACHINE: Final = "system/"  # metrics whose steps are seconds of the stage's time
LARGEST_TEXT: Final = 4 << 20  # bytes of a file that are read as a text


class Source(Protocol):
    """An MLflow that can be asked; any method may raise."""

    def runs(self, ids: Iterable[str]) -> dict[str, Tracked]:
        """The runs of these ids, by id."""

    def with_tags(self, key: str, values: Iterable[str]) -> list[str]:
        """Ids of the runs whose tag has one of these values, the newest first."""

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds, value) of a metric."""

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step."""


@final
class Files:
    """The reader behind a view. What MLflow does not have, or does not say, is looked for on disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.source: Source | None = None  # the MLflow that is asked first, as long as it answers
        self._tokens: dict[str, dict[int, float]] = {}  # by id of the tracked run, then by step
        self._curves: dict[tuple[str, str, str], list[Point]] = {}  # by stage, run or key, and metric
        self._disk: dict[tuple[str, str], dict[str, list[Point]]] = {}  # by stage and key

    def points(self, stage: StageView, metric: str) -> list[Point]:
        """The curve in the order of its steps; of a step that was logged twice, the last value."""
        asked = (stage.stage, stage.run_id or stage.key or "", clean(metric))
        if asked not in self._curves:
            self._curves[asked] = self._tracked(stage.run_id, metric) or self._on_disk(stage.stage, stage.key).get(
                clean(metric), []
            )
        return list(self._curves[asked])

    def metrics(self, stage: StageView) -> list[str]:
        """Names of the metrics that were measured at a step."""
        run_id = stage.run_id
        found = self._ask(lambda source: source.curves(run_id)) if run_id else None
        return [name for name in found or sorted(self._on_disk(stage.stage, stage.key)) if name != TOKENS]

    def last_values(self, stage: str, key: str | None) -> dict[str, float]:
        """The last number of each metric in the stage's own file."""
        curves = self._on_disk(stage, key)
        numbers = {name: [point.value for point in curve if math.isfinite(point.value)] for name, curve in curves.items()}
        return {name: values[-1] for name, values in numbers.items() if values}

    def text(self, stage: StageView, path: str) -> str | None:
        """A text below the stage's directory of the tracked run, else of its artifact."""
        if not _is_inside(path):
            return None
        for directory in self._directories(stage):
            with contextlib.suppress(OSError):
                with (directory / path).open("rb") as file:
                    return file.read(LARGEST_TEXT).decode("utf-8", errors="replace")
        client: Any = self.source
        if not stage.run_id or not hasattr(client, "text"):
            return None
        return outcome(lambda: str(client.text(stage.run_id, f"{stage.stage}/{path}")))[0]

    def files(self, stage: StageView, under: str) -> list[str]:
        """Paths of the stage's files below a directory."""
        if under and not _is_inside(under):
            return []
        for directory in self._directories(stage):
            if (directory / under).is_dir():
                found = (path for path in (directory / under).rglob("*") if path.is_file())
                return sorted(path.relative_to(directory).as_posix() for path in found)
        client: Any = self.source
        if not stage.run_id or not hasattr(client, "files"):
            return []
        listed = outcome(lambda: client.files(stage.run_id, f"{stage.stage}/{under}".rstrip("/")))[0] or []
        return sorted(path.removeprefix(f"{stage.stage}/") for path in listed)

    def _ask(self, question: Callable[[Source], Result]) -> Result | None:
        source = self.source
        return outcome(lambda: question(source))[0] if source is not None else None

    def _directories(self, stage: StageView) -> Iterator[Path]:
        """Where the files of a stage lie on this machine: in the store, in its work, in MLflow's artifacts."""
        if stage.key:
            yield self._store.path(stage.stage, stage.key)
            yield self._store.work(stage.stage, stage.key) / "output"
        if stage.artifact_uri and (root := local_path(stage.artifact_uri)):
            yield root / stage.stage

    def _tracked(self, run_id: str | None, metric: str) -> list[Point]:
        found = self._ask(lambda source: source.history(run_id, clean(metric))) if run_id else None
        if not found or not run_id:
            return []
        tokens_at: dict[int, float] = {}
        if not metric.startswith(OF_MACHINE):
            if run_id not in self._tokens:
                tokens = self._ask(lambda source: source.history(run_id, TOKENS)) or []
                self._tokens[run_id] = {step: value for step, _, value in tokens}
            tokens_at = self._tokens[run_id]
        latest = {step: Point(step, tokens_at.get(step), when / 1000, value) for step, when, value in found}
        return list(latest.values())  # `history` is in the order of the steps, and a key keeps its first place

    def _on_disk(self, stage: str, key: str | None) -> dict[str, list[Point]]:
        """All curves of the stage's own files; read once, for a long training has a hundred thousand lines."""
        if (stage, key or "") not in self._disk:
            latest: dict[str, dict[int, Point]] = {}
            for row in self._rows(stage, key):
                tokens, when = row.get(TOKENS), float(row.get("time") or 0.0)
                tokens = None if tokens is None else float(tokens)
                for name, value in row["metrics"].items():
                    number = math.nan if value is None else float(value)  # JSON has no NaN: the trainer writes null
                    latest.setdefault(clean(name), {})[row["step"]] = Point(row["step"], tokens, when, number)
            self._disk[stage, key or ""] = {name: [steps[at] for at in sorted(steps)] for name, steps in latest.items()}
        return self._disk[stage, key or ""]

    def _rows(self, stage: str, key: str | None) -> Iterator[dict[str, Any]]:
        """The lines of a stage's own curves, without torn ones."""
        if key is None:
            return
        for directory in (self._store.path(stage, key), self._store.work(stage, key) / "output"):
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
    """Whether a path stays below where it begins."""
    return bool(path) and "\0" not in path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
