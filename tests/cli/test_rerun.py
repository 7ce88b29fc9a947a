"""`rerun` takes the settings of an earlier run; a run ends with commands that work as printed."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.planned_homes import House
from typer.testing import CliRunner

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.cli.options import SettingsOptions
from ttrain.cli.pipeline import next_steps, with_settings
from ttrain.config import Settings
from ttrain.config.loading import LoadedSettings, load
from ttrain.data import locations
from ttrain.errors import UsageError
from ttrain.lineage.lookup import settings_of
from ttrain.store.run_views import need_run
from ttrain.store.runs import RunRecord


def record(home: Path, settings: Settings, stages: tuple[str, ...] = ("tokenizer", "sft")) -> str:
    made = RunRecord(home, "full", list(stages), settings.model_dump(mode="json"))
    made.finish("failed", {})
    return made.run


def loaded(*overrides: str, files: Any = (), base: Any = ()) -> LoadedSettings:
    return load(overrides, files=files, environment={}, base=base)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("sft.optim.lr=2e-4", "name=mine", "pretrain.epochs=3"),
        ("sft.tokens=9000",),  # which takes the default of sft.epochs away
        ("data.pretrain=[{path: a.jsonl, weight: 2}, b.jsonl]", "data.sft=c.jsonl,d.jsonl"),
        ("model.layers=8", "model.tie_embeddings=true"),  # and not what auto makes of the size
    ],
    ids=" ".join,
)
def test_the_settings_of_a_run_come_back(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    settings = loaded(*overrides).settings
    run = record(tmp_path, settings)
    base = settings_of(need_run(tmp_path, run))
    again = loaded(base=base)
    assert again.settings == settings and bool(base) == bool(overrides)
    sources = {f"run {run}", "sft.tokens is set", "pretrain.epochs is set"}
    assert {*again.sources.values()} <= sources


@pytest.fixture
def calls(built: House, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    options_of_runs: list[dict[str, Any]] = []

    def plan_and_run(pipeline: str, loaded: LoadedSettings, **options: Any) -> None:
        options_of_runs.append({"loaded": loaded, **options})

    monkeypatch.setenv("TTRAIN_HOME", str(built.store.root))
    monkeypatch.setattr(cli_pipeline, "plan_and_run", plan_and_run)
    return options_of_runs


def rerun(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["pipeline", "rerun", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_files_replace_the_settings_of_the_newest_run_and_the_environment_sets_the_runtime_alone(
    built: House, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = built.settings("sft.seed=3")
    run = record(built.store.root, settings)
    out = rerun("sft")
    assert calls[0]["loaded"].settings == settings and calls[0]["force"] == {"sft"}
    assert run in out and out.endswith(" sft.seed=3\n")
    config = built.write("mine.yaml", "lora: {seed: 9}\n")
    assert run not in rerun("sft", "-c", str(config))
    assert calls[1]["loaded"].settings == loaded("lora.seed=9").settings
    monkeypatch.setenv("TTRAIN__SFT__SEED", "8")
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    rerun("sft")
    settings = calls[2]["loaded"].settings
    assert (settings.sft.seed, settings.runtime.threads) == (3, 1)


def test_the_environment_fills_in_a_hidden_source(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://user:hunter2@host/chats.jsonl?sig=1"
    shown = "https://***@host/chats.jsonl?***"
    settings = Settings.model_validate({"data": {"sft": [url], "lora": ["mine.jsonl"]}})
    earlier = {"run": "full-1", "settings": settings.model_dump(mode="json")}
    data = SettingsOptions().over_run(earlier).settings.data
    assert data.sft == (shown,) and data.lora == ("mine.jsonl",)
    with pytest.raises(UsageError, match=r"data\.sft=URL.*TTRAIN__DATA__SFT"):
        locations.expand(data.sft, "data.sft")
    monkeypatch.setenv("TTRAIN__DATA__LORA", "other.jsonl")
    # The environment fills in the URL that is hidden: no other one, and nothing else.
    for value, source in ((url, url), (url.replace("host", "elsewhere"), shown)):
        monkeypatch.setenv("TTRAIN__DATA__SFT", value)
        data = SettingsOptions().over_run(earlier).settings.data
        assert data.sft == (source,) and data.lora == ("mine.jsonl",)


MADE = ("source", "tokenizer", "pretrain", "sft", "lora", "evaluate")


def test_every_command_is_one() -> None:
    _, *lines = next_steps("full-1", Settings(), MADE)
    commands = [line.partition(": ttrain ")[2] for line in lines]
    assert {"pipeline rerun sft --run full-1 sft.epochs=3", "chat sft"} <= {*commands}
    for command in commands:
        words = shlex.split(command)
        root = typer.main.get_command(app)
        while hasattr(root, "commands") and words[0] in root.commands:
            root = root.commands[words.pop(0)]
        root.make_context("ttrain", words)  # raises where it takes no such words


def test_the_command_of_a_url_has_no_password() -> None:
    own = 'data.pretrain=["https://user:secret@host/docs.jsonl?sig=hidden"]'
    command = with_settings(["pipeline", "run", "full", own], "sft.epochs=3")
    assert "https://***@host/docs.jsonl?***" in command
    assert "secret" not in command and "hidden" not in command
