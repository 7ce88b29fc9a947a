"""`ttrain doctor`: a stage's own parts, put through every check before the long run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import transformers

from ttrain.config import Section, Settings, Training
from ttrain.core.machine import usable_cores
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.inspect import Pieces, Shown, show_row
from ttrain.data.packing import Rows
from ttrain.doctor import labels, learning, machine, model, tokens
from ttrain.doctor.check import Check, guarded
from ttrain.doctor.inputs import Inputs, gather
from ttrain.doctor.parts import Learner
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.pipeline.plan import section_of
from ttrain.stages import STAGES, lora, pretrain, sft, training
from ttrain.stages.rows import open_rows
from ttrain.stages.shards import heldout_records
from ttrain.store.layout import Artifact
from ttrain.train import precision
from ttrain.train.precision import Precision

MODULES = {"pretrain": pretrain, "sft": sft, "lora": lora}
TEXTS = 200  # of the data, through the tokenizer and back
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # in a checkout


class Doctor:
    """The examination of one stage. `shown` is a row with its targets marked, once `checks` has come to it."""

    def __init__(self, stage: str, settings: Settings, artifacts: Mapping[str, Artifact], home: Path) -> None:
        """`artifacts`: of the stages that are finished under these settings, by stage."""
        self.stage, self.settings, self.artifacts, self.home = stage, settings, artifacts, home
        self.config: Training = getattr(settings, stage)
        self.shown: tuple[Shown, frozenset[int]] | None = None

    def checks(self) -> Iterator[Check]:
        """Each check as it is done. Raises UsageError where the settings ask for what cannot be had."""
        transformers.utils.logging.disable_progress_bar()  # of a model that is taken in
        runtime = self.settings.runtime
        device = training.start(runtime).device
        computed_in = precision.resolve(self.config.precision, device)
        yield guarded("versions", _versions)
        yield guarded("precision", lambda: machine.chosen_precision(self.config.precision, computed_in))
        yield guarded("threads", lambda: machine.threads(runtime, usable_cores()))
        with tempfile.TemporaryDirectory(prefix="ttrain-doctor-") as directory:
            try:
                inputs = gather(self.stage, self.settings, self.artifacts, Path(directory))
                encoder = Encoder(inputs.paths["tokenizer"])
                rows = open_rows(inputs.paths["shards"] / "train", encoder, self.config)
                if not len(rows):
                    raise DataError("the training data is empty: it gave no row to learn from")
            except UsageError:
                raise
            except TTrainError as error:
                yield Check("data", False, str(error), "mend the data; `ttrain data validate` names all bad rows")
                return
            counts = rows.counts()
            figure = f"{inputs.figure}: {counts['rows']} rows of {rows.row_length} tokens, {counts['fill']:.1%} filled"
            yield Check("data", True, figure)
            yield from self._of_data(inputs, encoder, rows)
            yield from self._of_training(inputs, rows, computed_in)

    def _of_data(self, inputs: Inputs, encoder: Encoder, rows: Rows) -> Iterator[Check]:
        said = heldout_records(inputs.paths["shards"])
        texts = [
            text for record in said[:TEXTS]
            for text in ([record["text"]] if "text" in record else [turn["content"] for turn in record["messages"]])
        ]  # fmt: skip
        normalizer = open_tokenizer(encoder.directory / "tokenizer.json").normalizer
        normalize = normalizer.normalize_str if normalizer else str
        yield guarded(tokens.NAME, lambda: tokens.round_trip(encoder, texts, normalize))
        heldout = open_rows(inputs.paths["shards"] / "heldout", encoder, self.config, heldout=True)
        answers = [turn["content"] for record in said for turn in record.get("messages", ()) if turn["role"] == "assistant"]
        self.shown = show_row(rows, 0, Pieces(encoder)), encoder.special_ids()
        if self.config.mask_intervals:
            yield guarded(labels.NAME, lambda: labels.masked_labels(rows, encoder))
        elif self.stage == "pretrain":
            yield guarded(labels.NAME, lambda: labels.document_labels(rows, encoder))
        else:
            yield guarded(labels.NAME, lambda: labels.chat_labels(rows, encoder, heldout, answers))

    def _of_training(self, inputs: Inputs, rows: Rows, computed_in: Precision) -> Iterator[Check]:
        config: Section = section_of(STAGES[self.stage], self.settings)
        runtime, device = self.settings.runtime, computed_in.device
        learner = Learner(self.config, runtime, partial(subject, self.stage, config, dict(inputs.paths)), training.task_of)
        footprint = cache(partial(machine.measure, learner, rows, computed_in))
        count, free = int(rows.counts()["rows"]), machine.free_bytes(self.home)
        checks: list[tuple[str, Callable[[], Check | None]]] = [
            ("memory", lambda: machine.memory(footprint(), runtime, device, machine.available_bytes(device))),
            ("disk", lambda: machine.disk(footprint(), self.config, runtime, count, inputs.unmade_bytes, free)),
            ("no future leak", lambda: model.future(learner, rows, computed_in)),
            ("records apart", lambda: model.documents(learner, rows, computed_in)),
            ("loss at the start", lambda: model.first_loss(learner, rows, computed_in, trained=inputs.trained)),
            ("routers balanced", lambda: model.routers(learner, rows, computed_in)),
            ("accumulation", lambda: learning.accumulation(learner, rows, device)),
            ("two ranks equal one", lambda: learning.two_ranks(learner, rows)),
            ("save and resume", lambda: learning.resume(learner, rows, computed_in)),
            ("one batch is learnt", lambda: learning.learns(learner, rows, computed_in)),
        ]
        for name, examine in checks:
            found = guarded(name, examine)
            if found is not None:
                yield found


def subject(stage: str, config: Section, inputs: Mapping[str, Path]) -> training.Trained:
    """The stage's model before its first step; the same weights every time."""
    transformers.utils.logging.disable_progress_bar()
    prepared: training.Trained = MODULES[stage].prepare(config, inputs, Encoder(inputs["tokenizer"], fast=False))
    return prepared


def _versions() -> Check:
    return machine.versions(metadata.requires("ttrain") or [], machine.pins_of(CONSTRAINTS))
