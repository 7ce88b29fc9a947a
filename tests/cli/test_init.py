"""`ttrain init`, and the settings that it writes as `ttrain config show --changed` shows them."""

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
    (tmp_path / "requirements.txt").write_text("torch\n")
    parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "more.parquet")
    return tmp_path


def test_the_files_of_the_directory_are_sorted_by_their_rows(folder: Path, run: Run) -> None:
    done = run("init")
    assert done.code == 0
    data = load(files=[folder / "my.yaml"], environment={}).settings.data
    assert data.pretrain == ("book.txt", "docs.jsonl", "more.parquet")
    assert data.sft == ("my chats.jsonl", "qa.jsonl") and data.sft_heldout == ("chats-val.jsonl",)
    assert data.dpo == ("pairs.jsonl",) and data.lora == ()
    assert 12 <= len((folder / "my.yaml").read_text().splitlines()) <= 16
    for words in ("other.jsonl: holds", "t.csv: is", "full -c my.yaml"):
        assert words in done.out


def test_only_named_files_are_written_and_none_is_overwritten(folder: Path, run: Run) -> None:
    answer = run("init", "docs.jsonl", "--out", "a b.yaml", "--json").json
    assert answer["data"] == {"pretrain": ["docs.jsonl"]}
    assert answer["next"] == "ttrain pipeline run full -c 'a b.yaml'"
    command = ("init", "qa.jsonl", "--out", "a b.yaml")
    assert run(*command).code == 2
    assert "docs.jsonl" in (folder / "a b.yaml").read_text()
    forced = run(*command, "--force")
    assert forced.code == 0 and "sft: [qa.jsonl]" in (folder / "a b.yaml").read_text()
    assert "sft.start_from" in forced.out


@pytest.mark.parametrize("name", ["t.csv", "nothing.jsonl"])
def test_a_file_without_rows_is_refused_by_name(folder: Path, run: Run, name: str) -> None:
    done = run("init", name)
    assert done.code == 2 and name in done.err
