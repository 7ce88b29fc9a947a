"""Run the trials of an experiment: each is a pipeline run in a thread of its own, with its stages in processes, as always.

What trials share is built once, since all of them find it in the store or wait for its lock. A process can be killed
anywhere: ended trials are in the record, and an unfinished one continues where its stage saved its state.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ttrain.core.text import format_duration
from ttrain.engine.display import Display
from ttrain.engine.execution import PipelineRun
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.experiments.records import COMPLETED, DIVERGED, FAILED, RUNNING, Experiment, Trial
from ttrain.experiments.request import Request
from ttrain.experiments.tracked import keep
from ttrain.experiments.verdict import Judgement, halves_of, scores_of, value_of
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EVALUATE
from ttrain.tracking.pusher import Pusher, track
from ttrain.tracking.tracked_runs import id_of

POLL_SECONDS = 0.1
NOT_FINITE = "NonFinite"  # the error of a stage whose loss is not finite


class Runner:
    """Runs trials of one experiment, as other processes may too, until nothing is left to decide."""

    def __init__(self, request: Request, experiment: Experiment, store: ArtifactStore, display: Display) -> None:
        self.request, self.experiment, self.store, self.display = request, experiment, store, display
        self.stop_request = StopRequest(display.say, "the running trials save their state")
        self.planning = threading.Lock()  # a plan parses code, which two threads at once cannot (`core/hashing.py`)
        once, by_seed, _ = request.stages()
        self.shared = [*once, *by_seed]  # stages that several trials share
        self._running: dict[int, RunningTrial] = {}  # by slot
        self._error: BaseException | None = None  # that every other trial would have, too
        self._tracks = request.baseline.tracking.enabled

    def run(self) -> None:
        """Run all trials to their ends. Raises Interrupted once they are saved, or an error that every trial would have."""
        self.experiment.note(outcome="running", process=runs.this_process())
        for trial in self.experiment.trials:
            if trial.outcome == FAILED:
                self.experiment.put(Trial(trial.change, trial.seed))
        outcome, pusher = "failed", Pusher(self.store.root, self.experiment.name, self._note)
        self._keep()
        if self._tracks:
            pusher.start()
        try:
            with self.stop_request.catching_signals():
                self._loop()
            outcome = "completed"
        except Interrupted:
            outcome = "interrupted"
            raise
        finally:
            self._finish()
            self.experiment.note(outcome=outcome)
            self._keep()
            if self._tracks:
                pusher.finish()

    def _loop(self) -> None:
        while True:
            is_open = not self._signum and self._fill()
            if not self._running and not is_open:
                break
            self._stop_trials(self._signum)
            for slot, running in [*self._running.items()]:
                if not running.thread.is_alive():
                    del self._running[slot]
                    self._ended(running)
            time.sleep(POLL_SECONDS)
        if self._error:
            raise self._error
        if signum := self.stop_request.signum:
            raise Interrupted("the sweep was stopped; the same command continues", signum)

    def _fill(self) -> bool:
        """Give every free slot a trial that nobody has; returns whether the experiment needs further trials."""
        free = [slot for slot in range(self.request.parallel) if slot not in self._running]
        wanted = self._wanted() if free else []
        for place in wanted:
            ends = contextlib.ExitStack()
            trial = self.experiment.claim(place, ends) if free else None
            if trial is None:
                ends.close()
            else:
                self._begin(free.pop(0), trial, ends)
        return bool(wanted or self._running)

    def _wanted(self) -> list[tuple[int, int]]:
        """The trials that the next decision needs; one of a change that is drawn by the results so far."""
        self.experiment.reload()
        number, judgement = len(self.experiment.changes), Judgement(self.experiment, self.store)
        if number > self.request.draws or not self.request.draws:
            return judgement.standing.wanted
        done = {change: judgement.sign * value_of(trial) for (change, seed), trial in judgement.trials.items()}
        ended = {trial.change for trial in self.experiment.trials if trial.outcome != RUNNING}
        if waiting := sorted({*range(number)} - ended):
            return [(change, 1) for change in waiting]
        from ttrain.experiments import sampler

        changes = self.experiment.changes
        self.experiment.add(lambda: sampler.draw(self.request.space, changes, done), number)
        return [(number, 1)]

    @property
    def _signum(self) -> int:
        """The signal that ends the running trials, also where every other trial would fail; 0 while there is none."""
        return self.stop_request.signum or (signal.SIGTERM if self._error else 0)

    def _stop_trials(self, signum: int) -> None:
        """Ask the running trials to save their state, or, after a second signal, end them; 0 asks for nothing."""
        for running in self._running.values():
            if signum and running.execution:
                running.execution.ask_to_stop(signum)
                running.execution.at_once = self.stop_request.at_once

    def _begin(self, slot: int, trial: Trial, ends: contextlib.ExitStack) -> None:
        running = RunningTrial(self, self.experiment.put(trial), slot, ends)
        self.display.say(f"{running.name}{' goes on' if trial.run else ''}")
        self._running[slot] = running
        running.thread.start()

    def _ended(self, running: "RunningTrial") -> None:
        """Record the trial; it stays unfinished where it was stopped, or where every other one would fail like it."""
        trial = running.outcome()
        failure: BaseException | None = None
        if trial.outcome == COMPLETED and trial.value is None:
            names = ", ".join(running.execution.metrics() if running.execution else ()) or "none"
            failure = TTrainError(
                f"{running.name} has no {self.experiment.measure.metric}; its metrics are: {names}; "
                f"name one of them with --metric, or hold out more records"
            )
        elif trial.outcome == FAILED and running.would_fail_again:
            failure = running.error
        if failure:
            self._error = failure
            trial = replace(trial, outcome=RUNNING)
        self.experiment.put(trial)
        running.ends.close()
        self._keep()
        if trial.outcome != RUNNING:
            result = f"{trial.outcome} {trial.reason}" if trial.value is None else f"{trial.value:.4f}"
            sentence = Judgement(self.experiment, self.store).sentence
            self.display.say(f"{running.name}: {result} in {format_duration(trial.seconds)}; {sentence}")

    def _finish(self) -> None:
        while any(running.thread.is_alive() for running in self._running.values()):  # after an error in the loop
            self._stop_trials(self._signum or signal.SIGTERM)
            time.sleep(POLL_SECONDS)

    def _keep(self) -> None:
        """Keep what trackers show of the experiment, for the next push."""
        if self._tracks:
            keep(Judgement(self.experiment, self.store), self.request.baseline.tracking.experiment)

    def _note(self, **values: Any) -> None:
        self.experiment.note(**values)


class RunningTrial:
    """A trial in its thread; whoever holds `ends` has it."""

    def __init__(self, runner: Runner, trial: Trial, slot: int, ends: contextlib.ExitStack) -> None:
        """`slot`: its number among parallel trials."""
        self._runner, self.trial, self.slot, self.ends = runner, trial, slot, ends
        self.change = runner.experiment.changes[trial.change]
        self.name = f"{self.change.name}, seed {trial.seed}"
        self.execution: PipelineRun | None = None
        self.error: BaseException | None = None
        self._began = time.monotonic()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def outcome(self) -> Trial:
        """The trial once the thread has ended; its outcome is "running" where it continues later."""
        artifacts = self.execution.artifacts if self.execution else {}
        trial = replace(self.trial, seconds=round(self.trial.seconds + time.monotonic() - self._began, 2))
        measure = self._runner.experiment.measure
        if measure.stage in artifacts:  # also where the stop came after its end
            value = measure.of({name: artifact.result for name, artifact in artifacts.items()})
            evaluation = artifacts.get(EVALUATE.name)
            if evaluation:
                halves = halves_of(scores_of(evaluation.path, measure.metric))
                trial = replace(trial, evaluation=evaluation.key, halves=halves)
            return replace(trial, outcome=COMPLETED, value=value)
        # a BaseException also ends the trial: rich exits where nobody reads its output any more
        if isinstance(self.error, Interrupted) or not isinstance(self.error, Exception):
            return trial
        diverged = isinstance(self.error, StageFailed) and self.error.kind == NOT_FINITE
        return replace(trial, outcome=DIVERGED if diverged else FAILED, error=str(self.error))

    @property
    def would_fail_again(self) -> bool:
        """Whether all trials would fail: a stage failed that several share, or none had begun. Settings that cannot be
        combined are this trial's own."""
        failed = self.execution.failures if self.execution else {}
        return not failed.keys().isdisjoint(self._runner.shared) if failed else not isinstance(self.error, UsageError)

    def _run(self) -> None:
        try:
            self._pipeline()
        except BaseException as error:  # the thread that waits for this one reports it
            self.error = error

    def _pipeline(self) -> None:
        runner, trial = self._runner, self.trial
        with runner.planning:
            plan = runner.request.plan(self.change, trial.seed, runner.store, self.slot)
        earlier = runs.read(runner.store.root, trial.run) if trial.run else None
        sweep = {"name": runner.experiment.name, "change": trial.change, "setting": self.change.name, "seed": trial.seed}
        execution = PipelineRun(
            plan,
            _TrialDisplay(runner.display, self.name, runner.shared),
            registers=False,
            part_of={"sweep": sweep, **({"continues": id_of(earlier)} if earlier else {})},  # an interrupted one goes on
        )
        # Before its stages begin, so that a trial which is killed in one continues this run.
        self.trial = runner.experiment.put(replace(trial, run=execution.record.run))
        self.execution = execution
        track(execution)
        with execution.recorded():
            execution.raise_if_signalled()
            execution.run_stages()


@dataclass
class _TrialDisplay:
    """The display of one trial within that of the experiment; cached stages are not shown."""

    _display: Display
    _name: str
    _shared: list[str]  # stages of several trials

    def __call__(self, stage: str, event: str, data: Mapping[str, Any]) -> None:
        if event == "message":
            self._display.say(f"  {self._name}: {data['text'].strip()}")
        elif stage in self._shared and data.get("state") != "cached":
            self._display(stage, event, data)
        elif event != "started" and data.get("state") != "cached":
            self._display(f"{self._name} {stage}", event, data)
