"""What a pipeline's tracked run shows at a glance: curves by tokens, the settings that count, a description. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Settings, flatten
from ttrain.core.files import parse_json
from ttrain.core.redact import HIDDEN
from ttrain.reports import summary

# MLflow takes what stands before the slash as a section of the run's page, which it sorts by character code: with a capital
# it comes before `eval`. The rest is the title of the chart; where runs are compared, the whole is, of which 27 letters fit.
SECTION = "Curves"
QUICK = "validation_loss_quick"
CURVES = {
    "loss": f"{SECTION}/{{stage}} loss",
    "validation_loss": f"{SECTION}/{{stage}} validation",
    QUICK: f"{SECTION}/{{stage}} quick val",
}
POINTS = 1000  # of a curve on the pipeline's run; the stage's own run has them all
SHOWN_SETTINGS = 6
SHAPING = ("tokenizer", "model", "pretrain", "sft", "lora", "evaluate")
CELLS = ("stage", "outcome", "time", "figures")


def curves(stage: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Rows for the pipeline's run from a stage's `metrics.jsonl`: its losses, where the step is the number of tokens.

    So runs whose steps have other sizes lie over each other on the step axis of MLflow's charts. Validations are all
    there, of the losses between them at most a thousand; the one of the last step alone is no curve beside the quick ones.
    """
    rows = [row for line in lines if (row := _row(line)) and row.get("tokens") is not None]
    losses = [number for number, row in enumerate(rows) if "loss" in row["metrics"]]
    kept = {*losses[:: max(1, -(-len(losses) // POINTS))], *losses[-1:]}
    is_quick = any(QUICK in row["metrics"] for row in rows)
    left_out = {"validation_loss"} if is_quick and sum("validation_loss" in row["metrics"] for row in rows) == 1 else set()
    for number, row in enumerate(rows):
        names = [name for name in CURVES if name in row["metrics"] and name not in left_out]
        names = [name for name in names if name != "loss" or number in kept]
        if names:
            metrics = {CURVES[name].format(stage=stage): row["metrics"][name] for name in names}
            yield {"step": int(row["tokens"]), "time": row.get("time"), "metrics": metrics}


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("metrics"), dict) else None


def deviations(settings: Settings) -> dict[str, Any]:
    """The settings that are not the defaults, by their dotted names."""
    usual = dict(flatten(Settings().model_dump(mode="json")))
    told = flatten(settings.model_dump(mode="json"))
    return {name: value for name, value in told if name not in usual or usual[name] != value}


def as_yaml(values: Mapping[str, Any]) -> str:
    """Settings by their dotted names as a file for `-c`, without those that are masked."""
    import yaml

    tree: dict[str, Any] = {}
    for name, value in values.items():
        if value == HIDDEN:
            continue
        *groups, last = name.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[last] = value
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def description(
    run: Mapping[str, Any],
    changed: Mapping[str, Any],
    metrics: Mapping[str, float],
    measured: Sequence[tuple[str, str, str]] = (),
) -> str:
    """What a run was and what came of it, in markdown; the first line says most, for tables show no more. The user's note
    comes before all else.

    `run` is its record, `changed` the settings that are not the defaults, `measured` the table of its evaluation.
    """
    bits = metrics.get("eval/bits_per_byte")
    came = f"{bits:.4f} bits per byte" if bits is not None else str(run["outcome"])
    words = [_cell(f"{name}={_value(value)}") for name, value in sorted(changed.items(), key=_by_weight)]
    more = [f"and {len(words) - SHOWN_SETTINGS} more settings"] if len(words) > SHOWN_SETTINGS else []
    lines = [note(run["note"]), ""] if run.get("note") else []
    lines += [f"{came}: {', '.join([*words[:SHOWN_SETTINGS], *more]) or 'the default settings'}", ""]
    if run.get("error"):
        lines += [f"**{run['outcome']}**: {_cell(run['error'])}", ""]
    if measured:
        lines += [summary.markdown(measured, ("evaluation", "", "")), ""]
    lines += [summary.markdown((tuple(map(_cell, summary.status_row(stage)[:4])) for stage in run["stages"]), CELLS), ""]
    lines += [
        f"`settings.yaml` among the artifacts has what is not a default; the same again: `ttrain pipeline run "
        f"{run['pipeline']} -c settings.yaml`. In the terminal: `ttrain report {run['run']}`."
    ]
    return "\n".join(lines)


def note(text: str) -> str:
    """A user's note in markdown, as lines of text."""
    return "  \n".join(text.replace("<", "&lt;").split("\n"))


def _by_weight(setting: tuple[str, Any]) -> tuple[int, str]:
    """What shapes the models first, in the order of the pipeline; what only says how fast and where last."""
    name = setting[0]
    group = name.partition(".")[0]
    return (SHAPING.index(group) if group in SHAPING else len(SHAPING) + (group in (*SHAPE_NO_RESULT, "name"))), name


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_value, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _cell(text: str) -> str:
    """One line that markdown takes for text."""
    return " ".join(text.split()).replace("<", "&lt;")[:300]
