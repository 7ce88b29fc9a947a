"""JSON schemas that data bring along: whether they are schemas, and whether arguments fit them, within a budget.

A schema is a program: a pattern can take hours, and so can a few `$ref` that double. `answer` runs in a child of
`ttrain.core.sandbox`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from ttrain.core.sandbox import BudgetExceeded, Sandbox, WorkFailed

SHOWN_CHARACTERS = 80
REMEMBERED = 4096
SECONDS, SECONDS_PER_CHECK, MEMORY_BYTES = 2.0, 0.1, 512 << 20
TOTAL_SECONDS = 60.0  # of CPU time for all checks of an evaluation task, beyond what each has for nothing
FREE_SECONDS = 0.01  # ten times what a check of real data takes

_TOO_COSTLY: dict[bytes, str] = {}  # schemas, with the reason


@dataclass(frozen=True)
class Checked:
    """What a schema says of arguments: why they do not fit, "" where they do; or why the schema cannot be asked."""

    mismatch: str = ""
    unchecked: str = ""


@dataclass
class Budget:
    """What the schemas of an evaluation task may cost together."""

    seconds: float = TOTAL_SECONDS
    used_seconds: float = 0.0
    refused: int = 0  # checks that were not made for it

    @property
    def reason(self) -> str:
        """Why no more is checked."""
        return f"the schemas of this evaluation have used up their {self.seconds:g} s of CPU time"


def check(schema: bytes, arguments: bytes, budget: Budget) -> Checked:
    """The arguments of a call, as JSON, against a schema, as JSON. One that asked for too much is not asked again, and
    none is once the budget is used up."""
    if budget.used_seconds >= budget.seconds:
        budget.refused += 1
        return Checked(unchecked=budget.reason)
    before = _SANDBOX.used_seconds
    checked = _check(schema, arguments)
    budget.used_seconds += max(0.0, _SANDBOX.used_seconds - before - FREE_SECONDS)
    return checked


def _check(schema: bytes, arguments: bytes) -> Checked:
    if reason := _TOO_COSTLY.get(schema) or _unusable(schema):
        return Checked(unchecked=reason)
    return Checked(**_asked(schema, arguments))


@lru_cache(maxsize=REMEMBERED)
def _unusable(schema: bytes) -> str:
    """Why this JSON is no schema that can be asked, "" for one that can: data have types such as Python's, which no
    arguments could fit.

    Asked once of each: it takes longer than to check a call (1,782 calls of two data sets: 2 s, then 0.3 s).
    """
    return _asked(schema, None).get("unchecked", "")


def _asked(schema: bytes, arguments: bytes | None) -> dict[str, str]:
    fragments = [orjson.Fragment(schema), None if arguments is None else orjson.Fragment(arguments)]
    try:
        found: dict[str, str] = orjson.loads(_SANDBOX.call(orjson.dumps(fragments)))
    except BudgetExceeded as error:
        reason = f"the schema asks for too much: {error}"
        if len(_TOO_COSTLY) < REMEMBERED:
            _TOO_COSTLY[schema] = reason
        return {"unchecked": reason}
    except WorkFailed as error:
        return {"unchecked": f"the schema cannot be used: {error!s:.{SHOWN_CHARACTERS}}"}
    return found


def answer(request: bytes) -> Iterator[bytes]:
    """In the child: {} where the schema is one, or the arguments fit; else `unchecked` or `mismatch` with the reason."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, ValidationError
    from referencing import Registry

    nothing_fetched: Registry[Any] = Registry()  # an address in a schema stays an address
    schema, arguments = orjson.loads(request)
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
        place = ".".join(map(str, mismatch.absolute_path)) or "the arguments"
        yield orjson.dumps({"mismatch": f"{place}: {_shown(mismatch)}"})


def _shown(error: Exception) -> str:
    text = str(getattr(error, "message", error))[:SHOWN_CHARACTERS]
    return text.encode("utf-8", "replace").decode("utf-8")


_SANDBOX = Sandbox(
    answer,
    seconds=SECONDS,
    seconds_per_result=SECONDS_PER_CHECK,
    memory_bytes=MEMORY_BYTES,
    preloaded=("jsonschema", "referencing"),
)
