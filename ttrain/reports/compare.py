"""How runs differ: settings, data, code, metrics, samples; for terminal, page and JSON."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Promotion, flatten
from ttrain.config.training import (
    EVALUATED,
    PRIMARY_METRICS,
    SEEDS,
    TRAININGS,
    VALIDATION_LOSS,
    model_order,
)
from ttrain.core.files import JsonDict
from ttrain.core.text import ABSENT, format_duration, format_number, format_time, is_number
from ttrain.evaluate.forgetting import advantage
from ttrain.evaluate.noise import noise_of
from ttrain.evaluate.task_result import SCORES, Metric, not_judged, read_scores
from ttrain.reports import facts
from ttrain.reports.summary import rounded
from ttrain.store.results import ShardsResult
from ttrain.store.run_views import RunView

Scores = Mapping[str, Metric]

# Settings that change no weight and no metric of a model: where and how fast a run goes, and who is
# notified.
SECTIONS_WITHOUT_RESULT = frozenset({*SHAPE_NO_RESULT, "name", "run"})
# Where runs share a model, the metric of the next model decides.
DECIDING_METRICS = (
    *(metric.of_run for metric in PRIMARY_METRICS.values()),
    *(f"{stage}/{VALIDATION_LOSS}" for stage in PRIMARY_METRICS),
)

EVALUATION = "evaluate"
# Why no run is the best by a metric.
OTHER_RECORDS = "other held-out records"
OTHER_TOKENIZERS = "other tokenizers"
WARNINGS = {
    OTHER_TOKENIZERS: "the tokenizers differ: losses are of different tokens and cannot be "
    "compared, bits per byte can",
    OTHER_RECORDS: "the held-out data differ: the evaluations are of different texts and cannot "
    "be compared; `ttrain eval` measures models on one text",
}
ADVISED_SEEDS = 5  # of a sweep that decides between two settings, as it is advised
ONLY_SEEDS = "the runs differ in their seeds or data alone, which says nothing about a setting"


@dataclass(frozen=True)
class Difference:
    """A row of a comparison: a setting, file, library or metric with each run's value."""

    name: str
    values: Sequence[Any]  # of each run: texts; of a metric numbers
    best: int | None = None  # number of the best run
    better: int = 0  # of a metric: -1 where less is better, 1 where more is
    not_judged: str = ""  # why no run is the best, of a metric on held-out records

    @property
    def title(self) -> str:
        return ": ".join(filter(None, (self.name, self.not_judged)))

    @property
    def texts(self) -> list[str]:
        """The value of each run; metrics with the change from the first run."""
        base: float | None = None
        texts: list[str] = []
        for value in self.values:
            if value is None or is_number(value):
                change = "" if self.not_judged else facts.change(value, base)
                texts.append(f"{format_number(value, self.name)}  {change}".rstrip())
                base = value if base is None else base
            else:
                texts.append(value)
        return texts


@dataclass(frozen=True)
class RunComparison:
    """Two or more runs side by side, in the order of each row's values."""

    runs: Sequence[str]
    verdict: str  # whose model is better on the held-out records, by which metric
    is_certain: bool  # whether the interval of that difference excludes zero
    remarks: Sequence[str]  # what cannot be compared
    notes: Sequence[str]  # what could not be read, and what was read instead
    settings: Sequence[Difference]
    metrics: Sequence[Difference]
    data: Sequence[Difference]
    code: Sequence[Difference]  # and libraries, and the machine
    settings_aside: Sequence[Difference]  # those that shape no result
    samples: Sequence[JsonDict]  # {model, prompt, answers, reference}, as of `_samples`

    @property
    def tables(self) -> dict[str, Sequence[Difference]]:
        """The tables of terminal and page by title; empty ones have no differences."""
        return {
            "Settings": self.settings,
            "Figures": self.metrics,
            "Data": self.data,
            "Code and machine": self.code,
            "Settings that shape no result": self.settings_aside,
        }


def compare(views: Sequence[RunView]) -> RunComparison:
    """Compare runs; percentages are relative to the first one."""
    settings = _differences(
        [{name: facts.as_yaml(value) for name, value in view.params.items()} for view in views]
    )
    aside = [row for row in settings if row.name.partition(".")[0] in SECTIONS_WITHOUT_RESULT]
    shaping = [row for row in settings if row not in aside]
    scores = [_scores(view) for view in views]
    names = sorted({name for view in views for name in view.metrics}, key=facts.rank)
    metrics = [_metric(name, views, scores) for name in names]
    metric, verdict, is_certain = _verdict(metrics, scores)
    reasons = {metric.not_judged for metric in metrics}
    remarks = [text for reason, text in WARNINGS.items() if reason in reasons]
    unfinished = [
        f"{facts.letter(number)} {view.status}"
        for number, view in enumerate(views)
        if view.status not in ("completed", "cached")
    ]
    if unfinished:
        remarks.append(f"not all runs are complete: {', '.join(unfinished)}")
    if shaping:
        remarks.append(_about_setting(views, shaping, metric))
    code = _differences([_code(view) for view in views])
    return RunComparison(
        runs=[view.name for view in views],
        verdict=verdict,
        is_certain=is_certain,
        remarks=remarks,
        notes=[*dict.fromkeys(note for view in views for note in view.notes)],
        settings=shaping,
        metrics=[metric for metric in metrics if len({*metric.values}) > 1],
        data=_differences([_data(view) for view in views]),
        # Not a stage that only one run has.
        code=[row for row in code if len({*row.values} - {ABSENT}) > 1],
        settings_aside=aside,
        samples=[*_samples(views)],
    )


def run_rows(views: Sequence[RunView]) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            facts.letter(number),
            view.name,
            view.status,
            format_time(view.started),
            format_duration(view.seconds),
        )
        for number, view in enumerate(views)
    ]


def _differences(tables: Sequence[Mapping[str, str]]) -> list[Difference]:
    rows: list[Difference] = []
    for name in sorted({name for table in tables for name in table}):
        values = tuple(table.get(name, ABSENT) for table in tables)
        if len({*values}) > 1:
            rows.append(Difference(name, values))
    return rows


def _data(view: RunView) -> dict[str, str]:
    table: dict[str, str] = {}
    for name, stage in view.stages.items():
        if name in ("tokenizer", "heldout", "source") or name.startswith("shards-"):
            table |= {
                f"{name}: {file} ({role})": digest
                for role, file, digest in facts.files_of(stage.manifest)
            }
            table |= {
                f"{name}: {count.replace('.', ' ').replace('_', ' ')}": format_number(value)
                for count, value in flatten(stage.manifest.get("result", {}))
                if is_number(value) and count != "encoded_blocks"
            }
    return table


def _code(view: RunView) -> dict[str, str]:
    made = {name: stage.manifest for name, stage in view.stages.items() if stage.manifest}
    return {
        **{f"code of {name}": facts.code_of(manifest) for name, manifest in made.items()},
        **{
            name: ", ".join(values)
            for name, values in facts.versions_of(made.values()).items()
            if name != "ttrain"
        },
    }


def _metric(name: str, views: Sequence[RunView], scores: Sequence[Scores]) -> Difference:
    # Values that differ only in the eighth digit are equal
    values = [
        rounded(view.metrics[name]) if view.metrics.get(name) is not None else None
        for view in views
    ]
    better = facts.better(name)
    is_held_out = name.startswith(EVALUATED) or name.partition("/")[2].startswith("validation_")
    if not is_held_out or not better or len({*values}) < 2:
        return Difference(name, values, better=better)
    reason = _not_judged(name, views, scores)
    order = [] if reason else facts.ranked(values, better)
    best = order[0] if order and values[order[0]] != values[order[-1]] else None
    return Difference(name, values, best, better, reason)


def _not_judged(name: str, views: Sequence[RunView], scores: Sequence[Scores]) -> str:
    stage, _, metric = name.partition("/")
    if not name.startswith(EVALUATED):  # of the rows that a training held out
        measured = [view for view in views if name in view.metrics]
        inputs = [view.manifest(stage).get("inputs", {}) for view in measured]
        if len({of_run.get("shards", {}).get("content") for of_run in inputs}) > 1:
            return "other shards"
        results = [view.manifest(f"shards-{stage}").get("result") for view in measured]
        counts = [ShardsResult.of(result).heldout.rows for result in results if result]
        return not_judged(min(counts)) if counts else ""
    scored = [
        of_run.get(metric)
        for of_run, view in zip(scores, views, strict=True)
        if name in view.metrics
    ]
    known = [each for each in scored if each]
    if len(known) < len(scored):
        return "unknown held-out records"
    if len({each.records for each in known}) > 1:
        return OTHER_RECORDS
    if len({each.sizes for each in known}) > 1:
        return OTHER_TOKENIZERS
    return not_judged(len(known[0].records))


# One run of each setting decides between two models, not between two settings.
def _about_setting(views: Sequence[RunView], shaping: Sequence[Difference], metric: str) -> str:
    unasked = {*SEEDS, *facts.set_by_rule(views[-1].params)}
    changed = [
        row for row in shaping if row.name not in unasked and not row.name.startswith("data.")
    ]
    if not changed:
        return ONLY_SEEDS
    noise = next(
        filter(
            None,
            (noise_of(views[0].store.root, metric, view.record["settings"]) for view in views),
        ),
        None,
    )
    spread = f"± {noise.spread:.2g}" if noise else "how much is not known"
    changes = shlex.join(
        f"{row.name}={row.values[-1]}" for row in changed if row.values[-1] != ABSENT
    )
    trained = [
        stage.seconds or 0.0
        for name, stage in views[-1].stages.items()
        if name in (*TRAININGS, EVALUATION)
    ]
    time = f", about {format_duration(2 * ADVISED_SEEDS * sum(trained))}" if sum(trained) else ""
    return (
        f"which setting is better is not decided: seeds of one setting differ, too, by {spread} "
        f"in this home{'' if noise else ' yet'}; with the other settings of "
        f"{facts.letter(0)}, `ttrain sweep full {changes} --seeds {ADVISED_SEEDS}` decides it{time}"
    )


def _verdict(metrics: Sequence[Difference], scores: Sequence[Scores]) -> tuple[str, str, bool]:
    """(metric, best run by the first metric that differs and its lead, whether it is certain)."""
    by_name = {metric.name: metric for metric in metrics}
    name = ""
    verdict = "the runs share no metric that decides which is better"
    for metric in filter(None, map(by_name.get, DECIDING_METRICS)):
        order = facts.ranked(metric.values, metric.better)
        if len(order) < 2:
            continue
        name = metric.name
        if metric.values[order[0]] != metric.values[order[-1]]:
            return name, *_difference_of_models(metric, order, scores)
        verdict = f"equal by {name}: {format_number(metric.values[order[0]])}"
    return name, verdict, False


def _difference_of_models(
    metric: Difference, order: Sequence[int], scores: Sequence[Scores]
) -> tuple[str, bool]:
    if metric.not_judged:
        return f"no model is better by {metric.name}: {metric.not_judged}", False
    best = metric.values[order[0]]
    winners = [run for run in order if metric.values[run] == best]
    second = order[len(winners)]
    letters = " and ".join(map(facts.letter, winners))
    next_best = metric.values[second]
    subject = f"models of {letters} are" if winners[1:] else f"model of {letters} is"
    verdict = (
        f"the {subject} better on these records by {metric.name}: {format_number(best)} against "
        f"{format_number(next_best)} of {facts.letter(second)} ({facts.change(best, next_best)})"
    )
    name = metric.name.removeprefix(EVALUATED)
    better = scores[order[0]].get(name)
    worse = scores[second].get(name)
    compared = advantage(better, worse, Promotion()) if better and worse else None
    if compared is None or compared.interval is None:
        return verdict, False
    low, high = compared.interval
    return (
        f"{verdict}; over {compared.items:,} held-out records, the {Promotion().confidence:.0%} "
        f"interval of the difference is {low:.4f} to {high:.4f}"
        f"{'' if low > 0 else ', so this may be chance'}",
        low > 0,
    )


def _samples(views: Sequence[RunView]) -> Iterator[JsonDict]:
    by_run = [facts.samples_of(view.manifest(EVALUATION)) for view in views]
    prompts = dict.fromkeys(chain.from_iterable(by_run))
    for model, prompt in sorted(prompts, key=lambda key: model_order(key[0])):
        samples = [of_run.get((model, prompt), {}) for of_run in by_run]
        yield {
            "model": model,
            "prompt": prompt,
            "answers": [sample.get("answer", ABSENT) for sample in samples],
            "reference": next(filter(None, (sample.get("reference") for sample in samples)), ""),
        }


# Empty where the files of the evaluation are gone.
def _scores(view: RunView) -> Scores:
    stage = view.stages.get(EVALUATION)
    path = view.store.path(EVALUATION, stage.key) / SCORES if stage and stage.key else None
    if path is None or not path.is_file():
        return {}
    return {name: metric for name, metric in read_scores(path).items() if metric.records}
