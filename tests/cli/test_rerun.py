"""`rerun` takes the settings of an earlier run: the exact ones, the run that was meant, and what is given on top."""

from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import House
from typer.testing import CliRunner

from ttrain.cli import pipeline as cli_pipeline
from ttrain.cli.main import app
from ttrain.cli.options import SettingsOptions
from ttrain.config import Settings
from ttrain.config.loading import LoadedSettings, load
from ttrain.data import locations
from ttrain.errors import UsageError
from ttrain.lineage.lookup import newest_with, settings_of
from ttrain.store.run_views import need_run
from ttrain.store.runs import RunRecord


def record(
    home: Path, settings: Settings, stages: list[str] | None = None, pipeline: str = "full"
) -> str:
    made = RunRecord(
        home, pipeline, stages or ["tokenizer", "sft"], settings.model_dump(mode="json")
    )
    made.finish("failed", {})
    return made.run


def loaded(*overrides: str, files: Any = (), base: Any = ()) -> LoadedSettings:
    return load(overrides, files=files, environment={}, base=base)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("sft.optim.lr=2e-4", "name=mine", "pretrain.epochs=3"),
        ("sft.tokens=9000",),  # which takes the default of sft.epochs away
        (
            "data.pretrain=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]",
            "data.sft=c.jsonl,d.jsonl",
        ),
        (
            "model.layers=8",
            "model.tie_embeddings=true",
        ),  # the default, and not what auto makes of the size
    ],
    ids=lambda given: " ".join(given) or "defaults",
)
def test_the_settings_of_a_run_come_back_as_they_were(
    tmp_path: Path, given: tuple[str, ...]
) -> None:
    settings = loaded(*given).settings
    run = record(tmp_path, settings)
    again = loaded(base=settings_of(need_run(tmp_path, run)))
    assert again.settings == settings
    assert set(again.sources.values()) <= {
        f"run {run}",
        "sft.tokens is set",
        "pretrain.epochs is set",
    }
    assert bool(settings_of(need_run(tmp_path, run))) == bool(given)


def test_the_settings_of_a_run_that_started_from_a_model_come_back(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.yaml"
    sizes.write_text("model: {layers: 2}\n")
    given = (
        "sft.start_from=models/one",
        "tokenizer.existing=models/other",
        "tokenizer.template=own",
    )
    settings = loaded(*given, files=[sizes]).settings
    base = settings_of({"run": "x", "settings": settings.model_dump(mode="json")})
    assert loaded(base=base).settings == settings
    another = loaded("sft.start_from=models/two", base=base).settings
    assert (another.sft.start_from, another.tokenizer.existing) == ("models/two", "models/two")
    with pytest.raises(
        UsageError, match=r"model.layers \(from command line\) describes a new model"
    ):
        loaded("model.layers=3", base=base)


def test_the_newest_run_that_has_the_stage_is_meant(tmp_path: Path) -> None:
    record(tmp_path, Settings())
    newest = record(tmp_path, Settings(), ["sft", "lora"])
    path = tmp_path / "runs" / f"{newest}.json"
    path.rename(
        path.with_name(f"full-29991231-000000-{newest[-4:]}.json")
    )  # names tell seconds, and both are of this one
    assert newest_with(tmp_path, "sft")["run"] == newest_with(tmp_path, "lora")["run"] == newest
    assert newest_with(tmp_path, "tokenizer")["run"] != newest
    with pytest.raises(UsageError, match="no run has a stage evaluate yet"):
        newest_with(tmp_path, "evaluate")
    with pytest.raises(
        UsageError, match=r"there is no stage 'sftt'; did you mean sft.* there are source"
    ):
        newest_with(tmp_path, "sftt")


@pytest.fixture
def asked(built: House, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("TTRAIN_HOME", str(built.store.root))
    monkeypatch.setattr(
        cli_pipeline,
        "plan_and_run",
        lambda pipeline, loaded, **options: calls.append({"loaded": loaded, **options}),
    )
    return calls


def rerun(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["pipeline", "rerun", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_rerun_forces_the_stage_with_the_settings_of_its_newest_run(
    built: House, asked: list[dict[str, Any]]
) -> None:
    settings = built.settings("sft.seed=3")
    run = record(built.store.root, settings)
    said = rerun("sft")
    assert asked[0]["loaded"].settings == settings and asked[0]["force"] == {"sft"}
    assert said.startswith(
        f"settings of {run}, apart from the defaults: data.lora=["
    ) and said.endswith(" sft.seed=3\n")


def test_files_alone_say_the_settings_anew_and_the_environment_speaks_of_the_runtime_alone(
    built: House, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(built.store.root, built.settings("sft.seed=3"))
    config = built.write("mine.yaml", "lora: {seed: 9}\n")
    assert "settings of" not in rerun("sft", "-c", str(config))
    assert asked[0]["loaded"].settings == load(["lora.seed=9"], environment={}).settings
    monkeypatch.setenv("TTRAIN__SFT__SEED", "8")
    monkeypatch.setenv("TTRAIN__RUNTIME__THREADS", "1")
    rerun("sft")
    settings = asked[1]["loaded"].settings
    assert (settings.sft.seed, settings.runtime.threads) == (3, 1)


def test_a_hidden_source_is_refused_by_name_unless_the_environment_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, shown = "https://user:hunter2@host/chats.jsonl?sig=1", "https://***@host/chats.jsonl?***"
    tree = Settings.model_validate({"data": {"sft": [whole], "lora": ["mine.jsonl"]}}).model_dump(
        mode="json"
    )
    record = {"run": "full-1", "settings": tree}
    hidden = SettingsOptions().over_run(record).settings.data
    assert hidden.sft == (shown,) and hidden.lora == ("mine.jsonl",)
    with pytest.raises(UsageError, match=r"data\.sft=URL, or TTRAIN__DATA__SFT in the environment"):
        locations.expand(hidden.sft, "data.sft")
    monkeypatch.setenv("TTRAIN__DATA__SFT", whole)
    monkeypatch.setenv("TTRAIN__DATA__LORA", "other.jsonl")
    data = SettingsOptions().over_run(record).settings.data
    assert data.sft == (whole,) and data.lora == ("mine.jsonl",), (
        "it fills in what is hidden, and changes nothing else"
    )
    monkeypatch.setenv("TTRAIN__DATA__SFT", whole.replace("host", "elsewhere"))
    assert SettingsOptions().over_run(record).settings.data.sft == (shown,), (
        "another file is not that one"
    )
