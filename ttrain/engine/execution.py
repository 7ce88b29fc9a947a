"""One run of a pipeline: builds, records, tracks and displays its stages. Independent of the engine: Prefect may call it."""

from __future__ import annotations

import contextlib
import getpass
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ttrain.config.training import TRAINING_STAGES
from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.engine import baseline, launch, processes
from ttrain.engine.graph import Planned
from ttrain.engine.labels import NO_LABELS, Labels
from ttrain.engine.plan import Plan
from ttrain.engine.progress_display import DisplayObserver, StageDisplay
from ttrain.engine.provenance import commit, with_absolute_paths
from ttrain.engine.run_models import RunModels, check_names
from ttrain.engine.stop_request import SIGNALLED, StopRequest
from ttrain.errors import Interrupted, NothingNew, TooFewRows, TTrainError, with_fix
from ttrain.reports import summary
from ttrain.store.layout import TRACKED, Artifact
from ttrain.store.results import TrainingResult
from ttrain.store.runs import BUILT, NOTHING_NEW, RunLog, RunRecord
from ttrain.tasks import STAGES, Stage

log = logging.getLogger("ttrain")

NOTE_SECONDS = 2.0  # between two notes of a stage's progress


class Tracker(Protocol):
    """Shows a run elsewhere while it goes on, from what the run writes into the home."""

    def finish(self) -> object:
        """Show the run's end."""


class PipelineRun(StopRequest):
    """A pipeline run in progress."""

    def __init__(
        self,
        plan: Plan,
        display: StageDisplay,
        *,
        part_of: Mapping[str, Any] = MappingProxyType({}),
        labels: Labels = NO_LABELS,
        registers: bool = True,
    ) -> None:
        """`part_of`: what is noted in its record of the night or the sweep that it is a part of, and as `continues` the
        interrupted run with which trackers show it as one."""
        super().__init__(display.say)
        settings, store = plan.settings, plan.store
        self.plan, self.settings, self.store, self.display = plan, settings, store, display
        self.registers = registers and settings.runtime.node_rank == 0  # whether its models become versions
        if self.registers:
            check_names(store, settings.name)
        self.outcome = "running"  # then completed, failed, interrupted or nothing-new
        self.labels = labels
        self.record = RunRecord(
            store.root,
            plan.pipeline,
            [planned.stage.name for planned in plan.stages],
            with_absolute_paths(settings).model_dump(mode="json"),
            labels=labels.to_json(),
        )
        self.log = RunLog(self.record.path.with_suffix(".log"))
        self.artifacts: dict[str, Artifact] = {}
        self.model_set: str | None = None  # version of the registered set of models, once the run is complete
        self.failures: dict[str, BaseException] = {}  # by stage, of those without a result
        self._champion: dict[str, JsonDict] | None = None  # as a baseline; looked for once there is an evaluation
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = None  # before a stage that reuses parts starts
        self.to_start = {planned.stage.name: planned.stage for planned in plan.stages if planned.state == "run"}
        self._began = time.monotonic()
        self.record.note(commit=commit(), user=user_name(), **part_of)
        self.models = RunModels(settings.name, store, self.record.run)
        self.tracker: Tracker | None = None  # shows the run elsewhere while it goes on

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Pickle as a bare object: Prefect sends flow and task functions to Dask with everything they reference."""
        return object, ()

    def run_stage(self, planned: Planned, logged: Callable[[str], None]) -> tuple[Artifact, str]:
        """Build a stage of the plan, once those that it reads have ended, or take it from the store.

        Returns the artifact and its state: cached, completed, ...
        """
        stage = planned.stage
        inputs = {name: self.artifacts[of] if isinstance(of, str) else of for name, of in planned.sources.items()}
        if stage.uses_ranks:
            self._raise_too_few_rows()  # nothing is trained that the shards of another training have ended
        watcher = StageWatcher(self, stage, logged)
        try:
            outcome = launch.build(
                stage, self.settings, self.store, inputs, watcher, self.plan.rerun, forced=planned.forced, planned=planned
            )
        except BaseException as error:
            if not isinstance(error, Interrupted):
                self.failures[stage.name] = error
            if isinstance(error, NothingNew):
                watcher.found_nothing_new(error)
            else:
                watcher.failed(error)
            raise
        self.failures.pop(stage.name, None)  # a retry succeeded
        watcher.ended(outcome)
        self._add_artifact(outcome.artifact)
        for training in self._trained_on(stage):
            self._check_rows(training, outcome.artifact, inputs["tokenizer"], watcher)
        self._raise_too_few_rows()
        return outcome.artifact, outcome.state

    def _trained_on(self, shards: Stage) -> list[str]:
        """The training stages that this run must train on these shards; none for another stage."""
        if not shards.reuses_parts:
            return []
        waiting = {planned.stage.name for planned in self.plan.stages if planned.state == "run"}
        return [name for name, row in TRAINING_STAGES.items() if name in waiting and row.dataset == shards.dataset]

    def _check_rows(self, training: str, shards: Artifact, tokenizer: Artifact, watcher: StageWatcher) -> None:
        """Note a training with too few rows as failed as soon as its shards exist. Raises for other faults of the data."""
        shards = self.store.complete(shards, ("train",), report=lambda line: watcher.noted(STAGES[shards.stage], line))
        tokenizer = self.store.complete(tokenizer, (), report=lambda line: watcher.noted(STAGES[tokenizer.stage], line))
        stage, inputs = STAGES[training], {"shards": shards, "tokenizer": tokenizer}
        try:
            launch.verify_inputs(stage, self.store, inputs)  # first: a damaged index is no fault of settings or data
            with launch.setting_aside(stage, self.store, inputs):
                launch.check(getattr(self.settings, training), shards.path, tokenizer.path)
        except TTrainError as error:
            self.failures[training] = error
            StageWatcher(self, STAGES[training], lambda line: None).failed(error)
            if not isinstance(error, TooFewRows):
                raise

    def _raise_too_few_rows(self) -> None:
        """Raise TooFewRows for all trainings that have too few, once the shards of all are checked."""
        errors = [error for error in self.failures.values() if isinstance(error, TooFewRows)]
        known = {*self.artifacts, *self.failures}
        to_build = [planned.stage for planned in self.plan.stages if not planned.reused and planned.stage.name not in known]
        waits = any(map(self._trained_on, to_build))
        if errors and not waits:
            fixes = [fix for error in errors for fix in error.fixes]
            raise errors[0] if len(errors) == 1 else TooFewRows("\n".join(map(str, errors)), fixes)

    def check_reused(self) -> None:
        """Fail a training whose reused shards have too few rows, before anything trains."""
        for planned in self.plan.stages:
            tokenizer = planned.inputs.get("tokenizer")
            if planned.reused and planned.artifact and tokenizer:
                for training in self._trained_on(planned.stage):
                    watcher = StageWatcher(self, planned.stage, lambda line: None)
                    self._check_rows(training, planned.artifact, tokenizer, watcher)
        self._raise_too_few_rows()

    def note_reused(self, planned: Planned) -> None:
        """Record a stage that is not run: the selection leaves it out and its artifact is in the store."""
        assert planned.artifact is not None, "a reused artifact is in the store"
        self._add_artifact(planned.artifact)
        self.record.stage(
            planned.stage.name,
            outcome="cached",
            key=planned.key,
            path=str(planned.artifact.path),
            metric=summary.key_figures(planned.stage.name, planned.artifact.result, planned.artifact.path),
            why=list(planned.why),
        )

    def note_prefect(self, flow_run_id: str, url: str | None) -> None:
        """Record the Prefect flow run."""
        self.record.note(prefect={"flow_run_id": flow_run_id, "url": url})

    def _add_artifact(self, artifact: Artifact) -> None:
        self.artifacts[artifact.stage] = artifact

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def metrics(self) -> dict[str, float]:
        """The run's metrics so far, under their stable names."""
        return summary.metrics_of(self._results())

    def evaluation_table(self) -> list[summary.EvaluationRow]:
        """The rows of the evaluation table; [] before the evaluation."""
        results = self._results()
        return summary.rows(summary.metrics_of(results), results)

    def _results(self) -> dict[str, Mapping[str, Any]]:
        """The results by stage, with the champion's as a baseline if no stage scores it."""
        stage_results = {name: artifact.result for name, artifact in self.artifacts.items()}
        evaluation = self.artifacts.get("evaluate")
        if evaluation is None or any(stage.name == baseline.STAGE for stage in self.plan):
            return stage_results
        if self._champion is None:
            self._champion = baseline.champion_results(evaluation, self.settings.name, self.store)
        return {**stage_results, **self._champion}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Close the run with the outcome of the block."""
        outcome, error = "failed", None
        try:
            yield
            outcome = "completed"
        except NothingNew:
            outcome = NOTHING_NEW
            raise
        except (Interrupted, KeyboardInterrupt) as raised:
            outcome, error = "interrupted", str(raised)
            raise
        except BaseException as raised:
            error = str(raised)
            raise
        finally:
            self.finish(outcome, error)

    def finish(self, outcome: str, error: str | None = None) -> None:
        """Close the record and the tracked run. `outcome`: completed, failed, interrupted or nothing-new."""
        self.outcome = outcome
        if error:
            self.record.note(error=error)
        if self.signum:
            self.record.note(stopped=self.stop_reason)
        if outcome == "completed":
            self.register_set()  # before the record is closed: if killed here, the run crashed, and the next one registers
        self.record.note(evaluation=[list(row) for row in self.evaluation_table()])
        self.record.finish(outcome, self.metrics())
        if self.tracker:
            self.tracker.finish()
        self.store.cache.save()

    def register_set(self) -> None:
        """Register the models of this run as one set, which can become champion; a run that left a stage out has none."""
        if self.registers and {"tokenizer", "evaluate", *self.settings.trainings} <= set(self.artifacts):
            self.model_set = self.models.register_set(self.artifacts)
            self.record.note(model_set=f"{self.settings.name}/{self.model_set}")

    def track_stage(self, stage: Stage, work: Path) -> str:
        """The id by which trackers know the stage: that of the run which began its training, if it continues one."""
        earlier = read_object(work / TRACKED).get("id")
        tracked = str(earlier or f"{self.record.run}/{stage.name}")
        experiment = self.settings.tracking.experiment
        write_json(work / TRACKED, {"run": self.record.run, "id": tracked, "experiment": experiment})
        return tracked


def user_name() -> str | None:
    """Who started the run; None where, as in some containers, the user has no name."""
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return None


class StageWatcher(DisplayObserver):
    """Reports the events of one stage to the display, the record and the log."""

    def __init__(self, execution: PipelineRun, stage: Stage, logged: Callable[[str], None]) -> None:
        super().__init__(execution.display, execution, execution.settings.runtime.log_level)
        self._execution, self._stage, self._logged = execution, stage, logged
        self._noted = 0.0  # when its progress was noted last

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        run = self._execution
        if not stage.loads_torch:  # then its own process is there before the libraries are
            run.to_start.pop(stage.name, None)
        processes.warm_up(run.settings, [*run.to_start.values()])
        log_path = work / "output" / "run" / "log.txt"
        run.display.started(stage.name, summary.shortened(planned.why))
        run.log.add(stage.name, f"started: {'; '.join(planned.why)}")
        tracked = run.track_stage(stage, work)
        run.record.stage(
            stage.name,
            outcome="running",
            started_unix=time.time(),
            key=planned.key,
            log=str(log_path),
            why=list(planned.why),
            tracked=tracked,
        )
        if run.make_parts_elsewhere and stage.reuses_parts:
            run.make_parts_elsewhere(stage, work)

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        super().progressed(stage, progress)
        if time.monotonic() - self._noted > NOTE_SECONDS:
            self._noted = time.monotonic()
            names = ("done", "total", "unit", "first", "seconds")
            self._execution.record.progressed(stage.name, **{name: progress[name] for name in names if name in progress})

    def logged(self, stage: Stage, line: str) -> None:
        super().logged(stage, line)
        self._execution.log.add(stage.name, line)
        self._logged(line)

    def noted(self, stage: Stage, text: str) -> None:
        super().noted(stage, text)
        self._execution.log.add(stage.name, text)
        self._logged(text)

    def ended(self, outcome: launch.StageOutcome) -> None:
        run, artifact, name = self._execution, outcome.artifact, self._stage.name
        figures = summary.key_figures(name, artifact.result, artifact.path)
        run.display.ended(name, outcome.state, outcome.seconds, figures)
        run.log.add(name, f"{outcome.state} after {outcome.seconds:.1f} s: {figures}")
        run.record.stage(
            name,
            outcome=outcome.state,
            seconds=round(outcome.seconds, 2),
            key=artifact.key,
            path=str(artifact.path),
            log=str(artifact.path / "run" / "log.txt"),
            metric=figures,
            resumed_from_step=TrainingResult.of(artifact.result).resumed_from_step,
        )
        if outcome.state in BUILT and run.registers:
            run.models.register(artifact)

    def found_nothing_new(self, error: NothingNew) -> None:
        """End the stage without an artifact and without a failure; the night says why."""
        run, name = self._execution, self._stage.name
        run.log.add(name, f"{NOTHING_NEW}: {error}")
        run.record.stage(name, outcome=NOTHING_NEW, metric=str(error))
        run.display.ended(name, NOTHING_NEW, 0.0, "")

    def failed(self, error: BaseException) -> None:
        run, name = self._execution, self._stage.name
        outcome = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        message = str(error) if isinstance(error, TTrainError) else f"{type(error).__name__}: {with_fix(error)}"
        if outcome == "interrupted" and run.signum:  # the stage's process knows only of the signal
            message = message.replace(SIGNALLED, run.stop_reason)
        run.log.add(name, f"{outcome}: {message}")
        run.record.stage(name, outcome=outcome, error=message)
        run.display.failed(name, message)
        if isinstance(error, TTrainError | OSError):
            error.shown = True  # type: ignore[union-attr]
