"""What a night reads, how it trains: files, settings, the champion's artifacts, held-out sets."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, completed, frozen, inbox, list_of

from ttrain.config import Nightly, Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.errors import ArtifactError, UsageError
from ttrain.flows import night_plan
from ttrain.flows.night_plan import night_graph
from ttrain.nightly import decision, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

KEYS = {"tokenizer": "t", "pretrain": "p", "sft": "q", "lora": "a"}
INFINITE = {"schedule": {"kind": "infinite"}}
MODEL, ADAPTER = "model/model.safetensors", "adapter/adapter_model.safetensors"
TRAINED = {"pretrain.schedule.kind": "infinite", "pretrain.optim.kind": "muon"}


def names(snapshot: InputSnapshot) -> list[str]:
    return [Path(file["location"]).name for file in snapshot.files["pretrain"]]


def files_of(digests: str) -> list[dict[str, Any]]:
    return [{"location": f"/{digest}.jsonl", "sha256": digest} for digest in digests]


def test_files_are_new_to_the_champion() -> None:
    """It was trained on a, and a night that was kept read b."""
    for settings, documents, given_chats, chats in (
        ({}, "bc", "ab", "ab"),
        ({"again": False}, "c", "ab", "ab"),
        ({"data": "all"}, "abc", "ab", "ab"),
        ({"start_from": "scratch"}, "abc", "ab", "ab"),
        ({"chats": "new"}, "bc", "ab", "b"),
        ({"chats": "new"}, "bc", "a", "a"),  # a new base that would be trained on no chat at all
        ({"chats": "new", "sft_base": "champion"}, "bc", "a", ""),
    ):
        nightly = Nightly.model_validate(settings)
        watched = {"pretrain": files_of("abc"), "sft": files_of(given_chats)}
        known = ({"a", "b"}, {"a"})
        selected, _ = night_inputs.select_files(nightly, watched, *known, has_champion=True)
        assert selected == {"pretrain": files_of(documents), "sft": files_of(chats)}


def test_the_files_of_a_champion_follow_its_own_nights_and_a_rollback(known: Nights) -> None:
    completed(known, frozen("a"), "promoted", "1")
    completed(known, frozen("b", champion="1"), "promoted", "2")
    completed(known, frozen("c", champion="2"), "kept", "3")
    completed(known, frozen("d", champion="2"), "failed")
    assert known.read() == {"a", "b", "c"}, "of completed nights alone"
    # version 3 was kept by its metrics, and may be promoted by hand
    for version, digests in {"1": "a", "2": "ab", "3": "abc"}.items():
        assert known.learnt(Champion(version, {})) == {*digests}
    assert known.learnt(None) == set()


def test_the_night_of_a_champion_is_found_by_keys(known: Nights) -> None:
    for digest, version in (("a", "1"), ("b", "2"), ("c", "1")):
        notes = {"keys": {"pretrain": f"p{digest}"}}
        completed(known, frozen(digest), "promoted", version, **notes)
    for digest, version in (("a", "7"), ("b", "1"), ("c", "2")):
        champion = Champion(version, {"pretrain": f"p{digest}", "sft": "s"})
        assert known.learnt(champion) == {digest}


def test_a_night_starts_from_its_champion(
    tmp_path: Path, store: ArtifactStore, champion: Champion
) -> None:
    def inputs_of(settings: Settings) -> NightInputs:
        return night_inputs.inputs_of(list_of(settings, store, champion), settings, store)

    inputs = inputs_of(inbox(tmp_path))
    assert inputs.kept_base and inputs.replacements["pretrain"].key == "p", "no new documents"
    settings = inbox(tmp_path, a="1", b="2")
    inputs = inputs_of(settings)
    assert inputs.settings.pretrain.start_from == str(store.path("pretrain", "p") / "model")
    assert inputs.settings.tokenizer.existing == str(store.path("tokenizer", "t"))
    files = tuple(str(tmp_path / "inbox" / name) for name in ("a.jsonl", "b.jsonl"))
    assert inputs.settings.data.pretrain == files
    assert set(inputs.replacements) == {"tokenizer"} and not inputs.kept_base
    compared = {model: made.key for model, made in inputs.champion.items()}
    assert compared == {"base": "p", "sft": "q"}
    inputs = inputs_of(settings.model_copy(update={"nightly": Nightly(start_from="scratch")}))
    assert inputs.settings.pretrain.start_from == "none"
    (store.path("sft", "q") / "model" / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"7.*sft q.*promote"):
        inputs_of(settings)


def test_without_new_documents_the_first_model_that_differs_decides(store: ArtifactStore) -> None:
    def model(stage: str, text: str) -> Artifact:
        return artifact(store, stage, f"{stage}-{text}", {"model.txt": text})

    champion = {stage: model(stage, stage[0]) for stage in ("pretrain", "sft", "dpo", "lora")}
    by_model = {TRAINING_STAGES[name].model: made for name, made in champion.items()}
    replacements = {"pretrain": champion["pretrain"]}
    inputs = NightInputs(Settings(), champion=by_model, replacements=replacements)
    for contents, metric in (
        ("s2 d2 l2", "chat_loss_sft"),
        ("s d2 l2", "preference_accuracy/dpo"),
        ("s d l2", "domain_loss_lora"),
    ):
        texts = zip(("sft", "dpo", "lora"), contents.split(), strict=True)
        rules = decision.rules_of(inputs, {stage: model(stage, text) for stage, text in texts})
        assert rules.metric == metric and rules.higher_is_better == metric.startswith("preference")


def test_a_night_that_continues_keeps_its_settings(tmp_path: Path, store: ArtifactStore) -> None:
    before = Nightly(epochs=1, deadline_hours=3, sft_base="champion")
    settings = inbox(tmp_path, a="1").model_copy(update={"nightly": before})
    nightly = {"epochs": 2, "deadline_hours": 5, "attempts": 9}
    changed = {"sft": {"epochs": 3.0}, "runtime": {"threads": 1}, "nightly": nightly}
    now = Settings.model_validate({**settings.model_dump(), **changed})
    continued = night_inputs.settings_of(list_of(settings, store), now)
    assert continued.sft == settings.sft and continued.runtime.threads == 1
    assert continued.nightly == Nightly(epochs=1, deadline_hours=5, attempts=9, sft_base="champion")


def test_held_out_documents_are_those_of_the_last_night(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1")

    def earlier(now: Settings) -> night_inputs.EarlierHeldout:
        return night_inputs.earlier_heldout(champion, known.newest_first(), store, now)

    # before the first night, those of the champion's base model
    assert earlier(settings) == ("shards-pretrain/s", (night_inputs.BEFORE,), "")
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    nights = (night_inputs.BEFORE, "night-000001")
    notes = {"heldout": "heldout/h", "heldout_nights": [*nights]}
    completed(known, list_of(settings, store), "kept", **notes)
    assert earlier(settings) == ("heldout/h", nights, "")
    less = settings.replaced({"reading": {"heldout_fraction": 0.01}})
    assert earlier(less).reference is None, "some may be trained on from now on"
    assert "reading.heldout_fraction" in earlier(less).note
    (tmp_path / "x.jsonl").write_text("x", encoding="utf-8")
    named = settings.data.model_copy(update={"pretrain_heldout": (str(tmp_path / "x.jsonl"),)})
    own = settings.model_copy(update={"data": named})
    assert earlier(own) == ("heldout/h", (), ""), "neither trained on nor measured"
    shutil.rmtree(store.path("heldout", "h"))
    listed = replace(list_of(own, store), heldout="heldout/h")
    assert night_inputs.inputs_of(listed, own, store).earlier_heldout is None
    with pytest.raises(ArtifactError, match=r"night-000001 .*heldout h.*data\.pretrain_heldout"):
        earlier(settings)


def test_the_files_of_a_first_champion_are_read_from_its_artifacts(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, monkeypatch: Any
) -> None:
    assert night_inputs.learnt_by(champion, store) == {"f"}
    assert night_inputs.learnt_by(None, store) == set()
    settings = inbox(tmp_path, old="1")
    shutil.rmtree(store.path("shards-pretrain", "s"))
    read = {"files": {"train": [*list_of(settings, store).files["pretrain"]]}}
    artifact(store, "shards-pretrain", "s", {"heldout/index.json": "{}"}, ingredients=read)
    monkeypatch.setattr(night_plan, "current_champion", lambda *_: champion)
    inbox(tmp_path, new="2")
    assert names(night_plan.choose_inputs(settings, store, known, None)[0]) == ["new.jsonl"]


def test_the_documents_of_a_champion_are_those_of_its_nights_that_are_in_the_store(
    store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    def learnt(champion: Champion | None) -> tuple[str, ...]:
        return night_inputs.learnt_shards("pretrain", champion, known.newest_first(), store)

    assert learnt(None) == ()
    for key in "bc":
        artifact(store, "shards-pretrain", key, {"train/index.json": "{}"})
    for number, own in enumerate(("b", None, "c", "gone"), start=1):  # None: it keeps the base
        before = learnt(Champion(str(number), champion.keys))
        listed = InputSnapshot({}, {}, champion, documents=before)
        made = own and f"shards-pretrain/{own}"
        completed(known, listed, "promoted", str(number + 1), documents=made)
    for version, keys in {"1": "s", "2": "sb", "3": "sb", "5": "sbc"}.items():
        expected = tuple(f"shards-pretrain/{key}" for key in keys)
        assert learnt(Champion(version, champion.keys)) == expected


def test_the_keys_that_the_next_nights_need(known: Nights, tmp_path: Path) -> None:
    for number in "12":
        notes = {"heldout": f"heldout/h{number}", "documents": f"shards-pretrain/s{number}"}
        completed(known, frozen(number), "promoted", **notes)
    assert records.needed_keys(tmp_path) == {"h2", "s1", "s2"}, "version 1 may be promoted again"
    champion = Champion("2", {"sft": "q", "pretrain": "p"})
    documents = ("shards-pretrain/s1", "shards-pretrain/s2")
    known.begin(InputSnapshot({}, {}, champion, "heldout/h2", documents=documents), None)
    assert records.needed_keys(tmp_path) == {"h2", "s1", "s2", "q", "p"}


def test_a_refreshed_list_follows_renames_only(tmp_path: Path, store: ArtifactStore) -> None:
    settings = inbox(tmp_path, a="1", b="2", c="3")
    before = list_of(settings, store)
    (tmp_path / "inbox/a.jsonl").rename(tmp_path / "inbox/z.jsonl")
    (tmp_path / "inbox/c.jsonl").unlink()
    now = list_of(inbox(tmp_path, b="another", new="4"), store).files
    refreshed, changed = night_inputs.refreshed_snapshot(before, now)
    assert [Path(name).name for name in changed] == ["b.jsonl", "c.jsonl"]
    assert names(refreshed) == ["z.jsonl", "b.jsonl"]


def test_after_a_failure_the_current_settings_choose_what_a_night_reads(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, monkeypatch: Any
) -> None:
    before = list_of(inbox(tmp_path, old="1"), store, champion)
    completed(known, before, "promoted", "8", documents="shards-pretrain/s")
    monkeypatch.setattr(night_plan, "current_champion", lambda *_: Champion("8", champion.keys))
    settings = inbox(tmp_path, new="2")
    first, _ = night_plan.choose_inputs(settings, store, known, None)
    night = known.begin(first, None)
    night.end_try("failed", "", closed=False)
    corrected = settings.model_copy(update={"nightly": Nightly(data="all", replay=0.3)})
    chosen, _ = night_plan.choose_inputs(corrected, store, known, night)
    assert (names(first), names(chosen)) == (["new.jsonl"], ["new.jsonl", "old.jsonl"])
    assert chosen.settings["nightly"]["replay"] == 0.3 and not chosen.documents
    night.begin_try(None)
    night.end_try("crashed", "", closed=False)
    again, _ = night_plan.choose_inputs(corrected, store, known, night)
    assert again == chosen, "killed while it chose"


def publish(
    store: ArtifactStore, stage: str, key: str, *files: str, **inputs: dict[str, str]
) -> dict[str, str]:
    """Publish an artifact; returns how a manifest names it as an input."""
    settings = TRAINED if (stage, key) == ("pretrain", "p") else {}
    ingredients = {"files": {}, "settings": settings}
    contents = dict.fromkeys(files, "{}")
    artifact(store, stage, key, contents, ingredients=ingredients, inputs=inputs)
    return {"stage": stage, "key": key, "content": ""}


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
    """The champion's base left a plateau, its adapter belongs to its SFT model."""
    publish(store, "tokenizer", "t", "tokenizer.json")
    documents = publish(store, "shards-pretrain", "d", "train/index.json")
    chats = publish(store, "shards-sft", "c", "train/index.json")
    plateau = ("plateau/model.safetensors", "plateau/optimizer.safetensors")
    publish(store, "pretrain", "p", MODEL, *plateau, shards=documents)
    publish(store, "pretrain", "old", MODEL)
    for adapter, key, inputs in (("a", "q", {"shards": chats}), ("a0", "q0", {})):
        sft = publish(store, "sft", key, MODEL, **inputs)
        publish(store, "lora", adapter, ADAPTER, base=sft)
    data = {dataset: f"{tmp_path}/{dataset}.jsonl" for dataset in ("pretrain", "sft", "lora")}
    for path in data.values():
        Path(path).write_text("{}", encoding="utf-8")
    return Night(data, store)


def stages_of(inputs: NightInputs) -> dict[str, dict[str, Any]]:
    return {name: dict(node.sources) for name, node in night_graph(inputs).items()}


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


def test_the_champion_teaches_what_a_night_replays(night: Night) -> None:
    taught = {"pretrain": {**INFINITE, "teacher": "champion"}}
    stages = stages_of(night.inputs(taught, documents=("shards-pretrain/d",)))
    assert stages["pretrain"]["teacher"] == "teacher"
    assert stages["teacher"]["replay"] == "replay" and stages["teacher"]["by-0"].key == "p"
    stages = stages_of(night.inputs(taught))  # nothing to replay
    assert "teacher" not in stages and "teacher" not in stages["pretrain"]
    for teacher, replay in (("previous", 0.05), ("champion", 0)):
        tree = {"pretrain": {"teacher": teacher}, "nightly": {"replay": replay}}
        with pytest.raises(UsageError, match="the teacher of a night is the champion"):
            night_plan.check(Settings.model_validate(tree))


def test_without_near_duplicates_a_night_holds_out_the_least_share(night: Night) -> None:
    """Rows that the champion was trained on could be among the larger share of `auto`."""
    for nearness, fraction, share in ((0.8, "auto", "auto"), (0, "auto", 0.02), (0, 0.3, 0.3)):
        reading = {"near_duplicates": nearness, "heldout_fraction": fraction}
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
