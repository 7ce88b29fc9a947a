"""Answers to prompts: many at once or one that streams, through transformers' `generate` with its KV cache.

Letters in names: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from ttrain.data.encoder import Encoder
from ttrain.errors import DataError
from ttrain.inference import speculative
from ttrain.inference.kv_cache import Kept
from ttrain.inference.loading import Speaker
from ttrain.inference.sampling import Sampling

OnTokens = Callable[[list[int]], None]
UNFINISHED = "\ufffd"  # what a decoder writes for bytes whose rest has not come


@dataclass(frozen=True)
class Said:
    """An answer: its tokens without the one that ended it, and whether one did (else the longest length was reached)."""

    ids: list[int]
    ended: bool
    seconds: float  # of the whole batch
    drafts: speculative.Drafts | None = None


def generate(
    speaker: Speaker,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    draft: bool = False,
    kept: Kept | None = None,
) -> list[Said]:
    """The model's answers to prompts of ids, made together.

    `numbers` tell rows apart: an answer depends on the seed and its own number, never on what else is in the batch.
    `on_tokens` gets the tokens of a single answer as they come. `draft`: the second head guesses, with the same result.
    `kept`: of the conversation that a single prompt belongs to.
    Raises DataError for a prompt that leaves no room for an answer.
    """
    longest = max(map(len, prompts))
    new_tokens = room(speaker, longest, sampling)
    numbers = range(len(prompts)) if numbers is None else numbers
    began = time.monotonic()
    processors = _processors(sampling, numbers, longest)
    if draft:
        (prompt,) = prompts
        said, drafts = speculative.generate(
            speaker, prompt, processors, new_tokens=new_tokens, kept=kept,
            on_token=lambda token: on_tokens and on_tokens([token]),
        )  # fmt: skip
        return [_said(speaker, said, time.monotonic() - began, drafts)]
    pad = int(speaker.model.generation_config.pad_token_id)
    ids_BT = torch.full((len(prompts), longest), pad, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):  # on the left, so that all answers begin at one position
        ids_BT[row, longest - len(prompt) :] = torch.as_tensor(np.asarray(prompt, dtype=np.int64))
        mask_BT[row, longest - len(prompt) :] = 1
    cache = kept.take(prompts[0]) if kept else None
    with torch.no_grad():  # not inference_mode: a table that the model keeps would be unfit for the training that goes on
        found_BT = speaker.model.generate(
            input_ids=ids_BT.to(speaker.device),
            attention_mask=mask_BT.to(speaker.device),
            generation_config=GenerationConfig(max_new_tokens=new_tokens, eos_token_id=list(speaker.stop_ids)),
            logits_processor=processors,
            streamer=_Streamer(on_tokens, speaker.stop_ids) if on_tokens else None,
            **({"past_key_values": cache} if cache is not None else {}),
        )
    if kept:
        kept.put(found_BT[0].tolist(), cache)
    seconds = time.monotonic() - began
    return [_said(speaker, row, seconds) for row in found_BT[:, longest:].tolist()]


def text_of(encoder: Encoder, said: Said) -> str:
    """The text of an answer; of one that was cut, without the bytes of a character whose rest did not come."""
    text = encoder.decode(said.ids)
    return text if said.ended else text.rstrip(UNFINISHED)


def room(speaker: Speaker, prompt_tokens: int, sampling: Sampling) -> int:
    """Tokens that an answer may have. Raises DataError where the prompt leaves none."""
    if speaker.max_length is None:
        return sampling.max_tokens
    if prompt_tokens >= speaker.max_length:
        raise DataError(
            f"the prompt has {prompt_tokens} tokens, but the model '{speaker.name}' takes {speaker.max_length} "
            "together with the answer; shorten it"
        )
    return min(sampling.max_tokens, speaker.max_length - prompt_tokens)


class Text:
    """The text of tokens that come one after the other; a character is held back until all its bytes are there."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._ids: list[int] = []
        self._given = 0

    def add(self, ids: Sequence[int]) -> str:
        """What can be shown now that was not shown before."""
        self._ids += ids
        return self._rest(self._encoder.decode(self._ids).rstrip(UNFINISHED))

    def end(self) -> str:
        """What was held back: bytes that are no character, after an answer that ended by itself."""
        return self._rest(self._encoder.decode(self._ids))

    def _rest(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new


class _SeededNoise(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed here
    """Adds Gumbel noise, after which the largest score is a sample of the softmax (arXiv:1411.0030).

    Each row has a generator of its own, so that its answer does not depend on the other rows, nor on how many there are.
    """

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        seeds = [int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) for number in numbers]
        self._generators = [torch.Generator().manual_seed(one) for one in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        smallest = torch.finfo(torch.float32).tiny  # the logarithm of 0 would win against any score
        drawn = [
            torch.empty(scores.shape[-1]).exponential_(generator=generator).clamp_min_(smallest)
            for generator in self._generators
        ]
        return scores - torch.stack(drawn).log_().to(scores.device)


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands on what `generate` puts: first the prompt, then token after token."""

    def __init__(self, on_tokens: OnTokens, stops: Sequence[int]) -> None:
        self._on_tokens, self._stops = on_tokens, stops
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self._on_tokens([token for token in value.flatten().tolist() if token not in self._stops])
        self._is_prompt = False

    def end(self) -> None:
        pass


def _processors(sampling: Sampling, numbers: Sequence[int], prompt_tokens: int) -> LogitsProcessorList:
    """The settings in the order that transformers has them. The penalty counts the answer alone: over the whole prompt it
    would also fall on the tokens that end a turn, and no answer would end."""
    found: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty, prompt_ignore_length=prompt_tokens))
    if sampling.temperature:
        found.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            found.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            found.append(TopPLogitsWarper(sampling.top_p))
        found.append(_SeededNoise(sampling.seed, numbers))
    return LogitsProcessorList(found)


def _said(speaker: Speaker, ids: list[int], seconds: float, drafts: speculative.Drafts | None = None) -> Said:
    end = next((at for at, token in enumerate(ids) if token in speaker.stop_ids), None)
    return Said(ids if end is None else ids[:end], end is not None, seconds, drafts)
