"""One run of a pipeline: builds, records, tracks and displays its stages. Independent of the engine: Prefect may call it."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttrain import tracking
from ttrain.config import Settings, flatten
from ttrain.config.training import TRAINING_STAGES
from ttrain.core import hashing
from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.errors import Interrupted, NothingNew, TooFewRows, TTrainError, with_fix
from ttrain.pipeline import launch, processes, run_summary, system_metrics
from ttrain.pipeline.labels import NIGHT, NO_LABELS, Labels, trained_at_night
from ttrain.pipeline.plan import section_of
from ttrain.pipeline.progress_display import DisplayObserver, StageDisplay
from ttrain.pipeline.provenance import commit, with_absolute_paths
from ttrain.pipeline.recipe import NOTHING_AGAIN, Planned, Rerun
from ttrain.pipeline.run_models import EXAMPLES, RunModels
from ttrain.pipeline.stop_request import SIGNALLED, StopRequest
from ttrain.reports import summary
from ttrain.stages import STAGES, Stage
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.runs import NOTHING_NEW, RunLog, RunRecord

log = logging.getLogger("ttrain")


class PipelineRun(StopRequest):
    """A pipeline run in progress."""

    def __init__(
        self,
        pipeline: str,
        settings: Settings,
        store: ArtifactStore,
        display: StageDisplay,
        stages: Sequence[Planned],
        rerun: Rerun = NOTHING_AGAIN,
        *,
        extra_tags: Mapping[str, str] = MappingProxyType({}),
        labels: Labels = NO_LABELS,
        registers: bool = True,
        parent_identity: str | None = None,
        continues: str | None = None,
    ) -> None:
        """`stages`: the plan of the run. `parent_identity`: identity of the parent tracked run. `continues`: identity of an
        interrupted run whose tracked run this one continues."""
        super().__init__(display.say)
        self.pipeline, self.settings, self.store, self.display = pipeline, settings, store, display
        self.rerun = rerun
        self.registers = registers  # whether its models go to the tracker, and become versions there
        self.outcome = "running"  # then completed, failed, interrupted or nothing-new
        self.labels = labels
        self.record = RunRecord(
            store.root,
            pipeline,
            [planned.stage.name for planned in stages],
            with_absolute_paths(settings).model_dump(mode="json"),
            labels=labels.to_json(),
        )
        self.log = RunLog(self.record.path.with_suffix(".log"))
        self.artifacts: dict[str, Artifact] = {}
        self.model_set: str | None = None  # version of the registered set of models, if the run was tracked to its end
        self.failures: dict[str, BaseException] = {}  # by stage, of those without a result
        self.planned = stages
        self._unbuilt = {planned.stage.name: planned for planned in stages if planned.key}
        self._champion: dict[str, JsonDict] | None = None  # as a baseline; looked for once there is an evaluation
        self.mlflow_url: str | None = None  # of a server that displays the tracker's database but is not the tracker itself
        self._tracked: dict[str, tracking.AnyRun] = {}  # by stage
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = None  # before a stage that reuses parts starts
        self.to_start = {planned.stage.name: planned.stage for planned in stages if planned.state == "run"}
        self._began = time.monotonic()
        self._forced: set[tuple[str, str]] = set()  # (stage, key) of artifacts that --force rebuilt
        self._tracker = (
            tracking.open_store(store.root, settings.tracking.experiment)
            if settings.tracking.enabled and settings.runtime.node_rank == 0
            else tracking.NullStore()
        )
        self._tracker.on_upload(self._uploading)
        self._changed = tracking.masked(run_summary.deviations(settings))
        everything = dict(flatten(settings.model_dump(mode="json")))
        self._tags = {"ttrain.run": self.record.run, "ttrain.host": platform.node(), "ttrain.commit": commit() or ""}
        tags = {**self._tags, **extra_tags, **labels.tags}
        if labels.note:  # at the end of the run the rest of the description stands below it
            tags[tracking.NOTE] = run_summary.note(labels.note)
        night = extra_tags.get("ttrain.night")
        if night:
            self.record.note(night=night)
        self._parent = run_summary.start_run(
            self._tracker,
            night or self.record.run,
            pipeline,
            everything,
            self._changed,
            tags,
            identity=continues,
            parent=tracking.NullRun(identity=parent_identity) if parent_identity else None,
        )
        self._models = RunModels(settings.name, settings.runtime.sample_prompts or EXAMPLES, store, self._tracker)
        self._note_tracked()

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Pickle as a bare object: Prefect sends flow and task functions to Dask with everything they reference."""
        return object, ()

    def run_stage(self, stage: Stage, inputs: Artifacts, logged: Callable[[str], None]) -> tuple[Artifact, str]:
        """Build one stage, or take it from the store; return the artifact and its state: cached, completed, ..."""
        if stage.uses_ranks:
            self._raise_too_few_rows()  # nothing is trained that the shards of another training have ended
        watcher = StageWatcher(self, stage, logged)
        forced = stage.name in self.rerun.force or any((a.stage, a.key) in self._forced for a in inputs.values())
        planned = self._unbuilt.pop(stage.name, None)  # a retry plans anew: the stage may have saved its state
        try:
            outcome = launch.build(
                stage, self.settings, self.store, inputs, watcher, self.rerun, forced=forced, planned=planned
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
        if forced:
            self._forced.add((stage.name, outcome.artifact.key))
        for training in self._trained_on(stage):
            self._check_rows(training, outcome.artifact, inputs["tokenizer"], watcher)
        self._raise_too_few_rows()
        return outcome.artifact, outcome.state

    def _trained_on(self, shards: Stage) -> list[str]:
        """The training stages that this run must train on these shards; none for another stage."""
        if not shards.reuses_parts:
            return []
        waiting = {planned.stage.name for planned in self.planned if planned.state == "run"}
        return [name for name, row in TRAINING_STAGES.items() if name in waiting and row.dataset == shards.dataset]

    def _check_rows(self, training: str, shards: Artifact, tokenizer: Artifact, watcher: StageWatcher) -> None:
        """Note a training with too few rows as failed as soon as its shards exist. Raises for other faults of the data."""
        shards = self.store.complete(shards, ("train",), report=lambda line: watcher.fetching(STAGES[shards.stage], line))
        tokenizer = self.store.complete(tokenizer, (), report=lambda line: watcher.fetching(STAGES[tokenizer.stage], line))
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
        to_build = [planned.stage for planned in self.planned if not planned.reused and planned.stage.name not in known]
        waits = any(map(self._trained_on, to_build))
        if errors and not waits:
            fixes = [fix for error in errors for fix in error.fixes]
            raise errors[0] if len(errors) == 1 else TooFewRows("\n".join(map(str, errors)), fixes)

    def check_reused(self) -> None:
        """Fail a training whose reused shards have too few rows, before anything trains."""
        for planned in self.planned:
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
        self._parent.link_made_by(planned.artifact.stage, planned.artifact.key)

    def _note_tracked(self) -> None:
        """Record the tracked run's id, URL and identity; the id is None until its server answers."""
        reference = {"run_id": self._parent.id, "url": self._parent.url, "identity": self._parent.identity}
        self.record.note(tracking=reference)

    def _uploading(self, done: int, total: int) -> None:
        """Display the progress of an upload of artifacts to a remote tracker."""
        progress = {"done": done / 1e6, "total": total / 1e6, "unit": "MB", "figures": {}}
        self.display.progressed("uploading", progress)

    def note_prefect(self, flow_run_id: str, url: str | None) -> None:
        """Record the Prefect flow run, also in the tags of the tracked runs."""
        self.record.note(prefect={"flow_run_id": flow_run_id})
        tags = {"ttrain.prefect.flow_run_id": flow_run_id, **({"ttrain.prefect.url": url} if url else {})}
        self._tags |= tags
        self._parent.set_tags(tags)

    def _add_artifact(self, artifact: Artifact) -> None:
        self.artifacts[artifact.stage] = artifact
        self._parent.log_inputs(tracking.data_of(artifact))

    @property
    def tracked_run(self) -> str | None:
        """Id of the tracked run; None if nothing is tracked."""
        return self._parent.id

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
        evaluation, planned = self.artifacts.get("evaluate"), {planned_stage.stage.name for planned_stage in self.planned}
        if evaluation is None or run_summary.STAGE in planned:
            return stage_results
        if self._champion is None:
            self._champion = run_summary.of(evaluation, self.settings.name, self.store)
        return {**stage_results, **self._champion}

    def description(self) -> str:
        """The run's settings and results so far, in markdown."""
        run, table = self.record.snapshot(), self.evaluation_table()
        return run_summary.description(run, self._changed, self.metrics(), table, self._models.versions)

    @contextlib.contextmanager
    def recorded(
        self, guard: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    ) -> Iterator[None]:
        """Close the run with the outcome of the block. `guard`: around the closing."""
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
            with guard():
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
        self.record.finish(outcome, self.metrics())
        if "evaluate" in self.artifacts and self.registers:
            self._models.log_cards(self.artifacts)
        table, versions = self.evaluation_table(), self._models.versions
        record = self.record.snapshot()
        run_summary.log_end(self._parent, record, self.store.root, self.artifacts, self._changed, table, versions=versions)
        self._tracker.close()
        tracking.refresh_views(self._tracker)
        self._note_tracked()
        self.store.cache.save()

    def page_of(self, stage: str | None = None) -> str | None:
        """URL of the tracked run, or of a stage's; None if no server displays it."""
        run = self._tracked.get(stage) if stage else self._parent
        if run is None or run.url or not (run.page and self.mlflow_url):
            return run.url if run else None
        return f"{self.mlflow_url}/{run.page}"

    def start_child(self, stage: Stage, planned: Planned, work: Path) -> tracking.AnyRun:
        """Start the tracked run of a stage, or continue it if the stage continues."""
        state = read_object(work / "tracking.json")
        child = run_summary.start_stage_run(
            self._tracker,
            self._parent,
            self.record.run,
            stage.name,
            planned.key,
            section_of(stage, self.settings).model_dump(mode="json"),
            planned.inputs,
            {**self._tags, "ttrain.code": hashing.digest_of(planned.ingredients["code"])},
            run_id=state.get("run_id"),
            identity=state.get("identity"),
            keeps_files=self.registers,
        )
        reference = {"run_id": child.id, "identity": child.identity, "run": self.record.run}
        write_json(work / "tracking.json", {**reference, "experiment": self.settings.tracking.experiment})
        self._tracked[stage.name] = child
        return child

    def register_set(self) -> None:
        """Register the models of this run as one set, which can become champion; a run that left a stage out has none."""
        if self.registers and {"tokenizer", "evaluate", *self.settings.trainings} <= set(self.artifacts):
            self.model_set = self._models.register_set(self.artifacts, self.record.run, self.metrics(), self._parent)
            self.record.note(model_set=self.model_set and f"{self.settings.name}/{self.model_set}")


class StageWatcher(DisplayObserver):
    """Reports the events of one stage to the display, the record, the log and the tracker."""

    def __init__(self, execution: PipelineRun, stage: Stage, logged: Callable[[str], None]) -> None:
        super().__init__(execution.display, execution, execution.settings.runtime.log_level)
        self._execution, self._stage, self._logged = execution, stage, logged
        self.child: tracking.AnyRun | None = None
        self._followers: list[tracking.MetricsFollower] = []
        self.log_path: Path | None = None
        self._samples: tracking.SampleFollower | None = None

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        run = self._execution
        if not stage.loads_torch:  # then its own process is there before the libraries are
            run.to_start.pop(stage.name, None)
        processes.warm_up(run.settings, [*run.to_start.values()])
        log_path = self.log_path = work / "output" / "run" / "log.txt"
        run.display.started(stage.name, summary.shortened(planned.why))
        run.log.add(stage.name, f"started: {'; '.join(planned.why)}")
        run.record.stage(stage.name, outcome="running", key=planned.key, log=str(log_path), why=list(planned.why))
        self.child = run.start_child(stage, planned, work)
        self._samples = tracking.SampleFollower(log_path.with_name("samples"), self.child, f"{stage.name}/run/samples")
        later = run.store.path(stage.name, planned.key or "") / "run"
        for name in ("metrics.jsonl", *system_metrics.files(run.settings.runtime.nodes)):
            follower = tracking.MetricsFollower(log_path.with_name(name), self.child, later_at=[later / name])
            self._followers.append(follower)
        if run.make_parts_elsewhere and stage.reuses_parts:
            run.make_parts_elsewhere(stage, work)

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        super().progressed(stage, progress)
        if self._samples:
            self._samples.log_new(only_if_changed=True)

    def logged(self, stage: Stage, line: str) -> None:
        super().logged(stage, line)
        self._execution.log.add(stage.name, line)
        self._logged(line)

    def waiting(self, stage: Stage, who: str) -> None:
        super().waiting(stage, who)
        self._execution.log.add(stage.name, f"waiting for {who}, who is building it")

    def fetching(self, stage: Stage, line: str) -> None:
        super().fetching(stage, line)
        self.logged(stage, line)

    def process_ended(self, stage: Stage) -> None:
        for follower in self._followers:  # before publishing, which moves the followed file
            follower.stop()
        self._followers = []
        may_be_night = self._execution.settings.runtime.night is not None
        if may_be_night and self.log_path and trained_at_night(self.log_path.with_name("metrics.jsonl")):
            self._execution._parent.set_tags({NIGHT: "1"})
            if self.child:
                self.child.set_tags({NIGHT: "1"})
        if self._samples:
            self._samples.log_new()

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
            resumed_from_step=artifact.result.get("resumed_from_step"),
        )
        if self.child:
            tracking.log_result(self.child, artifact)
            if run.registers:
                run._models.register(artifact, self.child)
            self.child.finish("FINISHED")
        else:
            run._parent.link_made_by(name, artifact.key)

    def found_nothing_new(self, error: NothingNew) -> None:
        """End the stage without an artifact and without a failure; the night says why."""
        run, name = self._execution, self._stage.name
        run.log.add(name, f"{NOTHING_NEW}: {error}")
        run.record.stage(name, outcome=NOTHING_NEW, metric=str(error))
        run.display.ended(name, NOTHING_NEW, 0.0, "")
        if self.child:
            self.child.finish(tracking.status_of(NOTHING_NEW))

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
        if self.child:
            self.child.set_tags({"ttrain.error": message[:1000]})
            if self.log_path:  # as it is now; a finished artifact has it among its files
                try:
                    self.child.log_text(self.log_path.read_text(encoding="utf-8", errors="replace"), self.log_path.name)
                except FileNotFoundError:
                    pass  # its process did not begin
                except OSError as error:
                    log.warning("the log %s does not reach MLflow: %s", self.log_path, error.strerror)
            self.child.finish(tracking.status_of(outcome))
