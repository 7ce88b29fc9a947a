"""Decisions about champions, the commands of sets, and what a run registers; real MLflow."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.champion_sets import SUFFIXES, aliases, champion, client_of, everywhere, register
from support.data_commands import Run, in_process
from support.outage_proxy import Proxy
from support.tiny_stages import planned
from support.tracked_stores import opened

from ttrain import tracking
from ttrain.config import Settings
from ttrain.core.files import read_json, write_json
from ttrain.errors import TrackingError, UsageError
from ttrain.evaluate.task_result import ScoreTable
from ttrain.pipeline import run_summary
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.progress_display import Display
from ttrain.store import artifacts, layout
from ttrain.store.references import Registered
from ttrain.tracking.database import database_of

# --- decisions ------------------------------------------------------------------------------------------------------------

DECISION = {
    "promote": True, "metric": "bits_per_byte", "challenger": 1.7, "champion": 1.8, "difference": 0.1,
    "interval": [0.05, 0.15], "samples": 40, "margin": 0.0, "confidence": 0.95, "reason": "better by 0.10000",
}  # fmt: skip


def test_a_decision_stands_on_the_set_and_on_the_run_however_often_it_is_logged(sets_home: Path) -> None:
    for _ in range(2):
        tracking.Champions(sets_home).log_decision("mine", "3", DECISION, "| decision | promoted |")
    found = tracking.Champions(sets_home).find("mine", "3")
    assert found.decision == DECISION
    client = client_of(sets_home)
    assert client.get_model_version("mine", "3").description.count("| decision | promoted |") == 1
    run = client.get_run(found.run_id)
    assert (run.data.tags["ttrain.decision"], run.data.tags["ttrain.decision.reason"]) == ("promoted", "better by 0.10000")
    assert {name: value for name, value in run.data.metrics.items() if name.startswith("promotion/")} == {
        "promotion/challenger": 1.7, "promotion/champion": 1.8, "promotion/difference": 0.1, "promotion/samples": 40,
        "promotion/interval_low": 0.05, "promotion/interval_high": 0.15,
    }  # fmt: skip
    files = Path(run.info.artifact_uri.removeprefix("file://").replace("%20", " "))
    assert json.loads((files / "decision.json").read_text()) == DECISION
    assert (files / "decision.md").read_text() == "| decision | promoted |"


def test_a_first_champions_decision_has_no_figures_to_compare_and_may_belong_to_another_run(sets_home: Path) -> None:
    night = opened(sets_home).start_run("night", tags={"ttrain.night": "night-000001"}, params={})
    first = {**DECISION, "champion": None, "difference": None, "interval": None, "samples": 0}
    pages: list[str] = []
    more = lambda run: pages.append(run.id)  # noqa: E731
    tracking.Champions(sets_home).log_decision("mine", "1", first, "| |", run_id=night.id, log_more=more)
    assert pages == [night.id], "the run is still open: its page is logged again"
    assert tracking.read_run(sets_home, str(night.id)).decision == ("night-000001", "promoted", "better by 0.10000")
    names = {name for name in client_of(sets_home).get_run(night.id).data.metrics if name.startswith("promotion/")}
    assert names == {"promotion/challenger", "promotion/samples"}


# --- no MLflow ------------------------------------------------------------------------------------------------------------


def test_a_home_that_never_tracked_has_no_champion_and_gets_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.Champions(tmp_path).champion("mine") is None
    assert tracking.list_sets(tmp_path) == []
    with pytest.raises(UsageError):
        tracking.Champions(tmp_path).promote("mine", "1")
    with pytest.raises(UsageError):
        tracking.Champions(tmp_path).rollback("mine")
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()


def test_a_server_that_does_not_answer_is_an_error_not_the_answer_none(
    sets_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night would else take it for "no champion yet" and begin from scratch."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hidden@127.0.0.1:9")
    champions = tracking.Champions(sets_home)
    for act in (champions.champion, champions.rollback, lambda name: tracking.list_sets(sets_home, name)):
        with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:9 cannot be queried") as raised:
            act("mine")
        assert "hidden" not in str(raised.value)


def test_a_server_that_refuses_the_account_names_the_variables_of_it(
    sets_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Proxy("http://127.0.0.1:9")) as proxy:
        proxy.mode = "no entry"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        with pytest.raises(TrackingError, match=r"401 .*; set MLFLOW_TRACKING_USERNAME and"):
            tracking.Champions(sets_home).champion("mine")


@pytest.mark.soak
def test_a_server_over_http_does_the_same(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    home = tmp_path / "home"
    assert [register(home, number) for number in (1, 2, 2)] == ["1", "2", "2"]
    for version in ("1", "2"):
        tracking.Champions(home).promote("mine", version)
    models = client_of(home).search_registered_models()
    assert {one.name: one.aliases for one in models} == {key: {"champion": "2"} for key in everywhere("2")}
    tracking.Champions(home).log_decision("mine", "2", DECISION, "| |")
    assert champion(home).decision == DECISION
    assert tracking.Champions(home).rollback("mine").version == "1"
    assert [one.aliases for one in tracking.list_sets(home)] == [(), ("champion",)]
    assert not (home / "mlflow" / "mlflow.db").exists()


# --- the command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def models(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(in_process(capsys), "models")


def test_the_commands_list_promote_and_roll_back(sets_home: Path, models: Run) -> None:
    assert "no champion; to choose one: ttrain models promote 3 --name mine" in models("list").out
    (sets_home / "runs").mkdir()
    stages = [{"name": stage, "key": f"{stage}-1", "outcome": "cached"} for stage in SUFFIXES]
    record: dict[str, Any] = {
        "run": "again",
        "pipeline": "full",
        "outcome": "completed",
        "started_unix": 0,
        "stages": stages,
    }
    record["process"] = {"pid": 1, "started": 0}
    (sets_home / "runs" / "again.json").write_text(json.dumps(record))
    for which, version in (("2", "2"), ("ll-3", "3"), ("again", "1")):
        said = models("promote", which).out
        assert said.startswith(f"mine/{version} of the run full-{version} is champion: mine-base/{version}")
    assert "is already champion" in models("promote", "1").out
    assert models("rollback", "--json").json["version"] == "3"
    tracking.Champions(sets_home).log_decision("mine", "3", DECISION, "")
    listed = models("list", "--json").json
    assert [(one["version"], one["aliases"]) for one in listed] == [("3", ["champion"]), ("2", []), ("1", [])]
    assert listed[0]["decision"] == DECISION
    done = models("list")
    assert done.code == 0 and "promoted: better by 0.10000" in " ".join(done.out.split())


def test_what_cannot_be_is_said_with_exit_code_2(sets_home: Path, models: Run) -> None:
    for words, said in (
        (("promote", "7"), "mine has no set '7'; there are 3, 2, 1"),
        (("promote", "../x"), "there is no registered set of the run '../x'"),
        (("rollback",), "mine has no earlier champion"),
        (("rollback", "--name", "other"), "no sets of models named other are registered"),
    ):
        refused = models(*words)
        assert refused.code == 2 and said in refused.err, words


def test_sets_of_two_pipelines_need_a_name(sets_home: Path, models: Run) -> None:
    register(sets_home, 1, name="other")
    refused = models("promote", "1")
    assert refused.code == 2 and "there are sets of mine, other; choose one with --name" in refused.err
    assert models("promote", "1", "--name", "other").code == 0
    assert aliases(sets_home) == everywhere("1", "other")


# --- a run registers its models --------------------------------------------------------------------------------------------

STAGES = ("tokenizer", "pretrain", "sft", "lora", "evaluate")


def published(store: artifacts.ArtifactStore, root: Path, number: int) -> dict[str, layout.Artifact]:
    """An artifact of each stage, as a run leaves them."""
    found = {}
    for stage in STAGES:
        output = root / f"{stage}-{number}"
        for name in ("model", "adapter"):
            (output / name).mkdir(parents=True)
            (output / name / "config.json").write_text(f"{stage} {number}")
        write_json(output / "samples.json", {})
        result = {"metrics": {"bits_per_byte": 2.5}, "counts": {}} if stage == "evaluate" else {}
        manifest = {"result": result, "inputs": {}, "ingredients": {"code": {}}}
        found[stage] = store.publish(stage, f"{stage}-{number}", output, manifest)
    return found


def ran(
    store: artifacts.ArtifactStore, found: dict[str, layout.Artifact], outcome: str = "completed", **settings: Any
) -> PipelineRun:
    """A run that took all its artifacts from the store, to its end."""
    execution = PipelineRun("full", Settings(**settings), store, Display(Console(quiet=True)), planned(*found))
    execution.artifacts.update(found)
    execution.finish(outcome)
    return execution


def test_a_run_that_ends_well_registers_its_models_as_one_set(sets_home: Path, tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(sets_home)
    found = published(store, tmp_path / "first", 21)
    first = ran(store, found, name="own")
    assert first.model_set == "1"
    (own,) = tracking.list_sets(sets_home, "own")
    assert {stage: (member.name, member.version, member.key) for stage, member in own.members.items()} == {
        "tokenizer": ("own-tokenizer", "1", "tokenizer-21"),
        "pretrain": ("own-base", "1", "pretrain-21"),
        "sft": ("own-sft", "1", "sft-21"),
        "lora": ("own-lora", "1", "lora-21"),
    }
    assert (own.run, own.keys["evaluate"], own.metrics) == (first.record.run, "evaluate-21", {"bits_per_byte": 2.5})
    assert (own.aliases, own.run_id) == (("challenger",), first.tracked_run)
    assert read_json(first.record.path)["model_set"] == "own/1"
    changed = {**found, "lora": published(store, tmp_path / "second", 22)["lora"]}
    assert ran(store, changed, name="own").model_set == "2"
    newest = tracking.Champions(sets_home).find("own", "2")
    assert {stage: member.version for stage, member in newest.members.items()} == {
        "tokenizer": "1", "pretrain": "1", "sft": "1", "lora": "2",
    }  # fmt: skip
    assert ran(store, found, name="other").model_set == "1", "another name registers from the store what is there"
    kept = tracking.find_version(sets_home, Registered("other-sft", None, "1")).source
    assert kept is not None
    assert (kept / "config.json").read_text() == "sft 21"


def test_a_run_that_left_a_stage_out_did_not_end_well_or_is_not_tracked_registers_no_set(
    sets_home: Path, tmp_path: Path
) -> None:
    store = artifacts.ArtifactStore(sets_home)
    found = published(store, tmp_path, 23)
    without = {stage: artifact for stage, artifact in found.items() if stage != "evaluate"}
    assert ran(store, without, name="own").model_set is None
    assert ran(store, found, "interrupted", name="own").model_set is None
    assert ran(store, found, name="own", tracking={"enabled": False}).model_set is None
    assert tracking.list_sets(sets_home, "own") == []


def evaluated(store: artifacts.ArtifactStore, number: int, documents: list[str], nats: float) -> layout.Artifact:
    """The evaluation of the set of this number, on these documents and on chats that are the same for all."""
    output = store.work("evaluate", f"evaluate-{number}") / "output"
    output.mkdir(parents=True)
    scores = ScoreTable()
    scores.part("documents", documents, [len(text) for text in documents])
    scores.part("chats", ["a chat"])
    figures = {
        "bits_per_byte": scores.figure("bits_per_byte", "documents", "base", [(nats, 2)] * len(documents), per="bytes"),
        "chat_loss_sft": scores.figure("chat_loss_sft", "chats", "sft", [(nats, 4)], per="tokens"),
    }
    scores.write(output)
    result = {"metrics": figures, "intervals": {name: [value, value] for name, value in figures.items()}}
    return store.publish("evaluate", f"evaluate-{number}", output, {"result": result, "inputs": {}, "ingredients": {}})


def test_a_run_has_the_champion_as_a_baseline_where_it_scored_the_same_records(sets_home: Path, monkeypatch: Any) -> None:
    store = artifacts.ArtifactStore(sets_home)
    evaluated(store, 1, ["one", "two"], 4.0)
    same, other = evaluated(store, 2, ["one", "two"], 2.0), evaluated(store, 3, ["one", "three"], 2.0)
    assert run_summary.of(same, "mine", store) == {}, "nothing is champion"
    tracking.Champions(sets_home).promote("mine", "1")
    found = run_summary.of(same, "mine", store)["evaluate-champion"]
    assert found["metrics"] == {"bits_per_byte": 8 / 6, "chat_loss_sft": 1.0}
    assert set(found["intervals"]) == {*found["metrics"]}
    assert set(run_summary.of(other, "mine", store)["evaluate-champion"]["metrics"]) == {"chat_loss_sft"}
    assert run_summary.of(same, "another", store) == {}
    scores = read_json(other.path / "scores.json") or {}
    scores["parts"]["chats"]["tokens"] = [5]
    (other.path / "scores.json").unlink()  # a link into the store's own
    write_json(other.path / "scores.json", scores)
    found = run_summary.of(other, "mine", store)["evaluate-champion"]
    assert found["metrics"] == {}, "a loss per token of another tokenizer tells nothing"
    tracking.Champions(sets_home).promote("mine", "2")
    assert run_summary.of(same, "mine", store) == {}, "it is itself the champion"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert run_summary.of(other, "mine", store) == {}, "nobody waits for a server for the sake of a baseline"


def test_a_listing_loads_no_mlflow_until_the_database_changes(sets_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tracking.list_sets(sets_home)
    assert [found.version for found in first] == ["3", "2", "1"]
    with monkeypatch.context() as patched:
        patched.setattr(tracking.champions, "Champions", lambda home: pytest.fail("MLflow was asked"))
        assert tracking.list_sets(sets_home) == first and tracking.list_sets(sets_home, "another") == []
    tracking.Champions(sets_home).promote("mine", "2")
    assert [found.aliases for found in tracking.list_sets(sets_home)][1] == ("champion",)
    copied = database_of(sets_home).with_name("sets.json")
    for damaged in ("{", '{"state": 1}', copied.read_text().replace('"members"', '"member"')):
        copied.write_text(damaged)
        assert [found.version for found in tracking.list_sets(sets_home)] == ["3", "2", "1"]
