"""The README's command on 300 documents, 100 chats and 40 chats of a domain."""

import json
from pathlib import Path

import pytest
from support.pipeline_home import Cli

from ttrain.config import PythonDocs
from ttrain.data import python_docs

ROWS = {"docs.jsonl": ("pretrain", 300), "chats.jsonl": ("sft", 100), "domain.jsonl": ("lora", 40)}
# A model and a budget of seconds; batch and passes of SFT and LoRA are those of the rows.
TINY = """
tokenizer: {vocab_size: 800}
model: {hidden_size: 64, layers: 2, heads: 2}
pretrain: {tokens: 200k}
evaluate: {new_tokens: 4}
runtime: {threads: 1, workers: 1}
"""

pytestmark = pytest.mark.soak  # in short: tests/tasks/test_rows.py


def test_small_data_ends_with_models_that_are_each_better_than_their_start(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", tmp_path / "data")
    cli.data.mkdir()
    python_docs.build(tmp_path / "source", PythonDocs())
    for file, (dataset, count) in ROWS.items():
        source = (tmp_path / "source" / f"{dataset}.jsonl").read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        step = len(lines) // count
        (cli.data / file).write_text("".join(lines[::step][:count]), encoding="utf-8")
    (cli.data / "tiny.yaml").write_text(TINY)
    cli("pipeline", "run", "full", "--engine", "none")
    [record] = (json.loads(path.read_text()) for path in (cli.home / "runs").glob("full-*.json"))
    metrics = record["metrics"]
    assert metrics["eval/chat_loss_sft"] < metrics["eval/chat_loss_base"]
    assert metrics["eval/domain_loss_lora"] < metrics["eval/domain_loss_sft"]
    for stage in ("sft", "lora"):
        [manifest] = (cli.home / "store" / stage).glob("*/manifest.json")
        result = json.loads(manifest.read_text())["result"]
        assert result["steps"] >= 60 and {*result["by_rule"]} == {"tokens_per_step", "epochs"}
