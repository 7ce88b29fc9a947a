"""Checks of the rows: targets are the next tokens, and of chats exactly what the assistant says.

What should be learnt is derived here a second time, from the text of the records, not by the code that makes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Rows
from ttrain.doctor.parts import Check, make_check

MOST_ROWS = 64

SHOWN_CHARACTERS = 40

END_TOKENS = 3  # an existing template may end an answer with the token and a newline after it

LABELS = "labels and mask"

REPLACEMENT = "\ufffd"  # what bytes that form no character are decoded to

FIX = "look at the rows with `ttrain data show`; the tokenizer's template or the code that makes rows has a fault"


def document_labels(rows: Rows, encoder: Encoder) -> Check:
    """Every token of a document but its first is a target, at the position before it."""

    def fault(ids: Array, labels: Array) -> str:
        if (labels == encoder.bos_id).any():
            return "the token that begins a document is learnt"
        not_learnt = np.flatnonzero(labels[: -1 if ids[-1] == encoder.eos_id else None] == IGNORE)
        return f"position {not_learnt[0]} has no target" if len(not_learnt) else ""

    return _check_rows(rows, encoder, fault)


def masked_labels(rows: Rows, encoder: Encoder) -> Check:
    """Every target is the next token; all that can be checked where regions are masked on purpose."""
    return _check_rows(rows, encoder, lambda ids, labels: "")


def _check_rows(rows: Rows, encoder: Encoder, fault: Callable[[Array, Array], str]) -> Check:
    """Check that every target is the next token, and that the labels of no record have a fault."""
    positions = targets = 0
    for number, ids, labels in records(rows):
        bad = np.flatnonzero((labels[:-1] != IGNORE) & (labels[:-1] != ids[1:]))
        if len(bad):
            target, following = (encoder.decode([int(token)]) for token in (labels[bad[0]], ids[bad[0] + 1]))
            wrong = f"the target at position {bad[0]} is not the next token: {target!r} where {following!r} follows"
        else:
            wrong = fault(ids, labels)
        if wrong:
            return Check(LABELS, False, f"row {number}: {wrong}", FIX)
        positions, targets = positions + len(ids), targets + int((labels != IGNORE).sum())
    shown = min(MOST_ROWS, len(rows))
    share = f"{targets} of {positions} tokens in {shown} rows are learnt, each the next one"
    return make_check(LABELS, targets > 0, share, FIX)


def chat_labels(rows: Rows, encoder: Encoder, heldout: Rows, answers: Sequence[str]) -> Check:
    """Every run of targets ends with the token that ends an answer and has no other special one; of the held-out rows, whose
    text is at hand, it is the text of one of `answers`. Where a row is full, it may be a part of one.
    """
    training_check = _runs_of(rows, encoder, None)
    heldout_check = _runs_of(heldout, encoder, answers) if training_check.ok and len(heldout) else None
    if heldout_check is None or not heldout_check.ok:
        return heldout_check or training_check
    return replace(
        heldout_check, figure=f"{training_check.figure}; of the held-out rows, with their text: {heldout_check.figure}"
    )


def _runs_of(rows: Rows, encoder: Encoder, answers: Sequence[str] | None) -> Check:
    expected_runs = {encoder.decode(ids).strip() for ids in encoder.encode(sorted(set(answers or ())))}
    whole, alone, special = not rows.counts().get("cut_records"), encoder.template != "own", encoder.special_ids()
    run_count = 0

    def fault(ids: Array, labels: Array) -> str:
        nonlocal run_count
        for run in _runs(labels):
            run_count += 1
            why = ""
            if whole and run[-1] != encoder.end_id and encoder.end_id not in run[-END_TOKENS:]:
                why = "without the token that ends an answer"
            elif alone and not special.isdisjoint(run[:-1]):
                why = "with what stands between turns"
            elif answers is not None and not _is_learnt(encoder.decode(run), expected_runs, whole=whole, alone=alone):
                why = "which no assistant says"
            if why:
                return f"learnt is {encoder.decode(run)[:SHOWN_CHARACTERS]!r}, {why}"
        return ""

    check = _check_rows(rows, encoder, fault)
    return replace(check, figure=f"{check.figure}, in {run_count} answers with their ends") if check.ok else check


def records(rows: Rows) -> Iterator[tuple[int, Array, Array]]:
    """(row, input ids, labels) of every record, or branch of one, of up to MOST_ROWS rows, padding left out."""
    for number in range(min(MOST_ROWS, len(rows))):
        batch = rows.batch([number * len(rows) // min(MOST_ROWS, len(rows))])
        for start, end in batch.spans(0):
            yield number, batch.input_ids_BT[0, start:end], batch.labels_BT[0, start:end]


def _runs(labels: Array) -> Iterator[list[int]]:
    """Targets that follow each other without a gap."""
    live = labels != IGNORE
    borders = [0, *(np.flatnonzero(np.diff(live)) + 1), len(labels)]
    for start, end in pairwise(borders):
        if end > start and live[start]:
            yield labels[start:end].tolist()


def _is_learnt(run: str, answers: set[str], *, whole: bool, alone: bool) -> bool:
    """Whether a run is an answer: where not `alone` with words of the template around it, where not `whole` a part of it.

    As text: a token may belong to an answer and to what the template writes before it.
    """
    run = run.strip().strip(REPLACEMENT)  # a part may end within a character
    return (
        run in answers
        or (not alone and any(answer in run for answer in answers))
        or (not whole and any(run in answer for answer in answers))
    )


SURROGATES = range(0xD800, 0xE000)  # halves of characters, which no text has

BLOCK, END = 1 << 12, 0x110000  # code points of one text, and of Unicode

AWKWARD = (
    "",
    " ",
    "  two  spaces  ",
    "\t\n\r\n",
    "e\u0301 a\u0308",
    "👩\u200d👧 🇩🇪 𝔘𝔫𝔦",
    "\0\x7f",
    "你好 東京 한국어 עברית",
    "½ ﬁ ™",
)

ROUND_TRIP = "tokenizer round trip"


def round_trip(encoder: Encoder, texts: Sequence[str], normalize: Callable[[str], str] = str) -> Check:
    """Whether all characters, awkward strings and texts of the data come back as the tokenizer's `normalize` leaves them,
    and text that spells a special token does not become one.

    All characters together have all bytes that UTF-8 has.
    """
    characters = [
        "".join(chr(point) for point in range(start, start + BLOCK) if point not in SURROGATES)
        for start in range(0, END, BLOCK)
    ]
    offered = [*characters, *AWKWARD, *texts]
    changed = lost = 0
    example = ""
    for text, ids in zip(offered, encoder.encode(offered), strict=True):
        back, expected = encoder.decode(ids), normalize(text)
        changed += expected != text
        if back != expected:
            lost += 1
            example = example or next(
                (have for have, got in zip(expected, back, strict=False) if have != got), expected[-1:]
            )
    forged = _forged(encoder)
    figure = (
        f"{len(offered) - lost} of {len(offered)} texts come back, all of Unicode and {len(texts)} of the data among them"
    )
    if changed:
        figure += f"; {changed} of them after the tokenizer's own normalizer, which changes text"
    if lost:
        figure += f"; the first character that does not is U+{ord(example or chr(0)):04X}"
    if forged:
        figure += f"; text that spells {forged[0]} becomes the special token"
    fix = (
        "train the tokenizer with ttrain, or take one with all bytes and no hidden changes of text (tokenizer.existing)"
        if lost else "do not train on such text, or a user can forge turns of a chat"
    )  # fmt: skip
    return make_check(ROUND_TRIP, not (lost or forged), figure, fix)


def _forged(encoder: Encoder) -> list[str]:
    """Special tokens that a text can spell."""
    special = encoder.special_ids()
    names = sorted({*encoder.tokens.values(), "<|im_start|>", "<|endoftext|>", "<s>"})
    return [name for name in names if special.intersection(encoder.encode([f"a{name}b {name}\n"])[0])]
