"""What a name on the command line means. Loads neither torch nor, unless needed, MLflow.

sft                              a stage, of one run for all names of a command: `run_of` says which
full-20261121-160222-1a2b        a run, by its name or a part of it; RUN:sft is that run's SFT stage
name@champion, name/3            a registered model, by alias or version; also as
                                 models:/name@champion. The name of a pipeline stands for the set
                                 of a run's models
3f1c0a9b, sft/3f1c0a9b           an artifact, by the beginning of its key
some/directory, ./sft            a Hugging Face directory, an adapter's directory, a checkpoint, an
                                 artifact
owner/name, owner/name@revision  a model on the Hugging Face Hub, for the commands that take one:
                                 fetched where its cache lacks it

Where a model is wanted, a run or a set stands for its last one, the adapter.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import flatten
from ttrain.config.loading import Override, load
from ttrain.config.training import TRAININGS
from ttrain.core import redact
from ttrain.core.files import JsonDict, read_object
from ttrain.data import existing
from ttrain.errors import ArtifactError, UsageError
from ttrain.reports.facts import changed_settings
from ttrain.store import layout, name_syntax, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    Reference,
    base_digest_of,
    weight_files,
    weights_digest,
)
from ttrain.store.registry import CHAMPION, ModelSet, Registry
from ttrain.store.run_views import find_run, need_run
from ttrain.tasks import OF_NIGHTS, SFT, STAGES
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.registered import take_over_champions

log = logging.getLogger("ttrain")

ADAPTER_DIRECTORY = "adapter"
HEX = frozenset("0123456789abcdef")
SHORTEST_KEY = 6
# Stages whose model is the default: the one that chats, since an adapter only knows its domain
DEFAULTS = (SFT.name, "dpo", "lora", "pretrain", "base-model", "new-model")
DONE = (*runs.BUILT, "cached")  # outcomes of stages that have an artifact


@dataclass(frozen=True)
class Named:
    """What a name means. `artifacts`: (stage, key) of each, in the order of the stages."""

    kind: str  # stage, run, set, model, key or directory
    name: str  # in full: NAME/VERSION, RUN, RUN:STAGE, STAGE/KEY
    artifacts: tuple[tuple[str, str], ...] = ()
    run: runs.RecordedRun | None = None  # that the name led to
    directory: Path | None = None


def find(
    store: ArtifactStore,
    text: str,
    searched_run: runs.RecordedRun | None = None,
    *,
    from_hub: bool = False,
) -> Named:
    """Find what a name means. `searched_run`: the run in which stages are looked up.

    Raises UsageError for an unknown name, listing what exists.
    """
    home = store.root
    if text in STAGES:
        if run := searched_run or run_of([text], home):
            return _of_run(run, text)
        artifact = store.latest(text)
        return Named("stage", f"{text}/{artifact.key}", ((text, artifact.key),))
    names = runs.names(home)
    is_path = name_syntax.is_path(text)
    directory = name_syntax.directory(text) if text not in names else None
    model = None if is_path else name_syntax.registered(text)
    if model and (directory is None or str(model) in Registry(home).versions()):
        if model.alias == CHAMPION:
            take_over_champions(home)
        version = Registry(home).resolve(model)
        members = version.models if isinstance(version, ModelSet) else [version]
        return Named(
            "set" if isinstance(version, ModelSet) else "model",
            str(version),
            tuple((member.stage, member.key) for member in members),
            runs.read(home, version.run),
        )
    if directory:
        places = (directory.resolve(), *directory.resolve().parents)
        if owner := next(filter(None, map(store.at, places)), None):
            identity = (owner.stage, owner.key)
            return Named("key", "/".join(identity), (identity,), directory=directory)
        return Named("directory", str(directory), directory=directory)
    if key := _of_key(store, text):
        return key
    run_name, stage = name_syntax.run_and_stage(text)
    if record := find_run(home, run_name):
        return _of_run(record, stage)
    if from_hub and not is_path and existing.HUB_REFERENCE.fullmatch(text):
        return Named(
            "directory", text, directory=existing.model_files(text, "MODEL")["config"][0].parent
        )
    hint = _models_in(store)
    raise name_syntax.unknown("model", text, names, begin=hint, also=f"; {hint}" if names else "")


def _models_in(store: ArtifactStore) -> str:
    stages = sorted({made.stage for made in store.artifacts() if model_directory(made.path)})
    if store.damaged() or not stages:
        return store.advice()
    return f"stages with a model: {', '.join(stages)}"


def _of_run(record: runs.RecordedRun, stage: str) -> Named:
    name = record["run"]
    entries = record["stages"]
    if stage:
        name_syntax.need_stage(stage, (entry["name"] for entry in entries), f"the run {name}")
        entries = [entry for entry in entries if entry["name"] == stage]
    artifacts = tuple(
        (entry["name"], entry["key"])
        for entry in entries
        if entry.get("key") and entry["outcome"] in DONE
    )
    return Named("run", f"{name}:{stage}" if stage else name, artifacts, record)


def _of_key(store: ArtifactStore, text: str) -> Named | None:
    stage, slash, prefix = text.rpartition("/")
    if len(prefix) < SHORTEST_KEY or not HEX.issuperset(prefix) or (slash and stage not in STAGES):
        return None
    artifacts = filter(
        None, map(store.at, (store.root / "store").glob(f"{stage or '*'}/{prefix}*"))
    )
    matches = sorted((artifact.stage, artifact.key) for artifact in artifacts)
    if len(matches) > 1:
        raise name_syntax.ambiguous(
            text, "keys", [f"{name}/{key[:SHOWN_KEY]}" for name, key in matches]
        )
    return Named("key", "/".join(matches[0]), tuple(matches)) if matches else None


def run_of(
    texts: Sequence[str],
    home: Path | None = None,
    *,
    run_name: str | None = None,
) -> runs.RecordedRun | None:
    """Find the run in which a command's stages are looked up; None if there is none.

    It is `run_name`, else the newest finished run that has them all, else the newest one. Nights
    and trials of sweeps, whose models the user did not make, come last. Raises UsageError for an
    unknown or unneeded run name, and if the stages exist only in different runs.
    """
    root = layout.home() if home is None else home
    stages = sorted({text for text in texts if text in STAGES})
    if run_name is not None and not stages:
        raise UsageError(
            f"--run is {run_name}, but {texts[0]} names no stage to look for in a run; "
            "leave --run out"
        )
    if run_name is not None:
        return need_run(root, run_name)
    store = ArtifactStore(root)
    suitable = [run for run in runs.newest_first(root) if runs.is_own(run) or runs.is_finished(run)]
    for run in sorted(suitable, key=lambda run: (not runs.is_own(run), not runs.is_finished(run))):
        if stages and _has_all(store, run, stages):
            return run
    if len(stages) > 1 and all(store.artifacts(stage) for stage in stages):
        raise UsageError(
            f"no run has all of {', '.join(stages)}; name each as RUN:STAGE, "
            "`ttrain pipeline status` lists runs"
        )
    return None


def _has_all(store: ArtifactStore, run: runs.RecordedRun, stages: Sequence[str]) -> bool:
    keys = {stage: key for stage, key in runs.keys_of(run).items() if key}
    if not keys.keys() >= {*stages}:
        return False
    lacking = [stage for stage in stages if not store.find(stage, keys[stage])]
    for stage in lacking:
        if store.at(store.path(stage, keys[stage])):  # it is there, but not as it was published
            log.warning(
                "%s of the run %s is damaged and not taken; see `ttrain artifacts verify`",
                stage,
                run["run"],
            )
    return not lacking


def resolve_all(
    texts: Sequence[str | None],
    home: Path | None = None,
    *,
    base: str | None = None,
    from_hub: bool = False,
    run: str | None = None,
) -> list[Reference]:
    """Find the models that a command names; all stages among them are taken from one run.

    None means the first of `DEFAULTS`; `base` is the full model of adapters that do not record
    their own. Raises UsageError for a missing model, ArtifactError for a damaged one.
    """
    store = ArtifactStore(layout.home() if home is None else home)
    named = [_default_model(store, run) if text is None else text for text in texts]
    common = run_of([*named, base] if base else named, store.root, run_name=run)
    below = _resolve(store, base, common) if base else None
    if below and below.adapter:
        raise UsageError(f"--base is '{base}', which is an adapter itself; name a full model")
    return [_resolve(store, text, common, below, from_hub=from_hub) for text in named]


def resolve(text: str | None, home: Path | None = None, **options: Any) -> Reference:
    """Find one model, as `resolve_all` does."""
    [reference] = resolve_all([text], home, **options)
    return reference


def _default_model(store: ArtifactStore, run_name: str | None) -> str:
    for stage in DEFAULTS:
        run = run_of([stage], store.root, run_name=run_name)
        if run and _has_all(store, run, [stage]):
            return stage
    raise UsageError(f"no finished run has a model in {store.root}; {_models_in(store)}")


def _resolve(
    store: ArtifactStore,
    text: str,
    run: runs.RecordedRun | None,
    below: Reference | None = None,
    *,
    from_hub: bool = False,
) -> Reference:
    named = find(store, text, run, from_hub=from_hub)
    artifact, directory = _model_of(store, named)
    if not (directory / ADAPTER_CONFIG).is_file():
        weight_files(directory)  # refuses an index that names other files than the directory's own
        return Reference(text, directory, None, artifact, named.run)
    weight_files(directory, ADAPTER)
    model = below.model if below else _base_of(store, directory)
    weight_files(model)
    return Reference(text, model, directory, artifact, named.run)


def _model_of(store: ArtifactStore, named: Named) -> tuple[layout.Artifact | None, Path]:
    directory = named.directory
    if directory:
        directory = model_directory(directory) or directory
        if not any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
            raise UsageError(f"{directory} holds neither config.json nor {ADAPTER_CONFIG}")
        return next(filter(None, map(store.read, directory.parents)), None), directory
    if named.kind in ("set", "model"):  # those that the store lacks may be in a shared MLflow
        store = ArtifactStore(store.root, MlflowArtifacts(store.root))
    for stage, key in named.artifacts[-1:] if named.kind == "set" else named.artifacts[::-1]:
        artifact = store.find(stage, key)
        if artifact and store.elsewhere:
            base = store.input_of(artifact, "base")
            if base and f"{ADAPTER_DIRECTORY}/{ADAPTER}" in artifact.manifest["files"]:
                store.complete(base, (existing.MODEL_DIRECTORY,))
            artifact = store.complete(artifact)
        if artifact and (directory := model_directory(artifact.path)):
            return artifact, directory
    raise UsageError(f"{named.name} has no model that is in {store.root}; {_models_in(store)}")


def _base_of(store: ArtifactStore, adapter: Path) -> Path:
    digest = base_digest_of(adapter)
    beside = adapter / "base"
    named_base = str(read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path"))
    artifacts = store.artifacts() if digest else ()
    same = (made for made in artifacts if digest == _stored_digest(made) and not store.damage(made))
    for directory in (
        beside,
        *(made.path / existing.MODEL_DIRECTORY for made in same),
        Path(named_base).absolute(),
    ):
        if (directory / "config.json").is_file():
            return directory
    wanted = f"with the weights {digest[:SHOWN_KEY]}" if digest else f"({named_base})"
    raise UsageError(
        f"{adapter} is an adapter, and its base {wanted} is not in {store.root}; name it with "
        f"--base, or put it into {beside}"
    )


def model_directory(directory: Path) -> Path | None:
    """The directory of an artifact's adapter or model."""
    markers = ((ADAPTER_DIRECTORY, ADAPTER_CONFIG), (existing.MODEL_DIRECTORY, "config.json"))
    return next(
        (directory / name for name, marker in markers if (directory / name / marker).is_file()),
        None,
    )


def _stored_digest(artifact: layout.Artifact) -> str | None:
    files = artifact.manifest["files"]
    directory = artifact.path / existing.MODEL_DIRECTORY
    try:
        return weights_digest(
            directory,
            digest=lambda file: files[f"{existing.MODEL_DIRECTORY}/{file.name}"]["sha256"],
        )
    except (ArtifactError, KeyError):
        return None


def with_models(home: Path) -> list[str]:
    """Names of the home's models, for a list: stages, aliases, stages of the newest runs."""
    store = ArtifactStore(home)
    made: list[tuple[str, str]] = []
    for run in itertools.islice(runs.newest_first(home), name_syntax.LISTED):
        for stage, key in runs.keys_of(run).items():
            artifact = store.find(stage, key) if key else None
            if artifact and model_directory(artifact.path):
                made.append((stage, f"{run['run']}:{stage}"))
    aliases = [
        f"{models.name}@{alias}" for models in Registry(home).sets() for alias in models.aliases
    ]
    return [*dict.fromkeys(stage for stage, _ in made), *aliases, *(of_run for _, of_run in made)]


def newest_with(home: Path, stage: str) -> JsonDict:
    """Find the newest run with the stage, whatever its outcome. Raises UsageError if there is none.

    Nights and trials of sweeps are skipped: their settings are not the user's.
    """
    name_syntax.need_stage(stage, STAGES)
    for run in runs.newest_first(home):
        if runs.is_own(run) and stage in runs.keys_of(run):
            return run
    raise UsageError(
        f"no run has a stage {stage} yet whose settings could be taken; "
        f"try `ttrain pipeline run {runs.NIGHTLY if stage in OF_NIGHTS else 'full'}`"
    )


def with_secrets(run: runs.RecordedRun) -> runs.RecordedRun:
    """Restore the secrets in a run's source URLs from variables such as TTRAIN__DATA__SFT."""
    if not redact.has_hidden(run["settings"]):
        return run
    return {**run, "settings": redact.restored(run["settings"], load().settings.model_dump())}


def settings_of(run: runs.RecordedRun) -> list[Override]:
    """The run's settings that differ from today's defaults."""
    return [
        Override(f"run {run['run']}", key, value)
        for key, (value, _) in changed_settings(dict(flatten(run["settings"]))).items()
    ]


def base_of(run: runs.RecordedRun) -> list[Override]:
    """The run's settings, with all data, to load others over them."""
    data = run["settings"].get("data", {})
    named = [
        Override(f"run {run['run']}", f"data.{name}", data[name])
        for name in TRAININGS
        if name in data
    ]
    return [*named, *settings_of(run)]


def to_json(reference: Reference) -> JsonDict:
    """`name` of the pipeline, `run` (RUN:STAGE), `key` of the artifact, `digest` of the weights."""
    adapter = reference.adapter
    return {
        **_identity(reference),
        "digest": weights_digest(adapter, name=ADAPTER) if adapter else reference.base_digest,
    }


def line_of(reference: Reference) -> str:
    """Which model a name led to: `sft = quickstart, full-20261121-160222-1a2b4:sft, 0f3a`."""
    model, name, run, key = _identity(reference).values()
    if key is None:
        return f"{model} = {reference.directory}"
    return f"{model} = {', '.join(filter(None, (name, run or 'of no run', key[:SHOWN_KEY])))}"


def _identity(reference: Reference) -> JsonDict:
    artifact = reference.artifact
    made = reference.run or (artifact.provenance if artifact else {})
    run = made.get("run") if artifact else None
    return {
        "model": reference.text,
        "name": (made.get("settings") or {}).get("name") or None,
        "run": f"{run}:{artifact.stage}" if artifact and run else None,
        "key": artifact.key if artifact else None,
    }
