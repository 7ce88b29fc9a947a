"""The flows of deployments: what a schedule, the Prefect UI or its API runs, in a process that Prefect's runner starts.

Their parameters are the tree of settings, typed, so that the UI makes a form of it and the server refuses what does not
fit, and changes to it as on the command line. Who starts a run through the API and gives `settings` gives all of them, while
`{"changes": ["sft.optim.lr=2e-4"]}` leaves the deployment's as they are. What names code or a command is the deployment's
own in any case (`flow_run_settings.py`). Entry points: `flows.deployments.full` and
`flows.deployments.nightly`. TTRAIN_HOME says where the store is.
"""

from __future__ import annotations

import io
import logging
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

from flows import flow_runs
from flows.flow_run_settings import settings_to_run
from flows.flow_runs import NIGHT_STATES, UNFINISHED
from flows.orchestrate import SIDE_BY_SIDE
from tasks.best_effort import courtesy
from ttrain.config import Settings
from ttrain.core.signals import catching_signals
from ttrain.core.standard_streams import guard_streams, outlast_output
from ttrain.core.terminal import show_warnings
from ttrain.errors import Interrupted, TTrainError
from ttrain.pipeline.stores import store_of
from ttrain.store.layout import usable_home

DEFAULTS = Settings()


@flow(  # type: ignore[untyped-decorator]  # mypy does not follow Prefect
    name="full",
    description="Raw files to tokenizer, shards, base model, SFT model, LoRA adapter and evaluation. Stages whose inputs, "
    "settings and code did not change come from the store, so that a retry continues.",
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=SIDE_BY_SIDE),
)
def full(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """The pipeline `full`.

    Args:
        settings: of the whole pipeline; what is left out has its default
        changes: settings of this run alone as key=value, such as sft.optim.lr=2e-4
    """
    from flows import recipe
    from flows.engine import run_pipeline
    from ttrain.pipeline.plan import plan

    def run(home: Path) -> State[Any] | None:
        changed = settings_to_run(home, "full", _changed(settings, changes))
        store = store_of(home, changed)
        stages = plan(recipe("full"), changed, store)
        run_pipeline("full", changed, store, stages, _console(), engine="prefect", in_flow=True)
        return None

    return _told(run)


@flow(  # type: ignore[untyped-decorator]
    name="nightly",
    description="New data, a challenger trained on it, its evaluation beside the champion's, and the decision which of "
    "them is champion. Nothing new: a short run that says so.",
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=SIDE_BY_SIDE),
)
def nightly(settings: Settings = DEFAULTS, changes: tuple[str, ...] = ()) -> State[Any] | None:
    """One night.

    Args:
        settings: of the whole night; what is left out has its default
        changes: settings of this night alone as key=value, such as pretrain.tokens=2000000
    """
    from flows.nightly import run_night

    def run(home: Path) -> State[Any] | None:
        changed = settings_to_run(home, "nightly", _changed(settings, changes))
        slot = flow_run.scheduled_start_time
        store = store_of(home, changed)
        result = run_night(changed, store, _console(), engine="prefect", slot=slot, in_flow=True)
        if result.outcome in NIGHT_STATES:
            return Completed(name=NIGHT_STATES[result.outcome], message=result.reason)
        if result.outcome == "unfinished":
            return Cancelled(name=UNFINISHED, message=result.reason)
        return Failed(message=result.reason)

    return _told(run)


def _changed(settings: Settings, changes: Sequence[str]) -> Settings:
    """The settings with changes, validated as a whole. Raises UsageError."""
    from ttrain.config.loading import load
    from ttrain.pipeline.earlier_settings import settings_of

    if not changes:
        return settings
    return load(changes, environment={}, base=settings_of({"run": "deployment", "settings": settings.model_dump()})).settings


def _told(run: Callable[[Path], State[Any] | None]) -> State[Any] | None:
    """What the run returns; what it raises on purpose as the state that says so, without a traceback.

    A retry of either starts the flow again, which takes what is finished from the store and continues the rest. What a
    mistake of settings or data ended is retried by a person alone, who has corrected it.
    """
    _quiet()
    try:
        home = usable_home()
        with courtesy():
            flow_runs.claim(home)
        with catching_signals(_stop):  # for what comes before and after the stages, which have their own ways
            return run(home)
    except Interrupted as error:
        return Cancelled(message=str(error))
    except TTrainError as error:
        get_run_logger().error("%s", error)
        if error.is_mistake:
            with courtesy():
                flow_runs.forbid_retries()
        return Failed(message=str(error))


def _quiet() -> None:
    """The terminal gets what the run itself says; the API gets all but the traceback of a state that we returned."""
    guard_streams()
    outlast_output()
    show_warnings()
    logging.getLogger("prefect.task_runs").propagate = False
    logging.getLogger("prefect.flow_runs").addFilter(_is_no_state_of_ours)


def _is_no_state_of_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledRun | FailedRun))


def _stop(signum: int) -> None:
    raise Interrupted("stopped before a stage began", signum)


def _console() -> Console:
    return Console(file=_RunLog(), force_terminal=False, width=160)  # type: ignore[arg-type]


class _RunLog(io.TextIOBase):
    """Passes what the run says to the terminal of the runner, and line by line to the log of the flow run."""

    def __init__(self) -> None:
        self._logger, self._rest = get_run_logger(), ""

    def write(self, text: str) -> int:
        sys.stdout.write(text)  # guarded: the runner, which reads it, may be gone
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.rstrip, lines)):
            self._logger.info("%s", line)
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()
