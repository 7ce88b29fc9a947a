"""Judge the function calls of an answer: whether they are valid and equal the reference's. Loads no torch.

The form is the one of `ttrain.data.tools`, which every chat template gets as text: the functions in the system turn, one
JSON object a line between <tools> and </tools>; a call as {"name": ..., "arguments": {...}} between <tool_call> and
</tool_call>. The metrics follow the Berkeley Function Calling Leaderboard
(https://gorilla.cs.berkeley.edu/leaderboard.html): names and arguments of calls, and needless calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context
from functools import lru_cache
from typing import Any

import orjson

from ttrain.core.files import JsonDict
from ttrain.core.sandbox import BudgetExceeded, Sandbox, WorkFailed
from ttrain.data import exact_json
from ttrain.data.chat_templates import Message
from ttrain.data.tools import CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END, dumps, has_calls

Functions = Mapping[str, Any]  # name to the JSON schema of its arguments, as the data have it

SHOWN_CHARACTERS = 80
# Only a mark on its own line counts: JSON has no newline, but descriptions and prompts mention the marks.
MARKS = re.compile(rf"^(?:{TOOLS_BEGIN}|{TOOLS_END})$", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A parsed call; `wrong` is why it is invalid, "" if it is valid. `unchecked` is why its arguments are not checked
    against its schema: that is not a valid schema, or needs too much time or memory."""

    name: str
    arguments: JsonDict
    wrong: str = ""
    unchecked: str = ""


@dataclass(frozen=True)
class CallVerdict:
    """An answer's calls judged by those of the reference.

    called       the answer has a call, or the beginning of one
    valid        it has calls, and each is valid
    right_names  it calls the same functions as the reference, each as often, in any order
    right        with the same arguments, whether or not they fit the schema: those of 2 % of Glaive's calls do not
    wrong        why calls are invalid
    unchecked    why the arguments of calls are not checked against a schema
    """

    called: bool
    valid: bool
    right_names: bool
    right: bool
    wrong: tuple[str, ...]
    unchecked: tuple[str, ...]


def offered_functions(messages: Sequence[Message]) -> Functions:
    """Read the functions that the system turns of a conversation offer."""
    functions: JsonDict = {}
    for message in messages:
        if message.role == "system":
            for text in _tool_blocks(message.content):
                for line in text.split("\n"):  # not splitlines: JSON may contain U+2028 and the like
                    tool = _object(line)
                    exact_json.drop_null_keys(tool)
                    function = (tool or {}).get("function") or tool
                    if isinstance(function, dict) and isinstance(function.get("name"), str):
                        functions[function["name"]] = function.get("parameters")
    return functions


def judge(answer: str, reference: str, functions: Functions, budget: Budget) -> CallVerdict:
    """Judge an answer's calls by the reference's. If no functions are offered, any name is valid.

    The budget is shared by all answers that are judged with it."""
    answer_calls, reference_calls = calls(answer, functions, budget), calls(reference, {}, budget)
    wrong = tuple(call.wrong for call in answer_calls if call.wrong)
    all_named = bool(answer_calls) and all(call.name for call in answer_calls)
    return CallVerdict(
        called=has_calls(answer),
        valid=bool(answer_calls) and not wrong,
        right_names=all_named
        and sorted(call.name for call in answer_calls) == sorted(call.name for call in reference_calls),
        right=all_named and sorted(map(_same, answer_calls)) == sorted(map(_same, reference_calls)),
        wrong=wrong,
        unchecked=tuple(call.unchecked for call in answer_calls if call.unchecked),
    )


def calls(text: str, functions: Functions, budget: Budget) -> list[Call]:
    """Parse every call of a text, in order; an unfinished call has no name."""
    bodies = [body.partition(CALL_END)[0] for body in text.split(CALL_BEGIN)[1:] if CALL_END in body]
    parsed = [_call(body, functions, budget) for body in bodies]
    if text.count(CALL_BEGIN) > len(parsed):
        parsed.append(Call("", {}, f"a call without {CALL_END}"))
    return parsed


def _call(body: str, functions: Functions, budget: Budget) -> Call:
    value = _object(body)
    if value is None:
        return Call("", {}, f"not a JSON object: {body.strip()[:SHOWN_CHARACTERS]}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return Call("", {}, "a call without a name")
    if isinstance(arguments, str):  # as in OpenAI's form, JSON in a string
        arguments = _object(arguments)
    if not isinstance(arguments, dict):
        return Call(name, {}, f"the arguments of {name[:SHOWN_CHARACTERS]} are not a JSON object")
    if functions and name not in functions:
        return Call(name, arguments, f"there is no function {name[:SHOWN_CHARACTERS]}")
    schema = functions.get(name)
    if schema is None:  # its arguments are not described
        return Call(name, arguments)
    checked = check(dumps(schema).encode(), orjson.dumps(arguments, default=exact_json.as_json), budget)
    wrong = f"{name}: {checked['mismatch']}" if "mismatch" in checked else ""
    return Call(name, arguments, wrong, checked.get("unchecked", ""))


def _tool_blocks(text: str) -> list[str]:
    """Texts between a line <tools> and the next line </tools>, in one pass."""
    blocks: list[str] = []
    begin: int | None = None
    for mark in MARKS.finditer(text):
        if mark.group() == TOOLS_BEGIN:
            begin = mark.end() + 1 if begin is None else begin
        elif begin is not None:
            blocks += [text[begin : mark.start() - 1]] if mark.start() > begin else []
            begin = None
    return blocks


def _object(text: str) -> JsonDict | None:
    """Parse a text as a JSON object; None if it is not one, or is nested deeper than orjson writes (254)."""
    try:
        value = exact_json.parse(text)
        orjson.dumps(value, default=exact_json.as_json)
    except (orjson.JSONDecodeError, RecursionError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _same(call: Call) -> tuple[str, bytes]:
    """Comparison key of a call, equal for equivalent ones: 5 equals 5.0, and the order of keys does not matter."""
    return call.name, orjson.dumps(_plain(call.arguments), option=orjson.OPT_SORT_KEYS)


def _plain(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = EXACT.create_decimal(str(value))
        return orjson.Fragment(str(number.normalize(EXACT) if number else 0))
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    return [_plain(element) for element in value] if isinstance(value, list) else value


EXACT = Context(prec=10_000)  # digits of a number that are compared; a double has 17

REMEMBERED = 4096

SECONDS, SECONDS_PER_CHECK, MEMORY_BYTES = 2.0, 0.1, 512 << 20

TOTAL_SECONDS = 60.0  # of CPU time for all checks of an evaluation task, beyond FREE_SECONDS for each

FREE_SECONDS = 0.01  # ten times the cost of a check of real data

_TOO_COSTLY: dict[bytes, str] = {}  # schema -> reason


@dataclass
class Budget:
    """CPU time for all schema checks of an evaluation task."""

    seconds: float = TOTAL_SECONDS
    used_seconds: float = 0.0
    refused: int = 0  # checks that were skipped since the budget was used up

    @property
    def reason(self) -> str:
        """Why further checks are skipped."""
        return f"the schemas of this evaluation have used up their {self.seconds:g} s of CPU time"


def check(schema: bytes, arguments: bytes, budget: Budget) -> dict[str, str]:
    """Check the arguments of a call against a schema, both as JSON: {} if they fit, else `mismatch` or `unchecked` with the
    reason. A schema that once exceeded the limits is not tried again, and none is once the budget is used up."""
    if budget.used_seconds >= budget.seconds:
        budget.refused += 1
        return {"unchecked": budget.reason}
    seconds_before = SANDBOX.used_seconds
    reason = _TOO_COSTLY.get(schema) or _unusable(schema)
    checked = {"unchecked": reason} if reason else _ask_sandbox(schema, arguments)
    budget.used_seconds += max(0.0, SANDBOX.used_seconds - seconds_before - FREE_SECONDS)
    return checked


@lru_cache(maxsize=REMEMBERED)
def _unusable(schema: bytes) -> str:
    """Why this JSON is not a usable schema, "" if it is: some data name types such as Python's, which no arguments fit.

    Cached, since it takes longer than to check a call (1,782 calls of two data sets: 2 s, then 0.3 s).
    """
    return _ask_sandbox(schema, None).get("unchecked", "")


def _ask_sandbox(schema: bytes, arguments: bytes | None) -> dict[str, str]:
    fragments = [orjson.Fragment(schema), None if arguments is None else orjson.Fragment(arguments)]
    try:
        reply: dict[str, str] = orjson.loads(SANDBOX.call(orjson.dumps(fragments)))
    except BudgetExceeded as error:
        reason = f"the schema asks for too much: {error}"
        if len(_TOO_COSTLY) < REMEMBERED:
            _TOO_COSTLY[schema] = reason
        return {"unchecked": reason}
    except WorkFailed as error:
        return {"unchecked": f"the schema cannot be used: {error!s:.{SHOWN_CHARACTERS}}"}
    return reply


def answer(request: bytes) -> Iterator[bytes]:
    """Run in the child: {} if the schema is valid, or the arguments fit; else `unchecked` or `mismatch` with the reason."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, ValidationError
    from referencing import Registry

    nothing_fetched: Registry[Any] = Registry()  # addresses in a schema are not fetched
    # orjson would read whole numbers beyond 64 bits as doubles.
    schema, arguments = json.JSONDecoder().decode(request.decode("utf-8"))
    if arguments is None:
        if not isinstance(schema, dict):
            yield orjson.dumps({"unchecked": "the schema is not a JSON object"})
            return
        try:
            Draft202012Validator.check_schema(schema)
            yield b"{}"
        except (SchemaError, RecursionError) as error:
            yield orjson.dumps({"unchecked": f"the schema is not valid: {_shown(error)}"})
        return
    try:
        Draft202012Validator(schema, registry=nothing_fetched).validate(arguments)
        yield b"{}"
    except ValidationError as mismatch:
        argument_path = ".".join(map(str, mismatch.absolute_path)) or "the arguments"
        yield orjson.dumps({"mismatch": f"{argument_path}: {_shown(mismatch)}"})


def _shown(error: Exception) -> str:
    text = str(getattr(error, "message", error))[:SHOWN_CHARACTERS]
    return text.encode("utf-8", "replace").decode("utf-8")


SANDBOX = Sandbox(
    answer,
    seconds=SECONDS,
    seconds_per_result=SECONDS_PER_CHECK,
    memory_bytes=MEMORY_BYTES,
    preloaded=("jsonschema", "referencing"),
)
