"""Confidence: intervals cover as often as they say, tests are as wrong as they say, and power is
what is promised."""

import itertools
import math
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from ttrain.evaluate import statistics
from ttrain.evaluate.statistics import PairedComparison, Rule
from ttrain.evaluate.task_result import LN2, Metric

RULE = Rule(resamples=400)
NOWHERE = (2.0, 2.0)  # an interval that covers no share

Draw = Callable[[np.random.Generator], Metric]


def accuracy(right: np.ndarray) -> Metric:
    sums = tuple(map(float, right))
    return Metric("accuracy", sums, (1.0,) * len(sums), higher_is_better=True)


def bits(sums: np.ndarray, sizes: np.ndarray) -> Metric:
    return Metric("bits_per_byte", tuple(sums), tuple(sizes), False, "bits", factor=1 / LN2)


def share_of(right: np.ndarray, sizes: np.ndarray) -> Metric:
    """The share of the parts of items that have so many of them."""
    return Metric("ended", tuple(right), tuple(sizes), higher_is_better=True, unit="share")


def documents(random: np.random.Generator, count: int) -> np.ndarray:
    return np.exp(random.normal(6, 0.7, count)).round()


def texts(count: int) -> Draw:
    def draw(random: np.random.Generator) -> Metric:
        sizes = documents(random, count)
        return bits(sizes * (2 + 0.5 * random.standard_normal(count)), sizes)

    return draw


def shares_of_parts(share: float, alike: float, items: int, parts: int | None) -> Draw:
    """Items of so many parts (None: a few have most) with the correlation `alike`, as the answers
    of one chat."""

    def draw(random: np.random.Generator) -> Metric:
        uneven = np.maximum(1, np.exp(random.normal(1.5, 1, items)).round())
        sizes = np.full(items, float(parts)) if parts else uneven
        of_item = random.beta(share * (1 / alike - 1), (1 - share) * (1 / alike - 1), items)
        return share_of(random.binomial(sizes.astype(int), of_item) * 1.0, sizes)

    return draw


@pytest.mark.parametrize(
    ("draw", "truth", "least"),
    [
        (texts(10), 2 / LN2, 0.90),  # plain percentiles reach 0.88
        # The bootstrap reaches 0.37, 0.75 and 0.97.
        (shares_of_parts(0.02, 0.9, 20, 2), 0.02, 0.92),
        (shares_of_parts(0.02, 0.3, 30, 8), 0.02, 0.92),
        (shares_of_parts(0.5, 0.3, 20, 2), 0.5, 0.92),
        # 0.81 if each item counted as much as any other
        (shares_of_parts(0.5, 0.9, 20, None), 0.5, 0.90),
        (shares_of_parts(0.5, 0.02, 20, None), 0.5, 0.90),
        (shares_of_parts(0.02, 0.3, 20, None), 0.02, 0.90),
    ],
)
def test_intervals_cover_the_truth_about_as_often_as_they_say(
    draw: Draw, truth: float, least: float
) -> None:
    """The standard error of a share of 95 % over 400 is 1.1 %."""
    random = np.random.default_rng(7)
    covered = 0
    for seed in range(400):
        ends = statistics.interval(draw(random), Rule(resamples=400, seed=seed))
        low, high = ends or (math.nan, math.nan)
        covered += low <= truth <= high
    assert least <= covered / 400 <= 0.98


@pytest.mark.parametrize(
    ("share", "count"), [(0.02, 20), (0.02, 100), (0.1, 50), (0.5, 20), (0.9, 20), (0.7, 300)]
)
def test_intervals_of_accuracies_cover_the_truth_about_as_often_as_they_say(
    share: float, count: int
) -> None:
    covered = 0
    draws = np.random.default_rng(3).binomial(count, share, 1000)
    for right, times in zip(*np.unique(draws, return_counts=True), strict=True):
        low, high = statistics.interval(accuracy(np.arange(count) < right), RULE) or NOWHERE
        covered += times * (low <= share <= high)
    assert 0.91 <= covered / 1000 <= 0.99


def test_a_share_that_all_parts_agree_on_has_at_least_the_interval_of_its_items() -> None:
    def ends(metric: Metric) -> tuple[float, float]:
        return statistics.interval(metric, RULE) or NOWHERE

    none = np.zeros(20)
    two, three = (ends(share_of(none, np.full(20, parts))) for parts in (2.0, 3.0))
    of_items = ends(accuracy(none))
    assert two == three
    assert of_items[1] < three[1] < 1.2 * of_items[1]
    one_has_most = ends(share_of(none, np.array([100.0] + [1.0] * 19)))
    assert one_has_most[1] > 0.5, "a single item shows little"


@pytest.mark.parametrize(
    ("loses", "wins", "count"), [(0.05, 0.1, 20), (0.02, 0.02, 50), (0.1, 0.2, 100)]
)
def test_intervals_of_a_difference_of_accuracies_cover_it_about_as_often_as_they_say(
    loses: float, wins: float, count: int
) -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        kind = random.choice(3, size=count, p=[wins, loses, 1 - wins - loses])
        comparison = statistics.compare(accuracy(kind != 1), accuracy(kind != 0), RULE)
        low, high = comparison.interval or NOWHERE
        covered += low <= wins - loses <= high
    assert covered / 400 >= 0.92


def test_the_interval_of_a_difference_covers_it_and_the_test_rejects_no_more_than_it_says() -> None:
    random = np.random.default_rng(11)
    comparisons = []
    for seed in range(400):
        sizes = documents(random, 20)
        hard = sizes * (2 + 0.5 * random.standard_normal(20))
        sides = [bits(hard + 0.05 * sizes * random.standard_normal(20), sizes) for _ in range(2)]
        comparisons.append(statistics.compare(*sides, Rule(resamples=400, seed=seed)))
    ends = [comparison.interval or NOWHERE for comparison in comparisons]
    assert 0.91 <= np.mean([low <= 0 <= high for low, high in ends]) <= 0.98
    assert np.mean([low > 0 for low, _ in ends]) <= 0.055, "promoted though none is better"
    assert 0.02 <= np.mean([comparison.p <= 0.05 for comparison in comparisons]) <= 0.08


def test_the_smallest_difference_is_detected_in_about_four_cases_of_five() -> None:
    random = np.random.default_rng(2)
    detected = 0
    promised: list[float] = []
    for seed in range(200):
        sizes = documents(random, 60)
        hard = sizes * (2 + 0.5 * random.standard_normal(60))
        noisy = hard + 0.1 * sizes * random.standard_normal(60)

        def against_hard(sums: np.ndarray, sizes=sizes, hard=hard, seed=seed) -> PairedComparison:
            rule = Rule(resamples=250, seed=seed)
            return statistics.compare(bits(sums, sizes), bits(hard, sizes), rule)

        promised.append(against_hard(noisy).smallest or 0)
        better = against_hard(noisy - np.mean(promised) * LN2 * sizes)
        detected += better.interval is not None and better.interval[1] < 0
    assert 0.7 <= detected / 200 <= 0.9


def test_one_model_alone_promises_what_an_independent_one_would_need() -> None:
    """Two accuracies of 0.5 on 100 items: 2.8 * sqrt(2 * 0.25 / 99)."""
    half = accuracy(np.arange(100) < 50)
    smallest = statistics.smallest(half)
    assert smallest == pytest.approx((1.959964 + 0.841621) * math.sqrt(2 * 0.25 / 99), rel=1e-4)
    pairs = statistics.compare(half, accuracy(np.arange(100) < 45), RULE)
    assert (pairs.smallest or 1) < smallest / 2


def test_one_of_many_comparisons_needs_more_and_a_less_sure_rule_less() -> None:
    """Of normal errors, (2.8070 + 0.8416) / (1.9600 + 0.8416) as much for one of ten."""
    random = np.random.default_rng(8)
    models = [bits(2 + random.standard_normal(400), np.ones(400)) for _ in range(2)]

    def smallest(rule: Rule = RULE, among: int = 1) -> float:
        return statistics.compare(*models, rule, among=among).smallest or 0

    assert smallest(among=10) / smallest() == pytest.approx(3.6487 / 2.8016, rel=1e-4)
    unsure = smallest(Rule(confidence=0.8, resamples=400))
    assert unsure / smallest() == pytest.approx((1.2816 + 0.8416) / 2.8016, rel=1e-4)
    same = accuracy(np.arange(50) < 20)
    # 2 / 2^9 is the first below 0.005
    assert statistics.compare(same, same, RULE, among=10).smallest == 9 / 50


def test_models_that_agree_on_every_item_have_an_interval_with_a_width() -> None:
    same = accuracy(np.arange(50) < 20)
    comparison = statistics.compare(same, same, RULE)
    assert comparison.interval is not None
    assert comparison.interval[0] < 0 < comparison.interval[1]
    values = (comparison.difference, comparison.better, comparison.p, comparison.smallest)
    assert values == (0.0, "", 1.0, 6 / 50)
    low, high = statistics.interval(accuracy(np.ones(50)), RULE) or NOWHERE
    assert (round(low, 3), high) == (0.929, 1.0)


@pytest.mark.parametrize(
    ("wins", "losses"), [(0, 0), (5, 0), (6, 0), (3, 9), (40, 60), (400, 460), (5000, 5300)]
)
def test_the_sign_test_is_the_exact_one(wins: int, losses: int) -> None:
    tail = sum(math.comb(wins + losses, k) for k in range(min(wins, losses) + 1))
    exact = min(1.0, float(Fraction(2 * tail, 2 ** (wins + losses))))
    assert statistics.sign_test(wins, losses) == pytest.approx(exact, rel=1e-9)


def test_randomisation_counts_the_arrangements_that_differ_as_much() -> None:
    """Eight items: all 256 arrangements of the signs can be listed."""
    differences = np.array([0.5, 0.25, 0.75, -0.125, 0.5, 0.25, 0.0, 1.0])
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    exact = np.mean(abs(signs @ differences) >= abs(differences.sum()))
    sizes = np.full(8, 3.0)
    sides = (bits(differences + 2, sizes), bits(np.full(8, 2.0), sizes))
    comparison = statistics.compare(*sides, Rule(resamples=20000))
    assert comparison.p == pytest.approx(exact, abs=0.01)


def test_the_bootstrap_is_what_single_draws_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, as for many items, and in one; by a naive loop over the draws, too."""
    random = np.random.default_rng(3)
    sums = random.standard_normal(30)
    sizes = random.integers(1, 9, 30).astype(float)
    draw = np.random.default_rng(5)
    ratios = []
    for _ in range(200):
        chosen = draw.integers(30, size=30)
        ratios.append(sums[chosen].sum() / sizes[chosen].sum())
    for chunk in (statistics.CHUNK, 90):  # 90: three draws of thirty at a time
        monkeypatch.setattr(statistics, "CHUNK", chunk)
        (drawn,) = statistics.bootstrap_ratios([sums], sizes, Rule(resamples=200, seed=5))
        np.testing.assert_allclose(drawn, ratios)


@pytest.mark.parametrize(
    ("freedom", "error", "exact"),
    [
        (4, 4e-3, (2.131846786, 2.776445105, 4.604094871)),
        (9, 4e-4, (1.833112933, 2.262157163, 3.249835542)),
        (79, 1e-6, (1.664371409, 1.990450210, 2.639504627)),
    ],
)
def test_the_quantile_of_students_t_is_near_the_exact_one(
    freedom: int, error: float, exact: tuple[float, ...]
) -> None:
    for share, quantile, factor in zip((0.95, 0.975, 0.995), exact, (1, 1, 10), strict=True):
        approximate = statistics.student_quantile(share, freedom)
        assert approximate == pytest.approx(quantile, rel=factor * error)


def test_perplexity_is_compared_on_its_own_scale() -> None:
    random = np.random.default_rng(1)
    sizes = documents(random, 40)

    def metric(loss: float, shown: str | None, noise: np.ndarray) -> Metric:
        return Metric("p", tuple(sizes * (loss + noise)), tuple(sizes), False, shown=shown)  # type: ignore[arg-type]

    noise = [0.1 * random.standard_normal(40) for _ in range(2)]
    losses, perplexities = (
        [metric(3.0, shown, noise[0]), metric(3.1, shown, noise[1])] for shown in (None, "exp")
    )
    assert perplexities[0].value == pytest.approx(math.exp(losses[0].value))
    plain = statistics.interval(losses[0], RULE) or NOWHERE
    assert statistics.interval(perplexities[0], RULE) == pytest.approx(tuple(map(math.exp, plain)))
    compared = statistics.compare(*perplexities, RULE)
    on_losses = statistics.compare(*losses, RULE)
    assert compared.difference == pytest.approx(perplexities[0].value - perplexities[1].value)
    assert compared.interval is not None
    assert compared.interval[0] < compared.difference < compared.interval[1] < 0
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
    assert statistics.interval(few, RULE) is None
    assert statistics.smallest(few) is None
    assert statistics.compare(few, few, RULE).interval is None
    endless = bits(np.array([1.0, math.inf, 1, 1, 1, 1]), np.ones(6) * 3)
    assert statistics.interval(endless, RULE) is None
    comparison = statistics.compare(endless, endless, RULE)
    assert (math.isnan(comparison.p), comparison.better) == (True, "")
    assert math.isnan(accuracy(np.array([])).value)


def test_metrics_of_two_tokenizers_are_not_comparable_by_token() -> None:
    ours, theirs = (bits(np.ones(9), np.full(9, size)) for size in (3.0, 4.0))
    assert statistics.comparable(ours, ours)
    assert not statistics.comparable(ours, theirs)
    with pytest.raises(AssertionError, match="items"):
        statistics.compare(ours, theirs, RULE)


def test_holms_values_are_those_of_the_book() -> None:
    """Four comparisons: the smallest times four, the next times three, never below the one
    before."""
    values = statistics.holm([0.01, 0.04, math.nan, 0.03, 0.005])
    assert values == pytest.approx([0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True)
    assert statistics.holm([0.5, 0.6]) == [1.0, 1.0]


def test_two_thousand_resamples_of_ten_thousand_items_take_less_than_a_second() -> None:
    random = np.random.default_rng(1)
    metric = bits(random.random(10_000), documents(random, 10_000))
    began = time.process_time()
    statistics.interval(metric, Rule(resamples=2000))
    assert time.process_time() - began < 1.0


def test_means_of_few_seeds_are_judged_as_scipy_judges_them() -> None:
    differences = [0.1, 0.3, -0.05, 0.2]
    theirs = stats.ttest_1samp(differences, 0.0)
    interval = theirs.confidence_interval(0.9)
    assert statistics.t_test(differences) == pytest.approx(theirs.pvalue)
    assert statistics.t_interval(differences, 0.1) == pytest.approx((interval.low, interval.high))


def test_percentiles_of_few_documents_are_widened() -> None:
    """By the quantile of Student's t of n - 1 and the square root of n / (n - 1)."""
    sizes = np.ones(5)
    sums = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    rule = Rule(resamples=2000, seed=2)
    (drawn,) = statistics.bootstrap_ratios([sums], sizes, rule)
    tail = stats.norm.cdf(-math.sqrt(5 / 4) * stats.t.ppf(0.975, 4))
    expected = np.quantile(drawn / LN2, (tail, 1 - tail))
    assert statistics.interval(bits(sums, sizes), rule) == pytest.approx(tuple(expected))
