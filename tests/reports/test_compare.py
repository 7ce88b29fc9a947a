"""Runs side by side: every difference a line, the better figure named, and a word where figures cannot be compared."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from support.recorded_homes import Made, falling, make_run
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.core.files import write_json
from ttrain.errors import UsageError
from ttrain.reports import facts
from ttrain.reports.compare import ComparedMetric, RunComparison, compare, labels, sections
from ttrain.reports.report import comparison_page
from ttrain.reports.sections import Answers
from ttrain.store.run_views import read_runs

A, B, C = "full-20261121-100000-0001a", "full-20261121-110000-0002b", "full-20261121-120000-0003c"
METRICS = {"eval/bits_per_byte": 2.5, "eval/documents": 50.0, "eval/document_bytes": 740.0, "tok/unk_rate": 0.0}


def tokenizer(content: str = "t1") -> Made:
    result = {"vocab_size": 400, "bytes_per_token": 3.5}
    return Made("tokenizer", files={"docs.jsonl": "a" * 64}, result=result, key=content * 32)


def shards(rows: int = 295, digest: str = "a", rejected: int = 0) -> Made:
    left_out = {"not JSON": rejected} if rejected else {}
    result = {
        "train": {"rows": rows, "tokens": 43 * rows, "live_tokens": 42 * rows, "bytes": 100 * rows},
        "heldout": {"rows": 5}, "blocks": 1, "encoded_blocks": 1,
        "rows": {"train": {"rows": 300, "skipped": {}, "rejected": left_out}},
    }  # fmt: skip
    inputs = {"tokenizer": ("tokenizer", "t1" * 32, "t1")}
    return Made("shards-pretrain", result=result, files={"docs.jsonl": digest * 64}, inputs=inputs)


def evaluation(answers: dict[str, str], heldout: str = "h1", tokenizer_content: str = "t1") -> Made:
    samples = {"base": [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]}
    inputs = {"documents": ("shards-pretrain", "d" * 64, heldout), "tokenizer": ("tokenizer", "t1" * 32, tokenizer_content)}
    return Made("evaluate", result={"samples": samples, "metrics": {}}, inputs=inputs)


def scored(bits: list[float], first: str = "r0", metric: str = "bits_per_byte", *, higher: bool = False) -> Made:
    """An evaluation with the bits of each held-out document, each of eight bytes."""
    records = [first, *(f"r{number}" for number in range(1, len(bits)))]
    entry = {"part": "documents", "sums": bits, "sizes": [8] * len(bits), "shown": None, "higher_is_better": higher}
    scores = {"parts": {"documents": {"records": records}}, "metrics": {metric: entry}}
    made = evaluation({}, heldout=f"{bits} {first}")
    return Made("evaluate", result=made.result, inputs=made.inputs, texts={"scores.json": json.dumps(scores)})


def compared(home: Path, *names: str) -> RunComparison:
    return compare(read_runs(home, names))


def lines(found: tuple[object, ...]) -> dict[str, tuple[object, ...]]:
    return {one.name: one.values for one in found}  # type: ignore[attr-defined]


def test_each_setting_that_differs_is_one_line_and_the_rest_are_none(tmp_path: Path) -> None:
    make_run(tmp_path, A, [Made("pretrain")], settings={"pretrain": {"optim": {"lr": 0.004}}})
    make_run(tmp_path, B, [Made("pretrain")], settings={"pretrain": {"optim": {"lr": 0.003}}, "runtime": {"threads": 3}})
    found = compared(tmp_path, A, B)
    assert lines(found.settings) == {"pretrain.optim.lr": ("0.004", "0.003")}
    assert lines(found.settings_aside) == {"runtime.threads": ("null", "3")}
    assert lines(compared(tmp_path, A, A).settings) == {}


def test_a_setting_that_is_retired_counts_only_where_two_records_differ_in_it(tmp_path: Path) -> None:
    for run, momentum in ((A, 0.9), (B, None), (C, 0.95)):
        make_run(tmp_path, run, [])
        if momentum:  # as an earlier version recorded it
            record = json.loads((path := tmp_path / "runs" / f"{run}.json").read_text())
            record["settings"]["pretrain"]["optim"]["muon_momentum"] = momentum
            record["settings"]["runtime"]["fork_server"] = True
            write_json(path, record)
    for names in ((A, B), (B, C)):
        found = compared(tmp_path, *names)
        assert lines(found.settings) == lines(found.settings_aside) == {}
    assert lines(compared(tmp_path, A, C).settings) == {"pretrain.optim.muon_momentum": ("0.9", "0.95")}
    assert facts.changed_settings({"runtime.fork_server": True, "runtime.threads": 3}) == {"runtime.threads": (3, None)}


def test_the_better_figure_is_named_by_its_direction_with_its_difference_in_percent(tmp_path: Path) -> None:
    names = ("eval/bits_per_byte", "pretrain/tokens_per_second", "eval/documents", "tok/bytes_per_token")
    for run, values in ((A, (2.0, 100.0, 50.0, 3.0)), (B, (1.5, 150.0, 60.0, 3.0))):
        make_run(tmp_path, run, [], metrics=dict(zip(names, values, strict=True)))
    found = {one.name: one for one in compared(tmp_path, A, B).metrics}
    assert (found["eval/bits_per_byte"].best, found["eval/bits_per_byte"].percent) == (1, (0.0, -25.0))
    later = ComparedMetric("champion/bits_per_byte", (None, 2.0, 3.0), -1, 1, (None, 0.0, 50.0))
    assert [later.cell(run).small for run in range(3)] == ["", "", "+50 %"], "nothing to compare the first one with"
    speed = found["pretrain/tokens_per_second"]
    assert (speed.best, speed.percent) == (None, (0.0, 50.0)), "a faster run is not a better model"
    assert found["eval/documents"].best is None and found["eval/documents"].better == 0
    assert compared(tmp_path, A, B).same_metrics == ("tok/bytes_per_token",)
    assert next(iter(found)) == "eval/bits_per_byte"  # what decides stands first


BITS, LOSS, VALIDATION = "eval/bits_per_byte", "eval/chat_loss_sft", "pretrain/validation_loss"


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        ([{BITS: 2.0}, {BITS: 1.5}],
         "the model of B is better on these records by eval/bits_per_byte: 1.5000 against 2 of A (-25 %)"),
        ([{BITS: 1.50000001}, {BITS: 1.5}, {BITS: 1.49999999}], "equal by eval/bits_per_byte: 1.5000"),
        ([{BITS: 2.0}, {BITS: 1.5}, {BITS: 1.5}],
         "the models of B and C are better on these records by eval/bits_per_byte: 1.5000 against 2 of A (-25 %)"),
        ([{BITS: 2.0}, {BITS: math.nan}], "the runs share no metric that decides which is better"),
        ([{BITS: 1.5, LOSS: 4.5}, {BITS: 1.5, LOSS: 4.0}],
         "equal by eval/bits_per_byte: 1.5000; "
         "the model of B is better on these records by eval/chat_loss_sft: 4 against 4.5000 of A (-11 %)"),
        ([{VALIDATION: 3.5}, {VALIDATION: 3.5 / 2}],
         "the model of B is better on these records by pretrain/validation_loss: 1.7500 against 3.5000 of A (-50 %)"),
    ],
)  # fmt: skip
def test_the_verdict_names_who_is_better_by_what(tmp_path: Path, metrics: list[dict[str, float]], verdict: str) -> None:
    names = [A, B, C][: len(metrics)]
    for name, of_run in zip(names, metrics, strict=True):
        make_run(tmp_path, name, [], metrics=of_run)
    assert compared(tmp_path, *names).verdict == verdict


def test_one_run_a_side_is_no_advice_about_the_setting_that_differs(tmp_path: Path) -> None:
    for name, rate, bits in ((A, 0.01, 2.0), (B, 0.02, 1.5)):
        make_run(tmp_path, name, [], settings={"pretrain": {"optim": {"lr": rate}}}, metrics={BITS: bits})
    (remark,) = compared(tmp_path, A, B).remarks
    assert "which model is better, not which setting: another seed may" in remark


@pytest.mark.parametrize(
    ("value", "text"),
    [("True", "true"), (None, "null"), ("['a', 'é']", '["a", "é"]'), ("[a", "[a"), ("muon", "muon"), (0.5, "0.5")],
)
def test_settings_stand_as_a_settings_file_has_them(value: object, text: str) -> None:
    assert facts.as_yaml(value) == text


def test_data_that_differs_is_told_by_digests_and_counts(tmp_path: Path) -> None:
    make_run(tmp_path, A, [tokenizer(), shards()])
    make_run(tmp_path, B, [tokenizer(), shards(rows=200, digest="b", rejected=7)])
    found = lines(compared(tmp_path, A, B).data)
    assert found["shards-pretrain: docs.jsonl"] == ("a" * 12, "b" * 12)
    assert found["shards-pretrain: rows"] == ("295", "200")
    assert found["shards-pretrain: train rows left out, not JSON"] == ("–", "7")
    assert not any(name.startswith("tokenizer") for name in found)


def test_runs_without_artifacts_are_not_said_to_have_the_same_data(tmp_path: Path) -> None:
    for number, (name, made) in enumerate(((A, shards()), (B, shards()))):
        make_run(tmp_path, name, [made], number=number)
    shutil.rmtree(tmp_path / "store")
    comparison = compared(tmp_path, A, B)
    assert (
        lines(comparison.data)
        == lines(comparison.code)
        == {"artifacts that are gone": ("shards-pretrain", "shards-pretrain")}
    )


def test_other_tokenizers_and_other_held_out_data_are_warned_of(tmp_path: Path) -> None:
    make_run(tmp_path, A, [evaluation({})], metrics=METRICS)
    make_run(tmp_path, B, [evaluation({}, tokenizer_content="t2", heldout="h2")], metrics=METRICS)
    assert compared(tmp_path, A, B).remarks == (
        "the tokenizers differ: losses are of different tokens and cannot be compared, bits per byte can",
    )  # the same texts, by their number and bytes
    losses = {VALIDATION: 3.5}
    make_run(tmp_path, C, [evaluation({}, tokenizer_content="t2")], metrics=losses)
    make_run(tmp_path, B, [evaluation({})], metrics={VALIDATION: 4.0})
    assert compared(tmp_path, B, C).verdict == "the runs share no metric that decides which is better with two tokenizers"
    make_run(tmp_path, B, [evaluation({}, heldout="h2")], metrics=METRICS)
    assert "the held-out data differ" in compared(tmp_path, A, B).remarks[0]
    other = evaluation({}, tokenizer_content="t2", heldout="h2")
    make_run(tmp_path, C, [other], metrics={**METRICS, "eval/document_bytes": 741.0})
    assert "the held-out data differ" in compared(tmp_path, A, C).remarks[1]
    make_run(tmp_path, B, [evaluation({})], metrics=METRICS)
    assert compared(tmp_path, A, B).remarks == ()


@pytest.mark.parametrize(
    ("bits", "told", "is_certain"),
    [
        (
            [8.0 + 0.1 * (number % 3) for number in range(40)],
            "over 40 held-out records, the 95% interval .* 0.98.* to 0.99.*$",
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
        make_run(tmp_path, name, [scored(found)], metrics={"eval/bits_per_byte": sum(found) / (8 * len(found))})
    found = compared(tmp_path, A, B)
    verdict = found.verdict
    assert verdict.startswith("the model of B is better") and re.search(told, verdict), verdict
    assert found.is_certain == is_certain
    assert ('<p class="verdict good">' in comparison_page(read_runs(tmp_path, [A, B]))) == is_certain


@pytest.mark.parametrize(("count", "is_judged"), [(1, False), (19, False), (20, True)])
def test_of_too_few_held_out_records_no_model_is_better(tmp_path: Path, count: int, is_judged: bool) -> None:
    for name, bits in ((A, 16.0), (B, 8.0)):
        make_run(tmp_path, name, [scored([bits] * count)], metrics={BITS: bits / 8})
    found = compared(tmp_path, A, B)
    (metric,) = found.metrics
    if is_judged:
        assert (metric.best, metric.percent, metric.not_judged) == (1, (0.0, -50.0), "")
        assert found.verdict.startswith("the model of B is better")
    else:
        few = f"not judged ({count} of 20 held-out records)"
        assert (metric.best, metric.percent, metric.not_judged) == (None, (None, None), few)
        assert found.verdict == f"no model is better by eval/bits_per_byte: {few}"
        assert [str(metric.cell(run)) for run in (0, 1)] == ["2", "1"]


@pytest.mark.parametrize(
    ("metrics", "few"),
    [
        ({LOSS: 2.0, "eval/chats": 3.0}, "3 of 20 held-out records"),
        ({"eval/domain_loss_lora": 2.0, "eval/domain": 8.0}, "8 of 20 held-out records"),
        ({"eval/poems/accuracy/sft": 2.0, "eval/poems/items": 4.0}, "4 of 20 held-out records"),
        ({VALIDATION: 2.0}, "5 of 20 held-out records"),
    ],
)
def test_each_metric_counts_its_own_records(tmp_path: Path, metrics: dict[str, float], few: str) -> None:
    name = next(iter(metrics))
    for run, value in ((A, 2.0), (B, 1.0)):
        make_run(tmp_path, run, [shards()], metrics={**metrics, name: value})
    found = {metric.name: metric for metric in compared(tmp_path, A, B).metrics}
    assert (found[name].best, found[name].not_judged) == (None, f"not judged ({few})")


def test_no_run_is_the_best_by_what_other_data_or_other_tokenizers_make_incomparable(tmp_path: Path) -> None:
    values = {BITS: 2.0, LOSS: 3.0, "eval/prose/perplexity/base": 30.0, VALIDATION: 4.0, "pretrain/loss": 4.0}
    better = {name: value / 2 for name, value in values.items()}
    made = {
        "tokenizer": [evaluation({}, tokenizer_content="t2")],
        "text": [evaluation({}, heldout="h2")],
        "shards": [evaluation({}), Made("pretrain", inputs={"shards": ("shards-pretrain", "e" * 64, "other")})],
    }
    make_run(
        tmp_path, A, [evaluation({}), Made("pretrain", inputs={"shards": ("shards-pretrain", "d" * 64, "h1")})],
        metrics=values,
    )  # fmt: skip
    best = {}
    for name, stages in made.items():
        make_run(tmp_path, B, stages, metrics=better)
        best[name] = {metric.name for metric in compared(tmp_path, A, B).metrics if metric.best is not None}
    of_chats = {BITS, LOSS, "eval/prose/perplexity/base"}
    assert best == {"tokenizer": {BITS}, "text": set(), "shards": of_chats}


def test_how_sure_it_is_that_an_accuracy_is_better_is_said_in_its_direction(tmp_path: Path) -> None:
    for name, right in ((A, 8), (B, 32)):
        scores = scored([8.0 * (number < right) for number in range(40)], metric="preference_accuracy/dpo", higher=True)
        make_run(tmp_path, name, [scores], metrics={"eval/preference_accuracy/dpo": right / 40})
    verdict = compared(tmp_path, A, B).verdict
    assert verdict.startswith("the model of B is better") and "interval of the difference is 0." in verdict, verdict
    assert "chance" not in verdict


def test_one_other_held_out_record_makes_evaluations_incomparable(tmp_path: Path) -> None:
    for name, found in ((A, scored([16.0] * 40)), (B, scored([8.0] * 40, first="another"))):
        make_run(tmp_path, name, [found], metrics={"eval/bits_per_byte": 1.0 if name == B else 2.0})
    found = compared(tmp_path, A, B)
    assert "the held-out data differ" in found.remarks[0]
    assert found.verdict.startswith("no metric decides which is better, since the held-out data differ")


def test_samples_stand_side_by_side_by_their_prompts_and_a_run_that_did_not_end_well_is_told(tmp_path: Path) -> None:
    make_run(tmp_path, A, [evaluation({"Hello": "world", "Only A": "yes"})])
    make_run(tmp_path, B, [evaluation({"Hello": "moon"})], outcome="failed")
    found = compared(tmp_path, A, B)
    answers = {one.prompt: one.answers for one in found.samples}
    assert answers == {"Hello": ("world", "moon"), "Only A": ("yes", "–")}
    assert found.remarks == ("not all runs are complete: B failed",)


def test_what_follows_a_prompt_in_the_data_stands_beside_the_answers(tmp_path: Path) -> None:
    for name, answer in ((A, "moon"), (B, "world")):
        sample = {"prompt": "Hello", "answer": answer, "reference": "there"}
        make_run(tmp_path, name, [Made("evaluate", result={"samples": {"base": [sample]}, "metrics": {}})])
    found = compared(tmp_path, A, B)
    assert [(sample.answers, sample.reference) for sample in found.samples] == [(("moon", "world"), "there")]
    (of_samples,) = [section for section in sections(found, ["A", "B"]) if section.title == "Samples"]
    assert of_samples.blocks[-1] == Answers([("A", "moon"), ("B", "world"), ("in the data", "there")])


def test_code_that_differs_names_its_modules(tmp_path: Path) -> None:
    make_run(tmp_path, A, [Made("pretrain", code={"ttrain.a": "1", "ttrain.b": "1"}, key="1" * 64)])
    make_run(tmp_path, B, [Made("pretrain", code={"ttrain.a": "1", "ttrain.b": "2"}, key="2" * 64)])
    assert [one.name for one in compared(tmp_path, A, B).code] == ["code of pretrain (ttrain.b)"]
    make_run(tmp_path, C, [Made("pretrain", outcome="failed")])  # what was not made is no other code
    assert compared(tmp_path, A, C).code == ()


def test_runs_have_letters_as_far_as_these_go() -> None:
    assert labels(3) == ["A", "B", "C"]
    assert labels(28)[25:] == ["Z", "R27", "R28"]


@pytest.fixture
def compared_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate((A, B, C)):
        trained, samples = Made("pretrain", falling(8, 3.0 - number)), evaluation({"Hello": f"world {number}"})
        metrics, settings = {**METRICS, BITS: 2.5 - number / 4}, {"pretrain": {"optim": {"lr": 0.001 + number / 10}}}
        made = [shards(rows=295 - number), trained, samples]
        make_run(tmp_path, name, made, number=number, metrics=metrics, settings=settings)
    return tmp_path


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_settings_data_figures_and_samples_and_the_json_is_the_comparison(compared_home: Path) -> None:
    told, shown = (
        said("compare", A, B),
        ("the model of B is better on these records by eval/bits_per_byte", "pretrain.optim.lr", "shards-pretrain: rows"),
    )
    assert [words for words in (*shown, "2.2500  -10 %  *", "world 1") if words not in told] == []
    found = json.loads(said("compare", A, B, "--json"))
    assert found.pop("page") is None
    assert found == json.loads(json.dumps(compared(compared_home, A, B).to_json()))
    assert found["settings"] == [{"name": "pretrain.optim.lr", "values": ["0.001", "0.101"]}]


def test_many_runs_are_lines_with_the_best_first(compared_home: Path) -> None:
    names = [A, B, C]
    for number in (3, 4):
        names.append(f"full-20261121-13000{number}-0001a")
        make_run(compared_home, names[-1], [], number=number, metrics={"eval/bits_per_byte": 3.0 - number})
    told = said("compare", *names).splitlines()
    order = [line.split()[0] for line in told[told.index("") + 1 :] if line[:2] in ("A ", "B ", "C ", "D ", "E ")]
    assert order[-5:] == ["E", "D", "C", "B", "A"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare", A], "needs two or more"),
        (["compare", A, A], "name the same run twice"),
        (["compare", A, B, "--html", "none/such.html"], "does not exist"),
        (["report", A, "--out", "."], "is a directory"),
    ],
)
def test_mistakes_are_refused_with_what_there_is(compared_home: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_commands_write_where_they_are_told_and_say_where(compared_home: Path) -> None:
    assert json.loads(said("report", "latest", "--json")) == {"run": C, "page": f"{C}.html", "notes": []}
    assert said("compare", A, B, "--html", "both.html").strip().endswith("written to both.html")
    assert (compared_home / "both.html").read_text(encoding="utf-8").startswith("<!doctype html>")
