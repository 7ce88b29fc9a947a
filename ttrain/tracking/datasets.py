"""The data sets that a run reads, as MLflow lists them: name, digest, context, counts, location.

MLflow keeps one record of a data set for each name and digest of an experiment, so a digest covers all that the record
says: the bytes of the files, how they are read, and the counts of documents and bytes. The number of tokens depends on
the tokenizer too, and is a tag of the link between run and data set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """One data set as a run reads it. `files`: name, sha256 and, if known, location of each."""

    name: str
    digest: str
    context: str
    counts: Mapping[str, int]  # documents and bytes
    tokens: int | None
    files: tuple[JsonObject, ...] = field(default=(), repr=False)
    made_by: str = ""  # the stage whose artifact the files are of, where they are not the user's own

    @property
    def identity(self) -> tuple[str, str]:
        """By which MLflow tells data sets apart."""
        return self.name, self.digest

    def source(self) -> str:
        """The files it comes from, as JSON for MLflow: their number, and the first ones."""
        made_by = {"made_by": self.made_by} if self.made_by else {}
        listed = [dict(file) for file in self.files[:LISTED_FILES]]
        return json.dumps({"files": len(self.files), **made_by, "listed": listed}, ensure_ascii=False)


def data_of(artifact: Artifact) -> list[DataInput]:
    """The data sets behind a set of shards (its training part, and what is held out), a tokenizer;
    else none."""
    if artifact.stage.startswith(SHARDS):
        return list(_of_shards(artifact))
    tokenizer = TokenizerResult.of(artifact.result)
    if artifact.stage != "tokenizer" or not tokenizer.files:
        return []
    counts = {} if tokenizer.documents is None else {"documents": tokenizer.documents, "bytes": tokenizer.bytes}
    return [_data(artifact, "tokenizer", TRAINING, counts, None, files_of(artifact, "train"))]


def read_by(inputs: Artifacts, *, trains: bool) -> list[DataInput]:
    """The data sets that a stage reads through its input artifacts: its training data, or else its validation data."""
    context = TRAINING if trains else VALIDATION
    return [
        data
        for artifact in inputs.values()
        if artifact.stage.startswith(SHARDS)
        for data in data_of(artifact)
        if data.context == context
    ]


def entities(inputs: Iterable[DataInput]) -> list[Any]:
    """Data sets as MLflow's client takes them."""
    mlflow, listed = import_module("mlflow.entities"), []
    for data in inputs:
        tags = {CONTEXT: data.context, **({} if data.tokens is None else {"tokens": str(data.tokens)})}
        dataset = mlflow.Dataset(
            name=data.name,
            digest=data.digest,
            source_type="ttrain",
            source=data.source(),
            profile=json.dumps(dict(data.counts)),
        )
        marks = [mlflow.InputTag(key=key, value=value) for key, value in tags.items()]
        listed.append(mlflow.DatasetInput(dataset=dataset, tags=marks))
    return listed


def _of_shards(artifact: Artifact) -> Iterator[DataInput]:
    dataset = artifact.stage.removeprefix(SHARDS)
    made = ShardsResult.of(artifact.result)
    for split, context, totals in (("train", TRAINING, made.train), ("heldout", VALIDATION, made.heldout)):
        if totals.rows:
            # Held-out rows are taken from the training files, unless there are held-out files.
            files = files_of(artifact, split) or files_of(artifact, "train")
            counts = {"documents": totals.rows, "bytes": totals.bytes}
            name = dataset if split == "train" else f"{dataset}-heldout"
            yield _data(artifact, name, context, counts, totals.tokens, files)


def _data(
    artifact: Artifact,
    name: str,
    context: str,
    counts: Mapping[str, int],
    tokens: int | None,
    files: list[JsonDict],
) -> DataInput:
    ingredients = artifact.manifest["ingredients"]
    reading = {key: value for key, value in ingredients.get("settings", {}).items() if key.startswith("reading.")}
    source = artifact.manifest["inputs"].get("source", {})
    stands_for = {
        "files": [{key: value for key, value in file.items() if key not in ("name", "location")} for file in files],
        "source": source.get("content"),
        "reading": reading,
        "counts": dict(counts),
        "context": context,
    }
    digest = digest_of(stands_for)[:DIGEST_CHARACTERS]
    return DataInput(name, digest, context, counts, tokens, tuple(files), source.get("stage", ""))


def files_of(artifact: Artifact, role: str) -> list[JsonDict]:
    """Name, sha256, weight and location of the user's own files that an artifact was made from, of one role."""
    files = artifact.manifest["ingredients"].get("files", {}).get(role, [])
    locations = artifact.provenance.get("files", {}).get(role, [])
    if len(locations) != len(files):
        return [dict(file) for file in files]
    return [{**file, "location": location} for file, location in zip(files, locations, strict=True)]
