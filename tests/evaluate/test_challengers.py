"""The gate over all models of a set: what one gains does not pay for what another lost, and what cannot be compared is not
promoted."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ttrain.config import Promotion
from ttrain.config.evaluate import TextTask
from ttrain.evaluate import promotion
from ttrain.evaluate.items import Items
from ttrain.evaluate.promotion import Decision
from ttrain.evaluate.task_result import LN2, Evaluation, Metric

COUNT = 40  # records of each night, and of each other part
NIGHTS = ("old", "new")
ACCURACY = "quiz/accuracy/base"


def metric(
    name: str, values: Sequence[float], records: Sequence[str], size: float = 1.0, **more: Any
) -> Metric:
    sums = tuple(value * size * more.get("factor", 1) ** -1 for value in values)
    return Metric(
        name, sums, (size,) * len(sums), more.pop("higher", False), records=tuple(records), **more
    )


def evaluation(*metrics: Metric) -> Evaluation:
    return Evaluation({each.name: each for each in metrics})


def evaluated(
    *,
    bits: Sequence[float] = (2.0, 2.0),
    sft: float | None = 1.5,
    dpo: float | None = 0.75,
    lora: float | None = 1.0,
    quiz: float = 0.5,
    count: int = COUNT,
    records: str = "",
    tokens: int = 10,
) -> Evaluation:
    names = [f"{records}{night} {number}" for night in NIGHTS for number in range(COUNT)]
    metrics = [
        metric(
            "bits_per_byte",
            [cost for cost in bits for _ in range(COUNT)],
            names,
            100.0,
            factor=1 / LN2,
        )
    ]
    for name, part, value in (
        ("chat_loss_sft", "chats", sft),
        ("domain_loss_lora", "domain", lora),
    ):
        if value is not None:
            costs = [value * (0.9 if number % 2 else 1.1) for number in range(count)]
            metrics.append(
                metric(
                    name, costs, [f"{records}{part} {number}" for number in range(count)], tokens
                )
            )
    if dpo is not None:
        right = [float(number < dpo * count) for number in range(count)]
        names = [f"{records}pair {number}" for number in range(count)]
        metrics.append(metric("preference_accuracy/dpo", right, names, higher=True))
    answers = [float(number < quiz * 100) for number in range(100)]
    metrics.append(metric(ACCURACY, answers, list(map(str, range(100))), higher=True))
    return evaluation(*metrics)


def compared(
    challenger: dict[str, Any], champion: dict[str, Any] | None = None, **rules: Any
) -> Decision:
    nights = {name: [f"{name} {number}" for number in range(COUNT)] for name in NIGHTS}
    theirs = evaluated(**(champion or {}))
    return promotion.judge(evaluated(**challenger), theirs, Promotion(**rules), nights, "new")[0]


GAIN = {"bits": (1.95, 1.8)}  # that would be promoted by itself


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"sft": 9.0}, "chat_loss_sft"),
        ({"dpo": 0.2}, "preference_accuracy/dpo"),
        ({"lora": math.inf}, "domain_loss_lora"),
    ],
)
def test_a_better_base_model_does_not_pay_for_the_loss_of_another_model(
    changes: dict[str, float], lost: str
) -> None:
    assert compared(GAIN).promote
    decision = compared({**GAIN, **changes})
    assert not decision.promote and decision.lost == (lost,)
    assert (
        f"it forgets {lost}: " in decision.reason
        and "promotion.forgetting allows 3.0%" in decision.reason
    )
    assert compared({**GAIN, **changes}, forgetting=None).promote


@pytest.mark.parametrize(
    ("challenger", "champion", "why"),
    [
        (
            {"bits": (math.nan, 2.0)},
            {},
            "the challenger's bits_per_byte is nan, the champion's is 2.00000",
        ),
        ({"records": "other "}, {}, "not evaluated on the same held-out records"),
        ({}, {"records": "other "}, "not evaluated on the same held-out records"),
    ],
)
def test_nothing_is_promoted_where_what_is_forgotten_cannot_be_determined(
    challenger: dict[str, Any], champion: dict[str, Any], why: str
) -> None:
    rules = {"metric": ACCURACY}
    decision = compared({"quiz": 0.9, **challenger}, champion, **rules)
    assert not decision.promote and decision.lost == () and decision.champion == 0.5
    assert (
        decision.reason.startswith("what it forgets cannot be determined: ")
        and why in decision.reason
    ), decision.reason
    assert "else it would be promoted: better by 0.40000" in decision.reason
    assert compared({"quiz": 0.9, **challenger}, champion, forgetting=None, **rules).promote
    for metric in ({}, rules):  # a champion without a finite figure has nothing to lose
        assert compared({"quiz": 0.9}, {"bits": (math.nan, 2.0)}, **metric).promote


STRANGE = (
    "r&d",
    "r#d",
    "r?d",
    "r_d",
    "R_D",
    "a/b",
    "caf\u00e9",
    "cafe\u0301",
)  # some of them MLflow refuses


def test_each_source_has_a_metric_and_a_bound_under_its_own_name() -> None:
    sides = []
    groups = {
        f"source={name}": tuple(range(30 * at, 30 * at + 30)) for at, name in enumerate(STRANGE)
    }
    for cost in (2.5, 2.0):
        names = tuple(f"text {number}" for number in range(30 * len(STRANGE)))
        bits = metric(
            "bits_per_byte",
            [cost if number in groups["source=r?d"] else 2.0 for number in range(len(names))],
            (),
        )
        result = Items("documents", TextTask(), (), names, groups=groups).result("base", [bits], [])
        recorded = result.recorded({"bits_per_byte": "bits_per_byte"})
        assert list(recorded) == [
            "bits_per_byte",
            *(f"bits_per_byte/source:{name}" for name in STRANGE),
        ]
        sides.append(evaluation(*recorded.values()))
    decision, texts = promotion.judge(*sides, Promotion(), {})
    assert {figure.name for figure in texts if figure.kind == "source"} == {
        f"source {name}" for name in STRANGE
    }
    assert decision.lost == ("source r?d",)


@pytest.mark.parametrize(
    ("count", "rules", "word", "reason"),
    [
        (9, {}, "kept", "9 of 20 held-out records"),
        (20, {}, "promoted", "better by 0.50000; the lower end of the interval"),
        (
            9,
            {"resamples": 0},
            "promoted",
            "resamples is 0",
        ),  # the user lets the figures alone decide
    ],
)
def test_a_night_of_too_few_held_out_records_keeps_the_champion(
    count: int, rules: dict[str, Any], word: str, reason: str
) -> None:
    better = {"sft": 1.0, "lora": 0.5, "count": count}
    decision = compared(better, {"count": count}, **{"metric": "chat_loss_sft", **rules})
    assert decision.word == word and reason in decision.reason, decision.reason
