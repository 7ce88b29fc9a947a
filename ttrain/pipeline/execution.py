"""One run of a pipeline: builds its stages, records, tracks and shows them. Knows no engine: Prefect may call it."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from ttrain import tracking
from ttrain.config import Settings, flatten
from ttrain.config.training import TRAININGS
from ttrain.core import hashing
from ttrain.core.files import read_object, write_json
from ttrain.core.signals import catching_signals, interrupted_twice
from ttrain.errors import Interrupted, TTrainError
from ttrain.pipeline import (
    champion_baseline,
    launch,
    model_description,
    processes,
    registration,
    run_summary,
    system_metrics,
)
from ttrain.pipeline.absolute_paths import absolute
from ttrain.pipeline.commit import commit
from ttrain.pipeline.labels import NIGHT, Labels
from ttrain.pipeline.labels import NONE as NO_LABELS
from ttrain.pipeline.plan import section_of
from ttrain.pipeline.planned import Planned
from ttrain.pipeline.progress_display import Screen
from ttrain.reports import evaluation_table, summary
from ttrain.stages import STAGES, Stage, enough_rows
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact
from ttrain.store.metric_rows import read_rows
from ttrain.store.run_log import RunLog
from ttrain.store.runs import RunRecord

log = logging.getLogger("ttrain")

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    "pretrain": ("base", "model"),
    "sft": ("sft", "model"),
    "lora": ("lora", "adapter"),
}


REPORT = "report.html"  # the run's page among the files of the tracked run
SIGNALLED = "stopped by a signal"
CLOCK_SECONDS = 1.0  # how often the clock is looked at


class Execution:
    """A pipeline run in progress."""

    def __init__(
        self,
        pipeline: str,
        settings: Settings,
        store: Store,
        display: Screen,
        stages: list[str],
        *,
        force: frozenset[str] = frozenset(),
        extend: bool = False,
        go_on: str = "",
        extra_tags: Mapping[str, str] = MappingProxyType({}),
        labels: Labels = NO_LABELS,
        registers: bool = True,
        within: str | None = None,
        continues: str | None = None,
    ) -> None:
        """`within`: identity of the tracked run that this one's is part of. `continues`: that of a run which was cut short,
        and whose tracked run goes on as this one's."""
        self.pipeline, self.settings, self.store, self.display = pipeline, settings, store, display
        self.force, self.extend, self.go_on = force, extend, go_on
        self.registers = registers  # whether its models go to the tracker, and become versions there
        self.outcome = "running"  # then completed, failed or interrupted
        self.labels = labels
        self.record = RunRecord(
            store.root, pipeline, stages, absolute(settings).model_dump(mode="json"), labels=labels.to_json()
        )
        self.log = RunLog(self.record.path.with_suffix(".log"))
        self.artifacts: dict[str, Artifact] = {}
        self.model_set: str | None = None  # version of the registered set of models, where the run was tracked to its end
        self.failures: dict[str, BaseException] = {}  # of stages that have no result yet
        self.signum = 0  # of the signal that asked to stop, or stands for another reason
        self.stop_reason = SIGNALLED
        self.at_once = False  # a second signal came
        self.planned: Sequence[Planned] = ()
        self._champion: dict[str, dict[str, Any]] | None = None  # as a baseline; looked for once there is an evaluation
        self.mlflow_url: str | None = None  # of a server that shows the tracker's database, where it is not the tracker
        self._cached: list[str] = []
        self._tracked: dict[str, tracking.Run | tracking.NullRun] = {}  # by stage
        self._opened_by_mlflow = set[str]()  # stages whose registered models MLflow can open
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = None  # before a stage that reuses parts starts
        self.loads_torch = any(STAGES[name].loads_torch for name in stages)
        self._began = time.monotonic()
        self._forced: set[tuple[str, str]] = set()  # (stage, key) of what was built because it was asked for
        self._tracker = (
            tracking.open_store(store.root, settings.tracking.experiment)
            if settings.tracking.enabled and settings.runtime.node_rank == 0
            else tracking.NullStore()
        )
        self._tracker.on_upload(self._uploading)
        self._changed = tracking.masked(run_summary.deviations(settings))
        params = dict(flatten(settings.model_dump(mode="json")))  # nothing that is another one each time: runs are compared
        self._tags = {"ttrain.run": self.record.run, "ttrain.host": platform.node(), "ttrain.commit": commit() or ""}
        tags = {"ttrain.pipeline": pipeline, **tracking.source_tags(pipeline), **self._tags, **extra_tags, **labels.tags}
        if labels.note:  # at the end of the run the rest of the description stands below it
            tags[tracking.NOTE] = run_summary.note(labels.note)
        self._parent = self._tracker.start_run(
            self.record.run,
            identity=continues,
            parent=tracking.NullRun(identity=within) if within else None,
            tags=tags,
            params=params,
        )
        self._parent.log_text(run_summary.as_yaml(self._changed), "settings.yaml")
        self._note_tracked()

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """It stays in its process: Prefect sends the functions of flow and task to Dask, with all that they hold."""
        return object, ()

    def run_stage(self, stage: Stage, inputs: Mapping[str, Artifact], logged: Callable[[str], None]) -> tuple[Artifact, str]:
        """Build one stage, or take it from the store; returns the artifact and what happened: cached, completed, ..."""
        watcher = _Watcher(self, stage, logged)
        forced = stage.name in self.force or any((a.stage, a.key) in self._forced for a in inputs.values())
        options: dict[str, Any] = {"forced": forced, "extend": self.extend, "go_on": self.go_on}
        try:
            outcome = launch.build(stage, self.settings, self.store, inputs, watcher, **options)
        except BaseException as error:
            if not isinstance(error, Interrupted):
                self.failures[stage.name] = error
            watcher.failed(error)
            raise
        self.failures.pop(stage.name, None)  # a retry made it
        watcher.ended(outcome)
        self._has(outcome.artifact)
        if forced:
            self._forced.add((stage.name, outcome.artifact.key))
        if stage.dataset in self._to_train and stage.reuses_parts:
            self._check_rows(stage.dataset, outcome.artifact, inputs["tokenizer"], watcher)
        return outcome.artifact, outcome.state

    @property
    def _to_train(self) -> frozenset[str]:
        """The stages that this run has to train, of those with shards of their own."""
        return frozenset(planned.stage.name for planned in self.planned if planned.state == "run").intersection(TRAININGS)

    def _check_rows(self, training: str, shards: Artifact, tokenizer: Artifact, watcher: _Watcher) -> None:
        """Fail the training that has too few rows as soon as its shards are there; no other begins then."""
        shards = self.store.complete(shards, ("train",), said=lambda line: watcher.fetching(STAGES[shards.stage], line))
        tokenizer = self.store.complete(tokenizer, (), said=lambda line: watcher.fetching(STAGES[tokenizer.stage], line))
        stage, inputs = STAGES[training], {"shards": shards, "tokenizer": tokenizer}
        try:
            launch.verify_inputs(stage, self.store, inputs)  # first: a damaged index is no fault of the settings or the data
            with launch.setting_aside(stage, self.store, inputs):
                enough_rows.check(getattr(self.settings, training), shards.path, tokenizer.path)
        except TTrainError as error:
            self.failures[training] = error
            _Watcher(self, STAGES[training], lambda line: None).failed(error)
            raise

    def check_taken(self) -> None:
        """Fail a training whose shards were taken and have too few rows, before anything trains."""
        for planned in self.planned:
            training, tokenizer = planned.stage.dataset, planned.inputs.get("tokenizer")
            if (
                planned.taken
                and planned.artifact
                and tokenizer
                and planned.stage.reuses_parts
                and training in self._to_train
            ):
                watcher = _Watcher(self, planned.stage, lambda line: None)
                self._check_rows(training, planned.artifact, tokenizer, watcher)

    def take(self, planned: Planned) -> None:
        """Note a stage that is not called, since its artifact is there and the selection leaves it out."""
        assert planned.artifact is not None, "what is taken is in the store"
        self._has(planned.artifact)
        self.record.stage(
            planned.stage.name,
            outcome="cached",
            key=planned.key,
            path=str(planned.artifact.path),
            metric=summary.key_figures(planned.stage.name, planned.artifact.result),
            why=list(planned.why),
        )
        self.link_cached(planned.artifact)

    def link_cached(self, artifact: Artifact) -> None:
        """The tracked run points to the one that made what this run took from the cache."""
        self._cached.append(artifact.stage)
        self._parent.link_made_by(artifact.stage, artifact.key)

    def _note_tracked(self) -> None:
        """Which run the tracker has of this one; no id as long as its server is silent."""
        about = {"run_id": self._parent.id, "url": self._parent.url, "identity": self._parent.identity}
        self.record.note(tracking=about)

    def _uploading(self, done: int, total: int) -> None:
        """Bytes of artifacts that went to a tracker elsewhere."""
        progress = {"done": done / 1e6, "total": total / 1e6, "unit": "MB", "figures": {}}
        self.display.progressed("uploading", progress)

    def note_prefect(self, flow_run_id: str, url: str | None) -> None:
        """Which flow run this is; its stages' runs say so, too."""
        self.record.note(prefect={"flow_run_id": flow_run_id})
        tags = {"ttrain.prefect.flow_run_id": flow_run_id, **({"ttrain.prefect.url": url} if url else {})}
        self._tags |= tags
        self._parent.set_tags(tags)

    def note_night(self, child: tracking.Run | tracking.NullRun | None) -> None:
        """A stage trained in night mode: its tracked run has a tag that says so, and so has this one."""
        for run in (self._parent, child):
            if run is not None:
                run.set_tags({NIGHT: "1"})

    def _has(self, artifact: Artifact) -> None:
        """A stage's artifact is there, built or not."""
        self.artifacts[artifact.stage] = artifact
        self._parent.log_inputs(tracking.data_of(artifact))

    @property
    def tracked_run(self) -> str | None:
        """Id of the tracked run; None where nothing is tracked."""
        return self._parent.id

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def metrics(self) -> dict[str, float]:
        """The run's metrics so far, under their stable names."""
        return summary.metrics_of(self._results())

    def evaluation_table(self) -> list[tuple[str, str, str]]:
        """What was evaluated, for a table; [] before that."""
        results = self._results()
        return evaluation_table.rows(summary.metrics_of(results), results)

    def _results(self) -> dict[str, Mapping[str, Any]]:
        """What the stages found, by stage; and the champion as a baseline, where no stage scores it."""
        found = {name: artifact.result for name, artifact in self.artifacts.items()}
        evaluation, planned = self.artifacts.get("evaluate"), {one.stage.name for one in self.planned}
        if evaluation is None or champion_baseline.STAGE in planned:
            return found
        if self._champion is None:
            self._champion = champion_baseline.of(evaluation, self.settings.name, self.store)
        return {**found, **self._champion}

    def description(self) -> str:
        """What the run was and what came of it so far, in markdown."""
        return run_summary.description(self.record.as_it_is(), self._changed, self.metrics(), self.evaluation_table())

    def finish(self, outcome: str, error: str | None = None) -> None:
        """Close the record and the tracked run. `outcome`: completed, failed or interrupted."""
        self.outcome = outcome
        metrics = self.metrics()
        if error:
            self.record.note(error=error)
        if self.signum:
            self.record.note(stopped=self.stop_reason)
        if outcome == "completed":
            self.register_set()  # before the record says so: killed here, the run has crashed, and the next one registers
        self.record.finish(outcome, metrics)
        self._parent.log_summary(metrics)
        self._log_curves()  # after those: MLflow's compare page begins with the metric that came first
        evaluation = self.artifacts.get("evaluate")
        if evaluation:
            rows = self.evaluation_table()
            self._parent.log_text(summary.markdown(rows, ("what", "value", "")), "evaluation.md")
            tables = registration.tables(rows, evaluation.result.get("samples", {}))
            for name, text in tables.items():
                self._parent.log_text(text, name)
            self._parent.set_tags(registration.tag_of_tables(tables))
            self._log_cards()
            if "samples.json" not in evaluation.absent:  # else the run that made it has it in MLflow
                self._parent.log_file(evaluation.path / "samples.json")
        note = self.description()
        self._parent.set_tags({"ttrain.outcome": outcome, tracking.NOTE: note, "ttrain.cached": " ".join(self._cached)})
        self._parent.note_stages({name: artifact.key for name, artifact in self.artifacts.items()})
        self._log_page()
        if self.log.path.is_file():  # else all was cached
            self._parent.log_file(self.log.path)
        self._parent.finish({"completed": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED"))
        self._tracker.close()
        tracking.refresh_views(self._tracker)
        self._note_tracked()
        self.store.cache.save()

    def _log_curves(self) -> None:
        """The losses of all trainings on the pipeline's tracked run, also of those that were not trained now."""
        for artifact in self.artifacts.values():
            curve = artifact.path / "run" / "metrics.jsonl"
            with contextlib.suppress(OSError):  # it did not train, or the file is where it was made, or cannot be read
                text = curve.read_text(encoding="utf-8", errors="replace")
                rows = run_summary.curves(artifact.stage, text.splitlines())
                self._parent.keep_rows(f"{json.dumps(row)}\n".encode() for row in rows)

    def _log_page(self) -> None:
        """Keep the run's page among its files: `report.html`. It is made from this disk alone; its troubles end no run."""
        if isinstance(self._parent, tracking.NullRun):
            return
        try:
            from ttrain.reports.report import report_of  # also of a library that was changed while the run went on

            page = report_of(self.store.root, tracking.read_local(self.store.root, self.record.run))
        except Exception:
            log.warning("the run's page could not be made; `ttrain report %s` tries again", self.record.run, exc_info=True)
            return
        self._parent.log_text(page, REPORT)

    def page_of(self, stage: str | None = None) -> str | None:
        """Address of the tracked run, or of that of a stage; None where no server shows it."""
        run = self._tracked.get(stage) if stage else self._parent
        if run is None or run.url or not (run.page and self.mlflow_url):
            return run.url if run else None
        return f"{self.mlflow_url}/{run.page}"

    def ask_to_stop(self, signum: int, why: str = SIGNALLED) -> None:
        """The running stages save their state and stop, and no other begins; the first reason is the one that is told."""
        if self.signum:
            return
        self.stop_reason, self.signum = why, signum  # the signal last: who sees it reads the reason
        reason, again = ("stopping", " (again to end at once)") if why == SIGNALLED else (why, "")
        self.display.say(f"[yellow]{reason}: the running stages save their state{again}[/]")

    def wait(self, seconds: float) -> None:
        """Let time pass, unless the run is asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.signum and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.1, left))

    @contextlib.contextmanager
    def stopping_at(self, when: float | None) -> Iterator[None]:
        """Asks to stop once the clock shows `when` (seconds since the epoch), also where it was set or the machine slept."""
        done = threading.Event()

        def watch(when: float) -> None:
            while not done.wait(min(CLOCK_SECONDS, max(0.0, when - time.time()))):
                if time.time() >= when:
                    self.ask_to_stop(signal.SIGTERM, "deadline reached")
                    return

        if when is not None:
            threading.Thread(target=watch, args=(when,), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def raise_if_signalled(self) -> None:
        """Raises Interrupted where a signal came before there was anything to stop."""
        if self.signum:
            raise Interrupted(f"{self.stop_reason} before a stage began", self.signum)

    def catching_signals(self) -> contextlib.AbstractContextManager[None]:
        """SIGINT, SIGTERM and SIGHUP ask the running stages to save and stop; a second one ends them, and rises at once."""

        def again(signum: int) -> BaseException:
            self.at_once = True  # for stages that other threads wait for
            return interrupted_twice(signum)

        return catching_signals(self.ask_to_stop, again)

    def start_child(self, stage: Stage, planned: Planned, work: Path) -> tracking.Run | tracking.NullRun:
        """The tracked run of a stage; continued where the stage continues."""
        state = read_object(work / "tracking.json")
        params = dict(flatten(section_of(stage, self.settings).model_dump(mode="json")))
        tags = {"ttrain.stage": stage.name, "ttrain.key": planned.key or ""}
        tags |= {f"ttrain.parent.{name}": f"{a.stage} {a.content}" for name, a in planned.inputs.items()}
        tags |= {**self._tags, "ttrain.code": hashing.digest_of(planned.ingredients["code"])}
        name = f"{stage.name} {self.record.run.rpartition('-')[2]}"  # so that stages of two runs differ in MLflow's legends
        before = {"run_id": state.get("run_id"), "identity": state.get("identity")}
        child = self._tracker.start_run(
            name, **before, parent=self._parent, tags=tags, params=params, keeps_files=self.registers
        )
        child.link_to_parent(stage.name)
        where = {"run_id": child.id, "identity": child.identity, "run": self.record.run}
        where["experiment"] = self.settings.tracking.experiment
        write_json(work / "tracking.json", where)
        child.log_inputs(tracking.read_by(planned.inputs, trains=stage.uses_ranks))
        self._tracked[stage.name] = child
        return child

    def register(self, artifact: Artifact, run: tracking.Run | tracking.NullRun) -> str | None:
        """Put the artifact's files and, for a model or the tokenizer, a registered version into the tracker."""
        if not self.registers:
            return None
        run.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return None
        name, path, beside = self._registered_name(artifact), tracked_path(artifact), self._beside(artifact, run)
        for file, text in beside.texts.items():
            run.log_text(text, f"{path}/{file}")
        for file, source in beside.files.items():
            run.log_file(source, str(PurePosixPath(path, file).parent))
        self._opened_by_mlflow |= {artifact.stage} if beside.is_whole else set()
        tags, words = {**registration.tags_of(artifact), **beside.tags}, self._words(artifact, opens=beside.is_whole)
        return self._tracker.register_model(name, run=run, artifact_path=path, tags=tags, **words)

    def _described(self, model: Artifact) -> dict[str, Any]:
        """What is said of a registered model, and what its directory gets where this run registers it from the store."""
        if model.stage in self._tracked:  # which has registered it
            words = self._words(model, opens=model.stage in self._opened_by_mlflow)
            return {"tags": registration.tags_of(model), "texts": {}, "files": {}, **words}
        beside = self._beside(model, self._parent)
        words = self._words(model, opens=beside.is_whole)
        files = {name: str(path) for name, path in beside.files.items()}
        return {"tags": {**registration.tags_of(model), **beside.tags}, "texts": dict(beside.texts), "files": files, **words}

    def _words(self, model: Artifact, *, opens: bool) -> dict[str, str]:
        """What MLflow's pages say of a registered model."""
        name, directory = self._registered_name(model), REGISTERED[model.stage][1]
        return registration.words_of(model, directory, name, self.settings.name, self.store, opens=opens)

    def _beside(self, artifact: Artifact, run: tracking.Run | tracking.NullRun) -> tracking.Loadable:
        """What goes into a registered model's directory beside its own files."""
        name, directory = self._registered_name(artifact), REGISTERED[artifact.stage][1]
        return registration.beside(artifact, directory, name, self.store, run, self.settings.runtime.sample_prompts)

    def _log_cards(self) -> None:
        """The cards of the models that this run made, anew: now they have an evaluation."""
        for stage, run in self._tracked.items():
            artifact = self.artifacts.get(stage)
            if artifact and self.registers and stage in REGISTERED and REGISTERED[stage][1]:
                card = registration.card_of(artifact, REGISTERED[stage][1], self._registered_name(artifact), self.store)
                if card:
                    run.log_text(card, f"{tracked_path(artifact)}/{tracking.CARD}")

    def register_set(self) -> None:
        """Register the models of this run as one set, which can become champion; a run that left a stage out has none.

        What is registered already is taken. Another run may have made a model under another `name`, or untracked: then it
        is registered from the store.
        """
        if not self.registers or not {"tokenizer", "evaluate", *self.settings.trainings} <= set(self.artifacts):
            return
        models = [
            {
                "name": self._registered_name(model),
                "stage": model.stage,
                "artifact_path": tracked_path(model),
                **self._described(model),
                "path": None if model.absent else str(model.path),
            }
            for model in self.artifacts.values()
            if model.stage in REGISTERED
        ]
        self._tracker.finish_uploads()
        members = {self._registered_name(one): one for one in self.artifacts.values() if one.stage in REGISTERED}
        self.model_set = self._tracker.register_models(
            self.settings.name,
            run=self._parent,
            run_name=self.record.run,
            models=models,
            keys={name: artifact.key for name, artifact in self.artifacts.items()},
            metrics=dict(self.artifacts["evaluate"].result["metrics"]),
            description=model_description.of_set(self.settings.name, self.record.run, members, self.metrics()),
            about=model_description.of_all_sets(self.settings.name),
        )
        self.record.note(model_set=self.model_set and f"{self.settings.name}/{self.model_set}")

    def _registered_name(self, artifact: Artifact) -> str:
        return f"{self.settings.name}-{REGISTERED[artifact.stage][0]}"


class _Watcher:
    """Passes what happens to one stage on to the display, the record, the log and the tracker."""

    def __init__(self, execution: Execution, stage: Stage, logged: Callable[[str], None]) -> None:
        self._execution, self._stage, self._logged = execution, stage, logged
        self._child: tracking.Run | tracking.NullRun | None = None
        self._followers: list[tracking.MetricsFollower] = []
        self._log: Path | None = None
        self._samples = set[str]()  # names of those that the tracker has
        self._samples_changed = 0  # when there was another one, by its directory

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        if self._execution.loads_torch:
            processes.warm_up(self._execution.settings)  # while this one runs, it may be
        log_path = self._log = work / "output" / "run" / "log.txt"
        self._execution.display.started(stage.name, summary.shortened(planned.why))
        self._execution.log.add(stage.name, f"started: {'; '.join(planned.why)}")
        self._execution.record.stage(
            stage.name, outcome="running", key=planned.key, log=str(log_path), why=list(planned.why)
        )
        self._child = self._execution.start_child(stage, planned, work)
        if isinstance(self._child, tracking.Run) and self._child.is_again:
            self._samples = {path.name for path in self._sampled()[:-1]}  # the last may not have been told
        files = ("metrics.jsonl", *system_metrics.files(self._execution.settings.runtime.nodes))
        later = self._execution.store.root / "store" / stage.name / (planned.key or "") / "run"
        for name in files:
            path, state = work / "output" / "run" / name, work / f"followed-{Path(name).stem}.json"
            self._followers.append(tracking.MetricsFollower(path, self._child, state, later_at=[later / name]))

    def prepared(self, stage: Stage, work: Path) -> None:
        if self._execution.make_parts_elsewhere and stage.reuses_parts:
            self._execution.make_parts_elsewhere(stage, work)

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        self._execution.display.progressed(stage.name, progress)
        with contextlib.suppress(OSError):  # else there are none yet
            if self._log and (changed := (self._log.parent / "samples").stat().st_mtime_ns) != self._samples_changed:
                self._samples_changed = changed  # a look at all of them takes 30 ms where there are 10,000
                self._keep_samples()

    def logged(self, stage: Stage, line: str) -> None:
        self._execution.log.add(stage.name, line)
        self._logged(line)

    def waiting(self, stage: Stage, who: str) -> None:
        self._execution.display.say(f"  {stage.name}: {who} is building it; waiting for that one")
        self._execution.log.add(stage.name, f"waiting for {who}, who is building it")

    def fetching(self, stage: Stage, line: str) -> None:
        self._execution.display.say(f"  {stage.name}: {line}")
        self.logged(stage, line)

    def process_ended(self, stage: Stage) -> None:
        for follower in self._followers:  # before publishing, which moves the file that it follows
            follower.stop()
        self._followers = []
        if self._execution.settings.runtime.night and self._log and _trained_at_night(self._log.with_name("metrics.jsonl")):
            self._execution.note_night(self._child)
        self._keep_samples()

    def _keep_samples(self) -> None:
        """Texts that the model wrote while it trains, where the finished artifact's files will be in the tracker."""
        if self._child is None:
            return
        for path in self._sampled():
            if path.name not in self._samples:
                with contextlib.suppress(OSError):  # it went meanwhile; the artifact's files are kept at the end
                    text = path.read_text(encoding="utf-8", errors="replace")
                    self._samples.add(path.name)
                    self._child.log_text(text, f"{self._stage.name}/run/samples/{path.name}")

    def _sampled(self) -> list[Path]:
        """The texts that there are, by their steps."""
        with contextlib.suppress(OSError):
            return sorted((self._log.parent / "samples").glob("step-*.txt")) if self._log else []
        return []

    def stop_signal(self) -> int:
        return self._execution.signum

    def at_once(self) -> bool:
        return self._execution.at_once

    def ended(self, outcome: launch.Outcome) -> None:
        artifact, name = outcome.artifact, self._stage.name
        figures = summary.key_figures(name, artifact.result)
        self._execution.display.ended(name, outcome.state, outcome.seconds, figures)
        self._execution.log.add(name, f"{outcome.state} after {outcome.seconds:.1f} s: {figures}")
        self._execution.record.stage(
            name,
            outcome=outcome.state,
            seconds=round(outcome.seconds, 2),
            key=artifact.key,
            path=str(artifact.path),
            log=str(artifact.path / "run" / "log.txt"),
            metric=figures,
            resumed_from_step=artifact.result.get("resumed_from_step"),
        )
        if self._child:
            tracking.log_result(self._child, artifact)
            self._execution.register(artifact, self._child)
            self._child.finish("FINISHED")
        else:
            self._execution.link_cached(artifact)

    def failed(self, error: BaseException) -> None:
        interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        message = str(error) if isinstance(error, TTrainError) else f"{type(error).__name__}: {error}"
        outcome = "interrupted" if interrupted else "failed"
        if interrupted and self._execution.signum:  # the stage's process saw no more than a signal
            message = message.replace(SIGNALLED, self._execution.stop_reason)
        self._execution.log.add(self._stage.name, f"{outcome}: {message}")
        self._execution.record.stage(self._stage.name, outcome=outcome, error=message)
        self._execution.display.failed(self._stage.name, message)
        if isinstance(error, TTrainError):
            error.shown = True
        if self._child:
            self._child.set_tags({"ttrain.error": message[:1000]})
            if self._log and self._log.is_file():  # of an artifact it is among its files
                self._child.log_file(self._log, changes=True)
            self._child.finish("KILLED" if interrupted else "FAILED")


def tracked_path(artifact: Artifact) -> str:
    """Where the model is, below the tracked run that holds the artifact."""
    directory = REGISTERED[artifact.stage][1]
    return f"{artifact.stage}/{directory}" if directory else artifact.stage


def _trained_at_night(curve: Path) -> bool:
    """Whether any line of a stage's curve was logged in night mode."""
    with contextlib.suppress(OSError):  # there is none where the stage does not train
        return any(row["metrics"].get(NIGHT) for row in read_rows(curve))
    return False
