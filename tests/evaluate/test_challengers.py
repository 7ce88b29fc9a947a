"""The gate over all models of a set: a gain of one does not pay for the loss of another, and
what cannot be compared is not promoted."""

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
ACCURACY = {"metric": "quiz/accuracy/base"}
GAIN = {"bits": (1.95, 1.8)}  # that would be promoted by itself
STRANGE = ("r&d", "r#d", "r?d", "r_d", "R_D", "a/b", "caf\u00e9", "cafe\u0301")  # for MLflow, too


def metric(name: str, values: Sequence[float], records: str = "", size: float = 1.0) -> Metric:
    """The mean of these values, of the records "records 0", "records 1" and so on."""
    sums = tuple(value * size for value in values)
    names = tuple(f"{records} {number}" for number in range(len(values)))
    higher = "accuracy" in name
    return Metric(name, sums, (size,) * len(sums), higher_is_better=higher, records=names)


def evaluated(
    *,
    bits: Sequence[float] = (2.0, 2.0),
    sft: float = 1.5,
    dpo: float = 0.75,
    lora: float = 1.0,
    quiz: float = 0.5,
    count: int = COUNT,
    records: str = "",
) -> Evaluation:
    """An evaluation with these values; `bits` are those of each night."""
    spread = [0.9 if number % 2 else 1.1 for number in range(count)]
    right = [float(number < dpo * count) for number in range(count)]
    answers = [float(number < quiz * 100) for number in range(100)]
    night_bits = Metric(
        "bits_per_byte",
        tuple(100.0 * LN2 * cost for cost in bits for _ in range(COUNT)),
        (100.0,) * (2 * COUNT),
        higher_is_better=False,
        factor=1 / LN2,
        records=tuple(f"{records}{night} {number}" for night in NIGHTS for number in range(COUNT)),
    )
    metrics = (
        night_bits,
        metric("chat_loss_sft", [sft * part for part in spread], f"{records}chats", 10),
        metric("domain_loss_lora", [lora * part for part in spread], f"{records}domain", 10),
        metric("preference_accuracy/dpo", right, f"{records}pair"),
        metric("quiz/accuracy/base", answers),
    )
    return Evaluation({each.name: each for each in metrics})


def compared(
    challenger: dict[str, Any], champion: dict[str, Any] | None = None, **rules: Any
) -> Decision:
    nights = {name: [f"{name} {number}" for number in range(COUNT)] for name in NIGHTS}
    theirs = evaluated(**(champion or {}))
    return promotion.judge(evaluated(**challenger), theirs, Promotion(**rules), nights, "new")[0]


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
    assert (decision.promote, decision.lost) == (False, (lost,))
    assert f"it forgets {lost}: " in decision.reason
    assert compared({**GAIN, **changes}, forgetting=None).promote


@pytest.mark.parametrize(
    ("challenger", "champion"),
    [({"bits": (math.nan, 2.0)}, {}), ({"records": "other "}, {}), ({}, {"records": "other "})],
)
def test_nothing_is_promoted_where_what_is_forgotten_cannot_be_determined(
    challenger: dict[str, Any], champion: dict[str, Any]
) -> None:
    decision = compared({"quiz": 0.9, **challenger}, champion, **ACCURACY)
    assert (decision.promote, decision.lost, decision.champion) == (False, (), 0.5)
    assert decision.reason.startswith("what it forgets cannot be determined: ")
    assert compared({"quiz": 0.9, **challenger}, champion, forgetting=None, **ACCURACY).promote


@pytest.mark.parametrize("rules", [{}, ACCURACY])
def test_a_champion_without_a_finite_metric_has_nothing_to_lose(rules: dict[str, str]) -> None:
    assert compared({"quiz": 0.9}, {"bits": (math.nan, 2.0)}, **rules).promote


def test_each_source_has_a_metric_and_a_bound_under_its_own_name() -> None:
    groups = {f"source={name}": range(30 * at, 30 * at + 30) for at, name in enumerate(STRANGE)}
    names = tuple(f"text {number}" for number in range(30 * len(STRANGE)))
    numbers_of = {name: tuple(numbers) for name, numbers in groups.items()}
    items = Items("documents", TextTask(), (), names, groups=numbers_of)
    sides = []
    for cost in (2.5, 2.0):
        costs = [cost if number in groups["source=r?d"] else 2.0 for number in range(len(names))]
        result = items.result("base", [metric("bits_per_byte", costs)], [])
        recorded = result.recorded({"bits_per_byte": "bits_per_byte"})
        by_source = [f"bits_per_byte/source:{name}" for name in STRANGE]
        assert list(recorded) == ["bits_per_byte", *by_source]
        sides.append(Evaluation(recorded))
    decision, texts = promotion.judge(*sides, Promotion(), {})
    sources = {text.name for text in texts if text.kind == "source"}
    assert sources == {f"source {name}" for name in STRANGE}
    assert decision.lost == ("source r?d",)


@pytest.mark.parametrize(
    ("count", "rules", "word", "reason"),
    [
        (19, {}, "kept", "19 of 20"),
        (20, {}, "promoted", "better by 0.50000"),
        (9, {"resamples": 0}, "promoted", "resamples is 0"),  # the user lets the values decide
    ],
)
def test_a_night_of_too_few_held_out_records_keeps_the_champion(
    count: int, rules: dict[str, Any], word: str, reason: str
) -> None:
    better = {"sft": 1.0, "lora": 0.5, "count": count}
    decision = compared(better, {"count": count}, metric="chat_loss_sft", **rules)
    assert decision.word == word
    assert reason in decision.reason
