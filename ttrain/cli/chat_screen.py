"""Where a chat is read and shown: a terminal, or lines through a pipe."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ttrain.cli import chat_commands
from ttrain.core.terminal import console, encodable, escaped, harmless, print_json
from ttrain.errors import TTrainError
from ttrain.inference.chat import Chat, Reply

if TYPE_CHECKING:
    from rich.console import RenderableType

PROMPT = "> "


class Screen(ABC):
    """Asks for lines and shows answers; `names` are those of the models that answer each question."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """What the user enters, until there is no more."""

    @abstractmethod
    def answer(self, chats: Sequence[Chat], question: str) -> None:
        """Let each chat answer, and show it."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Tell what is not an answer."""

    def is_command(self, line: str) -> bool:
        """Whether the line is one; only known words are, so that a script's paths are questions."""
        return chat_commands.is_known(line)

    def failed(self, error: TTrainError) -> None:
        """Show what was wrong with a line; a chat goes on."""
        self.say(f"error: {error}")


def run(screen: Screen, chats: list[Chat]) -> None:
    """Until the user ends it."""
    for line in screen.lines():
        if not line.strip():
            continue
        try:
            if screen.is_command(line):
                try:
                    screen.say(chat_commands.run(line, chats))
                    continue
                except chat_commands.Ask as again:
                    line = again.question
            screen.answer(chats, line)
        except chat_commands.Exit:
            return
        except TTrainError as error:
            screen.failed(error)


class Pipe(Screen):
    """One line in, one answer out: text, or a line of JSON a question. A line that cannot be answered ends it."""

    def __init__(self, names: Sequence[str], *, as_json: bool, identities: Sequence[Mapping[str, Any]] = ()) -> None:
        """`identities`: what JSON says of each model beside its answers; none of a gate's, which picks them later."""
        super().__init__(names)
        self._as_json, self._identities = as_json, identities or [{}] * len(names)

    def lines(self) -> Iterator[str]:
        for line in sys.stdin.buffer:
            yield line.decode("utf-8", "replace").rstrip("\r\n")

    def answer(self, chats: Sequence[Chat], question: str) -> None:
        replies = [chat.ask(question) for chat in chats]
        if any(reply.stop == "interrupted" for reply in replies):
            raise KeyboardInterrupt
        if self._as_json:
            found: list[dict[str, Any]] = [
                {**identity, **reply.to_json()} for identity, reply in zip(self._identities, replies, strict=True)
            ]
            print_json({"question": question, **(found[0] if len(found) == 1 else {"answers": found})}, indent=None)
            return
        for name, reply in zip(self.names, replies, strict=True):
            print(harmless(reply.text if len(replies) == 1 else f"{name}: {reply.text}"), flush=True)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def failed(self, error: TTrainError) -> None:
        raise error


class Terminal(Screen):
    """Streams; two models side by side, each in its column."""

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
        reply = chats[0].ask(question, lambda piece: print(harmless(piece), end="", flush=True))
        print()
        self._dim(_about(reply) + "\n")

    def say(self, text: str) -> None:
        self._dim(text)

    def is_command(self, line: str) -> bool:
        return chat_commands.is_known(line) or chat_commands.looks_like_one(line)  # a slip is told, and not answered

    def _side_by_side(self, chats: Sequence[Chat], question: str) -> None:
        """One after the other, so that each has the machine to itself and its seconds can be compared."""
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
        drawn.add_row(*(Text(harmless(text)) for text in texts))
        drawn.add_row(*(Text(_about(reply) if reply else "", style="dim") for reply in replies))
        return drawn

    def _dim(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(harmless(text), style="dim"), soft_wrap=True)


def _about(reply: Reply) -> str:
    """How an answer came about, in a line."""
    speed = f", {reply.tokens / reply.seconds:.0f} a second" if reply.seconds and reply.tokens else ""
    parts = [f"{reply.tokens} token{'s' * (reply.tokens != 1)}{speed}"]
    if "probabilities" in reply.choice:
        share = max(reply.choice["probabilities"])
        parts.insert(0, f"{reply.by} ({share:.0%})")
    if reply.drafts:
        parts.append(str(reply.drafts))
    if reply.stop != "end":
        parts.append({"length": "cut at the longest answer", "interrupted": "stopped"}[reply.stop])
    if reply.forgotten:
        parts.append(f"the first {reply.forgotten} messages no longer fit")
    return "; ".join(parts)
