"""What MLflow's pages say of registered models: the facts of the manifests; what a user wrote there stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ttrain.tracking.model_description import CHARACTERS, DECISION, HERE, add_decision, is_ours, marked, set_description

from ttrain.pipeline import registration
from ttrain.pipeline.lineage import History
from ttrain.pipeline.model_card import Exported
from ttrain.store.layout import Artifact

TRAINED = {"steps": 40, "tokens": 40960, "train_seconds": 2.0, "precision": "bf16", "device": "cpu", "ranks": 2}
SHARDS = {"train": {"rows": 1150, "tokens": 77478, "bytes": 9}, "heldout": {"rows": 12, "tokens": 6, "bytes": 7}}
SCORES = {
    "metrics": {"bits_per_byte": 1.25, "chat_loss_base": 5.5, "chat_loss_sft": 5.0, "chat_loss_lora": 4.0},
    "counts": {"chats": 50},
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


def test_a_version_says_what_it_is_from_what_data_how_good_and_how_it_opens() -> None:
    text = registration.of_model(*sft(), opens=True)
    assert text.startswith("A language model fine-tuned on chats, with 158,016 parameters.")
    names = ", ".join(rf"`docs\|{number}\.jsonl`" for number in range(3))
    [digest] = re.findall(rf"- data, pretrain: 1,150 records, 77,478 tokens, {names}, 2 more, digest `(.*)`", text)
    assert len(digest) == 12, "by which MLflow lists the same data set"
    assert "- training, pretrain: 40 steps, 40,960 tokens, bf16 on cpu, ranks 2, validation loss 2.5000\n" in text
    assert "- training, sft: 33 steps" in text and "tokenizer" not in text
    assert f"- made: run `full-1`, key `{'a1' * 6}`, commit `{'c0ffee' * 2}`, seed `7`" in text
    assert "- chats loss, sft: **5.000** (-0.500)" in text
    assert "loss, lora" not in text, "that is of a model trained on top of it"
    assert f'mlflow.transformers.load_model("models:/{HERE}")' in text and "Who are you?" in text


def test_what_mlflow_cannot_open_says_what_opens_it() -> None:
    _, history = sft()
    adapter = registration.of_model(Exported("mine-lora", "adapter", "float32", 9, {}), history, opens=False)
    assert "PeftModel.from_pretrained(base, place)" in adapter and "load_model" not in adapter
    tokenizer = registration.of_model(None, History(history.artifacts[:1], None, {}), opens=False)
    assert tokenizer.startswith("A tokenizer of 800 tokens") and "AutoTokenizer.from_pretrained(place)" in tokenizer
    assert "- data, tokenizer: 5 records" in tokenizer


def test_a_set_names_its_models_and_their_scores() -> None:
    _, history = sft()
    models = {"mine-base": history.artifacts[2], "mine-sft": history.artifacts[3]}
    text = registration.of_set("mine", "full-1", models, {"eval/bits_per_byte": 1.25})
    assert "- `mine-sft`: sft, key `a1a1a1a1a1a1`" in text and "**1.250**" in text and f"ttrain lineage {HERE}" in text


def test_a_text_of_ours_is_told_from_one_that_somebody_edited() -> None:
    ours = marked("# A\n\ntext with \ud800 and \0")
    assert is_ours(ours) and is_ours("") and is_ours(None)
    assert not is_ours(ours.replace("text", "my text")) and not is_ours("mine") and not is_ours(f"{ours}, and mine")
    long = marked("é" * 9000)
    assert len(long) <= CHARACTERS and is_ours(long)


class Registry:
    """MLflow's client, as far as it is asked: one version."""

    def __init__(self) -> None:
        self.version = SimpleNamespace(name="mine", version=3, description=None)
        self.writes = 0

    def update_model_version(self, name: str, version: str, description: str) -> None:
        assert (name, version) == ("mine", "3")
        self.version.description, self.writes = description, self.writes + 1


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_a_description_is_written_once_and_again_where_it_is_another(registry: Registry) -> None:
    for text in (f"see {HERE}", f"see {HERE}", "better"):
        set_description(registry, registry.version, text)
    assert registry.writes == 2 and registry.version.description == marked("better")
    set_description(registry, registry.version, "")
    assert registry.writes == 2, "an entry of an earlier ttrain brings none"


def test_a_decision_stands_below_whatever_is_written_and_is_replaced_by_the_next(registry: Registry) -> None:
    set_description(registry, registry.version, "what it is")
    add_decision(registry, registry.version, "kept")
    add_decision(registry, registry.version, "promoted")
    assert registry.version.description == marked(f"what it is{DECISION}promoted")
    set_description(registry, registry.version, "what it is, with figures")
    assert registry.version.description == marked(f"what it is, with figures{DECISION}promoted")


def test_what_a_user_wrote_stays(registry: Registry) -> None:
    registry.version.description = "my best one"
    set_description(registry, registry.version, "what it is")
    assert registry.version.description == "my best one"
    add_decision(registry, registry.version, "promoted")
    assert registry.version.description == f"my best one{DECISION}promoted"
    set_description(registry, registry.version, "what it is")
    assert registry.version.description == f"my best one{DECISION}promoted"
