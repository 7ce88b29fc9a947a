"""Registered models of a pipeline run: a version for each model and the tokenizer, and the set of all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TypeVar

from ttrain.config.training import MODEL_STAGES, TRAINING_STAGES
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.registry import Registry, Version

log = logging.getLogger("ttrain")

Result = TypeVar("Result")

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    **{name: (row.model, row.directory) for name, row in TRAINING_STAGES.items()},
}


def registered_name(pipeline: str, stage: str) -> str:
    """Name of the registered model of a stage. `pipeline`: the setting `name`."""
    return f"{pipeline}-{REGISTERED[stage][0]}"


def check_names(store: ArtifactStore, pipeline: str) -> None:
    """Raise UsageError where models of another pipeline bear the name of this one, or of its models."""
    suffixes = sorted({suffix for suffix, _ in REGISTERED.values()})
    Registry(store.root).check_names(pipeline, [f"{pipeline}-{suffix}" for suffix in suffixes])


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
        by_name = {registered_name(self.pipeline, artifact.stage): artifact for artifact in of_set}
        keys = {name: artifact.key for name, artifact in artifacts.items()}
        metrics = dict(artifacts["evaluate"].result["metrics"])
        members = [self._register(artifact) for artifact in by_name.values()]
        model_set = Registry(self.store.root).register_set(self.pipeline, self.run, members, keys, metrics)
        self.versions[model_set.name] = model_set.version
        return model_set.version

    def _register(self, artifact: Artifact) -> Version:
        name = registered_name(self.pipeline, artifact.stage)
        version = Registry(self.store.root).register_model(name, artifact, self.run)
        self.versions[name] = version.version
        return version
