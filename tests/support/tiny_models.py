"""Tiny models in directories, as `ttrain chat` and MLflow open them, with ttrain and without."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.tiny_adapters import save_base
from support.tiny_data import make_tokenizer
from support.tiny_trainers import tiny_model
from torch import nn

from ttrain.config import Model
from ttrain.data.encoder import Encoder
from ttrain.inference import gate_router
from ttrain.inference.chat import Chat
from ttrain.inference.loading import LoadedModel, load
from ttrain.inference.sampling import Sampling
from ttrain.lineage.lookup import resolve
from ttrain.model import adapters, factory
from ttrain.store.model_files import Reference, weights_digest
from ttrain.tasks import new_model
from ttrain.tracking.tracked_runs import MODEL

NEVER = 10**6  # an id that no model here says
SHORT = Sampling(max_tokens=6)
# With small tied weights a model repeats its last token for ever
TALKATIVE = {"tie_embeddings": False, "init_std": 0.3}
SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 64}


def chat_with(model: LoadedModel, sampling: Sampling = SHORT, **options: Any) -> Chat:
    return Chat(gate_router.single_model(model), sampling, **options)


def write_model(directory: Path, *, seed: int = 1, **settings: Any) -> Path:
    vocab = len(make_tokenizer(directory))
    settings = {"init_std": 0.4, "tie_embeddings": False, **settings}
    return save_base(tiny_model(seed=seed, vocab=vocab, **settings), directory)


def speaker(directory: Path, **options: Any) -> LoadedModel:
    return load(reference(directory), device="cpu", **options)


def ending_with(model: LoadedModel, *tokens: int) -> LoadedModel:
    return replace(model, stop_ids=tokens or (NEVER,))


def reference(directory: Path) -> Reference:
    return resolve(str(directory), directory / "home")


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def fresh(directory: Path, **settings: Any) -> Path:
    tokenizer = directory / "tokenizer"
    encoder = make_tokenizer(tokenizer)
    config = Model.model_validate({**SIZES, **TALKATIVE, **settings})
    new_model.write(new_model.new(config, encoder, seed=3), tokenizer, directory / MODEL)
    return directory / MODEL


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
