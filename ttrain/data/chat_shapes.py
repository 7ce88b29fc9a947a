"""Read chats in the formats of common data sets: messages, ShareGPT, alpaca, TRL's prompt and completion, and pairs
of a question and its answer.

Every rejection reason says what is wrong with the value and what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttrain.core.files import JsonDict
from ttrain.data import tools
from ttrain.data.chat_templates import Message, with_reasoning
from ttrain.data.jinja_templates import ROLES
from ttrain.data.tools import Malformed, kind_of

SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
CHAT_KEYS = ("messages", "conversations", "instruction")  # the first key that is present decides the format of a row
PROMPT_KEYS = ("prompt", "completion")
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
READ_OF_SHAREGPT = frozenset({"from", "value", "tool_calls", "tool_call_id", "function_call", "weight", "tools"})
READ_OF_TURN = READ_OF_SHAREGPT - {"from", "value"} | {"role", "content", "reasoning_content"}
READ_OF_PART = frozenset({"type", "text"})
READ_OF_ROW = frozenset({
    *CHAT_KEYS, *PROMPT_KEYS, "chosen", "rejected", "label", "input", "output", "history", "system", "tools",
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
# A visible character: neither white space nor one of zero width (soft hyphen, joiners, direction marks, BOM).
VISIBLE = re.compile(r"[^\s\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")


def is_blank(text: str) -> bool:
    """Whether the text has no visible character."""
    return VISIBLE.search(text) is None


def is_chat(row: Row) -> bool:
    """Whether a row has the keys of a chat. A prompt alone does not count: data sets of documents have that key too, and
    some with a text have keys of a question and its answer."""
    if any(row.get(key) is not None for key in CHAT_KEYS):
        return True
    keys = exchange_keys(row)
    if keys == PROMPT_KEYS:
        return True
    return keys is not None and row.get("text") is None and _beside_question(row, keys) is None


def exchange_keys(row: Row) -> tuple[str, str] | None:
    """The keys of a question and its answer in a row; None for none."""
    for keys in EXCHANGE_KEYS:
        if all(row.get(key) is not None for key in keys):
            return keys
    return None


def _beside_question(row: Row, keys: tuple[str, str]) -> str | None:
    """The first key beside a question and its answer that belongs to the question, such as `choices`."""
    for key, value in row.items():
        if key in keys or key in READ_OF_EXCHANGE or _is_metadata(key):
            continue
        is_list = isinstance(value, list | dict) and _holds_text(value)
        if is_list or (OF_QUESTION.fullmatch(key.lower()) and _holds_text(value)):
            return key
    return None


def messages_of(row: Row) -> list[Message]:
    """The turns of a chat in one of the known formats, with or without an answer. Raises Malformed with the reason."""
    shape = next((key for key in (*CHAT_KEYS, *PROMPT_KEYS) if row.get(key) is not None), None)
    keys = None if shape in CHAT_KEYS else exchange_keys(row)
    if shape is None and keys is None:
        if row.get("question") is not None:
            raise Malformed("no key 'answer' beside 'question'")
        names = (*CHAT_KEYS, "prompt", "question", "input")
        raise Malformed(f"none of the keys {', '.join(map(repr, names))} holds a conversation")
    has_tools = bool(row.get("tools"))
    if shape == "instruction":
        messages = [*alpaca_question(row), Message("assistant", visible_text(row, "output", "instruction"))]
    elif shape is None or shape in PROMPT_KEYS:
        messages = _exchange(row, keys or PROMPT_KEYS, has_tools)
    else:
        messages = turns_of(row[shape], shape, has_tools)
    return with_system_and_tools(messages, row)


def unread_keys(row: Row, *, is_pair: bool) -> set[str]:
    """Keys of texts of the assistant that are not read, such as `thinking`: half of an answer may be there.

    They are all keys with text on an assistant's turn, and beside a single answer, except METADATA.
    """
    shape = next((key for key in (*CHAT_KEYS, *PROMPT_KEYS) if row.get(key) is not None), "")
    is_of_turns = shape in ("messages", "conversations") and not is_pair
    keys = None if shape in CHAT_KEYS or is_pair else exchange_keys(row)
    read = READ_OF_ROW | {"question", "query"} if is_pair and not shape else READ_OF_ROW
    if keys and keys != PROMPT_KEYS:
        read = READ_OF_EXCHANGE | {*keys}
    found = set() if is_of_turns else _unread(row, read)
    for key in (shape,) if is_of_turns else (shape, *(keys or ()), "completion", "chosen", "rejected"):
        turns = row.get(key)
        for turn in turns if isinstance(turns, list) else [turns]:
            if not isinstance(turn, dict) or (turn.get("role") or turn.get("from")) not in ASSISTANT_NAMES:
                continue
            content, read = ("content", READ_OF_TURN) if turn.get("role") else ("value", READ_OF_SHAREGPT)
            found |= _unread(turn, read)
            for part in turn[content] if isinstance(turn.get(content), list) else ():
                found |= _unread(part, READ_OF_PART)
    return found


def _unread(values: Row, read: frozenset[str]) -> set[str]:
    return {key for key in values.keys() - read if not _is_metadata(key) and _holds_text(values[key])}


def _is_metadata(key: str) -> bool:
    key = key.lower()
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
    system = _optional_text(row, "system")
    if not is_blank(system):
        if any(message.role == "system" for message in messages):
            raise Malformed("both the key 'system' and a system turn; keep one of them")
        messages = [Message("system", system), *messages]
    functions = tools.tools_text(row.get("tools"))
    if not functions:
        return messages
    begins = bool(messages) and messages[0].role == "system"
    first = Message("system", tools.with_tools(messages[0].content if begins else "", functions))
    return [first, *messages[int(begins) :]]


def alpaca_question(row: Row) -> list[Message]:
    """The turns up to the answer."""
    instruction = visible_text(row, "instruction", "instruction")
    extra = _optional_text(row, "input")
    question = instruction if is_blank(extra) else f"{instruction}\n\n{extra}"
    return [*_history(row.get("history")), Message("user", question)]


def _history(pairs: object) -> list[Message]:
    """The exchanges before the instruction, as turns."""
    if pairs is None or (isinstance(pairs, str) and is_blank(pairs)):  # exports of CSV have an empty text for none
        return []
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise Malformed(
            '\'history\' is not a list of pairs of texts; write a list of pairs ["question", "answer"], or leave it out'
        )
    return [Message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)


def _optional_text(row: Row, key: str) -> str:
    text = row.get(key)
    if not (text is None or isinstance(text, str)):
        raise Malformed(f"'{key}' is {kind_of(text)}, not text")
    return text or ""


def visible_text(row: Row, key: str, other_key: str) -> str:
    text = row.get(key)
    if key not in row:
        raise Malformed(f"no key '{key}' beside '{other_key}'")
    if not isinstance(text, str):
        raise Malformed(f"'{key}' is {kind_of(text)}, not text")
    if is_blank(text):
        raise Malformed(f"'{key}' is empty; write a text, or leave the row out")
    return text


def _exchange(row: Row, keys: tuple[str, str], has_tools: bool) -> list[Message]:
    """A question and its answer, as TRL's prompt and completion: each is a text or a list of turns, and only the second
    is learnt."""
    asked, answered = keys
    if keys != PROMPT_KEYS and (other := _beside_question(row, keys)):
        raise Malformed(f"'{other}' beside '{asked}' may be a part of the question; write it there, or leave it out")
    prompt = turns_under(row, asked, answered, "user")
    completion = turns_under(row, answered, asked, "assistant")
    prompt, completion = apart(prompt, completion, answered, has_tools=has_tools)
    messages = turns_of([*prompt, *completion], asked, has_tools)
    history = _history(row.get("history")) if keys != PROMPT_KEYS else []
    return [*history, *map(not_learnt, messages[: len(prompt)]), *messages[len(prompt) :]]


def turns_under(row: Row, key: str, other_key: str, role: str) -> list[Any]:
    """The turns under a key, as they stand in the row: a list of them, or a text, which is one turn of the role."""
    value = row.get(key)
    if isinstance(value, str):
        return [{"role": role, "content": visible_text(row, key, other_key)}]
    if key not in row:
        raise Malformed(f"no key '{key}' beside '{other_key}'")
    if not isinstance(value, list):
        raise Malformed(f"'{key}' is {kind_of(value)}, not text or a list of turns such as {A_TURN}")
    if not value:
        raise Malformed(f"'{key}' has no turns; write turns such as {A_TURN}")
    return value


RawTurns = list[Any]  # as they are in the row


def apart(prompt: RawTurns, answer: RawTurns, key: str, *, has_tools: bool) -> tuple[RawTurns, RawTurns]:
    """The turns of the prompt, and those of an answer without it; white space does not count.

    An answer may be a whole conversation, with the prompt or the end of the prompt in it. Raises Malformed for another one.
    """
    asked, answered = wordings(prompt, has_tools), wordings(answer, has_tools)
    if not asked or not answered:  # who parses them together says what is wrong
        return prompt, answer
    for end in range(len(answered), 0, -1):
        known = min(end, len(asked))
        if answered[end - known : end] == asked[-known:] and (known == len(asked) or known == end):
            return (answer[:end] if known == len(asked) else prompt), answer[end:]
    roles = [role for role, _ in answered]
    if "assistant" in roles and (roles[0] == "system" or (roles[0] == "user" and asked[-1][0] == "user")):
        fix = "begin it with them, or write its answer alone"
        raise Malformed(f"'{key}' is a conversation without the turns of the prompt; {fix}")
    return prompt, answer


def wordings(turns: RawTurns, has_tools: bool) -> list[tuple[str, str]]:
    """(role, words) of each; [] for turns that need others before them, as the result of a call does."""
    try:
        messages = turns_of(turns, "prompt", has_tools)
    except Malformed:
        return []
    return [(message.role, " ".join(message.content.split())) for message in messages]


def not_learnt(message: Message) -> Message:
    return replace(message, in_loss=False) if message.role == "assistant" else message


def turns_of(turns: object, shape: str, has_tools: bool) -> list[Message]:
    """The turns under the key `shape`; `has_tools`: the row has the key `tools` too. Raises Malformed."""
    if not isinstance(turns, list):
        raise Malformed(f"'{shape}' is {kind_of(turns)}, not a list of turns such as {A_TURN}")
    if not turns:
        raise Malformed(f"'{shape}' has no turns; write turns such as {A_TURN}")
    messages: list[Message] = []
    call_ids: set[str] = set()
    called = False
    for turn in turns:
        if not isinstance(turn, dict):
            raise Malformed(f"a turn is {kind_of(turn)}, not an object such as {A_TURN}")
        message, calls = _turn(turn, has_tools)
        if message.role == "tool":
            number = turn.get("tool_call_id")
            if not called:
                raise Malformed("a tool turn without a call before it; put the assistant's 'tool_calls' before it")
            if number is not None and (not isinstance(number, str) or number not in call_ids):
                raise Malformed(
                    f"tool_call_id {str(number)[:40]!r}, which no call before it has; write the id of its call, or none"
                )
        called = called or (message.role == "assistant" and tools.has_calls(message.content))
        call_ids.update(call["id"] for call in calls if isinstance(call.get("id"), str))
        messages.append(message)
    return messages


def _turn(turn: JsonDict, has_tools: bool) -> tuple[Message, list[JsonDict]]:
    """(the turn, its calls); the content includes the calls as text."""
    is_sharegpt = turn.get("role") is None and "from" in turn
    name, key = (turn["from"], "value") if is_sharegpt else (turn.get("role"), "content")
    role = SHAREGPT_ROLES.get(name) if is_sharegpt and isinstance(name, str) else name
    if role not in ROLES:
        names = ", ".join(SHAREGPT_ROLES if is_sharegpt else ROLES)
        is_unknown = is_sharegpt or "role" in turn
        raise Malformed(f"unknown role {str(name)[:40]!r}; write one of {names}" if is_unknown else
                        f"a turn without a role; write 'role' as one of {names}")  # fmt: skip
    in_loss = _in_loss(turn) if role == "assistant" else True
    if is_sharegpt and name == "function_call":
        calls = tools.calls_of(turn.get(key), "'function_call'")
        return Message(role, tools.with_calls("", calls), in_loss), calls
    calls = tools.calls_of_turn(turn)
    if calls and role != "assistant":
        name = "tool_calls" if turn.get("tool_calls") else "function_call"
        raise Malformed(f"'{name}' on a turn of role '{role}'; only an assistant's turn may call functions")
    content = _content(turn, key, role, is_optional=bool(calls))
    functions = tools.tools_text(turn.get("tools"))
    if functions and role != "system":
        raise Malformed(f"'tools' on a turn of role '{role}'; write it beside the turns, or on the system turn")
    if functions and has_tools:
        raise Malformed("'tools' both beside the turns and on the system turn; keep one of them")
    content = tools.with_tools(tools.with_calls(content, calls), functions)
    reasoning = "" if is_sharegpt or role != "assistant" else _optional_text(turn, "reasoning_content")
    if is_blank(reasoning):
        return Message(role, content, in_loss), calls
    content, thought = with_reasoning(reasoning, content)
    return Message(role, content, in_loss, thought), calls


def _in_loss(turn: Row) -> bool:
    """Whether an answer is learnt or is context only, by `weight` as in OpenAI's fine-tuning files."""
    weight = turn.get("weight")
    if weight is None:
        return True
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise Malformed(f"the 'weight' of a turn is {str(weight)[:40]}; write 1 (it is learnt) or 0 (it is not)")
    return bool(weight)


def _content(turn: Row, key: str, role: str, *, is_optional: bool) -> str:
    """The text under `key`, joined if it is a list of parts; `is_optional`: null counts as empty."""
    content = turn.get(key)
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed(
            f"the '{key}' of a turn of role '{role}' is {kind_of(content) if key in turn else 'missing'}, not text"
        )
    return "".join(_part_text(content_part) for content_part in content)


def _part_text(content_part: object) -> str:
    if isinstance(content_part, dict) and content_part.get("type") == "text" and isinstance(content_part.get("text"), str):
        return str(content_part["text"])
    kind = content_part.get("type") if isinstance(content_part, dict) else kind_of(content_part)
    raise Malformed(
        f"a content part is not an object with a text (its type: {str(kind)[:40]}); only text is read: write {A_PART}"
    )
