"""Typical mistakes of a first day, as they are typed, and what the answer names: setting or command, value, fix."""

import json
from pathlib import Path

import pytest
from support.data_commands import Run

# (what is typed, the parts of the answer). Files are those of `folder`.
MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    (
        "sft",
        (
            "'ttrain sft'",
            "`ttrain stage run sft -c my.yaml`",
            "`ttrain pipeline run full -c my.yaml --until sft`",
        ),
    ),
    ("evaluate sft", ("'ttrain evaluate'", "`ttrain eval`")),
    ("sft.epochs=2", ("`ttrain pipeline run full -c my.yaml sft.epochs=2`",)),
    ("run my.yaml", ("'my.yaml'", "-c my.yaml")),
    ("run sft", ("'sft'", "`ttrain stage run sft -c my.yaml`")),
    ("run --learning-rate 2e-4", ("--learning-rate", "pretrain.optim.lr=2e-4")),
    ("run sft.epochs 2", ("'sft.epochs'", "write key=value without spaces")),
    ("run learning_rate=2e-4", ("'learning_rate'", "'sft.optim.lr'", "'pretrain.optim.lr'")),
    ("run sft.lr=2e-4", ("'sft.lr'", "did you mean 'sft.optim.lr'?")),
    ("run sft.optim.lr=2", ("sft.optim.lr is 2", "at most 1", "1e-5 to 5e-2")),
    ("run data.pretrain=my docs.jsonl", ("'docs.jsonl'", "quote a path with spaces")),
    ("run data.sft=a.jsonl chats.jsonl", ("'chats.jsonl'", "write commas between files")),
    ("run data.pretrain=doc.jsonl", ("data.pretrain is 'doc.jsonl'", "there is no such file")),
    (
        "run data.pretrain=table.csv",
        ("data.pretrain: table.csv is CSV", "as JSON objects, one a line"),
    ),
    (
        "run data.pretrain=chats.jsonl",
        ("data.pretrain needs documents", "chats.jsonl:1 is a chat", "data.sft=chats.jsonl"),
    ),
    (
        "sweep sft.epochs=choice(1,2) data.sft=docs.jsonl",
        ("docs.jsonl:1 is a document", "data.pretrain=docs.jsonl"),
    ),
    ("plan data.chats=chats.jsonl", ("'data.chats'", "did you mean 'data.sft'")),
    ("docs.jsonl", ("`ttrain init docs.jsonl`",)),
    ("plan -c my.yml", ("cannot read settings from my.yml",)),
    ("train my.yaml", ("'my.yaml' is a file of settings", "`ttrain pipeline run full -c my.yaml`")),
    ("chat why?", ("'why?' names no model", "echo 'why?' | ttrain chat sft")),
    (
        "plan -c sub/other.yaml",
        ("data.sft is 'rows.jsonl' but there is no such file in ", ", where the command runs"),
    ),
]


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    files = {
        "my.yaml": "sft: {epochs: 2}",
        "sub/other.yaml": "data: {sft: rows.jsonl}",
        "docs.jsonl": '{"text": "a"}',
        "my docs.jsonl": '{"text": "a"}',
        "chats.jsonl": '{"question": "q", "answer": "a"}',
        "table.csv": "id,text\n1,a\n2,b",
    }
    (tmp_path / "sub").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


@pytest.mark.parametrize(("typed", "parts"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_typical_mistake_is_answered_with_its_name_its_value_and_the_fix(
    folder: Path, run: Run, typed: str, parts: tuple[str, ...]
) -> None:
    done = run(*typed.split())
    assert done.code == 2
    assert [part for part in parts if part not in done.err] == [], done.err
    assert not (folder / "home" / "runs").exists(), "nothing ran"


@pytest.mark.parametrize(
    "words", ["status", "report latest", "compare latest a", "chat sft", "pipeline rerun sft"]
)
def test_a_run_that_is_advised_takes_the_settings_file_of_the_folder(
    folder: Path, run: Run, words: str
) -> None:
    assert "`ttrain pipeline run full -c my.yaml`" in run(*words.split()).err
    (folder / "my.yaml").unlink()
    assert "`ttrain pipeline run full`" in run(*words.split()).err


def test_a_run_that_is_advised_takes_the_settings_file_of_the_command(
    folder: Path, run: Run
) -> None:
    (folder / "other.yaml").write_text("sft: {epochs: 2}\n")
    done = run("pipeline", "plan", "full", "--only", "sft", "-c", "other.yaml")
    assert "`ttrain pipeline run full -c other.yaml --only source," in done.err


@pytest.mark.parametrize("value", ["*.jsonl", "~/docs/a.jsonl", "my docs.jsonl", "my docs"])
def test_what_people_type_first_is_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("my docs.jsonl", "docs/a.jsonl", "my docs/b.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text('{"text": "a"}\n')
    planned = json.loads(run("plan", f"data.pretrain={value}", "--json").out)
    assert [stage["state"] for stage in planned["stages"]] == ["run"] * len(planned["stages"])
