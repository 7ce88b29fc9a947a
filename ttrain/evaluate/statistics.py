"""Confidence intervals of metrics, paired comparisons of models, minimum detectable differences.

Loads only numpy and scipy.
"""

# Items are resampled and assumed to be independent, unlike the tokens of one document. Two models
# are compared on the same items, so that an item's difficulty for both cancels out. Letters in
# names: N items, R resamples.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ttrain.evaluate.task_result import Metric

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

FEWEST_ITEMS = 5  # with fewer, an interval would depend more on its method than on the model

POWER = 0.8

NORMAL = NormalDist()
CHUNK = 1 << 18  # drawn item numbers in memory at once


@dataclass(frozen=True)
class Rule:
    """Confidence level, and the number and seed of resamples."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 1


@dataclass(frozen=True)
class PairedComparison:
    """The first model compared with the second on the same items, in the displayed unit.

    better    "first" or "second"; "" if they are equal
    interval  of the difference, first - second; None below FEWEST_ITEMS
    p         two-sided, that the two are equally good
    smallest  minimum detectable difference
    """

    difference: float
    better: str
    interval: Interval | None
    p: float
    smallest: float | None
    items: int


def interval(figure: Metric, rule: Rule) -> Interval | None:
    """Confidence interval of the metric for other items of the same kind; None of too few items.

    Shares: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.
    Items of several parts: https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503.
    Everything else: bootstrap, Efron 1979, https://doi.org/10.1214/aos/1176344552.
    """
    # The bootstrap covers a share of 2 % on 20 items in 34 of 100 cases instead of 95, Wilson's in
    # 94. Items with several parts, as chats with answers, count as their number of independent
    # parts: of 2 % of answers in 20 to 60 chats that covers 94 to 98 of 100 cases, the bootstrap 37
    # to 96.
    sums, sizes = _counting(figure)
    if len(sums) < FEWEST_ITEMS or not math.isfinite(figure.value):
        return None
    if _are_counts(sums, sizes):
        low, high = _wilson(
            float(sums.sum() / sizes.sum()),
            _independent(sums, sizes, rule.confidence),
            rule.confidence,
        )
        low, high = figure.factor * low, figure.factor * high
    else:
        if not rule.resamples:
            return None
        drawn = figure.factor * bootstrap_ratios([sums], sizes, rule)[0]
        low, high = _percentiles(drawn, len(sums), rule.confidence)
    return figure.transform(low), figure.transform(high)


def comparable(first: Metric, second: Metric) -> bool:
    """Whether both metrics count the items alike, unlike nats per token of two tokenizers."""
    return (
        first.sizes == second.sizes
        and first.factor == second.factor
        and first.shown == second.shown
    )


def compare(first: Metric, second: Metric, rule: Rule, *, among: int = 1) -> PairedComparison:
    """Compare two `comparable` metrics. `among`: all comparisons, which correct `smallest`."""
    assert comparable(first, second), f"{first.name} does not count the items as {second.name} does"
    difference = first.value - second.value + 0.0  # avoids -0.0
    advantage = difference if first.higher_is_better else -difference
    better = "first" if advantage > 0 else ""  # for NaN, too
    if advantage < 0:
        better = "second"
    ours, sizes = _counting(first)
    theirs, _ = _counting(second)
    count = len(sizes)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()) or not count:
        return PairedComparison(difference, better, None, math.nan, None, count)
    if _is_share(ours, sizes) and _is_share(theirs, sizes):
        p = sign_test(int((ours > theirs).sum()), int((theirs > ours).sum()))
    else:
        p = randomised(ours - theirs, rule.resamples, rule.seed)
    ends = (
        _interval_of_difference(first, ours, theirs, sizes, rule) if count >= FEWEST_ITEMS else None
    )
    return PairedComparison(
        difference,
        better,
        ends,
        p,
        smallest(first, second, level=(1 - rule.confidence) / among),
        count,
    )


def smallest(first: Metric, second: Metric | None = None, *, level: float = 0.05) -> float | None:
    """Minimum detectable difference of a test at `level` with probability POWER, or None.

    Card et al. 2020, https://aclanthology.org/2020.emnlp-main.745. For one model alone, against an
    independent one that is as good.
    """
    sums, sizes = _counting(first)
    count = len(sums)
    if count < FEWEST_ITEMS or not math.isfinite(first.value):
        return None
    spread = _influence(first, sums, sizes)
    if second is None:
        error = math.sqrt(2) * _standard_error(spread)
    else:
        error = _standard_error(spread - _influence(second, _counting(second)[0], sizes))
    difference = (NORMAL.inv_cdf(1 - level / 2) + NORMAL.inv_cdf(POWER)) * error
    if _are_counts(
        sums, sizes
    ):  # the sign test needs so many items, all for one model: 2 / 2^6 is 0.03, 2 / 2^5 is 0.06
        return max(
            difference, abs(first.factor) * min(1.0, math.ceil(math.log2(2 / level)) / count)
        )
    return difference


def _interval_of_difference(
    first: Metric, ours: Floats, theirs: Floats, sizes: Floats, rule: Rule
) -> Interval | None:
    # Shares: Agresti and Min 2005, https://doi.org/10.1002/sim.1781, which has a width even if the
    # models agree on every item. Else the paired bootstrap, Koehn 2004,
    # https://aclanthology.org/W04-3250.
    if _is_share(ours, sizes) and _is_share(theirs, sizes):
        count = len(sizes) + 2
        wins = (ours > theirs).sum() + 0.5
        losses = (theirs > ours).sum() + 0.5
        middle = float(wins - losses) / count
        error = math.sqrt(wins + losses - (wins - losses) ** 2 / count) / count
        reach = NORMAL.inv_cdf((1 + rule.confidence) / 2) * error
        return first.factor * (middle - reach), first.factor * (middle + reach)
    if not rule.resamples:
        return None
    drawn = first.factor * bootstrap_ratios([ours, theirs], sizes, rule)
    ours_drawn, theirs_drawn = np.exp(drawn) if first.shown == "exp" else drawn
    return _percentiles(ours_drawn - theirs_drawn, len(sizes), rule.confidence)


def bootstrap_ratios(sums: Sequence[Floats], sizes: Floats, rule: Rule) -> Floats:
    """R quotients of items drawn with replacement, for each of the sums [N]; the same draws."""
    random = np.random.default_rng(rule.seed)
    count = len(sizes)
    ratios: list[Floats] = []
    for start in range(0, rule.resamples, rows := max(1, CHUNK // count)):
        drawn_RN = random.integers(count, size=(min(rows, rule.resamples - start), count))
        totals = np.array([item_sums.take(drawn_RN).sum(1) for item_sums in sums])
        ratios.append(totals / sizes.take(drawn_RN).sum(1))
    return np.concatenate(ratios, axis=1)


def _percentiles(drawn: Floats, count: int, confidence: float) -> Interval:
    # Widened as Student's t is beyond the normal: plain ones cover 0.88 instead of 0.95 on ten
    # documents, these 0.92 (Hesterberg 2015, https://arxiv.org/abs/1411.5279, section 4.4).
    tail = NORMAL.cdf(
        -math.sqrt(count / (count - 1)) * student_quantile((1 + confidence) / 2, count - 1)
    )
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def student_quantile(share: float, freedom: float) -> float:
    """Quantile of Student's t."""
    from scipy import (
        special,
    )  # here, since the process that forks the stages loads this module, but no scipy

    return float(special.stdtrit(freedom, share))


def t_interval(differences: Sequence[float], level: float = 0.05) -> Interval | None:
    """Interval of the mean of independent differences by Student's t; None of fewer than two."""
    count = len(differences)
    if count < 2:
        return None
    mean = np.mean(differences)
    quantile = student_quantile(1 - level / 2, count - 1)
    reach = quantile * (np.std(differences, ddof=1) / math.sqrt(count))
    return float(mean - reach), float(mean + reach)


def t_test(differences: Sequence[float]) -> float:
    """Two-sided p that the mean of independent differences is 0, by Student's t.

    NaN of fewer than two, or where all are the same, as they can be of counts.
    """
    from scipy import special

    count = len(differences)
    if count < 2:
        return math.nan
    mean = float(np.mean(differences))
    error = float(np.std(differences, ddof=1)) / math.sqrt(count)
    return 2 * float(special.stdtr(count - 1, -abs(mean) / error)) if error else math.nan


def _influence(figure: Metric, sums: Floats, sizes: Floats) -> Floats:
    # Of each item on the metric, times N: the variance of a quotient by linearisation.
    ratio = float(sums.sum() / sizes.sum())
    slope = figure.factor * (figure.value if figure.shown == "exp" else 1.0)
    return slope * (sums - ratio * sizes) * (len(sums) / float(sizes.sum()))


def _standard_error(spread: Floats) -> float:
    count = len(spread)
    return math.sqrt(float((spread**2).sum()) / (count - 1) / count)


def _independent(sums: Floats, sizes: Floats, confidence: float) -> float:
    # Effective number of independent parts: all of them if the parts of an item are uncorrelated;
    # if they are all alike, the number of items, or fewer if some have most of the parts (Kish
    # 1965). With log-normal lengths (sigma 1) the number of items instead covers 81 of 100 cases at
    # a share of a half and a correlation of 0.9, Kish's 88, with Student's t 93.
    parts = float(sizes.sum())
    if parts == len(sums):
        return parts
    share = float(sums.sum()) / parts
    error = _standard_error((sums - share * sizes) * (len(sums) / parts))
    least = parts**2 / float((sizes**2).sum())
    count = min(parts, max(least, share * (1 - share) / error**2)) if error else least
    return (
        count
        * (
            NORMAL.inv_cdf((1 + confidence) / 2)
            / student_quantile((1 + confidence) / 2, max(4, least - 1))
        )
        ** 2
    )


def _wilson(share: float, count: float, confidence: float) -> Interval:
    z = NORMAL.inv_cdf((1 + confidence) / 2)
    weight = z * z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _counting(figure: Metric) -> tuple[Floats, Floats]:
    # (sums, sizes) of the items with a size above 0.
    sizes = np.array(figure.sizes, np.float64)
    return np.array(figure.sums, np.float64)[sizes > 0], sizes[sizes > 0]


def _are_counts(sums: Floats, sizes: Floats) -> bool:
    # Whether each item counts a property of its parts, such as the answers that end.
    whole = (sums == np.round(sums)) & (sizes == np.round(sizes))
    return bool((whole & (sums >= 0) & (sums <= sizes)).all())


def _is_share(sums: Floats, sizes: Floats) -> bool:
    return bool((sizes == 1).all() and np.isin(sums, (0.0, 1.0)).all())


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of the exact McNemar test; items on which both agree do not count."""
    # It holds its level for two classifiers on one test set (Dietterich 1998,
    # https://doi.org/10.1162/089976698300017197).
    from scipy import special

    return min(1.0, 2 * float(special.bdtr(min(wins, losses), wins + losses, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons (Holm 1979, https://www.jstor.org/stable/4615733).

    NaNs stay NaN and do not count.
    """
    ordered = sorted((p, number) for number, p in enumerate(p_values) if not math.isnan(p))
    corrected = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, number) in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - rank) * p))
        corrected[number] = highest
    return corrected


def randomised(differences_N: Floats, resamples: int, seed: int) -> float:
    """Two-sided p of the summed difference under random exchange of each item's two scores.

    Approximate randomisation: Noreen 1989; Yeh 2000, https://aclanthology.org/C00-2137. Never below
    1 / (resamples + 1).
    """
    if not resamples:
        return math.nan
    random = np.random.default_rng(seed)
    count = len(differences_N)
    observed = abs(float(differences_N.sum()))
    reached = 0
    for start in range(0, resamples, rows := max(1, CHUNK // count)):
        rows = min(rows, resamples - start)
        signs_RN = 1.0 - 2.0 * random.integers(2, size=(rows, count), dtype=np.int8)
        reached += int((np.abs(signs_RN @ differences_N) >= observed * (1 - 1e-12)).sum())
    return (1 + reached) / (1 + resamples)
