"""Run the trials of a sweep: each is a pipeline run in a thread of its own, with its stages in processes, as always.

What trials share is built once, since all of them find it in the store or wait for its lock. A process can be killed
anywhere: ended trials are in the sweep's record, and an unfinished trial continues where its stage saved its state.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rich.console import Console

from ttrain.core.terminal import print_plain
from ttrain.core.text import format_duration
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.experiments.measure import changes_heldout
from ttrain.experiments.records import COMPLETED, DIVERGED, FAILED, RUNNING, Sweep, Trial
from ttrain.experiments.request import SweepRequest
from ttrain.experiments.sampler import TrialSampler
from ttrain.experiments.space import format_value
from ttrain.reports import summary as report
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import MetricRow
from ttrain.tracking.mlflow_mirror import TrackedRun
from ttrain.tracking.pusher import Pusher, keep_sweep, track
from ttrain.tracking.tracked_runs import NOTE, id_of, status_of

POLL_SECONDS = 0.1
NOT_FINITE = "NonFinite"  # the error of a stage whose loss is not finite


def run(request: SweepRequest, sweep: Sweep, arguments: Sequence[str], store: ArtifactStore, screen: Console) -> None:
    """Run the trials that are left; the sweep's lock must be held. `arguments`: of the command line, but for the ranges.

    Raises Interrupted, or an error that every trial would have.
    """
    sweep.note(arguments=list(arguments))
    for line in _opening(request, sweep):
        print_plain(screen, line)
    if _done(sweep.trials) < request.trials:
        with contextlib.closing(Display(screen)) as display:
            TrialRunner(request, sweep, store, display).run()


class TrialRunner:
    """Runs the trials of one sweep; this process holds its lock."""

    def __init__(self, request: SweepRequest, sweep: Sweep, store: ArtifactStore, display: Display) -> None:
        self.request, self.sweep, self.store, self.display = request, sweep, store, display
        self.stop_request = StopRequest(display.say, "the running trials save their state")
        self.planning = threading.Lock()  # a plan parses code, which two threads at once cannot (`core/hashing.py`)
        self.shared, _ = request.stages()
        self._sampler = TrialSampler(request.space, request.sampler, request.seed, request.measure.maximize)
        self._running: dict[int, RunningTrial] = {}  # by slot
        self._error: BaseException | None = None  # that every other trial would have, too
        sweep.note(outcome="running", process=runs.this_process())
        self._pusher: Pusher | None = None
        if request.settings(request.first).tracking.enabled:
            self._pusher = Pusher(store.root, sweep.name, sweep.note)
            keep_sweep(store.root, self._tracked())
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
            Trial(trial.number, trial.values) if trial.outcome == FAILED else trial
            for trial in self.sweep.trials
            if trial.outcome in (RUNNING, FAILED)
        ]
        while True:
            for slot in range(self.request.parallel):
                if slot in self._running or self._stop_signal():
                    continue
                if unfinished:
                    self._begin(slot, unfinished.pop(0))
                elif len(self.sweep.trials) < self.request.trials:
                    self._begin(slot, self._sampler.draw(self.sweep.trials))
            if not self._running:
                break
            self._stop_trials(self._stop_signal())
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
        self._running[slot] = RunningTrial(self, self.sweep.put(trial), slot)
        self._running[slot].thread.start()

    def _ended(self, running: RunningTrial) -> None:
        """Record the trial; it stays unfinished where it was stopped, or where every other one would fail like it."""
        outcome, value, error = running.outcome()
        seconds = round((running.trial.seconds or 0.0) + running.seconds, 2)
        failure: BaseException | None = None
        if outcome == COMPLETED and value is None:
            metric_names = ", ".join(running.execution.metrics() if running.execution else ()) or "none"
            failure = TTrainError(
                f"trial {running.trial.number} has no {self.request.measure.metric}; its metrics are: {metric_names}; "
                f"name one of them with --metric, or hold out more records"
            )
        elif outcome == FAILED and running.would_fail_again:
            failure = running.error
        if failure:
            self._error = failure
            outcome = RUNNING
        trial = self.sweep.put(replace(running.trial, outcome=outcome, value=value, seconds=seconds, error=error))
        self._keep()
        if outcome != RUNNING:
            result = trial.description if value is None else f"{value:.4f}"
            self.display.say(f"trial {trial.number}: {result} in {format_duration(seconds)}; {self.sweep.verdict()}")

    def _finish(self, outcome: str) -> None:
        while any(running.thread.is_alive() for running in self._running.values()):  # after an error in the loop
            self._stop_trials(self._stop_signal() or signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        self.sweep.note(outcome=outcome)
        self._keep()
        if self._pusher:
            self._pusher.finish()

    def _keep(self) -> None:
        """Keep what trackers show of the sweep, for the next push."""
        if self._pusher:
            keep_sweep(self.store.root, self._tracked())

    def _tracked(self) -> TrackedRun:
        """The sweep as trackers show it: the table of its trials, and the metrics of the best, so that it stands beside
        other runs. The step is the number of trials that ended, so that the newest metrics count."""
        request, outcome = self.request, self.sweep.outcome
        header, table = self.sweep.table()
        text = f"{self.sweep.verdict()}\n\n{report.markdown(table, header)}"
        best, rows = self.sweep.best, list[MetricRow]()
        if best and best.value is not None:
            record = (runs.read(self.store.root, best.run) if best.run else None) or {}
            metrics = {request.measure.metric: best.value, **record.get("metrics", {}), "sweep/best_trial": best.number}
            # of one time, by whichever process the row is pushed: then MLflow has it once
            ended = float(record.get("started_unix") or 1.0) + float(record.get("seconds") or 0.0)
            rows = [{"step": _done(self.sweep.trials), "time": ended, "metrics": metrics}]
        return TrackedRun(
            self.sweep.name,
            self.sweep.name,
            request.settings(request.first).tracking.experiment,
            datetime.fromisoformat(self.sweep["started"]).timestamp(),
            status_of(outcome),
            tags={
                "ttrain.pipeline": "sweep",
                "ttrain.sweep": self.sweep.name,
                "ttrain.outcome": outcome,
                "ttrain.best": (best and best.run) or "",
                NOTE: text,
            },
            params={
                **request.space.texts,
                "metric": request.measure.metric,
                "sampler": request.sampler,
                "seed": request.seed,
            },
            rows=rows,
        )


def _opening(request: SweepRequest, sweep: Sweep) -> list[str]:
    """The lines that announce the sweep."""
    shared, per_trial = request.stages()
    head = f"{sweep.name}: {request.trials} trials, {_done(sweep.trials)} of them done, {request.parallel} side by side"
    lines = [
        f"{head}, sampler {request.sampler}, to {request.measure.direction} {request.measure.metric}",
        *(f"  {key}={text}" for key, text in request.space.texts.items()),
        f"  once: {', '.join(shared) or 'nothing'}; in each trial: {', '.join(per_trial)}",
    ]
    if heldout := changes_heldout(list(request.space.dimensions), request.graph()):
        lines.append(
            f"  warning: {', '.join(heldout)} may change which records are held out, and losses are then of other text"
        )
    return lines


def _done(trials: Sequence[Trial]) -> int:
    """How many trials need not run any more."""
    return sum(trial.outcome not in (RUNNING, FAILED) for trial in trials)


class RunningTrial:
    """A trial in its thread."""

    def __init__(self, runner: TrialRunner, trial: Trial, slot: int) -> None:
        """`slot`: its number among parallel trials."""
        self._runner, self.request, self.trial, self.slot = runner, runner.request, trial, slot
        self.execution: PipelineRun | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name=f"trial-{trial.number}", daemon=True)
        self._began = time.monotonic()

    def outcome(self) -> tuple[str, float | None, str | None]:
        """(outcome, metric, error) once the thread has ended; the outcome is "running" for a trial that continues later."""
        artifacts = self.execution.artifacts if self.execution else {}
        measure = self.request.measure
        if measure.stage in artifacts:  # also where the stop came after its end
            return COMPLETED, measure.of({name: a.result for name, a in artifacts.items()}), None
        # a BaseException also ends the trial: rich exits where nobody reads its output any more
        if isinstance(self.error, Interrupted) or not isinstance(self.error, Exception):
            return RUNNING, None, None
        diverged = isinstance(self.error, StageFailed) and self.error.kind == NOT_FINITE
        return (DIVERGED if diverged else FAILED), None, str(self.error)

    @property
    def would_fail_again(self) -> bool:
        """Whether all trials would fail: a stage failed that all share, or none had begun. Settings that cannot be combined
        are this trial's own."""
        failed = self.execution.failures if self.execution else {}
        return not failed.keys().isdisjoint(self._runner.shared) if failed else not isinstance(self.error, UsageError)

    def _run(self) -> None:
        try:
            self._pipeline()
        except BaseException as error:  # the thread that waits for this one reports it
            self.error = error
        self.seconds = time.monotonic() - self._began

    def _pipeline(self) -> None:
        values, runner = self.trial.values, self._runner
        with runner.planning:
            plan = self.request.plan(values, runner.store, self.slot)
        earlier = runs.read(runner.store.root, self.trial.run) if self.trial.run else None
        sweep = {"name": runner.sweep.name, "trial": self.trial.number}
        execution = PipelineRun(
            plan,
            _TrialDisplay(runner.display, self.trial.number, runner.shared),
            registers=False,
            facts={"sweep": sweep, **({"continues": id_of(earlier)} if earlier else {})},  # an interrupted one goes on
        )
        # Before its stages begin, so that a trial which is killed in one continues this run.
        self.trial = runner.sweep.put(replace(self.trial, run=execution.record.run))
        self.execution = execution
        track(execution)
        with execution.recorded():
            execution.raise_if_signalled()
            execution.run_stages()


@dataclass
class _TrialDisplay:
    """The display of one trial within that of the sweep; cached stages are not shown."""

    _display: Display
    _number: int
    _shared: list[str]  # stages of all trials

    def __call__(self, stage: str, event: str, data: Mapping[str, Any]) -> None:
        if event == "message":
            self._display.say(f"  trial {self._number}: {data['text'].strip()}")
        elif stage in self._shared and data.get("state") != "cached":
            self._display(stage, event, data)
        elif event != "started" and data.get("state") != "cached":
            self._display(f"trial {self._number} {stage}", event, data)
