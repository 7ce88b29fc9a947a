"""Check of a tokenizer: nothing is lost between text and tokens, and no text becomes a special token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ttrain.data.encoder import Encoder
from ttrain.doctor.check import Check, judged

SURROGATES = range(0xD800, 0xE000)  # halves of characters, which no text has
BLOCK = 1 << 12  # code points of one text
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
NAME = "tokenizer round trip"


def round_trip(encoder: Encoder, texts: Sequence[str], normalize: Callable[[str], str] = str) -> Check:
    """Every character that there is, awkward strings and texts of the data come back as the tokenizer's `normalize` leaves
    them; text that spells a special token becomes none.

    All characters together have all bytes that UTF-8 has.
    """
    characters = ["".join(map(chr, range(start, start + BLOCK))) for start in range(0, 0x110000, BLOCK)
                  if start not in SURROGATES]  # fmt: skip
    characters[0xD000 // BLOCK] = "".join(map(chr, range(0xD000, 0xD800)))
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
    cure = (
        "train the tokenizer with ttrain, or take one with all bytes and no hidden changes of text (tokenizer.existing)"
        if lost else "do not train on such text, or a user can forge turns of a chat"
    )  # fmt: skip
    return judged(NAME, not (lost or forged), figure, cure)


def _forged(encoder: Encoder) -> list[str]:
    """Special tokens that a text can spell."""
    special = encoder.special_ids()
    names = sorted({*encoder.tokens.values(), "<|im_start|>", "<|endoftext|>", "<s>"})
    return [name for name in names if special.intersection(encoder.encode([f"a{name}b {name}\n"])[0])]
