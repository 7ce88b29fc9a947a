"""One run of a pipeline: builds, records, tracks and displays its stages, for any engine."""

import contextlib
import getpass
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.core.files import JsonObject, read_object, write_json
from ttrain.core.signals import handling_signals
from ttrain.core.terminal import showing_logs
from ttrain.core.text import first_of
from ttrain.engine import launch, processes, row_counts
from ttrain.engine.display import Display, StageDisplay
from ttrain.engine.graph import Plan, Planned
from ttrain.engine.planner import plan_stage
from ttrain.engine.provenance import commit, with_absolute_paths
from ttrain.engine.stop_request import SIGNALLED, StopRequest
from ttrain.errors import Interrupted, NothingNew, TooFewRows, TTrainError, with_fix
from ttrain.reports import summary
from ttrain.store.layout import TRACKED, Artifact
from ttrain.store.registry import Registry, Version
from ttrain.store.results import EvaluationResult, TrainingResult
from ttrain.store.runs import BUILT, NOTHING_NEW, RunRecord, guard_warning
from ttrain.tasks import Stage

log = logging.getLogger("ttrain")

NOTE_SECONDS = 2.0  # between two events of a stage's progress

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    **{
        name: (row.model, "adapter" if row.role == "adapter" else "model")
        for name, row in TRAINING_STAGES.items()
    },
}


def registered_name(pipeline: str, stage: str) -> str:
    """Name of the registered model of a stage. `pipeline`: the setting `name`."""
    return f"{pipeline}-{REGISTERED[stage][0]}"


class PipelineRun(StopRequest):
    """A pipeline run in progress: the one writer of its events, its record and its log."""

    def __init__(
        self,
        plan: Plan,
        display: StageDisplay,
        *,
        facts: JsonObject = MappingProxyType({}),
        registers: bool = True,
    ) -> None:
        """`facts`: more entries of the record: labels, the night or sweep, the run that it
        `continues`.
        """
        super().__init__(lambda text: display("", "message", {"text": text}))
        settings = plan.settings
        self.plan = plan
        self.settings = settings
        self.store = plan.store
        self.display = display
        # Whether its models become versions.
        self.registers = registers and settings.runtime.node_rank == 0
        if self.registers:
            Registry(self.store.root).check_names(
                settings.name, sorted(registered_name(settings.name, of) for of in REGISTERED)
            )
        self.outcome = "running"  # then completed, failed, interrupted or nothing-new
        self.record = RunRecord(
            self.store.root,
            plan.pipeline,
            [planned.stage.name for planned in plan.stages],
            with_absolute_paths(settings).model_dump(mode="json"),
            {"commit": commit(), "user": user_name(), **facts},
        )
        self.artifacts: dict[str, Artifact] = {}
        self.model_set: str | None = (
            None  # version of the registered set of models, once the run is complete
        )
        self.failures: dict[str, BaseException] = {}  # by stage, of those without a result
        self.make_parts_elsewhere: Callable[[Stage, Path], None] | None = (
            None  # before a stage that reuses parts starts
        )
        to_run = [planned for planned in plan.stages if planned.state == "run"]
        self._loads_torch = any(planned.stage.loads_torch for planned in to_run)
        self._to_check = [planned for planned in to_run if planned.name in TRAINING_STAGES]
        self._began = time.monotonic()
        self._noted: dict[str, float] = {}  # when the progress of a stage was noted last
        self.end_tracking: Callable[[], object] = lambda: None  # called once the record is closed
        self.page: Callable[[str | None], str | None] = lambda stage: (
            None
        )  # of the run, or of a stage, in a tracker

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Pickle as a bare object: Prefect sends flows to Dask with everything they reference."""
        return object, ()

    # --- stages -----------------------------------------------------------------------------------

    def run_stages(self) -> None:
        """Build the stages of the plan one after the other, in this thread."""
        for planned in self.plan.stages:
            self.run_stage(planned)
            if self.signum:
                raise Interrupted(f"stopped after stage {planned.stage.name}", self.signum)

    def run_stage(
        self, planned: Planned, logged: Callable[[str], object] = lambda line: None
    ) -> tuple[Artifact, str]:
        """Build a stage once its inputs exist, or take it from the store; returns (artifact,
        state).

        `logged` gets the lines of its log.
        """
        stage = planned.stage
        inputs = self._inputs_of(planned)
        if stage.uses_ranks:
            self.check_rows()
        try:
            if planned.key is None or planned.inputs != inputs:
                planned = plan_stage(
                    stage, self.settings, self.store, inputs, self.plan.rerun, forced=planned.forced
                )
            outcome = launch.build(
                planned, self.settings, self.store, partial(self._report, stage, logged), self
            )
        except BaseException as error:
            self._failed(stage, error)
            raise
        self.failures.pop(stage.name, None)  # a retry succeeded
        self._ended(planned, outcome)
        return outcome.artifact, outcome.state

    def _inputs_of(self, planned: Planned) -> dict[str, Artifact]:
        return {
            name: self.artifacts[of] if isinstance(of, str) else of
            for name, of in planned.sources.items()
        }

    def check_rows(self) -> None:
        """Fail every training whose shards have too few rows, before any of them trains."""
        errors: list[TooFewRows] = []
        while self._to_check:
            planned = self._to_check.pop(0)
            stage = planned.stage
            made = next(
                (each for each in self.plan.stages if each.name == planned.sources.get("shards")),
                None,
            )
            if made is None:
                continue
            shards = self.artifacts[made.name]
            inputs = {"shards": shards, "tokenizer": self._inputs_of(made)["tokenizer"]}
            try:
                for artifact in inputs.values():
                    self.store.complete(artifact, report=partial(self._message, stage))
                with launch.verified(
                    stage, self.store, inputs
                ):  # damage is no fault of settings or data
                    row_counts.check(
                        getattr(self.settings, stage.name), shards.path, inputs["tokenizer"].path
                    )
            except TTrainError as error:
                self._failed(stage, error)
                if not isinstance(error, TooFewRows):
                    raise
                errors.append(error)
        if errors:
            raise (
                errors[0]
                if len(errors) == 1
                else TooFewRows(
                    "\n".join(map(str, errors)), [fix for error in errors for fix in error.fixes]
                )
            )

    # --- events -----------------------------------------------------------------------------------

    def _report(
        self, stage: Stage, logged: Callable[[str], object], event: str, data: JsonObject
    ) -> None:
        if event == "started":
            self._started(stage, data["planned"], data["work"])
        elif event == "progressed":
            self.display(stage.name, event, data)
            if time.monotonic() - self._noted.get(stage.name, 0.0) > NOTE_SECONDS:
                self._noted[stage.name] = time.monotonic()
                self.record.stage(stage.name, progress=data)
        elif event == "message":
            self._message(stage, data["text"])
            logged(data["text"])
        else:
            self.record.log(stage.name, data["line"])
            logged(data["line"])
            shows_all = self.settings.runtime.log_level == "debug"
            if text := data["line"] if shows_all else guard_warning(data["line"]):
                self.display(stage.name, "message", {"text": text})

    def _message(self, stage: Stage, text: str) -> None:
        self.display(stage.name, "message", {"text": text})
        self.record.log(stage.name, text)

    def _started(self, stage: Stage, planned: Planned, work: Path) -> None:
        if self._loads_torch:
            processes.warm_up(self.settings)
        self.display(stage.name, "started", {"why": first_of(planned.why, 3, "; ")})
        self.record.log(stage.name, f"started: {'; '.join(planned.why)}")
        # the id by which trackers know it: that of the run which began its training, if it
        # continues one
        tracked = read_object(work / TRACKED).get("id") or f"{self.record.run}/{stage.name}"
        write_json(
            work / TRACKED,
            {
                "run": self.record.run,
                "id": tracked,
                "experiment": self.settings.tracking.experiment,
            },
        )
        self.record.stage(
            stage.name,
            outcome="running",
            started_unix=time.time(),
            key=planned.key,
            log=str(work / "output" / "run" / "log.txt"),
            why=list(planned.why),
            tracked=tracked,
        )
        if self.make_parts_elsewhere and stage.reuses_parts:
            self.make_parts_elsewhere(stage, work)

    def _ended(self, planned: Planned, outcome: launch.StageOutcome) -> None:
        name = planned.name
        artifact = outcome.artifact
        self.artifacts[name] = artifact
        figures = summary.key_figures(name, artifact.result, artifact.path)
        self.display(
            name, "ended", {"state": outcome.state, "seconds": outcome.seconds, "figures": figures}
        )
        self.record.log(name, f"{outcome.state} after {outcome.seconds:.1f} s: {figures}")
        self.record.stage(
            name,
            outcome=outcome.state,
            seconds=round(outcome.seconds, 2),
            key=artifact.key,
            path=str(artifact.path),
            log=str(artifact.path / "run" / "log.txt"),
            metric=figures,
            why=list(planned.why),
            resumed_from_step=TrainingResult.of(artifact.result).resumed_from_step,
        )
        if outcome.state in BUILT and self.registers and name in REGISTERED:
            self._register(artifact)

    def _failed(self, stage: Stage, error: BaseException) -> None:
        # NothingNew is no failure; the night reports the reason.
        name = stage.name
        is_stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        if not is_stopped:
            self.failures[name] = error
        message = (
            str(error)
            if isinstance(error, TTrainError)
            else f"{type(error).__name__}: {with_fix(error)}"
        )
        if isinstance(error, NothingNew):
            self.record.log(name, f"{NOTHING_NEW}: {message}")
            self.record.stage(name, outcome=NOTHING_NEW, metric=message)
            self.display(name, "ended", {"state": NOTHING_NEW, "seconds": 0.0, "figures": ""})
            return
        outcome = "interrupted" if is_stopped else "failed"
        if is_stopped and self.signum:  # the stage's process knows only of the signal
            message = message.replace(SIGNALLED, self.stop_reason)
        self.record.log(name, f"{outcome}: {message}")
        self.record.stage(name, outcome=outcome, error=message)
        self.display(name, "failed", {"error": message})
        if isinstance(error, TTrainError | OSError):
            error.shown = True  # type: ignore[union-attr]

    # --- the end ----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def metrics(self) -> dict[str, float]:
        """The run's metrics so far, under their stable names."""
        return summary.metrics_of(
            {name: artifact.result for name, artifact in self.artifacts.items()}
        )

    def evaluation_table(self) -> list[summary.EvaluationRow]:
        """The rows of the evaluation table; [] before the evaluation."""
        return summary.rows(
            self.metrics(), {name: artifact.result for name, artifact in self.artifacts.items()}
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Close the run with the outcome of the block."""
        error = None
        try:
            yield
            outcome = "completed"
        except NothingNew:
            outcome = NOTHING_NEW
            raise
        except BaseException as raised:
            outcome = (
                "interrupted" if isinstance(raised, Interrupted | KeyboardInterrupt) else "failed"
            )
            error = str(raised)
            raise
        finally:
            self.finish(outcome, error)

    def finish(self, outcome: str, error: str | None = None) -> None:
        """Close the record with an outcome: completed, failed, interrupted or nothing-new."""
        self.outcome = outcome
        if error:
            self.record.note(error=error)
        if self.signum:
            self.record.note(stopped=self.stop_reason)
        if outcome == "completed":
            # before the record is closed: if killed here, the run crashed, and the next one
            # registers
            self.register_set()
        self.record.note(evaluation=[list(row) for row in self.evaluation_table()])
        self.record.finish(outcome, self.metrics())
        self.end_tracking()
        self.store.cache.save()

    def register_set(self) -> None:
        """Register the models of a complete run as one set, which can become champion."""
        if not (
            self.registers
            and {"tokenizer", "evaluate", *self.settings.trainings} <= set(self.artifacts)
        ):
            return
        members = [
            self._register(self.artifacts[of])
            for of in ("tokenizer", *TRAININGS)
            if of in self.artifacts
        ]
        model_set = Registry(self.store.root).register_set(
            self.settings.name,
            self.record.run,
            members,
            {name: artifact.key for name, artifact in self.artifacts.items()},
            dict(EvaluationResult.of(self.artifacts["evaluate"].result).metrics),
        )
        self.model_set = model_set.version
        self.record.note(model_set=str(model_set))

    def _register(self, artifact: Artifact) -> Version:
        return Registry(self.store.root).register_model(
            registered_name(self.settings.name, artifact.stage), artifact, self.record.run
        )


def user_name() -> str | None:
    """Who started the run; None in containers without user names."""
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return None


@contextlib.contextmanager
def screen(
    console: Console, log_level: str, display: StageDisplay | None = None
) -> Iterator[StageDisplay]:
    """A display that is closed with the block, also by a signal that no run handles."""
    try:
        drawn = (
            contextlib.nullcontext(display)
            if display
            else contextlib.closing(Display(console, log_level))
        )
        with drawn as shown_on, handling_signals(_interrupt), showing_logs(log_level):
            yield shown_on
    except EarlySignal as early:
        raise Interrupted(str(early), early.args[0]) from None


class EarlySignal(KeyboardInterrupt):
    """Not an Exception, so that no library's `except Exception` swallows it."""

    def __str__(self) -> str:
        return "interrupted while no stage was running"


def _interrupt(signum: int) -> None:
    raise EarlySignal(signum)
