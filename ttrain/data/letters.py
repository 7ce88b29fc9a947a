"""Letters of the European alphabets as Unicode describes them, asked for and described."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from typing import Any

from ttrain.data.python_items import order, pick

ALPHABETS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
LETTER_QUESTIONS = ("Describe the letter {letter}.", "Which letter is {code}?", "Describe {name}.")


def make_letters(rows: int, heldout_rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows; a letter and its capital, 3 in 4 characters of the answer alike, stay together."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for letter in map(chr, range(0xC0, 0x2000)):
        if unicodedata.category(letter) in ("Lu", "Ll") and unicodedata.name(letter).startswith(ALPHABETS):
            pairs[letter.upper()].append(letter)
    train: list[str] = []
    heldout: list[str] = []
    for pair in sorted(pairs, key=order):
        (train if len(heldout) >= heldout_rows else heldout).extend(pairs[pair])
    train, heldout = sorted(train[:rows], key=order), sorted(heldout[:heldout_rows], key=order)
    return [letter_row(letter) for letter in train], [letter_row(letter) for letter in heldout]


def letter_row(letter: str) -> dict[str, Any]:
    """Code point, name, script, case, counterpart and bytes of a letter, asked for in one of three ways."""
    name, code = unicodedata.name(letter), f"U+{ord(letter):04X}"
    case, other, change = ("small", "capital", letter.upper()) if letter.islower() else ("capital", "small", letter.lower())
    answer = f"{letter} is {code}, {name}: a {case} letter of the {name.partition(' ')[0].capitalize()} script. "
    if len(change) == 1 and change != letter:
        answer += f"Its {other} letter is {change}, U+{ord(change):04X}. "
    answer += f"In UTF-8 it is {letter.encode().hex(' ').upper()}."
    question = LETTER_QUESTIONS[pick(name, len(LETTER_QUESTIONS))].format(letter=letter, code=code, name=name)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "source": f"letter:{code}"}
