"""Runs side by side: every difference a line, the better figure named, and a word where figures cannot be compared."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.recorded_homes import Made, falling, make_run
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.core.hashing import digest_of
from ttrain.reports.compare import Difference, RunComparison, compare
from ttrain.reports.report import comparison_page
from ttrain.store.run_views import read_runs

A, B, C = "full-20261121-100000-0001a", "full-20261121-110000-0002b", "full-20261121-120000-0003c"
METRICS = {
    "eval/bits_per_byte": 2.5,
    "eval/documents": 50.0,
    "eval/document_bytes": 740.0,
    "tok/unk_rate": 0.0,
}


def shards(rows: int = 295, digest: str = "a", rejected: int = 0) -> Made:
    left_out = {"not JSON": rejected} if rejected else {}
    result = {
        "train": {"rows": rows, "tokens": 43 * rows, "live_tokens": 42 * rows, "bytes": 100 * rows},
        "heldout": {"rows": 5},
        "blocks": 1,
        "encoded_blocks": 1,
        "rows": {"train": {"rows": 300, "skipped": {}, "rejected": left_out}},
    }
    inputs = {"tokenizer": ("tokenizer", "t1" * 32, "t1")}
    return Made("shards-pretrain", result=result, files={"docs.jsonl": digest * 64}, inputs=inputs)


def evaluation(answers: dict[str, str]) -> Made:
    samples = {"base": [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]}
    return Made("evaluate", result={"samples": samples, "metrics": {}})


def scored(scores: dict[str, list[float]], first: str = "r0", size: int = 8) -> Made:
    """An evaluation with the sums of each held-out record, by metric; `size`: what a record counts."""
    count = len(next(iter(scores.values())))
    records = [first, *(f"r{number}" for number in range(1, count))]
    metrics = [
        {
            "name": name,
            "sums": sums,
            "sizes": [1 if "bits" in name else size] * len(sums),
            "records": records,
            "higher_is_better": "accuracy" in name,
        }
        for name, sums in scores.items()
    ]
    texts = {"scores.json": json.dumps(metrics)}
    return Made(
        "evaluate",
        result={"samples": {}, "metrics": {}},
        texts=texts,
        key=digest_of([scores, first, size]),
    )


def compared(home: Path, *names: str) -> RunComparison:
    return compare(read_runs(home, names))


def lines(rows: Sequence[Difference]) -> dict[str, Sequence[object]]:
    return {row.name: row.values for row in rows}


def test_each_setting_that_differs_is_one_line_and_the_rest_are_none(tmp_path: Path) -> None:
    make_run(tmp_path, A, [Made("pretrain")], settings={"pretrain": {"optim": {"lr": 0.004}}})
    make_run(
        tmp_path,
        B,
        [Made("pretrain")],
        settings={"pretrain": {"optim": {"lr": 0.003}}, "runtime": {"threads": 3}},
    )
    found = compared(tmp_path, A, B)
    assert lines(found.settings) == {"pretrain.optim.lr": ("0.004", "0.003")}
    assert lines(found.settings_aside) == {"runtime.threads": ("null", "3")}
    assert lines(compared(tmp_path, A, A).settings) == {}


def test_the_better_figure_is_named_by_its_direction_with_its_difference_in_percent(
    tmp_path: Path,
) -> None:
    names = (BITS, "pretrain/tokens_per_second", "eval/documents", "tok/bytes_per_token")
    for run, values in ((A, (2.0, 100.0, 50.0, 3.0)), (B, (1.5, 150.0, 60.0, 3.0))):
        stages = [scored({"bits_per_byte": [values[0]] * 40})]
        make_run(tmp_path, run, stages, metrics=dict(zip(names, values, strict=True)))
    found = {metric.name: metric for metric in compared(tmp_path, A, B).metrics}
    assert (found[BITS].best, found[BITS].texts) == (1, ["2", "1.5000  -25 %"])
    later = Difference("champion/bits_per_byte", (None, 2.0, 3.0), 1, -1)
    assert later.texts == ["–", "2", "3  +50 %"], "nothing to compare the first one with"
    assert found["pretrain/tokens_per_second"].best is None, "a faster run is not a better model"
    assert found["eval/documents"].best is None and found["eval/documents"].better == 0
    assert next(iter(found)) == BITS and "tok/bytes_per_token" not in found, (
        "what decides stands first"
    )


BITS, LOSS, VALIDATION = "eval/bits_per_byte", "eval/chat_loss_sft", "pretrain/validation_loss"


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        (
            [{BITS: 2.0}, {BITS: 1.5}],
            "the model of B is better on these records by eval/bits_per_byte: 1.5000 against 2 of A (-25 %); over 40 held-out",
        ),
        (
            [{BITS: 1.50000001}, {BITS: 1.5}, {BITS: 1.49999999}],
            "equal by eval/bits_per_byte: 1.5000",
        ),
        (
            [{BITS: 2.0}, {BITS: 1.5}, {BITS: 1.5}],
            "the models of B and C are better on these records by eval/bits_per_byte: 1.5000 against 2 of A (-25 %)",
        ),
        ([{BITS: 2.0}, {BITS: math.nan}], "the runs share no metric that decides which is better"),
        (
            [{BITS: 1.5, LOSS: 4.5}, {BITS: 1.5, LOSS: 4.0}],
            "the model of B is better on these records by eval/chat_loss_sft: 4 against 4.5000 of A (-11 %)",
        ),
    ],
)
def test_the_verdict_names_who_is_better_by_what(
    tmp_path: Path, metrics: list[dict[str, float]], verdict: str
) -> None:
    names = [A, B, C][: len(metrics)]
    for name, of_run in zip(names, metrics, strict=True):
        sums = {
            metric.removeprefix("eval/"): [value] * 40
            for metric, value in of_run.items()
            if math.isfinite(value)
        }
        stages = [scored(sums)] if sums else []
        make_run(tmp_path, name, stages, metrics=of_run)
    assert compared(tmp_path, *names).verdict.startswith(verdict)


def test_data_that_differs_is_told_by_digests_and_counts(tmp_path: Path) -> None:
    tokenizer = Made("tokenizer", files={"docs.jsonl": "a" * 64}, result={"vocab_size": 400})
    make_run(tmp_path, A, [tokenizer, shards()])
    make_run(tmp_path, B, [tokenizer, shards(rows=200, digest="b", rejected=7)])
    found = lines(compared(tmp_path, A, B).data)
    assert found["shards-pretrain: docs.jsonl (train)"] == ("a" * 12, "b" * 12)
    assert found["shards-pretrain: train rows"] == ("295", "200")
    assert found["shards-pretrain: rows train rejected not JSON"] == ("–", "7")
    assert not any(name.startswith("tokenizer") for name in found)


def test_runs_without_artifacts_say_that_these_are_gone(tmp_path: Path) -> None:
    for number, name in enumerate((A, B)):
        make_run(
            tmp_path,
            name,
            [scored({"bits_per_byte": [8.0 + number] * 40})],
            number=number,
            metrics={BITS: 8.0 + number},
        )
    shutil.rmtree(tmp_path / "store")
    comparison = compared(tmp_path, A, B)
    assert comparison.notes == [f"the artifacts of evaluate are no longer in {tmp_path}"]
    assert (
        comparison.verdict == "no model is better by eval/bits_per_byte: unknown held-out records"
    )


@pytest.mark.parametrize(
    ("bits", "told", "is_certain"),
    [
        (
            [8.0 + 0.1 * (number % 3) for number in range(40)],
            "over 40 held-out records, the 95% interval .* 7.8.* to 7.9.*$",
            True,
        ),
        ([24.0 if number % 2 else 7.0 for number in range(40)], "so this may be chance$", False),
    ],
)
def test_the_verdict_says_how_sure_it_is_and_is_green_only_where_the_interval_excludes_zero(
    tmp_path: Path, bits: list[float], told: str, is_certain: bool
) -> None:
    worse = [16.0] * len(bits)
    for name, found in ((A, worse), (B, bits)):
        make_run(
            tmp_path,
            name,
            [scored({"bits_per_byte": found})],
            metrics={BITS: sum(found) / len(found)},
        )
    found = compared(tmp_path, A, B)
    verdict = found.verdict
    assert verdict.startswith("the model of B is better") and re.search(told, verdict), verdict
    assert found.is_certain == is_certain
    assert (
        '<p class="verdict good">' in comparison_page(read_runs(tmp_path, [A, B]))
    ) == is_certain


@pytest.mark.parametrize(("count", "is_judged"), [(1, False), (19, False), (20, True)])
def test_of_too_few_held_out_records_no_model_is_better(
    tmp_path: Path, count: int, is_judged: bool
) -> None:
    for name, bits in ((A, 16.0), (B, 8.0)):
        make_run(tmp_path, name, [scored({"bits_per_byte": [bits] * count})], metrics={BITS: bits})
    found = compared(tmp_path, A, B)
    (metric,) = found.metrics
    if is_judged:
        assert (metric.best, metric.texts, metric.not_judged) == (1, ["16", "8  -50 %"], "")
        assert found.verdict.startswith("the model of B is better")
    else:
        few = f"not judged ({count} of 20 held-out records)"
        assert found.verdict == f"no model is better by eval/bits_per_byte: {few}"
        assert (metric.best, metric.title, metric.texts) == (None, f"{BITS}: {few}", ["16", "8"])


def test_no_run_is_the_best_by_what_other_records_tokenizers_or_shards_make_incomparable(
    tmp_path: Path,
) -> None:
    values = {BITS: 2.0, LOSS: 3.0, VALIDATION: 4.0, "pretrain/loss": 4.0}
    sums = {"bits_per_byte": [2.0] * 40, "chat_loss_sft": [3.0] * 40}
    same, other = (
        Made("pretrain", inputs={"shards": ("shards-pretrain", key * 64, key)}) for key in "de"
    )
    made = {
        "tokenizer": [scored(sums, size=9), other],
        "records": [scored(sums, first="another"), same],
        "nothing": [scored(sums), same],
    }
    make_run(tmp_path, A, [scored(sums), same], metrics=values)
    best, remarks = {}, {}
    for name, stages in made.items():
        make_run(
            tmp_path, B, stages, metrics={metric: value / 2 for metric, value in values.items()}
        )
        found = compared(tmp_path, A, B)
        best[name], remarks[name] = (
            {metric.name for metric in found.metrics if metric.best is not None},
            found.remarks,
        )
    assert best == {
        "tokenizer": {BITS},
        "records": {VALIDATION},
        "nothing": {BITS, LOSS, VALIDATION},
    }
    assert "the tokenizers differ" in remarks["tokenizer"][0]
    assert "the held-out data differ" in remarks["records"][0]
    assert remarks["nothing"] == []


def test_samples_stand_side_by_side_by_their_prompts_and_a_run_that_did_not_end_well_is_told(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, A, [evaluation({"Hello": "world", "Only A": "yes"})])
    make_run(tmp_path, B, [evaluation({"Hello": "moon"})], outcome="failed")
    found = compared(tmp_path, A, B)
    answers = {sample["prompt"]: sample["answers"] for sample in found.samples}
    assert answers == {"Hello": ["world", "moon"], "Only A": ["yes", "–"]}
    assert found.remarks == ["not all runs are complete: B failed"]


@pytest.fixture
def compared_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate((A, B, C)):
        trained, samples = (
            Made("pretrain", falling(8, 3.0 - number)),
            scored({"bits_per_byte": [2.5 - number / 4] * 40}),
        )
        answers = {"base": [{"prompt": "Hello", "answer": f"world {number}"}]}
        samples = replace(samples, result={"samples": answers, "metrics": {}})
        metrics, settings = (
            {**METRICS, BITS: 2.5 - number / 4},
            {"pretrain": {"optim": {"lr": 0.001 + number / 10}}},
        )
        made = [shards(rows=295 - number), trained, samples]
        make_run(tmp_path, name, made, number=number, metrics=metrics, settings=settings)
    return tmp_path


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_settings_data_figures_and_samples_and_the_json_is_the_comparison(
    compared_home: Path,
) -> None:
    told = said("compare", A, B)
    for words in (
        "pretrain.optim.lr",
        "shards-pretrain: train rows",
        "2.2500  -10 %  * best",
        "world 1",
    ):
        assert words in told, words
    found = json.loads(said("compare", A, B, "--json"))
    assert found.pop("page") is None
    assert found == json.loads(json.dumps(asdict(compared(compared_home, A, B))))
    assert found["settings"][0]["values"] == ["0.001", "0.101"]


def test_the_commands_write_where_they_are_told_and_say_where(compared_home: Path) -> None:
    assert json.loads(said("report", "latest", "--json")) == {
        "run": C,
        "page": f"{C}.html",
        "notes": [],
    }
    assert said("compare", A, B, "--html", "both.html").strip().endswith("written to both.html")
    assert (compared_home / "both.html").read_text(encoding="utf-8").startswith("<!doctype html>")
