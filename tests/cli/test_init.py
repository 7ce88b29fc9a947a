"""`ttrain init`, which sorts files by their rows."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.data_commands import Run, chat, write

from ttrain.config.loading import load

FILES = {
    "docs.jsonl": {"text": "a"},
    "my chats.jsonl": chat("q", "a"),
    "qa.jsonl": {"question": "q", "answer": "a"},
    "chats-val.jsonl": chat("q", "a"),
    "pairs.jsonl": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "other.jsonl": {"Title": "t"},
}


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    for name, row in FILES.items():
        write(tmp_path / name, [row])
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "book.txt").write_text("once\n")
    parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "more.parquet")
    return tmp_path


def test_the_files_of_the_directory_are_sorted_by_their_rows(folder: Path, run: Run) -> None:
    done = run("init")
    assert done.code == 0
    data = load(files=[folder / "my.yaml"], environment={}).settings.data
    assert data.pretrain == ("book.txt", "docs.jsonl", "more.parquet")
    assert data.sft == ("my chats.jsonl", "qa.jsonl") and data.sft_heldout == ("chats-val.jsonl",)
    assert data.dpo == ("pairs.jsonl",) and data.lora == ()
    assert "other.jsonl" in done.out and "t.csv" in done.out


def test_only_named_files_are_written_and_none_is_overwritten(folder: Path, run: Run) -> None:
    answer = run("init", "docs.jsonl", "--out", "a b.yaml", "--json").json
    assert answer["data"] == {"pretrain": ["docs.jsonl"]}
    command = ("init", "qa.jsonl", "--out", "a b.yaml")
    assert run(*command).code == 2
    assert "docs.jsonl" in (folder / "a b.yaml").read_text()
    assert run(*command, "--force").code == 0
    assert "sft: [qa.jsonl]" in (folder / "a b.yaml").read_text()
