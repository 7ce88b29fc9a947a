"""The tokenizer of a GGUF file: tokens, merges, how text is split, template, special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from ttrain.core.files import JsonDict, read_object
from ttrain.errors import UsageError

# How a byte-level BPE splits text into words, and llama.cpp's names for it.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BY_PATTERN = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}


def fields(model: Any, directory: Path) -> JsonDict:
    """What a GGUF file says of the tokenizer of a `LoadedModel`, by the writer's methods `add_*`.

    Raises UsageError for a tokenizer that splits text in an unknown way.
    """
    encoder = model.encoder
    tokenizer = read_object(directory / "tokenizer.json")
    split = pre_tokenizer(tokenizer)  # known for byte-level BPE alone, whose fields follow
    size = model.causal.config.vocab_size
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number] = token
        types[number] = gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        # A control token is never found in a user's text.
        types[added["id"]] = gguf.TokenType["CONTROL" if added["special"] else "USER_DEFINED"]
    # eot ends an answer.
    ids = {"bos": encoder.bos_id, "eos": encoder.eos_id, "eot": encoder.end_id}
    ids |= {"pad": encoder.pad_id, "unk": encoder.unk_id}
    return {
        "tokenizer_model": "gpt2",  # byte-level BPE
        "tokenizer_pre": split,
        "token_list": tokens,
        "token_types": types,
        "token_merges": [
            pair if isinstance(pair, str) else " ".join(pair)
            for pair in tokenizer["model"]["merges"]
        ],
        **{f"{name}_token_id": number for name, number in ids.items() if 0 <= number < size},
        "add_bos_token": model.begin_ids == (encoder.bos_id,),
        "add_space_prefix": False,
        **({"chat_template": encoder.jinja} if model.can_chat else {}),
    }


def pre_tokenizer(tokenizer: JsonDict) -> str:
    """llama.cpp's name for how a tokenizer splits text. Raises UsageError for an unknown one."""
    kind = tokenizer["model"].get("type")
    split = tokenizer.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    words = parts[0].get("pattern", {}).get("Regex")
    # By ByteLevel itself, as ttrain's own, or by a pattern before it.
    name = BY_PATTERN.get(words) if len(parts) == 2 else "gpt-2"
    by_itself = parts[-1].get("use_regex", True)
    is_known = kind == "BPE" and parts[-1].get("type") == "ByteLevel" and len(parts) <= 2
    if not is_known or parts[-1].get("add_prefix_space") or by_itself != (len(parts) == 1):
        name = None
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if name is None or normalizer not in (None, "NFC"):
        raise UsageError(
            "--gguf is given, but it is not known how llama.cpp names the way in which this "
            f"tokenizer splits text (model {kind}, pre-tokenizer {split.get('type')}, normalizer "
            f"{normalizer}); known are those of ttrain, GPT-2, Qwen and Llama 3; leave --gguf out"
        )
    return name
