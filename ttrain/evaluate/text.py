"""Tasks of kind `text`: bits per byte, loss and perplexity of documents, in total and by the keys that their rows have."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.config.suite import HELDOUT, TextTask
from ttrain.data import sources
from ttrain.errors import DataError
from ttrain.evaluate import baselines, perplexity
from ttrain.evaluate import items as reading
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import BadRow, Items, Places
from ttrain.evaluate.log_likelihood import beginning
from ttrain.evaluate.task_result import LN2, Figure, Outcome

EXCERPT_CHARACTERS = 200
Record = tuple[str, Mapping[str, Any]]  # a text, and the row that it stood in
log = logging.getLogger("ttrain")


def read(task: str, spec: TextTask, places: Places) -> Items[str]:
    """The documents of a task: those of a file, or those that the model's run held out.

    `limit` and `max_bytes` both apply, in that order; the first document is taken whatever its length. Raises UsageError
    where there is no such file, DataError where no document is left.
    """
    parser, setting = sources.document_parser(spec.text_field), places.setting(task, "file")

    def parse(row: dict[str, Any]) -> Record:
        found = parser(row)
        if isinstance(found, sources.Rejected):
            raise BadRow(found.reason)
        if isinstance(found, sources.Skipped):
            raise BadRow(found.rule)
        assert isinstance(found, sources.Document), "the parser is that of documents"
        return found.text, row

    if spec.file == HELDOUT:
        found: list[Record] = [(row["text"], row) for row in places.heldout["documents"]]
        left_out: list[reading.LeftOut] = []
    else:
        found, left_out = reading.read_rows(places.file(spec.file), parse, setting)
    found = _first_bytes(reading.sampled(found, spec.limit, spec.seed), spec.max_bytes)
    if not found:
        wanted = sources.document_fields(spec.text_field, prefix=f"tasks.{task}.")
        bad = f"; the first of {len(left_out)} bad rows is {left_out[0].where}: {left_out[0].reason}" if left_out else ""
        raise DataError(f"{setting} {spec.file} has no document; a row needs {wanted}{bad}")
    texts = tuple(text for text, _ in found)
    groups = reading.groups([row for _, row in found], spec.by)
    return Items(task, spec, texts, reading.digests(texts), tuple(left_out), groups)


def run(items: Items[str], subject: Subject, progress: Progress) -> Outcome:
    """Bits per byte, loss in nats per token, and perplexity per token, of one model. Every token of a text is scored.

    Bits are divided by the bytes of the text as it stands in the file, so that models with different tokenizers can be
    compared (https://arxiv.org/abs/2101.00027, section 3.1). A tokenizer that does not give all of a text back had less to
    predict, and its figure is too good: such documents are counted and told, and marked as `lossy` in the rows.
    """
    spec = items.spec
    assert isinstance(spec, TextTask), "the module of another kind of task has its own"
    ids = subject.encoder.encode(items.items)
    before = beginning(subject)
    length = min(spec.row_length, subject.max_length or spec.row_length)
    scores = perplexity.score_each(
        subject.model,
        [([*before, *text_ids], [False] * len(before) + [True] * len(text_ids)) for text_ids in ids],
        length=length,
        stride=min(spec.stride, length),
        autocast=contextlib.nullcontext,
        device=subject.device,
        progress=progress,
        batch_tokens=subject.batch_tokens,
    )
    sizes = [len(text.encode("utf-8")) for text in items.items]
    lossy = [subject.encoder.decode(text_ids) != text for text, text_ids in zip(items.items, ids, strict=True)]
    if any(lossy):
        log.warning(
            "%s: the tokenizer of %s does not give back %d of %d documents as they were, so its bits per byte are too few",
            items.task, subject.name, sum(lossy), len(lossy),
        )  # fmt: skip
    return Outcome(
        task=items.task,
        kind=spec.kind,
        subject=subject.name,
        items=items.digests,
        figures=figures(scores, sizes),
        rows=[
            {"text": text[:EXCERPT_CHARACTERS], "bytes": size, "tokens": tokens, "nats": nats, "lossy": is_lossy}
            for text, size, (nats, tokens), is_lossy in zip(items.items, sizes, scores, lossy, strict=True)
        ],
        left_out=items.reasons,
        groups=items.groups,
        baselines=_baselines(items.items),
    )


def figures(scores: Sequence[perplexity.Score], sizes: Sequence[int]) -> tuple[Figure, ...]:
    """Of texts that cost these scores and have these many bytes."""
    nats, tokens = tuple(score.nats for score in scores), tuple(float(score.tokens) for score in scores)
    return (
        Figure("bits_per_byte", nats, tuple(map(float, sizes)), False, "bits per byte", factor=1 / LN2),
        Figure("loss", nats, tokens, False, "nats per token"),
        Figure("perplexity", nats, tokens, False, "per token", shown="exp"),
    )


@functools.lru_cache(maxsize=8)
def _baselines(texts: tuple[str, ...]) -> dict[str, float]:
    """The same for all models: computed once. xz takes a second for a megabyte."""
    return baselines.bits_per_byte("".join(texts).encode("utf-8"))


def _first_bytes(found: Sequence[Record], most: int | None) -> list[Record]:
    """The beginning of a list that has at most so many bytes of text; the first one in any case."""
    if most is None:
        return list(found)
    size = 0
    for number, (text, _) in enumerate(found):
        size += len(text.encode("utf-8"))
        if number and size > most:
            return list(found[:number])
    return list(found)
