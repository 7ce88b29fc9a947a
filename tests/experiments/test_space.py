"""What a sweep varies: ranges as they are written, the values that they mean, and what is said of those that mean none."""

from pathlib import Path
from typing import Any

import pytest

from ttrain.config.loading import layers, settings_of
from ttrain.errors import UsageError
from ttrain.experiments.space import (
    Interval,
    Space,
    ValueList,
    assignment,
    format_value,
    parse,
    parse_space,
    with_values,
)

LR = "pretrain.optim.lr"


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("log(1e-4,3e-3)", Interval(1e-4, 3e-3, log=True)),
        ("uniform(0,0.2)", Interval(0.0, 0.2)),
        ("int(64,256,64)", ValueList(range(64, 257, 64), ordered=True)),
        ("choice(1,2.5,null,true)", ValueList((1, 2.5, None, True))),
        ("choice([0.9,0.95],[0.9,0.99])", ValueList(([0.9, 0.95], [0.9, 0.99]))),
        ("log(1e-4,1e-1,4)", ValueList((1e-4, 1e-3, 1e-2, 1e-1), ordered=True)),
    ],
)
def test_a_range_means_these_values(text: str, dimension: Any) -> None:
    assert parse("x", text) == dimension


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("log(0,1)", "a logarithm needs numbers above 0"),
        ("log(1,2,2.5)", "the count of values must be a whole number"),
        ("choice(a)", "two values or more"),
        ("choice([a,b)", "cannot be read"),
    ],
)
def test_a_range_that_means_nothing_is_refused_with_setting_value_and_rule(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_space(layers([f"{LR}={text}"]))
    assert str(error.value).startswith(f"{LR} is '{text}'")
    assert said in str(error.value)
    with pytest.raises(UsageError, match="a sweep needs a setting that varies"):
        parse_space(layers([f"{LR}=1e-3", "name=log"]))


def test_the_values_of_a_choice_are_what_the_type_of_the_setting_makes_of_them() -> None:
    assert parse("data.pretrain", "choice(2026-11-21, 0123, no)").values == ("2026-11-21", "0123", "no")
    assert parse("tokenizer.vocab_size", "choice(1024, 02048)").values == (1024, 2048)
    assert parse("sft.optim.clip", "choice(1, 2e-3, null)").values == (1, 2e-3, None)


def test_ranges_stand_in_files_too_and_a_stronger_value_takes_one_away(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("pretrain: {optim: {lr: 'log(1e-4,1e-2)', kind: 'choice(muon,adamw)'}}\n", encoding="utf-8")
    assert list(parse_space(layers([], [file])).dimensions) == [LR, "pretrain.optim.kind"]
    assert list(parse_space(layers([f"{LR}=1e-3"], [file])).dimensions) == ["pretrain.optim.kind"]
    assert parse_space(layers([f"{LR}=log(1e-3,1e-1)"], [file])).texts[LR] == "log(1e-3,1e-1)"


def test_drawn_values_take_the_place_of_their_ranges_in_the_settings() -> None:
    given = layers([f"{LR}=log(1e-4,1e-2)", "pretrain.optim.betas=choice([0.9,0.95],[0.8,0.9])", "sft.epochs=2"])
    space = parse_space(given)
    loaded = settings_of(with_values(given, space, {LR: 0.0021, "pretrain.optim.betas": [0.8, 0.9]}))
    assert loaded.settings.pretrain.optim.lr == 0.0021
    assert loaded.settings.pretrain.optim.betas == (0.8, 0.9)
    assert loaded.settings.sft.epochs == 2
    assert loaded.sources[LR] == "command line"
    given = layers(["model.preset=choice(5m,10m)", "model.layers=3"])  # what is given beside a preset wins
    found = settings_of(with_values(given, parse_space(given), {"model.preset": "10m"})).settings.model
    assert (found.hidden_size, found.layers) == (320, 3)


def test_a_grid_has_each_combination_once_the_last_setting_fastest() -> None:
    space = Space({"a": ValueList((1, 2)), "b": ValueList(("x", "y", "z"))}, {})
    assert space.size == 6
    found = [space.combination(number) for number in range(6)]
    assert found == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y", "z")]
    assert Space({"a": ValueList((1, 2)), "b": Interval(0.0, 1.0)}, {}).size is None


@pytest.mark.parametrize("value", [1e-5, True, None, "adamw", [0.9, 0.95]])
def test_what_is_written_is_read_back_as_the_same_value(value: Any) -> None:
    (item,) = layers([assignment("sft.optim.lr", value)])
    assert (float(item.value) if isinstance(value, float) else item.value) == value
    assert assignment("sft.optim.lr", value) == f"sft.optim.lr={format_value(value)}"
