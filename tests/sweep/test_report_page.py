"""What a sweep shows: its table, its command, its page, which a browser reads back."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from pathlib import Path

import pytest
from support.browser import Browser, executable

from ttrain.reports.drawings import Scatter, page_drawings
from ttrain.sweep import records, report_page, summary
from ttrain.sweep.measure import Measure
from ttrain.sweep.study import COMPLETED, DIVERGED, PRUNED, Study

LR, KIND = "pretrain.optim.lr", "pretrain.optim.kind"
pytestmark = pytest.mark.usefixtures("real_drawings")
HOSTILE = "</script><script>document.title='owned'</script>"
MEASURE = Measure("pretrain/validation_loss", "pretrain", "pretrain")
VALUES = [3.25, 3.0, 3.5]  # of the trials that came to their end


def sweep_of(home: Path, measure: Measure = MEASURE) -> tuple[records.Sweep, Study]:
    """Five trials of a grid: three complete, one pruned, one diverged with a hostile message; a sixth is unfinished."""
    space = {LR: "log(1e-4,1e-2,3)", KIND: f"choice(muon,{HOSTILE!r})"}
    asked = {"pipeline": "full", "space": space, "measure": dataclasses.asdict(measure), "sampler": "grid", "seed": 1}
    sweep = records.begin(home, asked, {})
    sweep.note(outcome="completed", words=["--config=my file.yaml", "data.pretrain=*.jsonl"])
    study = Study(sweep.journal, sweep.space, sampler="grid", seed=1, maximize=measure.maximize)
    for value in VALUES:
        trial = study.ask()
        study.report(trial.number, {1000: value + 1, 2000: value + 0.5, 3000: value})
        study.note(trial.number, run=f"full-{trial.number}", seconds=10.0)
        study.tell(trial.number, COMPLETED, value)
    for outcome in (PRUNED, DIVERGED):
        trial = study.ask()
        study.report(trial.number, {1000: 6.125})
        study.note(trial.number, error=HOSTILE if outcome == DIVERGED else None)
        study.tell(trial.number, outcome)
    study.ask()
    return sweep, study


def test_the_table_has_the_best_first_and_says_how_the_others_ended(tmp_path: Path) -> None:
    sweep, study = sweep_of(tmp_path)
    header, rows = summary.trial_table(study.trials(), sweep.space, sweep.measure)
    assert header == ("trial", LR, KIND, "pretrain/validation_loss", "outcome", "time", "run")
    assert [row[0] for row in rows] == ["2 *", "1", "3", "4", "5", "6"]
    assert rows[0] == ("2 *", "0.0001", HOSTILE, "3.0000", "completed", "10.0 s", "full-2")
    assert [row[3] for row in rows[3:]] == ["(6.1250)", "(6.1250)", ""]
    assert [row[4] for row in rows[3:]] == ["pruned", f"diverged: {HOSTILE}", "begun"]
    assert summary.counts(study.trials()) == "3 completed, 1 pruned, 1 diverged, 1 unfinished"
    verdict = summary.verdict(study.trials(), sweep.measure)
    assert verdict.startswith("trial 2 is best: pretrain/validation_loss 3.0000 with pretrain.optim.lr=0.0001")
    assert verdict.endswith("the worst has 3.5000")


def test_a_page_is_drawn_again_once_a_trial_or_the_outcome_is_newer(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path)
    assert not sweep.has_current_page
    sweep.page.write_text("")
    for number, path in enumerate((sweep.journal, sweep.path / records.FILE), 1):
        later = sweep.journal.stat().st_mtime_ns + number * 10**10
        os.utime(sweep.page, ns=(later, later))
        assert sweep.has_current_page
        os.utime(path, ns=(later, later))
        assert not sweep.has_current_page, "equal times may hide a change"


def test_where_more_is_better_the_highest_is_first(tmp_path: Path) -> None:
    sweep, study = sweep_of(tmp_path, dataclasses.replace(MEASURE, maximize=True))
    _, rows = summary.trial_table(study.trials(), sweep.space, sweep.measure)
    assert [row[0] for row in rows[:3]] == ["3 *", "1", "2"]
    assert summary.verdict(study.trials(), sweep.measure).endswith("the worst has 3.0000")


def test_the_command_of_a_trial_is_one_that_a_shell_takes_as_it_was_meant(tmp_path: Path) -> None:
    sweep, study = sweep_of(tmp_path)
    best = study.best()
    assert best is not None
    assert shlex.split(summary.command(sweep, best)) == [
        *("ttrain", "pipeline", "run", "full", "--config=my file.yaml", "data.pretrain=*.jsonl"),
        *(f"{LR}=0.0001", f"{KIND}={HOSTILE}"),
    ]
    assert "no trial has completed" in report_page.render(sweep, [])


def test_dots_stand_where_their_values_are_and_tell_them() -> None:
    """Equal steps of the axis lie equally far apart; a higher value stands higher; equal values are drawn too."""
    ys = (3.0, 2.0, 1.0)
    linear, log, words, equal = page_drawings(
        [
            Scatter("x", [(x, y, f"dot <{y}>", y == 1.0) for x, y in zip((1.0, 2.0, 3.0), ys, strict=True)]),
            Scatter("x", [(x, y, "dot", False) for x, y in zip((0.001, 0.01, 0.1), ys, strict=True)], log=True),
            Scatter("x", [(x, y, "dot", False) for x, y in zip("zma", ys, strict=True)]),
            Scatter("x", [(0.0, 0.0, "a", False), (0.0, 0.0, "b", False)]),
        ],
        axis="tokens",
        log=False,
    )
    for drawing in (linear, log, words):
        across, down = zip(*places(drawing), strict=True)
        assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2) and across[0] < across[1]
        assert down[1] - down[0] == pytest.approx(down[2] - down[1], abs=0.2) and down[0] < down[1]
    assert len(places(equal)) == 2
    assert "<title>dot &lt;3.0&gt;</title>" in linear


def test_trials_and_nights_have_whole_numbers_also_where_they_are_two() -> None:
    few = Scatter("trial", [(1.0, 2.0, "dot", True), (2.0, 3.0, "dot", False)], is_whole=True)
    (drawing,) = page_drawings([few], axis="tokens", log=False)
    assert ">2<" in drawing and ">1.5<" not in drawing


def places(drawing: str) -> list[tuple[float, float]]:
    """Where the dots of a drawing are, in pixels from its upper left corner."""
    marks = drawing[drawing.index('class="mark-symbol') :]
    return [(float(x), float(y)) for x, y in re.findall(r'transform="translate\(([\d.]+),([\d.]+)\)" d="M', marks)]


@pytest.mark.skipif(executable() is None, reason="no Chromium is installed")
def test_a_browser_shows_the_numbers_of_the_page_and_no_error(tmp_path: Path) -> None:
    sweep, study = sweep_of(tmp_path)
    sweep.page.write_text(report_page.render(sweep, study.trials()), encoding="utf-8")
    with Browser() as browser:
        browser.resize(390, 900)
        browser.open(sweep.page.as_uri())
        assert browser.evaluate("document.title") == sweep.name
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.errors == []
        cells = browser.evaluate("[...document.querySelectorAll('td')].map(cell => cell.textContent)")
        told = browser.evaluate("[...document.querySelectorAll('.mark-symbol title')].map(title => title.textContent)")
        legend = browser.evaluate("document.querySelector('.legend').textContent")
    assert {"2 *", "3.0000", "(6.1250)", "full-2"} <= set(cells)
    assert f"diverged: {HOSTILE}" in cells
    assert sum("trial 2: 3.0000" in text for text in told) == 3  # on both settings' plots, and among the trials
    assert "trial 2" in legend and "trial 5" not in legend
