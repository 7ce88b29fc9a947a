"""Check of the chat template: whole conversations of the data, compared with transformers token by token."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ttrain.data import chat
from ttrain.data.chat_templates import Message, Messages, is_live
from ttrain.data.custom_template import FIXED_DATE_MACRO
from ttrain.data.encoder import Encoder
from ttrain.doctor.parts import Check

TEMPLATE = "chat template"
COMPARED = 3  # conversations
SHOWN_CHARACTERS = 30
FIX = (
    "a model that is asked by this template would not be asked as it was trained: correct chat_template.jinja of the "
    "tokenizer, or set tokenizer.template=ttrain"
)


def conversations_of(records: Iterable[Mapping[str, Any]], encoder: Encoder) -> list[Messages]:
    """The first conversations that are answered, up to their last answer.

    One whose text spells a special token is left out, since for transformers that text is the token, and so is
    one with reasoning, of which templates leave out some.
    """
    conversations: list[Messages] = []
    for record in records:
        turns = record.get("messages") or [*record.get("prompt", ()), *record.get("chosen", ())]
        messages = tuple(map(Message.from_json, turns))
        while messages and not is_live(messages[-1]):
            messages = messages[:-1]
        differs = any(turn.thought or encoder.specials_behind("", turn.content) for turn in messages)
        if messages and not differs and chat.refusals(encoder, [messages]) == [""]:
            conversations.append(messages)
        if len(conversations) == COMPARED:
            break
    return conversations


def check(encoder: Encoder, conversations: Sequence[Messages]) -> Check:
    """Ids are those of transformers, and what is trained on begins right behind the generation prompt."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(encoder.directory, local_files_only=True)
    template = FIXED_DATE_MACRO + encoder.jinja if encoder.template == "own" else None
    for number, messages in enumerate(conversations):
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        ids, live = chat.encode_chat(encoder, messages)

        def rendered(turns: Sequence[Mapping[str, str]], *, prompt: bool) -> list[int]:
            return list(
                tokenizer.apply_chat_template(
                    turns, chat_template=template, add_generation_prompt=prompt, tokenize=True, return_dict=False
                )
            )

        fault = _difference(encoder, ids, rendered(turns, prompt=False))
        fault = fault or _start(encoder, ids, live, rendered(turns[:-1], prompt=True))
        if fault:
            return Check(TEMPLATE, False, f"conversation {number}: {fault}", FIX)
    return Check(TEMPLATE, True, f"{len(conversations)} conversations have the ids that transformers makes of them")


def _difference(encoder: Encoder, ids: Sequence[int], expected: Sequence[int]) -> str:
    """Where ids differ from those of transformers; "" if they do not."""
    if list(ids) == list(expected):
        return ""
    equal = (left == right for left, right in zip(ids, expected, strict=False))
    place = next((number for number, is_equal in enumerate(equal) if not is_equal), min(len(ids), len(expected)))
    ours, theirs = (_shown(encoder, sequence[place:]) for sequence in (ids, expected))
    return f"from token {place} on it is {ours} where transformers has {theirs}"


def _start(encoder: Encoder, ids: Sequence[int], live: Sequence[bool], prompt: Sequence[int]) -> str:
    """What is wrong with the beginning of the last answer, which should follow the generation prompt; "" if nothing is."""
    size = len(prompt)
    if list(ids[:size]) != list(prompt):
        place = next(n for n in range(size) if n >= len(ids) or ids[n] != prompt[n])
        return (
            f"the generation prompt goes on {_shown(encoder, prompt[place:])} where the text in training has "
            f"{_shown(encoder, ids[place:])}"
        )
    if not live[size] or (size and live[size - 1]):
        return f"what is trained on does not begin with {_shown(encoder, ids[size:])}, right behind the generation prompt"
    return ""


def _shown(encoder: Encoder, ids: Sequence[int]) -> str:
    text = "".join(map(encoder.spelling, ids[:SHOWN_CHARACTERS]))
    return repr(text[:SHOWN_CHARACTERS])
