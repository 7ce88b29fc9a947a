"""The page of one run: what it was to do, what came of it, what it cost, and what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ttrain.reports import charts, evaluation_table, figures
from ttrain.reports import summary as tables
from ttrain.reports.compare import samples_of
from ttrain.reports.compare_page import TITLES
from ttrain.reports.data_section import data
from ttrain.reports.html import Markup, Page, details, joined, pill, table, tag, tiles
from ttrain.reports.lineage_section import lineage, machine, settings
from ttrain.reports.problems import Trouble, troubles
from ttrain.reports.timeline import times
from ttrain.store import runs
from ttrain.tracking import RunView

SAMPLE_FILES = re.compile(r"run/samples/step-0*(\d+)\.(txt|md)")
SAMPLES_SHOWN = 12  # of those that were written while it learned: first, last, and evenly between
EARLIER_RUNS = 200  # newest ones that are looked through for tries at the same work


def report_of(home: Path, view: RunView) -> str:
    """The page as HTML."""
    earlier = [run for run, _ in zip(runs.newest_first(home), range(EARLIER_RUNS), strict=False)]
    found = troubles(view, earlier)
    page = Page(f"{view.name}: report", runs=[view.name])
    page.section("Stages", times(view), _stages(view))
    page.section("What went wrong", _troubles(found))
    page.section("Curves", *_curves(page, view))
    page.section("Evaluation", _evaluation(view))
    page.section("Data", *data(view))
    page.section("Samples", *_samples(view))
    page.section("Lineage", lineage(view))
    page.section("Settings", *settings(view))
    page.section("Machine and libraries", machine(view))
    return page.render(_head(view, found))


def _head(view: RunView, found: Sequence[Trouble]) -> Markup:
    began = datetime.fromtimestamp(view.started, UTC).astimezone()
    took = f", took {figures.duration(view.seconds)}" if view.seconds else ""
    line = tag("p", f"pipeline {view.pipeline}, began {began:%Y-%m-%d %H:%M}{took}", class_="faint")
    labels = [tag("p", line, class_="note") for line in tables.labels(view.noted)]
    open_ones = [one for one in found if not one.mended]
    notes = [tag("p", _told(one), class_="remark") for one in open_ones]
    notes += [tag("p", note, class_="note") for note in view.notes]
    return joined([tag("h1", view.name, " ", pill(view.status)), line, *labels, *notes, tiles(_tiles(view))])


def _tiles(view: RunView) -> Iterator[tuple[str, str]]:
    """What one wants to know first."""
    named = (
        ("eval/bits_per_byte", "bits per byte, base"),
        ("eval/bits_per_byte_sft", "bits per byte, SFT"),
        ("eval/chat_loss_sft", "chats loss, SFT"),
        ("eval/domain_loss_lora", "domain loss, LoRA"),
        ("pretrain/validation_loss", "validation loss"),
        ("total/train_seconds", "training"),
    )
    for name, label in named:
        if name in view.metrics:
            yield label, figures.number(view.metrics[name], name)
    result = view.manifest("pretrain").get("result", {})
    for name, label in (
        ("tokens", "tokens trained on"),
        ("parameters", "parameters"),
        ("tokens_per_second", "tokens per second"),
    ):
        if name in result:
            yield label, figures.short(round(result[name]))


def _stages(view: RunView) -> Markup:
    rows = []
    for name, stage in view.stages.items():
        made = f"by {stage.made_by}" if stage.cached and stage.made_by and stage.made_by != view.name else ""
        why = tables.shortened(stage.noted.get("why") or [])
        manifest = view.manifest(name)
        told = stage.noted.get("metric") or (tables.key_figures(name, manifest["result"]) if manifest else "")
        rows.append(
            (
                tag("td", name, class_="short"),
                pill(stage.status),
                figures.duration(stage.seconds),
                told,
                joined([why, " ", tag("small", made)]),
            )
        )
    return table(("stage", "outcome", "took", "result", "why"), rows, numbers=(2,))


def _told(trouble: Trouble) -> str:
    return f"{trouble.stage}: {trouble.what}" if trouble.stage else trouble.what


def _troubles(found: Sequence[Trouble]) -> Markup:
    if not found:
        return tag("p", "Nothing failed, nothing was repeated, no row was put aside.", class_="faint")
    rows = (
        (
            one.stage or "the run",
            one.what,
            tag("td", "mended" if one.mended else "open", class_="good" if one.mended else "bad"),
        )
        for one in found
    )
    return table(("where", "what", ""), rows)


def _curves(page: Page, view: RunView) -> Iterator[Markup]:
    parts: list[Markup] = []
    for stage in view.stages:
        first, more = charts.charts_of(view, stage)
        if not first and not more:
            continue
        folded = details(f"{len(more)} more charts", page.charts(more)) if more else Markup()
        shown = page.charts(first)
        parts += (
            [tag("h3", TITLES.get(stage, stage)), shown, folded]
            if first
            else [details(f"{stage}: {len(more)} charts", page.charts(more))]
        )
    if parts:
        yield page.controls()
        yield from parts


def _evaluation(view: RunView) -> Markup:
    results = {stage: view.manifest(stage).get("result", {}) for stage in ("evaluate", "evaluate-champion")}
    rows = evaluation_table.rows(view.metrics, results)
    return table(("what", "value", ""), rows, numbers=(1,)) if rows else Markup()


def _samples(view: RunView) -> Iterator[Markup]:
    answers = samples_of(view.manifest("evaluate"))
    models = list(dict.fromkeys(model for model, _ in answers))
    models.sort(key=lambda model: ("base", "sft", "lora").index(model) if model in ("base", "sft", "lora") else 9)
    for prompt in dict.fromkeys(prompt for _, prompt in answers):
        yield tag("p", prompt, class_="prompt")
        told = ((model, answers[model, prompt]) for model in models if (model, prompt) in answers)
        yield tag(
            "div", *(tag("div", tag("h4", f"{model} model"), tag("pre", text)) for model, text in told), class_="answers"
        )
    for stage in charts.TRAININGS:
        written = _while_learning(view, stage)
        if written:
            parts = (tag("div", tag("h4", f"step {step:,}"), tag("pre", text.strip("\n"))) for step, text in written)
            yield details(f"what it wrote while it learned: {TITLES[stage]}", tag("div", *parts, class_="answers"))


def _while_learning(view: RunView, stage: str) -> list[tuple[int, str]]:
    """(step, text) of the samples of a training: the first, the last and some between."""
    if stage not in view.stages:
        return []
    found = [(int(match[1]), path) for path in view.files(stage, "run/samples") if (match := SAMPLE_FILES.fullmatch(path))]
    found.sort()
    if len(found) > SAMPLES_SHOWN:
        places = {round(place * (len(found) - 1) / (SAMPLES_SHOWN - 1)) for place in range(SAMPLES_SHOWN)}
        found = [found[place] for place in sorted(places)]
    return [(step, view.text(stage, path) or "") for step, path in found]
