"""A conversation with a model: history, answers, and truncation to the context length."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ttrain.core.files import JsonDict
from ttrain.data.chat import lead_text, prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import DataError, UsageError
from ttrain.inference import generate
from ttrain.inference.generate import KVCache, TextStream
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

ANSWER_SHARE = 4  # 1/4 of the context stays free for the answer, if it may be that long
Selected = tuple[
    LoadedModel, JsonDict
]  # the model that answers a question, and details for the reply
ModelSelector = Callable[[str], Selected]


@dataclass(frozen=True)
class Reply:
    """An answer. `stop`: "end" of turn, "length" of max_tokens or context, or "interrupted"."""

    text: str
    by: str  # the model's name
    tokens: int
    stop: str
    seconds: float
    forgotten: int  # messages that no longer fitted into the context
    choice: JsonDict

    def to_json(self) -> JsonDict:
        return {
            "answer": self.text,
            "model": self.by,
            "tokens": self.tokens,
            "stop": self.stop,
            "seconds": round(self.seconds, 3),
            "forgotten": self.forgotten,
            **self.choice,
        }


@dataclass(eq=False)
class Chat:
    """A conversation. `choose` selects the model for a question."""

    choose: ModelSelector
    sampling: Sampling
    system: str = ""
    _turns: list[Message] = field(default_factory=list)
    _kv_caches: dict[LoadedModel, KVCache] = field(default_factory=dict)
    _question_count: int = (
        0  # over the whole chat, so that repeating a question can give another answer
    )

    @property
    def messages(self) -> list[Message]:
        """All turns, with the system prompt."""
        return [*([Message("system", self.system)] if self.system else []), *self._turns]

    def reset(self) -> None:
        """Forget all turns and begin the random numbers again."""
        self._turns.clear()
        self._question_count = 0

    def ask(self, question: str, on_text: Callable[[str], object] = lambda piece: None) -> Reply:
        """Answer a question and append both to the history; `on_text` gets pieces of the answer.

        Ctrl-C ends the answer and keeps the text so far. Raises DataError for a question that is
        longer than the context.
        """
        loaded_model, choice = self.choose(question)
        if not loaded_model.can_chat:
            raise UsageError(
                f"the tokenizer of '{loaded_model.name}' has no chat template; "
                "train it on chats with `ttrain stage run sft "
                f"sft.start_from={loaded_model.name}`, or let it continue text with `ttrain "
                "generate --raw`"
            )
        user_message = Message("user", question)
        ids, forgotten = self._prompt(loaded_model, user_message)
        stream = TextStream(loaded_model.encoder, lead_text(loaded_model.encoder))

        def show(answers: dict[int, list[int]]) -> None:
            for ids in answers.values():
                on_text(stream.add(ids))

        completion = None
        with contextlib.suppress(KeyboardInterrupt):
            (completion,) = generate.generate(
                loaded_model,
                [ids],
                self.sampling,
                numbers=[self._question_count],
                on_tokens=show,
                kv_cache=self._kv_caches.setdefault(loaded_model, KVCache(loaded_model)),
            )
        stop = "interrupted"
        if completion is not None:
            stop = "end" if completion.ended else "length"
        if stop == "end":
            on_text(stream.end())
        self._question_count += 1
        self._turns += [user_message, Message("assistant", stream.shown)]
        return Reply(
            text=stream.shown,
            by=loaded_model.name,
            tokens=len(stream.ids),
            stop=stop,
            seconds=completion.seconds if completion else 0.0,
            forgotten=forgotten,
            choice=choice,
        )

    def _prompt(self, loaded_model: LoadedModel, user_message: Message) -> tuple[list[int], int]:
        # (ids of the prompt, number of oldest turns left out of it)
        longest = loaded_model.max_length
        reserved = min(self.sampling.max_tokens, longest // ANSWER_SHARE) if longest else 0
        for start in range(
            0, len(self._turns) + 1, 2
        ):  # in pairs: a template may require alternating questions and answers
            turns = (*self.messages[: bool(self.system)], *self._turns[start:], user_message)
            ids = prompt_ids(loaded_model.encoder, turns)
            if longest is None or len(ids) + reserved <= longest:
                return ids, start
        if longest and len(ids) < longest:
            return ids, len(self._turns)
        raise DataError(
            f"the question has {len(ids)} tokens with what the template adds, "
            f"but the model '{loaded_model.name}' takes "
            f"{longest} together with the answer; shorten it"
        )


def save(path: Path, chats: Sequence[Chat]) -> int:
    """Append each conversation as a line that `data.sft` reads; returns their number.

    Raises UsageError if the file cannot be written.
    """
    lines = []
    for chat in chats:
        if any(message.role == "assistant" for message in chat.messages):
            row = {"messages": [message.to_json() for message in chat.messages]}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if not lines:
        return 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return len(lines)
