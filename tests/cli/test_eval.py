"""`ttrain eval`: any model, two side by side, bad rows left out."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Run, in_process
from support.shard_sets import write_lines
from support.tiny_models import write_model
from support.tiny_stages import Home

from ttrain.cli.evaluation import heldout_of
from ttrain.lineage.lookup import resolve
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import Reference

CHOICES: list[dict[str, Any]] = [
    {"question": f"Return the {word} of", "choices": ["a list", "a file", "a name"]}
    | {"answer": number % 3, "lang": ("en", "zh")[number % 2]}
    for number, word in enumerate(["list", "file", "name", "code", "time", "line", "path", "test"])
]
BAD = [
    {"question": "of", "choices": ["a"], "answer": 0},
    {"question": "of", "choices": ["a", "b"], "answer": 2},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    home = Home.make(root / "home")
    provenance = {"run": "full-1"}
    base: Any = {"base": {"stage": "pretrain", "key": "3" * 64}}
    for stage, key, shards, more in (
        ("pretrain", "3", home.documents, {}),
        ("sft", "4", home.chats, base),
    ):
        entry = {"stage": shards.stage, "key": shards.key, "content": shards.content}
        inputs = {"shards": entry, **more}
        manifest = {"result": {}, "ingredients": {}, "provenance": provenance, "inputs": inputs}
        write_model(root / stage / "model", seed=int(key), max_length=64)
        home.store.publish(stage, key * 64, root / stage, manifest)
    write_model(root / "other", seed=2, max_length=64)
    write_lines(root / "words.jsonl", [*CHOICES, *BAD])
    return root


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TTRAIN_HOME", str(root / "home"))
    monkeypatch.chdir(root)
    return partial(in_process(capsys), "eval")


def test_two_models_stand_side_by_side_on_the_same_items(root: Path, run: Run) -> None:
    models = ["pretrain", "./other"]
    report = run(*models, "--choices", "words.jsonl", "--json", "--items", "items.jsonl").json
    (task,) = report["tasks"]
    assert (task["task"], task["items"], report["models"]) == ("words", len(CHOICES), models)
    assert sum(task["left_out"].values()) == len(BAD)
    keys = {name: identity["key"] for name, identity in report["identities"].items()}
    assert keys == {"pretrain": "3" * 64, "./other": None}
    first, second = (task["models"][name]["figures"]["accuracy"] for name in models)
    for metric in (first, second):
        assert metric["interval"][0] <= metric["value"] <= metric["interval"][1]
    by_accuracy, by_answers = report["comparisons"]
    assert (by_accuracy["figure"], by_answers["figure"]) == ("accuracy", "bits_per_byte")
    assert by_accuracy["difference"] == pytest.approx(first["value"] - second["value"])
    rows = [json.loads(line) for line in (root / "items.jsonl").read_bytes().splitlines()]
    assert [row["model"] for row in rows] == [name for name in models for _ in CHOICES]


def test_without_a_task_held_out_data_of_the_runs_is_scored(root: Path, run: Run) -> None:
    (task,) = run("./other", "pretrain", "--json").json["tasks"]
    store = ArtifactStore(root / "home")
    heldout = heldout_of([resolve("pretrain", root / "home")], store)
    assert set(heldout) == {"documents"}
    assert (task["task"], task["items"]) == ("documents", len(heldout["documents"]))
    # A base model has no chats, its fine-tuned one has: both together are asked chats, too.
    artifacts = [store.latest(stage) for stage in ("pretrain", "sft")]
    references = [Reference("a", artifact.path, None, artifact) for artifact in artifacts]
    assert list(heldout_of(references, store)) == ["documents", "chats"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("nothing", "'nothing'"),
        ("pretrain --choices none.jsonl", "none.jsonl"),
        ("./other", "./other"),
        ("pretrain --choices words.jsonl --items words.jsonl", "--items"),
    ],
)
def test_a_mistake_is_refused_by_name_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setattr("ttrain.inference.loading.load", pytest.fail)
    done = run(*command.split())
    assert done.code == 2 and name in done.err
