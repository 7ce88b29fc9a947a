"""Runs read back from the home: by every name they have, each step once, nothing from outside a run's files."""

import math
from pathlib import Path

import pytest
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, falling, make_run

from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.registry import Registry
from ttrain.store.run_views import read_run, read_runs

FIRST, SECOND, CACHED, KILLED = (
    "full-20261121-100000-0001a",
    "full-20261121-110000-0002b",
    "full-20261122-090000-0003c",
    "full-20261122-100000-0004d",
)
LOSSES = falling(8, gap=3)
PRETRAIN = Made(
    "pretrain",
    LOSSES,
    texts={"run/samples/step-00000004.txt": "=== Hello\nworld\n", "run/log.txt": "a line\n"},
)
SFT = Made("sft", falling(6, 2.0))
OTHER = Made("pretrain", falling(8, 2.5))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two runs, the second with a stage from the cache, one wholly cached, and one that was killed."""
    home = tmp_path_factory.mktemp("a home #1 50%")
    make_run(
        home,
        FIRST,
        [PRETRAIN, SFT],
        metrics={"eval/bits_per_byte": 2.5},
        tracking={"run_id": "b2" * 16},
    )
    from_cache = Made("sft", SFT.losses, outcome="cached")
    make_run(
        home,
        SECOND,
        [OTHER, from_cache],
        number=1,
        settings={"pretrain": {"optim": {"lr": 0.5}}},
        metrics={"eval/bits_per_byte": 2.25},
        tracking={"run_id": "a1" * 16},
    )
    cached = [Made("pretrain", PRETRAIN.losses, outcome="cached"), from_cache]
    cached[0].key = PRETRAIN.key
    make_run(home, CACHED, cached, number=2, outcome="cached", equals=FIRST)
    running = Made("pretrain", outcome="running", key="f" * 64)
    make_run(home, KILLED, [running, Made("sft", outcome="pending")], number=3, outcome="running")
    return home


def test_a_run_is_found_by_every_name_it_and_its_models_have(made: Path) -> None:
    base = ArtifactStore(made).find("pretrain", PRETRAIN.key)
    assert base is not None
    Registry(made).register_model("mine-base", base, FIRST)
    for text in (FIRST, FIRST[:16], FIRST[-5:], "b2" * 16, "mine-base/1", "models:/mine-base/1"):
        assert read_run(made, text).name == FIRST
    assert read_run(made, "latest").name == KILLED
    assert [view.name for view in read_runs(made, [SECOND, FIRST])] == [SECOND, FIRST]


def test_a_name_that_is_none_or_many_is_refused_with_what_there_is(made: Path) -> None:
    with pytest.raises(
        UsageError, match=f"'full-2026' is the beginning or end of 4 runs: {KILLED}, {CACHED}"
    ):
        read_run(made, "full-2026")
    for text in ("nothing-like-it", "", "../runs", "0" * 32):
        with pytest.raises(UsageError, match=f"there is no run '{text}'; there are {KILLED}"):
            read_run(made, text)
    with pytest.raises(UsageError, match=f"did you mean {FIRST}"):
        read_run(made, FIRST.replace("full", "fill"))


def test_a_curve_has_every_step_once_its_tokens_its_time_and_a_gap_where_there_was_no_number(
    made: Path,
) -> None:
    view = read_run(made, FIRST)
    assert view.curves("pretrain") == [
        "grad_norm",
        "loss",
        "lr",
        "validation_loss",
    ]  # not final/loss, not tokens
    assert view.curve("pretrain", "nothing") == view.curve("no stage", "loss") == []
    curve = view.curve("pretrain", "loss")
    assert [point.step for point in curve] == list(range(1, 9))
    assert [point.tokens for point in curve] == [TOKENS_PER_STEP * step for step in range(1, 9)]
    assert [point.time for point in curve] == [BEGAN + 2.0 * step for step in range(1, 9)]
    assert math.isnan(curve[2].value)
    assert [point.value for point in curve if point.step != 3] == [
        loss for loss in LOSSES if loss is not None
    ]
    assert [point.step for point in view.curve("pretrain", "validation_loss")] == [4, 8]


def test_a_cached_stage_has_the_curves_of_the_run_that_made_it(made: Path) -> None:
    first, second, cached = read_runs(made, [FIRST, SECOND, CACHED])
    assert (second.stages["sft"].cached, second.stages["sft"].made_by) == (True, FIRST)
    assert second.curve("sft", "loss") == first.curve("sft", "loss") != []
    assert second.curve("pretrain", "loss") != first.curve("pretrain", "loss")
    assert cached.status == "cached"
    assert [stage.made_by for stage in cached.stages.values()] == [FIRST, FIRST]
    assert cached.curve("pretrain", "loss")[0].value == LOSSES[0]
    assert cached.stages["pretrain"].seconds == 5.5


def test_files_are_listed_and_texts_are_read(made: Path) -> None:
    view = read_run(made, FIRST)
    assert view.files("pretrain", "run/samples") == ["run/samples/step-00000004.txt"]
    assert view.text("pretrain", "run/samples/step-00000004.txt") == "=== Hello\nworld\n"
    assert view.text("pretrain", "run/none.txt") is None


def test_settings_that_look_like_secrets_are_masked(tmp_path: Path) -> None:
    name = FIRST
    make_run(tmp_path, name, [Made("pretrain")])
    record = tmp_path / "runs" / f"{name}.json"
    record.write_text(
        record.read_text().replace(
            '"webhook": null', '"webhook": "https://hooks.example/T0/secret"'
        )
    )
    params = read_run(tmp_path, name).params
    assert params["notify.webhook"] == "***"
    assert params["pretrain.optim.lr"] != "***"
