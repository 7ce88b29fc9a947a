"""Tasks of kind `generation`: free answers to questions, compared as a number or as text."""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from ttrain.config.evaluate import GenerationTask
from ttrain.core.files import JsonDict
from ttrain.core.text import is_number as is_plain_number
from ttrain.data.chat import lead_text, prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.errors import UsageError
from ttrain.evaluate.choices import cut_figure
from ttrain.evaluate.items import (
    BadRow,
    Items,
    SuiteFiles,
    read_rows,
    separator,
    text_of,
    with_examples,
)
from ttrain.evaluate.perplexity import ProgressCallback
from ttrain.evaluate.task_result import TaskResult, mean
from ttrain.inference.generate import Completion
from ttrain.inference.loading import LoadedModel

ROW_FORMAT = '{"question": text, "answer": text or number, "final" (optional): the result alone}'

MARK = "####"  # before the result of a worked answer, as in GSM8K

# What may stand around an answer. Not before it: a full stop, since .5 is not 5.
BEFORE = " *_`\"'“”‘’«»„「」『』《》〈〉()[]（）【】"
AFTER = BEFORE + ".,;:!?。，、；：！？"

NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?[$€£¥]?(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,100})(?:\.\d{1,100})?|\.\d{1,100})"
    r"(?:/(?P<below>[1-9]\d{,99})(?![\d/]))?"
)


@dataclass(frozen=True)
class Problem:
    """A row: worked examples show `answer`; a model's answer is compared with `final`."""

    question: str
    answer: str
    final: str


ProblemWithExamples = tuple[Problem, tuple[Problem, ...]]  # with its worked examples


def parse(record: JsonDict, match: str) -> Problem:
    """Parse a row. Raises BadRow without a right answer of the kind that `match` compares.

    auto accepts what exact accepts, which includes every number.
    """
    question = text_of(record, "question")
    final = _text_or_number(record, "final")
    answer = _text_or_number(record, "answer") or final
    if not answer:
        raise BadRow("no answer")
    final = final or answer.rpartition(MARK)[2].strip()
    if match == "numeric" and answer_in(final) is None:
        raise BadRow("no number in the answer")
    if match != "numeric" and not normalised(final):
        raise BadRow("nothing but punctuation in the answer")
    return Problem(question, answer, final)


def read(task: str, spec: GenerationTask, files: SuiteFiles) -> Items[ProblemWithExamples]:
    """Read the questions of a file; resolves `spec.match` from auto.

    Raises UsageError if the file does not exist, DataError if it has no question.
    """
    parser = (
        partial(parse, match=spec.match),
        ROW_FORMAT,
    )  # worked examples of another file are parsed by this choice
    rows = read_rows(f"tasks.{task}.file", spec.file, files, parser)
    if spec.match == "auto":
        is_numeric = all(is_number(problem.final) for problem, _ in rows[0])
        spec = spec.model_copy(update={"match": "numeric" if is_numeric else "exact"})
    how = spec.model_dump(
        mode="json", include={"match", "new_tokens", "chat", "template", "stop", "shots_separator"}
    )

    def item_of(
        problem: Problem, examples: tuple[Problem, ...]
    ) -> tuple[ProblemWithExamples, object]:
        shots = [[shot.question, shot.answer] for shot in examples]
        return (problem, examples), [problem.question, problem.final, shots, how]

    return with_examples(task, spec, rows, files, parser, item_of)


def run(
    items: Items[ProblemWithExamples], subject: LoadedModel, progress: ProgressCallback
) -> TaskResult:
    """Compute `accuracy_exact` or `accuracy_numeric`, by `match`, and `ended`.

    `ended` is the share of answers that the model or a text of `stop` ended before `new_tokens`.
    """
    spec = items.spec
    if spec.chat and not subject.can_chat:
        raise UsageError(
            f"tasks.{items.task}.chat is true, but the tokenizer of '{subject.name}' has no chat "
            "template; set chat: false, "
            "or evaluate a model that was trained on chats"
        )
    room, longest = subject.room(spec.new_tokens)
    prompts = list[list[int]]()
    cut = list[int]()
    for problem, examples in items.items:
        ids = whole = _prompt(spec, problem, examples, subject)
        while (
            longest and len(ids) > longest and examples
        ):  # the oldest example first, then the beginning
            examples = examples[1:]
            ids = _prompt(spec, problem, examples, subject)
        prompts.append(ids[-(longest or 0) :])
        cut.append(len(whole) - len(prompts[-1]))
    stops, lead = ((), lead_text(subject.encoder)) if spec.chat else (spec.stop, "")
    rows: list[JsonDict] = []
    for (problem, _), (completion, answer) in zip(
        items.items, answers(subject, prompts, room, stops, progress, lead), strict=True
    ):
        parsed, right = judge_answer(answer, problem.final, spec.match)
        rows.append(
            {
                "question": problem.question,
                "reference": problem.final,
                "answer": answer,
                "extracted": parsed,
                "match": spec.match,
                "right": right,
                "ended": completion.ended,
            }
        )
    metrics = [
        mean(f"accuracy_{spec.match}", (row["right"] for row in rows)),
        mean("ended", (row["ended"] for row in rows)),
        *cut_figure(cut),
    ]
    return items.result(subject.name, metrics, rows)


def answers(
    subject: LoadedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stops: Sequence[str],
    progress: ProgressCallback,
    lead: str = "",
) -> list[tuple[Completion, str]]:
    """Generate a greedy answer to each prompt, with its text without the `lead` of a chat template.

    An answer ends at the first of `stops`, which its text leaves out.
    """
    stop = re.compile("|".join(map(re.escape, filter(None, stops)))) if any(stops) else None
    answered: list[tuple[Completion, str]] = []
    for completion in subject.generate(prompts, new_tokens, stop, progress):
        text = subject.encoder.decode(completion.ids).removeprefix(lead)
        found = stop.search(text) if stop else None
        if found:
            completion = replace(completion, ended=True)
            text = text[: found.start()]
        answered.append((completion, text))
    return answered


def judge_answer(answer: str, final: str, match: str) -> tuple[str | None, bool]:
    """(the part of the answer that was compared, whether it is right).

    numeric  the numbers of `answer_in` are equal
    exact    the `normalised` texts are equal
    """
    # Exact: of the answer the text after the last `####`, or, if the right answer has one line, its
    # first non-empty line.
    if match == "numeric":
        number = answer_in(answer)
        return None if number is None else str(number), number is not None and number == answer_in(
            final
        )
    compared = answer.rpartition(MARK)[2]
    if "\n" not in final.strip():
        compared = next((line for line in compared.splitlines() if normalised(line)), "")
    return compared.strip(), normalised(compared) == normalised(final)


def normalised(text: str) -> str:
    """Normalise to lower case, plain width and single spaces, without punctuation around it."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).lstrip(BEFORE).rstrip(AFTER)


def answer_in(text: str) -> Fraction | None:
    """The result that a text gives: the first number after the last `####`, else the last one."""
    _, mark, result = text.rpartition(MARK)
    number = NUMBER.search(_plain(result)) if mark else None
    number = number or next(reversed([*NUMBER.finditer(_plain(text))]), None)
    if number is None:
        return None
    value = Fraction(number["value"].replace(",", "")) / int(number["below"] or 1)
    return -value if number["sign"] else value


def is_number(text: str) -> bool:
    """Whether a text is one number, apart from a currency, a percent sign or a full stop."""
    return NUMBER.fullmatch(_plain(text).strip(" .%$€£¥\n")) is not None


def _plain(text: str) -> str:
    return (
        unicodedata.normalize("NFKC", text)
        .replace("\N{MINUS SIGN}", "-")
        .replace("\N{FRACTION SLASH}", "/")
    )


def _text_or_number(record: JsonDict, key: str) -> str:
    # A text or a number as text; "" if it is missing.
    value = record.get(key)
    if value is None or isinstance(value, str):
        return (value or "").strip() and str(value)
    if not is_plain_number(value) or not math.isfinite(value):
        raise BadRow(f"{key} is neither text nor a number")
    return str(value)


def _prompt(
    spec: GenerationTask, problem: Problem, examples: Sequence[Problem], subject: LoadedModel
) -> list[int]:
    if spec.chat:
        turns = [
            turn
            for shot in examples
            for turn in (Message("user", shot.question), Message("assistant", shot.answer))
        ]
        return prompt_ids(subject.encoder, (*turns, Message("user", problem.question)))
    text = ""
    for shot in examples:
        question = spec.template.replace("{question}", shot.question)
        text += question + separator(question, shot.answer) + shot.answer + spec.shots_separator
    return subject.text_ids([text + spec.template.replace("{question}", problem.question)])[0]
