"""Chat templates: how a conversation becomes texts between special tokens, with the live ones marked.

A template exists twice: as segments, which is what ttrain encodes, and as Jinja, which transformers uses and which gives
the same string (tests compare them). The loss mask is made here, next to what it masks, never by searching for markers.

    ttrain     every turn is one role token, its text and `<|end|>`
    tinyseek   `User：…\\n` and `Assistant：…<|im_end|>`, as TinySeek's training scripts join them
    own        the template that an existing tokenizer brings (`ttrain.data.custom_template`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ttrain.errors import DataError

if TYPE_CHECKING:
    from ttrain.data.encoder import Encoder
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttrain.data.jinja_templates import END, IM_END, ROLES, TINYSEEK_NAMES

if TYPE_CHECKING:
    from ttrain.data.encoder import Encoder


@dataclass(frozen=True)
class Message:
    """One turn; the role is one of `jinja_templates.ROLES`, calls and functions are part of the text (`ttrain.data.tools`).

    in_loss    whether an assistant's turn is learnt; where it is not, it is context, as what others say is
    """

    role: str
    content: str
    in_loss: bool = True

    def identity(self) -> list[object]:
        """What identifies the turn among those of other chats, as JSON."""
        return [self.role, self.content] if self.in_loss else [self.role, self.content, 0]

    def to_json(self) -> dict[str, Any]:
        """The turn as `messages` has it; `weight` is 0 where it is not learnt."""
        return {"role": self.role, "content": self.content, **({} if self.in_loss else {"weight": 0})}

    @classmethod
    def from_json(cls, turn: Mapping[str, Any]) -> Message:
        """The turn that `to_json` wrote."""
        return cls(turn["role"], turn["content"], turn.get("weight") != 0)


Messages = tuple[Message, ...]


class Segment(NamedTuple):
    """A piece of a rendered conversation: text that is encoded by itself, or ids; and whether the loss counts it."""

    content: str | tuple[int, ...]
    live: bool


class Template(ABC):
    """Renders conversations for one tokenizer."""

    @abstractmethod
    def segments(self, messages: Messages) -> list[Segment]:
        """The whole conversation; live are the assistant's texts, where they are not blank, and the token that ends each."""

    def segments_of_all(self, conversations: Sequence[Messages]) -> list[list[Segment]]:
        """`segments` of each; in one go where that is cheaper."""
        return [self.segments(messages) for messages in conversations]

    @abstractmethod
    def prompt(self, messages: Messages) -> list[Segment]:
        """The conversation up to where the assistant's next answer begins."""


class RoleTokens(Template):
    """`ttrain`: no token ever spans a border, since every text lies between special tokens, and no text can forge one."""

    def __init__(self, encoder: Encoder) -> None:
        self._bos = Segment((encoder.bos_id,), False)
        self._end = {live: Segment((encoder.special(END),), live) for live in (False, True)}
        self._roles = {role: Segment((encoder.special(f"<|{role}|>"),), False) for role in ROLES}

    def segments(self, messages: Messages) -> list[Segment]:
        found = [self._bos]
        for turn in messages:
            live = is_live(turn)
            found += (_of(self._roles, turn.role), Segment(turn.content, live), self._end[live])
        return found

    def prompt(self, messages: Messages) -> list[Segment]:
        return [*self.segments(messages), self._roles["assistant"]]


class NamedTurns(Template):
    """`tinyseek`: names in plain text. Only an answer ends with a special token, so a user can write `Assistant：`, as
    there; the mask does not follow what is written."""

    def __init__(self, encoder: Encoder) -> None:
        self._end = {live: Segment((encoder.special(IM_END),), live) for live in (False, True)}
        self._names = {role: Segment(name, False) for role, name in TINYSEEK_NAMES.items()}
        self._newline = Segment("\n", False)

    def segments(self, messages: Messages) -> list[Segment]:
        found: list[Segment] = []
        for turn in messages:
            live = is_live(turn)
            end = self._end[live] if turn.role == "assistant" else self._newline
            found += (_of(self._names, turn.role), Segment(turn.content, live), end)
        return found

    def prompt(self, messages: Messages) -> list[Segment]:
        return [*self.segments(messages), self._names["assistant"]]


def is_live(turn: Message) -> bool:
    """Whether there is something to learn from a turn."""
    return turn.role == "assistant" and turn.in_loss and bool(turn.content.strip())


def _of(found: dict[str, Segment], role: str) -> Segment:
    if role not in found:
        raise DataError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
    return found[role]
