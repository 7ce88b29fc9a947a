"""The stages `shards-*` and `tokenizer`: they agree on which rows are held out of the user's own files."""

import json
from pathlib import Path

import pytest
from support.tiny_data import make_tokenizer

from ttrain.config import Reading, Runtime, Settings, Tokenizer
from ttrain.core.files import ProgressWriter
from ttrain.data.pool import Processes
from ttrain.data.shards import ShardSet
from ttrain.tasks import shards, tokenizer
from ttrain.tasks.common.job import StageContext


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "tokenizer"
    make_tokenizer(directory)
    return directory


def texts(name: str, count: int) -> list[str]:
    return [f"{name} {number}: a text of a few words, which is not long" for number in range(count)]


def build(tokenizer_directory: Path, output: Path, files: dict[str, list[str]], reading: Reading) -> dict[str, int]:
    """The rows of each part of a set of documents, by the files of each role."""
    locations = {}
    for role, rows in files.items():
        path = output.with_name(f"{output.name}-{role}.jsonl")
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        locations[role] = [str(path)]
    job = StageContext(
        {"tokenizer": tokenizer_directory}, locations, {"kind": "documents", "dataset": "pretrain"}, output,
        Runtime(device="cpu"), ProgressWriter(None), lambda: False,
        groups={role: [0] for role in files},
    )  # fmt: skip
    built = shards.build(Settings(reading=reading), job, Processes(1))
    return {name: part["rows"] for name, part in built.parts.items()}


def test_files_that_are_held_out_by_name_leave_all_other_rows_to_training(tokenizer_directory: Path, tmp_path: Path) -> None:
    files = {"train": texts("a", 40), "heldout": texts("b", 5)}
    assert build(tokenizer_directory, tmp_path / "out", files, Reading()) == {"train": 40, "heldout": 5}


def test_the_tokenizer_learns_from_the_rows_that_the_model_learns_from(tokenizer_directory: Path, tmp_path: Path) -> None:
    rows = build(tokenizer_directory, tmp_path / "out", {"train": texts("a", 200)}, Reading())
    path = tmp_path / "out-train.jsonl"
    made = tokenizer.train_directory([str(path)], tmp_path / "tok", Tokenizer(vocab_size=300), Reading())
    assert made["documents_seen"] == rows["train"] == len(ShardSet(tmp_path / "out" / "train"))
