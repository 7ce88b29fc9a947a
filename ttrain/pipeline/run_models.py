"""Registered models of a pipeline run: a version for each model and the tokenizer, their cards, and the set of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ttrain.config.training import MODEL_STAGES, TRAINING_STAGES
from ttrain.core.files import read_object
from ttrain.pipeline import registration
from ttrain.pipeline.lineage import History
from ttrain.pipeline.model_card import Exported, card
from ttrain.pipeline.names import base_digest_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.model_files import ADAPTER as ADAPTER_WEIGHTS
from ttrain.store.model_files import numbers_in, parameters_of
from ttrain.store.registry import Registry, Version
from ttrain.tracking.client import first_line
from ttrain.tracking.loadable import ADAPTER, MODEL, LoadableModel, loadable

log = logging.getLogger("ttrain")

Result = TypeVar("Result")

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    **{name: (row.model, row.directory) for name, row in TRAINING_STAGES.items()},
}


@dataclass(frozen=True)
class Registered:
    """A model or tokenizer of a pipeline, as it is registered."""

    artifact: Artifact
    pipeline: str  # the setting `name`
    store: ArtifactStore

    @property
    def name(self) -> str:
        """Name of the registered model."""
        return f"{self.pipeline}-{REGISTERED[self.artifact.stage][0]}"

    @property
    def directory(self) -> str:
        """Directory of the model in the artifact; "" for a tokenizer."""
        return REGISTERED[self.artifact.stage][1]

    @property
    def path(self) -> str:
        """Path of the model within the tracked run that holds the artifact."""
        return f"{self.artifact.stage}/{self.directory}" if self.directory else self.artifact.stage

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the version: its artifact. The run that it names has the rest."""
        return {"ttrain.key": f"{self.artifact.stage}/{self.artifact.key}"}

    def card(self) -> str:
        """The model card, with any evaluation; "" for a tokenizer, or if the files cannot be read."""
        if not self.directory:
            return ""
        return self._attempt("a card", lambda: card(self._exported(), History.of(self.artifact, self.store))) or ""

    def descriptions(self, *, opens: bool, note: str = "") -> dict[str, str]:
        """Descriptions of the version and of its registered model for MLflow's pages; {} if its files cannot be read.

        `opens`: whether MLflow can open it; `note`: of the run.
        """

        def words() -> dict[str, str]:
            exported = self._exported() if self.directory else None
            text = registration.of_model(exported, History.of(self.artifact, self.store), opens=opens, note=note)
            return {"description": text, "about": registration.of_all_versions(self.artifact.stage, self.pipeline)}

        return {} if self.artifact.absent else self._attempt("a description", words) or {}

    def extra_files(self, examples: Sequence[str], *, is_local: bool) -> LoadableModel:
        """Extra files for the model's directory; none for a tokenizer, or if its files are not on this disk.

        An adapter includes its base where the tracker's files are on this disk (`is_local`), which takes no space there. A
        model whose files cannot be described is registered without them: the run does not depend on it.
        """
        if not self.directory or self.artifact.absent:
            return LoadableModel()

        def described() -> LoadableModel:
            below = self.artifact.manifest["inputs"].get("base") if self.directory == ADAPTER else None
            base = self.store.path(below["stage"], below["key"]) / MODEL if below and is_local else None
            if base is not None and not (base / "config.json").is_file():
                base = None
            return loadable(self.artifact, self.directory, base=base, card=self.card(), examples=examples)

        return self._attempt("a description of its files", described) or LoadableModel()

    def _attempt(self, what: str, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except Exception as error:  # of a damaged file, or of a plug-in's
            log.warning("%s is registered without %s: %s", self.name, what, first_line(error))
            return None

    def _exported(self) -> Exported:
        model_directory = self.artifact.path / self.directory
        is_adapter = self.directory == ADAPTER
        parameters = numbers_in(model_directory / ADAPTER_WEIGHTS) if is_adapter else parameters_of(model_directory)
        config = read_object(model_directory / "config.json")
        return Exported(
            name=self.name,
            files="adapter" if is_adapter else "model",
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            parameters=parameters,
            config=config,
            base_digest=base_digest_of(model_directory) if is_adapter else None,
            has_code=bool(config.get("auto_map")),
        )


def check_names(store: ArtifactStore, pipeline: str) -> None:
    """Raise UsageError where models of another pipeline bear the name of this one, or of its models."""
    suffixes = sorted({suffix for suffix, _ in REGISTERED.values()})
    Registry(store.root).check_names(pipeline, [f"{pipeline}-{suffix}" for suffix in suffixes])


EXAMPLES = ("Return the", "Hello! Who are you?")  # of what a model takes, where runtime.sample_prompts is empty


@dataclass
class RunModels:
    """Registers the models of one run in the home. `pipeline` is its setting `name`."""

    pipeline: str
    store: ArtifactStore
    run: str
    versions: dict[str, str] = field(default_factory=dict)  # that this run registered, by name

    def register(self, artifact: Artifact) -> None:
        """Register a model or tokenizer, as soon as it is made."""
        if artifact.stage in REGISTERED:
            self._register(artifact)

    def register_set(self, artifacts: Artifacts) -> str:
        """Register the models of a run as one set; return its version.

        Existing versions are reused.
        """
        of_set = [artifacts[stage] for stage in ("tokenizer", *MODEL_STAGES) if stage in artifacts]
        by_name = {self._registered(artifact).name: artifact for artifact in of_set}
        keys = {name: artifact.key for name, artifact in artifacts.items()}
        metrics = dict(artifacts["evaluate"].result["metrics"])
        members = [self._register(artifact) for artifact in by_name.values()]
        model_set = Registry(self.store.root).register_set(self.pipeline, self.run, members, keys, metrics)
        self.versions[model_set.name] = model_set.version
        return model_set.version

    def _registered(self, artifact: Artifact) -> Registered:
        return Registered(artifact, self.pipeline, self.store)

    def _register(self, artifact: Artifact) -> Version:
        name = self._registered(artifact).name
        version = Registry(self.store.root).register_model(name, artifact, self.run)
        self.versions[name] = version.version
        return version
