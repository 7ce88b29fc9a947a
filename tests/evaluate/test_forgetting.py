"""The gate over all nights, sources and models: no gain pays for a loss elsewhere, and what cannot
be compared is not promoted."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ttrain.config import Promotion
from ttrain.config.evaluate import TextTask
from ttrain.evaluate import forgetting, promotion
from ttrain.evaluate.forgetting import BestScore, TextScore, heldout_texts
from ttrain.evaluate.items import Items
from ttrain.evaluate.promotion import Decision, decide, first_champion
from ttrain.evaluate.task_result import Evaluation, Metric

COUNT = 40  # records of each night, and of each other part
LOSS = 1.029  # within the bound of 3 %
EARLIER = "all earlier nights"
EQUAL = {"night-1": 2.0, "night-2": 2.0}
NIGHTS = {night: [f"{night}/{number}" for number in range(COUNT)] for night in EQUAL}
ACCURACY = {"metric": "quiz/accuracy/base"}
GAIN = {"night-1": 1.95, "night-2": 1.8}  # that would be promoted by itself


def model(costs: Mapping[str, float], *, count: int = COUNT, seed: int = 1) -> Metric:
    """A model with about these bits per byte on the records of each night."""
    noise = np.random.default_rng(seed)
    sizes = np.random.default_rng(7).integers(50, 500, count * len(costs)).astype(float)
    level = np.repeat([*costs.values()], count)
    sums = sizes * (level + 0.02 * noise.standard_normal(len(sizes)))
    names = tuple(f"{name}/{number}" for name in costs for number in range(count))
    return Metric("bits_per_byte", tuple(sums), tuple(sizes), None, records=names)


def judged(
    old: Mapping[str, float],
    new: Mapping[str, float],
    best: Mapping[str, BestScore] | None = None,
    count: int = COUNT,
    **rules: Any,
) -> tuple[Decision, dict[str, TextScore]]:
    """A champion with the costs `old` against a challenger with `new`, whose last night is new."""
    champion = model(old, count=count, seed=2)
    challenger = model(new, count=count)
    nights = {
        name: [record for record in champion.records if record.startswith(f"{name}/")]
        for name in old
    }
    settings = Promotion(**rules)
    texts = heldout_texts(challenger.records, nights, {}, [*nights][-1])
    figures = forgetting.figures(challenger, champion, texts, settings, best or {})
    decision = decide(challenger, champion, settings, texts=figures)
    return decision, {figure.name: figure for figure in figures}


def test_a_gain_on_the_new_text_does_not_pay_for_a_loss_on_one_old_night() -> None:
    old = {**EQUAL, "night-3": 2.0}
    decision, figures = judged(old, {"night-1": 2.01, "night-2": 2.2, "night-3": 1.2})
    assert (decision.promote, decision.lost) == (False, ("night-2", EARLIER))
    assert decision.difference and decision.difference > 0.1
    lost = figures["night-2"]
    assert lost.interval and lost.champion
    assert lost.difference == pytest.approx(lost.champion - lost.challenger)
    change = f"it forgets night-2: {lost.champion:.5f} became {lost.challenger:.5f}, 9.6% worse"
    assert change in decision.reason
    assert not figures["night-1"].lost and not figures["night-3"].judged


@pytest.mark.parametrize(
    ("cost", "rules", "promote"),
    [
        (2.05, {}, True),  # 2.5 %: within the bound
        (2.05, {"forgetting": 0.01}, False),
        (2.2, {"forgetting": None}, True),
        (2.2, {"resamples": 0}, False),  # by the values alone
    ],
)
def test_the_bound_is_relative(cost: float, rules: dict[str, Any], promote: bool) -> None:
    assert judged(EQUAL, {"night-1": cost, "night-2": 1.2}, **rules)[0].promote == promote


def test_small_nights_are_judged_together_where_they_suffice_for_an_interval() -> None:
    costs = {"night-1": 2.2, "night-2": 2.2, "night-3": 2.2, "night-4": 1.0}
    decision, figures = judged(dict.fromkeys(costs, 2.0), costs, count=8)
    assert (decision.promote, decision.lost) == (False, (EARLIER,))
    assert (figures[EARLIER].records, figures[EARLIER].interval is None) == (24, False)
    assert not any(figures[name].judged for name in costs)
    new = {"night-1": 3.0, "night-2": 1.0}
    decision, figures = judged(EQUAL, new, count=4)
    first = figures["night-1"]
    assert (decision.lost, first.judged, first.interval) == ((), False, None)
    assert judged(EQUAL, new, count=4, resamples=0)[0].lost == ("night-1",), "by the values alone"


@pytest.mark.parametrize(
    ("earlier", "known", "lost"),
    [(1, False, ()), (0, True, ()), (1, True, ("night-1",)), (9, True, ("night-1",))],
)
def test_small_losses_do_not_add_up(earlier: int, known: bool, lost: tuple[str, ...]) -> None:
    """A challenger loses 2.9 % on the first night's text, after `earlier` nights that did so."""
    best = {"night-1": BestScore(2.0, "version 1", COUNT)} if known else {}
    old = {"night-1": 2.0 * LOSS**earlier, "night-2": 3.0}
    new = {"night-1": 2.0 * LOSS ** (earlier + 1), "night-2": 1.0}
    decision, figures = judged(old, new, best)
    assert (decision.promote, decision.lost) == (not lost, lost)
    if earlier == 1 and known:
        night = figures["night-1"]
        assert (night.best, night.best_champion) == (2.0, "version 1")
        assert "2.9% worse, and 5.9% worse than 2.00000 of version 1; promotion." in decision.reason
        gain = judged(old, {**new, "night-1": 2.03}, best)[1]["night-1"]
        assert (gain.best, gain.lost) == (2.0, False), "better than the champion"


@pytest.mark.parametrize(
    ("setting", "value", "promote", "why"),
    [
        ("xz", 1.9, True, "its 1.90000 beats 2.00000 of xz"),
        ("xz", 2.0, False, "does not beat 2.00000 of xz"),
        (1.5, 1.6, False, "does not beat 1.50000"),
        (None, 9.0, True, "there is no champion yet"),
    ],
)
def test_a_baseline_must_be_beaten(setting: Any, value: float, promote: bool, why: str) -> None:
    rules = Promotion(baseline=setting)
    values = {"bits_per_byte": value, "bits_per_byte_xz": 2.0, "bits_per_byte_zlib": 2.5}
    metrics = {name: Metric.of_value(name, known) for name, known in values.items()}
    challenger = metrics["bits_per_byte"]
    decision = decide(challenger, None, rules, first=first_champion(metrics, challenger, rules))
    assert decision.promote == promote and why in decision.reason


def metric(name: str, values: Sequence[float], records: str = "", size: float = 1.0) -> Metric:
    """The mean of these values, of the records "records 0", "records 1" and so on."""
    sums = tuple(value * size for value in values)
    names = tuple(f"{records} {number}" for number in range(len(values)))
    higher = "accuracy" in name
    return Metric(name, sums, (size,) * len(sums), higher_is_better=higher, records=names)


def compared(
    challenger: dict[str, Any], champion: dict[str, Any] | None = None, **rules: Any
) -> Decision:
    def evaluated(
        *,
        bits: Metric | None = None,
        sft: float = 1.5,
        dpo: float = 0.75,
        lora: float = 1.0,
        quiz: float = 0.5,
        count: int = COUNT,
    ) -> Evaluation:
        spread = [0.9 if number % 2 else 1.1 for number in range(count)]
        metrics = (
            bits or model(EQUAL),
            metric("chat_loss_sft", [sft * part for part in spread], "chats", 10),
            metric("domain_loss_lora", [lora * part for part in spread], "domain", 10),
            metric("preference_accuracy/dpo", [float(at < dpo * count) for at in range(count)]),
            metric("quiz/accuracy/base", [float(at < quiz * 100) for at in range(100)]),
        )
        return Evaluation({each.name: each for each in metrics})

    sides = evaluated(**challenger), evaluated(**(champion or {}))
    return promotion.judge(*sides, Promotion(**rules), NIGHTS, "night-2")[0]


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"sft": 9.0}, "chat_loss_sft"),
        ({"dpo": 0.2}, "preference_accuracy/dpo"),
        ({"lora": math.inf}, "domain_loss_lora"),
    ],
)
def test_no_gain_pays_for_another_model(changes: dict[str, float], lost: str) -> None:
    challenger = {"bits": model(GAIN), **changes}
    decision = compared(challenger)
    assert (decision.promote, decision.lost) == (False, (lost,))
    assert f"it forgets {lost}: " in decision.reason
    assert compared(challenger, forgetting=None).promote


NO_VALUE = {"bits": model({"night-1": math.nan, "night-2": 2.0})}
OTHER_RECORDS = {"bits": model({"night-1": 2.0, "other": 2.0})}


@pytest.mark.parametrize(
    ("challenger", "champion"), [(NO_VALUE, {}), (OTHER_RECORDS, {}), ({}, OTHER_RECORDS)]
)
def test_unknown_loss_keeps_champion(challenger: dict[str, Any], champion: dict[str, Any]) -> None:
    better = {"quiz": 0.9, **challenger}
    decision = compared(better, champion, **ACCURACY)
    assert (decision.promote, decision.lost, decision.champion) == (False, (), 0.5)
    assert decision.reason.startswith("what it forgets cannot be determined: ")
    assert compared(better, champion, forgetting=None, **ACCURACY).promote
    assert compared({"quiz": 0.9}, NO_VALUE, **ACCURACY).promote, "it has nothing to lose"


def test_each_source_has_a_metric_and_a_bound_under_its_own_name() -> None:
    numbers_of = {"source=r&d": tuple(range(30)), "source=a/b": tuple(range(30, 60))}
    names = tuple(f"text {number}" for number in range(60))
    items = Items("documents", TextTask(), (), names, groups=numbers_of)
    sides = []
    for cost in (2.5, 2.0):
        result = items.result("base", [metric("bits_per_byte", [cost] * 30 + [2.0] * 30)], [])
        recorded = result.recorded({"bits_per_byte": "bits_per_byte"})
        assert {*recorded} == {
            "bits_per_byte",
            *(f"bits_per_byte/source:{s}" for s in ("r&d", "a/b")),
        }
        sides.append(Evaluation(recorded))
    decision, texts = promotion.judge(*sides, Promotion(), {})
    assert [text.name for text in texts if text.kind == "source"] == ["source r&d", "source a/b"]
    assert decision.lost == ("source r&d",)


@pytest.mark.parametrize(
    ("count", "rules", "promote", "reason"),
    [
        (19, {}, False, "19 of 20"),
        (20, {}, True, "better by 0.50000"),
        (9, {"resamples": 0}, True, "resamples is 0"),  # the user lets the values decide
    ],
)
def test_too_few_records(count: int, rules: dict[str, Any], promote: bool, reason: str) -> None:
    better = {"sft": 1.0, "lora": 0.5, "count": count}
    decision = compared(better, {"count": count}, metric="chat_loss_sft", **rules)
    assert decision.promote == promote and reason in decision.reason
