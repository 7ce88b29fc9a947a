"""Checks of the rows: targets are the next tokens, and of chats exactly what the assistant says.

What should be learnt is derived anew here, from the text of the records and not from the code that makes the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Rows
from ttrain.doctor.check import Check, judged

MOST_ROWS = 64
SHOWN_CHARACTERS = 40
END_TOKENS = 3  # an existing template may end an answer with the token and a newline after it
NAME = "labels and mask"
CURE = "look at the rows with `ttrain data inspect`; the tokenizer's template or the code that makes rows has a fault"


def document_labels(rows: Rows, encoder: Encoder) -> Check:
    """Every token of a document but its first is a target, at the position before it."""
    positions = targets = 0
    for number, ids, labels in records(rows):
        wrong = _unshifted(ids, labels) or _not_learnt(labels)
        if wrong or (labels == encoder.bos_id).any():
            figure = f"row {number}: {wrong or 'the token that begins a document is learnt'}"
            return Check(NAME, False, _decoded(figure, wrong, ids, labels, encoder), CURE)
        positions, targets = positions + len(ids), targets + int((labels != IGNORE).sum())
    return judged(NAME, targets > 0, _share(targets, positions, rows), CURE)


def masked_labels(rows: Rows, encoder: Encoder) -> Check:
    """Where regions are masked on purpose, targets are at least the next tokens."""
    positions = targets = 0
    for number, ids, labels in records(rows):
        if wrong := _unshifted(ids, labels):
            return Check(NAME, False, _decoded(f"row {number}: {wrong}", wrong, ids, labels, encoder), CURE)
        positions, targets = positions + len(ids), targets + int((labels != IGNORE).sum())
    return judged(NAME, targets > 0, _share(targets, positions, rows), CURE)


def chat_labels(rows: Rows, encoder: Encoder, heldout: Rows, answers: Sequence[str]) -> Check:
    """Every run of targets ends with the token that ends an answer and has no other special one; of the held-out rows, whose
    text is at hand, it is the text of one of `answers`. Where a row is full, it may be a part of one.
    """
    found = _runs_of(rows, encoder, None)
    told = _runs_of(heldout, encoder, answers) if found.ok and len(heldout) else None
    if told is None or not told.ok:
        return told or found
    return judged(NAME, True, f"{found.figure}; of the held-out rows, with their text: {told.figure}", CURE)


def _runs_of(rows: Rows, encoder: Encoder, answers: Sequence[str] | None) -> Check:
    spoken = sorted({text for said in answers or () for text in (said, said.strip())})
    wanted = {_word([*ids, encoder.end_id]) for ids in encoder.encode(spoken)}
    whole, alone, special = not rows.counts().get("cut_records"), encoder.template != "own", encoder.special_ids()
    positions = targets = runs = 0
    for number, ids, labels in records(rows):
        if wrong := _unshifted(ids, labels):
            return Check(NAME, False, _decoded(f"row {number}: {wrong}", wrong, ids, labels, encoder), CURE)
        for run in _runs(labels):
            runs += 1
            why = ""
            if whole and run[-1] != encoder.end_id and encoder.end_id not in run[-END_TOKENS:]:
                why = "without the token that ends an answer"
            elif alone and not special.isdisjoint(run[:-1]):
                why = "with what stands between turns"
            elif answers is not None and not _is_learnt(_word(run), wanted, whole=whole, alone=alone):
                why = "which no assistant says"
            if why:
                return Check(NAME, False, f"row {number}: learnt is {encoder.decode(run)[:SHOWN_CHARACTERS]!r}, {why}", CURE)
        positions, targets = positions + len(ids), targets + int((labels != IGNORE).sum())
    return judged(NAME, targets > 0, f"{_share(targets, positions, rows)}, in {runs} answers with their ends", CURE)


def records(rows: Rows) -> Iterator[tuple[int, Array, Array]]:
    """(row, input ids, labels) of every record of up to MOST_ROWS rows, padding left out."""
    for number in range(min(MOST_ROWS, len(rows))):
        batch = rows.batch([number * len(rows) // min(MOST_ROWS, len(rows))])
        of_record, ids, labels = batch.segments_BT[0], batch.input_ids_BT[0], batch.labels_BT[0]
        borders = [*np.flatnonzero(np.diff(of_record, prepend=-2)), len(of_record)]
        for start, end in pairwise(borders):
            if of_record[start] >= 0:
                yield number, ids[start:end], labels[start:end]


def _unshifted(ids: Array, labels: Array) -> str:
    """What is wrong where a target is not the next token; empty where none is."""
    bad = np.flatnonzero((labels[:-1] != IGNORE) & (labels[:-1] != ids[1:]))
    return f"the target at position {bad[0]} is not the next token" if len(bad) else ""


def _not_learnt(labels: Array) -> str:
    bad = np.flatnonzero(labels[:-1] == IGNORE)
    return f"position {bad[0]} has no target" if len(bad) else ""


def _decoded(figure: str, wrong: str, ids: Array, labels: Array, encoder: Encoder) -> str:
    """The figure with the texts of the first wrong place."""
    bad = np.flatnonzero(labels[:-1] != ids[1:])
    if not wrong or not len(bad) or labels[bad[0]] == IGNORE:
        return figure
    target, following = (encoder.decode([int(number)]) for number in (labels[bad[0]], ids[bad[0] + 1]))
    return f"{figure}: {target!r} where {following!r} follows"


def _share(targets: int, positions: int, rows: Rows) -> str:
    return f"{targets} of {positions} tokens in {min(MOST_ROWS, len(rows))} rows are learnt, each the next one"


def _word(ids: Iterable[int]) -> str:
    """Ids as the characters of these numbers, so that one sequence is looked for in another as fast as in text."""
    return "".join(map(chr, ids))


def _runs(labels: Array) -> Iterator[list[int]]:
    """Targets that follow each other without a gap."""
    live = labels != IGNORE
    borders = [0, *(np.flatnonzero(np.diff(live)) + 1), len(labels)]
    for start, end in pairwise(borders):
        if end > start and live[start]:
            yield labels[start:end].tolist()


def _is_learnt(run: str, answers: set[str], *, whole: bool, alone: bool) -> bool:
    """Whether a run is an answer: where not `alone` with words of the template around it, where not `whole` a part of it."""
    if run in answers:
        return True
    return (not alone and any(answer[:-1] in run for answer in answers)) or (
        not whole and any(run in answer for answer in answers)
    )
