"""Tasks of kind `harness`: lm-evaluation-harness asks our model; its samples become metrics.

A group is one task here, whose `groups` have the metrics of each of its tasks.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lm_eval
from lm_eval.api import metrics as aggregations
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from ttrain.config.evaluate import HarnessTask, Windows
from ttrain.core.files import JsonDict
from ttrain.core.text import first_line
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import perplexity
from ttrain.evaluate.generation import answers
from ttrain.evaluate.items import Items, SuiteFiles, groups, sampled
from ttrain.evaluate.log_likelihood import log_likelihoods
from ttrain.evaluate.perplexity import ProgressCallback
from ttrain.evaluate.task_result import ANSWER_BITS, LN2, Metric, TaskResult, record_name
from ttrain.inference.loading import LoadedModel

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

HarnessItem = tuple[Task, int]  # a document of a task, by its number there


def read(task: str, spec: HarnessTask, files: SuiteFiles) -> Items[HarnessItem]:
    """Load the task, or all tasks of a group; digests are known once a model was asked.

    Raises UsageError if the harness does not know the task, DataError if its data cannot be loaded.
    """
    setting = f"tasks.{task}.task is {spec.task}"
    if (
        spec.task not in task_index().all_tasks
    ):  # a path, which the harness would open too, may run Python
        raise UsageError(
            f"{setting}, which lm-evaluation-harness does not know; "
            "`lm-eval ls tasks` lists the names"
        )
    try:
        loaded: list[Task] = list(task_index().load(spec.task)["tasks"].values())
    except Exception as error:  # from `datasets` or the network: many types without a common base
        raise DataError(
            f"{setting}, which cannot be loaded: {first_line(error)}. "
            "Data of the Hub must be in the cache of `datasets`"
        ) from error
    documents: list[HarnessItem] = []
    for harness_task in loaded:
        if (
            spec.shots is not None and harness_task.get_config("num_fewshot") != 0
        ):  # a task that says 0 takes no examples
            harness_task.set_config(key="num_fewshot", value=spec.shots)
        harness_task.set_fewshot_seed(seed=EXAMPLES_SEED)
        documents += [(harness_task, number) for number in range(len(harness_task.eval_docs))]
    drawn = sampled(documents, spec.limit, spec.seed)
    names = [{"task": harness_task.task_name} for harness_task, _ in drawn]
    return Items(task, spec, tuple(drawn), (), groups=groups(names, ["task"], len(drawn)))


@functools.cache
def task_index() -> Any:
    """Index the harness's own tasks: 14,000 files, which take eight seconds to read."""
    return TaskManager()


def run(items: Items[HarnessItem], subject: LoadedModel, progress: ProgressCallback) -> TaskResult:
    """Let the harness ask the model and judge its answers.

    The result has each metric that is a mean over items, and bits per byte of the right answer of
    multiple choice.
    """
    tasks = {task.task_name: task for task, _ in items.items}
    numbers: dict[str, list[int]] = {name: [] for name in tasks}
    for task, number in items.items:
        numbers[task.task_name].append(number)
    # Not `simple_evaluate`, which asks git and pip for versions for 1.5 s.
    judged = lm_eval.evaluate(
        HarnessModel(subject, progress), {"tasks": tasks}, samples=numbers, bootstrap_iters=0
    )
    places = {(task.task_name, number): place for place, (task, number) in enumerate(items.items)}
    rows = [JsonDict() for _ in places]
    digests = [""] * len(places)
    # By metric: sums and sizes
    parts: dict[str, tuple[list[float], list[float]]] = defaultdict(
        lambda: ([0.0] * len(places), [0.0] * len(places))
    )
    fields: dict[str, JsonDict] = {}
    for name, samples in judged["samples"].items():
        for sample in samples:  # several of an item where a task filters answers in several ways
            place = places[name, sample["doc_id"]]
            arguments = list(map(list, sample["arguments"]))
            digests[place] = record_name([name, arguments, str(sample["target"])])
            rows[place] |= {
                "task": name,
                "prompt": str(arguments[0][0])[-ROW_CHARACTERS:],
                "responses": [str(response)[-ROW_CHARACTERS:] for response, *_ in sample["resps"]],
                **{metric: str(sample[metric]) for metric in sample["metrics"]},
            }
            for label, fields[label], amount, size in _values(tasks[name], sample):
                parts[label][0][place] = amount
                parts[label][1][place] = size
    figures = [
        Metric(label, tuple(sums), tuple(sizes), **fields[label])
        for label, (sums, sizes) in parts.items()
    ]
    if not figures:
        raise DataError(
            f"tasks.{items.task}: {items.spec} has no metric that is a mean over items; "
            "choose another task"
        )
    return replace(items, digests=tuple(digests)).result(subject.name, figures, rows)


def _values(task: Task, sample: JsonDict) -> Iterator[tuple[str, JsonDict, float, float]]:
    # Of the metrics that are quotients of sums over items: (name, fields, sum, size).
    for metric in sample["metrics"]:
        if (form := FORMS.get(task.aggregation()[metric])) is not None:
            label = metric if sample["filter"] == "none" else f"{metric}_{sample['filter']}"
            amount, size = (
                sample[metric]
                if isinstance(sample[metric], tuple | list)
                else (sample[metric], 1.0)
            )
            yield (
                label,
                {**form, "higher_is_better": task.higher_is_better().get(metric) is not False},
                float(-amount if form else amount),
                float(size),
            )
    target = sample["target"]
    if task.OUTPUT_TYPE == "multiple_choice" and target in range(len(sample["arguments"])):
        [(log_likelihood, _)] = sample["resps"][target]
        size = len(sample["arguments"][target][1].encode("utf-8"))
        yield (
            ANSWER_BITS,
            {**FORMS[aggregations.bits_per_byte], "higher_is_better": False},
            -log_likelihood,
            float(size),
        )


class HarnessModel(LM):  # type: ignore[misc]  # the harness has no types
    """Answers the three kinds of requests that tasks make.

    An `LM`, not a `TemplateLM`, which gives a continuation that merges into its context the
    probability 1.
    """

    def __init__(self, subject: LoadedModel, progress: ProgressCallback) -> None:
        super().__init__()
        self._subject = subject
        self._progress = progress

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is greedy) of each continuation after its context."""
        costs = log_likelihoods(
            self._subject, [request.args for request in requests], self._progress
        )
        return [(-cost.nats, cost.greedy) for cost in costs]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Log-likelihood of each text, in the harness's windows, which overlap by one token."""
        subject = self._subject
        length = subject.max_length or DEFAULT_LENGTH
        start_ids = [subject.beginning()[-1], *subject.begin_ids]
        encoded = subject.encoder.encode([request.args[0] for request in requests])
        sequences = [([*start_ids, *ids], [True] * (len(start_ids) + len(ids))) for ids in encoded]
        scores = perplexity.score_items(
            Windows(row_length=length, stride=length), subject, sequences, self._progress
        )
        return [-score.nats for score in scores]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Greedy answer to each prompt, up to the first of its stop texts."""
        requests_of = Collator(
            [request.args for request in requests],
            lambda args: -len(args[0]),
            group_by="gen_kwargs",
        )
        texts: list[str] = []
        for alike in requests_of.get_batched(n=0):
            options = normalize_gen_kwargs(alike[0][1])
            if options["do_sample"]:
                raise UsageError(
                    "a task has do_sample: true, but ttrain evaluates greedily; "
                    "remove it from the suite"
                )
            room, longest = self._subject.room(options["max_gen_toks"])
            ids = self._subject.text_ids([prompt for prompt, _ in alike])
            prompts = [prompt_ids[-(longest or 0) :] for prompt_ids in ids]
            answered = answers(self._subject, prompts, room, options["until"], self._progress)
            texts += [text for _, text in answered]
        return list(requests_of.get_original(texts))
