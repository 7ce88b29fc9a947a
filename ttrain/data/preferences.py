"""Read preferences in the formats of common data sets: a chosen and a rejected answer to a prompt, or one rated answer.

Every rejection reason says what is wrong with the value and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ttrain.core.files import JsonDict
from ttrain.data import chat_shapes
from ttrain.data.chat_shapes import A_TURN, Row, is_blank
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.tools import Malformed, kind_of

ANSWER_KEYS = ("chosen", "rejected")
RATED_KEYS = ("prompt", "completion")
TEXT_KEYS = ("prompt", "question", "query", "input")
PROMPT_KEYS = (
    "prompt",
    "conversations",
    "messages",
    "instruction",
    *TEXT_KEYS[1:],
)  # the first that is present holds the prompt
PREFERENCE_FIELDS = (
    "'prompt', 'chosen' and 'rejected' (texts or lists of turns), 'chosen' and 'rejected' with a common beginning, "
    "or 'prompt', 'completion' and 'label'"
)
PROMPT, CHOSEN, REJECTED = 0, 1, 2  # parts of a record's tokens; a single rated answer is CHOSEN if it is desirable
AN_ANSWER = f"not text, a turn or a list of turns such as {A_TURN}"
Labels = tuple[tuple[str, str], ...]  # of a row, by key
Turns = Sequence[Message]
Sides = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected


@dataclass(frozen=True)
class Preference:
    """A prompt with the answer that is preferred and the one that is not; with the labels of its row.

    A single rated answer stands in `chosen` if it is desirable, else in `rejected`; the other is empty then.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    labels: Labels = ()
    weight: float = 1.0

    @property
    def messages(self) -> Messages:
        """All turns."""
        return (*self.prompt, *self.chosen, *self.rejected)

    def content(self) -> bytes:
        """What identifies the record, wherever it stands."""
        return orjson.dumps([_identity(turns) for turns in (self.prompt, self.chosen, self.rejected)])

    def prompt_content(self) -> bytes:
        """What identifies the prompt: the held-out part is chosen by it, so that no prompt is on both sides."""
        return orjson.dumps(_identity(self.prompt))

    def to_json(self) -> JsonDict:
        parts = {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}
        label: dict[str, bool] = {}
        if not (self.chosen and self.rejected):
            parts = {"prompt": self.prompt, "completion": self.chosen or self.rejected}
            label = {"label": bool(self.chosen)}
        return {name: [message.to_json() for message in turns] for name, turns in parts.items()} | label | dict(self.labels)

    @classmethod
    def from_json(cls, row: Row) -> Preference:
        """The record that `to_json` wrote, without its labels."""
        if "completion" in row:
            row = {"prompt": row["prompt"], "chosen" if row["label"] else "rejected": row["completion"]}
        prompt, chosen, rejected = (
            tuple(map(Message.from_json, row.get(key, ()))) for key in ("prompt", "chosen", "rejected")
        )
        return cls(prompt, chosen, rejected)


def is_preference(row: Row) -> bool:
    """Whether a row has the keys of a preference. A completion counts as rated only by a label that is true or false."""
    is_rated = all(row.get(key) is not None for key in RATED_KEYS) and isinstance(row.get("label"), bool)
    return is_rated or all(row.get(key) is not None for key in ANSWER_KEYS)


def preference_of(row: Row, labels: Labels = ()) -> Preference:
    """The preference in a row. A key that is null counts as absent. Raises Malformed with the reason."""
    if any(row.get(key) is not None for key in ANSWER_KEYS):
        prompt, chosen, rejected = _pair(row)
    elif row.get("completion") is not None:
        prompt, chosen, rejected = _rated(row)
    else:
        raise Malformed(f"none of the keys 'chosen', 'rejected' and 'completion' holds an answer; write {PREFERENCE_FIELDS}")
    prompt = tuple(map(chat_shapes.not_learnt, chat_shapes.with_system_and_tools(list(prompt), row)))
    return Preference(prompt, tuple(chosen), tuple(rejected), labels)


def _pair(row: Row) -> Sides:
    answers = {key: _answer_turns(row, key) for key in ANSWER_KEYS}
    prompt_key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if prompt_key is None:
        prompt, chosen, rejected = _common_beginning(row, answers)
    else:
        asked = _prompt_turns(row, prompt_key)
        prompt, chosen = _asked_and_answered(row, asked, answers, "chosen")
        other_prompt, rejected = _asked_and_answered(row, asked, answers, "rejected")
        if len(prompt) != len(other_prompt):
            raise Malformed("'chosen' and 'rejected' have no common prompt: one has turns before it; write both alike")
    if _identity(chosen) == _identity(rejected):
        raise Malformed("'chosen' and 'rejected' are equal; write two different answers, or leave the row out")
    for key, answer in zip(ANSWER_KEYS, (chosen, rejected), strict=True):
        _check_answer(answer, key)
    return prompt, chosen, rejected


def _rated(row: Row) -> Sides:
    """The sides of a single answer with a label."""
    label = row.get("label")
    if not isinstance(label, bool):
        kind = kind_of(label) if "label" in row else "missing"
        raise Malformed(f"'label' is {kind} beside 'completion'; write true (the answer is good) or false")
    if row.get("prompt") is None:
        raise Malformed("no key 'prompt' beside 'completion'; write the prompt as text or as a list of turns")
    answers = {"completion": _answer_turns(row, "completion")}
    prompt, answer = _asked_and_answered(row, _prompt_turns(row, "prompt"), answers, "completion")
    _check_answer(answer, "completion")
    return (prompt, answer, ()) if label else (prompt, (), answer)


def _prompt_turns(row: Row, key: str) -> list[Any]:
    """The turns of the prompt as they stand in the row."""
    if key == "instruction":
        return [message.to_json() for message in chat_shapes.alpaca_question(row)]
    if key not in TEXT_KEYS and isinstance(row[key], str):
        raise Malformed(f"'{key}' is text, not text or a list of turns such as {A_TURN}")
    return chat_shapes.turns_under(row, key, "chosen", "user")


def _answer_turns(row: Row, key: str) -> list[Any]:
    """The turns of an answer as they stand in the row: of a text, a turn or a list of turns."""
    value = row.get(key)
    if value is None:
        other_key = "chosen" if key == "rejected" else "rejected"
        raise Malformed(f"'{key}' is {'null' if key in row else 'missing'} beside '{other_key}'; write both answers")
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, str | list):
        raise Malformed(f"'{key}' is {kind_of(value)}, {AN_ANSWER}")
    return chat_shapes.turns_under(row, key, "prompt", "assistant")


def _asked_and_answered(row: Row, prompt: list[Any], answers: Mapping[str, list[Any]], key: str) -> tuple[Turns, Turns]:
    """(turns of the prompt, those of the answer under `key`)."""
    has_tools = bool(row.get("tools"))
    for turns in answers.values():
        last = chat_shapes.wordings(turns, has_tools)[-2:]
        if len(prompt) > 1 and last and chat_shapes.wordings(prompt, has_tools)[-len(last) :] == last:
            prompt = prompt[:-1]  # it holds an answer too
    prompt, answer = chat_shapes.apart(prompt, answers[key], key, has_tools=has_tools)
    conversation = _turns([*prompt, *answer], key, row)
    return conversation[: len(prompt)], conversation[len(prompt) :]


def _common_beginning(row: Row, answers: Mapping[str, list[Any]]) -> Sides:
    """(common turns, the others of `chosen`, those of `rejected`)."""
    for key in ANSWER_KEYS:
        if isinstance(row[key], str):
            raise Malformed(f"'{key}' is a text but there is no 'prompt'; write it, or lists of turns that begin alike")
    chosen, rejected = (_turns(answers[key], key, row) for key in ANSWER_KEYS)
    size = 0
    while size < min(len(chosen), len(rejected)) and chosen[size].identity() == rejected[size].identity():
        size += 1
    if not size:
        raise Malformed("'chosen' and 'rejected' have no common prompt: their first turns differ; write it under 'prompt'")
    return chosen[:size], chosen[size:], rejected[size:]


def _check_answer(answer: Turns, key: str) -> None:
    if not any(turn.role == "assistant" and turn.in_loss and not is_blank(turn.content) for turn in answer):
        raise Malformed(f"'{key}' has no answer of its own: no assistant's turn with a text after the prompt")


def _turns(turns: object, key: str, row: Row) -> list[Message]:
    return chat_shapes.turns_of(turns, key, has_tools=bool(row.get("tools")))


def _identity(turns: Turns) -> list[list[object]]:
    return [message.identity() for message in turns]
