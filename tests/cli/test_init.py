"""`ttrain init`, and the settings that it writes as `ttrain config show --changed` shows them."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.data_commands import Run

from ttrain.config.loading import load

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
FILES = {
    "docs.jsonl": [{"text": "a"}],
    "my chats.jsonl": [CHAT],
    "qa.jsonl": [{"question": "q", "answer": "a"}],
    "chats-val.jsonl": [CHAT],
    "pairs.jsonl": [{"prompt": "q", "chosen": "a", "rejected": "b"}],
    "other.jsonl": [{"Title": "t"}],
}


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "book.txt").write_text("once\n")
    (tmp_path / "requirements.txt").write_text("torch\n")
    parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "more.parquet")
    return tmp_path


def test_the_files_of_the_directory_are_sorted_by_their_rows(folder: Path, run: Run) -> None:
    done = run("init")
    assert done.code == 0
    text = (folder / "my.yaml").read_text()
    loaded = load(files=[folder / "my.yaml"], environment={})
    data = loaded.settings.data
    assert data.pretrain == ("book.txt", "docs.jsonl", "more.parquet")
    assert data.sft == ("my chats.jsonl", "qa.jsonl") and data.sft_heldout == ("chats-val.jsonl",)
    assert data.dpo == ("pairs.jsonl",)
    assert data.lora == () and "# lora: [FILE.jsonl]" in text
    assert 12 <= len(text.splitlines()) <= 16
    assert (
        "left out: other.jsonl: holds no documents, chats or pairs: line 1: no key 'text'"
        in done.out
    )
    assert "left out: t.csv: is CSV" in done.out
    assert (
        "next: ttrain pipeline plan full -c my.yaml, then ttrain pipeline run full -c my.yaml"
        in done.out
    )


def test_only_named_files_are_written_and_no_file_is_overwritten_unasked(
    folder: Path, run: Run
) -> None:
    answer = json.loads(run("init", "docs.jsonl", "--out", "a b.yaml", "--json").out)
    assert (
        answer["data"] == {"pretrain": ["docs.jsonl"]}
        and answer["next"] == "ttrain pipeline run full -c 'a b.yaml'"
    )
    again = run("init", "qa.jsonl", "--out", "a b.yaml")
    assert again.code == 2 and "a b.yaml, which exists; add --force" in again.err
    assert "docs.jsonl" in (folder / "a b.yaml").read_text()
    forced = run("init", "qa.jsonl", "--out", "a b.yaml", "--force")
    assert forced.code == 0 and "sft: [qa.jsonl]" in (folder / "a b.yaml").read_text()
    assert "set sft.start_from" in forced.out


def test_a_directory_without_data_is_refused_with_an_example(folder: Path, run: Run) -> None:
    (folder / "empty").mkdir()
    done = run("init", "t.csv")
    assert done.code == 2 and "there are no data in t.csv" in done.err and "is CSV" in done.err
    done = run("init", "nothing.jsonl")
    assert done.code == 2 and "'nothing.jsonl' but there is no such file" in done.err


def test_changed_settings_are_shown_with_where_they_were_set(folder: Path, run: Run) -> None:
    run("init", "docs.jsonl")
    shown = run(
        "config", "show", "-c", "my.yaml", "sft.epochs=2", "lora.epochs=auto", "--changed"
    ).out
    lines = shown.splitlines()
    assert 'data.pretrain: ["docs.jsonl"]  # my.yaml' in lines
    assert "sft.epochs: 2.0  # command line" in lines
    assert "lora.epochs" not in shown, "it is set to its default"
    assert run("config", "show", "--changed").out == "all settings have their defaults\n"
    as_json = json.loads(run("config", "show", "model.layers=6", "--changed", "--json").out)
    assert as_json["model.layers"] == {"value": 6, "source": "command line"}
