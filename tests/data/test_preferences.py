"""Preference pairs and rated answers, from rows of every known format to rows of a batch: nothing is lost in silence.

Rows of pairs are compared with a naive reference: every pair whole, branches apart, each position predicts one token.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.hostile_rows import outcome
from support.shard_sets import build, write_lines

from ttrain.config import Reading
from ttrain.data.blocks import BlockRecipe
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE
from ttrain.data.pair_rows import PairRows
from ttrain.data.preferences import (
    CHOSEN,
    PROMPT,
    REJECTED,
    Preference,
    is_preference,
    preference_of,
)
from ttrain.data.shards import Column, ShardSet, write_index, write_shard

USER, GOOD = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
PAIR = Preference(
    (Message("user", "Q"),), (Message("assistant", "good"),), (Message("assistant", "bad"),)
)
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "1"}


@pytest.fixture
def pairs(recipes: dict[str, BlockRecipe]) -> BlockRecipe:
    return recipes["pairs"]


def row(**values: Any) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": BAD},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
        {"question": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": " Q\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"input": "Q", "chosen": [USER, GOOD], "rejected": "bad"},
        {"messages": [USER, BAD], "chosen": GOOD, "rejected": "bad"},
    ],
)
def test_every_format_gives_the_same_pair(value: dict[str, Any]) -> None:
    assert preference_of(value) == PAIR
    assert is_preference(value)
    assert Preference.from_json(PAIR.to_json()) == PAIR


SYSTEM, EARLIER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "P"}


# (prompt, turns before the answers' own question and answer, roles and contents of the prompt that stays)
WITHIN = (
    ("Q", [SYSTEM, EARLIER, GOOD, USER], "Be brief. P good Q"),
    ([EARLIER, GOOD, USER], [SYSTEM, EARLIER, GOOD, USER], "Be brief. P good Q"),
    ([USER, GOOD], [SYSTEM, USER], "Be brief. Q"),
    ([SYSTEM, USER], [USER], "Be brief. Q"),
    ([USER, GOOD], [EARLIER], "Q good"),
    ([SYSTEM], [EARLIER], "Be brief."),
)


@pytest.mark.parametrize(("prompt", "before", "asked"), WITHIN)
def test_a_prompt_within_both_conversations_stands_there_once(
    prompt: Any, before: Any, asked: str
) -> None:
    pair = preference_of({"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]})
    assert " ".join(turn.content for turn in pair.prompt) == asked
    new = [] if before[-1] == USER else before
    assert [turn.content for turn in pair.rejected] == [turn["content"] for turn in (*new, BAD)]


def test_conversations_that_begin_alike_may_ask_the_same_again() -> None:
    pair = preference_of({"chosen": [USER, GOOD, USER, BAD], "rejected": [USER, BAD]})
    assert [len(side) for side in (pair.prompt, pair.chosen, pair.rejected)] == [1, 3, 1]


@pytest.mark.parametrize("label", [True, False])
def test_a_rated_answer_is_one_side_of_a_pair(label: bool) -> None:
    rated = preference_of({"prompt": "Q", "completion": "good", "label": label})
    assert (rated.chosen, rated.rejected)[not label] == PAIR.chosen
    assert (rated.chosen, rated.rejected)[label] == ()
    turns = {"prompt": [USER], "completion": [GOOD], "label": label}
    assert rated.to_json() == turns
    assert preference_of(turns) == Preference.from_json(turns) == rated


def test_system_functions_and_calls_are_part_of_prompt_and_answers() -> None:
    tools = [{"name": "f", "parameters": {}}]
    value = {
        "system": "Be brief.",
        "tools": tools,
        "prompt": "Q",
        "chosen": [CALL, RESULT, GOOD],
        "rejected": [CALL],
    }
    pair = preference_of(value)
    assert [turn.role for turn in pair.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "assistant",
    ]
    assert (
        pair.prompt[0].content.startswith("Be brief.") and '"name": "f"' in pair.prompt[0].content
    )
    assert '<tool_call>\n{"name": "f"' in pair.rejected[0].content


DEEP = b'{"prompt": "Q", "chosen": ' + b"[" * 900 + b"]" * 900 + b', "rejected": "b"}'
# (row, how its reason begins)
HOSTILE = (
    (
        row(prompt="Q", chosen="a", rejected="a"),
        "'chosen' and 'rejected' are equal; write two different answers",
    ),
    (
        row(prompt="Q", chosen="a", rejected=" \u200b"),
        "'rejected' is empty; write a text, or leave the row out",
    ),
    (row(prompt="Q", chosen=[], rejected="a"), "'chosen' has no turns; write turns such as"),
    (
        row(prompt="Q", chosen=None, rejected="a"),
        "'chosen' is null, not text or a list of turns such as",
    ),
    (
        row(prompt="Q", chosen=1, rejected="a"),
        "'chosen' is a number, not text or a list of turns such as",
    ),
    (
        row(prompt={"a": 1}, chosen="a", rejected="b"),
        "'prompt' is an object, not text or a list of turns such as",
    ),
    (
        row(chosen=[USER, GOOD], rejected=[EARLIER, BAD]),
        "'chosen' and 'rejected' have no common prompt",
    ),
    (row(chosen="a", rejected="b"), "'chosen' and 'rejected' have no common prompt: their first"),
    (
        row(prompt="Q", chosen=[USER], rejected="b"),
        "'chosen' has no answer of its own: no assistant's turn with a text",
    ),
    (
        row(prompt="Q", completion="a"),
        "'label' is null beside 'completion'; write true (the answer is good) or",
    ),
    (row(completion="a", label=True), "no key 'prompt' beside 'completion'; write the prompt"),
    (
        row(prompt="R", chosen=[USER, GOOD], rejected="b"),
        "'chosen' is a conversation without the turns of the prompt",
    ),
    (
        row(prompt="Q", chosen=[USER, GOOD], rejected=[SYSTEM, USER, BAD]),
        "'chosen' and 'rejected' have no common",
    ),
    (
        row(prompt="Q", chosen=[RESULT, GOOD], rejected="b"),
        "a tool turn without a call before it; put",
    ),
    (
        row(chosen=[{**USER, "role": "bot"}, GOOD], rejected=[USER, BAD]),
        "unknown role 'bot'; write one of",
    ),
    (DEEP, "a turn is a list, not an object such as"),
)


def test_bad_pairs_are_quarantined_with_their_line_and_reason(
    tmp_path: Path, pairs: BlockRecipe
) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        [row(prompt="1", chosen="a", rejected="b"), *(line for line, _ in HOSTILE)],
    )
    found, numbers = outcome(path, pairs)
    assert found.keys() == {"kept", "rejected"} and found["kept"] == 1
    assert numbers == list(range(2, len(HOSTILE) + 2))
    reasons = [
        json.loads(line)["reason"]
        for line in next(tmp_path.rglob("rejected.jsonl")).read_bytes().splitlines()
    ]
    for (_, beginning), reason in zip(HOSTILE, reasons, strict=True):
        assert reason.startswith(beginning)


def parts_of(
    encoder: Encoder, path: Path, recipe: BlockRecipe
) -> list[tuple[list[int], list[int], list[int]]]:
    build(path.parent / "shards", [path], recipe)
    shards = ShardSet(path.parent / "shards" / "train")
    return [tuple(column.tolist() for column in shards.row(n)) for n in range(len(shards))]


def test_a_pair_is_stored_with_the_mask_of_a_chat(
    tmp_path: Path, tokenizer: Path, pairs: BlockRecipe
) -> None:
    encoder = Encoder(tokenizer)
    hostile = "<|end|><|assistant|>你好"  # a text never becomes a special token
    path = write_lines(
        tmp_path / "a.jsonl", [row(prompt=hostile, chosen="g", rejected=f"b{hostile}")]
    )
    ((ids, live, branches),) = parts_of(encoder, path, pairs)
    prompt = ids[: branches.count(PROMPT)]
    for branch, answer in ((CHOSEN, "g"), (REJECTED, f"b{hostile}")):
        there = [place for place, part in enumerate(branches) if part == branch]
        expected = encode_chat(encoder, (Message("user", hostile), Message("assistant", answer)))
        assert (
            prompt + [ids[n] for n in there],
            [False] * len(prompt) + [bool(live[n]) for n in there],
        ) == expected
    assert [ids[n] for n, part in enumerate(branches) if part == CHOSEN][1:] == [encoder.end_id], (
        "an answer of one token"
    )


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (40, 0.2)])
def test_no_prompt_is_on_both_sides(
    count: int, fraction: float, tmp_path: Path, pairs: BlockRecipe
) -> None:
    """Also where nothing would be held out, so that the lowest row is."""
    rows = [
        row(prompt=f"prompt {p}", chosen=f"good {n}", rejected="bad")
        for p in range(count)
        for n in range(3)
    ]
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


# --- rows of pairs

PAD, BOS, END, USER_ID, ASSISTANT_ID = 0, 1, 2, 3, 4
Answer = tuple[
    int, int, list[int], list[int], list[int]
]  # its number, rating, inputs, labels, positions


class Record(NamedTuple):
    """Turns of the prompt; the answers that there are, by part."""

    turns: list[list[int]]
    answers: dict[int, list[int]]

    def prompt(self, first: int = 0) -> list[int]:
        """From the turn `first` on, up to the token that begins an answer."""
        beginning = [] if first else [BOS]
        return [*beginning, *itertools.chain.from_iterable(self.turns[first:]), ASSISTANT_ID]

    def size(self, first: int = 0) -> int:
        return len(self.prompt(first)) - 1 + sum(map(len, self.answers.values()))


def some_records(seed: int, *, rated: bool) -> list[Record]:
    chance = random.Random(seed)

    def text(least: int) -> list[int]:
        return [*(chance.randrange(10, 100) for _ in range(chance.randint(least, 6))), END]

    records = []
    for _ in range(80):
        answers = {part: text(1) for part in (CHOSEN, REJECTED)}
        if rated:
            del answers[chance.choice((CHOSEN, REJECTED))]
        records.append(Record([[USER_ID, *text(0)] for _ in range(chance.randint(1, 3))], answers))
    return records


def write(path: Path, records: list[Record]) -> ShardSet:
    pieces = [[(PROMPT, record.prompt()), *record.answers.items()] for record in records]
    flat = [*itertools.chain.from_iterable(pieces)]
    ids = [*itertools.chain.from_iterable(tokens for _, tokens in flat)]
    parts = np.repeat(
        np.array([part for part, _ in flat], np.uint8), [len(tokens) for _, tokens in flat]
    )
    offsets = np.cumsum([0, *(sum(len(tokens) for _, tokens in record) for record in pieces)])
    return written(path, Column(np.array(ids), offsets, parts != PROMPT, parts))


def written(path: Path, column: Column) -> ShardSet:
    entry = write_shard(path / "0.arrow", column, 128)
    write_index(
        path,
        kind="pairs",
        vocab_size=128,
        tokenizer="t",
        shards=[{**entry, "bytes": 0, "group": 0}],
    )
    return ShardSet(path)


def answers_in(batch: Any) -> Iterator[Answer]:
    """Every answer with the prompt before it, as its branch sees them."""
    for line, segments in enumerate(batch.segments_BT):
        for segment, branch in itertools.product(range(segments.max() + 1), (1, 2)):
            there = np.flatnonzero(
                (segments == segment) & np.isin(batch.branches_BT[line], (0, branch))
            )
            answers = {
                *batch.answers_BT[line][there][batch.branches_BT[line][there] == branch].tolist()
            }
            if answers:
                (answer,) = answers  # every position of the branch has its label
                columns = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT)
                inputs, labels, positions = (column[line][there].tolist() for column in columns)
                yield (
                    int(batch.answer_ids_A[answer]),
                    int(batch.ratings_A[answer]),
                    inputs,
                    labels,
                    positions,
                )


@pytest.mark.parametrize(
    ("seed", "row_length", "rated", "packed"),
    [(1, 24, False, True), (2, 32, True, False), (3, 64, True, True), (4, 12, False, False)],
)
def test_rows_hold_what_a_naive_reference_says(
    tmp_path: Path, seed: int, row_length: int, rated: bool, packed: bool
) -> None:
    """A property test: whole pairs, cut at the first turn that makes them fit, left out where only the answer would stay."""
    records = some_records(seed, rated=rated)
    rows = PairRows(write(tmp_path, records), row_length, PAD, END, header_length=1, packed=packed)
    wanted: list[Answer] = []
    cut = kept = too_long = 0
    for number, record in enumerate(records):
        first = next(
            (turn for turn in range(len(record.turns)) if record.size(turn) <= row_length), None
        )
        if first is None:
            too_long += 1
            continue
        cut += first > 0
        kept += record.size(first) + 1
        prompt = record.prompt(first)
        for part, ids in record.answers.items():
            side, labels = part - CHOSEN, [*[IGNORE] * (len(prompt) - 1), *ids]
            wanted.append(
                (
                    2 * number + side,
                    1 - 2 * side,
                    [*prompt, *ids[:-1]],
                    labels,
                    [*range(len(labels))],
                )
            )
    batches = [rows.batch([row]) for row in range(len(rows))]
    assert sorted(itertools.chain.from_iterable(map(answers_in, batches))) == sorted(wanted)
    counts = rows.counts()
    assert (counts["cut_records"], counts["too_long_dropped"], counts["records"]) == (
        cut,
        too_long,
        len(records),
    )
    assert counts["pairs" if not rated else "rated_answers"] == len(records) - too_long
    assert counts["rated_answers" if not rated else "pairs"] == 0
    assert counts["target_tokens"] == sum(
        len(labels) - labels.count(IGNORE) for *_, labels, _ in wanted
    )
    assert counts["dropped_tokens"] == rows.shards.tokens - kept
    assert [(batch.segments_BT >= 0).sum() for batch in batches] == rows.lengths().tolist()


def test_a_record_with_an_answer_that_has_no_live_token_is_left_out_and_counted(
    tmp_path: Path,
) -> None:
    ids, parts = [BOS, USER_ID, 9, END, ASSISTANT_ID, 8, END, 7, END], [0, 0, 0, 0, 0, 1, 1, 2, 2]
    live = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])
    shards = written(
        tmp_path, Column(np.array(ids), np.array([0, 9]), live, np.array(parts, np.uint8))
    )
    rows = PairRows(shards, 48, PAD, END)
    assert len(rows) == 0
    assert rows.counts()["all_masked_dropped"] == 1 and rows.counts()["dropped_tokens"] == 9
