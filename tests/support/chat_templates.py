"""Chat templates for tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ttrain.data import existing
from ttrain.data.chat_templates import Messages
from ttrain.data.encoder import Encoder

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def as_dicts(messages: Messages) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def make(directory: Path, template: str | None, **config: Any) -> Path:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog; user assistant system tool"] * 5, trainer
    )
    directory.mkdir(parents=True, exist_ok=True)
    trained.save(str(directory / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    settings = {**tokens, "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def take(directory: Path, template: str) -> Encoder:
    existing.install(
        existing.tokenizer_files(str(make(directory / "existing", template))),
        directory / "taken",
        "own",
    )
    return Encoder(directory / "taken")
