"""The inputs of a night that continues: changed files, corrected settings, missing sets."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.night_files import artifact, completed, inbox, list_of

from ttrain.config import Nightly
from ttrain.errors import ArtifactError
from ttrain.flows import night_plan
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.records import Champion, InputSnapshot, Nights
from ttrain.store.artifacts import ArtifactStore


@pytest.mark.parametrize(
    "expected",
    [({"replay": 0.3}, ["new"], 0.3, True), ({"data": "all"}, ["new", "old"], 0.05, False)],
)
def test_after_a_failure_the_current_settings_choose_what_a_night_reads(
    expected: tuple[dict[str, Any], list[str], float, bool],
    tmp_path: Path,
    store: ArtifactStore,
    champion: Champion,
    known: Nights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nightly, files, replay, documents = expected
    before = list_of(inbox(tmp_path, old="1"), store, champion)
    completed(known, before, "promoted", "8", documents="shards-pretrain/s")
    monkeypatch.setattr(night_plan, "current_champion", lambda *_: Champion("8", champion.keys))
    settings = inbox(tmp_path, new="2")
    first, _ = night_plan.choose_inputs(settings, store, known, None)
    assert first is not None and first.settings["nightly"]["replay"] == 0.05
    night = known.begin(first, None)
    night.end_try("failed", "", closed=False)
    corrected = settings.model_copy(update={"nightly": Nightly.model_validate(nightly)})
    frozen, reason = night_plan.choose_inputs(corrected, store, known, night)
    assert frozen is not None and "new.jsonl" in reason
    assert sorted(Path(file["location"]).stem for file in frozen.files["pretrain"]) == files
    assert (frozen.settings["nightly"]["replay"], bool(frozen.documents)) == (replay, documents)
    night.begin_try(None)
    night.end_try("crashed", "", closed=False)
    again, _ = night_plan.choose_inputs(corrected, store, known, night)
    assert again == frozen, "killed while it chose"
    deadline = settings.model_copy(update={"nightly": Nightly(deadline="07:30")})
    same, reason = night_plan.choose_inputs(deadline, store, known, night)
    assert same is not None and "new.jsonl" not in reason
    assert replace(same, settings=first.settings) == first


def test_a_night_stops_if_a_set_that_it_has_to_read_is_gone_and_the_next_does_without(
    tmp_path: Path, store: ArtifactStore, champion: Champion, caplog: Any, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1")
    artifact(store, "shards-pretrain", "own", {"train/index.json": "{}"})
    before = InputSnapshot({}, {}, champion, documents=("shards-pretrain/s",))
    night = completed(known, before, "promoted", "8", documents="shards-pretrain/own")
    listed = replace(list_of(settings, store, champion), documents=night.learnt_shards("pretrain"))
    assert len(night_inputs.inputs_of(listed, settings, store).learnt) == 2
    shutil.rmtree(store.path("shards-pretrain", "own"))
    with pytest.raises(ArtifactError, match="shards-pretrain own"):
        night_inputs.inputs_of(listed, settings, store)
    now = Champion("8", champion.keys)
    learnt = night_inputs.learnt_shards("pretrain", now, known.newest_first(), store)
    assert learnt == ("shards-pretrain/s",)
    assert len(caplog.records) == 1
