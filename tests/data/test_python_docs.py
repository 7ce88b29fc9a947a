"""The quickstart's data: true, split by module, free of copies across the split, and the same everywhere."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_data import write_shards

from ttrain.config import Pretrain, PythonDocs
from ttrain.data import python_docs, tokenizer
from ttrain.tasks.common.rows import open_rows

ROOT = Path(__file__).parents[2]
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    output = tmp_path_factory.mktemp("python_docs")
    names = python_docs.build(output, PythonDocs())
    return {
        name: [json.loads(line) for line in (output / f"{name}.jsonl").open(encoding="utf-8")]
        for name in names
    }


def top_module(row: dict[str, Any]) -> str:
    """Without the marks of a C or Python twin."""
    return re.sub("^_(py)?", "", row["source"].partition(":")[2].partition(".")[0])


def test_no_module_is_on_both_sides(rows: Rows) -> None:
    heldout = {top_module(row) for row in rows["pretrain_heldout"] + rows["sft_heldout"]}
    assert len(heldout) > 10
    assert not heldout & {top_module(row) for row in rows["pretrain"] + rows["sft"]}


def test_most_tokens_lie_in_a_row_with_the_beginning_of_their_document(
    rows: Rows, tmp_path: Path
) -> None:
    """Of a fourth of the quickstart's documents, in rows as pretraining packs them. In one stream 0.35 of the tokens of
    rows of 256 lie without it, and 0.20 of those of rows of 512."""
    documents = [row["text"] for row in rows["pretrain"]][::4]
    bpe = tokenizer.train(documents[::2], 4096)
    lengths = [len(encoding.ids) for encoding in bpe.encode_batch_fast(documents)]
    first, other = 1, 5
    records: list[Any] = [([first] + [other] * (length - 1), []) for length in lengths]
    tokenizer_of_it: Any = SimpleNamespace(digest="t", jinja="", pad_id=0)
    write_shards(tmp_path, records, kind="documents", vocab_size=4096, tokenizer="t")
    for row_length, most in ((256, 0.18), (512, 0.04)):
        packed = open_rows(tmp_path, tokenizer_of_it, Pretrain(row_length=row_length))
        batch, without = packed.batch(range(len(packed))), 0
        for row in range(len(packed)):
            spans = [span for span in batch.spans(row) if batch.input_ids_BT[row, span[0]] != first]
            without += sum(end - start for start, end in spans)
        tokens = sum(lengths) - len(lengths)  # the last one of each is a target only
        assert 0 < without / tokens <= most, f"rows of {row_length}"
        assert packed.counts()["fill"] > 0.99


def test_the_settings_say_how_much_is_taken(rows: Rows, tmp_path: Path) -> None:
    taken = python_docs.build(tmp_path, PythonDocs(chat_rows=200, document_bytes=300_000))
    assert {name: taken[name]["rows"] for name in ("sft", "dpo", "lora")} == {
        "sft": 200,
        "dpo": 75,
        "lora": 800,
    }
    assert 290_000 < taken["pretrain"]["bytes"] + taken["pretrain_heldout"]["bytes"] <= 300_000
    assert (
        (tmp_path / "sft.jsonl")
        .read_text("utf-8")
        .startswith(json.dumps(rows["sft"][0], ensure_ascii=False))
    )


def test_the_wheel_has_the_text_and_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["ttrain.configs"]
    file = python_docs.text_file()
    for path in (file, file.with_name("LICENSE.txt")):
        assert path.is_file() and any(
            path.relative_to(ROOT / "configs").match(pattern) for pattern in patterns
        )
    assert "configs/quickstart/LICENSE.txt" in project["project"]["license-files"]
    assert file.stat().st_size <= 1_500_000
