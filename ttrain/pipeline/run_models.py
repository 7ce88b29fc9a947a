"""Registered models of a pipeline run: a version for each model and the tokenizer, their cards, and the set of all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeVar

from ttrain import tracking
from ttrain.config.training import BASES, CHOSEN_BASE, MODEL_STAGES, TRAINING_STAGES
from ttrain.core.files import JsonDict, read_object
from ttrain.core.hashing import digest_of
from ttrain.pipeline import registration
from ttrain.pipeline.lineage import History, seed_of
from ttrain.pipeline.model_card import Exported, card
from ttrain.pipeline.names import base_digest_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.model_files import ADAPTER as ADAPTER_WEIGHTS
from ttrain.store.model_files import numbers_in, parameters_of
from ttrain.tracking.calls import attempt, first_line
from ttrain.tracking.model_description import ADAPTER, MODEL, loadable, shares_disk

log = logging.getLogger("ttrain")

Result = TypeVar("Result")

# Which artifacts become registered models: stage, suffix of the name, directory in the artifact.
REGISTERED = {
    "tokenizer": ("tokenizer", ""),
    **{name: (row.model, row.directory) for name, row in TRAINING_STAGES.items()},
    CHOSEN_BASE: (TRAINING_STAGES[BASES[0]].model, TRAINING_STAGES[BASES[0]].directory),
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
        """Tags of the version: its artifact and provenance."""
        manifest, provenance = self.artifact.manifest, self.artifact.provenance
        seed = seed_of(self.artifact.stage, manifest["ingredients"].get("settings", {}))
        optional_tags = {"ttrain.seed": seed, "ttrain.commit": provenance.get("commit"), "ttrain.run": provenance.get("run")}
        return {
            "ttrain.stage": self.artifact.stage,
            "ttrain.key": self.artifact.key,
            "ttrain.content": self.artifact.content,
            **{f"ttrain.input.{name}": entry["key"] for name, entry in manifest["inputs"].items()},
            "ttrain.code": digest_of(manifest["ingredients"].get("code", {})),
            **{name: str(value) for name, value in optional_tags.items() if value is not None},
        }

    def card(self) -> str:
        """The model card, with any evaluation; "" for a tokenizer, or if the files cannot be read."""
        if not self.directory:
            return ""
        return self._attempt("a card", lambda: card(self._exported(), History.of(self.artifact, self.store))) or ""

    def descriptions(self, *, opens: bool) -> dict[str, str]:
        """Descriptions of the version and of its registered model for MLflow's pages; {} if its files cannot be read.

        `opens`: whether MLflow can open it.
        """

        def words() -> dict[str, str]:
            exported = self._exported() if self.directory else None
            text = registration.of_model(exported, History.of(self.artifact, self.store), opens=opens)
            return {"description": text, "about": registration.of_all_versions(self.artifact.stage, self.pipeline)}

        return {} if self.artifact.absent else self._attempt("a description", words) or {}

    def extra_files(self, run: tracking.AnyRun, examples: Sequence[str]) -> tracking.LoadableModel:
        """Extra files for the model's directory; none for a tokenizer, or if its files are not on this disk.

        An adapter includes its base if the run's files are on the same disk, where that takes no space. A model whose files
        cannot be described is registered without them: the run does not depend on it.
        """
        if not self.directory or self.artifact.absent or isinstance(run, tracking.NullRun):
            return tracking.LoadableModel()

        def described() -> tracking.LoadableModel:
            below = self.artifact.manifest["inputs"].get("base") if self.directory == ADAPTER else None
            base = self.store.path(below["stage"], below["key"]) / MODEL if below else None
            if base is not None and not ((base / "config.json").is_file() and shares_disk(run, base)):
                base = None
            return loadable(self.artifact, self.directory, base=base, card=self.card(), examples=examples)

        return self._attempt("a description of its files", described) or tracking.LoadableModel()

    def _attempt(self, what: str, action: Callable[[], Result]) -> Result | None:
        result, error = attempt(action)
        if error is not None:
            log.warning("%s is registered without %s: %s", self.name, what, first_line(error))
        return result

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


EXAMPLES = ("Return the", "Hello! Who are you?")  # of what a model takes, where runtime.sample_prompts is empty


@dataclass
class RunModels:
    """Registers the models of one run. `pipeline` is its setting `name`, `prompts` are examples of what its models take."""

    _pipeline: str
    _prompts: Sequence[str]
    _store: ArtifactStore
    _tracker: tracking.AnyStore
    _runs: dict[str, tracking.AnyRun] = field(default_factory=dict)  # tracked runs that registered a model, by stage
    versions: dict[str, str] = field(default_factory=dict)  # that this run registered, by name
    _opened_by_mlflow: set[str] = field(default_factory=set)  # stages whose registered models MLflow can open

    def register(self, artifact: Artifact, run: tracking.AnyRun) -> None:
        """Log the artifact's files to the tracker, and register a model or tokenizer."""
        run.log_directory(artifact.path, artifact.stage)
        if artifact.stage not in REGISTERED:
            return
        self._runs[artifact.stage] = run
        model = self._registered(artifact)
        extra_files = model.extra_files(run, self._prompts)
        for file, text in extra_files.texts.items():
            run.log_text(text, f"{model.path}/{file}")
        for file, source in extra_files.files.items():
            run.log_file(source, str(PurePosixPath(model.path, file).parent))
        self._opened_by_mlflow |= {artifact.stage} if extra_files.is_whole else set()
        version = self._tracker.register_model(
            model.name,
            run=run,
            artifact_path=model.path,
            tags={**model.tags, **extra_files.tags},
            **model.descriptions(opens=extra_files.is_whole),
        )
        self._note(model.name, version)

    def _registered(self, artifact: Artifact) -> Registered:
        return Registered(artifact, self._pipeline, self._store)

    def _note(self, name: str, version: str | None) -> None:
        if version is not None:
            self.versions[name] = version

    def log_cards(self, artifacts: Artifacts) -> None:
        """Rewrite the cards of the models that this run made, now with their evaluation."""
        for stage, run in self._runs.items():
            if stage in artifacts and (card := (model := self._registered(artifacts[stage])).card()):
                run.log_text(card, f"{model.path}/{tracking.CARD}")

    def register_set(
        self,
        artifacts: Artifacts,
        run_name: str,
        metrics: Mapping[str, float],
        run: tracking.AnyRun,
    ) -> str | None:
        """Register the models of a run as one set, from the tracked `run` of the pipeline; return its version.

        Existing versions are reused. A model that another run made under another `name`, or untracked, is registered from
        the store. A base that a night chose stands for the one that it trained.
        """
        members = [self._registered(artifacts[stage]) for stage in ("tokenizer", *MODEL_STAGES) if stage in artifacts]
        by_name = {model.name: model for model in members}
        models = [self._registration(model, run) for model in by_name.values()]
        self._tracker.finish_uploads()
        version = self._tracker.register_models(
            self._pipeline,
            run=run,
            run_name=run_name,
            models=models,
            keys={name: artifact.key for name, artifact in artifacts.items()},
            metrics=dict(artifacts["evaluate"].result["metrics"]),
            description=registration.of_set(
                self._pipeline, run_name, {name: model.artifact for name, model in by_name.items()}, metrics
            ),
            about=registration.SETS.format(name=self._pipeline),
        )
        self._note(self._pipeline, version)
        return version

    def _registration(self, model: Registered, run: tracking.AnyRun) -> JsonDict:
        """The model as `register_models` takes it, with its extra files if this run registers it from the store."""
        stage, extra_files = model.artifact.stage, tracking.LoadableModel()
        opens = stage in self._opened_by_mlflow
        if stage not in self._runs:  # otherwise that tracked run has registered it
            extra_files = model.extra_files(run, self._prompts)
            opens = extra_files.is_whole
        return {
            "name": model.name,
            "stage": stage,
            "artifact_path": model.path,
            "path": None if model.artifact.absent else str(model.artifact.path),
            "tags": {**model.tags, **extra_files.tags},
            "texts": dict(extra_files.texts),
            "files": {name: str(path) for name, path in extra_files.files.items()},
            **model.descriptions(opens=opens),
        }
