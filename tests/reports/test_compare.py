"""Runs side by side: settings and data that differ, the better metric, the verdict."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.recorded_homes import Made, make_run
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.core.hashing import digest_of
from ttrain.reports.compare import Difference, RunComparison, compare
from ttrain.reports.report import comparison_page
from ttrain.store.run_views import read_runs

A, B, C = "full-20261121-100000-0001a", "full-20261121-110000-0002b", "full-20261121-120000-0003c"
BITS, LOSS, VALIDATION = "eval/bits_per_byte", "eval/chat_loss_sft", "pretrain/validation_loss"


def shards(rows: int = 295, digest: str = "a", rejected: int = 0) -> Made:
    left_out = {"not JSON": rejected} if rejected else {}
    train = {"rows": rows, "tokens": 43 * rows, "live_tokens": 42 * rows, "bytes": 100 * rows}
    tally = {"train": {"rows": 300, "skipped": {}, "rejected": left_out}}
    result = {"train": train, "heldout": {"rows": 5}, "blocks": 1, "encoded_blocks": 1}
    result["rows"] = tally
    inputs = {"tokenizer": ("tokenizer", "t1" * 32, "t1")}
    return Made("shards-pretrain", result=result, files={"docs.jsonl": digest * 64}, inputs=inputs)


def scored(scores: dict[str, list[float]], first: str = "r0", size: int = 8) -> Made:
    """An evaluation with the sums of held-out records, by metric; `size`: what a record counts."""
    metrics = []
    for name, sums in scores.items():
        records = [first, *(f"r{number}" for number in range(1, len(sums)))]
        sizes = [1 if "bits" in name else size] * len(sums)
        metric: dict[str, Any] = {"name": name, "sums": sums, "sizes": sizes, "records": records}
        metrics.append({**metric, "higher_is_better": "accuracy" in name})
    texts = {"scores.json": json.dumps(metrics)}
    key = digest_of([scores, first, size])
    return Made("evaluate", result={"samples": {}, "metrics": {}}, texts=texts, key=key)


def with_bits(home: Path, run: str, bits: list[float], number: int = 0) -> None:
    """A run whose evaluation has these bits per byte of held-out records."""
    metrics = {BITS: sum(bits) / len(bits)}
    make_run(home, run, [scored({"bits_per_byte": bits})], number=number, metrics=metrics)


def compared(home: Path, *names: str) -> RunComparison:
    return compare(read_runs(home, names))


def lines(rows: Sequence[Difference]) -> dict[str, Sequence[object]]:
    return {row.name: row.values for row in rows}


def test_settings_and_data_that_differ_are_lines_and_the_rest_are_none(tmp_path: Path) -> None:
    tokenizer = Made("tokenizer", files={"docs.jsonl": "a" * 64}, result={"vocab_size": 400})
    settings: dict[str, Any] = {"pretrain": {"optim": {"lr": 0.004}}}
    make_run(tmp_path, A, [tokenizer, shards()], settings=settings)
    settings = {"pretrain": {"optim": {"lr": 0.003}}, "runtime": {"threads": 3}}
    others = shards(rows=200, digest="b", rejected=7)
    make_run(tmp_path, B, [tokenizer, others], settings=settings)
    comparison = compared(tmp_path, A, B)
    assert lines(comparison.settings) == {"pretrain.optim.lr": ("0.004", "0.003")}
    assert lines(comparison.settings_aside) == {"runtime.threads": ("null", "3")}
    data = lines(comparison.data)
    assert data["shards-pretrain: docs.jsonl (train)"] == ("a" * 12, "b" * 12)
    assert data["shards-pretrain: train rows"] == ("295", "200")
    assert data["shards-pretrain: rows train rejected not JSON"] == ("–", "7")
    assert not any(name.startswith("tokenizer") for name in data)


def test_the_better_metric_is_named_with_its_difference_in_percent(tmp_path: Path) -> None:
    names = (BITS, "pretrain/tokens_per_second", "eval/documents", "tok/bytes_per_token")
    for run, values in ((A, (2.0, 100.0, 50.0, 3.0)), (B, (1.5, 150.0, 60.0, 3.0))):
        stages = [scored({"bits_per_byte": [values[0]] * 40})]
        make_run(tmp_path, run, stages, metrics=dict(zip(names, values, strict=True)))
    metrics = {metric.name: metric for metric in compared(tmp_path, A, B).metrics}
    assert (metrics[BITS].best, metrics[BITS].texts) == (1, ["2", "1.5000  -25 %"])
    later = Difference("champion/bits_per_byte", (None, 2.0, 3.0), 1, -1)
    assert later.texts == ["–", "2", "3  +50 %"], "nothing to compare the first one with"
    assert metrics["pretrain/tokens_per_second"].best is None, "faster is not better"
    assert metrics["eval/documents"].best is None and metrics["eval/documents"].better == 0
    assert "tok/bytes_per_token" not in metrics


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        ([{BITS: 1.50000001}, {BITS: 1.5}, {BITS: 1.49999999}], "equal by bits_per_byte: 1.5000"),
        (
            [{BITS: 2.0}, {BITS: 1.5}, {BITS: 1.5}],
            "B and C are better by bits_per_byte: 1.5000 against 2 of A (-25 %)",
        ),
        ([{BITS: 2.0}, {BITS: math.nan}], "the runs share no metric"),
        (
            [{BITS: 1.5, LOSS: 4.5}, {BITS: 1.5, LOSS: 4.0}],
            "B is better by chat_loss_sft: 4 against 4.5000 of A (-11 %)",
        ),
    ],
)
def test_the_verdict_names_who_is_better(
    tmp_path: Path, metrics: list[dict[str, float]], verdict: str
) -> None:
    names = [A, B, C][: len(metrics)]
    for name, of_run in zip(names, metrics, strict=True):
        finite = {metric: value for metric, value in of_run.items() if math.isfinite(value)}
        sums = {metric.removeprefix("eval/"): [value] * 40 for metric, value in finite.items()}
        make_run(tmp_path, name, [scored(sums)] if sums else [], metrics=of_run)
    text = compared(tmp_path, *names).verdict.replace(" on these records", "")
    assert re.sub("the models? of |eval/", "", text).startswith(verdict)


@pytest.mark.parametrize(
    ("bits", "end", "is_certain"),
    [
        ([8.0 + 0.1 * (number % 3) for number in range(40)], "7.8.* to 7.9.*$", True),
        ([24.0 if number % 2 else 7.0 for number in range(40)], "chance$", False),
    ],
)
def test_the_verdict_is_certain_and_green_only_where_the_interval_excludes_zero(
    tmp_path: Path, bits: list[float], end: str, is_certain: bool
) -> None:
    with_bits(tmp_path, A, [16.0] * 40)
    with_bits(tmp_path, B, bits)
    comparison = compared(tmp_path, A, B)
    assert comparison.verdict.startswith("the model of B is better")
    assert re.search(end, comparison.verdict), comparison.verdict
    assert comparison.is_certain == is_certain
    page = comparison_page(read_runs(tmp_path, [A, B]))
    assert ('class="verdict good">' in page) == is_certain


@pytest.mark.parametrize(("count", "is_judged"), [(1, False), (19, False), (20, True)])
def test_of_few_held_out_records_no_model_is_better(
    tmp_path: Path, count: int, is_judged: bool
) -> None:
    with_bits(tmp_path, A, [16.0] * count)
    with_bits(tmp_path, B, [8.0] * count)
    comparison = compared(tmp_path, A, B)
    (metric,) = comparison.metrics
    verdict = "the model of B is better" if is_judged else f"no model is better by {BITS}: "
    assert comparison.verdict.startswith(verdict)
    expected = (1, ["16", "8  -50 %"]) if is_judged else (None, ["16", "8"])
    assert (metric.best, metric.texts) == expected
    assert is_judged == (f"{count} of 20" not in metric.title)


@pytest.mark.parametrize(
    ("size", "first", "shards_key", "best", "remark"),
    [
        (9, "r0", "e", {BITS}, "tokenizers"),
        (8, "another", "d", {VALIDATION}, "held-out"),
        (8, "r0", "d", {BITS, LOSS, VALIDATION}, None),
    ],
)
def test_no_run_is_the_best_by_what_other_records_tokenizers_or_shards_make_incomparable(
    tmp_path: Path, size: int, first: str, shards_key: str, best: set[str], remark: str | None
) -> None:
    values = {BITS: 2.0, LOSS: 3.0, VALIDATION: 4.0, "pretrain/loss": 4.0}
    sums = {"bits_per_byte": [2.0] * 40, "chat_loss_sft": [3.0] * 40}

    def trained_on(key: str) -> Made:
        return Made("pretrain", inputs={"shards": ("shards-pretrain", key * 64, key)})

    make_run(tmp_path, A, [scored(sums), trained_on("d")], metrics=values)
    halves = {metric: value / 2 for metric, value in values.items()}
    make_run(tmp_path, B, [scored(sums, first, size), trained_on(shards_key)], metrics=halves)
    comparison = compared(tmp_path, A, B)
    assert {metric.name for metric in comparison.metrics if metric.best is not None} == best
    assert (remark in comparison.remarks[0]) if remark else (comparison.remarks == [])


def test_the_commands_print_tables_and_json_and_write_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    for number, (name, bits) in enumerate({A: 2.5, B: 2.25}.items()):
        made = [shards(295 - number), scored({"bits_per_byte": [bits] * 40})]
        settings = {"pretrain": {"optim": {"lr": 0.001 + number / 10}}}
        make_run(tmp_path, name, made, number=number, metrics={BITS: bits}, settings=settings)

    def output(*arguments: str) -> str:
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    table = output("compare", A, B)
    for text in ("pretrain.optim.lr", "shards-pretrain: train rows", "-10 %  * best"):
        assert text in table, text
    report = json.loads(output("compare", A, B, "--json"))
    assert report.pop("page") is None
    assert report == json.loads(json.dumps(asdict(compared(tmp_path, A, B))))
    report = json.loads(output("report", "latest", "--json"))
    assert report == {"run": B, "page": f"{B}.html", "notes": []}
    assert output("compare", A, B, "--html", "both.html").strip().endswith(" both.html")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")
