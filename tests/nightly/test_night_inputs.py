"""What a night reads: files, settings, the champion's artifacts, held-out documents of all nights."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.night_files import artifact, completed, frozen, inbox, list_of

from ttrain.config import Nightly, Settings
from ttrain.config.training import TRAINING_STAGES
from ttrain.errors import ArtifactError, NothingNew
from ttrain.flows import night_plan
from ttrain.nightly import decision, records
from ttrain.nightly import inputs as night_inputs
from ttrain.nightly.inputs import NightInputs
from ttrain.nightly.records import Champion, InputSnapshot, Nights
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact


def watched(*digests: str, chats: str = "c") -> dict[str, list[dict[str, Any]]]:
    return {**frozen(*digests).files, "sft": [{"location": "/chats.jsonl", "sha256": chats}]}


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({}, ["kept", "new"]),
        ({"again": False}, ["new"]),
        ({"data": "all"}, ["learnt", "kept", "new"]),
        ({"start_from": "scratch"}, ["learnt", "kept", "new"]),
    ],
)
def test_documents_are_those_that_the_champion_has_not_learnt(
    settings: dict[str, Any], reads: list[str]
) -> None:
    files, _ = night_inputs.select_files(
        Nightly(**settings),
        watched("learnt", "kept", "new"),
        {"learnt", "kept", "c"},
        {"learnt", "c"},
        has_champion=True,
    )
    assert [file["sha256"] for file in files["pretrain"]] == reads
    assert [file["sha256"] for file in files["sft"]] == [
        "c"
    ]  # all chats, since each night has another base


def test_what_made_the_champion_follows_its_own_nights_and_a_rollback(known: Nights) -> None:
    completed(known, frozen("a"), "promoted", "1")
    completed(known, frozen("b", champion="1"), "promoted", "2")
    completed(known, frozen("c", champion="2"), "kept", "3")
    completed(known, frozen("d", champion="2"), "failed")
    assert known.read() == {"a", "b", "c"}  # of completed nights alone
    assert known.learnt(Champion("2", {})) == {"a", "b"}
    assert known.learnt(Champion("1", {})) == {"a"}
    assert known.learnt(None) == set()
    assert known.learnt(Champion("3", {})) == {
        "a",
        "b",
        "c",
    }  # kept by its figures, promoted by hand
    completed(
        known, frozen("e", champion="4"), "promoted", "4"
    )  # such a circle is not made, and must not hang
    assert known.learnt(Champion("4", {})) == {"e"}


def test_the_night_of_a_champion_is_found_by_its_models_where_a_new_registry_counts_anew(
    known: Nights, store: ArtifactStore
) -> None:
    for digest, version in (("a", "1"), ("b", "2"), ("c", "1")):
        artifact(store, "shards-pretrain", f"of-{digest}", {"train/index.json": digest})
        notes = {"keys": {"pretrain": f"p{digest}"}, "documents": f"shards-pretrain/of-{digest}"}
        completed(known, frozen(digest), "promoted", version, **notes)
    for digest, version in (("a", "7"), ("b", "1"), ("c", "2")):
        champion = Champion(version, {"pretrain": f"p{digest}", "sft": "s"})
        assert known.learnt(champion) == {digest}
        learnt = night_inputs.learnt_shards("pretrain", champion, known.newest_first(), store)
        assert learnt == (f"shards-pretrain/of-{digest}",)


def test_a_night_starts_from_the_champion_s_tokenizer_and_base_or_from_scratch(
    tmp_path: Path, store: ArtifactStore, champion: Champion
) -> None:
    empty = inbox(tmp_path)
    inputs = night_inputs.inputs_of(list_of(empty, store, champion), empty, store)
    assert inputs.kept_base and inputs.replacements["pretrain"].key == "p", (
        "without new documents the base stays"
    )
    settings = inbox(tmp_path, a="1", b="2")
    inputs = night_inputs.inputs_of(list_of(settings, store, champion), settings, store)
    assert inputs.settings.pretrain.start_from == str(store.path("pretrain", "p") / "model")
    assert inputs.settings.tokenizer.existing == str(store.path("tokenizer", "t"))
    assert inputs.settings.data.pretrain == (
        str(tmp_path / "inbox/a.jsonl"),
        str(tmp_path / "inbox/b.jsonl"),
    )
    assert (
        set(inputs.replacements) == {"tokenizer"}
        and set(inputs.champion) == {"base", "sft"}
        and not inputs.kept_base
    )
    of_sft = {"base": {"stage": "sft", "key": "q", "content": ""}}
    artifact(store, "lora", "l", {"adapter/adapter_config.json": "{}"}, inputs=of_sft)
    with_adapter = replace(champion, keys={**champion.keys, "lora": "l"})
    compared = night_inputs.inputs_of(
        list_of(settings, store, with_adapter), settings, store
    ).champion
    assert {model: one.key for model, one in compared.items()} == {
        "base": "p",
        "sft": "q",
        "lora": "l",
    }
    scratch = settings.model_copy(update={"nightly": Nightly(start_from="scratch")})
    inputs = night_inputs.inputs_of(list_of(scratch, store, champion), scratch, store)
    assert inputs.settings.pretrain.start_from == "none" and set(inputs.replacements) == {
        "tokenizer"
    }
    (store.path("sft", "q") / "model" / "config.json").unlink()
    with pytest.raises(
        ArtifactError, match=r"version 7, needs the artifact sft q.*ttrain models promote"
    ):
        night_inputs.inputs_of(list_of(settings, store, champion), settings, store)


def test_without_new_documents_the_first_model_that_differs_decides(store: ArtifactStore) -> None:
    def models(**contents: str) -> dict[str, Artifact]:
        return {
            name: artifact(store, name, f"{name}-{text}", {"model.txt": text})
            for name, text in contents.items()
        }

    champion = models(pretrain="p", sft="s", dpo="d", lora="l")
    inputs = NightInputs(
        Settings(),
        champion={TRAINING_STAGES[name].model: made for name, made in champion.items()},
        replacements={"pretrain": champion["pretrain"]},
    )
    for tonight, metric in (
        ({"sft": "s2", "dpo": "d2", "lora": "l2"}, "chat_loss_sft"),
        ({"sft": "s", "dpo": "d2", "lora": "l2"}, "preference_accuracy/dpo"),
        ({"sft": "s", "dpo": "d", "lora": "l2"}, "domain_loss_lora"),
    ):
        rules = decision._rules(inputs, SimpleNamespace(artifacts=models(**tonight)))  # type: ignore[arg-type]
        assert rules.metric == metric and rules.higher_is_better == metric.startswith("preference")
    without = replace(
        inputs, champion={name: made for name, made in inputs.champion.items() if name != "dpo"}
    )
    tonight = SimpleNamespace(artifacts=models(sft="s", dpo="d2", lora="l2"))
    assert decision._rules(without, tonight).metric == "domain_loss_lora"  # type: ignore[arg-type]


def test_a_night_that_goes_on_keeps_its_settings_but_for_what_changes_no_result(
    tmp_path: Path, store: ArtifactStore
) -> None:
    then = Nightly(epochs=1, deadline_hours=3, sft_base="champion")
    settings = inbox(tmp_path, a="1").model_copy(update={"nightly": then})
    nightly = {"epochs": 2, "deadline_hours": 5, "attempts": 9}
    changed = {"sft": {"epochs": 3.0}, "runtime": {"threads": 1}, "nightly": nightly}
    found = night_inputs.settings_of(
        list_of(settings, store), Settings.model_validate({**settings.model_dump(), **changed})
    )
    assert found.sft == settings.sft and found.runtime.threads == 1
    assert found.nightly == Nightly(epochs=1, deadline_hours=5, attempts=9, sft_base="champion")


def test_a_list_that_goes_on_leaves_out_what_came_meanwhile_and_follows_renames(
    tmp_path: Path, store: ArtifactStore
) -> None:
    settings = inbox(tmp_path, a="1", b="2", c="3")
    before = list_of(settings, store)
    (tmp_path / "inbox/a.jsonl").rename(tmp_path / "inbox/z.jsonl")
    (tmp_path / "inbox/b.jsonl").write_text("another", encoding="utf-8")
    (tmp_path / "inbox/c.jsonl").unlink()
    (tmp_path / "inbox/new.jsonl").write_text("4", encoding="utf-8")
    now = night_inputs.watched_files(settings, store, may_be_gone=True)
    again, changed = night_inputs.refreshed_snapshot(before, now)
    assert [Path(name).name for name in changed] == ["b.jsonl", "c.jsonl"]
    assert [Path(file["location"]).name for file in again.files["pretrain"]] == [
        "z.jsonl",
        "b.jsonl",
    ]
    assert night_inputs.refreshed_snapshot(again, now) == (again, [])


def test_held_out_documents_are_those_of_the_last_completed_night(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    settings = inbox(tmp_path, a="1")

    def chosen(now: Settings) -> night_inputs.EarlierHeldout:
        return night_inputs.earlier_heldout(champion, known.newest_first(), store, now)

    of_base = chosen(settings)  # no night yet: those beside which the champion's base was trained
    assert of_base == ("shards-pretrain/s", (night_inputs.BEFORE,), "")
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    nights = (night_inputs.BEFORE, "night-000001")
    notes = {"heldout": "heldout/h", "heldout_nights": [*nights]}
    completed(known, list_of(settings, store), "kept", **notes)
    assert chosen(settings) == ("heldout/h", nights, "")
    less = Settings.model_validate({**settings.model_dump(), "reading": {"heldout_fraction": 0.01}})
    assert chosen(less).reference is None  # some may be learnt from now on
    assert "reading.heldout_fraction was auto and is 0.01: nothing is measured" in chosen(less).note
    (tmp_path / "x.jsonl").write_text("x", encoding="utf-8")
    named = settings.data.model_copy(update={"pretrain_heldout": (str(tmp_path / "x.jsonl"),)})
    own = settings.model_copy(update={"data": named})
    assert chosen(own) == ("heldout/h", (), ""), "they are not learnt, nor measured"
    shutil.rmtree(store.path("heldout", "h"))
    assert (
        night_inputs.inputs_of(
            replace(list_of(own, store), heldout="heldout/h"), own, store
        ).earlier_heldout
        is None
    )


def test_lost_held_out_documents_of_earlier_nights_stop_a_night_with_a_fix(
    tmp_path: Path, store: ArtifactStore, champion: Champion, known: Nights
) -> None:
    """Whether they are lost before a night begins or while it is unfinished."""
    settings = inbox(tmp_path, a="1")
    artifact(store, "heldout", "h", {"heldout/index.json": "{}"})
    completed(known, list_of(settings, store), "kept", heldout="heldout/h")
    unfinished = replace(list_of(settings, store, champion), heldout="heldout/h")
    shutil.rmtree(store.path("heldout", "h"))
    why = r"held-out documents heldout h, which is not in .*, or is damaged.*data\.pretrain_heldout"
    with pytest.raises(ArtifactError, match=f"night-000001 measures its models on the {why}"):
        night_inputs.earlier_heldout(champion, known.newest_first(), store, settings)
    with pytest.raises(ArtifactError, match=why):
        night_inputs.inputs_of(unfinished, settings, store)


def test_what_a_first_champion_has_learnt_is_read_from_its_artifacts_and_remembered_when_they_are_gone(
    tmp_path: Path,
    store: ArtifactStore,
    champion: Champion,
    known: Nights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen() -> InputSnapshot:
        return night_plan.choose_inputs(settings, store, known, None)[0]

    def names(snapshot: InputSnapshot) -> str:
        return records.shortened_names(file["location"] for file in snapshot.files["pretrain"])

    assert (
        night_inputs.learnt_by(champion, store) == {"f"}
        and night_inputs.learnt_by(None, store) == set()
    )
    settings = inbox(tmp_path, old="1")
    shutil.rmtree(store.path("shards-pretrain", "s"))
    trained_on = {
        "files": {
            "train": [
                {"name": "a", "sha256": file["sha256"]}
                for file in list_of(settings, store).files["pretrain"]
            ]
        }
    }
    artifact(store, "shards-pretrain", "s", {"heldout/index.json": "{}"}, ingredients=trained_on)
    champions = [champion]
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champions[-1])
    inbox(tmp_path, new="2")
    frozen = chosen()
    assert names(frozen) == "new.jsonl"
    completed(known, frozen, "promoted", "8")
    assert next(known.newest_first()).frozen == frozen
    shutil.rmtree(store.path("shards-pretrain", "s"))
    champions.append(Champion("8", {}))
    with pytest.raises(NothingNew, match="all 4 files have been read"):
        chosen()
    inbox(tmp_path, newer="3")
    after = chosen()
    assert names(after) == "newer.jsonl"
    assert after.learnt == (), "the night before has it"


def test_what_a_champion_that_no_night_made_was_trained_on_is_not_new(
    tmp_path: Path, store: ArtifactStore, known: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = inbox(tmp_path, old="1")
    for stage, key in (("pretrain", "p"), ("sft", "q")):
        read = {"files": {"train": [dict(file) for file in list_of(settings, store).files[stage]]}}
        artifact(store, f"shards-{stage}", key, {"train/index.json": "{}"}, ingredients=read)
        shards = {"shards": {"stage": f"shards-{stage}", "key": key, "content": ""}}
        artifact(store, stage, key, {"model/config.json": "{}"}, inputs=shards)
    champion = Champion("7", {"pretrain": "p", "sft": "q"})
    monkeypatch.setattr(night_plan, "current_champion", lambda settings, store: champion)
    with pytest.raises(NothingNew, match="all 3 files have been read"):
        night_plan.choose_inputs(settings, store, known, None)
    inbox(tmp_path, new="2")
    frozen, reason = night_plan.choose_inputs(settings, store, known, None)
    assert [Path(file["location"]).name for file in frozen.files["pretrain"]] == ["new.jsonl"]
    assert reason == "1 new: new.jsonl; the champion, version 7"


def test_the_documents_that_a_champion_has_learnt_are_those_of_its_nights_and_in_the_store(
    store: ArtifactStore, champion: Champion, known: Nights, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a champion that no night made, those of its base model; a night that keeps the base adds none."""
    assert night_inputs.learnt_shards("pretrain", None, known.newest_first(), store) == ()
    assert night_inputs.learnt_shards("pretrain", champion, known.newest_first(), store) == (
        "shards-pretrain/s",
    )
    for number, own in (("1", "b"), ("2", None), ("3", "c"), ("4", "gone")):
        if own and own != "gone":
            artifact(store, "shards-pretrain", own, {"train/index.json": "{}"})
        before = night_inputs.learnt_shards(
            "pretrain", Champion(number, champion.keys), known.newest_first(), store
        )
        listed = InputSnapshot({}, {}, champion, documents=before)
        made = own and f"shards-pretrain/{own}"
        completed(known, listed, "promoted", f"{int(number) + 1}", documents=made)
    learnt = {
        number: night_inputs.learnt_shards(
            "pretrain", Champion(number, champion.keys), known.newest_first(), store
        )
        for number in "1235"
    }
    assert learnt["1"] == ("shards-pretrain/s",)
    assert learnt["2"] == learnt["3"] == ("shards-pretrain/s", "shards-pretrain/b")
    assert learnt["5"] == ("shards-pretrain/s", "shards-pretrain/b", "shards-pretrain/c")
    caplog.clear()
    shutil.rmtree(store.path("shards-pretrain", "s"))
    assert night_inputs.learnt_shards("pretrain", champion, (), store) == ()
    assert "1 of 1 sets that version 7 has learnt are not in the store" in caplog.text


def test_what_nights_will_read_is_named_for_those_who_clean(known: Nights, tmp_path: Path) -> None:
    for number in (1, 2):
        notes = {"heldout": f"heldout/h{number}", "documents": f"shards-pretrain/s{number}"}
        completed(known, frozen(str(number)), "promoted", **notes)
    assert records.needed_keys(tmp_path) == {"h2", "s1", "s2"}, "version 1 may be promoted again"
    champion = Champion("2", {"sft": "q", "pretrain": "p"})
    known.begin(
        InputSnapshot(
            {}, {}, champion, "heldout/h2", documents=("shards-pretrain/s1", "shards-pretrain/s2")
        ),
        None,
    )
    assert records.needed_keys(tmp_path) == {"h2", "s1", "s2", "q", "p"}
    assert records.needed_keys(tmp_path / "elsewhere") == set()
