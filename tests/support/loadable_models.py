"""Tiny models that MLflow opens, and a process without ttrain that opens them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.tiny_adapters import disturb, save_adapter
from support.tiny_data import make_tokenizer
from support.tiny_models import greedy

from ttrain.config import Lora, Model
from ttrain.data.encoder import Encoder
from ttrain.model import adapters, factory
from ttrain.store.model_files import weights_digest
from ttrain.tasks import new_model
from ttrain.tracking.tracked_runs import ADAPTER, MODEL

# With small tied weights a model repeats its last token for ever
TALKATIVE = {"tie_embeddings": False, "init_std": 0.3}
SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 64}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def fresh(directory: Path, **settings: Any) -> Path:
    tokenizer = directory / "tokenizer"
    encoder = make_tokenizer(tokenizer)
    config = Model.model_validate({**SIZES, **TALKATIVE, **settings})
    new_model.write(new_model.new(config, encoder, seed=3), tokenizer, directory / MODEL)
    return directory / MODEL


def adapted(directory: Path, base: Path, **settings: Any) -> Path:
    config = Lora.model_validate({"rank": 2, "virtual_tokens": 4, "row_length": 32, **settings})
    model = disturb(adapters.attach(factory.load(base), config), seed=5, by=0.2)
    save_adapter(model, directory / ADAPTER, base)
    for name in TOKENIZER_FILES:
        shutil.copyfile(base / name, directory / ADAPTER / name)
    return directory / ADAPTER


def said_with_ttrain(
    prompt: str, new_tokens: int, model: Path, adapter: Path | None = None
) -> list[int]:
    network: Any = factory.load(model)
    if adapter:
        network = adapters.load(network, adapter, weights_digest(model))
    encoder = Encoder(adapter or model)
    ids = [encoder.bos_id, *encoder.encode([prompt])[0]]
    tokens = greedy(network.eval(), ids, new_tokens)
    stops = [tokens.index(id_) for id_ in (encoder.eos_id, encoder.end_id) if id_ in tokens]
    return tokens[: min(stops, default=None)]


def said_without_ttrain(code: str, *words: str, directory: Path, **environment: str) -> Any:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-P", "-c", code, *words]
    process = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=directory)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.partition("SAID")[2])
