"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), asked of our models.

The harness loads the data, writes the prompts and judges the answers; the model is asked here. An accuracy is its own, item
by item. Of a group of tasks every item counts the same, and `groups` has the figures of each task.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import yaml_text
from ttrain.config.suite import HarnessTask
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import lm_eval_code
from ttrain.evaluate.evaluated_model import Progress, Subject
from ttrain.evaluate.items import Items, Places, digests
from ttrain.evaluate.task_result import LN2, Figure, Outcome

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task

INSTALL = "lm-evaluation-harness is not installed; install it with: pip install 'ttrain[harness]'"
EXAMPLES_SEED = 1234  # the harness's own, so that prompts are those of published results
ROW_CHARACTERS = 2000  # of a prompt that a row of results shows, from its end
log = logging.getLogger("ttrain")


@dataclass(frozen=True, eq=False)
class Document:
    """An item: its task of the harness, the task's own document, and the requests that it makes of a model."""

    task: Task
    name: str
    content: Any
    requests: tuple[Instance, ...]


def read(task: str, spec: HarnessTask, places: Places) -> Items[Document]:
    """The documents of the task, or of all tasks of a group, with their prompts.

    Raises UsageError where the harness is missing, knows no such task, or would run Python of a task file, DataError where
    the data cannot be had.
    """
    setting = places.setting(task, "task")
    documents: list[Document] = []
    for name, one in _loaded(spec, places, setting).items():
        documents += _documents(name, one, spec, setting)
    if spec.limit is not None and spec.limit < len(documents):
        chosen = sorted(random.Random(spec.seed).sample(range(len(documents)), spec.limit))
        documents = [documents[number] for number in chosen]
    names: dict[str, list[int]] = defaultdict(list)
    for number, document in enumerate(documents):
        names[document.name].append(number)
    groups = {f"task={name}": tuple(numbers) for name, numbers in names.items()} if len(names) > 1 else {}
    asked = [
        [one.name, [[str(part) for part in request.args] for request in one.requests], _target(one)] for one in documents
    ]
    return Items(task, spec, tuple(documents), digests(asked), groups=groups)


def run(items: Items[Document], subject: Subject, progress: Progress) -> Outcome:
    """What the harness makes of the model's answers: a figure for each metric that is a mean over items."""
    from ttrain.evaluate.lm_eval_model import HarnessModel

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
    found = _judged(items.items)
    if not found.figures:
        raise DataError(f"tasks.{items.task}: {items.spec} has no metric that is a mean over items")
    return Outcome(items.task, items.spec.kind, subject.name, items.digests, found.figures, found.rows, {}, items.groups)


@dataclass(frozen=True)
class _Judged:
    figures: tuple[Figure, ...]
    rows: list[dict[str, Any]]


def _judged(documents: Sequence[Document]) -> _Judged:
    """The harness's own metrics of each document, by metric and filter."""
    for task in {id(document.task): document.task for document in documents}.values():
        task._instances = [request for one in documents if one.task is task for request in one.requests]
        task.apply_filters()
    values: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    higher: dict[str, bool] = {}
    means: dict[str, Callable[[Any], Any]] = {}
    rows: list[dict[str, Any]] = []
    for number, document in enumerate(documents):
        row: dict[str, Any] = {"task": document.name, "asked": _shown(document.requests[0].args[0])}
        for name in document.requests[0].filtered_resps:
            metrics = document.task.process_results(
                document.content, [one.filtered_resps[name] for one in document.requests]
            )
            for metric, value in metrics.items():
                values[metric, name][number] = value
                row[_label(metric, name)] = value if isinstance(value, int | float | str) else _shown(value)
            higher |= document.task.higher_is_better() or {}
            means |= document.task.aggregation() or {}
        row["said"] = [_shown(request.resps[0]) for request in document.requests]
        rows.append(row)
    figures = []
    for (metric, name), found in values.items():
        figure = _figure(_label(metric, name), found, len(documents), means.get(metric), higher.get(metric, True))
        if figure is None:
            log.warning("%s is no mean over items, so that it is not shown", metric)
        else:
            figures.append(figure)
    return _Judged(tuple(figures), rows)


def _figure(name: str, found: Mapping[int, Any], count: int, mean: Any, higher: bool) -> Figure | None:
    """The metric as sums over items, by the harness's own way of joining it; None where it is no quotient of sums."""
    kind = getattr(mean, "__name__", "")
    if kind not in {"mean", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte"}:
        return None
    sums, sizes = [0.0] * count, [0.0] * count
    for number, value in found.items():
        amount, size = value if isinstance(value, tuple | list) else (value, 1.0)
        if not isinstance(amount, int | float):
            return None
        if not (kind == "nanmean" and math.isnan(amount)):
            sums[number], sizes[number] = float(amount), float(size)
    if kind in {"mean", "nanmean"}:
        return Figure(name, tuple(sums), tuple(sizes), higher_is_better=higher, unit="")
    costs = tuple(-amount for amount in sums)  # the harness has log-likelihoods
    if kind == "bits_per_byte":
        return Figure(name, costs, tuple(sizes), higher_is_better=False, unit="bits per byte", factor=1 / LN2)
    return Figure(name, costs, tuple(sizes), higher_is_better=False, unit="", shown="exp")


def _loaded(spec: HarnessTask, places: Places, setting: str) -> dict[str, Task]:
    """The harness's tasks of that name, which may be a group, or of a task file."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(f"{setting} is {spec.task}, but {INSTALL} ({error})") from None
    if not places.allow_code:
        lm_eval_code.sandbox_templates()
    wanted: Any = spec.task
    where = Path.cwd()
    if Path(spec.task).suffix in {".yaml", ".yml"}:
        path = places.file(spec.task).resolve()
        if not path.is_file():
            raise UsageError(f"{setting} is {path}, which is no file; a suite's paths are relative to the suite's own file")
        if not places.allow_code:
            lm_eval_code.check(path, setting)
        wanted, where = _task_or_group(path, setting), path.parent
        manager = _index() if isinstance(wanted, list) else TaskManager(include_defaults=False)  # a group may name any task
    else:
        manager = _index()
        if wanted not in manager.all_tasks:
            near = difflib.get_close_matches(wanted, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `lm-eval ls tasks` lists them all"
            raise UsageError(f"{setting} is {wanted!r}, which lm-evaluation-harness does not know{hint}")
    try:
        with _quiet(), contextlib.chdir(where):  # files that a task file names lie beside it
            found: dict[str, Task] = manager.load(wanted)["tasks"]
    except Exception as error:  # of `datasets`, of the network, of the file: many kinds without a common parent
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{setting} is {spec.task}, whose data or task file cannot be read: {reason}. Data of the Hub have to be "
            "in the cache of `datasets`, or in a directory of their name, such as allenai/ai2_arc, where the command runs; "
            "a task file of your own names local data in dataset_kwargs.data_files"
        ) from error
    return found


@functools.cache
def _index() -> Any:
    """The harness's own tasks: 14,000 files, which take eight seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _task_or_group(path: Path, setting: str) -> str | list[Any]:
    """A task file's path; of a group, which the harness cannot open by its path, the tasks that it names."""
    try:
        text = path.read_text("utf-8")
        group = re.search(r"^group\s*:", text, re.MULTILINE) and yaml_text.parse(text)
    except (OSError, ValueError) as error:
        raise DataError(f"{setting}: cannot read {path}: {error}") from None
    return list(group.get("task") or []) if isinstance(group, dict) else str(path)


def _documents(name: str, task: Task, spec: HarnessTask, setting: str) -> Iterator[Document]:
    """The task's documents with their requests, as `lm_eval.evaluator.simple_evaluate` makes them."""
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise UsageError(f"{setting} is {name}, which runs code that a model wrote, or asks about pictures; leave it out")
    own = task.get_config("num_fewshot")
    if spec.shots is not None and own != 0:
        task.set_config(key="num_fewshot", value=spec.shots)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=EXAMPLES_SEED)
    with _quiet():
        task.build_all_requests()
        contents = dict(task.doc_iterator())
    requests: dict[int, list[Instance]] = defaultdict(list)
    for request in task.instances:
        requests[request.doc_id].append(request)
    for number, some in requests.items():
        yield Document(task, name, contents[number], tuple(sorted(some, key=lambda request: request.idx)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's bars, and without what it tells of each task."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _label(metric: str, name: str) -> str:
    """acc; exact_match_strict-match where the harness filters answers in more than one way."""
    return re.sub(r"[^\w.-]", "_", metric if name == "none" else f"{metric}_{name}")


def _target(document: Document) -> str:
    return str(document.task.doc_to_target(document.content))


def _shown(value: object) -> str:
    return str(value)[-ROW_CHARACTERS:]
