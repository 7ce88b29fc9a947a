"""The card of an export: settings, lineage, data and scores, from the manifests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from ttrain.errors import UsageError
from ttrain.export.export import Request, export
from ttrain.lineage.names import resolve
from ttrain.reports.history import History
from ttrain.reports.model_card import Exported, card
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import MODEL

EXPORTED = Exported(name="mine", files="model", dtype="bf16", parameters=1, config={})


def artifact(stage: str, **manifest: Any) -> Artifact:
    return Artifact(
        stage, "k" * 64, Path("/nowhere"), {"inputs": {}, "ingredients": {}, "files": {}, "result": {}, **manifest}
    )


@pytest.mark.usefixtures("use_trained_home")
def test_the_card_tells_training_settings_and_lineage_from_the_manifests(tmp_path: Path, trained: ArtifactStore) -> None:
    export(resolve("sft"), tmp_path / "out", Request(licence="apache-2.0"))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    base, chat = trained.latest("pretrain"), trained.latest("sft")
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert metadata == {
        "library_name": "transformers", "license": "apache-2.0", "pipeline_tag": "text-generation", "tags": ["ttrain"],
    }  # fmt: skip
    assert "fine-tuned on chats, with 46,048 parameters. Its numbers are bf16." in text
    assert 'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY", dtype="auto")\n' in text
    assert "| hidden size | 32 |" in text
    assert "## Data" not in text and "## Evaluation" not in text, "their records are not there"
    for artifact in (base, chat):
        figures = (f"{artifact.result[name]:.4f}" for name in ("loss", "validation_loss"))
        assert f"| {artifact.stage} | {artifact.result['steps']} | " in text
        assert all(figure in text for figure in figures)
        assert f"| {artifact.stage} | `{artifact.key[:12]}` | `{artifact.content[:12]}` |" in text
    assert f"base `{base.key[:12]}`" in text
    changed = text.partition("What differs from ttrain's defaults:")[2].partition("<details>")[0]
    assert "model.hidden_size=32" in changed
    assert "sft.packing" not in changed
    assert 'sft.packing: "best-fit"' in text
    assert str(trained.root) not in text, "no path of the user's disk"
    for licence in ("", "a: b", "mit\ntags: [x]"):  # which would break the card
        with pytest.raises(UsageError, match="but must be one word that names it"):
            export(resolve("sft"), tmp_path / "other", Request(licence=licence))


def test_the_card_of_an_adapter_says_what_it_belongs_to_and_how_it_is_loaded() -> None:
    adapter = replace(EXPORTED, files="adapter", base_digest="fedcba" * 10, has_code=True)
    text = card(adapter, History((artifact("sft"), artifact("lora")), None, {}, "owner/name"))
    assert ModelCard(text).data.to_dict() == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "owner/name",
        "tags": ["ttrain", "adapter"],
    }  # fmt: skip
    assert f"whose weights have the sha256 `{'fedcba' * 10}`" in text
    assert 'base = AutoModelForCausalLM.from_pretrained("BASE", trust_remote_code=True)' in text
    assert 'model = PeftModel.from_pretrained(base, "THIS_DIRECTORY")' in text


def test_the_card_names_the_model_that_was_started_from_but_no_path() -> None:
    files = {
        "config": [{"name": "config.json", "sha256": "abcdef" * 10}],
        "weights": [{"name": MODEL, "sha256": "fedcba" * 10}],
    }
    history = History((artifact("base-model", ingredients={"files": files}), artifact("sft")), None, {}, "owner/name")
    text = card(EXPORTED, history)
    assert ModelCard(text).data.base_model == "owner/name"
    assert "From `owner/name` on the Hugging Face Hub" in text
    assert "| config.json | `abcdefabcdef` |" in text and f"| {MODEL} | `fedcbafedcba` |" in text
    text = card(EXPORTED, replace(history, base=None))
    assert ModelCard(text).data.base_model is None and "From a local model" in text


@pytest.mark.parametrize(
    ("start", "base"), [("owner/name@main", "owner/name"), ("here", None), ("./x/y", None), ("sft", None)]
)
def test_where_a_pipeline_started_and_read_is_told_of_public_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, base: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    store, inputs = ArtifactStore(tmp_path / "home"), dict[str, Any]()
    data = ["hf://owner/data", "/home/me/secret.jsonl", {"path": "https://example.org/x.jsonl", "weight": 2}]
    provenance = {"settings": {"sft": {"start_from": start}, "data": {"sft": data}}}
    for stage in ("base-model", "shards-sft", "sft"):
        (output := store.work(stage, stage)).mkdir(parents=True)
        manifest = {"inputs": dict(inputs), "provenance": provenance, "result": {}, "ingredients": {}}
        made = store.publish(stage, stage, output, manifest)
        inputs[stage] = {"stage": stage, "key": stage}
    history = History.of(made, store)
    assert [one.stage for one in history.artifacts] == ["base-model", "shards-sft", "sft"]
    assert history.locations == {"sft": ("hf://owner/data", "https://example.org/x.jsonl")}
    assert history.base == base


def test_the_card_tells_the_data_its_digests_and_what_is_known_of_its_licence() -> None:
    file = {"role": "train", "kept": 7, "tokens": 70, "bytes": 700}
    own = artifact(
        "shards-pretrain",
        result={"files": [{**file, "name": "docs.jsonl"}]},
        ingredients={"files": {"train": [{"name": "docs.jsonl", "sha256": "abcdef" * 10}]}},
    )
    shipped = artifact(
        "shards-sft",
        result={"files": [{**file, "name": "sft.jsonl"}]},
        inputs={"source": {"stage": "source", "key": "k" * 64}},
    )
    source = artifact("source", files={"sft.jsonl": {"bytes": 700, "sha256": "fedcba" * 10}})
    history = History((source, own, shipped, artifact("sft")), None, {"pretrain": ("hf://owner/name",)})
    text = card(EXPORTED, history)
    assert "| pretrain | train | docs.jsonl | 7 | 70 | 700 | `abcdefabcdef` |" in text
    assert "| sft | train | sft.jsonl | 7 | 70 | 700 | `fedcbafedcba` |" in text
    assert "- sft: PSF-2.0 (https://docs.python.org/3/license.html), text of the Python documentation" in text
    assert "- pretrain: not recorded" in text
    assert "(`hf://owner/name`)" in text


def test_the_card_of_many_nights_tells_the_newest_of_their_artifacts() -> None:
    nights = [replace(artifact("pretrain"), key=f"{number:012x}" + "0" * 52) for number in range(2000)]
    text = card(EXPORTED, History(tuple(nights), None, {}))
    assert len(text) < 10_000 and "| pretrain | `0000000007a8` |" in text and "`0000000007a7`" not in text
    assert "Left out here and above: 1,960 earlier ones; `ttrain lineage` has all." in text


def test_the_card_scores_the_model_itself_and_not_what_was_trained_on_top_of_it() -> None:
    metrics = {"bits_per_byte": 1.5, "chat_loss_base": 3.0, "chat_loss_sft": 2.0, "chat_loss_lora": 2.5}
    said = {"sft": [{"prompt": "Who | `you`?", "answer": "I\nam"}], "lora": [{"prompt": "x", "answer": "never shown"}]}
    intervals = {"chat_loss_sft": [1.9, 2.1]}
    result = {"metrics": metrics, "counts": {"chats": 50}, "samples": said, "intervals": intervals}
    scored = artifact("evaluate", result=result)
    text = card(EXPORTED, History((artifact("pretrain"), artifact("sft")), scored, {}))
    assert "| chats loss, sft | 2.000 (1.900 to 2.100) | -1.000 |" in text
    assert "lora" not in text
    assert "| `Who \\| 'you'?` | `I am` |" in text and "Hello! Who are you?" in text
    assert "never shown" not in text
