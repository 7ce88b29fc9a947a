"""What each held-out record cost each model: the sums that the figures are quotients of, for comparing two evaluations.

{"parts": {"documents": {"records": [digest], "bytes": [n], "tokens": [n], "nats": {"base": [x]}}},
 "metrics": {"bits_per_byte": {"part": "documents", "model": "base", "per": "bytes", "factor": 1.44}}}

A figure is `factor * sum(nats) / sum(per)`. The lists of a part have an entry for each record, in one order. A suite's tasks
are parts, too: "nats" are then the sums of whatever the figure is of, and "per" names sizes of its own. A metric of some of
the records has their numbers as "rows"; "shown" is "exp" where the figure is the exponential of the quotient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ttrain.core.files import read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.evaluate.task_result import Figure, Outcome, metric_of

FILE = "scores.json"  # of an evaluation
DIGEST_CHARACTERS = 16  # 64 bits: among a million records a chance of 3e-8 that two are taken for one


class Table:
    """The parts and figures of one evaluation, as they come."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Any]] = {}
        self._metrics: dict[str, dict[str, Any]] = {}

    def part(self, name: str, records: Sequence[object], sizes: Sequence[int] = ()) -> None:
        """Records that will be scored; `sizes` are their bytes, where bytes count. They are told apart by what they say,
        since another tokenizer may read them."""
        names = [digest_of(record)[:DIGEST_CHARACTERS] for record in records]
        self._parts[name] = {"records": names, "bytes": list(sizes), "tokens": [], "nats": {}}

    def figure(
        self, metric: str, part: str, model: str, scored: Sequence[tuple[float, int]], *, per: str, factor: float = 1.0
    ) -> float:
        """The figure of a model, from (nats, tokens) of each record of the part; `per` is bytes or tokens."""
        entry = self._parts[part]
        entry["nats"][model], entry["tokens"] = [nats for nats, _ in scored], [tokens for _, tokens in scored]
        self._metrics[metric] = {"part": part, "model": model, "per": per, "factor": factor}
        return factor * sum(nats for nats, _ in scored) / max(1, int(sum(entry[per])))

    def groups(self, metric: str, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """The figure over the records of each group ("lang=zh" to numbers of records) by the name of its metric."""
        found = {}
        for group, numbers in groups.items():
            name = metric_of(metric, group)
            self._metrics[name] = {**self._metrics[metric], "rows": list(numbers)}
            found[name] = self._figure(name).value
        return found

    def outcome(self, outcome: Outcome) -> None:
        """What a model made of a task: every figure, and the one that stands for it over each group of items."""
        part = f"suite/{outcome.task}"
        entry = self._parts.setdefault(part, {"records": list(outcome.items), "bytes": [], "tokens": [], "nats": {}})
        for figure in outcome.figures:
            name = f"{figure.name}/{outcome.subject}"
            entry["nats"][name], entry[f"sizes/{name}"] = list(figure.sums), list(figure.sizes)
            self._metrics[f"{outcome.task}/{name}"] = {
                "part": part, "model": name, "per": f"sizes/{name}", "factor": figure.factor,
                "higher_is_better": figure.higher_is_better, "shown": figure.shown,
            }  # fmt: skip
        self.groups(f"{outcome.task}/{outcome.primary.name}/{outcome.subject}", outcome.groups)

    def figures(self) -> dict[str, Figure]:
        """Every figure by its metric's name."""
        return {metric: self._figure(metric) for metric in self._metrics}

    def _figure(self, metric: str) -> Figure:
        sums, sizes, _ = sums_in({"parts": self._parts, "metrics": self._metrics}, metric) or ([], [], [])
        told = self._metrics[metric]
        higher = told.get("higher_is_better", False)
        return Figure(metric, tuple(sums), tuple(sizes), higher, unit="", shown=told.get("shown"))

    def write(self, directory: Path) -> None:
        """Leave the file."""
        write_json(directory / FILE, {"parts": self._parts, "metrics": self._metrics})


def sums_of(directory: Path, metric: str) -> tuple[list[float], list[float], list[str]] | None:
    """(sums, sizes, records) behind a figure of the evaluation in this directory: `sum(sums) / sum(sizes)`, or of that what
    `shown_of` says; None where it has none."""
    return sums_in(read_object(directory / FILE), metric)


def direction_of(directory: Path, metric: str) -> bool | None:
    """Whether more of the figure is better, by the evaluation in this directory; None where it does not say."""
    entry = read_object(directory / FILE).get("metrics", {}).get(metric, {})
    higher: bool | None = entry.get("higher_is_better")
    return higher


def shown_of(directory: Path, metric: str) -> Literal["exp"] | None:
    """What the figure is of its quotient: "exp" for a perplexity."""
    entry = read_object(directory / FILE).get("metrics", {}).get(metric, {})
    return "exp" if entry.get("shown") == "exp" else None


def sums_in(found: Mapping[str, Any], metric: str) -> tuple[list[float], list[float], list[str]] | None:
    """The same from what such a file holds."""
    entry = found.get("metrics", {}).get(metric)
    if entry is None:
        return None
    part = found["parts"][entry["part"]]
    sums = [entry["factor"] * nats for nats in part["nats"][entry["model"]]]
    sizes, records = [float(size) for size in part[entry["per"]]], list(part["records"])
    if (rows := entry.get("rows")) is not None:
        return [sums[row] for row in rows], [sizes[row] for row in rows], [records[row] for row in rows]
    return sums, sizes, records
