"""Records of runs: their history, their curves by every name they have, and their replicates."""

import itertools
import math
import re
import subprocess
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from store.test_store import full_disk
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, falling, make_run

from ttrain.errors import UsageError
from ttrain.flows import deploy, serve
from ttrain.nightly.records import InputSnapshot, Nights
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry
from ttrain.store.replicates import values_by_seed
from ttrain.store.run_views import read_run, read_runs
from ttrain.store.runs import RunRecord, history

FIRST = "full-20261121-100000-0001a"
SECOND = "full-20261121-110000-0002b"
CACHED = "full-20261122-090000-0003c"
LOSSES = falling(8, gap=3)
PRETRAIN = Made("pretrain", LOSSES)
SFT = Made("sft", falling(6, 2.0))


def record(home: Path, **notes: object) -> RunRecord:
    made = RunRecord(home, "full", ["tokenizer", "pretrain"], {"name": "x"})
    made.note(**notes)
    return made


def test_runs_are_listed_newest_first_and_broken_records_hide_no_others(tmp_path: Path) -> None:
    names = [record(tmp_path).run for _ in range(3)]
    (tmp_path / "runs" / "broken.json").write_text('{"run": ')
    (tmp_path / "runs" / "older.json").write_text('{"run": "older", "outcome": "completed"}')
    assert [run["run"] for run in history(tmp_path)] == names[::-1]
    assert history(tmp_path / "empty") == []


def test_a_run_is_on_record_from_its_start(tmp_path: Path) -> None:
    made = record(tmp_path)
    made.stage("pretrain", outcome="running", key="k")
    (run,) = history(tmp_path)
    assert run["outcome"] == "running"
    pending = {"name": "tokenizer", "outcome": "pending"}
    assert run["stages"] == [pending, {"name": "pretrain", "outcome": "running", "key": "k"}]
    made.finish("completed", {"eval/x": 1.0})
    (run,) = history(tmp_path)
    assert (run["outcome"], run["metrics"]) == ("completed", {"eval/x": 1.0})
    assert 0 <= run["seconds"] < 60


def test_a_run_whose_process_was_killed_is_shown_as_crashed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record(tmp_path, process={"pid": process.pid, "started": runs.process_started(process.pid)})
        assert history(tmp_path)[0]["outcome"] == "running"
        process.kill()
        process.wait()
    assert history(tmp_path)[0]["outcome"] == "crashed"


def test_a_full_disk_costs_only_the_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = record(tmp_path)
    with full_disk(10):
        made.log("sft", "line")
        made.stage("pretrain", outcome="running", key="k")
        made.note(error="x")
    assert sum(str(made.path) in entry.message for entry in caplog.records) == 1
    stage = {"name": "pretrain", "outcome": "pending"}
    assert history(tmp_path)[0]["stages"][1] == stage
    made.finish("completed", {})
    assert history(tmp_path)[0]["stages"][1] == {**stage, "outcome": "running", "key": "k"}


def test_records_and_logs_are_for_their_owner_alone(tmp_path: Path) -> None:
    nights = Nights(tmp_path, "mine")
    record(tmp_path).log("sft", "a line")
    with nights.lock():
        nights.begin(InputSnapshot({}, {}), None)
    nights.skipped(None, "a reason")
    with serve.serve_lock(tmp_path):
        folders = (tmp_path / "runs", tmp_path / "nightly", deploy.folder_of(tmp_path))
        paths = [path for root in folders for path in (root, *root.rglob("*"))]
        assert len(paths) > 8
        guarded = [path for path in paths if path.suffix != ".lock"]
        assert [path for path in guarded if path.stat().st_mode & 0o077] == []


def test_the_run_that_a_cached_one_equals_is_the_newest_completed_with_these_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def makers(**keys: str) -> list[str | None]:
        return [runs.made_by(run) for run in runs.equal_runs(tmp_path, keys) if runs.made_by(run)]

    assert makers(tokenizer="a", pretrain="b") == []
    ticks = itertools.count(10**9)
    clock = Mock(wraps=datetime, now=lambda zone: datetime.fromtimestamp(next(ticks), zone))
    monkeypatch.setattr(runs, "datetime", clock)
    names = []
    for pretrain, outcome in zip("bbcb", [*["completed"] * 3, "failed"], strict=True):
        made = record(tmp_path)
        made.stage("tokenizer", key="a")
        made.stage("pretrain", key=pretrain)
        made.finish(outcome, {})
        names.append(made.run)
    assert makers(tokenizer="a", pretrain="b")[0] == names[1]
    assert makers(tokenizer="a") == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second with a cached stage, and one that is wholly cached."""
    home = tmp_path_factory.mktemp("a home #1 50%")
    make_run(home, FIRST, [PRETRAIN, SFT], tracking={"run_id": "b2" * 16})
    cached_sft = Made("sft", SFT.losses, outcome="cached")
    retrained = Made("pretrain", falling(8, 2.5))
    make_run(home, SECOND, [retrained, cached_sft], number=1)
    cached = [Made("pretrain", LOSSES, outcome="cached", key=PRETRAIN.key), cached_sft]
    webhook = {"notify": {"webhook": "https://hooks.example/T0/secret"}}
    make_run(home, CACHED, cached, number=2, outcome="cached", equals=FIRST, settings=webhook)
    return home


def test_a_run_is_found_by_every_name_it_and_its_models_have(home: Path) -> None:
    base = ArtifactStore(home).find("pretrain", PRETRAIN.key)
    Registry(home).register_model("mine-base", base, FIRST)
    for text in (FIRST, FIRST[:16], FIRST[-5:], "b2" * 16, "mine-base/1", "models:/mine-base/1"):
        assert read_run(home, text).name == FIRST
    assert read_run(home, "latest").name == CACHED
    newest = [runs.newest_finished(home, "".join(name)) for name in (["quick", "start"], "other")]
    assert [run and run["run"] for run in newest] == [CACHED, None]


def test_an_unknown_or_ambiguous_name_lists_runs(home: Path) -> None:
    for text, names in (
        ("full-2026", f"3 runs: {CACHED}, {SECOND}"),
        *((text, f"there are {CACHED}") for text in ("nothing-like-it", "", "../runs")),
        (FIRST.replace("full", "fill"), f"did you mean {FIRST}"),
    ):
        with pytest.raises(UsageError, match=f"'{re.escape(text)}'.*{names}"):
            read_run(home, text)


def test_a_curve_has_every_step_once_and_nan_where_there_was_no_number(home: Path) -> None:
    view = read_run(home, FIRST)
    assert view.curves("pretrain") == ["grad_norm", "loss", "lr", "validation_loss"]
    assert view.curve("pretrain", "nothing") == view.curve("no stage", "loss") == []
    curve = view.curve("pretrain", "loss")
    assert [point[:3] for point in curve] == [
        (step, TOKENS_PER_STEP * step, BEGAN + 2.0 * step) for step in range(1, 9)
    ]
    assert math.isnan(curve.pop(2).value)
    assert [point.value for point in curve] == [loss for loss in LOSSES if loss is not None]
    assert [point.step for point in view.curve("pretrain", "validation_loss")] == [4, 8]


def test_a_cached_stage_has_the_curves_of_the_run_that_made_it(home: Path) -> None:
    first, second, cached = read_runs(home, [FIRST, SECOND, CACHED])
    assert second.stages["sft"].made_by == FIRST
    assert second.curve("sft", "loss") == first.curve("sft", "loss") != []
    assert second.curve("pretrain", "loss") != first.curve("pretrain", "loss")
    assert [stage.made_by for stage in cached.stages.values()] == [FIRST, FIRST]
    assert cached.curve("pretrain", "loss")[0].value == LOSSES[0]
    assert cached.params["notify.webhook"] == "***"


def test_the_newest_replicate_of_each_seed_counts(tmp_path: Path) -> None:
    """Of the newest shards and of one setting."""
    trials = [(3, "before", 64), (1, "now", 64), (2, "now", 64), (1, "now", 64), (2, "now", 128)]
    for number, (seed, shards, row_length) in enumerate(trials):
        pretrain = {"seed": seed, "row_length": row_length}
        settings = {"pretrain": pretrain, "runtime": {"threads": number + 1}}
        made, name = [Made("shards-pretrain", key=shards)], f"full-{number}"
        notes = {"settings": settings, "metrics": {"eval/x": float(number)}}
        make_run(tmp_path, name, made, number=number, **notes)
    values = [sorted(of.values()) for of in values_by_seed(tmp_path, "eval/x").values()]
    assert sorted(values) == [[2.0, 3.0], [4.0]]
    assert values_by_seed(tmp_path, "eval/nothing") == {}
