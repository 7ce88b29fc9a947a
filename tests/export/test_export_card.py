"""The card of an export: settings, lineage, data and scores, from the manifests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from support import night_files

from ttrain.errors import UsageError
from ttrain.export.export import Request, export
from ttrain.lineage.lookup import resolve
from ttrain.reports.model_card import Exported, History, card
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

EXPORTED = Exported(name="mine", files="model", dtype="bf16", parameters=1, config={})


def artifact(stage: str, **manifest: Any) -> Artifact:
    empty: dict[str, Any] = {name: {} for name in ("inputs", "ingredients", "files", "result")}
    return Artifact(stage, "k" * 64, Path("/nowhere"), {**empty, **manifest})


@pytest.mark.usefixtures("use_trained_home")
def test_the_card_has_training_settings_and_lineage_from_the_manifests(
    tmp_path: Path, trained: ArtifactStore
) -> None:
    export(resolve("sft"), tmp_path / "out", Request(licence="apache-2.0"))
    path = tmp_path / "out" / "README.md"
    text = path.read_text(encoding="utf-8")
    metadata = ModelCard.load(path).data.to_dict()
    expected = {"library_name": "transformers", "license": "apache-2.0", "tags": ["ttrain"]}
    assert metadata.items() >= {**expected, "pipeline_tag": "text-generation"}.items()
    parts = ["46,048", "bf16", 'from_pretrained("THIS_DIRECTORY"']
    for stage in ("pretrain", "sft"):
        each = trained.latest(stage)
        assert each
        parts += [f"{each.result[name]:.4f}" for name in ("loss", "validation_loss")]
        parts.append(f"| {each.stage} | {each.result['steps']} | ")
        parts.append(f"| {each.stage} | `{each.key[:12]}` | `{each.content[:12]}` |")
    assert [part for part in parts if part not in text] == []
    absent = ("## Data", "## Evaluation", str(trained.root))  # no records, no path of this disk
    assert [part for part in absent if part in text] == []
    changed, _, details = text.partition("<details>")
    assert "model.hidden_size=32" in changed
    assert "sft.packing" not in changed
    assert "sft.packing" in details
    with pytest.raises(UsageError):  # two lines would break the card
        export(resolve("sft"), tmp_path / "second", Request(licence="mit\ntags: [x]"))


@pytest.mark.parametrize(("start", "base"), [("owner/name@main", "owner/name"), ("here", None)])
def test_the_card_names_the_sources_of_a_pipeline_in_public_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, base: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    store = ArtifactStore(tmp_path / "home")
    public = ("hf://owner/data", "https://example.org/x.jsonl")
    data = [public[0], "/home/me/secret.jsonl", {"path": public[1], "weight": 2}]
    provenance = {"settings": {"sft": {"start_from": start}, "data": {"sft": data}}}
    inputs: dict[str, Any] = {}
    stages = ["base-model", "shards-sft", "sft"]
    for stage in stages:
        manifest = {"inputs": dict(inputs), "provenance": provenance}
        published = night_files.artifact(store, stage, stage, {"x": ""}, **manifest)
        inputs[stage] = {"stage": stage, "key": stage}
    history = History.of(published, store)
    assert [each.stage for each in history.artifacts] == stages
    assert history.locations == {"shards-sft": public}
    assert history.base == base


def test_the_card_has_the_data_its_digests_and_the_licence_that_is_known() -> None:
    def shards(dataset: str, name: str, **manifest: Any) -> Artifact:
        file = {"role": "train", "kept": 7, "tokens": 70, "bytes": 700, "name": name}
        return artifact(f"shards-{dataset}", result={"files": [file]}, **manifest)

    ingredients = {"files": {"train": [{"name": "docs.jsonl", "sha256": "abcdef" * 10}]}}
    own = shards("pretrain", "docs.jsonl", ingredients=ingredients)
    shipped = shards("sft", "sft.jsonl", inputs={"source": {"stage": "source", "key": "k" * 64}})
    source = artifact("source", files={"sft.jsonl": {"bytes": 700, "sha256": "fedcba" * 10}})
    tokens = replace(own, stage="tokenizer")
    artifacts = (tokens, source, own, shipped, artifact("sft"))
    history = History(artifacts, None, {own.key: ("hf://owner/name",)})
    text = card(EXPORTED, history)
    parts = (
        "| pretrain | train | docs.jsonl | 7 | 70 | 700 | `abcdefabcdef` |",
        "| sft | train | sft.jsonl | 7 | 70 | 700 | `fedcbafedcba` |",
        "sft: PSF-2.0",
        "pretrain: not recorded",
        "- tokenizer: the files of the other data",
        "(`hf://owner/name`)",
    )
    assert [part for part in parts if part not in text] == []
    named = replace(EXPORTED, row_licences={own.key: "mit (75%), cc0-1.0 (25%)"})
    assert "- pretrain: mit (75%), cc0-1.0 (25%), by the rows" in card(named, history)


def test_the_card_scores_the_model_itself_and_no_later_stage() -> None:
    sample = {"prompt": "Who | `you`?", "answer": "I\nam"}
    result = {
        "metrics": {"chat_loss_base": 3.0, "chat_loss_sft": 2.0, "chat_loss_lora": 2.5},
        "counts": {"chats": 50},
        "intervals": {"chat_loss_sft": [1.9, 2.1]},
        "samples": {"sft": [sample], "lora": [{"prompt": "x", "answer": "hidden"}]},
    }
    trained = (artifact("pretrain"), artifact("sft"))
    text = card(EXPORTED, History(trained, artifact("evaluate", result=result), {}))
    parts = ("2.000 (1.900 to 2.100)", "-1.000", "Who \\| 'you'?", "`I am`")
    assert [part for part in parts if part not in text] == []
    assert [part for part in ("lora", "hidden") if part in text] == []
