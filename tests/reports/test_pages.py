"""Pages of runs: curves are where the numbers are, and no text of a run is executed."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from support.browser import Browser, executable
from support.recorded_homes import NONE_SUCH, TOKENS_PER_STEP, Made, falling, make_run

from ttrain.core.terminal import escaped
from ttrain.reports import charts
from ttrain.reports.report import comparison_page, find_problems, report_of
from ttrain.store.run_views import RunView, read_run, read_runs

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"
HOSTILE = (
    '</script><script>window.hit = 1</script><img src=x onerror="window.hit = 2">'
    "\u202e\x1b[31m{{7*7}}&amp;"
)
STEPS, GAP = 40, 7
OPEN_ALL = "document.querySelectorAll('details').forEach(part => { part.open = true; })"
NO_HIT = "window.hit === undefined && document.querySelectorAll('img').length === 0"
ADD_SCRIPT = """
    const script = document.createElement('script')
    document.body.append(Object.assign(script, {textContent: 'window.hit = 3'}))
"""
FETCH = "fetch('data:text/plain,x').then(() => 'fetched', () => 'refused')"
# In a timer, as a page compiles: what the test's own connection evaluates has no policy.
COMPILE = """new Promise(done => setTimeout(() => {
    try { Function('1'); done('compiled'); } catch { done('refused'); }
}))"""

needs_browser = pytest.mark.skipif(executable() is None, reason="no Chromium is installed")


def make_two(home: Path) -> list[RunView]:
    counts = {"rows": 295, "tokens": 12829, "live_tokens": 12534, "bytes": 42519}
    tally = {"train": {"rows": 300, "skipped": {}, "rejected": {"not JSON": 3}}}
    sharded: dict[str, Any] = {"train": counts, "heldout": {"rows": 5}, "rows": tally}
    sharded |= {"blocks": 1, "encoded_blocks": 1}
    sharded |= {"files": [{**counts, "name": HOSTILE, "kept": 297}]}
    trained: dict[str, Any] = {"tokens": STEPS * TOKENS_PER_STEP, "parameters": 39584}
    trained |= {"skipped_steps": 2, "stop_reason": "completed"}
    step_10 = f"=== {HOSTILE}\nfirst words\n"
    texts = {"run/samples/step-00000010.txt": step_10, "run/samples/step-00000020.txt": "later"}
    for number, name in enumerate((A, B)):
        hostile = {"prompt": HOSTILE, "answer": f"{HOSTILE} {number}"}
        samples = {"base": [hostile, {"prompt": "Hello", "answer": "一二三 world"}]}
        losses = falling(STEPS, 3.0 - number / 2, gap=GAP)
        made = [
            Made("shards-pretrain", files={HOSTILE: "a" * 64}, result=sharded),
            Made("pretrain", losses, texts=texts, result=trained, noted={"resumed_from_step": 20}),
            Made("evaluate", result={"samples": samples, "metrics": {"bits_per_byte": 1.5}}),
        ]
        metrics = {"eval/bits_per_byte": 1.5 - number / 8, "pretrain/validation_loss": 3.25}
        settings = {"data": {"pretrain": [HOSTILE]}}
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
    with Browser(width=1200) as browser:
        yield browser


def test_lines_are_where_the_numbers_are_with_a_gap_where_there_is_none(pages_home: Path) -> None:
    """Points of the paths, before the gap and after it, are tokens and losses but for scale."""
    views = read_runs(pages_home, [A, B])
    training, validation, *_ = comparison_page(views).split("<figure>")[1:]
    assert "<figcaption>validation_loss " in validation
    for name, view in zip("AB", views, strict=True):
        value = view.curve("pretrain", "validation_loss")[-1].value
        assert f"</i>{name} <b>{value:.5g}</b>" in validation
    paths = re.findall(r'<g class="line run\d"><path d="([^"]*)"', training)
    assert [path.count("M") for path in paths] == [2, 2]
    pixels = numpy.array(re.findall(r"([\d.]+),([\d.]+)", "".join(paths)), dtype=float)
    curves = [point for view in views for point in view.curve("pretrain", "loss")]
    known = numpy.array([(point.tokens, point.value) for point in curves if point.step != GAP])
    for numbers, positions in zip(known.T, pixels.T, strict=True):
        slope, start = numpy.polyfit(numbers, positions, 1)
        assert slope * start != 0
        assert numpy.allclose(slope * numbers + start, positions, atol=0.01)
    assert pixels[0][0] == charts.LEFT and pixels[0][1] < pixels[-1][1], "higher losses are higher"


@needs_browser
@pytest.mark.parametrize("name", ["both.html", "report.html"])
def test_no_text_is_executed_and_nothing_loaded(
    browser: Browser, pages_home: Path, name: str
) -> None:
    browser.errors.clear()
    browser.open((pages_home / name).as_uri())
    browser.evaluate(OPEN_ALL)
    assert escaped(HOSTILE) in browser.evaluate("document.body.innerText")
    assert browser.evaluate(NO_HIT)
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
    assert browser.errors == []
    # The policy of the page stands also where somebody found a hole.
    browser.evaluate(ADD_SCRIPT)
    assert browser.evaluate(NO_HIT)
    assert browser.evaluate(FETCH) == browser.evaluate(COMPILE) == "refused"


def test_the_report_shows_stages_data_samples_and_what_went_wrong(pages_home: Path) -> None:
    page = (pages_home / "report.html").read_text(encoding="utf-8")
    problems = ("resumed at step 20", "skipped 2 steps", "not JSON 3", "not finite at step 7")
    for text in (*problems, "12,829", "一二三 world", "step 10", "first words", "39.58k"):
        assert text in page, text


def test_the_policy_of_a_page_lets_its_own_style_through_alone(pages_home: Path) -> None:
    for name in ("both.html", "report.html"):
        page = (pages_home / name).read_text(encoding="utf-8")
        [policy] = re.findall('Content-Security-Policy" content="([^"]*)"', page)
        [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
        assert "unsafe" not in policy and "<script" not in page


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
