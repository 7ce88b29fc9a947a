"""Input and output of a chat: a terminal, or lines through a pipe."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.terminal import console, encodable, escape_control_characters, escaped, print_json
from ttrain.core.text import counted
from ttrain.data.records import NOT_UTF8
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.inference.chat import Chat, Reply, save

if TYPE_CHECKING:
    from rich.console import RenderableType


PROMPT = "> "


class ChatScreen(ABC):
    """Reads the user's lines and shows answers; `names` are those of the models that answer each question."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the lines that the user enters, until the input ends."""

    @abstractmethod
    def answer(self, chats: Sequence[Chat], question: str) -> None:
        """Let each chat answer the question, and show the answers."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a message that is not an answer."""

    def is_command(self, line: str) -> bool:
        """Whether the line is a command; only known commands count, so that paths in a script's input are questions."""
        return is_command(line)

    def failed(self, error: TTrainError) -> None:
        """Show the error of a line; the chat continues."""
        self.say(f"error: {error}")


def run(screen: ChatScreen, chats: list[Chat]) -> None:
    """Run the chat until the user ends it."""
    for line in screen.lines():
        if not line.strip():
            continue
        try:
            if screen.is_command(line):
                try:
                    screen.say(run_command(line, chats))
                    continue
                except Ask as command:
                    line = command.question
            screen.answer(chats, line)
        except Exit:
            return
        except TTrainError as error:
            screen.failed(error)


class Pipe(ChatScreen):
    """Prints one answer per input line, as text or as a line of JSON. A line that cannot be answered ends the chat."""

    def __init__(self, names: Sequence[str], *, as_json: bool, identities: Mapping[str, JsonObject]) -> None:
        """`identities`: JSON fields about models and adapters by their names, added to their answers; a gate's experts are
        not known yet."""
        super().__init__(names)
        self._as_json, self._identities = as_json, identities

    def lines(self) -> Iterator[str]:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                raise DataError(f"line {number} of standard input is {NOT_UTF8}") from None
            yield text.removeprefix("\ufeff").rstrip("\r\n")

    def answer(self, chats: Sequence[Chat], question: str) -> None:
        replies = [chat.ask(question) for chat in chats]
        if any(reply.stop == "interrupted" for reply in replies):
            raise KeyboardInterrupt
        if self._as_json:
            answers: list[JsonDict] = [{**self._identities.get(reply.by, {}), **reply.to_json()} for reply in replies]
            print_json({"question": question, **(answers[0] if len(answers) == 1 else {"answers": answers})}, indent=None)
            return
        for reply in replies:
            text = reply.text if len(replies) == 1 else f"{reply.by}: {reply.text}"
            print(escape_control_characters(text), flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def failed(self, error: TTrainError) -> None:
        raise error


class Terminal(ChatScreen):
    """Streams answers; two models answer side by side, each in its column."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._console = console()

    def lines(self) -> Iterator[str]:
        try:
            import readline  # gives input() editing and a history

            readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted are one question
            for setting in ("convert-meta off", "input-meta on", "output-meta on"):  # where no locale is set, as in a
                readline.parse_and_bind(f"set {setting}")  # container, the bytes of 你好 are keys that list files
        except ImportError:
            pass  # as on Windows
        while True:
            try:
                yield encodable(input(PROMPT))
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit ends the chat")
            except UnicodeDecodeError as error:
                print(f"error: that is not UTF-8: {error.reason}")

    def answer(self, chats: Sequence[Chat], question: str) -> None:
        if len(chats) > 1:
            self._side_by_side(chats, question)
            return
        reply = chats[0].ask(question, lambda piece: print(escape_control_characters(piece), end="", flush=True))
        print()
        self._dim(_reply_summary(reply) + "\n")

    def say(self, text: str) -> None:
        self._dim(text)

    def is_command(self, line: str) -> bool:
        # A mistyped command is an error, not a question.
        return is_command(line) or looks_like_command(line)

    def _side_by_side(self, chats: Sequence[Chat], question: str) -> None:
        """Answer one chat after the other, so that each has the machine to itself and their times can be compared."""
        from rich.live import Live

        texts = [""] * len(chats)
        replies: list[Reply | None] = [None] * len(chats)
        with Live(console=self._console, refresh_per_second=8) as live:
            for column, chat in enumerate(chats):

                def show(piece: str, column: int = column) -> None:
                    texts[column] += piece
                    live.update(self._columns(texts, replies))

                replies[column] = chat.ask(question, show)
                live.update(self._columns(texts, replies))
        print()

    def _columns(self, texts: Sequence[str], replies: Sequence[Reply | None]) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=None, expand=True, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for name in self.names:
            drawn.add_column(Text(escaped(name)), ratio=1, overflow="fold")
        drawn.add_row(*(Text(escape_control_characters(text)) for text in texts))
        drawn.add_row(*(Text(_reply_summary(reply) if reply else "", style="dim") for reply in replies))
        return drawn

    def _dim(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(escape_control_characters(text), style="dim"), soft_wrap=True)


def _reply_summary(reply: Reply) -> str:
    """One line about an answer: tokens, speed, adapter, and why it stopped."""
    speed = f", {reply.tokens / reply.seconds:.0f} a second" if reply.seconds and reply.tokens else ""
    parts = [f"{counted(reply.tokens, 'token')}{speed}"]
    if "probabilities" in reply.choice:
        share = max(reply.choice["probabilities"])
        parts.insert(0, f"{reply.by} ({share:.0%})")
    if reply.stop != "end":
        parts.append({"length": "cut at the longest answer", "interrupted": "stopped"}[reply.stop])
    if reply.forgotten:
        parts.append(f"the first {reply.forgotten} messages no longer fit")
    return "; ".join(parts)


HELP = {
    "/help": "list the commands",
    "/reset": "forget the conversation; the system prompt stays",
    "/again": "answer the last question again",
    "/system [TEXT]": "set or remove the system prompt, and forget the conversation",
    "/set [NAME=VALUE]": "change a setting, such as temperature=0.5; without one, show them all",
    "/adapter [NAME]": "switch to another adapter named by --adapter; without a name, list them",
    "/save FILE": "append the conversation to a JSONL file that data.sft can read",
    "/exit": "end (Ctrl-D does too; Ctrl-C stops an answer)",
}

COMMANDS = frozenset(line.split()[0] for line in HELP) | {"/quit"}


class Exit(Exception):
    """The user wants to end the chat."""


class Ask(Exception):
    """A command that asks the chats a question, such as /again."""

    def __init__(self, question: str) -> None:
        super().__init__(question)
        self.question = question


def is_command(line: str) -> bool:
    """Whether the line begins with a command; a line that begins with a space is a question."""
    return line.partition(" ")[0] in COMMANDS


def looks_like_command(line: str) -> bool:
    """Whether the line may be a mistyped command: /word, but not a path."""
    return re.fullmatch(r"/[a-z]+", line.partition(" ")[0]) is not None


def run_command(line: str, chats: list[Chat]) -> str:
    """Run the command in each of the chats; returns the message to show. Raises UsageError, Exit, or Ask."""
    word, _, argument = line.rstrip().partition(" ")
    argument = argument.strip()
    if word not in COMMANDS:
        raise UsageError(f"there is no command {word}; /help lists them, and a space before it makes it a question")
    if word in ("/exit", "/quit"):
        raise Exit
    if word == "/help":
        width = max(map(len, HELP))
        return "\n".join(f"{name:{width}}  {description}" for name, description in HELP.items())
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
            chat.system = argument
        return "the conversation is forgotten; " + (
            "the system prompt is changed" if argument else "there is no system prompt"
        )
    if word == "/set":
        return _set(argument, chats)
    if word == "/adapter":
        return _adapter(argument, chats)
    if not argument:
        raise UsageError("/save needs the name of a file")
    written = save(user_path(argument), chats)
    return f"{counted(written, 'conversation')} appended to {argument}" if written else "there is nothing to save yet"


def _set(assignment: str, chats: list[Chat]) -> str:
    name, equals, value = assignment.partition("=")
    if assignment and not equals:
        raise UsageError("/set takes NAME=VALUE, for example /set temperature=0.5")
    if assignment:
        changed = chats[0].sampling.changed(name.strip(), value.strip())
        for chat in chats:
            chat.sampling = changed
    return str(chats[0].sampling)


def _adapter(name: str, chats: list[Chat]) -> str:
    from ttrain.inference.gate_router import AdapterSelector

    choices = [chat.choose for chat in chats if isinstance(chat.choose, AdapterSelector)]
    if not choices:
        raise UsageError("this chat has no adapters to switch between; name them: ttrain chat A --adapter B")
    if name:
        choices[0].switch(name)
    return "\n".join(
        f"{'*' if adapter_name == choices[0].active else ' '} {adapter_name}" for adapter_name in choices[0].names
    )
