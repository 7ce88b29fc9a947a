"""What a model says to fixed prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def greedy(
    model: nn.Module, prompt: Sequence[int], *, new_tokens: int, stop_ids: Sequence[int], device: torch.device
) -> list[int]:
    """The most likely continuation of the prompt's ids, up to a stop id, without it."""
    model.eval()
    ids = torch.tensor([list(prompt)], device=device)
    cache: Any = None
    said: list[int] = []
    with torch.no_grad():  # not inference_mode: a table that the model keeps would be unfit for the training that goes on
        for _ in range(new_tokens):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            token = int(ids)
            if token in stop_ids:
                break
            said.append(token)
    return said
