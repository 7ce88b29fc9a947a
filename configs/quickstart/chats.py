"""Questions about functions, classes and modules, answered from signatures and docstrings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from reading import DocumentedItem, order, pick

ANSWER_CHARACTERS = 600
SYSTEMS = (
    "You answer questions about the Python standard library.",
    "You are a helpful assistant who knows Python well. Answer briefly.",
    "Answer from the documentation, in as few words as you can.",
    "You are a reference for Python programmers.",
)


class QuestionAnswer(NamedTuple):
    """One question with its answer; `follow_up` asks the same if the object was named before."""

    question: str
    follow_up: str
    answer: str


def chats_about(items: list[DocumentedItem]) -> Iterator[dict[str, Any]]:
    """Every form of question about every public item, in the order of their hashes."""
    public = [item for item in items if item.public]
    homes = Counter(item.qualname for item in public if item.kind in ("function", "class"))
    unique = {name for name, count in homes.items() if count == 1}
    candidates = [
        (order(f"{item.name}#{form}"), item, form) for item in public for form in range(len(FORMS))
    ]
    for _, item, form in sorted(candidates, key=lambda candidate: candidate[0]):
        turn = FORMS[form](item, unique)
        if turn and len(turn.answer) <= ANSWER_CHARACTERS:
            yield {
                "group": item.group,
                "messages": messages_of(item, form, turn, unique),
                "source": f"docstring:{item.module}",
            }


def messages_of(
    item: DocumentedItem, form: int, turn: QuestionAnswer, unique: set[str]
) -> list[dict[str, str]]:
    """Three in ten rows start with a system turn, one in five asks a second question about the same object."""
    key = f"{item.name}#{form}"
    messages = [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]
    if pick(key + " system", 10) < 3:
        messages.insert(0, {"role": "system", "content": SYSTEMS[pick(key, len(SYSTEMS))]})
    if pick(key + " second", 5) == 0:
        turns = [FORMS[(form + step) % len(FORMS)](item, unique) for step in range(1, len(FORMS))]
        fits = [
            next_turn
            for next_turn in turns
            if next_turn
            and len(next_turn.answer) <= ANSWER_CHARACTERS
            and next_turn.answer != turn.answer
        ]
        if fits:
            next_turn = fits[pick(key + " which", len(fits))]
            messages += [
                {"role": "user", "content": next_turn.follow_up},
                {"role": "assistant", "content": next_turn.answer},
            ]
    return messages


def summary_of(doc: str) -> str:
    """The first paragraph on one line, cut after a sentence; empty if it only introduces the next one."""
    text = " ".join(doc.partition("\n\n")[0].split())
    if len(text) > ANSWER_CHARACTERS:
        text = text[:ANSWER_CHARACTERS].rpartition(". ")[0]
        text += "." if text else ""
    return "" if text.endswith((":", "::")) or len(text.split()) < 3 else text


def parameters_of(item: DocumentedItem) -> list[tuple[str, str]] | None:
    """Names with their defaults as source text, without `self` and `cls`; None where the signature is unknown."""
    try:
        function = ast.parse(f"def f{item.signature}: pass").body[0]
    except SyntaxError:
        return None
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    parameters = list(zip([arg.arg for arg in plain], defaults, strict=True))
    parameters += [(f"*{arguments.vararg.arg}", None)] if arguments.vararg else []
    parameters += zip([arg.arg for arg in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
    parameters += [(f"**{arguments.kwarg.arg}", None)] if arguments.kwarg else []
    first = 1 if parameters and parameters[0][0] in ("self", "cls") else 0
    return [(name, ast.unparse(default) if default else "") for name, default in parameters[first:]]


def join_names(names: Iterable[str]) -> str:
    """Join names as "`a`, `b` and `c`"."""
    *head, last = [f"`{word}`" for word in names]
    return f"{', '.join(head)} and {last}" if head else last


def ask_purpose(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    summary = summary_of(item.doc)
    forms = {
        "module": "What is the module `{}` for?",
        "class": "What is the class `{}`?",
        "attribute": "What is `{}`?",
    }
    question = forms.get(item.kind, "What does `{}` do?").format(item.name)
    return QuestionAnswer(question, "And what is it for?", summary) if summary else None


def ask_first_line(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    line = item.doc.partition("\n")[0]
    question = f"Give the first line of the documentation of `{item.name}`."
    return (
        QuestionAnswer(question, "Now give the first line of its documentation.", line)
        if len(line.split()) >= 3
        else None
    )


def ask_signature(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    if parameters_of(item) is None:
        return None
    return QuestionAnswer(
        f"Write the signature of `{item.name}`.",
        "Write its signature.",
        f"`{item.name}{item.signature}`",
    )


def ask_arguments(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    parameters = parameters_of(item)
    if parameters is None:
        return None
    answer = f"`{item.name}` takes {join_names(name for name, _ in parameters) if parameters else 'no arguments'}."
    return QuestionAnswer(
        f"What arguments does `{item.name}` take?", "What arguments does it take?", answer
    )


def ask_default(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    optional = [(name, default) for name, default in parameters_of(item) or [] if default]
    if not optional:
        return None
    name, default = optional[pick(item.name, len(optional))]
    answer = f"The default of `{name}` in `{item.name}` is `{default}`."
    return QuestionAnswer(
        f"What is the default of `{name}` in `{item.name}`?",
        f"And the default of `{name}`?",
        answer,
    )


def ask_optional(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    parameters = parameters_of(item)
    if not parameters:
        return None
    optional = [name for name, default in parameters if default]
    subject = join_names(optional) if optional else "no argument"
    answer = f"In `{item.name}`, {subject} {'have' if len(optional) > 1 else 'has'} a default."
    return QuestionAnswer(
        f"Which arguments of `{item.name}` have a default?",
        "Which of its arguments have a default?",
        answer,
    )


def ask_module(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    if item.qualname not in unique:
        return None
    answer = f"The {item.kind} `{item.qualname}` is in the module `{item.module}`."
    return QuestionAnswer(
        f"Which module has the {item.kind} `{item.qualname}`?", "Which module is it in?", answer
    )


def ask_kind(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    owner = item.qualname.rpartition(".")[0]
    if item.kind == "module":
        return None
    home = f"of the class `{owner}`" if owner else f"of the module `{item.module}`"
    article = "an" if item.kind == "attribute" else "a"
    answer = f"`{item.name}` is {article} {item.kind} {home}."
    return QuestionAnswer(
        f"Is `{item.name}` a class, a function, a method or an attribute?",
        "What kind of object is it?",
        answer,
    )


def ask_members(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    if not item.members:
        return None
    member_kind, short_kind = (
        ("methods", "public methods")
        if item.kind == "class"
        else ("functions and classes", "contents")
    )
    answer = f"`{item.name}` defines {join_names(item.members)}."
    return QuestionAnswer(
        f"Which public {member_kind} does `{item.name}` define?", f"List its {short_kind}.", answer
    )


def ask_bases(item: DocumentedItem, unique: set[str]) -> QuestionAnswer | None:
    if not item.bases:
        return None
    answer = f"`{item.name}` inherits from {join_names(item.bases)}."
    return QuestionAnswer(
        f"What does the class `{item.name}` inherit from?", "What does it inherit from?", answer
    )


FORMS: tuple[Callable[[DocumentedItem, set[str]], QuestionAnswer | None], ...] = (
    ask_purpose,
    ask_first_line,
    ask_signature,
    ask_arguments,
    ask_default,
    ask_optional,
    ask_module,
    ask_kind,
    ask_members,
    ask_bases,
)
