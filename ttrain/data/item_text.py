"""What a row of an evaluation says, as it would stand in a document that holds it: what is looked for in training shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.data import sources
from ttrain.data.chat_templates import Messages

NONE = "no text that an item of an evaluation has"
WANTED = "'question' with 'choices' or 'answer', 'context' with 'target', 'text', or a chat"


def of_row(record: Mapping[str, Any]) -> str | None:
    """What a row of an evaluation says; None where it is none."""
    question, answer, context = (record.get(name) for name in ("question", "answer", "context"))
    if isinstance(question, str):
        choices = record.get("choices")
        if isinstance(choices, list):
            return f"{question}\n{_right(choices, answer)}"
        said = next(
            (one for one in (answer, record.get("final")) if isinstance(one, str | int | float) and str(one).strip()), None
        )
        return question if said is None else f"{question}\n{said}"
    if isinstance(context, str):
        return f"{context}{record.get('target') or ''}"
    for parse in (sources.parse_conversation, sources.document_parser(sources.TEXT)):
        found = parse(dict(record))
        if isinstance(found, sources.Conversation):
            return of_chat(found.messages)
        if isinstance(found, sources.Document):
            return found.text
    return None


def of_chat(messages: Messages) -> str:
    """What is said in a chat. Not its system turn: data sets have the same one, or the same functions, in many chats, which
    would be most of an item (of 24 chats with functions 23 seemed to be known, of 150 short ones 15, by every document)."""
    return "\n".join(message.content for message in messages if message.role != "system")


def _right(choices: Sequence[object], answer: object) -> object:
    """The right one of the choices: its number, its letter or its text."""
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().isalpha() and answer not in choices:
        answer = ord(answer.strip().upper()) - ord("A")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return choices[answer]
    return answer if isinstance(answer, str) else ""
