"""Settings: precedence of layers, sources of values, messages of wrong ones, rules."""

import json
import pickle
from itertools import compress, product
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from support.refusals import refused, settings_file
from typer.testing import CliRunner

from ttrain.cli.main import app, main
from ttrain.config import TRAININGS, Settings, flatten, loading, rules
from ttrain.config.loading import LoadedSettings, known_keys, load
from ttrain.tasks import STAGES

EMBEDDING_RATE, HEAD_RATE = "pretrain.optim.embedding_lr", "pretrain.optim.head_lr"
KEY, VARIABLE = "sft.optim.lr", "TTRAIN__SFT__OPTIM__LR"
# The weakest first.
LAYERS = {"profile": 1e-4, "file": 2e-4, "environment": 3e-4, "command line": 4e-4}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile `mine` that sets the learning rate."""
    directory = tmp_path / "configs" / "profiles"
    directory.mkdir(parents=True)
    (directory / "mine.yaml").write_text(f"sft: {{optim: {{lr: {LAYERS['profile']}}}}}\n")
    monkeypatch.setattr(loading, "configs_directory", lambda: tmp_path / "configs")
    return "mine"


@pytest.mark.parametrize("present", list(product((False, True), repeat=4)))
def test_the_strongest_layer_wins(tmp_path: Path, profile: str, present: tuple[bool, ...]) -> None:
    path = settings_file(tmp_path, f"sft: {{optim: {{lr: {LAYERS['file']}}}}}")
    has_profile, has_file, has_variable, has_override = present
    loaded = load(
        [f"{KEY}={LAYERS['command line']}"] if has_override else [],
        files=[path] if has_file else [],
        profiles=[profile] if has_profile else [],
        environment={VARIABLE: str(LAYERS["environment"])} if has_variable else {},
    )
    names = list(compress(("profile mine", str(path), VARIABLE, "command line"), present))
    rates = [Settings().sft.optim.lr, *compress(LAYERS.values(), present)]
    assert loaded.settings.sft.optim.lr == rates[-1]
    assert loaded.sources == ({KEY: names[-1]} if names else {})


def settings_of(*overrides: str) -> Settings:
    return load(overrides, environment={}).settings


def set_by_hand(loaded: LoadedSettings) -> dict[str, str]:
    """Sources of the settings that do not follow from others by a rule."""
    return {key: source for key, source in loaded.sources.items() if source != "auto"}


def test_a_later_file_wins_and_both_keep_what_only_they_name(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("model: {layers: 2, heads: 4}")
    second.write_text("model: {layers: 3}")
    loaded = load(files=[first, second], environment={})
    assert (loaded.settings.model.layers, loaded.settings.model.heads) == (3, 4)
    assert set_by_hand(loaded) == {"model.layers": str(second), "model.heads": str(first)}


@pytest.mark.parametrize("name", ["sft", "lora"])
def test_naming_one_field_leaves_the_other_defaults(name: str) -> None:
    own = getattr(Settings(), name).optim
    changed = getattr(settings_of(f"{name}.optim.lr=0.5"), name).optim
    assert changed == own.model_copy(update={"lr": 0.5})


@pytest.mark.parametrize("text", ["sft:\nlora: {optim: {}}", "# nothing\n"])
def test_an_empty_section_changes_nothing(tmp_path: Path, profile: str, text: str) -> None:
    loaded = load(files=[settings_file(tmp_path, text)], profiles=[profile], environment={})
    assert loaded.settings.sft.optim.lr == LAYERS["profile"]
    assert loaded.sources == {KEY: "profile mine"}


def test_unknown_keys_name_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_file(tmp_path, "sft: {epoch: 2}")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "bad.yaml").write_text("runtime: {device_: cpu}")
    monkeypatch.setattr(loading, "configs_directory", lambda: tmp_path)
    messages = {
        "command line": refused("pretrain.optm.lr=1"),
        str(path): refused(files=[path]),
        "TTRAIN__MODEL__LAYER": refused(environment={"TTRAIN__MODEL__LAYER": "3"}),
        "profile bad": refused(profiles=["bad"]),
    }
    near = ["pretrain.optim.lr", "sft.epochs", "model.layers", "runtime.device"]
    for (origin, message), neighbour in zip(messages.items(), near, strict=True):
        assert f"(from {origin})" in message
        assert f"did you mean '{neighbour}'?" in message


def test_a_wrong_value_says_setting_value_origin_and_rule(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "model: {layers: many}")
    device = {"TTRAIN__RUNTIME__DEVICE": "gpu"}
    two_rules = refused("pretrain.optim.lr=.nan", "model.layers=0")
    cases = {
        refused("sft.optim.lr=-1"): "sft.optim.lr | -1 | command line | greater than 0",
        refused(files=[path]): f"model.layers | 'many' | {path} | a whole number",
        refused(environment=device): "runtime.device | 'gpu' | TTRAIN__RUNTIME__DEVICE"
        " | 'auto', 'cpu', 'cuda' or 'mps'",
        refused("sft=3"): "sft | 3 | command line | a group of names",
        two_rules: "pretrain.optim.lr | nan | finite | model.layers | 0",
    }
    for message, parts in cases.items():
        assert [part for part in parts.split(" | ") if part not in message] == [], message
        assert "pydantic" not in message


# Overrides, separated by " & ", and the parts of the message, by " | ".
RULES = """
pretrain.tokens_per_step=1000 -> pretrain | tokens_per_step is 1000 | row_length 256 | try 1024
model.hidden_size=100 & model.heads=3 -> model.hidden_size is 100 | model.heads 3 | \
try model.hidden_size=102
model.heads=3 & model.hidden_size=129 -> size is 129 | heads of 43 | multiple of 6 | hidden_size=132
model.heads=4 & model.kv_heads=3 -> model.kv_heads is 3 | model.heads 4
evaluate.stride=300 -> evaluate.stride is 300 | evaluate.row_length 256
model.max_length=128 -> row_length is 256 | model.max_length is 128 | model.max_length=256
sft.tokens=5 & sft.epochs=1 -> sft: tokens is 5 and epochs is 1.0 | set the other to null
sft.tokens=null & sft.epochs=null -> sft: tokens and epochs are both empty | set one
sft.epochs=true -> sft.epochs is true (from command line) but must be a number
lora.rank=no -> lora.rank is false (from command line) but must be a number
name=modèle -> name is 'modèle' (from command line) but must be text that matches ^[A-Za-z0-9]
nightly.timezone=Berlin -> nightly.timezone is 'Berlin' (from command line) but must be the name \
of a time zone
SFT.EPOCHS=2 -> did you mean 'sft.epochs'?
data.pretrain=[python-docs, a.jsonl] -> data.pretrain mixes python-docs with files
data.sft_heldout=held.jsonl -> data.sft_heldout
data.pretrain=none & data.sft=none & data.dpo=none & data.lora=none -> data.lora are none, but | \
set one, such as data.pretrain=FILE
nightly.rate=fast -> nightly.rate is 'fast' (from command line) but must be 'auto' or a number
nightly.rate=0 -> must be 'auto' or greater than 0
pretrain.optim.betas=[a, 0.9] -> pretrain.optim.betas.0 is 'a'
lr=1e-3 -> did you mean 'pretrain.optim.lr' or 'sft.optim.lr' or 'dpo.optim.lr' or 'lora.optim.lr'?
vocab_size=500 -> did you mean 'tokenizer.vocab_size'?
sft -> 'sft' is not a setting; write key=value
sft.epochs=[1 -> not valid YAML
"""


@pytest.mark.parametrize("rule", RULES.strip().splitlines())
def test_what_breaks_a_rule_is_refused_with_the_rule_and_a_fix(rule: str) -> None:
    overrides, _, parts = rule.partition(" -> ")
    message = refused(*overrides.split(" & "))
    assert [part for part in parts.split(" | ") if part not in message] == [], message


def test_a_setting_twice_in_a_file_or_behind_a_wrong_prefix_is_refused(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "sft.epochs: 2\nsft: {epochs: 3}\n", "twice.yaml")
    message = refused(files=[path])
    assert "'sft.epochs'" in message and "twice.yaml" in message
    message = refused(environment={"TTRAIN_SFT__EPOCHS": "3"})
    assert "TTRAIN_SFT__EPOCHS" in message and "TTRAIN__SFT__EPOCHS" in message


@pytest.mark.parametrize(
    ("stage", "chosen", "other", "budget"),
    [("pretrain", "epochs", "tokens", (None, 2.0)), ("sft", "tokens", "epochs", (2, None))],
)
def test_one_budget_clears_the_other(stage: str, chosen: str, other: str, budget: Any) -> None:
    loaded = load([f"{stage}.{chosen}=2"], environment={})
    section = getattr(loaded.settings, stage)
    assert (section.tokens, section.epochs) == budget
    assert set_by_hand(loaded) == {
        f"{stage}.{chosen}": "command line",
        f"{stage}.{other}": f"{stage}.{chosen} is set",
    }
    weaker = load([f"{stage}.{chosen}=2"], environment={f"TTRAIN__{stage}__{other}".upper(): "7"})
    assert getattr(weaker.settings, stage) == section


def test_missing_names_are_reported_and_fifteen_neighbours_are_not(tmp_path: Path) -> None:
    assert "'runtime.stages" not in refused("timeout_seconds=5"), "fifteen say nothing"
    assert "small" in refused(profiles=["huge"]), "an unknown profile names those there are"
    assert "nowhere.yaml" in refused(files=[tmp_path / "nowhere.yaml"])


WHOLE = ("*.jsonl", "data #2", "2026-11-28", "2026", "0123", "no", "on", "null-1", "a: b")
WHOLE += ("- a", "&a", "!x", "%x", "'")


@pytest.mark.parametrize("text", WHOLE)
def test_a_text_is_taken_whole_whatever_yaml_reads_in_it(text: str) -> None:
    files = {"data.pretrain": (text,), "data.tokenizer": (text,)}
    for key, value in {**files, "reading.text_field": text, "tokenizer.existing": text}.items():
        section, name = key.split(".")
        variable = f"TTRAIN__{section}__{name}".upper()
        for loaded in (load([f"{key}={text}"], environment={}), load(environment={variable: text})):
            assert getattr(getattr(loaded.settings, section), name) == value


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("sft.seed=0123", 123),
        ("sft.optim.lr=3e-4", 3e-4),
        ("runtime.deterministic=no", False),
        ("runtime.compile=Yes", True),
        ("runtime.guards=off", "off"),
        ("runtime.threads=null", None),
        ("runtime.threads=none", None),
        ("tokenizer.existing=null", None),
        ("dpo.adapter=none", "none"),
        ("nightly.rate=2", 2.0),
        ("name='0123'", "0123"),
        ("data.pretrain=a.jsonl, b.jsonl", ("a.jsonl", "b.jsonl")),
        ("data.pretrain=[a.jsonl, b.jsonl]", ("a.jsonl", "b.jsonl")),
        ("data.pretrain=[2026-11-28, no, 'a,b']", ("2026-11-28", "no", "a,b")),
        ("data.pretrain=[{path: 0123, weight: 2}]", ({"path": "0123", "weight": 2.0},)),
        ("data.pretrain='[ab].jsonl'", ("[ab].jsonl",)),
        ("pretrain.start_from=[a]", "[a]"),
        ("evaluate.chats=Hello, you", ("Hello, you",)),
        ("runtime.gpus=1", (1,)),
        ("pretrain.mask_intervals=[[yes, no], [1, 2]]", (("yes", "no"), (1, 2))),
        ("model.fields.depth=[1, 0.002, yes, a]", [1, 0.002, True, "a"]),
    ],
)
def test_the_type_of_a_setting_says_what_its_text_means(assignment: str, value: Any) -> None:
    values = dict(flatten(settings_of(assignment).model_dump()))
    assert values[assignment.partition("=")[0]] == value


def test_what_follows_a_list_or_a_value_of_any_type_is_not_dropped() -> None:
    assert "'a #2'" in refused("model.fields.depth=a #2")
    message = refused("data.pretrain=[a, b] #2")
    assert "'[a, b] #2'" in message and "'#2'" in message


def test_a_wrong_source_of_a_weighted_list_is_named_without_inner_names() -> None:
    missing = "data.sft.0 is {'weight': 2} (from command line) but needs the key 'path'"
    assert refused("data.sft=[{weight: 2}]") == missing
    assert refused("data.sft=[{path: a, weight: 0}, {path: b, wight: 1}]") == (
        "data.sft.0.weight is 0 (from command line) but must be greater than 0\n"
        "data.sft.1.wight is 1 (from command line) but there is no such setting"
    )


def _sections(model: BaseModel) -> list[BaseModel]:
    sections = [model]
    for name in type(model).model_fields:
        value = getattr(model, name)
        sections += _sections(value) if isinstance(value, BaseModel) else []
    return sections


def test_all_sections_are_frozen_and_closed() -> None:
    sections = _sections(Settings())
    assert len(sections) > 12
    for section in sections:
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
        with pytest.raises(ValidationError, match="Extra inputs"):
            type(section).model_validate({**section.model_dump(), "surprise": 1})


def test_settings_are_equal_after_json_and_every_key_can_be_set(tmp_path: Path) -> None:
    given = ("pretrain.epochs=2", "data.pretrain=a.jsonl", "evaluate.chats=[Hello]")
    settings = settings_of(*given, "model.kv_heads=1")
    text = json.dumps(settings.model_dump(mode="json"))
    assert load(files=[settings_file(tmp_path, text)], environment={}).settings == settings
    default = dict(flatten(Settings().model_dump(mode="json")))
    assert set(known_keys()) == set(default)
    by_name = [f"{key}={json.dumps(value)}" for key, value in default.items()]
    assert settings_of(*by_name) == Settings()


def test_config_show_prints_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, runner = settings_file(tmp_path, "model: {layers: 3}"), CliRunner()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTRAIN__SFT__SEED", "5")
    done = runner.invoke(app, ["config", "show", "sft.epochs=2", "-c", path.name])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0, done.output
    assert {
        "sft.epochs: 2.0  # command line",
        "model.layers: 3  # settings.yaml",
        "sft.seed: 5  # TTRAIN__SFT__SEED",
        'model.kind: "qwen3"  # default',
    } <= set(lines)
    assert [line.partition(":")[0] for line in lines] == known_keys()
    command = ["config", "show", "--json"]
    shown = json.loads(runner.invoke(app, [*command, "--profile", "small"]).stdout)
    assert shown["name"] == {"value": "small", "source": "profile small"}
    assert set(shown) == set(known_keys())
    schema = json.loads(runner.invoke(app, [*command[:2], "--schema"]).stdout)
    assert schema["properties"].keys() == Settings.model_fields.keys()
    assert schema["additionalProperties"] is False
    assert json.loads(runner.invoke(app, [*command, "--schema"]).stdout) == schema


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_DEBUG", "")  # which the option changes
    with pytest.raises(SystemExit) as ended:
        main(["--debug", "config", "show", "sft.epoch=2"])
    error = capsys.readouterr().err
    assert ended.value.code != 0 and "Traceback" in error and "UsageError" in error


def test_a_section_that_is_absent_by_default_can_be_set_by_one_of_its_names() -> None:
    settings = settings_of("sft.early_stopping.patience=2", "sft.validate_every_steps=5")
    assert settings.sft.early_stopping is not None and settings.sft.early_stopping.patience == 2
    assert settings.pretrain.early_stopping is None
    assert "'sft.early_stopping.patience'" in refused("sft.early_stopping.patienc=2")


# --- settings of pretraining that follow from others where they are `auto`


def followed(*overrides: str) -> dict[str, Any]:
    values = dict(flatten(settings_of(*overrides).model_dump()))
    return {key: values[key] for key in rules.KEYS}


def test_the_defaults_are_what_auto_makes_of_them() -> None:
    usual = dict(flatten(Settings().model_dump()))
    assert rules.automatic(usual) == {key: usual[key] for key in rules.KEYS}


OWN_HEAD = {rules.TIED: False, HEAD_RATE: 8e-3}
ONE_RATE = {rules.BETAS_KEY: (0.9, 0.95), EMBEDDING_RATE: None, HEAD_RATE: None}
FOLLOWING = {  # {overrides: what of the settings that follow changes}
    "model.layers=8": OWN_HEAD,  # a head of 0.16 of the layers' parameters
    "model.layers=8 model.tie_embeddings=true": {},
    "pretrain.tokens=100k": {rules.BATCH_KEY: 1024},
    "pretrain.tokens=1M": {rules.BATCH_KEY: 2048},
    "pretrain.tokens=20M": {rules.BATCH_KEY: 8192},
    "pretrain.tokens=1B": {rules.BATCH_KEY: 65536},
    "pretrain.tokens=null pretrain.epochs=10": {"pretrain.optim.weight_decay": 0.5},
    "pretrain.tokens=null pretrain.epochs=10 pretrain.teacher=x": {
        "pretrain.optim.weight_decay": 0.3
    },
    "pretrain.optim.kind=adamw": ONE_RATE,
    "pretrain.start_from=./model": ONE_RATE,
    "pretrain.optim.head_lr=0.1 pretrain.optim.head_lr=auto": {},
    "model.tie_embeddings=false": OWN_HEAD,
    "tokenizer.vocab_size=1000": OWN_HEAD,
    "model.hidden_size=512 model.heads=8": {
        rules.TIED: False,
        EMBEDDING_RATE: 0.02,
        HEAD_RATE: 4e-3,
    },
    "pretrain.optim.betas=[0.9,0.99]": {rules.BETAS_KEY: (0.9, 0.99)},
}


@pytest.mark.parametrize(("overrides", "changes"), FOLLOWING.items())
def test_settings_follow_from_others(overrides: str, changes: dict[str, Any]) -> None:
    assert followed(*overrides.split()) == {**followed(), **changes}


@pytest.mark.parametrize("stage", TRAININGS)
def test_the_settings_of_a_training_stage_reach_a_rank_that_is_started_anew(stage: str) -> None:
    config = Settings.rebuilt(STAGES[stage].part_of(Settings()))
    assert pickle.loads(pickle.dumps(config)) == config


def chosen(*overrides: str) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The data sets that are not none, and the stages that train."""
    settings = settings_of(*overrides)
    paths = {name: settings.data.paths(name) for name in TRAININGS}
    return {name: files for name, files in paths.items() if files}, settings.trainings


@pytest.mark.parametrize(
    "own", [("pretrain",), ("pretrain", "sft"), ("pretrain", "lora"), ("pretrain", "sft", "dpo")]
)
def test_what_is_not_named_is_not_trained(own: tuple[str, ...]) -> None:
    data, trainings = chosen(*(f"data.{name}={name}.jsonl" for name in own))
    assert data == {name: (f"{name}.jsonl",) for name in own}
    assert trainings == own


@pytest.mark.parametrize(
    ("overrides", "trainings"),
    [
        ("", "pretrain sft lora"),
        ("data.pretrain=python-docs", "pretrain sft lora"),
        ("data.dpo=python-docs", "pretrain sft dpo lora"),
        ("data.lora=none", "pretrain sft"),
        ("data.lora=null", "pretrain sft"),
        ("data.sft=[none]", "pretrain lora"),
        ("data.sft=none data.lora=none", "pretrain"),
        ("data.pretrain=a.jsonl data.lora=python-docs", "pretrain lora"),
        ("data.tokenizer=a.jsonl", "pretrain sft lora"),
        ("data.sft=a.jsonl sft.start_from=owner/name", "sft"),  # without documents
        ("data.lora=a.jsonl lora.start_from=owner/name", "lora"),
    ],
)
def test_the_quickstart_is_trained_unless_a_set_is_none(overrides: str, trainings: str) -> None:
    assert " ".join(chosen(*overrides.split())[1]) == trainings


def test_a_stage_starts_from_the_nearest_one_that_has_data() -> None:
    assert chosen("data.sft=a.jsonl", "sft.start_from=owner/name")[0] == {"sft": ("a.jsonl",)}
    data = ("data.pretrain=a", "data.lora=c")
    starts = settings_of(*data, "data.dpo=b").starts
    assert (starts["dpo"], starts["lora"]) == ("pretrain", "dpo")
    assert settings_of(*data).starts["lora"] == "pretrain"
    message = refused(*data, "lora.start_from=sft")
    assert "lora.start_from" in message and "data.sft" in message
    assert "lora.start_from=pretrain" in message
