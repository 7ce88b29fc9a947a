"""Promotion: the decision follows its table, and has the values from which it was made."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ttrain.config import Promotion, Settings
from ttrain.config.evaluate import GenerationTask
from ttrain.core.files import finite
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import choices
from ttrain.evaluate.promotion import FIGURES, check_metric, decide
from ttrain.evaluate.task_result import SCORES, Evaluation, Metric, write_scores
from ttrain.store.layout import Artifact

RECORDS = 60
ACCURACY = {"metric": "poems/accuracy/base"}
CHAT_LOSS = {"metric": "chat_loss_sft"}
POSSIBLE = [
    "domain_loss_lora",
    "talks/distinct_2/sft",
    *(f"bits_per_byte{group}" for group in ("", "/lang:zh", "/source:a/b")),
    *(f"poems/accuracy/sft{group}" for group in ("", "/lang:zh", "/source:https://a/b:c")),
]
IMPOSSIBLE = ["bits_per_bite", "bits_per_byte_xz", "bits_per_byte/x", "chat_loss_sft/x"]
IMPOSSIBLE += ["poems/accuracy", "poems/accuracy/lora", "poem/accuracy/sft"]
IMPOSSIBLE += ["poems/acuracy/sft", "talks/loss/lora"]


def scores(
    better_by: float = 0.0, *, spread: float = 0.0, count: int = RECORDS, seed: int = 1
) -> Metric:
    random = np.random.default_rng(seed)
    sizes = np.random.default_rng(7).integers(50, 500, count).astype(float)
    sums = sizes * (2.0 - better_by + spread * random.standard_normal(count))
    records = tuple(map(str, range(count)))
    return Metric("bits_per_byte", tuple(sums), tuple(sizes), None, records=records)


def against_equal(better_by: float, **changes: Any) -> tuple[Metric, Metric]:
    """A challenger that is better by so much on average, and its champion."""
    return scores(better_by, **changes), scores(0.0, seed=2, **changes)


def values(challenger: float, champion: float) -> tuple[Metric, Metric]:
    """Two metrics without records."""
    return Metric.of_value("bits_per_byte", challenger), Metric.of_value("bits_per_byte", champion)


def accuracies(*right: int) -> list[Metric]:
    """For each number: so many right answers of 100."""
    records = tuple(map(str, range(100)))
    rows = [(1.0,) * count + (0.0,) * (100 - count) for count in right]
    return [
        Metric("poems/accuracy/base", row, (1.0,) * 100, higher_is_better=True, records=records)
        for row in rows
    ]


def by_token() -> tuple[Metric, Metric]:
    """Losses per token of two tokenizers: the champion's has a token more in each record."""
    sizes = tuple(size + 1 for size in scores().sizes)
    challenger = replace(scores(0.5), name="chat_loss_sft")
    return challenger, replace(scores(), name="chat_loss_sft", sizes=sizes)


@pytest.mark.parametrize(
    ("models", "changes", "promote", "why"),
    [
        ((scores(), None), {}, True, "no champion yet"),
        ((values(math.nan, 0)[0], None), {}, False, "challenger's bits_per_byte is nan"),
        (values(math.inf, 2.0), {}, False, "challenger's bits_per_byte is inf"),
        (values(9.0, math.nan), {}, True, "champion's bits_per_byte is nan"),
        (against_equal(0.1, spread=0.02), {}, True, "above the margin 0"),
        (against_equal(0.1, spread=0.02), {"margin": 0.2}, False, "not above the margin 0.2"),
        (against_equal(0.1, spread=0.02), {"margin": 0.099}, False, "not above the margin 0.099"),
        (against_equal(0.001, spread=0.5), {}, False, "not above the margin"),
        (against_equal(-0.1, spread=0.02), {}, False, "worse by 0."),
        (against_equal(-0.1, spread=0.02), {"higher_is_better": True}, True, "above the margin"),
        (against_equal(0.0), {}, False, "better by 0.00000"),
        (against_equal(0.1, spread=0.5), {"resamples": 0}, True, "resamples is 0"),
        (against_equal(0.1, count=19), {}, True, "19 held-out records are too few"),
        (against_equal(0.1, count=19), {"margin": 0.2}, False, "not more than the margin 0.2"),
        (against_equal(-0.1, count=19), {}, False, "worse by 0.10000; 19 held-out records"),
        (against_equal(-0.1, count=19), {}, False, "0.10000; 19 held-out records are too few"),
        (against_equal(0.1, count=20), {}, True, "lower end of the interval"),
        (values(1.9, 2.0), {}, True, "0 held-out records are too few"),
        (values(2.0, 2.0), {}, False, "not more than the margin"),
        ((scores(0.1), scores(count=RECORDS - 1)), {}, False, "same held-out records"),
        ((scores(0.1), values(2.0, 2.0)[1]), {}, False, "same held-out records"),
        (by_token(), CHAT_LOSS, False, "promotion.metric=bits_per_byte"),
        (accuracies(70, 40), ACCURACY, True, "above the margin"),
        (accuracies(40, 70), ACCURACY, False, "worse by"),
    ],
)
def test_decisions_follow_the_table(
    models: tuple[Metric, Metric | None], changes: dict[str, Any], promote: bool, why: str
) -> None:
    decision = decide(*models, Promotion(**changes))
    assert (decision.promote, decision.word) == (promote, "promoted" if promote else "kept")
    assert why in decision.reason


def test_a_decision_has_its_inputs_and_the_difference_that_its_records_would_show() -> None:
    """Beyond that difference a challenger is promoted, below half of it mostly not."""
    champion = scores(spread=0.05, seed=2)
    rules = Promotion(margin=0.01)
    near, far = (decide(scores(by, spread=0.05), champion, rules) for by in (0.011, 0.1))
    assert (far.challenger, far.champion) == (scores(0.1, spread=0.05).value, champion.value)
    assert (far.samples, far.margin, far.word) == (RECORDS, 0.01, "promoted")
    assert far.interval is not None
    assert far.difference is not None
    assert far.difference == pytest.approx(champion.value - far.challenger)
    assert far.interval[0] < far.difference < far.interval[1]
    assert json.loads(json.dumps(finite(asdict(far))))["interval"] == list(far.interval)
    assert decide(scores(0.1, spread=0.05), champion, rules) == far, "the same draws each time"
    not_finite = decide(values(math.nan, 0)[0], champion, rules)
    assert json.dumps(finite(asdict(not_finite)), allow_nan=False)
    assert near.word == "kept"
    assert f"about {near.smallest_difference or 0:.5f}" in near.reason
    assert far.difference > (far.smallest_difference or math.inf)
    assert finite(asdict(far))["smallest_difference"] == far.smallest_difference


def evaluation(directory: Path, *absent: str) -> Evaluation:
    """Three documents that cost 6, 3 and 1 nats over 2, 2 and 1 bytes, and a baseline."""
    costs = (6.0, 3.0, 1.0)
    metric = Metric("bits_per_byte", costs, (2.0, 2.0, 1.0), False, records=("ab", "cd", "e"))
    write_scores(directory, [metric, Metric.of_value("bits_per_byte_xz", 3.0)])
    return Evaluation.of(Artifact("evaluate", "key", directory, {"absent": absent}))


def test_the_scores_of_an_evaluation_are_its_records(tmp_path: Path) -> None:
    recorded = evaluation(tmp_path)
    metric = recorded.metric("bits_per_byte")
    assert (metric.value, metric.sums, metric.sizes) == (2.0, (6.0, 3.0, 1.0), (2.0, 2.0, 1.0))
    assert metric.records == ("ab", "cd", "e")
    xz = recorded.metric("bits_per_byte_xz")
    assert xz == Metric("bits_per_byte_xz", (3.0,), (1.0,), None)
    listed = r"promotion\.metric .*accuracy.* bits_per_byte, bits_per_byte_xz"
    with pytest.raises(UsageError, match=listed):
        recorded.metric("accuracy")
    with pytest.raises(ArtifactError, match="not fetched"):
        evaluation(tmp_path, SCORES)


def test_a_metric_that_no_evaluation_can_have_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    suite = tmp_path / "exams.yaml"
    suite.write_text("tasks: {poems: {kind: choices, file: poems.jsonl}, talks: {kind: chats}}\n")
    suites = {"evaluate": {"suites": {"sft": [str(suite)]}}}

    def check(metric: str, tree: dict[str, Any] = suites) -> None:
        check_metric(Settings.model_validate({"promotion": {"metric": metric}, **tree}))

    for metric in POSSIBLE:
        check(metric)
    for metric in IMPOSSIBLE:
        listed = rf"promotion\.metric is {metric}, .* poems/accuracy/sft, .* talks/FIGURE/sft"
        with pytest.raises(UsageError, match=listed):
            check(metric)
    with pytest.raises(UsageError, match=r"promotion\.metric.*base.* TASK/FIGURE/MODEL"):
        check("chat_loss_base", {"lora": {"start_from": "pretrain"}})


def test_the_metrics_that_a_night_may_follow_are_those_of_the_tasks() -> None:
    assert set(FIGURES["choices"]) == {*choices.FIGURES.values(), "choice_loss", "bits_per_byte"}
    matches = set(get_args(GenerationTask.model_fields["match"].annotation)) - {"auto"}
    assert set(FIGURES["generation"]) == {*(f"accuracy_{match}" for match in matches), "ended"}
