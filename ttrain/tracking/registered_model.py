"""A model or tokenizer as MLflow's registry shows it: path, tags, texts, and the files that make it loadable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ttrain.core.files import read_object
from ttrain.engine.execution import REGISTERED, registered_name
from ttrain.reports.history import History
from ttrain.reports.model_card import Exported, card
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER as ADAPTER_WEIGHTS
from ttrain.store.model_files import base_digest_of, numbers_in, parameters_of
from ttrain.tracking import registration
from ttrain.tracking.client import first_line
from ttrain.tracking.loadable import ADAPTER, MODEL, LoadableModel, loadable

log = logging.getLogger("ttrain")

Result = TypeVar("Result")

EXAMPLES = ("Return the", "Hello! Who are you?")  # of what a model takes, where runtime.sample_prompts is empty


@dataclass(frozen=True)
class Registered:
    """A model or tokenizer of a pipeline, as it is registered."""

    artifact: Artifact
    pipeline: str  # the setting `name`
    store: ArtifactStore

    @property
    def name(self) -> str:
        """Name of the registered model."""
        return registered_name(self.pipeline, self.artifact.stage)

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
