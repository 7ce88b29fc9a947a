"""The commands within a chat: lines that begin with one of these words. Any other line is a question."""

from __future__ import annotations

import re
from pathlib import Path

from ttrain.errors import UsageError
from ttrain.inference.chat import Chat, save

HELP = {
    "/help": "these lines",
    "/reset": "forget the conversation; the system prompt stays",
    "/again": "answer the last question anew",
    "/system [TEXT]": "another system prompt, or none, and forget the conversation",
    "/set [NAME=VALUE]": "another setting, such as temperature=0.5; without one, show them all",
    "/adapter [NAME]": "another of the adapters that --adapter named answers; without a name, list them",
    "/save FILE": "append the conversation to a JSONL file that data.sft can read",
    "/exit": "end (Ctrl-D does too; Ctrl-C stops an answer)",
}
WORDS = frozenset(line.split()[0] for line in HELP) | {"/quit"}


class Exit(Exception):
    """The user wants to end the chat."""


class Ask(Exception):
    """A command that comes down to a question."""

    def __init__(self, question: str) -> None:
        super().__init__(question)
        self.question = question


def is_known(line: str) -> bool:
    """Whether the line begins with one of the words; with a space before it, it is a question."""
    return line.partition(" ")[0] in WORDS


def looks_like_one(line: str) -> bool:
    """Whether a person may have meant one: /word, but not a path."""
    return re.fullmatch(r"/[a-z]+", line.partition(" ")[0]) is not None


def run(line: str, chats: list[Chat]) -> str:
    """Do what the command says, in each of the chats; returns what to tell. Raises UsageError, Exit, or Ask."""
    word, _, rest = line.rstrip().partition(" ")
    rest = rest.strip()
    if word not in WORDS:
        raise UsageError(f"there is no command {word}; /help lists them, and a space before it makes it a question")
    if word in ("/exit", "/quit"):
        raise Exit
    if word == "/help":
        width = max(map(len, HELP))
        return "\n".join(f"{name:{width}}  {what}" for name, what in HELP.items())
    if word == "/reset":
        for chat in chats:
            chat.reset()
        return "the conversation is forgotten"
    if word == "/again":
        questions = [chat.last_question() for chat in chats]
        raise Ask(questions[0])
    if word == "/system":
        for chat in chats:
            chat.reset()
            chat.system = rest
        return "the conversation is forgotten; " + ("the system prompt is another" if rest else "there is no system prompt")
    if word == "/set":
        return _set(rest, chats)
    if word == "/adapter":
        return _adapter(rest, chats)
    if not rest:
        raise UsageError("/save needs the name of a file")
    written = save(Path(rest).expanduser(), chats)
    return f"{written} conversation{'s' * (written != 1)} appended to {rest}" if written else "there is nothing to save yet"


def _set(rest: str, chats: list[Chat]) -> str:
    name, equals, value = rest.partition("=")
    if rest and not equals:
        raise UsageError("/set takes NAME=VALUE, for example /set temperature=0.5")
    if rest:
        changed = chats[0].sampling.changed(name.strip(), value.strip())
        for chat in chats:
            chat.sampling = changed
    return str(chats[0].sampling)


def _adapter(name: str, chats: list[Chat]) -> str:
    from ttrain.inference.model_choice import ByAdapter

    choices = [chat.choose for chat in chats if isinstance(chat.choose, ByAdapter)]
    if not choices:
        raise UsageError("this chat has no adapters to switch between; name them: ttrain chat A --adapter B")
    if name:
        choices[0].switch(name)
    return "\n".join(f"{'*' if known == choices[0].active else ' '} {known}" for known in choices[0].names)
