"""Chats through existing tokenizers of every kind: the ids are those of transformers."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import CHATML, HEADER, as_dicts
from support.tiny_data import LINES
from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
from tokenizers import pre_tokenizers as pre

from ttrain.data import chat, existing
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

INST = "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'assistant' %}"
INST += "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
INST += "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
# What ends the last question only: an earlier prompt does not begin the chat.
LAST = "{% if loop.revindex0 < 2 %}{{ ' Be brief.' }}{% endif %}"
SYSTEM_LAST = INST.replace(" + ' [/INST]' }}", " }}" + LAST + "{{ '[/INST]' }}")
THINKS = "'<think>\n\n</think>\n\n' * (message['role'] == 'assistant' and loop.last)"
THOUGHT = CHATML.replace("message['content']", f"{THINKS} + message['content']")
MARKED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
MARKED += "{% if m['role'] == 'assistant' %}{{ '<mood>calm</mood>' }}{% generation %}"
MARKED += "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
MARKED += "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + HEADER
IM = ["Blue.<|im_end|>", "Deep.<|im_end|>"]


def trained(model: Any, vocab: Sequence[str] = (), **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokens, alphabet = [*SPECIAL, *vocab], [] if vocab else sorted(pre.ByteLevel.alphabet())
    options: Any = {"special_tokens": tokens, "show_progress": False, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(LINES * 5, trainers.BpeTrainer(vocab_size=420, **options))
    spec = json.loads(tokenizer.to_str())
    added = spec["added_tokens"]
    spec["added_tokens"] = [token for token in added if token["content"] not in vocab]
    return Tokenizer.from_str(json.dumps(spec))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "metaspace":
        model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        first = pre.Metaspace(prepend_scheme="first")
        return trained(model, vocab=BYTES, pre_tokenizer=first, decoder=decoders.Metaspace())
    splitter = pre.ByteLevel(add_prefix_space=False)
    tokenizer = trained(models.BPE(), pre_tokenizer=splitter, decoder=decoders.ByteLevel())
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def install(directory: Path, kind: str, template: str) -> Encoder:
    """The tokenizer as ttrain uses it; padding is the end token, as many models have it."""
    source = directory / "source"
    source.mkdir()
    tokenizer_of(kind).save(str(source / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (source / "tokenizer_config.json").write_text(json.dumps(tokens))
    if is_own := "{" in template:
        (source / "chat_template.jinja").write_text(template)
    files = existing.files_in(source)
    existing.install(files, directory / "tokenizer", "own" if is_own else template)
    return Encoder(directory / "tokenizer")


def conversations(count: int) -> Iterator[Messages]:
    chance = random.Random(count)
    pieces = [*LINES, " ", "\n\n", "  two  ", "你好，世界", "🙂", "\u3000", "<think>", "Café"]
    for _ in range(count):
        roles = ["system"] * chance.randint(0, 1) + ["user", "assistant"] * chance.randint(1, 3)
        texts = ("".join(chance.choices(pieces, k=chance.randint(1, 4))) for _ in roles)
        yield tuple(map(Message, roles, texts))


def runs_trained_on(encoder: Encoder, turns: Messages) -> list[str]:
    pairs = zip(*chat.encode_chat(encoder, turns), strict=True)
    opened = Tokenizer.from_file(str(encoder.directory / "tokenizer.json"))
    stretches = itertools.groupby(pairs, key=lambda pair: pair[1])
    ids_of_runs = [[token for token, _ in stretch] for is_live, stretch in stretches if is_live]
    return [opened.decode(ids, skip_special_tokens=False) for ids in ids_of_runs]


@pytest.mark.parametrize("template", [CHATML, INST, THOUGHT, MARKED, "ttrain", "tinyseek"])
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_ids_are_those_of_transformers(kind: str, template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    encoder = install(tmp_path, kind, template)
    opened: Any = AutoTokenizer.from_pretrained(encoder.directory, local_files_only=True)
    for messages in conversations(25):
        ids, live = chat.encode_chat(encoder, messages)
        turns = as_dicts(messages)
        assert ids == opened.apply_chat_template(turns, tokenize=True, return_dict=False), messages
        options = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
        prompt = opened.apply_chat_template(turns[:-1], **options)
        assert chat.prompt_ids(encoder, messages[:-1]) == prompt, messages
        begin = len(prompt)
        if messages[-1].content.strip() and ids[:begin] == prompt:
            assert live[begin] and not live[begin - 1]


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (CHATML, *IM),
        (CHATML.replace(HEADER, ""), *(f"<|im_start|>assistant\n{text}" for text in IM)),
        (INST, " Blue.</s>", " Deep.</s>"),
        (SYSTEM_LAST, " Blue.</s>", " Deep.</s>"),
        (THOUGHT, IM[0], f"<think>\n\n</think>\n\n{IM[1]}"),
        (MARKED, *(f"<mood>calm</mood>{text}" for text in IM)),
    ],
)
def test_all_behind_the_prompt_is_live(
    template: str, first: str, second: str, tmp_path: Path
) -> None:
    encoder = install(tmp_path, "byte level", template)
    turns = tuple(map(Message, ["user", "assistant"] * 2, ("Sky?", "Blue.", "Sea?", "Deep.")))
    assert runs_trained_on(encoder, turns) == [first, second]
