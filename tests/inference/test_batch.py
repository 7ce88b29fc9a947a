"""Answers to files of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Run
from support.shard_sets import write_lines
from support.tiny_models import chat_with

from ttrain.data.chat_templates import Message
from ttrain.errors import DataError
from ttrain.inference import batch
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

BRIEF = Message("system", "Be brief.")
QUESTION = Message("user", "Q")
OWN = Message("system", "S")
TURNS = [QUESTION.to_json(), Message("assistant", "A").to_json()]
SHAPES: list[tuple[dict[str, Any], tuple[Message, ...], str | None]] = [  # row, turns, reference
    ({"prompt": "Q"}, (BRIEF, QUESTION), None),
    ({"text": "Once"}, (), None),
    ({"conversations": [OWN.to_json(), *TURNS]}, (OWN, QUESTION), "A"),
    ({"prompt": TURNS[:1], "completion": "C"}, (BRIEF, QUESTION), "C"),
]


def write_prompts(path: Path, count: int) -> Path:
    lengths = [number * 7 % 12 + 1 for number in range(count)]
    return write_lines(path, [{"prompt": "why " * n, "id": at} for at, n in enumerate(lengths)])


def windows_of(
    model: LoadedModel, rows: list[Any], size: int, **settings: Any
) -> Iterator[list[dict[str, Any]]]:
    tally = batch.AnswerCounts()
    return batch.answers(model, rows, Sampling(**settings), batch_size=size, tally=tally)


def test_answers_keep_the_order_of_prompts(model: LoadedModel, tmp_path: Path) -> None:
    rows = batch.read(write_prompts(tmp_path / "p.jsonl", 13), raw=False)
    warm = Sampling(max_tokens=6, temperature=1.0)
    windows = windows_of(model, rows, 5, max_tokens=6, temperature=1.0)
    answers = [row for window in windows for row in window]
    assert [row["id"] for row in answers] == list(range(13))
    separate = windows_of(model, rows, 1, max_tokens=6, temperature=1.0)
    assert answers == [row for window in separate for row in window]
    assert chat_with(model, sampling=warm).ask("why ").text == answers[0]["answer"]


def test_a_long_prompt_cuts_no_other(model: LoadedModel, tmp_path: Path) -> None:
    texts = ["w", "x" * 119, "z" * 300]
    rows = batch.read(write_lines(tmp_path / "p.jsonl", [{"text": t} for t in texts]), raw=False)
    ((short, long, too_long),) = windows_of(model, rows, 3, max_tokens=20)
    assert long["tokens"] <= 128 - 120 < short["tokens"]
    assert (too_long["answer"], too_long["stop"]) == (None, "too long")


def test_resuming(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "WINDOW_BATCHES", 2)
    rows = batch.read(write_prompts(tmp_path / "p.jsonl", 5), raw=False)
    complete, cut = tmp_path / "complete.jsonl", tmp_path / "cut.jsonl"

    def make(start: int, stop_after: int = 99) -> Iterator[list[dict[str, Any]]]:
        for number, window in enumerate(windows_of(model, rows[start:], 1, max_tokens=2)):
            if number == stop_after:
                raise KeyboardInterrupt
            yield window

    def interrupt(windows: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            batch.write_answers(cut, {"model": 1}, lambda start: make(start, windows))

    assert batch.write_answers(complete, {"model": 1}, make) == 0
    interrupt(2)
    [partial] = tmp_path.glob("cut.jsonl.*.partial")
    with partial.open("ab") as file:
        file.write(b'{"half": ')
    assert batch.write_answers(cut, {"model": 1}, make) == 4
    assert cut.read_bytes() == complete.read_bytes()
    interrupt(1)
    assert batch.write_answers(cut, {"model": 2}, make) == 0  # another model begins again


def test_every_shape_of_a_prompt_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [row for row, _, _ in SHAPES])
    prompts = batch.read(path, raw=False, system="Be brief.")
    read = [(prompt.messages, prompt.reference) for prompt in prompts]
    assert read == [(messages, reference) for _, messages, reference in SHAPES]
    text = tmp_path / "p.txt"
    text.write_text('Who?\n\n{"prompt": 1}\r\n')
    texts = [prompt.record["prompt"] for prompt in batch.read(text, raw=False)]
    assert texts == ["Who?", '{"prompt": 1}']


@pytest.mark.parametrize("line", ["{", '{"question": "Q"}', '{"text": "Q", "answer": "42"}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Q"}\n' + line)
    with pytest.raises(DataError, match=r"p\.jsonl:2: "):
        batch.read(path, raw=False)


def test_the_command(run: Run, directory: Path, model: LoadedModel, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    out = tmp_path / "out.jsonl"
    options = ("--device", "cpu", "--max-tokens", "6", "--out", out)
    command = ("generate", prompts, "--model", directory, *options)
    summary = run(*command, "--json").json
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (summary["answers"], summary["tokens"]) == (2, sum(row["tokens"] for row in rows))
    answers = [chat_with(model).ask(row["prompt"]).text for row in rows]
    assert [row["answer"] for row in rows] == answers
    assert run(*command).code == 2, "there are answers already"
