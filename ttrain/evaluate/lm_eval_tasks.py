"""Tasks of kind `harness`: lm-evaluation-harness asks our model and judges it; its samples become metrics over items.

A group is one task here, whose `groups` have the metrics of each of its tasks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lm_eval
from lm_eval.api import metrics as aggregations
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from ttrain.config.evaluate import HarnessTask
from ttrain.core.files import JsonDict
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import perplexity
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback, beginning
from ttrain.evaluate.generation import answers
from ttrain.evaluate.items import Items, SuiteFiles, digests, sampled
from ttrain.evaluate.log_likelihood import log_likelihoods
from ttrain.evaluate.task_result import LN2, Metric, TaskResult

if TYPE_CHECKING:
    from lm_eval.api.task import Task

EXAMPLES_SEED = 1234  # the harness's default, so that prompts equal those of published results
ROW_CHARACTERS = 2000  # from the end of a prompt, shown in a row of results
DEFAULT_LENGTH = 2048  # of the harness's own model

# By the harness's function that makes a metric of its values: the fields of ours.
# It sums log-likelihoods, ours costs.
FORMS: dict[Any, dict[str, Any]] = {
    aggregations.mean: {},
    aggregations.perplexity: {"shown": "exp"},
    aggregations.weighted_perplexity: {"shown": "exp"},
    aggregations.bits_per_byte: {"factor": 1 / LN2, "unit": "bits per byte"},
}
ANSWER_BITS = "bits_per_byte"  # of the right choice: not a metric of the harness

log = logging.getLogger("ttrain")


class HarnessItem(NamedTuple):
    """A document of a task, by its number there."""

    task: Task
    number: int


def read(task: str, spec: HarnessTask, files: SuiteFiles) -> Items[HarnessItem]:
    """Load the task, or all tasks of a group. What identifies an item is known when a model is asked it.

    Raises UsageError if the harness does not know the task, or would run Python of a task file; DataError if the data cannot
    be loaded.
    """
    documents: list[HarnessItem] = []
    for harness_task in _load_tasks(spec, files, f"tasks.{task}.task"):
        default_shots = harness_task.get_config("num_fewshot")
        if default_shots != 0:  # as in the harness, a task that says 0 takes no examples
            shots = default_shots or 0 if spec.shots is None else spec.shots
            harness_task.set_config(key="num_fewshot", value=shots)
        harness_task.set_fewshot_seed(seed=EXAMPLES_SEED)
        documents += [HarnessItem(harness_task, number) for number in range(len(harness_task.eval_docs))]
    return Items(task, spec, tuple(sampled(documents, spec.limit, spec.seed)), ())


def _load_tasks(spec: HarnessTask, files: SuiteFiles, setting: str) -> list[Task]:
    """Load the harness's tasks by the name of a task or group, or from a task file."""
    path = files.file(spec.task).resolve() if spec.task.endswith((".yaml", ".yml")) else None
    if path and not path.is_file():
        raise UsageError(f"{setting} is {path}, which is not a file; a suite's paths are relative to the suite's own file")
    if path and not files.allow_code:
        raise UsageError(
            f"{setting} is {path}: a task file may run Python, by its functions, metrics and templates; "
            "read it and the files that it names, then set allow_code: true in the suite"
        )
    if path is None and spec.task not in task_index().all_tasks:
        raise UsageError(
            f"{setting} is {spec.task!r}, which lm-evaluation-harness does not know; `lm-eval ls tasks` lists all"
        )
    try:
        manager = TaskManager(include_path=path.parent, include_defaults=False) if path else task_index()
        name = path.stem if path else spec.task
        with contextlib.chdir(path.parent if path else Path.cwd()):  # paths in a task file are relative to it
            loaded = manager.load(name if name in manager.all_tasks else str(path))  # a group is loaded by its name only
    except Exception as error:  # from `datasets`, the network or the file: many types without a common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{setting} is {spec.task}, whose data or task file cannot be read: {reason}. Data of the Hub must be in "
            "the cache of `datasets`; your own task file names local data in dataset_kwargs.data_files"
        ) from error
    return list(loaded["tasks"].values())


@functools.cache
def task_index() -> Any:
    """Index the harness's own tasks: 14,000 files, which take eight seconds to read."""
    return TaskManager()


def run(items: Items[HarnessItem], subject: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Let the harness ask the model and judge its answers.

    The result has each metric of the task that is a mean over items, and of multiple choice the bits per byte of the right
    answer. By `evaluate`, since `simple_evaluate` asks git and pip for versions, which takes 1.5 s.
    """
    tasks: dict[str, Task] = {}
    numbers: dict[str, list[int]] = defaultdict(list)
    places: dict[tuple[str, int], int] = {}
    for place, (task, number) in enumerate(items.items):
        tasks[task.task_name] = task
        numbers[task.task_name].append(number)
        places[task.task_name, number] = place
    for task in tasks.values():
        if others := [metric for metric, form in task.aggregation().items() if form not in FORMS]:
            log.warning("%s: not shown, since no mean over items: %s", task.task_name, ", ".join(others))
    judged = lm_eval.evaluate(HarnessModel(subject, progress), {"tasks": tasks}, samples=numbers, bootstrap_iters=0)
    rows: list[JsonDict] = [{} for _ in places]
    identities: list[object] = [None] * len(places)
    groups: dict[str, tuple[int, ...]] = {}
    values: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)  # of each metric, by the place of the item
    fields: dict[str, JsonDict] = {}
    for name, samples in judged["samples"].items():
        for sample in samples:
            place = places[name, sample["doc_id"]]
            identities[place] = [name, list(map(list, sample["arguments"])), str(sample["target"])]
            rows[place] |= _row(name, sample)
            for label, fields[label], amount, size in _values(tasks[name], sample):
                values[label][place] = amount, size
        groups[f"task={name}"] = tuple(sorted({places[name, sample["doc_id"]] for sample in samples}))
    metrics: list[Metric] = []
    for label, by_place in values.items():
        sums, sizes = zip(*(by_place.get(place, (0.0, 0.0)) for place in range(len(places))), strict=True)
        metrics.append(Metric(label, sums, sizes, **fields[label]))
    if not metrics:
        raise DataError(f"tasks.{items.task}: {items.spec} has no metric that is a mean over items; choose another task")
    by_task = groups if len(groups) > 1 else {}
    return replace(items, digests=digests(identities), groups=by_task).result(subject.name, metrics, rows)


def _values(task: Task, sample: JsonDict) -> Iterator[tuple[str, JsonDict, float, float]]:
    """The metrics of a sample that are quotients of sums over items: (name, fields of the metric, sum, size)."""
    aggregation, higher = task.aggregation(), task.higher_is_better()
    for metric in sample["metrics"]:
        if (form := FORMS.get(aggregation[metric])) is None:
            continue
        label = metric if sample["filter"] == "none" else f"{metric}_{sample['filter']}"
        amount, size = sample[metric] if isinstance(sample[metric], tuple | list) else (sample[metric], 1.0)
        fields = {"unit": "", **form, "higher_is_better": higher.get(metric) is not False}
        yield label, fields, float(-amount if form else amount), float(size)
    target = sample["target"]
    if task.OUTPUT_TYPE == "multiple_choice" and target in range(len(sample["arguments"])):
        [(log_likelihood, _)] = sample["resps"][target]
        size = len(sample["arguments"][target][1].encode("utf-8"))
        yield ANSWER_BITS, {**FORMS[aggregations.bits_per_byte], "higher_is_better": False}, -log_likelihood, float(size)


def _row(name: str, sample: JsonDict) -> JsonDict:
    """A sample for people: the end of its prompt, the answers, the value of each metric."""
    responses = [str(first)[-ROW_CHARACTERS:] for first, *_ in sample["resps"]]
    values = {metric: str(sample[metric]) for metric in sample["metrics"]}
    prompt = str(sample["arguments"][0][0])[-ROW_CHARACTERS:]
    return {"task": name, "prompt": prompt, "responses": responses, **values}


class HarnessModel(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the three kinds of requests that tasks make.

    An `LM`, not a `TemplateLM`, which gives a continuation that merges into its context the
    probability 1.
    """

    def __init__(self, subject: EvaluatedModel, progress: ProgressCallback) -> None:
        super().__init__()
        self._subject, self._progress = subject, progress

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its context."""
        costs = log_likelihoods(self._subject, [request.args for request in requests], self._progress)
        return [(-cost.nats, cost.greedy) for cost in costs]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-likelihood of each whole text, in the harness's windows: they overlap by one token, the last one is full."""
        subject = self._subject
        start, length = beginning(subject)[-1], subject.max_length or DEFAULT_LENGTH
        encoded = subject.encoder.encode([request.args[0] for request in requests])
        sequences = [(ids := [start, *subject.begin_ids, *text_ids], [True] * len(ids)) for text_ids in encoded]
        scores = perplexity.score_each(
            subject.model,
            sequences,
            length=length,
            stride=length,
            device=subject.device,
            progress=self._progress,
            batch_tokens=subject.batch_tokens,
        )
        return [-score.nats for score in scores]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Greedy answer to each prompt, up to the first of its stop texts."""
        texts = [""] * len(requests)
        alike: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            if options["do_sample"]:
                raise UsageError(
                    f"task {request.task_name} has do_sample: true, but ttrain evaluates greedily; remove the task"
                )
            alike[tuple(options["until"]), options["max_gen_toks"]].append(number)
        for (stops, tokens), numbers in alike.items():
            room, longest = self._subject.room(tokens)
            encoded = self._subject.encoder.encode([requests[number].args[0] for number in numbers])
            prompts = [[*self._subject.begin_ids, *ids][-(longest or 0) :] for ids in encoded]
            answered = answers(self._subject, prompts, room, stops, self._progress)
            for number, answer in zip(numbers, answered, strict=True):
                texts[number] = answer.text
        return texts
