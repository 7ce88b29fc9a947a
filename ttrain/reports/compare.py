"""What two or more runs have different: settings, data, code, figures, samples. Views in, plain values out; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from ttrain.config import SHAPE_NO_RESULT
from ttrain.core.hashing import digest_of
from ttrain.reports import figures, significance
from ttrain.reports.summary import rounded
from ttrain.tracking import RunView

# Settings that move no weight and no figure of a model: where and how fast a run goes, and who hears of it.
ASIDE = frozenset({*SHAPE_NO_RESULT, "name", "run"})
# Curves of the pipeline's run, also under their name of earlier versions: their last values are no figures of the result.
CURVES = re.compile(r"^(losses_by_tokens|Curves|system)/")
MISSING = "–"
SHOWN_DIGEST = 12
# Where runs share a model, the figure of the next one decides.
DECIDING = ("eval/bits_per_byte", "eval/chat_loss_sft", "eval/domain_loss_lora", "pretrain/validation_loss",
            "sft/validation_loss", "lora/validation_loss")  # fmt: skip
MODELS = ("base", "sft", "lora")
HELD_OUT = ("documents", "document_bytes", "chats", "domain")


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in all runs, with what it is in each."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A metric in each run."""

    name: str
    values: tuple[float | None, ...]
    better: int  # -1: less is better, 1: more is, 0: neither
    best: int | None  # number of the best run
    percent: tuple[float | None, ...]  # by how much it differs from the first run's


@dataclass(frozen=True)
class Sample:
    """What the runs' models of one stage make of a prompt."""

    model: str
    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Two or more runs side by side; each tuple of values has one entry a run, in their order."""

    runs: tuple[str, ...]
    verdict: str  # which is better, by which figure
    remarks: tuple[str, ...]  # what cannot be compared
    notes: tuple[str, ...]  # what could not be read, and what was read instead
    settings: tuple[Difference, ...]
    settings_aside: tuple[Difference, ...]  # those that shape no result
    data: tuple[Difference, ...]
    code: tuple[Difference, ...]  # and libraries, and the machine
    metrics: tuple[Figure, ...]
    same_metrics: tuple[str, ...]
    samples: tuple[Sample, ...]

    def to_json(self) -> dict[str, Any]:
        """What `compare --json` prints."""
        return asdict(self)


def compare(views: Sequence[RunView]) -> Comparison:
    """What the runs have different; the first one is what the others are measured against."""
    manifests = [{name: view.manifest(name) for name in view.stages} for view in views]
    settings = list(_settings(views))
    data, code = list(_data(views, manifests)), list(_code(manifests))
    names = {name for view in views for name in view.metrics if not CURVES.search(name)}
    found = [_figure(name, views) for name in sorted(names, key=figures.rank)]
    same = [figure.name for figure in found if len(set(figure.values)) == 1]
    return Comparison(
        runs=tuple(view.name for view in views),
        verdict=_verdict(views, found),
        remarks=tuple(_incomparable(views, manifests)),
        notes=tuple(dict.fromkeys(note for view in views for note in view.notes)),
        settings=tuple(one for one in settings if one.name.partition(".")[0] not in ASIDE),
        settings_aside=tuple(one for one in settings if one.name.partition(".")[0] in ASIDE),
        data=tuple(data),
        code=tuple(code),
        metrics=tuple(figure for figure in found if figure.name not in same),
        same_metrics=tuple(same),
        samples=tuple(_samples(views, manifests)),
    )


def labels(count: int) -> list[str]:
    """Short names of runs: A, B, ...; R27, R28, ... after Z."""
    return [chr(ord("A") + place) if place < 26 else f"R{place + 1}" for place in range(count)]


def _settings(views: Sequence[RunView]) -> Iterator[Difference]:
    yield from _different([view.params for view in views])


def _different(tables: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    """A line for each name whose value is not the same in all tables, in the order of the names."""
    for name in sorted({name for table in tables for name in table}):
        values = tuple(table.get(name, MISSING) for table in tables)
        if len(set(values)) > 1:
            yield Difference(name, values)


def _data(views: Sequence[RunView], manifests: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[Difference]:
    """Files by their digests, and what became of their rows; of a stage whose manifest nobody has, what MLflow lists."""
    tables: list[dict[str, str]] = []
    for view, stages in zip(views, manifests, strict=True):
        table: dict[str, str] = {}
        for name, stage in view.stages.items():
            if not (name == "tokenizer" or name.startswith("shards-") or name in ("heldout", "source")):
                continue
            table |= {f"{name}: {what}": value for what, value in _data_of(stages[name])}
            if not stages[name]:
                for one in stage.inputs:
                    counts = ", ".join(f"{what} {value}" for what, value in one.counts.items())
                    table[f"{name}: {one.name}"] = f"{one.digest[:SHOWN_DIGEST]} {counts}".strip()
        tables.append(table)
    yield from _different(tables)


def _data_of(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    result = manifest.get("result", {})
    for role, files in manifest.get("ingredients", {}).get("files", {}).items():
        for file in files:
            yield (f"{file['name']} ({role})" if role != "train" else file["name"]), file["sha256"][:SHOWN_DIGEST]
    for part, label in (("train", ""), ("heldout", "held-out ")):
        for what in ("rows", "tokens", "live_tokens", "bytes"):
            if isinstance(result.get(part), dict) and what in result[part]:
                yield f"{label}{what.replace('_', ' ')}", f"{result[part][what]:,}"
    for what in ("vocab_size", "documents", "bytes", "bytes_per_token", "duplicates"):
        if isinstance(result.get(what), int | float):
            yield what.replace("_", " "), figures.number(result[what])
    tallies = result.get("rows", {})
    for role, tally in (tallies if "rows" not in tallies else {"train": tallies}).items():
        if isinstance(tally, dict):
            lost = {**tally.get("skipped", {}), **tally.get("rejected", {})}
            for reason, count in lost.items():
                yield f"{role} rows left out, {reason}", f"{count:,}"


def _code(manifests: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[Difference]:
    """Code by its digest in each stage, then commits, libraries and machines, as the artifacts' makers noted them."""
    tables: list[dict[str, str]] = []
    for stages in manifests:
        table = {}
        for name, manifest in stages.items():
            if not manifest:
                continue
            table[f"code of {name}"] = digest_of(manifest["ingredients"].get("code", {}))[:SHOWN_DIGEST]
            made = manifest.get("provenance", {})
            noted = {"python": made.get("python"), "platform": made.get("platform"), **made.get("libraries", {})}
            for what, value in noted.items():
                if value:  # stages of one run can be of several days: all that there were
                    before = table.get(what, "").split(", ") if what in table else []
                    table[what] = ", ".join(dict.fromkeys([*before, str(value)]))
        tables.append(table)
    for one in _different(tables):
        if len({*one.values} - {MISSING}) < 2:
            continue  # a stage that one of the runs has not made is no other code
        modules = _modules(one.name.removeprefix("code of "), manifests) if one.name.startswith("code of ") else ""
        yield Difference(f"{one.name} ({modules})" if modules else one.name, one.values)


def _modules(stage: str, manifests: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """Names of the modules that are not the same in all runs that have them."""
    codes = [one[stage]["ingredients"].get("code", {}) for one in manifests if one.get(stage)]
    names = sorted({name for code in codes for name in code if len({other.get(name) for other in codes}) > 1})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _figure(name: str, views: Sequence[RunView]) -> Figure:
    given = [view.metrics.get(name) for view in views]
    values = tuple(None if value is None else rounded(value) for value in given)  # equal but for the eighth digit is equal
    base = next((value for value in values if value is not None), None)
    shares = tuple(figures.percent(value, base) for value in values)
    return Figure(name, values, figures.better(name), figures.best(name, values), shares)


def _verdict(views: Sequence[RunView], found: Sequence[Figure]) -> str:
    """The best run by the first figure that is not the same in all, and by how much it beats the next best."""
    by_name = {figure.name: figure for figure in found}
    equal = ""
    for name in DECIDING:
        figure = by_name.get(name)
        there = [(value, place) for place, value in enumerate(figure.values) if _is_number(value)] if figure else []
        if figure is None or len(there) < 2:
            continue
        if figure.best is None:
            equal = equal or f"equal by {name}: {figures.number(there[0][0])}"
            continue
        least, second = sorted({value for value, _ in there})[:2]
        first, other = ([place for value, place in there if value == wanted] for wanted in (least, second))
        names = labels(len(views))
        told = (
            f"{_few([names[place] for place in first])} {'are' if first[1:] else 'is'} better by {name}: "
            f"{figures.number(least)} against {figures.number(second)} of {_few([names[place] for place in other])} "
            f"({figures.change(figures.percent(least, second))})"
        )
        sure = significance.said(views[first[0]], views[other[0]], name)
        return "; ".join(filter(None, (equal, told, sure)))
    return equal or "no figure is there that decides which run is better"


def _few(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _incomparable(views: Sequence[RunView], manifests: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Where equal names do not mean equal things."""
    tokenizers = {_content(stages, "tokenizer") for stages in manifests} - {None}
    if len(tokenizers) > 1:
        yield "the tokenizers differ: losses are of different tokens and cannot be compared, bits per byte can"
    if len(_texts(views, manifests, same_tokens=len(tokenizers) < 2)) > 1:
        yield "the held-out data differ: the evaluations are of different texts and cannot be compared"
    unfinished = [
        f"{label} {view.status}"
        for label, view in zip(labels(len(views)), views, strict=True)
        if view.status not in ("completed", "cached")
    ]
    if unfinished:
        yield f"not all runs are complete: {', '.join(unfinished)}"


def _content(stages: Mapping[str, Mapping[str, Any]], name: str) -> str | None:
    """What identifies a stage's artifact, as those after it saw it."""
    for manifest in stages.values():
        for used in manifest.get("inputs", {}).values():
            if used["stage"] == name:
                return str(used["content"])
    return None


def _texts(views: Sequence[RunView], manifests: Sequence[Mapping[str, Mapping[str, Any]]], *, same_tokens: bool) -> set[str]:
    """What identifies the held-out records of each evaluation, by what all of them have: the records' digests, else those of
    the shards, which hold them as tokens, else how many and how large they are."""
    evaluated = [(view, stages["evaluate"]) for view, stages in zip(views, manifests, strict=True) if stages.get("evaluate")]
    records = [significance.records_of(significance.scores_of(view)) for view, _ in evaluated]
    if all(records):
        return {digest_of(one) for one in records}
    if same_tokens:
        inputs = [manifest["ingredients"].get("inputs", {}) for _, manifest in evaluated]
        return {digest_of({name: one.get(name) for name in ("documents", "chats", "domain")}) for one in inputs}
    return {digest_of([view.metrics.get(f"eval/{name}") for name in HELD_OUT]) for view, _ in evaluated}


def _samples(views: Sequence[RunView], manifests: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[Sample]:
    """What each run's models answered to the same prompts of the evaluation."""
    answers = [samples_of(stages.get("evaluate", {})) for stages in manifests]
    asked = dict.fromkeys(key for found in answers for key in found)
    for model, prompt in sorted(asked, key=lambda one: MODELS.index(one[0]) if one[0] in MODELS else len(MODELS)):
        yield Sample(model, prompt, tuple(found.get((model, prompt), MISSING) for found in answers))


def samples_of(manifest: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """{(model, prompt): answer} of an evaluation's manifest."""
    written = manifest.get("result", {}).get("samples") or {}
    return {(model, one["prompt"]): one["answer"] for model, found in written.items() for one in found}
