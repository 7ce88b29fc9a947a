"""Run the trials of a sweep: each is a pipeline run in a thread of its own, with its stages in processes, as always.

What trials share is built once, since all of them find it in the store or wait for its lock. A process can be killed
anywhere: ended trials are in the study, and an unfinished trial continues where its stage saved its state.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ttrain.core.terminal import print_plain
from ttrain.core.text import format_duration
from ttrain.engine.plain import run_plain
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.flows.sweep import SweepRequest, find_resumable
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.progress_display import Display
from ttrain.pipeline.pusher import Pusher
from ttrain.pipeline.recipe import planned_part
from ttrain.pipeline.stop_request import StopRequest
from ttrain.pipeline.tracked_runs import NOTE, id_of, status_of
from ttrain.reports import summary as report
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import MetricRow, this_process
from ttrain.sweep import measure as measures
from ttrain.sweep import records, report_page, summary
from ttrain.sweep import study as studies
from ttrain.sweep.records import Sweep
from ttrain.sweep.space import format_value
from ttrain.sweep.study import Study, Trial
from ttrain.tracking.mirror import Bound, TrackedRun

POLL_SECONDS, CURVE_SECONDS = 0.1, 0.5

FAILURES = 3  # of trials, one after the other, that end the sweep


def begin(request: SweepRequest, store: ArtifactStore, screen: Console) -> Sweep:
    """The requested sweep: one to continue, or a new one."""
    sweep, changed = find_resumable(request, store)
    if changed:
        print_plain(screen, f"a new sweep begins: {changed}")
    return sweep or records.begin(store.root, request.to_json(), request.ingredients(store))


def run(request: SweepRequest, sweep: Sweep, arguments: Sequence[str], store: ArtifactStore, screen: Console) -> None:
    """Run the trials that are left; the sweep's lock must be held. `arguments`: of the command line, but for the ranges.

    Raises Interrupted, or an error that every trial would have.
    """
    sweep.note(words=list(arguments))
    study = Study.of(sweep, writes=True)
    for line in _opening(request, sweep, study.trials()):
        print_plain(screen, line)
    if _done(study.trials()) < request.trials:
        with contextlib.closing(Display(screen)) as display:
            TrialRunner(request, sweep, study, store, display).run()


class TrialRunner:
    """Runs the trials of one sweep; this process holds its lock."""

    def __init__(self, request: SweepRequest, sweep: Sweep, study: Study, store: ArtifactStore, display: Display) -> None:
        self.request, self.sweep, self.study, self.store, self.display = request, sweep, study, store, display
        self.stop_request = StopRequest(display.say, "the running trials save their state")
        self.planning = threading.Lock()  # a plan parses code, which two threads at once cannot (`core/hashing.py`)
        self._running: dict[int, RunningTrial] = {}  # by slot
        self._failed_in_a_row = 0
        self._error: BaseException | None = None  # that every other trial would have, too
        sweep.note(outcome="running", process=this_process())
        self._pusher: Pusher | None = None
        if request.settings(request.first).tracking.enabled:
            self._pusher = Pusher(store.root, sweep.name, self._note_tracked, self._tracked)
            self._pusher.start()

    def run(self) -> None:
        """Run all trials to their ends. Raises Interrupted once they are saved, or an error that every trial would have."""
        outcome = "failed"
        try:
            with self.stop_request.catching_signals():
                self._loop()
            outcome = "completed"
        except Interrupted:
            outcome = "interrupted"
            raise
        finally:
            self._finish(outcome)

    def _loop(self) -> None:
        unfinished = [
            self.study.retry(trial) if trial.outcome == studies.FAILED else trial
            for trial in self.study.trials()
            if trial.outcome in (studies.RUNNING, studies.FAILED)
        ]
        looked = 0.0
        while True:
            for slot in range(self.request.parallel):
                if slot not in self._running and not self._stop_signal():
                    if unfinished:
                        self._begin(slot, unfinished.pop(0))
                    elif len(self.study.trials()) < self.request.trials and (trial := self.study.ask()):
                        self._begin(slot, trial)
            if not self._running:
                break
            self._stop_trials(self._stop_signal())
            if time.monotonic() - looked > CURVE_SECONDS:
                looked = time.monotonic()
                for running in self._running.values():
                    self._update_curve(running)
            for slot, running in [*self._running.items()]:
                if not running.thread.is_alive():
                    del self._running[slot]
                    self._ended(running)
            time.sleep(POLL_SECONDS)
        if self._error:
            raise self._error
        if signum := self.stop_request.signum:
            raise Interrupted("the sweep was stopped; the same command continues", signum)

    def _stop_signal(self) -> int:
        """The signal that ends the running trials, also where every other trial would fail; 0 while there is none."""
        return self.stop_request.signum or (signal.SIGTERM if self._error else 0)

    def _stop_trials(self, signum: int) -> None:
        """Ask the running trials to save their state, or, after a second signal, end them; 0 asks for nothing."""
        for running in self._running.values():
            if signum and running.execution:
                running.execution.ask_to_stop(signum)
                running.execution.at_once = self.stop_request.at_once

    def _begin(self, slot: int, trial: Trial) -> None:
        values = "  ".join(f"{key}={format_value(value)}" for key, value in trial.values.items())
        goes_on = " goes on" if trial.run else ""
        self.display.say(f"trial {trial.number} of {self.request.trials}{goes_on}: {values}")
        self._running[slot] = RunningTrial(self, trial, slot)
        self._running[slot].thread.start()

    def _update_curve(self, running: RunningTrial) -> None:
        """Record the new points of a trial's curve; end a trial that is behind the others."""
        number = running.trial.number
        if not running.execution or not (new := running.new_points()):
            return
        self.study.report(number, new)
        is_training = self.request.measure.stage not in running.execution.artifacts  # the measured stage has not ended
        if self.request.prune and is_training and self.study.is_hopeless(number):
            running.execution.ask_to_stop(signal.SIGTERM, f"{studies.PRUNED}: behind the median of the other trials")

    def _ended(self, running: RunningTrial) -> None:
        self._update_curve(running)
        outcome, value, error = running.outcome()
        trial, seconds = running.trial, (running.trial.seconds or 0.0) + running.seconds
        self.study.note(trial.number, seconds=round(seconds, 2), error=error)
        if outcome == studies.COMPLETED and value is None:
            assert running.execution is not None, "it has come to its end"
            metric_names = ", ".join(running.execution.metrics()) or "none"
            self._error = TTrainError(
                f"trial {trial.number} has no {self.request.measure.metric}; its metrics are: {metric_names}; "
                f"name one of them with --metric, or hold out more records"
            )
            return
        if outcome == studies.FAILED:
            self._failed_in_a_row += 1
            if self._failed_in_a_row == FAILURES or running.would_fail_again:
                self._error = running.error
                return
        elif outcome == studies.RUNNING:  # asked to stop: it continues another time
            return
        else:
            self._failed_in_a_row = 0
        self.study.tell(trial.number, outcome, value)
        self._report_trial(trial.number, seconds)

    def _report_trial(self, number: int, seconds: float) -> None:
        """A line for the user, two points for the tracker."""
        trials = self.study.trials()
        trial, best = next(t for t in trials if t.number == number), self.study.best()
        figure = summary.figure(trial) if trial.outcome == studies.COMPLETED else summary.outcome(trial)
        standing = (
            "the best so far" if best == trial else f"the best is trial {best.number}, {best.value:.4f}" if best else ""
        )
        self.display.say(f"trial {number}: {figure} in {format_duration(seconds)}; {standing}".rstrip("; "))

    def _finish(self, outcome: str) -> None:
        while any(running.thread.is_alive() for running in self._running.values()):  # after an error in the loop
            self._stop_trials(self._stop_signal() or signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        self.sweep.note(outcome=outcome)
        if self._pusher:
            self._pusher.finish()

    def _tracked(self) -> TrackedRun:
        """The sweep as trackers show it: the values of its trials by the number of those that ended, the table of them, and
        the metrics of the best, so that it stands beside other runs."""
        request, trials, outcome = self.request, self.study.trials(), self.sweep.outcome
        ended = [trial for trial in trials if trial.outcome != studies.RUNNING]
        header, rows = summary.trial_table(trials, request.space, request.measure)
        text = f"{summary.verdict(trials, request.measure)}\n\n{report.markdown(rows, header)}"
        run = TrackedRun(
            self.sweep.name,
            self.sweep.name,
            self.sweep.name,
            request.settings(request.first).tracking.experiment,
            datetime.fromisoformat(self.sweep["started"]).timestamp(),
            status_of(outcome),
            tags={"ttrain.pipeline": "sweep", "ttrain.sweep": self.sweep.name, NOTE: text, "ttrain.outcome": outcome},
            params={
                **request.space.texts,
                "metric": request.measure.metric,
                "sampler": request.sampler,
                "seed": request.seed,
            },
            rows=[*_points(ended, maximize=request.measure.maximize)],
            texts={"trials.json": json.dumps([trial.to_json() for trial in trials], indent=1)},
        )
        best = self.study.best()
        if outcome != "running" and best and best.value is not None:
            record = (runs.read(self.store.root, best.run) if best.run else None) or {}
            metrics = {request.measure.metric: best.value, **record.get("metrics", {}), "sweep/best_trial": best.number}
            run.rows = [*run.rows, {"step": len(ended), "time": time.time(), "metrics": metrics}]
            run.tags = {**run.tags, "ttrain.best": best.run or ""}
        if outcome != "running":
            run.texts = {**run.texts, self.sweep.page.name: report_page.render(self.sweep, trials)}
        return run

    def _note_tracked(self, bound: Bound) -> None:
        self.sweep.note(tracking={"run_id": bound.run_id, "experiment_id": bound.experiment_id})


def _points(trials: Sequence[Trial], *, maximize: bool) -> Iterator[MetricRow]:
    """The value of each trial that ended and the best so far, by the number of those that ended."""
    best: float | None = None
    for number, trial in enumerate(trials, 1):
        if trial.value is not None:
            best = trial.value if best is None else (max if maximize else min)(best, trial.value)
        values = {"sweep/value": trial.value, "sweep/best": best}
        yield {"step": number, "metrics": {name: value for name, value in values.items() if value is not None}}


def _opening(request: SweepRequest, sweep: Sweep, trials: Sequence[Trial]) -> list[str]:
    """The lines that announce the sweep."""
    shared, per_trial = request.stages()
    done = _done(trials)
    goes_on = f", {done} of them done before" if done else ""
    side = f", {request.parallel} side by side" if request.parallel > 1 else ""
    better = "higher" if request.measure.maximize else "lower"
    head = f"{sweep.name}: {request.trials} trials{goes_on}{side}, sampler {request.sampler}"
    lines = [
        f"{head}; {better} {request.measure.metric} is better",
        *(f"  {key}={text}" for key, text in request.space.texts.items()),
        f"  once: {', '.join(shared) or 'nothing'}; in each trial: {', '.join(per_trial)}",
    ]
    if heldout := measures.changes_heldout(list(request.space.dimensions), request.graph()):
        lines.append(
            f"  warning: {', '.join(heldout)} may change which records are held out, and losses are then of other text"
        )
    return lines


def _done(trials: Sequence[Trial]) -> int:
    """How many trials need not run any more."""
    return sum(trial.outcome not in (studies.RUNNING, studies.FAILED) for trial in trials)


NOT_FINITE = "NonFinite"  # the error of a stage whose loss is not finite


class RunningTrial:
    """A trial in its thread."""

    def __init__(self, runner: TrialRunner, trial: Trial, slot: int) -> None:
        """`slot`: its number among parallel trials."""
        self._runner, self.request, self.trial, self.slot = runner, runner.request, trial, slot
        self._shared, _ = self.request.stages()
        self.execution: PipelineRun | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name=f"trial-{trial.number}", daemon=True)
        self._began = time.monotonic()
        self._read: tuple[Path | None, int] = (None, -1)  # the curve and its size when it was last read

    def outcome(self) -> tuple[str, float | None, str | None]:
        """(outcome, metric, error) once the thread has ended; the outcome is "running" for a trial that continues later."""
        artifacts = self.execution.artifacts if self.execution else {}
        measure = self.request.measure
        if measure.until in artifacts:  # also where the stop came after its end
            return studies.COMPLETED, measure.of({name: a.result for name, a in artifacts.items()}), None
        # a BaseException also ends the trial: rich exits where nobody reads its output any more
        if isinstance(self.error, Interrupted) or not isinstance(self.error, Exception):
            stopped = self.execution.stop_reason if self.execution else ""
            return (studies.PRUNED if stopped.startswith(studies.PRUNED) else studies.RUNNING), None, None
        diverged = isinstance(self.error, StageFailed) and self.error.kind == NOT_FINITE
        return (studies.DIVERGED if diverged else studies.FAILED), None, str(self.error)

    @property
    def would_fail_again(self) -> bool:
        """Whether all trials would fail: a stage failed that all share, or none had begun. Settings that cannot be combined
        are this trial's own."""
        failed = self.execution.failures if self.execution else {}
        return not failed.keys().isdisjoint(self._shared) if failed else not isinstance(self.error, UsageError)

    def new_points(self) -> dict[int, float]:
        """{tokens: value} of the curve of the measured stage, where anything was written since the last look."""
        path, measure = self._curve(), self.request.measure
        with contextlib.suppress(OSError):
            if path and measure.curve and (size := path.stat().st_size) and (path, size) != self._read:
                self._read = (path, size)
                points: dict[int, float] = {}
                for row in runs.read_rows(path):
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # rows without the metric are left out
                        points[int(row["tokens"])] = float(row["metrics"][measure.curve])
                return points
        return {}

    def _curve(self) -> Path | None:
        """The metrics of the measured stage; None before it begins."""
        assert self.execution is not None
        stage = self.request.measure.stage
        if (artifact := self.execution.artifacts.get(stage)) is not None:
            return artifact.path / "run" / "metrics.jsonl"
        entries = self.execution.record.snapshot()["stages"]
        log = next((entry["log"] for entry in entries if entry["name"] == stage and entry.get("log")), None)
        return Path(log).with_name("metrics.jsonl") if log else None

    def _run(self) -> None:
        try:
            self._pipeline()
        except BaseException as error:  # the thread that waits for this one reports it
            self.error = error
        self.seconds = time.monotonic() - self._began

    def _pipeline(self) -> None:
        values, runner = self.trial.values, self._runner
        with runner.planning:
            stages = self.request.plan(values, runner.store, self.slot)
        earlier = runs.read(runner.store.root, self.trial.run) if self.trial.run else None
        sweep = {"name": runner.sweep.name, "trial": self.trial.number}
        execution = PipelineRun(
            self.request.pipeline,
            self.request.settings(values, self.slot),
            runner.store,
            _TrialDisplay(runner.display, self.trial.number, self._shared),
            stages,
            registers=False,
            part_of={"sweep": sweep, **({"continues": id_of(earlier)} if earlier else {})},  # an interrupted one goes on
        )
        # Before its stages begin, so that a trial which is killed in one continues this run.
        runner.study.note(self.trial.number, run=execution.record.run)
        self.trial = replace(self.trial, run=execution.record.run)
        self.execution = execution
        with execution.recorded():
            execution.raise_if_signalled()
            run_plain(execution, planned_part(self.request.recipe(), stages))


@dataclass
class _TrialDisplay:
    """The display of one trial within that of the sweep; cached stages are not shown."""

    _display: Display
    _number: int
    _shared: list[str]  # stages of all trials

    def say(self, text: str) -> None:
        self._display.say(f"  trial {self._number}: {text.strip()}")

    def started(self, name: str, why: str) -> None:
        if name in self._shared:
            self._display.started(name, why)

    def progressed(self, name: str, progress: Mapping[str, Any]) -> None:
        self._display.progressed(self._label(name), progress)

    def ended(self, name: str, state: str, took: float, figures: str) -> None:
        if state != "cached":
            self._display.ended(self._label(name), state, took, figures)

    def failed(self, name: str, message: str) -> None:
        self._display.failed(self._label(name), message)

    def _label(self, stage: str) -> str:
        return stage if stage in self._shared else f"trial {self._number} {stage}"
