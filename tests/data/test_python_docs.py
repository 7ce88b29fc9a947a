"""The quickstart's data: split by module, and as much as the settings say."""

import json
import re
from pathlib import Path

from ttrain.config import PythonDocs
from ttrain.data import python_docs


def modules(*paths: Path) -> set[str]:
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    sources = [row["source"].partition(":")[2].partition(".")[0] for row in rows]
    return {re.sub("^_(py)?", "", source) for source in sources}


def test_no_module_is_on_both_sides_and_the_settings_say_how_much_is_taken(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in python_docs.build(tmp_path, PythonDocs())}
    heldout = modules(files["pretrain_heldout"], files["sft_heldout"])
    assert len(heldout) > 10
    assert not heldout & modules(files["pretrain"], files["sft"])
    counts = python_docs.build(tmp_path, PythonDocs(chat_rows=200, document_bytes=300_000))
    assert [counts[name]["rows"] for name in ("sft", "dpo", "lora")] == [200, 75, 800]
    assert 290_000 < counts["pretrain"]["bytes"] + counts["pretrain_heldout"]["bytes"] <= 300_000
