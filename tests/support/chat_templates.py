"""Chat templates for tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ttrain.data import existing
from ttrain.data.chat_templates import Messages
from ttrain.data.encoder import Encoder

HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}" + HEADER
)
TEXT = "the quick brown fox jumps over the lazy dog; user assistant system tool"


def as_dicts(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def make(directory: Path, template: str | None, **config: Any) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, **options)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    settings = {**tokens, "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def take(directory: Path, template: str) -> Encoder:
    files = existing.tokenizer_files(str(make(directory / "existing", template)))
    existing.install(files, directory / "taken", "own")
    return Encoder(directory / "taken")
