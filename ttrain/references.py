"""What a model is called on the command line, and where its files lie. Loads neither torch nor, unless asked, MLflow.

full-20261121-160222-1a2b        a run: its last model; RUN:sft is that run's SFT model
sft                              a stage: its newest artifact
name@champion, name/3            a registered model, by alias or version; also as models:/name@champion. The name of a
                                 pipeline stands for the set of a run's models: its last one, the adapter, is taken
some/directory, ./sft            a Hugging Face directory, an adapter's directory, a checkpoint, an artifact
owner/name, owner/name@revision  a model on the Hugging Face Hub, for the commands that take one: fetched where its cache
                                 lacks it
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain import runs, store, tracking
from ttrain.data import existing, existing_model
from ttrain.errors import ArtifactError, UsageError
from ttrain.fetching import InTracker
from ttrain.stages import STAGES
from ttrain.store import MANIFEST, Artifact, Store, read_json
from ttrain.weights import ADAPTER, INDEX_SUFFIX, MODEL, SECOND_HEAD, weights_digest

MODEL_DIRECTORY, ADAPTER_DIRECTORY = "model", "adapter"  # of an artifact
ADAPTER_CONFIG, BASE = "adapter_config.json", "base.json"  # of an adapter
LISTED_RUNS = 5


@dataclass(frozen=True)
class Reference:
    """A model that was found: `model` is its Hugging Face directory, or that of the base which `adapter` goes onto."""

    text: str  # as the user wrote it
    model: Path
    adapter: Path | None = None
    # What the adapter, or else the model, is part of; None for a directory from elsewhere
    artifact: Artifact | None = field(default=None, repr=False)

    @property
    def directory(self) -> Path:
        """The files that make it what it is: the adapter's, where there is one, else the model's."""
        return self.adapter or self.model

    @property
    def tokenizer(self) -> Path:
        """The directory to take the tokenizer from: adapters of ours carry the one that they were trained with."""
        return self.directory if (self.directory / "tokenizer.json").is_file() else self.model

    @property
    def second_head(self) -> Path | None:
        """The head that predicts the token after the next, where the model's training kept it."""
        file = self.model / SECOND_HEAD
        return file if file.is_file() else None

    @property
    def base_digest(self) -> str:
        """Digest of the full model's weights, which an adapter is bound to. Reads the files unless a manifest knows it."""
        return weights_digest(self.model)


def resolve(text: str, home: Path | None = None, *, base: str | None = None, from_hub: bool = False) -> Reference:
    """The model that `text` names. `base` names the full model of an adapter that does not say where its own lies.
    `from_hub`: a name on the Hub is one, too.

    Raises UsageError for what there is not, naming what there is, and ArtifactError for what is damaged.
    """
    root = store.home() if home is None else home
    return _Resolver(Store(root), base, from_hub=from_hub).find(text)


def newest(home: Path | None = None) -> Reference:
    """The last model of the newest run that has one. Raises UsageError where there is none."""
    root = store.home() if home is None else home
    for run in runs.history(root):
        for stage in reversed(run["stages"]):
            artifact = _artifact_of(Store(root), stage)
            if artifact and _part_of(artifact.path):
                return resolve(f"{run['run']}:{stage['name']}", root)
    raise UsageError(f"there is no model in {root} yet; begin with `ttrain pipeline run full`, or name a directory")


class _Resolver:
    """Looks in one home; `base` is the user's word for an adapter's full model."""

    def __init__(self, home: Store, base: str | None, *, from_hub: bool = False) -> None:
        self.store, self.base, self._from_hub = home, base, from_hub

    def find(self, text: str) -> Reference:
        is_path = text.startswith((".", "~")) or Path(text).is_absolute()
        if text.startswith("models:/"):
            return self._registered(text, text.removeprefix("models:/"))
        if not is_path:
            if text in STAGES:
                return self._of_artifact(text, self.store.latest(text))
            run, _, stage = text.partition(":")
            record = self._record(run)
            if record is not None:
                return self._of_run(text, record, stage)
        directory = _directory(text)
        if directory is not None:
            return self._of_directory(text, directory)
        if not is_path and re.fullmatch(r"[^@/:]+(@[^@/:]+|/\d+)", text):
            return self._registered(text, text)
        if not is_path and self._from_hub and existing.ON_HUB.fullmatch(text):
            found = existing_model.files(text, "MODEL")
            return self._of_directory(text, found["config"][0].parent)
        raise UsageError(f"there is no model '{text}': it is no run, stage, registered name or directory; {self._listed()}")

    def _record(self, run: str) -> dict[str, Any] | None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", run):
            return None
        record = read_json(self.store.root / "runs" / f"{run}.json")
        return record if isinstance(record, dict) else None

    def _of_run(self, text: str, record: dict[str, Any], wanted: str) -> Reference:
        """The run's stage of that name, or its last one that left a model."""
        names = [stage["name"] for stage in record["stages"]]
        if wanted and wanted not in names:
            raise UsageError(f"the run {record['run']} has no stage '{wanted}'; its stages are {', '.join(names)}")
        for stage in reversed(record["stages"]):
            artifact = _artifact_of(self.store, stage)
            if artifact and (stage["name"] == wanted or (not wanted and _part_of(artifact.path))):
                return self._of_artifact(text, artifact)
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
            named = _Resolver(self.store, None).find(self.base)
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
        named_base = (read_json(adapter / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        if named_base and (Path(named_base) / "config.json").is_file():
            return Path(named_base).absolute()
        digest = f"with the weights {wanted[:12]}" if wanted else f"({named_base})"
        raise UsageError(
            f"'{text}' is an adapter, and its base {digest} is not in {self.store.root}; name it with --base, or put it "
            f"into {beside}"
        )

    def _listed(self) -> str:
        """What could have been named instead."""
        stages = sorted({artifact.stage for artifact in self.store.everything() if _part_of(artifact.path)})
        found = [run["run"] for run in runs.history(self.store.root)][:LISTED_RUNS]
        if not stages and not found:
            return f"in {self.store.root} there is none yet, begin with `ttrain pipeline run full`"
        return f"stages with a model: {', '.join(stages) or 'none'}; newest runs: {', '.join(found) or 'none'}"


def base_digest_of(adapter: Path) -> str | None:
    """Digest of the weights that an adapter was trained on, as it says itself; None where it does not (PEFT's own)."""
    try:
        return str(json.loads((adapter / BASE).read_bytes())["base_weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
