"""One conversation with a model: its history, its answers, and what no longer fits into its context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import DataError, UsageError
from ttrain.inference import generate
from ttrain.inference.generate import Text
from ttrain.inference.kv_cache import Kept
from ttrain.inference.loading import Speaker
from ttrain.inference.sampling import Sampling
from ttrain.inference.speculative import Drafts

ANSWER_SHARE = 4  # one part in so many of the context stays free for the answer, if it may be that long
OnText = Callable[[str], object]


class Choice(Protocol):
    """Says who answers a question, and anything worth knowing about it."""

    def __call__(self, question: str) -> tuple[Speaker, dict[str, Any]]: ...


@dataclass(frozen=True)
class Reply:
    """An answer and how it came about. `stop`: "end" of turn, "length" of max_tokens or context, or "interrupted"."""

    text: str
    by: str  # the model's name
    tokens: int
    stop: str
    seconds: float
    forgotten: int  # messages that no longer fitted into the context
    drafts: Drafts | None
    choice: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "answer": self.text, "model": self.by, "tokens": self.tokens, "stop": self.stop,
            "seconds": round(self.seconds, 3), "forgotten": self.forgotten,
        }  # fmt: skip
        return {**found, **({"speculative": self.drafts.to_json()} if self.drafts else {}), **self.choice}


class Chat:
    """A conversation. `choose` says who answers: always the same model, or the one that a gate picks."""

    def __init__(self, choose: Choice, sampling: Sampling, *, system: str = "", draft: bool = False) -> None:
        self.sampling, self.system = sampling, system
        self.choose, self._draft = choose, draft
        self._turns: list[Message] = []
        self._kept: dict[Speaker, Kept] = {}
        self._asked = 0  # over the whole chat, so that the same question twice may have two answers

    @property
    def messages(self) -> list[Message]:
        """All turns, with the system prompt."""
        return [*([Message("system", self.system)] if self.system else []), *self._turns]

    def reset(self) -> None:
        """Forget all turns; the system prompt and the settings stay, and random numbers begin anew."""
        self._turns.clear()
        self._asked = 0

    def last_question(self) -> str:
        """Take the last question back, with its answer. Raises UsageError where there is none."""
        if not self._turns:
            raise UsageError("there is no question yet")
        self._turns.pop()
        return self._turns.pop().content

    def ask(self, question: str, on_text: OnText | None = None) -> Reply:
        """The answer, which joins the history; `on_text` gets it in pieces.

        Ctrl-C ends the answer and keeps what was said. Raises DataError for a question that is longer than the context.
        """
        speaker, choice = self.choose(question)
        if not speaker.can_chat:
            raise UsageError(
                f"the tokenizer of '{speaker.name}' has no chat template; train it on chats with `ttrain train sft "
                f"sft.start_from={speaker.name}`, or let it continue text with `ttrain generate --raw`"
            )
        asked = Message("user", question)
        ids, forgotten = self._prompt(speaker, asked)
        text, pieces = Text(speaker.encoder), list[str]()
        heard: list[int] = []

        def show(piece: str) -> None:
            if piece:
                pieces.append(piece)
                if on_text:
                    on_text(piece)

        def hear(tokens: list[int]) -> None:
            heard.extend(tokens)
            show(text.add(tokens))

        said = None
        try:
            (said,) = generate.generate(
                speaker, [ids], self.sampling, numbers=[self._asked], on_tokens=hear, draft=self._draft,
                kept=self._kept.setdefault(speaker, Kept(speaker)),
            )  # fmt: skip
        except KeyboardInterrupt:
            pass
        if said is not None and said.ended:
            show(text.end())
        self._asked += 1
        self._turns += [asked, Message("assistant", "".join(pieces))]
        return Reply(
            text="".join(pieces),
            by=speaker.name,
            tokens=len(heard),
            stop="interrupted" if said is None else "end" if said.ended else "length",
            seconds=said.seconds if said else 0.0,
            forgotten=forgotten,
            drafts=said.drafts if said else None,
            choice=choice,
        )

    def _prompt(self, speaker: Speaker, asked: Message) -> tuple[list[int], int]:
        """(ids of what the model is given, how many of the oldest turns were left out of it)."""
        system = [Message("system", self.system)] if self.system else []
        longest = speaker.max_length
        reserved = min(self.sampling.max_tokens, longest // ANSWER_SHARE) if longest else 0
        for start in range(0, len(self._turns) + 1, 2):  # whole exchanges: a template may insist on questions and answers
            ids = prompt_ids(speaker.encoder, (*system, *self._turns[start:], asked))
            if longest is None or len(ids) + reserved <= longest:
                return ids, start
        if longest and len(ids) < longest:
            return ids, len(self._turns)
        raise DataError(
            f"the question has {len(ids)} tokens with what the template adds, but the model '{speaker.name}' takes "
            f"{longest} together with the answer; shorten it"
        )


def save(path: Path, chats: list[Chat]) -> int:
    """Append each conversation as a line that `data.sft` can read; returns how many were written. Raises UsageError."""
    lines = [
        json.dumps({"messages": [vars(message) for message in chat.messages]}, ensure_ascii=False) + "\n"
        for chat in chats
        if any(message.role == "assistant" for message in chat.messages)
    ]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    return len(lines)
