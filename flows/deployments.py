"""The flows of deployments: what a schedule, the Prefect UI or its API runs, in a process that Prefect's runner starts.

Their parameters are the tree of settings, typed, so that the UI makes a form of it and the server refuses what does not
fit, and changes to it as on the command line. A run that is started through the API with `settings` must give all of them;
`{"changes": ["sft.epochs=3"]}` keeps the others of the deployment. Settings that name code or a command are always the
deployment's (`settings_to_run`). Entry points:
`ttrain.flows.deployments.full` and `ttrain.flows.deployments.nightly`. TTRAIN_HOME is the home of the store.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.exceptions import CancelledRun, FailedRun
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from ttrain.config import NAMES_CODE, Settings, flatten
from ttrain.config.yaml_text import shown
from ttrain.core.signals import catching_signals
from ttrain.core.terminal import escaped, guard_streams, outlast_output, show_warnings
from ttrain.core.text import timed_lines
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import flow_runs, schedules
from ttrain.flows.flow_runs import NIGHT_STATES, UNFINISHED
from ttrain.flows.prefect_run import MAX_CONCURRENT_STAGES
from ttrain.pipeline.artifact_commands import store_of
from ttrain.store.layout import usable_home
from ttrain.tasks.best_effort import best_effort

DEFAULTS = Settings()
# The API gets these logs, the terminal does not: it has the run's own messages, and what starts the run tells how it ended.
# Now, not in the flow: a signal that comes before it is logged as a crash.
for run_logger in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(run_logger).propagate = False


@flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect
    name="full",
    description="Raw files to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation. Stages whose inputs, "
    "settings and code did not change come from the store, so that a retry continues.",
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
)
def full(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """The pipeline `full`.

    Args:
        settings: of the whole pipeline; what is left out has its default
        changes: settings of this run alone as key=value, such as sft.epochs=3
    """
    from ttrain.flows import recipe
    from ttrain.flows.run import run_pipeline
    from ttrain.pipeline.plan import plan

    def run(home: Path) -> State[Any] | None:
        changed = settings_to_run(home, "full", settings_with_changes(settings, changes))
        store = store_of(home, changed)
        stages = plan(recipe("full"), changed, store)
        run_pipeline("full", changed, store, stages, flow_run_console(), engine="prefect", in_flow=True)
        return None

    return _final_state(run)


@flow(  # type: ignore[untyped-decorator]
    name="nightly",
    description="New data, a challenger trained on it, its evaluation beside the champion's, and the decision which of "
    "them is champion. Nothing new: a short run that says so.",
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
)
def nightly(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """One night.

    Args:
        settings: of the whole night; what is left out has its default
        changes: settings of this night alone as key=value, such as pretrain.tokens=2000000
    """
    from ttrain.flows.nightly import run_night

    def run(home: Path) -> State[Any] | None:
        changed = settings_to_run(home, "nightly", settings_with_changes(settings, changes))
        slot = flow_run.scheduled_start_time
        store = store_of(home, changed)
        result = run_night(changed, store, flow_run_console(), engine="prefect", slot=slot, in_flow=True)
        if result.outcome in NIGHT_STATES:
            return Completed(name=NIGHT_STATES[result.outcome], message=result.reason)
        if result.outcome == "unfinished":
            return Cancelled(name=UNFINISHED, message=result.reason)
        return Failed(message=result.reason)

    return _final_state(run)


def settings_with_changes(settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings with changes, validated as a whole. Raises UsageError."""
    from ttrain.config.loading import load
    from ttrain.pipeline.names import base_of

    if not changes:
        return settings
    return load(changes, environment={}, base=base_of({"run": "deployment", "settings": settings.model_dump()})).settings


def _final_state(run: Callable[[Path], State[Any] | None]) -> State[Any] | None:
    """The final state of the run; ttrain's own errors become states, without a traceback.

    A retry starts the flow again, which takes what is finished from the store and continues the rest. After a mistake of
    settings or data there is no automatic retry.
    """
    set_up_logging()
    try:
        home = usable_home()
        with best_effort():
            flow_runs.label_with_process(home)
        with catching_signals(_stop):  # for what is before and after the stages, which handle signals themselves
            return run(home)
    except Interrupted as error:
        return Cancelled(message=str(error))
    except TTrainError as error:
        get_run_logger().error("%s", error)
        if not error.shown:
            print(timed_lines(f"error: {escaped(str(error))}"), flush=True)
        with best_effort():
            flow_runs.note_shown(is_final=error.is_mistake)
        return Failed(message=str(error))


def set_up_logging() -> None:
    """The terminal gets the run's own messages; the API gets all logs but the traceback of a state that we returned."""
    guard_streams()
    outlast_output()
    show_warnings()
    logging.getLogger("prefect.flow_runs").addFilter(is_not_own_state)


def is_not_own_state(record: logging.LogRecord) -> bool:
    """Logging filter: whether the record is not of a state that ttrain itself returned."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledRun | FailedRun))


def _stop(signum: int) -> None:
    raise Interrupted("stopped before a stage began", signum)


def flow_run_console() -> Console:
    """Make the console that prints to the terminal and to the flow run's log."""
    return Console(file=_RunLog(), force_terminal=False, width=160)  # type: ignore[arg-type]


class _RunLog(io.TextIOBase):
    """Passes the run's messages to the terminal of the runner, and line by line to the log of the flow run."""

    def __init__(self) -> None:
        self._logger, self._rest = get_run_logger(), ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.rstrip, lines)):
            sys.stdout.write(f"{timed_lines(line)}\n")  # guarded: the runner, which reads it, may be gone
            self._logger.info("%s", line)
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def settings_to_run(home: Path, kind: str, settings: Settings) -> Settings:
    """The settings of the current flow run: its parameters and the secrets of its sources.

    A flow that a user's program calls directly has no deployment, and runs with its arguments. Raises UsageError where the
    parameters set what they may not.
    """
    if not os.environ.get("PREFECT__FLOW_RUN_ID"):  # `serve` or a worker sets it
        return schedules.with_secrets(settings, None)
    from prefect.runtime import deployment

    full_name = f"{kind}/{deployment.name}"
    schedule = schedules.read_all(home).get(full_name)
    deployed = schedules.settings_of(home, schedule) if schedule else Settings()
    settings = schedules.with_secrets(settings, schedule)
    return with_code_of(deployed, settings, kind, schedules.path_of(home, full_name))


def with_code_of(deployed_settings: Settings, settings: Settings, kind: str, path: Path) -> Settings:
    """The settings, with those that name code from the deployment. Raises UsageError where a parameter has another value.

    A default is not another value: settings of a run need not repeat the deployment's.
    """
    values, trees = _naming_code(settings), [_naming_code(deployed_settings), _naming_code(Settings())]
    for key, value in values.items():
        if all(tree.get(key) != value for tree in trees):
            raise UsageError(
                f"{key} is {shown(value)} in the parameters of this flow run, but settings that name code or a command come "
                f"from the deployment's own file only, {path}; leave it out, or set it there with "
                f"`ttrain pipeline schedule {kind} ... {key}=...`"
            )
    deployed = deployed_settings.model_dump()
    for section, _, name in (key.partition(".") for key in NAMES_CODE):
        settings = settings.replaced({section: {name: deployed[section][name]} if name else deployed[section]})
    return settings


def _naming_code(settings: Settings) -> dict[str, Any]:
    """The settings that name code, as they are shown: without the secret part of a webhook's address."""
    prefixes = tuple(f"{key}." for key in NAMES_CODE)
    leaves = flatten(settings.model_dump(mode="json"))
    return {key: value for key, value in leaves if key in NAMES_CODE or key.startswith(prefixes)}
