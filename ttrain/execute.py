"""One run of a pipeline: builds its stages, records, tracks and shows them. Knows no engine: Prefect may call it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttrain import digests, launch, report, runs, supervise, tracking
from ttrain.absolute import absolute
from ttrain.config import Settings, flatten
from ttrain.display import Display
from ttrain.errors import Interrupted, TTrainError
from ttrain.plan import Planned, section_of
from ttrain.runs import RunRecord
from ttrain.stages import STAGES, Stage
from ttrain.stopping import catching_signals, interrupted_twice
from ttrain.store import Artifact, Store, exclusive, read_json, write_json

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    "pretrain": ("base", "model"),
    "sft": ("sft", "model"),
    "lora": ("lora", "adapter"),
}


SIGNALLED = "stopped by a signal"
CLOCK_SECONDS = 1.0  # how often the clock is looked at


class Execution:
    """A pipeline run in progress."""

    def __init__(
        self,
        pipeline: str,
        settings: Settings,
        store: Store,
        display: Display,
        stages: list[str],
        *,
        force: frozenset[str] = frozenset(),
        extend: bool = False,
        go_on: str = "",
        extra_tags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.pipeline, self.settings, self.store, self.display = pipeline, settings, store, display
        self.force, self.extend, self.go_on = force, extend, go_on
        self.outcome = "running"  # then completed, failed or interrupted
        self.record = RunRecord(store.root, pipeline, stages, absolute(settings).model_dump(mode="json"))
        self.artifacts: dict[str, Artifact] = {}
        self.model_set: str | None = None  # version of the registered set of models, where the run was tracked to its end
        self.failures: dict[str, BaseException] = {}  # of stages that have no result yet
        self.signum = 0  # of the signal that asked to stop, or stands for another reason
        self.stop_reason = SIGNALLED
        self.at_once = False  # a second signal came
        self.planned: Sequence[Planned] = ()
        self.mlflow_url: str | None = None  # of a server that shows the tracker's database, where it is not the tracker
        self._tracked: dict[str, tracking.Run | tracking.NullRun] = {}  # by stage
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = None  # before a stage that reuses parts starts
        self.loads_torch = any(STAGES[name].loads_torch for name in stages)
        self._began = time.monotonic()
        self._forced: set[tuple[str, str]] = set()  # (stage, key) of what was built because it was asked for
        self._tracker = (
            tracking.open_store(store.root, settings.tracking.experiment)
            if settings.tracking.enabled and settings.runtime.node_rank == 0
            else tracking.NullStore()
        )
        for crashed in runs.settle(store.root):  # whose tracked run nobody could end
            if (crashed.get("tracking") or {}).get("run_id"):
                self._tracker.end_run(crashed["tracking"]["run_id"], "KILLED")
        params = {**dict(flatten(settings.model_dump(mode="json"))), "run": self.record.run}
        self._parent = self._tracker.start_run(
            self.record.run, run_id=None, parent_run_id=None, tags={"ttrain.pipeline": pipeline, **extra_tags}, params=params
        )
        self.record.note(tracking={"run_id": self._parent.id, "url": self._parent.url})

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
        self.artifacts[stage.name] = outcome.artifact
        if forced:
            self._forced.add((stage.name, outcome.artifact.key))
        return outcome.artifact, outcome.state

    def take(self, planned: Planned) -> None:
        """Note a stage that is not called, since its artifact is there and the selection leaves it out."""
        assert planned.artifact is not None, "what is taken is in the store"
        self.artifacts[planned.stage.name] = planned.artifact
        self.record.stage(
            planned.stage.name,
            outcome="cached",
            key=planned.key,
            path=str(planned.artifact.path),
            metric=report.key_figures(planned.stage.name, planned.artifact.result),
            why=list(planned.why),
        )

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
        return report.metrics_of({name: artifact.result for name, artifact in self.artifacts.items()})

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
        evaluation = self.artifacts.get("evaluate")
        if evaluation:
            table = report.markdown(report.evaluation_table(metrics), ("what", "value", ""))
            self._parent.log_text(table, "evaluation.md")
            if "samples.json" not in evaluation.absent:  # else the run that made it has it in MLflow
                self._parent.log_file(evaluation.path / "samples.json")
        self._parent.set_tags({"ttrain.outcome": outcome})
        self._parent.finish({"completed": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED"))
        self.store.cache.save()

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
        """SIGINT and SIGTERM ask the running stages to save and stop; a second one ends them, and rises at once."""

        def again(signum: int) -> BaseException:
            self.at_once = True  # for stages that other threads wait for
            return interrupted_twice(signum)

        return catching_signals(self.ask_to_stop, again)

    def start_child(self, stage: Stage, planned: Planned, work: Path) -> tracking.Run | tracking.NullRun:
        """The tracked run of a stage; continued where the stage continues."""
        state = read_json(work / "tracking.json") or {}
        params = dict(flatten(section_of(stage, self.settings).model_dump(mode="json")))
        tags = {"ttrain.stage": stage.name, "ttrain.key": planned.key or "", "ttrain.run": self.record.run}
        tags |= {f"ttrain.parent.{name}": f"{a.stage} {a.content}" for name, a in planned.inputs.items()}
        child = self._tracker.start_run(
            stage.name, run_id=state.get("run_id"), parent_run_id=self._parent.id, tags=tags, params=params
        )
        write_json(work / "tracking.json", {"run_id": child.id})
        self._tracked[stage.name] = child
        return child

    def register(self, artifact: Artifact, run: tracking.Run | tracking.NullRun) -> str | None:
        """Put the artifact's files and, for a model or the tokenizer, a registered version into the tracker."""
        run.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return None
        directory = REGISTERED[artifact.stage][1]
        path = f"{artifact.stage}/{directory}" if directory else artifact.stage
        return self._tracker.register_model(
            self._registered_name(artifact), run=run, artifact_path=path, tags=_tags_of(artifact)
        )

    def register_set(self) -> None:
        """Register the models of this run as one set, which can become champion; a run that left a stage out has none.

        What is registered already is taken. Another run may have made a model under another `name`, or untracked: then it
        is registered from the store.
        """
        if not {"tokenizer", "evaluate", *self.settings.trainings} <= set(self.artifacts):
            return
        models = [artifact for artifact in self.artifacts.values() if artifact.stage in REGISTERED]
        members = []
        with exclusive(tracking.lock_of(self.store.root)):
            for model in models:
                name = self._registered_name(model)
                version = self._tracker.find_model(name, _tags_of(model))
                if version is None and not model.absent:
                    version = self.register(model, self._parent)
                if version is None:
                    return  # the tracker has said why
                members.append(tracking.Member(name, version, model.stage, model.key))
            tags = tracking.tags_of(
                self.record.run,
                members,
                contents={model.stage: model.content for model in models},
                keys={name: artifact.key for name, artifact in self.artifacts.items()},
                metrics=self.artifacts["evaluate"].result["metrics"],
            )
            self.model_set = self._tracker.register_set(self.settings.name, run=self._parent, tags=tags)
        self.record.note(model_set=self.model_set and f"{self.settings.name}/{self.model_set}")

    def _registered_name(self, artifact: Artifact) -> str:
        return f"{self.settings.name}-{REGISTERED[artifact.stage][0]}"


class _Watcher:
    """Passes what happens to one stage on to the display, the record, the log and the tracker."""

    def __init__(self, execution: Execution, stage: Stage, logged: Callable[[str], None]) -> None:
        self._execution, self._stage, self._logged = execution, stage, logged
        self._child: tracking.Run | tracking.NullRun | None = None
        self._follower: tracking.MetricsFollower | None = None

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        if self._execution.loads_torch:
            supervise.warm_up(self._execution.settings)  # while this one runs, it may be
        log_path = work / "output" / "run" / "log.txt"
        self._execution.display.started(stage.name, report.shortened(planned.why))
        self._execution.record.stage(
            stage.name, outcome="running", key=planned.key, log=str(log_path), why=list(planned.why)
        )
        self._child = self._execution.start_child(stage, planned, work)
        metrics = work / "output" / "run" / "metrics.jsonl"
        self._follower = tracking.MetricsFollower(metrics, self._child, work / "followed.json")

    def prepared(self, stage: Stage, work: Path) -> None:
        if self._execution.make_parts_elsewhere and stage.reuses_parts:
            self._execution.make_parts_elsewhere(stage, work)

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        self._execution.display.progressed(stage.name, progress)

    def logged(self, stage: Stage, line: str) -> None:
        self._logged(line)

    def waiting(self, stage: Stage, who: str) -> None:
        self._execution.display.say(f"  {stage.name}: {who} is building it; waiting for that one")

    def fetching(self, stage: Stage, line: str) -> None:
        self._execution.display.say(f"  {stage.name}: {line}")
        self._logged(line)

    def process_ended(self, stage: Stage) -> None:
        if self._follower:  # before publishing, which moves the file that it follows
            self._follower.stop()

    def stop_signal(self) -> int:
        return self._execution.signum

    def at_once(self) -> bool:
        return self._execution.at_once

    def ended(self, outcome: launch.Outcome) -> None:
        artifact, name = outcome.artifact, self._stage.name
        figures = report.key_figures(name, artifact.result)
        self._execution.display.ended(name, outcome.state, outcome.seconds, figures)
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
            self._child.log_params(_group_params(artifact.result))
            self._child.log_summary({**_numbers(artifact.result), **report.stage_metrics(artifact.result)})
            self._execution.register(artifact, self._child)
            self._child.finish("FINISHED")

    def failed(self, error: BaseException) -> None:
        interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        message = str(error) if isinstance(error, TTrainError) else f"{type(error).__name__}: {error}"
        outcome = "interrupted" if interrupted else "failed"
        if interrupted and self._execution.signum:  # the stage's process saw no more than a signal
            message = message.replace(SIGNALLED, self._execution.stop_reason)
        self._execution.record.stage(self._stage.name, outcome=outcome, error=message)
        self._execution.display.failed(self._stage.name, message)
        if isinstance(error, TTrainError):
            error.shown = True
        if self._child:
            self._child.finish("KILLED" if interrupted else "FAILED")


def _tags_of(artifact: Artifact) -> dict[str, str]:
    """What a registered version says of the artifact that it is."""
    return {
        "ttrain.stage": artifact.stage,
        "ttrain.key": artifact.key,
        "ttrain.content": artifact.content,
        **{f"ttrain.input.{name}": entry["key"] for name, entry in artifact.manifest["inputs"].items()},
        "ttrain.code": digests.digest_of(artifact.manifest["ingredients"]["code"]),
    }


def _group_params(result: Mapping[str, Any]) -> dict[str, object]:
    """What each optimizer group holds, as parameters: {"optim.groups.0.weight_decay": 0.1}."""
    groups = enumerate(result.get("optimizer_groups", ()))
    return {f"optim.groups.{number}.{name}": value for number, group in groups for name, value in group.items()}


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a result for the tracker, in a group of their own, so that they never join a curve of the same name."""
    return {
        f"final/{name.replace('.', '_')}": float(value)
        for name, value in flatten({key: value for key, value in result.items() if key != "samples"})
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
