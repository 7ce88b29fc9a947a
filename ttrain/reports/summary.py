"""Stages, runs and evaluations as tables: on a terminal, as markdown, as plain lines. Manifests in, text out; pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN_REASONS = 3

TRAININGS = ("pretrain", "sft", "lora")

# The metric that stands for a stage in one line of `status`.
KEY_METRICS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("vocab_size", "bytes_per_token"),
    "base-model": ("parameters", "vocab_size"),
    "new-model": ("parameters",),
    "pretrain": ("validation_loss", "tokens", "tokens_per_second"),
    "sft": ("validation_loss", "tokens", "tokens_per_second"),
    "lora": ("validation_loss", "tokens", "tokens_per_second"),
}


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of a pipeline run under their stable names, from the stages' results: the same whether cached or not."""
    found: dict[str, float] = {}
    for name in TRAININGS:
        for metric in ("validation_loss", "loss", "tokens", "tokens_per_second"):
            value = results.get(name, {}).get(metric)
            if value is not None:
                found[f"{name}/{metric}"] = float(value)
    found |= _total([results[name] for name in TRAININGS if name in results])
    tokenizer = results.get("tokenizer", {})
    found |= {f"tok/{name}": float(tokenizer[name]) for name in ("bytes_per_token", "unk_rate") if name in tokenizer}
    evaluation = results.get("evaluate", {})
    for group in ("metrics", "counts"):
        for name, value in evaluation.get(group, {}).items():
            found[f"eval/{name}"] = float(value)
    for name, value in results.get("evaluate-champion", {}).get("metrics", {}).items():
        found[f"champion/{name}"] = float(value)
    return {name: rounded(value) for name, value in sorted(found.items())}


def rounded(value: float) -> float:
    """A figure with the seven digits that fp32 has, for MLflow's tables show it as it is stored; a whole number as it is."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def _total(trainings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the trainings took together, whichever runs they were made in; a device is a rank.

    A training that was continued knows the time of its last attempt: the steps before are taken to have been as fast.
    """
    seconds = device_seconds = 0.0
    for one in trainings:
        timed = one.get("steps", 0) - one.get("resumed_from_step", 0)
        if timed > 0 and "train_seconds" in one:
            took = one["train_seconds"] * one["steps"] / timed
            seconds, device_seconds = seconds + took, device_seconds + took * one.get("ranks", 1)
    if not seconds:
        return {}
    return {"total/train_seconds": seconds, "total/device_hours": device_seconds / 3600}


def _overlaps(found: Mapping[str, Any] | None) -> str:
    """How many items of evaluations training documents hold, where they were searched and stay as they are."""
    if not found or found["removed"]:
        return ""
    items, held = (sum(task[name] for task in found["tasks"].values()) for name in ("items", "overlapping"))
    return f"; {held:,} of {items:,} evaluation items are in {found['documents']:,} training rows"


def key_figures(stage: str, result: Mapping[str, Any]) -> str:
    """One line about a stage's result."""
    if stage == "source":
        return ", ".join(f"{name} {result[name]['rows']:,} rows" for name in ("pretrain", "sft", "lora") if name in result)
    if stage.startswith("shards-"):
        train, heldout = result["train"], result["heldout"]
        lost = Counter[str]()
        for tally in result["rows"].values():
            lost.update({**tally["skipped"], "bad": sum(tally["rejected"].values())})
        left_out = "".join(f"; left out {count:,}: {rule}" for rule, count in lost.items() if count)
        reused = result["blocks"] - result["encoded_blocks"]
        taken = f"; {reused:,} of {result['blocks']:,} shards were there" if reused else ""
        held = _overlaps(result.get("contamination"))
        return (
            f"{train['rows']:,} rows, {train['tokens']:,} tokens; held out {heldout['rows']:,} rows{left_out}{taken}{held}"
        )
    if stage == "heldout":
        return f"{result['records']:,} held-out documents of all nights, {result['new']:,} of them new"
    if stage in ("evaluate", "evaluate-champion"):
        bits = result["metrics"].get("bits_per_byte")
        return f"{bits:.3f} bits per byte" if bits is not None else "no held-out documents"
    figures = [f"{name} {_figure(result[name])}" for name in KEY_METRICS.get(stage, ()) if result.get(name) is not None]
    if result.get("resumed_from_step"):
        figures.append(f"continued at step {result['resumed_from_step']} of {result['steps']}")
    return ", ".join(figures)


def markdown(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def shortened(reasons: Sequence[str]) -> str:
    """One line for a terminal: the first reasons, and how many more there are."""
    more = len(reasons) - SHOWN_REASONS
    return "; ".join([*reasons[:SHOWN_REASONS], *([f"and {more} more, which `plan --json` has"] if more > 0 else [])])


def run_json(run: Mapping[str, Any]) -> dict[str, Any]:
    """What `status --json` prints for one run."""
    names = ("run", "pipeline", "outcome", "note", "tags", "started", "seconds", "stages", "metrics", "error", "equals",
             "tracking")  # fmt: skip
    return {name: run[name] for name in names if name in run}


def labels(run: Mapping[str, Any]) -> list[str]:
    """The user's note and tags of a recorded run, as lines for a person."""
    tags = "  ".join(f"{key}={value}" for key, value in run.get("tags", {}).items())
    return [line for line in (*str(run.get("note", "")).split("\n"), tags) if line]


def seconds(value: float | None) -> str:
    """A duration as a person reads it."""
    if value is None:
        return ""
    return f"{value:.1f} s" if value < 100 else f"{int(value) // 60} min {int(value) % 60:02d} s"


def _figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def status_row(stage: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    """(stage, outcome, time, figures or error, log) of a stage of a recorded run; the log relative to where one stands."""
    log = stage.get("log") or ""
    if stage.get("key"):  # a shell's glob finds the rest of the key
        log = log.replace(stage["key"], f"{stage['key'][:12]}*")
    with contextlib.suppress(ValueError):
        log = str(Path(log).relative_to(Path.cwd())) if log else ""
    figures = stage.get("error") or stage.get("metric") or ""
    return stage["name"], stage["outcome"], seconds(stage.get("seconds")), figures, log
