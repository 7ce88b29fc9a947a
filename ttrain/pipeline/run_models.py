"""Registered models of a pipeline run: a version for each model and the tokenizer, their cards, and the set of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ttrain import tracking
from ttrain.config.training import BASES, CHOSEN_BASE, MODEL_STAGES, TRAINING_STAGES
from ttrain.pipeline import registration
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    **{name: (row.model, row.directory) for name, row in TRAINING_STAGES.items()},
    CHOSEN_BASE: (TRAINING_STAGES[BASES[0]].model, TRAINING_STAGES[BASES[0]].directory),
}


def members_of(artifacts: Mapping[str, Artifact], name: str) -> dict[str, Artifact]:
    """The models of a run's set by their registered names; a base that a night chose stands for the one that it trained."""
    return {
        f"{name}-{REGISTERED[stage][0]}": artifacts[stage] for stage in ("tokenizer", *MODEL_STAGES) if stage in artifacts
    }


def tracked_path(artifact: Artifact) -> str:
    """Path of the model within the tracked run that holds the artifact."""
    directory = REGISTERED[artifact.stage][1]
    return f"{artifact.stage}/{directory}" if directory else artifact.stage


class RunModels:
    """Registers the models of one run. `pipeline` is its setting `name`, `prompts` are examples of what its models take."""

    def __init__(
        self,
        pipeline: str,
        prompts: Sequence[str],
        store: ArtifactStore,
        tracker: tracking.AnyStore,
    ) -> None:
        self._pipeline, self._prompts, self._store, self._tracker = pipeline, prompts, store, tracker
        self._runs: dict[str, tracking.AnyRun] = {}  # tracked runs that registered a model, by stage
        self.versions: dict[str, str] = {}  # that this run registered, by name
        self._opened_by_mlflow = set[str]()  # stages whose registered models MLflow can open

    def register(self, artifact: Artifact, run: tracking.AnyRun) -> str | None:
        """Log the artifact's files to the tracker and register a model or tokenizer; return the version."""
        run.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return None
        self._runs[artifact.stage] = run
        path, extra_files = tracked_path(artifact), self._extra_files(artifact, run)
        for file, text in extra_files.texts.items():
            run.log_text(text, f"{path}/{file}")
        for file, source in extra_files.files.items():
            run.log_file(source, str(PurePosixPath(path, file).parent))
        self._opened_by_mlflow |= {artifact.stage} if extra_files.is_whole else set()
        tags = {**registration.tags_of(artifact), **extra_files.tags}
        descriptions = self._descriptions(artifact, opens=extra_files.is_whole)
        return self._noted(
            self._name(artifact),
            self._tracker.register_model(self._name(artifact), run=run, artifact_path=path, tags=tags, **descriptions),
        )

    def _noted(self, name: str, version: str | None) -> str | None:
        if version is not None:
            self.versions[name] = version
        return version

    def log_cards(self, artifacts: Mapping[str, Artifact]) -> None:
        """Rewrite the cards of the models that this run made, now with their evaluation."""
        for stage, run in self._runs.items():
            artifact = artifacts.get(stage)
            if artifact and REGISTERED[stage][1]:
                card = registration.card_of(artifact, REGISTERED[stage][1], self._name(artifact), self._store)
                if card:
                    run.log_text(card, f"{tracked_path(artifact)}/{tracking.CARD}")

    def register_set(
        self,
        artifacts: Mapping[str, Artifact],
        run_name: str,
        metrics: Mapping[str, float],
        run: tracking.AnyRun,
    ) -> str | None:
        """Register the models of a run as one set, from the tracked `run` of the pipeline; return its version.

        Existing versions are reused. A model that another run made under another `name`, or untracked, is registered from
        the store.
        """
        members = members_of(artifacts, self._pipeline)
        models = [
            {
                "name": name,
                "stage": model.stage,
                "artifact_path": tracked_path(model),
                **self._registration(model, run),
                "path": None if model.absent else str(model.path),
            }
            for name, model in members.items()
        ]
        self._tracker.finish_uploads()
        version = self._tracker.register_models(
            self._pipeline,
            run=run,
            run_name=run_name,
            models=models,
            keys={name: artifact.key for name, artifact in artifacts.items()},
            metrics=dict(artifacts["evaluate"].result["metrics"]),
            description=registration.of_set(self._pipeline, run_name, members, metrics),
            about=registration.SETS.format(name=self._pipeline),
        )
        return self._noted(self._pipeline, version)

    def _registration(self, model: Artifact, run: tracking.AnyRun) -> dict[str, Any]:
        """Tags and descriptions of a registered model, and its extra files if this run registers it from the store."""
        if model.stage in self._runs:  # that tracked run has registered it
            descriptions = self._descriptions(model, opens=model.stage in self._opened_by_mlflow)
            return {"tags": registration.tags_of(model), "texts": {}, "files": {}, **descriptions}
        extra_files = self._extra_files(model, run)
        descriptions = self._descriptions(model, opens=extra_files.is_whole)
        return {
            "tags": {**registration.tags_of(model), **extra_files.tags},
            "texts": dict(extra_files.texts),
            "files": {name: str(path) for name, path in extra_files.files.items()},
            **descriptions,
        }

    def _descriptions(self, model: Artifact, *, opens: bool) -> dict[str, str]:
        """Descriptions of a registered model for MLflow's pages."""
        directory = REGISTERED[model.stage][1]
        return registration.descriptions_of(model, directory, self._name(model), self._pipeline, self._store, opens=opens)

    def _extra_files(self, artifact: Artifact, run: tracking.AnyRun) -> tracking.LoadableModel:
        """Extra files for a registered model's directory."""
        directory = REGISTERED[artifact.stage][1]
        return registration.extra_files(artifact, directory, self._name(artifact), self._store, run, self._prompts)

    def _name(self, artifact: Artifact) -> str:
        return f"{self._pipeline}-{REGISTERED[artifact.stage][0]}"
