"""Read chats in the formats of common data sets: messages, ShareGPT, alpaca, prompt and completion.

Every rejection reason says what is wrong with the value and what to write instead.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from ttrain.core.files import JsonDict
from ttrain.data import tools
from ttrain.data.chat_templates import END_OF_THINK, THINK, Message
from ttrain.data.jinja_templates import ROLES
from ttrain.data.tools import Malformed, kind_of, require

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
OWN_ROLES = {role: role for role in ROLES}
# The first key that is present decides the format of a row.
CHAT_KEYS = ("messages", "conversations", "instruction")
PROMPT_KEYS = ("prompt", "completion")
# After those: a row has one exchange under the first of these pairs that it has.
EXCHANGE_KEYS = (
    PROMPT_KEYS,
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("prompt", "output"),
    ("input", "output"),
)
CHAT_FIELDS = (
    "'messages' or 'conversations' with role and content, 'instruction' with 'output', "
    "'prompt' with 'completion' or 'response', 'question' with 'answer', or 'input' with 'output'"
)
# Keys that a question needs beside itself: its choices, and the text that it is about.
OF_QUESTION = re.compile(
    r"contexts?|passages?|[a-e]|(opt?|option|choice|ending|sol|distractor)s?[ _]?[a-e\d]?"
)
# Lists and objects beside a question that are no part of it, also as the last word of their key.
BESIDE_QUESTION = re.compile(
    r"history|tools|(.*_)?(meta(data)?|tags?|labels?|ids?|urls?|source|model|author|language"
    r"|category|domain|topic|task|type|score|rating)"
)
# Keys under which data sets have a part of an answer. Of them `reasoning_content` alone is read.
UNREAD_KEYS = (
    "thinking",
    "think",
    "thought",
    "thoughts",
    "reasoning",
    "rationale",
    "explanation",
    "cot",
    "chain_of_thought",
)
Row = Mapping[str, Any]
RawTurns = list[Any]  # as they are in the row
A_TURN = '{"role": "user", "content": "..."}'
NOT_PAIRS = (
    "'history' is not a list of pairs of texts; "
    'write a list of pairs ["question", "answer"], or leave it out'
)
# Neither white space nor of zero width (soft hyphen, joiners, direction marks, BOM).
VISIBLE = re.compile(r"[^\s\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")


def is_blank(text: str) -> bool:
    """Whether the text has no visible character."""
    return VISIBLE.search(text) is None


def is_chat(row: Row) -> bool:
    """Whether a row has the keys of a chat."""
    # A prompt alone does not count: data sets of documents have that key too, and some with a text
    # have the keys of a question and its answer.
    keys = _exchange_keys(row)
    if keys == PROMPT_KEYS or any(row.get(key) is not None for key in CHAT_KEYS):
        return True
    return keys is not None and row.get("text") is None and not _key_of_question(row, keys)


def _exchange_keys(row: Row) -> tuple[str, str] | None:
    present = {key for key, value in row.items() if value is not None}
    return next((keys for keys in EXCHANGE_KEYS if present.issuperset(keys)), None)


def _key_of_question(row: Row, keys: tuple[str, str]) -> str | None:
    for key, value in row.items():
        if isinstance(value, list | dict):
            if value and key not in keys and not BESIDE_QUESTION.fullmatch(key.lower()):
                return key
        elif isinstance(value, str) and OF_QUESTION.fullmatch(key.lower()) and not is_blank(value):
            return key
    return None


def unread_keys(row: Row) -> set[str]:
    """The UNREAD_KEYS of a row and its turns that have a text: part of an answer may be there."""
    values = chain.from_iterable(v if isinstance(v, list) else [v] for v in row.values())
    holders = [row, *(value for value in values if isinstance(value, dict))]
    texts = ((key, holder.get(key)) for holder in holders for key in UNREAD_KEYS)
    return {key for key, text in texts if isinstance(text, str) and not is_blank(text)}


def messages_of(row: Row) -> list[Message]:
    """The turns of a chat in a known format. Raises Malformed with the reason."""
    key = next((key for key in CHAT_KEYS if row.get(key) is not None), None)
    if key is None:
        messages = _exchange(row)
    elif key == "instruction":
        output = visible_text(row, "output", key)
        messages = [*alpaca_question(row), Message("assistant", output)]
    else:
        messages = turns_of(row[key], key)
    return with_system_and_tools(messages, row)


def with_system_and_tools(messages: list[Message], row: Row) -> list[Message]:
    """The turns, with the row's `system` and `tools` in a system turn."""
    system = _optional_text(row, "system")
    functions = tools.tools_text(row.get("tools"))
    systems = [message.content for message in messages if message.role == "system"]
    if not is_blank(system):
        require(not systems, "both the key 'system' and a system turn; keep one of them")
        messages = [Message("system", system), *messages]
    if not functions:
        return messages
    require(
        not any(tools.TOOLS_SENTENCE in text for text in systems),
        "'tools' both beside the turns and on the system turn; keep one of them",
    )
    if not messages or messages[0].role != "system":
        messages = [Message("system", ""), *messages]
    return [Message("system", tools.with_tools(messages[0].content, functions)), *messages[1:]]


def alpaca_question(row: Row) -> list[Message]:
    """The turns up to the answer."""
    texts = [visible_text(row, "instruction", "instruction"), _optional_text(row, "input")]
    question = "\n\n".join(text for text in texts if not is_blank(text))
    return [*_history(row), Message("user", question)]


def _history(row: Row) -> list[Message]:
    pairs = row.get("history") or []
    if isinstance(pairs, str) and is_blank(pairs):  # exports of CSV have an empty text for none
        return []
    require(isinstance(pairs, list), NOT_PAIRS)
    messages: list[Message] = []
    for pair in pairs:
        require(isinstance(pair, list) and [*map(type, pair)] == [str, str], NOT_PAIRS)
        messages += map(Message, ("user", "assistant"), pair)
    return messages


def _optional_text(row: Row, key: str) -> str:
    text = row.get(key)
    require(text is None or isinstance(text, str), f"'{key}' is {kind_of(text)}, not text")
    return text or ""


def visible_text(row: Row, key: str, other_key: str) -> str:
    """The text under a key; `other_key` is the key that requires it."""
    require(key in row, f"no key '{key}' beside '{other_key}'")
    text = _optional_text(row, key)
    require(not is_blank(text), f"'{key}' is empty; write a text, or leave the row out")
    return text


def _exchange(row: Row) -> list[Message]:
    halves = (keys for keys in EXCHANGE_KEYS[:2] if row.get(keys[0]) is not None)
    keys = _exchange_keys(row) or next(halves, None)
    if keys is None:
        names = ", ".join(map(repr, (*CHAT_KEYS, "prompt", "question", "input")))
        raise Malformed(f"none of the keys {names} holds a conversation")
    asked, answered = keys
    history: list[Message] = []
    if keys != PROMPT_KEYS:
        other = _key_of_question(row, keys)
        require(
            not other,
            f"'{other}' beside '{asked}' may be a part of the question; "
            "write it there, or leave it out",
        )
        history = _history(row)
    prompt, completion = prompt_and_answer(
        turns_under(row, asked, answered, "user"),
        turns_under(row, answered, asked, "assistant"),
        answered,
    )
    return [*history, *map(not_learnt, prompt), *completion]


def turns_under(row: Row, key: str, other_key: str, role: str) -> RawTurns:
    """The raw turns under a key; a text is one turn of the role."""
    return (
        [{"role": role, "content": visible_text(row, key, other_key)}]
        if isinstance(row.get(key, ""), str)
        else list_of_turns(row[key], key, "text or ")
    )


def list_of_turns(value: Any, key: str, others: str = "") -> RawTurns:
    """The value under a key, a list of turns. `others`: what else the rule allows."""
    require(
        isinstance(value, list),
        f"'{key}' is {kind_of(value)}, not {others}a list of turns such as {A_TURN}",
    )
    require(value, f"'{key}' has no turns; write turns such as {A_TURN}")
    return list(value)


def prompt_and_answer(
    prompt: RawTurns, answer: RawTurns, key: str
) -> tuple[list[Message], list[Message]]:
    """(turns of the prompt, turns of the answer without the prompt).

    An answer may be a conversation that begins with the prompt or its end. Raises Malformed for any
    other conversation.
    """
    asked, answered = ([*map(wording, turns)] for turns in (prompt, answer))
    for end in range(len(answered), 0, -1):
        known = min(end, len(asked))
        if answered[end - known : end] == asked[-known:]:
            prompt = answer[:end] if known == len(asked) else prompt
            answer = answer[end:]
            break
    else:
        roles = [role for role, _ in answered]
        begins_anew = roles[0] == "system" or roles[0] == asked[-1][0] == "user"
        require(
            "assistant" not in roles or not begins_anew,
            f"'{key}' is a conversation without the turns of the prompt; "
            "begin it with them, or write its answer alone",
        )
    messages = turns_of([*prompt, *answer], key)
    return messages[: len(prompt)], messages[len(prompt) :]


def wording(turn: object) -> tuple[str, str]:
    """(role, words) of a turn; empty for a malformed one, which is rejected later."""
    try:
        message, _ = _turn(turn)
    except Malformed:
        return "", ""
    return message.role, " ".join(message.content.split())


def not_learnt(message: Message) -> Message:
    """The turn as context."""
    return replace(message, in_loss=False) if message.role == "assistant" else message


def turns_of(turns: object, key: str) -> list[Message]:
    """The turns under a key."""
    messages: list[Message] = []
    call_ids: set[str] = set()
    has_calls = False
    for turn in list_of_turns(turns, key):
        message, calls = _turn(turn)
        if message.role == "tool":
            require(
                has_calls,
                "a tool turn without a call before it; put the assistant's 'tool_calls' before it",
            )
            number = turn.get("tool_call_id")
            require(
                number is None or str(number) in call_ids,
                f"tool_call_id {str(number)[:40]!r}, which no call before it has; "
                "write the id of its call, or none",
            )
        has_calls |= message.role == "assistant" and tools.CALL_BEGIN in message.content
        call_ids.update(str(call.get("id")) for call in calls)
        messages.append(message)
    return messages


def _turn(turn: Any) -> tuple[Message, list[JsonDict]]:
    require(isinstance(turn, dict), f"a turn is {kind_of(turn)}, not an object such as {A_TURN}")
    is_sharegpt = turn.get("role") is None and "from" in turn
    name = turn["from"] if is_sharegpt else turn.get("role")
    key = "value" if is_sharegpt else "content"
    roles = SHAREGPT_ROLES if is_sharegpt else OWN_ROLES
    names = ", ".join(roles)
    require(
        is_sharegpt or "role" in turn,
        f"a turn without a role; write 'role' as one of {names}",
    )
    require(str(name) in roles, f"unknown role {str(name)[:40]!r}; write one of {names}")
    role = roles[str(name)]
    is_call = name == "function_call"
    calls = tools.calls_of(turn.get(key), name) if is_call else tools.calls_of_turn(turn, role)
    content = "" if is_call else _content(turn, key, role, is_optional=bool(calls))
    functions = tools.tools_text(turn.get("tools"))
    require(
        not functions or role == "system",
        f"'tools' on a turn of role '{role}'; write it beside the turns, or on the system turn",
    )
    content = tools.with_tools(tools.with_calls(content, calls), functions)
    if role != "assistant":
        return Message(role, content), calls
    reasoning = _optional_text(turn, "reasoning_content").strip()
    thought = f"{THINK}{reasoning}{END_OF_THINK}" if reasoning else ""
    weight = turn.get("weight")
    require(
        weight is None or (isinstance(weight, int | float) and weight in (0, 1)),
        f"the 'weight' of a turn is {str(weight)[:40]}; write 1 (it is learnt) or 0 (it is not)",
    )
    return Message(role, thought + content, weight != 0, len(thought)), calls


def _content(turn: Row, key: str, role: str, *, is_optional: bool) -> str:
    content: Any = turn.get(key)
    if isinstance(content, str) or (content is None and is_optional):
        return content or ""
    actual = kind_of(content) if key in turn else "missing"
    require(
        isinstance(content, list), f"the '{key}' of a turn of role '{role}' is {actual}, not text"
    )
    parts = [part if isinstance(part, dict) else {"type": kind_of(part)} for part in content]
    for part in parts:
        require(
            part.get("type") == "text" and isinstance(part.get("text"), str),
            "a content part is not an object with a text "
            f"(its type: {str(part.get('type'))[:40]}); "
            'only text is read: write {"type": "text", "text": "..."}',
        )
    return "".join(part["text"] for part in parts)
