"""What `ttrain doctor` examines: a stage's inputs from the store, or, before any run, from a sample of the data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.config import Settings, ShardsConfig, SourceConfig
from ttrain.config.training import NONE, TRAININGS
from ttrain.core.progress import Progress
from ttrain.data import chat_shapes, locations, sources
from ttrain.data.encoder import Encoder
from ttrain.data.jsonl import Tally
from ttrain.data.worker_pools import Here
from ttrain.errors import ArtifactError, UsageError
from ttrain.pipeline.input_files import EXISTING, HELDOUT, TRAIN, data_files
from ttrain.pipeline.plan import no_stage
from ttrain.stages import (
    EXISTING_MODEL,
    NEW_MODEL,
    SHARDS_LORA,
    SHARDS_PRETRAIN,
    SHARDS_SFT,
    TOKENIZER,
    Stage,
    existing_model,
    models,
    shards,
    source,
    tokenizer,
)
from ttrain.stages.job import Job
from ttrain.store.layout import Artifact

SHARDS = {"pretrain": SHARDS_PRETRAIN, "sft": SHARDS_SFT, "lora": SHARDS_LORA}
SAMPLE_RECORDS, SAMPLE_BYTES, SAMPLE_FILES = 2000, 4_000_000, 8  # of a data set; the first of each of so many files
HELDOUT_SHARE = 10  # one record of so many is held out of a sample for which the user names no such files


@dataclass(frozen=True)
class Inputs:
    """Directories that a stage reads, and what is known of them.

    figure          what they are, for people
    trained         whether the base is a trained model, not one of random weights that stands in for it
    unmade_bytes    shards that a run would still have to make
    """

    paths: Mapping[str, Path]
    figure: str
    trained: bool
    unmade_bytes: float


def gather(stage: str, settings: Settings, artifacts: Mapping[str, Artifact], directory: Path) -> Inputs:
    """The inputs of a stage that trains. What has to be made is made under `directory`.

    Raises DataError where the data is not fit to learn from, UsageError where it is not there, or where the stage is not
    part of the pipeline.
    """
    if stage not in settings.trainings:
        raise no_stage(stage, settings.trainings, settings)
    made = directory / "sample"
    found = artifacts.get("source")
    sampling = _Sample(settings, found.path if found else None, directory)
    words = artifacts["tokenizer"].path if "tokenizer" in artifacts else sampling.tokenizer()
    kept = artifacts.get(SHARDS[stage].name)
    unmade = 0.0 if kept else sampling.shards(SHARDS[stage], words, made)
    figure = "the shards of the store" if kept else f"the first {sampling.records} records"
    paths = {"tokenizer": words, "shards": kept.path if kept else made}
    found_base = artifacts.get(_base_stage(stage, settings))
    is_trained = settings.existing_model is not None or (found_base is not None and settings.starts[stage] != NONE)
    if found_base:
        paths["base"] = found_base.path
        figure += ", the base of the store"
    elif settings.existing_model:
        paths["base"] = _existing(settings, words, directory / "base")
        figure += f", the model {settings.existing_model}"
    elif stage != "pretrain":
        paths["base"] = _stand_in(settings, words, directory / "base")
        figure += ", a base of random weights until there is one"
    return Inputs(paths, figure, is_trained, unmade)


def _base_stage(stage: str, settings: Settings) -> str:
    """The stage that makes what this one starts from."""
    start = settings.starts[stage]
    if start in TRAININGS:
        return start
    return NEW_MODEL.name if start == NONE else EXISTING_MODEL.name


class _Sample:
    """The first records of the user's files, as a source that the stages read like the quickstart's."""

    def __init__(self, settings: Settings, made_source: Path | None, directory: Path) -> None:
        self._settings, self._source, self._directory = settings, made_source, directory
        self.records = 0

    def tokenizer(self) -> Path:
        """Train a tokenizer on the sample, or take the existing one."""
        roles = data_files(TOKENIZER, self._settings)
        texts = self._directory / "texts.jsonl"
        if is_measured := self._settings.reads("tokenizer"):
            self._copy(TOKENIZER, [file.location for file in roles.get(TRAIN, ())], texts, TRAIN)
        output = self._directory / "tokenizer"
        reading = self._settings.reading.model_copy(update={"text_field": "text", "heldout_fraction": 0.0})
        existing = [Path(file.location) for file in roles.get(EXISTING, ())]
        read = [str(texts)] if is_measured else []
        tokenizer.train_directory(read, output, self._settings.tokenizer, reading, found=existing)
        return output

    def shards(self, stage: Stage, words: Path, output: Path) -> float:
        """Make shards of the sample; returns about how many bytes those of all the data would take."""
        assert stage.dataset is not None, "shards are made of a data set"
        made = self._directory / stage.name
        made.mkdir()
        files = [made / f"{stage.dataset}.jsonl", made / f"{stage.dataset}_heldout.jsonl"]
        roles = data_files(stage, self._settings)
        for role, path in zip((TRAIN, HELDOUT), files, strict=True):
            locations_of = [file.location for file in roles.get(role, ())]
            if locations_of or not roles:
                self.records += self._copy(stage, locations_of, path, role)
        if not files[1].exists():
            _hold_out(*files)
        config = ShardsConfig(reading=self._settings.reading, shards=self._settings.shards)
        job = _job(self._settings, output, inputs={"source": made, "tokenizer": words}, arguments=dict(stage.arguments))
        built = shards.build(config, job, Here())
        shards.check(built, config.reading, f"data.{stage.dataset}", stage.arguments["kind"])
        ratio = _size(output) / max(1, sum(path.stat().st_size for path in files))
        given = (file.location for role in roles.values() for file in role)
        return ratio * sum(Path(path).stat().st_size for path in given if not locations.is_remote(path))

    def _copy(self, stage: Stage, files: Sequence[str], output: Path, role: str) -> int:
        """Write the first good records of the files as JSONL; returns how many. Raises DataError where too many are bad."""
        reading, dataset = self._settings.reading, "pretrain" if stage is TOKENIZER else stage.dataset
        name = dataset if role == TRAIN else f"{dataset}_heldout"
        if not files:
            files = [str(self._python_docs() / f"{name}.jsonl")]
            reading = reading.model_copy(update={"text_field": "text"})
        is_chats = stage.arguments.get("kind") == "chats"
        parse = sources.parse_conversation if is_chats else sources.document_parser(reading.text_field)
        wanted = chat_shapes.CHAT_FIELDS if is_chats else sources.document_fields(reading.text_field)
        tally, taken = Tally(), files[:SAMPLE_FILES]
        records = size = 0
        with output.open("w", encoding="utf-8") as file:
            for path in taken:
                room = SAMPLE_BYTES // len(taken)
                found = sources.read([path], parse, tally, reading.max_line_bytes, reading.text_field)
                for record in itertools.islice(found, max(1, SAMPLE_RECORDS // len(taken))):
                    size += file.write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")
                    records += 1
                    if size > room * (taken.index(path) + 1):
                        break
        tally.check(f"data.{name}", reading.rejected_fraction, wanted)
        return records

    def _python_docs(self) -> Path:
        if self._source is None:
            self._source = self._directory / "source"
            source.run(SourceConfig(python_docs=self._settings.python_docs), _job(self._settings, self._source))
        return self._source


def _job(
    settings: Settings, output: Path, inputs: Mapping[str, Path] | None = None, arguments: Mapping[str, str] | None = None
) -> Job:
    return Job(inputs or {}, {}, arguments or {}, output, settings.runtime, Progress(None), lambda: False)


def _hold_out(train: Path, heldout: Path) -> None:
    lines = train.read_text(encoding="utf-8").splitlines(keepends=True)
    train.write_text("".join(line for n, line in enumerate(lines) if n % HELDOUT_SHARE or len(lines) == 1), encoding="utf-8")
    heldout.write_text("".join(lines[::HELDOUT_SHARE]), encoding="utf-8")


def _existing(settings: Settings, words: Path, directory: Path) -> Path:
    """The model that the pipeline starts from, taken in as its stage does."""
    files = {role: [Path(file.location) for file in found] for role, found in data_files(EXISTING_MODEL, settings).items()}
    try:
        existing_model.take(files, words, directory / models.DIRECTORY)
    except ArtifactError as error:
        raise UsageError(f"{settings.trainings[0]}.start_from is {settings.existing_model}: {error}") from None
    return directory


def _stand_in(settings: Settings, words: Path, directory: Path) -> Path:
    """A base model of random weights, of the settings' sizes."""
    model = models.new(settings.model, Encoder(words, fast=False), settings.pretrain.seed)
    models.write(model, words, directory / models.DIRECTORY)
    return directory


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
