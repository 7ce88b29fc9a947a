"""Runs side by side: what differs, the verdict; and their pages, which execute no text."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.recorded_homes import NONE_SUCH, TOKENS_PER_STEP, Made, falling, make_run
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.core.hashing import digest_of
from ttrain.core.terminal import escaped
from ttrain.reports.compare import Difference, RunComparison, compare
from ttrain.reports.report import comparison_page, find_problems, report_of
from ttrain.store.run_views import read_run, read_runs

A, B, C = "full-20261121-100000-0001a", "full-20261121-110000-0002b", "full-20261121-120000-0003c"
BITS, LOSS, VALIDATION = "eval/bits_per_byte", "eval/chat_loss_sft", "pretrain/validation_loss"
SPEED = "pretrain/tokens_per_second"  # faster is not better


def shards(rows: int = 295, digest: str = "a", rejected: int = 0) -> Made:
    left_out = {"not JSON": rejected} if rejected else {}
    train = {"rows": rows, "tokens": 43 * rows, "live_tokens": 42 * rows, "bytes": 100 * rows}
    tally = {"train": {"rows": 300, "skipped": {}, "rejected": left_out}}
    result = {"train": train, "heldout": {"rows": 5}, "rows": tally}
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


def compared(home: Path, *names: str) -> RunComparison:
    return compare(read_runs(home, names))


def lines(rows: Sequence[Difference]) -> dict[str, Sequence[object]]:
    return {row.name: row.values for row in rows}


def test_settings_and_data_that_differ_are_lines_and_the_rest_are_none(tmp_path: Path) -> None:
    tokenizer = Made("tokenizer", files={"docs.jsonl": "a" * 64}, result={"vocab_size": 400})
    settings: dict[str, Any] = {"pretrain": {"optim": {"lr": 0.004}}}
    make_run(tmp_path, A, [tokenizer, shards()], settings=settings)
    settings = {"pretrain": {"optim": {"lr": 0.003}}, "runtime": {"threads": 3}}
    make_run(tmp_path, B, [tokenizer, shards(200, "b", 7)], settings=settings)
    comparison = compared(tmp_path, A, B)
    assert lines(comparison.settings) == {"pretrain.optim.lr": ("0.004", "0.003")}
    assert lines(comparison.settings_aside) == {"runtime.threads": ("null", "3")}
    data = lines(comparison.data)
    assert data["shards-pretrain: docs.jsonl (train)"] == ("a" * 12, "b" * 12)
    assert data["shards-pretrain: train rows"] == ("295", "200")
    assert data["shards-pretrain: rows train rejected not JSON"] == ("–", "7")
    assert not any(name.startswith("tokenizer") for name in data)


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        ([{BITS: 1.50000001}, {BITS: 1.5}], "equal by eval/bits_per_byte"),
        ([{BITS: 2.0}, {BITS: 1.5}, {BITS: 1.5}], "the models of B and C are better"),
        ([{BITS: 2.0}, {}], "the runs share no metric"),
        ([{BITS: 1.5, LOSS: 4.5}, {BITS: 1.5, LOSS: 4.0}], "the model of B is better"),
    ],
)
def test_the_verdict_names_who_is_better(
    tmp_path: Path, metrics: list[dict[str, float]], verdict: str
) -> None:
    names = [A, B, C][: len(metrics)]
    for name, of_run in zip(names, metrics, strict=True):
        sums = {metric.removeprefix("eval/"): [value] * 40 for metric, value in of_run.items()}
        make_run(tmp_path, name, [scored(sums)] if sums else [], metrics=of_run)
    assert compared(tmp_path, *names).verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("count", "most", "is_certain"),
    [(40, 8.2, True), (40, 24.0, False), (19, 8.0, False), (20, 8.0, True)],
)
def test_the_verdict_is_certain_where_the_interval_of_20_records_or_more_excludes_zero(
    tmp_path: Path, count: int, most: float, is_certain: bool
) -> None:
    is_judged = count >= 20
    for name, bits in ((A, [16.0] * count), (B, ([7.0, most] * 20)[:count])):
        made = [scored({"bits_per_byte": bits})]
        make_run(tmp_path, name, made, metrics={BITS: sum(bits) / count})
    comparison = compared(tmp_path, A, B)
    assert comparison.verdict.startswith("the model of B is better") == is_judged
    assert comparison.is_certain == is_certain
    (metric,) = comparison.metrics
    assert metric.best == (1 if is_judged else None)
    assert ("%" in metric.texts[1]) == is_judged
    page = comparison_page(read_runs(tmp_path, [A, B]))
    assert ('class="verdict good">' in page) == is_certain


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
    values = {BITS: 2.0, LOSS: 3.0, VALIDATION: 4.0, "pretrain/loss": 4.0, SPEED: 4.0}
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
    assert "pretrain.optim.lr" in table and "-10 %  * best" in table
    report = json.loads(output("compare", A, B, "--json"))
    assert report.pop("page") is None
    assert report == json.loads(json.dumps(asdict(compared(tmp_path, A, B))))
    page = {"run": B, "page": f"{B}.html", "notes": []}
    assert json.loads(output("report", "latest", "--json")) == page
    assert output("compare", A, B, "--html", "both.html").strip().endswith(" both.html")
    assert (tmp_path / "both.html").read_text().startswith("<!doctype html>")


HOSTILE = '</script><script>hit = 1</script><img src=x onerror="hit = 2">'
HOSTILE += "\u202e\x1b[31m{{7*7}}&amp;"
STEPS = 40


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    sharded = shards(rejected=3)
    counts = {**sharded.result["train"], "name": HOSTILE, "kept": 297}
    result: dict[str, Any] = {**sharded.result, "files": [counts]}
    trained = {"tokens": STEPS * TOKENS_PER_STEP, "parameters": 39584, "skipped_steps": 2}
    texts = {"run/samples/step-00000010.txt": f"=== {HOSTILE}\nfirst words\n"}
    for number, name in enumerate((A, B)):
        hostile = {"prompt": HOSTILE, "answer": f"{HOSTILE} {number}"}
        samples = {"base": [hostile, {"prompt": "Hello", "answer": "一二三 world"}]}
        losses = falling(STEPS, 3.0 - number / 2, gap=7)
        made = [
            Made("shards-pretrain", files={HOSTILE: "a" * 64}, result=result),
            Made("pretrain", losses, texts=texts, result=trained, noted={"resumed_from_step": 20}),
            Made("evaluate", result={"samples": samples, "metrics": {"bits_per_byte": 1.5}}),
        ]
        settings = {"data": {"pretrain": [HOSTILE]}}
        make_run(home, name, made, metrics={BITS: 1.5 - number / 8}, settings=settings)
    views = read_runs(home, [A, B])
    return {"both": comparison_page(views), "report": report_of(views[0])}


def test_pages_show_stages_data_samples_gaps_and_problems(pages: dict[str, str]) -> None:
    problems = ("resumed at step 20", "skipped 2 steps", "not JSON 3", "not finite at step 7")
    for text in (*problems, "12,685", "一二三 world", "first words", "39.58k"):
        assert text in pages["report"], text
    curve_a, curve_b, *_ = re.findall(r'<g class="line run\d"><path d="([^"]*)"', pages["both"])
    assert curve_a.count("M") == curve_b.count("M") == 2, "a gap where the loss was not finite"


@pytest.mark.parametrize("name", ["both", "report"])
def test_no_text_is_executed_and_the_policy_lets_the_page_s_style_through_alone(
    pages: dict[str, str], name: str
) -> None:
    page = pages[name]
    [policy] = re.findall('Content-Security-Policy" content="([^"]*)"', page)
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in policy
    assert escaped(HOSTILE) in html.unescape(page)
    assert not re.search("<(script|img)", page)


def test_kills_failures_and_warnings_are_problems(tmp_path: Path) -> None:
    killed = Made("pretrain", outcome="crashed")
    make_run(tmp_path, A, [killed], outcome="running", process=NONE_SUCH)
    assert "killed" in list(find_problems(read_run(tmp_path, A)))[-1][1]
    error = {"error": "the disk was full"}
    warned = {"guard_warnings": {"loss_spike": 3}}
    retried = Made("pretrain", outcome="completed", result=warned, noted=error)
    failed = Made("sft", outcome="failed", noted={"error": "no memory"})
    make_run(tmp_path, B, [retried, failed], number=1, outcome="failed", error="no memory")
    assert [*find_problems(read_run(tmp_path, B))] == [
        ("pretrain", "failed and was retried: the disk was full", True),
        ("pretrain", "the guard loss spike warned 3 times", False),
        ("sft", "failed: no memory", False),
    ]
