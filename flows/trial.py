"""One trial of a sweep in its thread: a pipeline run whose stages are processes as always."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.engine import run_plain
from flows.sweep import Asked
from ttrain.core.files import parse_json, read_json
from ttrain.errors import Interrupted, StageFailed, UsageError
from ttrain.pipeline.execution import Execution
from ttrain.pipeline.progress_display import Display
from ttrain.pipeline.selection import planned_part
from ttrain.store.artifacts import Store
from ttrain.sweep import study as studies
from ttrain.sweep.study import Trial

NOT_FINITE = "NonFinite"  # what a stage raises whose loss is no number
PRUNED = "pruned"


class RunningTrial:
    """A trial in its thread."""

    def __init__(
        self, asked: Asked, sweep: str, trial: Trial, place: int, store: Store, display: Display, tracked: Mapping[str, Any]
    ) -> None:
        """`place`: of those where trials run side by side. `tracked`: how its run is tracked, as options of Execution."""
        self.asked, self.trial, self.place = asked, trial, place
        self._sweep, self._store, self._tracked = sweep, store, tracked
        self._shared, _ = asked.stages()
        self._screen = _OfTrial(display, trial.number, self._shared)
        self.execution: Execution | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name=f"trial-{trial.number}", daemon=True)
        self._began, self._signum = time.monotonic(), 0
        self._read: tuple[Path | None, int] = (None, -1)  # curve and its bytes that were looked at

    def stop(self, signum: int) -> None:
        """Ask the running stage to save its state, whether one has begun or not."""
        self._signum = signum
        if self.execution:
            self.execution.ask_to_stop(signum)

    def outcome(self) -> tuple[str, float | None, str | None]:
        """(word, metric, what went wrong) once the thread has ended; the word is "running" for one that goes on later."""
        artifacts = self.execution.artifacts if self.execution else {}
        measure = self.asked.measure
        if measure.until in artifacts:  # also where the word to stop came after its end
            return studies.COMPLETED, measure.of({name: a.result for name, a in artifacts.items()}), None
        # what is no Exception asks for the end, too: rich exits where nobody reads its lines any more
        if isinstance(self.error, Interrupted) or not isinstance(self.error, Exception):
            stopped = self.execution.stop_reason if self.execution else ""
            return (studies.PRUNED if stopped.startswith(PRUNED) else studies.RUNNING), None, None
        diverged = isinstance(self.error, StageFailed) and self.error.kind == NOT_FINITE
        return (studies.DIVERGED if diverged else studies.FAILED), None, str(self.error)

    @property
    def is_training(self) -> bool:
        """Whether the stage that is measured is not at its end."""
        return self.execution is not None and self.asked.measure.stage not in self.execution.artifacts

    @property
    def would_fail_again(self) -> bool:
        """Whether no other trial would fare better: a stage failed that all share, or none had begun. Settings that do not
        go together are this trial's own."""
        failed = self.execution.failures if self.execution else {}
        return not failed.keys().isdisjoint(self._shared) if failed else not isinstance(self.error, UsageError)

    def new_points(self) -> dict[int, float]:
        """{tokens: value} of the curve of the measured stage, where anything was written since the last look."""
        path, measure = self._curve(), self.asked.measure
        with contextlib.suppress(OSError):
            if path and (size := path.stat().st_size) and (path, size) != self._read:
                self._read = (path, size)
                return dict(_points(path, measure.curve))
        return {}

    def _curve(self) -> Path | None:
        """The metrics of the measured stage; None before it begins."""
        assert self.execution is not None
        stage = self.asked.measure.stage
        if (artifact := self.execution.artifacts.get(stage)) is not None:
            return artifact.path / "run" / "metrics.jsonl"
        record: Mapping[str, Any] = read_json(self.execution.record.path) or {"stages": []}
        log = next((entry["log"] for entry in record["stages"] if entry["name"] == stage and entry.get("log")), None)
        return Path(log).with_name("metrics.jsonl") if log else None

    def _run(self) -> None:
        try:
            self._pipeline()
        except BaseException as error:  # it is told by the thread that waits for this one
            self.error = error
        self.seconds = time.monotonic() - self._began

    def _pipeline(self) -> None:
        values = self.trial.values
        stages = self.asked.plan(values, self._store, self.place)
        execution = Execution(
            self.asked.pipeline,
            self.asked.settings(values, self.place),
            self._store,
            self._screen,
            [planned.stage.name for planned in stages],
            registers=False,
            **self._tracked,
        )
        execution.planned = stages
        execution.record.note(sweep={"name": self._sweep, "trial": self.trial.number})
        self.execution = execution
        if self._signum:
            execution.ask_to_stop(self._signum)
        outcome, error = "failed", None
        try:
            execution.raise_if_signalled()
            run_plain(execution, planned_part(self.asked.recipe(), stages))
            outcome = "completed"
        except Interrupted as raised:
            outcome, error = "interrupted", str(raised)
            raise
        except BaseException as raised:
            error = str(raised)
            raise
        finally:
            execution.finish(outcome, error)


class _OfTrial:
    """What one trial tells, on the screen of all: what it took from the store is not said."""

    def __init__(self, display: Display, number: int, shared: list[str]) -> None:
        self._display, self._number, self._shared = display, number, shared

    def say(self, text: str) -> None:
        self._display.say(f"  trial {self._number}: {text.strip()}")

    def started(self, name: str, why: str) -> None:
        if name in self._shared:
            self._display.started(name, why)

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None:
        self._display.progressed(self._named(name), progress)

    def ended(self, name: str, state: str, took: float, figures: str) -> None:
        if state != "cached":
            self._display.ended(self._named(name), state, took, figures)

    def failed(self, name: str, message: str) -> None:
        self._display.failed(self._named(name), message)

    def _named(self, stage: str) -> str:
        return stage if stage in self._shared else f"trial {self._number} {stage}"


def _points(path: Path, name: str | None) -> Iterator[tuple[int, float]]:
    """(tokens, value) of a metric in a stage's curve; what is no number is left out."""
    for line in path.read_bytes().split(b"\n") if name else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = parse_json(line)
            yield int(row["tokens"]), float(row["metrics"][name])
