"""Tasks of kind `chats`: loss on the assistant's turns, and metrics of the model's own answers in their place."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.config.evaluate import ChatsTask
from ttrain.core.files import JsonDict
from ttrain.data import chat, chat_shapes, records
from ttrain.data.chat_templates import Message, Messages, is_live
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import generation, perplexity
from ttrain.evaluate import items as reading
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.items import UNSPACED, BadRow, Items, SuiteFiles
from ttrain.evaluate.perplexity import Tokens
from ttrain.evaluate.task_result import Metric, TaskResult

log = logging.getLogger("ttrain")


def read(task: str, spec: ChatsTask, files: SuiteFiles) -> Items[Messages]:
    """Read the chats of a file, or those that the model's run held out. Raises UsageError if the file does not exist,
    DataError if it has no chat."""

    is_heldout = reading.heldout_part(spec) is not None

    def parse(row: JsonDict) -> Messages:
        if is_heldout:
            return tuple(map(Message.from_json, row["messages"]))
        conversation = records.parse_conversation(row)
        if isinstance(conversation, records.Conversation):
            return conversation.messages
        raise BadRow(conversation.reason)

    def identity(messages: Messages) -> object:
        return [message.identity() for message in messages]

    return reading.read_texts(task, spec, files, parse, chat_shapes.CHAT_FIELDS, identity)


def run(items: Items[Messages], subject: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Compute loss in nats per token of the assistant's turns, their end tokens included, and its exponential; and the
    metrics of `answers.figures` unless `new_tokens` is 0.

    A chat that the model's own template refuses, as some refuse a system turn, is not scored but reported in a warning.
    Raises UsageError for a model without a chat template.
    """
    spec = items.spec
    encoded = encode(items, subject, items.items)
    whole = bool(spec.new_tokens and spec.answers)  # the loss is half of the work then
    scores = perplexity.score_items(spec, subject, encoded, _part(progress, 0, whole))
    figures = perplexity.loss_figures(scores)
    rows: list[JsonDict] = [score._asdict() for score in scores]
    chats = list(items.items)
    for number, encoding in enumerate(encoded):
        if isinstance(encoding, str):
            rows[number]["refused"], chats[number] = encoding, ()
    if whole:
        answers_by_chat = ask(chats, subject, spec.answers, spec.new_tokens, _part(progress, 1, whole))
        figures += answer_metrics(answers_by_chat)
        for row, turns in zip(rows, answers_by_chat, strict=True):
            row["answers"] = [turn.to_json() for turn in turns]
    return items.result(subject.name, figures, rows)


def encode(items: Items[Any], subject: EvaluatedModel, conversations: Sequence[Messages]) -> list[Tokens | str]:
    """Encode the conversations of a task as (ids, live), or, if the model's template refuses one, as the error message; one
    of these is reported in a warning. Raises UsageError for a model without a chat template."""
    if not subject.can_chat:
        raise UsageError(
            f"{items.task} evaluates {items.spec.kind}, but the tokenizer of {subject.name} has no chat template whose "
            "tokens the model knows; remove the task"
        )
    encoded: list[Tokens | str] = []
    for messages in conversations:
        try:
            encoded.append(chat.encode_chat(subject.encoder, messages))
        except DataError as error:
            encoded.append(str(error))
    refused = [encoding for encoding in encoded if isinstance(encoding, str)]
    if refused:
        log.warning(
            "%s: %d of %d chats are not scored; the first error: %s", items.task, len(refused), len(encoded), refused[0]
        )
    return encoded


def _part(progress: ProgressCallback, number: int, halves: bool) -> ProgressCallback:
    """Progress of the first or the second half of the work; of all of it without `halves`."""
    return (lambda done, total: progress(number * total + done, 2 * total)) if halves else progress


@dataclass(frozen=True)
class AnsweredTurn:
    """A generated answer with the chat's own turn as its reference.

    number     of the turn, from 0
    reference  the chat's own turn
    text       the model's answer
    ended      whether it ended by itself, before `new_tokens`
    markers    turn markers in the answer
    cut        tokens cut from the beginning of the chat, which the model did not see
    """

    number: int
    reference: str
    text: str
    ended: bool
    markers: tuple[str, ...]
    cut: int

    def to_json(self) -> JsonDict:
        """Return the fields of an `--items` row as JSON."""
        fields: JsonDict = {"turn": self.number, "answer": self.text, "reference": self.reference, "ended": self.ended}
        fields |= {"markers": list(self.markers)} if self.markers else {}
        fields |= {"cut": self.cut} if self.cut else {}
        return fields


Chats = Sequence[Sequence[AnsweredTurn]]


def ask(
    chats: Sequence[Messages], subject: EvaluatedModel, most: int, new_tokens: int, progress: ProgressCallback
) -> list[list[AnsweredTurn]]:
    """Generate greedy answers in each chat, at most `most` (see `turns_of`), each after the chat's own preceding turns.

    With a short context the answers take at most half of it, and only the end of the preceding turns is given. A turn whose
    preceding turns the template refuses is skipped with a warning."""
    room, longest = subject.room(new_tokens)
    places: list[tuple[int, int]] = []
    prompts: list[tuple[list[int], int]] = []
    refused: list[DataError] = []
    for number, messages in enumerate(chats):
        for turn in turns_of(messages, most):
            try:
                prompts.append(_prompt(subject, messages[:turn], longest))
                places.append((number, turn))
            except DataError as error:
                refused.append(error)
    if refused:
        log.warning("%d answers of %s are skipped; the first error: %s", len(refused), subject.name, refused[0])
    answers: list[list[AnsweredTurn]] = [[] for _ in chats]
    prompt_ids = [ids for ids, _ in prompts]
    generated = generation.answers(subject, prompt_ids, room, (), progress, chat.lead_text(subject.encoder))
    for (number, turn), (_, cut), (ids, text, ended) in zip(places, prompts, generated, strict=True):
        reference = chats[number][turn].content
        marks = tuple(find_markers(subject.encoder, ids, text))
        answers[number].append(AnsweredTurn(turn, reference, text, ended, marks, cut))
    return answers


def turns_of(messages: Messages, most: int) -> list[int]:
    """Numbers of at most `most` assistant turns that answer something, the last ones."""
    return [number for number, turn in enumerate(messages) if number and is_live(turn)][-most:]


def answer_metrics(chats: Chats) -> list[Metric]:
    """Metrics of all answers; those of a chat form one item, since they are not independent:

    ended             share that the model ended by itself
    clean             share without a token or a name that begins or ends a turn
    empty             share of empty answers
    repeated          share of runs of four words that already occurred in the answer
    distinct_1, 2, 3  different words, pairs and triples over all of them
    length            characters
    """
    words_by_chat = [[words(turn.text) for turn in turns] for turns in chats]
    metrics = [
        _share("ended", chats, lambda turn: turn.ended),
        _share("clean", chats, lambda turn: not turn.markers),
        _share("empty", chats, lambda turn: not turn.text.strip(), higher=False),
        _metric("repeated", [[repeated(turn_words) for turn_words in chat_words] for chat_words in words_by_chat], False),
    ]
    for length in (1, 2, 3):
        runs = iter(distinct([turn_words for chat_words in words_by_chat for turn_words in chat_words], length))
        metrics.append(
            _metric(f"distinct_{length}", [[next(runs) for _ in chat_words] for chat_words in words_by_chat], True)
        )
    metrics.append(_metric("length", [[(len(turn.text), 1) for turn in turns] for turns in chats], False, "characters"))
    if any(turn.cut for turns in chats for turn in turns):
        metrics.append(_share("cut", chats, lambda turn: turn.cut > 0, higher=False))
    return metrics


def _share(name: str, items: Sequence[Sequence[Any]], holds: Callable[[Any], bool], *, higher: bool = True) -> Metric:
    return _metric(name, [[(holds(entry), 1) for entry in parts] for parts in items], higher)


def _metric(name: str, items: Sequence[Sequence[tuple[float, float]]], higher: bool, unit: str = "share") -> Metric:
    """Build the metric whose items sum their parts' (amount, size) pairs."""
    sums = tuple(float(sum(amount for amount, _ in parts)) for parts in items)
    sizes = tuple(float(sum(size for _, size in parts)) for parts in items)
    return Metric(name, sums, sizes, higher_is_better=higher, unit=unit)


def _prompt(subject: EvaluatedModel, messages: Messages, longest: int | None) -> tuple[list[int], int]:
    """(prompt ids, number of tokens cut from their beginning)."""
    ids = chat.prompt_ids(subject.encoder, messages)
    cut = 0 if longest is None else max(0, len(ids) - longest)
    return ids[cut:], cut


# A special token spelt out as text, as by a model of another template: <|im_start|>, <｜User｜>, [INST], <s>.
SPELT = re.compile(r"<\|\w{1,32}\|>|<｜[^<>｜\s]{1,32}｜>|\[/?INST\]|</?s>")
# A line that begins like a turn of any template.
TURN = re.compile(r"^[ \t]*(?:\#+ *)?(?:user|human|assistant|用户|助手)[ \t]*[:：]", re.IGNORECASE | re.MULTILINE)


def find_markers(encoder: Encoder, ids: Sequence[int], text: str) -> list[str]:
    """Find the markers in an answer, given as ids and as text; [] if there are none."""
    special = encoder.special_ids()
    markers = [f"token {number}" for number in ids if number in special or number >= len(encoder)]
    markers += SPELT.findall(text) + [match.group().strip() for match in TURN.finditer(text)]
    return list(dict.fromkeys(markers))


REPEATED_WORDS = 4  # words of a run that counts as repeated; three are often a phrase

# A character of a script without spaces, a word or number of any other, a sign.
WORDS = re.compile(rf"{UNSPACED.pattern}|(?:(?!{UNSPACED.pattern})\w)+|[^\w\s]")


def words(text: str) -> list[str]:
    """Split into words, numbers and signs; into characters in scripts without spaces, such as Chinese, Japanese and Thai."""
    return [word for word in WORDS.findall(text) if not word.isspace()]


def phrases(answer_words: Sequence[str], length: int) -> list[tuple[str, ...]]:
    """All runs of `length` words, in order."""
    return [tuple(answer_words[start : start + length]) for start in range(len(answer_words) - length + 1)]


def repeated(answer_words: Sequence[str]) -> tuple[int, int]:
    """(runs of REPEATED_WORDS words that occurred earlier in the answer, all its runs): seq-rep-4 of arXiv:1908.04319."""
    runs = phrases(answer_words, REPEATED_WORDS)
    return len(runs) - len(set(runs)), len(runs)


def distinct(answers: Sequence[Sequence[str]], length: int) -> list[tuple[float, int]]:
    """For each answer (its share of the different runs of `length` words in all answers, its number of runs).

    Their quotient over all answers is distinct-n (arXiv:1510.03055), which also detects answers that are all alike. A run
    that occurs n times counts 1/n each time, so that the order of answers does not matter. It falls with the number of
    answers: compare it on the same items only.
    """
    runs_by_answer = [phrases(answer_words, length) for answer_words in answers]
    times = Counter(run for runs in runs_by_answer for run in runs)
    return [(sum(1 / times[run] for run in runs), len(runs)) for runs in runs_by_answer]
