"""Promotion: the decision follows its table, the interval covers as often as it says, and pairs are what is resampled."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ttrain.config import Promotion, Settings
from ttrain.config.evaluate import GenerationTask
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import choices
from ttrain.evaluate.promotion import FIGURES, check_metric, decide
from ttrain.evaluate.task_result import SCORES, Evaluation, Metric, write_scores
from ttrain.store.layout import Artifact

RECORDS = 60


def scores(
    better_by: float = 0.0,
    *,
    spread: float = 0.0,
    count: int = RECORDS,
    seed: int = 1,
    metric: str = "bits_per_byte",
) -> Metric:
    random = np.random.default_rng(seed)
    sizes = np.random.default_rng(7).integers(50, 500, count).astype(float)
    sums = sizes * (2.0 - better_by + spread * random.standard_normal(count))
    return Metric(metric, tuple(sums), tuple(sizes), None, records=tuple(map(str, range(count))))


def figure(value: float, name: str = "bits_per_byte") -> Metric:
    return Metric(name, (value,), (1.0,), None)


def right(count: int) -> Metric:
    sums = (1.0,) * count + (0.0,) * (100 - count)
    return Metric(
        "poems/accuracy/base",
        sums,
        (1.0,) * 100,
        higher_is_better=True,
        records=tuple(map(str, range(100))),
    )


def of_tokens(better_by: float = 0.0, *, per_record: int = 0) -> Metric:
    """A loss by token, of a tokenizer with so many tokens more in each record."""
    ours = scores(better_by, metric="chat_loss_sft")
    return replace(ours, sizes=tuple(size + per_record for size in ours.sizes))


@pytest.mark.parametrize(
    ("challenger", "champion", "changes", "promote", "why"),
    [
        (scores(), None, {}, True, "no champion yet"),
        (figure(math.nan), None, {}, False, "challenger's bits_per_byte is nan"),
        (figure(math.inf), figure(2.0), {}, False, "challenger's bits_per_byte is inf"),
        (figure(9.0), figure(math.nan), {}, True, "champion's bits_per_byte is nan"),
        (scores(0.1, spread=0.02), scores(spread=0.02, seed=2), {}, True, "above the margin 0"),
        (
            scores(0.1, spread=0.02),
            scores(spread=0.02, seed=2),
            {"margin": 0.2},
            False,
            "not above the margin 0.2",
        ),
        (
            scores(0.1, spread=0.02),
            scores(spread=0.02, seed=2),
            {"margin": 0.099},
            False,
            "not above the margin 0.099",
        ),
        (scores(0.001, spread=0.5), scores(spread=0.5, seed=2), {}, False, "not above the margin"),
        (scores(-0.1, spread=0.02), scores(spread=0.02, seed=2), {}, False, "worse by 0."),
        (
            scores(-0.1, spread=0.02),
            scores(spread=0.02, seed=2),
            {"higher_is_better": True},
            True,
            "above the margin",
        ),
        (scores(), scores(), {}, False, "better by 0.00000"),
        (
            scores(0.1, spread=0.5),
            scores(spread=0.5, seed=2),
            {"resamples": 0},
            True,
            "resamples is 0",
        ),
        (scores(0.1, count=19), scores(count=19), {}, True, "19 held-out records are too few"),
        (
            scores(0.1, count=19),
            scores(count=19),
            {"margin": 0.2},
            False,
            "not more than the margin 0.2",
        ),
        (
            scores(-0.1, count=19),
            scores(count=19),
            {},
            False,
            "worse by 0.10000; 19 held-out records are too few",
        ),
        (scores(0.1, count=20), scores(count=20), {}, True, "lower end of the interval"),
        (figure(1.9), figure(2.0), {}, True, "0 held-out records are too few"),
        (figure(2.0), figure(2.0), {}, False, "not more than the margin"),
        (
            scores(0.1),
            scores(count=RECORDS - 1),
            {},
            False,
            "not evaluated on the same held-out records",
        ),
        (scores(0.1), figure(2.0), {}, False, "not evaluated on the same held-out records"),
        (
            of_tokens(0.5),
            of_tokens(per_record=1),
            {"metric": "chat_loss_sft"},
            False,
            "promotion.metric=bits_per_byte",
        ),
        (right(70), right(40), {"metric": "poems/accuracy/base"}, True, "above the margin"),
        (right(40), right(70), {"metric": "poems/accuracy/base"}, False, "worse by"),
    ],
)
def test_decisions_follow_the_table(
    challenger: Metric, champion: Metric | None, changes: dict[str, Any], promote: bool, why: str
) -> None:
    found = decide(challenger, champion, Promotion(**changes))
    assert (found.promote, found.word) == (promote, "promoted" if promote else "kept")
    assert why in found.reason, found.reason


def test_a_decision_has_the_figures_that_it_was_made_from_and_says_which_difference_its_records_would_show() -> (
    None
):
    """What was found beyond it is promoted, what lies below half of it mostly is not: the decision names the border."""
    champion, rules = scores(spread=0.05, seed=2), Promotion(margin=0.01)
    near, far = (decide(scores(by, spread=0.05), champion, rules) for by in (0.011, 0.1))
    assert (far.challenger, far.champion) == (scores(0.1, spread=0.05).value, champion.value)
    assert (far.samples, far.margin) == (RECORDS, 0.01) and far.difference == pytest.approx(
        champion.value - far.challenger
    )
    assert far.interval is not None and far.interval[0] < far.difference < far.interval[1]
    assert json.loads(json.dumps(far.to_json()))["interval"] == list(far.interval)
    assert far.word == "promoted"
    assert decide(scores(0.1, spread=0.05), champion, rules) == far, "the same draws each time"
    assert json.dumps(decide(figure(math.nan), champion, rules).to_json(), allow_nan=False)
    assert near.smallest_difference is not None and far.smallest_difference is not None
    assert (
        not near.promote
        and f"the minimum detectable difference is about {near.smallest_difference:.5f}"
        in near.reason
    )
    assert far.promote and far.difference > far.smallest_difference
    assert far.to_json()["smallest_difference"] == far.smallest_difference


def evaluation(directory: Path) -> Artifact:
    """Three documents that cost 6, 3 and 1 nats over 2, 2 and 1 bytes: 2 a byte, in nats."""
    metric = Metric(
        "bits_per_byte", (6.0, 3.0, 1.0), (2.0, 2.0, 1.0), False, "", records=("ab", "cd", "e")
    )
    assert metric.value == 2.0
    write_scores(directory, [metric, Metric.of_value("bits_per_byte_xz", 3.0)])
    return Artifact("evaluate", "key", directory, {})


def test_the_scores_of_an_evaluation_are_its_records(tmp_path: Path) -> None:
    found = Evaluation.of(evaluation(tmp_path)).metric("bits_per_byte")
    assert (found.value, found.sums, found.sizes) == (2.0, (6.0, 3.0, 1.0), (2.0, 2.0, 1.0))
    assert len(set(found.records)) == 3
    assert Evaluation.of(evaluation(tmp_path)).metric("bits_per_byte_xz") == figure(
        3.0, "bits_per_byte_xz"
    )


def test_a_figure_that_there_is_not_is_named_with_those_there_are_and_records_that_were_not_fetched_are_none(
    tmp_path: Path,
) -> None:
    found = evaluation(tmp_path)
    with pytest.raises(
        UsageError,
        match=r"promotion\.metric is accuracy.*choose one of bits_per_byte, bits_per_byte_xz",
    ):
        Evaluation.of(found).metric("accuracy")
    (tmp_path / SCORES).unlink()
    elsewhere = Artifact(found.stage, found.key, found.path, {**found.manifest, "absent": [SCORES]})
    with pytest.raises(ArtifactError, match="was not fetched yet"):
        Evaluation.of(elsewhere).metric("bits_per_byte")


def test_a_metric_that_no_evaluation_can_have_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    suite = tmp_path / "exams.yaml"
    suite.write_text(
        "tasks:\n  poems: {kind: choices, file: poems.jsonl}\n  talks: {kind: chats}\n"
    )
    suites = {"evaluate": {"suites": {"sft": [str(suite)]}}}

    def check(metric: str) -> None:
        check_metric(Settings.model_validate({"promotion": {"metric": metric}, **suites}))

    for metric in (
        "bits_per_byte",
        "bits_per_byte/lang:zh",
        "domain_loss_lora",
        "poems/accuracy/sft",
        "poems/accuracy/sft/lang:zh",
        "talks/distinct_2/sft",
        "bits_per_byte/source:a/b",
        "poems/accuracy/sft/source:https://a/b:c",
    ):
        check(metric)
    for metric in (
        "bits_per_bite",
        "poems/accuracy",
        "poems/accuracy/lora",
        "poem/accuracy/sft",
        "poems/acuracy/sft",
        "bits_per_byte_xz",
        "bits_per_byte/x",
        "chat_loss_sft/x",
        "talks/loss/lora",
    ):
        with pytest.raises(
            UsageError,
            match=rf"promotion.metric is {metric}, .* poems/accuracy/sft, .* talks/FIGURE/sft",
        ):
            check(metric)
    alone = {"lora": {"start_from": "pretrain"}, "promotion": {"metric": "chat_loss_base"}}
    with pytest.raises(
        UsageError, match=r"promotion.metric is chat_loss_base, .* TASK/FIGURE/MODEL"
    ):
        check_metric(Settings.model_validate(alone))


def test_the_figures_that_a_night_may_follow_are_those_of_the_tasks() -> None:
    assert set(FIGURES["choices"]) == {*choices.FIGURES.values(), "choice_loss", "bits_per_byte"}
    ways = set(get_args(GenerationTask.model_fields["match"].annotation)) - {"auto"}
    assert set(FIGURES["generation"]) == {*(f"accuracy_{way}" for way in ways), "ended"}
