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
    return Artifact(
        stage,
        "k" * 64,
        Path("/nowhere"),
        {"inputs": {}, "ingredients": {}, "files": {}, "result": {}, **manifest},
    )


@pytest.mark.usefixtures("use_trained_home")
def test_the_card_tells_training_settings_and_lineage_from_the_manifests(
    tmp_path: Path, trained: ArtifactStore
) -> None:
    export(resolve("sft"), tmp_path / "out", Request(licence="apache-2.0"))
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    base, chat = trained.latest("pretrain"), trained.latest("sft")
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert (metadata["library_name"], metadata["license"]) == ("transformers", "apache-2.0")
    assert metadata["pipeline_tag"] == "text-generation" and metadata["tags"] == ["ttrain"]
    assert "46,048" in text and "bf16" in text and 'from_pretrained("THIS_DIRECTORY"' in text
    assert "## Data" not in text and "## Evaluation" not in text, "their records are not there"
    for artifact in (base, chat):
        figures = (f"{artifact.result[name]:.4f}" for name in ("loss", "validation_loss"))
        assert f"| {artifact.stage} | {artifact.result['steps']} | " in text
        assert all(figure in text for figure in figures)
        assert f"| {artifact.stage} | `{artifact.key[:12]}` | `{artifact.content[:12]}` |" in text
    assert f"base `{base.key[:12]}`" in text
    changed, _, every = text.partition("<details>")
    assert (
        "model.hidden_size=32" in changed
        and "sft.packing" not in changed
        and "sft.packing" in every
    )
    assert str(trained.root) not in text, "no path of the user's disk"
    with pytest.raises(UsageError, match="one word"):  # which would break the card
        export(resolve("sft"), tmp_path / "other", Request(licence="mit\ntags: [x]"))


def test_the_card_of_an_adapter_says_what_it_belongs_to_and_how_it_is_loaded() -> None:
    adapter = replace(EXPORTED, files="adapter", base_digest="fedcba" * 10, has_code=True)
    text = card(adapter, History((artifact("sft"), artifact("lora")), None, {}, "owner/name"))
    metadata = ModelCard(text).data.to_dict()
    assert (metadata["library_name"], metadata["base_model"]) == ("peft", "owner/name")
    for part in (
        f"`{'fedcba' * 10}`",
        'from_pretrained("BASE", trust_remote_code=True)',
        'from_pretrained(base, "THIS_DIR',
    ):
        assert part in text


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        ("pretrain", "A language model trained on documents"),
        ("sft", "A language model fine-tuned on chats"),
        ("dpo", "A language model tuned on pairs of answers, of which one is preferred"),
        ("base-model", "A causal language model"),
    ],
)
def test_the_card_says_in_a_sentence_what_the_model_learnt_from(stage: str, sentence: str) -> None:
    text = card(EXPORTED, History((artifact(stage),)))
    assert (
        f"# mine\n\n{sentence}, with 1 parameters. Its numbers are bf16. Made with ttrain.\n"
        in text
    )


@pytest.mark.parametrize(("start", "base"), [("owner/name@main", "owner/name"), ("here", None)])
def test_where_a_pipeline_started_and_read_is_told_of_public_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, base: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    store, inputs = ArtifactStore(tmp_path / "home"), dict[str, Any]()
    data = [
        "hf://owner/data",
        "/home/me/secret.jsonl",
        {"path": "https://example.org/x.jsonl", "weight": 2},
    ]
    provenance = {"settings": {"sft": {"start_from": start}, "data": {"sft": data}}}
    for stage in ("base-model", "shards-sft", "sft"):
        manifest = {"inputs": dict(inputs), "provenance": provenance}
        made = night_files.artifact(store, stage, stage, {"x": ""}, **manifest)
        inputs[stage] = {"stage": stage, "key": stage}
    history = History.of(made, store)
    assert [one.stage for one in history.artifacts] == ["base-model", "shards-sft", "sft"]
    assert history.locations == {"sft": ("hf://owner/data", "https://example.org/x.jsonl")}
    assert history.base == base


def test_the_card_tells_the_data_its_digests_and_what_is_known_of_its_licence() -> None:
    def shards(dataset: str, name: str, **manifest: Any) -> Artifact:
        file = {"role": "train", "kept": 7, "tokens": 70, "bytes": 700, "name": name}
        return artifact(f"shards-{dataset}", result={"files": [file]}, **manifest)

    named = {"files": {"train": [{"name": "docs.jsonl", "sha256": "abcdef" * 10}]}}
    own = shards("pretrain", "docs.jsonl", ingredients=named)
    shipped = shards("sft", "sft.jsonl", inputs={"source": {"stage": "source", "key": "k" * 64}})
    source = artifact("source", files={"sft.jsonl": {"bytes": 700, "sha256": "fedcba" * 10}})
    text = card(
        EXPORTED,
        History((source, own, shipped, artifact("sft")), None, {"pretrain": ("hf://owner/name",)}),
    )
    for dataset, name, digest in (
        ("pretrain", "docs.jsonl", "abcdefabcdef"),
        ("sft", "sft.jsonl", "fedcbafedcba"),
    ):
        assert f"| {dataset} | train | {name} | 7 | 70 | 700 | `{digest}` |" in text
    assert (
        "sft: PSF-2.0" in text
        and "pretrain: not recorded" in text
        and "(`hf://owner/name`)" in text
    )


def test_the_card_scores_the_model_itself_and_not_what_was_trained_on_top_of_it() -> None:
    metrics = {
        "bits_per_byte": 1.5,
        "chat_loss_base": 3.0,
        "chat_loss_sft": 2.0,
        "chat_loss_lora": 2.5,
    }
    said = {
        "sft": [{"prompt": "Who | `you`?", "answer": "I\nam"}],
        "lora": [{"prompt": "x", "answer": "hidden"}],
    }
    intervals = {"chat_loss_sft": [1.9, 2.1]}
    result = {"metrics": metrics, "counts": {"chats": 50}, "samples": said, "intervals": intervals}
    text = card(
        EXPORTED,
        History((artifact("pretrain"), artifact("sft")), artifact("evaluate", result=result), {}),
    )
    assert "2.000 (1.900 to 2.100)" in text and "-1.000" in text
    assert "lora" not in text and "hidden" not in text
    assert all(part in text for part in ("Who \\| 'you'?", "`I am`"))
