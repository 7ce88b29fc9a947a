"""Convert function calls to text, in this module only: chat templates get just roles and contents.

    the functions   after the text of the system turn: a sentence, then one JSON object a line between <tools> and </tools>
    a call          after the assistant's words: {"name": …, "arguments": …} between <tool_call> and </tool_call>

Known are OpenAI's form (`tools` beside `messages`; `tool_calls` with a `function` each, before
that one `function_call`), MiniMind's (`tools` on the system turn and `tool_calls`, both as JSON
strings) and ShareGPT's (`function_call`, the JSON of a call as a turn's text).
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from ttrain.core.files import JsonDict

TOOLS_SENTENCE = "You may call these functions; put each call as JSON between <tool_call> and </tool_call>."
TOOLS_BEGIN, TOOLS_END = "<tools>", "</tools>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
A_TOOL, A_CALL = '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {}}'
JSON_TYPES = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list",
    dict: "an object",
}  # fmt: skip
PARQUET_TYPE = "type of parquet"  # the only key of what replaces a value that JSON lacks, such as a date


LARGE = 2.0**63  # doubles from here on may be whole numbers


class Malformed(ValueError):
    """A malformed row; the message is the reason."""


def kind_of(value: object) -> str:
    """What JSON calls the value: "null", "a number", ...; Python's name for types that only Parquet has."""
    if isinstance(value, dict) and PARQUET_TYPE in value:
        return str(value[PARQUET_TYPE])
    return JSON_TYPES.get(type(value), type(value).__name__)


def tools_text(tools: object) -> str:
    """The functions as text; "" for none. `tools` is a list of objects with a name, or the JSON of one."""
    functions = None if _is_empty_text(tools) else _parsed(tools, "'tools'")
    if functions is None or functions == []:
        return ""
    if not isinstance(functions, list):
        raise Malformed(f"'tools' is {kind_of(functions)}, not a list of functions such as {A_TOOL}")
    for tool in functions:
        _check_name(tool, "a tool", A_TOOL)
    return "\n".join([TOOLS_SENTENCE, TOOLS_BEGIN, *map(dumps, functions), TOOLS_END])


def with_tools(content: str, text: str) -> str:
    """A system turn's content with the functions after it."""
    return content + ("\n\n" if content and text else "") + text


def calls_of(value: object, name: str = "'tool_calls'") -> list[JsonDict]:
    """The calls, checked; [] for none. `value` is a list of calls, one call in ShareGPT's format, or the JSON of these."""
    is_turn = name != "'tool_calls'"  # a turn that is nothing but its calls
    calls = None if _is_empty_text(value) and not is_turn else _parsed(value, name)
    if calls is None and not is_turn:
        return []
    if isinstance(calls, dict) and is_turn:
        calls = [calls]
    if not isinstance(calls, list):
        raise Malformed(f"{name} is {kind_of(calls)}, not a list of calls such as {A_CALL}")
    for call in calls:
        _check_name(call, "a tool call", A_CALL)
        arguments = _parsed(_function(call).get("arguments"), "the arguments of a tool call")
        if not isinstance(arguments, dict):
            raise Malformed(
                f'the arguments of a tool call are {kind_of(arguments)}, not an object such as {{"city": "Rome"}}'
            )
    return calls


def calls_of_turn(turn: JsonDict) -> list[JsonDict]:
    """The calls under `tool_calls`, or the one under `function_call`, as OpenAI wrote it before."""
    calls = calls_of(turn.get("tool_calls"))
    older = turn.get("function_call")
    if isinstance(older, dict) and all(value is None for value in older.values()):
        older = None  # a struct of parquet that only other rows have
    if older is None or _is_empty_text(older):
        return calls
    if calls:
        raise Malformed("both 'tool_calls' and 'function_call' on a turn; keep one of them")
    return calls_of(older, "'function_call'")


def with_calls(content: str, calls: list[JsonDict]) -> str:
    """An assistant's text followed by its calls."""
    return "\n".join(([content] if content else []) + [_call_text(_function(call)) for call in calls])


def has_calls(content: str) -> bool:
    """Whether an assistant's text holds a call."""
    return CALL_BEGIN in content


def _call_text(function: JsonDict) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else dumps(arguments)
    return f'{CALL_BEGIN}\n{{"name": {dumps(function["name"])}, "arguments": {written}}}\n{CALL_END}'


def _function(value: JsonDict) -> JsonDict:
    function = value.get("function") or value
    return function if isinstance(function, dict) else {}


def _check_name(value: object, kind: str, example: str) -> None:
    if not isinstance(value, dict):
        raise Malformed(f"{kind} is {kind_of(value)}, not an object such as {example}")
    name = _function(value).get("name")
    if not isinstance(name, str) or not name.strip():
        raise Malformed(f"{kind} has no name; write {example}")


def _is_empty_text(value: object) -> bool:
    """Whether it is a text without JSON in it, which exports of tables have for none."""
    return isinstance(value, str) and not value.strip()


def _parsed(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return without_null_keys(value, orjson.loads(value))
    except orjson.JSONDecodeError:
        raise Malformed(f"{name}: not valid JSON; write JSON, or a text that holds JSON") from None


def without_null_keys(data: str | bytes, value: Any) -> Any:
    """A row without keys that are null, whole numbers exact; `value` is what orjson read of `data`.

    orjson reads whole numbers beyond 64 bits as doubles: an order number was trained on as 9.876543210987654e+19.
    """
    if drop_null_keys(value):
        value = json.loads(data)
        drop_null_keys(value)
    return value


def drop_null_keys(value: Any) -> bool:
    """Remove keys that are null, at any depth: structs of parquet have the keys of all rows.

    Returns whether a double may be a whole number beyond 64 bits.
    """
    has_large = False
    items = list(value.items()) if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, element in items:
        kind = type(element)
        if kind is dict or kind is list:
            has_large |= drop_null_keys(element)
        elif element is None and type(value) is dict:
            del value[key]
        elif kind is float:
            has_large |= abs(element) >= LARGE
    return has_large


def dumps(value: object) -> str:
    """The JSON of a function or of arguments. Raises Malformed for what JSON lacks."""
    written = json.dumps(value, ensure_ascii=False)
    if f'"{PARQUET_TYPE}"' in written:
        raise Malformed("a value of a function or a call has a type of parquet which JSON lacks; write it as text")
    return written
