"""Text reduced to what two copies of it have in common: letters and digits in lower case, as UTF-8. And shards read so."""

from __future__ import annotations

import json
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.core.files import parse_json
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.shards import Column, Ids

# What stands between records, and for special tokens: surrogates, which no text has in UTF-8.
RECORD, SPECIAL = "\ud800", "\ud801"
RECORD_BYTES, SPECIAL_BYTES = (mark.encode("utf-8", "surrogatepass") for mark in (RECORD, SPECIAL))
# What most templates write between two turns: special tokens, and the name of a role after one or between two.
BETWEEN_TURNS = re.compile(SPECIAL_BYTES + rb"(?:(?:system|user|assistant|tool|model)(?:\n|(?=" + SPECIAL_BYTES + rb")))?")
CODE_POINTS = 0x110000
LETTERS = (*range(0x40000), *range(0xE0000, 0xE0200))  # Unicode has no letters elsewhere
CHUNK_TOKENS = 500_000
Bytes = npt.NDArray[np.uint8]


def plain(text: str) -> bytes:
    """The letters and digits of a text, in lower case, without accents, full-width ones as ASCII.

    White space, punctuation and symbols are left out: copies of a text differ in them, and Chinese has no spaces (GPT-4's
    check of its benchmarks leaves them out too: https://arxiv.org/abs/2303.08774, appendix C). Traditional and simplified
    characters stay different.
    """
    return _reduced(text.encode("utf-32-le", "replace"))


def records(column: Column, token_bytes: TokenBytes, first: int, last: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """(plain text of the records `first` to `last` one after the other, where each begins in it).

    The turns of a chat follow each other as those of an item do, so that one of many short turns is found whole too.
    """
    start, end = column.offsets[first], column.offsets[last]
    ids = np.insert(column.tokens[start:end].astype(np.int32), column.offsets[first:last] - start, token_bytes.record)
    text = _decoded(BETWEEN_TURNS.sub(b"", token_bytes.join(ids)))
    found = np.frombuffer(_reduced(text.encode("utf-32-le", "surrogatepass")), np.uint8)
    begins = np.flatnonzero(found[:-1] == RECORD_BYTES[0])  # the byte begins letters of Hangul, too
    begins = begins[found[begins + 1] == RECORD_BYTES[1]]
    return found, begins[found[begins + 2] == RECORD_BYTES[2]]


def chunks(column: Column, tokens: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Ranges of records of about so many tokens, which bound the memory; a longer record stands alone."""
    found, first = [], 0
    while first < len(column):
        last = max(first + 1, int(np.searchsorted(column.offsets, column.offsets[first] + tokens, "right")) - 1)
        found.append((first, last))
        first = last
    return found


class TokenBytes:
    """The bytes of each id of a tokenizer. What separates words there is left out of plain text anyway."""

    def __init__(self, encoder: Encoder) -> None:
        path = encoder.directory / "tokenizer.json"
        tokenizer = parse_json(path.read_bytes())
        is_bytes = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
        added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        special = encoder.special_ids()
        found = [b""] * (len(encoder) + 1)
        for piece, number in open_tokenizer(path).get_vocab(with_added_tokens=False).items():
            found[number] = _bytes_of(piece, is_bytes=is_bytes)
        for number, content in added.items():
            found[number] = content.encode("utf-8")
        for number in special:
            found[number] = SPECIAL_BYTES
        self.record = len(encoder)
        found[self.record] = RECORD_BYTES
        self._array = pa.array(found, pa.binary())

    def join(self, ids: Ids) -> bytes:
        """The bytes of all ids. The library's decoder makes 10 MB a second of what this makes 400 of."""
        buffer = pa.py_buffer(np.ascontiguousarray(ids))
        taken = self._array.take(pa.Array.from_buffers(pa.from_numpy_dtype(ids.dtype), len(ids), [None, buffer]))
        found: bytes = taken.buffers()[2].to_pybytes() if len(ids) else b""
        return found

    def text(self, ids: Ids) -> str:
        """A few ids as people read them, on one line, without special tokens."""
        found = self.join(ids.astype(np.int32)).replace(SPECIAL_BYTES, b" ").decode("utf-8", "replace")
        return " ".join(found.split()).rstrip("\ufffd")  # the ids may end within a character


@lru_cache(maxsize=2)
def token_bytes_of(directory: str) -> TokenBytes:
    """Those of the tokenizer in a directory, made once a process."""
    return TokenBytes(Encoder(Path(directory), fast=False))


def _reduced(text: bytes) -> bytes:
    """UTF-32 to plain UTF-8."""
    points = _table()[np.frombuffer(text, "<u4")]
    kept: bytes = points[points != 0].tobytes()
    return kept.decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    """UTF-8 to text. Ids that are no text (a model's own, or of a tokenizer that lost bytes) must not end the work."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return RECORD.join(part.decode("utf-8", "replace") for part in data.split(RECORD_BYTES))


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """By code point: the one that it is reduced to, or 0 where it is left out. 0.3 s."""
    found = np.zeros(CODE_POINTS, np.uint32)
    for point in LETTERS:
        if 0xD800 <= point < 0xE000:
            continue
        letter = chr(point)
        for form in ("NFKD", "NFKC"):  # accents come off, but a Hangul syllable stays whole
            folded = unicodedata.normalize(form, letter).casefold()
            parts = [part for part in folded if unicodedata.category(part)[0] in "LN"]
            if len(parts) == 1:
                break
        if parts:
            found[point] = ord(parts[0])  # of a ligature that has no letter of its own, the first
    found[ord(RECORD)] = ord(RECORD)
    return found


def _bytes_of(piece: str, *, is_bytes: bool) -> bytes:
    """A token of the vocabulary as the bytes that it stands for."""
    if is_bytes:
        return bytes(_letters()[letter] for letter in piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.removeprefix("##").replace("\u2581", " ").encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable Latin-1 for itself, the others from 256 on.

    As GPT-2's encoder has it (https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode).
    """
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [number for number in range(256) if number not in own]
    return {chr(number): number for number in own} | {chr(256 + place): number for place, number in enumerate(others)}
