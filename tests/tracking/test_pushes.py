"""Pushes of runs to a real MLflow: all of a run, once, in its state, and again from nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, alive, falling, make_run, rows_of
from support.tracked_stores import client_of, files_of, pushed, rows_of_database, steps, tracked
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.config.loading import load
from ttrain.core.files import write_json
from ttrain.engine.labels import labels_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.store.registry import Registry
from ttrain.tracking import pusher, run_summary
from ttrain.tracking.client import clean, database_of
from ttrain.tracking.mirror import Mirror, TrackedRun

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"
LOSSES = falling(8, gap=3)
TOKENIZER = Made("tokenizer", result={"vocab_size": 400, "bytes_per_token": 3.5, "unk_rate": 0.0})
SHARDS = Made(
    "shards-pretrain",
    result={"train": {"rows": 80, "tokens": 700, "bytes": 2700}, "heldout": {"rows": 10, "tokens": 100, "bytes": 300}},
    files={"docs.jsonl": "5" * 64},
    noted={"metric": "80 rows"},
)
PRETRAIN = Made(
    "pretrain",
    LOSSES,
    inputs={"shards": (SHARDS.stage, SHARDS.key, "c1")},
    result={"steps": 8, "optimizer_groups": [{"optimizer": "AdamW", "lr": 0.5}]},
    texts={"run/log.txt": "a line\n"},
)
FAILED = Made("sft", outcome="failed", noted={"error": "out of memory"})


def only(home: Path, identity: str) -> Any:
    [run] = tracked(home, identity)
    return run


def in_progress(home: Path, run: str, *stages: Made, number: int = 0) -> None:
    """A run whose process is this one."""
    make_run(home, run, stages, number=number, outcome="running", process=alive(), seconds=None)


def work_of(home: Path, stage: Made, run: str, identity: str, losses: list[float | None]) -> Path:
    """The work directory of a stage as it trains: whose it is, and its curve. Returns the curve."""
    work = ArtifactStore(home).work(stage.stage, stage.key)
    curve = work / "output" / "run" / "metrics.jsonl"
    curve.parent.mkdir(parents=True, exist_ok=True)
    write_json(work / TRACKED, {"run": run, "id": identity})
    curve.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(losses, BEGAN)))
    return curve


def test_a_run_is_in_mlflow_with_its_stages_and_all_that_they_left(tracked_home: Path) -> None:
    settings = {"pretrain": {"optim": {"lr": 0.5}}}
    make_run(
        tracked_home, A, [TOKENIZER, SHARDS, PRETRAIN, FAILED, Made("lora", outcome="pending")], settings=settings,
        metrics={"eval/bits_per_byte": 2.5}, outcome="failed", tags={"purpose": "a smaller rate"}, note="why",
    )  # fmt: skip
    pushed(tracked_home)
    run, stage = only(tracked_home, A), only(tracked_home, f"{A}/pretrain")
    assert (run.info.run_name, run.info.status, run.info.start_time) == (A, "FAILED", 1000 * BEGAN)
    assert run.info.end_time == 1000 * (BEGAN + 60.5)
    assert run.data.params["pretrain.optim.lr"] == "0.5" and run.data.metrics["eval/bits_per_byte"] == 2.5
    assert run.data.tags["purpose"] == "a smaller rate" and run.data.tags["ttrain.outcome"] == "failed"
    assert run.data.tags["mlflow.note.content"].startswith("why")
    assert {"settings.yaml", "report.html"} <= files_of(run).keys()
    by_tokens = client_of(tracked_home).get_metric_history(run.info.run_id, "Curves/pretrain loss")
    assert [point.step for point in by_tokens] == [TOKENS_PER_STEP * step for step in range(1, 9)]

    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id and stage.data.tags["ttrain.key"] == PRETRAIN.key
    assert (stage.info.status, stage.data.params["optim.groups.0.lr"]) == ("FINISHED", "0.5")
    points = client_of(tracked_home).get_metric_history(stage.info.run_id, "loss")
    assert [(point.step, point.timestamp) for point in points] == [(n, 1000 * (BEGAN + 2 * n)) for n in range(1, 9)]
    assert str([point.value for point in points]) == str([math.nan if loss is None else loss for loss in LOSSES])
    assert steps(tracked_home, stage.info.run_id, "tokens") == list(range(1, 9))
    assert {"pretrain/manifest.json", "pretrain/run/metrics.jsonl", "pretrain/run/log.txt"} <= files_of(stage).keys()
    inputs = [(one.dataset.name, one.dataset.profile) for one in stage.inputs.dataset_inputs]
    assert inputs == [("pretrain", '{"documents": 80, "bytes": 2700}')]
    assert only(tracked_home, f"{A}/tokenizer").data.metrics == {"tok/bytes_per_token": 3.5, "tok/unk_rate": 0.0}
    failed = only(tracked_home, f"{A}/sft")
    assert (failed.info.status, failed.data.tags["ttrain.error"]) == ("FAILED", "out of memory")
    assert tracked(tracked_home, f"{A}/lora") == [], "it never began"


def test_the_settings_file_of_a_run_gives_its_settings_without_secrets(tracked_home: Path) -> None:
    settings = load(["sft.optim.lr=2e-4", "notify.webhook=https://h.example/hidden"], environment={}).settings
    make_run(tracked_home, A, [TOKENIZER], settings=settings.model_dump(mode="json"))
    pushed(tracked_home)
    path = files_of(only(tracked_home, A))["settings.yaml"]
    assert load(files=[path], environment={}).settings == settings.replaced({"notify": {"webhook": None}})


def test_a_second_push_changes_nothing(tracked_home: Path) -> None:
    make_run(tracked_home, A, [TOKENIZER, SHARDS, PRETRAIN, FAILED], metrics={"eval/bits_per_byte": 2.5, "bad": math.nan})
    pushed(tracked_home)
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before
    assert pushed(tracked_home) == [], "what has not changed is not looked at"


def test_a_stage_is_pushed_while_it_trains_and_a_curve_that_was_cut_back_has_each_step_once(tracked_home: Path) -> None:
    training = Made("pretrain", outcome="running", key="f" * 64)
    curve = work_of(tracked_home, training, A, f"{A}/pretrain", falling(20))
    in_progress(tracked_home, A, training)
    mirror = Mirror(tracked_home)
    pusher.push_run(mirror, A)
    stage = only(tracked_home, f"{A}/pretrain")
    assert (stage.info.status, only(tracked_home, A).info.status) == ("RUNNING", "RUNNING")
    with curve.open("a") as file:
        file.write('{"step": 21, "tokens": 1, "ti')
    pusher.push_run(mirror, A)
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 21)), "a line that is half written waits"
    work_of(tracked_home, training, A, f"{A}/pretrain", falling(12))  # back to the checkpoint, with other lines
    pusher.push_run(mirror, A)
    work_of(tracked_home, training, A, f"{A}/pretrain", falling(2000, 2.0))
    pusher.push_run(mirror, A)
    pusher.push_run(Mirror(tracked_home), A)  # another process, which knows nothing
    for metric in ("loss", "tokens"):
        assert steps(tracked_home, stage.info.run_id, metric) == list(range(1, 2001)), "more than MLflow takes at once"


def test_a_resumed_stage_is_one_curve_under_the_run_that_began_it(tracked_home: Path) -> None:
    """Pushing the older run again does not take the stage back."""
    training = Made("pretrain", outcome="interrupted", key="f" * 64, noted={"tracked": f"{A}/pretrain"})
    work_of(tracked_home, training, A, f"{A}/pretrain", falling(20))
    make_run(tracked_home, A, [training], outcome="interrupted")
    pushed(tracked_home)
    assert only(tracked_home, f"{A}/pretrain").info.status == "KILLED"
    work_of(tracked_home, training, B, f"{A}/pretrain", falling(30, 2.0))
    done = Made("pretrain", falling(30, 2.0), key="f" * 64, noted={"tracked": f"{A}/pretrain"})
    make_run(tracked_home, B, [done], number=1)
    pushed(tracked_home)
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before
    stage = only(tracked_home, f"{A}/pretrain")
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 31))
    assert (stage.info.status, stage.data.tags["ttrain.run"]) == ("FINISHED", B)
    assert stage.data.tags["mlflow.parentRunId"] == only(tracked_home, B).info.run_id
    assert tracked(tracked_home, f"{B}/pretrain") == []


def test_a_killed_run_is_killed_after_the_next_push_and_a_stage_that_it_published_is_finished(tracked_home: Path) -> None:
    published = Made("pretrain", LOSSES, noted={"outcome": "running"}, result={"steps": 8})
    open_stage = Made("sft", outcome="running", key="e" * 64)
    in_progress(tracked_home, A, Made("pretrain", outcome="running", key=published.key), open_stage)
    shutil.rmtree(tracked_home / "store", ignore_errors=True)
    pusher.push_run(Mirror(tracked_home), A)
    assert only(tracked_home, f"{A}/pretrain").info.status == "RUNNING"
    make_run(tracked_home, A, [published, open_stage], outcome="running")  # its process is gone
    pushed(tracked_home)
    stage = only(tracked_home, f"{A}/pretrain")
    assert (only(tracked_home, A).info.status, only(tracked_home, f"{A}/sft").info.status) == ("KILLED", "KILLED")
    assert (stage.info.status, stage.data.params["result.steps"]) == ("FINISHED", "8")
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 9))
    assert "pretrain/manifest.json" in files_of(stage)


def test_secrets_are_masked_everywhere(tracked_home: Path) -> None:
    settings = {"notify": {"webhook": "https://hooks.example/T0/hunter2"}, "data": {"sft": "https://u:hunter2@h.example/x"}}
    labels = labels_of("see https://u:hunter2@h.example/x", ["hub.token=hunter2"])
    make_run(tracked_home, A, [PRETRAIN], settings=settings, **labels.to_json())
    pushed(tracked_home)
    run = only(tracked_home, A)
    assert (run.data.params["notify.webhook"], run.data.tags["hub.token"]) == ("***", "***")
    files = [path for path in (tracked_home / "mlflow").rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if b"hunter2" in path.read_bytes()]


PIECES = (
    "..", "/", "//", "\\", "%2e%2e", "\0", "\n", "\x1b[2J", "\u202e", "\uff0e\uff0e", "\ud800", "~root", "C:", "file:///etc",
    "a", " ", ".hidden", "*", "$HOME", "\u00e9", "e\u0301", "\u5929", "\U0001f600", "x" * 300, "y" * 3000, "'", '"', ":",
)  # fmt: skip


def test_names_that_mlflow_would_refuse_are_shown_and_lead_nowhere(tracked_home: Path) -> None:
    for name in ("loss", "eval/bits_per_byte/lang:zh", "source:\u7ef4\u57fa/a b.c-d", "y" * 250):
        assert clean(name) == name, "a name that MLflow accepts stays as it is"
    outside = {path for path in tracked_home.parent.rglob("*") if tracked_home not in path.parents}
    names = [*PIECES, *(f"{one}/{other}" for one in PIECES for other in PIECES[:8])]
    run = TrackedRun("all", A, "\0\ud800" * 300, "odd", BEGAN, "FINISHED", tags=dict.fromkeys(names, "\0"))
    run.summary, run.params = dict.fromkeys(names, 1.0), dict.fromkeys(names, "x" * 7000)
    bound = Mirror(tracked_home).push(run)
    assert bound
    assert client_of(tracked_home).get_run(bound.run_id).data.metrics.keys() == {clean(name) for name in names}
    assert {path for path in tracked_home.parent.rglob("*") if tracked_home not in path.parents} == outside


def test_a_run_that_was_deleted_in_mlflow_stays_deleted_and_holds_up_no_other(tracked_home: Path) -> None:
    [first] = (make_run(tracked_home, A, [PRETRAIN], tracked=True),)
    client_of(tracked_home).delete_run(first)
    make_run(tracked_home, B, [TOKENIZER], number=1)
    assert pushed(tracked_home) == [None, only(tracked_home, B).info.run_id] or pushed(tracked_home) == []
    assert pushed(tracked_home, [A]) == [None] and tracked(tracked_home, A) == []
    assert only(tracked_home, B).info.status == "FINISHED"


def shown(home: Path) -> dict[str, Any]:
    """All that MLflow shows of a home, without the ids and times that are MLflow's own."""
    mlflow, runs = client_of(home), dict[str, Any]()
    experiment = mlflow.get_experiment_by_name("ttrain").experiment_id
    found = mlflow.search_runs([experiment], max_results=1000)
    names = {run.info.run_id: run.data.tags["ttrain.id"] for run in found}
    for run in found:
        tags = {key: names.get(value, value) for key, value in run.data.tags.items()}
        curves = {key: str(mlflow.get_metric_history(run.info.run_id, key)) for key in run.data.metrics}
        curves = {key: text.replace(run.info.run_id, "") for key, text in curves.items()}
        inputs = sorted((one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs)
        info = (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time)
        runs[names[run.info.run_id]] = (info, run.data.params, tags, curves, inputs, sorted(files_of(run)))
    versions = {
        (one.name, one.version): (one.description, one.tags, names.get(one.run_id), one.source.split("/", 1)[0])
        for one in mlflow.search_model_versions()
    }
    aliases = {one.name: one.aliases for one in mlflow.search_registered_models()}
    return {"runs": runs, "versions": versions, "aliases": aliases}


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]) -> tuple[Path, dict[str, Any]]:
    """A home with twelve runs, four sets of their models, one of them champion; and what MLflow shows of them."""
    home = tmp_path_factory.mktemp("twelve") / "home"
    add_database(home)
    registry, store = Registry(home), ArtifactStore(home)
    for number in range(12):
        run, model = f"full-20261121-10{number:02}00-0001a", Made("sft", falling(4 + number))
        make_run(home, run, [TOKENIZER, model], number=number, metrics={"eval/bits_per_byte": 3.0 - number / 10})
        if number % 3 == 0:
            artifact = store.find("sft", model.key)
            assert artifact
            member = registry.register_model("quickstart-sft", artifact, run)
            registry.register_set("quickstart", run, [member], {"sft": model.key}, {"bits_per_byte": 3.0})
    registry.promote("quickstart", "2")
    assert len(pushed(home)) == 12
    return home, shown(home)


def damage_nothing(database: Path) -> None:
    database.unlink()


def damage_all(database: Path) -> None:
    database.write_bytes(bytes(range(256)) * 4000)


def damage_the_middle(database: Path) -> None:
    data = bytearray(database.read_bytes())
    data[4096 : len(data) - 4096] = b"\xa5" * (len(data) - 8192)
    database.write_bytes(data)


def empty(database: Path) -> None:
    database.write_bytes(b"")


@pytest.mark.parametrize("harm", [damage_nothing, damage_all, damage_the_middle, empty])
def test_a_database_that_is_gone_or_damaged_is_made_again_from_the_home(
    twelve: tuple[Path, dict[str, Any]], harm: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(twelve[0], home := tmp_path / "home")
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    before = twelve[1]
    assert before["aliases"]["quickstart"] == before["aliases"]["quickstart-sft"] == {"champion": 2, "challenger": 4}
    assert len(before["runs"]) == 3 * 12 and len(before["versions"]) == 8
    harm(database_of(home))
    done = CliRunner().invoke(app, ["track", "push", "--json"])
    assert done.exit_code == 0, done.output
    assert shown(home) == before
    assert (champion := Registry(home).champion("quickstart")) and champion.version == "2"
    aside = [path.name for path in database_of(home).parent.glob("mlflow.db.damaged-*")]
    assert len(aside) == (1 if harm in (damage_all, damage_the_middle) else 0)


def _push_often(home: str, times: int) -> None:
    run_summary.page_of = lambda home, run: None  # which takes 2 s of CPU each time
    for _ in range(times):
        pushed(Path(home), [A])


@pytest.mark.soak  # two minutes
def test_two_processes_that_push_one_run_fifty_times_make_it_once(tmp_path: Path) -> None:
    make_run(home := tmp_path / "home", A, [TOKENIZER, PRETRAIN])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.tracking", "tracking.test_push"])
    processes = [context.Process(target=_push_often, args=(str(home), 50)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    stage = only(home, f"{A}/pretrain")
    assert only(home, A) and only(home, f"{A}/tokenizer")
    for metric in ("loss", "tokens", "validation_loss"):
        found = steps(home, stage.info.run_id, metric)
        assert found == ([4, 8] if metric == "validation_loss" else list(range(1, 9))), metric


def test_track_push_says_what_it_did(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tracked_home))
    command = CliRunner().invoke
    make_run(tracked_home, A, [TOKENIZER])
    make_run(tracked_home, B, [TOKENIZER], number=1, outcome="cached")
    assert "pushed: 1 run" in command(app, ["track", "push"]).stdout
    assert "up to date" in command(app, ["track", "push"]).stdout
    [again] = json.loads(command(app, ["track", "push", A, "--json"]).stdout)
    assert again == {"run": A, "run_id": only(tracked_home, A).info.run_id, "pushed": True, "why": ""}
    unknown = command(app, ["track", "push", "other"])
    assert unknown.exit_code and "there is no run 'other'" in str(unknown.exception)


SWEEP, TRIAL = "sweep-20260101-000000-00000", "full-20260101-000001-aaaaa"


def keep(home: Path, status: str, process: Any) -> None:
    """A sweep as its process left it."""
    (home / "sweeps" / SWEEP).mkdir(parents=True)
    write_json(home / "sweeps" / SWEEP / "sweep.json", {"process": process})
    rows: Any = [{"step": 2, "metrics": {"loss": 1.5}}]
    pusher.keep_sweep(home, TrackedRun(SWEEP, SWEEP, SWEEP, "ttrain", BEGAN, status, rows=rows))
    make_run(home, TRIAL, [], sweep={"name": SWEEP, "trial": 0})


def test_a_sweep_is_there_again_with_its_trials_below_it(tracked_home: Path) -> None:
    keep(tracked_home, "FINISHED", alive())
    for _ in range(2):
        parent, child = pushed(tracked_home)
        client_now = Mirror(tracked_home).client  # of the file that is there now
        assert client_now.get_run(child).data.tags["mlflow.parentRunId"] == parent
        assert [point.step for point in client_now.get_metric_history(parent, "loss")] == [2]
        assert pushed(tracked_home) == []
        database_of(tracked_home).unlink()


def test_a_sweep_whose_process_is_gone_is_killed(tracked_home: Path) -> None:
    keep(tracked_home, "RUNNING", {"pid": 1, "started": 0})
    pushed(tracked_home)
    assert only(tracked_home, SWEEP).info.status == "KILLED"
    assert pushed(tracked_home) == []
