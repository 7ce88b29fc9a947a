"""How a night trains: from which state, with which budget, chats and base models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, sources_in

from ttrain.config import Settings
from ttrain.flows.night_plan import night_graph
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot
from ttrain.store.artifacts import ArtifactStore

KEYS = {"tokenizer": "t", "pretrain": "p", "sft": "q", "lora": "a"}
INFINITE = {"schedule": {"kind": "infinite"}}
MODEL, ADAPTER = "model/model.safetensors", "adapter/adapter_model.safetensors"
TRAINED = {"pretrain.schedule.kind": "infinite", "pretrain.optim.kind": "muon"}


def reference(stage: str, key: str) -> dict[str, str]:
    return {"stage": stage, "key": key, "content": ""}


def publish(store: ArtifactStore, stage: str, key: str, *files: str, **inputs: Any) -> None:
    settings = TRAINED if (stage, key) == ("pretrain", "p") else {}
    ingredients = {"files": {}, "settings": settings}
    contents = dict.fromkeys(files, "{}")
    artifact(store, stage, key, contents, ingredients=ingredients, inputs=inputs)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """The champion is version 7: its base left a plateau, its adapter belongs to its SFT model."""
    store = ArtifactStore(tmp_path / "home")
    publish(store, "tokenizer", "t", "tokenizer.json")
    documents, chats = reference("shards-pretrain", "d"), reference("shards-sft", "c")
    for shards in (documents, chats):
        publish(store, shards["stage"], shards["key"], "train/index.json")
    plateau = ("plateau/model.safetensors", "plateau/optimizer.safetensors")
    publish(store, "pretrain", "p", MODEL, *plateau, shards=documents)
    publish(store, "pretrain", "old", MODEL)
    publish(store, "sft", "q", MODEL, shards=chats)
    publish(store, "sft", "q0", MODEL)
    publish(store, "lora", "a", ADAPTER, base=reference("sft", "q"))
    publish(store, "lora", "a0", ADAPTER, base=reference("sft", "q0"))
    return store


@dataclass
class Night:
    """Inputs of a night that starts from version 7."""

    data: dict[str, str]
    store: ArtifactStore

    def inputs(self, sections: Any, without: str = "", **snapshot: Any) -> NightInputs:
        settings = Settings.model_validate({"data": self.data, **sections})
        files = dict(night_inputs.watched_files(settings, self.store, may_be_gone=True))
        if without:
            files[without] = []
        champion = Champion("7", {**KEYS, **snapshot.pop("keys", {})})
        frozen = InputSnapshot(files, settings.model_dump(mode="json"), champion, **snapshot)
        return night_inputs.inputs_of(frozen, settings, self.store)


@pytest.fixture
def night(tmp_path: Path, store: ArtifactStore) -> Night:
    data = {dataset: f"{tmp_path}/{dataset}.jsonl" for dataset in ("pretrain", "sft", "lora")}
    for path in data.values():
        Path(path).write_text("{}", encoding="utf-8")
    return Night(data, store)


def stages_of(inputs: NightInputs) -> dict[str, dict[str, Any]]:
    return sources_in(night_graph(inputs))


def test_a_night_continues_the_plateau_of_the_champion_without_a_warm_up(night: Night) -> None:
    inputs = night.inputs({"pretrain": INFINITE})
    assert inputs.plateau and inputs.plateau.key == "p" and not inputs.note
    schedule = inputs.settings.pretrain.schedule
    assert (schedule.warmup_steps, schedule.kind) == (0, "infinite")
    assert stages_of(inputs)["pretrain"]["plateau"] is inputs.plateau
    for key, kind in (("old", "muon"), ("p", "adamw")):  # without a plateau, of another optimizer
        sections = {"pretrain": {**INFINITE, "optim": {"kind": kind}}}
        inputs = night.inputs(sections, keys={"pretrain": key})
        assert inputs.plateau is None and kind in inputs.note
        assert inputs.settings.pretrain.schedule.warmup_steps is None


def test_shards_and_replay_read_what_earlier_nights_hold_out(night: Night) -> None:
    publish(night.store, "heldout", "h", "heldout/index.json")
    documents = ("shards-pretrain/d",)
    stages = stages_of(night.inputs({}, heldout="heldout/h", documents=documents))
    for name in ("shards-pretrain", "replay", "heldout"):
        assert stages[name]["earlier"].key == "h"
    assert stages["replay"]["tokenizer"].key == "t"
    assert "earlier" not in stages["shards-sft"]
    alone = stages_of(night.inputs({}, documents=documents))
    assert alone["shards-pretrain"].keys() == {"tokenizer", "learnt-0000"}
    assert alone["replay"].keys() == {"documents", "learnt-0000"}
    assert (alone["sft"]["base"], alone["lora"]["base"]) == ("pretrain", "sft")


def test_without_near_duplicates_a_night_holds_out_the_least_share(night: Night) -> None:
    """Rows that the champion was trained on could be among the larger share of `auto`."""
    shares = ((0.8, "auto", "auto"), (0, "auto", 0.02), (0, 0.3, 0.3))
    for near_duplicates, fraction, share in shares:
        reading = {"near_duplicates": near_duplicates, "heldout_fraction": fraction}
        assert night.inputs({"reading": reading}).settings.reading.heldout_fraction == share


def test_a_night_has_its_own_budget(night: Night) -> None:
    for nightly, budget in (
        ({}, ("auto", None)),
        ({"tokens": "50k"}, (50_000, None)),
        ({"epochs": 1.5}, (None, 1.5)),
        ({"epochs": 1, "start_from": "scratch"}, ("auto", None)),
    ):
        inputs = night.inputs({"pretrain": INFINITE, "nightly": nightly})
        assert (inputs.settings.pretrain.tokens, inputs.settings.pretrain.epochs) == budget
        assert (inputs.plateau is None) == ("start_from" in nightly)


def test_a_night_has_a_share_of_the_rates_that_are_set_or_one_by_its_length(night: Night) -> None:
    optim = {"kind": "muon", "lr": 0.01, "muon_lr": 0.02, "head_lr": None}
    sections = {"pretrain": {"optim": optim}, "nightly": {"rate": 0.3}}
    scaled = night.inputs(sections).settings.pretrain.optim
    assert (scaled.lr, scaled.muon_lr, scaled.head_lr) == (0.003, 0.006, None)
    automatic = night.inputs({"nightly": {"rate": "auto"}}).settings.pretrain
    assert automatic.schedule.full_rate_steps == night_inputs.FULL_RATE_STEPS


def test_sft_continues_the_champions_model_with_a_sample_of_known_chats(night: Night) -> None:
    sections = {"nightly": {"sft_base": "champion", "chats": "new"}}
    inputs = night.inputs(sections, chats=("shards-sft/c",))
    stages, [replayed] = stages_of(inputs), inputs.replayed_chats
    assert stages["sft"]["base"].key == "q" and stages["sft"]["replay"] == "replay-sft"
    assert stages["replay-sft"] == {"documents": "shards-sft", "learnt-0000": replayed}
    assert stages["lora"]["base"] == "sft"
    # without new chats its SFT model stays
    inputs = night.inputs(sections, without="sft", chats=("shards-sft/c",))
    assert inputs.replacements["sft"].key == "q" and not inputs.replayed_chats
    stages = stages_of(inputs)
    assert {"sft", "replay-sft"}.isdisjoint(stages) and stages["lora"]["base"].key == "q"


def test_an_adapter_stays_with_its_model_for_training_and_evaluation(night: Night) -> None:
    stages = stages_of(night.inputs({"nightly": {"lora_base": "champion"}}))
    assert stages["lora"]["base"].key == stages["evaluate"]["base_of_lora"].key == "q"
    assert "base_of_lora" not in stages["evaluate-champion"]
    stages = stages_of(night.inputs({}, keys={"lora": "a0"}))  # an adapter of an earlier model
    assert stages["evaluate-champion"]["base_of_lora"].key == "q0"
    assert "base_of_lora" not in stages["evaluate"]
