"""Confidence: intervals cover as often as they say, tests are as wrong as they say, and power is what is promised."""

import itertools
import math
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from ttrain.evaluate import statistics
from ttrain.evaluate.statistics import Rule
from ttrain.evaluate.task_result import LN2, Metric

RULE = Rule(resamples=400)


def accuracy(right: np.ndarray) -> Metric:
    return Metric(
        "accuracy", tuple(map(float, right)), (1.0,) * len(right), higher_is_better=True, unit=""
    )


def bits(sums: np.ndarray, sizes: np.ndarray) -> Metric:
    return Metric(
        "bits_per_byte",
        tuple(sums),
        tuple(sizes),
        higher_is_better=False,
        unit="bits",
        factor=1 / LN2,
    )


def documents(random: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(random.normal(6, 0.7, count)).round()


Draw = Callable[[np.random.Generator], Metric]


def texts(count: int) -> Draw:
    def draw(random: np.random.Generator) -> Metric:
        sizes = documents(random, count)
        return bits(sizes * (2 + 0.5 * random.standard_normal(count)), sizes)

    return draw


def shares_of_parts(share: float, alike: float, items: int, parts: int | None) -> Draw:
    """Items of so many parts (None: a few have most), as the answers of one chat, whose correlation is `alike`."""

    def draw(random: np.random.Generator) -> Metric:
        uneven = np.maximum(1, np.exp(random.normal(1.5, 1, items)).round())
        sizes = np.full(items, float(parts)) if parts else uneven
        of_item = random.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), items)
        return Metric(
            "ended",
            tuple(random.binomial(sizes.astype(int), of_item) * 1.0),
            tuple(sizes),
            True,
            "share",
        )

    return draw


@pytest.mark.parametrize(
    ("draw", "truth", "least"),
    [
        (texts(10), 2 / LN2, 0.90),  # plain percentiles reach 0.88
        (
            shares_of_parts(0.02, 0.9, 20, 2),
            0.02,
            0.92,
        ),  # the bootstrap reaches 0.37, 0.75 and 0.97
        (shares_of_parts(0.02, 0.3, 30, 8), 0.02, 0.92),
        (shares_of_parts(0.5, 0.3, 20, 2), 0.5, 0.92),
        (
            shares_of_parts(0.5, 0.9, 20, None),
            0.5,
            0.90,
        ),  # 0.81 if each item told as much as any other
        (shares_of_parts(0.5, 0.02, 20, None), 0.5, 0.90),
        (shares_of_parts(0.02, 0.3, 20, None), 0.02, 0.90),
    ],
)
def test_intervals_cover_the_truth_about_as_often_as_they_say(
    draw: Draw, truth: float, least: float
) -> None:
    """The standard error of a share of 95 % over 400 is 1.1 %."""
    random, covered = np.random.default_rng(7), 0
    for seed in range(400):
        low, high = statistics.interval(draw(random), Rule(resamples=400, seed=seed)) or (
            math.nan,
            math.nan,
        )
        covered += low <= truth <= high
    assert least <= covered / 400 <= 0.98


def test_intervals_of_accuracies_cover_the_truth_about_as_often_as_they_say() -> None:
    for share, count in ((0.02, 20), (0.02, 100), (0.1, 50), (0.5, 20), (0.9, 20), (0.7, 300)):
        right = np.random.default_rng(3).binomial(count, share, 1000)
        ends = {
            k: statistics.interval(accuracy(np.arange(count) < k), RULE)
            for k in set(right.tolist())
        }
        covered = sum(
            low <= share <= high for low, high in (ends[k] or (2, 2) for k in right.tolist())
        )
        assert 0.91 <= covered / 1000 <= 0.99, (share, count)


def test_a_share_that_all_parts_agree_on_has_at_least_the_interval_of_its_items() -> None:
    alike = {
        parts: statistics.interval(shares(0.0, (float(parts),) * 20), RULE) for parts in (2, 3)
    }
    of_items = statistics.interval(accuracy(np.zeros(20)), RULE)
    assert alike[2] == alike[3] and alike[3] is not None and of_items is not None
    assert of_items[1] < alike[3][1] < 1.2 * of_items[1]
    one_has_most = statistics.interval(shares(0.0, (100.0,) + (1.0,) * 19), RULE)
    assert one_has_most is not None and one_has_most[1] > 0.5, "what one item says tells little"


def shares(share: float, sizes: tuple[float, ...]) -> Metric:
    return Metric(
        "ended", tuple(share * size for size in sizes), sizes, higher_is_better=True, unit="share"
    )


@pytest.mark.parametrize(
    ("loses", "wins", "count"), [(0.05, 0.1, 20), (0.02, 0.02, 50), (0.1, 0.2, 100)]
)
def test_intervals_of_a_difference_of_accuracies_cover_it_about_as_often_as_they_say(
    loses: float, wins: float, count: int
) -> None:
    random, covered = np.random.default_rng(5), 0
    for _ in range(400):
        kind = random.choice(3, size=count, p=[wins, loses, 1 - wins - loses])
        found = statistics.compare(accuracy(kind != 1), accuracy(kind != 0), RULE)
        low, high = found.interval or (2, 2)
        covered += low <= wins - loses <= high
    assert covered / 400 >= 0.92


def test_the_interval_of_a_difference_covers_it_and_the_test_rejects_no_more_than_it_says() -> None:
    random, covered, early, rejected = np.random.default_rng(11), 0, 0, 0
    for seed in range(400):
        sizes = documents(random, 20)
        hard = sizes * (2 + 0.5 * random.standard_normal(20))
        first, second = (
            bits(hard + 0.05 * sizes * random.standard_normal(20), sizes) for _ in range(2)
        )
        found = statistics.compare(first, second, Rule(resamples=400, seed=seed))
        low, high = found.interval or (2, 2)
        covered, early, rejected = (
            covered + (low <= 0 <= high),
            early + (low > 0),
            rejected + (found.p <= 0.05),
        )
    assert 0.91 <= covered / 400 <= 0.98
    assert early / 400 <= 0.055, "so often a model that is no better would be promoted"
    assert 0.02 <= rejected / 400 <= 0.08


def test_the_smallest_difference_is_seen_in_about_four_cases_of_five() -> None:
    random, seen, promised = np.random.default_rng(2), 0, []
    for seed in range(200):
        sizes = documents(random, 60)
        hard = sizes * (2 + 0.5 * random.standard_normal(60))
        noise = 0.1 * sizes * random.standard_normal(60)
        found = statistics.compare(
            bits(hard + noise, sizes), bits(hard, sizes), Rule(resamples=250, seed=seed)
        )
        promised.append(found.smallest or 0)
        better = statistics.compare(
            bits(hard + noise - np.mean(promised) * LN2 * sizes, sizes),
            bits(hard, sizes),
            Rule(resamples=250, seed=seed),
        )
        seen += better.interval is not None and better.interval[1] < 0
    assert 0.7 <= seen / 200 <= 0.9


def test_one_model_alone_promises_what_an_independent_one_would_need() -> None:
    """Two accuracies of 0.5 on 100 items: 2.8 * sqrt(2 * 0.25 / 99)."""
    found = statistics.smallest(accuracy(np.arange(100) < 50))
    assert found == pytest.approx((1.959964 + 0.841621) * math.sqrt(2 * 0.25 / 99), rel=1e-4)
    pairs = statistics.compare(accuracy(np.arange(100) < 50), accuracy(np.arange(100) < 45), RULE)
    assert (pairs.smallest or 1) < found / 2


def test_one_of_many_comparisons_needs_more_and_a_less_sure_rule_less() -> None:
    """Of normal errors, (2.8070 + 0.8416) / (1.9600 + 0.8416) as much where one of ten is to be right, and so for 80 %."""
    random = np.random.default_rng(8)
    first, second = (bits(2 + random.standard_normal(400), np.ones(400)) for _ in range(2))
    one = statistics.compare(first, second, RULE).smallest or 0
    assert (statistics.compare(first, second, RULE, among=10).smallest or 0) / one == pytest.approx(
        3.6487 / 2.8016, rel=1e-4
    )
    unsure = statistics.compare(first, second, Rule(confidence=0.8, resamples=400)).smallest or 0
    assert unsure / one == pytest.approx((1.2816 + 0.8416) / 2.8016, rel=1e-4)
    same = accuracy(np.arange(50) < 20)
    assert statistics.compare(same, same, RULE, among=10).smallest == 9 / 50, (
        "2 / 2^9 is the first below 0.005"
    )


def test_models_that_agree_on_every_item_have_an_interval_with_a_width() -> None:
    same = accuracy(np.arange(50) < 20)
    found = statistics.compare(same, same, RULE)
    assert found.interval is not None
    assert found.interval[0] < 0 < found.interval[1]
    assert (found.difference, found.better, found.p, found.smallest) == (0.0, "", 1.0, 6 / 50)
    low, high = statistics.interval(accuracy(np.ones(50)), RULE) or (2, 2)
    assert (round(low, 3), high) == (0.929, 1.0)


def test_the_sign_test_is_the_exact_one() -> None:
    for wins, losses in ((0, 0), (5, 0), (6, 0), (3, 9), (40, 60), (400, 460), (5000, 5300)):
        ways = tail = 1
        for k in range(min(wins, losses)):
            ways = ways * (wins + losses - k) // (k + 1)
            tail += ways
        exact = min(1.0, float(Fraction(2 * tail, 2 ** (wins + losses))))
        assert statistics.sign_test(wins, losses) == pytest.approx(exact, rel=1e-9)


def test_randomisation_counts_the_arrangements_that_differ_as_much() -> None:
    """Eight items: all 256 arrangements of the signs can be listed."""
    differences = np.array([0.5, 0.25, 0.75, -0.125, 0.5, 0.25, 0.0, 1.0])
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    exact = sum(one >= abs(differences.sum()) for one in sums) / 256
    found = statistics.compare(
        bits(differences + 2, np.full(8, 3.0)),
        bits(np.full(8, 2.0), np.full(8, 3.0)),
        Rule(resamples=20000),
    )
    assert found.p == pytest.approx(exact, abs=0.01)


def test_the_bootstrap_is_what_single_draws_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, as for many items, the draws are the same as in one; by a naive loop over them, too."""
    random = np.random.default_rng(3)
    sums, sizes = random.standard_normal(30), random.integers(1, 9, 30).astype(float)
    whole = statistics.bootstrap_ratios([sums], sizes, Rule(resamples=200, seed=5))[0]
    monkeypatch.setattr("ttrain.evaluate.statistics.CHUNK", 90)  # three draws of thirty at a time
    pieces = statistics.bootstrap_ratios([sums], sizes, Rule(resamples=200, seed=5))[0]
    draw, ratios = np.random.default_rng(5), []
    for _ in range(200):
        chosen = [int(number) for number in draw.integers(30, size=30)]
        ratios.append(sum(sums[k] for k in chosen) / sum(sizes[k] for k in chosen))
    np.testing.assert_allclose(whole, ratios)
    np.testing.assert_allclose(pieces, ratios)


def test_the_quantile_of_students_t_is_near_the_exact_one() -> None:
    for freedom, off, exact in (
        (4, 4e-3, (2.131846786, 2.776445105, 4.604094871)),
        (9, 4e-4, (1.833112933, 2.262157163, 3.249835542)),
        (79, 1e-6, (1.664371409, 1.990450210, 2.639504627)),
    ):
        found = [statistics.student_quantile(share, freedom) for share in (0.95, 0.975, 0.995)]
        assert found[:2] == pytest.approx(exact[:2], rel=off) and found[2] == pytest.approx(
            exact[2], rel=10 * off
        )


def test_perplexity_is_compared_on_its_own_scale() -> None:
    random = np.random.default_rng(1)
    sizes = documents(random, 40)
    losses = [
        Metric("p", tuple(sizes * (x + 0.1 * random.standard_normal(40))), tuple(sizes), False, "")
        for x in (3.0, 3.1)
    ]
    shown = [Metric(one.name, one.sums, one.sizes, False, "", shown="exp") for one in losses]
    assert shown[0].value == pytest.approx(math.exp(losses[0].value))
    plain, found = statistics.interval(losses[0], RULE), statistics.interval(shown[0], RULE)
    assert found == pytest.approx(tuple(map(math.exp, plain or ())))
    compared, on_losses = statistics.compare(*shown, RULE), statistics.compare(*losses, RULE)
    assert compared.difference == pytest.approx(shown[0].value - shown[1].value)
    assert (
        compared.interval is not None
        and compared.interval[0] < compared.difference < compared.interval[1] < 0
    )
    assert compared.p == on_losses.p
    assert compared.smallest == pytest.approx((on_losses.smallest or 0) * math.exp(3.05), rel=0.1)


def test_items_that_do_not_count_change_nothing() -> None:
    random = np.random.default_rng(4)
    sizes = documents(random, 30)
    sums = sizes * random.random(30)
    more = bits(np.append(sums, [0.0, 7.0]), np.append(sizes, [0.0, 0.0]))
    assert statistics.interval(more, RULE) == statistics.interval(bits(sums, sizes), RULE)
    assert statistics.compare(more, more, RULE).items == 30


def test_too_few_items_or_no_number_have_no_interval() -> None:
    few = accuracy(np.array([1, 0, 1, 1]))
    assert statistics.interval(few, RULE) is None and statistics.smallest(few) is None
    assert statistics.compare(few, few, RULE).interval is None
    endless = bits(np.array([1.0, math.inf, 1, 1, 1, 1]), np.ones(6) * 3)
    assert statistics.interval(endless, RULE) is None
    endless_twice = statistics.compare(endless, endless, RULE)
    assert math.isnan(endless_twice.p) and endless_twice.better == "", (
        "nobody is better by no number"
    )
    assert math.isnan(accuracy(np.array([])).value)


def test_figures_of_two_tokenizers_are_not_comparable_by_token() -> None:
    ours, theirs = bits(np.ones(9), np.full(9, 3.0)), bits(np.ones(9), np.full(9, 4.0))
    assert statistics.comparable(ours, ours) and not statistics.comparable(ours, theirs)
    with pytest.raises(AssertionError, match="does not count the items as"):
        statistics.compare(ours, theirs, RULE)


def test_holms_values_are_those_of_the_book() -> None:
    """Four comparisons: the smallest times four, the next times three, never below the one before."""
    assert statistics.holm([0.01, 0.04, math.nan, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True
    )
    assert statistics.holm([0.5, 0.6]) == [1.0, 1.0]


def test_two_thousand_resamples_of_ten_thousand_items_take_less_than_a_second() -> None:
    random = np.random.default_rng(1)
    figure = bits(random.random(10_000), documents(random, 10_000))
    began = time.process_time()
    statistics.interval(figure, Rule(resamples=2000))
    assert time.process_time() - began < 1.0
