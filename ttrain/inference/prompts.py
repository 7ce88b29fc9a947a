"""Prompts from a file.

lines of text     each a question, or with `raw` a text to continue
JSON lines        {"prompt": …} as such a line; {"text": …} is continued; {"messages": […]}, {"prompt": […]} and the other
                  shapes of chats are asked for their next answer, or again for one that they end with (the "reference")
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ttrain.data.chat_shapes import CHAT_KEYS, messages_of
from ttrain.data.chat_templates import Message
from ttrain.data.tools import Malformed
from ttrain.errors import DataError, UsageError

WRITTEN = ("answer", "tokens", "stop")  # keys of an answer, which stand beside those of its prompt
NO_ANSWER = "-"


@dataclass(frozen=True)
class Prompt:
    """A row of the file: `messages` that ask for an answer, or `text` to continue; `given` is what its line held."""

    number: int
    given: dict[str, Any]
    messages: tuple[Message, ...] = ()
    text: str = ""
    reference: str | None = None


def read(path: Path, *, raw: bool, system: str = "") -> list[Prompt]:
    """The prompts of a file, JSON lines where its name says so. Empty lines are none.

    Raises DataError, with file and line, for one that is not a prompt.
    """
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    found: list[Prompt] = []
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read the prompts {path}: {error.strerror or error}") from None
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line) if is_json else {"prompt": line.decode("utf-8").rstrip("\r")}
            found.append(_prompt(len(found), value, raw=raw, system=system))
        except (ValueError, RecursionError) as error:  # Malformed, JSON and UTF-8 are ValueErrors
            raise DataError(f"{path}:{at}: {error}") from None
    if not found:
        raise DataError(f"{path} holds no prompts")
    return found


def _prompt(number: int, value: Any, *, raw: bool, system: str) -> Prompt:
    if not isinstance(value, dict):
        raise Malformed("not a JSON object")
    if taken := [key for key in WRITTEN if key in value]:
        raise Malformed(f"the key '{taken[0]}' would be overwritten by the answer; rename it")
    if isinstance(value.get("prompt"), str):
        if raw:
            return Prompt(number, value, text=value["prompt"])
        return Prompt(number, value, _with(system, [Message("user", value["prompt"])]))
    if isinstance(value.get("text"), str):
        return Prompt(number, value, text=value["text"])
    if all(value.get(key) is None for key in ("prompt", *CHAT_KEYS)):
        raise Malformed(f"none of the keys {', '.join(('prompt', 'text', *CHAT_KEYS))} holds a prompt")
    answers = {key: value.get(key) or NO_ANSWER for key in ("output", "completion")}  # there need not be one here
    messages = messages_of({**value, **answers})
    reference = messages.pop().content if messages[-1].role == "assistant" else None
    if not messages:
        raise Malformed("there is no question before the answer")
    return Prompt(number, value, _with(system, messages), reference=None if reference == NO_ANSWER else reference)


def _with(system: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    first = [Message("system", system)] if system and messages[0].role != "system" else []
    return (*first, *messages)
