"""Tasks of kind `chats`: what the assistant's turns cost a model, and what its own answers in their place look like."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from ttrain.config.suite import HELDOUT_PARTS, ChatsTask
from ttrain.data import chat, chat_shapes, chat_templates, sources
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import answers, perplexity
from ttrain.evaluate import items as reading
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import BadRow, Items, LeftOut, Places
from ttrain.evaluate.task_result import Figure, Outcome

log = logging.getLogger("ttrain")
Tokens = tuple[list[int], list[bool]]


def read(task: str, spec: ChatsTask, places: Places) -> Items[chat_templates.Messages]:
    """The chats of a file, or those that the model's run held out. Raises UsageError where there is no such file, DataError
    where it holds no chat."""
    setting = places.setting(task, "file")
    if part := HELDOUT_PARTS.get(spec.file):
        rows, left_out = [dict(record) for record in places.heldout[part]], list[LeftOut]()
        found = [(_messages(row), row) for row in rows]
    else:
        found, left_out = reading.read_rows(places.file(spec.file), lambda row: (_messages(row), row), setting)
    found = reading.sampled(found, spec.limit, spec.seed)
    if not found:
        bad = f"; the first of {len(left_out)} bad rows is {left_out[0].where}: {left_out[0].reason}" if left_out else ""
        raise DataError(f"{setting} {spec.file} has no chat; a row needs {chat_shapes.CHAT_FIELDS}{bad}")
    chats = tuple(messages for messages, _ in found)
    names = reading.digests([[message.identity() for message in messages] for messages in chats])
    return Items(task, spec, chats, names, tuple(left_out), reading.groups([row for _, row in found], spec.by))


def run(items: Items[chat_templates.Messages], subject: Subject, progress: Progress) -> Outcome:
    """Loss in nats per token of the assistant's turns, the token that ends each included, and its exponential; and where
    `new_tokens` is not 0, the figures of `answers.figures`.

    A chat that the model's own template refuses, as some do with a system turn, is not scored, and told.
    Raises UsageError for a model that knows no chat template.
    """
    spec = items.spec
    assert isinstance(spec, ChatsTask), "the module of another kind of task has its own"
    if not subject.can_chat:
        raise UsageError(
            f"{items.task} asks about chats, but the tokenizer of {subject.name} has no chat template whose tokens the "
            "model knows; leave the task out"
        )
    encoded = [_encoded(subject, messages) for messages in items.items]
    refused = [one for one in encoded if isinstance(one, str)]
    if refused:
        log.warning("%s: %d of %d chats are not asked: %s", items.task, len(refused), len(encoded), refused[0])
    whole = bool(spec.new_tokens and spec.answers)  # the loss is half of the work then
    scores = _scores(
        spec, subject, [([], []) if isinstance(one, str) else one for one in encoded], _part(progress, 0, whole)
    )
    nats, tokens = tuple(score.nats for score in scores), tuple(float(score.tokens) for score in scores)
    figures = [
        Figure("loss", nats, tokens, False, "nats per token"),
        Figure("perplexity", nats, tokens, False, "per token", shown="exp"),
    ]
    rows: list[dict[str, Any]] = [{"nats": score.nats, "tokens": score.tokens} for score in scores]
    for row, one in zip(rows, encoded, strict=True):
        row |= {"refused": one} if isinstance(one, str) else {}
    if whole:
        chats = [() if isinstance(one, str) else messages for messages, one in zip(items.items, encoded, strict=True)]
        said = answers.ask(chats, subject, spec.answers, spec.new_tokens, _part(progress, 1, whole))
        figures += answers.figures(said)
        for row, turns in zip(rows, said, strict=True):
            row["answers"] = [turn.to_json() for turn in turns]
    return Outcome(
        task=items.task,
        kind=spec.kind,
        subject=subject.name,
        items=items.digests,
        figures=tuple(figures),
        rows=rows,
        left_out=items.reasons,
        groups=items.groups,
    )


def _scores(
    spec: ChatsTask, subject: Subject, sequences: Sequence[perplexity.Tokens], progress: Progress
) -> list[perplexity.Score]:
    length = min(spec.row_length, subject.max_length or spec.row_length)
    return perplexity.score_each(
        subject.model,
        sequences,
        length=length,
        stride=min(spec.stride, length),
        autocast=contextlib.nullcontext,
        device=subject.device,
        progress=progress,
        batch_tokens=subject.batch_tokens,
    )


def _encoded(subject: Subject, messages: chat_templates.Messages) -> Tokens | str:
    """(ids, live) of a chat, or why the model's template refuses it."""
    try:
        return chat.encode_chat(subject.encoder, messages)
    except DataError as error:
        return str(error)


def _part(progress: Progress, number: int, halves: bool) -> Progress:
    """Of the first or the second half of the work; of all of it where there are no halves."""
    return (lambda done, total: progress(number * total + done, 2 * total)) if halves else progress


def _messages(row: dict[str, Any]) -> chat_templates.Messages:
    found = sources.parse_conversation(row)
    if isinstance(found, sources.Conversation):
        return found.messages
    assert isinstance(found, sources.Skipped | sources.Rejected), "a row of chats is no document"
    raise BadRow(found.rule if isinstance(found, sources.Skipped) else found.reason)
