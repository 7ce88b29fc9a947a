"""The trials of a sweep, run: each a pipeline run in a thread of its own, whose stages are processes as always.

What trials share is built once, since all of them find it in the store or wait for its lock. A process can be killed
anywhere: what has ended is in the study, and a trial that had not ended goes on where its stage saved its state.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from flows.sweep import Asked, continued
from flows.trial import PRUNED, RunningTrial
from ttrain import tracking
from ttrain.core.signals import catching_signals
from ttrain.core.terminal import escaped
from ttrain.errors import Interrupted, TTrainError
from ttrain.pipeline.progress_display import Display
from ttrain.reports import summary as report
from ttrain.store import runs
from ttrain.store.artifacts import Store
from ttrain.sweep import measure as measures
from ttrain.sweep import records, report_page, summary
from ttrain.sweep import study as studies
from ttrain.sweep.records import Sweep, process_here
from ttrain.sweep.space import shown
from ttrain.sweep.study import Study, Trial

POLL_SECONDS, CURVE_SECONDS = 0.1, 0.5
FAILURES = 3  # of trials, one after the other, that end the sweep


def begin(asked: Asked, store: Store, screen: Console) -> Sweep:
    """The sweep that was asked for: one that goes on, or a new one."""
    sweep, changed = continued(asked, store)
    for line in changed:
        screen.print(escaped(f"a new sweep begins: {line}"), highlight=False, soft_wrap=True, markup=False)
    return sweep or records.begin(store.root, asked.to_json(), asked.ingredients(store))


def run(asked: Asked, sweep: Sweep, words: Sequence[str], store: Store, screen: Console) -> None:
    """Run the trials that are left; the sweep's lock must be held. `words`: of the command line, but for the ranges.

    Raises Interrupted, or what no trial would escape.
    """
    sweep.note(words=list(words))
    study = Study.of(sweep, writes=True)
    for line in _opening(asked, sweep, study.trials()):
        screen.print(escaped(line), highlight=False, soft_wrap=True, markup=False)
    if _done(study.trials()) < asked.trials:
        with contextlib.closing(Display(screen)) as display:
            Trials(asked, sweep, study, store, display).run()


class Trials:
    """The trials of one sweep, whose lock this process has."""

    def __init__(self, asked: Asked, sweep: Sweep, study: Study, store: Store, display: Display) -> None:
        self.asked, self.sweep, self.study, self.store, self.display = asked, sweep, study, store, display
        self.signum = 0
        self._running: dict[int, RunningTrial] = {}  # by place
        self._failed_in_a_row = 0
        self._error: BaseException | None = None  # that no other trial would escape
        self._tracker = (
            tracking.open_store(store.root, asked.settings(asked.first).tracking.experiment)
            if asked.settings(asked.first).tracking.enabled
            else tracking.NullStore()
        )
        self._parent = self._tracker.start_run(
            sweep.name,
            identity=(sweep["tracking"] or {}).get("identity"),
            tags={"ttrain.pipeline": "sweep", "ttrain.sweep": sweep.name},
            params={**asked.space.texts, "metric": asked.measure.metric, "sampler": asked.sampler, "seed": asked.seed},
        )
        sweep.note(outcome="running", process=process_here(), tracking=self._tracked())

    def run(self) -> None:
        """Until all trials have ended. Raises Interrupted once all that ran are saved, or what no trial would escape."""
        outcome = "failed"
        try:
            with catching_signals(self._stop, self._stop_at_once):
                self._loop()
            outcome = "completed"
        except Interrupted:
            outcome = "interrupted"
            raise
        finally:
            self._finish(outcome)

    def _loop(self) -> None:
        unfinished = [
            self.study.again(trial) if trial.outcome == studies.FAILED else trial
            for trial in self.study.trials()
            if trial.outcome in (studies.RUNNING, studies.FAILED)
        ]
        looked = 0.0
        while True:
            for place in range(self.asked.parallel):
                if place not in self._running and not self.signum and not self._error:
                    trial = unfinished.pop(0) if unfinished else self._next()
                    if trial:
                        self._begin(place, trial)
            if not self._running:
                break
            if time.monotonic() - looked > CURVE_SECONDS:
                looked = time.monotonic()
                for running in self._running.values():
                    self._look(running)
            for place, running in [*self._running.items()]:
                if not running.thread.is_alive():
                    del self._running[place]
                    self._ended(running)
            time.sleep(POLL_SECONDS)
        if self._error:
            raise self._error
        if self.signum:
            raise Interrupted("the sweep was stopped; the same command continues", self.signum)

    def _next(self) -> Trial | None:
        return self.study.ask() if len(self.study.trials()) < self.asked.trials else None

    def _begin(self, place: int, trial: Trial) -> None:
        values = "  ".join(f"{key}={shown(value)}" for key, value in trial.values.items())
        goes_on = " goes on" if trial.run else ""
        self.display.say(_plain(f"trial {trial.number} of {self.asked.trials}{goes_on}: {values}"))
        tracked = self._options_of(trial)
        running = RunningTrial(self.asked, self.sweep.name, trial, place, self.store, self.display, tracked)
        self._running[place] = running
        running.thread.start()

    def _look(self, running: RunningTrial) -> None:
        """Keep what is new of a trial's curve; end one that is behind the others."""
        number = running.trial.number
        if not running.execution:
            return
        if running.trial.run != running.execution.record.run:
            running.trial = replace(running.trial, run=running.execution.record.run)
            self.study.note(number, run=running.trial.run)
        if not (new := running.new_points()):
            return
        self.study.report(number, new)
        if self.asked.prune and running.is_training and self.study.is_hopeless(number):
            running.execution.ask_to_stop(signal.SIGTERM, f"{PRUNED}: behind the median of the other trials")

    def _ended(self, running: RunningTrial) -> None:
        self._look(running)
        outcome, value, error = running.outcome()
        trial, seconds = running.trial, (running.trial.seconds or 0.0) + running.seconds
        self.study.note(trial.number, seconds=round(seconds, 2), error=error)
        if outcome == studies.COMPLETED and value is None:
            self._fail(self._no_metric(running))
            return
        if outcome == studies.FAILED:
            self._failed_in_a_row += 1
            if self._failed_in_a_row == FAILURES or running.would_fail_again:
                self._fail(running.error)
                return
        if outcome == studies.RUNNING:  # asked to stop: it goes on another time
            return
        if outcome != studies.FAILED:
            self._failed_in_a_row = 0
        self.study.tell(trial.number, outcome, value)
        self._tell(trial.number, seconds)

    def _fail(self, error: BaseException | None) -> None:
        """No other trial would fare better: those that run save their state, and none begins."""
        self._error = error
        for running in self._running.values():
            running.stop(signal.SIGTERM)

    def _no_metric(self, running: RunningTrial) -> TTrainError:
        assert running.execution is not None, "it has come to its end"
        there = ", ".join(running.execution.metrics()) or "none"
        return TTrainError(
            f"trial {running.trial.number} has no {self.asked.measure.metric}; its metrics are: {there}; "
            f"name one of them with --metric, or hold out more records"
        )

    def _tell(self, number: int, seconds: float) -> None:
        """A line for the user, two points for the tracker."""
        trials = self.study.trials()
        trial, best = next(t for t in trials if t.number == number), self.study.best()
        figure = summary.figure(trial) if trial.outcome == studies.COMPLETED else summary.outcome(trial)
        standing = (
            "the best so far" if best == trial else f"the best is trial {best.number}, {best.value:.4f}" if best else ""
        )
        self.display.say(_plain(f"trial {number}: {figure} in {report.seconds(seconds)}; {standing}".rstrip("; ")))
        done = sum(t.outcome != studies.RUNNING for t in trials)
        points = {"sweep/value": trial.value, "sweep/best": best.value if best else None}
        metrics = {name: value for name, value in points.items() if value is not None}
        if metrics:
            self._parent.log_metrics([{"step": done, "time": time.time(), "metrics": metrics}])

    def _stop(self, signum: int) -> None:
        self.signum = signum
        self.display.say("[yellow]stopping: the running trials save their state (again to end at once)[/]")
        for running in self._running.values():
            running.stop(signum)

    def _stop_at_once(self, signum: int) -> BaseException:
        for running in self._running.values():
            if running.execution:
                running.execution.at_once = True
        return Interrupted("interrupted twice; the trials were ended where they stood", signum)

    def _finish(self, outcome: str) -> None:
        for running in self._running.values():  # where the loop was left before they had ended
            running.stop(signal.SIGTERM)
            running.thread.join()
        best, trials = self.study.best(), self.study.trials()
        self.sweep.note(outcome=outcome, best=best.number if best else None)
        header, rows = summary.trial_table(trials, self.asked.space, self.asked.measure)
        table = report.markdown(rows, header)
        self._parent.log_text(json.dumps([trial.to_json() for trial in trials], indent=1), "trials.json")
        self._parent.log_text(report_page.render(self.sweep, trials, self.study.importances()), self.sweep.page.name)
        self._parent.set_tags({tracking.NOTE: f"{summary.verdict(trials, self.asked.measure)}\n\n{table}"})
        if best and best.value is not None:
            self._log_best(best, done=_done(trials))
            self._parent.set_tags({"ttrain.best": best.run or ""})
        self._parent.set_tags({"ttrain.outcome": outcome})
        self._parent.finish({"completed": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED"))
        self._tracker.close()
        self.sweep.note(tracking=self._tracked())

    def _log_best(self, best: Trial, *, done: int) -> None:
        """Give the sweep's tracked run the figures of its best trial, so that it stands in MLflow's table beside other runs.

        The step is the number of trials that ended: of a sweep that goes on, the newest figures count.
        """
        record = (runs.read(self.store.root, best.run) if best.run else None) or {}
        figures = {self.asked.measure.metric: best.value, **record.get("metrics", {}), "sweep/best_trial": best.number}
        row = {"step": done, "time": time.time(), "metrics": figures}
        self._parent.keep_rows([f"{json.dumps(row)}\n".encode()])

    def _tracked(self) -> dict[str, str | None]:
        """The sweep's tracked run; no id as long as the tracker's server is silent."""
        return {"identity": self._parent.identity, "run_id": self._parent.id, "url": self._parent.url}

    def _options_of(self, trial: Trial) -> dict[str, Any]:
        """How a trial's run is tracked: as a part of the sweep's; one that was cut short goes on as the run that it was."""
        earlier = runs.read(self.store.root, trial.run) if trial.run else None
        return {
            "within": self._parent.identity,
            "continues": ((earlier or {}).get("tracking") or {}).get("identity"),
            "extra_tags": {"ttrain.sweep": self.sweep.name, "ttrain.trial": str(trial.number)},
        }


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _opening(asked: Asked, sweep: Sweep, trials: Sequence[Trial]) -> list[str]:
    """What is about to be done."""
    shared, own = asked.stages()
    done = _done(trials)
    goes_on = f", {done} of them done before" if done else ""
    side = f", {asked.parallel} side by side" if asked.parallel > 1 else ""
    better = "more" if asked.measure.maximize else "less"
    head = f"{sweep.name}: {asked.trials} trials{goes_on}{side}, sampler {asked.sampler}"
    lines = [
        f"{head}; {better} {asked.measure.metric} is better",
        *(f"  {key}={text}" for key, text in asked.space.texts.items()),
        f"  once: {', '.join(shared) or 'nothing'}; in each trial: {', '.join(own)}",
    ]
    heldout = measures.changes_heldout(list(asked.space.dimensions), asked.graph())
    if heldout:
        lines.append(
            f"  careful: {', '.join(heldout)} may change which records are held out, and losses are then of other text"
        )
    return lines


def _done(trials: Sequence[Trial]) -> int:
    """How many need not be run any more."""
    return sum(trial.outcome not in (studies.RUNNING, studies.FAILED) for trial in trials)
