"""Train a byte-level BPE tokenizer, and save it as a Hugging Face directory."""

import hashlib
import heapq
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ttrain.config import Tokenizer as TokenizerSettings
from ttrain.core.files import write_json
from ttrain.data import jinja_templates
from ttrain.data.encoder import END_OF_TURN, Encoder

MODEL_MAX_LENGTH = 32768

RUN_CHARACTERS = 256
# Runs of letters and numbers, white space or other characters: at least what the pre-tokenizer
# takes for one word. (In Chinese, a run without a space is a page, without punctuation a clause.)
# Letters and numbers are one kind, since Python's \d lacks numbers such as ² and Ⅷ; the separators
# U+001C to U+001F are white space to Python alone.
KINDS = (r"[^\W_]", r"\s", r"(?:[^\w\s]|[_\x1c-\x1f])")

LONG_RUN = re.compile("|".join(f"{kind}{{{RUN_CHARACTERS}}}(?={kind})" for kind in KINDS))
CUT = "\udfff"  # a lone surrogate, which no text that was read contains


def train(texts: Sequence[str], vocab_size: int, template: str = "ttrain") -> Tokenizer:
    """Train a byte-level BPE (arXiv:1508.07909, on bytes as in GPT-2); no byte is unknown.

    The same texts give the same tokenizer with any number of threads. Special tokens come first.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=jinja_templates.UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(jinja_templates.SPECIAL_TOKENS[template]),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{jinja_templates.BOS} $A",
        pair=f"{jinja_templates.BOS} $A {jinja_templates.BOS} $B",
        special_tokens=[(jinja_templates.BOS, tokenizer.token_to_id(jinja_templates.BOS))],
    )
    return tokenizer


def pieces(text: str) -> list[str]:
    """The text to train on, cut within each word of more than RUN_CHARACTERS."""
    # BPE training is superlinear in the length of a word: one of 200,000 characters costs 6.5 s,
    # one of 1.5 million over ten minutes. Encoding is not cut.
    return LONG_RUN.sub(lambda run: run.group() + CUT, text).split(CUT)


def save(tokenizer: Tokenizer, directory: Path, template: str = "ttrain") -> None:
    """Write a trained tokenizer as a directory that `AutoTokenizer.from_pretrained` opens."""
    tokens = {
        "bos_token": jinja_templates.BOS,
        "eos_token": jinja_templates.EOS,
        "pad_token": jinja_templates.PAD,
        "unk_token": jinja_templates.UNK,
        END_OF_TURN: jinja_templates.END_TOKENS[template],
    }
    write(
        directory,
        tokenizer.to_str(pretty=True),
        tokens,
        jinja_templates.SPECIAL_TOKENS[template][4:],
        jinja_templates.JINJA[template],
        MODEL_MAX_LENGTH,
    )


def write(
    directory: Path,
    tokenizer_json: str,
    tokens: dict[str, str],
    others: Sequence[str],
    jinja: str,
    max_length: int,
) -> None:
    """Write a tokenizer directory. `tokens`: by the names of transformers; `others`: special."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8", newline="")
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokens,
            "additional_special_tokens": list(others),
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right",
        },
    )
    (directory / "chat_template.jinja").write_text(jinja, encoding="utf-8", newline="")


def measure(encoder: Encoder, texts: Sequence[str]) -> dict[str, Any]:
    """Bytes per token, fraction of unknown tokens, texts changed by a round trip."""
    size = sum(len(text.encode("utf-8")) for text in texts)
    encoded = encoder.encode(texts)
    tokens = sum(map(len, encoded))
    return {
        "documents": len(texts),
        "bytes": size,
        "tokens": tokens,
        "bytes_per_token": size / max(1, tokens),
        "unk_rate": sum(ids.count(encoder.unk_id) for ids in encoded) / max(1, tokens),
        "changed_texts": sum(
            encoder.decode(ids) != text for text, ids in zip(texts, encoded, strict=True)
        ),
    }


def sample(
    texts: Iterable[str],
    config: TokenizerSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[str], dict[str, int]]:
    """(sample of the texts within `max_bytes` and `max_documents`, in their order; its counts).

    "head": the first ones. "reservoir": the lowest hashes keyed by the seed, in any order of the
    input. Only the sample is in memory; if the lowest text alone is too large, it is the
    whole sample.
    """
    is_head = config.sample == "head"
    max_documents = config.max_documents or math.inf
    key = config.seed.to_bytes(8, "big")
    # (-hash, -number, bytes, text): the highest comes first.
    heap: list[tuple[int, int, int, str]] = []
    # (-hash, -number) of the last one removed; lower ones are skipped.
    cutoff: tuple[int, int] | None = None
    size = documents_seen = 0
    for text in texts:
        data = text.encode("utf-8")
        digest = b"" if is_head else hashlib.blake2b(data, digest_size=8, key=key).digest()
        entry = (-int.from_bytes(digest, "big"), -documents_seen, len(data), text)
        documents_seen += 1
        progress(documents_seen)
        if cutoff is None or entry[:2] >= cutoff:
            heapq.heappush(heap, entry)
            size += len(data)
        while len(heap) > 1 and (size > config.max_bytes or len(heap) > max_documents):
            gone = heapq.heappop(heap)
            size -= gone[2]
            cutoff = gone[:2]
        if is_head and (cutoff or len(heap) == max_documents):
            break
    sampled = [text for *_, text in sorted(heap, key=lambda entry: -entry[1])]
    return sampled, {"documents": len(sampled), "documents_seen": documents_seen, "bytes": size}
