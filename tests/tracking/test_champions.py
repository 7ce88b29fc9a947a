"""Champions: one alias is the truth, the rest follows it; a kill between any two writes is mended; real MLflow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.doubles import planned

from ttrain import tracking
from ttrain.cli.main import main
from ttrain.config import Settings
from ttrain.core.files import read_json, write_json
from ttrain.errors import TrackingError, UsageError
from ttrain.evaluate.task_result import ScoreTable
from ttrain.pipeline import run_summary
from ttrain.pipeline.execution import PipelineRun
from ttrain.pipeline.progress_display import Display
from ttrain.store import artifacts, layout
from ttrain.store.references import Registered
from ttrain.tracking import Member, MlflowStore, ModelSet, TrackedRun, open_store
from ttrain.tracking import database as databases
from ttrain.tracking.champions import recorded_keys
from ttrain.tracking.database import database_of

SUFFIXES = {"pretrain": "base", "sft": "sft", "lora": "lora", "tokenizer": "tokenizer"}
WRITES = (
    "create_registered_model", "create_model_version", "set_registered_model_alias", "delete_registered_model_alias",
    "set_registered_model_tag", "set_model_version_tag", "update_model_version",
)  # fmt: skip


def register(home: Path, number: int, stages: Any = SUFFIXES, name: str = "mine", **metrics: float) -> str | None:
    """The set of a run: a member for each stage, whose keys tell its number."""
    store = open_store(home, "ttrain")
    assert isinstance(store, MlflowStore)
    run = store.start_run(f"full-{number}", run_id=None, parent_run_id=None, tags={}, params={})
    models = []
    for stage in stages:
        model, key = f"{name}-{SUFFIXES[stage]}", f"{stage}-{number}"
        run.log_text(key, f"{stage}/x.txt")
        tags = {"ttrain.stage": stage, "ttrain.key": key, "ttrain.content": key}
        version = store.register_model(model, run=run, artifact_path=stage, tags=tags)
        assert version is not None or store.is_http, "it waits for files that go over the network, and for nothing else"
        models.append({"name": model, "stage": stage, "tags": tags, "artifact_path": stage, "path": None})
    keys = {**{stage: f"{stage}-{number}" for stage in stages}, "evaluate": f"evaluate-{number}"}
    figures = {"bits_per_byte": 2 - number / 10, **metrics}
    return store.register_models(name, run=run, run_name=f"full-{number}", models=models, keys=keys, metrics=figures)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with three sets, none of them champion; made once, since its database takes 1 s to make."""
    home = tmp_path_factory.mktemp("three")
    assert [register(home, number) for number in (1, 2, 3)] == ["1", "2", "3"]
    return home


@pytest.fixture(scope="module")
def used(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one home that all tests use: to open another one costs MLflow 0.3 s."""
    home = tmp_path_factory.mktemp("used") / "a home"
    (home / "mlflow").mkdir(parents=True)
    return home


@pytest.fixture
def sets_home(used: Path, three: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It with three sets, none of them champion."""
    monkeypatch.setenv("TTRAIN_HOME", str(used))
    for left in ("store", "runs"):
        shutil.rmtree(used / left, ignore_errors=True)
    return restored(used, database_of(three))


def restored(home: Path, kept: Path) -> Path:
    """The home with the database as it was kept; written over in place, since MLflow holds connections to it."""
    with closing(sqlite3.connect(kept)) as old, closing(sqlite3.connect(database_of(home))) as new:
        old.backup(new)
    return home


def kept(home: Path, path: Path) -> Path:
    """A copy of the home's database."""
    with closing(sqlite3.connect(database_of(home))) as old, closing(sqlite3.connect(path)) as new:
        old.backup(new)
    return path


def client_of(home: Path) -> Any:
    return databases.open_client(tracking.tracking_uri(home.resolve()), home.resolve())


def aliases(home: Path, alias: str = "champion") -> dict[str, str]:
    """Where an alias stands, on all registered models, as the database has it, where nobody mends it."""
    with closing(sqlite3.connect(database_of(home))) as db:
        rows = db.execute("SELECT name, version FROM registered_model_aliases WHERE alias = ?", (alias,))
        return {str(name): str(version) for name, version in rows}


def history(home: Path) -> str:
    with closing(sqlite3.connect(database_of(home))) as db:
        row = db.execute(
            "SELECT value FROM registered_model_tags WHERE name = 'mine' AND key = 'ttrain.champions'"
        ).fetchone()
        return str(row[0]) if row else ""


def everywhere(version: str, name: str = "mine") -> dict[str, str]:
    return {name: version, **{f"{name}-{suffix}": version for suffix in SUFFIXES.values()}}


def champion(home: Path) -> ModelSet:
    found = tracking.champion(home, "mine")
    assert found is not None
    return found


# --- registering --------------------------------------------------------------------------------------------------------


def test_a_set_names_its_members_their_keys_and_figures(sets_home: Path) -> None:
    newest, *older = tracking.list_sets(sets_home)
    assert [one.version for one in older] == ["2", "1"]
    assert newest.members["lora"] == Member("mine-lora", "3", "lora", "lora-3")
    assert set(newest.members) == set(SUFFIXES)
    assert newest.keys == {**{stage: f"{stage}-3" for stage in SUFFIXES}, "evaluate": "evaluate-3"}
    assert (newest.run, newest.metrics) == ("full-3", {"bits_per_byte": 1.7})
    assert newest.run_id is not None
    assert client_of(sets_home).get_run(newest.run_id).info.run_name == "full-3"


def test_the_same_models_are_one_set_that_knows_its_newest_evaluation(sets_home: Path) -> None:
    assert register(sets_home, 2, accuracy=0.5) == "2"
    again = tracking.find_set(sets_home, "mine", "2")
    assert again.metrics == {"bits_per_byte": 1.8, "accuracy": 0.5}
    assert again.run == "full-2"
    assert len(tracking.list_sets(sets_home)) == 3


def test_two_homes_that_register_the_same_at_once_leave_one(sets_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    create, other = MlflowClient.create_model_version, []

    def overtaken(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in other:
            other.append(name)
            create(self, name, *args, **kwargs)  # that of the other home, between our question and our answer
        return create(self, name, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "create_model_version", overtaken)
    assert register(sets_home, 9, name="raced") == "1"
    assert len(other) == 5, "each member and the set"
    (made,) = tracking.list_sets(sets_home, "raced")
    assert {member.version for member in made.members.values()} == {"1"} and made.aliases == ("challenger",)


def test_the_newest_set_is_challenger_and_its_members_follow_with_the_list(sets_home: Path) -> None:
    tracking.list_sets(sets_home)
    assert aliases(sets_home, "challenger") == everywhere("3")
    tracking.promote(sets_home, "mine", "3")
    assert aliases(sets_home, "challenger") == {}
    register(sets_home, 3)
    assert aliases(sets_home, "challenger") == {}, "the champion challenges nobody"


def test_a_name_that_models_of_another_pipeline_bear_is_not_taken(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The models of a pipeline `mine` and the sets of a pipeline `mine-sft` would share aliases."""
    assert register(sets_home, 9, name="mine-sft") is None
    assert "holds models of another pipeline" in caplog.text
    assert {one.name for one in tracking.list_sets(sets_home)} == {"mine"}


# --- promoting and going back --------------------------------------------------------------------------------------------


def test_all_models_of_a_run_become_champion_together(sets_home: Path) -> None:
    assert tracking.champion(sets_home, "mine") is None
    promoted = tracking.promote(sets_home, "mine", "2")
    assert (promoted.version, promoted.aliases) == ("2", ("champion",))
    assert aliases(sets_home) == everywhere("2")
    assert champion(sets_home).keys["sft"] == "sft-2"
    tracking.promote(sets_home, "mine", "3")
    assert aliases(sets_home) == everywhere("3")


def test_promoted_twice_is_promoted_once(sets_home: Path) -> None:
    tracking.promote(sets_home, "mine", "1")
    tracking.promote(sets_home, "mine", "2")
    tracking.promote(sets_home, "mine", "2")
    assert history(sets_home) == "1 2"
    assert tracking.rollback(sets_home, "mine").version == "1"


def test_rolling_back_twice_goes_further_back_also_past_a_champion_that_came_again(sets_home: Path) -> None:
    for version in ("1", "2", "1", "3"):
        tracking.promote(sets_home, "mine", version)
    found = []
    for expected in ("1", "2", "1"):
        found.append(tracking.rollback(sets_home, "mine").version)
        assert aliases(sets_home) == everywhere(expected)
    assert found == ["1", "2", "1"]
    with pytest.raises(UsageError, match="mine has no earlier champion to go back to"):
        tracking.rollback(sets_home, "mine")
    assert aliases(sets_home) == everywhere("1")


def test_a_champion_that_was_deleted_is_passed_over_on_the_way_back(sets_home: Path) -> None:
    for version in ("1", "2", "3"):
        tracking.promote(sets_home, "mine", version)
    client_of(sets_home).delete_model_version("mine", "2")
    assert tracking.rollback(sets_home, "mine").version == "1"


def test_the_present_champion_is_not_an_earlier_one_where_the_version_between_was_deleted(sets_home: Path) -> None:
    for version in ("3", "1", "2", "1"):
        tracking.promote(sets_home, "mine", version)
    client_of(sets_home).delete_model_version("mine", "2")
    assert tracking.rollback(sets_home, "mine").version == "3"
    assert aliases(sets_home) == everywhere("3")


def test_a_champion_that_was_deleted_is_followed_by_the_one_before(sets_home: Path) -> None:
    for version in ("1", "2"):
        tracking.promote(sets_home, "mine", version)
    client_of(sets_home).delete_model_version("mine", "2")
    assert tracking.champion(sets_home, "mine") is None
    assert tracking.rollback(sets_home, "mine").version == "1"
    assert aliases(sets_home) == everywhere("1")


def test_a_champion_chosen_in_mlflow_itself_counts(sets_home: Path) -> None:
    """Somebody sets the alias on MLflow's page: the members follow, and the way back leads to the one before."""
    tracking.promote(sets_home, "mine", "1")
    client_of(sets_home).set_registered_model_alias("mine", "champion", "3")
    assert champion(sets_home).version == "3"
    tracking.list_sets(sets_home)
    assert aliases(sets_home) == everywhere("3")
    assert tracking.rollback(sets_home, "mine").version == "1"


def test_a_set_without_an_adapter_leaves_none_champion(sets_home: Path) -> None:
    tracking.promote(sets_home, "mine", "3")
    version = register(sets_home, 4, stages=("tokenizer", "pretrain", "sft"))
    assert version == "4"
    tracking.promote(sets_home, "mine", version)
    assert aliases(sets_home) == {"mine": "4", "mine-base": "4", "mine-sft": "4", "mine-tokenizer": "4"}


def test_a_member_that_was_deleted_is_a_warning(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    client_of(sets_home).delete_model_version("mine-sft", "2")
    tracking.promote(sets_home, "mine", "2")
    assert "MLflow has no mine-sft/2" in caplog.text
    assert aliases(sets_home) == {name: "2" for name in everywhere("2") if name != "mine-sft"}


def test_a_set_that_is_not_there_is_refused_and_those_there_are_named(sets_home: Path) -> None:
    for act in (tracking.promote, tracking.find_set):
        with pytest.raises(UsageError, match=r"mine has no version 7 that is a set.*3 \(.*full-3\), 2"):
            act(sets_home, "mine", "7")
    with pytest.raises(UsageError, match="there are none yet"):
        tracking.promote(sets_home, "other", "1")
    assert tracking.champion(sets_home, "other") is None
    assert tracking.champion(sets_home, "mine-sft") is None


def test_the_alias_of_a_set_leads_to_its_last_model(sets_home: Path) -> None:
    tracking.promote(sets_home, "mine", "2")
    assert tracking.last_of(tracking.find_version(sets_home, Registered("mine", "champion", None))) == Member(
        "mine-lora", "2", "lora", "lora-2"
    )
    assert tracking.last_of(tracking.find_version(sets_home, Registered("mine-sft", "champion", None))) is None


def test_an_alias_of_a_set_leads_to_its_members_before_they_have_it(sets_home: Path) -> None:
    """MLflow's page sets the alias on the set alone; other names are refused with what is registered."""
    client_of(sets_home).set_registered_model_alias("mine", "champion", "3")
    assert set(aliases(sets_home)) == {"mine"}
    version = tracking.find_version(sets_home, Registered("mine-base", "champion", None))
    assert (version.name, version.version) == ("mine-base", "3")
    for name in ("mine-reward", "other-base", "other"):
        with pytest.raises(UsageError, match=f"{name}@champion.*mine-base/3"):
            tracking.find_version(sets_home, Registered(name, "champion", None))


def test_the_home_records_its_champions_for_readers_without_mlflow(sets_home: Path) -> None:
    tracking.list_sets(sets_home)
    assert recorded_keys(sets_home, "mine") == {} == tracking.champion_keys_here(sets_home, "mine")
    for version in ("2", "3"):
        tracking.promote(sets_home, "mine", version)
        assert recorded_keys(sets_home, "mine")["sft"] == f"sft-{version}"
    tracking.rollback(sets_home, "mine")
    assert recorded_keys(sets_home, "mine")["sft"] == "sft-2"
    client_of(sets_home).set_registered_model_alias("mine", "champion", "1")  # as MLflow's page does
    assert tracking.champion_keys_here(sets_home, "mine")["sft"] == "sft-1" == recorded_keys(sets_home, "mine")["sft"]


# --- killed between any two writes ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception: nothing in between may take it for a trouble of MLflow's."""


def dying_at(home: Path, patch: pytest.MonkeyPatch, number: int) -> None:
    """From here on, the write of this number does not happen, nor anything after it."""
    opened, left = databases.open_client, [number]

    def client(uri: str, where: Path) -> Any:
        made = opened(uri, where)
        for name in WRITES:
            write = getattr(made, name)

            def counted(*args: Any, write: Callable[..., Any] = write, **named: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return write(*args, **named)

            setattr(made, name, counted)
        return made

    patch.setattr("ttrain.tracking.champions.open_client", client)
    patch.setattr("ttrain.tracking.open_client", client)


def state(home: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    return history(home), aliases(home), aliases(home, "challenger")


def prepared(home: Path) -> None:
    """Champion is 2, before it was 1; 3 challenges."""
    tracking.promote(home, "mine", "1")
    tracking.promote(home, "mine", "2")


@pytest.mark.soak
@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_a_kill_between_any_two_writes_leaves_one_champion_and_is_mended(
    action: str, sets_home: Path, tmp_path: Path
) -> None:
    prepared(sets_home)
    start, before = kept(sets_home, tmp_path / "start.db"), state(sets_home)

    def act() -> None:
        if action == "promote":
            tracking.promote(sets_home, "mine", "3")
        else:
            tracking.rollback(sets_home, "mine")

    act()
    after = state(sets_home)
    assert before != after
    for number in range(50):
        restored(sets_home, start)
        with pytest.MonkeyPatch.context() as patch:
            dying_at(sets_home, patch, number)
            try:
                act()
            except Killed:
                pass
            else:
                break
        truth = aliases(sets_home)["mine"]
        assert champion(sets_home).version == truth
        tracking.list_sets(sets_home)
        assert state(sets_home) == (before if truth == before[1]["mine"] else after), f"killed at write {number}"
        if truth == before[1]["mine"]:
            act()
        assert state(sets_home) == after, f"done again after a kill at write {number}"
    assert number >= 6, "a promotion is the history, the alias, and what follows on the members"


@pytest.mark.soak
def test_a_kill_in_the_first_promotion_of_all_is_mended_by_the_next(sets_home: Path, tmp_path: Path) -> None:
    start = kept(sets_home, tmp_path / "start.db")
    tracking.promote(sets_home, "mine", "1")
    after = state(sets_home)
    for number in range(4):
        restored(sets_home, start)
        with pytest.MonkeyPatch.context() as patch:
            dying_at(sets_home, patch, number)
            with pytest.raises(Killed):
                tracking.promote(sets_home, "mine", "1")
        tracking.promote(sets_home, "mine", "1")
        assert state(sets_home) == after, f"done again after a kill at write {number}"


@pytest.mark.soak
def test_a_kill_while_a_set_is_registered_leaves_no_second_one(sets_home: Path, tmp_path: Path) -> None:
    start = kept(sets_home, tmp_path / "start.db")
    for number in range(50):
        restored(sets_home, start)
        with pytest.MonkeyPatch.context() as patch:
            dying_at(sets_home, patch, number)
            try:
                register(sets_home, 4)
            except Killed:
                pass
            else:
                break
        assert register(sets_home, 4) == "4"
        assert [one.version for one in tracking.list_sets(sets_home)] == ["4", "3", "2", "1"]
        assert aliases(sets_home, "challenger") == everywhere("4")
        versions = client_of(sets_home).search_model_versions("")
        assert sorted(f"{one.name}/{one.version}" for one in versions) == sorted(
            f"{name}/{version}" for version in "1234" for name in everywhere(version)
        ), f"killed at write {number}"
    assert number >= 6


def test_a_process_that_is_killed_releases_the_lock_and_its_half_is_mended(sets_home: Path) -> None:
    """The same with a real SIGKILL, after the history and before the alias."""
    prepared(sets_home)
    program = (
        "import os, signal, sys; from pathlib import Path; from ttrain import tracking\n"
        "from ttrain.tracking.champions import Champions\n"
        "write_history = Champions.write_history\n"
        "def write(self, *args):\n"
        "    write_history(self, *args)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Champions.write_history = write\n"
        "tracking.promote(Path(sys.argv[1]), 'mine', '3')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(sets_home)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert history(sets_home) == "1 2 3"
    assert champion(sets_home).version == "2"
    assert tracking.rollback(sets_home, "mine").version == "1", "what never became champion is no step of the way back"
    assert history(sets_home) == "1"


# --- decisions ------------------------------------------------------------------------------------------------------------

DECISION = {
    "promote": True, "metric": "bits_per_byte", "challenger": 1.7, "champion": 1.8, "difference": 0.1,
    "interval": [0.05, 0.15], "samples": 40, "margin": 0.0, "confidence": 0.95, "reason": "better by 0.10000",
}  # fmt: skip


def test_a_decision_stands_on_the_set_and_on_the_run_however_often_it_is_logged(sets_home: Path) -> None:
    for _ in range(2):
        tracking.log_decision(sets_home, "mine", "3", DECISION, "| decision | promoted |")
    found = tracking.find_set(sets_home, "mine", "3")
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
    store = open_store(sets_home, "ttrain")
    night = store.start_run("night", run_id=None, parent_run_id=None, tags={}, params={})
    assert isinstance(night, TrackedRun)
    first = {**DECISION, "champion": None, "difference": None, "interval": None, "samples": 0}
    tracking.log_decision(sets_home, "mine", "1", first, "| |", run_id=night.id)
    names = {name for name in client_of(sets_home).get_run(night.id).data.metrics if name.startswith("promotion/")}
    assert names == {"promotion/challenger", "promotion/samples"}


# --- no MLflow ------------------------------------------------------------------------------------------------------------


def test_a_home_that_never_tracked_has_no_champion_and_gets_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.champion(tmp_path, "mine") is None
    assert tracking.list_sets(tmp_path) == []
    for act in (lambda: tracking.promote(tmp_path, "mine", "1"), lambda: tracking.rollback(tmp_path, "mine")):
        with pytest.raises(UsageError):
            act()
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()


def test_a_server_that_does_not_answer_is_an_error_not_the_answer_none(
    sets_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night would else take it for "no champion yet" and begin from scratch."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hidden@127.0.0.1:9")
    for act in (tracking.champion, tracking.list_sets, tracking.rollback):
        with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:9 cannot be queried") as raised:
            act(sets_home, "mine")
        assert "hidden" not in str(raised.value)


@pytest.mark.soak
def test_a_server_over_http_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/m.db",
               "--artifacts-destination", str(tmp_path / "kept"), "--port", str(port), "--workers", "1"]  # fmt: skip
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        wait_for(port, server)
        home = tmp_path / "home"
        stages = ("tokenizer", "sft")
        assert [register(home, number, stages) for number in (1, 2, 2)] == ["1", "2", "2"]
        for version in ("1", "2"):
            tracking.promote(home, "mine", version)
        models = client_of(home).search_registered_models()
        assert {one.name: one.aliases for one in models} == {
            name: {"champion": "2"} for name in ("mine", "mine-tokenizer", "mine-sft")
        }
        tracking.log_decision(home, "mine", "2", DECISION, "| |")
        assert champion(home).decision == DECISION
        assert tracking.rollback(home, "mine").version == "1"
        assert [one.aliases for one in tracking.list_sets(home)] == [(), ("champion",)]
        assert not (home / "mlflow" / "mlflow.db").exists()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    import urllib.request

    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            assert time.monotonic() < deadline, "the server did not answer within 120 s"
            time.sleep(0.2)


# --- the command line -----------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = 0
    try:
        main(["models", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_commands_list_promote_and_roll_back(sets_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = command(capsys, "list")
    assert code == 0
    assert "no champion; to choose one: ttrain models promote 3 --name mine" in out
    (sets_home / "runs").mkdir()
    stages = [{"name": stage, "key": f"{stage}-1"} for stage in SUFFIXES]
    (sets_home / "runs" / "again.json").write_text(json.dumps({"run": "again", "outcome": "completed", "stages": stages}))
    for which, version in (("2", "2"), ("ll-3", "3"), ("again", "1")):
        code, out = command(capsys, "promote", which)
        assert (code, out.startswith(f"mine/{version} of the run full-{version} is champion: mine-tokenizer/{version}")) == (
            0,
            True,
        )
    assert "is already champion" in command(capsys, "promote", "1")[1]
    code, out = command(capsys, "rollback", "--json")
    assert (code, json.loads(out)["version"]) == (0, "3")
    tracking.log_decision(sets_home, "mine", "3", DECISION, "")
    code, out = command(capsys, "list", "--json")
    assert [(one["version"], one["aliases"]) for one in json.loads(out)] == [("3", ["champion"]), ("2", []), ("1", [])]
    assert json.loads(out)[0]["decision"] == DECISION
    code, out = command(capsys, "list")
    assert "promoted: better by 0.10000" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("promote", "7"), "mine has no set '7'; there are 3, 2, 1"),
        (("promote", "full-9"), "there is no registered set of the run 'full-9'"),
        (("promote", "../x"), "there is no registered set of the run '../x'"),
        (("rollback",), "mine has no earlier champion"),
        (("rollback", "--name", "other"), "no sets of models named other are registered"),
    ],
)
def test_what_cannot_be_is_said_with_exit_code_2(
    words: tuple[str, ...], said: str, sets_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = command(capsys, *words)
    assert code == 2
    assert said in out


def test_sets_of_two_pipelines_need_a_name(sets_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register(sets_home, 1, name="other")
    code, out = command(capsys, "promote", "1")
    assert code == 2
    assert "there are sets of mine, other; choose one with --name" in out
    assert command(capsys, "promote", "1", "--name", "other")[0] == 0
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
    assert ran(store, found, name="own").model_set == "1", "the same models are the same set"
    changed = {**found, "lora": published(store, tmp_path / "second", 22)["lora"]}
    assert ran(store, changed, name="own").model_set == "2"
    newest = tracking.find_set(sets_home, "own", "2")
    assert {stage: member.version for stage, member in newest.members.items()} == {
        "tokenizer": "1", "pretrain": "1", "sft": "1", "lora": "2",
    }  # fmt: skip
    assert ran(store, found, name="other").model_set == "1", "another name registers from the store what is there"
    kept = tracking.find_version(sets_home, Registered("other-sft", None, "1")).source
    assert kept is not None
    assert (kept / "config.json").read_text() == "sft 21"


@pytest.mark.parametrize("missing", STAGES)
def test_a_run_that_left_a_stage_out_registers_no_set(missing: str, sets_home: Path, tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(sets_home)
    found = {stage: layout.Artifact(stage, "k", tmp_path, {"result": {}}) for stage in STAGES if stage != missing}
    assert ran(store, found, name="own").model_set is None


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_a_run_that_did_not_end_well_registers_no_set(outcome: str, sets_home: Path, tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(sets_home)
    assert ran(store, published(store, tmp_path, 23), outcome, name="own").model_set is None
    assert tracking.list_sets(sets_home, "own") == []


def test_an_untracked_run_registers_no_set(sets_home: Path, tmp_path: Path) -> None:
    store = artifacts.ArtifactStore(sets_home)
    execution = ran(store, published(store, tmp_path, 24), name="own", tracking={"enabled": False})
    assert execution.model_set is None
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
    tracking.promote(sets_home, "mine", "1")
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
    tracking.promote(sets_home, "mine", "2")
    assert run_summary.of(same, "mine", store) == {}, "it is itself the champion"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert run_summary.of(other, "mine", store) == {}, "nobody waits for a server for the sake of a baseline"


def test_a_listing_loads_no_mlflow_until_the_database_changes(sets_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tracking.list_sets(sets_home)
    assert [found.version for found in first] == ["3", "2", "1"]
    with monkeypatch.context() as patched:
        patched.setattr(tracking, "_champions", lambda home: pytest.fail("MLflow was asked"))
        assert tracking.list_sets(sets_home) == first and tracking.list_sets(sets_home, "another") == []
    tracking.promote(sets_home, "mine", "2")
    assert [found.aliases for found in tracking.list_sets(sets_home)][1] == ("champion",)
    copied = database_of(sets_home).with_name("sets.json")
    for damaged in ("{", '{"state": 1}', copied.read_text().replace('"members"', '"member"')):
        copied.write_text(damaged)
        assert [found.version for found in tracking.list_sets(sets_home)] == ["3", "2", "1"]
