"""The flows of deployments: one scheduled run of the pipeline, or one night.

A deployment's parameters are the tree of settings, typed, so that Prefect's page makes a form of it
and the server refuses what does not fit. A run that is started through the API with `settings` must
give all of them; `{"changes": ["sft.epochs=3"]}` keeps the others of the deployment. Settings that
name code or a command are always the deployment's (`settings_to_run`).
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.exceptions import CancelledRun, FailedRun
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from ttrain.config import NAMES_CODE, Settings
from ttrain.config.loading import load
from ttrain.core import redact
from ttrain.core.files import PRIVATE_FILE, Taken, exclusive, read_object, refuse, write_json
from ttrain.core.terminal import escaped, guard_streams, outlast_output, show_warnings
from ttrain.core.text import timed_lines
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.flows import deploy, flow_runs
from ttrain.flows.flow_runs import NIGHT_STATES, UNFINISHED, best_effort, current_flow_run
from ttrain.flows.prefect_run import MAX_CONCURRENT_STAGES
from ttrain.lineage.names import base_of
from ttrain.store.layout import usable_home
from ttrain.tracking.artifact_source import store_of

DEFAULTS = Settings()

# The API gets these logs, the terminal does not: it has the run's own messages. Now, not in the
# flow: a signal that comes before it is logged as a crash.
for run_logger in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(run_logger).propagate = False


def slot_name() -> str:
    """The name of a flow run until it is named after its night or run."""
    return f"slot {flow_run.scheduled_start_time.astimezone():%Y-%m-%d %H:%M}"


def run_full(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """Raw files to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation.

    Stages whose inputs, settings and code did not change come from the store: a retry continues.

    Args:
        settings: of the whole pipeline; what is left out has its default
        changes: settings of this run alone as key=value, such as sft.epochs=3
    """
    return _final_state("full", _run_full, settings, changes)


def run_nightly(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """One night: new data, a challenger trained on it, and the decision which model is champion.

    Args:
        settings: of the whole night; what is left out has its default
        changes: settings of this night alone as key=value, such as pretrain.tokens=2000000
    """
    return _final_state("nightly", _run_night, settings, changes)


# Prefect retries no flow run: stages have retries of their own, and the next slot continues. Names
# differ from those of the functions, which the runner's processes load by their names.
OPTIONS: Any = {
    "flow_run_name": slot_name,
    "retries": 0,
    "persist_result": False,
    "task_runner": ThreadPoolTaskRunner(max_workers=MAX_CONCURRENT_STAGES),
}
full = flow(run_full, name="full", **OPTIONS)
nightly = flow(run_nightly, name="nightly", **OPTIONS)
FLOWS = {"full": full, "nightly": nightly}


def _run_full(home: Path, settings: Settings) -> State[Any] | None:
    """Run the pipeline; a slot that another one covers is skipped."""
    from ttrain.engine.plan import Plan
    from ttrain.engine.planner import plan
    from ttrain.flows.full import full as full_graph
    from ttrain.flows.run import RunOptions, run_pipeline

    schedule = f"full/{settings.name}"
    lock = deploy.path_of(home, schedule).with_suffix(".lock")
    is_slot = current_flow_run().auto_scheduled
    try:
        with exclusive(lock, refuse) if is_slot else contextlib.nullcontext():
            if is_slot and (covered := covered_by(home, schedule)):
                return Completed(name=NIGHT_STATES["skipped"], message=covered)
            store = store_of(home, settings)
            graph = full_graph(settings)
            planned = Plan("full", settings, store, graph, plan(graph, settings, store))
            run_pipeline(planned, flow_run_console(), RunOptions(in_flow=True))
    except Taken:
        return Completed(name=NIGHT_STATES["skipped"], message="the slot before is still running")
    return None


def covered_by(home: Path, schedule: str) -> str | None:
    """Why a slot needs no run: one that began after it has ended, as after an outage."""
    last = read_object(deploy.last_run_file(home, schedule))
    if flow_run.run_count > 1 or not last:  # a retry
        return None
    began = datetime.fromisoformat(last["began"])
    is_covered = flow_run.scheduled_start_time < began < datetime.now().astimezone()
    return f"{last['name']} began after this slot" if is_covered else None


def _run_night(home: Path, settings: Settings) -> State[Any]:
    from ttrain.flows.nightly import run_night

    slot, console = flow_run.scheduled_start_time, flow_run_console()
    store = store_of(home, settings)
    result = run_night(settings, store, console, engine="prefect", slot=slot, in_flow=True)
    if result.outcome in NIGHT_STATES:
        return Completed(name=NIGHT_STATES[result.outcome], message=result.reason)
    if result.outcome == "unfinished":
        return Cancelled(name=UNFINISHED, message=result.reason)
    return Failed(message=result.reason)


def _final_state(
    kind: str,
    run: Callable[[Path, Settings], State[Any] | None],
    settings: Settings,
    changes: Sequence[str],
) -> State[Any] | None:
    """The final state of the run, which is printed and kept for `schedule list`.

    ttrain's own errors become states, without a traceback. A retry starts the flow again, which
    takes what is finished from the store and continues the rest.
    """
    set_up_logging()
    try:
        home = usable_home()
        with best_effort():
            flow_runs.label_with_process(home)
        state = run(home, settings_to_run(home, kind, settings, changes))
    except Interrupted as error:
        state = Cancelled(message=str(error))
    except TTrainError as error:
        get_run_logger().error("%s", error)
        state = Failed(message=str(error))
    with best_effort():
        _show_end(home, f"{kind}/{settings.name}", state or Completed())
    return state


def _show_end(home: Path, schedule: str, state: State[Any]) -> None:
    """Print how the flow run ended, and keep it as the schedule's last one."""
    with flow_runs.sync_client() as client:
        run = client.read_flow_run(current_flow_run().id)  # its name is that of its night by now
    message = f", {state.message}" if state.message else ""
    print(timed_lines(escaped(f"{run.name}: {state.name}{message}")), flush=True)
    last = {
        "name": run.name,
        "outcome": state.name,
        "slot": flow_run.scheduled_start_time.isoformat(),
        "began": run.start_time.isoformat(),
        "message": state.message,
    }
    write_json(deploy.last_run_file(home, schedule), last, PRIVATE_FILE)


def settings_to_run(home: Path, kind: str, settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings of the current flow run: its parameters with the secrets of their sources.

    Secrets are those of the schedule, else of the environment. What names code is always what the
    schedule says; a flow that a user's program calls directly runs with its arguments. Raises
    UsageError for a change of such a setting.
    """
    schedule = None
    if deployment.id:
        full_name = f"{kind}/{deployment.name}"
        schedule = deploy.read_all(home).get(full_name)
        for key in (change.partition("=")[0] for change in changes):
            if any(f"{key}.".startswith(f"{name}.") for name in NAMES_CODE):
                raise UsageError(
                    f"{key} is in the changes of this flow run, but a setting that names code or a "
                    f"command comes from {deploy.path_of(home, full_name)} only; leave it out, or "
                    f"set it there with `ttrain pipeline schedule {kind} ... {key}=...`"
                )
    tree = settings_with_changes(settings, changes).model_dump()
    if schedule:
        tree = redact.restored(tree, schedule.settings)
    if redact.has_hidden(tree):
        tree = redact.restored(tree, load().settings.model_dump())
    if deployment.id:
        deployed = (deploy.settings_of(home, schedule) if schedule else Settings()).model_dump()
        for section, _, name in (key.partition(".") for key in NAMES_CODE):
            own = deployed[section]
            tree[section] = {**tree[section], name: own[name]} if name else own
    return Settings.model_validate(tree)


def settings_with_changes(settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings with changes, validated as a whole. Raises UsageError."""
    if not changes:
        return settings
    base = base_of({"run": "deployment", "settings": settings.model_dump()})
    return load(changes, environment={}, base=base).settings


def set_up_logging() -> None:
    """The terminal gets the run's own messages, the API all logs but tracebacks of our states."""
    guard_streams()
    outlast_output()
    show_warnings()
    logging.getLogger("prefect.flow_runs").addFilter(is_not_own_state)


def is_not_own_state(record: logging.LogRecord) -> bool:
    """Logging filter: whether the record is not of a state that ttrain itself returned."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, CancelledRun | FailedRun)


def flow_run_console() -> Console:
    """Make the console that prints to the terminal and to the flow run's log."""
    return Console(file=_RunLog(), force_terminal=False, width=160)


class _RunLog(io.StringIO):
    """Passes the run's messages to the terminal, and line by line to the flow run's log."""

    def __init__(self) -> None:
        super().__init__()
        self._logger = get_run_logger()

    def write(self, text: str) -> int:
        for line in filter(None, map(str.rstrip, text.split("\n"))):
            print(timed_lines(line), flush=True)
            self._logger.info("%s", line)
        return len(text)
