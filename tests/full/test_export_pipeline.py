"""What a real pipeline left, exported by its names, with a card that tells the user's own files and scores."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.soak
@pytest.mark.parametrize("name", ["lora", "run", "tiny-test-lora/1"])
def test_every_name_of_a_model_exports_the_same_files(finished: Any, tmp_path: Path, name: str) -> None:
    reference = finished.runs()[-1]["run"] if name == "run" else name
    said = finished("export", reference, "--merge", "--to", str(tmp_path / "out"), "--json", settings=False)
    done = json.loads(said[said.index("{") :])
    adapter = finished.manifest("lora")
    assert done["kind"] == "model" and "model.safetensors" in done["files"]
    assert done["parameters"] == adapter["result"]["parameters"] - adapter["result"]["trainable_parameters"]
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for part, file in (("pretrain", "docs-1"), ("sft", "chats"), ("lora", "domain")):
        digest = hashlib.sha256((finished.data / f"{file}.jsonl").read_bytes()).hexdigest()
        assert re.search(rf"\| {part} \| train \| {file}\.jsonl \| [\d,]+ \| [\d,]+ \| [\d,]+ \| `{digest[:12]}` \|", card)
    scores = finished.manifest("evaluate")["result"]["metrics"]
    assert f"| domain loss, lora | {scores['domain_loss_lora']:.3f} | " in card
    assert str(finished.data) not in card and str(finished.home) not in card
