"""Preference pairs and rated answers, from rows of every known format to rows of a batch: nothing is lost in silence.

Rows of pairs are compared with a naive reference: every pair whole, branches apart, each position predicts one token.
"""

from __future__ import annotations

import json
import random
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
from ttrain.data.pair_rows import PairBatch, PairRows
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED, Preference, is_preference, preference_of
from ttrain.data.shards import Column, ShardSet, write_index, write_shard

USER, GOOD = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
PAIR = Preference((Message("user", "Q"),), (Message("assistant", "good"),), (Message("assistant", "bad"),))
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
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
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
        {"question": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": " Q\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"input": "Q", "chosen": [USER, GOOD], "rejected": "bad"},
        {"messages": [USER, BAD], "chosen": GOOD, "rejected": "bad"},
    ],
)  # fmt: skip
def test_every_format_gives_the_same_pair(value: dict[str, Any]) -> None:
    assert preference_of(value) == PAIR
    assert is_preference(value)
    assert Preference.from_json(PAIR.to_json()) == PAIR


SYSTEM, EARLIER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "P"}


@pytest.mark.parametrize(
    ("prompt", "before"),
    [("Q", [SYSTEM, EARLIER, GOOD]), ([EARLIER, GOOD, USER], [SYSTEM, EARLIER, GOOD]), ([USER, GOOD], [SYSTEM])],
)
def test_a_prompt_within_both_conversations_stands_there_once(prompt: Any, before: list[dict[str, str]]) -> None:
    pair = preference_of({"prompt": prompt, "chosen": [*before, USER, GOOD], "rejected": [*before, USER, BAD]})
    assert [turn.content for turn in pair.prompt] == [turn["content"] for turn in (*before, USER)]
    assert (pair.chosen, pair.rejected) == (PAIR.chosen, PAIR.rejected)


@pytest.mark.parametrize(
    ("prompt", "before"),
    [([SYSTEM, USER], [USER]), ([USER, GOOD], [EARLIER]), ([SYSTEM], [EARLIER])],
    ids=["the end of the prompt again", "another question", "the first question"],
)
def test_a_prompt_keeps_what_answers_do_not_repeat(prompt: Any, before: list[dict[str, str]]) -> None:
    pair = preference_of({"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD]})
    new = [] if before == [USER] else before
    assert [turn.role for turn in pair.prompt] == [turn["role"] for turn in prompt]
    assert [turn.content for turn in pair.rejected] == [turn["content"] for turn in (*new, BAD)]


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
    value = {"system": "Be brief.", "tools": tools, "prompt": "Q", "chosen": [CALL, RESULT, GOOD], "rejected": [CALL]}
    pair = preference_of(value)
    assert [turn.role for turn in pair.messages] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    assert pair.prompt[0].content.startswith("Be brief.") and '"name": "f"' in pair.prompt[0].content
    assert '<tool_call>\n{"name": "f"' in pair.rejected[0].content


DEEP = b'{"prompt": "Q", "chosen": ' + b"[" * 900 + b"]" * 900 + b', "rejected": "b"}'
# (row, how its reason begins)
HOSTILE = (
    (row(prompt="Q", chosen="a", rejected="a"), "'chosen' and 'rejected' are equal; write two different answers"),
    (row(prompt="Q", chosen="a", rejected=" \u200b"), "'rejected' is empty; write a text, or leave the row out"),
    (row(prompt="Q", chosen=[], rejected="a"), "'chosen' has no turns; write turns such as"),
    (row(prompt="Q", chosen=None, rejected="a"), "'chosen' is null, not text or a list of turns such as"),
    (row(prompt="Q", chosen=1, rejected="a"), "'chosen' is a number, not text or a list of turns such as"),
    (row(prompt={"a": 1}, chosen="a", rejected="b"), "'prompt' is an object, not text or a list of turns such as"),
    (row(chosen=[USER, GOOD], rejected=[EARLIER, BAD]), "'chosen' and 'rejected' have no common prompt"),
    (row(chosen="a", rejected="b"), "'chosen' and 'rejected' have no common prompt: their first"),
    (row(prompt="Q", chosen=[USER], rejected="b"), "'chosen' has no answer of its own: no assistant's turn with a text"),
    (row(prompt="Q", completion="a"), "'label' is null beside 'completion'; write true (the answer is good) or"),
    (row(completion="a", label=True), "no key 'prompt' beside 'completion'; write the prompt"),
    (row(prompt="R", chosen=[USER, GOOD], rejected="b"), "'chosen' is a conversation without the turns of the prompt"),
    (row(prompt="Q", chosen=[USER, GOOD], rejected=[SYSTEM, USER, BAD]), "'chosen' and 'rejected' have no common"),
    (row(prompt="Q", chosen=[RESULT, GOOD], rejected="b"), "a tool turn without a call before it; put"),
    (DEEP, "a turn is a list, not an object such as"),
)


def test_bad_pairs_are_quarantined_with_their_line_and_reason(tmp_path: Path, pairs: BlockRecipe) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row(prompt="1", chosen="a", rejected="b"), *(line for line, _ in HOSTILE)])
    found, numbers = outcome(path, pairs)
    assert found.keys() == {"kept", "rejected"} and found["kept"] == 1
    assert numbers == list(range(2, len(HOSTILE) + 2))
    reasons = [json.loads(line)["reason"] for line in next(tmp_path.rglob("rejected.jsonl")).read_bytes().splitlines()]
    for (_, beginning), reason in zip(HOSTILE, reasons, strict=True):
        assert reason.startswith(beginning)


def parts_of(encoder: Encoder, path: Path, recipe: BlockRecipe) -> list[tuple[list[int], list[int], list[int]]]:
    build(path.parent / "shards", [path], recipe)
    shards = ShardSet(path.parent / "shards" / "train")
    return [tuple(column.tolist() for column in shards.preference(n)[:3]) for n in range(len(shards))]


def test_a_pair_is_stored_with_the_mask_of_a_chat(tmp_path: Path, tokenizer: Path, pairs: BlockRecipe) -> None:
    encoder = Encoder(tokenizer)
    hostile = "<|end|><|assistant|>你好"  # a text never becomes a special token
    path = write_lines(tmp_path / "a.jsonl", [row(prompt=hostile, chosen="g", rejected=f"b{hostile}")])
    ((ids, live, branches),) = parts_of(encoder, path, pairs)
    prompt = ids[: branches.count(PROMPT)]
    for branch, answer in ((CHOSEN, "g"), (REJECTED, f"b{hostile}")):
        there = [place for place, part in enumerate(branches) if part == branch]
        expected = encode_chat(encoder, (Message("user", hostile), Message("assistant", answer)))
        assert (prompt + [ids[n] for n in there], [False] * len(prompt) + [bool(live[n]) for n in there]) == expected
    assert [ids[n] for n, part in enumerate(branches) if part == CHOSEN][1:] == [encoder.end_id], "an answer of one token"


@pytest.mark.parametrize(("count", "fraction"), [(2, 1e-9), (40, 0.2)])
def test_no_prompt_is_on_both_sides(count: int, fraction: float, tmp_path: Path, pairs: BlockRecipe) -> None:
    """Also where nothing would be held out, so that the lowest row is."""
    rows = [row(prompt=f"prompt {p}", chosen=f"good {n}", rejected="bad") for p in range(count) for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    built = build(tmp_path / "s", [path], pairs, Reading(heldout_fraction=fraction))
    prompts = []
    for part in ("train", "heldout"):
        shards = ShardSet(tmp_path / "s" / part)
        stored = [shards.preference(number) for number in range(len(shards))]
        prompts.append({tuple(ids[branches == PROMPT].tolist()) for ids, _, branches, _ in stored})
    assert all(prompts) and not prompts[0] & prompts[1]
    tally = built.tallies["train"]
    assert tally.rows == tally.kept + tally.skipped.total() == 3 * count


# --- rows of pairs


PAD, BOS, END, USER_ID, ASSISTANT_ID = 0, 1, 2, 3, 4


class Record(NamedTuple):
    """Turns of the prompt as texts; the answers as texts, None where there is none."""

    prompt: list[list[int]]
    chosen: list[int] | None
    rejected: list[int] | None

    def prompt_ids(self, first: int = 0) -> list[int]:
        """From the turn `first` on, up to the token that begins an answer."""
        turns = [[USER_ID, *text, END] for text in self.prompt[first:]]
        return [*([] if first else [BOS]), *(token for turn in turns for token in turn), ASSISTANT_ID]

    def answers(self) -> list[tuple[int, list[int]]]:
        """(0 for the chosen or 1 for the other, ids) of each."""
        return [(side, [*text, END]) for side, text in enumerate((self.chosen, self.rejected)) if text is not None]

    def size(self, first: int = 0) -> int:
        return len(self.prompt_ids(first)) - 1 + sum(len(ids) for _, ids in self.answers())


def some_records(seed: int, count: int, *, rated: bool = False) -> list[Record]:
    chance = random.Random(seed)

    def text(least: int) -> list[int]:
        return [chance.randrange(10, 100) for _ in range(chance.randint(least, 6))]

    records = []
    for _ in range(count):
        answers: list[list[int] | None] = [text(1), text(1)]
        if rated:
            answers[chance.randrange(2)] = None
        records.append(Record([text(0) for _ in range(chance.randint(1, 3))], *answers))
    return records


def write(path: Path, records: list[Record], shards: int) -> ShardSet:
    path.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(shards):
        ids: list[int] = []
        parts: list[int] = []
        offsets = [0]
        for record in records[number::shards]:
            for part, tokens in ((PROMPT, record.prompt_ids()), *((CHOSEN + n, answer) for n, answer in record.answers())):
                ids += tokens
                parts += [part] * len(tokens)
            offsets.append(len(ids))
        column = Column(np.array(ids), np.array(offsets), np.array(parts) != PROMPT, np.array(parts, np.uint8))
        entries.append({**write_shard(path / f"{number:016x}.arrow", column, 128), "bytes": 0, "group": 0})
    write_index(path, kind="pairs", vocab_size=128, tokenizer="t", shards=entries)
    return ShardSet(path)


Branch = tuple[int, int, list[int], list[int], list[int]]  # answer id, rating, inputs, targets, positions


def pairs_in(batch: PairBatch) -> list[tuple[list[int], list[Branch]]]:
    """(ids of the common prefix, branches) of every pair."""
    names = ("input_ids_BT", "labels_BT", "positions_BT", "answers_BT")
    found = []
    for line, segments in enumerate(batch.segments_BT):
        for segment in range(segments.max() + 1):
            branches = []
            for branch in range(3):
                there = (segments == segment) & (batch.branches_BT[line] == branch)
                ids, labels, positions, answers = (getattr(batch, name)[line][there].tolist() for name in names)
                if branch == 0:
                    prefix = ids
                    assert {*labels} <= {IGNORE} and {*answers} <= {-1} and positions == list(range(len(ids)))
                elif ids:
                    assert len(set(answers)) == 1, "every position of a branch here has a label"
                    numbers = int(batch.answer_ids_A[answers[0]]), int(batch.ratings_A[answers[0]])
                    branches.append((*numbers, ids, labels, positions))
            found.append((prefix, branches))
    return found


def expected(record: Record, number: int, first: int) -> tuple[list[int], list[Branch]]:
    prompt = record.prompt_ids(first)
    branches = []
    for side, ids in record.answers():
        positions = list(range(len(prompt) - 1, len(prompt) - 1 + len(ids)))
        branches.append((2 * number + side, 1 - 2 * side, [prompt[-1], *ids[:-1]], ids, positions))
    return prompt[:-1], branches


def numbers_in_set(count: int, shards: int) -> list[int]:
    """Of each record, in the order of the records: `write` deals them out."""
    order = [number for shard in range(shards) for number in range(shard, count, shards)]
    return [order.index(number) for number in range(count)]


@pytest.mark.parametrize(
    ("seed", "row_length", "shards", "rated", "packed"),
    [(1, 24, 1, False, True), (2, 32, 3, True, False), (3, 64, 2, True, True), (4, 12, 5, False, False)],
)
def test_rows_hold_what_a_naive_reference_says(
    tmp_path: Path, seed: int, row_length: int, shards: int, rated: bool, packed: bool
) -> None:
    """A property test: whole pairs, cut at the first turn that makes them fit, left out where only the answer would stay."""
    records = some_records(seed, 80, rated=rated)
    rows = PairRows(write(tmp_path, records, shards), row_length, PAD, END, header_length=1, packed=packed)
    wanted, cut, too_long = [], 0, 0
    for record, number in zip(records, numbers_in_set(len(records), shards), strict=True):
        first = next((turn for turn in range(len(record.prompt)) if record.size(turn) <= row_length), None)
        if first is None:
            too_long += 1
            continue
        cut += first > 0
        wanted.append(expected(record, number, first))
    batches = [rows.batch([row]) for row in range(len(rows))]
    found = [pair for batch in batches if isinstance(batch, PairBatch) for pair in pairs_in(batch)]
    assert sorted(found) == sorted(wanted)
    counts = rows.counts()
    assert (counts["cut_records"], counts["too_long_dropped"], counts["records"]) == (cut, too_long, len(records))
    assert counts["pairs"] + counts["rated_answers"] == len(wanted)
    assert counts["rated_answers"] == (len(wanted) if rated else 0)
    assert counts["target_tokens"] == sum(len(ids) for _, branches in wanted for *_, ids, _ in branches)
    kept = sum(len(prefix) + 1 + sum(len(branch[2]) for branch in branches) for prefix, branches in wanted)
    assert counts["dropped_tokens"] == rows.shards.tokens - kept
    assert [(batch.segments_BT >= 0).sum() for batch in batches] == rows.lengths().tolist()


def test_a_record_with_an_answer_that_has_no_live_token_is_left_out_and_counted(tmp_path: Path) -> None:
    ids, parts = [BOS, USER_ID, 9, END, ASSISTANT_ID, 8, END, 7, END], [0, 0, 0, 0, 0, 1, 1, 2, 2]
    live = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])
    entry = write_shard(tmp_path / "0.arrow", Column(np.array(ids), np.array([0, 9]), live, np.array(parts, np.uint8)), 128)
    write_index(tmp_path, kind="pairs", vocab_size=128, tokenizer="t", shards=[{**entry, "bytes": 0, "group": 0}])
    rows = PairRows(ShardSet(tmp_path), 48, PAD, END)
    assert len(rows) == 0
    assert rows.counts()["all_masked_dropped"] == 1 and rows.counts()["dropped_tokens"] == 9
