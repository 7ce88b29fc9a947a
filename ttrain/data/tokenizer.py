"""The tokenizer: a byte-level BPE trained on text, kept as a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.data import chat
from ttrain.data.sources import Document, position
from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.store import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_MAX_LENGTH = 32768
RUN_CHARACTERS = 256
LONG_RUN = re.compile(rf"\S{{{RUN_CHARACTERS}}}(?=\S)")
CUT = "\udfff"  # a lone surrogate, which no text that was read contains


def sample(documents: Iterable[Document], max_bytes: int) -> list[Document]:
    """At most `max_bytes` of text, uniform over the whole input, whatever its order; memory stays within `max_bytes`.

    Documents are kept while their hash lies below a threshold that halves each time the limit is passed. Where none is left,
    since each is too large, the lowest one alone is taken.
    """
    kept: list[tuple[float, Document]] = []
    lowest: tuple[float, Document] | None = None
    size, threshold = 0, 1.0
    for document in documents:
        place = position(document)
        if lowest is None or place < lowest[0]:
            lowest = (place, document)
        if place >= threshold:
            continue
        kept.append((place, document))
        size += len(document.content())
        while size > max_bytes:
            threshold /= 2
            kept = [(place, document) for place, document in kept if place < threshold]
            size = sum(len(document.content()) for _, document in kept)
    return [document for _, document in kept or ([lowest] if lowest else [])]


def train(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (arXiv:1508.07909, on bytes as in GPT-2) with the full byte alphabet, so that nothing is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=chat.UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(chat.SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    bos = tokenizer.token_to_id(chat.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chat.BOS} $A", pair=f"{chat.BOS} $A {chat.BOS} $B", special_tokens=[(chat.BOS, bos)]
    )
    return tokenizer


def pieces(text: str) -> list[str]:
    """The text, cut within each run of more than RUN_CHARACTERS without white space, to learn from.

    BPE training is superlinear in the length of a word: one of 200,000 characters costs 6.5 s, one of 1.5 million over
    ten minutes. Encoding is not cut.
    """
    return LONG_RUN.sub(lambda run: run.group() + CUT, text).split(CUT) if LONG_RUN.search(text) else [text]


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a directory that `AutoTokenizer.from_pretrained` opens."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BOS,
        "eos_token": chat.EOS,
        "pad_token": chat.PAD,
        "unk_token": chat.UNK,
        "additional_special_tokens": list(chat.SPECIAL_TOKENS[4:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "right",
    }
    write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(chat.TEMPLATE, encoding="utf-8")


class Encoder:
    """Text to ids and back. Text never becomes a special token, whatever it contains."""

    def __init__(self, directory: Path) -> None:
        """Raises ArtifactError where the tokenizer is missing, corrupt, or lacks one of the special tokens."""
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self.digest = sha256_file(path)
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise ArtifactError(f"cannot read the tokenizer {path}: {error}; it is not trained anew in silence") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        found = {token: self._tokenizer.token_to_id(token) for token in chat.SPECIAL_TOKENS}
        missing = [token for token, number in found.items() if number is None]
        if missing:
            raise ArtifactError(f"the tokenizer {path} lacks the special tokens {', '.join(missing)}")
        self._special = {token: int(number) for token, number in found.items() if number is not None}

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def special(self, token: str) -> int:
        """Id of one of the special tokens."""
        return self._special[token]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def document(self, ids: Sequence[int]) -> list[int]:
        """A document's ids between the tokens that begin and end it."""
        return [self.special(chat.BOS), *ids, self.special(chat.EOS)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
