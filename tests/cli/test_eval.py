"""`ttrain eval`: any model, two side by side, bad rows left out and said; and the suites of the pipeline's own stage."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.shard_sets import write_lines
from support.tiny_models import write_model
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.cli.evaluation import heldout_of
from ttrain.cli.main import main
from ttrain.config import Settings
from ttrain.evaluate import baselines
from ttrain.lineage.lookup import resolve
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.model_files import Reference
from ttrain.tasks import evaluate

WORDS = ("list", "file", "name", "code", "time", "line", "path", "test")
CHOICES: list[dict[str, Any]] = [
    {
        "question": f"Return the {word} of",
        "choices": ["a list", "a file", "a name"],
        "answer": number % 3,
        "lang": "en",
    }
    for number, word in enumerate(WORDS)
]
BAD = [
    {"question": "of", "choices": ["a"], "answer": 0},
    {"question": "of", "choices": ["a", "b"], "answer": 2},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a pretrained model and its shards, and a model in a directory of its own."""
    root = tmp_path_factory.mktemp("eval")
    home = Home.make(root / "home")
    write_model(root / "made" / "model", max_length=64)
    inputs = {
        "shards": {
            "stage": home.documents.stage,
            "key": home.documents.key,
            "content": home.documents.content,
        }
    }
    manifest = {"result": {}, "ingredients": {}, "inputs": inputs, "provenance": {"run": "full-1"}}
    home.store.publish("pretrain", "3" * 64, root / "made", manifest)
    write_model(root / "tuned" / "model", seed=3, max_length=64)
    inputs = {
        "base": {"stage": "pretrain", "key": "3" * 64},
        "shards": {"stage": home.chats.stage, "key": home.chats.key},
    }
    home.store.publish("sft", "4" * 64, root / "tuned", {**manifest, "inputs": inputs})
    write_model(root / "other", seed=2, max_length=64)
    write_lines(root / "words.jsonl", [*CHOICES, *BAD])
    return root


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTRAIN_HOME", str(root / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(root)
    return root


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    told = capsys.readouterr()
    assert (ended.value.code or 0) == code, told
    return told.err if code else told.out


def test_two_models_stand_side_by_side_on_the_same_items(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(
        said(
            capsys,
            "pretrain",
            "./other",
            "--choices",
            "words.jsonl",
            "--json",
            "--items",
            "items.jsonl",
        )
    )
    (task,) = told["tasks"]
    assert (task["task"], task["items"], told["models"]) == (
        "words",
        len(CHOICES),
        ["pretrain", "./other"],
    )
    assert sum(task["left_out"].values()) == len(BAD)
    assert [note.partition(":")[0] for note in told["notes"]] == ["words", "words"]
    assert {name: one["key"] for name, one in told["identities"].items()} == {
        "pretrain": "3" * 64,
        "./other": None,
    }
    first, second = (task["models"][name]["figures"]["accuracy"] for name in told["models"])
    for figure in (first, second):
        assert figure["interval"][0] <= figure["value"] <= figure["interval"][1]
    compared, by_answers = told["comparisons"]
    assert (compared["figure"], by_answers["figure"]) == ("accuracy", "bits_per_byte"), (
        "which tells small models apart"
    )
    assert compared["difference"] == pytest.approx(first["value"] - second["value"])
    rows = [json.loads(line) for line in (here / "items.jsonl").read_bytes().splitlines()]
    assert [row["model"] for row in rows] == ["pretrain"] * len(CHOICES) + ["./other"] * len(
        CHOICES
    )
    assert len({row["item"] for row in rows}) == len(CHOICES)


def test_the_table_says_what_was_left_out_and_what_the_items_can_show(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "pretrain", "pretrain", "--choices", "words.jsonl")
    assert text.startswith(f"pretrain = full-1:pretrain, {'3' * 12}\n")
    for reason, line in (
        ("choices are not two or more different texts", 9),
        ("answer is no choice", 10),
    ):
        assert f"words: 1 row left out: {reason} ({here / 'words.jsonl'}:{line})" in text
    assert "pretrain (1) - pretrain (2)" in text and "not judged (8 of 20 items)" in text


def test_without_a_task_the_held_out_data_of_the_models_runs_is_scored(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(said(capsys, "./other", "pretrain", "--json"))
    (task,) = told["tasks"]
    store = ArtifactStore(here / "home")
    heldout = heldout_of([resolve("pretrain", here / "home")], store)
    assert set(heldout) == {"documents"}
    assert (task["task"], task["items"]) == ("documents", len(heldout["documents"]))
    assert set(task["baselines"]) == set(baselines.BASELINES)
    # A base model has no chats, its fine-tuned one has: asked about both, chats are asked, too
    base, fine = (store.latest(stage) for stage in ("pretrain", "sft"))
    found = heldout_of(
        [Reference("a", base.path, None, base), Reference("b", fine.path, None, fine)], store
    )
    assert list(found) == ["documents", "chats"]


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (("nothing",), "there is no model 'nothing'"),
        (
            ("pretrain", "--choices", "none.jsonl"),
            "--choices is none.jsonl, which is not a file; name a JSON Lines file",
        ),
        (("pretrain", "--suite", "heldot"), "did you mean heldout"),
        (("./other",), "there is no held-out data of ./other in this store"),
        (
            ("pretrain", "--choices", "words.jsonl", "--items", "words.jsonl"),
            "--items is words.jsonl, which exists",
        ),
    ],
)
def test_what_cannot_be_asked_is_told_before_a_model_is_loaded(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    cure: str,
) -> None:
    monkeypatch.setattr(
        "ttrain.inference.loading.load", lambda *_, **__: pytest.fail("a model was loaded")
    )
    assert cure in said(capsys, *words, code=2)


def evaluated(root: Path, output: Path, **changes: Any) -> dict[str, Any]:
    settings = stage_settings()
    tree = settings.model_dump()
    config = Settings.model_validate(
        {**tree, "evaluate": {**tree["evaluate"], "new_tokens": 2, **changes}}
    )
    store = ArtifactStore(root / "home")
    output.mkdir(exist_ok=True)
    inputs = {
        "base": store.latest("pretrain").path,
        "documents": store.latest("shards-pretrain").path,
    }
    found: dict[str, Any] = run_here(evaluate, config, output, inputs, settings.runtime)
    return found


def test_suites_add_figures_to_the_stage_and_change_none(here: Path, tmp_path: Path) -> None:
    rows = [{**row, "lang": ("en", "zh")[number % 2]} for number, row in enumerate(CHOICES)]
    write_lines(here / "groups.jsonl", [*rows, *BAD])
    (here / "mine.yaml").write_text(
        "tasks:\n  words: {kind: choices, file: groups.jsonl, by: [lang]}\n  prose: {kind: text}\n"
    )
    plain = evaluated(
        here, tmp_path / "plain", suites={"sft": "mine.yaml"}
    )  # a model is asked its own suites only
    found = evaluated(here, tmp_path / "found", suites="mine.yaml")
    assert {name: found["metrics"][name] for name in plain["metrics"]} == plain["metrics"]
    assert not any(name.startswith("words") for name in plain["metrics"])
    assert found["counts"]["words/items"] == len(CHOICES) and found["counts"][
        "words/left_out"
    ] == len(BAD)
    low, high = plain["intervals"]["bits_per_byte"]
    assert low < plain["metrics"]["bits_per_byte"] < high
    lines = (tmp_path / "found" / "items.jsonl").read_bytes().splitlines()
    assert len(lines) == len(CHOICES) + found["counts"]["documents"]
    assert (
        json.loads((tmp_path / "found" / "evaluation.json").read_bytes())["suites"]
        == found["suites"]
    )
