"""The data sets that a run reads, as MLflow lists them: name, digest, what they are read for, counts, where they lie.

MLflow keeps one record of a data set for each name and digest of an experiment, so a digest stands for all that the record
says: the bytes of the files, how they are read, and the counts of documents and bytes. How many tokens they are depends on
the tokenizer too, and is a tag of the link between run and data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from ttrain.core.hashing import digest_of
from ttrain.store.layout import Artifact

TRAINING, VALIDATION, EVALUATION = "training", "validation", "evaluation"
CONTEXT: Final = "mlflow.data.context"  # the tag that MLflow's pages show beside a data set
TOKENS: Final = "tokens"
DIGEST_CHARACTERS: Final = 12  # MLflow takes 36; its pages show it in the table of runs
SOURCE_BYTES: Final = 60_000  # of MLflow's 65535
SHARDS: Final = "shards-"
COUNTED_AS: Final = {"rows": "documents", "bytes": "bytes"}
HELD_OUT: Final = "heldout"
TAKEN: Final = re.compile("unique constraint|duplicate (key|entry)", re.IGNORECASE)  # SQLite, PostgreSQL, MySQL


@dataclass(frozen=True)
class DataInput:
    """One data set as a run reads it. `files`: name, sha256 and, where it is known, location of each."""

    name: str
    digest: str
    context: str
    counts: Mapping[str, int]  # documents and bytes
    tokens: int | None
    files: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    made_by: str = ""  # the stage whose artifact the files are of, where they are not the user's own

    def source(self) -> str:
        """Where it comes from, as JSON that MLflow takes; a list that is too long is cut, and says how many there are."""
        told: dict[str, Any] = {"files": len(self.files), **({"made_by": self.made_by} if self.made_by else {})}
        listed, room = [], SOURCE_BYTES
        for file in self.files:
            text = json.dumps(dict(file), ensure_ascii=False)
            room -= len(text.encode()) + 2
            if room < 0:
                break
            listed.append(dict(file))
        return json.dumps({**told, "listed": listed}, ensure_ascii=False)


def data_of(artifact: Artifact) -> list[DataInput]:
    """The data sets behind a set of shards (its training part, and what is held out), a tokenizer, or the suites of an
    evaluation; else none."""
    if "suites" in artifact.result:
        return of_tasks(artifact.result["suites"]["tasks"])
    if artifact.stage.startswith(SHARDS):
        return list(_of_shards(artifact))
    return [_of_tokenizer(artifact)] if artifact.stage == "tokenizer" and artifact.result.get("files") else []


def of_tasks(tasks: Iterable[Mapping[str, Any]]) -> list[DataInput]:
    """The items of an evaluation's tasks, as its results tell them."""
    return [
        DataInput(one["task"], one["digest"][:DIGEST_CHARACTERS], EVALUATION, {"items": one["items"]}, None) for one in tasks
    ]


def read_by(inputs: Mapping[str, Artifact], *, trains: bool) -> list[DataInput]:
    """The data sets that a stage reads through its input artifacts: what it trains on, or else what it is measured on."""
    wanted = TRAINING if trains else VALIDATION
    return [
        data for one in inputs.values() if one.stage.startswith(SHARDS) for data in data_of(one) if data.context == wanted
    ]


def log(client: Any, run_id: str, inputs: Iterable[DataInput]) -> None:
    """Tell MLflow that a run reads these; one that it lists already is not listed twice.

    MLflow looks whether it has a data set, then makes it: runs side by side that read the same ones, as the trials of a
    sweep, meet there, at most once for each data set.
    """
    entities = import_module("mlflow.entities")
    known = client.get_run(run_id).inputs
    there = {(one.dataset.name, one.dataset.digest) for one in (known.dataset_inputs if known else ())}
    fresh = {(data.name, data.digest): data for data in inputs if (data.name, data.digest) not in there}
    datasets = [_entity(entities, data) for data in fresh.values()]
    for left in reversed(range(len(datasets) + 1) if datasets else ()):
        try:
            client.log_inputs(run_id, datasets=datasets)
            return
        except Exception as error:
            if not left or not TAKEN.search(str(error)):
                raise


def _entity(entities: Any, data: DataInput) -> Any:
    tags = {CONTEXT: data.context, **({} if data.tokens is None else {TOKENS: str(data.tokens)})}
    return entities.DatasetInput(
        dataset=entities.Dataset(
            name=data.name,
            digest=data.digest,
            source_type="ttrain",
            source=data.source(),
            profile=json.dumps(dict(data.counts)),
        ),
        tags=[entities.InputTag(key=key, value=value) for key, value in tags.items()],
    )


def _of_shards(artifact: Artifact) -> Iterator[DataInput]:
    dataset = artifact.stage.removeprefix(SHARDS)
    for part, context in (("train", TRAINING), (HELD_OUT, VALIDATION)):
        told = artifact.result.get(part, {})
        if told.get("rows"):
            # What is held out is taken from the training files, unless it has files of its own.
            files = files_of(artifact, part) or files_of(artifact, "train")
            counts = {name: told[key] for key, name in COUNTED_AS.items() if key in told}
            name = dataset if part == "train" else f"{dataset}-{HELD_OUT}"
            yield _data(artifact, name, context, counts, told.get("tokens"), files)


def _of_tokenizer(artifact: Artifact) -> DataInput:
    counts = {name: artifact.result[name] for name in ("documents", "bytes") if name in artifact.result}
    return _data(artifact, "tokenizer", TRAINING, counts, None, files_of(artifact, "train"))


def _data(
    artifact: Artifact,
    name: str,
    context: str,
    counts: Mapping[str, int],
    tokens: int | None,
    files: list[dict[str, Any]],
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


def files_of(artifact: Artifact, role: str) -> list[dict[str, Any]]:
    """Name, sha256, weight and location of the user's own files that an artifact was made from, of one role."""
    known = artifact.manifest["ingredients"].get("files", {}).get(role, [])
    places = artifact.manifest.get("provenance", {}).get("files", {}).get(role, [])
    if len(places) != len(known):
        return [dict(file) for file in known]
    return [{**file, "location": place} for file, place in zip(known, places, strict=True)]
