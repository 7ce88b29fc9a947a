"""The lineage of a model: the artifacts behind it, each with what it was made of."""

from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import JsonDict
from ttrain.core.hashing import digest_of
from ttrain.errors import ArtifactError, UsageError
from ttrain.lineage.lookup import Named, find
from ttrain.reports.facts import changed_settings
from ttrain.reports.history import inputs_first, inputs_of
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.results import ShardsResult
from ttrain.tracking import datasets
from ttrain.tracking.artifact_source import MlflowArtifacts


@dataclass(frozen=True)
class Lineage:
    """Everything behind a name: artifacts, inputs first."""

    text: str
    named: Named
    artifacts: tuple[Artifact, ...]

    def to_json(self) -> JsonDict:
        """What `lineage --json` prints, and the table shows."""
        return {
            "requested": self.text,
            "kind": self.named.kind,
            "name": self.named.name,
            "run": self.named.run["run"] if self.named.run else None,
            "stages": [
                {**facts_of(one), "known_from": "store" if one.path.exists() else "mlflow"}
                for one in self.artifacts
            ],
        }


def lineage_of(home: Path, text: str) -> Lineage:
    """The lineage of what a name means, from the store or, for missing artifacts, a shared MLflow.

    Raises UsageError if the text names no artifact, ArtifactError if a manifest is missing.
    """
    store = ArtifactStore(home)
    tracked = MlflowArtifacts(home)
    named = find(store, text)
    if not named.artifacts:
        raise UsageError(f"'{text}' is {named.name}, which has no artifact in {store.root}")

    def read(stage: str, key: str) -> Artifact:
        path = store.path(stage, key)
        if artifact := store.at(path):
            return artifact
        if manifest := tracked.manifest(stage, key):
            return Artifact(stage, key, path, manifest)
        raise ArtifactError(
            f"the manifest of {stage} {key[:SHOWN_KEY]} is neither in the store {home / 'store'} "
            "nor in MLflow"
        )

    return Lineage(text, named, tuple(inputs_first(named.artifacts, read)))


def facts_of(artifact: Artifact) -> JsonDict:
    """How an artifact was made. What is not recorded is None."""
    manifest = artifact.manifest
    provenance = artifact.provenance
    settings = manifest["ingredients"].get("settings", {})
    versions = {name: provenance[name] for name in ("ttrain", "python") if provenance.get(name)}
    section = "pretrain" if artifact.stage == "new-model" else artifact.stage
    counted = {
        (file.get("role", "train"), file["name"]): file
        for file in ShardsResult.of(artifact.result).files
    }
    data: list[JsonDict] = []
    for role in manifest["ingredients"].get("files", {}):
        for file in datasets.files_of(artifact, role):
            counts = counted.get((role, file["name"]), {})
            data.append(
                {
                    "part": role,
                    **{name: file.get(name) for name in ("name", "sha256", "location")},
                    **{name: counts.get(name) for name in ("tokens", "bytes")},
                    "documents": counts.get("kept", counts.get("documents")),
                }
            )
    return {
        "stage": artifact.stage,
        "key": artifact.key,
        "content": artifact.content,
        "made_unix": manifest.get("published"),
        "run": provenance.get("run"),  # name of the pipeline's run
        "run_id": provenance.get("run_id"),  # MLflow's, of the stage
        "code": digest_of(manifest["ingredients"].get("code", {})),  # that shaped it
        "commit": provenance.get("commit"),
        "seed": settings.get(f"{section}.seed", settings.get("reading.seed")),
        "settings": {
            name: value for name, (value, _) in sorted(changed_settings(settings).items())
        },
        "inputs": {
            name: {"stage": stage, "key": key} for name, (stage, key) in inputs_of(artifact).items()
        },
        "data": data,
        "libraries": {**versions, **provenance.get("libraries", {})},
        "runtime": provenance.get("runtime"),
        "machine": provenance.get("machine"),
        "notes": notes_of(artifact),
    }


def notes_of(artifact: Artifact) -> list[str]:
    """Notes on an artifact that was adopted, continued or extended."""
    manifest = artifact.manifest
    notes: list[str] = []
    for entry in (*manifest.get("adopted", ()), *(manifest.get("continued") or ())):
        made = (
            f"begun as {{}}, continued at step {entry['step']}"
            if "step" in entry
            else "adopted from {},"
        )
        notes.append(
            f"{made.format(entry['key'][:SHOWN_KEY])} although {'; '.join(entry['differences'])}"
        )
    if manifest.get("extends"):
        notes.append(f"extends a shorter training from its checkpoint {manifest['extends']}")
    return notes
