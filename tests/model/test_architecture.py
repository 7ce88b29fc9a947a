"""Settings of a model: presets by layer, fields that only an architecture knows, and what enters
the key."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.refusals import settings_file

from ttrain.config import Model, Settings
from ttrain.config.loading import load
from ttrain.config.model import PRESETS, sizes_of
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.model.architecture import build_config
from ttrain.tasks import PRETRAIN

SMALL, LARGE = sizes_of("1m"), sizes_of("124m")


def model_of(*overrides: str, **layers: Any) -> Model:
    return load(overrides, **{"environment": {}, **layers}).settings.model


def test_a_preset_sets_the_sizes() -> None:
    for name in PRESETS:
        assert model_of(f"model.preset={name}") == Model(preset=name) == Model(**sizes_of(name))


PLACES = {"file": 0, "environment": 1, "command line": 2}


@pytest.mark.parametrize(("preset", "size"), list(product(PLACES, repeat=2)))
def test_a_size_wins_where_its_layer_is_as_strong(tmp_path: Path, preset: str, size: str) -> None:
    given: dict[str, list[tuple[str, Any]]] = {place: [] for place in PLACES}
    given[size].append(("layers", 7))
    given[preset].append(("preset", "124m"))  # after it, which must not matter in one layer
    lines = "".join(f"  {key}: {value}\n" for key, value in given["file"])
    path = settings_file(tmp_path, f"model:\n{lines}")
    names = {f"TTRAIN__MODEL__{key.upper()}": str(value) for key, value in given["environment"]}
    overrides = [f"model.{key}={value}" for key, value in given["command line"]]
    loaded = load(overrides, files=[path] if lines else [], environment=names)
    wins = PLACES[size] >= PLACES[preset]
    assert loaded.settings.model.layers == (7 if wins else LARGE["layers"])
    assert loaded.settings.model.hidden_size == LARGE["hidden_size"]
    assert loaded.sources["model.hidden_size"] == "preset 124m"
    assert (loaded.sources["model.layers"] == "preset 124m") is not wins


def test_only_the_strongest_preset_counts_and_null_is_none(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "model: {preset: 500m, heads: 4}")
    # Nothing of 500m, such as its kv_heads.
    assert model_of("model.preset=1m", files=[path]) == Model(**SMALL)
    assert model_of("model.preset=null", files=[path]) == Model(heads=4)


def test_a_preset_is_not_in_the_key_but_its_sizes_are() -> None:
    def key(*overrides: str) -> str:
        return digest_of(PRETRAIN.part_of(load(overrides, environment={}).settings))

    sizes = {name: "null" if value is None else value for name, value in sizes_of("10m").items()}
    by_hand = [f"model.{name}={value}" for name, value in sizes.items()]
    assert key("model.preset=10m") == key(*by_hand) != key()
    settings = load(["model.preset=10m"], environment={}).settings
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


def test_fields_of_an_architecture_come_from_every_layer(tmp_path: Path) -> None:
    fields = "{resid_pdrop: 0.1, embd_pdrop: 0.2, summary_type: mean}"
    path = settings_file(tmp_path, f"model: {{kind: gpt2, fields: {fields}}}")
    environment = {"TTRAIN__MODEL__FIELDS__SUMMARY_TYPE": "first"}
    loaded = load(["model.fields.embd_pdrop=0.4"], files=[path], environment=environment)
    expected = {"resid_pdrop": 0.1, "embd_pdrop": 0.4, "summary_type": "first"}
    assert loaded.settings.model.fields == expected
    assert loaded.sources["model.fields.embd_pdrop"] == "command line"
    assert loaded.sources["model.fields.resid_pdrop"] == str(path)


NOT_JSON = (".nan", "2001-01-01", "!!binary aGk=")
UNKNOWN = ("model.field.any", "model.layers.any", "sft.fields.any")
VALUES: dict[str, Any] = {"null": None, "{}": {}, "[1, 2]": [1, 2], "true": True}
VALUES |= {"1e-5": "1e-5", "gelu": "gelu"}


def test_a_field_takes_any_value_of_json_alone_or_within_a_mapping(tmp_path: Path) -> None:
    for text, value in VALUES.items():
        assert model_of(f"model.fields.any={text}").fields == {"any": value}
    rope = "{rope_parameters: {rope_type: linear, factor: 2.0}}"
    path = settings_file(tmp_path, f"model: {{fields: {rope}}}")
    model = model_of("model.fields.rope_parameters.factor=4.0", files=[path])
    assert model.fields == {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    assert model_of("model.fields={}", files=[path]).fields == {}


TINYSEEK = {"vocab_size": 23, "device": "cuda", "n_layer": 2, "n_head": 4, "d_model": 16}
TINYSEEK |= {"d_c": 6, "d_r": 4, "hidden": 5, "other_experts": 6, "shared_experts": 2, "keep": 3}
TINYSEEK |= {"ro_theta": 500.0, "dropout": 0.1, "scale": 0.02, "alpha": 0.02, "pad_idx": 0}
FIELDS_OF_TINYSEEK = {
    "d_model": "hidden_size",
    "n_head": "num_attention_heads",
    "d_c": "latent_size",
    "d_r": "rope_head_dim",
    "hidden": "moe_intermediate_size",
    "scale": "initializer_range",
    "other_experts": "num_local_experts",
    "shared_experts": "n_shared_experts",
    "keep": "num_experts_per_tok",
    "alpha": "router_aux_loss_coef",
    "dropout": "dropout",
}


def test_a_model_config_of_tinyseek_alone_is_its_model(tmp_path: Path) -> None:
    theirs = {**TINYSEEK, "vocab_size": 500, "hidden": 24}
    path = settings_file(tmp_path, json.dumps(theirs), "model_config.json")
    settings = load(["model.layers=5"], files=[path], environment={}).settings
    assert settings.model.layers == 5 and settings.tokenizer.vocab_size == theirs["vocab_size"]
    config = build_config(settings.model, vocab_size=99, ids={"pad_token_id": 1})
    assert config.model_type == "tinyseek"
    assert config.rope_parameters["rope_theta"] == theirs["ro_theta"]
    fields = {name: getattr(config, field) for name, field in FIELDS_OF_TINYSEEK.items()}
    assert fields == {name: theirs[name] for name in FIELDS_OF_TINYSEEK}
    few = settings_file(tmp_path, json.dumps({"n_layer": 2, "other_experts": 6}))
    assert model_of(files=[few]).kind == "tinyseek"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("n_layers", r"did you mean 'n_layer'\?"),
        ("sft", r"there are n_layer, .*-c OTHER\.yaml"),
        ("kep", "'keep'"),
    ],
)
def test_a_name_that_tinyseek_lacks_is_refused(tmp_path: Path, name: str, hint: str) -> None:
    path = settings_file(tmp_path, json.dumps({**TINYSEEK, name: 1}), "model_config.json")
    with pytest.raises(UsageError, match=rf"'{name}' \(from .*model_config\.json\) .*{hint}"):
        model_of(files=[path])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # They could not enter the key, nor config.json.
        *((f"model.fields.any={text}", r"model\.fields\.any") for text in NOT_JSON),
        ("model.rope_factor=2", r"model\.rope_factor .*model\.rope_type"),
        *((f"{key}=1", f"unknown setting '{key}'") for key in UNKNOWN),
        ("model.preset=3m", r"model\.preset.*1m, 5m"),
    ],
)
def test_what_no_model_has_is_refused(overrides: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_of(overrides)


def test_a_factor_stretches_positions_of_a_type() -> None:
    assert model_of("model.rope_factor=2", "model.rope_type=yarn").rope_factor == 2
