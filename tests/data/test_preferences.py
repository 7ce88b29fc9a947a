"""Preference pairs and rated answers, from rows of every known format to rows of a batch."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.hostile_rows import outcome
from support.shard_sets import build, write_lines

from ttrain.config import Reading
from ttrain.data import preferences
from ttrain.data.blocks import BlockRecipe
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE
from ttrain.data.pair_rows import PairRows
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED, Preference, preference_of
from ttrain.data.shards import Column, ShardSet, write_index, write_shard

USER, EARLIER = {"role": "user", "content": "Q"}, {"role": "user", "content": "P"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "Be brief."}
TEXTS = {"chosen": "good", "rejected": "bad"}
ANSWERS = [(Message("assistant", text),) for text in TEXTS.values()]
PAIR = Preference((Message("user", "Q"),), *ANSWERS)
CONVERSATIONS = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
SHAREGPT = {side: {"from": "gpt", "value": text} for side, text in TEXTS.items()}
SAME_PAIR: list[dict[str, Any]] = [
    {"prompt": "Q", **TEXTS},
    {"prompt": [USER], "chosen": [GOOD], "rejected": BAD},
    CONVERSATIONS,
    {"conversations": [{"from": "human", "value": "Q"}], **SHAREGPT},
    {"instruction": "Q", "input": "", **TEXTS},
    {"prompt": " Q\n", **CONVERSATIONS},
    {"messages": [USER, BAD], "chosen": GOOD, "rejected": "bad"},
]


def with_prompt(chosen: Any = "a", rejected: Any = "b", **more: Any) -> dict[str, Any]:
    return {"prompt": "Q", "chosen": chosen, "rejected": rejected, **more}


HOSTILE = (  # (row, how its reason begins)
    (with_prompt("a", "a"), "'chosen' and 'rejected' are equal"),
    (with_prompt("a", " \u200b"), "'rejected' is empty"),
    (with_prompt(None), "'chosen' is null"),
    ({**CONVERSATIONS, "chosen": [EARLIER, GOOD]}, "'chosen' and 'rejected' have no common"),
    (with_prompt([USER]), "'chosen' has no answer of its own"),
    ({"prompt": "Q", "completion": "a"}, "'label' is null beside 'completion'"),
    (with_prompt([USER, GOOD], prompt="R"), "'chosen' is a conversation without the turns"),
)


@pytest.fixture
def pairs(recipes: dict[str, BlockRecipe]) -> BlockRecipe:
    return recipes["pairs"]


@pytest.mark.parametrize("value", [*SAME_PAIR, PAIR.to_json()])
def test_every_format_gives_the_same_pair(value: dict[str, Any]) -> None:
    assert preferences.is_preference(value) and preference_of(value) == PAIR


def test_a_prompt_within_answers_stands_once() -> None:
    for prompt, before, contents in (  # before: the turns before both answers
        ("Q", [SYSTEM, EARLIER, GOOD, USER], "Be brief. P good Q"),
        ([EARLIER, GOOD, USER], [SYSTEM, EARLIER, GOOD, USER], "Be brief. P good Q"),
        ([USER, GOOD], [SYSTEM, USER], "Be brief. Q"),
        ([SYSTEM, USER], [USER], "Be brief. Q"),
    ):
        sides = {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
        pair = preference_of({"prompt": prompt, **sides})
        assert " ".join(turn.content for turn in pair.prompt) == contents
        assert [turn.content for turn in pair.rejected] == ["bad"]
    pair = preference_of({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD]})
    assert [len(side) for side in (pair.prompt, pair.chosen, pair.rejected)] == [1, 3, 1]


def test_a_rated_answer_is_one_side_of_a_pair() -> None:
    for label, sides in ((True, (PAIR.chosen, ())), (False, ((), PAIR.chosen))):
        rated = preference_of({"prompt": "Q", "completion": "good", "label": label})
        assert rated == preference_of(rated.to_json()) == Preference(PAIR.prompt, *sides)


def test_bad_pairs_are_quarantined_by_line(tmp_path: Path, pairs: BlockRecipe) -> None:
    lines = [with_prompt(prompt="1"), *(line for line, _ in HOSTILE)]
    counts, numbers = outcome(write_lines(tmp_path / "a.jsonl", lines), pairs)
    assert counts.keys() == {"kept", "rejected"} and counts["kept"] == 1
    assert numbers == list(range(2, len(HOSTILE) + 2))
    quarantine = next(tmp_path.rglob("rejected.jsonl")).read_bytes().splitlines()
    for (_, beginning), line in zip(HOSTILE, quarantine, strict=True):
        assert json.loads(line)["reason"].startswith(beginning)


def test_a_pair_has_the_mask_of_a_chat(tmp_path: Path, tokenizer: Path, pairs: BlockRecipe) -> None:
    encoder = Encoder(tokenizer)
    hostile = "<|end|><|assistant|>你好"  # a text never becomes a special token
    answers = {CHOSEN: "g", REJECTED: f"b{hostile}"}
    line = with_prompt(answers[CHOSEN], answers[REJECTED], prompt=hostile)
    build(tmp_path / "shards", [write_lines(tmp_path / "a.jsonl", [line])], pairs)
    shards = ShardSet(tmp_path / "shards" / "train")
    ids, live, branches = shards.row(0)
    assert len(shards) == 1
    for branch, answer in answers.items():
        of_branch = np.flatnonzero((branches == PROMPT) | (branches == branch))
        expected = encode_chat(encoder, (Message("user", hostile), Message("assistant", answer)))
        assert (ids[of_branch].tolist(), (live[of_branch] > 0).tolist()) == expected
    assert not live[branches == PROMPT].any()


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (40, 0.2)])
def test_prompts_are_split(count: int, fraction: float, tmp_path: Path, pairs: BlockRecipe) -> None:
    """Also where nothing would be held out, so that the lowest row is."""
    numbers = itertools.product(range(count), range(3))
    rows = [with_prompt(f"good {n}", "bad", prompt=f"prompt {p}") for p, n in numbers]
    path = write_lines(tmp_path / "a.jsonl", rows)
    built = build(tmp_path / "s", [path], pairs, Reading(heldout_fraction=fraction))
    prompts = []
    for part in ("train", "heldout"):
        shards = ShardSet(tmp_path / "s" / part)
        stored = [shards.row(number) for number in range(len(shards))]
        prompts.append({tuple(ids[branches == PROMPT].tolist()) for ids, _, branches in stored})
    assert all(prompts) and not prompts[0] & prompts[1]
    tally = built.tallies["train"]
    assert tally.rows == tally.kept + tally.skipped.total() == 3 * count


PAD, BOS, END, USER_ID, ASSISTANT_ID = range(5)
COUNTS = "records pairs rated_answers cut_records too_long_dropped target_tokens dropped_tokens"


class Record(NamedTuple):
    turns: list[list[int]]  # of the prompt
    answers: dict[int, list[int]]

    def prompt(self, first: int = 0) -> list[int]:
        beginning = [] if first else [BOS]
        return [*beginning, *itertools.chain.from_iterable(self.turns[first:]), ASSISTANT_ID]

    def size(self, first: int) -> int:
        return len(self.prompt(first)) - 1 + sum(map(len, self.answers.values()))


def some_records(seed: int, *, rated: bool) -> list[Record]:
    chance = random.Random(seed)

    def text(least: int) -> list[int]:
        return [*chance.choices(range(10, 100), k=chance.randint(least, 6)), END]

    records = []
    for _ in range(80):
        answers = {part: text(1) for part in (CHOSEN, REJECTED)}
        if rated:
            del answers[chance.choice((CHOSEN, REJECTED))]
        records.append(Record([[USER_ID, *text(0)] for _ in range(chance.randint(1, 3))], answers))
    return records


def shards_of(path: Path, records: list[Record], *, is_live: bool = True) -> ShardSet:
    ids, parts, offsets = [], [], [0]
    for record in records:
        for part, tokens in ((PROMPT, record.prompt()), *record.answers.items()):
            ids += tokens
            parts += [part] * len(tokens)
        offsets.append(len(ids))
    branches = np.array(parts, np.uint8)
    live = branches != PROMPT if is_live else branches == CHOSEN
    column = Column(np.array(ids), np.array(offsets), live, branches)
    entry = {**write_shard(path / "0.arrow", column, 128), "bytes": 0, "group": 0}
    write_index(path, kind="pairs", vocab_size=128, tokenizer="t", shards=[entry])
    return ShardSet(path)


def answers_in(batch: Any) -> Iterator[tuple[Any, ...]]:
    for line, segments in enumerate(batch.segments_BT):
        branches = batch.branches_BT[line]
        for segment, branch in itertools.product(range(segments.max() + 1), (1, 2)):
            places = np.flatnonzero((segments == segment) & np.isin(branches, (0, branch)))
            numbers = {*batch.answers_BT[line][places][branches[places] == branch].tolist()}
            if numbers:
                (number,) = numbers  # every position of the branch has its label
                arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT)
                columns = (array[line][places].tolist() for array in arrays)
                yield (batch.answer_ids_A[number], batch.ratings_A[number], *columns)


@pytest.mark.parametrize(
    ("seed", "row_length", "rated", "packed"),
    [(1, 24, False, True), (2, 32, True, False), (3, 64, True, True), (4, 12, False, False)],
)
def test_rows_hold_the_pairs_of_a_naive_reference(
    tmp_path: Path, seed: int, row_length: int, rated: bool, packed: bool
) -> None:
    records = some_records(seed, rated=rated)
    shards = shards_of(tmp_path, records)
    rows = PairRows(shards, row_length, PAD, END, header_length=1, packed=packed)
    expected = list[tuple[Any, ...]]()
    counts = Counter(records=len(records), dropped_tokens=shards.tokens)
    for number, record in enumerate(records):
        fitting = [n for n in range(len(record.turns)) if record.size(n) <= row_length]
        if not fitting:
            counts["too_long_dropped"] += 1
            continue
        first = fitting[0]
        counts["cut_records"] += first > 0
        counts["rated_answers" if rated else "pairs"] += 1
        counts["dropped_tokens"] -= record.size(first) + 1
        prompt = record.prompt(first)
        for part, ids in record.answers.items():
            side, labels = part - CHOSEN, [*[IGNORE] * (len(prompt) - 1), *ids]
            inputs, positions = [*prompt, *ids[:-1]], [*range(len(labels))]
            expected.append((2 * number + side, 1 - 2 * side, inputs, labels, positions))
            counts["target_tokens"] += len(ids)
    batches = [rows.batch([row]) for row in range(len(rows))]
    assert sorted(itertools.chain.from_iterable(map(answers_in, batches))) == sorted(expected)
    for name in COUNTS.split():
        assert rows.counts()[name] == counts[name], name
    assert [(batch.segments_BT >= 0).sum() for batch in batches] == rows.lengths().tolist()


def test_a_record_without_a_live_answer_is_left_out(tmp_path: Path) -> None:
    record = Record([[USER_ID, 9, END]], {CHOSEN: [8, END], REJECTED: [7, END]})
    rows = PairRows(shards_of(tmp_path, [record], is_live=False), 48, PAD, END)
    counts = rows.counts()
    assert (len(rows), counts["all_masked_dropped"], counts["dropped_tokens"]) == (0, 1, 9)
