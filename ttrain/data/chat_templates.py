"""Chat templates: render a conversation as text between special tokens, marking what the loss counts.

A template exists twice: here, and as Jinja, which transformers uses and which gives the same string and ids (tests compare
them). The loss mask is made together with the text, never by searching for markers.

    ttrain     every turn is one role token, its text and `<|end|>`
    tinyseek   `User：…\\n` and `Assistant：…<|im_end|>`, as TinySeek's training scripts join them
    own        the template that comes with an existing tokenizer (`ttrain.data.custom_template`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.data.jinja_templates import END, IM_END, ROLE_TOKENS, ROLES, TINYSEEK_NAMES
from ttrain.errors import DataError

if TYPE_CHECKING:  # a plan reads the names of templates, and loads no numpy
    from ttrain.data.encoder import Encoder

THINK, END_OF_THINK = "<think>\n", "\n</think>\n\n"  # around the reasoning, as Qwen3 and DeepSeek-R1 write it


@dataclass(frozen=True)
class Message:
    """One turn; the role is one of `jinja_templates.ROLES`, calls and functions are part of the text (`ttrain.data.tools`).

    in_loss             whether an assistant's turn is trained on; if not, it is context like the other turns
    thought             characters at the beginning of the content that are its reasoning, with the tags around it
    thought_in_loss     whether that reasoning is trained on
    """

    role: str
    content: str
    in_loss: bool = True
    thought: int = 0
    thought_in_loss: bool = True

    @property
    def reasoning(self) -> str:
        """The reasoning without its tags."""
        return self.content[len(THINK) : self.thought - len(END_OF_THINK)] if self.thought else ""

    @property
    def masked(self) -> int:
        """Characters at the beginning of an answer that are not trained on."""
        return 0 if self.thought_in_loss else self.thought

    def identity(self) -> list[object]:
        """The fields that identify the turn's content, as JSON."""
        return [self.role, self.content] if self.in_loss else [self.role, self.content, 0]

    def to_json(self) -> dict[str, Any]:
        """The turn in the `messages` format; `weight` is 0 if it is not trained on."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if not self.in_loss:
            turn["weight"] = 0
        if self.thought:
            turn |= {"thought": self.thought, "thought_in_loss": self.thought_in_loss}
        return turn

    @classmethod
    def from_json(cls, turn: Mapping[str, Any]) -> Message:
        """The turn that `to_json` wrote."""
        is_learnt = turn.get("weight") != 0
        return cls(turn["role"], turn["content"], is_learnt, turn.get("thought", 0), turn.get("thought_in_loss", True))


Messages = tuple[Message, ...]


def with_reasoning(reasoning: str, content: str) -> tuple[str, int]:
    """(an assistant's text after its reasoning, the characters of the reasoning with its tags)."""
    thought = f"{THINK}{reasoning.strip()}{END_OF_THINK}"
    return thought + content, len(thought)


class Segment(NamedTuple):
    """A piece of a rendered conversation: text that is encoded by itself, or ids; and whether the loss counts it."""

    content: str | tuple[int, ...]
    live: bool


Span = tuple[int, int]


class Rendering(NamedTuple):
    """A conversation as one text; spans are (start, end) in its characters.

    contents    the texts of the turns, in which no special token counts
    live        what the loss counts
    """

    text: str
    contents: list[Span]
    live: list[Span]


class TemplateRefused(DataError):
    """The tokenizer's own template cannot render a conversation as it is; `reason` says why, without the conversation."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Template(ABC):
    """Renders conversations for one tokenizer.

    lead    text that the template writes between the prompt and an answer, so that the model says it first
    """

    lead = ""

    @abstractmethod
    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        """Render a conversation. Raises DataError if the template refuses it.

        Live are the assistant's non-blank texts, what the template writes between the prompt and such a text, and the token
        that ends it. `prompt`: up to the beginning of the assistant's next answer.
        """


@dataclass(frozen=True)
class TurnTemplate(Template):
    """A template that writes each turn as the mark of its role, its text and its end.

    ends        by role, those of a turn that the loss does not count, and of one that it counts
    spelling    the text of a special token
    separable   whether each text has the ids that it has alone, so that segments can be encoded one by one
    """

    begin: Sequence[Segment]
    roles: Mapping[str, Segment]
    ends: Mapping[str, Sequence[Segment]]
    spelling: Callable[[int], str]
    separable: bool

    def render(self, messages: Messages, *, prompt: bool = False) -> Rendering:
        segments = self.prompt(messages) if prompt else self.segments(messages)
        rendering = Rendering("", [], [])
        pieces: list[str] = []
        at = 0
        for content, is_live in segments:
            piece = content if isinstance(content, str) else "".join(map(self.spelling, content))
            span = (at, at + len(piece))
            if isinstance(content, str):
                rendering.contents.append(span)
            if is_live:
                rendering.live.append(span)
            pieces.append(piece)
            at += len(piece)
        return rendering._replace(text="".join(pieces))

    def segments(self, messages: Messages) -> list[Segment]:
        """Render the whole conversation as pieces."""
        segments = list(self.begin)
        for turn in messages:
            if turn.role not in self.roles:
                raise DataError(f"unknown role {turn.role!r}; the roles are {', '.join(ROLES)}")
            live = is_live(turn)
            segments.append(self.roles[turn.role])
            if live and turn.masked:
                segments.append(Segment(turn.content[: turn.masked], False))
            segments += (Segment(turn.content[turn.masked if live else 0 :], live), self.ends[turn.role][live])
        return segments

    def prompt(self, messages: Messages) -> list[Segment]:
        """Render the conversation up to the beginning of the assistant's next answer, as pieces."""
        return [*self.segments(messages), self.roles["assistant"]]


def role_tokens(encoder: Encoder) -> TurnTemplate:
    """`ttrain`: every text lies between special tokens, so no token spans a border, and no text can forge one."""
    roles = {role: Segment((encoder.special(f"<|{role}|>"),), False) for role in ROLES}
    separable = encoder.encodes_apart([encoder.tokens["bos_token"], *ROLE_TOKENS, END])
    ends = dict.fromkeys(ROLES, _ends(encoder.special(END)))
    return TurnTemplate([Segment((encoder.bos_id,), False)], roles, ends, encoder.spelling, separable)


def named_turns(encoder: Encoder) -> TurnTemplate:
    """`tinyseek`: role names in plain text. Only an answer ends with a special token, so a user can write `Assistant：`,
    as in TinySeek itself; the loss mask does not depend on it."""
    roles = {role: Segment(name, False) for role, name in TINYSEEK_NAMES.items()}
    ends = {**dict.fromkeys(ROLES, (Segment("\n", False),)), "assistant": _ends(encoder.special(IM_END))}
    return TurnTemplate([], roles, ends, encoder.spelling, separable=False)  # names and texts touch


def _ends(token: int) -> list[Segment]:
    """The token as the end of a turn that the loss does not count, and of one that it counts."""
    return [Segment((token,), live) for live in (False, True)]


def is_live(turn: Message) -> bool:
    """Whether the loss counts the turn."""
    return turn.role == "assistant" and turn.in_loss and bool(turn.content.strip())
