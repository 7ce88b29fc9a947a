"""The pages: of one run its stages, results, curves, lineage and problems; of several runs how they differ.

A page loads nothing and runs no script: its style and drawings are inside, and all text of a run is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from ttrain.config.training import EVALUATED, PRIMARY_METRICS, TRAININGS, VALIDATION_LOSS
from ttrain.core.machine import VERSION
from ttrain.core.terminal import escape_control_characters
from ttrain.core.text import ABSENT, counted, first_of, format_duration, format_number, format_time, short_digest
from ttrain.reports import charts, compare, drawings, facts, summary
from ttrain.reports.charts import TITLES, Chart
from ttrain.reports.drawings import COLOURS, Drawing, drawing_of
from ttrain.reports.sections import Cell
from ttrain.store import runs
from ttrain.store.layout import Manifest
from ttrain.store.run_views import RunView, StageView

SAMPLE_FILES = re.compile(r"run/samples/step-0*(\d+)\.(txt|md)")

SAMPLES_SHOWN = 12  # of the samples written during training: first, last, and evenly between

EARLIER_RUNS = 200  # newest runs that are searched for attempts at the same work


def report_of(home: Path, view: RunView, *, axis: str = "tokens", log: bool = False) -> str:
    """The page of a run as HTML."""
    earlier = [run for run, _ in zip(runs.newest_first(home), range(EARLIER_RUNS), strict=False)]
    results = {stage: view.manifest(stage).get("result", {}) for stage in ("evaluate", "evaluate-champion")}
    changed = sorted(facts.changed_settings(view.params).items())
    return _rendered(
        "run.html",
        view=view,
        began=format_time(view.started),
        took=format_duration(view.seconds),
        labels=summary.labels(view.record),
        tiles=list(_tiles(view)),
        stages=[_stage_row(view, stage) for stage in view.stages.values()],
        problems=find_problems(view, earlier),
        stages_with_curves=_curves({stage: charts.charts_of(view, stage) for stage in view.stages}, axis, log=log),
        evaluation=summary.rows(view.metrics, results),
        data_sets=list(_data_sets(view)),
        files=list(_files(view)),
        tokenizer=_tokenizer(view.manifest("tokenizer").get("result", {})),
        training_rows=[row for name in TRAININGS if (row := _rows(name, view.manifest(name).get("result", {})))],
        samples=_samples(view),
        training_samples=[(TITLES[stage], texts) for stage in TRAININGS if (texts := _training_samples(view, stage))],
        lineage=list(_lineage(view)),
        changed_settings=[(name, *map(facts.as_yaml, values)) for name, values in changed],
        all_settings="\n".join(f"{name}: {facts.as_yaml(value)}" for name, value in sorted(view.params.items())),
        machine=list(_machine(view)),
    )


def comparison_page(
    views: Sequence[RunView], compared: compare.RunComparison | None = None, *, axis: str = "tokens", log: bool = False
) -> str:
    """The page of a comparison as HTML."""
    compared = compared or compare.compare(views)
    letter = Markup('<span class="letter run{}">{}</span>')
    names = [letter.format(number % COLOURS, label) for number, label in enumerate(compare.labels(len(views)))]
    drawn = {stage: charts.comparison_charts(views, stage) for stage in TRAININGS}
    contents: list[tuple[str, Sequence[object]]] = [
        (section.title, section.blocks) for section in compare.sections(compared, names)
    ]
    contents.insert(2, ("Curves", _curves(drawn, axis, log=log)))  # below the figures
    return _rendered("comparison.html", compared=compared, names=names, runs=compare.run_rows(views), contents=contents)


def _rendered(template: str, **context: object) -> str:
    """A page of a template, in which all text of a run is escaped and the policy allows the style sheet alone."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ttrain.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    frame = {"left": drawings.LEFT, "right": drawings.RIGHT, "top": drawings.TOP, "bottom": drawings.BOTTOM}
    environment.globals |= {"width": drawings.WIDTH, "height": drawings.HEIGHT, **frame}
    style = resources.files("ttrain.reports").joinpath("templates/page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = environment.get_template(template)
    text = page.render(style=Markup(style), style_digest=Markup(digest), version=VERSION, **context)
    return text.encode("utf-8", errors="replace").decode("utf-8")  # an unpaired surrogate has no UTF-8 form


def _visible(value: object) -> object:
    """Text of a run with its control characters, such as those that turn the direction of writing, made visible."""
    return escape_control_characters(value) if type(value) is str else value


def _curves(
    charts_by_stage: Mapping[str, tuple[Sequence[Chart], Sequence[Chart]]], axis: str, *, log: bool
) -> list[tuple[str, list[Drawing], list[Drawing]]]:
    """(title, main drawings, folded drawings) of each stage that has any."""
    stages = []
    for stage, (main, others) in charts_by_stage.items():
        shown, folded = ([drawing_of(chart, axis, log=log) for chart in part] for part in (main, others))
        if shown or folded:
            stages.append((TITLES.get(stage, stage), shown, folded))
    return stages


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


def _stage_row(view: RunView, stage: StageView) -> dict[str, str]:
    manifest = stage.manifest
    is_reused = stage.cached and stage.made_by and stage.made_by != view.name
    return {
        "name": stage.stage,
        "status": stage.status,
        "took": format_duration(stage.seconds),
        "result": stage.record.get("metric") or (summary.key_figures(stage.stage, manifest["result"]) if manifest else ""),
        "why": "; ".join(stage.record.get("why") or ()),
        "maker": f"by {stage.made_by}" if is_reused else "",
    }


def _samples(view: RunView) -> dict[str, list[tuple[str, str]]]:
    """{prompt: the answers of the models and what follows in the data}."""
    evaluation = view.manifest("evaluate")
    samples: dict[str, list[tuple[str, str]]] = {}
    for (model, prompt), answer in facts.samples_of(evaluation).items():
        samples.setdefault(prompt, []).append((f"{model} model", answer))
    for prompt, reference in facts.references_of(evaluation).items():
        samples[prompt].append((facts.REFERENCE, reference))
    return samples


def _training_samples(view: RunView, stage: str) -> list[tuple[str, str]]:
    """(step, text) of the samples of a training: the first, the last and some between."""
    files = view.files(stage, "run/samples")
    samples = sorted((int(match[1]), path) for path in files if (match := SAMPLE_FILES.fullmatch(path)))
    shown = facts.spread(samples, SAMPLES_SHOWN)
    return [(f"step {step:,}", (view.text(stage, path) or "").strip("\n")) for step, path in shown]


def _shards(view: RunView) -> Iterator[tuple[str, summary.Result]]:
    """(data set, result of the stage that made its shards)."""
    for stage in view.stages:
        if stage.startswith("shards-") and (result := view.manifest(stage).get("result")):
            yield stage.removeprefix("shards-"), result


def _data_sets(view: RunView) -> Iterator[tuple[str, ...]]:
    for name, result in _shards(view):
        train = result.get("train", {})
        lost = "; ".join(filter(None, map(_lost, facts.row_tallies(result).values())))
        yield (
            name,
            *(format_number(train.get(field)) for field in ("rows", "tokens", "live_tokens")),
            format_number(train.get("bytes"), "bytes"),
            format_number(result.get("heldout", {}).get("rows")),
            format_number(result.get("duplicates")),
            lost or "none",
        )


def _files(view: RunView) -> Iterator[tuple[str, ...]]:
    for name, result in _shards(view):
        for file in result.get("files", ()):
            counts = [format_number(file.get(field)) for field in ("rows", "kept", "tokens")]
            yield name, file["name"], *counts, format_number(file.get("bytes"), "bytes"), _lost(file) or "none"


def _tokenizer(result: summary.Result) -> str:
    if not result:
        return ""
    ids, fit, unknown = (result.get(name, 0) for name in ("vocab_size", "bytes_per_token", "unk_rate"))
    text = f"The tokenizer has {ids:,} ids, and a token stands for {fit:.3f} bytes of its training text"
    return f"{text}; {100 * unknown:.3g} % of the tokens are unknown."


def _rows(name: str, result: summary.Result) -> tuple[str, ...]:
    rows = result.get("rows", {})
    if not rows:
        return ()
    fill, epochs = rows.get("fill"), result.get("epochs")
    return (
        TITLES[name],
        format_number(rows.get("rows")),
        f"{rows.get('row_length', 0):,} tokens",
        f"{100 * fill:.1f} %" if fill is not None else ABSENT,
        *(format_number(rows.get(field)) for field in ("records", "cut_records", "dropped_tokens")),
        f"{epochs:.3g}" if epochs is not None else ABSENT,
    )


def _lost(tally: summary.Result) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in facts.lost_rows(tally).items() if count)


def _lineage(view: RunView) -> Iterator[tuple[object, ...]]:
    """The key, inputs, code, commit and run of each stage."""
    for name, stage in view.stages.items():
        manifest = stage.manifest
        if not manifest:
            continue
        sources = [f"{entry['stage']} {short_digest(entry['key'])}" for entry in manifest.get("inputs", {}).values()]
        sources += [f"{file} {digest}" for _, file, digest in facts.files_of(manifest)]
        provenance = manifest.get("provenance", {})
        commit = str(provenance.get("commit") or "")
        commit = short_digest(commit) + ("+" if "+" in commit else "")
        digests = (short_digest(stage.key or ""), first_of(sources, 6) or ABSENT, facts.code_of(manifest), commit)
        yield name, *(Cell(text, "mono") for text in digests), provenance.get("run") or stage.made_by or ""


def _machine(view: RunView) -> Iterator[tuple[str, str]]:
    """Versions, platforms and devices that the artifacts record, each value once."""
    manifests = [stage.manifest for stage in view.stages.values()]
    values = facts.versions_of(manifests)
    for field in ("device", "precision", "threads", "ranks", "compiled"):
        recorded = (manifest.get("result", {}).get(field) for manifest in manifests)
        values[field] = list(dict.fromkeys(str(value) for value in recorded if value is not None))
    return ((field, ", ".join(texts)) for field, texts in values.items() if texts)


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
