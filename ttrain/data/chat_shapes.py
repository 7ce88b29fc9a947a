"""Read chats in the formats of common data sets: messages, ShareGPT, alpaca, TRL's prompt and completion, and pairs
of a question and its answer.

Every rejection reason says what is wrong with the value and what to write instead.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttrain.core.files import JsonDict
from ttrain.data import tools
from ttrain.data.chat_templates import Message, with_reasoning
from ttrain.data.jinja_templates import ROLES
from ttrain.data.tools import Malformed, kind_of, require

SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
OWN_ROLES = {role: role for role in ROLES}
CHAT_KEYS = (
    "messages",
    "conversations",
    "instruction",
)  # the first key that is present decides the format of a row
PROMPT_KEYS = ("prompt", "completion")
QUESTION_KEYS = ("question", "answer")
# After those: a row has one exchange under the first of these pairs that it has.
EXCHANGE_KEYS = (
    PROMPT_KEYS,
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"),
    ("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("input", "output"),
)  # fmt: skip
CHAT_FIELDS = (
    "'messages' or 'conversations' with role and content, 'instruction' with 'output', 'prompt' with 'completion' or "
    "'response', 'question' with 'answer', or 'input' with 'output'"
)
# Keys that a question needs beside itself: choices as one or several keys, and the text that it is about.
OF_QUESTION = re.compile(r"contexts?|passages?|[a-e]|(opt?|option|choice|ending|sol|distractor)s?[ _]?[a-e\d]?")
Row = Mapping[str, Any]
RawTurns = list[Any]  # as they are in the row
READ_OF_BOTH = frozenset({"tool_calls", "tool_call_id", "function_call", "weight", "tools"})
READ_OF_SHAREGPT = READ_OF_BOTH | {"from", "value", "reasoning_content"}
READ_OF_TURN = READ_OF_BOTH | {"role", "content", "reasoning_content"}
READ_OF_PART = frozenset({"type", "text"})
READ_OF_ROW = frozenset({
    *CHAT_KEYS, *PROMPT_KEYS, "chosen", "rejected", "label", "input", "output", "question", "query",
    "history", "system", "tools",
})  # fmt: skip
READ_OF_EXCHANGE = frozenset({"history", "system", "tools", "weight"})
# What is no part of an answer, also as the last word of a key: `message_id`, `chosen_model`.
METADATA = frozenset({
    "id", "uuid", "index", "hash", "name", "author", "model", "source", "dataset", "split", "license",
    "url", "ip", "country", "language", "lang", "category", "topic", "domain", "task", "type", "tag",
    "tags", "label", "labels", "score", "rating", "time", "date", "timestamp", "created", "updated",
    "created_at", "updated_at", "status", "finish_reason", "stop_reason", "metadata", "meta",
    "cache_control",
})  # fmt: skip
ASSISTANT_NAMES = ("assistant", "gpt", "function_call")
A_TURN = '{"role": "user", "content": "..."}'
A_PART = '{"type": "text", "text": "..."}'
NOT_PAIRS = '\'history\' is not a list of pairs of texts; write a list of pairs ["question", "answer"], or leave it out'
# A visible character: neither white space nor one of zero width (soft hyphen, joiners, direction marks, BOM).
VISIBLE = re.compile(r"[^\s\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")


def is_blank(text: str) -> bool:
    """Whether the text has no visible character."""
    return VISIBLE.search(text) is None


def is_chat(row: Row) -> bool:
    """Whether a row has the keys of a chat. A prompt alone does not count: data sets of documents
    have that key too, and some with a text have keys of a question and its answer."""
    keys = exchange_keys(row)
    if keys == PROMPT_KEYS or any(row.get(key) is not None for key in CHAT_KEYS):
        return True
    return keys is not None and row.get("text") is None and not _beside_question(row, keys)


def exchange_keys(row: Row) -> tuple[str, str] | None:
    """The keys of a question and its answer in a row; None for none."""
    present = {key for key, value in row.items() if value is not None}
    return next((keys for keys in EXCHANGE_KEYS if present.issuperset(keys)), None)


def _beside_question(row: Row, keys: tuple[str, str]) -> str | None:
    """The first key beside a question and its answer that belongs to the question."""
    for key in _unread(row, READ_OF_EXCHANGE.union(keys)):
        if isinstance(row[key], list | dict) or OF_QUESTION.fullmatch(key.lower()):
            return key
    return None


def messages_of(row: Row) -> list[Message]:
    """The turns of a chat in one of the known formats, with or without an answer.

    Raises Malformed with the reason.
    """
    shape = _shape(row)
    if shape == "instruction":
        answer = Message("assistant", visible_text(row, "output", "instruction"))
        messages = [*alpaca_question(row), answer]
    elif shape in CHAT_KEYS:
        messages = turns_of(row[shape], shape, has_tools=bool(row.get("tools")))
    else:
        messages = _exchange(row)
    return with_system_and_tools(messages, row)


def _shape(row: Row) -> str:
    """The key that decides the format of a row; "" for a question and its answer."""
    return next((key for key in (*CHAT_KEYS, *PROMPT_KEYS) if row.get(key) is not None), "")


def unread_keys(row: Row, *, is_pair: bool) -> set[str]:
    """Keys of texts of the assistant that are not read, such as `thinking`: half of an answer may
    be there.

    They are all keys with text on an assistant's turn, and beside a single answer, except METADATA.
    """
    shape = _shape(row)
    is_of_turns = shape in ("messages", "conversations") and not is_pair
    found = set() if is_of_turns else {*_unread(row, READ_OF_ROW.union(exchange_keys(row) or ()))}
    for turns in [row[shape]] if is_of_turns else row.values():
        for turn in turns if isinstance(turns, list) else [turns]:
            if not isinstance(turn, dict) or (turn.get("role") or turn.get("from")) not in ASSISTANT_NAMES:
                continue
            key, read = ("content", READ_OF_TURN) if turn.get("role") else ("value", READ_OF_SHAREGPT)
            content = turn.get(key)
            found.update(_unread(turn, read))
            parts = content if isinstance(content, list) else []
            for part in parts:
                found.update(_unread(part, READ_OF_PART) if isinstance(part, dict) else ())
    return found


def _unread(values: Row, read: frozenset[str]) -> list[str]:
    """The keys with text that are neither read nor metadata, in their order."""
    others = [key for key in values if key not in read and not _is_metadata(key.lower())]
    return [key for key in others if _holds_text(values[key])]


def _is_metadata(key: str) -> bool:
    return key in METADATA or key.rpartition("_")[2] in METADATA


def _holds_text(value: object) -> bool:
    waiting = [value]  # not by recursion: a row may be nested deeper than the stack
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict | list):
            waiting.extend(part.values() if isinstance(part, dict) else part)
        elif isinstance(part, str) and not is_blank(part):
            return True
    return False


def with_system_and_tools(messages: list[Message], row: Row) -> list[Message]:
    """The turns with the keys `system` and `tools` of their row as the first one."""
    system = _optional_text(row, "system")
    begins = bool(messages) and messages[0].role == "system"
    if not is_blank(system):
        has_system = any(message.role == "system" for message in messages)
        require(not has_system, "both the key 'system' and a system turn; keep one of them")
    elif begins:
        system, messages = messages[0].content, messages[1:]
    functions = tools.tools_text(row.get("tools"))
    if not functions and is_blank(system) and not begins:
        return messages
    return [Message("system", tools.with_tools(system, functions)), *messages]


def alpaca_question(row: Row) -> list[Message]:
    """The turns up to the answer."""
    instruction = visible_text(row, "instruction", "instruction")
    extra = _optional_text(row, "input")
    question = instruction if is_blank(extra) else f"{instruction}\n\n{extra}"
    return [*_history(row), Message("user", question)]


def _history(row: Row) -> list[Message]:
    """The exchanges before the instruction, as turns."""
    pairs = row.get("history") or []
    if isinstance(pairs, str) and is_blank(pairs):  # exports of CSV have an empty text for none
        return []
    require(isinstance(pairs, list) and all(map(_is_pair, pairs)), NOT_PAIRS)
    texts = itertools.chain.from_iterable(pairs)
    return [Message(role, text) for role, text in zip(itertools.cycle(("user", "assistant")), texts)]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _optional_text(row: Row, key: str) -> str:
    text = row.get(key)
    require(text is None or isinstance(text, str), f"'{key}' is {kind_of(text)}, not text")
    return text or ""


def visible_text(row: Row, key: str, other_key: str) -> str:
    """The text under a key; `other_key` is the key of the row that calls for it."""
    text = row.get(key)
    require(key in row, f"no key '{key}' beside '{other_key}'")
    require(isinstance(text, str), f"'{key}' is {kind_of(text)}, not text")
    require(not is_blank(str(text)), f"'{key}' is empty; write a text, or leave the row out")
    return str(text)


def _exchange(row: Row) -> list[Message]:
    """A question and its answer, as TRL's prompt and completion: each is a text or a list of turns,
    and only the second is learnt."""
    present = {key for key, value in row.items() if value is not None}
    halves = [keys for keys in (PROMPT_KEYS, QUESTION_KEYS) if not present.isdisjoint(keys)]
    keys = exchange_keys(row) or (halves[0] if halves else None)
    if keys is None:
        names = ", ".join(map(repr, (*CHAT_KEYS, "prompt", "question", "input")))
        raise Malformed(f"none of the keys {names} holds a conversation")
    asked, answered = keys
    if keys != PROMPT_KEYS and (other := _beside_question(row, keys)):
        raise Malformed(f"'{other}' beside '{asked}' may be a part of the question; write it there, or leave it out")
    prompt = turns_under(row, asked, answered, "user")
    completion = turns_under(row, answered, asked, "assistant")
    has_tools = bool(row.get("tools"))
    prompt, completion = apart(prompt, completion, answered, has_tools=has_tools)
    messages = turns_of([*prompt, *completion], asked, has_tools=has_tools)
    history = _history(row) if keys != PROMPT_KEYS else []
    return [*history, *map(not_learnt, messages[: len(prompt)]), *messages[len(prompt) :]]


def turns_under(row: Row, key: str, other_key: str, role: str) -> RawTurns:
    """The turns under a key, as they stand in the row: a list of them, or a text, which is one turn
    of the role."""
    value = row.get(key)
    require(key in row, f"no key '{key}' beside '{other_key}'")
    if isinstance(value, str):
        return [{"role": role, "content": visible_text(row, key, other_key)}]
    return list_of_turns(value, key, "text or ")


def list_of_turns(value: Any, key: str, others: str = "") -> RawTurns:
    """The value under a key, a list of turns. `others`: what else may stand there."""
    require(
        isinstance(value, list),
        f"'{key}' is {kind_of(value)}, not {others}a list of turns such as {A_TURN}",
    )
    require(value, f"'{key}' has no turns; write turns such as {A_TURN}")
    return list(value)


def apart(prompt: RawTurns, answer: RawTurns, key: str, *, has_tools: bool) -> tuple[RawTurns, RawTurns]:
    """The turns of the prompt, and those of an answer without it; white space does not count.

    An answer may be a whole conversation, with the prompt or the end of the prompt in it. Raises
    Malformed for another one.
    """
    asked, answered = wordings(prompt, has_tools), wordings(answer, has_tools)
    if not asked or not answered:  # who parses them together says what is wrong
        return prompt, answer
    for end in range(len(answered), 0, -1):
        known = min(end, len(asked))
        if answered[end - known : end] == asked[-known:]:
            return (answer[:end] if known == len(asked) else prompt), answer[end:]
    roles = [role for role, _ in answered]
    begins_anew = roles[0] == "system" or (roles[0] == "user" and asked[-1][0] == "user")
    require(
        "assistant" not in roles or not begins_anew,
        f"'{key}' is a conversation without the turns of the prompt; begin it with them, or write its answer alone",
    )
    return prompt, answer


def wordings(turns: RawTurns, has_tools: bool) -> list[tuple[str, str]]:
    """(role, words) of each; [] for turns that need others before them, as the result of a call."""
    try:
        messages = turns_of(turns, "prompt", has_tools=has_tools)
    except Malformed:
        return []
    return [(message.role, " ".join(message.content.split())) for message in messages]


def not_learnt(message: Message) -> Message:
    """The turn as context."""
    return replace(message, in_loss=False) if message.role == "assistant" else message


def turns_of(turns: object, shape: str, *, has_tools: bool) -> list[Message]:
    """The turns under the key `shape`; `has_tools`: the row has the key `tools` too."""
    messages: list[Message] = []
    call_ids: set[str] = set()
    has_calls = False
    for turn in list_of_turns(turns, shape):
        require(isinstance(turn, dict), f"a turn is {kind_of(turn)}, not an object such as {A_TURN}")
        message, calls = _turn(turn, has_tools)
        if message.role == "tool":
            require(
                has_calls,
                "a tool turn without a call before it; put the assistant's 'tool_calls' before it",
            )
            number = turn.get("tool_call_id")
            require(
                number is None or (isinstance(number, str) and number in call_ids),
                f"tool_call_id {str(number)[:40]!r}, which no call before it has; write the id of its call, or none",
            )
        has_calls = has_calls or (message.role == "assistant" and tools.has_calls(message.content))
        call_ids.update(call["id"] for call in calls if isinstance(call.get("id"), str))
        messages.append(message)
    return messages


def _turn(turn: JsonDict, has_tools: bool) -> tuple[Message, list[JsonDict]]:
    """(the turn, its calls); the content includes the calls as text."""
    name, key, roles = turn.get("role"), "content", OWN_ROLES
    if name is None and "from" in turn:
        name, key, roles = turn["from"], "value", SHAREGPT_ROLES
    names = ", ".join(roles)
    if key == "content":
        require("role" in turn, f"a turn without a role; write 'role' as one of {names}")
    is_known = isinstance(name, str) and name in roles
    require(is_known, f"unknown role {str(name)[:40]!r}; write one of {names}")
    role = roles[str(name)]
    if name == "function_call":
        calls, content = tools.calls_of(turn.get(key), name), ""
    else:
        calls = tools.calls_of_turn(turn, role)
        content = _content(turn, key, role, is_optional=bool(calls))
    functions = tools.tools_text(turn.get("tools"))
    if functions:
        require(
            role == "system",
            f"'tools' on a turn of role '{role}'; write it beside the turns, or on the system turn",
        )
        require(not has_tools, "'tools' both beside the turns and on the system turn; keep one of them")
    content = tools.with_tools(tools.with_calls(content, calls), functions)
    if role != "assistant":
        return Message(role, content), calls
    content, thought = with_reasoning(_optional_text(turn, "reasoning_content"), content)
    weight = turn.get("weight")
    require(
        weight is None or (isinstance(weight, int | float) and weight in (0, 1)),
        f"the 'weight' of a turn is {str(weight)[:40]}; write 1 (it is learnt) or 0 (it is not)",
    )
    return Message(role, content, weight is None or bool(weight), thought), calls


def _content(turn: Row, key: str, role: str, *, is_optional: bool) -> str:
    """The text under `key`, joined if it is a list of parts; `is_optional`: null is empty."""
    content = turn.get(key)
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    kind = kind_of(content) if key in turn else "missing"
    require(isinstance(content, list), f"the '{key}' of a turn of role '{role}' is {kind}, not text")
    return "".join(map(_part_text, content or ()))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    is_text = isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str)
    require(
        is_text,
        f"a content part is not an object with a text (its type: {str(kind)[:40]}); only text is read: write {A_PART}",
    )
    return str(part["text"])
