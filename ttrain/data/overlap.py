"""Find many short texts in a long one, in part or whole: first by seeds of 24 bytes, then byte by byte.

A common part counts from `ngram` bytes on, or if it is a whole text. Every such part has a seed, since the seeds of a
text lie so close that any `ngram` bytes hold one; and each hit of a seed is compared byte for byte, so there are no
false matches. Of the seeds of a common part that follow one another only the first is looked at.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ttrain.core.files import parse_json
from ttrain.data.common_parts import (
    MANY_BYTES,
    WORD_BYTES,
    Bytes,
    Comparison,
    Parts,
    Places,
    is_first,
    merged,
    occurrences,
    padded_words,
)
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.shards import Column, Ids, arrow_array, counted_up, offsets_of

SEED_BYTES = 24  # eight Chinese characters, or four to five English words

BLOCK_BYTES = 1 << 20  # searched at a time: each position that is a seed takes some 100 bytes until it is compared

SLICE_BYTES = 1 << 16  # hashed at a time, so that intermediate values stay in the cache

FILTER_PER_SEED = 64  # slots of the filter: one position in 64 passes it by chance

COARSE_BITS = 20  # of a filter before it that stays in the cache: 3.5 ns a byte where the large one alone took 9
# A seed at more places of the texts identifies none of them, such as an instruction before each question, and each record
# with that instruction would cost as many comparisons. If a record contains a whole text, its other seeds find it. With 64
# places 652 chats of the quickstart seemed to hold three others of one instruction; up to 16 questions may share a passage.
MOST_ALIKE = 16

MOST_PLACES = 256  # of the rarest seed of a text that has only such ones, as many questions of one pattern: it is kept

MOST_HITS = 1 << 20  # of seeds in memory at once: a long text that repeats itself has MOST_PLACES of them at each byte

FEWEST_LETTERS = 5  # different bytes of a seed: "hahaha" and "000000" stand everywhere
# Odd numbers without a pattern: of the golden ratio, and of splitmix64 (https://doi.org/10.1145/2660193.2660195).
FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]


class TextMatch(NamedTuple):
    """A record that contains parts of a text: the number of the text's bytes in it, and the longest part."""

    record: int
    text: int
    bytes: int
    longest: int


class TextIndex:
    """A search index of plain texts. A text shorter than a seed is never found."""

    def __init__(self, texts: Sequence[bytes], ngram: int) -> None:
        """`ngram` is at least SEED_BYTES."""
        assert ngram >= SEED_BYTES, f"parts of {ngram} bytes have no seed of {SEED_BYTES}"
        lengths = np.array([len(text) for text in texts], np.int64)
        self.lengths, self.needed = lengths, np.minimum(lengths, ngram)
        self._data = np.frombuffer(b"\0" + b"".join(text + b"\0" for text in texts), np.uint8)  # no plain text has a zero
        self._words = padded_words(self._data, 0)
        self._starts = 1 + offsets_of(lengths + 1)
        places = [
            _places(start, start + length - SEED_BYTES, max(1, needed - SEED_BYTES + 1))
            for start, length, needed in zip(self._starts.tolist(), lengths.tolist(), self.needed.tolist(), strict=False)
        ]
        at = np.concatenate([np.zeros(0, np.int64), *places]).astype(np.int64)
        hashes = [np.zeros(0, np.uint64)]
        seed_places = [np.zeros(0, np.int64)]
        for some in np.array_split(at, 1 + len(at) // SLICE_BYTES):
            windows = self._data[some[:, None] + np.arange(SEED_BYTES)]
            several = (np.diff(np.sort(windows, axis=1), axis=1) != 0).sum(axis=1) + 1 >= FEWEST_LETTERS
            seed_places.append(some[several])
            hashes.append(seeds(windows[several].reshape(-1))[::SEED_BYTES])
        self._sort(np.concatenate(hashes), np.concatenate(seed_places))

    def _sort(self, hashes: Hashes, at: Places) -> None:
        """Sort the seeds by hash, and build two filters that reject most positions of other texts."""
        order = np.argsort(hashes, kind="stable")
        hashes, at = hashes[order], at[order]
        alike = np.searchsorted(hashes, hashes, "right") - np.searchsorted(hashes, hashes)
        of = self._text_at(at)
        rarest = np.full(len(self.lengths), len(at) + 1)
        np.minimum.at(rarest, of, alike)
        is_usable = (alike <= MOST_ALIKE) | ((alike == rarest[of]) & (alike <= MOST_PLACES))
        # A text that repeats itself is found by MOST_ALIKE places of a seed. With all 202 of an item of 20 kB each record
        # with its period was compared at 400 places: 4.9 s a MB of records of 5 kB, now 0.6.
        is_again = (hashes[MOST_ALIKE:] == hashes[:-MOST_ALIKE]) & (of[MOST_ALIKE:] == of[:-MOST_ALIKE])
        is_usable[MOST_ALIKE:] &= ~is_again
        self._chain(hashes[is_usable], at[is_usable])
        bits = max(COARSE_BITS, int(np.ceil(np.log2(max(1, len(self._hashes)) * FILTER_PER_SEED))))
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)
        self._filter[(self._hashes >> self._shift).view(np.int64)] = True
        self._coarse = self._filter.reshape(1 << COARSE_BITS, -1).any(axis=1)

    def _chain(self, hashes: Hashes, at: Places) -> None:
        """Sort the seeds so that of each hash those come first that most often stand behind the same bytes, in a chain.

        Where such a seed is hit behind those bytes, the seed before it is hit too, on the way to the same common part, and
        the hits of the whole chain add nothing. A text that repeats a period has one chain for each of its bytes, and data
        with that period would hit at each byte as many seeds as the text has periods.
        """
        gaps, contexts = self._contexts(hashes, at)
        frequency = np.where(gaps > 0, occurrences(hashes, contexts), 0)
        order = np.lexsort((contexts, -frequency, hashes))
        hashes, at, gaps = hashes[order], at[order], gaps[order]
        first_alike = np.searchsorted(hashes, hashes)  # of each seed, the first of the same hash, with the commonest context
        texts = Comparison(self._data, self._data, self._words)
        is_behind = self._is_behind(texts, at, at[first_alike], gaps[first_alike])
        is_chained = (gaps > 0) & (gaps == gaps[first_alike]) & is_behind
        order = np.lexsort((~is_chained, hashes))
        self._hashes, self._at = hashes[order], at[order]
        # Of all seeds of a hash, the distance of the first from the seed before it; of the first, the number in its chain.
        self._gaps = gaps[first_alike]
        self._chained = np.bincount(first_alike[is_chained], minlength=len(at))

    def _contexts(self, hashes: Hashes, at: Places) -> tuple[Places, Hashes]:
        """Of each seed the distance from the seed before it, and a hash of the two; 0 for the first of a text, and for one
        that is far from the seed before it."""
        by_place = np.argsort(at)
        last, this = by_place[:-1], by_place[1:]
        is_near = (at[this] - at[last] <= MANY_BYTES) & (self._text_at(at[this]) == self._text_at(at[last]))
        last, this = last[is_near], this[is_near]
        gaps, contexts = np.zeros(len(at), np.int64), np.zeros(len(at), np.uint64)
        gaps[this] = at[this] - at[last]
        contexts[this] = (hashes[last] ^ gaps[this].astype(np.uint64)) * np.uint64(FACTORS[1])
        return gaps, contexts

    @staticmethod
    def _is_behind(comparison: Comparison, data_places: Places, text_places: Places, gaps: Places) -> npt.NDArray[np.bool_]:
        """Whether the seeds at these places are equal, and so many bytes before them."""
        is_equal = comparison.equal_after(data_places, text_places, SEED_BYTES) >= SEED_BYTES
        is_equal[is_equal] = (
            comparison.equal_before(data_places[is_equal], text_places[is_equal], gaps[is_equal]) >= gaps[is_equal]
        )
        return is_equal

    @property
    def searchable(self) -> npt.NDArray[np.bool_]:
        """Which of the texts have a seed."""
        has_seed = np.zeros(len(self.lengths), np.bool_)
        has_seed[self._text_at(self._at)] = True
        return has_seed

    def find(self, data: Bytes, begins: Places) -> list[TextMatch]:
        """Find the texts in the records that begin at these positions of plain text."""
        comparison = Comparison(data, self._data, self._words)
        parts = merged([self._parts(begins, comparison, *hits) for hits in self._hits(comparison)])
        texts = self._text_at(parts.starts)
        begins_pair = is_first(parts.records, texts)
        ends_before = np.append(0, parts.ends[:-1])  # of another text it lies before this one, of another record anywhere
        covered = parts.ends - np.where(begins_pair, parts.starts, np.maximum(parts.starts, ends_before))
        firsts = np.flatnonzero(begins_pair)
        if not len(firsts):
            return []
        covered, longest = np.add.reduceat(covered, firsts), np.maximum.reduceat(parts.ends - parts.starts, firsts)
        columns = (parts.records[firsts], texts[firsts], covered, longest)
        return [TextMatch(*figures) for figures in zip(*(column.tolist() for column in columns), strict=True)]

    def _text_at(self, places: npt.ArrayLike) -> Places:
        text_numbers: Places = np.searchsorted(self._starts, places, "right") - 1
        return text_numbers

    def _hits(self, comparison: Comparison) -> Iterator[tuple[Places, Places]]:
        """(positions of seeds in the data, positions of the same bytes in the texts), some at a time, without those hits
        whose chain has an earlier one; a position may occur several times."""
        for data_places, seed_hashes in self._passed(comparison.data):
            first, last = np.searchsorted(self._hashes, seed_hashes), np.searchsorted(self._hashes, seed_hashes, "right")
            is_hit = first < last
            data_places, first, last = data_places[is_hit], first[is_hit], last[is_hit]
            chained = np.flatnonzero(self._chained[first])
            firsts = first[chained]
            is_behind = self._is_behind(comparison, data_places[chained], self._at[firsts], self._gaps[firsts])
            first[chained[is_behind]] += self._chained[firsts[is_behind]]
            counts = last - first
            total = np.cumsum(counts)
            limits = np.searchsorted(total, np.arange(MOST_HITS, total[-1] if len(total) else 0, MOST_HITS))
            for some in np.split(np.arange(len(counts)), limits):
                positions = np.repeat(data_places[some], counts[some])
                text_places = self._at[counted_up(first[some], counts[some])]
                same = comparison.equal_after(positions, text_places, SEED_BYTES) >= SEED_BYTES
                yield positions[same], text_places[same]

    def _passed(self, data: Bytes) -> Iterator[tuple[Places, Hashes]]:
        """(positions that pass the filters, their hashes), of BLOCK_BYTES at a time."""
        for begin in range(0, len(data) - SEED_BYTES + 1 if len(self._hashes) else 0, BLOCK_BYTES):
            place_slices, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
            for start in range(begin, min(begin + BLOCK_BYTES, len(data) - SEED_BYTES + 1), SLICE_BYTES):
                slice_hashes = seeds(data[start : start + SLICE_BYTES + SEED_BYTES - 1])
                passed = np.flatnonzero(self._coarse.take((slice_hashes >> np.uint64(64 - COARSE_BITS)).view(np.int64)))
                passed = passed[self._filter.take((slice_hashes[passed] >> self._shift).view(np.int64))]
                place_slices.append(passed + start)
                hashes.append(slice_hashes[passed])
            yield np.concatenate(place_slices), np.concatenate(hashes)

    def _parts(self, begins: Places, comparison: Comparison, data_places: Places, text_places: Places) -> Parts:
        """The common parts at these hits that are long enough."""
        needed = self.needed[self._text_at(text_places)]
        most = int(needed.max(initial=0)) - SEED_BYTES
        bytes_before = comparison.equal_before(data_places, text_places, most)
        bytes_after = comparison.equal_after(data_places + SEED_BYTES, text_places + SEED_BYTES, most)
        enough = bytes_before + bytes_after + SEED_BYTES >= needed
        data_places, text_places = data_places[enough], text_places[enough]
        return comparison.parts(np.searchsorted(begins, data_places, "right") - 1, data_places, text_places)


def _places(first: int, last: int, step: int) -> Places:
    """Where the seeds of a text begin; the last is at its end, which may be all that distinguishes it from others."""
    return np.unique(np.append(np.arange(first, last, step), [last] * (last >= first))).astype(np.int64)


def seeds(data: Bytes) -> Hashes:
    """Hash the SEED_BYTES at each position: a sum of three products, of which the high bits are used."""
    if len(data) < SEED_BYTES:
        return np.zeros(0, np.uint64)
    word_values: Hashes = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", np.ascontiguousarray(data), strides=(1,))
    hashes = word_values[: -2 * WORD_BYTES] * np.uint64(FACTORS[0])
    hashes += word_values[WORD_BYTES:-WORD_BYTES] * np.uint64(FACTORS[1])
    hashes += word_values[2 * WORD_BYTES :] * np.uint64(FACTORS[2])
    return hashes


# Separators of records, and replacements of special tokens: surrogates, which no text has in UTF-8.
RECORD, SPECIAL = "\ud800", "\ud801"

RECORD_BYTES, SPECIAL_BYTES = (mark.encode("utf-8", "surrogatepass") for mark in (RECORD, SPECIAL))
# What most templates write between two turns: special tokens, and the name of a role after one or between two.
BETWEEN_TURNS = re.compile(SPECIAL_BYTES + rb"(?:(?:system|user|assistant|tool|model)(?:\n|(?=" + SPECIAL_BYTES + rb")))?")

CODE_POINTS = 0x110000

LETTERS = (range(0x40000), range(0xE0000, 0xE0200))  # Unicode has no letters elsewhere

CHUNK_TOKENS = 500_000

REDUCED_POINTS = 1 << 20


def plain(text: str) -> bytes:
    """The letters and digits of a text, in lower case, without accents, full-width ones as ASCII.

    White space, punctuation and symbols are left out: copies of a text differ in them, and Chinese has no spaces (GPT-4's
    check of its benchmarks leaves them out too: https://arxiv.org/abs/2303.08774, appendix C). Traditional and simplified
    characters stay different.
    """
    return _reduced(text.encode("utf-32-le", "replace"))


def records(column: Column, token_bytes: TokenBytes, first: int, last: int) -> tuple[Bytes, Places]:
    """(plain text of the records `first` to `last` concatenated, where each begins in it).

    The turns of a chat are joined like those of an item, so that an item of many short turns is found whole too.
    """
    start, end = column.offsets[first], column.offsets[last]
    ids = np.insert(column.tokens[start:end].astype(np.int32), column.offsets[first:last] - start, token_bytes.record)
    joined = token_bytes.join(ids)
    del ids  # of a long record, four times its text
    text = _decoded(BETWEEN_TURNS.sub(b"", joined))
    plain_bytes = np.frombuffer(_reduced(text.encode("utf-32-le", "surrogatepass")), np.uint8)
    begins = np.flatnonzero(plain_bytes[:-1] == RECORD_BYTES[0])  # the byte begins letters of Hangul, too
    begins = begins[plain_bytes[begins + 1] == RECORD_BYTES[1]]
    return plain_bytes, begins[plain_bytes[begins + 2] == RECORD_BYTES[2]]


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
        tokenizer = parse_json(path.read_bytes())
        is_bytes = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
        token_bytes = [b""] * (len(encoder) + 1)
        for piece, number in open_tokenizer(path).get_vocab(with_added_tokens=False).items():
            token_bytes[number] = _bytes_of(piece, is_bytes=is_bytes)
        for token in tokenizer["added_tokens"]:
            token_bytes[token["id"]] = token["content"].encode("utf-8")
        for number in encoder.special_ids():
            token_bytes[number] = SPECIAL_BYTES
        self.record = len(encoder)
        token_bytes[self.record] = RECORD_BYTES
        self._array = pa.array(token_bytes, pa.binary())

    def join(self, ids: Ids) -> bytes:
        """The bytes of all ids, at 400 MB a second; the library's decoder does 10 MB a second."""
        joined: bytes = self._array.take(arrow_array(ids)).buffers()[2].to_pybytes() if len(ids) else b""
        return joined

    def text(self, ids: Ids) -> str:
        """Readable text of a few ids, on one line, without special tokens."""
        text = self.join(ids.astype(np.int32)).replace(SPECIAL_BYTES, b" ").decode("utf-8", "replace")
        return " ".join(text.split()).rstrip("\ufffd")  # the ids may end within a character


@lru_cache(maxsize=2)
def token_bytes_of(directory: str) -> TokenBytes:
    """The token bytes of the tokenizer in a directory, cached."""
    return TokenBytes(Encoder(Path(directory), fast=False))


def _reduced(text: bytes) -> bytes:
    """Reduce UTF-32 to plain text in UTF-8, slice by slice, since it takes four times the memory."""
    pieces, code_points = [], np.frombuffer(text, "<u4")
    for start in range(0, len(code_points), REDUCED_POINTS):
        points = _table()[code_points[start : start + REDUCED_POINTS]]
        reduced: bytes = points[points != 0].tobytes()
        pieces.append(reduced.decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass"))
    return b"".join(pieces)


def _decoded(data: bytes) -> str:
    """Decode UTF-8. Invalid bytes (of ids that a model generated, or of a tokenizer that lost bytes) must not raise."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return RECORD.join(piece.decode("utf-8", "replace") for piece in data.split(RECORD_BYTES))


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """Table from each code point to its reduced one, or to 0 if it is left out. Takes 0.3 s."""
    table = np.zeros(CODE_POINTS, np.uint32)
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
    table[ord(RECORD)] = ord(RECORD)
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
