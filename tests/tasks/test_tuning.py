"""`runtime.tune`: which sizes the search tries, that all ranks agree, and what a stage makes of the choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import ALONE, settings_of_training, tiny_model
from torch import nn

from ttrain.data.loader import ShuffledOrder
from ttrain.tasks import user_task
from ttrain.tasks.common import tuning
from ttrain.tasks.common.trainable_model import compiles
from ttrain.tasks.common.tuning import fastest, step_seconds
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision

SIZES = [1, 2, 4, 8, 16, 32]


def lacks_memory_from(limit: int) -> Callable[[int], float]:
    def measure(size: int) -> float:
        if size >= limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 10.0 - size

    return measure


@pytest.mark.parametrize(
    ("measure", "best", "tried"),
    [
        pytest.param({1: 9.0, 2: 7.0, 4: 5.0, 8: 6.0}.__getitem__, 4, 4, id="until it is slower"),
        pytest.param({1: 1.0, 2: 1.01, 4: 1.0, 8: 0.9, 16: 1.0}.__getitem__, 8, 5, id="over sizes that are equally fast"),
        pytest.param(lacks_memory_from(8), 4, 4, id="until it does not fit"),
        pytest.param(lambda size: 10.0 / size, 32, 6, id="to the end"),
        pytest.param(lacks_memory_from(1), 1, 1, id="nothing fits, as the training then says"),
    ],
)
def test_the_search_doubles_the_rows_until_a_step_is_slower_or_does_not_fit(
    measure: Callable[[int], float], best: int, tried: int
) -> None:
    calls: list[int] = []

    def measured(size: int) -> float:
        calls.append(size)
        return measure(size)

    assert fastest(measured, SIZES, ALONE) == best
    assert calls == SIZES[:tried]


# --- a run --------------------------------------------------------------------------------------------------------------


def seconds_of(module: nn.Module, rows_per_device: int, ranks: Ranks = ALONE) -> float:
    task, order = LanguageModeling(settings_of_training(), module), ShuffledOrder(40, 6, 120, seed=1)
    precision = Precision("fp32", torch.device("cpu"))
    return step_seconds(task, NumberedRows(40), order, precision, ranks, rows_per_device)


def test_measuring_leaves_weights_gradients_and_random_numbers_as_they_are() -> None:
    module = tiny_model()
    before = copies(module.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert seconds_of(module, 2) > 0
    assert same(before, module.state_dict())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


# --- a stage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.make(tmp_path_factory.mktemp("home"))


def run(home: Home, output: Path, **runtime: Any) -> Any:
    settings = stage_settings(2, {"optim": {"kind": "adamw"}}, **runtime)
    without_dropout = settings.replaced({"model": {"dropout": 0.0}})  # whose masks follow the micro-batches
    return home.pretrain(without_dropout, output, home=output / "home")


def weights(output: Path) -> Any:
    return load_file(output / "model" / "model.safetensors")


def test_in_deterministic_mode_nothing_is_measured_and_no_bit_is_another(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "fastest", lambda *given, **more: pytest.fail("it may not be called"))
    outputs = []
    for tune in ("off", "auto"):
        outputs.append(tmp_path / tune)
        assert "tuned" not in run(home, outputs[-1], tune=tune)
    assert "nothing is tuned" in caplog.text and "set runtime.deterministic=false" in caplog.text
    assert same(*map(weights, outputs))
    assert not (tmp_path / "auto" / "home").exists()


def test_else_the_stage_runs_with_what_is_fastest_and_does_not_measure_again(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are equal up to the order of sums."""
    monkeypatch.setattr(tuning, "step_seconds", lambda *given: {1: 2.0, 2: 1.0, 4: 3.0}[given[-1]])
    plain = run(home, tmp_path / "plain", deterministic=False)
    found = run(home, tmp_path / "tuned", deterministic=False, tune="auto")
    assert "tuned" not in plain and found["tuned"] == {"rows_per_device": 2}
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "tuned")) < 1e-4
    remembered = tmp_path / "tuned" / "home" / tuning.FILE
    assert [*json.loads(remembered.read_text()).values()] == [2]
    assert remembered.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tuning, "step_seconds", lambda *given: pytest.fail("it is remembered"))
    again = run(home, tmp_path / "tuned", deterministic=False, tune="auto")
    assert again["tuned"] == {"rows_per_device": 2}


def test_a_model_is_compiled_as_the_setting_says_and_else_on_cuda_in_long_runs_over_rows_of_one_width() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    rows, trimmed = NumberedRows(4), NumberedRows(4)
    trimmed.trimmed = True
    unset, on, off = (stage_settings(compile=compile).runtime for compile in (None, True, False))
    assert compiles(unset, cuda, rows, 500)
    assert not compiles(unset, cpu, rows, 500)
    assert not compiles(unset, cuda, rows, 499)
    assert not compiles(unset, cuda, trimmed, 500)
    assert not compiles(unset, cuda, user_task.Batches([1], list), 500), "rows of a user's task may have any shape"
    assert compiles(on, cpu, trimmed, 1)
    assert not compiles(off, cuda, rows, 500)
