"""What a run shows: one log of whole lines of all stages, in their order, and the speed of a stage at work."""

import io
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from ttrain.core.terminal import showing_logs
from ttrain.engine import display as displays
from ttrain.engine import stage_worker
from ttrain.engine.display import Display
from ttrain.reports import summary
from ttrain.store.runs import RunRecord

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\S+): (.*)")


def test_a_line_has_the_time_that_it_says_itself_or_that_it_is(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "full", [], {})
    record.log("pretrain", "2026-11-21 22:59:54,854 rank 1: step 5/40")
    record.log("pretrain", "a library's own line")
    first, second = record.path.with_suffix(".log").read_text().splitlines()
    assert first == "2026-11-21 22:59:54 pretrain: rank 1: step 5/40"
    assert LINE.fullmatch(second) and second.endswith(" pretrain: a library's own line")


def test_what_a_line_holds_can_make_no_other_line_and_move_no_cursor(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "full", [], {})
    record.log("sft", "bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京\tok")
    (line,) = record.path.with_suffix(".log").read_text(encoding="utf-8").split("\n")[:-1]
    assert line.endswith(
        r"sft: bar\rbaz\n2026-11-21 00:00:00 lora: forged \x1b[31m\u2028 東京" + "\tok"
    )


def test_warnings_of_the_guards_name_the_setting_to_change_and_their_file() -> None:
    result = {"tokens": 512, "guard_warnings": {"overfit": 1}}
    warned = summary.key_figures("sft", result, Path("/home/store/sft/1"))
    assert warned.endswith(
        "the guards warned of overfit; try fewer passes by a smaller sft.epochs or sft.tokens, more data, or keep the best step: "
        "sft.early_stopping.patience=3 sft.validate_every_steps=50; "
        "/home/store/sft/1/run/guards.jsonl"
    )
    warned = summary.key_figures(
        "pretrain", {**result, "guard_warnings": {"overfit": 1, "no_effect": 1}}
    )
    assert (
        "warned of overfit, no effect; " in warned
        and "pretrain.tokens" in warned
        and "pretrain.optim.lr" in warned
    )
    assert "pretrain.early_stopping.patience=3" in warned


def test_figures_have_three_digits_or_none_and_one_of_a_thing_is_not_called_several() -> None:
    result = {"validation_loss": 3.1882, "tokens": 512, "tokens_per_second": 919.878}
    assert (
        summary.key_figures("pretrain", result)
        == "validation_loss 3.188, tokens 512, tokens_per_second 920"
    )
    metrics = {"eval/chat_loss_base": 4.1, "eval/chats": 1, "eval/chat_tokens": 11}
    assert [row[2] for row in summary.rows(metrics, {})] == ["1 chat, 11 scored tokens"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_speed_and_the_time_left_are_shown_from_the_second_report_on(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    output = io.StringIO()
    display = Display(Console(file=output, force_terminal=is_terminal, width=150))
    for done in (0, 1000, 2000):
        progress = {
            "done": done,
            "total": 10_000,
            "unit": "tokens",
            "first": 0,
            "seconds": done / 50,
        }
        display("pretrain", "progressed", {**progress, "figures": {"loss": 7.25}})
        if display._bars:
            display._bars.refresh()
        clock[0] += 20
    display.close()
    shown = output.getvalue()
    assert (
        "20 %" in shown
        and "loss 7.250, 50 tokens/s, 2 min 40 s left" in shown
        and "--:--" not in shown
    )


@pytest.mark.parametrize(
    ("level", "logged", "shown"),
    [
        ("debug", {"a step", "a fact", "a doubt"}, {"started", "took", "a failure", "a doubt"}),
        ("info", {"a fact", "a doubt"}, {"started", "took", "a failure", "a doubt"}),
        ("warning", {"a doubt"}, {"a failure", "a doubt"}),
        ("error", set(), {"a failure"}),
    ],
)
def test_the_log_level_chooses_what_the_log_of_a_stage_has_and_what_the_terminal_shows(
    level: str, logged: set[str], shown: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("ttrain.of_this_test")
    caplog.set_level(logging.DEBUG, logger=log.name)
    for rank in (0, 1):
        caplog.clear()
        log.setLevel(stage_worker.level_of(level, rank))
        log.debug("a step"), log.info("a fact"), log.warning("a doubt")
        below_a_warning = set() if rank and level != "debug" else {"a step", "a fact"}
        assert set(caplog.messages) == logged - ({"a step", "a fact"} - below_a_warning)

    output = io.StringIO()
    log.setLevel(logging.NOTSET)
    warnings = logging.StreamHandler(output)
    logging.getLogger("ttrain").addHandler(warnings)
    try:
        with showing_logs(level):
            display = Display(Console(file=output, width=150), level)
            display("sft", "started", {"why": "started"})
            display("sft", "ended", {"state": "completed", "seconds": 1.0, "figures": "took"})
            display("sft", "failed", {"error": "a failure"})
            logging.getLogger("ttrain").warning("a doubt")
    finally:
        logging.getLogger("ttrain").removeHandler(warnings)
    everything = {"started", "took", "a failure", "a doubt"}
    assert {words for words in everything if words in output.getvalue()} == shown
