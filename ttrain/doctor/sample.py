"""What a stage reads: artifacts of the store, or what the stages before it make of a sample."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import orjson

from ttrain.config import Settings
from ttrain.config.training import NONE, TRAINING_STAGES, TRAININGS
from ttrain.core.files import ProgressWriter
from ttrain.data import locations, records
from ttrain.engine.input_files import EXISTING, TRAIN, data_files
from ttrain.engine.planner import no_stage
from ttrain.store.layout import Artifact
from ttrain.tasks import EXISTING_MODEL, NEW_MODEL, SHARDS, SOURCE, TOKENIZER, Stage
from ttrain.tasks.common.job import StageContext

# The first ones of each of so many files.
SAMPLE_RECORDS, SAMPLE_BYTES, SAMPLE_FILES = 2000, 4_000_000, 8


@dataclass(frozen=True)
class StageInputs:
    """Directories that a stage reads.

    is_trained      whether the base is a trained model, not one of random weights
    made            the stages whose artifacts the store lacks, which were run on a sample
    unmade_bytes    text of which a run would still have to make shards, which are about as large
    """

    paths: Mapping[str, Path]
    is_trained: bool
    made: Sequence[str]
    unmade_bytes: int


def gather(
    stage: str,
    settings: Settings,
    artifacts: Mapping[str, Artifact],
    directory: Path,
) -> StageInputs:
    """The inputs of a stage that trains; those that are no artifacts are made under `directory`.

    Raises DataError where the data is not fit to learn from, UsageError where it is missing, or
    where the stage is not part of the pipeline.
    """
    if stage not in settings.trainings:
        raise no_stage(stage, settings.trainings, settings)
    row, start = TRAINING_STAGES[stage], settings.starts[stage]
    maker, shards = Maker(settings, artifacts, directory), SHARDS[row.dataset]
    tokenizer = maker.make(TOKENIZER)
    paths = {"tokenizer": tokenizer, "shards": maker.make(shards, tokenizer=tokenizer)}
    trained = artifacts.get(start) if start in TRAININGS else None
    if trained:
        paths["base"] = trained.path
    elif start != NONE or row.role != "base":
        base = EXISTING_MODEL if settings.existing_model else NEW_MODEL
        paths["base"] = maker.make(base, tokenizer=tokenizer)
    unmade_bytes = local_bytes(shards, settings) if shards.name in maker.made else 0
    is_trained = settings.existing_model is not None or trained is not None
    return StageInputs(paths, is_trained, maker.made, unmade_bytes)


def local_bytes(stage: Stage, settings: Settings) -> int:
    """The bytes of the files that the stage reads, as far as they are on this machine."""
    files = itertools.chain.from_iterable(data_files(stage, settings).values())
    local = [file.location for file in files if not locations.is_remote(file.location)]
    return sum(Path(path).stat().st_size for path in local)


@dataclass(frozen=True)
class Maker:
    """Runs the stages of data and models here, on a sample of the data."""

    settings: Settings
    artifacts: Mapping[str, Artifact]
    directory: Path
    made: list[str] = field(default_factory=list)

    def make(self, stage: Stage, **inputs: Path) -> Path:
        """The artifact of the stage, or what it makes of the inputs and a sample of its files."""
        if stage.name in self.artifacts:
            return self.artifacts[stage.name].path
        output = self.directory / stage.name
        if stage.name in self.made:
            return output
        roles = data_files(stage, self.settings)
        files = {role: [file.location for file in roles[role]] for role in roles}
        if stage.dataset:
            read = files.pop(TRAIN, [])
            files = {role: files[role] for role in files if role == EXISTING}
            if self.settings.reads(stage.dataset):
                files[TRAIN] = [self._sample(stage, read)]
        # A sample has its text under the key of ttrain, and does not pay for processes.
        reading = self.settings.reading.model_copy(update={"text_field": records.TEXT})
        settings = self.settings.model_copy(update={"reading": reading})
        job = StageContext(
            inputs,
            files,
            stage.arguments,
            output,
            settings.runtime.model_copy(update={"workers": 1}),
            ProgressWriter(None),
            lambda: False,
            groups={TRAIN: [0]},
        )
        import_module(stage.module).run(Settings.rebuilt(stage.part_of(settings)), job)
        self.made.append(stage.name)
        return output

    def _sample(self, stage: Stage, files: Sequence[str]) -> str:
        """Write the first good records of the files as JSONL.

        Raises DataError where too many are bad.
        """
        reading, kind = self.settings.reading, stage.arguments.get("kind", "documents")
        name = "pretrain" if stage is TOKENIZER else stage.dataset
        text_field, files = reading.text_field, files[:SAMPLE_FILES]
        if not files:
            text_field, files = records.TEXT, [str(self.make(SOURCE) / f"{name}.jsonl")]
        parse, tally, lines = records.parser_of(kind, text_field), records.Tally(), list[bytes]()
        for file in files:
            good = records.read([file], parse, tally, reading.max_line_bytes, text_field)
            size = 0
            for record in itertools.islice(good, max(1, SAMPLE_RECORDS // len(files))):
                lines.append(orjson.dumps(record.to_json(), option=orjson.OPT_APPEND_NEWLINE))
                size += len(lines[-1])
                if size > SAMPLE_BYTES // len(files):
                    break
        expected_fields = records.expected_fields(kind, text_field)
        tally.check(f"data.{name}", reading.rejected_fraction, expected_fields)
        sample = self.directory / f"{stage.name}.jsonl"
        sample.write_bytes(b"".join(lines))
        return str(sample)
