"""What a night reads: files, settings, the champion's artifacts, held-out documents."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, completed, frozen, inbox, list_of

from ttrain.config import Nightly, Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.errors import ArtifactError
from ttrain.flows import night_plan
from ttrain.nightly import decision, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact


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
    def learnt(champion: Champion | None) -> list[str]:
        references = night_inputs.learnt_shards("pretrain", champion, known.newest_first(), store)
        return [reference.removeprefix("shards-pretrain/") for reference in references]

    def of_version(number: int) -> Champion:
        return Champion(str(number), champion.keys)

    assert (learnt(None), learnt(champion)) == ([], ["s"]), "without a night, of the base model"
    for number, own in enumerate(("b", None, "c", "gone"), start=1):  # None: it keeps the base
        if own and own != "gone":
            artifact(store, "shards-pretrain", own, {"train/index.json": "{}"})
        before = tuple(f"shards-pretrain/{key}" for key in learnt(of_version(number)))
        listed = InputSnapshot({}, {}, champion, documents=before)
        made = own and f"shards-pretrain/{own}"
        completed(known, listed, "promoted", str(number + 1), documents=made)
    for number, keys in {1: "s", 2: "sb", 3: "sb", 5: "sbc"}.items():
        assert learnt(of_version(number)) == [*keys]


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
