"""Resolve the names of models on the command line to their files. Loads neither torch nor, unless needed, MLflow.

full-20261121-160222-1a2b        a run: its last model; RUN:sft is that run's SFT model
sft                              a stage, of one run for all names of a command: `run_of` says which
name@champion, name/3            a registered model, by alias or version; also as models:/name@champion. The name of a
                                 pipeline stands for the set of a run's models: its last one, the adapter, is taken
some/directory, ./sft            a Hugging Face directory, an adapter's directory, a checkpoint, an artifact
owner/name, owner/name@revision  a model on the Hugging Face Hub, for the commands that take one: fetched where its cache
                                 lacks it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttrain.config import flatten
from ttrain.config.data import LEARNT
from ttrain.config.loading import Override, load
from ttrain.config.training import TRAINING_STAGES
from ttrain.core import redact
from ttrain.core.files import JsonDict, read_object
from ttrain.data import existing
from ttrain.errors import ArtifactError, DamagedFile, NothingBuilt, UsageError
from ttrain.reports.facts import changed_settings
from ttrain.store import layout, references, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.layout import MANIFEST, Artifact
from ttrain.store.model_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX_SUFFIX,
    MODEL,
    Reference,
    base_digest_of,
    need_own_file,
    weight_files,
    weights_digest,
)
from ttrain.store.registry import CHAMPION, ModelSet, Registry
from ttrain.tasks import OF_NIGHTS, SFT, STAGES
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.registered import take_over_champions

MODEL_DIRECTORY, ADAPTER_DIRECTORY = "model", "adapter"  # of an artifact

FINISHED = ("completed", "cached")  # outcomes of finished runs


def resolve(
    text: str | None,
    home: Path | None = None,
    *,
    base: str | None = None,
    from_hub: bool = False,
    searched_run: runs.RecordedRun | None = None,
) -> Reference:
    """Find the model that `text` names; None means the last model of a run. `base` names the full model of an adapter that
    does not record its own. `from_hub`: accept names on the Hub. `searched_run`: the run in which stages are looked up.

    Raises UsageError for a missing model, listing what exists, and ArtifactError for a damaged one.
    """
    root = layout.home() if home is None else home
    run = searched_run or run_of([text], root, base=base)
    return _Resolver(ArtifactStore(root), base, run, from_hub=from_hub).find(text)


def resolve_all(
    texts: Sequence[str],
    home: Path | None = None,
    *,
    base: str | None = None,
    from_hub: bool = False,
    run: str | None = None,
) -> list[Reference]:
    """Find the models that a command names; all stages among them are taken from one run."""
    searched_run = run_of(texts, home, run_name=run, base=base)
    return [resolve(text, home, base=base, from_hub=from_hub, searched_run=searched_run) for text in texts]


def default_model(home: Path | None = None, run_name: str | None = None) -> str | None:
    """The model of `chat`, `generate` and `serve` where none is named: SFT's, of the newest finished run that has one.

    Where no run has one, or not the run `run_name`: None, which is the last model of the run. The adapter, the last
    model of most runs, only knows its domain.
    """
    root = layout.home() if home is None else home
    run = run_of([SFT.name], root, run_name=run_name)
    has_one = run is not None and _has_all(ArtifactStore(root), run, {SFT.name}, with_model=False)
    return SFT.name if has_one else None


def run_of(
    texts: Sequence[str | None], home: Path | None = None, *, run_name: str | None = None, base: str | None = None
) -> runs.RecordedRun | None:
    """Find the run in which a command's stages, and its None, are looked up: `run_name`, else the newest finished one that
    has them all, else the newest that has them all. None if there is no such run, or none is needed.

    Nights and trials of sweeps are about models that the user did not make: the newest finished one is taken only if no
    other run has the stages. Raises UsageError for a run name that does not exist or is not needed, and if several
    stages exist only in different runs.
    """
    root = layout.home() if home is None else home
    texts = [*texts, base] if base else texts
    stages = {text for text in texts if text is not None and text in STAGES}
    if not stages and None not in texts:
        if run_name is not None:
            shown = ", ".join(str(text) for text in texts)
            raise UsageError(f"--run is {run_name}, but {shown} names no stage to look for in a run; leave --run out")
        return None
    if run_name is not None:
        return references.need_run(root, run_name)
    store = ArtifactStore(root)
    for suits in (lambda run: _is_own(run) and _is_finished(run), _is_own, _is_finished):
        for run in runs.newest_first(root):
            if suits(run) and _has_all(store, run, stages, with_model=None in texts):
                return run
        if suits is _is_own and len(stages) > 1 and all(store.artifacts(stage) for stage in stages):
            listed = ", ".join(sorted(stages))
            raise UsageError(f"no run has all of {listed}; name each as RUN:STAGE, `ttrain pipeline status` lists runs")
    return None


def _is_own(run: runs.RecordedRun) -> bool:
    return run["pipeline"] != runs.NIGHTLY and "sweep" not in run


def _is_finished(run: runs.RecordedRun) -> bool:
    return run["outcome"] in FINISHED


def _has_all(home: ArtifactStore, run: runs.RecordedRun, stages: set[str], *, with_model: bool) -> bool:
    """Whether the run's artifacts of these stages exist undamaged; and any model, if one is needed."""
    listed = (stage for stage in run["stages"] if stage["name"] in stages or with_model)
    artifacts = {stage["name"]: artifact for stage in listed if (artifact := _artifact_of(home, stage))}
    has_model = any(_model_directory_of(artifact.path) for artifact in artifacts.values())
    return stages <= artifacts.keys() and (has_model or not with_model)


@dataclass(frozen=True)
class _Resolver:
    """Looks names up in one home; `base` is the user's --base, `run` the run of the stages."""

    store: ArtifactStore
    base: str | None
    run: runs.RecordedRun | None
    from_hub: bool = False

    def find(self, text: str | None) -> Reference:
        if text is None:
            return self._last_model()
        model = references.registered(text)
        if text.startswith("models:/") and model:
            return self._registered(text, model)
        names, is_path = runs.names(self.store.root), references.is_path(text)
        run, stage = references.run_and_stage(text)
        if text in STAGES:
            if self.run:
                return self._of_run(text, self.run, text)
            self._refuse_untrained(text)
            return self._of_artifact(text, self.store.latest(text))
        directory = references.directory(text) if run not in names else None
        if directory:
            return self._of_directory(text, directory)
        if model and not is_path:
            return self._registered(text, model)
        if record := references.find_run(self.store.root, run):
            return self._of_run(text, record, stage)
        if not is_path and self.from_hub and existing.HUB_REFERENCE.fullmatch(text):
            files = existing.model_files(text, "MODEL")
            return self._of_directory(text, files["config"][0].parent)
        advice = f"; {self.store.advice()}" if self.store.damaged() else ""
        stages = self._stages_with_models()
        if not stages:
            runs.check_readable(self.store.root)
        raise references.unknown("model", text, [*stages, *names], shown=len(stages) + references.LISTED, also=advice)

    def _refuse_untrained(self, stage: str) -> None:
        """Raise NothingBuilt for a stage that no run trained, where the newest run has no data for it."""
        row = TRAINING_STAGES.get(stage)
        run = next(runs.newest_first(self.store.root), None)
        if row is None or run is None or self.store.artifacts(stage) or self.store.unreadable(stage):
            return
        if run["settings"].get("data", {row.dataset: True}).get(row.dataset):
            return
        model = "adapter" if row.role == "adapter" else f"{row.label} model"
        raise NothingBuilt(
            f"the run {run['run']} has no {model}, since data.{row.dataset} is none; set it to your file: "
            f"`ttrain pipeline run full data.{row.dataset}=FILE`"
        )

    def _last_model(self) -> Reference:
        """The last model of the run."""
        for stage in reversed(self.run["stages"]) if self.run else ():
            artifact = _artifact_of(self.store, stage)
            if self.run and artifact and _model_directory_of(artifact.path):
                return self._of_run(f"{self.run['run']}:{stage['name']}", self.run, stage["name"])
        if self.store.damaged() or self._stages_with_models():
            raise UsageError(f"no finished run has a complete model in {self.store.root}; {self._listed()}")
        raise UsageError(
            f"there is no model in {self.store.root} yet; begin with `ttrain pipeline run full`, or name a directory"
        )

    def _of_run(self, text: str, record: runs.RecordedRun, stage_name: str) -> Reference:
        """The model of the run's stage of that name, or of its last stage with a model."""
        if stage_name:
            references.need_stage(stage_name, (stage["name"] for stage in record["stages"]), f"the run {record['run']}")
        for stage in reversed(record["stages"]):
            artifact = _artifact_of(self.store, stage)
            if artifact and (stage["name"] == stage_name or (not stage_name and _model_directory_of(artifact.path))):
                return replace(self._of_artifact(text, artifact), run=record)
            key = stage.get("key") if stage["name"] == stage_name else None
            if key and (problem := self.store.damage_at(stage_name, key)):
                raise ArtifactError(
                    f"the stage {stage_name} of the run {record['run']} is damaged: {problem}; {DamagedFile.fix}"
                )
        missing = f"stage {stage_name} of the run {record['run']}" if stage_name else f"run {record['run']}"
        raise UsageError(f"the {missing} left no model that is still in {self.store.root}; {self._listed()}")

    def _registered(self, text: str, model: references.Registered) -> Reference:
        """The artifact in the store if it is there, else the files in MLflow. A set stands for its last model."""
        if model.alias == CHAMPION:
            take_over_champions(self.store.root)
        resolved = Registry(self.store.root).resolve(model)
        version = resolved.last if isinstance(resolved, ModelSet) else resolved
        assert version is not None, "a set has a model"
        artifact = self.store.find(version.stage, version.key)
        if artifact is None or not artifact.absent.isdisjoint(artifact.files_of(())):
            artifact = self._fetched(version.stage, version.key)
        if artifact is None:
            raise UsageError(
                f"the files of {version} are neither in the store {self.store.root} nor in MLflow; run its pipeline again, "
                f"or name a directory"
            )
        return self._of_artifact(text, artifact)

    def _fetched(self, stage: str, key: str) -> Artifact | None:
        """Fetch the model's files from MLflow, with the base model of an adapter; None if they are not there."""
        store = ArtifactStore(self.store.root, MlflowArtifacts(self.store.root))
        artifact = store.find(stage, key)
        if artifact is None:
            return None
        base = store.input_of(artifact, "base")
        if base and any(name.startswith(f"{ADAPTER_DIRECTORY}/") for name in artifact.manifest["files"]):
            store.complete(base, (MODEL_DIRECTORY,))
        return store.complete(artifact)

    def _of_artifact(self, text: str, artifact: Artifact) -> Reference:
        directory = _model_directory_of(artifact.path)
        if directory is None:
            raise UsageError(f"'{text}' leads to {artifact.path}, which holds no model; {self._listed()}")
        return self._of_directory(text, directory)

    def _of_directory(self, text: str, directory: Path) -> Reference:
        if (directory / MANIFEST).is_file() and (model_directory := _model_directory_of(directory)):
            directory = model_directory
        artifact = next((stored for parent in directory.parents if (stored := self.store.read(parent))), None)
        if (directory / ADAPTER_CONFIG).is_file():
            if not (directory / ADAPTER).is_file():
                raise ArtifactError(f"'{text}' is an adapter's directory, but it holds no {ADAPTER}")
            need_own_file(directory / ADAPTER)
            base = self._base_of(text, directory)
            weight_files(base)
            return Reference(text, base, directory, artifact)
        if not (directory / "config.json").is_file():
            raise UsageError(f"'{text}' is a directory, but it holds neither config.json nor {ADAPTER_CONFIG}")
        if not any((directory / name).is_file() for name in (MODEL, MODEL + INDEX_SUFFIX)):
            raise UsageError(f"'{text}' holds a config.json, but no weights as safetensors ({MODEL} or its index)")
        weight_files(directory)  # refuses an index that names other files than the directory's own
        return Reference(text, directory, None, artifact)

    def _base_of(self, text: str, adapter: Path) -> Path:
        """Find an adapter's base: --base, else `base/` in its directory, else by digest, else by the adapter's config."""
        if self.base is not None:
            base = _Resolver(self.store, None, self.run).find(self.base)
            if base.adapter:
                raise UsageError(f"the base of '{text}' must be a full model, but '{self.base}' is an adapter itself")
            return base.model
        base_digest = base_digest_of(adapter)
        local_base = adapter / "base"
        if (local_base / "config.json").is_file():
            return local_base
        for artifact in self.store.artifacts() if base_digest else ():
            if base_digest == _stored_digest(artifact) and not self.store.damage(artifact):
                return artifact.path / MODEL_DIRECTORY
        named_base = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
        if named_base and (Path(named_base) / "config.json").is_file():
            return Path(named_base).absolute()
        digest = f"with the weights {base_digest[:12]}" if base_digest else f"({named_base})"
        raise UsageError(
            f"'{text}' is an adapter, and its base {digest} is not in {self.store.root}; name it with --base, or put it "
            f"into {local_base}"
        )

    def _listed(self) -> str:
        """The stages and runs that could be named instead."""
        stages, names = self._stages_with_models(), runs.names(self.store.root)
        damage = f"; {self.store.advice()}" if self.store.damaged() else ""
        return (
            f"stages with a model: {', '.join(stages) or 'none'}; newest runs: {references.listed(names) or 'none'}{damage}"
        )

    def _stages_with_models(self) -> list[str]:
        return sorted({artifact.stage for artifact in self.store.artifacts() if _model_directory_of(artifact.path)})


def _artifact_of(home: ArtifactStore, stage: JsonDict) -> Artifact | None:
    """The artifact of a recorded stage, if it still exists."""
    return home.find(stage["name"], stage["key"]) if stage.get("key") else None


def _model_directory_of(artifact: Path) -> Path | None:
    """The directory of an artifact that holds its adapter or model."""
    for name, marker in ((ADAPTER_DIRECTORY, ADAPTER_CONFIG), (MODEL_DIRECTORY, "config.json")):
        if (artifact / name / marker).is_file():
            return artifact / name
    return None


def _stored_digest(artifact: Artifact) -> str | None:
    """Digest of an artifact's model, by its manifest: no byte of the weights is read."""
    files = artifact.manifest["files"]
    try:
        return weights_digest(
            artifact.path / MODEL_DIRECTORY, digest=lambda file: str(files[f"{MODEL_DIRECTORY}/{file.name}"]["sha256"])
        )
    except (ArtifactError, KeyError):
        return None


def with_models(home: Path) -> list[str]:
    """Names of the home's models, for a list: stages, champions, and the stages of the newest runs."""
    store = ArtifactStore(home)
    newest = itertools.islice(runs.newest_first(home), references.LISTED)
    found = [(run["run"], _artifact_of(store, stage)) for run in newest for stage in run["stages"]]
    models = [(run, made.stage) for run, made in found if made and _model_directory_of(made.path)]
    aliases = [f"{models.name}@{alias}" for models in Registry(home).sets() for alias in models.aliases]
    return [*dict.fromkeys(stage for _, stage in models), *aliases, *(f"{run}:{stage}" for run, stage in models)]


def newest_with(home: Path, stage: str) -> JsonDict:
    """Find the newest run with the stage, whatever its outcome. Raises UsageError if there is none.

    Nights are skipped: their settings start from the champion of that night, and name the few files that were new. Trials of
    sweeps are skipped too: the newest trial is not the best one.
    """
    if stage in OF_NIGHTS:
        raise UsageError(f"stage {stage} belongs to nights; try `ttrain pipeline run nightly`")
    references.need_stage(stage, STAGES)
    for run in runs.newest_first(home):
        if _is_own(run) and any(entry["name"] == stage for entry in run["stages"]):
            return run
    raise UsageError(f"no run has a stage {stage} yet whose settings could be taken; try `ttrain pipeline run full`")


def with_secrets(run: runs.RecordedRun) -> runs.RecordedRun:
    """Restore the secrets in a run's source URLs from environment variables such as TTRAIN__DATA__SFT."""
    if not redact.has_hidden(run["settings"]):
        return run
    return {**run, "settings": redact.restored(run["settings"], load().settings.model_dump())}


def settings_of(run: runs.RecordedRun) -> list[Override]:
    """The run's settings that differ from today's defaults."""
    changed = changed_settings(dict(flatten(run["settings"])))
    return [Override(f"run {run['run']}", key, value) for key, (value, _) in changed.items()]


def base_of(run: runs.RecordedRun) -> list[Override]:
    """The same, to load other settings over them: with all data of the run, so that none counts as not named."""
    data = run["settings"].get("data", {})
    named = [Override(f"run {run['run']}", f"data.{name}", data[name]) for name in LEARNT if name in data]
    return [*named, *settings_of(run)]


def to_json(reference: Reference) -> dict[str, Any]:
    """As JSON: `name` of the pipeline, `run` (RUN:STAGE), `key` of the artifact, `digest` of the weights."""
    weights = (reference.adapter, ADAPTER) if reference.adapter else None
    return {
        "model": reference.text,
        "name": _pipeline_of(reference),
        "run": _run_of(reference),
        "key": reference.artifact.key if reference.artifact else None,
        "digest": weights_digest(weights[0], name=weights[1]) if weights else reference.base_digest,
    }


def line_of(reference: Reference) -> str:
    """Which model a name led to, such as `sft = quickstart, full-20261121-160222-1a2b4:sft, 0f3a91c2d4e5`."""
    artifact = reference.artifact
    if artifact is None:
        return f"{reference.text} = {reference.directory}"
    run = _run_of(reference) or "of no run"
    labels = [word for word in (_pipeline_of(reference), run, artifact.key[:SHOWN_KEY]) if word]
    return f"{reference.text} = {', '.join(labels)}"


def _run_of(reference: Reference) -> str | None:
    """RUN:STAGE of the run that was named or found, else of the one that made the artifact."""
    if reference.artifact is None:
        return None
    made_by = reference.artifact.provenance.get("run")
    run = reference.run["run"] if reference.run else made_by
    return f"{run}:{reference.artifact.stage}" if run else None


def _pipeline_of(reference: Reference) -> str | None:
    """The setting `name` of the run, or of the run that made the artifact."""
    if reference.run:
        return str(reference.run["settings"].get("name") or "") or None
    made_with = reference.artifact.provenance.get("settings") if reference.artifact else None
    return str(made_with["name"]) if made_with and made_with.get("name") else None
