"""What a model is called on the command line, and where its files lie. Loads neither torch nor, unless asked, MLflow.

full-20261121-160222-1a2b        a run: its last model; RUN:sft is that run's SFT model
sft                              a stage, of one run for all names of a command: `run_of` says which
name@champion, name/3            a registered model, by alias or version; also as models:/name@champion. The name of a
                                 pipeline stands for the set of a run's models: its last one, the adapter, is taken
some/directory, ./sft            a Hugging Face directory, an adapter's directory, a checkpoint, an artifact
owner/name, owner/name@revision  a model on the Hugging Face Hub, for the commands that take one: fetched where its cache
                                 lacks it
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttrain import tracking
from ttrain.config.loading import ENVIRONMENT_PREFIX, load
from ttrain.core.files import read_json, read_object
from ttrain.data import existing_model, existing_tokenizer
from ttrain.errors import ArtifactError, DamagedFile, UsageError
from ttrain.pipeline.earlier_settings import NIGHTLY, run_named
from ttrain.pipeline.stores import InTracker
from ttrain.stages import STAGES
from ttrain.store import layout, runs
from ttrain.store.artifacts import Store
from ttrain.store.layout import MANIFEST, Artifact
from ttrain.store.model_reference import Reference, Run
from ttrain.store.weights import ADAPTER, INDEX_SUFFIX, MODEL, weights_digest

MODEL_DIRECTORY, ADAPTER_DIRECTORY = "model", "adapter"  # of an artifact
ADAPTER_CONFIG, BASE = "adapter_config.json", "base.json"  # of an adapter
LISTED_RUNS = 5
NAME_VARIABLE = f"{ENVIRONMENT_PREFIX}NAME"
FINISHED = ("completed", "cached")  # outcomes of runs that came to their end


def resolve(
    text: str | None,
    home: Path | None = None,
    *,
    base: str | None = None,
    from_hub: bool = False,
    within: Run | None = None,
) -> Reference:
    """The model that `text` names; None means the last model of a run. `base` names the full model of an adapter that does
    not say where its own lies. `from_hub`: a name on the Hub is one, too. `within`: the run that stages are looked for in.

    Raises UsageError for what there is not, naming what there is, and ArtifactError for what is damaged.
    """
    root = layout.home() if home is None else home
    run = within or run_of(_with_base([text], base), root)
    return _Resolver(Store(root), base, run, from_hub=from_hub).find(text)


def resolve_all(
    texts: Sequence[str],
    home: Path | None = None,
    *,
    base: str | None = None,
    from_hub: bool = False,
    run: str | None = None,
) -> list[Reference]:
    """The models that a command names; all stages among them are those of one run."""
    within = run_of(_with_base(texts, base), home, named=run)
    return [resolve(text, home, base=base, from_hub=from_hub, within=within) for text in texts]


def run_of(texts: Sequence[str | None], home: Path | None = None, named: str | None = None) -> Run | None:
    """The run in which a command's stages, and its None, are looked for: the one that is `named`, else the newest that has
    them all and came to its end, else the newest that has them all. None where no run has, or nothing asks for one.

    Nights and trials of sweeps are about models that the user did not make: where no other run has any of the stages, the
    newest night that came to its end is taken, else the newest such trial. Where the environment sets `name`, runs of other
    names are passed over. Raises UsageError where a run is named that does not exist or that nothing
    needs, and where several stages stand in different runs only.
    """
    root = layout.home() if home is None else home
    stages = {text for text in texts if text in STAGES}
    if not stages and None not in texts:
        if named is not None:
            shown = ", ".join(str(text) for text in texts)
            raise UsageError(f"--run is {named}, but {shown} names no stage to look for in a run; leave --run out")
        return None
    if named is not None:
        return run_named(root, named)
    unfinished: Run | None = None
    nights, trials = list[Run](), list[Run]()  # that came to their end with all of them, newest first
    holders: dict[str, str] = {}  # of each stage the newest run that came to its end with it
    name = _name_in_environment()
    for run in runs.newest_first(root):
        if name and run["settings"].get("name") != name:
            continue
        automatic = nights if run["pipeline"] == NIGHTLY else trials if "sweep" in run else None
        if automatic or (automatic is not None and run["outcome"] not in FINISHED):
            continue
        if not _has_all(Store(root), run, stages, with_model=None in texts):
            if automatic is None and run["outcome"] in FINISHED:
                for stage in run["stages"]:
                    if stage["name"] in stages and _artifact_of(Store(root), stage):
                        holders.setdefault(stage["name"], run["run"])
            continue
        if automatic is not None:
            automatic.append(run)
            continue
        if run["outcome"] in FINISHED:
            return run
        unfinished = unfinished or run
    if unfinished is None and len(stages) > 1 and holders:
        listed = ", ".join(f"{run}:{stage}" for stage, run in holders.items())
        raise UsageError(
            f"no run has all of {', '.join(sorted(filter(None, stages)))}; there are {listed}; name each as RUN:STAGE"
        )
    return unfinished or next(iter([*nights, *trials]), None)


def _with_base(texts: Sequence[str | None], base: str | None) -> list[str | None]:
    """All names of a command."""
    return [*texts, base] if base else [*texts]


def _name_in_environment() -> str | None:
    """The setting `name`, where the environment gives it. No other variable is read: models are found without settings."""
    loaded = load(environment={name: os.environ[name] for name in os.environ if name.upper() == NAME_VARIABLE})
    return loaded.settings.name if "name" in loaded.sources else None


def _has_all(home: Store, run: Run, stages: set[str | None], *, with_model: bool) -> bool:
    """Whether the artifacts of these stages of a run are there, undamaged; and any model, where one is needed."""
    artifacts = {
        stage["name"]: _artifact_of(home, stage) for stage in run["stages"] if stage["name"] in stages or with_model
    }
    models = [artifact for artifact in artifacts.values() if artifact and _part_of(artifact.path)]
    return all(artifacts.get(str(stage)) for stage in stages) and (bool(models) or not with_model)


class _Resolver:
    """Looks in one home; `base` is the user's word for an adapter's full model, `run` that of the stages."""

    def __init__(self, home: Store, base: str | None, run: Run | None, *, from_hub: bool = False) -> None:
        self.store, self.base, self.run, self._from_hub = home, base, run, from_hub

    def find(self, text: str | None) -> Reference:
        if text is None:
            return self._last_model()
        is_path = text.startswith((".", "~")) or Path(text).is_absolute()
        if text.startswith("models:/"):
            return self._registered(text, text.removeprefix("models:/"))
        if not is_path:
            if text in STAGES:
                return self._of_run(text, self.run, text) if self.run else self._of_artifact(text, self.store.latest(text))
            run, _, stage = text.partition(":")
            record = self._record(run)
            if record is not None:
                return self._of_run(text, record, stage)
        directory = _directory(text)
        if directory is not None:
            return self._of_directory(text, directory)
        if not is_path and re.fullmatch(r"[^@/:]+(@[^@/:]+|/\d+)", text):
            return self._registered(text, text)
        if not is_path and self._from_hub and existing_tokenizer.ON_HUB.fullmatch(text):
            found = existing_model.files(text, "MODEL")
            return self._of_directory(text, found["config"][0].parent)
        raise UsageError(f"there is no model '{text}': it is no run, stage, registered name or directory; {self._listed()}")

    def _last_model(self) -> Reference:
        """That of the run."""
        for stage in reversed(self.run["stages"]) if self.run else ():
            artifact = _artifact_of(self.store, stage)
            if self.run and artifact and _part_of(artifact.path):
                return self._of_run(f"{self.run['run']}:{stage['name']}", self.run, stage["name"])
        if self.store.damaged() or self._stages_with_models():
            raise UsageError(f"no finished run has a model that is whole in {self.store.root}; {self._listed()}")
        raise UsageError(
            f"there is no model in {self.store.root} yet; begin with `ttrain pipeline run full`, or name a directory"
        )

    def _record(self, run: str) -> dict[str, Any] | None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", run):
            return None
        record = read_json(self.store.root / "runs" / f"{run}.json")
        return record if isinstance(record, dict) else None

    def _of_run(self, text: str, record: Run, wanted: str) -> Reference:
        """The run's stage of that name, or its last one that left a model."""
        names = [stage["name"] for stage in record["stages"]]
        if wanted and wanted not in names:
            raise UsageError(f"the run {record['run']} has no stage '{wanted}'; its stages are {', '.join(names)}")
        for stage in reversed(record["stages"]):
            artifact = _artifact_of(self.store, stage)
            if artifact and (stage["name"] == wanted or (not wanted and _part_of(artifact.path))):
                return replace(self._of_artifact(text, artifact), run=record)
            if stage["name"] == wanted and stage.get("key") and (problem := self.store.damage_at(wanted, stage["key"])):
                raise ArtifactError(
                    f"the stage {wanted} of the run {record['run']} is damaged: {problem}; {DamagedFile.fix}"
                )
        what = f"stage {wanted} of the run {record['run']}" if wanted else f"run {record['run']}"
        raise UsageError(f"the {what} left no model that is still in {self.store.root}; {self._listed()}")

    def _registered(self, text: str, name: str) -> Reference:
        """The store's own artifact where it has it, else the files that MLflow kept."""
        model, at, alias = name.partition("@")
        model, _, version = (model, "", None) if at else name.rpartition("/")
        if not model or not (alias if at else version):
            raise UsageError(f"'{text}' names no registered model; write NAME@ALIAS or NAME/VERSION, for example mine-sft/1")
        found = tracking.find_version(self.store.root, model, version=version, alias=alias or None)
        if (last := tracking.last_of(found)) is not None:  # a set of models: the one that the run ended with
            return self._registered(text, f"{last.name}/{last.version}")
        stage, key = found.tags.get("ttrain.stage", ""), found.tags.get("ttrain.key", "")
        artifact = self.store.find(stage, key) if stage and key else None
        if artifact and artifact.absent.isdisjoint(artifact.files_of(())):
            return self._of_artifact(text, artifact)
        if found.source is None or not found.source.is_dir():
            if artifact := self._fetched(stage, key):
                return self._of_artifact(text, artifact)
            raise UsageError(
                f"the files of {model}/{found.version} are neither in the store {self.store.root} nor on a disk of this "
                f"machine ({found.source or 'MLflow keeps them elsewhere'}); run its pipeline again, or name a directory"
            )
        return self._of_directory(text, found.source)

    def _fetched(self, stage: str, key: str) -> Artifact | None:
        """The model's files from MLflow, with the full model that an adapter goes onto; None where they are not there."""
        store = Store(self.store.root, InTracker(self.store.root))
        artifact = store.find(stage, key) if stage and key else None
        if artifact is None:
            return None
        base = artifact.manifest["inputs"].get("base")
        if base and any(name.startswith(f"{ADAPTER_DIRECTORY}/") for name in artifact.manifest["files"]):
            full = store.find(base["stage"], base["key"])
            if full:
                store.complete(full, (MODEL_DIRECTORY,))
        return store.complete(artifact)

    def _of_artifact(self, text: str, artifact: Artifact) -> Reference:
        part = _part_of(artifact.path)
        if part is None:
            raise UsageError(f"'{text}' leads to {artifact.path}, which holds no model; {self._listed()}")
        return self._of_directory(text, part)

    def _of_directory(self, text: str, directory: Path) -> Reference:
        if (directory / MANIFEST).is_file() and (part := _part_of(directory)):
            directory = part
        artifact = next((found for parent in directory.parents if (found := self.store.read(parent))), None)
        if (directory / ADAPTER_CONFIG).is_file():
            if not (directory / ADAPTER).is_file():
                raise ArtifactError(f"'{text}' is an adapter's directory, but it holds no {ADAPTER}")
            return Reference(text, self._base_of(text, directory), directory, artifact)
        if not (directory / "config.json").is_file():
            raise UsageError(f"'{text}' is a directory, but it holds neither config.json nor {ADAPTER_CONFIG}")
        if not any((directory / name).is_file() for name in (MODEL, MODEL + INDEX_SUFFIX)):
            raise UsageError(f"'{text}' holds a config.json, but no weights as safetensors ({MODEL} or its index)")
        return Reference(text, directory, None, artifact)

    def _base_of(self, text: str, adapter: Path) -> Path:
        """The full model: what the user named, what lies beside, what has the digest, what the adapter's config names."""
        if self.base is not None:
            named = _Resolver(self.store, None, self.run).find(self.base)
            if named.adapter:
                raise UsageError(f"the base of '{text}' must be a full model, but '{self.base}' is an adapter itself")
            return named.model
        wanted = base_digest_of(adapter)
        beside = adapter / "base"
        if (beside / "config.json").is_file():
            return beside
        for artifact in self.store.everything() if wanted else ():
            if wanted == _stored_digest(artifact) and not self.store.damage(artifact):
                return artifact.path / MODEL_DIRECTORY
        named_base = read_object(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
        if named_base and (Path(named_base) / "config.json").is_file():
            return Path(named_base).absolute()
        digest = f"with the weights {wanted[:12]}" if wanted else f"({named_base})"
        raise UsageError(
            f"'{text}' is an adapter, and its base {digest} is not in {self.store.root}; name it with --base, or put it "
            f"into {beside}"
        )

    def _listed(self) -> str:
        """What could have been named instead."""
        stages = self._stages_with_models()
        names = [run["run"] for run in runs.history(self.store.root)][:LISTED_RUNS]
        if not stages and not names:
            return f"in {self.store.root} there is none yet, begin with `ttrain pipeline run full`"
        damage = f"; {self.store.advice()}" if self.store.damaged() else ""
        return f"stages with a model: {', '.join(stages) or 'none'}; newest runs: {', '.join(names) or 'none'}{damage}"

    def _stages_with_models(self) -> list[str]:
        return sorted({artifact.stage for artifact in self.store.everything() if _part_of(artifact.path)})


def base_digest_of(adapter: Path) -> str | None:
    """Digest of the weights that an adapter was trained on, as it says itself; None where it does not (PEFT's own)."""
    digest = read_object(adapter / BASE).get("base_weights_sha256")
    return digest and str(digest)


def _directory(text: str) -> Path | None:
    """The directory of that name, if there is one; none has a name that no file can have."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        path = Path(text).expanduser().absolute()
        return path if path.is_dir() else None
    return None


def _artifact_of(home: Store, stage: dict[str, Any]) -> Artifact | None:
    """What a recorded stage left, where it is still there."""
    return home.find(stage["name"], stage["key"]) if stage.get("key") else None


def _part_of(artifact: Path) -> Path | None:
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
