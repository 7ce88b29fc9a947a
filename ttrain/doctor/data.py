"""Checks of the data: texts come back, targets are the next tokens, in chats the answers."""

# Targets are derived a second time here, from the text of the records.

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.files import JsonDict
from ttrain.data import chat
from ttrain.data.chat_templates import Message, is_live
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.packing import IGNORE, Array, Rows
from ttrain.doctor.parts import Finding

TEXTS = 200  # records of the data, through the tokenizer and back
COMPARED = 3  # conversations
MOST_ROWS = 64
SHOWN_CHARACTERS = 40
SHOWN_TOKENS = 8
END_TOKENS = 3  # an existing template may end an answer with the token and a newline after it
REPLACEMENT = "\ufffd"  # what bytes that form no character are decoded to
SURROGATES = range(0xD800, 0xE000)  # no valid text has these code points
BLOCK = 1 << 12  # code points in one text of the round trip
END = 0x110000  # number of Unicode code points
AWKWARD = (
    "",
    " ",
    "  two  spaces  ",
    "\t\n\r\n",
    "e\u0301 a\u0308",
    "👩\u200d👧 🇩🇪 𝔘𝔫𝔦",
    "\0\x7f",
    "½ ﬁ ™",
)


@dataclass(frozen=True)
class Data:
    """What a stage reads. `kind`: documents, chats or pairs; `records`: the held-out ones as text.

    `masked`: regions of them are masked on purpose, by `mask_intervals`.
    """

    kind: str
    encoder: Encoder
    rows: Rows
    heldout: Rows
    records: Sequence[JsonDict]
    masked: bool = False


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    # Of a chat, or of a prompt and its answers.
    parts = (record.get(name, ()) for name in ("messages", "prompt", "chosen", "rejected"))
    return list(itertools.chain.from_iterable(parts))


def round_trip(data: Data) -> Finding:
    """Whether all characters and texts of the data come back from the tokenizer, normalized.

    And whether no text becomes a special token. All of Unicode together has every byte of UTF-8.
    """
    encoder = data.encoder
    normalizer = open_tokenizer(encoder.directory / "tokenizer.json").normalizer
    texts = []
    for first in range(0, END, BLOCK):
        block = range(first, first + BLOCK)
        texts.append("".join(chr(number) for number in block if number not in SURROGATES))
    texts += AWKWARD
    for record in data.records[:TEXTS]:
        texts += [turn["content"] for turn in _turns(record)] or [record["text"]]
    expected = [normalizer.normalize_str(text) for text in texts] if normalizer else texts
    pairs = zip(expected, map(encoder.decode, encoder.encode(texts)), strict=True)
    lost = [pair for pair in pairs if pair[0] != pair[1]]
    if lost:
        characters = itertools.zip_longest(*lost[0], fillvalue="")
        changed = next(sent or got for sent, got in characters if sent != got)
        return Finding(
            False,
            f"{len(lost)} of {len(texts)} texts come back changed, first U+{ord(changed):04X}",
            "train the tokenizer with ttrain, or take one with all bytes (tokenizer.existing)",
        )
    for name in sorted({*encoder.tokens.values(), "<|im_start|>", "<|endoftext|>", "<s>"}):
        if not encoder.special_ids().isdisjoint(encoder.encode([f"a{name}b {name}\n"])[0]):
            return Finding(
                False,
                f"text that spells {name} becomes the special token",
                "do not train on such text, or a user can forge turns of a chat",
            )
    return Finding(
        True, f"all of Unicode and {len(data.records[:TEXTS])} records of the data come back"
    )


def template(data: Data) -> Finding | None:
    """Whether targets begin where the prompt for an answer ends, in some conversations."""
    compared = 0
    for record in data.records:
        turns = record.get("messages") or [*record.get("prompt", ()), *record.get("chosen", ())]
        messages = tuple(map(Message.from_json, turns))
        while messages and not is_live(messages[-1]):
            messages = messages[:-1]
        if not messages or any(turn.thought for turn in messages) or compared == COMPARED:
            continue  # chat templates may drop earlier reasoning, so ids would differ
        ids, live = chat.encode_chat(data.encoder, messages)
        prompt = chat.prompt_ids(data.encoder, messages[:-1])
        size = len(prompt)
        if ids[:size] != prompt or live[size - 1 : size + 1] != [False, True]:
            begins = "".join(map(data.encoder.spelling, prompt[-SHOWN_TOKENS:]))
            return Finding(
                False, f"an answer is asked for by {begins!r}, but not trained behind it"
            )
        compared += 1
    if not compared:
        return None
    return Finding(
        True, f"{compared} conversations have their answers right behind the generation prompt"
    )


Fault = Callable[[Array, Array], str]  # (ids, labels) of a record: what is wrong with its labels


def labels(data: Data) -> Finding:
    """Whether every target is the next token: all of a document but the first, a chat's answers."""
    # Every run of targets of a chat ends with the token that ends an answer and has no other
    # special one; of the held-out rows, whose text is known, it is the text of an answer.
    if data.masked:  # regions that are masked on purpose leave nothing else to compare
        return _check_rows(data.rows, lambda ids, labels: "")
    if data.kind == "documents":
        return _check_rows(data.rows, partial(_document_fault, data.encoder))
    finding = _check_rows(data.rows, partial(_answer_fault, data, data.rows, None))
    if not finding.ok or not len(data.heldout):
        return finding
    turns = itertools.chain.from_iterable(map(_turns, data.records))
    answers = {turn["content"] for turn in turns if turn["role"] == "assistant"}
    said = {data.encoder.decode(ids).strip() for ids in data.encoder.encode(sorted(answers))}
    heldout = _check_rows(data.heldout, partial(_answer_fault, data, data.heldout, said))
    return replace(heldout, measured=f"{finding.measured}; held out: {heldout.measured}")


def _check_rows(rows: Rows, fault: Fault) -> Finding:
    positions = targets = 0
    shown = min(MOST_ROWS, len(rows))
    for number in (row * len(rows) // shown for row in range(shown)):
        batch = rows.batch([number])
        for start, end in batch.spans(0):
            ids = batch.input_ids_BT[0, start:end]
            labels = batch.labels_BT[0, start:end]
            others = (labels[:-1] != IGNORE) & (labels[:-1] != ids[1:])
            wrong = "a target is not the next token" if others.any() else fault(ids, labels)
            if wrong:
                return Finding(False, f"row {number}, record at {start}: {wrong}")
            positions += end - start
            targets += int((labels != IGNORE).sum())
    return Finding(
        targets > 0,
        f"{targets} of {positions} tokens in {shown} rows are trained on, each the next one",
    )


def _document_fault(encoder: Encoder, ids: Array, labels: Array) -> str:
    # Every token of a document but its first is a target, at the position before it.
    if (labels == encoder.bos_id).any():
        return "the token that begins a document is trained on"
    without = labels[: -1 if ids[-1] == encoder.eos_id else None] == IGNORE
    return f"position {without.argmax()} has no target" if without.any() else ""


def _answer_fault(
    data: Data,
    rows: Rows,
    answers: set[str] | None,
    _ids: Array,
    labels: Array,
) -> str:
    # `answers`: their texts, where known.
    encoder = data.encoder
    is_own = encoder.template == "own"  # whose words around an answer may be trained on with it
    is_whole = not rows.counts().get("cut_records")
    for run in np.split(labels, np.flatnonzero(np.diff(labels != IGNORE)) + 1):
        if run[0] == IGNORE:
            continue
        text = encoder.decode(run.tolist())
        why = ""
        words = text.strip().strip(REPLACEMENT)  # a part may end within a character
        # As text: a token may belong to an answer and to what the template writes before it.
        is_said = (
            answers is None
            or words in answers
            or (is_own and any(answer in words for answer in answers))
            or (not is_whole and any(words in answer for answer in answers))
        )
        if is_whole and encoder.end_id not in run[-END_TOKENS:]:
            why = "without the token that ends an answer"
        elif not is_own and not encoder.special_ids().isdisjoint(run[:-1].tolist()):
            why = "with what stands between turns"
        elif not is_said:
            why = "which no assistant says"
        if why:
            return f"{text[:SHOWN_CHARACTERS]!r} is trained on, {why}"
    return ""
