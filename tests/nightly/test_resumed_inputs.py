"""The inputs of a night that continues: changed files, corrected settings, missing sets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.night_files import completed, inbox, list_of

from ttrain.config import Nightly
from ttrain.flows import night_plan
from ttrain.nightly.records import Champion, Nights
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
