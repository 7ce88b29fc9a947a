"""The gate over all nights: a gain on the new text does not pay for a loss on the old."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ttrain.config import Promotion
from ttrain.evaluate import forgetting
from ttrain.evaluate.forgetting import BestFigure, TextFigure, heldout_texts
from ttrain.evaluate.promotion import Decision, decide, first_champion
from ttrain.evaluate.task_result import Metric

COUNT = 40  # records of each night
LOSS = 1.029  # within the bound of 3 %
EARLIER = "all earlier nights"


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
    best: Mapping[str, BestFigure] | None = None,
    count: int = COUNT,
    **rules: Any,
) -> tuple[Decision, dict[str, TextFigure]]:
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
    old = {"night-1": 2.0, "night-2": 2.0, "night-3": 2.0}
    decision, figures = judged(old, {"night-1": 2.01, "night-2": 2.2, "night-3": 1.2})
    assert not decision.promote
    assert (decision.difference or 0) > 0.1
    assert decision.lost == ("night-2", EARLIER)
    lost = figures["night-2"]
    assert lost.interval
    assert lost.champion
    assert lost.difference == pytest.approx(lost.champion - lost.challenger)
    change = f"it forgets night-2: {lost.champion:.5f} became {lost.challenger:.5f}, 9.6% worse"
    assert change in decision.reason
    assert not figures["night-1"].lost
    assert not figures["night-3"].judged


@pytest.mark.parametrize(
    ("cost", "rules", "promote"),
    [
        (2.05, {}, True),  # 2.5 %: within the bound
        (2.05, {"forgetting": 0.01}, False),
        (2.2, {"forgetting": None}, True),
        (2.2, {"resamples": 0}, False),  # by the values alone
    ],
)
def test_the_bound_is_a_share_of_the_champion_s_value(
    cost: float, rules: dict[str, Any], promote: bool
) -> None:
    old = {"night-1": 2.0, "night-2": 2.0}
    assert judged(old, {"night-1": cost, "night-2": 1.2}, **rules)[0].promote == promote


def test_small_nights_are_judged_together() -> None:
    costs = {"night-1": 2.2, "night-2": 2.2, "night-3": 2.2, "night-4": 1.0}
    decision, figures = judged(dict.fromkeys(costs, 2.0), costs, count=8)
    assert (decision.promote, decision.lost) == (False, (EARLIER,))
    assert figures[EARLIER].records == 24
    assert figures[EARLIER].interval is not None
    assert not any(figures[name].judged for name in costs)


def test_nights_that_are_together_too_few_for_an_interval_are_judged_by_values_alone_or_not() -> (
    None
):
    old = {"night-1": 2.0, "night-2": 2.0}
    new = {"night-1": 3.0, "night-2": 1.0}
    decision, figures = judged(old, new, count=4)
    assert decision.lost == ()
    assert (figures["night-1"].judged, figures["night-1"].interval) == (False, None)
    assert judged(old, new, count=4, resamples=0)[0].lost == ("night-1",)


@pytest.mark.parametrize(
    ("earlier", "known", "lost"),
    [(1, False, ()), (0, True, ()), (1, True, ("night-1",)), (9, True, ("night-1",))],
)
def test_losses_within_the_bound_of_a_night_do_not_add_up_over_nights(
    earlier: int, known: bool, lost: tuple[str, ...]
) -> None:
    """A challenger loses 2.9 % on the first night's text, after `earlier` nights that did so."""
    best = {"night-1": BestFigure(2.0, "version 1", COUNT)} if known else {}
    old = {"night-1": 2.0 * LOSS**earlier, "night-2": 3.0}
    new = {"night-1": 2.0 * LOSS ** (earlier + 1), "night-2": 1.0}
    decision, figures = judged(old, new, best)
    assert (decision.promote, decision.lost) == (not lost, lost)
    if earlier == 1 and known:
        night = figures["night-1"]
        assert (night.best, night.best_champion) == (2.0, "version 1")
        assert "2.9% worse, and 5.9% worse than 2.00000 of version 1; promotion." in decision.reason


def test_a_gain_on_the_champion_passes_however_good_an_earlier_champion_was() -> None:
    best = {"a": BestFigure(2.0, "version 1", COUNT)}
    figure = judged({"a": 3.0, "b": 3.0}, {"a": 2.9, "b": 1.0}, best)[1]["a"]
    assert (figure.best, figure.lost) == (2.0, False)


@pytest.mark.parametrize(
    ("setting", "value", "promote", "why"),
    [
        ("xz", 1.9, True, "its 1.90000 beats 2.00000 of xz"),
        ("xz", 2.0, False, "does not beat 2.00000 of xz"),
        (1.5, 1.6, False, "does not beat 1.50000"),
        (None, 9.0, True, "there is no champion yet"),
    ],
)
def test_a_first_champion_must_beat_the_baseline(
    setting: Any, value: float, promote: bool, why: str
) -> None:
    rules = Promotion(baseline=setting)
    values = {"bits_per_byte": value, "bits_per_byte_xz": 2.0, "bits_per_byte_zlib": 2.5}
    metrics = {name: Metric.of_value(name, known) for name, known in values.items()}
    challenger = metrics["bits_per_byte"]
    decision = decide(challenger, None, rules, first=first_champion(metrics, challenger, rules))
    assert (decision.promote, decision.word) == (promote, "promoted" if promote else "kept")
    assert why in decision.reason
