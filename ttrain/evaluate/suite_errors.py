"""What is wrong in a suite, in words: pydantic's errors by task and setting, with the rule and a cure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.config.suite import KINDS

TASKS = "write below tasks: a name for each task, such as poems: {kind: choices, file: poems.jsonl}"
# What a value must be, by pydantic's name of the error; {gt} and the like come with the error.
RULES: Mapping[str, str] = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list, such as [lang]",
}


def explained(item: Mapping[str, Any], tree: Mapping[str, Any]) -> str:
    """One wrong setting in a line. pydantic's place of a task's setting is tasks, name, kind, setting."""
    place = [str(part) for part in item["loc"]]
    name = ".".join([place[1], *place[3:]] if len(place) > 2 and place[0] == "tasks" else place[1:] or place)
    match item["type"]:
        case "extra_forbidden" if len(place) > 2:
            known = list(KINDS[place[2]].model_fields)
            near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
            return f"{name} is no setting of kind {place[2]}; " + (
                f"did you mean '{near[0]}'?" if near else f"it has {', '.join(known)}"
            )
        case "extra_forbidden":
            return f"{name} is no part of a suite; put it below tasks:"
        case "missing":
            return f"{name} is missing" + (f"; {TASKS}" if name == "tasks" else "")
        case "too_short" if place == ["tasks"]:
            return f"tasks is empty; {TASKS}"
        case "dict_type" if place == ["tasks"]:
            return f"tasks is {_kind_of(item['input'])}, not a mapping; {TASKS}"
        case "model_type" | "model_attributes_type":
            return (
                f"{name} is {_kind_of(item['input'])}, not a mapping; write settings, such as {{kind: text, file: x.jsonl}}"
            )
        case "union_tag_not_found":
            return f"{name} does not say its kind; there are {', '.join(KINDS)}"
        case "union_tag_invalid":
            return f"{name} is of kind {_kind(tree, place)!r}, which there is not; there are {', '.join(KINDS)}"
        case "value_error":
            return f"{name}: {str(item['msg']).removeprefix('Value error, ')}"
    rule = RULES.get(item["type"])
    if rule is None:
        message = str(item["msg"])
        return f"{name} is {item['input']!r} but: {message[0].lower()}{message[1:]}"
    return f"{name} is {item['input']!r} but {rule.format_map(item.get('ctx', {}))}"


def _kind_of(value: object) -> str:
    return "empty" if value is None else "a list" if isinstance(value, list) else repr(value)


def _kind(tree: Mapping[str, Any], place: Sequence[str]) -> object:
    return tree["tasks"][place[1]].get("kind")
