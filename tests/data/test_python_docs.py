"""The quickstart's data: split by module, and as much as the settings say."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from ttrain.config import PythonDocs
from ttrain.data import python_docs

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    output = tmp_path_factory.mktemp("python_docs")
    lines = {
        name: (output / f"{name}.jsonl").read_text("utf-8").splitlines()
        for name in python_docs.build(output, PythonDocs())
    }
    return {name: list(map(json.loads, of_file)) for name, of_file in lines.items()}


def test_no_module_is_on_both_sides(rows: Rows) -> None:
    def modules(name: str) -> set[str]:
        sources = [row["source"].partition(":")[2].partition(".")[0] for row in rows[name]]
        return {re.sub("^_(py)?", "", source) for source in sources}

    heldout = modules("pretrain_heldout") | modules("sft_heldout")
    assert len(heldout) > 10
    assert not heldout & (modules("pretrain") | modules("sft"))


def test_the_settings_say_how_much_is_taken(rows: Rows, tmp_path: Path) -> None:
    taken = python_docs.build(tmp_path, PythonDocs(chat_rows=200, document_bytes=300_000))
    assert [taken[name]["rows"] for name in ("sft", "dpo", "lora")] == [200, 75, 800]
    assert 290_000 < taken["pretrain"]["bytes"] + taken["pretrain_heldout"]["bytes"] <= 300_000
    first, *_ = (tmp_path / "sft.jsonl").read_text("utf-8").splitlines()
    assert json.loads(first) == rows["sft"][0]


def test_the_wheel_has_the_text_and_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["ttrain.configs"]
    text = python_docs.text_file()
    for path in (text, text.with_name("LICENSE.txt")):
        name = path.relative_to(ROOT / "configs")
        assert path.is_file() and any(map(name.match, patterns))
    assert "configs/quickstart/LICENSE.txt" in project["project"]["license-files"]
