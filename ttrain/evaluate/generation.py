"""Questions that a model answers in its own words; the answer is compared with the right one, as a number or as text."""

from __future__ import annotations

import logging
import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrain.config.suite import GenerationTask
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import UsageError
from ttrain.evaluate import prompts as wording
from ttrain.evaluate.answer_numbers import MARK, answer_in, is_number
from ttrain.evaluate.choices import cut_figure
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import BadRow, Items, Places, digests, groups, read_rows, sampled
from ttrain.evaluate.task_result import Figure, Outcome

WANTED = '{"question": text, "answer": text or number, "final" (optional): the result alone}'
log = logging.getLogger("ttrain")
PIECE = 64  # tokens after which it is looked for a text that ends the answer
EDGES = string.punctuation + string.whitespace + "，。、；：？！“”‘’（）《》【】「」『』…—"


@dataclass(frozen=True)
class Problem:
    """A row: `answer` is what a worked example shows, `final` what an answer is compared with."""

    question: str
    answer: str
    final: str
    labels: dict[str, Any] = field(default_factory=dict, compare=False)


Asked = tuple[Problem, tuple[Problem, ...]]  # with its worked examples


def parse(record: dict[str, Any], match: str, by: Sequence[str] = ()) -> Problem:
    """The item of a row. Raises BadRow where there is no right answer, or none of the kind that `match` compares; auto takes
    what exact does, and every number is among that."""
    question = wording.text(record, "question")
    given = {key: _told(record, key) for key in ("answer", "final")}
    answer = given["answer"] or given["final"]
    if answer is None:
        raise BadRow("no answer")
    final = given["final"] or (answer.rsplit(MARK, 1)[1].strip() if MARK in answer else answer)
    if match == "numeric" and answer_in(final) is None:
        raise BadRow("no number in the answer")
    if match != "numeric" and not normalised(final):
        raise BadRow("nothing but punctuation in the answer")
    return Problem(question, answer, final, wording.labels(record, by))


def read(task: str, spec: GenerationTask, places: Places) -> Items[Asked]:
    """The questions of the file; their `spec.match` says what is compared, where the task's was auto. Raises UsageError, or
    DataError where the file has none."""
    setting = places.setting(task, "file")

    def parsed(record: dict[str, Any]) -> Problem:
        return parse(record, spec.match, spec.by)

    rows, left_out = read_rows(places.file(spec.file), parsed, setting)
    wording.check_some(rows, left_out, f"{setting} {spec.file}", WANTED)
    if spec.match == "auto":  # worked examples of another file are parsed by what is found here
        spec = spec.model_copy(update={"match": "numeric" if all(is_number(row.final) for row in rows) else "exact"})
    items = sampled(rows, spec.limit, spec.seed)
    shots, more = wording.examples(task, spec, rows, items, places, parsed)
    asked = tuple(zip(items, shots, strict=True))
    told = [[one.question, one.final, [[shot.question, shot.answer] for shot in before]] for one, before in asked]
    how = spec.model_dump(mode="json", include={"match", "new_tokens", "chat", "template", "stop", "shots_separator"})
    names = digests([[*one, how] for one in told])
    return Items(task, spec, asked, names, (*left_out, *more), groups([item.labels for item in items], spec.by))


def run(items: Items[Asked], subject: Subject, progress: Progress) -> Outcome:
    """`accuracy_exact` or `accuracy_numeric`, by `match`: answers that are right; `ended`: those that the model, or a text
    of `stop`, ended before `new_tokens`."""
    spec = items.spec
    assert isinstance(spec, GenerationTask)
    if spec.chat and not subject.can_chat:
        raise UsageError(
            f"tasks.{items.task}.chat is true, but the tokenizer of '{subject.name}' has no chat template; set chat: false, "
            "or evaluate a model that was trained on chats"
        )
    room = spec.new_tokens
    if subject.max_length is not None:
        room = min(room, subject.max_length // 2)  # the same for all items: an answer does not depend on its batch
        if room < spec.new_tokens:
            log.warning("%s: answers of %s have at most %d tokens, half of its context", items.task, subject.name, room)
    longest = None if subject.max_length is None else subject.max_length - room
    prompts = [_prompt(spec, asked, subject, longest) for asked in items.items]
    said = answers(subject, [ids for ids, _ in prompts], room, () if spec.chat else spec.stop, progress)
    rows: list[dict[str, Any]] = []
    for (problem, _), (answer, ended), (_, cut) in zip(items.items, said, prompts, strict=True):
        found, right = judged(answer, problem.final, spec.match)
        rows.append({
            "question": problem.question, "reference": problem.final, "answer": answer, "found": found, "match": spec.match,
            "right": right, "ended": ended, **({"cut": cut} if cut else {}),
        })  # fmt: skip
    ones = (1.0,) * len(rows)
    figures = [
        Figure(name, tuple(float(row[key]) for row in rows), ones, higher_is_better=True, unit="share")
        for name, key in ((f"accuracy_{spec.match}", "right"), ("ended", "ended"))
    ]
    figures += cut_figure([row.get("cut", 0) for row in rows])
    return Outcome(items.task, spec.kind, subject.name, items.digests, tuple(figures), rows, items.reasons, items.groups)


def answers(
    subject: Subject, prompts: Sequence[Sequence[int]], new_tokens: int, stops: Sequence[str], progress: Progress
) -> list[tuple[str, bool]]:
    """(text, whether it ended before `new_tokens`) of the greedy answer to each prompt, up to the first of `stops`.

    Prompts of like length share a batch. With `stops` an answer comes in pieces, so that one that has ended costs no more.
    """
    found = [("", False)] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    start = 0
    while start < len(order):
        count = max(1, subject.batch_tokens // (len(prompts[order[start]]) + new_tokens))
        batch = order[start : start + count]
        said: dict[int, list[int]] = {number: [] for number in batch}
        open_ones, left = list(batch), new_tokens
        while open_ones and left:
            piece = min(left, PIECE) if stops else left
            more = subject.generate([[*prompts[number], *said[number]] for number in open_ones], piece)
            left -= piece
            going_on = []
            for number, (ids, ended) in zip(open_ones, more, strict=True):
                said[number] += ids
                text, stopped = _until(subject.encoder.decode(said[number]), stops)
                found[number] = text, ended or stopped
                if not found[number][1]:
                    going_on.append(number)
            open_ones = going_on
        start += count
        progress(min(start, len(order)), len(order))
    return found


def judged(answer: str, final: str, match: str) -> tuple[str | None, bool]:
    """(what of the answer was compared, whether it is right).

    numeric: the numbers that `answer_numbers.answer_in` finds are equal. exact: the text is the same but for case, width,
    white space and punctuation at its ends; of the answer what follows the last `####` where there is one, else its first
    line that says anything, where the right answer has one line.
    """
    if match == "numeric":
        number = answer_in(answer)
        return None if number is None else str(number), number is not None and number == answer_in(final)
    told = answer.rsplit(MARK, 1)[1] if MARK in answer else answer
    if "\n" not in final.strip():
        told = next((line for line in told.splitlines() if normalised(line)), "")
    return told.strip(), normalised(told) == normalised(final)


def normalised(text: str) -> str:
    """Lower case, plain width, single spaces, no punctuation at the ends."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip(EDGES)


def _told(record: dict[str, Any], key: str) -> str | None:
    """A text or a number of a row; None where there is none. Raises BadRow for anything else."""
    value = record.get(key)
    if isinstance(value, str):
        return value if value.strip() else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"{key} is neither text nor a number")
    return str(value)


def _prompt(spec: GenerationTask, asked: Asked, subject: Subject, longest: int | None) -> tuple[list[int], int]:
    """(ids of what the model is given, tokens that were cut): the oldest examples go first, then the beginning."""
    problem, examples = asked
    render: Callable[[Problem, Sequence[Problem], Subject], list[int]] = _as_chat if spec.chat else _as_text(spec)
    whole = render(problem, examples, subject)
    ids = whole
    while longest is not None and len(ids) > longest and examples:
        examples = examples[1:]
        ids = render(problem, examples, subject)
    if longest is not None:
        ids = ids[-longest:]
    return ids, len(whole) - len(ids)


def _as_chat(problem: Problem, examples: Sequence[Problem], subject: Subject) -> list[int]:
    turns = [turn for one in examples for turn in (Message("user", one.question), Message("assistant", one.answer))]
    return prompt_ids(subject.encoder, (*turns, Message("user", problem.question)))


def _as_text(spec: GenerationTask) -> Callable[[Problem, Sequence[Problem], Subject], list[int]]:
    def asked(one: Problem) -> str:
        return spec.template.replace("{question}", one.question)

    def shown(one: Problem) -> str:
        before = asked(one)
        return before + wording.between(before, one.answer) + one.answer + spec.shots_separator

    def render(problem: Problem, examples: Sequence[Problem], subject: Subject) -> list[int]:
        text = "".join(map(shown, examples)) + asked(problem)
        return [*subject.begin_ids, *subject.encoder.encode([text])[0]]

    return render


def _until(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """(the text up to the first of `stops`, whether there was one)."""
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
