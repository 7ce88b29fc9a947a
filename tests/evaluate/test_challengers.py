"""The gate over all models of a set: what one gains does not pay for what another lost, and what cannot be compared is not
promoted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ttrain.config import Promotion
from ttrain.core.files import write_json
from ttrain.evaluate import promotion
from ttrain.evaluate.promotion import Judged
from ttrain.evaluate.scores import Evaluation
from ttrain.evaluate.task_result import LN2, Metric, ScoreTable, TaskResult, mean

COUNT = 40  # records of each night, and of each other part
NIGHTS = ("old", "new")
ACCURACY = "quiz/accuracy/base"


def evaluated(
    directory: Path, *, bits: Sequence[float] = (2.0, 2.0), sft: float | None = 1.5, dpo: float | None = 0.75,
    lora: float | None = 1.0, quiz: float = 0.5, count: int = COUNT, records: str = "", tokens: int = 10,
) -> Evaluation:  # fmt: skip
    """An evaluation with these bits a byte on each night's documents, and these figures of the other models, on `count`
    records whose names begin with `records` and of so many tokens."""
    table, metrics = ScoreTable(), dict[str, float]()
    names = [f"{records}{night} {number}" for night in NIGHTS for number in range(COUNT)]
    table.part("documents", names)
    nats = tuple(100 * cost * LN2 for cost in bits for _ in range(COUNT))
    of_documents = Metric("bits_per_byte", nats, (100.0,) * len(names), False, "", factor=1 / LN2)
    metrics["bits_per_byte"] = table.add("documents", of_documents)
    for metric, part, value in (("chat_loss_sft", "chats", sft), ("domain_loss_lora", "domain", lora)):
        if value is not None:
            table.part(part, [f"{records}{part} {number}" for number in range(count)])
            nats = tuple(tokens * value * (0.9 if number % 2 else 1.1) for number in range(count))
            metrics[metric] = table.add(part, Metric(metric, nats, (float(tokens),) * count, False, ""))
    if dpo is not None:
        table.part("pairs", [f"{records}pair {number}" for number in range(count)])
        right = mean("preference_accuracy/dpo", [float(number < dpo * count) for number in range(count)])
        metrics[right.name] = table.add("pairs", right)
    answers = mean("accuracy", [float(number < quiz * 100) for number in range(100)])
    quizzed = TaskResult("quiz", "choices", "base", tuple(map(str, range(100))), (answers,))
    table.result("suite/quiz", quizzed, quizzed.names)
    metrics[ACCURACY] = quiz
    table.write(directory)
    write_json(directory / "evaluation.json", {"metrics": metrics})
    return Evaluation.at(directory)


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """Judges a challenger with these figures against a champion with those."""

    def judge(challenger: dict[str, Any], champion: dict[str, Any] | None = None, **rules: Any) -> Judged:
        nights = {name: [f"{name} {number}" for number in range(COUNT)] for name in NIGHTS}
        directories = [tmp_path / name for name in ("challenger", "champion")]
        for directory in directories:
            directory.mkdir(exist_ok=True)
        theirs = evaluated(directories[1], **(champion or {}))
        return promotion.judge(evaluated(directories[0], **challenger), theirs, Promotion(**rules), nights, "new")

    return judge


GAIN = {"bits": (1.95, 1.8)}  # that would be promoted by itself


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"sft": 9.0}, "chat_loss_sft"),
        ({"dpo": 0.2}, "preference_accuracy/dpo"),
        ({"lora": 1.1}, "domain_loss_lora"),
        ({"sft": math.nan}, "chat_loss_sft"),
        ({"lora": math.inf}, "domain_loss_lora"),
    ],
)
def test_a_better_base_model_does_not_pay_for_the_loss_of_another_model(
    compared: Any, changes: dict[str, float], lost: str
) -> None:
    assert compared(GAIN).decision.promote
    judged = compared({**GAIN, **changes})
    assert not judged.decision.promote and judged.decision.lost == (lost,)
    assert f"it forgets {lost}: " in judged.decision.reason and "promotion.forgetting allows 3.0%" in judged.decision.reason
    of_metrics = {figure.name: figure for figure in judged.texts if figure.kind == "metric"}
    assert set(of_metrics) == {"chat_loss_sft", "preference_accuracy/dpo", "domain_loss_lora"}
    assert of_metrics[lost].lost and of_metrics[lost].records == COUNT
    assert compared({**GAIN, **changes}, forgetting=None).decision.promote


@pytest.mark.parametrize(
    ("challenger", "champion", "why"),
    [
        ({"bits": (math.nan, 2.0)}, {}, "the challenger's bits_per_byte is nan, the champion's is 2.00000"),
        ({"bits": (math.nan, 2.0)}, {"bits": (math.nan, 2.0)}, "bits_per_byte is nan, the champion's is nan"),
        ({"records": "other "}, {}, "not evaluated on the same held-out records"),
        ({}, {"records": "other "}, "not evaluated on the same held-out records"),
    ],
)
def test_nothing_is_promoted_where_what_is_forgotten_cannot_be_determined(
    compared: Any, challenger: dict[str, Any], champion: dict[str, Any], why: str
) -> None:
    rules = {"metric": ACCURACY}
    decision = compared({"quiz": 0.9, **challenger}, champion, **rules).decision
    assert not decision.promote and decision.lost == () and decision.champion == 0.5
    assert decision.reason.startswith("what it forgets cannot be determined: ") and why in decision.reason, decision.reason
    assert "else it would be promoted: better by 0.40000" in decision.reason
    assert compared({"quiz": 0.9, **challenger}, champion, forgetting=None, **rules).decision.promote
    assert "what it forgets" not in compared({"quiz": 0.5, **challenger}, champion, **rules).decision.reason
    assert compared({"quiz": 0.9}, **rules).decision.promote
    for metric in ({}, rules):  # a champion without a finite figure has nothing to lose
        assert compared({"quiz": 0.9}, {"bits": (math.nan, 2.0)}, **metric).decision.promote


STRANGE = ("r&d", "r#d", "r?d", "r_d", "R_D", "a/b", "caf\u00e9", "cafe\u0301")  # some of them MLflow refuses


def test_each_source_has_a_metric_and_a_bound_under_its_own_name(tmp_path: Path) -> None:
    sides = []
    for side, cost in (("challenger", 2.5), ("champion", 2.0)):
        table, names = ScoreTable(), [f"text {number}" for number in range(30 * len(STRANGE))]
        table.part("documents", names)
        of_strange = range(60, 90)  # of r?d
        nats = tuple(100 * LN2 * (cost if number in of_strange else 2.0) for number in range(len(names)))
        bits = Metric("bits_per_byte", nats, (100.0,) * len(names), False, "", factor=1 / LN2)
        metrics = {"bits_per_byte": table.add("documents", bits)}
        rows = {f"source={name}": range(30 * at, 30 * at + 30) for at, name in enumerate(STRANGE)}
        metrics |= table.groups("bits_per_byte", rows)
        assert list(metrics) == ["bits_per_byte", *(f"bits_per_byte/source:{name}" for name in STRANGE)]
        (tmp_path / side).mkdir()
        table.write(tmp_path / side)
        write_json(tmp_path / side / "evaluation.json", {"metrics": metrics})
        sides.append(Evaluation.at(tmp_path / side))
    judged = promotion.judge(*sides, Promotion(), {})
    assert {figure.name for figure in judged.texts if figure.kind == "source"} == {f"source {name}" for name in STRANGE}
    assert judged.decision.lost == ("source r?d",)


@pytest.mark.parametrize(
    ("count", "rules", "word", "reason"),
    [
        (9, {}, "kept", "9 of 20 held-out records"),
        (19, {"metric": "domain_loss_lora"}, "kept", "19 of 20 held-out records"),
        (20, {}, "promoted", "better by 0.50000; the lower end of the interval"),
        (9, {"min_samples": 5}, "promoted", "the lower end of the interval"),
        (9, {"min_samples": 30}, "kept", "9 of 30 held-out records"),
        (9, {"resamples": 0}, "promoted", "resamples is 0"),  # the user lets the figures alone decide
    ],
)
def test_a_night_of_too_few_held_out_records_keeps_the_champion(
    compared: Any, count: int, rules: dict[str, Any], word: str, reason: str
) -> None:
    better = {"sft": 1.0, "lora": 0.5, "count": count}
    decision = compared(better, {"count": count}, **{"metric": "chat_loss_sft", **rules}).decision
    assert decision.word == word and reason in decision.reason, decision.reason


def test_the_first_champion_needs_no_number_of_records_and_a_metric_without_records_none(tmp_path: Path) -> None:
    alone = evaluated(tmp_path, count=3)
    assert promotion.judge(alone, None, Promotion(metric="chat_loss_sft"), {}).decision.promote
