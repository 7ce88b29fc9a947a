"""Results: table and JSON agree, and claim no difference that the items do not show."""

import json
import math
from dataclasses import replace

import pytest

from ttrain.config.evaluate import ChoicesTask, TextTask
from ttrain.evaluate.items import Items, groups
from ttrain.evaluate.results import OTHER_COUNTS, OTHER_ITEMS, Results
from ttrain.evaluate.statistics import Rule
from ttrain.evaluate.task_result import LN2, Metric, TaskResult

NONE = "no significant difference"
NAMES = tuple(f"item{number}" for number in range(100))
SIZES = (1.0,) * 100
GROUPS = {"lang=en": tuple(range(0, 100, 2)), "lang=zh/tw": tuple(range(1, 100, 2))}
BITS = ["bits_per_byte", "bits_per_byte/lang:en", "bits_per_byte/lang:zh/tw"]
VALUE = 70.0 * 1.05 / 100 / LN2  # bits per byte of text("a", 70.0)


def choices(model: str, right: int, names: tuple[str, ...] = NAMES) -> TaskResult:
    sums = (1.0,) * right + (0.0,) * (100 - right)
    accuracy = Metric("accuracy", sums, SIZES, higher_is_better=True)
    return Items("poems", ChoicesTask(file="x"), (), names).result(model, [accuracy], [])


def text(model: str, nats: float, tokens: float = 30.0) -> TaskResult:
    """Documents of 100 bytes; those of odd numbers cost a tenth more."""
    sums = tuple(nats * (1.1 if number % 2 else 1.0) for number in range(100))
    metrics = [
        Metric("bits_per_byte", sums, (100.0,) * 100, False, "bits per byte", factor=1 / LN2),
        Metric("perplexity", sums, (tokens,) * 100, False, "per token", shown="exp"),
    ]
    left_out = [{"file": "a", "line": line, "reason": "no text"} for line in (1, 2)]
    items = Items("prose", TextTask(), (), NAMES, left_out=left_out, groups=GROUPS)
    return items.result(model, metrics, [])


def perplexity(tokens: float) -> TaskResult:
    result = text(f"model of {tokens} tokens", 70.0, tokens)
    return replace(result, figures=result.figures[3:])


@pytest.mark.parametrize(
    ("models", "rule", "verdict"),
    [
        ((choices("a", 50), choices("b", 52)), Rule(), f"{NONE} (minimum detectable: 0.0600)"),
        ((choices("a", 50), choices("b", 70)), Rule(), "b is better"),
        ((choices("a", 50), choices("b", 60, NAMES[::-1])), Rule(), OTHER_ITEMS),
        ((perplexity(30), perplexity(20)), Rule(), OTHER_COUNTS),
        ((text("a", 70.0), text("b", math.nan)), Rule(), "the metric of b is not finite"),
        ((text("a", 70.0), text("b", 60.0)), Rule(resamples=0), "not tested: resamples is 0"),
        ((text("a", 70.3), text("b", 70.3)), Rule(), NONE),
        ((text("a", 70.0, 30.0), text("b", 60.0, 20.0)), Rule(), "b is better"),
    ],
)
def test_verdicts(models: tuple[TaskResult, TaskResult], rule: Rule, verdict: str) -> None:
    (comparison,) = Results(models, rule).comparisons()
    assert comparison["verdict"] == verdict


def test_a_field_of_two_to_twenty_values_makes_groups() -> None:
    rows = [{"lang": "ab"[number % 2], "id": number, "same": 1} for number in range(21)]
    by = ("lang", "langg", "id", "same")
    assert (set(groups(rows, by)), len(groups(rows[:20], by))) == ({"lang=a", "lang=b"}, 22)


def test_metrics_are_named_by_task_metric_model_and_group() -> None:
    results = Results([text("sft", 70.0), choices("sft", 40)], Rule())
    assert results.metrics()["poems/accuracy/sft"] == 0.4
    prose = ("bits_per_byte/sft", "bits_per_byte/sft/lang:en", "bits_per_byte/sft/lang:zh/tw")
    names = {f"prose/{name}" for name in (*prose, "perplexity/sft")}
    assert set(results.metrics()) == {"poems/accuracy/sft", *names}
    counts = {"prose/items": 100, "prose/left_out": 2, "poems/items": 100, "poems/left_out": 0}
    assert results.counts() == counts


def test_the_json_has_what_the_table_shows_and_no_number_that_is_not_finite() -> None:
    results = Results([text("a", 70.0), text("b", math.inf)], Rule())
    tree = json.loads(json.dumps(results.to_json(), allow_nan=False))
    (task,) = tree["tasks"]
    a, b = (task["models"][name]["figures"] for name in "ab")
    assert list(a) == [*BITS, "perplexity"]
    bits = a["bits_per_byte"]
    low, high = bits["interval"]
    assert bits["value"] == pytest.approx(VALUE) and low < VALUE < high
    assert (bits["smallest"] > 0, bits["items"], bits["higher_is_better"]) == (True, 100, False)
    assert b["bits_per_byte"] == {**bits, "value": None, "interval": None, "smallest": None}
    assert (task["left_out"], tree["models"]) == ({"no text": 2}, ["a", "b"])
    assert tree["comparisons"][0]["interval"] is None
