"""Chat templates: how a conversation becomes texts between special tokens, with the live ones marked.

A template exists twice: as segments, which is what ttrain encodes, and as Jinja, which transformers uses and which gives
the same string (tests compare them). The loss mask is made here, next to what it masks, never by searching for markers.

    ttrain     every turn is one role token, its text and `<|end|>`
    tinyseek   `User：…\\n` and `Assistant：…<|im_end|>`, as TinySeek's training scripts join them
    own        the template that an existing tokenizer brings (`ttrain.data.foreign`)
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from ttrain.data.tools import CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END, TOOLS_SENTENCE
from ttrain.errors import DataError

if TYPE_CHECKING:
    from ttrain.data.chat import Message, Messages
    from ttrain.data.encoder import Encoder

ROLES = ("system", "user", "assistant", "tool")
PAD, UNK, BOS, EOS, END, IM_END = "<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>", "<|end|>", "<|im_end|>"
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)
TINYSEEK_NAMES = {role: f"{role.capitalize()}：" for role in ROLES}

# Special tokens of a tokenizer that is trained, in the order of their ids, and the one that ends an answer.
SPECIAL_TOKENS = {"ttrain": (PAD, UNK, BOS, EOS, *ROLE_TOKENS, END), "tinyseek": (PAD, UNK, BOS, EOS, IM_END)}
END_TOKENS = {"ttrain": END, "tinyseek": IM_END}


class Segment(NamedTuple):
    """A piece of a rendered conversation: text that is encoded by itself, or ids; and whether the loss counts it."""

    content: str | tuple[int, ...]
    live: bool


class Template(ABC):
    """Renders conversations for one tokenizer."""

    @abstractmethod
    def segments(self, messages: Messages) -> list[Segment]:
        """The whole conversation; live are the assistant's texts, where they are not blank, and the token that ends each."""

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
    return turn.role == "assistant" and bool(turn.content.strip())


def _of(found: dict[str, Segment], role: str) -> Segment:
    if role not in found:
        raise DataError(f"unknown role {role!r}; the roles are {', '.join(ROLES)}")
    return found[role]


# What transformers renders. `turn.text` is gathered as `ttrain.data.tools` does it: the functions on the first turn, the
# calls after the words of the assistant.
_JINJA = """\
$begin
{%- set functions = namespace(text='') -%}
{%- if tools -%}
{%- set functions.text = '$sentence\\n$tools_begin' -%}
{%- for tool in tools -%}{%- set functions.text = functions.text ~ '\\n' ~ (tool | tojson) -%}{%- endfor -%}
{%- set functions.text = functions.text ~ '\\n$tools_end' -%}
{%- if not messages or messages[0]['role'] != 'system' -%}
{%- set messages = [{'role': 'system', 'content': ''}] + messages -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role not in $roles -%}{{- raise_exception('unknown role ' ~ role) -}}{%- endif -%}
{%- set turn = namespace(text=message['content'] or '') -%}
{%- if loop.first and functions.text -%}
{%- set turn.text = turn.text ~ ('\\n\\n' if turn.text else '') ~ functions.text -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{%- set arguments = function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -%}
{%- set written = '{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": ' ~ arguments ~ '}' -%}
{%- set turn.text = turn.text ~ ('\\n' if turn.text else '') ~ '$call_begin\\n' ~ written ~ '\\n$call_end' -%}
{%- endfor -%}
{{- $header -}}
{%- if role == 'assistant' and turn.text | trim -%}
{%- generation -%}{{- turn.text ~ '$answer_end' -}}{%- endgeneration -%}
{%- else -%}
{{- turn.text ~ ($turn_end) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{%- set role = 'assistant' -%}{{- $header -}}{%- endif -%}
"""
_TOOLS = {
    "sentence": TOOLS_SENTENCE, "tools_begin": TOOLS_BEGIN, "tools_end": TOOLS_END, "call_begin": CALL_BEGIN,
    "call_end": CALL_END, "roles": str(list(ROLES)),
}  # fmt: skip
_PARTS = {
    "ttrain": {"begin": "{{- bos_token -}}", "header": "'<|' ~ role ~ '|>'", "answer_end": END, "turn_end": f"'{END}'"},
    "tinyseek": {
        "begin": "", "header": "role | capitalize ~ '：'", "answer_end": IM_END,
        "turn_end": f"'{IM_END}' if role == 'assistant' else '\\n'",
    },
}  # fmt: skip
JINJA = {name: string.Template(_JINJA).substitute(_TOOLS, **parts).lstrip() for name, parts in _PARTS.items()}


def name_of(jinja: str) -> str:
    """Name of the template whose Jinja text this is; "own" for any that is not of this house."""
    return next((name for name, text in JINJA.items() if text == jinja), "own")
