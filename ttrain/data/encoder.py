"""Text to ids and back, by the fastest library that gives the ids of `tokenizers`.

`fastokens` needs a twentieth of the time. It is compared with `tokenizers` on awkward texts when a
tokenizer is opened, and not used if it is missing, fails or differs.
"""

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ttrain.core.files import need_object
from ttrain.core.hashing import digest_of, sha256_file
from ttrain.data import jinja_templates
from ttrain.errors import ArtifactError

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
log = logging.getLogger("ttrain")

END_OF_TURN = "end_of_turn_token"  # in tokenizer_config.json, beside Hugging Face's own names
REQUIRED = ("pad_token", "bos_token", "eos_token", END_OF_TURN)
NO_TOKEN = -1
PROBES = (
    "",
    " ",
    "   ",
    "a  b   c    d",
    " before and after ",
    "\n",
    "\n\n\n",
    "a\n\n  b\r\n\tc\t\t",
    "\0",
    "a\0b\x01\x7f",
    "don't I'll we've they're she'd I'm it's",
    "DON'T ’s",
    "0 12 345 6789 3.14 1,000,000 ½ ٣ 二",
    "x_1 = f(y)[0] // 2 != 3;",
    "你好，世界！東京に行く 한국어",
    "über Ångström e\u0301 a\u0308\u0323",
    "\u202eשלום\u202c عربي",
    "\u00a0\u2009\u3000\u200b\ufeff",
    "🙂 👨\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇩🇪",
    "\U0010ffff\ufffd\u2028\u2029\u0085",
    "a" * 500,
    "日" * 300,
    "-" * 100 + "=" * 100,
    "https://example.org/a?b=c&d=%20#e",
    "<html><body class='x'>&amp;</body>",
    "{{ 7*7 }} {% if x %}",
)


class Encoding(NamedTuple):
    """A text's ids, and where each token begins and ends in its characters; of shape [tokens].

    A special token begins and ends with its own text, without white space around it.
    """

    ids: Ids
    starts: Offsets
    ends: Offsets

    def within(self, spans: Sequence[tuple[int, int]]) -> Flags:
        """Whether each token overlaps a span; one without characters, whether it begins in one."""
        inside = np.zeros(len(self.ids), np.bool_)
        ends = np.maximum(self.ends, self.starts + 1)
        for start, end in spans:
            inside[
                np.searchsorted(ends, start, "right") : np.searchsorted(self.starts, end, "left")
            ] = True
        return inside


class Encoder:
    """A tokenizer directory, opened. Text never becomes a special token.

    digest      identifies the tokenizer: tokenizer.json and the ids below
    kind        "fastokens" or "tokenizers": the library that encodes
    pad_id, bos_id, eos_id, end_id, unk_id
                `end_id` ends an answer; `unk_id` is -1 if every byte has a token
    tokens      the same as strings, by the names of transformers
    template    "ttrain", "tinyseek" or "own"
    jinja       the text of that template
    """

    def __init__(self, directory: Path, *, fast: bool = True) -> None:
        """Raises ArtifactError for a missing, corrupt or incomplete tokenizer."""
        path = directory / "tokenizer.json"
        self._reference = open_tokenizer(path)
        self._reference.encode_special_tokens = True
        self._reference.no_truncation()
        self._reference.no_padding()
        self.directory = directory
        try:
            # As bytes: a template's line ends are part of it.
            self.jinja = (directory / "chat_template.jinja").read_bytes().decode()
            config = need_object((directory / "tokenizer_config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"cannot read what belongs to the tokenizer {path}: {error}"
            ) from None
        self.template = next(
            (name for name, text in jinja_templates.JINJA.items() if text == self.jinja), "own"
        )
        vocabulary = self._reference.get_vocab(with_added_tokens=True)
        self.tokens: dict[str, str] = {}
        for name in (*REQUIRED, "unk_token"):
            value = config.get(name)
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) and token in vocabulary:
                self.tokens[name] = token
        missing = [name for name in REQUIRED if name not in self.tokens]
        if missing:
            raise ArtifactError(
                f"the tokenizer {path} lacks {', '.join(missing)}; "
                "tokenizer.existing=… adds what is missing"
            )
        ids = [self.special(self.tokens[name]) for name in REQUIRED]
        self.pad_id, self.bos_id, self.eos_id, self.end_id = ids
        self.unk_id = (
            self.special(self.tokens["unk_token"]) if "unk_token" in self.tokens else NO_TOKEN
        )
        self.digest = digest_of([sha256_file(path), ids])
        self._special_ids = frozenset(
            number
            for number, token in self._reference.get_added_tokens_decoder().items()
            if token.special
        )
        self._length = 1 + max(vocabulary.values())
        self._fast = self._checked_fast(path) if fast else None

    @property
    def kind(self) -> str:
        return "fastokens" if self._fast is not None else "tokenizers"

    def __len__(self) -> int:
        """The highest id plus one, also if ids in between are unused."""
        return self._length

    def special(self, token: str) -> int:
        """Id of a special token. Raises ArtifactError if the vocabulary lacks it."""
        number = self._reference.token_to_id(token)
        if number is None:
            raise ArtifactError(f"the tokenizer {self.directory} lacks the special token {token}")
        return int(number)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token."""
        ids, offsets = self.encode_flat(texts)
        return [ids[start:end].tolist() for start, end in itertools.pairwise(offsets.tolist())]

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """(ids of all texts, read-only; len(texts) + 1 offsets), without special tokens."""
        if self._fast is not None:
            try:
                return _fast_flat(self._fast, texts)
            except Exception as error:  # such as a limit of its regular expressions
                log.warning("fastokens failed on a text (%s); using tokenizers from here on", error)
                self._fast = None
        return _reference_flat(self._reference, texts)

    def encode_markup(self, text: str) -> list[int]:
        """Ids of template text, where special tokens count; never of text from outside."""
        encoding, _ = self._with_exact_specials(text)
        return list(encoding.ids.tolist())

    def encode_rendered(self, text: str, contents: Sequence[tuple[int, int]]) -> Encoding:
        """Encode a chat as transformers does; in the spans `contents` special tokens are text.

        A tenth as fast as `encode_flat`.
        """
        whole, special = self._with_exact_specials(text)
        is_forged = whole.within(contents) & special
        if not is_forged.any():
            return whole
        numbers, starts, ends = (column[special & ~is_forged].tolist() for column in whole)
        places = [*zip(numbers, starts, ends, strict=True), (NO_TOKEN, len(text), len(text))]
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for number, start, end in places:
            piece = self._reference.encode(text[at:start], add_special_tokens=False)
            ids += [*piece.ids, number]
            offsets += [(at + begin, at + stop) for begin, stop in piece.offsets]
            offsets.append((start, end))
            at = end
        return _encoding(ids[:-1], offsets[:-1])

    def _with_exact_specials(self, text: str) -> tuple[Encoding, Flags]:
        self._reference.encode_special_tokens = False
        try:
            encoding = self._reference.encode(text, add_special_tokens=False)
        finally:
            self._reference.encode_special_tokens = True
        whole = _encoding(encoding.ids, encoding.offsets)
        special = np.isin(whole.ids, list(self._special_ids))
        for at in np.flatnonzero(special).tolist():
            token = self.spelling(int(whole.ids[at]))
            begin = text.find(token, int(whole.starts[at]), int(whole.ends[at]))
            special[at] = begin >= 0  # else it is an unknown word
            if special[at]:
                whole.starts[at] = begin
                whole.ends[at] = begin + len(token)
        return whole, special

    def encodes_apart(self, specials: Sequence[str]) -> bool:
        """Whether a text between two special tokens has the ids that it has alone; probed."""
        probes = [probe for probe in PROBES if probe]
        alone = self.encode(probes)
        return all(
            self.encode_markup(f"{token}{probe}{token}")
            == [self.special(token), *ids, self.special(token)]
            for token in specials
            for probe, ids in zip(probes, alone, strict=True)
        )

    def spelling(self, number: int) -> str:
        """The text of a token."""
        return str(self._reference.id_to_token(number))

    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return self._special_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._reference.decode(list(ids), skip_special_tokens=True))

    def _checked_fast(self, path: Path) -> Any:
        # It has threads beside rayon's. With one of them a worker takes 0.92 of the CPU seconds at
        # 0.93 of the speed, and two workers are 1.91 times as fast as one, not 1.65 (EPYC, Zen 5).
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            import fastokens

            fast = fastokens.Tokenizer.from_file(str(path))
            fast.no_truncation()
            fast.no_padding()
            added = [token.content for token in self._reference.get_added_tokens_decoder().values()]
            texts = [*PROBES, *(f"a{token}b {token} {token}{token}\n" for token in added)]
            fast_ids, fast_offsets = _fast_flat(fast, texts)
            ids, offsets = _reference_flat(self._reference, texts)
            if not (np.array_equal(fast_ids, ids) and np.array_equal(fast_offsets, offsets)):
                raise ValueError("fastokens and tokenizers make different ids of awkward texts")
        except ImportError:
            log.info(
                "fastokens is not installed; using tokenizers, "
                "which takes about twenty times as long"
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            log.info("fastokens cannot be used for %s (%s); using tokenizers", path, error)
        else:
            return fast
        return None


def _encoding(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Encoding:
    borders = np.array(offsets, np.int64).reshape(-1, 2)
    return Encoding(np.array(ids, np.uint32), borders[:, 0], borders[:, 1])


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer.json. Raises ArtifactError for anything wrong with the file."""
    try:
        return Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise ArtifactError(f"cannot read the tokenizer {path}: {error}") from None


def _fast_flat(fast: Any, texts: Sequence[str]) -> tuple[Ids, Offsets]:
    # No special tokens are added, none are read in the text.
    ids, offsets = fast.encode_batch_flat(list(texts), False, True)
    return np.frombuffer(ids, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").astype(np.int64)


def _reference_flat(reference: Tokenizer, texts: Sequence[str]) -> tuple[Ids, Offsets]:
    encodings = reference.encode_batch_fast(list(texts), add_special_tokens=False)
    offsets = np.cumsum([0, *map(len, encodings)], dtype=np.int64)
    ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
    return np.fromiter(ids, dtype=np.uint32, count=int(offsets[-1])), offsets
