"""Rows of pairs, compared with a naive reference: every pair whole, branches apart, each position predicts one token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ttrain.data.packing import IGNORE, MixedRows
from ttrain.data.pair_rows import PairBatch, PairRows
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED
from ttrain.data.shards import Column, ShardSet, write_index, write_shard

PAD, BOS, END, USER, ASSISTANT = 0, 1, 2, 3, 4


class Record(NamedTuple):
    """Turns of the prompt as texts; the answers as texts, None where there is none."""

    prompt: list[list[int]]
    chosen: list[int] | None
    rejected: list[int] | None

    def prompt_ids(self, first: int = 0) -> list[int]:
        """From the turn `first` on, up to the token that begins an answer."""
        turns = [[USER, *text, END] for text in self.prompt[first:]]
        return [*([] if first else [BOS]), *(token for turn in turns for token in turn), ASSISTANT]

    def answers(self) -> list[tuple[int, list[int]]]:
        """(0 for the chosen or 1 for the other, ids) of each."""
        return [(side, [*text, END]) for side, text in enumerate((self.chosen, self.rejected)) if text is not None]

    def size(self, first: int = 0) -> int:
        return len(self.prompt_ids(first)) - 1 + sum(len(ids) for _, ids in self.answers())


def some_records(seed: int, count: int, *, turns: int = 3, longest: int = 6, rated: bool = False) -> list[Record]:
    chance = random.Random(seed)

    def text(least: int) -> list[int]:
        return [chance.randrange(10, 100) for _ in range(chance.randint(least, longest))]

    records = []
    for _ in range(count):
        answers: list[list[int] | None] = [text(1), text(1)]
        if rated:
            answers[chance.randrange(2)] = None
        records.append(Record([text(0) for _ in range(chance.randint(1, turns))], *answers))
    return records


def write(path: Path, records: list[Record], *, shards: int = 1, weights: tuple[float, ...] = ()) -> ShardSet:
    path.mkdir(parents=True, exist_ok=True)
    entries = []
    for number in range(shards):
        ids: list[int] = []
        parts: list[int] = []
        offsets = [0]
        for record in records[number::shards]:
            ids += record.prompt_ids()
            parts += [PROMPT] * len(record.prompt_ids())
            for side, answer in record.answers():
                ids += answer
                parts += [(CHOSEN, REJECTED)[side]] * len(answer)
            offsets.append(len(ids))
        column = Column(np.array(ids), np.array(offsets), np.array(parts) != PROMPT, np.array(parts, np.uint8))
        entry = write_shard(path / f"{number:016x}.arrow", column, 128)
        entries.append({**entry, "bytes": 0, "group": number if weights else 0})
    more = {"weights": list(weights)} if weights else {}
    write_index(path, kind="pairs", vocab_size=128, tokenizer="t", shards=entries, **more)
    return ShardSet(path)


Branch = tuple[int, int, list[int], list[int], list[int]]  # answer id, rating, inputs, targets, positions


def pairs_in(batch: PairBatch) -> list[tuple[list[int], list[Branch]]]:
    """(ids of the common prefix, branches) of every pair."""
    found = []
    for line in range(len(batch.segments_BT)):
        segments = batch.segments_BT[line]
        for segment in range(segments.max() + 1):
            there = segments == segment
            branches = []
            for branch in (1, 2):
                inside = there & (batch.branches_BT[line] == branch)
                if not inside.any():
                    continue
                answers = set(batch.answers_BT[line][inside].tolist())
                assert len(answers) == 1, "every position of a branch here has a label"
                answer = answers.pop()
                arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT)
                ids = [array[line][inside].tolist() for array in arrays]
                branches.append((int(batch.answer_ids_A[answer]), int(batch.ratings_A[answer]), ids[0], ids[1], ids[2]))
            prefix = there & (batch.branches_BT[line] == 0)
            assert (batch.labels_BT[line][prefix] == IGNORE).all() and (batch.answers_BT[line][prefix] == -1).all()
            assert batch.positions_BT[line][prefix].tolist() == list(range(int(prefix.sum())))
            found.append((batch.input_ids_BT[line][prefix].tolist(), branches))
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
    rows = PairRows(write(tmp_path, records, shards=shards), row_length, PAD, END, header_length=1, packed=packed)
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
    for row, batch in enumerate(batches):
        assert (batch.segments_BT >= 0).sum() == rows.lengths()[row]


def test_answers_of_a_pair_follow_each_other_in_a_batch_of_any_rows(tmp_path: Path) -> None:
    rows = PairRows(write(tmp_path, some_records(5, 40)), 48, PAD, END, header_length=1)
    for numbers in ([0], [3, 1], range(len(rows))):
        batch = rows.batch(numbers)
        assert isinstance(batch, PairBatch)
        chosen, rejected = batch.answer_ids_A[::2], batch.answer_ids_A[1::2]
        assert (rejected == chosen + 1).all() and (chosen % 2 == 0).all()
        assert (batch.ratings_A == np.tile([1, -1], len(chosen))).all()
        assert set(batch.answers_BT.flatten().tolist()) == {-1, *range(len(batch.answer_ids_A))}
        assert ((batch.labels_BT != IGNORE) == (batch.answers_BT >= 0)).all()
    muted = rows.batch([0]).without_targets()
    assert isinstance(muted, PairBatch) and (muted.answers_BT == -1).all()
    assert muted.live_tokens == len(muted.answer_ids_A) == len(muted.ratings_A) == 0
    rated = PairRows(write(tmp_path / "rated", some_records(8, 1, rated=True)), 48, PAD, END).batch([0, 0])
    assert isinstance(rated, PairBatch)
    assert len(rated.answer_ids_A) == 2 and len(set(rated.answer_ids_A.tolist())) == 1, "twice in a batch counts twice"


def test_answers_of_weighted_sources_have_numbers_of_the_whole_set(tmp_path: Path) -> None:
    records = some_records(7, 30)
    shards = write(tmp_path, records, shards=2, weights=(1.0, 3.0))
    groups = [PairRows(shards.group(number), 48, PAD, END, header_length=1) for number in (0, 1)]
    mixed = MixedRows(groups, shards.weights)
    batch = mixed.batch(range(len(mixed)))
    assert isinstance(batch, PairBatch)
    assert sorted(batch.answer_ids_A.tolist()) == list(range(2 * len(records)))


def test_a_record_with_an_answer_that_has_no_live_token_is_left_out_and_counted(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    ids, parts = [BOS, USER, 9, END, ASSISTANT, 8, END, 7, END], [0, 0, 0, 0, 0, 1, 1, 2, 2]
    live = np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])
    entry = write_shard(tmp_path / "0.arrow", Column(np.array(ids), np.array([0, 9]), live, np.array(parts, np.uint8)), 128)
    write_index(tmp_path, kind="pairs", vocab_size=128, tokenizer="t", shards=[{**entry, "bytes": 0, "group": 0}])
    rows = PairRows(ShardSet(tmp_path), 48, PAD, END)
    assert len(rows) == 0
    assert rows.counts()["all_masked_dropped"] == 1 and rows.counts()["dropped_tokens"] == 9
