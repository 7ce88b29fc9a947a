"""Items of evaluations in training shards: found however they are written, nothing that is not there; told apart in an
evaluation, left out on request, and known to later nights."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import shard_sets
from support.shard_sets import ALL, write_lines
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Evaluate, Settings
from ttrain.config.evaluate import Suite
from ttrain.data import contamination
from ttrain.data.contamination import GramIndex
from ttrain.data.encoder import Encoder
from ttrain.data.plain_text import plain, words_of
from ttrain.engine.input_files import data_files, evaluation_files
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import run
from ttrain.evaluate.items import Items, SuiteFiles
from ttrain.tasks import SHARDS_PRETRAIN, TOKENIZER, evaluate
from ttrain.tasks.shards import recipe_of

POEM = "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。"
QUESTION, ANSWER = "Which river does the old wooden bridge of the village cross?", "The upper Rhine"
CHAT = {
    "messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
}


def test_words_are_the_same_whatever_case_width_and_punctuation() -> None:
    assert words_of("Ｔhe  CAFÉ,\n(1)") == words_of("the cafe\u0301 1") == ["the", "café", "1"]
    assert words_of("—… 🙂 \u200b\0") == [] and words_of("你好，Welt！") == ["你", "好", "welt"]
    for text in ("Ｔhe  CAFÉ,\n(1)", POEM, "한국어 텍스트", "Straße, ÜBER ﬁ ½ ①"):
        assert plain(text) == "".join(words_of(text)).encode()


def grams(words: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_is_what_a_naive_search_finds(seed: int) -> None:
    """In words of letters and of single Chinese characters, with any punctuation between the words."""
    rng = random.Random(seed)
    kinds = [
        [f"{letter}{number}" for letter in "abc" for number in range(5)],
        list("天地玄黃宇宙洪荒"),
    ]
    source = [rng.choice(rng.choice(kinds)) for _ in range(600)]
    items = [source[start : start + rng.randrange(13, 40)] for start in (0, 40, 45, 300)]
    items += [source[100:110], [rng.choice(kinds[0]) for _ in range(30)], ["one", "two"]]
    index = GramIndex([" ".join(words) for words in items])
    found_any = False
    for _ in range(6):
        start = rng.randrange(400)
        document = source[start : start + 200]
        for _ in range(rng.randrange(6)):
            document[rng.randrange(len(document))] = "changed"
        expected = {}
        for item, words in enumerate(items):
            wanted, held = grams(words, min(13, len(words))), grams(document, min(13, len(words)))
            if wanted & held and len(words) >= contamination.FEWEST_WORDS:
                expected[item] = len(wanted & held) / len(wanted)
        found_any |= bool(expected)
        assert index.find(rng.choice((", ", " ", "\n- ")).join(document).upper()) == expected
    assert found_any, "the documents have parts of the items"


def test_what_many_items_begin_with_identifies_none_of_them() -> None:
    instruction = " ".join(f"instruction{number}" for number in range(14))
    ends = [
        f"{number} " + " ".join(f"end{number}of{word}" for word in range(14))
        for number in range(50)
    ]
    index = GramIndex([f"{instruction} {end}" for end in ends])
    assert index.find(f"{instruction} z" * 9) == {}
    assert index.find(f"{instruction} {ends[7]}") == {7: 1.0}


def test_rows_of_every_kind_of_task_are_items(tmp_path: Path) -> None:
    choices = {"question": QUESTION, "choices": ["a", ANSWER]}
    whole = plain(QUESTION + ANSWER)
    rows = {
        whole: [
            {**choices, "answer": 1},
            {**choices, "answer": "B"},
            {"question": QUESTION, "answer": ANSWER},
            CHAT,
            {"question": QUESTION, "answer": " ", "final": ANSWER},
        ],
        plain(QUESTION): [
            {**choices, "answer": 7},
            {"question": QUESTION, "answer": [{"role": "assistant"}]},
        ],
        b"theoldbridgecrossestherhine": [
            {"context": "The old bridge crosses the", "target": " Rhine"}
        ],
        plain(POEM): [{"text": POEM}],
    }
    bad = {"title": "nothing"}, b"no JSON"
    for text, given in rows.items():
        left_out = Counter[str]()
        path = write_lines(tmp_path / "items.jsonl", [*bad, *given])
        items = contamination.read_items(str(path), left_out)
        assert left_out == {"items.jsonl": 2}
        assert [item.digest for item in items] == [contamination.digest_of_text(text)] * len(given)
        assert items[0].location == "items.jsonl:3"
    with pytest.raises(DataError, match="no item"):
        contamination.read_items(str(write_lines(tmp_path / "none.jsonl", bad)), Counter())


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
        {
            "question": "What is it that none of the documents of the training set says?",
            "choices": ["a", "b"],
            "answer": 1,
        },
        {"question": "1+1", "choices": ["2", "3"], "answer": 0},
        {"question": ["bad"]},
    ]
    documents = [{"text": text} for text in texts]
    return write_lines(tmp_path / "documents.jsonl", documents), write_lines(
        tmp_path / "items.jsonl", items
    )


def build(
    output: Path,
    encoder: Encoder,
    rows: Path,
    items: Path | None,
    remove: bool = True,
    kind: str = "documents",
) -> Any:
    against = None
    if items:
        left_out = Counter[str]()
        found = contamination.read_items(str(items), left_out)
        against = contamination.OverlapCheck(found, remove, left_out)
    return shard_sets.build(
        output, [rows], recipe_of(ALL, encoder.directory, kind), block_bytes=2048, against=against
    )


@pytest.mark.parametrize("remove", [True, False])
def test_documents_that_hold_an_item_are_left_out(
    tmp_path: Path, encoder: Encoder, corpus: tuple[Path, Path], remove: bool
) -> None:
    documents, items = corpus
    plain = build(tmp_path / "plain", encoder, documents, None)
    built = build(tmp_path / "out", encoder, documents, items, remove)
    assert plain.contamination is None and not (tmp_path / "plain" / contamination.REPORT).exists()
    told = json.loads((tmp_path / "out" / contamination.REPORT).read_bytes())
    assert told["tasks"] == {
        "items.jsonl": {"items": 4, "too_short": 1, "overlapping": 2, "left_out": 1}
    }
    assert (told["documents"], told["removed"]) == (2, remove)
    held = {item["digest"]: item["share"] for item in told["items"]}
    assert contamination.read_item_shares(tmp_path / "out") == ({} if remove else held) and held
    assert str(tmp_path) not in json.dumps(
        told
    )  # what evaluations read must not depend on where files lie
    assert {item["where"].rpartition(":")[2]: item["documents"] for item in told["items"]} == {
        "1": 1,
        "2": 1,
    }
    assert all(
        place["file"] == documents.name for item in told["items"] for place in item["places"]
    )
    rows = built.parts["train"]["rows"] + built.parts["heldout"]["rows"]
    assert rows == 30 - 2 * remove
    tally = built.tallies["train"]
    assert (
        tally.kept + sum(tally.skipped.values()) + sum(tally.rejected.values()) == tally.rows == 30
    )
    assert tally.skipped.get(contamination.OVERLAPS, 0) == 2 * remove
    assert (
        any("床前" in text for text in shard_sets.texts_in(tmp_path / "out", encoder.directory))
        is not remove
    )
    again = build(
        tmp_path / "out", encoder, documents, None
    )  # the whole shards stay aside, so they come back
    assert again.parts["train"]["shards"] == plain.parts["train"]["shards"]
    assert not (tmp_path / "out" / contamination.REPORT).exists()
    assert contamination.read_item_shares(tmp_path / "out") == {}


def test_chats_are_found_whole_and_not_by_the_system_turn_that_others_have_too(
    tmp_path: Path, encoder: Encoder
) -> None:
    """Of turns that are all shorter than a part, and after a system turn that is longer than all of them."""
    system = {
        "role": "system",
        "content": "You are an assistant who answers questions about rivers in a friendly way.",
    }

    def chat(*words: str) -> dict[str, Any]:
        turns = [
            {"role": ("user", "assistant")[number % 2], "content": word}
            for number, word in enumerate(words)
        ]
        return {"messages": [system, *turns]}

    short = ("Which river is it?", "The Rhine", "And the city?", "Cologne, I say so")
    chats = [chat("Say it in Latin!", f"Non possum dicere {number}") for number in range(5)]
    documents = write_lines(tmp_path / "chats.jsonl", [*chats, chat(*short), chat("Who?", *short)])
    items = write_lines(
        tmp_path / "items.jsonl",
        [chat(*short), chat("Where does this one stand?", "It stands nowhere.")],
    )
    built = build(tmp_path / "out", encoder, documents, items, kind="chats")
    told = json.loads((tmp_path / "out" / contamination.REPORT).read_bytes())
    assert [(item["where"], item["share"]) for item in told["items"]] == [("items.jsonl:1", 1.0)]
    assert [place["line"] for place in told["items"][0]["places"]] == [6, 7]
    assert built.parts["train"]["rows"] == 5


def test_files_of_evaluations_are_inputs_of_shards_and_count_by_their_bytes(tmp_path: Path) -> None:
    items = write_lines(tmp_path / "items.jsonl", [{"text": POEM}])
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "tasks:\n  poems: {kind: choices, file: items.jsonl}\n  prose: {kind: text, file: heldout}\n"
    )
    for named in (str(items), str(suite)):
        settings = Settings.model_validate({"shards": {"decontaminate": named}})
        assert [file.location for file in data_files(SHARDS_PRETRAIN, settings)["against"]] == [
            str(items)
        ]
        assert "against" not in data_files(TOKENIZER, settings)
    assert data_files(SHARDS_PRETRAIN, Settings()) == {}
    suite.write_text("tasks:\n  arc: {kind: harness, task: arc_easy}\n")
    with pytest.raises(UsageError, match="arc are those of lm-evaluation-harness"):
        evaluation_files((str(suite),))


# --- items of an evaluation


def items_of(task: str, kind: str, rows: Sequence[Any], directory: Path, **more: Any) -> Items[Any]:
    file = write_lines(directory / f"{task}.jsonl", rows)
    spec = Suite.model_validate(
        {"tasks": {task: {"kind": kind, "file": file.name, "by": ["lang"], **more}}}
    ).tasks[task]
    return run.functions_of(spec)[0](task, spec, SuiteFiles(directory))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("choices", {"question": QUESTION, "choices": ["Danube", ANSWER], "answer": 1}),
        (
            "last_word",
            {"context": "The old wooden bridge of the village crosses the", "target": " Rhine"},
        ),
        ("text", {"text": POEM}),
        ("chats", CHAT),
    ],
)
def test_items_that_training_documents_hold_are_told_apart(
    tmp_path: Path, kind: str, row: Any
) -> None:
    fillers = [
        json.loads(json.dumps(row).replace("Rhine", f"Elbe {n}").replace("\\u5e8a", f"{n}"))
        for n in range(2)
    ]
    rows = [{**fillers[0], "lang": "en"}, {**row, "lang": "en"}, {**fillers[1], "lang": "zh"}]
    items = items_of("task", kind, rows, tmp_path)
    [found] = contamination.read_items(str(write_lines(tmp_path / "row.jsonl", [row])), Counter())
    apart = run.mark_overlaps(items, {found.digest})
    assert apart.groups == {**items.groups, "overlap=yes": (1,), "overlap=no": (0, 2)}
    assert apart.digests == items.digests
    assert run.mark_overlaps(items, {"other"}) is items
    if kind in ("choices", "last_word"):  # worked examples are no part of what is looked for
        shown = items_of("task", kind, rows, tmp_path, shots=1)
        assert run.mark_overlaps(shown, {found.digest}).groups["overlap=yes"] == (1,)


def test_the_evaluation_tells_items_apart_that_its_shards_hold(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=1)
    home.pretrain(settings, tmp_path / "base")
    write_lines(tmp_path / "items.jsonl", [{"text": POEM}, {"text": QUESTION}, {"text": ANSWER}])
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  texts: {kind: text, file: items.jsonl}\n")
    contamination.write_item_shares(
        home.documents.path, {contamination.digest_of_text(plain(QUESTION)): 1.0}
    )
    told: Any = {"suites": str(suite), "row_length": 32, "stride": 16, "resamples": 100}
    config = Settings(evaluate=Evaluate(**told, new_tokens=0))
    (tmp_path / "output").mkdir()
    given = {"base": tmp_path / "base", "documents": home.documents.path}
    found = run_here(evaluate, config, tmp_path / "output", given, settings.runtime)
    assert found["counts"]["texts/items"] == 3
    metrics = {
        group: found["metrics"][f"texts/bits_per_byte/base/overlap:{group}"]
        for group in ("yes", "no")
    }
    assert metrics["no"] != pytest.approx(metrics["yes"], rel=1e-6)
