"""Typical mistakes of a first day as they are typed: exit code, value and rule, then the fix.

The only place where sentences of messages are asserted. HERE is the directory of the command; the
lines after the first are the fix, which is joined to it by "; ".
"""

import json
from pathlib import Path

import pytest
from support.data_commands import Run

MISTAKES = """
$ ttrain sft
2 there is no command 'ttrain sft'
did you mean `ttrain stage run sft -c my.yaml`
or `ttrain pipeline run full -c my.yaml --until sft`?
$ ttrain sft.epochs=2
2 there is no command 'ttrain sft.epochs=2'
did you mean `ttrain pipeline run full -c my.yaml sft.epochs=2`?
$ ttrain docs.jsonl
2 there is no command 'ttrain docs.jsonl'
did you mean `ttrain init docs.jsonl`?
$ ttrain run my.yaml
2 there is no pipeline 'my.yaml'
did you mean `ttrain pipeline run full -c my.yaml`?
$ ttrain run --engine dask
2 invalid value for '--engine': 'dask' is not one of 'prefect', 'none'
`ttrain run --help` shows what it takes
$ ttrain run --learning-rate 2e-4
2 no such option: --learning-rate
settings are written without dashes, such as pretrain.optim.lr=2e-4;
`ttrain run --help` shows what it takes
$ ttrain run sft.epochs 2
2 'sft.epochs' is not a setting
write key=value without spaces, for example sft.epochs=3; quote a path with spaces,
write commas between files, and -c FILE for a file of settings
$ ttrain run learning_rate=2e-4
2 unknown setting 'learning_rate' (from command line)
did you mean 'pretrain.optim.lr' or 'sft.optim.lr' or 'dpo.optim.lr' or 'lora.optim.lr'?
$ ttrain run sft.optim.lr=2
2 sft.optim.lr is 2.0 (from command line) but must be at most 1
usual are 1e-5 to 5e-2, such as 2e-4
$ ttrain run pretrain.tokens_per_step=1000
2 pretrain: tokens_per_step is 1000 but must be a multiple of row_length 256
try 1024
$ ttrain run sft.epochs=1 sft.tokens=5
2 sft: tokens is 5 and epochs is 1.0, but only one of them can be the budget
set the other to null
$ ttrain plan -c my.yml
2 cannot read settings from my.yml: No such file or directory
name a YAML file that exists
$ ttrain plan -c sub/other.yaml
2 data.sft is 'rows.jsonl' but there is no such file in HERE, where the command runs
name a .jsonl, .parquet or .txt file, a glob or a folder (commas separate several)
$ ttrain plan --only sft -c sub/sft.yaml
2 --only sft leaves out source,tokenizer,shards-pretrain,shards-sft,pretrain, which the store does \
not have as these settings make it (source: never run before)
run first, with the same settings: `ttrain pipeline run full -c sub/sft.yaml --only \
source,tokenizer,shards-pretrain,shards-sft,pretrain`
$ ttrain run data.pretrain=table.csv
2 data.pretrain: table.csv is CSV or plain text, not JSON Lines
write rows as JSON objects, one a line, or name a text .txt
$ ttrain run data.pretrain=chats.jsonl
2 data.pretrain needs documents, but chats.jsonl:1 is a chat (keys: question, answer)
write data.sft=chats.jsonl
$ ttrain data check bad.jsonl
1 bad.jsonl: 1 of 1 rows are bad, more than reading.rejected_fraction=0.01
the first is bad.jsonl:1: not valid JSON: unexpected end of data. ttrain looked for one JSON \
object a line, with the key 'text' or 'content' or 'body' or 'paragraphs' (reading.text_field) \
with a text; keys seen: none
$ ttrain init docs.jsonl
2 --out is my.yaml, which exists
add --force to overwrite it, or name another file
$ ttrain pipeline rerun sft
2 no run has a stage sft yet whose settings could be taken
try `ttrain pipeline run full -c my.yaml`
$ ttrain status
2 there are no runs yet in HERE/home
begin with `ttrain pipeline run full -c my.yaml`, or set TTRAIN_HOME to the home that has some
$ ttrain chat sft
2 stage sft has no artifact in HERE/home/store
run `ttrain pipeline run full -c my.yaml` first, with files in data.sft
$ ttrain chat why?
2 'why?' names no model
to ask it: echo 'why?' | ttrain chat sft
$ ttrain eval sft --limit 0
2 --limit is '0' but must be at least 1
`ttrain eval --help` shows what it takes
"""
ROWS = [row.splitlines() for row in MISTAKES.split("\n$ ttrain ")[1:]]
FILES = {
    "my.yaml": "sft: {epochs: 2}",
    "sub/sft.yaml": "sft: {epochs: 2}",
    "sub/other.yaml": "data: {sft: rows.jsonl}",
    "docs.jsonl": '{"text": "a"}',
    "chats.jsonl": '{"question": "q", "answer": "a"}',
    "bad.jsonl": '{"text": ',
    "table.csv": "id,text\n1,a\n2,b",
}


@pytest.fixture
def folder(tmp_path: Path, run: Run) -> Path:
    (tmp_path / "sub").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_mistake_gets_a_line_with_rule_and_fix(folder: Path, run: Run, row: list[str]) -> None:
    typed, problem, *fix = row
    code, _, problem = problem.partition(" ")
    done = run(*typed.split())
    message = done.err.replace(str(folder), "HERE")
    assert message == f"error: {problem}; {' '.join(fix)}\n"
    assert done.code == int(code)
    assert len(problem) <= 160
    assert not (folder / "home" / "runs").exists(), "nothing ran"


@pytest.mark.parametrize("value", ["*.jsonl", "~/docs/a.jsonl", "my docs.jsonl", "my docs"])
def test_first_tries_are_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("my docs.jsonl", "docs/a.jsonl", "my docs/b.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text('{"text": "a"}\n')
    planned = json.loads(run("plan", f"data.pretrain={value}", "--json").out)
    assert {stage["state"] for stage in planned["stages"]} == {"run"}
