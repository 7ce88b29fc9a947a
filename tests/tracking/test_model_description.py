"""What MLflow's pages say of registered models: the facts of the manifests; what a user wrote there stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.reports.history import History
from ttrain.reports.model_card import Exported
from ttrain.store.layout import Artifact
from ttrain.tracking import registration
from ttrain.tracking.registration import HERE

TRAINED = {"steps": 40, "tokens": 40960, "train_seconds": 2.0, "precision": "bf16", "device": "cpu", "ranks": 2}
SHARDS = {"train": {"rows": 1150, "tokens": 77478, "bytes": 9}, "heldout": {"rows": 12, "tokens": 6, "bytes": 7}}
SCORES = {
    "metrics": {"bits_per_byte": 1.25, "chat_loss_base": 5.5, "chat_loss_sft": 5.0, "chat_loss_lora": 4.0},
    "counts": {"chats": 50},
    "intervals": {"chat_loss_sft": [4.9, 5.1]},
}


def artifact(stage: str, result: Mapping[str, Any], files: int = 0) -> Artifact:
    named = [{"name": f"docs`|{number}.jsonl", "sha256": "5" * 64} for number in range(files)]
    ingredients = {"files": {"train": named}, "settings": {f"{stage}.seed": 7}, "code": {}}
    made = {"run": "full-1", "commit": "c0ffee" * 6}
    return Artifact(
        stage, "a1" * 32, Path(), {"ingredients": ingredients, "inputs": {}, "result": result, "provenance": made}
    )


def sft(files: int = 5) -> tuple[Exported, History]:
    chain = (
        artifact("tokenizer", {"vocab_size": 800, "files": [{}], "documents": 5}, 1),
        artifact("shards-pretrain", SHARDS, files),
        artifact("pretrain", {**TRAINED, "validation_loss": 2.5}),
        artifact("sft", {**TRAINED, "steps": 33}),
    )
    exported = Exported("mine-sft", "model", "float32", 158016, {})
    return exported, History(chain, artifact("evaluate", SCORES), {})


def test_a_version_begins_with_its_metric_and_the_note_and_says_what_it_is_made_of_and_how_it_opens() -> None:
    text = registration.of_model(*sft(), opens=True, note="twice\nthe rate")
    assert text.startswith("chats loss **5.000** (4.900 to 5.100). twice the rate\n\n")
    assert "A language model fine-tuned on chats, with 158,016 parameters." in text
    names = ", ".join(rf"`docs\|{number}\.jsonl`" for number in range(3))
    [digest] = re.findall(rf"- data, pretrain: 1,150 records, 77,478 tokens, 5 files, {names}, digest `(.*)`", text)
    assert len(digest) == 12, "by which MLflow lists the same data set"
    assert "- training, pretrain: validation_loss 2.500, tokens 40,960\n" in text
    assert "- training, sft: tokens 40,960" in text and "tokenizer" not in text
    assert f"- made: run `full-1`, key `{'a1' * 6}`, commit `{'c0ffee' * 2}`, seed `7`" in text
    assert "lora" not in text, "that is a model trained on top of it"
    assert f'mlflow.transformers.load_model("models:/{HERE}")' in text and "Who are you?" in text


def test_a_version_without_evaluation_begins_with_the_note() -> None:
    exported, history = sft()
    text = registration.of_model(exported, History(history.artifacts, None, {}), opens=True, note="my note")
    assert text.startswith("my note\n\nA language model fine-tuned on chats")


def test_what_mlflow_cannot_open_says_what_opens_it() -> None:
    _, history = sft()
    adapter = registration.of_model(Exported("mine-lora", "adapter", "float32", 9, {}), history, opens=False)
    assert "PeftModel.from_pretrained(base, place)" in adapter and "load_model" not in adapter
    tokenizer = registration.of_model(None, History(history.artifacts[:1], None, {}), opens=False)
    assert tokenizer.startswith("A tokenizer of 800 tokens") and "AutoTokenizer.from_pretrained(place)" in tokenizer
    assert "- data, tokenizer: 5 records" in tokenizer


def test_a_set_begins_with_the_metric_of_its_last_model_and_names_its_models() -> None:
    _, history = sft()
    models = {"mine-base": history.artifacts[2], "mine-sft": history.artifacts[3]}
    text = registration.of_set("mine", "full-1", models, {"eval/bits_per_byte": 1.25}, note="first")
    assert text.startswith("bits per byte **1.250**. first\n\nModels of the run `full-1` of `mine`")
    assert "- `mine-sft`: sft, key `a1a1a1a1a1a1`" in text and f"ttrain lineage {HERE}" in text
    both = {"eval/bits_per_byte": 1.25, "eval/chat_loss_sft": 5.0}
    text = registration.of_set("mine", "full-1", models, both, intervals={"chat_loss_sft": [4.9, 5.1]})
    assert text.startswith("chats loss **5.000** (4.900 to 5.100)\n\n"), "of the last model that is judged"
