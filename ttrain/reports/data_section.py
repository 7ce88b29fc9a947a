"""What a run's page tells of its data: records and tokens, what was left out, how full the rows are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ttrain.reports import charts, figures
from ttrain.reports.compare_page import TITLES
from ttrain.reports.html import Markup, details, table, tag
from ttrain.tracking import RunView


def data(view: RunView) -> Iterator[Markup]:
    """One table of the data sets, one of the tokenizer's fit, one of the rows that training sees."""
    sets, files = [], []
    for stage in view.stages:
        if not stage.startswith("shards-"):
            continue
        name, result = stage.removeprefix("shards-"), view.manifest(stage).get("result")
        if not result:
            continue
        train, heldout = result.get("train", {}), result.get("heldout", {})
        lost = "; ".join(filter(None, (_lost(tally) for tally in result.get("rows", {}).values())))
        counted = [_count(train.get(what)) for what in ("rows", "tokens", "live_tokens")]
        rest = [figures.number(train.get("bytes"), "bytes"), _count(heldout.get("rows")), _count(result.get("duplicates"))]
        sets.append((name, *counted, *rest, lost or "none"))
        for file in result.get("files", ()):
            counted = [_count(file.get(what)) for what in ("rows", "kept", "tokens")]
            files.append((name, file["name"], *counted, figures.number(file.get("bytes"), "bytes"), _lost(file) or "none"))
    if sets:
        header = ("data set", "records", "tokens", "count in the loss", "bytes", "held out", "duplicates", "left out")
        yield table(header, sets, numbers=range(1, 7))
    if files:
        shown = table(("data set", "file", "rows", "kept", "tokens", "bytes", "left out"), files, numbers=range(2, 6))
        yield details(f"{len(files)} files", shown)
    tokenizer = view.manifest("tokenizer").get("result", {})
    if tokenizer:
        ids, fit, unknown = (tokenizer.get(name, 0) for name in ("vocab_size", "bytes_per_token", "unk_rate"))
        told = (
            f"The tokenizer has {ids:,} ids, and a token of it stands for {fit:.3f} bytes of the text that it learnt from; "
        )
        yield tag("p", f"{told}{100 * unknown:.3g} % of the tokens are unknown.")
    rows = [row for name in charts.TRAININGS if (row := _rows(name, view.manifest(name).get("result", {})))]
    if rows:
        yield tag("h3", "Rows as the trainings see them")
        yield table(
            ("training", "rows", "of", "full to", "records", "cut", "tokens dropped", "epochs"), rows, numbers=range(1, 8)
        )


def _rows(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    rows = result.get("rows", {})
    if not rows:
        return ()
    fill, epochs = rows.get("fill"), result.get("epochs")
    return (
        TITLES.get(name, name), _count(rows.get("rows")), f"{rows.get('row_length', 0):,} tokens",
        f"{100 * fill:.1f} %" if fill is not None else "–", _count(rows.get("records")), _count(rows.get("cut_records")),
        _count(rows.get("dropped_tokens")), f"{epochs:.3g}" if epochs is not None else "–",
    )  # fmt: skip


def _lost(tally: Mapping[str, Any]) -> str:
    lost = {**tally.get("skipped", {}), **tally.get("rejected", {})}
    return ", ".join(f"{reason} {count:,}" for reason, count in lost.items() if count)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
