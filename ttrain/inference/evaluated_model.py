"""Adapts a loaded chat model to the evaluation interface."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.evaluate import perplexity
from ttrain.evaluate.evaluated_model import EvaluatedModel
from ttrain.inference import generate as generating
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling
from ttrain.train.distributed import Ranks


def as_evaluated_model(
    loaded_model: LoadedModel, *, batch_tokens: int | None = None, ranks: Ranks | None = None
) -> EvaluatedModel:
    """Adapt a loaded model for evaluation in batches of at most `batch_tokens`, padding included; None: by device."""
    most = batch_tokens or perplexity.batch_tokens_of(loaded_model.device)[0]

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[list[int], bool]]:
        completions: dict[int, tuple[list[int], bool]] = {}
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))  # so that there is little padding
        for numbers in generating.grouped(
            by_length, lambda batch, number: (len(batch) + 1) * (len(prompts[number]) + new_tokens) <= most
        ):
            answers = generating.generate(
                loaded_model, [prompts[number] for number in numbers], Sampling(max_tokens=new_tokens), numbers=numbers
            )
            completions |= {number: (answer.ids, answer.ended) for number, answer in zip(numbers, answers, strict=True)}
        return [completions[number] for number in range(len(prompts))]

    return EvaluatedModel(
        name=loaded_model.name,
        model=loaded_model.model,
        encoder=loaded_model.encoder,
        device=loaded_model.device,
        begin_ids=loaded_model.begin_ids,
        max_length=loaded_model.max_length,
        can_chat=loaded_model.can_chat,
        batch_tokens=most,
        generate=generate,
        ranks=ranks,
    )
