"""Items of evaluations in training shards: found however they are written, nothing that is not there; told apart in an
evaluation, left out on request, and known to later nights."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import shard_sets
from support.data_commands import in_process
from support.shard_sets import ALL, write_lines
from support.tiny_data import write_shards
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Evaluate, EvaluateConfig, Reading, Settings
from ttrain.config.evaluate import Suite
from ttrain.data import contamination, overlap
from ttrain.data.common_parts import Comparison, Places
from ttrain.data.contamination import OverlapRule
from ttrain.data.encoder import Encoder
from ttrain.data.overlap import TextIndex, TextMatch
from ttrain.data.shards import Column, ShardSet, read_shard
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import run
from ttrain.evaluate.items import IN_TRAINING, Items, SuiteFiles
from ttrain.pipeline.input_files import data_files, evaluation_files
from ttrain.stages import SHARDS_PRETRAIN, TOKENIZER, evaluate
from ttrain.stages.shards import heldout_records, recipe_of

POEM = "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。"
QUESTION, ANSWER = "Which river does the old wooden bridge of the village cross?", "The upper Rhine"
AWKWARD = (
    "Straße, ÜBER e\u0301 ﬁ ½ ①", "한국어 텍스트", "\ud7ff\ue000 <|bos|> <|im_start|>user", "🙂👩\u200d👧 a\0b\t\n", "",
    "日" * 50, "नमस्ते दुनिया", "a" * 300, "\uffff\U0010ffff x", "ＡＢＣ１２３", POEM,
)  # fmt: skip


def naive(text: bytes, wanted: bytes, ngram: int) -> tuple[int, int]:
    """(bytes of `wanted` in parts of at least `ngram` bytes that the text has, the longest such part), one by one."""
    needed, covered, longest = min(ngram, len(wanted)), set[int](), 0
    for start in range(len(wanted)):
        length = 0
        while start + length < len(wanted) and wanted[start : start + length + 1] in text:
            length += 1
        if length >= max(1, needed):
            covered.update(range(start, start + length))
            longest = max(longest, length)
    return len(covered), longest


def stored(directory: Path, encoder: Encoder, texts: Sequence[Sequence[int]]) -> Column:
    """The ids as they come back from a shard."""
    rows = [([encoder.bos_id, *ids, encoder.eos_id], ()) for ids in texts]
    index = write_shards(directory, rows, kind="documents", vocab_size=len(encoder))
    return read_shard(directory / index["shards"][0]["file"])


@pytest.mark.parametrize("chunk_tokens", [1, 10**6])
def test_ids_of_shards_become_the_plain_text_of_their_records(tmp_path: Path, encoder: Encoder, chunk_tokens: int) -> None:
    column, token_bytes, found = stored(tmp_path, encoder, encoder.encode(AWKWARD)), overlap.TokenBytes(encoder), []
    for first, last in overlap.chunks(column, chunk_tokens):
        data, begins = overlap.records(column, token_bytes, first, last)
        assert len(begins) == last - first
        found += [bytes(part.tobytes()) for part in np.split(data, begins[1:])]
    assert found == [overlap.RECORD_BYTES + overlap.plain(text) for text in AWKWARD]
    assert overlap.plain("Ｔhe  CAFÉ,\n(1)") == overlap.plain("the cafe\u03011") == b"thecafe1"
    assert overlap.plain("—… 🙂 \u200b\0") == b"" and overlap.plain("你好，世界！") == "你好世界".encode()


def test_ids_that_are_no_text_do_not_harm_the_records_beside_them(tmp_path: Path, encoder: Encoder) -> None:
    (poem,) = encoder.encode([POEM])
    column = stored(tmp_path, encoder, [poem, poem[:1], poem])  # the second ends within a character
    data, begins = overlap.records(column, overlap.TokenBytes(encoder), 0, 3)
    assert len(begins) == 3
    found = TextIndex([overlap.plain(POEM)], 32).find(data, begins)
    assert [(one.record, one.bytes) for one in found] == [(0, 60), (2, 60)]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_is_what_a_naive_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    source = bytes(rng.choice(b"abcdefgh") for _ in range(3000))
    wanted = [source[start : start + rng.randrange(20, 200)] for start in (0, 40, 40, 700, 2000)]
    wanted += [bytes(rng.choice(b"abcdefgh") for _ in range(120)), b"hgfedcba" * 20]
    records = [b"hgfedcba" * 30]
    for _ in range(6):
        start = rng.randrange(2500)
        record = bytearray(source[start : start + 500])
        for _ in range(rng.randrange(12)):
            record[rng.randrange(len(record))] = ord("z")
        records.append(bytes(record))
    data = b"".join(overlap.RECORD_BYTES + record for record in records)
    begins = np.cumsum([0, *(len(overlap.RECORD_BYTES + record) for record in records[:-1])])
    ngram = rng.choice([24, 32, 50])
    expected = [
        TextMatch(record, text, *naive(records[record], one, ngram))
        for record in range(len(records))
        for text, one in enumerate(wanted)
        if len(one) >= overlap.SEED_BYTES and naive(records[record], one, ngram)[0]
    ]
    assert expected, "the records have parts of the texts"
    for most_hits in (overlap.MOST_HITS, 8):
        monkeypatch.setattr(overlap, "MOST_HITS", most_hits)
        assert TextIndex(wanted, ngram).find(np.frombuffer(data, np.uint8), begins) == expected


def test_equal_numbers_of_different_bytes_are_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, other = b"the quick brown fox jumps over it", b"some other thirty-two bytes of text"
    data = np.frombuffer(other + wanted[:30] + other, np.uint8)
    begins = np.zeros(1, np.int64)
    true = TextIndex([wanted], 28).find(data, begins)
    monkeypatch.setattr(overlap, "seeds", lambda data: np.zeros(max(0, len(data) - overlap.SEED_BYTES + 1), np.uint64))
    assert TextIndex([wanted], 28).find(data, begins) == true == [TextMatch(0, 0, 30, 30)]


def test_rows_of_every_kind_of_task_are_items_and_others_are_counted(tmp_path: Path) -> None:
    rows = [
        {"question": QUESTION, "choices": ["a", ANSWER], "answer": 1},
        {"question": QUESTION, "choices": ["a", ANSWER], "answer": "B"},
        {"question": QUESTION, "choices": ["a", ANSWER], "answer": 7},
        {"question": QUESTION, "answer": ANSWER},
        {"context": "The old bridge crosses the", "target": " Rhine"},
        {"text": POEM},
        {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]},
        {"title": "nothing"},
        b"no JSON",
    ]
    found, tally = contamination.read_items(str(write_lines(tmp_path / "items.jsonl", rows)), "mixed")
    whole = overlap.plain(QUESTION + ANSWER)
    expected = [whole, whole, overlap.plain(QUESTION), whole, b"theoldbridgecrossestherhine", overlap.plain(POEM)]
    assert [item.text for item in found] == [*expected, whole]
    assert sum(tally.rejected.values()) == 2
    assert found[1].location.endswith("items.jsonl:2")
    with pytest.raises(DataError, match="no item"):
        contamination.read_items(str(write_lines(tmp_path / "none.jsonl", [{"title": 1}])), "none")


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, Path]:
    """(documents, two of which hold an item of the evaluation; the evaluation)."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = ["".join(rng.choice(letters) for _ in range(200)) for _ in range(30)]
    texts[7] = f"{texts[7]}\n{POEM.replace('，', ' ')}"
    texts[20] = f"{texts[20][:50]} {QUESTION.upper()} -- {ANSWER}!"
    texts[25] = f"{texts[25]} {QUESTION[:20]}"  # too little
    items = [
        {"question": POEM[:12], "choices": [POEM[12:], "白日依山盡"], "answer": 0},
        {"question": QUESTION, "choices": ["Danube", ANSWER], "answer": 1},
        {"question": "What is it that none of the documents of the training set says?", "choices": ["a", "b"], "answer": 1},
        {"question": "1+1", "choices": ["2", "3"], "answer": 0},
        {"question": ["bad"]},
    ]
    documents = [{"text": text} for text in texts]
    return write_lines(tmp_path / "documents.jsonl", documents), write_lines(tmp_path / "items.jsonl", items)


def build(
    output: Path, encoder: Encoder, corpus: Path, against: contamination.OverlapCheck | None, kind: str = "documents"
) -> Any:
    return shard_sets.build(output, [corpus], recipe_of(ALL, encoder.directory, kind), block_bytes=2048, against=against)


@pytest.mark.parametrize("remove", [True, False])
def test_documents_that_hold_an_item_are_left_out(
    tmp_path: Path, encoder: Encoder, corpus: tuple[Path, Path], remove: bool
) -> None:
    documents, items = corpus
    against = contamination.overlap_check([str(items)], OverlapRule(), remove=remove)
    plain = build(tmp_path / "plain", encoder, documents, None)
    built = build(tmp_path / "out", encoder, documents, against)
    assert plain.contamination is None and not (tmp_path / "plain" / contamination.REPORT).exists()
    told = json.loads((tmp_path / "out" / contamination.REPORT).read_bytes())
    task = {"items": 4, "too_short": 1, "touched": 2, "overlapping": 2, "share": 0.5, "left_out": 1}
    assert told["tasks"] == {"items.jsonl": task}
    assert (told["documents"], told["removed"]) == (2, remove)
    held = {item["digest"]: item["share"] for item in told["items"]}
    assert contamination.read_item_shares(tmp_path / "out") == ({} if remove else held) and held
    assert str(tmp_path) not in json.dumps(told)  # what evaluations read must not depend on where files lie
    assert {item["where"].rpartition(":")[2]: item["documents"] for item in told["items"]} == {"1": 1, "2": 1}
    assert all(place["file"] == documents.name for item in told["items"] for place in item["places"])
    rows = built.parts["train"]["rows"] + built.parts["heldout"]["rows"]
    assert rows == 30 - 2 * remove
    tally = built.tallies["train"]
    assert tally.kept + sum(tally.skipped.values()) + sum(tally.rejected.values()) == tally.rows == 30
    assert tally.skipped.get(contamination.OVERLAPS, 0) == 2 * remove
    assert any("床前" in text for text in shard_sets.texts_in(tmp_path / "out", encoder.directory)) is not remove
    again = build(tmp_path / "out", encoder, documents, None)  # the whole shards stay aside, so they come back
    assert again.parts["train"]["shards"] == plain.parts["train"]["shards"]
    assert not (tmp_path / "out" / contamination.REPORT).exists()
    assert contamination.read_item_shares(tmp_path / "out") == {}


def test_the_rule_says_from_which_length_and_share_on_a_document_holds_an_item(tmp_path: Path, encoder: Encoder) -> None:
    """A document has the first 40 of the 100 letters of an item."""
    item = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=100))
    texts = [f"0123 {item[:40]} 4567", *(f"Another document, number {n}." for n in range(5))]
    documents = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    items = write_lines(tmp_path / "items.jsonl", [{"text": item}])
    for number, (rule, touched, overlapping) in enumerate((
        (OverlapRule(share=0.4), 1, 1), (OverlapRule(share=0.41), 1, 0), (OverlapRule(ngram_bytes=50, share=0.4), 0, 0),
    )):  # fmt: skip
        against = contamination.overlap_check([str(items)], rule, remove=False)
        task = build(tmp_path / f"{number}", encoder, documents, against).contamination["tasks"]["items.jsonl"]
        assert (task["items"], task["touched"], task["overlapping"]) == (1, touched, overlapping)


def test_chats_are_found_whole_and_not_by_the_system_turn_that_others_have_too(tmp_path: Path, encoder: Encoder) -> None:
    """Of turns that are all shorter than a part, and after a system turn that is longer than all of them."""
    system = {"role": "system", "content": "You are an assistant who answers questions about rivers in a friendly way."}

    def chat(*words: str) -> dict[str, Any]:
        turns = [{"role": ("user", "assistant")[number % 2], "content": word} for number, word in enumerate(words)]
        return {"messages": [system, *turns]}

    short = ("Which river is it?", "The Rhine", "And the city?", "Cologne, I say")
    chats = [chat("Say it in Latin!", f"Non possum dicere {number}") for number in range(5)]
    documents = write_lines(tmp_path / "chats.jsonl", [*chats, chat(*short), chat("Who?", *short)])
    items = write_lines(tmp_path / "items.jsonl", [chat(*short), chat("Where does this one stand?", "It stands nowhere.")])
    against = contamination.overlap_check([str(items)], OverlapRule(), remove=True)
    built = build(tmp_path / "out", encoder, documents, against, "chats")
    told = json.loads((tmp_path / "out" / contamination.REPORT).read_bytes())
    assert [(item["where"], item["share"]) for item in told["items"]] == [("items.jsonl:1", 1.0)]
    assert [place["record"] for place in told["items"][0]["places"]] == [5, 6]
    assert built.parts["train"]["rows"] == 5


def test_what_templates_write_between_turns_is_passed_over(tmp_path: Path, encoder: Encoder) -> None:
    role, end = encoder.special("<|user|>"), encoder.special("<|end|>")
    first, second = encoder.encode(["user\nWhich river?", "assistant\nThe assistant\nsays: none"])
    column = stored(tmp_path, encoder, [[role, *first, end, role, *second, end]])
    data, _ = overlap.records(column, overlap.TokenBytes(encoder), 0, 1)
    assert data.tobytes() == overlap.RECORD_BYTES + b"whichrivertheassistantsaysnone"


def test_what_says_little_of_a_text_and_what_many_begin_with_finds_none_of_them() -> None:
    rng = random.Random(4)
    instruction = b"translatethefollowingsentenceintothelanguageofourtimeplease"
    ends = [bytes(rng.choice(b"abcdefgh") for _ in range(40)) for _ in range(300)]
    texts = TextIndex([instruction + end for end in ends], 32)
    assert texts.searchable.all()
    repeated = TextIndex([b"a" * 100_000, b"0" * 24, b"short", b"this one is long enough to be found"], 32)
    assert repeated.searchable.tolist() == [False, False, False, True], "of one letter, or too short"
    alone = (instruction + b"z" * 9) * 50
    found = texts.find(np.frombuffer(alone + instruction + ends[7], np.uint8), np.array([0, len(alone)]))
    assert {one.record for one in found} == {1}
    assert max(found, key=lambda one: one.bytes) == TextMatch(1, 7, len(instruction) + 40, len(instruction) + 40)
    alike = TextIndex([instruction + bytes([65 + number]) for number in range(50)] * 2, 32)
    assert alike.searchable.all(), "the last letter tells them apart"
    found = alike.find(np.frombuffer(instruction + b"A", np.uint8), np.array([0]))
    assert {one.text for one in found if one.bytes > len(instruction)} == {0, 50}, "a text that comes twice, each time"


@pytest.mark.parametrize("middle", [b"", b"?"])
def test_what_repeats_a_period_on_both_sides_is_compared_once_a_period(
    middle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    period = b"thelazydogsleepswhilethequickfoxjumps"
    wanted, data = period * 2_000, period * 3_000 + middle + period * 3_000
    compared = []
    equal_before = Comparison.equal_before

    def counting(self: Comparison, data_places: Places, text_places: Places, most: int | Places) -> Places:
        compared.append(len(data_places))
        return equal_before(self, data_places, text_places, most)

    monkeypatch.setattr(Comparison, "equal_before", counting)
    assert TextIndex([wanted], 32).find(np.frombuffer(data, np.uint8), np.zeros(1, np.int64)) == [
        TextMatch(0, 0, len(wanted), len(wanted))
    ]
    assert sum(compared) < len(data), "216 seeds of the text are equal to those at each byte of the data"


def test_a_text_that_repeats_itself_is_compared_with_a_record_at_a_few_of_its_places() -> None:
    """However often it does; a record with half of it is found, whichever half."""
    period = b"thefoxjumps"
    text = period * 1_800
    searched, records = TextIndex([text], 32), [period * 450, text[: len(text) // 2 + 1], text[len(text) // 2 - 4 :]]
    data = np.frombuffer(b"".join(record + b"\1" for record in records), np.uint8)
    compared = sum(len(places) for places, _ in searched._hits(Comparison(data, searched._data, searched._words)))
    beginnings = len(records) * 16 * 9  # 16 places, at each of the nine periods before the second seed of a chain
    assert compared <= len(data) // len(period) + beginnings, "it was compared with each record at 202 places"
    begins = np.cumsum([0, *(len(record) + 1 for record in records[:-1])])
    found = {match.record: match.bytes for match in searched.find(data, begins)}
    assert found[1] >= len(text) // 2 and found[2] >= len(text) // 2


def test_items_of_one_pattern_are_found_although_none_of_their_seeds_is_rare() -> None:
    names, numbers = [f"Namenname{one}" for one in "abcdefghijklmnopqr"], range(100, 118)
    pattern = "howmanyappleshas{}whenmarygiveshimanotherbasketwith{}applesinsideitintheafternoon"
    texts = [pattern.format(name, number).encode() for name in names for number in numbers]
    searched = TextIndex(texts, 32)
    assert searched.searchable.all()
    for number, text in list(enumerate(texts))[::7]:
        found = searched.find(np.frombuffer(text, np.uint8), np.array([0]))
        assert number in {one.text for one in found if one.bytes == len(text)}


def test_what_was_left_out_is_not_found(
    tmp_path: Path, encoder: Encoder, corpus: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    documents, items = corpus
    arguments = ["--items", items, "--tokenizer", encoder.directory, "--workers", "1"]
    for name, remove, count in (("kept", False, 2), ("clean", True, 0)):
        against = contamination.overlap_check([str(items)], OverlapRule(), remove=True) if remove else None
        build(tmp_path / name, encoder, documents, against)
        done = in_process(capsys)("data", "contamination", tmp_path / name, *arguments, "--json")
        found = done.json
        assert done.code == 0 and found["tasks"]["items.jsonl"]["overlapping"] == count
        shards = ShardSet(tmp_path / name / "train")
        for item in found["items"]:
            text = encoder.decode(shards.row(item["places"][0]["record"])[0].tolist())
            assert " ".join(text.split()).startswith(item["places"][0]["begins"][:30])
    shown = in_process(capsys)("data", "contamination", tmp_path / "kept", *arguments)
    assert "2 training documents contain an item" in shown.out


def test_held_out_rows_are_items_by_default(tmp_path: Path, encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=100)) for seed in range(40)]
    documents = write_lines(
        tmp_path / "documents.jsonl", [{"text": text} for text in (*texts, *(text.upper() for text in texts))]
    )
    reading = Reading(heldout_fraction=0.3)
    shard_sets.build(tmp_path / "out", [documents], recipe_of(reading, encoder.directory, "documents"), reading)
    held_out = [record["text"].lower() for record in heldout_records(tmp_path / "out")]
    alone = sum(held_out.count(text) == 1 for text in held_out)  # the other spelling is learnt from
    assert 0 < alone < len(held_out)
    arguments = ["--tokenizer", encoder.directory, "--workers", "1", "--json"]
    task = in_process(capsys)("data", "contamination", tmp_path / "out", *arguments).json["tasks"]["heldout"]
    assert (task["items"], task["overlapping"]) == (len(held_out), alone)


def test_files_of_evaluations_are_inputs_of_shards_and_count_by_their_bytes(tmp_path: Path) -> None:
    items = write_lines(tmp_path / "items.jsonl", [{"text": POEM}])
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  poems: {kind: choices, file: items.jsonl}\n  prose: {kind: text, file: heldout}\n")
    for named in (str(items), str(suite)):
        settings = Settings.model_validate({"shards": {"decontaminate": named}})
        assert [file.location for file in data_files(SHARDS_PRETRAIN, settings)["against"]] == [str(items)]
        assert "against" not in data_files(TOKENIZER, settings)
    assert data_files(SHARDS_PRETRAIN, Settings()) == {}
    suite.write_text("tasks:\n  arc: {kind: harness, task: arc_easy}\n")
    with pytest.raises(UsageError, match="arc are those of lm-evaluation-harness"):
        evaluation_files((str(suite),))


# --- items of an evaluation


def items_of(task: str, kind: str, rows: Sequence[Any], directory: Path, **more: Any) -> Items[Any]:
    file = write_lines(directory / f"{task}.jsonl", rows)
    spec = Suite.model_validate({"tasks": {task: {"kind": kind, "file": file.name, "by": ["lang"], **more}}}).tasks[task]
    return run.functions_of(spec)[0](task, spec, SuiteFiles(directory))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("choices", {"question": QUESTION, "choices": ["Danube", ANSWER], "answer": 1}),
        ("last_word", {"context": "The old wooden bridge of the village crosses the", "target": " Rhine"}),
        ("generation", {"question": QUESTION, "answer": ANSWER}),
        ("text", {"text": POEM}),
        ("chats", {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}),
    ],
)
def test_items_that_training_documents_hold_are_told_apart_or_left_out(tmp_path: Path, kind: str, row: Any) -> None:
    fillers = [json.loads(json.dumps(row).replace("Rhine", f"Elbe {n}").replace("\\u5e8a", f"{n}")) for n in range(2)]
    rows = [{**fillers[0], "lang": "en"}, {**row, "lang": "en"}, {**fillers[1], "lang": "zh"}]
    items = items_of("task", kind, rows, tmp_path)
    found, _ = contamination.read_items(str(write_lines(tmp_path / "row.jsonl", [row])), "row")
    apart = run.mark_overlaps(items, {found[0].digest}, leave_out=False)
    assert apart.groups == {**items.groups, "overlap=yes": (1,), "overlap=no": (0, 2)}
    assert apart.digests == items.digests
    without = run.mark_overlaps(items, {found[0].digest}, leave_out=True)
    assert without.digests == (items.digests[0], items.digests[2])
    assert without.reasons == {IN_TRAINING: 1}
    assert without.groups == ({"lang=en": (0,), "lang=zh": (1,)} if items.groups else {})
    assert run.mark_overlaps(items, {"other"}, leave_out=True) is items
    if kind in ("choices", "last_word", "generation"):  # worked examples are no part of what is looked for
        shown = items_of("task", kind, rows, tmp_path, shots=1)
        assert run.mark_overlaps(shown, {found[0].digest}, leave_out=False).groups["overlap=yes"] == (1,)


@pytest.mark.parametrize("row", [{"answer": 1234}, {"final": "1234"}, {"answer": " ", "final": 1234}])
def test_an_answer_is_looked_for_in_whatever_form_a_task_reads_it(tmp_path: Path, row: Any) -> None:
    items = items_of("sums", "generation", [{"question": QUESTION, **row}], tmp_path)
    (found,), _ = contamination.read_items(str(tmp_path / "sums.jsonl"), "sums")
    assert found.text == overlap.plain(QUESTION) + b"1234"
    assert run.mark_overlaps(items, {found.digest}, leave_out=False).groups == {"overlap=yes": (0,)}


@pytest.mark.parametrize(("answer", "text"), [(" B ", "two"), (0, "one"), ("two", "two"), ("Z", ""), ("ß", "ß"), (None, "")])
def test_a_right_choice_is_looked_for_by_its_number_letter_or_text(answer: Any, text: str) -> None:
    assert contamination.of_row({"question": "Which?", "choices": ["one", "two"], "answer": answer}) == f"Which?\n{text}"


def test_the_evaluation_tells_items_apart_that_its_shards_hold(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=1)
    home.pretrain(settings, tmp_path / "base")
    write_lines(tmp_path / "items.jsonl", [{"text": POEM}, {"text": QUESTION}, {"text": ANSWER}])
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  texts: {kind: text, file: items.jsonl}\n")
    contamination.write_item_shares(home.documents.path, {contamination.item_of("", "", QUESTION).digest: 1.0})
    found = {}
    for overlapping in ("report", "leave_out"):
        told: Any = {"suites": str(suite), "overlapping": overlapping, "row_length": 32, "stride": 16, "resamples": 100}
        config = EvaluateConfig(evaluate=Evaluate(**told, new_tokens=0))
        (tmp_path / overlapping).mkdir()
        given = {"base": tmp_path / "base", "documents": home.documents.path}
        found[overlapping] = run_here(evaluate, config, tmp_path / overlapping, given, settings.runtime)
    apart, without = found["report"], found["leave_out"]
    assert (apart["counts"]["texts/items"], without["counts"]["texts/items"]) == (3, 2)
    assert without["counts"]["texts/left_out"] == 1
    clean = apart["metrics"]["texts/bits_per_byte/base/overlap:no"]
    assert clean == pytest.approx(without["metrics"]["texts/bits_per_byte/base"], rel=1e-6)
    assert clean != pytest.approx(apart["metrics"]["texts/bits_per_byte/base"], rel=1e-6)


def test_a_task_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    items = items_of("task", "text", [{"text": POEM}], tmp_path)
    known = {contamination.item_of("", "", POEM).digest}
    with pytest.raises(DataError, match=r"evaluate\.overlapping=report"):
        run.mark_overlaps(items, known, leave_out=True)
