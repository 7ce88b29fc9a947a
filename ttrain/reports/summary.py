"""Stages, runs and evaluations as tables: on a terminal, as markdown, as plain lines. Manifests in, text out; pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttrain.core.terminal import escaped
from ttrain.core.text import counted, format_duration, short_digest
from ttrain.store.runs import NOTHING_NEW, RecordedRun

SHOWN_REASONS = 3
EvaluationRow = tuple[str, str, str]  # metric, value, remark
Result = Mapping[str, Any]  # of a stage, as its manifest has it, or a part of one

# The metrics of a stage in its line of `status`.
KEY_METRICS: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("vocab_size", "bytes_per_token"),
    "base-model": ("parameters", "vocab_size"),
    "new-model": ("parameters",),
    "reference": ("answers", "log_probability"),
}

OVERFIT = "overfit"  # the guard of a held-out loss that rises while that of the training falls
KEEP_THE_BEST = "or keep the best step: pretrain.early_stopping.patience=3 pretrain.validate_every_steps=50"
GUARD_FIXES = {
    OVERFIT: "try fewer passes by a smaller {budget}, or more data",
    "no_effect": "try a larger {stage}.optim.lr, or more passes",
    "loss-spike": "try a smaller {stage}.optim.lr",
}


def metrics_of(results: Mapping[str, Result]) -> dict[str, float]:
    """The metrics of a pipeline run under their stable names, from the stages' results: the same whether cached or not."""
    from ttrain.config.training import TRAININGS, VALIDATION_LOSS

    trainings = {name: results[name] for name in TRAININGS if name in results}
    figures = (VALIDATION_LOSS, "loss", "tokens", "tokens_per_second")
    metrics = {f"{name}/{figure}": result.get(figure) for name, result in trainings.items() for figure in figures}
    metrics |= _total(trainings.values())
    metrics |= {f"tok/{name}": results.get("tokenizer", {}).get(name) for name in ("bytes_per_token", "unk_rate")}
    for stage, group, prefix in (
        ("evaluate", "metrics", "eval"), ("evaluate", "counts", "eval"), ("evaluate-champion", "metrics", "champion"),
    ):  # fmt: skip
        metrics |= {f"{prefix}/{name}": value for name, value in results.get(stage, {}).get(group, {}).items()}
    return {name: rounded(value) for name, value in sorted(metrics.items()) if value is not None}


def rounded(value: float) -> float:
    """Round a metric to the seven digits of fp32, since MLflow's tables show it as stored; whole numbers are kept."""
    return float(value) if float(value).is_integer() else float(f"{value:.7g}")


def _total(trainings: Iterable[Result]) -> dict[str, float]:
    """The total time of the trainings, whichever runs made them; a device is a rank.

    A training that was continued knows the time of its last attempt: the steps before are taken to have been as fast.
    """
    seconds = device_seconds = 0.0
    for training in trainings:
        timed = training.get("steps", 0) - training.get("resumed_from_step", 0)
        if timed > 0 and "train_seconds" in training:
            took = training["train_seconds"] * training["steps"] / timed
            seconds, device_seconds = seconds + took, device_seconds + took * training.get("ranks", 1)
    if not seconds:
        return {}
    return {"total/train_seconds": seconds, "total/device_hours": device_seconds / 3600}


def _overlaps(contamination: Result | None) -> str:
    """How many evaluation items occur in training rows, where these were searched and none was removed."""
    if not contamination or contamination["removed"]:
        return ""
    items, overlapping = (sum(task[name] for task in contamination["tasks"].values()) for name in ("items", "overlapping"))
    return f"; {overlapping:,} of {items:,} evaluation items are in {contamination['documents']:,} training rows"


def key_figures(stage: str, result: Result, directory: Path = Path()) -> str:
    """One line about a stage's result. `directory`: of its artifact."""
    from ttrain.config.data import LEARNT
    from ttrain.config.training import BITS_PER_BYTE, TRAININGS, VALIDATION_LOSS

    if stage == "source":
        return ", ".join(f"{name} {result[name]['rows']:,} rows" for name in LEARNT if name in result)
    if stage.startswith("shards-"):
        train, heldout = result["train"], result["heldout"]
        lost = Counter[str]()
        for tally in result["rows"].values():
            lost.update({**tally["skipped"], "bad": sum(tally["rejected"].values())})
        left_out = "".join(f"; left out {count:,}: {rule}" for rule, count in lost.items() if count)
        unread = Counter[str]()
        for tally in result["rows"].values():
            unread.update(tally.get("unread_keys", {}))
        left_out += "".join(f"; not read: '{escaped(key)}' in {counted(rows, 'row')}" for key, rows in unread.items())
        reused = result["blocks"] - result["encoded_blocks"]
        reused_text = f"; {reused:,} of {result['blocks']:,} shards were reused" if reused else ""
        overlap_text = _overlaps(result.get("contamination"))
        counts = f"{counted(train['rows'], 'row')}, {train['tokens']:,} tokens; held out {counted(heldout['rows'], 'row')}"
        return f"{counts}{left_out}{reused_text}{overlap_text}"
    if stage == "heldout":
        unscored = f"; {result['unscored']:,} of this night are beyond its share" if result.get("unscored") else ""
        return f"{result['records']:,} held-out documents of all nights, {result['new']:,} of them new{unscored}"
    if stage in ("replay", "replay-sft"):
        kind, sets = "windows of documents" if stage == "replay" else "chats", len(result["nights"])
        return f"{result['records']:,} {kind}, {result['tokens']:,} tokens, of {counted(sets, 'earlier set')}"
    if stage.startswith("evaluate"):
        bits = result["metrics"].get(BITS_PER_BYTE.name)
        return f"{bits:.3f} {BITS_PER_BYTE.label}" if bits is not None else "no held-out documents"
    names = (VALIDATION_LOSS, "tokens", "tokens_per_second") if stage in TRAININGS else KEY_METRICS.get(stage, ())
    figures = [f"{name} {_figure(result[name])}" for name in names if result.get(name) is not None]
    if result.get("resumed_from_step"):
        figures.append(f"continued at step {result['resumed_from_step']} of {result['steps']}")
    if warned := result.get("guard_warnings"):
        figures.append(f"{_advice_of_guards(stage, warned)}; {directory / 'run' / 'guards.jsonl'}")
    return ", ".join(figures)


def _advice_of_guards(stage: str, warned: Iterable[str]) -> str:
    """Which guards warned, and which settings to change."""
    budget = f"{stage}.{'tokens' if stage == 'pretrain' else 'epochs'}"
    fixes = [GUARD_FIXES[name].format(stage=stage, budget=budget) for name in warned if name in GUARD_FIXES]
    if stage == "pretrain" and OVERFIT in warned:
        fixes.append(KEEP_THE_BEST)
    names = ", ".join(name.replace("_", " ") for name in warned)
    return f"the guards warned of {'; '.join([names, *fixes])}"


def markdown(rows: Iterable[Sequence[object]], header: Sequence[object]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([escaped(str(cell)).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shortened(reasons: Sequence[str]) -> str:
    """One line for a terminal: the first reasons, and how many more there are."""
    hidden_count = len(reasons) - SHOWN_REASONS
    hidden = [f"and {hidden_count} more, which `plan --json` has"] if hidden_count > 0 else []
    return "; ".join([*reasons[:SHOWN_REASONS], *hidden])


def run_json(run: RecordedRun) -> dict[str, Any]:
    """The object that `status --json` prints for one run."""
    names = ("run", "pipeline", "outcome", "note", "tags", "started", "seconds", "stages", "metrics", "error", "equals",
             "tracking")  # fmt: skip
    return {name: run[name] for name in names if name in run}


def labels(run: RecordedRun) -> list[str]:
    """The user's note and tags of a recorded run, as lines for a person."""
    tags = "  ".join(f"{key}={value}" for key, value in run.get("tags", {}).items())
    return [line for line in (*str(run.get("note", "")).split("\n"), tags) if line]


def _figure(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def shown_stages(run: RecordedRun) -> list[Result]:
    """The stages of a recorded run that tell something: none where all were cached, and after a night that found nothing new
    those that it came to."""
    if run["outcome"] == "cached":
        return []
    return [stage for stage in run["stages"] if run["outcome"] != NOTHING_NEW or stage["outcome"] != "pending"]


def status_row(stage: Result) -> tuple[str, str, str, str, str]:
    """(stage, outcome, time, figures or error, log) of a recorded stage; the log relative to the working directory."""
    log = stage.get("log") or ""
    if stage.get("key"):  # a shell's glob finds the rest of the key
        log = log.replace(stage["key"], f"{short_digest(stage['key'])}*")
    with contextlib.suppress(ValueError):
        log = str(Path(log).relative_to(Path.cwd())) if log else ""
    figures = stage.get("error") or stage.get("metric") or ""
    return stage["name"], stage["outcome"], format_duration(stage.get("seconds")), figures, log


BASELINES = (("xz", "xz -9e"), ("zlib", "zlib -9"), ("order0", "order-0 bytes"), ("order3", "order-3 bytes"))

# Of the held-out records, what is counted beside them.
SCORED = {"chats": ("chat", "chat_tokens"), "domain": ("chat", "domain_tokens"), "pairs": ("pair", "")}

NO_SUITES: Result = {"models": (), "tasks": (), "comparisons": ()}


def rows(metrics: Mapping[str, float], results: Mapping[str, Result] = MappingProxyType({})) -> list[EvaluationRow]:
    """(metric, value, remark) of each evaluated metric of the run; with the results of its stages, also the metrics'
    intervals and the tasks of its suites."""
    from ttrain.config.training import EVALUATED, MODELS, PRIMARY_METRICS  # here: `status` needs none of the settings, 0.1 s
    from ttrain.evaluate.few_records import not_judged

    intervals = {
        f"{prefix}/{name}": bounds
        for stage, prefix in (("evaluate", "eval"), ("evaluate-champion", "champion"))
        for name, bounds in results.get(stage, {}).get("intervals", {}).items()
    }

    paired = results.get("evaluate", {}).get("paired", {})

    def row(label: str, name: str, remark: str = "") -> EvaluationRow:
        return label, _with_interval(metrics[name], intervals.get(name)), remark

    def number_of(name: str) -> int:
        return int(metrics.get(f"{EVALUATED}{name}") or 0)

    def count(name: str, noun: str) -> str:
        return counted(number_of(name), noun)

    table: list[EvaluationRow] = []
    bits, *losses = PRIMARY_METRICS.values()
    for model, label in ((bits.model, "base model"), *BASELINES):
        name, xz, remark = f"{EVALUATED}{bits.of(model)}", metrics.get(f"{EVALUATED}{bits.of('xz')}"), ""
        if name not in metrics:
            continue
        if model == bits.model:
            remark = f"{count('documents', 'document')}, {count('document_bytes', 'byte')}"
            if xz is not None:
                comparison = f"{'beats' if metrics[name] < xz else 'does not beat'} xz"
                remark += f"; {not_judged(number_of('documents')) or comparison}"
        table.append(row(f"{bits.label}, {label}", name, remark))
        groups = (group for group in metrics if group.startswith(f"{name}/"))  # eval/bits_per_byte/lang:zh is lang=zh
        table += [row(f"{bits.label}, {label}, {group.rpartition('/')[2].replace(':', '=', 1)}", group) for group in groups]
    for loss in losses:
        previous: float | None = None
        for model in MODELS:
            name = f"{EVALUATED}{loss.of(model)}"
            if (value := metrics.get(name)) is not None:
                unit, tokens = SCORED[loss.records]
                scored = count(loss.records, unit) + (f", {count(tokens, 'scored token')}" if tokens else "")
                p = paired.get(loss.of(model), {}).get("p")
                change = "" if previous is None else f"{value - previous:+.3f}" + ("" if p is None else f", p = {p:.2g}")
                remark = scored if previous is None else not_judged(number_of(loss.records)) or change
                table.append(row(f"{loss.label}, {model}", name, remark))
                previous = value
    for judged in (bits, *losses):  # what a night's table shows of the champion beside its challenger
        name, new = f"champion/{judged.name}", metrics.get(judged.of_run)
        if name in metrics:
            difference = "" if new is None else f"the challenger: {new - metrics[name]:+.3f}"
            remark = difference and (not_judged(number_of(judged.records)) or difference)
            model = "base model" if judged == bits else judged.model
            table.append(row(f"{judged.label}, {model}, champion", name, remark))
    suites, champion_suites = (
        results.get(stage, {}).get("suites", NO_SUITES) for stage in ("evaluate", "evaluate-champion")
    )
    return [*table, *_suites(suites), *_suites_of_champion(suites, champion_suites)]


def _suites_of_champion(suites: Result, champion_suites: Result) -> Iterator[EvaluationRow]:
    """The rows of the champion's suites, each with the difference of its challenger."""
    challengers = {task["task"]: task for task in suites["tasks"]}
    for task in champion_suites["tasks"]:
        for model in (name for name in champion_suites["models"] if name in task["models"]):
            figure = task["models"][model]["figures"][task["figure"]]
            remark = _of_challenger(challengers.get(task["task"]), task, model, figure["value"])
            yield _suite_row(task, f"{model}, champion", figure, remark)


def _of_challenger(challenger: Result | None, task: Result, model: str, value: float | None) -> str:
    """A remark about the challenger's task beside the champion's: the difference from its `value`, or why there is none."""
    if challenger is None or (challenger["digest"] == task["digest"] and model not in challenger["models"]):
        return ""
    if challenger["digest"] != task["digest"]:
        return "not the same items"
    figure = challenger["models"][model]["figures"].get(task["figure"])
    if figure is None:
        return f"the challenger's is {challenger['figure'].replace('_', ' ')}"
    if value is None or figure["value"] is None:
        return ""
    from ttrain.evaluate.few_records import not_judged

    return not_judged(task["items"], noun="items") or f"the challenger: {figure['value'] - value:+.3f}"


def _suites(suites: Result) -> Iterator[EvaluationRow]:
    """The main metric of each task for each model, and its comparison with the first model."""
    verdicts = {(comparison["task"], comparison["second"]): comparison for comparison in suites["comparisons"]}
    for task in suites["tasks"]:
        for model in (name for name in suites["models"] if name in task["models"]):
            left_out = sum(task["left_out"].values())
            remark = f"{task['items']:,} items" + (f"; {counted(left_out, 'row')} left out" if left_out else "")
            if versus := verdicts.get((task["task"], model)):
                difference, verdict = versus.get("difference"), versus["verdict"]
                is_judged = difference is not None and not verdict.startswith("not judged")
                remark = (f"{0 - difference:+.3f}: " if is_judged else "") + verdict
            yield _suite_row(task, model, task["models"][model]["figures"][task["figure"]], remark)


def _suite_row(task: Result, model: str, figure: Result, remark: str) -> EvaluationRow:
    label = f"{task['task']} {task['figure'].replace('_', ' ')}, {model}"
    return label, _with_interval(figure["value"], figure["interval"]), remark


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    text = "no number" if value is None else f"{value:.3f}"
    return f"{text} ({interval[0]:.3f} to {interval[1]:.3f})" if interval else text
