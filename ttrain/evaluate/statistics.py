"""How sure a figure is, and whether two models differ: intervals, comparisons, the smallest difference that can be seen.

Items (documents, chats, questions) are what is resampled: tokens of one document are not independent, items are taken to be.
Two models are compared on the same items, so that what makes an item hard for both falls out. Letters: N items, R
resamples. Loads numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrain.evaluate import p_values
from ttrain.evaluate.p_values import CHUNK
from ttrain.evaluate.task_result import Figure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FEWEST_ITEMS = 5  # below, an interval would say more about its method than about the model
POWER = 0.8
NORMAL = NormalDist()


@dataclass(frozen=True)
class Rule:
    """How sure to be, and how much work to put into it."""

    confidence: float = 0.95
    resamples: int = 2000
    seed: int = 1


@dataclass(frozen=True)
class Comparison:
    """The first model against the second on the same items, in the unit that is shown; `difference` is first - second.

    better    "first" or "second", whichever has the better figure; "" where they are equal
    interval  of the difference; None below FEWEST_ITEMS
    p         two-sided, of the hypothesis that the two are equally good
    smallest  the difference that items like these show in POWER of all cases, each of the comparisons that there are
    items     pairs
    """

    difference: float
    better: str
    interval: tuple[float, float] | None
    p: float
    smallest: float | None
    items: int

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)


def interval(figure: Figure, rule: Rule) -> tuple[float, float] | None:
    """Where the figure would lie for other items of the same kind; None where it is no number or the items are too few.

    Shares of items that are right: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953. The bootstrap has no width
    where all are right or all wrong, and covers a share of 2 % on 20 items in 34 of 100 cases instead of 95; Wilson's in 94.
    Of items with several parts each, as chats with answers, so many count as are worth independent ones (Wilson's form with
    the effective sample size of https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503, which is less by Student's t where it is
    known from few items): of 2 % of answers in 20 to 60 chats it covers 94 to 98 of 100 cases, the bootstrap 37 to 96.
    Everything else: bootstrap (Efron 1979, https://doi.org/10.1214/aos/1176344552).
    """
    sums, sizes = _counting(figure)
    if len(sums) < FEWEST_ITEMS or not math.isfinite(figure.value):
        return None
    if _are_counts(sums, sizes):
        share = float(sums.sum() / sizes.sum())
        low, high = _wilson(share, _independent(sums, sizes, rule.confidence), rule.confidence)
        low, high = figure.factor * low, figure.factor * high
    else:
        if not rule.resamples:
            return None
        drawn = figure.factor * _ratios([sums], sizes, rule)[0]
        low, high = _percentiles(drawn, len(sums), rule.confidence)
    return figure.transform(low), figure.transform(high)


def comparable(first: Figure, second: Figure) -> bool:
    """Whether both count the same items alike: nats per token are not comparable between two tokenizers, nats per byte
    are."""
    return first.sizes == second.sizes and first.factor == second.factor and first.shown == second.shown


def compare(first: Figure, second: Figure, rule: Rule, *, among: int = 1) -> Comparison:
    """The paired comparison of two models' figures over the same items, which must be `comparable`; one `among` so many that
    are to be right at once, which needs a larger difference."""
    assert comparable(first, second), f"{first.name} does not count the items as {second.name} does"
    difference = first.value - second.value + 0.0  # no minus before a zero
    sign = 1 if first.higher_is_better else -1
    better = "first" if sign * difference > 0 else "second" if sign * difference < 0 else ""  # "": no number, too
    (ours, sizes), (theirs, _) = _counting(first), _counting(second)
    count = len(sizes)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()) or not count:
        return Comparison(difference, better, None, math.nan, None, count)
    if _is_share(ours, sizes) and _is_share(theirs, sizes):
        p = p_values.sign_test(int((ours > theirs).sum()), int((theirs > ours).sum()))
    else:
        p = p_values.randomised(ours - theirs, rule.resamples, rule.seed)
    if count < FEWEST_ITEMS:
        return Comparison(difference, better, None, p, None, count)
    needed = smallest(first, second, level=(1 - rule.confidence) / among)
    return Comparison(difference, better, _interval_of_difference(first, second, rule), p, needed, count)


def smallest(first: Figure, second: Figure | None = None, *, level: float = 0.05) -> float | None:
    """The true difference that these items show with a probability of POWER to a test that is wrong in `level` of all cases
    (Card et al. 2020, "With Little Power Comes Great Responsibility", https://aclanthology.org/2020.emnlp-main.745).

    From the spread of the paired differences; with one model alone, for another that is as good and independent of it: pairs
    that agree show smaller ones. None where there are too few items to tell.
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
    found = (NORMAL.inv_cdf(1 - level / 2) + NORMAL.inv_cdf(POWER)) * error
    if _are_counts(sums, sizes):  # the sign test needs so many items, all for one model: 2 / 2^6 is 0.03, 2 / 2^5 is 0.06
        return max(found, abs(first.factor) * min(1.0, math.ceil(math.log2(2 / level)) / count))
    return found


def _interval_of_difference(first: Figure, second: Figure, rule: Rule) -> tuple[float, float] | None:
    """Shares: Agresti and Min 2005, https://doi.org/10.1002/sim.1781, which has a width also where the models agree on every
    item. Else the paired bootstrap, Koehn 2004, https://aclanthology.org/W04-3250: both models' sums of each drawn item."""
    (ours, sizes), (theirs, _) = _counting(first), _counting(second)
    if _is_share(ours, sizes) and _is_share(theirs, sizes):
        count, wins, losses = len(sizes) + 2, (ours > theirs).sum() + 0.5, (theirs > ours).sum() + 0.5
        middle = float(wins - losses) / count
        error = math.sqrt(wins + losses - (wins - losses) ** 2 / count) / count
        reach = NORMAL.inv_cdf((1 + rule.confidence) / 2) * error
        return first.factor * (middle - reach), first.factor * (middle + reach)
    if not rule.resamples:
        return None
    one, other = (first.factor * drawn for drawn in _ratios([ours, theirs], sizes, rule))
    drawn = np.exp(one) - np.exp(other) if first.shown == "exp" else one - other
    return _percentiles(drawn, len(sizes), rule.confidence)


def _ratios(sums: Sequence[Floats], sizes: Floats, rule: Rule) -> list[Floats]:
    """For each of the sums [N] its R quotients `sum(sums) / sum(sizes)` of items drawn anew with replacement; all of the
    same draws."""
    random, count = np.random.default_rng(rule.seed), len(sizes)
    found: list[list[Floats]] = [[] for _ in sums]
    for start in range(0, rule.resamples, rows := max(1, CHUNK // count)):
        drawn_RN = random.integers(count, size=(min(rows, rule.resamples - start), count))
        totals_R = sizes.take(drawn_RN).sum(1)
        for quotients, one in zip(found, sums, strict=True):
            quotients.append(one.take(drawn_RN).sum(1) / totals_R)
    return [np.concatenate(quotients) for quotients in found]


def _percentiles(drawn: Floats, count: int, confidence: float) -> tuple[float, float]:
    """Percentiles that lie as far out as Student's t does beyond the normal: plain ones are too short on few items, 0.88
    instead of 0.95 on ten documents, these 0.92 (Hesterberg 2015, https://arxiv.org/abs/1411.5279, section 4.4)."""
    tail = NORMAL.cdf(-math.sqrt(count / (count - 1)) * _student((1 + confidence) / 2, count - 1))
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def _student(share: float, freedom: float) -> float:
    """Quantile of Student's t by its expansion in 1/freedom (Abramowitz and Stegun 26.7.5): 0.3 % off at 4, less beyond."""
    z = NORMAL.inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _influence(figure: Figure, sums: Floats, sizes: Floats) -> Floats:
    """How far each item moves the figure, times N: the variance of a quotient by linearisation."""
    ratio = float(sums.sum() / sizes.sum())
    slope = figure.factor * (figure.value if figure.shown == "exp" else 1.0)
    return slope * (sums - ratio * sizes) * (len(sums) / float(sizes.sum()))


def _standard_error(spread: Floats) -> float:
    count = len(spread)
    return math.sqrt(float((spread**2).sum()) / (count - 1) / count)


def _independent(sums: Floats, sizes: Floats, confidence: float) -> float:
    """How many independent parts tell as much as those of these items: all of them where the parts of an item have nothing
    in common; where they are all alike as many as there are items, or fewer where some have most of the parts (Kish 1965).

    With lengths like those of texts (log-normal, sigma 1) the number of items instead of Kish's covers 81 of 100 cases at a
    share of a half and a correlation of 0.9, Kish's 88, with Student's t of as many 93.
    """
    items, parts = len(sums), float(sizes.sum())
    if parts == items:
        return parts
    share = float(sums.sum()) / parts
    error = _standard_error((sums - share * sizes) * (items / parts))
    least = parts**2 / float((sizes**2).sum())
    found = min(parts, max(least, share * (1 - share) / error**2)) if error else least
    return found * (NORMAL.inv_cdf((1 + confidence) / 2) / _student((1 + confidence) / 2, max(4, least - 1))) ** 2


def _wilson(share: float, count: float, confidence: float) -> tuple[float, float]:
    z = NORMAL.inv_cdf((1 + confidence) / 2)
    weight = z * z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _counting(figure: Figure) -> tuple[Floats, Floats]:
    """(sums, sizes) of the items that count."""
    sums, sizes = np.array(figure.sums, np.float64), np.array(figure.sizes, np.float64)
    return sums[sizes > 0], sizes[sizes > 0]


def _are_counts(sums: Floats, sizes: Floats) -> bool:
    """Whether each item says how many of its parts are so: of its answers those that end."""
    whole = (sums == np.round(sums)) & (sizes == np.round(sizes))
    return bool((whole & (sums >= 0) & (sums <= sizes)).all())


def _is_share(sums: Floats, sizes: Floats) -> bool:
    return bool((sizes == 1).all() and np.isin(sums, (0.0, 1.0)).all())
