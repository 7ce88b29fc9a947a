"""`ttrain doctor`: labels and tokenizers that are sound pass, and the fault that is planted in one of them is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor.test_doctor import ok
from support.chat_templates import CHATML, take
from support.shard_sets import ALL, build, write_lines
from support.tiny_data import LINES, NumberedRows, make_shards, make_tokenizer, write_shards
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import settings_of_training

from ttrain.config import Optim, Settings
from ttrain.core.files import ProgressWriter
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.record_rows import SeparateDocumentRows
from ttrain.doctor import data as labels
from ttrain.doctor import model, run
from ttrain.doctor.data import Data
from ttrain.doctor.inputs import missing_data, paths_of
from ttrain.doctor.parts import with_references
from ttrain.engine.graph import Graph, Plan, Planned
from ttrain.errors import DataError
from ttrain.flows.full import full
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import NEW_MODEL
from ttrain.tasks.common.job import StageContext
from ttrain.tasks.common.rows import open_rows
from ttrain.tasks.new_model import run as make_new_model
from ttrain.tasks.shards import recipe_of


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Data:
    directory = tmp_path_factory.mktemp("documents")
    encoder = make_tokenizer(directory / "tokenizer")
    make_shards(directory, encoder, "documents", 30)
    config = settings_of_training(row_length=96, packing="stream")
    rows = open_rows(directory / "heldout", encoder, config, heldout=True)
    return Data("documents", encoder, rows, rows, [])


@pytest.fixture(scope="module")
def talks(documents: Data, tmp_path_factory: pytest.TempPathFactory) -> Data:
    directory, encoder = tmp_path_factory.mktemp("chats"), documents.encoder
    turns = [(f"Number {number}?", f"Here it comes: {number * 37}.") for number in range(12)]
    messages = [
        (Message("user", question), Message("assistant", answer)) for question, answer in turns
    ]
    encoded = [encode_chat(encoder, conversation) for conversation in messages]
    write_shards(
        directory, encoded, kind="chats", vocab_size=len(encoder), tokenizer=encoder.digest
    )
    rows = open_rows(directory, encoder, settings_of_training(row_length=96), heldout=True)
    return Data("chats", encoder, rows, rows, records_of(messages))


def records_of(conversations: Sequence[Messages]) -> list[dict[str, Any]]:
    return [{"messages": [message.to_json() for message in messages]} for messages in conversations]


class Spoilt(Rows):
    def __init__(self, rows: Rows, spoil: Callable[[Any, Any, Any], None]) -> None:
        self.rows, self.spoil, self.row_length, self.pad_id = (
            rows,
            spoil,
            rows.row_length,
            rows.pad_id,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        self.rows.fill(rows, batch, lines)
        for at in lines.tolist():
            self.spoil(batch.input_ids_BT[at], batch.labels_BT[at], batch.segments_BT[at])

    def counts(self) -> Counts:
        return self.rows.counts()


def unshifted(ids: Any, labels: Any, segments: Any) -> None:
    labels[:] = np.where(labels == IGNORE, IGNORE, ids)


def all_live(ids: Any, labels: Any, segments: Any) -> None:
    same = segments[1:] == segments[:-1]
    labels[:-1] = np.where(same & (segments[1:] >= 0), ids[1:], labels[:-1])


def questions_live(ids: Any, labels: Any, segments: Any) -> None:
    """The words between the second and the third special token of each record, and its end, as if a user were learnt."""
    for record in range(segments.max() + 1):
        there = np.flatnonzero(segments == record)
        marks = there[ids[there] < 9]
        labels[there] = IGNORE
        labels[marks[1] : marks[2]] = ids[marks[1] + 1 : marks[2] + 1]


def nothing_live(ids: Any, labels: Any, segments: Any) -> None:
    labels[:] = IGNORE


def into_the_next_document(ids: Any, labels: Any, segments: Any) -> None:
    labels[:-1] = ids[1:]


def without(number: int) -> Callable[[Any, Any, Any], None]:
    return lambda ids, labels, segments: np.copyto(labels, IGNORE, where=labels == number)


def test_labels_of_documents_are_all_tokens_but_the_first(documents: Data) -> None:
    """In one stream and packed; of a packed document the end is no input, and yet must be learnt."""
    shards, encoder = documents.rows.shards, documents.encoder  # type: ignore[attr-defined]
    of_stream = (without(encoder.encode(["e"])[0][0]), into_the_next_document)
    packed = SeparateDocumentRows(shards, 96, encoder.pad_id, packed=True)
    for rows, more in ((documents.rows, of_stream), (packed, ())):
        assert ok(labels.labels(replace(documents, rows=rows)))
        for spoil in (unshifted, nothing_live, without(encoder.eos_id), *more):
            assert not ok(labels.labels(replace(documents, rows=Spoilt(rows, spoil)))), spoil
    masked = replace(documents, masked=True)  # regions that are masked leave next tokens
    assert ok(labels.labels(replace(masked, rows=Spoilt(documents.rows, without(encoder.eos_id)))))
    assert not ok(labels.labels(replace(masked, rows=Spoilt(documents.rows, unshifted))))


def test_labels_of_chats_are_the_answers_with_their_ends(talks: Data) -> None:
    found = labels.labels(talks)
    assert ok(found) and found.measured.count("tokens in") == 2
    for spoil in (unshifted, nothing_live, without(talks.encoder.end_id), all_live):
        spoilt = Spoilt(talks.rows, spoil)
        assert not ok(labels.labels(replace(talks, rows=spoilt))), spoil
        assert not ok(labels.labels(replace(talks, heldout=spoilt))), spoil
    found = labels.labels(replace(talks, heldout=Spoilt(talks.rows, questions_live)))
    assert not ok(found) and "no assistant says" in found.measured
    assert not ok(labels.labels(replace(talks, records=talks.records[1:])))


class Lossy(Encoder):
    tried: set[str]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.tried = set("".join(texts))
        return super().encode(
            ["".join(letter for letter in text if letter < "\U00010000") for text in texts]
        )


class Forgeable(Encoder):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_markup(texts[0])] if len(texts) == 1 else super().encode(texts)


def test_a_tokenizer_that_loses_characters_or_reads_special_tokens_is_found(
    documents: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = Lossy(documents.encoder.directory)
    found = labels.round_trip(replace(documents, encoder=lossy))
    assert not ok(found) and "U+10000" in found.measured
    assert len(lossy.tried) == 0x110000 - 0x800, "all characters are tried"
    monkeypatch.setattr(labels, "END", 0x20000)
    data = replace(documents, records=[{"text": "Grüße 東京 🙂"}])
    assert ok(labels.round_trip(data))
    found = labels.round_trip(replace(data, encoder=Forgeable(documents.encoder.directory)))
    assert not ok(found) and "text that spells <|" in found.measured


def test_a_stage_reads_the_store_and_a_base_that_no_run_trained_has_random_weights(
    tmp_path: Path,
) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(rows_per_device=2)
    made = {
        "tokenizer": home.tokenizer,
        "shards-pretrain": home.documents,
        "shards-sft": home.chats,
    }
    graph = full(settings)
    states = {name: "cached" if name in made else "run" for name in graph}
    stages = [
        Planned(graph[name].stage, states[name], (), artifact=made.get(name)) for name in graph
    ]
    plan = Plan("full", settings, ArtifactStore(tmp_path / "home"), graph, stages)
    assert not missing_data("pretrain", plan)
    assert paths_of("pretrain", plan, tmp_path)[0] == {
        "tokenizer": home.tokenizer.path,
        "shards": home.documents.path,
    }
    paths, is_trained = paths_of("sft", plan, tmp_path)
    assert not is_trained and (paths["base"] / "model" / "model.safetensors").exists()
    missing = missing_data("lora", plan)
    assert [each.stage.name for each in missing] == ["source", "shards-lora"]


def test_pairs_too_long_for_a_row_are_named_before_a_run_trains_what_dpo_starts_from(
    tmp_path: Path, documents: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"prompt": f"Is {n} even?", "chosen": "yes", "rejected": "no"} for n in range(60)]
    file, tokenizer = write_lines(tmp_path / "dpo.jsonl", pairs), documents.encoder.directory
    sizes = stage_settings(rows_per_device=2).model_dump(mode="json")
    settings = Settings.model_validate({**sizes, "dpo": {"row_length": 64, "tokens_per_step": 64}})
    build(tmp_path / "shards", [file], recipe_of(ALL, tokenizer, "pairs"))
    paths = {"tokenizer": tokenizer, "shards": tmp_path / "shards"}
    new_model = StageContext(
        {"tokenizer": tokenizer},
        {},
        {},
        tmp_path / "new",
        settings.runtime,
        ProgressWriter(None),
        bool,
    )
    make_new_model(Settings.rebuilt(NEW_MODEL.part_of(settings)), new_model)
    monkeypatch.setattr(run, "paths_of", lambda *_: ({**paths, "base": tmp_path / "new"}, False))
    plan = Plan("full", settings, ArtifactStore(tmp_path), Graph(), [])
    learner, data = run.prepare("dpo", plan, tmp_path)
    assert data.kind == "pairs" and data.rows.counts()["pairs"] > 40
    found = model.learns(with_references(learner).changed(optim=Optim(lr=1e-2)))
    assert ok(found) and "loss 0.6931 to 0." in found.measured, "ln 2 of two equal models"
    long = settings.model_copy(update={"dpo": settings.dpo.model_copy(update={"row_length": 8})})
    with pytest.raises(DataError, match=r"dpo\.row_length 8"):
        next(run.examine("dpo", replace(plan, settings=long)))


def test_an_answer_is_trained_on_where_the_prompt_for_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with a space behind it, which no conversation has, and targets that begin later, are found."""
    talks = [
        (Message("user", text), Message("assistant", "Blue."), Message("user", "?"))
        for text in LINES
    ]
    sound = take(tmp_path / "sound", CHATML)
    data = Data("chats", sound, NumberedRows(1), NumberedRows(1), records_of(talks))
    found = labels.template(data)
    assert ok(found) and found is not None and "3 conversations" in found.measured
    spaced = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n ' }}{% endif %}")
    assert not ok(labels.template(replace(data, encoder=take(tmp_path / "spaced", spaced))))
    ids, live = encode_chat(sound, talks[0][:2])
    later = live.index(True) + 1
    monkeypatch.setattr(
        labels.chat, "encode_chat", lambda *_: (ids, [False] * later + live[later:])
    )
    assert not ok(labels.template(data))
