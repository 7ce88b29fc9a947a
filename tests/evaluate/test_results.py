"""Results: the table and the JSON say the same, and no difference is claimed that the items do not show."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ttrain.config.evaluate import ChoicesTask, TextTask
from ttrain.evaluate.items import Items, groups, notes_on
from ttrain.evaluate.results import OTHER_COUNTS, OTHER_ITEMS, Results
from ttrain.evaluate.statistics import Rule
from ttrain.evaluate.task_result import LN2, Metric, TaskResult
from ttrain.reports import summary

ITEMS = tuple(f"item{number}" for number in range(100))


def choices(model: str, right: int, task: str = "poems", **changes: Any) -> TaskResult:
    figure = Metric(
        "accuracy",
        (1.0,) * right + (0.0,) * (100 - right),
        (1.0,) * 100,
        higher_is_better=True,
        unit="",
    )
    rows = [{"question": str(number)} for number in range(100)]
    return Items(task, ChoicesTask(file="x"), (), changes.get("items", ITEMS)).result(
        model, [figure], rows
    )


def text(model: str, nats: float, tokens: float = 30.0) -> TaskResult:
    """Documents of 100 bytes; those of odd numbers cost a tenth more."""
    sums = tuple(nats * (1.1 if number % 2 else 1.0) for number in range(100))
    figures = [
        Metric("bits_per_byte", sums, (100.0,) * 100, False, "bits per byte", factor=1 / LN2),
        Metric("perplexity", sums, (tokens,) * 100, False, "per token", shown="exp"),
    ]
    groups = {"lang=en": tuple(range(0, 100, 2)), "lang=zh/tw": tuple(range(1, 100, 2))}
    left_out = [{"file": "a", "line": line, "reason": "no text"} for line in (1, 2)]
    return Items("prose", TextTask(), (), ITEMS, left_out=left_out, groups=groups).result(
        model, figures, [{}] * 100
    )


def test_a_difference_is_claimed_only_where_the_items_show_it() -> None:
    near, far = (
        Results([choices("a", 50), choices("b", right)], Rule()).comparisons()[0]
        for right in (52, 70)
    )
    assert near["verdict"] == "no significant difference (minimum detectable: 0.0600)"
    assert far["verdict"] == "b is better"
    assert (near["p"], round(far["difference"], 9)) == (0.5, -0.2)


def test_what_cannot_be_compared_says_why() -> None:
    other = choices("b", 60, items=tuple(f"other{number}" for number in range(100)))

    def verdict(*outcomes: TaskResult, **rule: int) -> str:
        (comparison,) = Results(outcomes, Rule(**rule)).comparisons()
        return str(comparison["verdict"])

    assert verdict(choices("a", 50), other) == OTHER_ITEMS
    by_token = (text("a", 70.0, 30.0), text("b", 70.0, 20.0))
    assert (
        verdict(*(replace(outcome, figures=outcome.figures[3:]) for outcome in by_token))
        == OTHER_COUNTS
    )
    assert verdict(text("a", 70.0), text("b", math.nan)) == "the metric of b is not finite"
    assert verdict(text("a", 70.0), text("b", 60.0), resamples=0) == "not tested: resamples is 0"
    assert verdict(text("a", 70.3), text("b", 70.3)) == "no significant difference"
    assert verdict(text("a", 70.0, 30.0), text("b", 60.0, 20.0)) == "b is better"


def test_notes_say_which_rows_are_left_out() -> None:
    left_out = [{"file": "/data/a.jsonl", "line": line, "reason": "no text"} for line in (3, 7)]
    left_out += [
        {"file": "/data/b.jsonl", "line": line, "reason": "empty"} for line in range(11, 1211)
    ]
    rows = [{"lang": "ab"[number % 2], "id": number, "same": 1} for number in range(30)]
    by = ("lang", "langg", "id", "same")
    found = groups(rows, by)
    assert set(found) == {"lang=a", "lang=b"}
    assert len(groups(rows[:20], by)) == 22, "each of 20 values is a group, and of 21 none"
    names = tuple(map(str, range(30)))
    read = Items("poems", ChoicesTask(file="x", by=by), tuple(rows), names, rows, left_out, found)
    assert notes_on([read]) == [
        "poems: 2 rows left out: no text (/data/a.jsonl:3, /data/a.jsonl:7)",
        "poems: 1,200 rows left out: empty (/data/b.jsonl:11, /data/b.jsonl:12, /data/b.jsonl:13 and 1,197 more)",
    ]


def test_the_table_has_a_column_for_each_model_and_groups_below_the_figure() -> None:
    header, rows = Results([text("a", 70.0), text("b", 60.0)], Rule()).table()
    assert header == ["task", "figure", "a", "b", "items"]
    assert [row[1] for row in rows] == ["bits_per_byte", "  lang=en", "  lang=zh/tw", "perplexity"]
    value = 70.0 * 1.05 / 100 / LN2
    assert rows[0][2].startswith(f"{value:.4f} (") and rows[0][4] == "100"
    assert rows[1][2].startswith(f"{70 / 100 / LN2:.4f} (") and rows[1][4] == "50"


def test_the_metrics_name_task_figure_model_and_the_groups_own_value_and_each_item_is_a_row() -> (
    None
):
    found = Results([text("sft", 70.0), choices("sft", 40)], Rule())
    assert set(found.metrics()) == {
        "prose/bits_per_byte/sft",
        "prose/perplexity/sft",
        "poems/accuracy/sft",
        "prose/bits_per_byte/sft/lang:en",
        "prose/bits_per_byte/sft/lang:zh/tw",
    }
    assert found.metrics()["poems/accuracy/sft"] == 0.4
    assert found.counts() == {
        "prose/items": 100,
        "prose/left_out": 2,
        "poems/items": 100,
        "poems/left_out": 0,
    }


def test_the_json_holds_what_the_table_shows_and_is_json() -> None:
    endless = text("b", math.inf)
    told = json.loads(
        json.dumps(Results([text("a", 70.0), endless], Rule()).to_json(), allow_nan=False)
    )
    (task,) = told["tasks"]
    figure = task["models"]["a"]["figures"]["bits_per_byte"]
    assert figure["value"] == pytest.approx(70.0 * 1.05 / 100 / LN2)
    assert figure["interval"][0] < figure["value"] < figure["interval"][1]
    assert figure["smallest"] > 0 and figure["items"] == 100 and not figure["higher_is_better"]
    assert task["models"]["b"]["figures"]["bits_per_byte"] == {
        **figure,
        "value": None,
        "interval": None,
        "smallest": None,
    }
    names = ["bits_per_byte", "bits_per_byte/lang:en", "bits_per_byte/lang:zh/tw", "perplexity"]
    assert list(task["models"]["a"]["figures"]) == names
    assert (task["left_out"], told["models"]) == ({"no text": 2}, ["a", "b"])
    assert told["comparisons"][0]["interval"] is None


def test_the_champion_stands_below_its_challenger_in_the_suites_too() -> None:
    new, old = (Results([choices("base", right)], Rule()) for right in (70, 50))
    stages = {"evaluate": new, "evaluate-champion": old}
    results = {
        name: {"suites": found.to_json(), "metrics": found.metrics()}
        for name, found in stages.items()
    }
    metrics = summary.metrics_of(results)
    assert summary.rows(metrics, results) == [
        ("poems accuracy, base", "0.700", "100 items"),
        ("poems accuracy, base, champion", "0.500", "the challenger: +0.200"),
    ]
