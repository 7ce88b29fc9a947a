"""Items of evaluations in training shards; the held-out part of the quickstart's data."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import shard_sets
from support.shard_sets import ALL, write_lines
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Evaluate, PythonDocs, Settings
from ttrain.data import contamination, python_docs
from ttrain.data.contamination import GramIndex, OverlapCheck
from ttrain.data.encoder import Encoder
from ttrain.data.plain_text import plain, words_of
from ttrain.engine.input_files import data_files, evaluation_files
from ttrain.errors import DataError, UsageError
from ttrain.tasks import SHARDS_PRETRAIN, TOKENIZER, evaluate
from ttrain.tasks.shards import recipe_of

Json = dict[str, Any]
POEM = "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。"
QUESTION = "Which river does the old wooden bridge of the village cross?"
ANSWER = "The upper Rhine"
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def test_words_are_the_same_whatever_case_width_and_punctuation() -> None:
    assert words_of("Ｔhe  CAFÉ,\n(1)") == words_of("the cafe\u0301 1") == ["the", "café", "1"]
    assert words_of("—… 🙂 \u200b\0") == [] and words_of("你好，Welt！") == ["你", "好", "welt"]
    assert plain("Straße, ÜBER ﬁ ½ ①") == "".join(words_of("Straße, ÜBER ﬁ ½ ①")).encode()


def grams(words: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}


@pytest.mark.parametrize("seed", range(3))
def test_matches_are_those_of_a_naive_search(seed: int) -> None:
    rng = random.Random(seed)
    latin = [f"{letter}{number}" for letter in "abc" for number in range(5)]
    source = [rng.choice(rng.choice((latin, "天地玄黃宇宙洪荒"))) for _ in range(600)]
    items = [source[start : start + rng.randrange(13, 40)] for start in (0, 40, 45, 300)]
    items += [source[100:110], rng.choices(latin, k=30), ["one", "two"]]
    index = GramIndex([" ".join(words) for words in items])
    matched = 0
    for _ in range(6):
        start = rng.randrange(400)
        document = source[start : start + 200]
        for _ in range(rng.randrange(6)):
            document[rng.randrange(len(document))] = "changed"
        expected = {}
        for item, words in enumerate(items):
            size = min(13, len(words))
            wanted, common = grams(words, size), grams(words, size) & grams(document, size)
            if common and len(words) >= contamination.FEWEST_WORDS:
                expected[item] = len(common) / len(wanted)
        matched += len(expected)
        assert index.find(rng.choice((", ", " ", "\n- ")).join(document).upper()) == expected
    assert matched


def test_what_many_items_begin_with_identifies_none_of_them() -> None:
    instruction = " ".join(f"instruction{number}" for number in range(14))
    ends = [" ".join(f"end{n}of{word}" for word in range(14)) for n in range(17)]
    index = GramIndex([f"{instruction} {end}" for end in ends])
    assert index.find(f"{instruction} z" * 9) == {}
    assert index.find(f"{instruction} {ends[7]}") == {7: 1.0}


CHOICES: Json = {"question": QUESTION, "choices": ["a", ANSWER]}
LAST_WORD = {"context": "The old bridge of the village crosses the", "target": " Rhine"}
BOTH = plain(QUESTION + ANSWER)
ITEM_ROWS: list[tuple[Json, bytes]] = [
    ({**CHOICES, "answer": 1}, BOTH),
    ({**CHOICES, "answer": "B"}, BOTH),
    ({"question": QUESTION, "answer": ANSWER}, BOTH),
    ({"messages": TURNS}, BOTH),
    ({**CHOICES, "answer": 7}, plain(QUESTION)),
    (LAST_WORD, plain(LAST_WORD["context"] + LAST_WORD["target"])),
    ({"text": POEM}, plain(POEM)),
]


def test_rows_of_every_kind_of_task_are_items(tmp_path: Path) -> None:
    bad, left_out = [{"title": "nothing"}, b"no JSON"], Counter[str]()
    path = write_lines(tmp_path / "items.jsonl", [*bad, *(row for row, _ in ITEM_ROWS)])
    items = contamination.read_items(str(path), left_out)
    assert left_out == {"items.jsonl": 2}
    expected = [contamination.digest_of_text(text) for _, text in ITEM_ROWS]
    assert [item.digest for item in items] == expected
    assert items[0].location == "items.jsonl:3"
    with pytest.raises(DataError, match="no item"):
        contamination.read_items(str(write_lines(tmp_path / "none.jsonl", bad)), Counter())


@pytest.mark.parametrize("remove", [True, False])
def test_documents_with_items_are_left_out(tmp_path: Path, encoder: Encoder, remove: bool) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=200)) for _ in range(30)]
    texts[7] = f"{texts[7]}\n{POEM.replace('，', ' ')}"
    texts[20] = f"{texts[20][:50]} {QUESTION.upper()} -- {ANSWER}!"
    rows: list[Json] = [
        {"question": POEM[:12], "choices": [POEM[12:], "白日依山盡"], "answer": 0},
        {**CHOICES, "answer": 1},
        {"question": "What does no document of the set say?", "choices": ["a", "b"], "answer": 1},
        {"question": "1+1", "choices": ["2", "3"], "answer": 0},  # too short
    ]
    items = write_lines(tmp_path / "items.jsonl", [*rows, {"question": ["bad"]}])
    documents = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    output, left_out = tmp_path / "out", Counter[str]()
    check = OverlapCheck(contamination.read_items(str(items), left_out), remove, left_out)
    recipe = recipe_of(ALL, encoder.directory, "documents")
    make = partial(shard_sets.build, output, [documents], recipe, block_bytes=2048)
    built = make(against=check)
    report = json.loads((output / contamination.REPORT).read_bytes())
    counts = {"items": 4, "too_short": 1, "overlapping": 2, "left_out": 1}
    assert report["tasks"] == {"items.jsonl": counts}
    assert (report["documents"], report["removed"]) == (2, remove)
    shares = {item["digest"]: item["share"] for item in report["items"]}
    assert shares and contamination.read_item_shares(output) == ({} if remove else shares)
    # What evaluations read must not depend on where files lie.
    assert str(tmp_path) not in json.dumps(report)
    tally, removed = built.tallies["train"], 2 if remove else 0
    assert built.parts["train"]["rows"] == 30 - removed
    assert tally.kept + tally.skipped.total() + tally.rejected.total() == tally.rows == 30
    assert tally.skipped[contamination.OVERLAPS] == removed
    kept = "".join(shard_sets.texts_in(output, encoder.directory))
    assert ("床前" in kept) is not remove
    assert make().parts["train"]["rows"] == 30
    assert not (output / contamination.REPORT).exists()


def test_files_of_evaluations_are_inputs_of_shards_and_count_by_their_bytes(tmp_path: Path) -> None:
    items, suite = write_lines(tmp_path / "i.jsonl", [{"text": POEM}]), tmp_path / "suite.yaml"
    suite.write_text("tasks: {a: {kind: choices, file: i.jsonl}, b: {kind: text, file: heldout}}")
    for named in (str(items), str(suite)):
        settings = Settings.model_validate({"shards": {"decontaminate": named}})
        against = data_files(SHARDS_PRETRAIN, settings)["against"]
        assert [file.location for file in against] == [str(items)]
        assert "against" not in data_files(TOKENIZER, settings)
    assert data_files(SHARDS_PRETRAIN, Settings()) == {}
    suite.write_text("tasks: {arc: {kind: harness, task: arc_easy}}")
    with pytest.raises(UsageError, match="arc"):
        evaluation_files((str(suite),))


KINDS = ("choices", "last_word", "text", "chats")
EVALUATED = dict(zip(KINDS, (ITEM_ROWS[number][0] for number in (0, 5, 6, 3)), strict=True))


def test_the_evaluation_marks_items_that_its_shards_hold(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=1)
    home.pretrain(settings, tmp_path / "base")
    lines, shares = ["tasks:"], {}
    for kind, row in EVALUATED.items():
        written = json.dumps(row, ensure_ascii=False)
        other = json.loads(written.replace("Rhine", "Elbe").replace("床", "x"))
        path = write_lines(tmp_path / f"{kind}.jsonl", [other, row])
        _, item = contamination.read_items(str(path), Counter())
        shares[item.digest] = 1.0
        lines.append(f"  {kind}: {{kind: {kind}, file: {path.name}}}")
    suite, documents = tmp_path / "suite.yaml", home.documents.path
    suite.write_text("\n".join(lines))
    contamination.write_item_shares(documents, shares)
    few: Any = {"row_length": 64, "stride": 32, "resamples": 100, "new_tokens": 0}
    config = Settings(evaluate=Evaluate(suites=str(suite), **few))
    (tmp_path / "output").mkdir()
    inputs = {"base": tmp_path / "base", "documents": documents}
    metrics = run_here(evaluate, config, tmp_path / "output", inputs, settings.runtime)["metrics"]
    name = "text/bits_per_byte/base/overlap"
    assert metrics[f"{name}:no"] != pytest.approx(metrics[f"{name}:yes"], rel=1e-6)
    for end in ("overlap:no", "overlap:yes"):
        assert {metric.split("/")[0] for metric in metrics if metric.endswith(end)} == {*EVALUATED}


def modules(*paths: Path) -> set[str]:
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    sources = [row["source"].partition(":")[2].partition(".")[0] for row in rows]
    return {re.sub("^_(py)?", "", source) for source in sources}


def test_no_module_is_on_both_sides_and_the_settings_say_how_much_is_taken(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in python_docs.build(tmp_path, PythonDocs())}
    heldout = modules(files["pretrain_heldout"], files["sft_heldout"])
    assert len(heldout) > 10
    assert not heldout & modules(files["pretrain"], files["sft"])
    counts = python_docs.build(tmp_path, PythonDocs(chat_rows=200, document_bytes=300_000))
    assert [counts[name]["rows"] for name in ("sft", "dpo", "lora")] == [200, 75, 800]
    assert 290_000 < counts["pretrain"]["bytes"] + counts["pretrain_heldout"]["bytes"] <= 300_000
