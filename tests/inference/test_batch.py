"""Answers to files of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data_commands import Run
from support.tiny_models import chat_with

from ttrain.data.chat_templates import Message
from ttrain.errors import DataError
from ttrain.inference import batch
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling


def write_prompts(path: Path, count: int) -> Path:
    path.write_text(
        "".join(
            json.dumps({"prompt": "why " * (number * 7 % 12 + 1), "id": number}) + "\n"
            for number in range(count)
        )
    )
    return path


def test_answers_stand_in_the_order_of_their_prompts_and_are_those_of_one_alone(
    one: LoadedModel, tmp_path: Path
) -> None:
    rows = batch.read(write_prompts(tmp_path / "p.jsonl", 13), raw=False)
    warm = Sampling(max_tokens=6, temperature=1.0)
    tally = batch.AnswerCounts()
    found = [
        row
        for window in batch.answers(one, rows, warm, batch_size=5, tally=tally)
        for row in window
    ]
    assert [row["id"] for row in found] == list(range(13))
    assert tally.summary()["answers"] == tally.stops.total() == 13
    alone = [
        row
        for window in batch.answers(one, rows, warm, batch_size=1, tally=batch.AnswerCounts())
        for row in window
    ]
    assert found == alone
    chat = chat_with(one, sampling=warm)
    assert chat.ask("why ").text == found[0]["answer"]


def test_a_long_prompt_neither_cuts_the_others_nor_ends_the_run(
    one: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    texts = ["w", "x" * 119, "y", "z" * 300]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = Sampling(max_tokens=20)
    rows = batch.read(path, raw=False)
    ((first, second, third, fourth),) = batch.answers(
        one, rows, settings, batch_size=4, tally=batch.AnswerCounts()
    )
    assert second["tokens"] <= 128 - 120
    assert (fourth["answer"], fourth["stop"]) == (None, "too long")
    alone = next(batch.answers(one, rows[:1], settings, batch_size=1, tally=batch.AnswerCounts()))
    assert [first] == alone
    assert first["tokens"] > 128 - 120
    assert third["stop"] != "too long"


def test_an_answering_that_was_cut_goes_on_where_it_was(
    one: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "WINDOW_BATCHES", 2)
    settings, rows = (
        Sampling(max_tokens=2),
        batch.read(write_prompts(tmp_path / "p.jsonl", 5), raw=False),
    )
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    made: list[int] = []

    def make(start: int, stop_after: int = 99) -> Iterator[list[dict[str, Any]]]:
        windows = batch.answers(
            one, rows[start:], settings, batch_size=1, tally=batch.AnswerCounts()
        )
        for number, window in enumerate(windows):
            if number == stop_after:
                raise KeyboardInterrupt
            made.append(len(window))
            yield window

    assert batch.write_answers(whole, {"model": 1}, make) == 0
    with pytest.raises(KeyboardInterrupt):
        batch.write_answers(cut, {"model": 1}, lambda start: make(start, 2))
    [partial] = tmp_path.glob("cut.jsonl.*.partial")
    assert set(tmp_path.iterdir()) == {tmp_path / "p.jsonl", whole, partial}
    with partial.open("ab") as file:
        file.write(b'{"half": ')
    made.clear()
    assert batch.write_answers(cut, {"model": 1}, make) == 4
    assert sum(made) == 1
    assert cut.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"p.jsonl", "whole.jsonl", "cut.jsonl"}
    with pytest.raises(KeyboardInterrupt):
        batch.write_answers(cut, {"model": 1}, lambda start: make(start, 1))
    assert batch.write_answers(cut, {"model": 2}, make) == 0  # another model begins anew


def test_every_shape_of_a_prompt_is_read_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "Q"},
        {"text": "Once"},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]},
        {"instruction": "Q", "input": "I", "output": ""},
        {"prompt": [{"role": "user", "content": "Q"}], "completion": "C"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = batch.read(path, raw=False, system="Be brief.")
    brief, question = Message("system", "Be brief."), Message("user", "Q")
    assert [prompt.messages for prompt in read] == [
        (brief, question),
        (),
        (brief, question),
        (Message("system", "S"), question),
        (brief, Message("user", "Q\n\nI")),
        (brief, question),
    ]
    assert [prompt.reference for prompt in read] == [None, None, "A", None, None, "C"]
    (tmp_path / "p.txt").write_text('Who?\n\n{"prompt": 1}\r\n')
    assert [prompt.record["prompt"] for prompt in batch.read(tmp_path / "p.txt", raw=False)] == [
        "Who?",
        '{"prompt": 1}',
    ]
    for line in (
        "{",
        "[1]",
        '{"question": "Q"}',
        '{"messages": []}',
        '{"text": "Q", "answer": "42"}',
    ):
        path.write_text('{"prompt": "Q"}\n' + line)
        with pytest.raises(DataError, match=r"p\.jsonl:2: "):
            batch.read(path, raw=False)


def test_the_command_writes_answers_and_a_summary(
    run: Run, directory: Path, one: LoadedModel, tmp_path: Path
) -> None:
    path, out = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "out.jsonl"
    arguments = (
        "generate",
        path,
        "--model",
        directory,
        "--device",
        "cpu",
        "--max-tokens",
        "6",
        "--out",
        out,
    )
    summary = run(*arguments, "--json").json
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (summary["prompts"], summary["answers"], summary["tokens"]) == (
        5,
        5,
        sum(row["tokens"] for row in rows),
    )
    assert [row["answer"] for row in rows] == [
        chat_with(one).ask(row["prompt"]).text for row in rows
    ]
    refused = run(*arguments)
    assert refused.code == 2 and "--force" in refused.err
