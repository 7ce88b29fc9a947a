"""With default settings, too many passes over too little text are named while they happen."""

import json
from pydoc_data.topics import topics

import pytest
from support.pipeline_home import Cli

DOCUMENT_BYTES, DOCUMENTS = 500, 100


@pytest.mark.soak
@pytest.mark.long
def test_thirty_passes_over_50_kb_are_named_before_they_end(fresh: Cli) -> None:
    text = "\n".join(topics.values())
    starts = range(0, DOCUMENTS * DOCUMENT_BYTES, DOCUMENT_BYTES)
    rows = [json.dumps({"text": text[start : start + DOCUMENT_BYTES]}) for start in starts]
    (fresh.data / "few.jsonl").write_text("\n".join(rows), encoding="utf-8")
    command = ("pipeline", "run", "full", "--until", "pretrain", "data.pretrain=few.jsonl")
    budget = ("pretrain.tokens=null", "pretrain.epochs=30", "tracking.enabled=false")
    lines = fresh(*command, *budget, settings=False).splitlines()
    (warning,) = [line for line in lines if line.startswith("  pretrain: guard overfit")]
    (end,) = [line for line in lines if "✓ pretrain" in line]
    assert lines.index(warning) < lines.index(end)
    assert "no effect" not in end
