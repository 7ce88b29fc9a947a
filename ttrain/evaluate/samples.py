"""Samples: what a model writes.

Prompts are those of the settings, else beginnings of held-out documents and held-out questions,
with what follows them there.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ttrain.data import chat
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.data.records import hash_of
from ttrain.errors import ArtifactError
from ttrain.inference.loading import LoadedModel

SAMPLED = 2  # documents, and as many questions
BEGINNING_BYTES = 80  # of a document: about a line, of at most as many tokens
WORDS = re.compile(r".*\S(?=\s)", re.DOTALL)  # all up to the last space


@dataclass(frozen=True)
class SamplePrompt:
    """The beginning of a document, or the turns of a chat up to a question.

    `reference` is what follows it in the data.
    """

    text: str
    turns: Messages = ()  # empty: a document
    reference: str = ""


def hash_of_text(text: str) -> bytes:
    """A sort key for texts that depends on the text alone."""
    return hash_of(text.encode("utf-8"))


def question(text: str) -> SamplePrompt:
    """A question of the settings."""
    return SamplePrompt(text, (Message("user", text),))


def of_documents(
    texts: Iterable[str], encoder: Encoder, *, new_tokens: int, room: int
) -> list[SamplePrompt]:
    """The beginnings of two documents, of at most `room` tokens.

    Those with the lowest hashes, so that runs with the same held-out rows have the same prompts.
    """
    begun = (_begun(text, min(BEGINNING_BYTES, room)) for text in sorted(texts, key=hash_of_text))
    return _chosen((prompt for prompt in begun if prompt.text.strip()), encoder, new_tokens)


def of_chats(
    chats: Iterable[Messages], encoder: Encoder, *, new_tokens: int, room: int
) -> list[SamplePrompt]:
    """The first questions of two chats, with the turns before them, and their answers."""
    prompts: list[SamplePrompt] = []
    for turns in sorted(
        chats, key=lambda turns: hash_of_text("\n".join(turn.content for turn in turns))
    ):
        before = tuple(itertools.takewhile(lambda turn: turn.role != "assistant", turns))
        if (
            before
            and before[-1].role == "user"
            and before[-1].content.strip()
            and len(before) < len(turns)
        ):
            prompts.append(SamplePrompt(before[-1].content, before, turns[len(before)].content))
    short = (prompt for prompt in prompts if len(chat.prompt_ids(encoder, prompt.turns)) <= room)
    return _chosen(short, encoder, new_tokens)


def _chosen(
    prompts: Iterator[SamplePrompt], encoder: Encoder, new_tokens: int
) -> list[SamplePrompt]:
    # The first prompts with different texts; references are cut to what a model writes.
    chosen: dict[str, SamplePrompt] = {}
    for prompt in prompts:
        (reference_ids,) = encoder.encode([prompt.reference])
        reference = encoder.decode(list(reference_ids[:new_tokens])).rstrip(
            "\N{REPLACEMENT CHARACTER}"
        )
        chosen.setdefault(prompt.text, replace(prompt, reference=reference))
        if len(chosen) == SAMPLED:
            break
    return list(chosen.values())


def _begun(text: str, most_bytes: int) -> SamplePrompt:
    # At most the first half of a document, up to the end of a word, and the rest.
    half = text[: len(text) // 2].encode("utf-8")[:most_bytes].decode("utf-8", errors="ignore")
    words = WORDS.match(text[: len(half) + 1])
    # Chinese has a space in a title at most: the characters up to it are not the beginning.
    shown = words[0] if words and 2 * len(words[0]) >= len(half) else half
    return SamplePrompt(shown, reference=text[len(shown) :])


def continuations(
    subject: LoadedModel, prompts: Sequence[SamplePrompt], *, new_tokens: int
) -> list[dict[str, str]]:
    """The prompts, their likeliest continuations as `answer`, and `reference` if there is one."""
    encoder = subject.encoder
    ids = [
        chat.prompt_ids(encoder, prompt.turns)
        if prompt.turns
        else [encoder.bos_id, *encoder.encode([prompt.text])[0]]
        for prompt in prompts
    ]
    try:
        answers = [
            encoder.decode(completion.ids) for completion in subject.generate(ids, new_tokens)
        ]
    except ArtifactError:  # of a model that has diverged, which is scored all the same
        answers = [""] * len(ids)
    return [
        {
            "prompt": prompt.text,
            "answer": answer.removeprefix(chat.lead_text(encoder)) if prompt.turns else answer,
            **({"reference": prompt.reference} if prompt.reference else {}),
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
