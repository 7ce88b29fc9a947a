"""One run of a pipeline: builds its stages, records, tracks and shows them. Knows no engine: Prefect may call it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ttrain import digests, launch, report, runs, supervise, tracking
from ttrain.config import Settings, flatten
from ttrain.display import Display
from ttrain.errors import Interrupted, TTrainError
from ttrain.plan import Planned, section_of
from ttrain.runs import RunRecord
from ttrain.stages import STAGES, Stage
from ttrain.stopping import catching_signals, interrupted_twice
from ttrain.store import Artifact, Store, read_json, write_json

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    "pretrain": ("base", "model"),
    "sft": ("sft", "model"),
    "lora": ("lora", "adapter"),
}


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
    ) -> None:
        self.pipeline, self.settings, self.store, self.display = pipeline, settings, store, display
        self.force, self.extend = force, extend
        self.record = RunRecord(store.root, pipeline, stages, settings.model_dump(mode="json"))
        self.artifacts: dict[str, Artifact] = {}
        self.failures: dict[str, BaseException] = {}  # of stages that have no result yet
        self.signum = 0
        self.at_once = False  # a second signal came
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = None  # before a stage that reuses parts starts
        self.loads_torch = any(STAGES[name].loads_torch for name in stages)
        self._began = time.monotonic()
        self._forced: set[str] = set()
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
            self.record.run, run_id=None, parent_run_id=None, tags={"ttrain.pipeline": pipeline}, params=params
        )
        self.record.note(tracking={"run_id": self._parent.id, "url": self._parent.url})

    def run_stage(self, stage: Stage, inputs: Mapping[str, Artifact], logged: Callable[[str], None]) -> tuple[Artifact, str]:
        """Build one stage, or take it from the store; returns the artifact and what happened: cached, completed, ..."""
        watcher = _Watcher(self, stage, logged)
        forced = stage.name in self.force or any(artifact.stage in self._forced for artifact in inputs.values())
        if forced:
            self._forced.add(stage.name)
        try:
            outcome = launch.build(stage, self.settings, self.store, inputs, watcher, forced=forced, extend=self.extend)
        except BaseException as error:
            if not isinstance(error, Interrupted):
                self.failures[stage.name] = error
            watcher.failed(error)
            raise
        self.failures.pop(stage.name, None)  # a retry made it
        watcher.ended(outcome)
        self.artifacts[stage.name] = outcome.artifact
        return outcome.artifact, outcome.state

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def metrics(self) -> dict[str, float]:
        """The run's metrics so far, under their stable names."""
        return report.metrics_of({name: artifact.result for name, artifact in self.artifacts.items()})

    def finish(self, outcome: str, error: str | None = None) -> None:
        """Close the record and the tracked run. `outcome`: completed, failed or interrupted."""
        metrics = self.metrics()
        if error:
            self.record.note(error=error)
        self.record.finish(outcome, metrics)
        self._parent.log_summary(metrics)
        evaluation = self.artifacts.get("evaluate")
        if evaluation:
            table = report.markdown(report.evaluation_table(metrics), ("what", "value", ""))
            self._parent.log_text(table, "evaluation.md")
            self._parent.log_file(evaluation.path / "samples.json")
        self._parent.set_tags({"ttrain.outcome": outcome})
        self._parent.finish({"completed": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED"))
        self.store.cache.save()

    def raise_if_signalled(self) -> None:
        """Raises Interrupted where a signal came before there was anything to stop."""
        if self.signum:
            raise Interrupted("stopped before a stage began", self.signum)

    def catching_signals(self) -> contextlib.AbstractContextManager[None]:
        """SIGINT and SIGTERM ask the running stages to save and stop; a second one ends them, and rises at once."""

        def asked(signum: int) -> None:
            self.signum = signum
            self.display.say("[yellow]stopping: the running stages save their state (again to end at once)[/]")

        def again(signum: int) -> BaseException:
            self.at_once = True  # for stages that other threads wait for
            return interrupted_twice(signum)

        return catching_signals(asked, again)

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
        return child

    def register(self, artifact: Artifact, child: tracking.Run | tracking.NullRun) -> None:
        """Put the artifact's files and, for a model or the tokenizer, a registered version into the tracker."""
        child.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return
        suffix, directory = REGISTERED[artifact.stage]
        tags = {
            "ttrain.stage": artifact.stage,
            "ttrain.key": artifact.key,
            "ttrain.content": artifact.content,
            **{f"ttrain.input.{name}": entry["key"] for name, entry in artifact.manifest["inputs"].items()},
            "ttrain.code": digests.digest_of(artifact.manifest["ingredients"]["code"]),
        }
        path = f"{artifact.stage}/{directory}" if directory else artifact.stage
        self._tracker.register_model(f"{self.settings.name}-{suffix}", run=child, artifact_path=path, tags=tags)


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
        self._execution.display.started(stage.name, "; ".join(planned.why))
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

    def waiting(self, stage: Stage) -> None:
        self._execution.display.say(f"  {stage.name}: another run is building it; waiting for that one")

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
        self._execution.record.stage(self._stage.name, outcome=outcome, error=message)
        self._execution.display.failed(self._stage.name, message)
        if isinstance(error, TTrainError):
            error.shown = True
        if self._child:
            self._child.finish("KILLED" if interrupted else "FAILED")


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
