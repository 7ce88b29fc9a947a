"""`ttrain doctor`: run every check on a stage's own parts, before the long run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import transformers

from ttrain.config import Section, Settings, ShardsConfig, SourceConfig, Training
from ttrain.config.training import NONE, TRAINING_STAGES, TRAININGS
from ttrain.core.files import ProgressWriter, temporary_directory
from ttrain.core.machine import usable_cores
from ttrain.data import chat, locations
from ttrain.data import records as sources
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.inspect import TokenDecoder, TokenView, show_row
from ttrain.data.packing import Rows
from ttrain.data.records import Tally
from ttrain.data.sharding import Here
from ttrain.doctor import data, machine, model, preferences, template
from ttrain.doctor.parts import Check, Learner, run_check
from ttrain.errors import ArtifactError, DataError, TTrainError, UsageError
from ttrain.pipeline.input_files import EXISTING, HELDOUT, TRAIN, data_files
from ttrain.pipeline.plan import no_stage, section_of
from ttrain.stages import (
    EXISTING_MODEL,
    NEW_MODEL,
    SHARDS,
    STAGES,
    TOKENIZER,
    Stage,
    existing_model,
    new_model,
    shards,
    source,
    tokenizer,
    training,
)
from ttrain.stages.job import StageContext
from ttrain.stages.rows import check_left_out, open_rows, resolved
from ttrain.stages.shards import heldout_records
from ttrain.store.layout import Artifact
from ttrain.train import precision
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import available_bytes

TEXTS = 200  # of the data, through the tokenizer and back

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # in a checkout


Checks = dict[str, Callable[[], Check | None]]
CHECKS_OF_ROWS = {"pairs": preferences}  # by kind of rows: the module whose checks join those of all stages


class Doctor:
    """The examination of one stage.

    `shown` is a heading and what is trained on, once `checks` has come to it: conversations, or the first row.
    """

    def __init__(self, stage: str, settings: Settings, artifacts: Mapping[str, Artifact], home: Path) -> None:
        """`artifacts`: of the stages that are finished under these settings, by stage."""
        self.stage, self.settings, self.artifacts, self.home = stage, settings, artifacts, home
        self.config: Training = getattr(settings, stage)
        self.shown: tuple[str, list[TokenView]] = ("", [])
        self.special: frozenset[int] = frozenset()

    def checks(self) -> Iterator[Check]:
        """Yield each check as it is done. Raises UsageError where the settings cannot be met."""
        transformers.utils.logging.disable_progress_bar()  # of an existing model that is loaded
        runtime = self.settings.runtime
        device = training.start(runtime).device
        computed_in = precision.resolve_precision(self.config.precision, device)
        pins = machine.pins_of(CONSTRAINTS)
        yield from _run_checks({
            "versions": lambda: machine.versions(metadata.requires("ttrain") or [], pins),
            "precision": lambda: machine.chosen_precision(self.config.precision, computed_in),
            "native kernels": lambda: machine.native_kernels(computed_in),
            "threads": lambda: machine.threads(runtime, usable_cores()),
        })  # fmt: skip
        with temporary_directory("doctor") as directory:
            try:
                inputs = gather(self.stage, self.settings, self.artifacts, directory)
                encoder = Encoder(inputs.paths["tokenizer"])
                rows = open_rows(inputs.paths["shards"] / "train", encoder, self.config)
                check_left_out(self.config, rows)
                if not len(rows):
                    raise DataError("the training data is empty: it gave no row to learn from")
                self.config = resolved(self.config, rows)
            except UsageError:
                raise
            except TTrainError as error:
                yield Check(
                    "data", False, str(error), "fix the data or the setting; `ttrain data check` lists every bad row"
                )
                return
            counts = rows.counts()
            figure = f"{inputs.figure}: {counts['rows']} rows of {rows.row_length} tokens, {counts['fill']:.1%} filled"
            yield Check("data", True, figure)
            yield from self._of_data(inputs, encoder, rows)
            yield from self._of_training(inputs, rows, computed_in)

    def _of_data(self, inputs: StageInputs, encoder: Encoder, rows: Rows) -> Iterator[Check]:
        records = heldout_records(inputs.paths["shards"])
        texts = [
            text for record in records[:TEXTS]
            for text in ([record["text"]] if "text" in record else [turn["content"] for turn in _turns(record)])
        ]  # fmt: skip
        normalizer = open_tokenizer(encoder.directory / "tokenizer.json").normalizer
        normalize = normalizer.normalize_str if normalizer else str
        yield run_check(data.ROUND_TRIP, lambda: data.round_trip(encoder, texts, normalize))
        heldout = open_rows(inputs.paths["shards"] / "heldout", encoder, self.config, heldout=True)
        answers = [turn["content"] for record in records for turn in _turns(record) if turn["role"] == "assistant"]
        pieces, self.special = TokenDecoder(encoder), encoder.special_ids()
        conversations = template.conversations_of(records, encoder)
        if TRAINING_STAGES[self.stage].rows == "documents" or not conversations:
            self.shown = ("the first row", [show_row(rows, 0, pieces)])
        else:
            views = [TokenView.of(*chat.encode_chat(encoder, messages), pieces) for messages in conversations]
            self.shown = ("conversations", views)
            yield run_check(template.TEMPLATE, lambda: template.check(encoder, conversations))
        if self.config.mask_intervals:
            yield run_check(data.LABELS, lambda: data.masked_labels(rows, encoder))
        elif TRAINING_STAGES[self.stage].rows == "documents":
            yield run_check(data.LABELS, lambda: data.document_labels(rows, encoder))
        else:
            yield run_check(data.LABELS, lambda: data.chat_labels(rows, encoder, heldout, answers))

    def _of_training(self, inputs: StageInputs, rows: Rows, computed_in: Precision) -> Iterator[Check]:
        config: Section = section_of(STAGES[self.stage], self.settings)
        runtime, device = self.settings.runtime, computed_in.device
        row_count = int(rows.counts()["rows"])
        build = partial(subject, self.stage, config, dict(inputs.paths))
        task_of = getattr(import_module(STAGES[self.stage].module), "task_of", training.task_of)
        next_tokens, learner = (Learner(self.config, runtime, build, task) for task in (training.task_of, task_of))
        learner.task(self.config, build().model, runtime).check_rows(rows)
        kind = CHECKS_OF_ROWS.get(TRAINING_STAGES[self.stage].rows)
        sample = kind.with_references(learner, rows, device) if kind else None
        rows = rows if sample is None else sample
        footprint = cache(partial(machine.measure, learner, rows, computed_in))
        free = machine.free_bytes(self.home)
        checks: Checks = {
            "memory": lambda: machine.memory(footprint(), runtime, device, available_bytes(device)),
            "disk": lambda: machine.disk(footprint(), self.config, runtime, row_count, inputs.unmade_bytes, free),
            "no future leak": lambda: model.future(next_tokens, rows, computed_in),
            "records apart": lambda: model.documents(next_tokens, rows, computed_in),
            "loss at the start": lambda: model.first_loss(learner, rows, computed_in, trained=inputs.trained),
            "routers balanced": lambda: model.routers(learner, rows, computed_in),
            "accumulation": lambda: model.accumulation(learner, rows, device),
            "two ranks equal one": lambda: model.two_ranks(learner, rows),
            "save and resume": lambda: model.resume(learner, rows, computed_in),
            "one batch is learnt": lambda: model.learns(learner, rows, computed_in),
        }
        if kind is not None and sample is not None:
            checks |= kind.checks(learner, sample, computed_in)
        yield from _run_checks(checks)


def _run_checks(checks: Checks) -> Iterator[Check]:
    for name, examine in checks.items():
        if (check := run_check(name, examine)) is not None:
            yield check


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a chat, or of a prompt and its answers."""
    return [turn for turns in record.values() if isinstance(turns, list) for turn in turns if isinstance(turn, dict)]


def subject(stage: str, config: Section, inputs: Mapping[str, Path]) -> training.TrainableModel:
    """The stage's model before its first step; the same weights every time."""
    transformers.utils.logging.disable_progress_bar()
    prepare: Callable[..., training.TrainableModel] = import_module(STAGES[stage].module).prepare
    return prepare(config, inputs, Encoder(inputs["tokenizer"], fast=False))


SAMPLE_RECORDS, SAMPLE_BYTES, SAMPLE_FILES = 2000, 4_000_000, 8  # of a data set; the first of each of so many files

HELDOUT_SHARE = 10  # one record of so many is held out of a sample for which the user names no such files


@dataclass(frozen=True)
class StageInputs:
    """Directories that a stage reads, and where they come from.

    figure          a description for people
    trained         whether the base is a trained model, not one of random weights that stands in for it
    unmade_bytes    shards that a run would still have to make
    """

    paths: Mapping[str, Path]
    figure: str
    trained: bool
    unmade_bytes: float


def gather(stage: str, settings: Settings, artifacts: Mapping[str, Artifact], directory: Path) -> StageInputs:
    """The inputs of a stage that trains; those that do not exist yet are made under `directory`.

    Raises DataError where the data is not fit to learn from, UsageError where it is missing, or where the stage is not part
    of the pipeline.
    """
    if stage not in settings.trainings:
        raise no_stage(stage, settings.trainings, settings)
    sample_shards = directory / "sample"
    sampling = _Sample(settings, artifacts["source"].path if "source" in artifacts else None, directory)
    tokenizer_path = artifacts["tokenizer"].path if "tokenizer" in artifacts else sampling.tokenizer()
    shards_stage = SHARDS[TRAINING_STAGES[stage].dataset]
    stored_shards = artifacts.get(shards_stage.name)
    unmade = 0.0 if stored_shards else sampling.shards(shards_stage, tokenizer_path, sample_shards)
    figure = "the shards of the store" if stored_shards else f"the first {sampling.records} records"
    paths = {"tokenizer": tokenizer_path, "shards": stored_shards.path if stored_shards else sample_shards}
    start = settings.starts[stage]  # the stage that makes what this one starts from, unless no stage that trains does
    base_artifact = artifacts.get(start if start in TRAININGS else NEW_MODEL.name if start == NONE else EXISTING_MODEL.name)
    is_trained = settings.existing_model is not None or (base_artifact is not None and start != NONE)
    if base_artifact:
        paths["base"] = base_artifact.path
        figure += ", the base of the store"
    elif settings.existing_model:
        paths["base"] = _existing(settings, tokenizer_path, directory / "base")
        figure += f", the model {settings.existing_model}"
    elif TRAINING_STAGES[stage].role != "base":
        paths["base"] = _stand_in(settings, tokenizer_path, directory / "base")
        figure += ", a base of random weights until there is one"
    return StageInputs(paths, figure, is_trained, unmade)


@dataclass
class _Sample:
    """The first records of the user's files, as a source that the stages read like the quickstart's."""

    settings: Settings
    source: Path | None
    directory: Path
    records: int = 0

    def tokenizer(self) -> Path:
        """Train a tokenizer on the sample, or take the existing one."""
        roles = data_files(TOKENIZER, self.settings)
        texts, output, read = self.directory / "texts.jsonl", self.directory / "tokenizer", list[str]()
        if self.settings.reads("tokenizer"):
            self._copy(TOKENIZER, [file.location for file in roles.get(TRAIN, ())], texts, TRAIN)
            read = [str(texts)]
        reading = self.settings.reading.model_copy(update={"text_field": "text", "heldout_fraction": 0.0})
        existing = [Path(file.location) for file in roles.get(EXISTING, ())]
        tokenizer.train_directory(read, output, self.settings.tokenizer, reading, existing_files=existing)
        return output

    def shards(self, stage: Stage, tokenizer_path: Path, output: Path) -> float:
        """Make shards of the sample; returns about how many bytes those of all the data would take."""
        assert stage.dataset is not None, "shards are made of a data set"
        sample_source = self.directory / stage.name
        sample_source.mkdir()
        files = [sample_source / f"{stage.dataset}.jsonl", sample_source / f"{stage.dataset}_heldout.jsonl"]
        roles = data_files(stage, self.settings)
        for role, path in zip((TRAIN, HELDOUT), files, strict=True):
            locations_of = [file.location for file in roles.get(role, ())]
            if locations_of or not roles:
                self.records += self._copy(stage, locations_of, path, role)
        if not files[1].exists():
            _hold_out(*files)
        config = ShardsConfig(reading=self.settings.reading, shards=self.settings.shards)
        job = _job(
            self.settings,
            output,
            inputs={"source": sample_source, "tokenizer": tokenizer_path},
            arguments=dict(stage.arguments),
        )
        built = shards.build(config, job, Here())
        shards.check(built, config.reading, f"data.{stage.dataset}", stage.arguments["kind"])
        ratio = _size(output) / max(1, sum(path.stat().st_size for path in files))
        file_locations = (file.location for role in roles.values() for file in role)
        return ratio * sum(Path(path).stat().st_size for path in file_locations if not locations.is_remote(path))

    def _copy(self, stage: Stage, files: Sequence[str], output: Path, role: str) -> int:
        """Write the first good records of the files as JSONL; returns how many. Raises DataError where too many are bad."""
        reading, dataset = self.settings.reading, "pretrain" if stage is TOKENIZER else stage.dataset
        name = dataset if role == TRAIN else f"{dataset}_heldout"
        if not files:
            files = [str(self._python_docs() / f"{name}.jsonl")]
            reading = reading.model_copy(update={"text_field": "text"})
        kind = stage.arguments.get("kind", "documents")
        parse = sources.parser_of(kind, reading.text_field)
        tally, sampled_files, size = Tally(), files[:SAMPLE_FILES], 0
        with output.open("w", encoding="utf-8") as file:
            for number, path in enumerate(sampled_files, start=1):
                records = sources.read([path], parse, tally, reading.max_line_bytes, reading.text_field)
                for record in itertools.islice(records, max(1, SAMPLE_RECORDS // len(sampled_files))):
                    size += file.write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")
                    if size > SAMPLE_BYTES // len(sampled_files) * number:
                        break
        tally.check(f"data.{name}", reading.rejected_fraction, sources.expected_fields(kind, reading.text_field))
        return tally.kept

    def _python_docs(self) -> Path:
        if self.source is None:
            self.source = self.directory / "source"
            source.run(SourceConfig(python_docs=self.settings.python_docs), _job(self.settings, self.source))
        return self.source


def _job(
    settings: Settings, output: Path, inputs: Mapping[str, Path] | None = None, arguments: Mapping[str, str] | None = None
) -> StageContext:
    return StageContext(inputs or {}, {}, arguments or {}, output, settings.runtime, ProgressWriter(None), lambda: False)


def _hold_out(train: Path, heldout: Path) -> None:
    lines = train.read_bytes().splitlines(keepends=True)  # of bytes: text would be split at U+2028 and the like too
    train.write_bytes(b"".join(line for n, line in enumerate(lines) if n % HELDOUT_SHARE or len(lines) == 1))
    heldout.write_bytes(b"".join(lines[::HELDOUT_SHARE]))


def _existing(settings: Settings, tokenizer_path: Path, directory: Path) -> Path:
    """The model that the pipeline starts from, prepared as by its stage."""
    files = {
        role: [Path(file.location) for file in role_files]
        for role, role_files in data_files(EXISTING_MODEL, settings).items()
    }
    try:
        existing_model.prepare_base_model(files, tokenizer_path, directory / new_model.DIRECTORY)
    except ArtifactError as error:
        raise UsageError(f"{settings.trainings[0]}.start_from is {settings.existing_model}: {error}") from None
    return directory


def _stand_in(settings: Settings, tokenizer_path: Path, directory: Path) -> Path:
    """A base model of random weights, of the settings' sizes."""
    model = new_model.new(settings.model, Encoder(tokenizer_path, fast=False), settings.pretrain.seed)
    new_model.write(model, tokenizer_path, directory / new_model.DIRECTORY)
    return directory


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
