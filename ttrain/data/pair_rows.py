"""Rows of preference pairs: two answers share a prompt, separated by the attention mask."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import numpy as np
import numpy.typing as npt

from ttrain.data.chat import header_length
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, NONE, Array, Batch, Counts, Intervals
from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED
from ttrain.data.record_rows import ChatRows, PieceRows, ThreeArrays, sums_by_record
from ttrain.data.shards import Column, ShardSet

BRANCHES = (CHOSEN, REJECTED)
PARTS = (PROMPT, *BRANCHES)
FILLED = ("input_ids_BT", "labels_BT", "positions_BT", "branches_BT", "answers_BT")


@dataclass(frozen=True)
class PairBatch(Batch):
    """Rows of pairs. A token sees earlier tokens of its segment in branch 0 or its own branch.

    segments_BT    which pair of the row, -1 for padding; positions continue the prompt
    branches_BT    0: the prompt without its last token; 1: that token and the preferred answer, or
                   a single rated one; 2: that token and the other answer. Only answers have labels.
    answers_BT     number of the answer in this batch that the label belongs to; -1: none
    answer_ids_A   2 * number of the record in the shard set + 0 (preferred or desirable) or 1
    ratings_A      1 if the answer is preferred or desirable, else -1; 2k and 2k + 1 are a pair
    references_A   log-probabilities of the answers under the reference model, in nats, or None
    """

    FILLS: ClassVar[tuple[int, ...]] = (0, -1)
    divisible: ClassVar[bool] = False
    branches_BT: Array
    answers_BT: Array
    answer_ids_A: Array = field(default_factory=NONE.copy)
    ratings_A: Array = field(default_factory=NONE.copy)
    references_A: npt.NDArray[np.float64] | None = None

    @property
    def parts_BT(self) -> Array:
        return np.where(self.segments_BT < 0, -1, self.segments_BT * len(PARTS) + self.branches_BT)

    @property
    def answers_B(self) -> Array:
        """Number of answers in each row."""
        lines, _ = np.nonzero(self.answers_BT >= 0)
        _, firsts = np.unique(self.answers_BT[self.answers_BT >= 0], return_index=True)
        return np.bincount(lines[firsts], minlength=len(self.answers_BT)).astype(np.int64)

    def without_targets(self) -> Self:
        """The same rows without targets and answers."""
        return replace(
            super().without_targets(),
            answers_BT=np.full_like(self.answers_BT, -1),
            answer_ids_A=NONE.copy(),
            ratings_A=NONE.copy(),
            references_A=None if self.references_A is None else self.references_A[:0],
        )


def finished_pairs(batch: PairBatch) -> PairBatch:
    """Number the answers of the batch row by row; `answers_BT` holds their global numbers.

    An answer that is in the batch twice (of a mixture by weight) has two numbers.
    """
    places = np.flatnonzero(batch.answers_BT >= 0)
    width = batch.answers_BT.shape[1]
    ids = batch.answers_BT.reshape(-1)[places]
    pairs = batch.segments_BT.reshape(-1)[places] + width * (places // width)
    begins = np.ones(len(places), bool)
    begins[1:] = (ids[1:] != ids[:-1]) | (pairs[1:] != pairs[:-1])
    answers_BT = np.full(batch.answers_BT.shape, -1, np.int64)
    answers_BT.reshape(-1)[places] = begins.cumsum() - 1
    answer_ids_A = ids[begins]
    return replace(
        batch,
        answers_BT=answers_BT,
        answer_ids_A=answer_ids_A,
        ratings_A=1 - 2 * (answer_ids_A % 2),
    )


@final
class PairRows(PieceRows):
    """Rows whose pieces are complete pairs.

    A pair longer than a row loses the fewest first turns of its prompt, but never the last one. One
    that is still too long, or has an answer without a live token, is left out and counted.
    """

    batch_type = PairBatch

    def __init__(
        self,
        shards: ShardSet,
        row_length: int,
        pad_id: int,
        end_id: int,
        *,
        header_length: int = 0,
        packed: bool = True,
    ) -> None:
        """`header_length`: tokens between the prompt's last turn and the answer."""
        self._end_id = end_id
        self._header_length = header_length
        super().__init__(shards, row_length, pad_id, packed=packed)

    def finished(self, batch: Batch) -> Batch:
        """The batch with its answers numbered."""
        assert isinstance(batch, PairBatch)
        return finished_pairs(batch)

    def fill_piece(self, piece: int, batch: Batch, line: int, position: int, segment: int) -> None:
        assert isinstance(batch, PairBatch)
        record = int(self.records[piece])
        ids, live, parts = self.shards.row(record)
        prompt = np.arange(int(self.starts[piece]), int((parts == PROMPT).sum()))
        context = prompt[:-1]
        zeros = np.zeros(len(context), np.int64)
        columns = [(ids[context], zeros + IGNORE, np.arange(len(context)), zeros, zeros - 1)]
        present = (part for part in BRANCHES if (parts == part).any())
        for branch, part in enumerate(present, start=1):
            # Places in the record: the prompt's last token, which each branch repeats, first.
            tokens = np.concatenate([prompt[-1:], np.flatnonzero(parts == part)])
            is_live = live[tokens[1:]] != 0
            labels = np.where(is_live, ids[tokens[1:]].astype(np.int64), IGNORE)
            columns.append(
                (
                    ids[tokens[:-1]],
                    labels,
                    len(context) + np.arange(len(labels)),
                    np.full(len(labels), branch),
                    np.where(is_live, 2 * self.shards.numbers[record] + part - CHOSEN, -1),
                )
            )
        span = slice(position, position + int(self.sizes[piece]))
        batch.segments_BT[line, span] = segment
        for name, column in zip(FILLED, zip(*columns, strict=True), strict=True):
            getattr(batch, name)[line, span] = np.concatenate(column)

    def counts(self) -> Counts:
        """`dropped_tokens` are of records left out, and of turns that a prompt lost."""
        pairs = self.totals["pairs"]
        pieces: Counts = {"pairs": pairs, "rated_answers": len(self.records) - pairs}
        return self.counted(pieces, {"too_long_dropped": self.totals["too_long_dropped"]})

    def plan(self, column: Column, first: int) -> ThreeArrays:
        # Only records longer than a row are handled one by one.
        assert column.live is not None and column.branches is not None, (
            "shards of pairs have a loss mask and branches"
        )
        in_part = [column.branches == part for part in PARTS]
        sizes = np.stack([sums_by_record(flags, column.offsets) for flags in in_part])
        live = np.stack(
            [sums_by_record(flags & (column.live != 0), column.offsets) for flags in in_part]
        )
        prompts = sizes[PROMPT]
        answers = sizes[list(BRANCHES)]
        shared = np.minimum(prompts, 1)  # tokens that each branch repeats
        needed = np.where(answers > 0, answers + shared - 1, 0).sum(0)
        is_learnt = ((live[list(BRANCHES)] > 0) | (answers == 0)).all(0) & (needed > 0)
        starts = np.zeros(len(column), np.int64)
        for record in np.flatnonzero(
            is_learnt & (prompts - shared + needed > self.row_length)
        ).tolist():
            begin = int(column.offsets[record])
            prompt = column.tokens[begin : begin + int(prompts[record])]
            borders = np.flatnonzero(prompt == self._end_id) + 1
            left = len(prompt) - borders
            room = self.row_length - int(needed[record])  # for all of the prompt but its last token
            fitting = borders[(left - 1 <= room) & (left > max(1, self._header_length))]
            starts[record] = fitting[0] if len(fitting) else -1
        fits = is_learnt & (starts >= 0)
        self.totals.update(
            cut_records=int((starts > 0).sum()),
            all_masked_dropped=int((~is_learnt).sum()),
            too_long_dropped=int((starts < 0).sum()),
            pairs=int(((answers > 0).all(0) & fits).sum()),
            target_tokens=int(live[:, fits].sum()),
            used_tokens=int((sizes.sum(0) - starts)[fits].sum()),
        )
        records = np.flatnonzero(fits)
        return first + records, starts[records], (prompts - shared + needed - starts)[records]


def answer_rows(
    shards: ShardSet,
    row_length: int,
    encoder: Encoder,
    *,
    packed: bool = True,
    masks: Intervals = (),
) -> PieceRows:
    """The rows of a set of chats, or of pairs, which have no masks."""
    if shards.index["kind"] == "chats":
        return ChatRows(
            shards, row_length, encoder.pad_id, encoder.end_id, packed=packed, masks=masks
        )
    return PairRows(
        shards,
        row_length,
        encoder.pad_id,
        encoder.end_id,
        header_length=header_length(encoder),
        packed=packed,
    )
