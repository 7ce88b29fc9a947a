"""The registry of a home: sets of models, aliases, the way back, decisions, in one file."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest
from support.artifact_home import SUFFIXES, register
from support.night_files import artifact

from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.name_syntax import registered
from ttrain.store.registry import Registry


def entry(home: Path) -> Any:
    """The sets "mine" as the file has them."""
    return Registry(home).read()["sets"]["mine"]


def resolved(home: Path, text: str) -> str:
    member = Registry(home).resolve(registered(text))
    return f"{member.name}/{member.version}"


def test_the_same_models_are_one_set_that_knows_its_newest_evaluation(sets_home: Path) -> None:
    registry, again = Registry(sets_home), register(sets_home, 2, accuracy=0.5)
    assert again == registry.find("mine", "2")
    assert again.metrics == {"bits_per_byte": 1.8, "accuracy": 0.5}
    assert {registry.find_set(name).version for name in ("2", "mine/2", "full-2")} == {"2"}


def test_the_newest_set_is_challenger_until_it_is_champion(sets_home: Path) -> None:
    assert entry(sets_home)["aliases"] == {"challenger": "3"}
    Registry(sets_home).promote("mine", "3")
    register(sets_home, 3)
    assert entry(sets_home)["aliases"] == {"champion": "3"}, "the champion challenges nobody"


def test_all_models_of_a_run_become_champion_together(sets_home: Path) -> None:
    registry = Registry(sets_home)
    for version in ("2", "3", "3"):
        promoted = registry.promote("mine", version)
        assert (promoted.version, promoted.aliases) == (version, ("champion",))
        for name in ("mine", *(f"mine-{suffix}" for suffix in SUFFIXES.values())):
            assert resolved(sets_home, f"{name}@champion") == f"{name}/{version}"
        assert promoted.keys["lora"] == f"lora-{version}"
    assert entry(sets_home)["champions"] == ["2", "3"], "promoted twice is promoted once"
    last = registry.champion("mine").last
    assert (last.stage, last.key) == ("lora", "lora-3")
    assert registry.rollback("mine").version == "2"


def test_rolling_back_repeatedly_passes_a_champion_that_came_again(sets_home: Path) -> None:
    registry = Registry(sets_home)
    for version in ("1", "2", "1", "3"):
        registry.promote("mine", version)
    assert [registry.rollback("mine").version for _ in range(3)] == ["1", "2", "1"]
    with pytest.raises(UsageError, match="mine"):
        registry.rollback("mine")
    assert entry(sets_home)["aliases"]["champion"] == "1"


def test_an_unknown_name_is_refused_with_what_is_registered(sets_home: Path) -> None:
    for text in ("other@champion", "mine-base@best", "mine/7", "mine-base/7"):
        with pytest.raises(UsageError, match=f"{text}.*mine/3, mine@challenger, mine-base/3"):
            resolved(sets_home, text)
    with pytest.raises(UsageError, match="models promote"):
        resolved(sets_home, "mine@champion")


def test_registered_models_keep_their_inputs_and_the_champion_its_data(tmp_path: Path) -> None:
    store, registry = ArtifactStore(tmp_path / "home"), Registry(tmp_path / "home")
    assert registry.keys() == frozenset()

    def publish(stage: str, **inputs: str) -> Artifact:
        used = {name: {"stage": of, "key": f"{of}-1", "content": ""} for name, of in inputs.items()}
        return artifact(store, stage, f"{stage}-1", {"x.txt": stage}, inputs=used)

    for stage in ("tokenizer", "shards-sft", "pretrain"):
        publish(stage)
    adapter = publish("lora", base="pretrain", tokenizer="tokenizer", shards="shards-sft")
    member = registry.register_model("mine-lora", adapter, "full-1")
    expected = {"lora-1", "pretrain-1", "tokenizer-1"}
    assert registry.keys() == expected, "its training data is not needed to use a model"
    keys = {"lora": "lora-1", "evaluate": "evaluate-1", "shards-sft": "shards-sft-1", "source": "s"}
    registry.register_set("mine", "full-1", [member], keys, {})
    assert registry.keys() == expected | {"evaluate-1"}
    registry.promote("mine", "1")  # a night must not take its data for new
    assert registry.keys() == expected | {"evaluate-1", "shards-sft-1"}


def test_the_file_is_for_its_owner_and_a_damaged_one_is_an_error(sets_home: Path) -> None:
    path, registry = sets_home / "registry.json", Registry(sets_home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(damaged := path.read_text()[:100])
    for call in (registry.keys, lambda: register(sets_home, 4)):
        with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*; restore"):
            call()
    assert path.read_text() == damaged
