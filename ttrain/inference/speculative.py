"""Speculative decoding with a second head of the model itself (arXiv:1811.03115, arXiv:2404.19737).

The hidden state from which the head tells the next token also feeds a second one, which guesses the token after that. The
guess goes through the model together with the token before it: where the model itself would have said the same, one pass has
made two tokens. Whatever is said is what the model says, so the second head changes the speed alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttrain.errors import UsageError
from ttrain.inference.loading import need_second_head

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

    from ttrain.inference.kv_cache import Kept
    from ttrain.inference.loading import Speaker


@dataclass
class Drafts:
    """How often the second head was right, and how many passes through the model that took."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "acceptance": self.accepted / self.drafted if self.drafted else None}

    def __str__(self) -> str:
        share = f"{self.accepted / self.drafted:.0%} of " if self.drafted else ""
        return f"{share}{self.drafted} guesses accepted"


def generate(
    speaker: Speaker,
    prompt: Sequence[int],
    processors: LogitsProcessorList,
    *,
    new_tokens: int,
    on_token: Callable[[int], object],
    kept: Kept | None = None,
) -> tuple[list[int], Drafts]:
    """(tokens of the answer with the one that ended it, what became of the guesses).

    The processors see each position once, in order, as they do in `generate`: so sampling under a seed is the same too.
    """
    head = need_second_head(speaker)
    model, drafts = _Model(speaker, kept.take(prompt) if kept else None), Drafts()
    ids_T = torch.tensor(list(prompt), device=speaker.device)
    said: list[int] = []
    guess: int | None = None
    with torch.inference_mode():
        while True:
            asked = [] if guess is None else [guess]
            candidates_T = torch.cat([ids_T, ids_T.new_tensor(asked)])
            logits_TV, hidden_TD = model(candidates_T, positions=1 + len(asked))
            drafts.passes += 1
            drafts.drafted += len(asked)
            for at in range(1 + len(asked)):
                before = candidates_T[: len(ids_T)]
                scores_V = processors(before[None], logits_TV[at][None].float())[0]
                token = int(scores_V.argmax())
                is_right = at < len(asked) and token == guess
                drafts.accepted += is_right
                said.append(token)
                ids_T = torch.cat([ids_T, ids_T.new_tensor([token])])
                ends = token in speaker.stop_ids
                if not ends:
                    on_token(token)
                if ends or len(said) == new_tokens:
                    model.keep(len(ids_T) - 1)
                    if kept:
                        kept.put(ids_T.tolist(), model.cache)
                    return said, drafts
                if not is_right:
                    break
            model.keep(len(ids_T) - 1)  # the last token has not gone through the model
            guess = int(head(hidden_TD[at]).argmax())


class _Model:
    """Logits and hidden states of the last positions of a row that grows, and may lose its last token."""

    def __init__(self, speaker: Speaker, cache: Any) -> None:
        """`cache`: with the beginning of the row in it; None: one is made where the model uses any."""
        from transformers import DynamicCache

        self._model = speaker.model
        self._head = speaker.causal.get_output_embeddings()
        self.cache = cache
        if cache is None and speaker.uses_cache:
            self.cache = DynamicCache(config=speaker.causal.config)
            self.cache.activate_past_recording()  # layers that look at a window can only then be cropped
        self._fed = cache.get_seq_length() if cache is not None else 0  # positions that are in it
        self._keeps = "logits_to_keep" in inspect.signature(speaker.causal.forward).parameters

    def __call__(self, ids_T: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """(logits, hidden states) of the last positions."""
        found: list[Tensor] = []
        handle = self._head.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
        try:
            only_last = {"logits_to_keep": positions} if self._keeps else {}
            cached = {"past_key_values": self.cache} if self.cache is not None else {}
            out = self._model(input_ids=ids_T[None, self._fed :], use_cache=self.cache is not None, **cached, **only_last)
        finally:
            handle.remove()
        if self.cache is not None:
            self.cache = out.past_key_values  # another one where a prefix stands before the text
        if len(found) != 1:
            raise UsageError("--speculative does not fit this model: its output head is not a module that it calls")
        self._fed = len(ids_T) if self.cache is not None else 0
        return out.logits[0, -positions:], found[0][0, -positions:]

    def keep(self, tokens: int) -> None:
        """Forget what went through the model after so many tokens."""
        if self.cache is not None and self._fed > tokens:
            self.cache.crop(tokens - self._fed)
            self._fed = tokens
