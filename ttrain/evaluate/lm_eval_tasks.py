"""Tasks of kind `harness`: lm-evaluation-harness asks our model and judges it; its samples become metrics over items.

A group is one task here, whose `groups` have the metrics of each of its tasks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ttrain.config.evaluate import HarnessTask
from ttrain.core.files import JsonDict
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.evaluated_model import EvaluatedModel, ProgressCallback
from ttrain.evaluate.generation import answers
from ttrain.evaluate.items import Items, SuiteFiles, digests, sampled
from ttrain.evaluate.log_likelihood import beginning, log_likelihoods, score_pairs
from ttrain.evaluate.task_result import LN2, Metric, TaskResult

if TYPE_CHECKING:
    from lm_eval.api.task import Task

EXAMPLES_SEED = 1234  # the harness's default, so that prompts equal those of published results
ROW_CHARACTERS = 2000  # from the end of a prompt, shown in a row of results
DEFAULT_LENGTH = 2048  # of the harness's own model
ANSWER_BITS = ("bits_per_byte", "none")  # of the right choice: not a metric of the harness

Values = dict[int, Any]  # of a metric, by the number of the item

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
    for harness_task in _load_tasks(spec, files, files.setting(task, "task")):
        default_shots = harness_task.get_config("num_fewshot")
        if default_shots != 0:  # as in the harness, a task that says 0 takes no examples
            shots = default_shots or 0 if spec.shots is None else spec.shots
            harness_task.set_config(key="num_fewshot", value=shots)
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
    for harness_task, number in items.items:
        tasks[harness_task.task_name] = harness_task
        numbers[harness_task.task_name].append(number)
    for harness_task in tasks.values():
        harness_task.set_fewshot_seed(seed=EXAMPLES_SEED)
    judged = lm_eval.evaluate(HarnessModel(subject, progress), {"tasks": tasks}, samples=numbers, bootstrap_iters=0)
    places = {(task.task_name, number): place for place, (task, number) in enumerate(items.items)}
    rows: list[JsonDict] = [{} for _ in places]
    identities: list[object] = [None] * len(places)
    groups: dict[str, list[int]] = defaultdict(list)
    metrics: list[Metric] = []
    for name, samples in judged["samples"].items():
        values: dict[tuple[str, str], Values] = defaultdict(dict)
        for sample in samples:
            place = places[name, sample["doc_id"]]
            identities[place] = [name, list(map(list, sample["arguments"])), str(sample["target"])]
            rows[place] |= _row(name, sample)
            for metric in sample["metrics"]:
                values[metric, sample["filter"]][place] = sample[metric]
            if tasks[name].OUTPUT_TYPE == "multiple_choice":
                values[ANSWER_BITS][place] = _right_answer(sample)
        groups[f"task={name}"] = sorted({places[name, sample["doc_id"]] for sample in samples})
        metrics += _metrics(values, judged["results"][name], judged["higher_is_better"][name], len(places))
    merged = _merged(metrics)
    if not merged:
        raise DataError(f"tasks.{items.task}: {items.spec} has no metric that is a mean over items; choose another task")
    by_task = {name: tuple(group) for name, group in groups.items()} if len(groups) > 1 else {}
    return replace(items, digests=digests(identities), groups=by_task).result(subject.name, merged, rows)


def _row(name: str, sample: JsonDict) -> JsonDict:
    responses = [_shown(first) for first, *_ in sample["resps"]]
    row: JsonDict = {"task": name, "prompt": _shown(sample["arguments"][0][0]), "responses": responses}
    for metric in sample["metrics"]:
        value = sample[metric]
        row[_label(metric, sample["filter"])] = value if isinstance(value, int | float | str) else _shown(value)
    return row


def _right_answer(sample: JsonDict) -> tuple[float, float]:
    """(log-likelihood, bytes) of the right choice; (0, 0), which does not count, where the task has no single one."""
    target = sample["target"]
    if not isinstance(target, int) or not 0 <= target < len(sample["arguments"]):
        return 0.0, 0.0
    [(log_likelihood, _)] = sample["resps"][target]
    return log_likelihood, float(len(sample["arguments"][target][1].encode("utf-8")))


def _metrics(
    values: Mapping[tuple[str, str], Values], results: JsonDict, higher: Mapping[str, bool], count: int
) -> list[Metric]:
    """The metrics of one task that are quotients of sums over its items: those that give the harness's own value."""
    metrics: list[Metric] = []
    for (metric, name), by_item in values.items():
        sums, sizes = [0.0] * count, [0.0] * count
        for number, value in by_item.items():
            amount, size = value if isinstance(value, tuple | list) else (value, 1.0)
            if isinstance(amount, int | float) and not math.isnan(amount):
                sums[number], sizes[number] = float(amount), float(size)
        costs = tuple(-amount for amount in sums)  # the harness gives log-likelihoods
        is_higher_better = higher.get(metric) is not False
        forms = (
            Metric(_label(metric, name), tuple(sums), tuple(sizes), is_higher_better, ""),
            Metric(_label(metric, name), costs, tuple(sizes), False, "", shown="exp"),
            Metric(_label(metric, name), costs, tuple(sizes), False, "bits per byte", factor=1 / LN2),
        )
        reported = forms[2].value if (metric, name) == ANSWER_BITS else results.get(f"{metric},{name}", math.nan)
        equal = [form for form in forms if math.isclose(form.value, reported, rel_tol=1e-9)]
        if equal:
            metrics.append(equal[0])
        elif (metric, name) != ANSWER_BITS:
            log.warning("%s is not a mean over items; it is not shown", metric)
    return metrics


def _merged(metrics: Sequence[Metric]) -> list[Metric]:
    """One metric of each name over the items of all tasks, which have different ones."""
    merged: dict[str, Metric] = {}
    for metric in metrics:
        if first := merged.get(metric.name):
            sums = tuple(a + b for a, b in zip(first.sums, metric.sums, strict=True))
            sizes = tuple(a + b for a, b in zip(first.sizes, metric.sizes, strict=True))
            metric = replace(metric, sums=sums, sizes=sizes)
        merged[metric.name] = metric
    return list(merged.values())


def _label(metric: str, name: str) -> str:
    """Metric name such as acc, or exact_match_strict-match if the harness has several filters of answers."""
    return metric if name == "none" else f"{metric}_{name}"


def _shown(value: object) -> str:
    return str(value)[-ROW_CHARACTERS:]


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
        encoded = self._subject.encoder.encode([request.args[0] for request in requests])
        start = beginning(self._subject)[-1]
        pairs, owners = [], []
        for number, ids in enumerate(encoded):
            windows = get_rolling_token_windows(
                token_list=[*self._subject.begin_ids, *ids], prefix_token=start,
                max_seq_len=self._subject.max_length or DEFAULT_LENGTH, context_len=1,
            )  # fmt: skip
            for window in windows:
                context, continuation = make_disjoint_window(window)
                pairs.append((tuple(context), tuple(continuation)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owners, score_pairs(self._subject, pairs, self._progress), strict=True):
            totals[number] -= nats
        return totals

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
