"""`ttrain doctor`: sound labels and tokenizers pass, and the fault that is planted fails."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor.test_doctor import check, fails
from support.chat_templates import CHATML, take
from support.shard_sets import ALL, build, write_lines
from support.tiny_data import LINES, NumberedRows, make_shards, make_tokenizer, write_shards
from support.tiny_stages import run_here, stage_settings
from support.tiny_trainers import settings_of_training

from ttrain.config import Optim, Settings
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.record_rows import SeparateDocumentRows
from ttrain.doctor import data as labels
from ttrain.doctor import model, run
from ttrain.doctor.data import Data
from ttrain.doctor.parts import with_references
from ttrain.engine.graph import Graph, Plan
from ttrain.errors import DataError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import NEW_MODEL, new_model
from ttrain.tasks.common.rows import open_rows
from ttrain.tasks.shards import recipe_of

Spoil = Callable[[Any, Any, Any], None]


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
    directory = tmp_path_factory.mktemp("chats")
    encoder = documents.encoder
    talks = [
        (Message("user", f"Number {n}?"), Message("assistant", f"Here it comes: {n * 37}."))
        for n in range(12)
    ]
    encoded = [encode_chat(encoder, talk) for talk in talks]
    identity = {"vocab_size": len(encoder), "tokenizer": encoder.digest}
    write_shards(directory, encoded, kind="chats", **identity)  # type: ignore[arg-type]
    rows = open_rows(directory, encoder, settings_of_training(row_length=96), heldout=True)
    return Data("chats", encoder, rows, rows, records_of(talks))


def records_of(conversations: Sequence[Messages]) -> list[dict[str, Any]]:
    return [{"messages": [message.to_json() for message in messages]} for messages in conversations]


class Spoilt(Rows):
    """Rows whose labels are spoilt by `spoil(ids, labels, segments)`."""

    def __init__(self, rows: Rows, spoil: Spoil) -> None:
        self.rows, self.spoil = rows, spoil
        self.row_length, self.pad_id = rows.row_length, rows.pad_id

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
    """Train on the words between the second and the third special token of each record."""
    for record in range(segments.max() + 1):
        places = np.flatnonzero(segments == record)
        marks = places[ids[places] < 9]
        labels[places] = IGNORE
        labels[marks[1] : marks[2]] = ids[marks[1] + 1 : marks[2] + 1]


def nothing_live(ids: Any, labels: Any, segments: Any) -> None:
    labels[:] = IGNORE


def into_the_next_document(ids: Any, labels: Any, segments: Any) -> None:
    labels[:-1] = ids[1:]


def without(number: int) -> Spoil:
    return lambda ids, labels, segments: np.copyto(labels, IGNORE, where=labels == number)


def test_labels_of_documents_are_all_tokens_but_the_first(documents: Data) -> None:
    """In one stream and packed, where the end of a document is no input, but a target."""
    encoder = documents.encoder
    (e,) = encoder.encode(["e"])[0]
    shards = documents.rows.shards  # type: ignore[attr-defined]
    packed = SeparateDocumentRows(shards, 96, encoder.pad_id, packed=True)
    faults = [unshifted, nothing_live, without(encoder.eos_id)]
    stream_faults = [*faults, without(e), into_the_next_document]
    for rows, spoils in ((documents.rows, stream_faults), (packed, faults)):
        check(labels.labels(replace(documents, rows=rows)))
        for spoil in spoils:
            fails(labels.labels(replace(documents, rows=Spoilt(rows, spoil))))
    masked = replace(documents, masked=True)  # regions that are masked leave next tokens
    check(labels.labels(replace(masked, rows=Spoilt(documents.rows, without(encoder.eos_id)))))
    fails(labels.labels(replace(masked, rows=Spoilt(documents.rows, unshifted))))


def test_labels_of_chats_are_the_answers_with_their_ends(talks: Data) -> None:
    check(labels.labels(talks), "tokens in", "held out: ")
    for spoil in (unshifted, nothing_live, without(talks.encoder.end_id), all_live):
        spoilt = Spoilt(talks.rows, spoil)
        fails(labels.labels(replace(talks, rows=spoilt)))
        fails(labels.labels(replace(talks, heldout=spoilt)))
    questions = Spoilt(talks.rows, questions_live)
    fails(labels.labels(replace(talks, heldout=questions)), "no assistant says")
    fails(labels.labels(replace(talks, records=talks.records[1:])))


class Lossy(Encoder):
    characters: set[str]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.characters = set("".join(texts))
        basic = ["".join(letter for letter in text if ord(letter) < 0x10000) for text in texts]
        return super().encode(basic)


class Forgeable(Encoder):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_markup(texts[0])] if len(texts) == 1 else super().encode(texts)


def test_a_tokenizer_that_loses_characters_or_reads_special_tokens_fails(
    documents: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = Lossy(documents.encoder.directory)
    fails(labels.round_trip(replace(documents, encoder=lossy)), "U+10000")
    assert len(lossy.characters) == 0x110000 - 0x800, "all characters are tried"
    monkeypatch.setattr(labels, "END", 0x20000)
    data = replace(documents, records=[{"text": "Grüße 東京 🙂"}])
    check(labels.round_trip(data))
    forgeable = Forgeable(documents.encoder.directory)
    fails(labels.round_trip(replace(data, encoder=forgeable)), "text that spells <|")


def test_pairs_too_long_for_a_row_are_named_before_a_run_trains_the_base_of_dpo(
    tmp_path: Path, documents: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [{"prompt": f"Is {n} even?", "chosen": "yes", "rejected": "no"} for n in range(60)]
    file = write_lines(tmp_path / "dpo.jsonl", pairs)
    tokenizer = documents.encoder.directory
    sizes = stage_settings(rows_per_device=2).model_dump(mode="json")
    settings = Settings.model_validate({**sizes, "dpo": {"row_length": 64, "tokens_per_step": 64}})
    build(tmp_path / "shards", [file], recipe_of(ALL, tokenizer, "pairs"))
    part = Settings.rebuilt(NEW_MODEL.part_of(settings))
    run_here(new_model, part, tmp_path / "new", {"tokenizer": tokenizer}, settings.runtime)
    paths = {"tokenizer": tokenizer, "shards": tmp_path / "shards", "base": tmp_path / "new"}
    monkeypatch.setattr(run, "paths_of", lambda *_: (paths, False))
    plan = Plan("full", settings, ArtifactStore(tmp_path), Graph(), [])
    learner, data = run.prepare("dpo", plan, tmp_path)
    assert data.kind == "pairs"
    assert data.rows.counts()["pairs"] > 40
    scored = with_references(learner).changed(optim=Optim(lr=1e-2))
    check(model.learns(scored), "loss 0.6931 to 0.")  # ln 2 of two equal models
    short = settings.model_copy(update={"dpo": settings.dpo.model_copy(update={"row_length": 8})})
    with pytest.raises(DataError, match=r"dpo\.row_length 8"):
        next(run.examine("dpo", replace(plan, settings=short)))


def test_an_answer_is_trained_on_where_the_prompt_for_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (Message("assistant", "Blue."), Message("user", "?"))
    talks = [(Message("user", text), *answer) for text in LINES]
    sound = take(tmp_path / "sound", CHATML)
    data = Data("chats", sound, NumberedRows(1), NumberedRows(1), records_of(talks))
    check(labels.template(data), "3 conversations")
    # A prompt with a space behind it, which no conversation has.
    spaced = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n ' }}{% endif %}")
    fails(labels.template(replace(data, encoder=take(tmp_path / "spaced", spaced))))
    ids, live = encode_chat(sound, talks[0][:2])
    later = live.index(True) + 1
    from_later = (ids, [False] * later + live[later:])
    monkeypatch.setattr(labels.chat, "encode_chat", lambda *_: from_later)
    fails(labels.template(data))
