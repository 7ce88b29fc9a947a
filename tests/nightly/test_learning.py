"""How a night learns: from which state, with which budget, which chats, and which models SFT and LoRA start from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, sources_in

from ttrain.config import Nightly, Settings
from ttrain.flows.night_plan import night_graph
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

TRAINED = {"pretrain.schedule.kind": "infinite", "pretrain.optim.kind": "muon"}


def publish(store: ArtifactStore, stage: str, key: str, *files: str, **manifest: Any) -> Artifact:
    return artifact(store, stage, key, dict.fromkeys(files, "{}"), **manifest)


def reference(stage: str, key: str) -> dict[str, str]:
    return {"stage": stage, "key": key, "content": ""}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """The champion is version 7: its base left a plateau, its adapter belongs to its SFT model."""
    store = ArtifactStore(tmp_path / "home")
    publish(store, "tokenizer", "t", "tokenizer.json")
    for stage, key in (("shards-pretrain", "d"), ("shards-sft", "c")):
        publish(store, stage, key, "train/index.json")
    publish(
        store,
        "pretrain",
        "p",
        "model/model.safetensors",
        "plateau/model.safetensors",
        "plateau/optimizer.safetensors",
        inputs={"shards": reference("shards-pretrain", "d")},
        ingredients={"files": {}, "settings": TRAINED},
    )
    publish(
        store,
        "pretrain",
        "old",
        "model/model.safetensors",
        ingredients={"files": {}, "settings": {}},
    )
    publish(
        store,
        "sft",
        "q",
        "model/model.safetensors",
        inputs={"shards": reference("shards-sft", "c")},
    )
    publish(store, "sft", "q0", "model/model.safetensors")
    publish(
        store,
        "lora",
        "a",
        "adapter/adapter_model.safetensors",
        inputs={"base": reference("sft", "q")},
    )
    publish(
        store,
        "lora",
        "a0",
        "adapter/adapter_model.safetensors",
        inputs={"base": reference("sft", "q0")},
    )
    return store


KEYS = {"tokenizer": "t", "pretrain": "p", "sft": "q", "lora": "a"}


def settings_of(tmp_path: Path, **sections: Any) -> Settings:
    for name in ("docs", "chats", "domain"):
        (tmp_path / f"{name}.jsonl").write_text("{}", encoding="utf-8")
    data = {
        "pretrain": f"{tmp_path}/docs.jsonl",
        "sft": f"{tmp_path}/chats.jsonl",
        "lora": f"{tmp_path}/domain.jsonl",
    }
    return Settings.model_validate({"data": data, **sections})


def inputs(
    store: ArtifactStore,
    settings: Settings,
    keys: Mapping[str, str] = KEYS,
    *,
    without: str = "",
    **snapshot: Any,
) -> NightInputs:
    files = night_inputs.watched_files(settings, store, may_be_gone=True)
    files = {name: [] if name == without else entries for name, entries in files.items()}
    frozen = InputSnapshot(files, settings.model_dump(mode="json"), Champion("7", keys), **snapshot)
    return night_inputs.inputs_of(frozen, settings, store)


def stages_of(found: NightInputs) -> dict[str, dict[str, Any]]:
    return sources_in(night_graph(found))


def infinite(tmp_path: Path, nightly: Mapping[str, Any] | None = None, **pretrain: Any) -> Settings:
    return settings_of(
        tmp_path, pretrain={"schedule": {"kind": "infinite"}, **pretrain}, nightly=nightly or {}
    )


def test_a_night_continues_the_plateau_of_the_champion_without_a_warm_up(
    store: ArtifactStore, tmp_path: Path
) -> None:
    found = inputs(store, infinite(tmp_path))
    assert found.plateau and found.plateau.key == "p" and not found.note
    assert (
        found.settings.pretrain.schedule.warmup_steps == 0
        and found.settings.pretrain.schedule.kind == "infinite"
    )
    assert stages_of(found)["pretrain"]["plateau"] is found.plateau
    another = inputs(store, settings_of(tmp_path))  # schedule warms up again and says nothing
    assert another.plateau is None and another.note == ""


@pytest.mark.parametrize(
    ("key", "sections", "why"),
    [
        ("old", {}, "no plateau of pretrain.optim.kind muon (it was unknown)"),
        (
            "p",
            {"optim": {"kind": "adamw"}},
            "no plateau of pretrain.optim.kind adamw (it was muon)",
        ),
    ],
)
def test_a_champion_whose_plateau_cannot_be_continued_is_warmed_up_with_a_message(
    store: ArtifactStore, tmp_path: Path, key: str, sections: dict[str, Any], why: str
) -> None:
    found = inputs(store, infinite(tmp_path, **sections), {**KEYS, "pretrain": key})
    assert found.plateau is None and why in found.note and "version 7" in found.note
    assert (
        found.settings.pretrain.schedule.warmup_steps is None
        and "plateau" not in stages_of(found)["pretrain"]
    )


def test_shards_and_replay_are_told_what_earlier_nights_hold_out(
    store: ArtifactStore, tmp_path: Path
) -> None:
    earlier = publish(store, "heldout", "h", "heldout/index.json")
    settings, documents = settings_of(tmp_path), ("shards-pretrain/d",)
    stages = stages_of(inputs(store, settings, heldout="heldout/h", documents=documents))
    for name in ("shards-pretrain", "replay", "heldout"):
        assert stages[name]["earlier"].key == earlier.key
    assert stages["replay"]["tokenizer"].key == "t"
    assert "earlier" not in stages["shards-sft"] and "earlier" not in stages["shards-lora"]
    alone = stages_of(inputs(store, settings, documents=documents))
    assert alone["shards-pretrain"].keys() == {"tokenizer", "learnt-0000"}
    assert alone["replay"].keys() == {"documents", "learnt-0000"}


def test_a_night_that_does_not_look_for_known_documents_holds_out_the_least_share(
    store: ArtifactStore, tmp_path: Path
) -> None:
    """`auto` is more of few new rows: rows that the champion was trained on could be among them."""
    shares = {
        near: inputs(
            store, settings_of(tmp_path, reading={"near_duplicates": near})
        ).settings.reading.heldout_fraction
        for near in (None, 0.8, 0.0)
    }
    assert shares == {None: "auto", 0.8: "auto", 0.0: 0.02}
    set_share = settings_of(tmp_path, reading={"near_duplicates": 0.0, "heldout_fraction": 0.3})
    assert inputs(store, set_share).settings.reading.heldout_fraction == 0.3


def test_a_night_has_its_own_budget_and_one_from_scratch_that_of_pretraining(
    store: ArtifactStore, tmp_path: Path
) -> None:
    for nightly, budget in (
        ({}, ("auto", None)),
        ({"tokens": "50k"}, (50_000, None)),
        ({"epochs": 1.5}, (None, 1.5)),
    ):
        pretrain = inputs(store, settings_of(tmp_path, nightly=nightly)).settings.pretrain
        assert (pretrain.tokens, pretrain.epochs) == budget
    found = inputs(store, infinite(tmp_path, {"epochs": 1, "start_from": "scratch"}))
    assert found.settings.pretrain.tokens == "auto" and found.plateau is None
    assert found.settings.pretrain.optim == Settings().pretrain.optim
    with pytest.raises(
        ValueError, match=r"nightly\.tokens is 5 and nightly\.epochs is 1\.0; set one"
    ):
        Nightly(tokens=5, epochs=1)


def test_a_night_has_a_share_of_the_rates_whichever_are_set_or_one_by_its_length(
    store: ArtifactStore, tmp_path: Path
) -> None:
    optim = {"optim": {"kind": "muon", "lr": 0.01, "muon_lr": 0.02, "head_lr": None}}
    found = inputs(
        store, settings_of(tmp_path, pretrain=optim, nightly={"rate": 0.3})
    ).settings.pretrain.optim
    assert (found.lr, found.muon_lr, found.head_lr, found.kind) == (0.003, 0.006, None, "muon")
    pretrain = inputs(store, infinite(tmp_path, {"rate": "auto"})).settings.pretrain
    assert pretrain.optim == Settings().pretrain.optim
    assert pretrain.schedule.full_rate_steps == night_inputs.FULL_RATE_STEPS
    assert inputs(store, infinite(tmp_path)).settings.pretrain.schedule.full_rate_steps is None


def test_sft_and_lora_start_anew_from_the_models_of_the_night(
    store: ArtifactStore, tmp_path: Path
) -> None:
    stages = stages_of(inputs(store, settings_of(tmp_path)))
    assert (stages["sft"]["base"], stages["lora"]["base"]) == (
        "pretrain",
        "sft",
    ) and "replay-sft" not in stages
    assert not {name for name in stages["evaluate"] if name.startswith("base_of")}


def test_sft_continues_the_champion_s_model_with_a_sample_of_learnt_chats(
    store: ArtifactStore, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, nightly={"sft_base": "champion", "chats": "new"})
    found = inputs(store, settings, chats=("shards-sft/c",))
    stages = stages_of(found)
    assert stages["sft"]["base"].key == "q" and stages["sft"]["replay"] == "replay-sft"
    assert stages["replay-sft"] == {
        "documents": "shards-sft",
        "learnt-0000": found.replayed_chats[0],
    }
    assert stages["lora"]["base"] == "sft"
    found = inputs(
        store, settings, without="sft", chats=("shards-sft/c",)
    )  # without new chats its SFT model stays
    assert found.replacements["sft"].key == "q" and not found.replayed_chats
    assert {"sft", "replay-sft"}.isdisjoint(stages_of(found)) and stages_of(found)["lora"][
        "base"
    ].key == "q"


def test_an_adapter_stays_with_its_model_which_the_evaluation_is_told(
    store: ArtifactStore, tmp_path: Path
) -> None:
    stages = stages_of(inputs(store, settings_of(tmp_path, nightly={"lora_base": "champion"})))
    assert stages["lora"]["base"].key == stages["evaluate"]["base_of_lora"].key == "q"
    assert stages["sft"]["base"] == "pretrain" and "base_of_lora" not in stages["evaluate-champion"]
    earlier = stages_of(
        inputs(store, settings_of(tmp_path), {**KEYS, "lora": "a0"})
    )  # an adapter of an earlier model
    assert (
        earlier["evaluate-champion"]["base_of_lora"].key == "q0"
        and "base_of_lora" not in earlier["evaluate"]
    )
    gone = publish(
        store,
        "lora",
        "b",
        "adapter/adapter_model.safetensors",
        inputs={"base": reference("sft", "gone")},
    )
    assert store.input_of(gone, "base") is None, "a base that was removed"


def watched(*names: str) -> dict[str, list[dict[str, Any]]]:
    return {"sft": [{"location": f"{name}.jsonl", "sha256": name} for name in names]}


@pytest.mark.parametrize(
    ("nightly", "files", "chosen"),
    [
        ({}, "ab", "ab"),
        ({"chats": "new"}, "ab", "b"),
        ({"chats": "new"}, "a", "a"),  # a new base that would learn no chat at all
        ({"chats": "new", "sft_base": "champion"}, "a", ""),
    ],
)
def test_new_chats_are_those_that_the_champion_has_not_learnt(
    nightly: dict[str, Any], files: str, chosen: str
) -> None:
    selected, _ = night_inputs.select_files(
        Nightly(**nightly), watched(*files), {"a"}, {"a"}, has_champion=True
    )
    assert "".join(file["sha256"] for file in selected["sft"]) == chosen
