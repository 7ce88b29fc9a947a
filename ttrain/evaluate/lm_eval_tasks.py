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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
import yaml
from lm_eval import utils
from lm_eval.api import metrics as harness_metrics
from lm_eval.api import registry
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ttrain.config import yaml_text
from ttrain.config.evaluate import HarnessTask
from ttrain.core.files import JsonDict, user_path
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

log = logging.getLogger("ttrain")


@dataclass(frozen=True, eq=False)
class HarnessDocument:
    """An item: the harness's task, the task's own document, and its requests to a model."""

    task: Task
    name: str
    content: Any
    requests: tuple[Instance, ...]


def read(task: str, spec: HarnessTask, files: SuiteFiles) -> Items[HarnessDocument]:
    """Read the documents of the task, or of all tasks of a group, with their prompts.

    Raises UsageError if the harness does not know the task, or would run Python of a task file; DataError if the data cannot
    be loaded.
    """
    setting = files.setting(task, "task")
    documents: list[HarnessDocument] = []
    for name, harness_task in _load_tasks(spec, files, setting).items():
        documents += _documents(name, harness_task, spec, setting)
    documents = sampled(documents, spec.limit, spec.seed)
    numbers_by_name: dict[str, list[int]] = defaultdict(list)
    for number, document in enumerate(documents):
        numbers_by_name[document.name].append(number)
    several = numbers_by_name if len(numbers_by_name) > 1 else {}
    groups = {f"task={name}": tuple(numbers) for name, numbers in several.items()}
    identities = [
        [
            document.name,
            [list(map(str, request.args)) for request in document.requests],
            str(document.task.doc_to_target(document.content)),
        ]
        for document in documents
    ]
    return Items(task, spec, tuple(documents), digests(identities), groups=groups)


def run(items: Items[HarnessDocument], subject: EvaluatedModel, progress: ProgressCallback) -> TaskResult:
    """Run the model and let the harness judge its answers: a metric for each of the task's that is a mean over items."""
    model = HarnessModel(subject, progress)
    requests: dict[str, list[Instance]] = defaultdict(list)
    for document in items.items:
        for request in document.requests:
            request.resps.clear()
            request.filtered_resps.clear()
            requests[request.request_type] += [request] * (request.repeats or 1)
    for kind, some in requests.items():
        for request, answer in zip(some, getattr(model, kind)(some), strict=True):
            request.resps.append(answer)
    figures, rows = _collect_metrics(items.items)
    if not figures:
        raise DataError(f"tasks.{items.task}: {items.spec} has no metric that is a mean over items; choose another task")
    return items.result(subject.name, figures, rows)


def _collect_metrics(documents: Sequence[HarnessDocument]) -> tuple[list[Metric], list[JsonDict]]:
    """Compute the harness's own metrics, by metric and filter, and the rows with those of each document."""
    for task in {id(document.task): document.task for document in documents}.values():
        task._instances = [request for document in documents if document.task is task for request in document.requests]
        task.apply_filters()
    values: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    higher: dict[str, bool] = {}
    means: dict[str, Callable[[Any], Any]] = {}
    rows: list[JsonDict] = []
    for number, document in enumerate(documents):
        row: JsonDict = {"task": document.name, "asked": _shown(document.requests[0].args[0])}
        for name in document.requests[0].filtered_resps:
            metrics = document.task.process_results(
                document.content, [request.filtered_resps[name] for request in document.requests]
            )
            for metric, value in metrics.items():
                values[metric, name][number] = value
                row[_label(metric, name)] = value if isinstance(value, int | float | str) else _shown(value)
            higher |= document.task.higher_is_better() or {}
            means |= document.task.aggregation() or {}
        row["said"] = [_shown(request.resps[0]) for request in document.requests]
        rows.append(row)
    figures = []
    for (metric, name), by_document in values.items():
        figure = _figure(_label(metric, name), by_document, len(documents), means.get(metric), higher.get(metric, True))
        if figure is None:
            log.warning("%s is not a mean over items; it is not shown", metric)
        else:
            figures.append(figure)
    return figures, rows


def _figure(name: str, by_document: Mapping[int, Any], count: int, mean: Any, higher: bool) -> Metric | None:
    """Express the metric as sums over items, by the harness's aggregation; None if it is not a quotient of sums."""
    kind = getattr(mean, "__name__", "")
    if kind not in {"mean", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte"}:
        return None
    sums, sizes = [0.0] * count, [0.0] * count
    for number, value in by_document.items():
        amount, size = value if isinstance(value, tuple | list) else (value, 1.0)
        if not isinstance(amount, int | float):
            return None
        if not (kind == "nanmean" and math.isnan(amount)):
            sums[number], sizes[number] = float(amount), float(size)
    if kind in {"mean", "nanmean"}:
        return Metric(name, tuple(sums), tuple(sizes), higher_is_better=higher, unit="")
    costs = tuple(-amount for amount in sums)  # the harness gives log-likelihoods
    if kind == "bits_per_byte":
        return Metric(name, costs, tuple(sizes), higher_is_better=False, unit="bits per byte", factor=1 / LN2)
    return Metric(name, costs, tuple(sizes), higher_is_better=False, unit="", shown="exp")


def _load_tasks(spec: HarnessTask, files: SuiteFiles, setting: str) -> dict[str, Task]:
    """Load the harness's tasks by the name of a task or group, or from a task file."""
    from lm_eval.tasks import TaskManager

    if not files.allow_code:
        sandbox_templates()
    source: Any = spec.task
    directory = Path.cwd()
    if Path(spec.task).suffix in {".yaml", ".yml"}:
        path = files.file(spec.task).resolve()
        if not path.is_file():
            raise UsageError(
                f"{setting} is {path}, which is not a file; a suite's paths are relative to the suite's own file"
            )
        if not files.allow_code:
            check_task_file(path, setting)
        source, directory = _task_or_group(path, setting), path.parent
        # A group may name any task
        manager = task_index() if isinstance(source, list) else TaskManager(include_defaults=False)
    else:
        manager = task_index()
        if source not in manager.all_tasks:
            near = difflib.get_close_matches(source, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists them all"
            raise UsageError(f"{setting} is {source!r}, which lm-evaluation-harness does not know{hint}")
    try:
        with _quiet(), contextlib.chdir(directory):  # relative paths in a task file are relative to it
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
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _task_or_group(path: Path, setting: str) -> str | list[Any]:
    """Return a task file's path, or the tasks of a group file, which the harness cannot open by its path."""
    try:
        text = path.read_text("utf-8")
        group = re.search(r"^group\s*:", text, re.MULTILINE) and yaml_text.parse(text)
    except (OSError, ValueError) as error:
        raise DataError(f"{setting}: cannot read {path}: {error}") from None
    return list(group.get("task") or []) if isinstance(group, dict) else str(path)


def _documents(name: str, task: Task, spec: HarnessTask, setting: str) -> Iterator[HarnessDocument]:
    """Yield the task's documents with their requests, as `lm_eval.evaluator.simple_evaluate` builds them."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UsageError(f"{setting} is {name}, which runs model-written code or needs images; remove it from the suite")
    default_shots = task.get_config("num_fewshot")
    if spec.shots is not None and default_shots != 0:
        task.set_config(key="num_fewshot", value=spec.shots)
    elif default_shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=EXAMPLES_SEED)
    with _quiet():
        task.build_all_requests()
        contents = dict(task.doc_iterator())
    requests: dict[int, list[Instance]] = defaultdict(list)
    for request in task.instances:
        requests[request.doc_id].append(request)
    for number, some in requests.items():
        yield HarnessDocument(task, name, contents[number], tuple(sorted(some, key=lambda request: request.idx)))


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


DEFAULT_LENGTH, DEFAULT_TOKENS = 2048, 256  # the defaults of the harness's own model


class HarnessModel(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the three kinds of requests that tasks make."""

    def __init__(self, subject: EvaluatedModel, progress: ProgressCallback) -> None:
        super().__init__()
        self._subject, self._progress = subject, progress

    def loglikelihood(self, requests: Sequence[Instance], **others: Any) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its context."""
        costs = log_likelihoods(self._subject, [request.args for request in requests], self._progress)
        return [(-cost.nats, cost.greedy) for cost in costs]

    def loglikelihood_rolling(self, requests: Sequence[Instance], **others: Any) -> list[float]:
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

    def generate_until(self, requests: Sequence[Instance], **others: Any) -> list[str]:
        """Greedy answer to each prompt, up to the first of its stop texts."""
        texts = [""] * len(requests)
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            options = dict(request.args[1])
            if options.get("do_sample"):
                raise UsageError(
                    f"task {request.task_name} has do_sample: true, but ttrain evaluates greedily; remove the task"
                )
            until = options.get("until") or ()
            stops = (until,) if isinstance(until, str) else tuple(until)
            tokens = next(
                (options[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if options.get(key)),
                DEFAULT_TOKENS,
            )
            alike.setdefault((stops, int(tokens)), []).append(number)
        for (stops, tokens), numbers in alike.items():
            room, longest = self._subject.room(tokens)
            encoded = self._subject.encoder.encode([requests[number].args[0] for number in numbers])
            prompts = [[*self._subject.begin_ids, *ids][-(longest or 0) :] for ids in encoded]
            answered = answers(self._subject, prompts, room, stops, self._progress)
            for number, (_, text, _) in zip(numbers, answered, strict=True):
                texts[number] = text
        return texts


# --- task files that run Python --------------------------------------------------------------------------------------------
# `!function` in such a file imports a module, and a metric that is not the harness's own is a script that the library
# `evaluate` runs. Included files and the files that a group names count as well; the harness's own do not. Prompt templates
# can run Python, too: the harness renders them in an environment that reaches every module (0.4.13), so they get a sandbox.
FUNCTION = "!function"
MAX_BYTES, MAX_FILES = yaml_text.MOST_BYTES, 1000
FIX = "to run it with your full rights, read the file and the module that it names, then set allow_code: true in the suite"


def check_task_file(path: Path, setting: str) -> None:
    """Raise UsageError, with file and line, if the task file at `path` or one that it reads runs Python.

    Raises DataError for a file that cannot be read.
    """
    pending, visited = [path.resolve()], set[Path]()
    while pending:
        file = pending.pop()
        if file in visited or file.is_relative_to(Path(lm_eval.__file__).resolve().parent):  # one of the harness
            continue
        visited.add(file)
        if len(visited) > MAX_FILES:
            raise DataError(f"{setting}: {path} reads more than {MAX_FILES} files; split it")
        try:
            tree = _parsed(file)
        except _FunctionCall as call:
            name, line = call.args
            message = f"{setting} is {path}, which runs Python: {FUNCTION} {name} in {file}, line {line}; {FIX}"
            raise UsageError(message) from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{setting}: cannot read {file}: {' '.join(str(error).split())}") from None
        for metric in _metrics(tree):
            if not _is_metric_of_the_harness(metric):
                script = metric["metric"]
                raise UsageError(
                    f"{setting} is {path}, which runs Python: the metric {script!r} in {file} is not the harness's own "
                    f"but a script; {FIX}"
                )
        pending += [linked.resolve() for linked in _files_named(tree, file.parent, path.parent) if linked.is_file()]


def sandbox_templates() -> None:
    """Make the harness render the templates of task files in Jinja's sandbox."""
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    if not isinstance(utils.env, SandboxedEnvironment):
        sandboxed = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
        sandboxed.filters.update(utils.env.filters)
        utils.env = sandboxed


class _FunctionCall(Exception):
    """A file names a function, which the harness would import: (name, line)."""


def _parsed(file: Path) -> Any:
    """The contents of a file. Raises _FunctionCall."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return yaml.load(file.read_bytes().decode("utf-8-sig"), _Loader)


class _Loader(yaml_text.Loader):
    """Loads the harness's files, within the limits of settings files, without importing the functions that they name."""

    tags = yaml_text.PLAIN | {FUNCTION}


def _refuse(loader: yaml.Loader, node: yaml.Node) -> None:
    raise _FunctionCall(node.value, node.start_mark.line + 1)


_Loader.add_constructor(FUNCTION, _refuse)


def _nested(tree: Any) -> Iterator[Any]:
    """Yield every value in a tree, each once, so that nested aliases do not multiply."""
    pending, visited = [tree], set[int]()
    while pending:
        value = pending.pop()
        if id(value) not in visited:
            visited.add(id(value))
            yield value
            pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _metrics(tree: Any) -> Iterator[dict[str, Any]]:
    for value in _nested(tree):
        listed = value.get("metric_list") if isinstance(value, dict) else None
        for metric in listed if isinstance(listed, list) else ():
            if isinstance(metric, dict) and "metric" in metric:
                yield metric


def _is_metric_of_the_harness(metric: dict[str, Any]) -> bool:
    assert harness_metrics, "the import fills the registry"
    return metric.get("hf_evaluate") is not True and metric["metric"] in list(registry.metric_registry)


def _files_named(tree: Any, directory: Path, working_directory: Path) -> Iterator[Path]:
    """Yield the files that a file includes, in its own directory, and a group's task files, in the working directory."""
    if not isinstance(tree, dict):
        return
    for key in ("include", "task"):
        references = tree.get(key)
        for name in references if isinstance(references, list) else [references]:
            if isinstance(name, str):
                yield directory / name
                yield working_directory / user_path(name)
