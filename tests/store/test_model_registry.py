"""The registry of a home: sets of models, aliases, the way back, decisions; one file, replaced as a whole."""

import re
import stat
from pathlib import Path

import pytest
from support.champion_sets import SUFFIXES, register
from support.night_files import artifact

from ttrain.errors import UsageError
from ttrain.store import layout
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.name_syntax import Registered, registered
from ttrain.store.registry import ModelSet, Registry

DECISION = {
    "promote": True,
    "metric": "bits_per_byte",
    "challenger": 1.7,
    "champion": 1.8,
    "difference": 0.1,
    "interval": [0.05, 0.15],
    "samples": 40,
    "margin": 0.0,
    "confidence": 0.95,
    "reason": "better by 0.10000",
}


def aliases(home: Path, name: str = "mine") -> dict[str, str]:
    return dict(Registry(home).read()["sets"][name]["aliases"])


def history(home: Path) -> list[str]:
    return list(Registry(home).read()["sets"]["mine"]["champions"])


def resolved(home: Path, text: str) -> str:
    reference = registered(text)
    assert reference is not None
    found = Registry(home).resolve(reference)
    return f"{found.name}/{found.version}"


def test_the_same_models_are_one_set_that_knows_its_newest_evaluation(sets_home: Path) -> None:
    again = register(sets_home, 2, accuracy=0.5)
    assert again == Registry(sets_home).find("mine", "2")
    assert again.metrics == {"bits_per_byte": 1.8, "accuracy": 0.5}
    assert again.run == "full-2"
    assert [each.version for each in Registry(sets_home).sets()] == ["3", "2", "1"]
    assert {Registry(sets_home).find_set(name).version for name in ("2", "mine/2", "full-2")} == {
        "2"
    }


def test_the_newest_set_is_challenger_until_it_is_champion(sets_home: Path) -> None:
    assert aliases(sets_home) == {"challenger": "3"}
    Registry(sets_home).promote("mine", "3")
    register(sets_home, 3)
    assert aliases(sets_home) == {"champion": "3"}, "the champion challenges nobody"


def test_all_models_of_a_run_become_champion_together(sets_home: Path) -> None:
    registry = Registry(sets_home)
    assert registry.champion("mine") is None
    for version in ("2", "3", "3"):
        promoted = registry.promote("mine", version)
        assert (promoted.version, promoted.aliases) == (version, ("champion",))
        assert registry.champion("mine") == promoted
        names = ("mine", *(f"mine-{suffix}" for suffix in SUFFIXES.values()))
        assert [resolved(sets_home, f"{name}@champion") for name in names] == [
            f"{name}/{version}" for name in names
        ]
        assert promoted.keys["lora"] == f"lora-{version}"
    assert history(sets_home) == ["2", "3"], "promoted twice is promoted once"
    last = registry.resolve(Registered("mine", "champion", None))
    assert isinstance(last, ModelSet) and last.last is not None
    assert (str(last.last), last.last.stage, last.last.key) == ("mine-lora/3", "lora", "lora-3")
    assert registry.rollback("mine").version == "2"


def test_rolling_back_twice_goes_further_back_also_past_a_champion_that_came_again(
    sets_home: Path,
) -> None:
    registry = Registry(sets_home)
    for version in ("1", "2", "1", "3"):
        registry.promote("mine", version)
    for expected in ("1", "2", "1"):
        rolled_back = registry.rollback("mine")
        assert (rolled_back.version, rolled_back.aliases) == (expected, ("champion",))
    with pytest.raises(UsageError, match="mine has no earlier champion to go back to"):
        registry.rollback("mine")
    assert aliases(sets_home)["champion"] == "1"


def test_a_name_of_nothing_is_refused_with_what_is_registered(
    sets_home: Path, tmp_path: Path
) -> None:
    existing = "there are mine/3, mine@challenger, mine-base/3, mine-base@challenger, mine-lora/3"
    for text in (
        "mine-reward@challenger",
        "other@champion",
        "mine-base@best",
        "mine/7",
        "mine-base/7",
    ):
        with pytest.raises(UsageError, match=f"no registered model '{text}'.*{existing}"):
            resolved(sets_home, text)
    with pytest.raises(
        UsageError, match="no set of models is champion before `ttrain models promote`"
    ):
        resolved(sets_home, "mine@champion")
    with pytest.raises(
        UsageError, match=f"nothing is registered in {re.escape(str(tmp_path))}: begin with"
    ):
        resolved(tmp_path, "mine/1")


def test_the_last_decision_about_a_set_stands_with_its_texts(sets_home: Path) -> None:
    registry = Registry(sets_home)
    registry.decide("mine", "3", {**DECISION, "promote": False}, run="night")
    registry.decide("mine", "3", DECISION, run="full-3")
    decided = registry.find("mine", "3")
    assert decided.decision == DECISION == decided.to_json()["decision"]
    assert decided.decided == {"run": "full-3"}
    assert registry.find("mine", "2").decision is None


def test_the_kept_keys_are_those_of_all_versions_their_inputs_and_the_champions_data(
    tmp_path: Path,
) -> None:
    store, registry = ArtifactStore(tmp_path / "home"), Registry(tmp_path / "home")
    assert registry.keys() == frozenset()

    def publish(stage: str, key: str, **inputs: layout.Artifact) -> layout.Artifact:
        used = {
            name: {"stage": of.stage, "key": of.key, "content": of.content}
            for name, of in inputs.items()
        }
        return artifact(store, stage, key, {"x.txt": key}, inputs=used)

    tokenizer, shards, base = (
        publish(stage, f"{stage}-1") for stage in ("tokenizer", "shards-sft", "pretrain")
    )
    adapter = publish("lora", "lora-1", base=base, tokenizer=tokenizer, shards=shards)
    member = registry.register_model("mine-lora", adapter, "full-1")
    expected = {"lora-1", "pretrain-1", "tokenizer-1"}
    assert registry.keys() == expected, (
        "a model is useless without them, but not without its training data"
    )
    keys = {"lora": "lora-1", "evaluate": "evaluate-1", "shards-sft": "shards-sft-1", "source": "s"}
    registry.register_set("mine", "full-1", [member], keys, {})
    assert registry.keys() == expected | {"evaluate-1"}
    registry.promote("mine", "1")
    assert registry.keys() == expected | {"evaluate-1", "shards-sft-1"}, (
        "which a night must not take for new"
    )


def test_the_file_is_for_its_owner(sets_home: Path) -> None:
    assert stat.S_IMODE((sets_home / "registry.json").stat().st_mode) == 0o600


def test_a_damaged_file_is_an_error_with_its_path_and_what_to_do(sets_home: Path) -> None:
    path = sets_home / "registry.json"
    path.write_text(damaged := path.read_text()[:100])
    registry = Registry(sets_home)
    for act in (
        registry.sets,
        registry.keys,
        lambda: registry.promote("mine", "1"),
        lambda: register(sets_home, 4),
    ):
        with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*is damaged.*; restore it"):
            act()
    assert path.read_text() == damaged
