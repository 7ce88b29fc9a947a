"""The inputs of a night that goes on: files that changed meanwhile, settings that were corrected, sets that are gone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, completed, inbox, list_of, sources_in

from ttrain.config import Nightly, Settings
from ttrain.engine.planner import plan
from ttrain.errors import ArtifactError
from ttrain.flows import night_plan
from ttrain.nightly import heldout
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.records import Champion, InputSnapshot, NightRecord, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.runs import RunRecord


def unfinished(known: Nights, listed: InputSnapshot, store: ArtifactStore, outcome: str, **keys: str) -> NightRecord:
    """A night with this list whose try ended so, after its run had made the stages with these keys."""
    night = known.begin(listed, None)
    run = RunRecord(store.root, "nightly", [name.replace("_", "-") for name in keys], {})
    for name, key in keys.items():
        run.stage(name.replace("_", "-"), key=key)
    night.note_try(run=run.run)
    night.end_try(outcome, "the deadline was reached", closed=False)
    return night


def shards_of(store: ArtifactStore, listed: InputSnapshot, key: str) -> None:
    """Shards of the list's documents."""
    read = {"files": {"train": [{"name": "a", "sha256": file["sha256"]} for file in listed.files["pretrain"]]}}
    of = {"tokenizer": {"stage": "tokenizer", "key": "t", "content": ""}}
    files = {"heldout/index.json": "{}", "train/index.json": "{}"}
    artifact(store, "shards-pretrain", key, files, ingredients=read, inputs=of)


def night_with_shards(
    root: Path, store: ArtifactStore, known: Nights, outcome: str, champion: Champion | None = None, **keys: str
) -> tuple[Settings, InputSnapshot, NightRecord]:
    """A night over two files whose try ended so after it had made their shards."""
    settings = inbox(root, a="1", b="2")
    listed = list_of(settings, store, champion)
    shards_of(store, listed, "made")
    return settings, listed, unfinished(known, listed, store, outcome, **keys, shards_pretrain="made")


@pytest.mark.parametrize("change", ["grew", "gone"])
def test_a_night_whose_shards_are_made_goes_on_with_them_whatever_becomes_of_a_file(
    change: str, tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings, listed, night = night_with_shards(tmp_path, store, known, "unfinished", champion)
    becomes(tmp_path / "inbox/b.jsonl", change)
    for _ in range(2):  # and in the slot after the next one
        frozen, reason = night_plan.choose_inputs(settings, store, known, night)
        assert frozen is not None and frozen.files == listed.files and "changed or gone since it began: b.jsonl" in reason
        assert frozen.shards == {"pretrain": "shards-pretrain/made"}
        night.freeze(frozen)
    inputs = night_inputs.inputs_of(night.frozen, settings, store)
    stages = sources_in(night_plan.night_graph(inputs))
    assert "shards-pretrain" not in stages and stages["pretrain"]["shards"].key == "made"
    assert stages["evaluate"]["documents"].key == "made"


def becomes(file: Path, change: str) -> None:
    file.unlink() if change == "gone" else file.write_text("2\n3", encoding="utf-8")


@pytest.mark.parametrize("change", ["grew", "gone"])
def test_a_first_night_goes_on_with_the_tokenizer_of_its_shards(
    change: str, tmp_path: Path, store: ArtifactStore, known: Nights
) -> None:
    """Which is made of the same files."""
    artifact(store, "tokenizer", "t", {"tokenizer.json": "{}"})
    settings, _, night = night_with_shards(tmp_path, store, known, "unfinished", tokenizer="t")
    becomes(tmp_path / "inbox/b.jsonl", change)
    planned = night_plan.choose_inputs(settings, store, known, night)[0]
    assert planned is not None
    inputs = night_inputs.inputs_of(planned, settings, store)
    stages = {row.stage.name: row for row in plan(night_plan.night_graph(inputs), inputs.settings, store)}
    assert {"tokenizer", "shards-pretrain"}.isdisjoint(stages) and stages["pretrain"].state == "run"
    assert inputs.replacements["tokenizer"].key == "t" and inputs.replacements["shards-pretrain"].key == "made"


@pytest.mark.parametrize("correction", ["reading", "shards"])
def test_shards_that_were_made_with_other_settings_are_not_gone_on_with(
    correction: str, tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings, listed, night = night_with_shards(tmp_path, store, known, "failed")
    change = {"reading": {"text_field": "body"}, "shards": {"overlap_share": 0.9}}[correction]
    corrected = Settings.model_validate({**settings.model_dump(), correction: change})
    (tmp_path / "inbox/b.jsonl").write_text("2\n3", encoding="utf-8")
    frozen, _ = night_plan.choose_inputs(corrected, store, known, night)
    assert frozen is not None and frozen.shards == {}
    night.begin_try(None)
    night.freeze(frozen)
    assert len(night.tries_with_inputs) == 1
    night.end_try("unfinished", "", closed=False)
    (tmp_path / "inbox/b.jsonl").write_text("2", encoding="utf-8")  # as it was when the shards were made
    night.freeze(replace(frozen, files=listed.files))
    (tmp_path / "inbox/b.jsonl").unlink()
    frozen, _ = night_plan.choose_inputs(corrected, store, known, night)
    assert frozen is not None and frozen.shards == {} and len(frozen.files["pretrain"]) == 1


def test_what_the_settings_name_no_more_after_a_failure_is_not_learnt(
    tmp_path: Path, store: ArtifactStore, known: Nights
) -> None:
    settings, _, night = night_with_shards(tmp_path, store, known, "failed")
    alone = {**settings.model_dump()["data"], "pretrain": str(tmp_path / "inbox/a.jsonl")}
    frozen, _ = night_plan.choose_inputs(settings.model_validate({"data": alone}), store, known, night)
    assert frozen is not None and frozen.shards == {}
    assert [Path(file["location"]).name for file in frozen.files["pretrain"]] == ["a.jsonl"]


def test_a_damaged_file_of_one_data_set_leaves_the_shards_of_another(tmp_path: Path, store: ArtifactStore) -> None:
    settings = inbox(tmp_path, a="1")
    listed = list_of(settings, store, Champion("8", {}))
    more = {"location": str(tmp_path / "bad.jsonl"), "sha256": "bad"}
    chats = {**listed.files, "sft": [*listed.files["sft"], more]}
    frozen = replace(listed, files=chats, shards={"pretrain": "shards-pretrain/made"})
    smaller = night_inputs.smaller_snapshot(frozen, [more["location"]], set())
    assert smaller is not None and smaller.files["sft"] == listed.files["sft"]
    assert smaller.shards == {"pretrain": "shards-pretrain/made"}


@pytest.mark.parametrize("key", ["never-made", "of-other-files"])
def test_a_night_without_shards_of_its_files_reads_a_file_as_it_is_now(
    key: str, tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1", b="2")
    listed = list_of(settings, store, champion)
    shards_of(store, replace(listed, files={"pretrain": listed.files["pretrain"][:1]}), "of-other-files")
    night = unfinished(known, listed, store, "unfinished", shards_pretrain=key)
    (tmp_path / "inbox/b.jsonl").write_text("2\n3", encoding="utf-8")
    frozen, _ = night_plan.choose_inputs(settings, store, known, night)
    assert frozen is not None and frozen.shards == {} and len(frozen.files["pretrain"]) == 2
    assert frozen.files["pretrain"] == list_of(settings, store).files["pretrain"]


@pytest.mark.parametrize(
    ("nightly", "files", "replay", "documents"),
    [
        ({"replay": 0.0}, ["new"], 0.0, True),
        ({"replay": 0.3}, ["new"], 0.3, True),
        ({"data": "all"}, ["new", "old"], 0.0, False),
        ({"start_from": "scratch"}, ["new", "old"], 0.0, False),
    ],
)
def test_after_a_failure_the_current_settings_choose_what_a_night_reads(
    nightly: Mapping[str, Any], files: list[str], replay: float, documents: bool,
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    settings = inbox(tmp_path, old="1")
    completed(known, list_of(settings, store, champion), "promoted", "8")
    next(known.newest_first()).note(documents="shards-pretrain/s")
    monkeypatch.setattr(night_plan, "current_champion", lambda *_: Champion("8", champion.keys))
    settings = inbox(tmp_path, new="2")
    first, _ = night_plan.choose_inputs(settings, store, known, None)
    assert first is not None and first.replay == 0.05
    night = unfinished(known, first, store, "failed")
    corrected = settings.model_copy(update={"nightly": Nightly.model_validate(nightly)})
    frozen, reason = night_plan.choose_inputs(corrected, store, known, night)
    assert frozen is not None
    assert "with the current settings, by which its inputs are chosen anew: 1 new: new.jsonl" in reason
    assert sorted(Path(file["location"]).stem for file in frozen.files["pretrain"]) == files
    assert (frozen.replay, bool(frozen.documents)) == (replay, documents)
    night.begin_try(None)
    night.end_try("crashed", "its process was killed", closed=False)
    assert night_plan.choose_inputs(corrected, store, known, night)[0] == frozen, "killed while it chose"
    deadline = settings.model_copy(update={"nightly": Nightly(deadline="07:30")})
    same, reason = night_plan.choose_inputs(deadline, store, known, night)
    assert same is not None and "chosen anew" not in reason and replace(same, settings=first.settings) == first


def test_a_night_that_has_to_read_a_set_that_is_gone_stops(
    tmp_path: Path, store: ArtifactStore, champion: Champion, caplog: pytest.LogCaptureFixture, known: Nights
) -> None:
    """Instead of going on with other rows; the next night does without, and says so."""
    settings = inbox(tmp_path, a="1")
    artifact(store, "shards-pretrain", "own", {"train/index.json": "{}"})
    night = known.begin(InputSnapshot({}, {}, champion, documents=("shards-pretrain/s",)), None)
    night.note(version="8", documents="shards-pretrain/own")
    night.end_try("promoted", "", closed=True)
    listed = replace(list_of(settings, store, champion), documents=night.learnt_shards("pretrain"), replay=0.05)
    assert len(night_inputs.inputs_of(listed, settings, store).replayed) == 2
    shutil.rmtree(store.path("shards-pretrain", "own"))
    told = r"reads shards-pretrain own, which is not in .*store, or is damaged; restore it"
    with pytest.raises(ArtifactError, match=told):
        night_inputs.inputs_of(listed, settings, store)
    with caplog.at_level(logging.WARNING, "ttrain"):
        learnt = night_inputs.learnt_shards("pretrain", Champion("8", champion.keys), known.newest_first(), store)
    assert learnt == ("shards-pretrain/s",) and "1 of 2 sets that version 8 has learnt are not in the store" in caplog.text


def test_where_sft_reads_all_chats_again_none_of_them_is_replayed(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = inbox(tmp_path, a="1").model_copy(update={"nightly": Nightly(chats="new")})
    completed(known, list_of(settings, store, champion), "promoted", "8")
    artifact(store, "shards-sft", "c", {"train/index.json": "{}"})
    next(known.newest_first()).note(chats="shards-sft/c")
    monkeypatch.setattr(night_plan, "current_champion", lambda *_: Champion("8", champion.keys))
    inbox(tmp_path, b="2")
    frozen, _ = night_plan.choose_inputs(settings, store, known, None)
    assert frozen is not None and len(frozen.files["sft"]) == 1 and frozen.chats == ()
    (tmp_path / "chats.jsonl").write_text("more", encoding="utf-8")
    frozen, _ = night_plan.choose_inputs(settings, store, known, None)
    assert frozen is not None and len(frozen.files["sft"]) == 1 and frozen.chats == ("shards-sft/c",)


def test_a_night_on_held_out_documents_of_the_user_does_not_end_those_of_the_nights(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1")
    own = settings.model_copy(update={"data": settings.data.model_copy(update={"pretrain_heldout": ("x.jsonl",)})})
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    for now, reference in ((settings, "heldout/h"), (own, "shards-pretrain/named")):
        night = known.begin(InputSnapshot({}, now.model_dump(mode="json"), champion), None)
        night.note(heldout=reference, heldout_nights=[night.name])
        night.end_try("promoted", "", closed=True)
    assert heldout.earlier_heldout(champion, known.newest_first(), store, settings) == ("heldout/h", ("night-000001",), "")
