"""Text generation through transformers' `generate`: batches, a streamed answer, its KV cache."""

# Letters in names: B rows, T positions.

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, DataError
from ttrain.inference.sampling import Sampling

LoadedModel = Any  # of `loading`, which imports this module
# Gets the tokens of each answer that has not ended, by row; may return the rows that end here.
OnTokens = Callable[[dict[int, list[int]]], Collection[int] | None]
UNFINISHED = "\ufffd"  # the decoder's output for an incomplete character


@dataclass(frozen=True)
class Completion:
    """An answer without its stop token, and whether there was one (else the limit was reached)."""

    ids: list[int]
    ended: bool
    seconds: float  # of the whole batch


def generate(
    loaded_model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    kv_cache: KVCache | None = None,
) -> list[Completion]:
    """Generate answers to a batch of prompts (token ids).

    numbers    identify rows, whose answers never depend on the batch
    on_tokens  gets the answers with each new token, may return rows to end
    kv_cache   of the conversation to which a single prompt belongs

    Raises DataError for a prompt that leaves no room for an answer.
    """
    longest = max(map(len, prompts))
    room = (
        sampling.max_tokens
        if loaded_model.max_length is None
        else loaded_model.max_length - longest
    )
    if room <= 0:
        raise DataError(
            f"the prompt has {longest} tokens, but the model '{loaded_model.name}' takes "
            f"{loaded_model.max_length} "
            "together with the answer; shorten it"
        )
    numbers = numbers or range(len(prompts))
    began = time.monotonic()
    processors = logits_processors(sampling, numbers, longest)
    processors.insert(0, _FiniteScores(loaded_model.name))
    pad = int(loaded_model.model.generation_config.pad_token_id)
    rows = [torch.as_tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    padded = partial(
        pad_sequence, batch_first=True, padding_side="left"
    )  # so that all answers begin at the same position
    watches = [_TokenWatch(on_tokens, loaded_model.stop_ids, longest)] if on_tokens else []
    cache = kv_cache.take(prompts[0][:-1]) if kv_cache else None  # the last token predicts
    with (
        torch.no_grad()
    ):  # not inference_mode: tables cached in the model would be unusable for further training
        found_BT = loaded_model.model.generate(
            input_ids=padded(rows, padding_value=pad).to(loaded_model.device),
            attention_mask=padded([torch.ones_like(ids) for ids in rows]).to(loaded_model.device),
            generation_config=GenerationConfig(
                max_new_tokens=min(sampling.max_tokens, room),
                eos_token_id=list(loaded_model.stop_ids),
            ),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList(watches),
            **({"cache": cache} if cache is not None else {}),
        )
    if kv_cache:
        kv_cache.put(found_BT[0].tolist(), cache)
    seconds = time.monotonic() - began
    return [_completion(loaded_model, row, seconds) for row in found_BT[:, longest:].tolist()]


def completion_text(encoder: Encoder, completion: Completion, lead: str = "") -> str:
    """Decode an answer without the `lead` of the chat template, nor a cut last character."""
    text = encoder.decode(completion.ids).removeprefix(lead)
    return text if completion.ended else text.rstrip(UNFINISHED)


class TextStream:
    """Decodes a stream of tokens; a character is held back until all its bytes have arrived.

    So is a beginning that may become the `lead`, which is not shown.
    """

    def __init__(self, encoder: Encoder, lead: str = "") -> None:
        self._encoder = encoder
        self._lead = lead
        self.ids: Sequence[int] = ()
        self.shown = ""

    def add(self, ids: Sequence[int]) -> str:
        """Take the tokens so far; returns the new text that can be shown."""
        self.ids = ids
        text = self._encoder.decode(ids).rstrip(UNFINISHED)
        return "" if self._lead.startswith(text) else self._unseen(text)

    def end(self) -> str:
        """The held-back text: bytes that form no character."""
        return self._unseen(self._encoder.decode(self.ids))

    def _unseen(self, text: str) -> str:
        new = text.removeprefix(self._lead)[len(self.shown) :]
        self.shown += new
        return new


class _SeededNoise(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed here
    """Adds Gumbel noise: the largest score is a sample of the softmax then (arXiv:1411.0030).

    Each row has its own generator, so that its answer does not depend on the other rows.
    """

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        seeds = [
            int(np.random.SeedSequence([seed, number]).generate_state(1)[0]) for number in numbers
        ]
        self._generators = [torch.Generator().manual_seed(row_seed) for row_seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        smallest = torch.finfo(torch.float32).tiny  # log(0) would win against any score
        drawn = [
            torch.empty(scores.shape[-1]).exponential_(generator=generator).clamp_min_(smallest)
            for generator in self._generators
        ]
        return scores - torch.stack(drawn).log_().to(scores.device)


class _FiniteScores(LogitsProcessor):  # type: ignore[misc]
    """Refuses scores that are not finite, of which the first token would be the best."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not torch.isfinite(scores.max()):
            raise ArtifactError(
                f"the model '{self._name}' computes scores that are not finite; use --dtype fp32, "
                "or train the model again"
            )
        return scores


class _TokenWatch(StoppingCriteria):  # type: ignore[misc]
    """Passes on the answers that have not ended, and ends the rows that `on_tokens` returns."""

    def __init__(self, on_tokens: OnTokens, stop_ids: Sequence[int], prompt_tokens: int) -> None:
        self._on_tokens = on_tokens
        self._stop_ids = stop_ids
        self._prompt_tokens = prompt_tokens
        self._ended: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        answers = input_ids[:, self._prompt_tokens :].tolist()
        self._ended |= {row for row, ids in enumerate(answers) if ids[-1] in self._stop_ids}
        unended = {row: ids for row, ids in enumerate(answers) if row not in self._ended}
        self._ended |= set(self._on_tokens(unended) or ())
        return torch.tensor(
            [row in self._ended for row in range(len(answers))], device=input_ids.device
        )


def logits_processors(
    sampling: Sampling, numbers: Sequence[int], prompt_tokens: int
) -> LogitsProcessorList:
    """Logits processors in transformers' order."""
    # The repetition penalty applies to the answer only: over the prompt it would also penalise the
    # tokens that end a turn, and no answer would end.
    processors: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        processors.append(
            RepetitionPenaltyLogitsProcessor(
                sampling.repetition_penalty, prompt_ignore_length=prompt_tokens
            )
        )
    if sampling.temperature:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        processors.append(_SeededNoise(sampling.seed, numbers))
    return LogitsProcessorList(processors)


def _completion(loaded_model: LoadedModel, ids: list[int], seconds: float) -> Completion:
    end = next((at for at, token in enumerate(ids) if token in loaded_model.stop_ids), None)
    return Completion(ids if end is None else ids[:end], end is not None, seconds)


class KVCache:
    """The cache of the last sequence, cut to what the next one has in common with it."""

    def __init__(self, loaded_model: LoadedModel) -> None:
        causal = loaded_model.causal
        self._config = causal.config
        # A prefix has a cache of its own.
        self._is_used = (
            "cache" in inspect.signature(causal.forward).parameters
            and causal.generation_config.use_cache
            and not loaded_model.has_prefix
        )
        self._ids: Sequence[int] = ()
        self._cache: Any = None

    def take(self, ids: Sequence[int]) -> Any:
        """The cache of a common beginning with `ids`; None for layers whose cache cannot be cut.

        The caller owns it until `put`: an interrupted pass leaves no half-filled cache behind.
        """
        cache = self._cache
        self._cache = None
        same = common(self._ids, ids)
        if cache is None or not same:
            cache = DynamicCache(config=self._config) if self._is_used else None
            return (
                cache
                if cache and all(type(layer) is DynamicLayer for layer in cache.layers)
                else None
            )
        if same < len(self._ids):
            cache.crop(same - len(self._ids))
        return cache

    def put(self, ids: Sequence[int], cache: Any) -> None:
        """Store the cache of a sequence; it may lack the last token."""
        self._cache = cache
        self._ids = ids[: cache.get_seq_length()] if cache is not None else ()


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    return sum(takewhile(bool, map(operator.eq, first, second)))
