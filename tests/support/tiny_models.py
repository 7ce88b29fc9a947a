"""Tiny models in directories, as `ttrain chat` finds them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.tiny_adapters import save_base
from support.tiny_data import make_tokenizer
from support.tiny_trainers import tiny_model
from torch import nn

from ttrain.inference import gate_router
from ttrain.inference.chat import Chat
from ttrain.inference.loading import LoadedModel, load
from ttrain.inference.sampling import Sampling
from ttrain.lineage.lookup import resolve
from ttrain.store.model_files import Reference

NEVER = 10**6  # an id that no model here says
SHORT = Sampling(max_tokens=6)


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
