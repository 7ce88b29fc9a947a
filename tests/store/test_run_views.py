"""Runs read back from the home: by every name they have, each step once."""

import math
import re
from pathlib import Path

import pytest
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, falling, make_run

from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry
from ttrain.store.run_views import read_run, read_runs

FIRST = "full-20261121-100000-0001a"
SECOND = "full-20261121-110000-0002b"
CACHED = "full-20261122-090000-0003c"
KILLED = "full-20261122-100000-0004d"
LOSSES = falling(8, gap=3)
PRETRAIN = Made("pretrain", LOSSES)
SFT = Made("sft", falling(6, 2.0))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second with a cached stage; one wholly cached, one that was killed."""
    home = tmp_path_factory.mktemp("a home #1 50%")
    make_run(home, FIRST, [PRETRAIN, SFT], tracking={"run_id": "b2" * 16})
    cached_sft = Made("sft", SFT.losses, outcome="cached")
    retrained = Made("pretrain", falling(8, 2.5))
    make_run(home, SECOND, [retrained, cached_sft], number=1, tracking={"run_id": "a1" * 16})
    cached = [Made("pretrain", LOSSES, outcome="cached", key=PRETRAIN.key), cached_sft]
    make_run(home, CACHED, cached, number=2, outcome="cached", equals=FIRST)
    running = Made("pretrain", outcome="running", key="f" * 64)
    make_run(home, KILLED, [running, Made("sft", outcome="pending")], number=3, outcome="running")
    return home


def test_a_run_is_found_by_every_name_it_and_its_models_have(home: Path) -> None:
    base = ArtifactStore(home).find("pretrain", PRETRAIN.key)
    assert base is not None
    Registry(home).register_model("mine-base", base, FIRST)
    for text in (FIRST, FIRST[:16], FIRST[-5:], "b2" * 16, "mine-base/1", "models:/mine-base/1"):
        assert read_run(home, text).name == FIRST
    assert read_run(home, "latest").name == KILLED
    assert [view.name for view in read_runs(home, [SECOND, FIRST])] == [SECOND, FIRST]


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("full-2026", f"4 runs: {KILLED}, {CACHED}"),
        *((text, f"there are {KILLED}") for text in ("nothing-like-it", "", "../runs")),
        (FIRST.replace("full", "fill"), f"did you mean {FIRST}"),
    ],
)
def test_an_unknown_or_ambiguous_name_lists_runs(home: Path, text: str, runs: str) -> None:
    with pytest.raises(UsageError, match=f"'{re.escape(text)}'.*{runs}"):
        read_run(home, text)


def test_a_curve_has_every_step_once_and_nan_where_there_was_no_number(home: Path) -> None:
    view = read_run(home, FIRST)
    assert view.curves("pretrain") == ["grad_norm", "loss", "lr", "validation_loss"]
    assert view.curve("pretrain", "nothing") == view.curve("no stage", "loss") == []
    curve = view.curve("pretrain", "loss")
    assert [point[:3] for point in curve] == [
        (step, TOKENS_PER_STEP * step, BEGAN + 2.0 * step) for step in range(1, 9)
    ]
    assert math.isnan(curve.pop(2).value)
    assert [point.value for point in curve] == [loss for loss in LOSSES if loss is not None]
    assert [point.step for point in view.curve("pretrain", "validation_loss")] == [4, 8]


def test_a_cached_stage_has_the_curves_of_the_run_that_made_it(home: Path) -> None:
    first, second, cached = read_runs(home, [FIRST, SECOND, CACHED])
    assert (second.stages["sft"].cached, second.stages["sft"].made_by) == (True, FIRST)
    assert second.curve("sft", "loss") == first.curve("sft", "loss") != []
    assert second.curve("pretrain", "loss") != first.curve("pretrain", "loss")
    assert cached.status == "cached"
    assert [stage.made_by for stage in cached.stages.values()] == [FIRST, FIRST]
    assert cached.curve("pretrain", "loss")[0].value == LOSSES[0]
    assert cached.stages["pretrain"].seconds == 5.5


def test_settings_that_look_like_secrets_are_masked(tmp_path: Path) -> None:
    webhook = {"notify": {"webhook": "https://hooks.example/T0/secret"}}
    make_run(tmp_path, FIRST, [Made("pretrain")], settings=webhook)
    params = read_run(tmp_path, FIRST).params
    assert params["notify.webhook"] == "***"
    assert params["pretrain.optim.lr"] != "***"
