"""Plan a graph: the key of every stage, whether it is cached, and why not."""

import copy
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ttrain.config import Settings, flatten
from ttrain.config.data import PYTHON_DOCS
from ttrain.config.settings import OPTIONAL
from ttrain.config.training import TRAINING_STAGES, adapter_of
from ttrain.core import extras, redact
from ttrain.core.files import JsonObject
from ttrain.core.hashing import code_digests, digest_of
from ttrain.core.text import counted
from ttrain.engine import resume
from ttrain.engine.graph import EVERYTHING, NOTHING_AGAIN, Graph, Plan, Planned, Rerun, Selection
from ttrain.engine.input_files import data_files, file_digests
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.evaluate import suites
from ttrain.model import kinds
from ttrain.reports import summary
from ttrain.store import name_syntax, runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.differences import SECOND_HEAD, Ingredients, differences
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.results import ShardsResult
from ttrain.tasks import EVALUATE, OF_NIGHTS, SHARDS, STAGES, Stage

# Settings that name files or other stages: the key has the digests of those instead.
COUNTED_BY_BYTES = (
    *("tokenizer.existing", "shards.decontaminate", "pretrain.teacher"),
    *(f"{name}.start_from" for name in TRAINING_STAGES),
    *(f"evaluate.suites.{row.model}" for row in TRAINING_STAGES.values()),
)

SHOWN_SOURCES = 4

SAME, IN_MLFLOW = "same settings, inputs and code", "in MLflow, fetched when a stage reads it"


def plan(
    graph: Graph,
    settings: Settings,
    store: ArtifactStore,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    selection: Selection = EVERYTHING,
    compared_with: runs.RecordedRun | None = None,
) -> list[Planned]:
    """Plan every selected stage of the graph, in its order.

    `compared_with`: the run whose artifacts explain changes, else the most similar ones. Raises
    UsageError if a stage that must be in the store is missing, a logger is not installed, or
    `runtime.eval_suite` is invalid.
    """
    extras.check(settings.runtime.loggers)  # now, not after the stages before the first training
    if settings.runtime.eval_every_steps and settings.runtime.eval_suite:
        suites.files_of(suites.load(settings.runtime.eval_suite))
    built, reused = _selected(graph, settings, store, rerun, selection)
    planned: dict[str, Planned] = {}
    for name, node in graph.items():
        if name not in built | reused:
            continue
        read = [planned[of] for of in node.sources.values() if isinstance(of, str)]
        forced = name in rerun.force or any(each.forced for each in read)
        if pending := dict.fromkeys(each.name for each in read if each.artifact is None):
            data_files(
                node.stage, settings
            )  # a wrong path is reported before earlier stages are built
            one = Planned(node.stage, "run", (f"waits for {', '.join(pending)}",), forced=forced)
        else:
            one = plan_stage(
                node.stage,
                settings,
                store,
                node.inputs({each.name: each.artifact for each in read}),
                rerun,
                forced=forced,
                compared_with=compared_with,
            )
        if name in reused and one.artifact:
            one = replace(
                one,
                state="cached",
                why=(f"taken from the store: {selection} leaves it out",),
                forced=False,
            )
        planned[name] = replace(one, sources=node.sources)
    stages = list(planned.values())
    _check_models(stages, settings)
    store.cache.save()
    if missing := [each for each in stages if each.name in reused and not each.artifact]:
        names = ",".join(each.name for each in missing)
        raise UsageError(
            f"{selection} leaves out {names}, which the store does not have as these settings "
            f"make it "
            f"({missing[0].name}: {'; '.join(missing[0].why[:3])}); run first, with the same "
            f"settings: "
            f"`ttrain pipeline run full --only {names}`"
        )
    return stages


def _selected(
    graph: Graph, settings: Settings, store: ArtifactStore, rerun: Rerun, selection: Selection
) -> tuple[frozenset[str], frozenset[str]]:
    required = {f"--force {name}": name for name in sorted(rerun.force)}
    if rerun.resume_key:
        required[f"--continue {rerun.resume_key}"] = resume.find_stage(store, rerun.resume_key)
    for name in (*selection.names, *required.values()):
        if name not in graph:
            raise no_stage(name, graph, settings)
    built, reused = selection.of(graph)
    for option, name in required.items():
        if name not in built:
            raise UsageError(
                f"{option} refers to stage {name}, which {selection} leaves out; remove one of them"
            )
    return built, reused


def _check_models(stages: list[Planned], settings: Settings) -> None:
    # Now, not after the stages before it.
    # The base model of an earlier night has a shape of its own
    is_kept = any(isinstance(planned.sources.get("base"), Artifact) for planned in stages)
    for planned in (planned for planned in stages if planned.state == "run"):
        if _describes_model(planned.stage, settings):
            kinds.check_kind(settings.model.kind)
        adapter = adapter_of(planned.name, settings)
        if adapter and not is_kept and settings.existing_model is None:
            kinds.check_targets(planned.name, adapter, settings.model)


def settings_of_selection(
    graph: Graph, settings: Settings, store: ArtifactStore, rerun: Rerun, selection: Selection
) -> Settings:
    """The settings for the stages that `--only` names.

    If `--only` has evaluate and other stages that train, models that it leaves out and the store
    lacks are not evaluated: their data are removed.
    """
    chosen = selection.only.intersection(settings.trainings)
    needed = frozenset[str]().union(*map(graph.needed_by, chosen))
    left_out = set(settings.trainings) - needed
    if EVALUATE.name not in selection.only or not chosen or not left_out:
        return settings
    cached = {each.name for each in plan(graph, settings, store, rerun) if each.state == "cached"}
    if left_out <= cached:
        return settings
    return settings.replaced({"data": dict.fromkeys(left_out, ())})


def no_stage(name: str, stage_names: Iterable[str], settings: Settings) -> UsageError:
    """The error for a stage that is not in the pipeline."""
    names = list(stage_names)
    if name not in STAGES:
        return name_syntax.unknown("stage", name, names, shown=len(names))
    stages = f"the stages are {', '.join(names)}"
    if name in OF_NIGHTS:
        return UsageError(
            f"stage {name} belongs to nights; try `ttrain pipeline run nightly`. Here {stages}"
        )
    starts = ", ".join(
        f"{stage}.start_from is {settings.starts[stage]}" for stage in settings.trainings
    )
    return UsageError(f"stage {name} is not needed here, since {starts}; {stages}")


def alone(name: str, plan: Plan) -> Plan:
    """The plan of one stage, with existing artifacts. Raises UsageError."""
    planned = {each.name: each for each in plan}
    if name not in planned:
        raise no_stage(name, planned, plan.settings)
    needed = plan.graph.needed_by(name) - {name}
    if missing := [each for each in planned if each in needed and not planned[each].artifact]:
        commands = ", ".join(f"`ttrain stage run {each}`" for each in missing)
        raise UsageError(
            f"stage {name} waits for {', '.join(missing)}; run first, with the same settings: "
            f"{commands}, "
            f"or all at once: `ttrain pipeline run full --until {name}`"
        )
    return replace(
        plan,
        pipeline=f"stage-{name}",
        stages=[replace(planned[name], sources=planned[name].inputs)],
    )


def plan_stage(
    stage: Stage,
    settings: Settings,
    store: ArtifactStore,
    inputs: Artifacts,
    rerun: Rerun = NOTHING_AGAIN,
    *,
    forced: bool = False,
    compared_with: runs.RecordedRun | None = None,
) -> Planned:
    """Plan one stage whose inputs exist: its key and state."""
    ingredients = ingredients_of(stage, settings, store, inputs)
    key = key_of(ingredients)
    artifact = store.find(stage.name, key)
    planned = Planned(stage, "cached", (), key, artifact, ingredients, forced, inputs)
    if artifact and not forced:
        reasons = [SAME]
        if adopted := artifact.manifest.get("adopted"):
            changed = ", ".join(adopted[-1]["differences"])
            reasons = [f"adopted from {adopted[-1]['key'][:12]}, although {changed}"]
        if artifact.absent.issuperset(artifact.files_of(())):
            reasons.append(IN_MLFLOW)
        return replace(planned, why=tuple(reasons))
    step = resume.saved_step(store.work(stage.name, key))
    if artifact:
        return replace(planned, state="run", why=("asked to run again",), first_step=step)
    why = tuple(explain(stage, key, ingredients, store, compared_with))
    planned = replace(planned, state="run", why=why, first_step=step)
    if not stage.uses_ranks or step:
        return planned
    if rerun.resume_key and (
        work := resume.find_partial_run(stage, rerun.resume_key, ingredients, store)
    ):
        why = (
            f"continues the unfinished work {work.key[:12]} at step {work.step}",
            *differences(work.ingredients, ingredients),
        )
        return replace(planned, why=why, first_step=work.step, partial_run=work)
    if rerun.extend:
        start_from, step, reason = resume.extension_of(stage, settings, ingredients, store)
        return replace(planned, why=(reason, *why), first_step=step, start_from=start_from)
    return planned


def ingredients_of(
    stage: Stage, settings: Settings, store: ArtifactStore, inputs: Artifacts
) -> dict[str, Any]:
    """Everything that determines a stage's result; the key is its digest."""
    return {
        "stage": stage.name,
        "arguments": dict(stage.arguments),
        "settings": {
            name: value
            for name, value in flatten(stage.part_of(settings))
            if name not in COUNTED_BY_BYTES
            and (
                not name.startswith("model.")
                or name.startswith(SECOND_HEAD)
                or _describes_model(stage, settings)
            )
        },
        "inputs": {name: inputs[name].part(stage.inputs.get(name, ())) for name in sorted(inputs)},
        "files": file_digests(stage, settings, store),
        "code": code_digests(stage.module, store.cache),
    }


def _describes_model(stage: Stage, settings: Settings) -> bool:
    return "model" in stage.sees and settings.existing_model is None


def key_of(ingredients: Ingredients) -> str:
    """sha256 over the ingredients, without the names of files: a renamed file is the same file."""
    files = copy.deepcopy(ingredients.get("files", {}))
    for file in itertools.chain.from_iterable(files.values()):
        file.pop("name", None)
    return digest_of({**ingredients, "files": files})


def explain(
    stage: Stage,
    key: str,
    ingredients: Ingredients,
    store: ArtifactStore,
    compared_with: runs.RecordedRun | None = None,
) -> list[str]:
    """Why this key is not in the store: damage, or the differences from an earlier artifact.

    It is the one of the run `compared_with`, else the most similar one.
    """
    if problem := store.damage_at(store.path(stage.name, key)):
        return [f"its artifact is damaged: {problem}"]
    continues: list[str] = []
    if step := resume.saved_step(store.work(stage.name, key)):
        continues = [f"continues its unfinished work at step {step}"]
    elif stage.uses_ranks:
        continues = resume.offer(stage, ingredients, store)
    artifacts = store.artifacts(stage.name)
    if not artifacts:
        return continues if step else [*continues, "never run before"]
    earlier_key = runs.keys_of(compared_with).get(stage.name) if compared_with else None
    earlier = [artifact for artifact in artifacts if artifact.key == earlier_key]
    # min keeps the first of equals, which is the newest.
    return continues + min(
        (_changes(artifact, ingredients) for artifact in earlier or artifacts), key=len
    )


def _changes(artifact: Artifact, ingredients: Ingredients) -> list[str]:
    before = artifact.manifest["ingredients"].get("inputs", {})
    now = ingredients.get("inputs", {})
    makers = {name: entry["stage"] for name, entry in artifact.manifest["inputs"].items()}
    changed = [
        name
        for name in sorted(before.keys() & now.keys() & makers.keys())
        if before[name] != now[name]
    ]
    alike = {**ingredients, "inputs": {**now, **{name: before[name] for name in changed}}}
    return [
        *differences(artifact.manifest["ingredients"], alike),
        *dict.fromkeys(
            f"{makers[name]} changed" for name in changed
        ),  # a stage may give two inputs
    ]


def trained_on(settings: Settings, stages: Iterable[Planned]) -> dict[str, str]:
    """What each training is trained on: its files, and the number of records if known."""
    artifacts = {each.name: each.artifact for each in stages}
    lines: dict[str, str] = {}
    for name in filter(artifacts.__contains__, settings.trainings):
        paths = settings.data.paths(name)
        sources = (
            counted(len(paths), "source")
            if len(paths) > SHOWN_SOURCES
            else ", ".join(map(redact.url, paths))
        )
        if settings.data.uses_python_docs(name):
            sources = f"{PYTHON_DOCS}, which ships with ttrain"
        shards = artifacts.get(SHARDS[name].name)
        records = ShardsResult.of(shards.result).train.rows if shards else 0
        lines[name] = f"{sources}: {records:,} {TRAINING_STAGES[name].rows}" if records else sources
    return lines


def without_data(settings: Settings) -> str:
    """A line that names the trainings without data, or nothing."""
    names = [name for name in TRAINING_STAGES if not settings.exists(name) and name not in OPTIONAL]
    if not names:
        return ""
    data = ", ".join(f"data.{name}" for name in names)
    return f"no {', '.join(names)}: {data} {'is' if len(names) == 1 else 'are'} none"


def record_cached(plan: Plan, labels: JsonObject) -> runs.RecordedRun | None:
    """Record a run that found everything cached; None if it did not, or has models to register.

    It has if no run of these models had this name, or the newest one was interrupted.
    """
    if not plan.is_cached:
        return None
    home = plan.store.root
    keys = {stage.name: stage.key for stage in plan}
    newest = next(runs.equal_runs(home, keys), None)
    own = next(
        (
            run
            for run in runs.equal_runs(home, keys)
            if run["settings"]["name"] == plan.settings.name
        ),
        None,
    )
    if newest and (own is None or runs.is_cut_short(own)):
        return None
    recorded = with_absolute_paths(plan.settings).model_dump(mode="json")
    facts = {
        "metrics": summary.metrics_of(plan.results),
        "equals": runs.made_by(own) if own else None,
        **labels,
    }
    return runs.record_cached(home, plan.pipeline, plan.stages, recorded, facts)
