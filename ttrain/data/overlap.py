"""Find evaluation items in records by hashed 13-grams of words, whatever case and punctuation they are written with.

A word is a run of letters and digits, or one Chinese or Japanese character. The n-grams of an item that a record has, as a
share of all of them, say how much of the item the record has. GPT-3 took 13 words too
(https://arxiv.org/abs/2005.14165, appendix C).
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.shards import Column, Ids, Offsets, arrow_array, counted_up

GRAM_WORDS = 13  # of one n-gram; a shorter item is one n-gram
FEWEST_WORDS = 8  # of an item; what is shorter stands everywhere
# An n-gram at more places of the items identifies none of them, such as an instruction before each question. Up to 16
# questions may share a passage.
MOST_ALIKE = 16
SPECIAL = b"\xff"  # a special token, among the bytes of the others: a byte that UTF-8 never has
RECORD = 0xFF  # the byte before each record, among the letters of several
# What most templates write between two turns: special tokens, and the name of a role after one or between two.
BETWEEN_TURNS = re.compile(SPECIAL + rb"(?:(?:system|user|assistant|tool|model)(?:\n|(?=" + SPECIAL + rb")))?")
CODE_POINTS = 0x110000
LETTERS = (range(0x40000), range(0xE0000, 0xE0200))  # Unicode has no letters elsewhere
CHUNK_TOKENS = 500_000
FILTER_BITS = 22  # 4 MB: of 200,000 n-grams one in twenty hashes passes by chance
FILTER_SHIFT = np.uint64(64 - FILTER_BITS)
SPACE = ord(" ")
FACTOR = 0x9E3779B97F4A7C15  # odd, without a pattern: of the golden ratio

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class TextMatch(NamedTuple):
    """A record that has n-grams of a text: the share of them."""

    record: int
    text: int
    share: float


class GramTable(NamedTuple):
    """The n-grams of texts, in the order of their hashes, and the number of the text of each.

    filter    whether a hash begins with these bits; most others are passed over without a search
    """

    hashes: Hashes
    texts: Places
    filter: npt.NDArray[np.bool_]


class GramIndex:
    """An index of texts, which `spaced` made, by their n-grams.

    totals    of each text the number of its n-grams that identify it; a text without one is never found
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        grams: defaultdict[int, list[tuple[int, Hashes]]] = defaultdict(list)
        for number, text in enumerate(texts):
            letters, words = _words_of(np.frombuffer(text, np.uint8))
            size = min(GRAM_WORDS, len(words))
            if size >= FEWEST_WORDS:
                grams[size].append((number, WordHashes(letters, words).of_grams(size)))
        self._tables = {size: _table_of(found) for size, found in grams.items()}
        self.totals = np.zeros(len(texts), np.int64)
        for table in self._tables.values():
            self.totals += np.bincount(table.texts, minlength=len(texts))

    def find(self, records: Sequence[bytes]) -> list[TextMatch]:
        """Each record, as `spaced` makes it, with each of the texts of which it has an n-gram."""
        counts: dict[tuple[int, int], int] = {}
        marked = b"".join(b"\xff %b " % record for record in records)
        letters, words = _words_of(np.frombuffer(marked, np.uint8))
        begins = np.flatnonzero(letters == RECORD)
        word_hashes = WordHashes(letters, words)
        for size, table in self._tables.items():
            hashes = word_hashes.of_grams(size)
            hits = np.flatnonzero(table.filter[hashes >> FILTER_SHIFT])
            first = np.searchsorted(table.hashes, hashes[hits])
            alike = np.searchsorted(table.hashes, hashes[hits], "right") - first
            grams = counted_up(first, alike)
            places = np.repeat(words[hits], alike)
            owners = np.searchsorted(begins, places, "right") - 1
            found = np.unique(np.stack([owners, grams], axis=1), axis=0)  # each n-gram once in a record
            pairs = np.stack([found[:, 0], table.texts[found[:, 1]]], axis=1)
            distinct, numbers = np.unique(pairs, axis=0, return_counts=True)
            counts.update(zip(map(tuple, distinct.tolist()), numbers.tolist(), strict=True))
        return [TextMatch(record, text, count / int(self.totals[text])) for (record, text), count in sorted(counts.items())]


def _table_of(grams: Sequence[tuple[int, Hashes]]) -> GramTable:
    hashes = np.concatenate([some for _, some in grams])
    texts = np.repeat([number for number, _ in grams], [len(some) for _, some in grams])
    order = np.argsort(hashes, kind="stable")
    hashes, texts = hashes[order], texts[order]
    alike = np.searchsorted(hashes, hashes, "right") - np.searchsorted(hashes, hashes)
    hashes, texts = hashes[alike <= MOST_ALIKE], texts[alike <= MOST_ALIKE]
    first_bits = np.zeros(1 << FILTER_BITS, np.bool_)
    first_bits[hashes >> FILTER_SHIFT] = True
    return GramTable(hashes, texts, first_bits)


class WordHashes:
    """Hashes of the letters of some words after another: differences of the prefix sums of a polynomial."""

    def __init__(self, letters: Bytes, words: Places) -> None:
        self._size, self._words = len(letters), words
        self._sums = np.zeros(len(letters) + 1, np.uint64)
        np.cumsum(_byte_values()[letters] * _powers(FACTOR, len(letters)), out=self._sums[1:])
        self._inverses = _powers(pow(FACTOR, -1, 1 << 64), len(letters))[words]

    def of_grams(self, size: int) -> Hashes:
        """The hash of `size` words from each word on that has so many."""
        count = max(0, len(self._words) - size + 1)
        ends = np.append(self._words, self._size)[size:]
        hashes: Hashes = (self._sums[ends] - self._sums[self._words[:count]]) * self._inverses[:count]
        return hashes ^ (hashes >> np.uint64(32))


def _powers(factor: int, count: int) -> Hashes:
    powers = np.full(count, factor, np.uint64)
    powers[:1] = 1
    return powers.cumprod(dtype=np.uint64)


@lru_cache(maxsize=1)
def _byte_values() -> Hashes:
    return np.random.default_rng(13).integers(1 << 63, size=256, dtype=np.uint64)


def _words_of(text: Bytes) -> tuple[Bytes, Places]:
    """(letters of a text with spaces, where each word begins in them)."""
    is_letter = text != SPACE
    begins = is_letter.copy()
    begins[1:] &= ~is_letter[:-1]
    begins |= (text >= 0xE3) & (text <= 0xE9)  # the first byte of U+3000 to U+9FFF: Chinese and Japanese
    places = np.cumsum(is_letter) - 1
    return text[is_letter], places[begins]


def spaced(text: str) -> bytes:
    """The letters and digits of a text, in lower case, without accents, full-width ones as ASCII, between spaces."""
    points = _table()[np.frombuffer(text.encode("utf-32-le", "replace"), "<u4")]
    reduced: bytes = points[points != 0].tobytes()
    return reduced.decode("utf-32-le").encode("utf-8")


def plain(text: str) -> bytes:
    """The letters and digits of a text without what stands between them.

    White space, punctuation and symbols are left out: copies of a text differ in them, and Chinese has no spaces (GPT-4's
    check of its benchmarks leaves them out too: https://arxiv.org/abs/2303.08774, appendix C). Traditional and simplified
    characters stay different.
    """
    return spaced(text).replace(b" ", b"")


def records(column: Column, token_bytes: TokenBytes, first: int, last: int) -> list[bytes]:
    """The letters and digits of the records `first` to `last`, between spaces, as `spaced` makes them of a text.

    The turns of a chat are joined like those of an item, so that an item of many short turns is found whole too. Bytes that
    are no UTF-8, of ids that a model generated, are left out.
    """
    texts = token_bytes.split(column.tokens, column.offsets[first : last + 1])
    return [spaced(BETWEEN_TURNS.sub(b" ", text).decode("utf-8", "replace")) for text in texts]


def chunks(column: Column, tokens: int = CHUNK_TOKENS) -> list[tuple[int, int]]:
    """Ranges of records of about `tokens` tokens, which bounds memory; a longer record is a range of its own."""
    ranges, first = [], 0
    while first < len(column):
        last = max(first + 1, int(np.searchsorted(column.offsets, column.offsets[first] + tokens, "right")) - 1)
        ranges.append((first, last))
        first = last
    return ranges


class TokenBytes:
    """The bytes of each id of a tokenizer. Word separators may differ, since plain text leaves them out."""

    def __init__(self, encoder: Encoder) -> None:
        path = encoder.directory / "tokenizer.json"
        tokenizer = json.loads(path.read_bytes())
        is_bytes = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
        token_bytes = [b""] * len(encoder)
        for piece, number in open_tokenizer(path).get_vocab(with_added_tokens=False).items():
            token_bytes[number] = _bytes_of(piece, is_bytes=is_bytes)
        for token in tokenizer["added_tokens"]:
            token_bytes[token["id"]] = token["content"].encode("utf-8")
        for number in encoder.special_ids():
            token_bytes[number] = SPECIAL
        self._array = pa.array(token_bytes, pa.binary())

    def split(self, ids: Ids, offsets: Offsets) -> list[bytes]:
        """The bytes of each record, at 400 MB a second; the library's decoder does 10 MB a second."""
        taken = self._array.take(arrow_array(ids[offsets[0] : offsets[-1]].astype(np.int32)))
        _, borders, data = taken.buffers()
        borders = np.frombuffer(borders, np.int32)[offsets - offsets[0]].tolist()
        joined = data.to_pybytes() if data else b""
        return [joined[start:end] for start, end in itertools.pairwise(borders)]


@lru_cache(maxsize=2)
def token_bytes_of(directory: str) -> TokenBytes:
    """The token bytes of the tokenizer in a directory, cached."""
    return TokenBytes(Encoder(Path(directory), fast=False))


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """Table from each code point to its reduced one, to a space between words, or to 0 if it is left out. Takes 0.3 s."""
    table = np.full(CODE_POINTS, SPACE, np.uint32)
    for point in itertools.chain(*LETTERS):
        if 0xD800 <= point < 0xE000:
            continue
        letter = chr(point)
        for form in ("NFKD", "NFKC"):  # accents are removed, but a Hangul syllable stays whole
            folded = unicodedata.normalize(form, letter).casefold()
            parts = [character for character in folded if unicodedata.category(character)[0] in "LN"]
            if len(parts) == 1:
                break
        if parts:
            table[point] = ord(parts[0])  # of a ligature that has no letter of its own, the first
        elif unicodedata.category(letter)[0] in "MC" and letter not in "\t\n\r\v\f":  # accents, joiners
            table[point] = 0
    return table


def _bytes_of(piece: str, *, is_bytes: bool) -> bytes:
    """The bytes of a token of the vocabulary."""
    if is_bytes:
        return bytes(_letters()[letter] for letter in piece)
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.removeprefix("##").replace("\u2581", " ").encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable Latin-1 for itself, the others from 256 on.

    As in GPT-2's encoder (https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode).
    """
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(map(ord, ByteLevel.alphabet()))
    printable = [number for number in letters if number < 256]
    others = sorted({*range(256)} - {*printable})
    return dict(zip(map(chr, letters), [*printable, *others], strict=True))
