"""Encode chats as token ids with a loss mask, by the tokenizer's chat template.

The mask is made together with the tokens, never by searching for markers. The templates:

    ttrain     every turn is one role token, its text and `<|end|>`
    tinyseek   `User：…\\n` and `Assistant：…<|im_end|>`, as TinySeek's training scripts join them
    own        the template that comes with an existing tokenizer
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ttrain.data import preferences
from ttrain.data.chat_templates import Message, Messages, is_live
from ttrain.data.custom_template import JinjaTemplate, TemplateRefused
from ttrain.data.encoder import Encoder, Flags, Ids
from ttrain.data.jinja_templates import END, ROLE_TOKENS, ROLES
from ttrain.errors import DataError

Encoded = tuple[Ids, Flags]


def encode_chats(encoder: Encoder, conversations: Sequence[Messages]) -> list[Encoded]:
    """(ids, live) of each conversation; live are the answers and the token that ends each.

    The ids are those of transformers, unless a text spells a special token. Raises DataError for a
    conversation that the template does not accept.
    """
    return _encode(encoder, conversations, prompt=False)


def refusal(encoder: Encoder, messages: Messages) -> str:
    """Why the tokenizer's own template refuses a conversation; "" if it does not."""
    try:
        _template_of(encoder).render(messages)
    except TemplateRefused as error:
        return error.reason
    return ""


def _encode(encoder: Encoder, conversations: Sequence[Messages], *, prompt: bool) -> list[Encoded]:
    turns = list(itertools.chain.from_iterable(conversations))
    for role in {turn.role for turn in turns}.difference(ROLES):
        raise DataError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
    # A reasoning that is not trained on and the answer after it are one text.
    roles = None if any(turn.masked for turn in turns) else _role_tokens(encoder)
    if roles is not None:
        return _encode_apart(encoder, roles, conversations, prompt=prompt)
    encoded: list[Encoded] = []
    for messages in conversations:
        rendering = _template_of(encoder).render(messages, prompt=prompt)
        encoding = encoder.encode_rendered(rendering.text, rendering.contents)
        encoded.append((encoding.ids, encoding.within(rendering.live)))
    return encoded


def _encode_apart(
    encoder: Encoder, roles: dict[str, Ids], conversations: Sequence[Messages], *, prompt: bool
) -> list[Encoded]:
    ids, offsets = encoder.encode_flat(
        [turn.content for messages in conversations for turn in messages]
    )
    texts = (ids[start:end] for start, end in itertools.pairwise(offsets.tolist()))
    begin, end = np.array([[encoder.bos_id], [encoder.end_id]], np.uint32)
    encoded: list[Encoded] = []
    for messages in conversations:
        pieces = [begin]
        live = [False]
        for turn in messages:
            pieces += (roles[turn.role], next(texts), end)
            live += (False, is_live(turn), is_live(turn))
        if prompt:
            pieces.append(roles["assistant"])
            live.append(False)
        encoded.append((np.concatenate(pieces), np.repeat(live, [len(piece) for piece in pieces])))
    return encoded


@lru_cache(maxsize=4)
def _role_tokens(encoder: Encoder) -> dict[str, Ids] | None:
    # Every text lies between special tokens: no token spans a border, and no text can forge one.
    specials = [encoder.tokens["bos_token"], *ROLE_TOKENS, END]
    if encoder.template != "ttrain" or not encoder.encodes_apart(specials):
        return None
    return {role: np.array([encoder.special(f"<|{role}|>")], np.uint32) for role in ROLES}


@lru_cache(maxsize=4)
def _template_of(encoder: Encoder) -> JinjaTemplate:
    return JinjaTemplate(
        encoder.jinja, encoder.tokens, map(encoder.spelling, encoder.special_ids())
    )


def encode_preferences(
    encoder: Encoder, pairs: Sequence[tuple[Messages, Messages, Messages]]
) -> list[tuple[Ids, Flags, npt.NDArray[np.uint8]]]:
    """(ids, live, branches) of each (prompt, chosen, rejected); one answer may be empty.

    The prompt ends before the first token that is live or in which the answers differ.
    """
    answers = [(*prompt, *answer) for prompt, *sides in pairs for answer in sides if answer]
    encoded = iter(encode_chats(encoder, answers))
    joined = []
    for _, *sides in pairs:
        parts = [part for part, turns in enumerate(sides, preferences.CHOSEN) if turns]
        arrays = [next(encoded) for _ in parts]
        first = arrays[0]
        size = min(int(live.argmax()) if live.any() else len(live) for _, live in arrays)
        differing = np.flatnonzero(first[0][:size] != arrays[-1][0][:size])
        size = int(differing[0]) if len(differing) else size
        ids = [first[0][:size], *(ids[size:] for ids, _ in arrays)]
        live = [np.zeros(size, np.bool_), *(live[size:] for _, live in arrays)]
        branches = np.repeat(
            np.array([preferences.PROMPT, *parts], np.uint8), [len(piece) for piece in ids]
        )
        joined.append((np.concatenate(ids), np.concatenate(live), branches))
    return joined


def header_length(encoder: Encoder) -> int:
    """Tokens between the end of a user's turn and an answer; 0 if `end_id` does not end it."""
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
    # The templates of ttrain write nothing there.
    lead = _template_of(encoder).lead if encoder.template == "own" else ""
    return encoder.decode(encoder.encode_markup(lead))
