"""An evaluation as a table: the figures of a run, its baselines, its champion and its suites. Results in, text out; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ttrain.evaluate.item_notes import counted

BASELINES = (("_xz", "xz -9e"), ("_zlib", "zlib -9"), ("_order0", "order-0 bytes"), ("_order3", "order-3 bytes"))
NO_SUITES: Mapping[str, Any] = {"models": (), "tasks": (), "comparisons": ()}
# What a night's table shows of the champion beside its challenger.
CHAMPION_METRICS: Mapping[str, str] = {
    "bits_per_byte": "bits per byte, base model",
    "chat_loss_sft": "chats loss, sft",
    "domain_loss_lora": "domain loss, lora",
}


def rows(
    metrics: Mapping[str, float], results: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> list[tuple[str, str, str]]:
    """(what, value, remark) of each evaluated figure, from the run's metrics; with the results of its stages, the intervals
    of the figures and the tasks of its suites, too."""
    intervals = _intervals(results)

    def value(name: str) -> float | None:
        return metrics.get(f"eval/{name}")

    def shown(name: str, figure: float) -> str:
        low, high = intervals.get(name, (None, None))
        return f"{figure:.3f}" if low is None or high is None else f"{figure:.3f} ({low:.3f} to {high:.3f})"

    found: list[tuple[str, str, str]] = []
    model, xz = value("bits_per_byte"), value("bits_per_byte_xz")
    documents = f"{_count(value('documents'))} documents, {_count(value('document_bytes'))} bytes"
    for name, label in (("", "base model"), *BASELINES):
        bits = value(f"bits_per_byte{name}")
        if bits is not None:
            remark = documents if not name else ""
            if not name and xz is not None and model is not None:
                remark += f"; {'beats' if model < xz else 'does not beat'} xz"
            found.append((f"bits per byte, {label}", shown(f"eval/bits_per_byte{name}", bits), remark))
            groups = [metric for metric in metrics if metric.startswith(f"eval/bits_per_byte{name}/")]
            found += [(f"bits per byte, {label}, {_group(metric)}", shown(metric, metrics[metric]), "") for metric in groups]
    for metric, label, count, tokens in (
        ("chat_loss", "chats", "chats", "chat_tokens"),
        ("domain_loss", "domain", "domain", "domain_tokens"),
    ):
        before: float | None = None
        for name in ("base", "sft", "lora"):
            loss = value(f"{metric}_{name}")
            if loss is not None:
                scored = f"{_count(value(count))} chats, {_count(value(tokens))} scored tokens"
                told = shown(f"eval/{metric}_{name}", loss)
                found.append((f"{label} loss, {name}", told, scored if before is None else f"{loss - before:+.3f}"))
                before = loss
    for metric, label in CHAMPION_METRICS.items():
        old, new = metrics.get(f"champion/{metric}"), value(metric)
        if old is not None:
            told = shown(f"champion/{metric}", old)
            found.append((f"{label}, champion", told, "" if new is None else f"the challenger: {new - old:+.3f}"))
    told, old = (results.get(stage, {}).get("suites", NO_SUITES) for stage in ("evaluate", "evaluate-champion"))
    return [*found, *_suites(told), *_suites_of_champion(told, old)]


def _suites_of_champion(told: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The same of the champion, with what its challenger's figure has more."""
    challengers = {task["task"]: task for task in told["tasks"]}
    for task in old["tasks"]:
        name, beside = task["figure"], challengers.get(task["task"])
        for model in (name for name in old["models"] if name in task["models"]):
            figure, remark = task["models"][model]["figures"][name], ""
            if beside is not None and beside["digest"] != task["digest"]:
                remark = "not the same items"
            elif beside is not None and model in beside["models"]:
                new = beside["models"][model]["figures"].get(name)
                if new is None:
                    remark = f"the challenger's is {beside['figure'].replace('_', ' ')}"
                elif None not in (new["value"], figure["value"]):
                    remark = f"the challenger: {new['value'] - figure['value']:+.3f}"
            yield f"{task['task']} {name.replace('_', ' ')}, {model}, champion", _with_interval(figure), remark


def _suites(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The figure that stands for each task, of each model; and what the task says of it beside the first model."""
    verdicts = {(one["task"], one["second"]): one for one in told["comparisons"]}
    for task in told["tasks"]:
        for model in (name for name in told["models"] if name in task["models"]):
            name, figure = task["figure"], task["models"][model]["figures"][task["figure"]]
            left_out = sum(task["left_out"].values())
            remark = f"{task['items']:,} items" + (f"; {counted(left_out, 'row')} left out" if left_out else "")
            if versus := verdicts.get((task["task"], model)):
                difference = versus.get("difference")
                remark = ("" if difference is None else f"{0 - difference:+.3f}: ") + versus["verdict"]
            yield f"{task['task']} {name.replace('_', ' ')}, {model}", _with_interval(figure), remark


def _with_interval(figure: Mapping[str, Any]) -> str:
    value = "no number" if figure["value"] is None else f"{figure['value']:.3f}"
    return value + (f" ({figure['interval'][0]:.3f} to {figure['interval'][1]:.3f})" if figure["interval"] else "")


def _intervals(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The intervals of evaluated figures, under the names that `metrics_of` gives to the figures."""
    return {
        f"{prefix}/{name}": (found[0], found[1])
        for stage, prefix in (("evaluate", "eval"), ("evaluate-champion", "champion"))
        for name, found in results.get(stage, {}).get("intervals", {}).items()
    }


def _group(metric: str) -> str:
    """ "lang=zh" of the metric eval/bits_per_byte/lang:zh."""
    return metric.rpartition("/")[2].replace(":", "=", 1)


def _count(value: float | None) -> str:
    return f"{int(value or 0):,}"
