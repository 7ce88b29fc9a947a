"""The conversation of `ttrain chat`: streamed in a terminal, line by line in a pipe."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.terminal import console, encodable, escape_control_characters, print_json
from ttrain.core.text import counted
from ttrain.data.json_rows import NOT_UTF8
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.inference.chat import Chat, Reply, save

PROMPT = "> "
HELP = {
    "/help": "list the commands",
    "/reset": "forget the conversation; the system prompt stays",
    "/save FILE": "append the conversation to a JSONL file that data.sft can read",
    "/exit": "end (Ctrl-D does too; Ctrl-C stops an answer)",
}


def talk_in_terminal(chats: Sequence[Chat], names: Sequence[str], greeting: str) -> None:
    """Answer typed lines until the user exits; several models answer in turn."""
    say_dim(greeting)
    for line in typed_lines():
        try:
            if is_command(line):
                say_dim(run_command(line, chats))
                continue
            for chat, name in zip(chats, names, strict=True):
                if len(chats) > 1:
                    say_dim(f"{name}:")
                reply = chat.ask(
                    line, lambda piece: print(escape_control_characters(piece), end="", flush=True)
                )
                print()
                say_dim(_reply_summary(reply) + "\n")
        except EOFError:
            return
        except TTrainError as error:
            say_dim(f"error: {error}")


def talk_in_pipe(
    chats: Sequence[Chat], identities: Mapping[str, JsonObject], *, as_json: bool
) -> None:
    """Print an answer for each line of standard input, as text or JSON; `/reset` starts over.

    `identities`: JSON fields about each model.
    """
    for line in piped_lines():
        if line.rstrip() == "/reset":
            print(run_command(line, chats), file=sys.stderr)
            continue
        replies = [chat.ask(line) for chat in chats]
        if any(reply.stop == "interrupted" for reply in replies):
            raise KeyboardInterrupt
        if as_json:
            answers: list[JsonDict] = [
                {**identities.get(reply.by, {}), **reply.to_json()} for reply in replies
            ]
            print_json(
                {"question": line, **(answers[0] if len(answers) == 1 else {"answers": answers})},
                indent=None,
            )
            continue
        for reply in replies:
            text = reply.text if len(replies) == 1 else f"{reply.by}: {reply.text}"
            print(escape_control_characters(text), flush=True)


def typed_lines() -> Iterator[str]:
    import readline  # gives input() editing and a history

    # Lines that are pasted are one question. Where no locale is set, as in a container, the bytes
    # of 你好 would be keys that list files.
    for setting in (
        "enable-bracketed-paste on",
        "convert-meta off",
        "input-meta on",
        "output-meta on",
    ):
        readline.parse_and_bind(f"set {setting}")
    while True:
        try:
            line = encodable(input(PROMPT))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /exit ends the chat")
            continue
        if line.strip():
            yield line


def piped_lines() -> Iterator[str]:
    """The lines of standard input that are not empty. Raises DataError where it is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
        except UnicodeDecodeError:
            raise DataError(f"line {number} of standard input is {NOT_UTF8}") from None
        if text.strip():
            yield text


def say_dim(text: str) -> None:
    from rich.text import Text

    console().print(Text(escape_control_characters(text), style="dim"), soft_wrap=True)


def _reply_summary(reply: Reply) -> str:
    speed = (
        f", {reply.tokens / reply.seconds:.0f} a second" if reply.seconds and reply.tokens else ""
    )
    parts = [f"{counted(reply.tokens, 'token')}{speed}"]
    if "probabilities" in reply.choice:
        parts.insert(0, f"{reply.by} ({max(reply.choice['probabilities']):.0%})")
    if reply.stop != "end":
        parts.append({"length": "cut at the longest answer", "interrupted": "stopped"}[reply.stop])
    if reply.forgotten:
        parts.append(f"the first {reply.forgotten} messages no longer fit")
    return "; ".join(parts)


def is_command(line: str) -> bool:
    """Whether the line is a command, maybe mistyped: /word, but not a path."""
    return re.fullmatch(r"/[a-z]+", line.partition(" ")[0]) is not None


def run_command(line: str, chats: Sequence[Chat]) -> str:
    """Run a command in each chat; return the message. Raises UsageError, EOFError for /exit."""
    word, _, file = line.rstrip().partition(" ")
    match word:
        case "/exit":
            raise EOFError
        case "/help":
            return "\n".join(f"{name:12}{description}" for name, description in HELP.items())
        case "/reset":
            for chat in chats:
                chat.reset()
            return "the conversation is forgotten"
        case "/save" if file:
            written = save(user_path(file.strip()), chats)
            return (
                f"{counted(written, 'conversation')} appended to {file}"
                if written
                else "there is nothing to save yet"
            )
        case "/save":
            raise UsageError("/save needs the name of a file")
    raise UsageError(
        f"there is no command {word}; /help lists them, and a space before it makes it a question"
    )
