"""Champions: one alias is the truth, the rest follows it; a kill between any two writes is mended; real MLflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.champion_sets import aliases, champion, client_of, everywhere, history, kept, register, restored, state

from ttrain import tracking
from ttrain.errors import UsageError
from ttrain.store.references import Registered
from ttrain.tracking import Member
from ttrain.tracking import database as databases
from ttrain.tracking.champions import recorded_keys
from ttrain.tracking.model_description import LOADS

WRITES = (
    "create_registered_model", "create_model_version", "set_registered_model_alias", "delete_registered_model_alias",
    "set_registered_model_tag", "set_model_version_tag", "update_model_version",
)  # fmt: skip


# --- registering --------------------------------------------------------------------------------------------------------


def test_the_same_models_are_one_set_that_knows_its_newest_evaluation(sets_home: Path) -> None:
    assert register(sets_home, 2, accuracy=0.5) == "2"
    again = tracking.Champions(sets_home).find("mine", "2")
    assert again.metrics == {"bits_per_byte": 1.8, "accuracy": 0.5}
    assert again.run == "full-2"
    assert len(tracking.list_sets(sets_home)) == 3


def test_two_homes_that_register_the_same_at_once_leave_one(sets_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    create, other = MlflowClient.create_model_version, []

    def overtaken(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in other:
            other.append(name)
            create(self, name, *args, **kwargs)  # that of the other home, between our question and our answer
        return create(self, name, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "create_model_version", overtaken)
    assert register(sets_home, 9, name="raced") == "1"
    assert len(other) == 3, "each member and the set"
    (made,) = tracking.list_sets(sets_home, "raced")
    assert {member.version for member in made.members.values()} == {"1"} and made.aliases == ("challenger",)


def test_the_newest_set_is_challenger_until_it_is_champion(sets_home: Path) -> None:
    tracking.list_sets(sets_home)
    assert aliases(sets_home, "challenger") == everywhere("3")
    tracking.Champions(sets_home).promote("mine", "3")
    register(sets_home, 3)
    assert aliases(sets_home, "challenger") == {}, "the champion challenges nobody"


def test_a_name_that_models_of_another_pipeline_bear_is_not_taken(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The models of a pipeline `mine` and the sets of a pipeline `mine-base` would share aliases."""
    assert register(sets_home, 9, name="mine-base") is None
    assert "holds models of another pipeline" in caplog.text
    assert {one.name for one in tracking.list_sets(sets_home)} == {"mine"}


def test_a_set_opens_as_the_last_of_its_models_that_mlflow_can_load(sets_home: Path) -> None:
    client = client_of(sets_home)
    tags = client.get_model_version("mine", "1").tags
    assert tracking.model_sets._source(client, tags) is None
    for model in ("mine-base", "mine-lora"):  # an adapter on a server brings no base along, and is not loaded
        client.set_model_version_tag(model, "1", LOADS, "mlflow.transformers")
        source, _ = tracking.model_sets._source(client, tags) or ("", "")
        assert source == f"models:/{model}/1"


# --- promoting and going back --------------------------------------------------------------------------------------------


def test_all_models_of_a_run_become_champion_together_and_the_home_records_it(sets_home: Path) -> None:
    champions = tracking.Champions(sets_home)
    assert champions.champion("mine") is None
    assert recorded_keys(sets_home, "mine") == {} == tracking.champion_keys_here(sets_home, "mine")
    for version in ("2", "3", "3"):
        promoted = champions.promote("mine", version)
        assert (promoted.version, promoted.aliases) == (version, ("champion",))
        assert aliases(sets_home) == everywhere(version)
        assert champion(sets_home).keys["lora"] == recorded_keys(sets_home, "mine")["lora"] == f"lora-{version}"
    assert history(sets_home) == "2 3", "promoted twice is promoted once"
    last = tracking.last_of(tracking.find_version(sets_home, Registered("mine", "champion", None)))
    assert last == Member("mine-lora", "3", "lora", "lora-3")
    assert tracking.last_of(tracking.find_version(sets_home, Registered("mine-base", "champion", None))) is None
    assert champions.rollback("mine").version == "2"
    assert recorded_keys(sets_home, "mine")["lora"] == "lora-2"


def test_rolling_back_twice_goes_further_back_also_past_a_champion_that_came_again(sets_home: Path) -> None:
    for version in ("1", "2", "1", "3"):
        tracking.Champions(sets_home).promote("mine", version)
    found = []
    for expected in ("1", "2", "1"):
        found.append(tracking.Champions(sets_home).rollback("mine").version)
        assert aliases(sets_home) == everywhere(expected)
    assert found == ["1", "2", "1"]
    with pytest.raises(UsageError, match="mine has no earlier champion to go back to"):
        tracking.Champions(sets_home).rollback("mine")
    assert aliases(sets_home) == everywhere("1")


def test_neither_a_version_that_was_deleted_nor_the_present_one_is_an_earlier_champion(sets_home: Path) -> None:
    for version in ("3", "1", "2", "1"):
        tracking.Champions(sets_home).promote("mine", version)
    client_of(sets_home).delete_model_version("mine", "2")
    assert tracking.Champions(sets_home).rollback("mine").version == "3"
    assert aliases(sets_home) == everywhere("3")
    tracking.Champions(sets_home).promote("mine", "1")
    client_of(sets_home).delete_model_version("mine", "1")
    assert tracking.Champions(sets_home).champion("mine") is None
    assert tracking.Champions(sets_home).rollback("mine").version == "3"
    assert aliases(sets_home) == everywhere("3")


def version_of(home: Path, name: str, alias: str = "champion") -> str:
    return tracking.find_version(home, Registered(name, alias, None)).version


def test_a_champion_chosen_in_mlflow_itself_counts(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its page sets the alias on the set alone: the members follow, and the way back leads to the one before."""
    tracking.Champions(sets_home).promote("mine", "1")
    assert version_of(sets_home, "mine-lora") == "1" and not caplog.messages
    client_of(sets_home).set_registered_model_alias("mine", "champion", "3")
    assert champion(sets_home).version == version_of(sets_home, "mine") == version_of(sets_home, "mine-lora") == "3"
    assert "mine-lora@champion: its alias in MLflow is on version 1, but the set mine@champion" in caplog.text
    assert "has version 3: version 3 is used" in caplog.text
    assert tracking.champion_keys_here(sets_home, "mine")["lora"] == "lora-3" == recorded_keys(sets_home, "mine")["lora"]
    tracking.list_sets(sets_home)
    assert aliases(sets_home) == everywhere("3")
    assert tracking.Champions(sets_home).rollback("mine").version == "1"


def test_an_alias_of_a_model_alone_counts_where_its_set_has_none(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    client_of(sets_home).set_registered_model_alias("mine", "best", "1")
    client_of(sets_home).set_registered_model_alias("mine-lora", "best", "2")
    assert (version_of(sets_home, "mine-base", "best"), version_of(sets_home, "mine-lora", "best")) == ("1", "2")
    client_of(sets_home).set_registered_model_alias("mine-lora", "champion", "2")
    assert not caplog.messages and version_of(sets_home, "mine-lora") == "2"
    assert "the set mine@champion, which decides, has none: version 2 is used" in caplog.text


def test_a_set_without_an_adapter_leaves_none_champion(sets_home: Path) -> None:
    tracking.Champions(sets_home).promote("mine", "3")
    version = register(sets_home, 4, stages=("pretrain",))
    assert version == "4"
    tracking.Champions(sets_home).promote("mine", version)
    assert aliases(sets_home) == {"mine": "4", "mine-base": "4"}


def test_a_member_that_was_deleted_is_a_warning(sets_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    client_of(sets_home).delete_model_version("mine-base", "2")
    tracking.Champions(sets_home).promote("mine", "2")
    assert "MLflow has no mine-base/2" in caplog.text
    assert aliases(sets_home) == {name: "2" for name in everywhere("2") if name != "mine-base"}


def test_a_set_that_is_not_there_is_refused_and_those_there_are_named(sets_home: Path) -> None:
    for act in (tracking.Champions(sets_home).promote, tracking.Champions(sets_home).find):
        with pytest.raises(UsageError, match=r"mine has no version 7 that is a set.*3 \(.*full-3\), 2"):
            act("mine", "7")
    with pytest.raises(UsageError, match="there are none yet"):
        tracking.Champions(sets_home).promote("other", "1")
    assert tracking.Champions(sets_home).champion("other") is None
    assert tracking.Champions(sets_home).champion("mine-base") is None


def test_an_alias_of_a_set_leads_to_its_members_before_they_have_it(sets_home: Path) -> None:
    """MLflow's page sets the alias on the set alone; other names are refused with what is registered."""
    client_of(sets_home).set_registered_model_alias("mine", "champion", "3")
    assert set(aliases(sets_home)) == {"mine"}
    version = tracking.find_version(sets_home, Registered("mine-base", "champion", None))
    assert (version.name, version.version) == ("mine-base", "3")
    for name in ("mine-reward", "other-base", "other"):
        with pytest.raises(UsageError, match=f"{name}@champion.*mine-base/3"):
            tracking.find_version(sets_home, Registered(name, "champion", None))


# --- killed between any two writes ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception: nothing in between may take it for a trouble of MLflow's."""


def dying_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """From here on, the write of this number does not happen, nor anything after it."""
    opened, left = databases.open_client, [number]

    def client(uri: str, where: Path) -> Any:
        made = opened(uri, where)
        for name in WRITES:
            write = getattr(made, name)

            def counted(*args: Any, write: Callable[..., Any] = write, **named: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return write(*args, **named)

            setattr(made, name, counted)
        return made

    patch.setattr("ttrain.tracking.champions.open_client", client)
    patch.setattr("ttrain.tracking.runs.open_client", client)


def killed_at_each_write(home: Path, start: Path, act: Callable[[], object]) -> Iterator[int]:
    """The number of each write of `act`, with the home as it is when that and what follows does not happen."""
    for number in range(50):
        restored(home, start)
        with pytest.MonkeyPatch.context() as patch:
            dying_at(patch, number)
            try:
                act()
            except Killed:
                pass
            else:
                return
        yield number


def prepared(home: Path) -> None:
    """Champion is 2, before it was 1; 3 challenges."""
    tracking.Champions(home).promote("mine", "1")
    tracking.Champions(home).promote("mine", "2")


@pytest.mark.soak
@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_a_kill_between_any_two_writes_leaves_one_champion_and_is_mended(
    action: str, sets_home: Path, tmp_path: Path
) -> None:
    prepared(sets_home)
    start, before = kept(sets_home, tmp_path / "start.db"), state(sets_home)

    def act() -> None:
        if action == "promote":
            tracking.Champions(sets_home).promote("mine", "3")
        else:
            tracking.Champions(sets_home).rollback("mine")

    act()
    after = state(sets_home)
    assert before != after
    for number in killed_at_each_write(sets_home, start, act):
        truth = aliases(sets_home)["mine"]
        assert champion(sets_home).version == truth
        tracking.list_sets(sets_home)
        assert state(sets_home) == (before if truth == before[1]["mine"] else after), f"killed at write {number}"
        if truth == before[1]["mine"]:
            act()
        assert state(sets_home) == after, f"done again after a kill at write {number}"
    assert number >= 3, "the history, the alias, and what follows on two members"


@pytest.mark.soak
def test_a_kill_in_the_first_promotion_of_all_is_mended_by_the_next(sets_home: Path, tmp_path: Path) -> None:
    start = kept(sets_home, tmp_path / "start.db")
    tracking.Champions(sets_home).promote("mine", "1")
    after = state(sets_home)
    for number in killed_at_each_write(sets_home, start, lambda: tracking.Champions(sets_home).promote("mine", "1")):
        tracking.Champions(sets_home).promote("mine", "1")
        assert state(sets_home) == after, f"done again after a kill at write {number}"


@pytest.mark.soak
def test_a_kill_while_a_set_is_registered_leaves_no_second_one(sets_home: Path, tmp_path: Path) -> None:
    start = kept(sets_home, tmp_path / "start.db")
    for number in killed_at_each_write(sets_home, start, lambda: register(sets_home, 4)):
        assert register(sets_home, 4) == "4"
        assert [one.version for one in tracking.list_sets(sets_home)] == ["4", "3", "2", "1"]
        assert aliases(sets_home, "challenger") == everywhere("4")
        versions = client_of(sets_home).search_model_versions("")
        assert sorted(f"{one.name}/{one.version}" for one in versions) == sorted(
            f"{name}/{version}" for version in "1234" for name in everywhere(version)
        ), f"killed at write {number}"
    assert number >= 5


def test_what_never_became_champion_is_no_step_of_the_way_back(sets_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its promotion was killed after the history and before the alias."""
    prepared(sets_home)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dying_at(patch, 1)
        tracking.Champions(sets_home).promote("mine", "3")
    assert (history(sets_home), champion(sets_home).version) == ("1 2 3", "2")
    assert tracking.Champions(sets_home).rollback("mine").version == "1"
    assert history(sets_home) == "1"
