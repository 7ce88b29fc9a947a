"""Chat templates that came with a model, rendered in a child of `ttrain.core.sandbox`: a template is a program of strangers.

transformers' own sandbox keeps it from files and from the interpreter; loops, repeated strings, formats of any width and
patterns are kept from taking all time and memory by the child's budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from ttrain.core.sandbox import Sandbox, WorkFailed

Turns = Sequence[Mapping[str, Any]]
Rendered = tuple[str, list[tuple[int, int]]]
# A conversation takes 0.1 ms; one of 1,000 turns in a template that is quadratic in them 50 ms.
SECONDS, SECONDS_PER_CONVERSATION, MEMORY_BYTES = 2.0, 0.05, 1 << 30
# What a template writes around the contents; the longest known one has 1 KB a turn.
WRITTEN_CHARACTERS, WRITTEN_CHARACTERS_PER_TURN = 1 << 20, 1 << 14
ERROR_CHARACTERS = 200


def render(
    template: str, variables: Mapping[str, Any], conversations: Sequence[Turns], *, prompt: bool, spans: bool
) -> list[Rendered | str]:
    """(text, spans of `{% generation %}` in it, where `spans`) of each conversation, or why it does not render.

    `variables`: special tokens by their names, and what else the template may read, such as `tools`.
    Raises BudgetExceeded where one of them needs more than its share of time or memory.
    """
    request = orjson.dumps(
        {"template": template, "variables": variables, "conversations": conversations, "prompt": prompt, "spans": spans}
    )
    try:
        found = [orjson.loads(result) for result in _SANDBOX.stream(request)]
    except WorkFailed as error:
        return [str(error)[:ERROR_CHARACTERS]] * len(conversations)
    return [one if isinstance(one, str) else (one[0], [(start, end) for start, end in one[1]]) for one in found]


def answer(request: bytes) -> Iterator[bytes]:
    """In the child: [text, spans] of each conversation, or the reason why it has none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = orjson.loads(request)
    for turns in asked["conversations"]:
        try:
            (text,), spans = render_jinja_template(
                [turns],
                chat_template=asked["template"],
                add_generation_prompt=asked["prompt"],
                return_assistant_tokens_mask=asked["spans"],
                **asked["variables"],
            )
            _check_length(text, turns, asked["variables"])
            yield orjson.dumps([text, spans[0] if spans else []])
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            yield orjson.dumps(str(error)[:ERROR_CHARACTERS].encode("utf-8", "replace").decode("utf-8"))


def _check_length(text: str, turns: Turns, variables: Mapping[str, Any]) -> None:
    if len(text) <= WRITTEN_CHARACTERS:
        return
    read = len(orjson.dumps([turns, variables]))
    most = WRITTEN_CHARACTERS + WRITTEN_CHARACTERS_PER_TURN * len(turns) + 2 * read
    if len(text) > most:
        raise ValueError(f"it writes {len(text):,} characters, more than {most:,}")


_SANDBOX = Sandbox(
    answer,
    seconds=SECONDS,
    seconds_per_result=SECONDS_PER_CONVERSATION,
    memory_bytes=MEMORY_BYTES,
    preloaded=("transformers.utils.chat_template_utils",),
)
