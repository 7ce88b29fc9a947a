"""What a sweep varies: values as they are written, what they mean, and which are refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from ttrain.config.loading import layers
from ttrain.errors import UsageError
from ttrain.experiments.space import (
    Interval,
    Space,
    ValueList,
    assignment,
    format_value,
    parse,
    parse_space,
)

LR = "pretrain.optim.lr"


@pytest.mark.parametrize(
    ("key", "text", "dimension"),
    [
        (LR, "log(1e-4,3e-3)", Interval(1e-4, 3e-3, log=True)),
        ("lora.dropout", "uniform(0,0.2)", Interval(0.0, 0.2)),
        (LR, "1e-3, 2e-3,4e-3", ValueList((1e-3, 2e-3, 4e-3))),
        ("pretrain.optim.kind", "muon,adamw", ValueList(("muon", "adamw"))),
        ("model.tie_embeddings", "true,false", ValueList((True, False))),
        ("pretrain.optim.betas", "choice([0.9,1],[0,1])", ValueList(([0.9, 1], [0, 1]))),
        ("data.pretrain", "choice(2026-11-21, 0123, no)", ValueList(("2026-11-21", "0123", "no"))),
        ("sft.optim.clip", "choice(1, 2e-3, null)", ValueList((1, 2e-3, None))),
    ],
)
def test_several_values_mean_what_the_type_of_the_setting_makes_of_them(
    key: str, text: str, dimension: Any
) -> None:
    assert parse_space(layers([f"{key}={text}"])).dimensions == {key: dimension}


def test_one_value_does_not_vary() -> None:
    lists = ["data.pretrain=a.jsonl,b.jsonl", "pretrain.optim.betas=0.9,0.95"]
    plain = [*lists, f"{LR}=1e-3", "name=log"]
    assert parse_space(layers(plain)).dimensions == {}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("log(0,1)", "above 0"),
        ("log(1,2,3)", "two numbers"),
        ("uniform(2,1)", "lower first"),
        ("choice([a,b)", "be read"),
    ],
)
def test_a_range_that_means_nothing_is_refused_with_setting_value_and_rule(
    text: str, rule: str
) -> None:
    with pytest.raises(UsageError, match=f"^{LR} is '{re.escape(text)}'.*{rule}"):
        parse_space(layers([f"{LR}={text}"]))


def test_ranges_stand_in_files_too_and_a_stronger_value_takes_one_away(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("pretrain: {optim: {lr: 'log(1e-4,1e-2)', kind: 'muon,adamw'}}")
    assert list(parse_space(layers([], [file])).dimensions) == [LR, "pretrain.optim.kind"]
    assert list(parse_space(layers([f"{LR}=1e-3"], [file])).dimensions) == ["pretrain.optim.kind"]


def test_what_can_be_listed_is_listed_the_last_setting_fastest_and_the_rest_is_spread() -> None:
    space = Space({"a": ValueList((1, 2)), "b": ValueList(("x", "y", "z"))})
    assert space.size == 6
    assert space.combinations(6) == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y", "z")]
    endless = Space({"a": ValueList((1, 2)), "b": Interval(0.0, 1.0)})
    assert endless.size is None
    drawn = endless.combinations(4)
    assert sorted(values["a"] for values in drawn) == [1, 1, 2, 2]
    assert sorted(values["b"] for values in drawn) == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize("value", [1e-5, True, None, "adamw", [0.9, 0.95]])
def test_what_is_written_is_read_back_as_the_same_value(value: Any) -> None:
    (item,) = layers([assignment("sft.optim.lr", value)])
    assert (float(item.value) if isinstance(value, float) else item.value) == value
    assert assignment("sft.optim.lr", value) == f"sft.optim.lr={format_value(value)}"


def test_a_secret_is_not_put_on_record() -> None:
    with pytest.raises(UsageError, match="secrets"):
        parse("data.pretrain", "choice(https://me:secret@host/a.jsonl,b.jsonl)")
