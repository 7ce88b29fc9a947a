"""What an evaluation sees of a model. The stages and the command line make one from a model that they loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ttrain.data.encoder import Encoder

Generate = Callable[[Sequence[Sequence[int]], int], list[tuple[list[int], bool]]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under evaluation, and what is needed to ask it something.

    name          what tables call it
    model         in eval mode, on `device`; called as transformers' causal models are (`input_ids`, `use_cache`, ...)
    encoder       its tokenizer
    device        where its inputs have to be
    begin_ids     tokens before a text that is to be continued
    stop_ids      tokens that end an answer
    max_length    positions the model accepts; None where it has no limit
    can_chat      whether its tokenizer brings a chat template, whose tokens the model knows
    batch_tokens  padded tokens of a forward pass: what bounds the memory; no score may depend on it
    generate      (prompts as ids, new tokens) -> of each the ids that were said, without the one that ended it, and whether
                  one did; greedy
    """

    name: str
    model: nn.Module
    encoder: Encoder
    device: torch.device
    begin_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_length: int | None
    can_chat: bool
    batch_tokens: int
    generate: Generate
