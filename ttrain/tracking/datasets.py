"""The data sets that a run reads, as MLflow lists them: name, digest, context, counts, location.

MLflow keeps one record for each name and digest of an experiment, so a digest covers all that the
record has. The number of tokens also depends on the tokenizer, and is a tag of the link between run
and data set.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.hashing import digest_of
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.results import ShardsResult, TokenizerResult

TRAINING, VALIDATION = "training", "validation"
CONTEXT = "mlflow.data.context"  # the tag that MLflow's pages show beside a data set
DIGEST_CHARACTERS = 12  # MLflow takes 36; its pages show it in the table of runs
LISTED_FILES = 100  # of a data set: MLflow takes 65,535 bytes
SHARDS = "shards-"


@dataclass(frozen=True)
class DataInput:
    """One data set as MLflow lists it; the tags are of the link between a run and it."""

    name: str
    digest: str
    source: str  # JSON: its files
    profile: str  # JSON: documents and bytes
    tags: Mapping[str, str]

    def entity(self) -> Any:
        mlflow = import_module("mlflow.entities")
        dataset = mlflow.Dataset(
            self.name, self.digest, "ttrain", self.source, profile=self.profile
        )
        return mlflow.DatasetInput(dataset, [mlflow.InputTag(*tag) for tag in self.tags.items()])


def data_of(artifact: Artifact) -> list[DataInput]:
    """The data sets of shards (training and held-out part) or of a tokenizer; else none."""
    files = files_of(artifact, "train")
    if artifact.stage.startswith(SHARDS):
        name = artifact.stage.removeprefix(SHARDS)
        made = ShardsResult.of(artifact.result)
        # Held-out rows are taken from the training files, unless there are held-out files.
        others = files_of(artifact, "heldout") or files
        parts = [
            (name, TRAINING, made.train, files),
            (f"{name}-heldout", VALIDATION, made.heldout, others),
        ]
        return [
            _data(artifact, part, of, vars(totals), read)
            for part, of, totals, read in parts
            if totals.rows
        ]
    tokenizer = TokenizerResult.of(artifact.result)
    if artifact.stage != "tokenizer" or not tokenizer.files:
        return []
    return [
        _data(
            artifact,
            "tokenizer",
            TRAINING,
            {"rows": tokenizer.documents, "bytes": tokenizer.bytes},
            files,
        )
    ]


def read_by(inputs: Artifacts, *, trains: bool) -> list[DataInput]:
    """The data sets that a stage reads: its training data, or else its validation data."""
    shards = [artifact for artifact in inputs.values() if artifact.stage.startswith(SHARDS)]
    context = TRAINING if trains else VALIDATION
    return [
        data for artifact in shards for data in data_of(artifact) if data.tags[CONTEXT] == context
    ]


def _data(
    artifact: Artifact, name: str, context: str, totals: JsonObject, files: list[JsonDict]
) -> DataInput:
    settings = artifact.manifest["ingredients"].get("settings", {})
    source = artifact.manifest["inputs"].get("source", {})
    counts = (
        {"documents": totals["rows"], "bytes": totals["bytes"]}
        if totals["rows"] is not None
        else {}
    )
    contents = []
    for file in files:
        contents.append({key: file[key] for key in file if key not in ("name", "location")})
    stands_for = {
        "files": contents,
        "source": source.get("content"),
        "reading": {key: value for key, value in settings.items() if key.startswith("reading.")},
        "counts": counts,
        "context": context,
    }
    made_by = (
        {"made_by": source["stage"]} if source else {}
    )  # where the files are not the user's own
    listed = {"files": len(files), **made_by, "listed": files[:LISTED_FILES]}
    tags = {CONTEXT: context, **({"tokens": str(totals["tokens"])} if "tokens" in totals else {})}
    return DataInput(
        name,
        digest_of(stands_for)[:DIGEST_CHARACTERS],
        json.dumps(listed, ensure_ascii=False),
        json.dumps(counts),
        tags,
    )


def files_of(artifact: Artifact, role: str) -> list[JsonDict]:
    """Name, sha256, weight and location of the user's files that an artifact was made from."""
    files = artifact.manifest["ingredients"].get("files", {}).get(role, [])
    locations = artifact.provenance.get("files", {}).get(role, [])
    if len(locations) != len(files):
        return [dict(file) for file in files]
    return [{**file, "location": location} for file, location in zip(files, locations, strict=True)]
