"""The registry of a home: sets of models, aliases, the way back, decisions, in one file."""

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.artifact_home import SUFFIXES, register
from support.night_files import artifact

from ttrain.errors import UsageError
from ttrain.store import layout
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.name_syntax import Registered, registered
from ttrain.store.registry import ModelSet, Registry

DECISION = {"promote": True, "metric": "bits_per_byte", "challenger": 1.7, "interval": [0.05, 0.15]}


def entry(home: Path) -> Mapping[str, Any]:
    """The sets "mine" as the file has them."""
    return dict(Registry(home).read()["sets"]["mine"])


def resolved(home: Path, text: str) -> str:
    reference = registered(text)
    assert reference is not None
    resolved = Registry(home).resolve(reference)
    return f"{resolved.name}/{resolved.version}"


def test_the_same_models_are_one_set_that_knows_its_newest_evaluation(sets_home: Path) -> None:
    registry, again = Registry(sets_home), register(sets_home, 2, accuracy=0.5)
    assert again == registry.find("mine", "2")
    assert again.metrics == {"bits_per_byte": 1.8, "accuracy": 0.5}
    assert again.run == "full-2"
    assert {registry.find_set(name).version for name in ("2", "mine/2", "full-2")} == {"2"}


def test_the_newest_set_is_challenger_until_it_is_champion(sets_home: Path) -> None:
    assert entry(sets_home)["aliases"] == {"challenger": "3"}
    Registry(sets_home).promote("mine", "3")
    register(sets_home, 3)
    assert entry(sets_home)["aliases"] == {"champion": "3"}, "the champion challenges nobody"


def test_all_models_of_a_run_become_champion_together(sets_home: Path) -> None:
    registry = Registry(sets_home)
    names = ("mine", *(f"mine-{suffix}" for suffix in SUFFIXES.values()))
    for version in ("2", "3", "3"):
        promoted = registry.promote("mine", version)
        assert (promoted.version, promoted.aliases) == (version, ("champion",))
        assert registry.champion("mine") == promoted
        champions = [resolved(sets_home, f"{name}@champion") for name in names]
        assert champions == [f"{name}/{version}" for name in names]
        assert promoted.keys["lora"] == f"lora-{version}"
    assert entry(sets_home)["champions"] == ["2", "3"], "promoted twice is promoted once"
    champion = registry.resolve(Registered("mine", "champion", None))
    assert isinstance(champion, ModelSet) and champion.last is not None
    last = champion.last
    assert (str(last), last.stage, last.key) == ("mine-lora/3", "lora", "lora-3")
    assert registry.rollback("mine").version == "2"


def test_rolling_back_repeatedly_passes_a_champion_that_came_again(sets_home: Path) -> None:
    registry = Registry(sets_home)
    for version in ("1", "2", "1", "3"):
        registry.promote("mine", version)
    for expected in ("1", "2", "1"):
        rolled_back = registry.rollback("mine")
        assert (rolled_back.version, rolled_back.aliases) == (expected, ("champion",))
    with pytest.raises(UsageError, match="mine"):
        registry.rollback("mine")
    assert entry(sets_home)["aliases"]["champion"] == "1"


@pytest.mark.parametrize(
    "text", ["other@champion", "mine-base@best", "mine/7", "mine-base/7", "mine@champion"]
)
def test_an_unknown_name_is_refused_with_what_is_registered(sets_home: Path, text: str) -> None:
    fix = "models promote" if text == "mine@champion" else "mine/3, mine@challenger, mine-base/3"
    with pytest.raises(UsageError, match=f"{text}.*{fix}"):
        resolved(sets_home, text)


def test_the_last_decision_about_a_set_is_kept(sets_home: Path) -> None:
    registry = Registry(sets_home)
    registry.decide("mine", "3", {**DECISION, "promote": False}, run="night")
    registry.decide("mine", "3", DECISION, run="full-3")
    decided = registry.find("mine", "3")
    assert decided.decision == DECISION == decided.to_json()["decision"]
    assert decided.decided == {"run": "full-3"}
    assert registry.find("mine", "2").decision is None


def test_registered_models_keep_their_inputs_and_the_champion_its_data(tmp_path: Path) -> None:
    store, registry = ArtifactStore(tmp_path / "home"), Registry(tmp_path / "home")
    assert registry.keys() == frozenset()

    def publish(stage: str, **inputs: layout.Artifact) -> layout.Artifact:
        keys = {name: {"stage": of.stage, "key": of.key} for name, of in inputs.items()}
        used = {name: {**key, "content": ""} for name, key in keys.items()}
        return artifact(store, stage, f"{stage}-1", {"x.txt": stage}, inputs=used)

    tokenizer, shards, base = map(publish, ("tokenizer", "shards-sft", "pretrain"))
    adapter = publish("lora", base=base, tokenizer=tokenizer, shards=shards)
    member = registry.register_model("mine-lora", adapter, "full-1")
    expected = {"lora-1", "pretrain-1", "tokenizer-1"}
    assert registry.keys() == expected, "its training data is not needed to use a model"
    keys = {"lora": "lora-1", "evaluate": "evaluate-1", "shards-sft": "shards-sft-1", "source": "s"}
    registry.register_set("mine", "full-1", [member], keys, {})
    assert registry.keys() == expected | {"evaluate-1"}
    registry.promote("mine", "1")
    champion_data = {"shards-sft-1"}  # which a night must not take for new
    assert registry.keys() == expected | {"evaluate-1"} | champion_data


def test_the_file_is_for_its_owner(sets_home: Path) -> None:
    assert stat.S_IMODE((sets_home / "registry.json").stat().st_mode) == 0o600


def test_a_damaged_file_is_an_error_with_its_path_and_a_fix(sets_home: Path) -> None:
    path, registry = sets_home / "registry.json", Registry(sets_home)
    path.write_text(damaged := path.read_text()[:100])
    for call in (registry.keys, lambda: register(sets_home, 4)):
        with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*; restore"):
            call()
    assert path.read_text() == damaged
