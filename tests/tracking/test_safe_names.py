"""What a tracker must not get: secrets, and files outside a run's own directory."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from support.tracked_stores import opened, started

from ttrain.core.redact import HIDDEN
from ttrain.tracking import MlflowStore
from ttrain.tracking.calls import artifact_path, below, clean, run_name

HOSTILE, WRITTEN = 3_000, 300
PIECES = [
    "..", ".", "...", "/", "//", "\\", "\\..\\", "%2e%2e", "%2E.", "%252e%252e%252f", "%2f", "%5c", "%00", "\0", "\n",
    "\x1b[2J", "\x7f", "\u202e", "\u2024\u2024", "\uff0e\uff0e", "\uff0f", "\u2215", "\u2044", "\ud800", "\u2028", "\u200b",
    "~", "~root", "C:", "c:\\", "\\\\host\\x", "file:", "file:///etc", "runs:/", "etc/passwd", "escaped", "con", "a",
    "weights.bin", " ", "  ..", ".. ", ".hidden", "-rf", "*", "?", "$HOME", "`id`", "{x}", "\u00e9", "e\u0301", "\u5929",
    "\U0001f600", "x" * 300, "y" * 3000, "#", "&", ";", "|", "'", '"', "<script>", ":", "@",
]  # fmt: skip


def hostile_names(seed: int) -> list[str]:
    """Names put together from what leads out of directories, ends strings, or is decoded somewhere."""
    draw = random.Random(seed)
    joints = ("", "", "/", "%2f")
    return ["".join(draw.choice(PIECES) + draw.choice(joints) for _ in range(draw.randint(1, 5))) for _ in range(HOSTILE)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowStore:
    (tmp_path / "outer" / "home").mkdir(parents=True)
    return opened(tmp_path / "outer" / "home")


def test_no_hostile_name_leads_out_of_a_runs_directory(store: MlflowStore, tmp_path: Path) -> None:
    run = started(store)
    root = store.home / "mlflow" / "artifacts" / str(run.id) / "artifacts"
    given = tmp_path / "escaped"
    given.write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "weights").write_text("x")
    own = {root, *root.parents, *(store.home / "tracking" / run.identity).iterdir()}
    before = {path for path in tmp_path.rglob("*") if root not in path.parents}
    for name in hostile_names(0):
        with contextlib.suppress(ValueError):
            assert below(root, name).resolve().is_relative_to(root.resolve())
    for number, name in enumerate(hostile_names(0)[:WRITTEN]):
        if number % 3 == 0:
            run.log_text("escaped", name)
        elif number % 3 == 1:
            run.log_file(given, name)
        else:
            run.log_directory(tree, name)
    new = {path for path in tmp_path.rglob("*") if root not in path.parents} - before
    assert new <= own | {store.home / "tracking" / run.identity / "journal.jsonl"}, "nothing was written anywhere else"
    assert not run.waiting(), "and nothing waits for ever"
    accepted = [path for path in root.rglob("*") if path.is_file()]
    assert len(accepted) > WRITTEN // 100, "what is merely strange is kept"
    assert all(path.resolve().is_relative_to(root.resolve()) for path in accepted)


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "/etc/passwd", "a/../../b", "a//b", "a/./b", "", "%2e%2e/x", "%252e%252e%252fx", "a\\..\\b", "C:/x",
     "~/x", "a\0b", "\uff0e\uff0e/x", "a/\u2024\u2024/b", "a\nb", "x" * 300, "/".join(["x" * 200] * 11), "a/ .. /b"],
)  # fmt: skip
def test_a_path_that_some_layer_could_read_otherwise_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a path below a run"):
        artifact_path(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b.txt", "模型/权重", "100%", "step-00000100.txt", "a b/c", ".hidden", "..a", "a..b", "e\u0301"]
)
def test_a_path_that_is_merely_unusual_is_taken(name: str) -> None:
    assert artifact_path(name) == name


def test_a_link_out_of_the_artifacts_is_not_followed(
    store: MlflowStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(store)
    run.log_text("x", "a/b.txt")
    root, outside = store.home / "mlflow" / "artifacts" / str(run.id) / "artifacts", tmp_path / "outside"
    outside.mkdir()
    (root / "out").symlink_to(outside)
    run.log_text("x", "out/c.txt")
    assert list(outside.iterdir()) == []
    assert "leads out of" in caplog.text and not run.waiting()


def test_mlflow_takes_every_metrics_name(store: MlflowStore) -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_tag_name

    for name in hostile_names(1):
        _validate_metric_name(clean(name))
        _validate_tag_name(clean(name))
    run = started(store)
    assert run.log_metrics([{"step": 1, "metrics": dict.fromkeys(hostile_names(2)[:700], 1.0)}])
    assert len(store.client.get_run(run.id).data.metrics) > 200


APART = (
    "source:r&d", "source:r#d", "source:r?d", "source:r_d", "source:R_D", "source:R&D", "source:caf\u00e9",
    "source:cafe\u0301", "source:", "source:/", "a/./b", "a/b", "", "_", "y" * 260, "y" * 261, "y" * 250,
)  # fmt: skip


def test_each_metric_has_a_name_of_its_own_in_mlflow(store: MlflowStore) -> None:
    names = [*APART, *map(clean, APART), *hostile_names(4)]  # also what looks like the name of another one
    assert len({clean(name) for name in names}) == len(set(names))
    for name in ("loss", "eval/bits_per_byte/lang:zh", "eval/bits_per_byte/source:\u7ef4\u57fa/a b.c-d", "y" * 250):
        assert clean(name) == name, "a name that MLflow accepts stays as it is"
    assert clean("source:r&d") == "source:r_d--9886bfeb", "which does not depend on other sources or on the run"
    run = started(store)
    run.log_summary({name: float(number) for number, name in enumerate(APART)})
    run.finish("FINISHED")
    values = store.client.get_run(run.id).data.metrics
    assert [values[clean(name)] for name in APART] == [float(number) for number in range(len(APART))]


def test_runs_of_any_name_and_identity_are_made(store: MlflowStore) -> None:
    for name in hostile_names(3)[:12]:
        run = store.start_run(name, identity=name, run_id=None, tags={"t": name}, params={"p": name})
        assert store.client.get_run(run.id).info.run_name == run_name(name)
        run.finish("FINISHED")
    store.close()
    assert sorted(path.name for path in store.home.parent.iterdir()) == ["home"]
    assert {path.name for path in store.home.iterdir()} <= {"mlflow", "tracking"}


def test_a_masked_parameter_is_nowhere_on_disk(store: MlflowStore) -> None:
    run = store.start_run("r", tags={"x.token": "hunter2"}, params={"hub.token": "hunter2", "url": "https://u:hunter2@h/x"})
    run.finish("FINISHED")
    assert store.client.get_run(run.id).data.params == {"hub.token": HIDDEN, "url": "https://***@h/x"}
    files = [path for path in store.home.rglob("*") if path.is_file()]
    assert len(files) > 2 and not [path for path in files if b"hunter2" in path.read_bytes()]
