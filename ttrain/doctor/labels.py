"""Checks of the rows: targets are the next tokens, and of chats exactly what the assistant says.

What should be learnt is derived anew here, from the text of the records and not from the code that makes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Rows
from ttrain.doctor.check import Check, judged

MOST_ROWS = 64
SHOWN_CHARACTERS = 40
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


def chat_labels(rows: Rows, encoder: Encoder, answers: Sequence[str]) -> Check:
    """Every run of targets is the text of one of `answers` with the token that ends it; where a row ends, a part of one.

    `answers` are those of all conversations in the rows.
    """
    whole = {_answer(encoder, text) for said in answers for text in (said, said.strip())}
    cut = bool(rows.counts().get("cut_records"))
    positions = targets = runs = 0
    for number, ids, labels in records(rows):
        if wrong := _unshifted(ids, labels):
            return Check(NAME, False, _decoded(f"row {number}: {wrong}", wrong, ids, labels, encoder), CURE)
        for run in _runs(labels):
            runs += 1
            if (
                run in whole
                or (encoder.template == "own" and _holds_an_answer(run, whole))
                or (cut and _is_part(run, whole))
            ):
                continue
            learnt = encoder.decode(run)[:SHOWN_CHARACTERS]
            why = "which no assistant says" if run[-1] == encoder.end_id else "without the token that ends an answer"
            return Check(NAME, False, f"row {number}: learnt is {learnt!r}, {why}", CURE)
        positions, targets = positions + len(ids), targets + int((labels != IGNORE).sum())
    return judged(NAME, targets > 0, f"{_share(targets, positions, rows)}, which is {runs} answers with their ends", CURE)


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


def _answer(encoder: Encoder, text: str) -> tuple[int, ...]:
    return (*encoder.encode([text])[0], encoder.end_id)


def _runs(labels: Array) -> Iterator[tuple[int, ...]]:
    """Targets that follow each other without a gap."""
    live = labels != IGNORE
    borders = [0, *(np.flatnonzero(np.diff(live)) + 1), len(labels)]
    for start, end in pairwise(borders):
        if end > start and live[start]:
            yield tuple(labels[start:end].tolist())


def _holds_an_answer(run: tuple[int, ...], whole: set[tuple[int, ...]]) -> bool:
    """For templates that put words of their own around an answer and learn them too."""
    return any(_holds(run, answer[:-1]) for answer in whole)


def _is_part(run: tuple[int, ...], whole: set[tuple[int, ...]]) -> bool:
    return any(_holds(answer, run) for answer in whole)


def _holds(long: tuple[int, ...], short: tuple[int, ...]) -> bool:
    size = len(short)
    return any(long[at : at + size] == short for at in range(len(long) - size + 1))
