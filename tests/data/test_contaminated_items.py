"""Evaluation items that training documents hold are told apart, left out on request, and known to later nights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.contaminated_shards import ANSWER, POEM, QUESTION, jsonl
from support.tiny_stages import Home, run_here, stage_settings

from ttrain.config import Evaluate, EvaluateConfig
from ttrain.config.evaluate import Suite
from ttrain.data import contamination, overlap
from ttrain.errors import DataError
from ttrain.evaluate import run
from ttrain.evaluate import run as contaminated
from ttrain.evaluate.items import IN_TRAINING, Items, SuiteFiles
from ttrain.stages import evaluate


def items_of(task: str, kind: str, rows: Sequence[Any], directory: Path, **more: Any) -> Items[Any]:
    file = jsonl(directory / f"{task}.jsonl", rows)
    spec = Suite.model_validate({"tasks": {task: {"kind": kind, "file": file.name, "by": ["lang"], **more}}}).tasks[task]
    return run.functions_of(spec)[0](task, spec, SuiteFiles(directory))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("choices", {"question": QUESTION, "choices": ["Danube", ANSWER], "answer": 1}),
        ("last_word", {"context": "The old wooden bridge of the village crosses the", "target": " Rhine"}),
        ("generation", {"question": QUESTION, "answer": ANSWER}),
        ("text", {"text": POEM}),
        ("chats", {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}),
    ],
)
def test_items_that_training_documents_hold_are_told_apart_or_left_out(tmp_path: Path, kind: str, row: Any) -> None:
    fillers = [json.loads(json.dumps(row).replace("Rhine", f"Elbe {n}").replace("\\u5e8a", f"{n}")) for n in range(2)]
    rows = [{**fillers[0], "lang": "en"}, {**row, "lang": "en"}, {**fillers[1], "lang": "zh"}]
    items = items_of("task", kind, rows, tmp_path)
    found, _ = contamination.read_items(str(jsonl(tmp_path / "row.jsonl", [row])), "row")
    apart = contaminated.mark_overlaps(items, {found[0].digest}, leave_out=False)
    assert apart.groups == {**items.groups, "overlap=yes": (1,), "overlap=no": (0, 2)}
    assert apart.digests == items.digests
    without = contaminated.mark_overlaps(items, {found[0].digest}, leave_out=True)
    assert without.digests == (items.digests[0], items.digests[2])
    assert without.reasons == {IN_TRAINING: 1}
    assert without.groups == ({"lang=en": (0,), "lang=zh": (1,)} if items.groups else {})
    assert contaminated.mark_overlaps(items, {"other"}, leave_out=True) is items
    if kind in ("choices", "last_word", "generation"):  # worked examples are no part of what is looked for
        shown = items_of("task", kind, rows, tmp_path, shots=1)
        assert contaminated.mark_overlaps(shown, {found[0].digest}, leave_out=False).groups["overlap=yes"] == (1,)


@pytest.mark.parametrize("row", [{"answer": 1234}, {"final": "1234"}, {"answer": " ", "final": 1234}])
def test_an_answer_is_looked_for_in_whatever_form_a_task_reads_it(tmp_path: Path, row: Any) -> None:
    items = items_of("sums", "generation", [{"question": QUESTION, **row}], tmp_path)
    (found,), _ = contamination.read_items(str(tmp_path / "sums.jsonl"), "sums")
    assert found.text == overlap.plain(QUESTION) + b"1234"
    assert contaminated.mark_overlaps(items, {found.digest}, leave_out=False).groups == {"overlap=yes": (0,)}


@pytest.mark.parametrize(("answer", "text"), [(" B ", "two"), (0, "one"), ("two", "two"), ("Z", ""), ("ß", "ß"), (None, "")])
def test_a_right_choice_is_looked_for_by_its_number_letter_or_text(answer: Any, text: str) -> None:
    assert contamination.of_row({"question": "Which?", "choices": ["one", "two"], "answer": answer}) == f"Which?\n{text}"


def test_the_evaluation_tells_items_apart_that_its_shards_hold(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=1)
    home.pretrain(settings, tmp_path / "base")
    jsonl(tmp_path / "items.jsonl", [{"text": POEM}, {"text": QUESTION}, {"text": ANSWER}])
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  texts: {kind: text, file: items.jsonl}\n")
    contamination.write_item_shares(home.documents.path, {contamination.item_of("", "", QUESTION).digest: 1.0})
    found = {}
    for overlapping in ("report", "leave_out"):
        told: Any = {"suites": str(suite), "overlapping": overlapping, "row_length": 32, "stride": 16, "resamples": 100}
        config = EvaluateConfig(evaluate=Evaluate(**told, new_tokens=0))
        (tmp_path / overlapping).mkdir()
        given = {"base": tmp_path / "base", "documents": home.documents.path}
        found[overlapping] = run_here(evaluate, config, tmp_path / overlapping, given, settings.runtime)
    apart, without = found["report"], found["leave_out"]
    assert (apart["counts"]["texts/items"], without["counts"]["texts/items"]) == (3, 2)
    assert without["counts"]["texts/left_out"] == 1
    clean = apart["metrics"]["texts/bits_per_byte/base/overlap:no"]
    assert clean == pytest.approx(without["metrics"]["texts/bits_per_byte/base"], rel=1e-6)
    assert clean != pytest.approx(apart["metrics"]["texts/bits_per_byte/base"], rel=1e-6)


def test_a_task_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    items = items_of("task", "text", [{"text": POEM}], tmp_path)
    known = {contamination.item_of("", "", POEM).digest}
    with pytest.raises(DataError, match=r"evaluate\.overlapping=report"):
        contaminated.mark_overlaps(items, known, leave_out=True)
