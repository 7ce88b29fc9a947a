"""Stages, runs and evaluations as tables of text, from manifests."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.core.terminal import escaped
from ttrain.core.text import counted, format_duration, is_number, short_digest
from ttrain.store.results import (
    EvaluationResult,
    HeldoutResult,
    PartCounts,
    ReplayResult,
    ShardsResult,
    TokenizerResult,
    TrainingResult,
)
from ttrain.store.runs import NOTHING_NEW, RecordedRun

LOST = ("skipped", "rejected")  # groups of rows that are left out, with a count for each reason
EvaluationRow = tuple[str, str, str]  # metric, value, remark
Result = Mapping[str, Any]  # of a stage, as its manifest has it, or a part of one

# The values of a stage in its line of `status`, where its result has them.
KEY_METRICS = ("parameters", "vocab_size", "bytes_per_token", "answers", "log_probability")
TRAINING_METRICS = ("validation_loss", "tokens", "tokens_per_second")

GUARD_FIXES = {
    "overfit": "try fewer passes by a smaller {stage}.epochs or {stage}.tokens, more data, "
    "or keep the best step: "
    "{stage}.early_stopping.patience=3 {stage}.validate_every_steps=50",
    "no_effect": "try a larger {stage}.optim.lr, or more passes",
    "loss-spike": "try a smaller {stage}.optim.lr",
}
BASELINES = {
    "xz": "xz -9e",
    "zlib": "zlib -9",
    "order0": "order-0 bytes",
    "order3": "order-3 bytes",
}
# Of held-out records: one of them, and what is counted in them
SCORED = {
    "documents": ("document", "document_bytes", "byte"),
    "chats": ("chat", "chat_tokens", "scored token"),
    "domain": ("chat", "domain_tokens", "scored token"),
    "pairs": ("pair", "", ""),
}


def metrics_of(results: Mapping[str, Result]) -> dict[str, float]:
    """The metrics of a pipeline run by stable names, from results of cached and new stages."""
    from ttrain.config.training import TRAININGS

    trainings = {name: TrainingResult.of(results[name]) for name in TRAININGS if name in results}
    tokenizer = TokenizerResult.of(results.get("tokenizer", {}))
    evaluation = EvaluationResult.of(results.get("evaluate", {}))
    champion = EvaluationResult.of(results.get("evaluate-champion", {}))
    metrics = {
        **{
            f"{name}/{metric}": getattr(result, metric)
            for name, result in trainings.items()
            for metric in (*TRAINING_METRICS, "loss")
        },
        **_total(trainings.values()),
        "tok/bytes_per_token": tokenizer.bytes_per_token,
        "tok/unk_rate": tokenizer.unk_rate,
        **{f"eval/{name}": value for name, value in evaluation.metrics.items()},
        **{f"eval/{name}": value for name, value in evaluation.counts.items()},
        **{f"champion/{name}": value for name, value in champion.metrics.items()},
    }
    return {name: rounded(value) for name, value in sorted(metrics.items()) if value is not None}


def rounded(value: float) -> float:
    """Round a metric to fp32's seven digits, as MLflow shows all of them; integers stay."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def _total(trainings: Iterable[TrainingResult]) -> dict[str, float]:
    """The total time of trainings, whichever runs made them; a device is a rank.

    A continued training recorded only its last attempt: earlier steps are taken to be as fast.
    """
    seconds = device_seconds = 0.0
    for training in trainings:
        timed = training.steps - (training.resumed_from_step or 0)
        if timed > 0 and training.train_seconds is not None:
            took = training.train_seconds * training.steps / timed
            seconds += took
            device_seconds += took * (training.ranks or 1)
    if not seconds:
        return {}
    return {"total/train_seconds": seconds, "total/device_hours": device_seconds / 3600}


def row_tallies(result: Result) -> dict[str, Result]:
    """Row counts of a stage's result, by role: train, heldout."""
    tallies = result.get("rows") or {}
    tallies = {"train": tallies} if "rows" in tallies else tallies
    return {role: tally for role, tally in tallies.items() if isinstance(tally, dict)}


def lost_rows(tally: Result, *groups: str) -> str:
    """Rows left out by reason, "no text 3, not JSON 1"; `groups`: skipped, rejected."""
    reasons = {
        reason: n for group in groups or LOST for reason, n in tally.get(group, {}).items() if n
    }
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def key_figures(stage: str, result: Result, directory: Path = Path()) -> str:
    """One line about a stage's result. `directory`: of its artifact."""
    from ttrain.config.training import BITS_PER_BYTE, TRAININGS

    if stage == "source":
        return ", ".join(
            f"{name} {PartCounts.of(result[name]).rows:,} rows"
            for name in TRAININGS
            if name in result
        )
    if stage.startswith("shards-"):
        return "; ".join(_about_shards(result))
    if stage == "heldout":
        held_out = HeldoutResult.of(result)
        unscored = (
            f"; {held_out.unscored:,} of this night are beyond its share"
            if held_out.unscored
            else ""
        )
        return (
            f"{held_out.records:,} held-out documents of all nights, {held_out.new:,} of "
            f"them new{unscored}"
        )
    if stage in ("replay", "replay-sft"):
        kind = "windows of documents" if stage == "replay" else "chats"
        sample = ReplayResult.of(result)
        return (
            f"{sample.records:,} {kind}, {sample.tokens:,} tokens, of "
            f"{counted(sample.nights, 'earlier set')}"
        )
    if stage.startswith("evaluate"):
        bits = EvaluationResult.of(result).metrics.get(BITS_PER_BYTE.name)
        return f"{bits:.3f} {BITS_PER_BYTE.label}" if bits is not None else "no held-out documents"
    names = TRAINING_METRICS if stage in TRAININGS else KEY_METRICS
    figures = [f"{name} {_figure(result[name])}" for name in names if is_number(result.get(name))]
    training = TrainingResult.of(result)
    if training.resumed_from_step:
        figures.append(f"continued at step {training.resumed_from_step} of {training.steps}")
    if warned := training.guard_warnings:
        fixes = [GUARD_FIXES[name].format(stage=stage) for name in warned if name in GUARD_FIXES]
        guards = ", ".join(name.replace("_", " ") for name in warned)
        hints = "; ".join([guards, *fixes, f"{directory}/run/guards.jsonl"])
        figures.append(f"the guards warned of {hints}")
    return ", ".join(figures)


def _about_shards(result: Result) -> Iterator[str]:
    made = ShardsResult.of(result)
    yield (
        f"{counted(made.train.rows, 'row')}, {made.train.tokens:,} tokens; held out "
        f"{counted(made.heldout.rows, 'row')}"
    )
    for role, tally in row_tallies(result).items():
        if lost := lost_rows(tally):
            yield f"left out of {role}: {lost}"
        for key, rows in tally.get("unread_keys", {}).items():
            yield f"not read: '{escaped(key)}' in {counted(rows, 'row')}"
    if reused := made.blocks - made.encoded_blocks:
        yield f"{reused:,} of {made.blocks:,} shards were reused"
    contamination = made.contamination
    if contamination and not contamination["removed"]:
        tasks = contamination["tasks"].values()
        overlapping = sum(task["overlapping"] for task in tasks)
        items = sum(task["items"] for task in tasks)
        yield (
            f"{overlapping:,} of {items:,} evaluation items are in "
            f"{contamination['documents']:,} training rows"
        )


def markdown(rows: Iterable[Sequence[object]], header: Sequence[object]) -> str:
    lines: list[Sequence[object]] = [header, ["---"] * len(header)]
    for row in rows:
        lines.append([escaped(str(cell)).replace("|", "\\|") for cell in row])
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def run_json(run: RecordedRun) -> dict[str, Any]:
    names = "run pipeline outcome note tags started seconds stages metrics error equals tracking"
    return {name: run[name] for name in names.split() if name in run}


def labels(run: RecordedRun) -> list[str]:
    tags = "  ".join(f"{key}={value}" for key, value in run.get("tags", {}).items())
    return [line for line in (*str(run.get("note", "")).split("\n"), tags) if line]


def _figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def shown_stages(run: RecordedRun) -> list[Result]:
    """The stages of a recorded run worth listing.

    None if all were cached; of a night without new data, those that it reached.
    """
    if run["outcome"] == "cached":
        return []
    return [
        stage
        for stage in run["stages"]
        if run["outcome"] != NOTHING_NEW or stage["outcome"] != "pending"
    ]


def status_row(stage: Result) -> tuple[str, str, str, str, str]:
    """(stage, outcome, time, metrics or error, log) of a recorded stage."""
    log = os.path.relpath(stage["log"]) if stage.get("log") else ""
    if stage.get("key"):  # a shell's glob finds the rest of the key
        log = log.replace(stage["key"], f"{short_digest(stage['key'])}*")
    return (
        stage["name"],
        stage["outcome"],
        format_duration(stage.get("seconds")),
        stage.get("error") or stage.get("metric") or "",
        log,
    )


# A metric of an evaluation that is shown: its name, label, number of records (0 where it has no
# champion), remark
Shown = tuple[str, str, int, str]


def rows(metrics: Mapping[str, float], results: Mapping[str, Result]) -> list[EvaluationRow]:
    """(metric, value, remark) of each metric of the run and of a night's champion.

    With the results of stages also intervals, and tasks of suites.
    """
    from ttrain.evaluate.task_result import not_judged

    evaluation = EvaluationResult.of(results.get("evaluate", {}))
    champion = EvaluationResult.of(results.get("evaluate-champion", {}))
    table: list[EvaluationRow] = []
    for name, label, records, remark in (*_heldout(metrics, evaluation), *_suites(evaluation)):
        value = metrics.get(f"eval/{name}")
        of_champion = metrics.get(f"champion/{name}")
        if value is not None:
            table.append((label, _with_interval(value, evaluation.intervals.get(name)), remark))
        if of_champion is not None and records:
            difference = metrics.get(f"eval/{name}", of_champion) - of_champion
            remark = not_judged(records) or f"the challenger: {difference:+.3f}"
            table.append(
                (
                    f"{label}, champion",
                    _with_interval(of_champion, champion.intervals.get(name)),
                    remark,
                )
            )
    return table


def _heldout(metrics: Mapping[str, float], evaluation: EvaluationResult) -> Iterator[Shown]:
    """Rows for held-out records: each model against the one before, groups, compressors."""
    # Imported here: `status` does without the settings, which take 0.1 s.
    from ttrain.config.training import BITS_PER_BYTE, MODELS, PRIMARY_METRICS
    from ttrain.evaluate.task_result import not_judged

    for metric in PRIMARY_METRICS.values():
        records = int(metrics.get(f"eval/{metric.records}", 0))
        noun, count, of_count = SCORED[metric.records]
        amount = metrics.get(f"eval/{count}")
        remark = counted(records, noun) + (f", {counted(int(amount), of_count)}" if amount else "")
        before = None
        for model in (model for model in MODELS if f"eval/{metric.of(model)}" in metrics):
            name = metric.of(model)
            value = metrics[f"eval/{name}"]
            if before is not None:
                p = evaluation.paired.get(name, {}).get("p")
                remark = not_judged(records) or f"{value - before:+.3f}" + (
                    "" if p is None else f", p = {p:.2g}"
                )
            yield name, f"{metric.label}, {model}", records, remark
            before = value
        if metric is BITS_PER_BYTE:
            prefix = f"{metric.of_run}/"
            for name in (name.removeprefix("eval/") for name in metrics if name.startswith(prefix)):
                # bits_per_byte/lang:zh is lang=zh
                yield (
                    name,
                    f"{metric.label}, base, {name.partition('/')[2].replace(':', '=', 1)}",
                    records,
                    "",
                )
            for compressor, label in BASELINES.items():
                yield metric.of(compressor), f"{metric.label}, {label}", 0, ""  # it has no champion


def _suites(evaluation: EvaluationResult) -> Iterator[Shown]:
    verdicts = {
        (versus["task"], versus["second"]): versus for versus in evaluation.suites["comparisons"]
    }
    for task in evaluation.suites["tasks"]:
        for model in (name for name in evaluation.suites["models"] if name in task["models"]):
            remark = f"{task['items']:,} items"
            if versus := verdicts.get((task["task"], model)):
                is_judged = versus["difference"] is not None and not versus["verdict"].startswith(
                    "not judged"
                )
                remark = (f"{0 - versus['difference']:+.3f}: " if is_judged else "") + versus[
                    "verdict"
                ]
            yield (
                f"{task['task']}/{task['figure']}/{model}",
                f"{task['task']} {task['figure'].replace('_', ' ')}, {model}",
                task["items"],
                remark,
            )


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})" if interval else f"{value:.3f}"
