"""The pages: of one run its stages, results, curves, lineage and problems; of several runs how they differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.config.training import EVALUATED, PRIMARY_METRICS, TRAININGS, VALIDATION_LOSS
from ttrain.core.text import ABSENT, counted, first_of, format_duration, format_number, format_time, short_digest
from ttrain.reports import charts, compare, facts, summary
from ttrain.reports.charts import TITLES
from ttrain.reports.html import Markup, Page, joined, letter, pill, table, tag, tiles
from ttrain.reports.sections import Answers, Block, Cell, Code, Fold, Heading, Table, Text, table_of
from ttrain.store import runs
from ttrain.store.layout import Manifest
from ttrain.store.run_views import RunView

SAMPLE_FILES = re.compile(r"run/samples/step-0*(\d+)\.(txt|md)")

SAMPLES_SHOWN = 12  # of the samples written during training: first, last, and evenly between

TRAINING_COLUMNS = ("training", "rows", "of", "full to", "records", "cut", "tokens dropped", "epochs")

EARLIER_RUNS = 200  # newest runs that are searched for attempts at the same work


def report_of(home: Path, view: RunView, *, axis: str = "tokens", log: bool = False) -> str:
    """The page of a run as HTML."""
    earlier = [run for run, _ in zip(runs.newest_first(home), range(EARLIER_RUNS), strict=False)]
    problems = find_problems(view, earlier)
    page = Page(f"{view.name}: report", runs=[view.name], axis=axis, log=log)
    page.section("Stages", _stages(view))
    page.section("What went wrong", _problem_table(problems))
    page.section("Curves", page.curves({stage: charts.charts_of(view, stage) for stage in view.stages}))
    results = {stage: view.manifest(stage).get("result", {}) for stage in ("evaluate", "evaluate-champion")}
    page.section("Evaluation", *table_of(("metric", "value", ""), summary.rows(view.metrics, results), numbers=(1,)))
    page.section("Data", *data_tables(view))
    page.section("Samples", *_samples(view))
    page.section("Lineage", *lineage(view))
    page.section("Settings", *settings(view))
    page.section("Machine and libraries", *machine(view))
    return page.render(_head(view, problems))


def comparison_page(
    views: Sequence[RunView], compared: compare.RunComparison | None = None, *, axis: str = "tokens", log: bool = False
) -> str:
    """The page of a comparison as HTML."""
    compared = compared or compare.compare(views)
    page = Page("compared: " + ", ".join(compared.runs), runs=compared.runs, axis=axis, log=log)
    names = [letter(label, number) for number, label in enumerate(compare.labels(len(views)))]
    for section in compare.sections(compared, names):
        page.section(section.title, *section.blocks)
        if section.title == compare.FIGURES:
            page.section("Curves", page.curves({stage: charts.comparison_charts(views, stage) for stage in TRAININGS}))
    rows = [
        (name, Cell(run, "short mono"), pill(status), *(Cell(text, "short") for text in when))
        for name, (_, run, status, *when) in zip(names, compare.run_rows(views), strict=True)
    ]
    head = [tag("h1", f"{len(views)} runs compared"), tag("p", compared.verdict, class_="verdict")]
    head += [tag("p", remark, class_="remark") for remark in compared.remarks]
    head += [tag("p", note, class_="note") for note in compared.notes]
    return page.render(joined([*head, table(("", "run", "outcome", "began", "took"), rows)]))


def _head(view: RunView, problems: Sequence[Problem]) -> Markup:
    took = f", took {format_duration(view.seconds)}" if view.seconds else ""
    lines = [(f"pipeline {view.pipeline}, began {format_time(view.started)}{took}", "faint")]
    if view.decision:
        lines.append((": ".join(view.decision), "verdict" if "promoted" in view.decision else "remark"))
    lines += [(label, "note") for label in summary.labels(view.record)]
    lines += [(str(problem), "remark") for problem in problems if not problem.is_resolved]
    lines += [(note, "note") for note in view.notes]
    paragraphs = [tag("p", text, class_=style) for text, style in lines]
    return joined([tag("h1", view.name, " ", pill(view.status)), *paragraphs, tiles(_tiles(view))])


def _tiles(view: RunView) -> Iterator[tuple[str, str]]:
    """The main metrics of the run."""
    bits = PRIMARY_METRICS["pretrain"]
    metrics = {bits.of_run: f"{bits.label}, base", f"{EVALUATED}{bits.of('sft')}": f"{bits.label}, {TITLES['sft']}"}
    for stage, metric in PRIMARY_METRICS.items():
        metrics.setdefault(metric.of_run, f"{metric.label}, {TITLES[stage]}")
    metrics |= {f"pretrain/{VALIDATION_LOSS}": "validation loss", "total/train_seconds": "training"}
    for name, label in metrics.items():
        if name in view.metrics:
            yield label, format_number(view.metrics[name], name)
    result = view.manifest("pretrain").get("result", {})
    labels = {"tokens": "tokens trained on", "parameters": "parameters", "tokens_per_second": "tokens per second"}
    yield from ((label, facts.short(round(result[name]))) for name, label in labels.items() if name in result)


def _stages(view: RunView) -> Table:
    rows = []
    for name, stage in view.stages.items():
        maker = f"by {stage.made_by}" if stage.cached and stage.made_by and stage.made_by != view.name else ""
        manifest = view.manifest(name)
        figure_text = stage.record.get("metric") or (summary.key_figures(name, manifest["result"]) if manifest else "")
        reason = joined(["; ".join(stage.record.get("why") or ()), " ", tag("small", maker)])
        rows.append((Cell(name, "short"), pill(stage.status), format_duration(stage.seconds), figure_text, reason))
    return Table(("stage", "outcome", "took", "result", "why"), rows, numbers=(2,))


def _problem_table(problems: Sequence[Problem]) -> Block:
    if not problems:
        return Text("Nothing failed, nothing was retried, no row was rejected.", "faint")
    states = {True: Cell("resolved", "good"), False: Cell("open", "bad")}
    rows = [(problem.stage or "the run", problem.description, states[problem.is_resolved]) for problem in problems]
    return Table(("stage", "problem", ""), rows)


def _samples(view: RunView) -> Iterator[Block]:
    evaluation = view.manifest("evaluate")
    samples, references = facts.samples_of(evaluation), facts.references_of(evaluation)
    for prompt in dict.fromkeys(prompt for _, prompt in samples):
        answers = [(f"{model} model", text) for (model, question), text in samples.items() if question == prompt]
        reference = [(facts.REFERENCE, references[prompt])] if prompt in references else []
        yield Text(prompt, "prompt")
        yield Answers([*answers, *reference])
    for stage in TRAININGS:
        if written := _training_samples(view, stage):
            texts = Answers([(f"step {step:,}", text.strip("\n")) for step, text in written])
            yield Fold(f"samples during training: {TITLES[stage]}", texts)


def _training_samples(view: RunView, stage: str) -> list[tuple[int, str]]:
    """(step, text) of the samples of a training: the first, the last and some between."""
    files = view.files(stage, "run/samples")
    samples = sorted((int(match[1]), path) for path in files if (match := SAMPLE_FILES.fullmatch(path)))
    return [(step, view.text(stage, path) or "") for step, path in facts.spread(samples, SAMPLES_SHOWN)]


def data_tables(view: RunView) -> Iterator[Block]:
    """One table of the data sets, one of the tokenizer's fit, one of the rows that training sees."""
    sets, files = [], []
    for stage in view.stages:
        result = view.manifest(stage).get("result") if stage.startswith("shards-") else None
        if not result:
            continue
        name, train = stage.removeprefix("shards-"), result.get("train", {})
        lost = "; ".join(filter(None, map(_lost, facts.row_tallies(result).values())))
        size, heldout_rows = format_number(train.get("bytes"), "bytes"), result.get("heldout", {}).get("rows")
        counts = [format_number(train.get(field)) for field in ("rows", "tokens", "live_tokens")]
        further = (size, format_number(heldout_rows), format_number(result.get("duplicates")), lost or "none")
        sets.append((name, *counts, *further))
        for file in result.get("files", ()):
            counts = [format_number(file.get(field)) for field in ("rows", "kept", "tokens")]
            files.append((name, file["name"], *counts, format_number(file.get("bytes"), "bytes"), _lost(file) or "none"))
    header = ("data set", "records", "tokens", "count in the loss", "bytes", "held out", "duplicates", "left out")
    yield from table_of(header, sets, numbers=range(1, 7))
    if files:
        columns = ("data set", "file", "rows", "kept", "tokens", "bytes", "left out")
        yield Fold(counted(len(files), "file"), Table(columns, files, numbers=range(2, 6)))
    tokenizer = view.manifest("tokenizer").get("result", {})
    if tokenizer:
        ids, fit, unknown = (tokenizer.get(name, 0) for name in ("vocab_size", "bytes_per_token", "unk_rate"))
        text = f"The tokenizer has {ids:,} ids, and a token stands for {fit:.3f} bytes of its training text; "
        yield Text(f"{text}{100 * unknown:.3g} % of the tokens are unknown.")
    rows = [row for name in TRAININGS if (row := _rows(name, view.manifest(name).get("result", {})))]
    if rows:
        yield Heading("Rows as the trainings see them")
        yield Table(TRAINING_COLUMNS, rows, numbers=range(1, 8))


def _rows(name: str, result: summary.Result) -> tuple[str, ...]:
    rows = result.get("rows", {})
    if not rows:
        return ()
    fill, epochs = rows.get("fill"), result.get("epochs")
    return (
        TITLES[name], format_number(rows.get("rows")), f"{rows.get('row_length', 0):,} tokens",
        f"{100 * fill:.1f} %" if fill is not None else ABSENT,
        *(format_number(rows.get(field)) for field in ("records", "cut_records", "dropped_tokens")),
        f"{epochs:.3g}" if epochs is not None else ABSENT,
    )  # fmt: skip


def _lost(tally: summary.Result) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in facts.lost_rows(tally).items() if count)


def lineage(view: RunView) -> Iterator[Block]:
    """A table of the stages: the key, inputs, code, commit and run of each."""
    rows = []
    for name, stage in view.stages.items():
        manifest = view.manifest(name)
        if not manifest:
            continue
        sources = [f"{entry['stage']} {short_digest(entry['key'])}" for entry in manifest.get("inputs", {}).values()]
        sources += [f"{file} {digest}" for _, file, digest in facts.files_of(manifest)]
        provenance = manifest.get("provenance", {})
        commit = str(provenance.get("commit") or "")
        commit = short_digest(commit) + ("+" if "+" in commit else "")
        digests = (short_digest(stage.key or ""), first_of(sources, 6) or ABSENT, facts.code_of(manifest), commit)
        maker = provenance.get("run") or stage.made_by or ""
        rows.append((name, *(Cell(text, "mono") for text in digests), maker))
    if rows:
        yield Table(("stage", "key", "made of", "code", "commit", "made by"), rows)
        yield Text(joined(["In full: ", tag("code", f"ttrain lineage {view.name}")]), "faint")


def settings(view: RunView) -> Iterator[Block]:
    """The settings that differ from the defaults; all settings are folded."""
    if not view.params:
        return
    changed = [(name, *map(facts.as_yaml, values)) for name, values in sorted(facts.changed_settings(view.params).items())]
    yield from table_of(("changed setting", "value", "default"), changed)
    everything = [f"{name}: {facts.as_yaml(value)}" for name, value in sorted(view.params.items())]
    yield Fold(f"all {len(view.params)} settings", Code("\n".join(everything)))


def machine(view: RunView) -> list[Block]:
    """Versions, platforms and devices that the artifacts record, each value once."""
    manifests = [view.manifest(name) for name in view.stages]
    values = facts.versions_of(manifests)
    for field in ("device", "precision", "threads", "ranks", "compiled"):
        recorded = (manifest.get("result", {}).get(field) for manifest in manifests)
        values[field] = list(dict.fromkeys(str(value) for value in recorded if value is not None))
    return table_of(("name", "value"), [(field, ", ".join(texts)) for field, texts in values.items() if texts])


UNFINISHED: Mapping[str, str] = {"crashed": "was killed", "failed": "failed", "interrupted": "was stopped"}


@dataclass(frozen=True)
class Problem:
    """A problem: its stage ("" for the run), its description, and whether it is resolved."""

    stage: str
    description: str
    is_resolved: bool = True

    def __str__(self) -> str:
        return f"{self.stage}: {self.description}" if self.stage else self.description


def find_problems(view: RunView, earlier: Iterable[runs.RecordedRun] = ()) -> list[Problem]:
    """All recorded problems of a run. `earlier`: records of other runs, some of which worked on the same stages."""
    problems = [Problem("", text, is_resolved=False) for text in _of_run(view)]
    for name, stage in view.stages.items():
        problems += (Problem(name, text) for text in _of_attempts(view, name, earlier))
        error, done = stage.record.get("error"), stage.status not in UNFINISHED
        if error or not done:
            outcome = "failed and was retried" if done else UNFINISHED[stage.status]
            text = str(error or "").removeprefix(f"stage {name} ").removeprefix("failed: ")
            problems.append(Problem(name, f"{outcome}: {text}" if text else outcome, done))
        if step := stage.record.get("resumed_from_step"):
            problems.append(Problem(name, f"resumed at step {step:,}"))
        problems += (Problem(name, *problem) for problem in _of_artifact(view.manifest(name)))
        problems += (Problem(name, text) for text in _gaps(view, name))
    return list(dict.fromkeys(problems))


def _of_run(view: RunView) -> Iterator[str]:
    stopped, error = view.record.get("stopped"), view.record.get("error")
    if stopped and not str(error or "").startswith(str(stopped)):
        yield f"the run was stopped: {stopped}"
    if error and not any(stage.record.get("error") == error for stage in view.stages.values()):
        yield str(error)
    if view.status == "crashed":
        yield "the run's process was killed, or the machine went down"


def _of_attempts(view: RunView, name: str, earlier: Iterable[runs.RecordedRun]) -> Iterator[str]:
    """Earlier runs that began the same work and did not finish it."""
    key = view.stages[name].key
    for run in earlier:
        if run["run"] == view.name or run["started_unix"] > view.started or not key:
            continue
        for stage in run["stages"]:
            if stage["name"] == name and stage.get("key") == key and stage["outcome"] in UNFINISHED:
                yield f"the run {run['run']} began the same work and {UNFINISHED[stage['outcome']]}"


def _of_artifact(manifest: Manifest) -> Iterator[tuple[str, bool]]:
    result = manifest.get("result", {})
    for source in manifest.get("continued") or ():
        yield f"continued the work of {short_digest(source['key'])}, made by other code", True
    if skipped := result.get("skipped_steps"):
        yield f"skipped {counted(skipped, 'step')} whose gradient was not finite", True
    for guard, count in (result.get("guard_warnings") or {}).items():
        yield f"the guard {guard.replace('_', ' ')} warned {count:,} times", False
    if result.get("stop_reason") not in (None, "completed"):
        yield f"training ended early: {result['stop_reason']}", True
    for role, tally in facts.row_tallies(result).items():
        if rejected := tally.get("rejected"):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
            of = f" of the {role} data" if role != "train" else ""
            yield f"{counted(sum(rejected.values()), 'bad row')}{of} left out: {reasons}", True
        for key, rows in tally.get("unread_keys", {}).items():
            yield f"{counted(rows, 'row')} of the {role} data with text of an answer under '{key}', which is not read", False


def _gaps(view: RunView, stage: str) -> Iterator[str]:
    for metric in ("loss", VALIDATION_LOSS):
        steps = [f"{point.step:,}" for point in view.curve(stage, metric) if not math.isfinite(point.value)]
        if steps:
            shown = ", ".join(steps[:5]) + (", ..." if steps[5:] else "")
            yield f"the {metric.replace('_', ' ')} was not finite at step {shown}"
