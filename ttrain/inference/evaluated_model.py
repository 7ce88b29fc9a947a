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
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))  # so that there is little padding
        lengths = [len(prompts[number]) + new_tokens for number in order]
        for part in perplexity.batch_slices(lengths, most, most):
            of_batch = [prompts[number] for number in order[part]]
            answers = generating.generate(loaded_model, of_batch, Sampling(max_tokens=new_tokens), numbers=order[part])
            for number, answer in zip(order[part], answers, strict=True):
                completions[number] = answer.ids, answer.ended
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
