"""The model card of an export, `README.md`, from manifests and `model_card.md`.

The Hugging Face Hub reads its header: https://huggingface.co/docs/hub/model-cards
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ttrain.config.training import TRAINING_STAGES, TRAININGS
from ttrain.core.terminal import escaped
from ttrain.core.text import format_duration, format_value, short_digest
from ttrain.data.existing import HUB_REFERENCE
from ttrain.reports import facts, summary
from ttrain.reports.history import inputs_first
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
BASE_MODEL = "base-model"  # the stage that imports an existing model
SHOWN_ARTIFACTS = 40  # the newest; a year of nights has some 2,000 behind its model


@dataclass(frozen=True)
class Exported:
    """An exported model: `files` is "model" or "adapter"."""

    name: str
    files: str
    dtype: str
    parameters: int
    config: Mapping[str, Any]  # of the model, or of the model that the adapter goes onto
    merged: bool = False
    base_digest: str | None = None  # of an adapter
    licence: str | None = None
    has_code: bool = False  # the directory brings Python files of its own
    # Of GGUF files: name, bits per byte, the model's, and the change.
    scores: tuple[tuple[str, str, str, str], ...] = ()
    # By the key of their shards: the licences that held-out rows name, with their share.
    row_licences: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """The artifacts behind a model, inputs first, and its evaluation."""

    artifacts: tuple[Artifact, ...] = ()
    evaluation: Artifact | None = None
    # Public sources (URLs, the Hub) by the key of their shards.
    locations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str | None = None  # the Hub's name of the model that it started from

    @classmethod
    def of(cls, model: Artifact | None, store: ArtifactStore) -> Self:
        """Collect it from a store, without inputs that are gone and paths of the user's disk."""
        if model is None:
            return cls()
        root = (model.stage, model.key)
        artifacts = inputs_first(
            [root], lambda *name: model if name == root else store.read(store.path(*name))
        )
        locations: dict[str, tuple[str, ...]] = {}
        starts: list[str] = []
        for made in artifacts:
            settings = made.provenance.get("settings", {})
            if dataset := made.stage.partition("shards-")[2]:
                paths = (
                    entry["path"] if isinstance(entry, dict) else entry
                    for entry in settings.get("data", {}).get(dataset) or ()
                )
                locations[made.key] = tuple(
                    path for path in paths if "://" in path and not path.startswith("file:")
                )
            elif made.stage == BASE_MODEL:
                starts += filter(
                    None, (settings.get(training, {}).get("start_from") for training in TRAININGS)
                )
        on_hub = (HUB_REFERENCE.fullmatch(start) for start in starts if not Path(start).is_dir())
        base = next((match[1] for match in on_hub if match), None)
        return cls(
            tuple(artifacts), next(iter(store.made_from(model, "evaluate")), None), locations, base
        )


def card(exported: Exported, history: History) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    is_adapter = exported.files == "adapter"
    row = TRAINING_STAGES.get(history.artifacts[-1].stage) if history.artifacts else None
    settings: dict[str, Any] = {}
    for artifact in history.artifacts:
        settings |= artifact.manifest["ingredients"].get("settings", {})
    filled = ModelCard.from_template(
        ModelCardData(
            library_name="peft" if is_adapter else "transformers",
            pipeline_tag="text-generation",
            license=exported.licence,
            base_model=history.base,
            tags=["ttrain", "adapter"] if is_adapter else ["ttrain"],
        ),
        template_path=str(TEMPLATE),
        exported=exported,
        is_adapter=is_adapter,
        history=history,
        row=row,
        recent=history.artifacts[-SHOWN_ARTIFACTS:],
        evaluation=_evaluation_rows(history),
        settings=settings,
        facts=facts,
        digests_of=_digests,
        cell=lambda value: escaped(format_value(value)).replace("|", "\\|"),
        short=short_digest,
        duration=format_duration,
        json=json.dumps,
    )
    return f"{filled.content}\n"


def _digests(history: History, shards: Artifact) -> dict[Any, str]:
    key = shards.manifest["inputs"].get("source", {}).get("key")
    sources = [made for made in history.artifacts if made.stage == "source" and made.key == key]
    written = sources[0].manifest["files"] if sources else {}
    return {
        **{(role, name): digest for role, name, digest in facts.files_of(shards.manifest)},
        **{name: short_digest(entry["sha256"]) for name, entry in written.items()},
    }


def _evaluation_rows(history: History) -> list[summary.EvaluationRow]:
    if history.evaluation is None:
        return []
    stages = {artifact.stage for artifact in history.artifacts}
    later = [
        row.model
        for name, row in TRAINING_STAGES.items()
        if row.role != "base" and name not in stages
    ]
    results = {"evaluate": history.evaluation.result}
    # Of models trained on top of this one.
    suffixes = tuple(f"{mark}{name}" for name in later for mark in "_/")
    shown = {
        name: value
        for name, value in summary.metrics_of(results).items()
        if not name.endswith(suffixes)
    }
    return summary.rows(shown, results)
