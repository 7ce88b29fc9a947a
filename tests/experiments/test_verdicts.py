"""What experiments decide on made-up metrics: error rates, what stops, repeated seeds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.evaluate.noise import Noise
from ttrain.experiments.verdict import Judgement, Verdict
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.sweeps import COMPLETED, DIVERGED, Experiment, Trial

Value = Callable[[int, int], float | None]


def play(value: Value, changes: int, **options: Any) -> tuple[Judgement, int]:
    """An experiment whose trials give `value(change, seed)`, and how many of them it took."""
    record = {
        "sweep": "sweep-1",
        "measure": {"metric": "eval/bits_per_byte", "stage": "evaluate"},
        "changes": [{"name": f"{number}", "values": {"a": number}} for number in range(changes)],
        "process": runs.this_process(),
        "trials": [],
        "seeds": 5,
        "rounds": True,
        "noise": None,
        "looks": 0,
        "outcome": "running",
        **options,
    }
    while True:
        judgement = Judgement(Experiment(Path(), record), ArtifactStore(Path("none")))
        assert changes > 5 or len(judgement.to_json()["settings"]) == changes, "at any moment"
        if not judgement.standing.wanted:
            return judgement, len(record["trials"])
        for change, seed in judgement.standing.wanted[:1]:
            number = value(change, seed)
            outcome = DIVERGED if number is None else COMPLETED
            record["trials"].append(vars(Trial(change, seed, outcome, value=number)))


def noisy(effects: Mapping[int, float], draw: int, spread: float = 0.03) -> Value:
    """The effect of each change, with noise of its own for each seed, and noise that all share."""

    def value(change: int, seed: int) -> float:
        common = np.random.default_rng([draw, seed]).normal(0, 0.1)
        own = np.random.default_rng([draw, seed, change]).normal(0, spread)
        return 1.6 + effects.get(change, 0.0) + float(common + own)

    return value


def verdicts(judgement: Judgement) -> list[str]:
    return [row.verdict for row in judgement.verdicts]


def test_of_twelve_changes_without_effect_few_are_called_better_or_worse() -> None:
    judgements = [play(noisy({}, draw), 13)[0] for draw in range(40)]
    called = [verdicts(judgement) for judgement in judgements]
    assert sum("better" in words for words in called) <= 2
    assert sum("worse" in words for words in called[:30]) <= 3
    assert sum(judgement.standing.winner is not None for judgement in judgements) > 30


def lucky(change: int, seed: int) -> float:
    return noisy({2: -0.2 if seed < 100 else 0.0}, 7)(change, seed)


def diverging(change: int, seed: int) -> float | None:
    return None if change == 1 else noisy({2: -0.3}, 1)(change, seed)


ACCURACY = {"metric": "eval/accuracy", "stage": "evaluate", "maximize": True}
NOISE = {"spread": 0.03, "freedom": 4}
ALL = {"rounds": False}


@pytest.mark.parametrize(
    ("value", "options", "words", "trials", "reason"),
    [
        (noisy({1: -0.1}, 12), {}, ["better"], 10, ""),
        (noisy({1: -0.1}, 12), {"looks": 12}, ["not decided"], 10, "takes"),
        (lucky, {}, ["stopped", "equal", "stopped"], 26, "fresh seeds"),
        (noisy({1: -0.2, 2: 0.2}, 3), ALL, ["better", "worse", "not decided"], 20, "takes"),
        (noisy({1: -0.30, 2: -0.31}, 3), {}, ["not decided", "better"], 25, "alone"),
        (noisy({1: 0.2, 2: -0.2}, 3), {**ALL, "measure": ACCURACY}, ["better", "worse"], 15, ""),
        (noisy({1: -0.5}, 1), {"seeds": 1}, ["not decided"], 2, ""),
        (lambda change, seed: 1.6 - 0.1 * change, {}, ["not decided"], 10, "no replicates"),
        (noisy({1: 0.5}, 1), {"noise": NOISE}, ["worse", "not decided"], 11, "after 1 seed"),
        (diverging, {}, ["diverged", "better"], 21, ""),
    ],
)
def test_a_change_is_judged_by_its_differences(
    value: Value, options: dict[str, Any], words: list[str], trials: int, reason: str
) -> None:
    judgement, ended = play(value, 1 + len(words), **options)
    assert (verdicts(judgement), ended) == (["baseline", *words], trials)
    assert reason in "".join(row.why for row in judgement.verdicts)
    assert (judgement.best is not None) == ("better" in words)


def test_intervals_over_seeds_are_those_of_paired_differences() -> None:
    row = Verdict("a", [1, 2, 3], [1.0, 1.2, 1.1], [1.1, 1.3, 1.3])
    assert row.difference == pytest.approx(-0.1333, abs=1e-4)
    # 0.1333 -+ 4.303 * 0.0577 / sqrt(3)
    assert row.over_seeds == pytest.approx((-0.2768, 0.0101), abs=1e-4)
    seeds = [Noise(0.03, 5).seeds_for(difference) for difference in (0.1, 0.03, 1e-6)]
    assert seeds == [4, 18, None]
