"""How two or more runs differ: settings, data, code, figures, samples. Views in, plain values out; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from ttrain.config import SHAPE_NO_RESULT
from ttrain.config.base import is_retired
from ttrain.config.nightly import FEWEST_RECORDS
from ttrain.config.training import EVALUATED, PRIMARY_METRICS, TRAINING_STAGES, VALIDATION_LOSS, model_order
from ttrain.core.files import parse_object
from ttrain.core.hashing import digest_of
from ttrain.core.text import ABSENT, first_of, format_duration, format_number, format_time
from ttrain.evaluate import few_records
from ttrain.reports import facts
from ttrain.reports.sections import Answers, Block, Cell, Heading, Section, Table, Text
from ttrain.reports.summary import rounded
from ttrain.store.layout import Manifest
from ttrain.store.run_views import RunView, StageView
from ttrain.store.runs import BUILT

# Settings that change no weight and no metric of a model: where and how fast a run goes, and who is notified.
SECTIONS_WITHOUT_RESULT = frozenset({*SHAPE_NO_RESULT, "name", "run"})
# Curves of the pipeline's run: their last values are not metrics of the result.
CURVES = ("Curves/", "system/")

# Where runs share a model, the metric of the next model decides.
DECIDING_METRICS = (
    *(metric.of_run for metric in PRIMARY_METRICS.values()),
    *(f"{stage}/{VALIDATION_LOSS}" for stage in PRIMARY_METRICS),
)

VALIDATION = "validation_"  # how the names of a training's metrics on held-out rows begin
HELD_OUT = ("documents", "document_bytes", "chats", "domain")

EVALUATION = "evaluate"

Manifests = Mapping[str, Manifest]  # of the stages of a run
PAIRS = "pairs"  # a run without preference tuning has none, and is comparable all the same

ABOUT_MODELS = (
    "the runs have other settings, but one run of each shows which model is better, not which setting: another seed may "
    "turn it around"
)


@dataclass(frozen=True)
class Difference:
    """A setting, file or library that is not the same in all runs, with its value in each."""

    name: str
    values: tuple[str, ...]

    def cell(self, run: int) -> Cell:
        """The value of a run."""
        return Cell(self.values[run], "")


@dataclass(frozen=True)
class ComparedMetric:
    """A metric in each run."""

    name: str
    values: tuple[float | None, ...]
    better: int  # -1: less is better, 1: more is, 0: neither
    best: int | None  # number of the best run
    percent: tuple[float | None, ...]  # by how much it differs from that of the first run that has it
    not_judged: str = ""  # why no run is the best, of a metric on held-out records

    def cell(self, run: int) -> Cell:
        """The value of a run, by how much it differs from that of the first run that has it, and whether it is the best."""
        style = "number best" if run == self.best else "number"
        is_first = all(value is None for value in self.values[:run])
        return Cell(format_number(self.values[run], self.name), style, "" if is_first else facts.change(self.percent[run]))


@dataclass(frozen=True)
class ComparedSample:
    """The answers of the runs' models of one stage to a prompt."""

    model: str
    prompt: str
    answers: tuple[str, ...]
    reference: str = ""  # what follows the prompt in the held-out row that it is from


@dataclass(frozen=True)
class RunComparison:
    """Two or more runs side by side; each tuple of values has one entry a run, in their order."""

    runs: tuple[str, ...]
    verdict: str  # whose model is better on the held-out records, by which metric
    is_certain: bool  # whether the interval of that difference excludes zero
    remarks: tuple[str, ...]  # what cannot be compared
    notes: tuple[str, ...]  # what could not be read, and what was read instead
    settings: tuple[Difference, ...]
    settings_aside: tuple[Difference, ...]  # those that shape no result
    data: tuple[Difference, ...]
    code: tuple[Difference, ...]  # and libraries, and the machine
    metrics: tuple[ComparedMetric, ...]
    same_metrics: tuple[str, ...]
    samples: tuple[ComparedSample, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `compare --json` prints."""
        return asdict(self)


def compare(views: Sequence[RunView]) -> RunComparison:
    """Compare runs; percentages are relative to the first one."""
    manifests = [{name: view.manifest(name) for name in view.stages} for view in views]
    settings = {True: list[Difference](), False: list[Difference]()}
    for difference in _differences([{name: facts.as_yaml(value) for name, value in view.params.items()} for view in views]):
        if is_retired(difference.name) and len({*difference.values} - {ABSENT}) < 2:
            continue  # newer runs do not record it
        settings[difference.name.partition(".")[0] in SECTIONS_WITHOUT_RESULT].append(difference)
    names = {name for view in views for name in view.metrics if not name.startswith(CURVES)}
    gone = list(_gone(views, manifests))
    has_one_tokenizer = len(_tokenizers(manifests)) < 2
    has_one_text = len(_texts(views, manifests, same_tokens=has_one_tokenizer)) < 2
    scores = [scores_of(view) for view in views]

    def not_judged(name: str) -> str:
        if not _is_held_out(name):
            return ""
        if not has_one_text or not _has_one_validation(name, manifests):
            return "other held-out records"
        if not has_one_tokenizer and _is_per_token(name):
            return "other tokenizers"
        runs = zip(views, manifests, scores, strict=True)
        counts = (_records(name, *run) for run in runs)
        return few_records.not_judged(min((count for count in counts if count is not None), default=FEWEST_RECORDS))

    metrics = [_figure(name, views, not_judged(name)) for name in sorted(names, key=facts.rank)]
    same = [figure.name for figure in metrics if len(set(figure.values)) == 1]
    verdict, is_certain = _verdict(views, metrics, has_one_tokenizer=has_one_tokenizer, has_one_text=has_one_text)
    return RunComparison(
        runs=tuple(view.name for view in views),
        verdict=verdict,
        is_certain=is_certain,
        remarks=(
            *_comparability_warnings(views, has_one_tokenizer=has_one_tokenizer, has_one_text=has_one_text),
            *([ABOUT_MODELS] if settings[False] else []),
        ),
        notes=tuple(dict.fromkeys(note for view in views for note in view.notes)),
        settings=tuple(settings[False]),
        settings_aside=tuple(settings[True]),
        data=(*gone, *_data(views, manifests)),
        code=(*gone, *_code(manifests)),
        metrics=tuple(figure for figure in metrics if figure.name not in same),
        same_metrics=tuple(same),
        samples=tuple(_samples(views, manifests)),
    )


def sections(comparison: RunComparison, names: Sequence[object]) -> list[Section]:
    """What a reader is shown of a comparison; `names` are the short names of the runs."""

    def table(differences: Sequence[Difference]) -> Table:
        return Table(("", *names), [(difference.name, *difference.values) for difference in differences])

    def differing(title: str, differences: Sequence[Difference], text_if_none: str) -> Section:
        return Section(title, [table(differences) if differences else Text(text_if_none, "faint")])

    metrics = [
        (" ".join(filter(None, (metric.name, metric.not_judged))), *map(metric.cell, range(len(names))))
        for metric in comparison.metrics
    ]
    figures: list[Block] = [
        Table(("", *names), metrics, range(1, len(names) + 1)) if metrics else Text("All figures are the same.")
    ]
    if metrics and comparison.same_metrics:
        figures.append(Text(f"The same in all: {', '.join(comparison.same_metrics)}.", "faint"))
    samples: list[Block] = []
    for model in dict.fromkeys(sample.model for sample in comparison.samples):
        samples.append(Heading(f"{model} model"))
        for sample in comparison.samples:
            if sample.model == model:
                reference = [(facts.REFERENCE, sample.reference)] if sample.reference else []
                answers = [*zip(names, sample.answers, strict=True), *reference]
                samples += [Text(sample.prompt, "prompt"), Answers(answers)]
    aside = comparison.settings_aside
    return [
        differing("Settings that differ", comparison.settings, "All settings that shape a result are the same."),
        Section("Figures", figures),
        differing("Data", comparison.data, "The same files, the same rows."),
        Section("Samples", samples),
        differing("Code and machine", comparison.code, "The same code and libraries on the same kind of machine."),
        Section("Settings that shape no result", [table(aside)] if aside else []),
    ]


def labels(count: int) -> list[str]:
    """Short names of runs: A, B, ...; R27, R28, ... after Z."""
    return [chr(ord("A") + number) if number < 26 else f"R{number + 1}" for number in range(count)]


def run_rows(views: Sequence[RunView]) -> list[tuple[str, str, str, str, str]]:
    """(short name, name, outcome, beginning, time) of each run."""
    return [
        (label, view.name, view.status, format_time(view.started), format_duration(view.seconds))
        for label, view in zip(labels(len(views)), views, strict=True)
    ]


def _differences(tables: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    """A line for each name whose value is not the same in all tables, in the order of the names."""
    for name in sorted({name for table in tables for name in table}):
        values = tuple(table.get(name, ABSENT) for table in tables)
        if len(set(values)) > 1:
            yield Difference(name, values)


def _gone(views: Sequence[RunView], manifests: Sequence[Manifests]) -> Iterator[Difference]:
    """The stages of each run whose artifacts are gone: of what they read only MLflow knows, and of their code nobody."""
    stages = [
        [name for name, stage in view.stages.items() if stage.status in (*BUILT, "cached") and not of_run[name]]
        for view, of_run in zip(views, manifests, strict=True)
    ]
    if any(stages):
        yield Difference("artifacts that are gone", tuple(", ".join(names) or ABSENT for names in stages))


def _data(views: Sequence[RunView], manifests: Sequence[Manifests]) -> Iterator[Difference]:
    """Files by their digests, and counts of their rows."""
    return _differences(
        [
            {f"{name}: {label}": value for name in stages for label, value in _data_of(view.stages[name], stages[name])}
            for view, stages in zip(views, manifests, strict=True)
        ]
    )


def _data_of(stage: StageView, manifest: Manifest) -> Iterator[tuple[str, str]]:
    if not (stage.stage in ("tokenizer", "heldout", "source") or stage.stage.startswith("shards-")):
        return
    result = manifest.get("result", {})
    for role, name, digest in facts.files_of(manifest):
        yield (f"{name} ({role})" if role != "train" else name), digest
    for split, label in (("train", ""), ("heldout", "held-out ")):
        for field in ("rows", "tokens", "live_tokens", "bytes"):
            if isinstance(result.get(split), dict) and field in result[split]:
                yield f"{label}{field.replace('_', ' ')}", f"{result[split][field]:,}"
    for field in ("vocab_size", "documents", "bytes", "bytes_per_token", "duplicates"):
        if isinstance(result.get(field), int | float):
            yield field.replace("_", " "), format_number(result[field])
    for role, tally in facts.row_tallies(result).items():
        for reason, count in facts.lost_rows(tally).items():
            yield f"{role} rows left out, {reason}", f"{count:,}"


def _code(manifests: Sequence[Manifests]) -> Iterator[Difference]:
    """Code by its digest in each stage, then commits, libraries and machines, as the artifacts record them."""
    tables: list[dict[str, str]] = []
    for stages in manifests:
        table = {f"code of {name}": facts.code_of(manifest) for name, manifest in stages.items() if manifest}
        versions = facts.versions_of(stages.values())
        table |= {name: ", ".join(values) for name, values in versions.items() if name != "ttrain"}
        tables.append(table)
    for difference in _differences(tables):
        if len({*difference.values} - {ABSENT}) < 2:
            continue  # a stage that only one run has made is not a difference
        _, is_code, stage = difference.name.partition("code of ")
        modules = _modules(stage, manifests) if is_code else ""
        yield replace(difference, name=f"{difference.name} ({modules})") if modules else difference


def _modules(stage: str, manifests: Sequence[Manifests]) -> str:
    """Names of the modules that are not the same in all runs that have them."""
    codes = [run_manifests[stage]["ingredients"].get("code", {}) for run_manifests in manifests if run_manifests.get(stage)]
    names = sorted({name for code in codes for name in code if len({digests.get(name) for digests in codes}) > 1})
    return first_of(names, 3)


def _is_held_out(name: str) -> bool:
    """Whether a metric is of a model on held-out records: of speeds, times and sizes, and of the loss in training, no run
    is the best."""
    return name.startswith(EVALUATED) or name.partition("/")[2].startswith(VALIDATION)


def _is_per_token(name: str) -> bool:
    return "loss" in name or "perplexity" in name


def _has_one_validation(name: str, manifests: Sequence[Manifests]) -> bool:
    """Whether all runs read the same shards, whose held-out rows a stage's validation loss is over."""
    stage, _, metric = name.partition("/")
    if not metric.startswith(VALIDATION):
        return True
    inputs = (stages.get(stage, {}).get("inputs", {}).get("shards", {}) for stages in manifests)
    return len({shards.get("content") for shards in inputs} - {None}) < 2


def _records(name: str, view: RunView, stages: Manifests, scores: Mapping[str, Any]) -> int | None:
    """How many held-out records a metric of a run is over; None where that is not known."""
    stage, _, metric = name.partition("/")
    if metric.startswith(VALIDATION):
        row = TRAINING_STAGES.get(stage)
        shards = stages.get(f"shards-{row.dataset}", {}) if row else {}
        count = shards.get("result", {}).get("heldout", {}).get("rows")
        return None if count is None else int(count)
    if entry := scores.get("metrics", {}).get(metric):
        return len(entry.get("rows") or scores["parts"][entry["part"]]["records"])
    part = next((primary.records for primary in PRIMARY_METRICS.values() if metric.startswith(primary.family)), "")
    count = view.metrics.get(f"{EVALUATED}{part or metric.partition('/')[0] + '/items'}")
    return None if count is None else int(count)


def _figure(name: str, views: Sequence[RunView], not_judged: str) -> ComparedMetric:
    raw_values = [view.metrics.get(name) for view in views]
    # Values that differ only in the eighth digit are equal
    values = tuple(None if value is None else rounded(value) for value in raw_values)
    base = next((value for value in values if value is not None), None)
    shares = tuple(None if not_judged else facts.percent(value, base) for value in values)
    has_best = _is_held_out(name) and not not_judged
    best = facts.best(name, values) if has_best else None
    return ComparedMetric(name, values, facts.better(name), best, shares, not_judged)


def _verdict(
    views: Sequence[RunView], metrics: Sequence[ComparedMetric], *, has_one_tokenizer: bool, has_one_text: bool
) -> tuple[str, bool]:
    """(the best run by the first deciding metric that differs, and by how much it beats the next best; whether certain)."""
    if not has_one_text:
        text = "no metric decides which is better, since the held-out data differ"
        return f"{text}; `ttrain eval` measures models on one text", False
    by_name = {figure.name: figure for figure in metrics}
    equal = ""
    deciding = [name for name in DECIDING_METRICS if has_one_tokenizer or not _is_per_token(name)]
    for figure in filter(None, map(by_name.get, deciding)):
        finite = {run: value for run, value in enumerate(figure.values) if value is not None and math.isfinite(value)}
        if len(finite) < 2:
            continue
        best, *others = sorted(set(finite.values()), reverse=figure.better > 0)
        if not others:
            equal = equal or f"equal by {figure.name}: {format_number(best)}"
            continue
        if figure.not_judged:
            text = f"no model is better by {figure.name}: {figure.not_judged}"
            return "; ".join(filter(None, (equal, text))), False
        winners, next_best = ([run for run, value in finite.items() if value == target] for target in (best, others[0]))
        named = _joined_names(winners, len(views))
        models = f"the models of {named} are" if winners[1:] else f"the model of {named} is"
        comparison = (
            f"{models} better on these records by {figure.name}: "
            f"{format_number(best)} against {format_number(others[0])} of {_joined_names(next_best, len(views))} "
            f"({facts.change(facts.percent(best, others[0]))})"
        )
        text, is_certain = significance(views[winners[0]], views[next_best[0]], figure.name)
        return "; ".join(filter(None, (equal, comparison, text))), is_certain
    tokenizers = "" if has_one_tokenizer else " with two tokenizers"
    return equal or f"the runs share no metric that decides which is better{tokenizers}", False


def _joined_names(numbers: Sequence[int], count: int) -> str:
    names = [labels(count)[number] for number in numbers]
    return " and ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _comparability_warnings(views: Sequence[RunView], *, has_one_tokenizer: bool, has_one_text: bool) -> Iterator[str]:
    """Reasons why metrics of the same name cannot be compared."""
    if not has_one_tokenizer:
        yield "the tokenizers differ: losses are of different tokens and cannot be compared, bits per byte can"
    if not has_one_text:
        yield "the held-out data differ: the evaluations are of different texts and cannot be compared"
    unfinished = [
        f"{label} {view.status}"
        for label, view in zip(labels(len(views)), views, strict=True)
        if view.status not in ("completed", "cached")
    ]
    if unfinished:
        yield f"not all runs are complete: {', '.join(unfinished)}"


def _tokenizers(manifests: Sequence[Manifests]) -> set[str | None]:
    """The content digests of the runs' tokenizers, as far as they are known."""
    return {_content(stages, "tokenizer") for stages in manifests} - {None}


def _content(stages: Manifests, name: str) -> str | None:
    """The content digest of a stage's artifact, as later stages recorded it."""
    inputs = chain.from_iterable(manifest.get("inputs", {}).values() for manifest in stages.values())
    return next((used.get("content") for used in inputs if used["stage"] == name), None)


def _texts(views: Sequence[RunView], manifests: Sequence[Manifests], *, same_tokens: bool) -> set[str]:
    """Digests that identify the held-out records of each evaluation, by what all runs have: the records, else the shards,
    which hold them as tokens, else their number and size."""
    evaluated = [(view, stages["evaluate"]) for view, stages in zip(views, manifests, strict=True) if stages.get("evaluate")]
    parts = [scores_of(view).get("parts", {}) for view, _ in evaluated]
    if all(parts):
        names = [name for name in dict.fromkeys(chain(*parts)) if name != PAIRS or all(PAIRS in entry for entry in parts)]
        return {digest_of({name: list(entry.get(name, {}).get("records", ())) for name in names}) for entry in parts}
    if same_tokens:
        inputs = [manifest["ingredients"].get("inputs", {}) for _, manifest in evaluated]
        return {digest_of({name: entry.get(name) for name in ("documents", "chats", "domain")}) for entry in inputs}
    return {digest_of([view.metrics.get(f"eval/{name}") for name in HELD_OUT]) for view, _ in evaluated}


def _samples(views: Sequence[RunView], manifests: Sequence[Manifests]) -> Iterator[ComparedSample]:
    """The answers of each run's models to the same prompts of the evaluation."""
    answers = [facts.samples_of(stages.get(EVALUATION, {})) for stages in manifests]
    prompts = dict.fromkeys(key for run_answers in answers for key in run_answers)
    references = dict(chain.from_iterable(facts.references_of(stages.get(EVALUATION, {})).items() for stages in manifests))
    for model, prompt in sorted(prompts, key=lambda key: model_order(key[0])):
        of_runs = tuple(run_answers.get((model, prompt), ABSENT) for run_answers in answers)
        yield ComparedSample(model, prompt, of_runs, references.get(prompt, ""))


def scores_of(view: RunView) -> dict[str, Any]:
    """The scores of each held-out record in the run's evaluation (`ttrain.evaluate.task_result`); else empty."""
    from ttrain.evaluate.task_result import FILE

    return parse_object(view.text(EVALUATION, FILE) or "")


def significance(better: RunView, worse: RunView, name: str) -> tuple[str, bool]:
    """The interval of the difference of two runs by a metric, "" where there is none, and whether it excludes zero."""
    if not name.startswith(EVALUATED):
        return "", False
    from ttrain.config import Promotion
    from ttrain.evaluate.promotion import decide
    from ttrain.evaluate.task_result import scores_in

    metric, rule = name.removeprefix(EVALUATED), Promotion()
    first, second = (scores_in(scores_of(view), metric, view.metrics[name]) for view in (better, worse))
    if not (first and second) or first.records != second.records or first.sizes != second.sizes:
        return "", False
    decision = decide(first, second, rule)
    if decision.interval is None:
        return "", False
    low, high = decision.interval
    interval = f"the {rule.confidence:.0%} interval of the difference is {low:.4f} to {high:.4f}"
    text = f"over {decision.samples:,} held-out records, {interval}"
    return (text, True) if low > 0 else (f"{text}, so this may be chance", False)
