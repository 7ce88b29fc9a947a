"""`ttrain doctor`: labels and tokenizers that are sound pass, and the fault that is planted in one of them is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor.test_doctor import ok
from support.chat_templates import CHATML, take
from support.shard_sets import write_lines
from support.tiny_data import LINES, chats, make_shards, make_tokenizer, write_shards
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import settings_of_training

from ttrain.config import Settings
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.record_rows import SeparateDocumentRows
from ttrain.doctor import data as labels
from ttrain.doctor import run, template
from ttrain.doctor.run import gather
from ttrain.errors import DataError
from ttrain.stages.rows import open_rows
from ttrain.stages.shards import heldout_records


@dataclass(frozen=True)
class Data:
    encoder: Encoder
    documents: Rows
    chats: Rows
    answers: Sequence[str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    directory = tmp_path_factory.mktemp("data")
    encoder = make_tokenizer(directory / "tokenizer")
    make_shards(directory / "documents", encoder, "documents", 30)
    talks = [
        (Message("user", f"Number {number}?"), Message("assistant", f"Here it comes: {number * 37}."))
        for number in range(12)
    ]
    encoded = [encode_chat(encoder, messages) for messages in talks]
    common = {"vocab_size": len(encoder), "tokenizer": encoder.digest}
    write_shards(directory / "chats" / "heldout", encoded, kind="chats", **common)
    config = settings_of_training(row_length=96)
    documents, rows = (
        open_rows(directory / kind / "heldout", encoder, config.model_copy(update=more), heldout=True)
        for kind, more in (("documents", {"packing": "stream"}), ("chats", {}))
    )
    return Data(encoder, documents, rows, [messages[1].content for messages in talks])


class Spoilt(Rows):
    """Rows whose labels are changed by `spoil(ids, labels, segments)`, in place."""

    def __init__(self, rows: Rows, spoil: Callable[[Any, Any, Any], None]) -> None:
        self.rows, self.spoil, self.row_length, self.pad_id = rows, spoil, rows.row_length, rows.pad_id

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


def test_labels_of_documents_are_all_tokens_but_the_first(data: Data) -> None:
    """In one stream and packed; of a packed document the end is no input, and yet must be learnt."""
    shards, encoder = data.documents.shards, data.encoder  # type: ignore[attr-defined]
    of_stream = (without(encoder.encode(["e"])[0][0]), into_the_next_document)
    for rows, more in ((data.documents, of_stream), (SeparateDocumentRows(shards, 96, encoder.pad_id, packed=True), ())):
        assert ok(labels.document_labels(rows, encoder))
        for spoil in (unshifted, nothing_live, without(encoder.eos_id), *more):
            assert not ok(labels.document_labels(Spoilt(rows, spoil), encoder)), spoil
    masked = Spoilt(data.documents, without(encoder.eos_id))  # regions that are masked leave next tokens
    assert ok(labels.masked_labels(masked, encoder))
    assert not ok(labels.masked_labels(Spoilt(data.documents, unshifted), encoder))


def test_labels_of_chats_are_the_answers_with_their_ends(data: Data) -> None:
    rows = data.chats
    found = labels.chat_labels(rows, data.encoder, rows, data.answers)
    assert ok(found)
    assert str(found.figure).count("12 answers with their ends") == 2
    for spoil in (unshifted, nothing_live, without(data.encoder.end_id), all_live):
        assert not ok(labels.chat_labels(Spoilt(rows, spoil), data.encoder, rows, data.answers)), spoil
        assert not ok(labels.chat_labels(rows, data.encoder, Spoilt(rows, spoil), data.answers)), spoil
    spoilt = labels.chat_labels(rows, data.encoder, Spoilt(rows, questions_live), data.answers)
    assert not ok(spoilt) and "no assistant says" in str(spoilt.figure)
    assert not ok(labels.chat_labels(rows, data.encoder, rows, [text for text in data.answers if text != data.answers[0]]))


def test_an_answer_longer_than_a_row_may_be_learnt_in_parts(data: Data, tmp_path: Path) -> None:
    make_shards(tmp_path, data.encoder, "chats", 3)
    rows = open_rows(tmp_path / "heldout", data.encoder, settings_of_training(row_length=16), heldout=True)
    answers = [messages[1].content for messages in chats(12, seed=1)]
    assert rows.counts()["cut_records"]
    assert ok(labels.chat_labels(rows, data.encoder, rows, answers))
    assert not ok(labels.chat_labels(rows, data.encoder, rows, answers[:1]))


# --- the tokenizer ----------------------------------------------------------------------------------------------------


class Lossy(Encoder):
    """Drops characters of four bytes."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode(["".join(letter for letter in text if letter < "\U00010000") for text in texts])


class Forgeable(Encoder):
    """Reads special tokens out of a text."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_markup(texts[0])] if len(texts) == 1 else super().encode(texts)


class Lower(Encoder):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode([text.lower() for text in texts])


@pytest.fixture
def first_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all characters, those that are most in use."""
    monkeypatch.setattr(labels, "END", 0x20000)


def test_a_tokenizer_that_loses_characters_or_reads_special_tokens_is_found(data: Data, first_planes: None) -> None:
    texts = ["Grüße 東京 🙂", "def f(x):\n\treturn x"]
    assert ok(labels.round_trip(data.encoder, texts))
    for faulty, told in ((Lossy, "U+1"), (Forgeable, "<|")):
        found = labels.round_trip(faulty(data.encoder.directory), texts)
        assert not ok(found) and told in str(found.figure)
    found = labels.round_trip(Lower(data.encoder.directory), ["ABC"], str.lower)
    assert ok(found) and "normalizer" in str(found.figure), "a normalizer that changes text is told and allowed"


def test_all_characters_are_tried() -> None:
    tried: set[str] = set()

    class Watched:
        """A text is its own ids."""

        tokens: Mapping[str, str] = {}

        def encode(self, texts: Sequence[str]) -> Sequence[str]:
            tried.update(*texts)
            return texts

        def decode(self, ids: str) -> str:
            return ids

        def special_ids(self) -> frozenset[int]:
            return frozenset()

    assert ok(labels.round_trip(Watched(), []))  # type: ignore[arg-type]
    assert len(tried) == 0x110000 - 0x800


# --- what a stage reads ---


def test_what_the_store_holds_is_taken_from_there(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    made = {"tokenizer": home.tokenizer, "shards-pretrain": home.documents}
    found = gather("pretrain", stage_settings(rows_per_device=2), made, tmp_path / "made")
    assert found.paths == {"tokenizer": home.tokenizer.path, "shards": home.documents.path}
    assert found.unmade_bytes == 0
    assert not (tmp_path / "made").exists()


def with_data(directory: Path, texts: Sequence[Any], **more: Any) -> Settings:
    """Settings of a home with these documents, with chats and, where `dpo` is set, pairs; a folder `made` beside them."""
    talks = [{"messages": [vars(message) for message in messages]} for messages in chats(60)]
    pairs = [{"prompt": f"Is {n} even?", "chosen": "yes", "rejected": "no"} for n in range(60)]
    (directory / "made").mkdir(parents=True)
    rows = {"pretrain": texts, "sft": talks, **({"dpo": pairs} if "dpo" in more else {})}
    data = {name: str(write_lines(directory / f"{name}.jsonl", lines)) for name, lines in rows.items()}
    sizes = stage_settings(rows_per_device=2).model_dump(mode="json")
    return Settings.model_validate({**sizes, "data": data, "tokenizer": {"vocab_size": 300}, **more})


NUMBERS = [{"text": f"{number} is a number, and {number * 7} is another"} for number in range(300)]


def test_before_any_run_a_sample_stands_in_for_shards_and_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAMPLE_RECORDS", 200)
    settings = with_data(tmp_path / "home", NUMBERS)
    found = gather("sft", settings, {}, tmp_path / "home" / "made")
    assert {*found.paths} == {"tokenizer", "shards", "base"}
    assert not found.trained and found.unmade_bytes > 0
    assert (found.paths["base"] / "model" / "model.safetensors").exists()
    assert len(open_rows(found.paths["shards"] / "train", Encoder(found.paths["tokenizer"]), settings.sft)) > 0
    assert len((tmp_path / "home" / "made" / "texts.jsonl").read_text().splitlines()) == 200
    settings = with_data(tmp_path / "bad", [{"text": 3}] * 9)
    with pytest.raises(DataError, match=r"data\.pretrain"):
        gather("pretrain", settings, {}, tmp_path / "bad" / "made")


def test_a_sample_of_texts_with_other_line_separators_is_whole(tmp_path: Path) -> None:
    texts = [{"text": f"{number} is\u2028a number\x85and {number * 7}\u2029another"} for number in range(60)]
    found = gather("pretrain", with_data(tmp_path, texts), {}, tmp_path / "made")
    records = [record["text"] for record in heldout_records(found.paths["shards"])]
    assert records == [text["text"] for text in texts[:: run.HELDOUT_SHARE]]


def test_pairs_that_no_run_has_sharded_are_read_as_pairs(tmp_path: Path) -> None:
    settings = with_data(tmp_path / "home", NUMBERS, dpo={"row_length": 64, "tokens_per_step": 64})
    paths = gather("dpo", settings, {}, tmp_path / "home" / "made").paths
    assert open_rows(paths["shards"] / "train", Encoder(paths["tokenizer"]), settings.dpo).counts()["pairs"] > 50


def test_pairs_too_long_for_a_row_are_named_before_a_run_trains_what_dpo_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_run_checks", lambda checks: iter(()))  # those of the machine
    settings = with_data(tmp_path / "home", NUMBERS, dpo={"row_length": 8, "tokens_per_step": 64})
    *_, last = run.Doctor("dpo", settings, {}, tmp_path / "home").checks()
    assert not last.ok and "are longer than dpo.row_length 8" in str(last.figure)


def test_the_chat_template_is_compared_with_transformers_and_with_its_prompt(tmp_path: Path) -> None:
    """A prompt with a space behind it, which no conversation has, and ids of texts that were encoded one by one."""
    talks = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Blue."}]} for text in LINES]
    spelt = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "Blue."}]}
    sound = take(tmp_path / "sound", CHATML)
    conversations = template.conversations_of([spelt, *talks], sound)
    assert [messages[0].content for messages in conversations] == list(LINES[:3])
    assert ok(template.check(sound, conversations))
    spaced = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n ' }}{% endif %}")
    assert spaced != CHATML
    found = template.check(take(tmp_path / "spaced", spaced), conversations)
    assert not ok(found) and "the generation prompt goes on" in str(found.figure)


def test_what_does_not_begin_behind_the_prompt_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = take(tmp_path, CHATML)
    talk = (Message("user", "Sky?"), Message("assistant", "Blue."))
    ids, live = encode_chat(encoder, talk)
    later = live.index(True) + 1
    monkeypatch.setattr(template.chat, "encode_chat", lambda *_: (ids, [False] * later + live[later:]))
    found = template.check(encoder, [talk])
    assert not ok(found) and "right behind the generation prompt" in str(found.figure)
    monkeypatch.setattr(template.chat, "encode_chat", lambda *_: (ids[:3] + ids[4:], live[:3] + live[4:]))
    found = template.check(encoder, [talk])
    assert not ok(found) and "where transformers has" in str(found.figure)
