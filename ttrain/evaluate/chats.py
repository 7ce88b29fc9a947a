"""Tasks on conversations.

chats  loss on the assistant's turns, and metrics of the model's own answers
pairs  whether the chosen answer is likelier than the rejected one
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from ttrain.config.evaluate import ChatsTask, PairsTask
from ttrain.core.files import JsonDict
from ttrain.data import chat as chat_data
from ttrain.data import chat_shapes, records
from ttrain.data.chat_templates import Message, Messages, is_live
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import PREFERENCE_FIELDS, Preference
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import generation, perplexity
from ttrain.evaluate.items import UNSPACED, BadRow, Items, Parsers, SuiteFiles, accepted, read_texts
from ttrain.evaluate.perplexity import ProgressCallback, Tokens
from ttrain.evaluate.task_result import Metric, TaskResult
from ttrain.inference.loading import LoadedModel

log = logging.getLogger("ttrain")
# A special token spelt out as text, as by a model of another template: <|im_start|>, <｜User｜>,
# [INST], <s>. Or a line that begins like a turn of any template.
MARKER = re.compile(
    r"<\|\w{1,32}\|>|<｜[^<>｜\s]{1,32}｜>|\[/?INST\]|</?s>"
    r"|^[ \t]*(?:\#+ *)?(?:user|human|assistant|用户|助手)[ \t]*[:：]",
    re.IGNORECASE | re.MULTILINE,
)
REPEATED_WORDS = 4  # words of a run that counts as repeated; three are often a phrase
# A character of a script without spaces, a word or number of any other, a sign.
WORDS = re.compile(rf"{UNSPACED.pattern}|(?:(?!{UNSPACED.pattern})\w)+|[^\w\s]")
RATED = "a single rated answer, which has no other one to be compared with"


def read(task: str, spec: ChatsTask, files: SuiteFiles) -> Items[Messages]:
    """Read the chats of a file, or those that the model's run held out.

    Raises UsageError if the file does not exist, DataError if it has no chat.
    """
    parsers = Parsers(
        (
            lambda row: accepted(records.parse_conversation(row), records.Conversation).messages,
            chat_shapes.CHAT_FIELDS,
        ),
        lambda row: tuple(map(Message.from_json, row["messages"])),
        lambda messages: [message.identity() for message in messages],
    )
    return read_texts(task, spec, files, parsers)


def run(items: Items[Messages], subject: LoadedModel, progress: ProgressCallback) -> TaskResult:
    """Compute loss in nats per token of the assistant's turns, end tokens included, and perplexity.

    Adds `answer_metrics` unless `answers` or `new_tokens` is 0. Raises UsageError for a model
    without a chat template.
    """
    # A chat that the model's own template refuses, as some refuse a system turn, is not scored.
    spec = items.spec
    encoded = encode(items, subject, items.items)
    with_answers = bool(spec.new_tokens and spec.answers)
    total = 1 + with_answers  # the loss is half of the work then
    scores = perplexity.score_items(
        spec, subject, encoded, lambda done, of: progress(done, total * of)
    )
    metrics = perplexity.loss_figures(scores)
    rows: list[JsonDict] = [
        score._asdict() | ({"refused": encoding} if isinstance(encoding, str) else {})
        for score, encoding in zip(scores, encoded, strict=True)
    ]
    if with_answers:
        chats = [
            () if "refused" in row else chat for row, chat in zip(rows, items.items, strict=True)
        ]
        answers = ask(chats, subject, spec, lambda done, of: progress(of + done, total * of))
        metrics += answer_metrics(answers)
        rows = [row | {"answers": turns} for row, turns in zip(rows, answers, strict=True)]
    return items.result(subject.name, metrics, rows)


def encode(
    items: Items[Any], subject: LoadedModel, conversations: Sequence[Messages]
) -> list[Tokens | str]:
    """Encode conversations as (ids, live), or as the error of the template that refuses one.

    Warns of the first error. Raises UsageError for a model without a chat template.
    """
    if not subject.can_chat:
        raise UsageError(
            f"{items.task} evaluates {items.spec.kind}, but the tokenizer of {subject.name} has "
            "no chat template whose "
            "tokens the model knows; remove the task"
        )
    encoded: list[Tokens | str] = []
    for messages in conversations:
        try:
            encoded.append(chat_data.encode_chat(subject.encoder, messages))
        except DataError as error:
            encoded.append(str(error))
    refused = [encoding for encoding in encoded if isinstance(encoding, str)]
    if refused:
        log.warning(
            "%s: %d of %d chats are not scored; the first error: %s",
            items.task,
            len(refused),
            len(encoded),
            refused[0],
        )
    return encoded


def ask(
    chats: Sequence[Messages], subject: LoadedModel, spec: ChatsTask, progress: ProgressCallback
) -> list[list[JsonDict]]:
    """Generate greedy answers to the last `spec.answers` turns of each chat, as rows.

    Each answer follows the chat's own preceding turns, of which a short context gets only the end.
    """
    room, longest = subject.room(spec.new_tokens)
    places = [
        (number, turn) for number, chat in enumerate(chats) for turn in turns_of(chat, spec.answers)
    ]
    prompts = [
        chat_data.prompt_ids(subject.encoder, chats[number][:turn])[-(longest or 0) :]
        for number, turn in places
    ]
    generated = generation.answers(
        subject, prompts, room, (), progress, chat_data.lead_text(subject.encoder)
    )
    answers: list[list[JsonDict]] = [[] for _ in chats]
    for (number, turn), (completion, text) in zip(places, generated, strict=True):
        markers = find_markers(subject.encoder, completion.ids, text)
        row = {
            "turn": turn,
            "answer": text,
            "reference": chats[number][turn].content,
            "ended": completion.ended,
        }
        answers[number].append({**row, "markers": markers} if markers else row)
    return answers


def turns_of(messages: Messages, most: int) -> list[int]:
    """Numbers of the last assistant turns that answer something, at most `most`."""
    return [number for number, turn in enumerate(messages) if number and is_live(turn)][-most:]


def answer_metrics(chats: Sequence[Sequence[JsonDict]]) -> list[Metric]:
    """Metrics of all answers. A chat is one item, since its answers are not independent."""
    # ended: the model ended by itself; clean: without a token or a name that begins or ends a turn;
    # repeated: runs of four words that already occurred in the answer.
    return [
        _metric("ended", chats, lambda row: (row["ended"], 1)),
        _metric("clean", chats, lambda row: ("markers" not in row, 1)),
        _metric("empty", chats, lambda row: (not row["answer"].strip(), 1), higher=False),
        _metric("repeated", chats, lambda row: repeated(words(row["answer"])), higher=False),
        _metric(
            "length", chats, lambda row: (len(row["answer"]), 1), higher=False, unit="characters"
        ),
    ]


def _metric(
    name: str,
    chats: Sequence[Sequence[JsonDict]],
    part: Callable[[JsonDict], tuple[float, float]],
    *,
    higher: bool = True,
    unit: str = "share",
) -> Metric:
    # The metric whose items sum their answers' (amount, size) parts.
    parts = [[*map(part, answers)] for answers in chats]
    sums = tuple(float(sum(map(itemgetter(0), of_chat))) for of_chat in parts)
    sizes = tuple(float(sum(map(itemgetter(1), of_chat))) for of_chat in parts)
    return Metric(name, sums, sizes, higher_is_better=higher, unit=unit)


def find_markers(encoder: Encoder, ids: Sequence[int], text: str) -> list[str]:
    """Find the markers of turns in an answer, given as ids and as text."""
    unknown = encoder.special_ids().union(number for number in ids if number >= len(encoder))
    markers = [f"token {number}" for number in ids if number in unknown]
    return list(dict.fromkeys(markers + [match.strip() for match in MARKER.findall(text)]))


def words(text: str) -> list[str]:
    """Split into words, numbers and signs; into characters in scripts without spaces."""
    return [word for word in WORDS.findall(text) if not word.isspace()]


def repeated(answer_words: Sequence[str]) -> tuple[int, int]:
    """(runs of REPEATED_WORDS words that occurred earlier, all runs), arXiv:1908.04319."""
    runs = list(zip(*(answer_words[start:] for start in range(REPEATED_WORDS)), strict=False))
    return len(runs) - len(set(runs)), len(runs)


# --- pairs ---


def read_pairs(task: str, spec: PairsTask, files: SuiteFiles) -> Items[Preference]:
    """Read the pairs of a file, or those that the model's run held out.

    Raises UsageError if the file does not exist, DataError if it has no pair.
    """

    def parse(row: JsonDict) -> Preference:
        pair = accepted(records.parse_preference(row), Preference)
        if not (pair.chosen and pair.rejected):
            raise BadRow(RATED)
        return pair

    return read_texts(
        task,
        spec,
        files,
        Parsers(
            (parse, PREFERENCE_FIELDS), Preference.from_json, lambda pair: pair.content().decode()
        ),
    )


def run_pairs(
    items: Items[Preference], subject: LoadedModel, progress: ProgressCallback
) -> TaskResult:
    """Compute the share of pairs whose chosen answer is likelier, and its mean lead in nats.

    A tie counts one half. Raises UsageError for a model without a chat template.
    """
    # A pair that the model's own template refuses is not scored.
    conversations = [
        (*pair.prompt, *answer) for pair in items.items for answer in (pair.chosen, pair.rejected)
    ]
    encoded = encode(items, subject, conversations)
    scores = perplexity.score_items(items.spec, subject, encoded, progress)
    rows: list[JsonDict] = []
    preferred = list[float]()
    margins = list[float]()
    sizes = list[float]()
    for number in range(0, len(scores), 2):
        chosen, rejected = scores[number : number + 2]
        errors = [side for side in encoded[number : number + 2] if isinstance(side, str)]
        # Of whole answers, which preference tuning moves; divided by length, an answer that ends
        # too early would count by its first tokens.
        margin = rejected.nats - chosen.nats
        sizes.append(float(not errors))
        margins.append(margin * sizes[-1])
        preferred.append(((margin > 0) + 0.5 * (margin == 0)) * sizes[-1])
        rows.append(
            {"refused": errors[0]}
            if errors
            else {
                "preferred": preferred[-1],
                "margin": margin,
                "chosen": chosen._asdict(),
                "rejected": rejected._asdict(),
            }
        )
    accuracy = Metric(
        "accuracy", tuple(preferred), tuple(sizes), higher_is_better=True, unit="share"
    )
    return items.result(
        subject.name,
        [accuracy, replace(accuracy, name="margin", sums=tuple(margins), unit="nats")],
        rows,
    )
