"""TinySeek's vocabulary of words and its regular expression as a Hugging Face tokenizer with the same ids."""

from __future__ import annotations

import json
from pathlib import Path

from ttrain.core.files import parse_json
from ttrain.errors import ArtifactError

VOCABULARY = "vocab.json"
# Words of Latin letters, numbers, single signs, single Chinese characters; what none of them matches is lost.
WORDS = r"[a-zA-Z]+|\d+(?:\.\d+)?%?|[^\w\s]|[\u4e00-\u9fff]"
IN_NUMBERS = r"[\d.%]"  # each for itself
PAD, END, UNKNOWN = "[PAD]", "<|im_end|>", "[UNK]"


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """`tokenizer.json` and its config. Raises ArtifactError where the file is no such vocabulary.

    Ids that no word has get a name of their own, since a tokenizer counts its words.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence, Split

    try:
        words: dict[str, int] = parse_json(path.read_bytes())
        held = {number: word for word, number in words.items()}
        whole = {held.get(number, f"[hole{number}]"): number for number in range(max(held) + 1)}
    except (ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{path} is no vocabulary, which maps words to numbers: {error}") from None
    if missing := [word for word in (PAD, END, UNKNOWN) if word not in words]:
        raise ArtifactError(f"{path} is no vocabulary of TinySeek's: it lacks {', '.join(missing)}")
    made = Tokenizer(WordLevel(whole, unk_token=UNKNOWN))
    made.pre_tokenizer = Sequence([
        Split(Regex(WORDS), "removed", invert=True), Split(Regex(IN_NUMBERS), "isolated"),
    ])  # fmt: skip
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (PAD, END, UNKNOWN)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    return {
        "tokenizer.json": made.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }
