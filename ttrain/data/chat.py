"""Encode chats as token ids with a loss mask, by the tokenizer's chat template.

Training, evaluation and generation all use these functions, so prompts have the format that the model was trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ttrain.data import chat_templates, preferences
from ttrain.data.chat_templates import (
    Message,
    Messages,
    Segment,
    Template,
    TemplateRefused,
    TurnTemplate,
)
from ttrain.data.encoder import Encoder

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]


def encode_chats(encoder: Encoder, conversations: Sequence[Messages]) -> list[Encoded]:
    """(ids, live) of each conversation, both of shape [tokens]; live are the answers and the token that ends each.

    The ids are those that transformers makes of the conversation by the tokenizer's directory, unless a text spells a
    special token. Raises DataError for a role or a conversation that the template does not accept.
    """
    return _encode(encoder, conversations, prompt=False)


def refusal(encoder: Encoder, messages: Messages) -> str:
    """Why the tokenizer's own template refuses a conversation; "" where it does not, as those of ttrain."""
    try:
        template_of(encoder).render(messages)
    except TemplateRefused as error:
        return error.reason
    return ""


def _encode(encoder: Encoder, conversations: Sequence[Messages], *, prompt: bool) -> list[Encoded]:
    template = template_of(encoder)
    # A reasoning that is not trained on and the answer after it are one text.
    in_pieces = any(turn.masked for messages in conversations for turn in messages)
    if isinstance(template, TurnTemplate) and template.separable and not in_pieces:
        render = template.prompt if prompt else template.segments
        return assemble(encoder, [render(messages) for messages in conversations])
    renderings = [template.render(messages, prompt=prompt) for messages in conversations]
    texts = [rendering.text for rendering in renderings]
    encodings = encoder.encode_in_one_piece(texts, [rendering.contents for rendering in renderings])
    live = [rendering.live for rendering in renderings]
    return [(encoding.ids, encoding.within(spans)) for encoding, spans in zip(encodings, live, strict=True)]


def encode_preferences(
    encoder: Encoder, pairs: Sequence[tuple[Messages, Messages, Messages]]
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]:
    """(ids, live, branches) of each (prompt, chosen, rejected), of shape [tokens]; one answer may be empty.

    The prompt comes once, up to the first token that is live in an answer or in which the two differ; then each answer.
    """
    answers = [(prompt, answer) for prompt, *answers_of_pair in pairs for answer in answers_of_pair if answer]
    encoded = iter(encode_chats(encoder, [(*prompt, *answer) for prompt, answer in answers]))
    joined = []
    for _, *answers_of_pair in pairs:
        sides = [
            (branch, *next(encoded)) for branch, answer in enumerate(answers_of_pair, start=preferences.CHOSEN) if answer
        ]
        size = _common(*((ids, live) for _, ids, live in sides))
        branches = [np.full(len(ids) - size, branch, np.uint8) for branch, ids, _ in sides]
        joined.append(
            (
                np.concatenate([sides[0][1][:size], *(ids[size:] for _, ids, _ in sides)]),
                np.concatenate([np.zeros(size, np.bool_), *(live[size:] for *_, live in sides)]),
                np.concatenate([np.full(size, preferences.PROMPT, np.uint8), *branches]),
            )
        )
    return joined


def _common(*sequences: Encoded) -> int:
    """How many tokens the sequences begin with that are equal in all and live in none."""
    size = min(int(live.argmax()) if live.any() else len(live) for _, live in sequences)
    first, last = sequences[0][0][:size], sequences[-1][0][:size]
    differing = np.flatnonzero(first != last)
    return int(differing[0]) if len(differing) else size


def header_length(encoder: Encoder) -> int:
    """Tokens between the end of a user's turn and an answer; 0 if the template does not end such a turn by `end_id`."""
    ids, live = encode_chat(encoder, (Message("user", "?"), Message("assistant", "!")))
    header = ids[: live.index(True)]
    return header[::-1].index(encoder.end_id) if encoder.end_id in header else 0


def encode_chat(encoder: Encoder, messages: Messages) -> tuple[list[int], list[bool]]:
    """(ids, live) of one conversation."""
    ((ids, live),) = encode_chats(encoder, [messages])
    return ids.tolist(), live.tolist()


def prompt_ids(encoder: Encoder, messages: Messages) -> list[int]:
    """Ids of the prompt for the assistant's next answer."""
    ((ids, _),) = _encode(encoder, [messages], prompt=True)
    return list(ids.tolist())


def lead_text(encoder: Encoder) -> str:
    """What the template writes between the prompt and an answer, as it is decoded."""
    return encoder.decode(encoder.encode_markup(template_of(encoder).lead))


def assemble(encoder: Encoder, rendered: Sequence[Sequence[Segment]]) -> list[Encoded]:
    """(ids, live) of each list of segments. All texts go to the encoder in one call."""
    segments = list(itertools.chain.from_iterable(rendered))
    texts = [content for content, _ in segments if isinstance(content, str)]
    text_ids, offsets = encoder.encode_flat(texts)
    is_text = np.array([isinstance(content, str) for content, _ in segments], dtype=np.bool_)
    lengths = np.empty(len(segments), dtype=np.int64)
    lengths[is_text] = np.diff(offsets)
    lengths[~is_text] = [len(content) for content, _ in segments if not isinstance(content, str)]
    from_text = np.repeat(is_text, lengths)
    ids = np.empty(len(from_text), dtype=np.uint32)
    ids[from_text] = text_ids
    other_ids = itertools.chain.from_iterable(content for content, _ in segments if not isinstance(content, str))
    ids[~from_text] = np.fromiter(other_ids, dtype=np.uint32)
    live = np.repeat(np.array([live for _, live in segments], dtype=np.bool_), lengths)
    token_ends = np.concatenate([[0], np.cumsum(lengths)])
    borders = token_ends[np.cumsum([0, *map(len, rendered)])].tolist()
    return [(ids[start:end], live[start:end]) for start, end in itertools.pairwise(borders)]


@lru_cache(maxsize=4)
def template_of(encoder: Encoder) -> Template:
    """The encoder's chat template, cached. Raises DataError if the existing tokenizer's own template cannot be used."""
    if encoder.template == "ttrain":
        return chat_templates.role_tokens(encoder)
    if encoder.template == "tinyseek":
        return chat_templates.named_turns(encoder)
    from ttrain.data.custom_template import JinjaTemplate

    return JinjaTemplate(encoder)
