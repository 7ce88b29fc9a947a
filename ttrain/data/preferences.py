"""Read preferences: a chosen and a rejected answer to a prompt, or one rated answer.

Every rejection reason says what is wrong with the value and what to write instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from ttrain.core.files import JsonDict
from ttrain.data import chat_shapes
from ttrain.data.chat_shapes import RawTurns, Row, is_blank, wording
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.tools import kind_of, require

ANSWER_KEYS = ("chosen", "rejected")
RATED_KEYS = ("prompt", "completion")
# The first that is present holds the prompt.
PROMPT_KEYS = ("prompt", "conversations", "messages", "instruction", "question", "query", "input")
PREFERENCE_FIELDS = (
    "'prompt', 'chosen' and 'rejected' (texts or lists of turns), 'chosen' and 'rejected' with a "
    "common beginning, or 'prompt', 'completion' and 'label'"
)
# Parts of a record's tokens; a single rated answer is CHOSEN if it is desirable.
PROMPT, CHOSEN, REJECTED = 0, 1, 2
Labels = tuple[tuple[str, str], ...]  # of a row, by key
Turns = list[Message]
Sides = tuple[Turns, Turns, Turns]  # prompt, chosen, rejected


@dataclass(frozen=True)
class Preference:
    """A prompt with a preferred answer and another, and the labels of its row.

    A single rated answer is `chosen` if it is desirable, else `rejected`; the other is empty.
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
        return orjson.dumps(
            [_identity(turns) for turns in (self.prompt, self.chosen, self.rejected)]
        )

    def prompt_content(self) -> bytes:
        """What identifies the prompt, by which the held-out part is chosen."""
        return orjson.dumps(_identity(self.prompt))

    def to_json(self) -> JsonDict:
        """The record as a row that `preference_of` reads."""
        sides = {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}
        rating: JsonDict = {}
        if not (self.chosen and self.rejected):
            sides = {"prompt": self.prompt, "completion": self.chosen or self.rejected}
            rating = {"label": bool(self.chosen)}
        turns = {name: [turn.to_json() for turn in side] for name, side in sides.items()}
        return turns | rating | dict(self.labels)

    @classmethod
    def from_json(cls, row: Row) -> "Preference":
        """The record that `to_json` wrote, without its labels."""
        if "completion" in row:
            row = {"prompt": row["prompt"], ANSWER_KEYS[not row["label"]]: row["completion"]}
        sides = (row.get(key, ()) for key in ("prompt", *ANSWER_KEYS))
        prompt, chosen, rejected = (tuple(map(Message.from_json, side)) for side in sides)
        return cls(prompt, chosen, rejected)


def is_preference(row: Row) -> bool:
    """Whether a row has the keys of a preference; the label of a completion is a boolean."""
    is_rated = all(row.get(key) is not None for key in RATED_KEYS) and isinstance(
        row.get("label"), bool
    )
    return is_rated or all(row.get(key) is not None for key in ANSWER_KEYS)


def preference_of(row: Row, labels: Labels = ()) -> Preference:
    """The preference in a row. Raises Malformed with the reason."""
    is_pair = any(row.get(key) is not None for key in ANSWER_KEYS)
    prompt, chosen, rejected = _pair(row) if is_pair else _rated(row)
    asked = map(chat_shapes.not_learnt, chat_shapes.with_system_and_tools(prompt, row))
    return Preference(tuple(asked), tuple(chosen), tuple(rejected), labels)


def _pair(row: Row) -> Sides:
    answers = [_answer_turns(row, key) for key in ANSWER_KEYS]
    if any(row.get(key) is not None for key in PROMPT_KEYS):
        asked = _prompt_turns(row, answers)
        prompt, chosen = chat_shapes.prompt_and_answer(asked, answers[0], "chosen")
        other_prompt, rejected = chat_shapes.prompt_and_answer(asked, answers[1], "rejected")
        require(
            len(prompt) == len(other_prompt),
            "'chosen' and 'rejected' have no common prompt: one has turns before it; "
            "write both alike",
        )
    else:
        chosen, rejected = map(chat_shapes.turns_of, answers, ANSWER_KEYS)
        alike = [wording(one) == wording(other) for one, other in zip(*answers, strict=False)]
        size = [*alike, False].index(False)
        require(
            size,
            "'chosen' and 'rejected' have no common prompt: their first turns differ; "
            "write it under 'prompt'",
        )
        prompt = chosen[:size]
        chosen = chosen[size:]
        rejected = rejected[size:]
    require(
        _identity(chosen) != _identity(rejected),
        "'chosen' and 'rejected' are equal; write two different answers, or leave the row out",
    )
    _check_answer(chosen, "chosen")
    _check_answer(rejected, "rejected")
    return prompt, chosen, rejected


def _rated(row: Row) -> Sides:
    require(
        row.get("completion") is not None,
        "none of the keys 'chosen', 'rejected' and 'completion' holds an answer; "
        f"write {PREFERENCE_FIELDS}",
    )
    label = row.get("label")
    require(
        isinstance(label, bool),
        f"'label' is {kind_of(label)} beside 'completion'; "
        "write true (the answer is good) or false",
    )
    require(
        row.get("prompt") is not None,
        "no key 'prompt' beside 'completion'; write the prompt as text or as a list of turns",
    )
    answer = _answer_turns(row, "completion")
    prompt, turns = chat_shapes.prompt_and_answer(
        _prompt_turns(row, [answer]), answer, "completion"
    )
    _check_answer(turns, "completion")
    return (prompt, turns, []) if label else (prompt, [], turns)


def _answer_turns(row: Row, key: str) -> RawTurns:
    if isinstance(row.get(key), dict):
        return [row[key]]
    other_key = "chosen" if key == "rejected" else "rejected"
    return chat_shapes.turns_under(row, key, other_key, "assistant")


def _prompt_turns(row: Row, answers: Sequence[RawTurns]) -> RawTurns:
    key = next(key for key in PROMPT_KEYS if row.get(key) is not None)
    if key == "instruction":
        prompt = [message.to_json() for message in chat_shapes.alpaca_question(row)]
    else:
        prompt = chat_shapes.turns_under(row, key, "chosen", "user")
    for answer in answers:
        last = [*map(wording, answer[-2:])]
        if len(prompt) > 1 and [*map(wording, prompt[-len(last) :])] == last:
            prompt = prompt[:-1]
    return prompt


def _check_answer(answer: Turns, key: str) -> None:
    require(
        any(
            turn.role == "assistant" and turn.in_loss and not is_blank(turn.content)
            for turn in answer
        ),
        f"'{key}' has no answer of its own: no assistant's turn with a text after the prompt",
    )


def _identity(turns: Sequence[Message]) -> list[list[object]]:
    return [message.identity() for message in turns]
