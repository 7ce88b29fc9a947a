"""From a model that one can talk to, to one that is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttrain.evaluate import perplexity
from ttrain.evaluate.evaluated_model import Subject
from ttrain.inference import generate as generating
from ttrain.inference.loading import Speaker
from ttrain.inference.sampling import Sampling


def subject_of(speaker: Speaker, *, batch_tokens: int | None = None) -> Subject:
    """The same model, asked in batches of at most so many tokens, padding included; None: as many as suit its device."""
    most = batch_tokens or perplexity.BATCH_TOKENS.get(speaker.device.type, perplexity.BATCH_TOKENS_ELSEWHERE)

    def generate(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[list[int], bool]]:
        said: list[tuple[list[int], bool]] = [([], False)] * len(prompts)
        for numbers in _batches([len(prompt) for prompt in prompts], new_tokens, most):
            answers = generating.generate(
                speaker, [prompts[number] for number in numbers], Sampling(max_tokens=new_tokens), numbers=numbers
            )
            for number, answer in zip(numbers, answers, strict=True):
                said[number] = (answer.ids, answer.ended)
        return said

    return Subject(
        name=speaker.name,
        model=speaker.model,
        encoder=speaker.encoder,
        device=speaker.device,
        begin_ids=speaker.begin_ids,
        stop_ids=speaker.stop_ids,
        max_length=speaker.max_length,
        can_chat=speaker.can_chat,
        batch_tokens=most,
        generate=generate,
    )


def _batches(lengths: Sequence[int], new_tokens: int, batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of prompts that are answered together: of like length, so that little is padding; one at least."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * (lengths[number] + new_tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
