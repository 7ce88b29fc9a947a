"""Chats as token ids with a loss mask, made together.

Every turn is one role token, its text, and `<|end|>`: since each text lies between special tokens, no token ever spans a
border, and since users' text is encoded without special tokens, no text can forge one. The Jinja template, which
transformers uses, gives the same ids (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrain.data.tokenizer import Encoder

ROLES = ("system", "user", "assistant", "tool")
PAD, UNK, BOS, EOS, END = "<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNK, BOS, EOS, *(f"<|{role}|>" for role in ROLES), END)

TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] ~ '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: str
    content: str


def encode_chat(encoder: Encoder, messages: tuple[Message, ...]) -> tuple[list[int], list[bool]]:
    """(ids, live) of a conversation; live are the assistant's texts and the `<|end|>` that stops each."""
    ids, live = [encoder.special(BOS)], [False]
    texts = encoder.encode([message.content for message in messages])
    for message, text in zip(messages, texts, strict=True):
        answer = message.role == "assistant"
        ids += [encoder.special(f"<|{message.role}|>"), *text, encoder.special(END)]
        live += [False] + [answer] * (len(text) + 1)
    return ids, live


def prompt_ids(encoder: Encoder, messages: tuple[Message, ...]) -> list[int]:
    """Ids after which the assistant's next answer begins."""
    return [*encode_chat(encoder, messages)[0], encoder.special("<|assistant|>")]
