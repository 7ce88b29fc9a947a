"""Pages of runs: their drawings are read back, in a browser too, and no text of a run is obeyed."""

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from support.browser import Browser, executable
from support.recorded_homes import BEGAN, NONE_SUCH, TOKENS_PER_STEP, Made, falling, make_run

from ttrain.reports import charts
from ttrain.reports.report import comparison_page, find_problems, report_of
from ttrain.store.run_views import Point, RunView, read_run, read_runs

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"
HOSTILE = '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2">\u202e\x1b[31m{{7*7}}&amp;'
STEPS, GAP = 40, 7

needs_browser = pytest.mark.skipif(executable() is None, reason="no Chromium is installed")


def make_two(home: Path) -> list[RunView]:
    settings: dict[str, Any] = {"data": {"pretrain": [HOSTILE]}}
    for number, name in enumerate((A, B)):
        samples = {
            "base": [
                {"prompt": HOSTILE, "answer": f"{HOSTILE} {number}"},
                {"prompt": "Hello", "answer": "一二三 world"},
            ]
        }
        counts = {"rows": 295, "tokens": 12829, "live_tokens": 12534, "bytes": 42519}
        file = {"name": HOSTILE, "rows": 300, "kept": 297, "tokens": 12829, "bytes": 42519}
        tally = {"train": {"rows": 300, "skipped": {}, "rejected": {"not JSON": 3}}}
        sharded = {
            "train": counts,
            "heldout": {"rows": 5},
            "rows": tally,
            "blocks": 1,
            "encoded_blocks": 1,
            "files": [file],
        }
        texts = {
            "run/samples/step-00000010.txt": f"=== {HOSTILE}\nfirst words\n",
            "run/samples/step-00000020.txt": "later",
        }
        trained = {
            "tokens": STEPS * TOKENS_PER_STEP,
            "parameters": 39584,
            "skipped_steps": 2,
            "stop_reason": "completed",
        }
        losses = falling(STEPS, 3.0 - number / 2, gap=GAP)
        made = [
            Made("shards-pretrain", files={HOSTILE: "a" * 64}, result=sharded),
            Made("pretrain", losses, texts=texts, result=trained, noted={"resumed_from_step": 20}),
            Made("evaluate", result={"samples": samples, "metrics": {"bits_per_byte": 1.5}}),
        ]
        metrics = {"eval/bits_per_byte": 1.5 - number / 8, "pretrain/validation_loss": 3.25}
        make_run(home, name, made, number=number, metrics=metrics, settings=settings)
    return read_runs(home, [A, B])


@pytest.fixture(scope="module")
def pages_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        home = tmp_path_factory.mktemp("home")
        first, second = make_two(home)
        (home / "both.html").write_text(comparison_page([first, second]), encoding="utf-8")
        (home / "report.html").write_text(report_of(first), encoding="utf-8")
        yield home


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(width=1200) as opened:
        yield opened


def opened(browser: Browser, path: Path) -> None:
    browser.errors.clear()
    browser.open(path.as_uri())


def test_lines_are_where_the_numbers_are_with_a_gap_where_there_is_none(pages_home: Path) -> None:
    """The points of the paths, a stretch before the gap and one after it, are the tokens and losses but for scale."""
    views = read_runs(pages_home, [A, B])
    page = comparison_page(views)
    training, validation, *_ = page.split("<figure>")[1:]
    assert "<figcaption>validation_loss " in validation and "nats per target" in validation
    last = [view.curve("pretrain", "validation_loss")[-1].value for view in views]
    for name, value in zip("AB", last, strict=True):
        assert f"</i>{name} <b>{value:.5g}</b>" in validation
    paths = re.findall(r'<g class="line run\d"><path d="([^"]*)"', training)
    known = [
        (point.tokens, point.value)
        for view in views
        for point in view.curve("pretrain", "loss")
        if point.step != GAP
    ]
    pixels = [
        tuple(map(float, pair)) for path in paths for pair in re.findall(r"([\d.]+),([\d.]+)", path)
    ]
    assert [path.count("M") for path in paths] == [2, 2] and len(pixels) == len(known)
    for numbers, positions in zip(zip(*known, strict=True), zip(*pixels, strict=True), strict=True):
        slope, start = numpy.polyfit(numbers, positions, 1)
        assert slope * start != 0 and numpy.allclose(
            slope * numpy.array(numbers) + start, positions, atol=0.01
        )
    assert pixels[0][0] == charts.LEFT and pixels[0][1] < pixels[-1][1], (
        "from the left, and higher losses are higher"
    )


@needs_browser
@pytest.mark.parametrize("name", ["both.html", "report.html"])
def test_no_text_of_a_run_is_obeyed_and_nothing_is_loaded(
    browser: Browser, pages_home: Path, name: str
) -> None:
    opened(browser, pages_home / name)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    text = browser.evaluate("document.body.innerText")
    assert (
        '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2">\\u202e\\x1b[31m{{7*7}}&amp;'
        in text
    )
    assert browser.evaluate(
        "window.hit === undefined && document.querySelectorAll('img').length === 0"
    )
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
    assert browser.errors == []
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 3'}))"
    )
    assert browser.evaluate(
        "window.hit === undefined"
    )  # also where somebody found a hole, the policy of the page stands
    assert (
        browser.evaluate("fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')")
        == "refused"
    )
    compiled = "setTimeout(() => { try { Function('1'); done('compiled'); } catch { done('refused'); } })"  # as a page does
    assert browser.evaluate(f"new Promise(done => {compiled})") == "refused"


@needs_browser
@pytest.mark.parametrize("name", ["both.html", "report.html"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_fits_a_phone_and_a_desk(
    browser: Browser, pages_home: Path, name: str, width: int
) -> None:
    browser.resize(width, 800)
    opened(browser, pages_home / name)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    plot = browser.evaluate("document.querySelector('figure svg').getBoundingClientRect().right")
    assert 100 < plot <= width
    browser.resize(1200, 800)
    assert browser.errors == []


def test_the_report_shows_stages_data_samples_and_what_went_wrong(pages_home: Path) -> None:
    page = (pages_home / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    assert headings[:4] == ["Stages", "What went wrong", "Curves", "Evaluation"]
    assert {"Data", "Samples", "Lineage", "Settings", "Machine and libraries"} <= set(headings)
    for words in (
        "resumed at step 20",
        "skipped 2 steps whose gradient",
        "bad rows of the train data left out: not JSON 3",
        "the loss was not finite at step 7",
        "12,829",
        "一二三 world",
        "step 10",
        "first words",
        "39.58k",
    ):
        assert words in page, words


def test_a_page_is_whole_and_small(pages_home: Path) -> None:
    for name in ("both.html", "report.html"):
        page = (pages_home / name).read_text(encoding="utf-8")
        assert len(page) < 150_000
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
        (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', page)
        assert (
            policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
        )
        assert "<script" not in page
        (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
        assert style.count("{") == style.count("}"), "a rule that is cut ends the style sheet"


def points(values: list[float]) -> list[Point]:
    return [
        Point(step, 512.0 * step, BEGAN + step, value) for step, value in enumerate(values, start=1)
    ]


def test_a_long_curve_keeps_its_ends_its_extremes_and_its_gaps() -> None:
    values = [math.sin(step / 700) for step in range(10_000)]
    values[4321], values[7777], values[1234] = 50.0, -50.0, math.nan
    kept = charts.thinned(points(values))
    assert len(kept) <= 1.1 * charts.POINTS
    assert [point.step for point in kept] == sorted({point.step for point in kept})
    assert {1, 4322, 7778, 1235, 10_000} <= {point.step for point in kept}
    assert charts.thinned(points(values[:100])) == points(values[:100])


def test_kills_failures_and_warnings_are_told(tmp_path: Path) -> None:
    make_run(
        tmp_path, A, [Made("pretrain", outcome="crashed")], outcome="running", process=NONE_SUCH
    )
    warned, noted = {"guard_warnings": {"loss_spike": 3}}, {"error": "the disk was full"}
    failed = Made("pretrain", outcome="completed", result=warned, noted=noted)
    sft = Made("sft", outcome="failed", noted={"error": "no memory"})
    make_run(tmp_path, B, [failed, sft], number=1, outcome="failed", error="no memory")
    assert [*find_problems(read_run(tmp_path, B))] == [
        ("pretrain", "failed and was retried: the disk was full", True),
        ("pretrain", "the guard loss spike warned 3 times", False),
        ("sft", "failed: no memory", False),
    ]
    assert ("", "the run's process was killed, or the machine went down", False) in find_problems(
        read_run(tmp_path, A)
    )
    stop = {
        "stopped": "stopped by a signal",
        "error": "stopped by a signal; the same command continues",
    }
    make_run(tmp_path, A, [Made("pretrain")], outcome="interrupted", **stop)
    assert [*find_problems(read_run(tmp_path, A))] == [("", stop["error"], False)], "once"


def test_a_night_s_page_shows_its_decision_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path, A, [Made("pretrain")])
    undecided = report_of(read_run(tmp_path, A))
    decision = {
        "promote": False,
        "metric": "bits_per_byte",
        "challenger": 1.9,
        "champion": 1.8,
        "difference": -0.1,
    }
    decision |= {"interval": None, "samples": 3, "reason": "worse by <b>0.1</b>"}
    make_run(tmp_path, A, [Made("pretrain")], night="night-000002", decision=decision)
    said = '<p class="remark">night-000002: kept: worse by &lt;b&gt;0.1&lt;/b&gt;</p>'
    assert said in report_of(read_run(tmp_path, A)) and "night-" not in undecided


def test_quick_validations_are_a_curve_and_the_one_on_all_rows_a_point_of_its_own() -> None:
    curves = {
        "validation_loss_quick": points([4.0, 3.0, 2.75]),
        "validation_loss": points([1.0, 1.0, 2.75])[2:],
    }
    view: Any = SimpleNamespace(
        curves=lambda stage: [*curves], curve=lambda stage, name: curves[name]
    )
    (main,), _ = charts.charts_of([view], "sft")
    assert [(line["label"], line["last"], len(line["points"])) for line in main["lines"]] == [
        ("validation_loss_quick", "3", 2),
        ("validation_loss", "2.75", 1),
    ]
