"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), run on our models.

The harness loads the data, writes the prompts and judges the answers; ttrain runs the model. Accuracies equal the harness's,
item by item. In a group of tasks every item counts the same, and `groups` has the metrics of each task.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lm_eval
import yaml
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

# Aggregations of the harness that are quotients of sums, by the names of its functions
MEANS = {"mean", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte"}

log = logging.getLogger("ttrain")


class HarnessItem(NamedTuple):
    """A document of a task, by its number there."""

    task: Task
    number: int


def read(task: str, spec: HarnessTask, files: SuiteFiles) -> Items[HarnessItem]:
    """Read the documents of the task, or of all tasks of a group, with their prompts.

    Raises UsageError if the harness does not know the task, or would run Python of a task file; DataError if the data cannot
    be loaded.
    """
    setting = files.setting(task, "task")
    tasks = _load_tasks(spec, files, setting)
    for name, harness_task in tasks.items():
        if any(getattr(harness_task, flag, False) for flag in ("UNSAFE_CODE", "MULTIMODAL")):
            raise UsageError(f"{setting} is {name}, which runs model-written code or needs images; remove it from the suite")
        default_shots = harness_task.get_config("num_fewshot")
        if default_shots != 0:  # as in the harness, a task that says 0 takes no examples
            shots = default_shots or 0 if spec.shots is None else spec.shots
            harness_task.set_config(key="num_fewshot", value=shots)
    documents: list[HarnessItem] = []
    for harness_task in tasks.values():
        count = len(harness_task.eval_docs)
        documents += [HarnessItem(harness_task, number) for number in range(count)]
    items = sampled(documents, spec.limit, spec.seed)
    identities: list[object] = []
    groups: dict[str, tuple[int, ...]] = {}
    for name, numbers in _numbers_by_task(items).items():
        groups[f"task={name}"] = tuple(range(len(identities), len(identities) + len(numbers)))
        identities += _identities(tasks[name], numbers if spec.limit else None)
    if len(groups) == 1:
        groups = {}
    return Items(task, spec, tuple(items), digests(identities), groups=groups)


def _identities(task: Task, numbers: list[int] | None) -> Iterator[object]:
    """What each of the documents asks, and by what it is judged; None: all of the task."""
    task.set_fewshot_seed(seed=EXAMPLES_SEED)
    with _quiet():
        task.build_all_requests(samples=numbers)
    requests: dict[int, list[list[str]]] = defaultdict(list)
    targets: dict[int, str] = {}
    for request in task.instances:
        requests[request.doc_id].append(list(map(str, request.args)))
        targets[request.doc_id] = str(task.doc_to_target(request.doc))
    for number, prompts in sorted(requests.items()):
        yield [task.task_name, prompts, targets[number]]


def _numbers_by_task(items: Sequence[HarnessItem]) -> dict[str, list[int]]:
    numbers_by_task: dict[str, list[int]] = defaultdict(list)
    for item in items:
        numbers_by_task[item.task.task_name].append(item.number)
    return numbers_by_task


def run(items: Items[HarnessItem], subject: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Let the harness run the model and judge its answers.

    The result has each metric of the task that is a mean over items. By `evaluate`, since
    `simple_evaluate` asks git and pip for versions, which takes 1.5 s, and may seed torch in the
    middle of a training.
    """
    tasks = {item.task.task_name: item.task for item in items.items}
    for task in tasks.values():
        task.set_fewshot_seed(seed=EXAMPLES_SEED)
    model = HarnessModel(subject, progress)
    numbers = _numbers_by_task(items.items) if items.spec.limit else None
    with _quiet():
        judged = lm_eval.evaluate(model, {"tasks": tasks}, samples=numbers, bootstrap_iters=0)
    places = {(item.task.task_name, item.number): place for place, item in enumerate(items.items)}
    rows: list[JsonDict] = [{} for _ in items.items]
    values: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for name, samples in judged["samples"].items():
        for sample in samples:
            place = places[name, sample["doc_id"]]
            row = rows[place]
            row["task"] = name
            row["prompt"] = _shown(sample["arguments"][0][0])
            row["responses"] = [_shown(first) for first, *_ in sample["resps"]]
            for metric in sample["metrics"]:
                value = values[metric, sample["filter"]][place] = sample[metric]
                is_plain = isinstance(value, int | float | str)
                row[_label(metric, sample["filter"])] = value if is_plain else _shown(value)
    figures = _figures(list(tasks.values()), values, len(rows))
    if not figures:
        raise DataError(f"tasks.{items.task}: {items.spec} has no metric that is a mean over items; choose another task")
    return items.result(subject.name, figures, rows)


def _figures(tasks: Sequence[Task], values: Mapping[tuple[str, str], Mapping[int, Any]], count: int) -> list[Metric]:
    """The metrics that are means over items."""
    higher: dict[str, bool] = {}
    means: dict[str, Callable[[Any], Any]] = {}
    for task in tasks:
        higher |= task.higher_is_better() or {}
        means |= task.aggregation() or {}
    figures: list[Metric] = []
    for (metric, name), by_document in values.items():
        label, is_higher_better = _label(metric, name), higher.get(metric, True)
        figure = _figure(label, by_document, count, means.get(metric), higher=is_higher_better)
        if figure is None:
            log.warning("%s is not a mean over items; it is not shown", metric)
        else:
            figures.append(figure)
    return figures


def _figure(name: str, by_document: Mapping[int, Any], count: int, mean: Any, *, higher: bool) -> Metric | None:
    """Express the metric as sums over items, by the harness's aggregation; None if it is not a quotient of sums."""
    kind = getattr(mean, "__name__", "")
    sums, sizes = [0.0] * count, [0.0] * count
    for number, value in by_document.items():
        amount, size = value if isinstance(value, tuple | list) else (value, 1.0)
        if kind not in MEANS or not isinstance(amount, int | float):
            return None
        if not (kind == "nanmean" and math.isnan(amount)):
            sums[number], sizes[number] = float(amount), float(size)
    if kind in ("mean", "nanmean"):
        return Metric(name, tuple(sums), tuple(sizes), higher_is_better=higher, unit="")
    costs = tuple(-amount for amount in sums)  # the harness gives log-likelihoods
    metric = Metric(name, costs, tuple(sizes), higher_is_better=False, unit="", shown="exp")
    if kind == "bits_per_byte":
        return replace(metric, unit="bits per byte", factor=1 / LN2, shown=None)
    return metric


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's progress bars and log lines."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _label(metric: str, name: str) -> str:
    """Metric name such as acc, or exact_match_strict-match if the harness has several filters of answers."""
    return re.sub(r"[^\w.-]", "_", metric if name == "none" else f"{metric}_{name}")


def _shown(value: object) -> str:
    return str(value)[-ROW_CHARACTERS:]


def _loud(method: Callable[..., Any]) -> Callable[..., Any]:
    """Give standard error, with our own display, back to the model while the harness is silent."""

    @functools.wraps(method)
    def answered(model: HarnessModel, requests: Sequence[Instance]) -> Any:
        with contextlib.redirect_stderr(model._stderr):
            return method(model, requests)

    return answered


class HarnessModel(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the three kinds of requests that tasks make.

    An `LM`, not a `TemplateLM`, which gives a continuation that merges into its context the
    probability 1.
    """

    def __init__(self, subject: EvaluatedModel, progress: ProgressCallback) -> None:
        super().__init__()
        self._subject, self._progress = subject, progress
        self._stderr = sys.stderr

    @_loud
    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its context."""
        costs = log_likelihoods(self._subject, [request.args for request in requests], self._progress)
        return [(-cost.nats, cost.greedy) for cost in costs]

    @_loud
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
        scores = score_pairs(self._subject, pairs, self._progress)
        for number, (nats, _) in zip(owners, scores, strict=True):
            totals[number] -= nats
        return totals

    @_loud
    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Greedy answer to each prompt, up to the first of its stop texts."""
        texts = [""] * len(requests)
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            if options["do_sample"]:
                raise UsageError(
                    f"task {request.task_name} has do_sample: true, but ttrain evaluates greedily; remove the task"
                )
            alike.setdefault((tuple(options["until"]), options["max_gen_toks"]), []).append(number)
        for (stops, tokens), numbers in alike.items():
            room, longest = self._subject.room(tokens)
            encoded = self._subject.encoder.encode([requests[number].args[0] for number in numbers])
            prompts = [[*self._subject.begin_ids, *ids][-(longest or 0) :] for ids in encoded]
            answered = answers(self._subject, prompts, room, stops, self._progress)
            for number, (_, text, _) in zip(numbers, answered, strict=True):
                texts[number] = text
        return texts


def _load_tasks(spec: HarnessTask, files: SuiteFiles, setting: str) -> dict[str, Task]:
    """Load the harness's tasks by the name of a task or group, or from a task file."""
    path = files.file(spec.task).resolve() if spec.task.endswith((".yaml", ".yml")) else None
    if path is None and spec.task not in (names := task_index().all_tasks):
        near = difflib.get_close_matches(spec.task, names, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists them all"
        raise UsageError(f"{setting} is {spec.task!r}, which lm-evaluation-harness does not know{hint}")
    if path and not path.is_file():
        raise UsageError(f"{setting} is {path}, which is not a file; a suite's paths are relative to the suite's own file")
    if path and not files.allow_code:
        raise UsageError(
            f"{setting} is {path}: a task file may run Python, by its functions, metrics and templates; "
            "read it and the files that it names, then set allow_code: true in the suite"
        )
    try:
        source = _task_or_group(path) if path else spec.task
        # A group may name any task; relative paths in a task file are relative to it.
        manager = TaskManager(include_defaults=False) if source == str(path) else task_index()
        with _quiet(), contextlib.chdir(path.parent if path else Path.cwd()):
            tasks: dict[str, Task] = manager.load(source)["tasks"]
    except Exception as error:  # from `datasets`, the network or the file: many types without a common base
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{setting} is {spec.task}, whose data or task file cannot be read: {reason}. Data of the Hub must be in "
            "the cache of `datasets`, or in a directory of their name, such as allenai/ai2_arc, in the working directory; "
            "your own task file names local data in dataset_kwargs.data_files"
        ) from error
    return tasks


@functools.cache
def task_index() -> Any:
    """Index the harness's own tasks: 14,000 files, which take eight seconds to read."""
    return TaskManager()


class TaskFile(yaml.CSafeLoader):
    """Reads a task file with the names of its functions as texts."""


TaskFile.add_constructor("!function", lambda loader, node: node.value)


def _task_or_group(path: Path) -> str | list[Any]:
    """A task file's path, or the tasks of a group file, which the harness cannot open by path."""
    config = yaml.load(path.read_bytes(), TaskFile)
    return list(config["task"]) if "group" in config else str(path)
