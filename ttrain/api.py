"""The Python interface: what `import ttrain` offers and the pipeline commands use.

    settings = ttrain.load_settings("my.yaml", overrides={"sft.epochs": 3}, profile="small")
    plan = ttrain.plan("full", settings)
    run = ttrain.run("full", settings)
    model, tokenizer = ttrain.load("quickstart-sft@champion")

It works in notebooks and threads: no signal handlers, no exit, no output unless requested, and an
unchanged environment. Errors are `ttrain.TTrainError`.
"""

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.core.html_table import html_table
from ttrain.engine.display import StageDisplay
from ttrain.engine.graph import Graph, Plan, Planned, Rerun, Selection
from ttrain.errors import Interrupted, TTrainError, UsageError
from ttrain.store import layout
from ttrain.store import runs as run_records
from ttrain.store.artifacts import ArtifactStore

# Without a handler Python prints warnings to standard error.
logging.getLogger("ttrain").addHandler(logging.NullHandler())

ENGINES = ("prefect", "none")


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Restore environment variables and MLflow's loggers, which libraries change."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "sqlalchemy")]
    handlers = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for logger, own_handlers, propagate in handlers:
            logger.handlers = own_handlers
            logger.propagate = propagate
        if "ttrain.flows.engine" in sys.modules:
            sys.modules["ttrain.flows.engine"].reread_environment()


def load_settings(
    *files: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    profile: str | Sequence[str] = (),
) -> Settings:
    """Load settings: defaults < profiles < YAML files < TTRAIN__SECTION__KEY < overrides.

    `overrides`: {"sft.epochs": 3} or ["sft.epochs=3"]. Raises UsageError.
    """
    from ttrain.config.loading import load

    profiles = (profile,) if isinstance(profile, str) and profile else tuple(profile)
    return load(overrides, files=[Path(file) for file in files], profiles=profiles).settings


@_as_found()
def plan(
    pipeline: str = "full",
    settings: Settings | None = None,
    *,
    only: Iterable[str] | None = (),
    since: str = "",
    until: str = "",
    force: Iterable[str] | None = (),
    extend: bool = False,
    resume_key: str = "",
    home: str | Path | None = None,
) -> Plan:
    """What a run would do. Runs nothing. Raises UsageError.

    `only`, `since`, `until`: stages, as --only, --from and --until; `force`: stages to rebuild. A
    text may name several, between commas. `extend`: continue a shorter run's checkpoint.
    `resume_key`: of unfinished work. `home`: default TTRAIN_HOME, else ./artifacts.
    """
    from ttrain.engine.input_files import check_first_rows
    from ttrain.engine.planner import plan as plan_stages
    from ttrain.engine.planner import settings_of_selection
    from ttrain.flows import pipeline as graph_of
    from ttrain.flows.teacher import name_teachers, with_teachers
    from ttrain.tracking.artifact_source import store_of

    settings = Settings() if settings is None else settings
    store = store_of(_home(home), settings)
    settings = name_teachers(settings, store)
    selection = Selection(_stage_names(only), since, until)
    rerun = Rerun(_stage_names(force), extend, resume_key)

    def make_graph(settings: Settings) -> Graph:
        return with_teachers(graph_of(pipeline)(settings), settings, store)

    settings = settings_of_selection(make_graph(settings), settings, store, rerun, selection)
    graph = make_graph(settings)
    earlier = run_records.newest_finished(store.root, settings.name)
    try:
        stages = plan_stages(
            graph, settings, store, rerun, selection=selection, compared_with=earlier
        )
    except UsageError:
        # Report all mistakes: a file of another kind explains more than a missing stage.
        check_first_rows(settings)
        raise
    check_first_rows(settings, [planned.stage for planned in stages if planned.state == "run"])
    name = str(earlier["run"]) if earlier else ""
    return Plan(pipeline, settings, store, graph, stages, selection, rerun, name)


def _stage_names(names: Iterable[str] | None) -> frozenset[str]:
    texts = [names] if isinstance(names, str) else names or ()
    return frozenset(name.strip() for text in texts for name in text.split(",") if name.strip())


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run of a pipeline.

    outcome  completed, cached, nothing-new (a night), failed, interrupted, crashed or running
    metrics  by name, such as "eval/bits_per_byte"
    """

    record: Mapping[str, Any]
    store: ArtifactStore

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.outcome}>"

    def _repr_html_(self) -> str:
        from ttrain.reports import summary

        stages = [summary.status_row(stage)[:4] for stage in summary.shown_stages(self.record)]
        tables = [
            html_table(
                ("stage", "outcome", "time", "figures"), stages, f"{self.name}: {self.outcome}"
            )
        ]
        if evaluation := summary.rows(self.metrics, {}):
            tables.append(html_table(("evaluation", "value", ""), evaluation))
        return "".join(tables)

    @property
    def name(self) -> str:
        return str(self.record["run"])

    @property
    def pipeline(self) -> str:
        return str(self.record["pipeline"])

    @property
    def outcome(self) -> str:
        return str(self.record["outcome"])

    @property
    def started(self) -> str:
        return str(self.record["started"])

    @property
    def seconds(self) -> float:
        """Wall-clock seconds; 0 if nothing ran or the run has not ended."""
        return float(self.record["seconds"] or 0)

    @property
    def metrics(self) -> Mapping[str, float]:
        return dict(self.record.get("metrics", {}))

    @property
    def settings(self) -> Mapping[str, Any]:
        return dict(self.record["settings"])

    @functools.cached_property
    def artifacts(self) -> layout.Artifacts:
        """Artifacts of finished stages in the home, by stage; `.path` is the directory."""
        keys = run_records.keys_of(self.record).items()
        return {
            name: artifact
            for name, key in keys
            if key and (artifact := self.store.at(self.store.path(name, key)))
        }

    def to_json(self) -> dict[str, Any]:
        """What `ttrain pipeline status --json` prints."""
        from ttrain.reports.summary import run_json

        return run_json(self.record)


class Runs(list[Run]):
    def to_pandas(self) -> Any:
        """A data frame with a row per run and a column per metric."""
        import pandas

        columns = ("name", "pipeline", "outcome", "started", "seconds")
        return pandas.DataFrame(
            [{name: getattr(run, name) for name in columns} | dict(run.metrics) for run in self]
        )


def runs(
    name: str = "", *, pipeline: str = "", limit: int | None = None, home: str | Path | None = None
) -> Runs:
    """The recorded runs of a home, newest first, filtered by the setting `name` or the pipeline."""
    store = ArtifactStore(_home(home))
    chosen = (
        Run(record, store)
        for record in run_records.history(store.root)
        if (not name or record["settings"].get("name") == name)
        and (not pipeline or record["pipeline"] == pipeline)
    )
    return Runs(list(chosen)[:limit])


@_as_found()
def run(
    pipeline: str = "full",
    settings: Settings | None = None,
    *,
    engine: str = "none",
    progress: StageDisplay | bool = False,
    note: str = "",
    tags: Mapping[str, str] | None = None,
    home: str | Path | None = None,
    **selection: Any,
) -> Run:
    """Run a pipeline to its end and return its record; what is cached is not run again.

    `engine`: "none" builds one stage after the other, "prefect" is a flow run, on the server of
    PREFECT_API_URL or its own. `progress`: True prints; a function gets (stage, event, data),
    events being started, progressed, ended, failed, message. `selection`: see `plan`. Raises
    TTrainError. A KeyboardInterrupt stops the stages first; the same call continues at their last
    checkpoint.
    """
    from rich.console import Console

    from ttrain.core.signals import without_signal_handlers
    from ttrain.core.terminal import console
    from ttrain.engine.labels import labels_of
    from ttrain.engine.planner import record_cached

    if engine not in ENGINES:
        raise UsageError(f"engine is {engine!r} but must be prefect or none")
    if pipeline == "nightly":
        raise UsageError(
            "pipeline is 'nightly', which needs a process of its own; try `ttrain pipeline "
            "run nightly`"
        )
    labels = labels_of(note, [f"{key}={value}" for key, value in (tags or {}).items()])
    planned = plan(pipeline, settings, home=home, **selection)
    if record := record_cached(planned, labels):
        return Run(record, planned.store)
    layout.usable_home(planned.store.root)
    from ttrain.flows.engine import RunOptions, run_pipeline

    with without_signal_handlers():
        try:
            screen = console() if progress is True else Console(quiet=True)
            display = progress if callable(progress) else None
            execution = run_pipeline(
                planned, screen, RunOptions(engine, labels=labels, display=display)
            )
        except Interrupted as error:
            raise KeyboardInterrupt(str(error)) from None
    return Run(run_records.read(planned.store.root, execution.record.run) or {}, planned.store)


@_as_found()
def load(reference: str, *, device: str = "cpu", home: str | Path | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, or of PEFT for an adapter, in eval mode.

    `reference`: a stage, RUN:stage, NAME@ALIAS, NAME/VERSION or a directory. Raises UsageError for
    an unknown name, ArtifactError for damaged files.
    """
    from ttrain.lineage.lookup import resolve

    artifact = resolve(reference, _home(home))
    artifact.verify()
    from transformers import AutoTokenizer

    from ttrain.model import adapters, factory

    with _quiet_transformers():
        model: Any = factory.load(artifact.model)
        if artifact.adapter is not None:
            model = adapters.load(model, artifact.adapter, artifact.base_digest)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(artifact.tokenizer)


def _home(home: str | Path | None) -> Path:
    return layout.home() if home is None else Path(home).absolute()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers
            yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


__all__ = [
    "Plan",
    "Planned",
    "Run",
    "Runs",
    "TTrainError",
    "load",
    "load_settings",
    "plan",
    "run",
    "runs",
]
