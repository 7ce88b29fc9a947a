"""Pages of a run (stages, results, curves, lineage, problems), of a comparison, of a sweep.

They load nothing and run no script; all text of runs is escaped.
"""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ttrain.config.training import EVALUATED, PRIMARY_METRICS, TRAININGS, VALIDATION_LOSS
from ttrain.core import text
from ttrain.core.files import JsonObject
from ttrain.core.machine import VERSION
from ttrain.core.terminal import escape_control_characters
from ttrain.reports import charts, compare, facts, summary
from ttrain.store.layout import Manifest
from ttrain.store.results import TrainingResult
from ttrain.store.run_views import RunView

STYLE = Path(__file__).with_name("templates") / "page.css"
SAMPLE_FILES = re.compile(r"run/samples/step-0*(\d+)\.(txt|md)")
SAMPLES_SHOWN = 12  # of the texts that a model wrote during training, evenly spread
UNFINISHED: Mapping[str, str] = {
    "crashed": "was killed",
    "failed": "failed",
    "interrupted": "was stopped",
}

BITS = PRIMARY_METRICS["pretrain"]
TILES: Mapping[str, str] = {  # metrics of a run in large letters at the top of its page
    BITS.of_run: f"{BITS.label}, base",
    f"{EVALUATED}{BITS.of('sft')}": f"{BITS.label}, {charts.TITLES['sft']}",
    **{
        metric.of_run: f"{metric.label}, {charts.TITLES[stage]}"
        for stage, metric in [*PRIMARY_METRICS.items()][1:]
    },
    f"pretrain/{VALIDATION_LOSS}": "validation loss",
    "total/train_seconds": "training",
    "pretrain/tokens": "tokens trained on",
    "pretrain/tokens_per_second": "tokens per second",
}
FILTERS: Mapping[str, Callable[..., object]] = {
    "number": text.format_number,
    "duration": text.format_duration,
    "time": text.format_time,
    "digest": text.short_digest,
    "yaml": facts.as_yaml,
    "left_out": summary.lost_rows,
}


def report_of(view: RunView) -> str:
    samples: dict[str, dict[str, summary.Result]] = {}
    for (model, prompt), sample in facts.samples_of(view.manifest("evaluate")).items():
        samples.setdefault(prompt, {})[model] = sample
    return _rendered(
        "run.html",
        view=view,
        results={
            name: stage.manifest["result"] for name, stage in view.stages.items() if stage.manifest
        },
        problems=[*find_problems(view)],
        curves={stage: charts.charts_of([view], stage) for stage in view.stages},
        evaluation=summary.rows(
            view.metrics,
            {
                stage: view.manifest(stage).get("result", {})
                for stage in ("evaluate", "evaluate-champion")
            },
        ),
        samples=samples,
        training_samples={
            stage: texts for stage in TRAININGS if (texts := _training_samples(view, stage))
        },
        changed_settings=facts.changed_settings(view.params),
        versions=facts.versions_of(stage.manifest for stage in view.stages.values()),
    )


def comparison_page(views: Sequence[RunView], compared: compare.RunComparison | None = None) -> str:
    return _rendered(
        "comparison.html",
        compared=compared or compare.compare(views),
        runs=compare.run_rows(views),
        curves={stage: charts.charts_of(views, stage) for stage in TRAININGS},
    )


def sweep_page(sweep: JsonObject) -> str:
    """The page of a sweep as HTML, from the value of `sweep show --json`."""
    return _rendered(
        "sweep.html",
        sweep=sweep,
        chart=charts.draw_rows(
            [
                (row["setting"], row["differences"], row["over_seeds"])
                for row in sweep["settings"][1:]
            ]
        ),
    )


def _rendered(template: str, **context: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ttrain.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: escape_control_characters(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    style = STYLE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=Markup(style),
        style_digest=Markup(digest),
        version=VERSION,
        charts=charts,
        facts=facts,
        summary=summary,
        tiles=TILES,
        **context,
    )


def _training_samples(view: RunView, stage: str) -> list[tuple[str, str]]:
    samples = {
        int(match[1]): path
        for path in view.files(stage, "run/samples")
        if (match := SAMPLE_FILES.fullmatch(path))
    }
    every = max(1, math.ceil(len(samples) / SAMPLES_SHOWN))
    steps = sorted(samples)[::-every][::-1]
    return [
        (f"step {step:,}", (view.text(stage, samples[step]) or "").strip("\n")) for step in steps
    ]


# (stage, "" for the run; description; whether it is resolved)
Problem = tuple[str, str, bool]


def find_problems(view: RunView) -> Iterator[Problem]:
    error = view.record.get("error") or view.record.get("stopped")
    if error and not any(stage.record.get("error") == error for stage in view.stages.values()):
        yield "", str(error), False
    if view.status == "crashed":
        yield "", "the run's process was killed, or the machine went down", False
    for name, stage in view.stages.items():
        record = stage.record
        is_done = stage.status not in UNFINISHED
        if record.get("error") or not is_done:
            outcome = "failed and was retried" if is_done else UNFINISHED[stage.status]
            error = (
                str(record.get("error") or "")
                .removeprefix(f"stage {name} ")
                .removeprefix("failed: ")
            )
            yield name, ": ".join(filter(None, (outcome, error))), is_done
        if step := record.get("resumed_from_step"):
            yield name, f"resumed at step {step:,}", True
        yield from ((name, *problem) for problem in _of_artifact(stage.manifest))
        steps = [
            f"{point.step:,}"
            for point in view.curve(name, "loss")
            if not math.isfinite(point.value)
        ]
        if steps:
            yield name, f"the loss was not finite at step {text.first_of(steps, 5)}", True


def _of_artifact(manifest: Manifest) -> Iterator[tuple[str, bool]]:
    result: Mapping[str, Any] = manifest.get("result", {})
    for source in manifest.get("continued") or ():
        yield f"continued the work of {text.short_digest(source['key'])}, made by other code", True
    training = TrainingResult.of(result)
    if skipped := training.skipped_steps:
        yield f"skipped {text.counted(skipped, 'step')} whose gradient was not finite", True
    for guard, count in training.guard_warnings.items():
        yield f"the guard {guard.replace('_', ' ')} warned {count:,} times", False
    if training.stop_reason != "completed":
        yield f"training ended early: {training.stop_reason}", True
    for role, tally in summary.row_tallies(result).items():
        if lost := summary.lost_rows(tally, "rejected"):
            yield f"bad rows of the {role} data left out: {lost}", True
        for key, rows in tally.get("unread_keys", {}).items():
            yield (
                f"{text.counted(rows, 'row')} of the {role} data with text of an answer under "
                f"'{key}', which is not read",
                False,
            )
