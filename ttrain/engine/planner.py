"""Plan a graph: the key of every stage, whether it is cached, and why not. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ttrain.config import Settings, flatten, rules
from ttrain.config.data import PYTHON_DOCS
from ttrain.config.settings import OPTIONAL
from ttrain.config.training import TRAINING_STAGES, adapter_of
from ttrain.core import extras, machine, redact
from ttrain.core.hashing import code_digests, digest_of
from ttrain.core.text import counted
from ttrain.engine import resume
from ttrain.engine.graph import EVERYTHING, NOTHING_AGAIN, Graph, Node, Planned, Rerun, Selection
from ttrain.engine.input_files import check_suite, data_files, file_digests
from ttrain.engine.resume import extension_of
from ttrain.errors import UsageError
from ttrain.model import registry
from ttrain.reports.summary import shortened
from ttrain.store import references, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.differences import SECOND_HEAD, Ingredients, differences, library_changes
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.results import ShardsResult, TrainingResult
from ttrain.store.runs import RecordedRun
from ttrain.tasks import EVALUATE, OF_NIGHTS, SHARDS, STAGES, Stage

# Settings that name files or other stages: the key has the digests of those instead.
COUNTED_BY_BYTES = (
    *("tokenizer.existing", "shards.decontaminate"),
    *(f"{name}.start_from" for name in TRAINING_STAGES),
    *(f"evaluate.suites.{row.model}" for row in TRAINING_STAGES.values()),
)

SHOWN_SOURCES = 4

SAME, IN_MLFLOW = ("same settings, inputs and code",), ("in MLflow, fetched when a stage reads it",)

WHOLE_IN_MLFLOW = ("MLflow has an intact copy: `ttrain artifacts verify --set-aside` lets the next run fetch it",)


def plan(
    graph: Graph,
    settings: Settings,
    store: ArtifactStore,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    selection: Selection = EVERYTHING,
    compared_with: RecordedRun | None = None,
) -> list[Planned]:
    """Plan every stage of the graph, in its order, except those that the selection leaves out.

    `compared_with`: the run whose artifacts the stages that will run are compared with, else with the most similar ones.

    Raises UsageError if a stage that must be in the store is missing, a logger is not installed, or
    `runtime.eval_suite` cannot be used.
    """
    extras.check(settings.runtime.loggers)  # now, not after the stages before the first training
    check_suite(settings)
    built, reused = _selected(graph, settings, store, rerun, selection)
    planned_stages: dict[str, Planned] = {}
    for name in graph:
        if name not in built | reused:
            continue
        planned = _planned(graph[name], planned_stages, settings, store, rerun, compared_with)
        if name in reused and planned.artifact:
            why = (f"taken from the store: {selection} leaves it out",)
            planned = replace(planned, state="cached", why=why, forced=False, reused=True)
        planned_stages[name] = planned
    stages = list(planned_stages.values())
    _check_models(stages, settings, store)
    store.cache.save()
    if missing := [planned for planned in stages if planned.stage.name in reused and not planned.reused]:
        names = [planned.stage.name for planned in missing]
        raise UsageError(
            f"{selection} leaves out {', '.join(names)}, which the store does not have as these settings make it "
            f"({names[0]}: {'; '.join(missing[0].why[:3])}); run first, with the same settings: "
            f"`ttrain pipeline run full --only {','.join(names)}`"
        )
    return stages


def _selected(
    graph: Graph, settings: Settings, store: ArtifactStore, rerun: Rerun, selection: Selection
) -> tuple[frozenset[str], frozenset[str]]:
    """The stages that the selection builds and reuses. Raises UsageError where an option names another stage."""
    required_by = {f"--force {name}": name for name in sorted(rerun.force)}
    if rerun.resume_key:
        required_by[f"--continue {rerun.resume_key}"] = resume.find_stage(store, rerun.resume_key)
    for name in (*selection.names, *required_by.values()):
        if name not in graph:
            raise no_stage(name, graph, settings)
    built, reused = selection.of(graph)
    for option, name in required_by.items():
        if name not in built:
            raise UsageError(f"{option} refers to stage {name}, which {selection} leaves out; remove one of them")
    return built, reused


def _planned(
    node: Node,
    earlier: Mapping[str, Planned],
    settings: Settings,
    store: ArtifactStore,
    rerun: Rerun,
    compared_with: RecordedRun | None,
) -> Planned:
    """The plan of a stage, after those of the `earlier` ones."""
    stage = node.stage
    read = [earlier[name] for name in node.sources.values() if isinstance(name, str)]
    forced = stage.name in rerun.force or any(planned.forced for planned in read)
    if pending := dict.fromkeys(planned.stage.name for planned in read if planned.artifact is None):
        data_files(stage, settings)  # report a wrong path now, not after earlier stages were built
        return Planned(stage, "run", (f"waits for {', '.join(pending)}",), forced=forced, sources=node.sources)
    found = {name: earlier[of].artifact if isinstance(of, str) else of for name, of in node.sources.items()}
    inputs = {name: artifact for name, artifact in found.items() if artifact}
    planned = plan_stage(stage, settings, store, inputs, rerun, forced=forced, compared_with=compared_with)
    return replace(planned, sources=node.sources)


def _check_models(stages: Iterable[Planned], settings: Settings, store: ArtifactStore) -> None:
    """Raise UsageError for a model that cannot be, or not with its adapter: now, not after the stages before it."""
    continues = False  # whether a model comes from an earlier run, as a night's does, whose shape is its own
    for planned in stages:
        stage = planned.stage
        continues = continues or isinstance(planned.sources.get("base"), Artifact)
        if planned.state == "cached":
            continue
        if _describes_model(stage, settings):
            registry.check_kind(settings.model.kind)
        adapter = adapter_of(stage.name, settings)
        if adapter and not continues and settings.existing_model is None:
            registry.check_targets(stage.name, adapter, settings.model)


def settings_of_selection(
    graph: Graph, settings: Settings, store: ArtifactStore, rerun: Rerun, selection: Selection
) -> Settings:
    """The settings for stages that `--only` names: without the data of the trainings that it leaves out, where it names
    evaluate, and others that train, and not all those models are in the store. What is not there is not evaluated.
    """
    kept = set[str]()
    for chosen in selection.only.intersection(settings.trainings):
        name = chosen
        while name in TRAINING_STAGES and name not in kept:
            kept.add(name)
            name = settings.starts[name]
    left_out = [name for name in settings.trainings if name not in kept]
    if EVALUATE.name not in selection.only or not kept or not left_out:
        return settings
    planned = plan(graph, settings, store, rerun)
    if all(one.state == "cached" for one in planned if one.stage.name in left_out):
        return settings
    none = {TRAINING_STAGES[name].dataset: () for name in left_out}
    return settings.model_copy(update={"data": settings.data.model_copy(update=none)})


def no_stage(name: str, stage_names: Iterable[str], settings: Settings) -> UsageError:
    """The error for a stage that is not in the pipeline: never, or not with these settings."""
    names = list(stage_names)
    stages = f"the stages are {', '.join(names)}"
    if name not in STAGES:
        return references.unknown("stage", name, names, shown=len(names))
    if name in OF_NIGHTS:
        return UsageError(f"stage {name} belongs to nights; try `ttrain pipeline run nightly`. Here {stages}")
    starts = ", ".join(f"{stage}.start_from is {settings.starts[stage]}" for stage in settings.trainings)
    return UsageError(f"stage {name} is not needed here, since {starts}; {stages}")


def plan_stage(
    stage: Stage,
    settings: Settings,
    store: ArtifactStore,
    inputs: Artifacts,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    forced: bool = False,
    compared_with: RecordedRun | None = None,
) -> Planned:
    """Plan one stage whose inputs exist: its key and state."""
    ingredients = ingredients_of(stage, settings, store, inputs)
    key = key_of(ingredients)
    artifact = store.find(stage.name, key)
    if artifact and not forced:
        return Planned(stage, "cached", _why_cached(artifact), key, artifact, ingredients, inputs=inputs)
    if not artifact and not forced and (by_rule := _made_by_rule(stage, ingredients, store)):
        same = f"the values that {stage.name} was trained with by rule"
        ingredients = by_rule.manifest["ingredients"]
        return Planned(stage, "cached", (same,), by_rule.key, by_rule, ingredients, inputs=inputs)
    why = ("asked to run again",) if artifact else tuple(explain(stage, key, ingredients, store, compared_with))
    start_from = work = None
    begins = stage.uses_ranks and not artifact and not resume.saved_step(store.work(stage.name, key))
    if rerun.resume_key and begins and (work := resume.find_partial_run(stage, rerun.resume_key, ingredients, store)):
        why = (f"continues the unfinished work {work.key[:12]} at step {work.step}", *resume.changes(work, ingredients))
    elif rerun.extend and begins:
        start_from, reason = extension_of(stage, settings, ingredients, store)
        why = (reason, *why)
    return Planned(
        stage, "run", why, key, artifact, ingredients, forced=forced, inputs=inputs, start_from=start_from, partial_run=work
    )


def _made_by_rule(stage: Stage, ingredients: Ingredients, store: ArtifactStore) -> Artifact | None:
    """The artifact of a training whose rows gave the same numbers for `auto` that the settings name."""
    for names in (("tokens",), ("epochs",), ("tokens_per_step",), ("epochs", "tokens_per_step")) if stage.uses_ranks else ():
        values = {name: ingredients["settings"].get(f"{stage.name}.{name}") for name in names}
        automatic = {f"{stage.name}.{name}": rules.AUTO for name in names}
        key = key_of({**ingredients, "settings": {**ingredients["settings"], **automatic}})
        artifact = store.find(stage.name, key)
        by_rule = TrainingResult.of(artifact.result).by_rule if artifact else {}
        if artifact and values == {name: by_rule.get(name) for name in names}:
            return artifact
    return None


def _why_cached(artifact: Artifact) -> tuple[str, ...]:
    adopted = artifact.manifest.get("adopted", [])[-1:]
    same = [f"adopted from {last['key'][:12]}, although {'; '.join(last['differences'])}" for last in adopted] or SAME
    return (*same, *(IN_MLFLOW if artifact.absent.issuperset(artifact.files_of(())) else ()))


def ingredients_of(stage: Stage, settings: Settings, store: ArtifactStore, inputs: Artifacts) -> dict[str, Any]:
    """Everything that determines a stage's result: its key is the digest of this, which also explains a cache miss."""
    return {
        "stage": stage.name,
        "arguments": dict(stage.arguments),
        "settings": {name: value for name, value in flatten(stage.part_of(settings)) if _counts(name, stage, settings)},
        "inputs": {name: inputs[name].part(stage.inputs.get(name, ())) for name in sorted(inputs)},
        "files": file_digests(stage, settings, store),
        "code": code_digests(stage.module, store.cache),
    }


def _counts(name: str, stage: Stage, settings: Settings) -> bool:
    """Whether a setting affects the stage's result."""
    if name in COUNTED_BY_BYTES:
        return False
    return not name.startswith("model.") or _describes_model(stage, settings) or name.startswith(SECOND_HEAD)


def _describes_model(stage: Stage, settings: Settings) -> bool:
    """Whether the stage creates a new model of the configured sizes."""
    return "model" in stage.sees and settings.existing_model is None


def key_of(ingredients: Ingredients) -> str:
    """sha256 over the ingredients, without the names of files: a renamed file is the same file."""
    files = {
        role: [{name: value for name, value in file.items() if name != "name"} for file in files]
        for role, files in ingredients.get("files", {}).items()
    }
    return digest_of({**ingredients, "files": files})


def explain(
    stage: Stage,
    key: str,
    ingredients: Ingredients,
    store: ArtifactStore,
    compared_with: RecordedRun | None = None,
) -> list[str]:
    """Explain why this key is not in the store: damage, or the differences from an earlier artifact.

    It is the one of the run `compared_with`, else the most similar one.
    """
    if problem := store.damage_at(stage.name, key):
        is_unreadable = (
            store.at(store.path(stage.name, key)) is None
        )  # otherwise its files may be hard links to MLflow's own
        hint = WHOLE_IN_MLFLOW if is_unreadable and store.manifest_elsewhere(stage.name, key) else ()
        return [f"its artifact is damaged: {problem}", *hint]
    artifacts = store.artifacts(stage.name)
    step = resume.saved_step(store.work(stage.name, key))
    continues = [f"continues its unfinished work at step {step}"] if step else []
    if stage.uses_ranks and not step:
        continues = resume.offer(stage, ingredients, store)
    if not artifacts:
        return continues if step else [*continues, "never run before"]
    earlier_key = runs.keys_of(compared_with).get(stage.name) if compared_with else None
    compared = [_changes(artifact, ingredients) for artifact in artifacts if artifact.key == earlier_key]
    if not compared:
        compared = [_changes(artifact, ingredients) for artifact in artifacts]
    return continues + min(compared, key=len)  # min keeps the first of equals, which is the newest


def _changes(artifact: Artifact, ingredients: Ingredients) -> list[str]:
    """What changed since an artifact was made; of an input the stage that made it, where it is the same one."""
    before, now = artifact.manifest["ingredients"].get("inputs", {}), ingredients.get("inputs", {})
    makers = {name: entry["stage"] for name, entry in artifact.manifest["inputs"].items()}
    changed = [name for name in sorted(before.keys() & now.keys() & makers.keys()) if before[name] != now[name]]
    alike = {**ingredients, "inputs": {**now, **{name: before[name] for name in changed}}}
    return [*differences(artifact.manifest["ingredients"], alike), *(f"{makers[name]} changed" for name in changed)]


def plan_rows(stages: Iterable[Planned]) -> list[tuple[str, str, str, str]]:
    """(stage, state, key, why) for a table; cached stages note which libraries have changed since."""
    versions = machine.versions()
    return [(p.stage.name, p.state, (p.key or "")[:12], shortened([*p.why, *_notes(p, versions)])) for p in stages]


def trained_on(settings: Settings, stages: Iterable[Planned]) -> dict[str, str]:
    """What each training in the plan is trained on: its files, and its records where they are in the store."""
    planned = {one.stage.name: one for one in stages}
    found: dict[str, str] = {}
    for name in (name for name in settings.trainings if name in planned):
        row = TRAINING_STAGES[name]
        paths = settings.data.paths(row.dataset)
        sources = counted(len(paths), "source") if len(paths) > SHOWN_SOURCES else ", ".join(map(redact.url, paths))
        if settings.data.uses_python_docs(row.dataset):
            sources = f"{PYTHON_DOCS}, which ships with ttrain"
        shards = planned.get(SHARDS[row.dataset].name)
        records = ShardsResult.of(shards.artifact.result).train.rows if shards and shards.artifact else 0
        found[name] = f"{sources}: {records:,} {row.rows}" if records else sources
    return found


def without_data(settings: Settings) -> str:
    """A line that names the trainings that have no data, or nothing."""
    names = [name for name in TRAINING_STAGES if not settings.exists(name) and name not in OPTIONAL]
    if not names:
        return ""
    data = ", ".join(f"data.{TRAINING_STAGES[name].dataset}" for name in names)
    return f"no {', '.join(names)}: {data} {'is' if len(names) == 1 else 'are'} none"


def plan_json(pipeline: str, stages: Iterable[Planned]) -> dict[str, Any]:
    """What `plan --json` prints."""
    versions = machine.versions()
    return {"pipeline": pipeline, "stages": [{**p.to_json(), "notes": _notes(p, versions)} for p in stages]}


def _notes(planned: Planned, versions: Mapping[str, str]) -> list[str]:
    cached = planned.artifact if planned.state == "cached" else None
    return library_changes(cached.manifest, versions) if cached else []
