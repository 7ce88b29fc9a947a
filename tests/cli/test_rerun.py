"""`rerun`, the commands that a run ends with, logs, metrics, sets of models, a missing device."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.data_commands import Run, in_process
from support.planned_homes import House

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.cli.options import SettingsOptions
from ttrain.cli.pipeline import next_steps, with_settings
from ttrain.config import Settings
from ttrain.config.loading import LoadedSettings, load
from ttrain.data import locations
from ttrain.errors import UsageError
from ttrain.lineage.lookup import settings_of
from ttrain.store import runs
from ttrain.store.registry import Registry
from ttrain.store.run_views import need_run
from ttrain.store.runs import RunRecord


def record(home: Path, settings: Settings) -> str:
    made = RunRecord(home, "full", ["tokenizer", "sft"], settings.model_dump(mode="json"))
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


def test_files_replace_the_settings_of_the_newest_run_and_the_environment_sets_the_runtime_alone(
    run: Run, built: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[dict[str, Any]]()

    def plan_and_run(pipeline: str, loaded: LoadedSettings, **options: Any) -> None:
        calls.append({"loaded": loaded, **options})

    monkeypatch.setenv("TTRAIN_HOME", str(built.store.root))
    monkeypatch.setattr(cli_pipeline, "plan_and_run", plan_and_run)
    rerun = partial(run, "pipeline", "rerun", "sft")
    settings = built.settings("sft.seed=3")
    earlier = record(built.store.root, settings)
    shown = rerun().out
    assert calls[0]["loaded"].settings == settings and calls[0]["force"] == {"sft"}
    assert earlier in shown and shown.endswith(" sft.seed=3\n")
    assert earlier not in rerun("-c", built.write("mine.yaml", "lora: {seed: 9}\n")).out
    assert calls[1]["loaded"].settings == loaded("lora.seed=9").settings
    monkeypatch.setenv("TTRAIN__SFT__SEED", "8")
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    rerun()
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


def test_every_command_is_one() -> None:
    stages = ("source", "tokenizer", "pretrain", "sft", "lora", "evaluate")
    _, *lines = next_steps("full-1", Settings(), stages)
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


def test_a_missing_device_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run("pipeline", "run", "full", "--engine", "none", "runtime.device=cuda")
    assert done.code == 2 and "runtime.device" in done.err and not Path("home/runs").exists()


def test_a_log_is_printed_and_followed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOG_POLL_SECONDS", 0.01)
    record = RunRecord(Path("home"), "full", ["tokenizer", "sft"], {})
    record.log("tokenizer", "first")
    record.log("sft", "second \x1b[2J")
    lines = run("pipeline", "logs", record.run).out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["tokenizer: first", "sft: second \\x1b[2J"]
    followed = runs.log_lines(Path("home"), record.run, follow=True)
    texts = [next(followed).rpartition(" ")[2], next(followed).rpartition(" ")[2]]
    record.log("sft", "third")
    record.finish("completed", {})
    texts += [line.rpartition(" ")[2] for line in followed]
    assert texts == ["first", "\\x1b[2J", "third"]


def test_json_has_null_where_a_metric_is_not_finite(run: Run) -> None:
    metrics = {"sft/loss": float("nan"), "eval/perplexity": float("inf"), "eval/chats": 2.0}
    RunRecord(Path("home"), "full", ["sft"], {}).finish("completed", metrics)
    done = run("pipeline", "status", "--json")
    shown = json.loads(done.out, parse_constant=pytest.fail)[0]["metrics"]
    assert shown == {"sft/loss": None, "eval/perplexity": None, "eval/chats": 2.0}


def test_the_commands_list_promote_and_roll_back_sets_of_models(
    sets_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = partial(in_process(capsys), "models")
    for name, version in (("2", "2"), ("ll-3", "3"), ("full-1", "1")):
        assert models("promote", name).out.startswith(f"mine/{version} ")
    assert models("promote", "--previous", "--json").json["version"] == "3"
    decision = {"promote": True, "reason": "better by 0.10000"}
    Registry(sets_home).decide("mine", "3", decision, run="full-3")
    listed = models("list", "--json").json
    aliases = [(entry["version"], entry["aliases"]) for entry in listed]
    assert aliases == [("3", ["champion"]), ("2", []), ("1", [])]
    assert listed[0]["decision"] == decision
    assert decision["reason"] in " ".join(models("list").out.split())
