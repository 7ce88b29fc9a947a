"""Convert function calls to text, in this module only: chat templates get just roles and contents.

    functions   after the system turn's text: a sentence, then a JSON object a line within <tools>
    a call      after the assistant's words: {"name": …, "arguments": …} within <tool_call>

Known are OpenAI's form (`tools`, `tool_calls`, before that `function_call`), MiniMind's (both as
JSON strings, `tools` on the system turn) and ShareGPT's (`function_call` as a turn's role).
"""

import json
from typing import Any

import orjson

from ttrain.core.files import JsonDict

TOOLS_SENTENCE = (
    "You may call these functions; put each call as JSON between <tool_call> and </tool_call>."
)
TOOLS_BEGIN, TOOLS_END = "<tools>", "</tools>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
A_TOOL, A_CALL = '{"name": "f", "parameters": {}}', '{"name": "f", "arguments": {}}'
JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


class Malformed(ValueError):
    """A malformed row; the message is the reason."""


def require(condition: object, reason: str) -> None:
    """Raise Malformed with the reason unless the condition holds."""
    if not condition:
        raise Malformed(reason)


def kind_of(value: object) -> str:
    """What JSON calls the value: "null", "a number", ..."""
    return JSON_TYPES[type(value)]


def tools_text(tools: object) -> str:
    """The functions, a list of objects or its JSON, as text; "" for none."""
    if _is_nothing(tools, "'tools'"):
        return ""
    functions = _parsed(tools, "'tools'")
    require(
        type(functions) is list,
        f"'tools' is {kind_of(functions)}, not a list of functions such as {A_TOOL}",
    )
    for tool in functions:
        _check_name(tool, "a tool", A_TOOL)
    return "\n".join([TOOLS_SENTENCE, TOOLS_BEGIN, *map(dumps, functions), TOOLS_END])


def with_tools(content: str, text: str) -> str:
    """A system turn's content with the functions after it."""
    return content + ("\n\n" if content and text else "") + text


def calls_of(value: object, key: str) -> list[JsonDict]:
    """The calls under a key, checked; `function_call` may be one call. All may be JSON."""
    calls = _parsed(value, f"'{key}'")
    if isinstance(calls, dict) and key == "function_call":
        calls = [calls]
    require(
        type(calls) is list,
        f"'{key}' is {kind_of(calls)}, not a list of calls such as {A_CALL}",
    )
    for call in calls:
        _check_name(call, "a tool call", A_CALL)
        arguments = _parsed(_function(call).get("arguments"), "the arguments of a tool call")
        require(
            isinstance(arguments, dict),
            f"the arguments of a tool call are {kind_of(arguments)}, "
            'not an object such as {"city": "Rome"}',
        )
    return list(calls)


def calls_of_turn(turn: JsonDict, role: str) -> list[JsonDict]:
    """The calls under `tool_calls`, or the one under OpenAI's older `function_call`."""
    keys = [
        key for key in ("tool_calls", "function_call") if not _is_nothing(turn.get(key), f"'{key}'")
    ]
    if not keys:
        return []
    require(len(keys) == 1, "both 'tool_calls' and 'function_call' on a turn; keep one of them")
    require(
        role == "assistant",
        f"'{keys[0]}' on a turn of role '{role}'; only an assistant's turn may call functions",
    )
    return calls_of(turn[keys[0]], keys[0])


def with_calls(content: str, calls: list[JsonDict]) -> str:
    """An assistant's text followed by its calls."""
    texts = [content] if content else []
    for call in calls:
        name = dumps(_function(call)["name"])
        arguments = _function(call)["arguments"]
        written = arguments if isinstance(arguments, str) else dumps(arguments)
        texts.append(f'{CALL_BEGIN}\n{{"name": {name}, "arguments": {written}}}\n{CALL_END}')
    return "\n".join(texts)


def _function(value: JsonDict) -> JsonDict:
    function = value.get("function") or value
    return function if isinstance(function, dict) else {}


def _check_name(value: Any, kind: str, example: str) -> None:
    require(isinstance(value, dict), f"{kind} is {kind_of(value)}, not an object such as {example}")
    name = _function(value).get("name")
    require(isinstance(name, str) and name.strip(), f"{kind} has no name; write {example}")


def _is_nothing(value: object, name: str) -> bool:
    # A blank text as in exports of tables, or a struct of parquet that only other rows have.
    if isinstance(value, str) and not value.strip():
        return True
    value = _parsed(value, name)
    return value in (None, []) or (
        isinstance(value, dict) and all(element is None for element in value.values())
    )


def _parsed(value: object, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        raise Malformed(f"{name}: not valid JSON; write JSON, or a text that holds JSON") from None
    return without_null_keys(value)


def without_null_keys(data: str | bytes) -> Any:
    """A row without keys that are null, at any depth."""
    # Structs of parquet have the keys of all rows. Integers are exact: orjson reads those beyond 64
    # bits as doubles, so that an order number was trained on as 9.876543210987654e+19.
    return json.loads(
        data, object_hook=lambda values: {k: v for k, v in values.items() if v is not None}
    )


def dumps(value: object) -> str:
    """The JSON of a function or of arguments."""
    return json.dumps(value, ensure_ascii=False)
