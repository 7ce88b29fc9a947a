"""Runs read back: by every name they have, from MLflow or without it, each step once, nothing from outside a run's files."""

from __future__ import annotations

import json
import math
import shutil
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.paths import ROOT
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, falling, make_run
from support.tracked_stores import opened
from support.waiting import stopwatch

from ttrain.errors import UsageError
from ttrain.store.runs import read_rows
from ttrain.tracking import read_local, read_run, read_runs
from ttrain.tracking.artifact_source import MlflowSource
from ttrain.tracking.database import database_of
from ttrain.tracking.views import RunView

FIRST, SECOND, CACHED, KILLED = (
    "full-20261121-100000-0001a",
    "full-20261121-110000-0002b",
    "full-20261122-090000-0003c",
    "full-20261122-100000-0004d",
)
LOSSES = falling(8, gap=3)
PRETRAIN = Made("pretrain", LOSSES, texts={"run/samples/step-00000004.txt": "=== Hello\nworld\n", "run/log.txt": "a line\n"})
SFT = Made("sft", falling(6, 2.0))
OTHER = Made("pretrain", falling(8, 2.5))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two tracked runs, the second with a stage from the cache, one wholly cached, and one that was killed."""
    home = tmp_path_factory.mktemp("a home #1 50%")
    make_run(home, FIRST, [PRETRAIN, SFT], metrics={"eval/bits_per_byte": 2.5}, tracked=True)
    from_cache = Made("sft", SFT.losses, outcome="cached")
    make_run(
        home, SECOND, [OTHER, from_cache], number=1, settings={"pretrain": {"optim": {"lr": 0.5}}},
        metrics={"eval/bits_per_byte": 2.25}, tracked=True,
    )  # fmt: skip
    cached = [Made("pretrain", PRETRAIN.losses, outcome="cached"), from_cache]
    cached[0].key = PRETRAIN.key
    make_run(home, CACHED, cached, number=2, outcome="cached", equals=FIRST)
    running = Made("pretrain", outcome="running", key="f" * 64)
    make_run(home, KILLED, [running, Made("sft", outcome="pending")], number=3, outcome="running")
    return home


@pytest.fixture
def read_home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


def ids(home: Path) -> dict[str, str]:
    """MLflow's id of each run, also of the stages', by name."""
    with closing(sqlite3.connect(database_of(home))) as db:
        return dict(db.execute("SELECT name, run_uuid FROM runs"))


def test_a_run_is_found_by_every_name_it_its_stages_and_its_models_have(read_home: Path) -> None:
    store, known = opened(read_home), ids(read_home)
    first, second = (read_run(read_home, name, tracked=True) for name in (FIRST, SECOND))
    stages = [view.stages["pretrain"].run_id for view in (first, second)]
    store.client.create_registered_model("mine-base")
    tags = {"ttrain.stage": "pretrain", "ttrain.key": PRETRAIN.key}
    store.client.create_model_version("mine-base", "file:///nowhere", stages[0], tags=tags)
    store.client.set_registered_model_alias("mine-base", "champion", "1")
    store.close()
    for text in (FIRST, FIRST[:16], FIRST[-5:], known[FIRST], stages[0], "mine-base/1", "models:/mine-base@champion"):
        assert read_run(read_home, text).name == FIRST
    assert stages[1] != second.run_id and read_run(read_home, stages[1]).name == SECOND
    assert read_run(read_home, "latest").name == KILLED
    assert [view.name for view in read_runs(read_home, [SECOND, FIRST])] == [SECOND, FIRST]


def test_a_name_that_is_none_or_many_is_refused_with_what_there_is(read_home: Path) -> None:
    with pytest.raises(UsageError, match=f"'full-2026' is the beginning or end of 4 runs: {KILLED}, {CACHED}"):
        read_run(read_home, "full-2026")
    for text in ("nothing-like-it", "", "../runs", "0" * 32):
        with pytest.raises(UsageError, match=f"there is no run '{text}'; there are {KILLED}"):
            read_run(read_home, text)
    with pytest.raises(UsageError, match=f"did you mean {FIRST}"):
        read_run(read_home, FIRST.replace("full", "fill"))


def test_a_curve_has_every_step_once_its_tokens_its_time_and_a_gap_where_there_was_no_number(read_home: Path) -> None:
    view = read_run(read_home, FIRST)
    assert view.curves("pretrain") == ["grad_norm", "loss", "lr", "validation_loss"]  # not final/loss, not tokens
    assert view.curve("pretrain", "nothing") == view.curve("no stage", "loss") == []
    curve = view.curve("pretrain", "loss")
    assert [point.step for point in curve] == list(range(1, 9))
    assert [point.tokens for point in curve] == [TOKENS_PER_STEP * step for step in range(1, 9)]
    assert [point.time for point in curve] == [BEGAN + 2.0 * step for step in range(1, 9)]
    assert math.isnan(curve[2].value)
    assert [point.value for point in curve if point.step != 3] == [loss for loss in LOSSES if loss is not None]
    assert [point.step for point in view.curve("pretrain", "validation_loss")] == [4, 8]


def test_metrics_are_read_back_under_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    of_sources = {f"bits_per_byte/source:{name}": 1.0 + number for number, name in enumerate(("r&d", "r#d", "r_d"))}
    metrics = {f"eval/{name}": value for name, value in of_sources.items()}
    evaluate = Made(
        "evaluate", result={"metrics": of_sources}, texts={"evaluation.json": json.dumps({"metrics": of_sources})}
    )
    make_run(tmp_path, FIRST, [evaluate], metrics=metrics, tracked=True)
    assert read_run(tmp_path, FIRST, tracked=True).metrics == metrics
    (tmp_path / "runs" / f"{FIRST}.json").unlink()  # as where another home made it
    assert read_run(tmp_path, FIRST).metrics == metrics


def test_a_step_that_was_logged_twice_is_drawn_once_with_its_last_value_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, [made := Made("pretrain", falling(8))])
    path = tmp_path / "store" / "pretrain" / made.key / "run" / "metrics.jsonl"
    again = f'{{"step": 5, "time": {BEGAN}, "metrics": {{"loss": 7.5}}}}'
    path.write_text(f'{path.read_text()}{again}\n{{"step": 9, "metr')
    curve = read_run(tmp_path, FIRST).curve("pretrain", "loss")
    assert [point.step for point in curve] == list(range(1, 9))
    assert curve[4].value == 7.5


def test_a_cached_stage_has_the_curves_of_the_run_that_made_it(read_home: Path) -> None:
    first, second, cached = read_runs(read_home, [FIRST, SECOND, CACHED])
    assert (second.stages["sft"].cached, second.stages["sft"].made_by) == (True, FIRST)
    assert second.curve("sft", "loss") == first.curve("sft", "loss") != []
    assert second.curve("pretrain", "loss") != first.curve("pretrain", "loss")
    assert cached.run_id is None and cached.status == "cached"
    assert [stage.made_by for stage in cached.stages.values()] == [FIRST, FIRST]
    assert cached.curve("pretrain", "loss")[0].value == LOSSES[0]
    assert cached.stages["pretrain"].seconds == 5.5 and cached.stages["pretrain"].ended is None


def test_runs_that_share_a_stage_read_its_curves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing ten runs of one base of 100,000 steps took 84 s and 870 MB instead of 7 s and 180 MB."""
    make_run(tmp_path, FIRST, [made := Made("pretrain", falling(8))])
    make_run(tmp_path, SECOND, [Made("pretrain", made.losses, outcome="cached", key=made.key)], number=1)
    read: list[Path] = []
    monkeypatch.setattr("ttrain.tracking.views.read_rows", lambda path: read.append(path) or read_rows(path))
    first, second = read_runs(tmp_path, [FIRST, SECOND])
    assert first.curve("pretrain", "loss") == second.curve("pretrain", "loss") != []
    assert len(read) == 1


def test_a_stage_that_two_runs_built_is_to_each_its_own(read_home: Path, tmp_path: Path) -> None:
    """A forced run builds a key again: its curves are the same, its clock is not."""
    shutil.copytree(read_home, tmp_path / "home")
    again = "full-20261122-110000-0005e"
    make_run(tmp_path / "home", again, [Made("pretrain", PRETRAIN.losses, key=PRETRAIN.key)], number=5, tracked=True)
    first, second = read_runs(tmp_path / "home", [FIRST, again])
    assert [view.stages["pretrain"].made_by for view in (first, second)] == [FIRST, again]
    assert second.curve("pretrain", "loss")[0].time - first.curve("pretrain", "loss")[0].time == 5000.0


def test_mlflow_has_the_runs_their_curves_and_their_files(read_home: Path) -> None:
    source, known = MlflowSource(read_home), ids(read_home)
    first = source.runs([known[FIRST], "0" * 32])
    assert [run.name for run in first.values()] == [FIRST] and source.runs(["0" * 32]) == {}
    [child] = source.with_tags("ttrain.key", [PRETRAIN.key])
    assert child.tags["ttrain.run"] == FIRST and source.with_tags("ttrain.stage", ["it's"]) == []
    assert {run.tags["ttrain.run"] for run in source.with_tags("ttrain.stage", ["pretrain"])} == {FIRST, SECOND}
    assert source.curves(child.run_id) == ["grad_norm", "loss", "lr", "tokens", "validation_loss"]
    losses = [value for _, _, value in source.history(child.run_id, "loss")]
    assert str(losses) == str([math.nan if loss is None else loss for loss in LOSSES])
    assert source.history(child.run_id, "nothing") == []
    assert source.text(child.run_id, "pretrain/run/log.txt") == "a line\n"
    assert source.files(child.run_id, "pretrain/run/samples") == {"pretrain/run/samples/step-00000004.txt": 16}


def same(one: RunView, other: RunView) -> None:
    assert (one.name, one.status, one.params, one.metrics) == (other.name, other.status, other.params, other.metrics)
    for name in one.stages:
        for metric in ("loss", "validation_loss"):
            assert str(one.curve(name, metric)) == str(other.curve(name, metric))
        assert one.text(name, "run/log.txt") == other.text(name, "run/log.txt")


def test_a_run_of_this_home_asks_nobody_and_one_without_files_says_that_mlflow_is_silent(
    read_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_run(read_home, FIRST)
    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody answers there once it is closed
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:word@127.0.0.1:{port}")
    same(whole, read_run(read_home, FIRST))
    assert whole.notes == read_run(read_home, FIRST).notes == ()
    shutil.copytree(read_home / "runs", tmp_path / "runs")
    waited = stopwatch()
    view = read_run(tmp_path, FIRST)
    assert waited() < 10
    assert (view.params, view.metrics, view.curves("pretrain")) == (whole.params, whole.metrics, [])
    assert len(view.notes) == 1 and f"MLflow at http://127.0.0.1:{port} cannot be queried" in view.notes[0]
    assert read_local(tmp_path, FIRST).notes == ()


def test_a_run_of_which_only_mlflow_knows_is_read_from_there(read_home: Path, tmp_path: Path) -> None:
    shutil.copytree(read_home / "mlflow", tmp_path / "mlflow")
    view = read_run(tmp_path, FIRST)
    assert (view.name, view.status, list(view.stages)) == (FIRST, "completed", ["pretrain", "sft"])
    assert view.metrics["eval/bits_per_byte"] == 2.5
    assert view.curve("sft", "loss") == read_run(read_home, FIRST).curve("sft", "loss")


def test_a_copied_home_reads_its_own_files(read_home: Path, tmp_path: Path) -> None:
    """Of artifacts that were cleaned away, MLflow's files in the home are read without MLflow."""
    copy = tmp_path / "copy"
    shutil.copytree(read_home, copy)
    shutil.rmtree(copy / "store")
    view = read_run(copy, FIRST)
    same(read_run(read_home, FIRST), view)
    assert view.stages["pretrain"].artifact_uri and str(copy.resolve().as_uri()) in view.stages["pretrain"].artifact_uri
    assert view.text("pretrain", "run/log.txt") == "a line\n"
    assert view.manifest("pretrain")["key"] == PRETRAIN.key
    (copy / "mlflow" / "artifacts").rename(copy / "gone")
    assert view.text("pretrain", "run/log.txt") is None
    assert view.manifest("pretrain")["key"] == PRETRAIN.key, "asked for once"
    assert read_run(copy, FIRST).manifest("pretrain") == {}


def test_files_are_listed_and_texts_cannot_lead_out_of_the_stage(read_home: Path, tmp_path: Path) -> None:
    view = read_run(read_home, FIRST)
    assert view.files("pretrain", "run/samples") == ["run/samples/step-00000004.txt"]
    assert view.text("pretrain", "run/samples/step-00000004.txt") == "=== Hello\nworld\n"
    assert view.text("pretrain", "run/none.txt") is None
    for path in ("../../../runs/x", f"{tmp_path}/x", "run/../../x", "", "a\0b"):
        assert view.text("pretrain", path) is None
    assert view.files("pretrain", "../..") == []


def test_settings_that_look_like_secrets_are_masked(tmp_path: Path) -> None:
    name = FIRST
    make_run(tmp_path, name, [Made("pretrain")])
    record = tmp_path / "runs" / f"{name}.json"
    record.write_text(record.read_text().replace('"webhook": null', '"webhook": "https://hooks.example/T0/secret"'))
    params = read_run(tmp_path, name).params
    assert params["notify.webhook"] == "***"
    assert params["pretrain.optim.lr"] != "***"


def test_what_the_machine_did_has_the_clock_for_a_step_and_no_tokens(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, [made := Made("pretrain", falling(4))])
    rows = "".join(
        f'{{"step": {step}, "time": {BEGAN + step}, "metrics": {{"system/cpu": {step}.5}}}}\n' for step in (1, 2, 3)
    )
    (tmp_path / "store" / "pretrain" / made.key / "run" / "system.jsonl").write_text(rows)
    view = read_run(tmp_path, FIRST)
    assert "system/cpu" in view.curves("pretrain")
    assert [(point.step, point.tokens) for point in view.curve("pretrain", "system/cpu")] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    assert [point.tokens for point in view.curve("pretrain", "loss")] == [512, 1024, 1536, 2048]


def test_reading_a_homes_own_database_imports_no_mlflow(read_home: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ttrain.tracking import read_run\n"
        f"for name in {[FIRST, SECOND, CACHED]}:\n"
        f"    view = read_run(Path({str(read_home)!r}), name)\n"
        f"    assert view.curve('pretrain', 'loss')\n"
        "sys.exit(any(name in sys.modules for name in ('mlflow', 'sqlalchemy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
