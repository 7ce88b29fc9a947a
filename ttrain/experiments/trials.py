"""Run the trials of an experiment one after the other: each is a pipeline run.

Stages that trials share are built once: all trials find them in the store or wait for their lock.
Several processes may work on one experiment: each takes the next trial that no other has. A process
can be killed anywhere: ended trials are in the record, and an unfinished one continues where its
stage saved its state.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.text import format_duration
from ttrain.engine.display import StageDisplay
from ttrain.engine.execution import PipelineRun
from ttrain.errors import Interrupted, StageFailed, TTrainError, UsageError
from ttrain.experiments.changes import Change
from ttrain.experiments.request import Request
from ttrain.experiments.verdict import Judgement, scores_of, value_of
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.sweeps import COMPLETED, DIVERGED, FAILED, RUNNING, Experiment, Place, Trial
from ttrain.tasks import EVALUATE
from ttrain.tracking.pusher import Pusher, track
from ttrain.tracking.tracked_runs import id_of

POLL_SECONDS = 1.0  # while other processes run all trials that are needed
ENOUGH_RECORDS = 200  # of which one half chooses and the other decides; of fewer, both take all
NOT_FINITE = "NonFinite"  # the error of a stage whose loss is not finite


def run(
    request: Request, experiment: Experiment, store: ArtifactStore, display: StageDisplay
) -> None:
    """Run trials until all is decided. Raises Interrupted, or an error of all trials."""
    for trial in experiment.trials:
        with experiment.claimed(trial.place, FAILED) as failed:
            if failed:
                experiment.put(Trial(trial.change, trial.seed))
    worker = Worker(request, experiment, store, display)
    with worker.tracked():
        outcome = "failed"
        try:
            while worker.takes_next():
                pass
            outcome = "completed"
        except (Interrupted, KeyboardInterrupt):
            outcome = "interrupted"
            raise
        finally:
            experiment.end(outcome, worker.judged())


class Worker:
    """Runs trials of one experiment, as other processes may too."""

    def __init__(
        self, request: Request, experiment: Experiment, store: ArtifactStore, display: StageDisplay
    ) -> None:
        self.request = request
        self.experiment = experiment
        self.store = store
        self.display = display
        once, by_seed, _ = request.stages()
        self.shared = [*once, *by_seed]  # stages of several trials

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Show the experiment in trackers meanwhile, if the settings say so."""
        tracking = self.request.baseline.tracking
        if not tracking.enabled:
            yield
            return
        pusher = Pusher(self.store.root, self.experiment.name, self.experiment.note)
        self.experiment.note(experiment=tracking.experiment, **self.judged())
        pusher.start()
        try:
            yield
        finally:
            pusher.finish()

    def takes_next(self) -> bool:
        """Run the next trial that no other process has; False once nothing is left to decide."""
        wanted = self._wanted()
        for place in wanted:
            with self.experiment.claimed(place) as trial:
                if trial:
                    self._run(trial)
                    return True
        if wanted:
            time.sleep(POLL_SECONDS)
        return bool(wanted)

    def _wanted(self) -> list[Place]:
        """The trials that the next decision needs; those of a sampler that learns, one by one."""
        self.experiment.reload()
        judgement = Judgement(self.experiment, self.store)
        changes = judgement.changes
        if len(changes) >= len(self.request.changes) + self.request.draws:
            return judgement.standing.wanted
        ended = {trial.change for trial in self.experiment.trials if trial.outcome != RUNNING}
        if waiting := sorted({*range(len(changes))} - ended):
            return [(change, 1) for change in waiting]
        from ttrain.experiments import sampler

        trials = (
            trial
            for trial in judgement.trials.values()
            if trial.seed == 1 and trial.change > self.request.named
        )
        values = {trial.change: judgement.sign * value_of(trial) for trial in trials}
        self.experiment.add(
            lambda: asdict(sampler.draw(self.request.space, changes, values)), len(changes)
        )
        return [(len(changes), 1)]

    def _run(self, trial: Trial) -> None:
        """Run a trial, from where it was stopped, and record how it ended."""
        began = time.monotonic()
        change = Change(**self.experiment["changes"][trial.change])
        name = f"{change.name}, seed {trial.seed}"
        self._say(f"{name}{' goes on' if trial.run else ''}")
        # Again with each trial: of several processes another may have been interrupted.
        self.experiment.note(outcome="running", process=runs.this_process())
        execution: PipelineRun | None = None
        try:
            plan = self.request.plan(change, trial.seed, self.store)
            earlier = runs.read(self.store.root, trial.run) if trial.run else None
            facts = {
                "sweep": {
                    "name": self.experiment.name,
                    "change": trial.change,
                    "setting": change.name,
                    "seed": trial.seed,
                },
                **({"continues": id_of(earlier)} if earlier else {}),  # an interrupted one
            }
            execution = PipelineRun(plan, partial(self._show, name), facts=facts, registers=False)
            # before its stages begin, so that a trial which is killed in one continues this run
            trial = self.experiment.put(replace(trial, run=execution.record.run))
            track(execution)
            with execution.catching_signals(), execution.recorded():
                execution.run_stages()
        except Interrupted:
            self.experiment.put(self._measured(trial, execution, began))
            raise
        except Exception as error:
            trial = self._failed(trial, execution, error)
        trial = self._measured(trial, execution, began)
        self.experiment.put(trial)
        judged = self.judged()
        self.experiment.note(**judged)
        result = f"{trial.outcome} {trial.reason}" if trial.value is None else f"{trial.value:.4f}"
        self._say(f"{name}: {result} in {format_duration(trial.seconds)}; {judged['verdict']}")

    def _measured(self, trial: Trial, execution: PipelineRun | None, began: float) -> Trial:
        """The trial with its time and, where the metric's stage has ended, its metric.

        Raises TTrainError where the stage has no such metric.
        """
        trial = replace(trial, seconds=round(trial.seconds + time.monotonic() - began, 2))
        measure = self.request.measure
        if execution is None or measure.stage not in execution.artifacts:
            return trial
        value = measure.of({name: made.result for name, made in execution.artifacts.items()})
        if value is None:
            raise TTrainError(
                f"the trials have no {measure.metric}; their metrics are: "
                f"{', '.join(execution.metrics()) or 'none'}; "
                "name one of them with --metric, or hold out more records"
            )
        if evaluation := execution.artifacts.get(EVALUATE.name):
            metric = scores_of(evaluation.path, measure.metric)
            chooses = (
                self.request.options.rounds and len(self.request.changes) + self.request.draws > 2
            )
            has_enough = chooses and metric is not None and metric.items >= ENOUGH_RECORDS
            halves = (
                [metric.half(which).value for which in (False, True)]
                if metric and has_enough
                else []
            )
            trial = replace(trial, evaluation=evaluation.key, halves=halves)
        return replace(trial, outcome=COMPLETED, value=value)

    def _failed(self, trial: Trial, execution: PipelineRun | None, error: Exception) -> Trial:
        """The trial that ended by an error.

        Raises the error where nothing could be compared: the baseline failed, or a stage that
        several trials share, or none had begun. Settings that cannot be combined are this trial's.
        """
        failed = execution.failures if execution else {}
        is_of_all = (
            not failed.keys().isdisjoint(self.shared)
            if failed
            else not isinstance(error, UsageError)
        )
        if is_of_all or not trial.change:
            raise error
        diverged = isinstance(error, StageFailed) and error.kind == NOT_FINITE
        return replace(trial, outcome=DIVERGED if diverged else FAILED, error=str(error))

    def judged(self) -> JsonDict:
        """The verdicts after so many ended trials, as the record keeps them for trackers."""
        ended = sum(trial.outcome != RUNNING for trial in self.experiment.trials)
        judgement = Judgement(self.experiment, self.store).to_json()
        return {
            "settings": judgement["settings"],
            "verdict": judgement["verdict"],
            "judged_trials": ended,
        }

    def _show(self, name: str, stage: str, event: str, data: JsonObject) -> None:
        """Show an event of a trial within the display of all; cached stages are not shown."""
        if event == "message":
            self._say(f"  {name}: {data['text'].strip()}")
        elif data.get("state") != "cached" and (stage in self.shared or event != "started"):
            self.display(stage if stage in self.shared else f"{name} {stage}", event, data)

    def _say(self, text: str) -> None:
        self.display("", "message", {"text": text})
