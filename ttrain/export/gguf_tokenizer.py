"""The tokenizer of a GGUF file: tokens, merges, how text is split, template, special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.files import JsonDict, read_object
from ttrain.errors import UsageError

# How a byte-level BPE splits text into words, and llama.cpp's names for it.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BY_PATTERN = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file knows of a tokenizer.

    specials    ids by llama.cpp's names: bos, eos, eot (ends an answer), pad, unk
    begins      whether a text begins with bos
    template    the chat template, Jinja; None without one
    """

    size: int
    tokenizer: JsonDict
    specials: dict[str, int]
    begins: bool
    template: str | None

    def write(self, writer: Any) -> None:
        """Write the fields of `tokenizer.ggml`. Raises UsageError for an unknown tokenizer."""
        import gguf

        pre = pre_tokenizer(self.tokenizer)
        model = self.tokenizer["model"]
        tokens = [f"[PAD{number}]" for number in range(self.size)]
        types = [gguf.TokenType.UNUSED] * self.size
        for token, number in model["vocab"].items():
            tokens[number] = token
            types[number] = gguf.TokenType.NORMAL
        for added in self.tokenizer["added_tokens"]:
            tokens[added["id"]] = added["content"]
            # A control token is never found in a user's text.
            control, user = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
            types[added["id"]] = control if added["special"] else user
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        writer.add_tokenizer_model("gpt2")  # byte-level BPE
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        for name, number in self.specials.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.begins)
        writer.add_add_space_prefix(False)
        if self.template is not None:
            writer.add_chat_template(self.template)


def vocabulary(model: Any, directory: Path) -> Vocabulary:
    """The vocabulary of a loaded model (`LoadedModel`) and its tokenizer's directory."""
    encoder = model.encoder
    ids = {"bos": encoder.bos_id, "eos": encoder.eos_id, "eot": encoder.end_id}
    ids |= {"pad": encoder.pad_id, "unk": encoder.unk_id}
    size = model.causal.config.vocab_size
    return Vocabulary(
        size=size,
        tokenizer=read_object(directory / "tokenizer.json"),
        specials={name: number for name, number in ids.items() if 0 <= number < size},
        begins=model.begin_ids == (encoder.bos_id,),
        template=encoder.jinja if model.can_chat else None,
    )


def pre_tokenizer(tokenizer: JsonDict) -> str:
    """llama.cpp's name for how a tokenizer splits text. Raises UsageError for an unknown one."""
    kind = tokenizer["model"].get("type")
    split = tokenizer.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    last = parts[-1]
    is_plain = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    name = None
    if kind == "BPE" and is_plain and len(parts) == 1 and last.get("use_regex", True):
        name = "gpt-2"  # ttrain's own tokenizers too
    elif kind == "BPE" and is_plain and len(parts) == 2 and not last.get("use_regex", True):
        name = BY_PATTERN.get(parts[0].get("pattern", {}).get("Regex"))
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if name is None or normalizer not in (None, "NFC"):
        raise UsageError(
            "--gguf is given, but it is not known how llama.cpp names the way in which this "
            f"tokenizer splits text (model {kind}, pre-tokenizer {split.get('type')}, normalizer "
            f"{normalizer}); known are those of ttrain, GPT-2, Qwen and Llama 3; leave --gguf out"
        )
    return name
