"""MLflow's registered models as a view of the home's registry, and made again from the home."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.recorded_homes import Made, make_run
from support.tracked_stores import client_of, files_of, pushed
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.reports import report
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry
from ttrain.tracking.client import database_of
from ttrain.tracking.mlflow_mirror import Mirror
from ttrain.tracking.pusher import push_noted
from ttrain.tracking.registered import take_over_champions

NAME = "quickstart"
BASE, SFT = f"{NAME}-base", f"{NAME}-sft"
RUNS = {1: "full-20261121-101000-0001a", 2: "full-20261121-102000-0001a"}


@pytest.fixture
def sets_home(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one base model, registered and pushed."""
    # without the report of a run, which takes 2 s of CPU each time
    monkeypatch.setattr(report, "report_of", lambda view: "")
    registry, store = Registry(tracked_home), ArtifactStore(tracked_home)
    for number, run in RUNS.items():
        stages = {BASE: Made("pretrain", [3.0]), SFT: Made("sft", [float(number)])}
        make_run(tracked_home, run, [*stages.values()], number=number)
        members = []
        for model, made in stages.items():
            artifact = store.find(made.stage, made.key)
            assert artifact
            members.append(registry.register_model(model, artifact, run))
        keys = {made.stage: made.key for made in stages.values()}
        registry.register_set(NAME, run, members, keys, {"bits_per_byte": 2 - number / 10})
    pushed(tracked_home)
    return tracked_home


def aliases(home: Path, name: str = NAME) -> dict[str, str]:
    numbers = client_of(home).get_registered_model(name).aliases
    return {alias: str(number) for alias, number in numbers.items()}


def champion(home: Path) -> str | None:
    model_set = Registry(home).champion(NAME)
    return model_set and model_set.version


def test_versions_have_tags_descriptions_and_the_aliases_of_their_set(sets_home: Path) -> None:
    assert aliases(sets_home) == aliases(sets_home, SFT) == {"challenger": "2"}
    Registry(sets_home).promote(NAME, "1")
    pushed(sets_home, [RUNS[1]])
    assert aliases(sets_home) == {"champion": "1", "challenger": "2"} == aliases(sets_home, SFT)
    assert aliases(sets_home, BASE) == {"champion": "1", "challenger": "1"}, "of both sets"
    mlflow = client_of(sets_home)
    sft, of_set = (mlflow.get_model_version(name, "2") for name in (SFT, NAME))
    stage_run = mlflow.get_run(sft.run_id)
    assert stage_run.data.tags["ttrain.key"] == sft.tags["ttrain.key"].partition("/")[2]
    assert sft.source == f"{stage_run.info.artifact_uri}/sft/model"
    assert f"ttrain lineage {NAME}/2" in of_set.description
    assert of_set.source == f"models:/{SFT}/2"
    assert mlflow.get_run(of_set.run_id).info.run_name == RUNS[2]
    mlflow.update_model_version(NAME, "1", "mine")
    pushed(sets_home, [RUNS[1]])
    assert mlflow.get_model_version(NAME, "1").description == "mine", "a user's text stays"


def test_a_champion_that_somebody_chose_on_mlflows_page_is_taken_over(sets_home: Path) -> None:
    mlflow = client_of(sets_home)
    push_noted(sets_home, Registry(sets_home).promote(NAME, "2").run)
    take_over_champions(sets_home)
    assert champion(sets_home) == "2", "nobody moved it"
    mlflow.set_registered_model_alias(NAME, "champion", "1")
    take_over_champions(sets_home)
    assert champion(sets_home) == aliases(sets_home, SFT)["champion"] == "1", "the models follow"
    mlflow.delete_registered_model_alias(NAME, "champion")
    take_over_champions(sets_home)
    assert champion(sets_home) == "1", "one that was removed there stays here"
    push_noted(sets_home, Registry(sets_home).promote(NAME, "1").run)
    Registry(sets_home).promote(NAME, "2")
    mlflow.set_registered_model_alias(NAME, "other", "1")  # MLflow changed
    take_over_champions(sets_home)
    assert champion(sets_home) == "2", "nobody moved the one that was pushed last"


def shown(home: Path) -> Any:
    """All that MLflow shows of a home, without the ids and times that are MLflow's own."""
    mlflow, views = Mirror(home).client, dict[str, Any]()  # of the present file
    experiment = mlflow.get_experiment_by_name("ttrain").experiment_id
    runs = mlflow.search_runs([experiment])
    for run in runs:
        info, data = run.info, run.data
        curves = {key: str(mlflow.get_metric_history(info.run_id, key)) for key in data.metrics}
        shown_of_run = [data.to_dictionary(), info.status, info.start_time, info.end_time, curves]
        views[data.tags["ttrain.id"]] = [*shown_of_run, sorted(files_of(run))]
    for version in mlflow.search_model_versions():
        details = [version.description, version.tags, version.run_id]
        views[f"{version.name}/{version.version}"] = details
    views["aliases"] = {model.name: model.aliases for model in mlflow.search_registered_models()}
    text = json.dumps(views)
    for run in runs:
        text = text.replace(run.info.run_id, run.data.tags["ttrain.id"])
    return json.loads(text)


def test_a_database_that_is_gone_or_damaged_is_made_again_from_the_home(
    sets_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(sets_home))
    Registry(sets_home).promote(NAME, "1")
    pushed(sets_home, [RUNS[1]])
    before, database = shown(sets_home), database_of(sets_home)
    assert len(before) == 2 * 3 + 5 + 1, "runs with two stages each, versions, aliases"
    for damaged in (b"", bytes(range(256)) * 4000):
        database.unlink()
        if damaged:
            database.write_bytes(damaged)
        result = CliRunner().invoke(app, ["track", "push", "--json"])
        assert result.exit_code == 0, result.output
        assert shown(sets_home) == before and champion(sets_home) == "1"
    assert len([*database.parent.glob("mlflow.db.damaged-*")]) == 1
