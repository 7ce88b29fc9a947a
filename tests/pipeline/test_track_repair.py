"""Damaged databases: what a run does, what is set aside, and what `ttrain track repair` brings back from the home."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.recorded_homes import Made, alive, falling, make_run
from support.tracked_stores import opened

from ttrain import tracking
from ttrain.cli.main import main
from ttrain.core.files import PRIVATE_FILE, read_json, write_json
from ttrain.core.sqlite_files import damage_of, set_aside
from ttrain.errors import TrackingError, UsageError
from ttrain.flows import servers
from ttrain.pipeline.track_repair import repair
from ttrain.tracking import TrackedRun

IDENTITY, OTHER = "1f" * 16, "2e" * 16


@pytest.fixture
def runs_home(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a database of MLflow, and three runs on record: two tracked by it, one by a server."""
    monkeypatch.setenv("TTRAIN_HOME", str(tracked_home))
    base = Made("pretrain", falling(12), result={"steps": 12, "loss": 3.0}, texts={"model/config.json": "{}"})
    tuned = Made("sft", falling(8), result={"steps": 8}, inputs={"base": ("pretrain", base.key, "")})
    kept = {"tracking": {"identity": IDENTITY, "run_id": "gone", "url": None}}
    make_run(tracked_home, "full-20260101-000000-aaaa", [base], number=1, metrics={"pretrain/loss": 3.0}, **kept)
    again = [Made("pretrain", key=base.key, outcome="cached"), tuned, Made("lora", outcome="failed", noted={"error": "no"})]
    kept = {"tracking": {"identity": OTHER, "run_id": "gone", "url": None}}
    make_run(tracked_home, "full-20260102-000000-bbbb", again, number=2, outcome="failed", **kept)
    elsewhere = {"tracking": {"identity": "3d" * 16, "run_id": "there", "url": "http://127.0.0.1:1/#/x"}}
    make_run(tracked_home, "full-20260103-000000-cccc", [], number=3, **elsewhere)
    return tracked_home


def overwrite(start: int, size: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(os.urandom(size))

    return damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


DAMAGES = {"header": overwrite(0, 100), "all": overwrite(0, 200_000), "middle": overwrite(20 * 4096, 8192), "cut": truncate}


@pytest.fixture(params=DAMAGES.values(), ids=DAMAGES)
def damage(request: Any) -> Callable[[Path], None]:
    found: Callable[[Path], None] = request.param
    return found


def test_damage_is_recognized_and_a_whole_or_locked_file_is_not(runs_home: Path, damage: Callable[[Path], None]) -> None:
    database = tracking.database_of(runs_home)
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert damage_of(database) is None
    assert damage_of(database) is None and damage_of(runs_home / "nothing.db") is None
    damage(database)
    assert damage_of(database) and damage_of(database, seconds=60)


def test_a_file_is_set_aside_with_what_sqlite_keeps_beside_it(tmp_path: Path) -> None:
    for name in ("a.db", "a.db-wal", "a.db-shm", "b.db"):
        (tmp_path / name).write_text(name)
    aside = set_aside(tmp_path / "a.db")
    assert aside.name.startswith("a.db.damaged-20")
    assert sorted(path.name for path in tmp_path.iterdir()) == [aside.name, f"{aside.name}-shm", f"{aside.name}-wal", "b.db"]


def test_a_damaged_history_of_prefect_gives_way_to_a_new_one(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "prefect" / "prefect.db"
    database.parent.mkdir()
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE flow_run (id INTEGER PRIMARY KEY, name TEXT)")
        db.executemany("INSERT INTO flow_run (name) VALUES (?)", [("a run" * 50,)] * 2000)
        db.commit()
    assert not servers.set_database_aside(tmp_path) and database.exists()
    damage(database)
    assert servers.set_database_aside(tmp_path)
    [kept] = database.parent.glob("*.db.damaged-*[0-9]")
    assert kept.name in caplog.text and "cannot be used" in caplog.text and kept.name.startswith("prefect.db.damaged-")
    assert not servers.set_database_aside(tmp_path)
    database.write_bytes(kept.read_bytes())
    assert servers.set_database_aside(tmp_path, "alembic: Can't locate revision identified by 'ffff'"), "another version"


def runs_of(home: Path) -> dict[str, dict[str, Any]]:
    """What the database has of each run, by name."""
    with closing(sqlite3.connect(tracking.database_of(home))) as db:
        runs = db.execute("SELECT run_uuid, name, status, start_time, end_time FROM runs").fetchall()
        return {
            name: {
                "status": status,
                "id": run_id,
                "time": (started / 1000, ended / 1000),
                "tags": dict(db.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,))),
                "params": dict(db.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,))),
                "points": db.execute(
                    "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'loss' ORDER BY step", (run_id,)
                ).fetchall(),
                "metrics": dict(db.execute("SELECT key, value FROM latest_metrics WHERE run_uuid = ?", (run_id,))),
            }
            for run_id, name, status, started, ended in runs
        }


def damaged_run(home: Path, caplog: pytest.LogCaptureFixture) -> TrackedRun:
    """A run that tells all it has while the database is damaged."""
    store = opened(home)
    run = store.start_run("late", identity="4c" * 16, tags={"ttrain.run": "late"}, params={"lr": 0.02})
    run.log_summary({"eval/bits_per_byte": 1.5})
    run.log_metrics([{"step": 1, "tokens": 1, "time": 1700000000, "metrics": {"loss": 1.0}}])
    run.set_tags({"ttrain.outcome": "completed"})
    run.finish("FINISHED")
    assert store.close() >= 5
    assert caplog.text.count("`ttrain track repair`") == 2, "when it is met, and at the end"
    return run


def test_a_run_keeps_what_it_has_to_tell_and_a_repair_brings_all_of_it(
    runs_home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES["header"](tracking.database_of(runs_home))
    damaged_run(runs_home, caplog)
    with pytest.raises(TrackingError, match=r"is damaged .*`ttrain track repair`") as told:
        tracking.list_sets(runs_home)
    assert "start it" not in str(told.value)
    assert all("`ttrain track repair`" in one.why for one in tracking.sync(runs_home))

    with pytest.raises(SystemExit) as ended:
        main(["track", "repair"])
    said = capsys.readouterr()
    assert ended.value.code == 0 and "logged again: 2 runs" in said.out and "champions" in said.out
    named = "not logged again, because a server that may have used this database has them: full-20260103-000000-cccc\n"
    assert named in said.out
    assert "mlflow.db.damaged-" in said.err and len([*runs_home.glob("mlflow/mlflow.db.damaged-*[0-9]")]) == 1

    found = runs_of(runs_home)
    assert found.keys() == {"full-20260101-000000-aaaa", "full-20260102-000000-bbbb", "pretrain aaaa", "sft bbbb",
                            "lora bbbb", "late"}  # fmt: skip
    first, second = found["full-20260101-000000-aaaa"], found["full-20260102-000000-bbbb"]
    assert first["status"] == "FINISHED" and second["status"] == found["lora bbbb"]["status"] == "FAILED"
    assert first["tags"]["ttrain.id"] == IDENTITY and first["metrics"]["pretrain/loss"] == 3.0
    assert first["time"] == (1_795_001_000.0, 1_795_001_060.5) and first["params"]["pretrain.optim.lr"]
    base, tuned = found["pretrain aaaa"], found["sft bbbb"]
    assert [step for step, _ in base["points"]] == list(range(1, 13)) and len(tuned["points"]) == 8
    assert base["params"]["result.steps"] == "12" and base["tags"]["mlflow.parentRunId"] == first["id"]
    assert base["time"] == (1_795_001_024.5, 1_795_001_030.0)
    assert second["tags"]["ttrain.cached"] == "pretrain" and found["lora bbbb"]["tags"]["ttrain.error"] == "no"
    assert found["late"]["status"] == "FINISHED" and found["late"]["metrics"]["eval/bits_per_byte"] == 1.5
    assert [*runs_home.glob(f"mlflow/artifacts/**/{base['id']}/artifacts/pretrain/model/config.json")]
    with closing(sqlite3.connect(tracking.database_of(runs_home))) as db:
        models = db.execute("SELECT name, run_id FROM model_versions").fetchall()
    assert sorted(models) == sorted([("quickstart-base", base["id"]), ("quickstart-sft", tuned["id"])])
    record = runs_home / "runs" / "full-20260101-000000-aaaa.json"
    assert read_json(record)["tracking"]["run_id"] == first["id"] and record.stat().st_mode & 0o777 == PRIVATE_FILE

    done = repair(runs_home, lambda line: None)
    assert not done.runs and not done.by_servers and done.damage is None, "the database is whole"
    assert runs_of(runs_home) == found, "and has all"


def test_damage_that_shows_in_the_middle_loses_nothing(runs_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file opens, and fails at the first look into the pages that are gone."""
    with closing(sqlite3.connect(database := tracking.database_of(runs_home))) as db:
        [(page,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'runs'").fetchall()
        [(size,)] = db.execute("PRAGMA page_size").fetchall()
    overwrite((page - 1) * size, size)(database)
    # In a fork, since MLflow keeps the file open in the process of the run
    process = multiprocessing.get_context("fork").Process(target=damaged_run, args=(runs_home, caplog))
    process.start()
    process.join()
    done = repair(runs_home, lambda line: None)
    assert process.exitcode == 0 and done.damage and len(done.runs) == 2 and done.waiting == 0
    assert {"late", "sft bbbb"} <= runs_of(runs_home).keys()


def test_a_repair_brings_the_set_of_a_night_that_took_its_tokenizer_and_base_from_the_champion(runs_home: Path) -> None:
    def evaluated(**models: Made) -> Made:
        inputs = {name: (made.stage, made.key, "") for name, made in models.items()}
        return Made("evaluate", inputs=inputs, result={"metrics": {"bits_per_byte": 2.0}})

    tokenizer = Made("tokenizer", texts={"tokenizer.json": "{}"})
    base = Made("pretrain", falling(4), inputs={"tokenizer": ("tokenizer", tokenizer.key, "")})
    tuned = Made("sft", falling(4), inputs={"base": ("pretrain", base.key, "")})
    kept = {"model_set": "quickstart/1", "metrics": {}, "tracking": {"identity": "5d" * 16, "run_id": "gone", "url": None}}
    make_run(runs_home, "full-20260104-000000-dddd", [tokenizer, base, evaluated(base=base)], number=4, **kept)
    kept["tracking"] = {"identity": "6e" * 16, "run_id": "gone", "url": None}
    make_run(runs_home, "nightly-20260105-000000-eeee", [tuned, evaluated(base=base, sft=tuned)], number=5, **kept)
    DAMAGES["header"](tracking.database_of(runs_home))
    repair(runs_home, lambda line: None)
    night, first = tracking.list_sets(runs_home)
    assert (night.run, first.run) == ("nightly-20260105-000000-eeee", "full-20260104-000000-dddd")
    assert night.members.keys() == {"tokenizer", "pretrain", "sft"}
    assert all(night.keys[stage] == first.keys[stage] for stage in ("tokenizer", "pretrain"))


def test_a_repair_holds_the_locks_of_one_run_at_a_time(runs_home: Path) -> None:
    """Else a home of some hundred runs has more files open than a system allows."""
    DAMAGES["header"](tracking.database_of(runs_home))
    held: list[str] = []

    def look(line: str) -> None:
        held.extend(file.path for file in psutil.Process().open_files() if file.path.startswith(f"{runs_home}/tracking"))

    assert len(repair(runs_home, look).runs) == 2 and not held


def test_a_repair_that_was_killed_goes_on(runs_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DAMAGES["header"](tracking.database_of(runs_home))
    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "log_metrics", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as killed:
            repair(runs_home, lambda line: None)
    del killed  # with the locks of the outboxes, which die with their process
    gc.collect()
    done = repair(runs_home, lambda line: None)
    assert done.damage is None and len(done.runs) == 2
    names = list(runs_of(runs_home))
    assert len(names) == len(set(names)) == 5 and len(runs_of(runs_home)["pretrain aaaa"]["points"]) == 12


def test_removed_artifacts_and_records_that_cannot_be_told_are_named(runs_home: Path) -> None:
    shutil.rmtree(runs_home / "store" / "sft")
    path = runs_home / "runs" / "full-20260101-000000-aaaa.json"
    write_json(path, {**read_json(path), "settings": {}})
    DAMAGES["header"](tracking.database_of(runs_home))
    done = repair(runs_home, lambda line: None)
    assert done.without_files == ("full-20260102-000000-bbbb:sft",)
    assert done.runs == ("full-20260102-000000-bbbb",) and done.unreadable == ("full-20260101-000000-aaaa",)


def test_a_repair_waits_for_runs_that_are_in_progress(runs_home: Path) -> None:
    DAMAGES["header"](tracking.database_of(runs_home))
    make_run(runs_home, "full-20260104-000000-dddd", [], number=4, outcome="running", process=alive())
    with pytest.raises(UsageError, match="full-20260104-000000-dddd is in progress"):
        repair(runs_home, lambda line: None)
    assert not [*runs_home.glob("mlflow/mlflow.db.damaged-*[0-9]")]


@pytest.fixture
def unwritable(runs_home: Path) -> Iterator[Path]:
    """The home as another account sees it that may only read."""
    public = Path("/tmp") / f"ttrain-unwritable-{os.getpid()}"
    shutil.copytree(runs_home, public)
    for path in (public, *public.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user, directory = os.geteuid(), Path.cwd()
    os.chdir("/")
    if user == 0:
        os.seteuid(65534)
    try:
        yield public
    finally:
        os.seteuid(user)
        os.chdir(directory)
        for path in (public, *public.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(public)


def test_models_are_listed_in_a_home_that_cannot_be_written(unwritable: Path) -> None:
    assert tracking.list_sets(unwritable) == []
    assert not [*unwritable.rglob("*.lock")]
