"""Settings: who wins, where a value came from, what a wrong one says; and the same through the command line."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from ttrain.cli.main import app, main
from ttrain.config import Night, Settings, flatten, loading
from ttrain.config.loading import LoadedSettings, known_keys, load
from ttrain.errors import UsageError
from ttrain.pipeline.names import settings_of

KEY, VARIABLE = "sft.optim.lr", "TTRAIN__SFT__OPTIM__LR"
LAYERS = {"profile": 1e-4, "file": 2e-4, "environment": 3e-4, "command line": 4e-4}  # the weakest first


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile `mine` that sets the learning rate."""
    directory = tmp_path / "configs" / "profiles"
    directory.mkdir(parents=True)
    (directory / "mine.yaml").write_text(f"sft: {{optim: {{lr: {LAYERS['profile']}}}}}\n")
    monkeypatch.setattr(loading, "configs_directory", lambda: tmp_path / "configs")
    return "mine"


def settings_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(*overrides: str, **layers: Any) -> str:
    with pytest.raises(UsageError) as raised:
        load(overrides, **{"environment": {}, **layers})
    return str(raised.value)


@pytest.mark.parametrize("present", list(product((False, True), repeat=4)))
def test_the_strongest_layer_that_names_a_value_wins_and_is_named_as_its_source(
    tmp_path: Path, profile: str, present: tuple[bool, ...]
) -> None:
    names = [layer for layer, there in zip(LAYERS, present, strict=True) if there]
    path = settings_file(tmp_path, f"sft: {{optim: {{lr: {LAYERS['file']}}}}}")
    loaded = load(
        [f"{KEY}={LAYERS['command line']}"] if "command line" in names else [],
        files=[path] if "file" in names else [],
        profiles=[profile] if "profile" in names else [],
        environment={VARIABLE: str(LAYERS["environment"])} if "environment" in names else {},
    )
    sources = {"profile": "profile mine", "file": str(path), "environment": VARIABLE, "command line": "command line"}
    assert loaded.settings.sft.optim.lr == (LAYERS[names[-1]] if names else Settings().sft.optim.lr)
    assert loaded.sources == ({KEY: sources[names[-1]]} if names else {})


def set_by_hand(loaded: LoadedSettings) -> dict[str, str]:
    """Sources of the settings that do not follow from others by a rule."""
    return {key: source for key, source in loaded.sources.items() if source != "auto"}


def test_a_later_file_wins_over_an_earlier_one_and_both_keep_what_only_they_name(tmp_path: Path) -> None:
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    first.write_text("model: {layers: 2, heads: 4}")
    second.write_text("model: {layers: 3}")
    loaded = load(files=[first, second], environment={})
    assert (loaded.settings.model.layers, loaded.settings.model.heads) == (3, 4)
    assert set_by_hand(loaded) == {"model.layers": str(second), "model.heads": str(first)}


@pytest.mark.parametrize("name", ["pretrain", "sft", "lora"])
def test_naming_one_field_of_a_section_leaves_the_stages_own_defaults_of_the_others(name: str) -> None:
    own = getattr(Settings(), name).optim
    assert getattr(load([f"{name}.optim.lr=0.5"], environment={}).settings, name).optim == own.model_copy(update={"lr": 0.5})


@pytest.mark.parametrize("text", ["sft: {}", "sft: {optim: {}}", "", "# nothing\n"])
def test_an_empty_section_in_a_file_changes_nothing(tmp_path: Path, profile: str, text: str) -> None:
    loaded = load(files=[settings_file(tmp_path, text)], profiles=[profile], environment={})
    assert loaded.settings.sft.optim.lr == LAYERS["profile"]
    assert loaded.sources == {KEY: "profile mine"}


def test_the_environment_of_the_process_is_read_and_other_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN__MODEL__LAYERS", "3")
    monkeypatch.setenv("TTRAIN_HOME", "somewhere")
    assert load().settings.model.layers == 3
    assert load().sources == {"model.layers": "TTRAIN__MODEL__LAYERS"}


def test_an_unknown_key_names_its_nearest_neighbour_and_its_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_file(tmp_path, "sft: {epoch: 2}")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "bad.yaml").write_text("runtime: {device_: cpu}")
    monkeypatch.setattr(loading, "configs_directory", lambda: tmp_path)
    said = {
        "command line": refused("pretrain.optm.lr=1"),
        str(path): refused(files=[path]),
        "TTRAIN__MODEL__LAYER": refused(environment={"TTRAIN__MODEL__LAYER": "3"}),
        "profile bad": refused(profiles=["bad"]),
    }
    near = ["pretrain.optim.lr", "sft.epochs", "model.layers", "runtime.device"]
    for (origin, message), neighbour in zip(said.items(), near, strict=True):
        assert f"(from {origin})" in message
        assert f"did you mean '{neighbour}'?" in message


def test_a_key_whose_section_was_left_out_names_all_that_end_so() -> None:
    assert "did you mean 'pretrain.optim.lr' or 'sft.optim.lr' or 'dpo.optim.lr' or 'lora.optim.lr'?" in refused("lr=1e-3")
    assert "did you mean 'tokenizer.vocab_size'?" in refused("vocab_size=500")
    assert "did you mean 'runtime.stages" not in refused("timeout_seconds=5"), "fifteen say nothing"
    assert "small" in refused(profiles=["huge"]), "an unknown profile names those there are"


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.0003", "'3e-4'"])
def test_a_float_may_be_written_as_people_write_it(tmp_path: Path, text: str) -> None:
    """PyYAML reads `3e-4` as a string."""
    from_file = load(files=[settings_file(tmp_path, f"sft: {{optim: {{lr: {text}}}}}")], environment={})
    from_line = load([f"{KEY}={text}"], environment={})
    from_environment = load(environment={VARIABLE: text})
    assert [loaded.settings.sft.optim.lr for loaded in (from_file, from_line, from_environment)] == [3e-4] * 3


def test_a_wrong_value_says_setting_value_origin_and_rule(tmp_path: Path) -> None:
    path = settings_file(tmp_path, "model: {layers: many}")
    cases = {
        refused("sft.optim.lr=-1"): ("sft.optim.lr", "-1", "command line", "greater than 0"),
        refused(files=[path]): ("model.layers", "'many'", str(path), "a whole number"),
        refused(environment={"TTRAIN__RUNTIME__DEVICE": "gpu"}): (
            "runtime.device", "'gpu'", "TTRAIN__RUNTIME__DEVICE", "'auto', 'cpu', 'cuda' or 'mps'",
        ),
        refused("name=a/b"): ("name", "'a/b'", "command line", "pattern"),
        refused("sft=3"): ("sft", "3", "command line", "a group of names"),
        refused("pretrain.optim.lr=.nan"): ("pretrain.optim.lr", "nan", "command line", "finite"),
        refused("pretrain.seed=4294967296"): ("pretrain.seed", "4294967296", "command line", "less than"),
    }  # fmt: skip
    for message, parts in cases.items():
        assert [part for part in parts if part not in message] == [], message
        assert "pydantic" not in message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["pretrain.tokens_per_step=1000"], ["pretrain", "tokens_per_step is 1000", "row_length 256", "try 1024"]),
        (
            ["model.hidden_size=100", "model.heads=3"],
            ["model.hidden_size is 100", "model.heads 3", "try model.hidden_size=102"],
        ),
        (["model.heads=3"], ["model.hidden_size is 128", "model.heads 3", "try model.hidden_size=132"]),
        (
            ["model.heads=3", "model.hidden_size=129"],
            ["model.hidden_size is 129", "heads of 43", "multiple of 6", "try model.hidden_size=132"],
        ),
        (["model.heads=4", "model.kv_heads=3"], ["model.kv_heads is 3", "model.heads 4"]),
        (["evaluate.stride=300"], ["evaluate.stride is 300", "evaluate.row_length 256"]),
        (["model.max_length=128"], ["row_length is 256", "model.max_length is 128", "model.max_length=256"]),
    ],
)
def test_a_broken_rule_between_settings_names_both_and_a_cure(overrides: list[str], parts: list[str]) -> None:
    message = refused(*overrides)
    assert [part for part in parts if part not in message] == [], message


def test_every_wrong_setting_is_named_at_once() -> None:
    message = refused("sft.optim.lr=-1", "model.layers=0")
    assert "sft.optim.lr" in message
    assert "model.layers" in message


@pytest.mark.parametrize(
    ("item", "budget"),
    [
        ("pretrain.epochs=2", (None, 2.0)),
        ("pretrain.tokens=5000", (5000, None)),
        ("sft.tokens=5000", (5000, None)),
        ("sft.epochs=3", (None, 3.0)),
        ("lora.tokens=5000", (5000, None)),
    ],
)
def test_naming_one_budget_clears_the_default_of_the_other(item: str, budget: tuple[int | None, float | None]) -> None:
    loaded = load([item], environment={})
    name, _, chosen = item.partition("=")[0].partition(".")
    section = getattr(loaded.settings, name)
    assert (section.tokens, section.epochs) == budget
    other = "epochs" if chosen == "tokens" else "tokens"
    assert set_by_hand(loaded) == {f"{name}.{chosen}": "command line", f"{name}.{other}": f"{name}.{chosen} is set"}


@pytest.mark.parametrize("overrides", [["sft.tokens=5", "sft.epochs=1"], ["sft.tokens=null", "sft.epochs=null"]])
def test_two_budgets_or_none_are_refused(overrides: list[str]) -> None:
    message = refused(*overrides)
    assert "set one of tokens" in message
    assert "sft" in message


def test_a_key_that_yaml_takes_for_a_boolean_is_a_name_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    written = "notify: {on: [failed], command: [tell]}"
    path = tmp_path / "mine.yaml"
    path.write_text(written, encoding="utf-8")
    assert load([], files=[path], environment={}).settings.notify.on == ("failed",)
    assert load(["notify={on: [kept]}"], environment={}).settings.notify.on == ("kept",)
    assert load(["runtime.deterministic=on"], environment={}).settings.runtime.deterministic is True  # a value still is one


def test_python_docs_do_not_mix_with_files() -> None:
    assert "data.pretrain mixes python-docs with files" in refused("data.pretrain=[python-docs, a.jsonl]")
    assert "data.sft_heldout" in refused("data.sft_heldout=held.jsonl")
    assert "data.lora is [] (from command line) but must be a list of 1 or more" in refused("data.lora=null")
    assert load(["data.sft=a.jsonl", "data.sft_heldout=held.jsonl"], environment={}).settings.data.sft == ("a.jsonl",)


def test_a_setting_of_several_forms_is_told_once_with_all_of_them() -> None:
    assert refused("nightly.rate=fast") == "nightly.rate is 'fast' (from command line) but must be 'auto' or a number"
    assert refused("nightly.rate=0").endswith("must be 'auto' or greater than 0.0")
    assert "pretrain.optim.betas.0 is 'a'" in refused("pretrain.optim.betas=[a, 0.9]"), "a place in a list is no form"


@pytest.mark.parametrize("value", ["a.jsonl, b.jsonl", "[a.jsonl, b.jsonl]"])
def test_paths_come_as_a_list_or_between_commas(value: str) -> None:
    assert load([f"data.pretrain={value}"], environment={}).settings.data.pretrain == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    ("text", "part"),
    [("a: [", "not valid YAML"), ("- a\n- b", "mapping"), ("1: 2", "mapping"), ("sft: {1: 2}", "unknown setting 'sft.1'")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = settings_file(tmp_path, text)
    message = refused(files=[path])
    assert part in message
    assert str(path) in message


def nested(bomb: str) -> str:
    """30 lines, each of which stands for ten of the line before it."""
    lines = (f"a{n}: &a{n} {bomb.replace('*', ', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 30))
    return "\n".join(["a0: &a0 {k: 1}", *lines])


TRAPS: dict[str, tuple[str | bytes, str]] = {
    "a day that is none": ("name: 2026-02-30", "line 1, column 7: '2026-02-30' looks like a date but is not one; put text"),
    "an integer without text": ("seed: !!int ''", "looks like an integer but is not one"),
    "a truth that is none": ("seed: !!bool perhaps", "'perhaps' looks like a value of its type but is not one"),
    "a path that is too long": (f"data: {{pretrain: {'x' * 5000}}}\nsft: {{epochs: x}}", "sft.epochs is 'x'"),
    "a zone that is none": ("name: 2001-12-14t21:59:43.10-99:00", "looks like a date but is not one"),
    "5,000 digits": (f"seed: 1{'9' * 5000}", "line 1, column 7: '1999"),
    "5,000 digits of 16": (f"seed: 0x{'f' * 5000}", "has more than 64 bits"),
    "no digits": ("sft:\n  epochs: 0b_", "line 2, column 11: '0b_' looks like an integer but is not one"),
    "a list in itself": ("sft: &a [*a]", "line 1, column 10: the alias *a contains itself"),
    "a mapping in itself": ("sft: &a {b: *a}", "the alias *a contains itself"),
    "3,000 lists": (f"sft: {'[' * 3000}", "line 1, column 55: it is nested more than 50 deep"),
    "3,000 mappings": (f"sft: {'{a: ' * 3000}", "nested more than 50 deep"),
    "3,000 names": (f"{'.'.join('a' * 3000)[:900]}: 1", "unknown setting 'a.a.a"),
    "3,000 names of an open setting": (
        f"model: {{fields: {{{'.'.join('a' * 400)}: 1}}}}",
        "unknown setting 'model.fields.a.a",
    ),
    "aliases": (nested("[*]"), "line 5, column 40: it holds more than 25,000 values or 1,048,576 characters, aliases"),
    "merges": (nested("{<<: [*]}"), "it holds more than 25,000 values"),
    "a long text by aliases": (f"a: &a '{'x' * 300_000}'\nb: [*a, *a, *a, *a]", "line 2, column 13: it holds more than"),
    "20,000 unknown settings": ("\n".join(f"key{n}: 1" for n in range(20_000)), "it holds more than 25,000 values"),
    "10,000 unknown settings": ("\n".join(f"key{n}: 1" for n in range(10_000)), "unknown setting 'key0'"),
    "20,000 times one setting": (f"sft: {{{', '.join(['lr: 1'] * 20_000)}}}", "it holds more than 25,000 values"),
    "10,000 times one setting": (f"sft: {{{', '.join(['lr: 1'] * 10_000)}}}", "'lr' is given twice"),
    "a long value": (f"sft: {{epochs: {'x' * 900_000}}}", "sft.epochs is 'xxxx"),
    "2 MB": ("a: " + "x" * 2_000_000, "it is longer than 1 MiB"),
    "a tag of Python's": ("sft: !!python/object/apply:os.system [id]", "is not a plain type; leave it out"),
    "bytes": ("name: !!binary aGk=", "is not a plain type; leave it out"),
    "a set": ("name: !!set {a}", "is not a plain type; leave it out"),
    "a long anchor": (f"sft: *{'x' * 100_000}", "line 1, column 6: found undefined alias"),
    "a bell": ("sft:\n  a: \x07", "line 2: a character that YAML does not allow"),
    "no UTF-8": (b"sft:\n  a: \xff", "line 2: it is not UTF-8"),
    "a list as a key": ("sft: {? [a, b] : 1}", "line 1, column 9: found unhashable key"),
    "two documents": ("--- 1\n--- 2", "another document"),
    "a line break in a key": ('"a\\nb": 1', "unknown setting 'a b'"),
}


@pytest.mark.parametrize(("text", "message"), TRAPS.values(), ids=TRAPS)
def test_a_file_that_is_a_trap_is_answered_soon_and_in_one_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    begun = time.process_time()
    said = refused(files=[path])
    assert time.process_time() - begun < 3  # 0.4 s at most on a quiet core; one that is shared counts up to three times that
    assert message in said and str(path) in said
    assert "\n" not in said and len(said) < 700


IN_VALUES = (
    "a day that is none", "5,000 digits", "no digits", "a list in itself", "3,000 lists", "3,000 names", "aliases", "merges",
    "10,000 times one setting", "a tag of Python's", "a bell", "two documents", "a line break in a key",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_VALUES)
def test_the_same_in_a_variable_and_on_the_command_line(name: str) -> None:
    text, begun = TRAPS[name][0], time.process_time()
    for call in (
        lambda: load([f"sft.epochs={text}"], environment={}), lambda: load([text], environment={}),
        lambda: load([f"{text}=1"], environment={}), lambda: load(environment={"TTRAIN__SFT__EPOCHS": text}),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "folder"])
def test_what_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = {"/dev/zero": Path("/dev/zero"), "folder": tmp_path}.get(kind, tmp_path / "pipe")
    if kind == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(b"",), daemon=True).start()  # else who reads it would wait forever
    assert refused(files=[path]) == (
        f"cannot read settings from {path}: it is not a regular file; write the settings into one"
    )
    if kind == "pipe":
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # which ends the thread


def test_10_000_settings_of_an_architecture_are_read_soon(tmp_path: Path) -> None:
    fields = {f"field{number}": number for number in range(10_000)}
    path = settings_file(tmp_path, json.dumps({"model": {"fields": fields}}))
    begun = time.process_time()
    assert load(files=[path], environment={}).settings.model.fields == fields
    assert time.process_time() - begun < 4  # 0.6 s on a quiet core


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), values, max_size=4),
    max_leaves=8,
)
WORDS = (
    "sft:", "model:", "  fields:", "  epochs:", "  optim: {lr:", "&a", "*a", "<<:", "- ", "[", "]", "{", "}", ",", "!!int",
    "!!str", "!!float", "!!null", "|", ">", "'", '"', "\n", "  ", "?", ":", "=", "~", "0x", "1_0", "0b1", "1e400", ".nan",
    "2026-13-01", "12:61", "---", "...", "%YAML 1.1", "\t", "#", "é",
)  # fmt: skip
LINES = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=25)
TREES = st.dictionaries(st.sampled_from(known_keys()), VALUES, max_size=3).map(yaml.dump)


@given_settings(max_examples=30, deadline=None)
@given(st.one_of(LINES.map(" ".join), LINES.map("".join), TREES))
def test_whatever_a_file_says_is_read_or_refused_in_lines(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "settings.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        for call in (lambda: load(files=[path], environment={}), lambda: load([f"sft.epochs={text}"], environment={})):
            try:
                call()
            except UsageError as error:
                assert all(len(line) < 700 for line in str(error).split("\n"))


def test_a_missing_file_and_a_stray_word_are_a_users_mistake(tmp_path: Path) -> None:
    assert "nowhere.yaml" in refused(files=[tmp_path / "nowhere.yaml"])
    assert "'sft' is not a setting; write key=value" in refused("sft")
    assert "not valid YAML" in refused("sft.epochs=[1")


def _sections(model: BaseModel) -> list[BaseModel]:
    inner = [value for name in type(model).model_fields if isinstance(value := getattr(model, name), BaseModel)]
    return [model, *(section for value in inner for section in _sections(value))]


def test_all_sections_are_frozen_and_closed() -> None:
    sections = _sections(Settings())
    assert len(sections) > 12
    for section in sections:
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
        with pytest.raises(ValidationError, match="Extra inputs"):
            type(section).model_validate({**section.model_dump(), "surprise": 1})


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["pretrain.epochs=2", "data.pretrain=a.jsonl", "evaluate.chats=[Hello]"],
        ["model.kv_heads=1", "runtime.threads=3"],
    ],
)
def test_settings_dumped_as_json_and_loaded_again_are_equal(tmp_path: Path, overrides: list[str]) -> None:
    settings = load(overrides, environment={}).settings
    text = json.dumps(settings.model_dump(mode="json"))
    assert Settings.model_validate(json.loads(text)) == settings
    assert load(files=[settings_file(tmp_path, text)], environment={}).settings == settings


def test_the_json_schema_describes_every_section() -> None:
    schema = Settings.model_json_schema()
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["additionalProperties"] is False
    assert json.loads(json.dumps(schema)) == schema


def test_every_known_key_can_be_set_by_its_own_name() -> None:
    default = dict(flatten(Settings().model_dump(mode="json")))
    assert set(known_keys()) == set(default)
    items = [f"{key}={json.dumps(value)}" for key, value in default.items()]
    assert load(items, environment={}).settings == Settings()


def test_config_show_prints_every_value_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settings_file(tmp_path, "model: {layers: 3}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TTRAIN__SFT__SEED", "5")
    done = CliRunner().invoke(app, ["config", "show", "sft.epochs=2", "-c", path.name])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0, done.output
    assert {
        "sft.epochs: 2.0  # command line", "model.layers: 3  # settings.yaml", "sft.seed: 5  # TTRAIN__SFT__SEED",
        "model.kind: \"qwen3\"  # default",
    } <= set(lines)  # fmt: skip
    assert [line.partition(":")[0] for line in lines] == known_keys()


def test_config_show_as_json_and_the_schema_are_json() -> None:
    runner = CliRunner()
    shown = json.loads(runner.invoke(app, ["config", "show", "--json", "--profile", "small"]).stdout)
    assert shown["name"] == {"value": "small", "source": "profile small"}
    assert set(shown) == set(known_keys())
    assert json.loads(runner.invoke(app, ["config", "schema"]).stdout) == Settings.model_json_schema()


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTRAIN_DEBUG", "")  # which the option changes
    with pytest.raises(SystemExit) as ended:
        main(["--debug", "config", "show", "sft.epoch=2"])
    said = capsys.readouterr().err
    assert ended.value.code != 0 and "Traceback" in said and "UsageError" in said


def test_a_stronger_layer_s_budget_takes_a_weaker_one_s_away(tmp_path: Path) -> None:
    (tmp_path / "weak.yaml").write_text("sft: {epochs: 3}\nlora:\n")
    loaded = load(["sft.tokens=5000"], files=[tmp_path / "weak.yaml"], environment={})
    assert (loaded.settings.sft.tokens, loaded.settings.sft.epochs) == (5000, None)
    assert loaded.settings.lora == load(environment={}).settings.lora, (
        "a section of which nothing is said keeps its defaults"
    )


def test_a_section_that_is_absent_by_default_can_be_set_by_one_of_its_names() -> None:
    found = load(["sft.early_stopping.patience=2", "sft.validate_every_steps=5"], environment={}).settings
    assert found.sft.early_stopping is not None and found.sft.early_stopping.patience == 2
    assert found.pretrain.early_stopping is None
    with pytest.raises(UsageError, match=r"did you mean 'sft\.early_stopping\.patience'"):
        load(["sft.early_stopping.patienc=2"], environment={})


def test_a_time_of_day_is_hour_and_minute_without_quotes_and_nothing_else(tmp_path: Path) -> None:
    for written in ("06:30", "22:30", "6:30"):
        files = [settings_file(tmp_path, f"nightly:\n  deadline: {written}\n")]
        for loaded in (load([], files=files, environment={}), load([f"nightly.deadline={written}"], environment={})):
            assert loaded.settings.nightly.deadline == written.rjust(5, "0")
    assert load(["runtime.night.start=23:05"], environment={}).settings.runtime.night == Night(start="23:05")
    for wrong in ("25:00", "6:30:10", "soon"):
        with pytest.raises(
            UsageError, match=r"nightly\.deadline.*is not a time of day; write hour:minute from 00:00 to 23:59"
        ):
            load([f"nightly.deadline={wrong}"], environment={})


def test_settings_of_earlier_versions_do_not_spoil_their_records_but_can_no_longer_be_set() -> None:
    tree = Settings().model_dump(mode="json")
    tree["pretrain"]["optim"] |= {"muon_momentum": 0.9, "muon_adjust_lr": "original"}
    tree["runtime"]["prefetch_steps"] = 2
    assert Settings.model_validate(tree) == Settings()
    assert settings_of({"run": "old", "settings": tree}) == []
    with pytest.raises(UsageError, match=r"unknown setting 'runtime\.prefetch_steps'"):
        load(["runtime.prefetch_steps=2"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1M", 10**6), ("1.5m", 1_500_000), ("250k", 250_000), ("2e6", 2_000_000), ("1_000_000", 10**6), ("2B", 2 * 10**9)],
)
def test_counts_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert load([f"pretrain.tokens={text}"], environment={}).settings.pretrain.tokens == tokens


@pytest.mark.parametrize("text", ["M", "1.5", "0.5e0", "1e999999999", "1MM", "0k", "-1M", "1 M 2"])
def test_what_is_no_whole_number_above_zero_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"pretrain\.tokens"):
        load([f"pretrain.tokens={text}"], environment={})
