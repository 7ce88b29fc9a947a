"""Function calls in an answer: whether they can be made, and whether they are those of the reference. No torch.

The form is the one of `ttrain.data.tools`, which every chat template gets as text: the functions in the system turn, one
JSON object a line between <tools> and </tools>; a call as {"name": ..., "arguments": {...}} between <tool_call> and
</tool_call>. What is counted follows the Berkeley Function Calling Leaderboard
(https://gorilla.cs.berkeley.edu/leaderboard.html): names and arguments of calls, and calls that nobody needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ttrain.data.chat_templates import Message
from ttrain.data.tools import CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END, has_calls
from ttrain.evaluate import json_schemas
from ttrain.evaluate.json_schemas import Budget

Object = dict[str, Any]
Functions = Mapping[str, Any]  # name to the JSON schema of its arguments, as the data have it
SHOWN_CHARACTERS = 80
# A line by itself begins and ends the functions: no JSON holds a newline, but descriptions and prompts speak of the marks.
MARKS = re.compile(rf"^(?:{TOOLS_BEGIN}|{TOOLS_END})$", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A call as JSON says it; `wrong` is why it cannot be made, "" where it can. `unchecked` is why its arguments are not
    compared with its schema: that is no schema, or asks for too much time or memory."""

    name: str
    arguments: Object
    wrong: str = ""
    unchecked: str = ""


@dataclass(frozen=True)
class Judged:
    """The calls of an answer beside those of the reference.

    called       it holds a call, or the beginning of one
    valid        it holds calls, and each can be made
    right_names  it calls the same functions as the reference, each as often, in any order
    right        with the same arguments, whether or not they fit the schema: those of 2 % of Glaive's calls do not
    wrong        why calls cannot be made
    unchecked    why the arguments of calls are not compared with a schema
    """

    called: bool
    valid: bool
    right_names: bool
    right: bool
    wrong: tuple[str, ...]
    unchecked: tuple[str, ...]


def given(messages: Sequence[Message]) -> Functions:
    """The functions that the system turns of a conversation offer."""
    found: dict[str, Any] = {}
    for message in messages:
        if message.role == "system":
            for text in _offered(message.content):
                for tool in map(_object, text.split("\n")):  # JSON may hold what else ends a line, such as U+2028
                    function = (tool or {}).get("function") or tool
                    if isinstance(function, dict) and isinstance(function.get("name"), str):
                        found[function["name"]] = function.get("parameters")
    return found


def judge(answer: str, reference: str, functions: Functions, budget: Budget | None = None) -> Judged:
    """What an answer calls, beside what the reference calls. Where nobody offers functions, any name can be called.

    The budget is for the schemas of all answers that are judged with it."""
    made, wanted = calls(answer, functions, budget), calls(reference, {})
    wrong = tuple(call.wrong for call in made if call.wrong)
    named = bool(made) and all(call.name for call in made)
    return Judged(
        called=has_calls(answer),
        valid=bool(made) and not wrong,
        right_names=named and sorted(call.name for call in made) == sorted(call.name for call in wanted),
        right=named and sorted(map(_same, made)) == sorted(map(_same, wanted)),
        wrong=wrong,
        unchecked=tuple(call.unchecked for call in made if call.unchecked),
    )


def calls(text: str, functions: Functions, budget: Budget | None = None) -> list[Call]:
    """Every call of a text, in its order; what begins like one and does not end has no name."""
    found = [_call(body, functions, budget or Budget()) for body in _between(text, CALL_BEGIN, CALL_END)]
    if text.count(CALL_BEGIN) > len(found):
        found.append(Call("", {}, f"a call without {CALL_END}"))
    return found


def _call(body: str, functions: Functions, budget: Budget) -> Call:
    value = _object(body)
    if value is None:
        return Call("", {}, f"no JSON object: {body.strip()[:SHOWN_CHARACTERS]}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return Call("", {}, "a call without a name")
    if isinstance(arguments, str):  # as in OpenAI's form, JSON in a string
        arguments = _object(arguments)
    if not isinstance(arguments, dict):
        return Call(name, {}, f"the arguments of {name[:SHOWN_CHARACTERS]} are no JSON object")
    if functions and name not in functions:
        return Call(name, arguments, f"there is no function {name[:SHOWN_CHARACTERS]}")
    schema = functions.get(name)
    if schema is None:  # nobody says what it takes
        return Call(name, arguments)
    try:
        schema_json = orjson.dumps(schema)
    except TypeError as error:  # nested deeper than orjson writes
        return Call(name, arguments, unchecked=f"the schema cannot be used: {error}")
    checked = json_schemas.check(schema_json, orjson.dumps(arguments), budget)
    return Call(name, arguments, f"{name}: {checked.mismatch}" if checked.mismatch else "", checked.unchecked)


def _offered(text: str) -> list[str]:
    """What stands between a line <tools> and the next line </tools>, in one pass over the text."""
    found: list[str] = []
    begin: int | None = None
    for mark in MARKS.finditer(text):
        if mark.group() == TOOLS_BEGIN:
            begin = mark.end() + 1 if begin is None else begin
        elif begin is not None:
            found += [text[begin : mark.start() - 1]] if mark.start() > begin else []
            begin = None
    return found


def _between(text: str, begin: str, end: str) -> list[str]:
    """What stands between the two marks, each time that there are both; a begin without an end is passed over."""
    return [part.partition(end)[0] for part in text.split(begin)[1:] if end in part]


def _object(text: str) -> Object | None:
    """The JSON object of a text; None where there is none, or one that is nested deeper than orjson writes (254)."""
    try:
        value = orjson.loads(text)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _same(call: Call) -> tuple[str, bytes]:
    """Equal for calls that do the same: 5 and 5.0 are one number, and the order of keys is none."""
    return call.name, orjson.dumps(_plain(call.arguments), option=orjson.OPT_SORT_KEYS)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
