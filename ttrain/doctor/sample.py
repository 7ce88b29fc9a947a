"""What a stage reads: from the store, and where that lacks it, what the stages before make of a sample."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import orjson

from ttrain.config import Settings
from ttrain.config.training import NONE, TRAINING_STAGES, TRAININGS
from ttrain.core.files import ProgressWriter
from ttrain.data import locations, records
from ttrain.errors import ArtifactError, UsageError
from ttrain.pipeline.input_files import EXISTING, HELDOUT, TRAIN, data_files
from ttrain.pipeline.plan import no_stage, section_of
from ttrain.stages import EXISTING_MODEL, NEW_MODEL, SHARDS, SOURCE, TOKENIZER, Stage
from ttrain.stages.job import StageContext
from ttrain.store.layout import Artifact

# The first ones of each of so many files.
SAMPLE_RECORDS, SAMPLE_BYTES, SAMPLE_FILES = 2000, 4_000_000, 8


@dataclass(frozen=True)
class StageInputs:
    """Directories that a stage reads, and where they come from.

    origin          a description for people
    is_trained      whether the base is a trained model, not one of random weights
    unmade_bytes    text of which a run would still have to make shards, which are about as large
    """

    paths: Mapping[str, Path]
    origin: str
    is_trained: bool
    unmade_bytes: float


def gather(stage: str, settings: Settings, artifacts: Mapping[str, Artifact], directory: Path) -> StageInputs:
    """The inputs of a stage that trains; those that are no artifacts are made under `directory`.

    Raises DataError where the data is not fit to learn from, UsageError where it is missing, or where
    the stage is not part of the pipeline.
    """
    if stage not in settings.trainings:
        raise no_stage(stage, settings.trainings, settings)
    row, start = TRAINING_STAGES[stage], settings.starts[stage]
    maker, shards = _Maker(settings, artifacts, directory), SHARDS[row.dataset]
    paths, unmade_bytes = {"tokenizer": maker.tokenizer()}, 0.0
    origin = "the shards of the store"
    if shards.name not in artifacts:
        origin = "the first records of the data"
        unmade_bytes = maker.bytes_of(shards)
    paths["shards"] = maker.shards(shards, paths["tokenizer"])
    base = start if start in TRAININGS else NEW_MODEL.name if start == NONE else EXISTING_MODEL.name
    if base in artifacts:
        paths["base"] = artifacts[base].path
        origin += ", the base of the store"
    elif settings.existing_model:
        paths["base"] = maker.existing_model(paths["tokenizer"])
        origin += f", the model {settings.existing_model}"
    elif row.role != "base":
        paths["base"] = maker.make(NEW_MODEL, tokenizer=paths["tokenizer"])
        origin += ", a base of random weights until there is one"
    is_trained = settings.existing_model is not None or (start != NONE and base in artifacts)
    return StageInputs(paths, origin, is_trained, unmade_bytes)


@dataclass(frozen=True)
class _Maker:
    """Runs the stages of data and models here, on a sample of the data."""

    settings: Settings
    artifacts: Mapping[str, Artifact]
    directory: Path

    def make(self, stage: Stage, files: Mapping[str, Sequence[str]] | None = None, **inputs: Path) -> Path:
        """The artifact of the stage, or what the stage makes of these files and inputs."""
        if stage.name in self.artifacts:
            return self.artifacts[stage.name].path
        output = self.directory / stage.name
        if output.exists():
            return output
        # A sample has its text under the key of ttrain, and does not pay for processes.
        reading = self.settings.reading.model_copy(update={"text_field": records.TEXT})
        settings = self.settings.model_copy(update={"reading": reading})
        job = StageContext(
            inputs,
            {role: list(paths) for role, paths in (files or {}).items()},
            stage.arguments,
            output,
            settings.runtime.model_copy(update={"workers": 1}),
            ProgressWriter(None),
            lambda: False,
            groups={TRAIN: [0]},
        )
        import_module(stage.module).run(section_of(stage, settings), job)
        return output

    def tokenizer(self) -> Path:
        """The tokenizer, or one that is trained on the sample."""
        if TOKENIZER.name in self.artifacts:
            return self.artifacts[TOKENIZER.name].path
        files = self._files(TOKENIZER, EXISTING)
        if self.settings.reads("tokenizer"):
            files[TRAIN] = self._sample(TOKENIZER, "pretrain")
        return self.make(TOKENIZER, files)

    def shards(self, stage: Stage, tokenizer: Path) -> Path:
        """The shards, or those of the sample."""
        if stage.name in self.artifacts:
            return self.artifacts[stage.name].path
        files = {TRAIN: self._sample(stage, str(stage.dataset))}
        return self.make(stage, files, tokenizer=tokenizer)

    def existing_model(self, tokenizer: Path) -> Path:
        """The model that the pipeline starts from, prepared as by its stage."""
        files = self._files(EXISTING_MODEL, *data_files(EXISTING_MODEL, self.settings))
        try:
            return self.make(EXISTING_MODEL, files, tokenizer=tokenizer)
        except ArtifactError as error:
            setting = f"{self.settings.trainings[0]}.start_from"
            raise UsageError(f"{setting} is {self.settings.existing_model}: {error}") from None

    def bytes_of(self, stage: Stage) -> int:
        """The bytes of the files that the stage reads, as far as they are on this machine."""
        files = itertools.chain.from_iterable(self._files(stage, TRAIN, HELDOUT).values())
        local = itertools.filterfalse(locations.is_remote, files)
        return sum(Path(path).stat().st_size for path in local)

    def _files(self, stage: Stage, *roles: str) -> dict[str, list[str]]:
        """The locations of the stage's files of these roles."""
        files = data_files(stage, self.settings)
        return {role: [file.location for file in files[role]] for role in roles if role in files}

    def _sample(self, stage: Stage, name: str) -> list[str]:
        """Write the first good records of a stage's files as JSONL.

        Raises DataError where too many are bad.
        """
        reading, kind = self.settings.reading, stage.arguments.get("kind", "documents")
        files = self._files(stage, TRAIN).get(TRAIN, [])[:SAMPLE_FILES]
        field = reading.text_field
        if not files:
            files = [str(self.make(SOURCE) / f"{name}.jsonl")]
            field = records.TEXT
        parse, tally, lines = records.parser_of(kind, field), records.Tally(), list[bytes]()
        for file in files:
            room = SAMPLE_BYTES // len(files)
            good = records.read([file], parse, tally, reading.max_line_bytes, field)
            for record in itertools.islice(good, max(1, SAMPLE_RECORDS // len(files))):
                line = orjson.dumps(record.to_json(), option=orjson.OPT_APPEND_NEWLINE)
                lines.append(line)
                room -= len(line)
                if room <= 0:
                    break
        expected_fields = records.expected_fields(kind, field)
        tally.check(f"data.{name}", reading.rejected_fraction, expected_fields)
        sample = self.directory / f"{stage.name}.jsonl"
        sample.write_bytes(b"".join(lines))
        return [str(sample)]
