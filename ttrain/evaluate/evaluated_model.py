"""The interface between evaluation and a model. Stages and the command line adapt their loaded models to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ttrain.data.encoder import Encoder
from ttrain.data.jinja_templates import BOS
from ttrain.errors import UsageError
from ttrain.train.distributed import Ranks

Generate = Callable[[Sequence[Sequence[int]], int], list[tuple[list[int], bool]]]
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model under evaluation, with what is needed to score texts and generate answers.

    name          its name in tables
    model         in eval mode, on `device`; called as transformers' causal models are (`input_ids`, `use_cache`, ...)
    encoder       its tokenizer
    device        the device of its inputs
    begin_ids     tokens before a text to continue
    max_length    positions the model accepts; None where it has no limit
    can_chat      whether its tokenizer has a chat template whose tokens the model knows
    batch_tokens  padded tokens of a forward pass, which bound the memory; no score may depend on it
    generate      greedy: (prompts as ids, new tokens) -> for each prompt (new ids without the stop id, whether a stop id
                  ended it)
    ranks         that score texts and chats together; None: this process alone
    """

    name: str
    model: nn.Module
    encoder: Encoder
    device: torch.device
    begin_ids: tuple[int, ...]
    max_length: int | None
    can_chat: bool
    batch_tokens: int
    generate: Generate
    ranks: Ranks | None = None

    def room(self, new_tokens: int) -> tuple[int, int | None]:
        """(tokens of an answer, tokens of a prompt at most): an answer takes at most half of the positions.

        Both are the same for all prompts, so that no answer depends on its batch.
        """
        if self.max_length is None:
            return new_tokens, None
        tokens = min(new_tokens, self.max_length // 2)
        return tokens, self.max_length - tokens


def beginning(subject: EvaluatedModel) -> tuple[int, ...]:
    """Ids before a text, so that its first token is scored too: those that the tokenizer adds, else its bos, as in the
    harness, else its eos.

    The model does not know a bos that ttrain added to the tokenizer. Raises UsageError if it knows none of these.
    """
    model, encoder = subject.model, subject.encoder
    rows = getattr(model, "get_input_embeddings")().weight.shape[0]  # noqa: B009  # a method of transformers' models
    bos_ids = () if encoder.tokens["bos_token"] == BOS else (encoder.bos_id,)
    for ids in (subject.begin_ids, bos_ids, (encoder.eos_id,)):
        if ids and max(ids) < rows:
            return ids
    raise UsageError(
        f"the model {subject.name} knows no token that begins or ends a text, so the first token of a text cannot be "
        "scored; give its tokenizer a bos_token or an eos_token"
    )
