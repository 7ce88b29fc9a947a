"""`runtime.tune`: what the search tries, when it ends, that all ranks agree, and what a stage makes of the choice."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import copies, distance, same
from support.tiny_data import NumberedRows
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import ALONE, in_ranks, settings_of_training, tiny_model

from ttrain.core.machine import processor
from ttrain.data.loader import ShuffledOrder
from ttrain.doctor import machine
from ttrain.stages import tuning, user_task
from ttrain.stages.trainable_model import compiles
from ttrain.stages.tuning import Axis, Search, Subject
from ttrain.store import tunings
from ttrain.store.tunings import Choice
from ttrain.train import resource_limits
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision

START = Choice(4, "records", 256, False)
AXES = [
    Axis("attention", tunings.ATTENTIONS),
    Axis("rows_per_device", [1, 2, 4, 8, 16, 32], climbs=True),
    Axis("loss_chunk_tokens", [256, 512, 1024], climbs=True),
]
DESCRIBED = {"processor": "a CPU"}
FASTEST = Choice(16, "masked", 512, False)


def seconds(choice: Choice) -> float:
    rows = {1: 9.0, 2: 7.0, 4: 5.0, 8: 4.0, 16: 3.0, 32: 6.0}[choice.rows_per_device]
    return rows * (0.8 if choice.attention == "masked" else 1.0) * (0.9 if choice.loss_chunk_tokens == 512 else 1.0)


def leaves_out(choice: Choice) -> float:
    if choice.rows_per_device >= 16:
        raise torch.OutOfMemoryError("CUDA out of memory")
    if choice.attention == "masked":
        raise RuntimeError("no kernel")
    return seconds(choice)


def by_hundredths(choice: Choice) -> float:
    return (0.985 if choice.attention == "masked" else 1.0) * (0.985 if choice.loss_chunk_tokens == 512 else 1.0)


@pytest.mark.parametrize(
    ("measure", "axes", "best", "gain"),
    [
        pytest.param(seconds, AXES, FASTEST, 5.0 / (3.0 * 0.8 * 0.9), id="the fastest"),
        pytest.param(leaves_out, AXES, Choice(8, "records", 512, False), 5.0 / (4.0 * 0.9), id="of what can be computed"),
        pytest.param(lambda choice: 1.0 - 0.01 * (choice != START), [Axis("attention", ["masked"])], START, 1.0, id="noise"),
        pytest.param(
            by_hundredths, [AXES[0], AXES[2]], Choice(4, "masked", 512, False), 1 / 0.985**2, id="small gains together"
        ),
    ],
)
def test_the_search_finds_the_fastest_and_tries_no_further_where_a_direction_loses(
    measure: Callable[[Choice], float], axes: list[Axis], best: Choice, gain: float
) -> None:
    search = Search(measure, ALONE)
    assert search.run(START, axes) == (best, pytest.approx(gain))
    assert not any(choice.rows_per_device == 1 for choice in search.seconds)


def test_settings_whose_rows_do_not_fit_begin_with_half_of_them_or_a_quarter() -> None:
    def measure(choice: Choice) -> float:
        if choice.rows_per_device > 4:
            raise MemoryError
        return seconds(choice)

    assert Search(measure, ALONE).fitting(Choice(16, "records", 256, False)) == START


@pytest.mark.parametrize(("error", "measured"), [(MemoryError(), 5), (RuntimeError("no compiler here"), 1)], ids=str)
def test_where_nothing_can_be_computed_the_settings_stay(error: Exception, measured: int) -> None:
    """Fewer rows help against a lack of memory alone."""
    calls: list[Choice] = []

    def measure(choice: Choice) -> float:
        calls.append(choice)
        raise error

    start = Choice(16, "records", 256, False)
    search = Search(measure, ALONE)
    assert search.fitting(start) == start
    assert search.run(start, AXES) == (start, 1.0)
    assert len(calls) == measured


def test_what_was_slow_while_another_program_ran_is_measured_again() -> None:
    calls: list[Choice] = []

    def measure(choice: Choice) -> float:
        calls.append(choice)
        disturbed = choice.loss_chunk_tokens == 512 and calls.count(choice) == 1
        return seconds(choice) * (1.14 if disturbed else 1.0)

    best, _ = Search(measure, ALONE).run(START, AXES)
    assert best == FASTEST


def test_it_ends_when_the_time_is_over_with_the_best_so_far() -> None:
    now = [0.0]

    def measure(choice: Choice) -> float:
        now[0] += 25.0
        return seconds(choice)

    search = Search(measure, ALONE, clock=lambda: now[0])
    best, _ = search.run(START, AXES)
    assert len(search.seconds) == 3 and now[0] == 75.0, "the third begins before the minute is over, and no fourth"
    assert best == Choice(8, "masked", 256, False)


# --- a run --------------------------------------------------------------------------------------------------------------


def subject(ranks: Ranks = ALONE) -> Subject:
    rows = NumberedRows(40)
    order = ShuffledOrder(40, 6, 120, seed=1)
    task = LanguageModeling(settings_of_training(), tiny_model())
    return Subject(task, rows, order, Precision("fp32", torch.device("cpu")), ranks)


def fake(monkeypatch: pytest.MonkeyPatch, measure: Callable[[Any, Choice], float]) -> None:
    monkeypatch.setattr(Subject, "seconds_of_a_step", measure)


def tuned(home: Path | None, ranks: Ranks = ALONE, stop: Callable[[], bool] = lambda: False) -> Choice:
    return tuning.tune(subject(ranks), START, AXES, DESCRIBED, home=home, stop=stop)


def test_measuring_leaves_weights_gradients_and_random_numbers_as_they_are() -> None:
    measured = subject()
    module = measured.task.build_model()
    before = copies(module.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert measured.seconds_of_a_step(Choice(2, "masked", 256, False)) > 0
    assert same(before, module.state_dict())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_the_rank_with_most_micro_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows: in threes one micro-batch each for two ranks, in fours two micro-batches, and in twos two and one."""
    monkeypatch.setattr(tuning, "min", lambda values: 1.0, raising=False)
    measured = subject(Ranks(0, 2, torch.device("cpu")))
    passes = {rows: measured.seconds_of_a_step(Choice(rows, "records", 256, False)) for rows in (2, 3, 6)}
    assert passes == {2: 2.0, 3: 1.0, 6: 1.0}


def test_what_is_found_is_remembered_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake(monkeypatch, lambda self, choice: seconds(choice))
    caplog.set_level(logging.INFO, "ttrain")
    first = tuned(tmp_path)
    assert first == FASTEST
    assert "tuning: took" in caplog.text and f"{first}, 2.31 times the speed of the settings" in caplog.text

    def refuse(self: Any, choice: Choice) -> float:
        raise AssertionError("it is remembered")

    fake(monkeypatch, refuse)
    assert tuned(tmp_path) == first
    assert "remembered for this machine" in caplog.text
    fake(monkeypatch, lambda self, choice: seconds(choice))
    assert tuned(None) == first, "without a home, too"


def test_a_search_that_is_stopped_is_not_remembered_and_after_an_error_the_lock_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    def measure(self: Any, choice: Choice) -> float:
        count[0] += 1
        if count[0] > 2:
            raise KeyboardInterrupt
        return seconds(choice)

    fake(monkeypatch, measure)
    tuned(tmp_path, stop=lambda: count[0] >= 2)
    assert count == [2] and not (tmp_path / tunings.FILE).exists()
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path)
    fake(monkeypatch, lambda self, choice: seconds(choice))
    assert tuned(tmp_path) == FASTEST


def test_of_several_at_once_one_measures_and_the_others_take_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first measures."""
    measured: list[Choice] = []
    found: list[Choice] = []
    second = threading.Thread(target=lambda: found.append(tuned(tmp_path)))

    def measure(self: Any, choice: Choice) -> float:
        if not measured:
            second.start()
        measured.append(choice)
        return seconds(choice)

    fake(monkeypatch, measure)
    found.append(tuned(tmp_path))
    count = len(measured)
    second.join()
    assert found == [FASTEST] * 2
    assert len(measured) == count


def test_compiling_is_tried_in_runs_that_are_long_enough_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Choice] = []
    fake(monkeypatch, lambda self, choice: tried.append(choice) or 1.0)
    axes = [Axis("compile", [True])]
    for pays, expected in ((21.0, False), (19.0, True)):  # seconds of twenty steps of one second
        monkeypatch.setattr(tuning, "COMPILING_PAYS_SECONDS", pays)
        tried.clear()
        tuning.tune(subject(), START, axes, DESCRIBED, home=None, stop=lambda: False)
        assert any(choice.compile for choice in tried) is expected


def test_all_ranks_choose_alike_though_each_measures_something_else(tmp_path: Path) -> None:
    """Rank 1 is slow with a mask, and has no memory for 16 rows; a damaged file is read by the first alone."""

    def work(ranks: Ranks) -> str:
        def measure(self: Any, choice: Choice) -> float:
            if not ranks.first and choice.rows_per_device == 16:
                raise MemoryError
            return seconds(choice) * (2.0 if choice.attention == "masked" and not ranks.first else 1.0)

        Subject.seconds_of_a_step = measure  # type: ignore[method-assign]  # this process ends with the test
        first = tuned(tmp_path / "home", ranks)
        assert tuned(tmp_path / "home", ranks) == first
        return str(first)

    (tmp_path / "home" / "cache").mkdir(parents=True)
    (tmp_path / "home" / tunings.FILE).write_text("{")
    assert in_ranks(2, tmp_path / "ranks", work) == [str(Choice(8, "records", 512, False))] * 2


def test_while_it_measures_memory_that_is_not_there_is_an_error_and_not_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(resource_limits, "available_bytes", lambda device: 1e8)
    with resource_limits.cap_at_available_memory(device, ranks=2):
        assert len(torch.empty(1_000_000)) == 1_000_000
        with pytest.raises(RuntimeError) as error:
            torch.empty(100_000_000)
        assert resource_limits.is_out_of_memory(error.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


# --- a stage ------------------------------------------------------------------------------------------------------------

CHOSEN = Choice(2, "masked", 256, False)


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
    monkeypatch.setattr(tuning, "tune", lambda *given, **more: pytest.fail("it may not be called"))
    outputs = []
    for tune in ("off", "auto"):
        outputs.append(tmp_path / tune)
        assert "tuned" not in run(home, outputs[-1], tune=tune)
    assert "nothing is tuned" in caplog.text and "set runtime.deterministic=false" in caplog.text
    assert same(*map(weights, outputs))
    assert not (tmp_path / "auto" / "home").exists()


def test_else_the_stage_runs_with_what_is_fastest_and_the_weights_are_equal_up_to_the_order_of_sums(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Any, choice: Choice) -> float:
        differing = sum(value != getattr(CHOSEN, name) for name, value in vars(choice).items())
        return 1.0 if not differing else 2.0 + differing

    monkeypatch.setattr(tuning.Subject, "seconds_of_a_step", measure)
    plain = run(home, tmp_path / "plain", deterministic=False)
    found = run(home, tmp_path / "tuned", deterministic=False, tune="auto")
    assert "tuned" not in plain and found["tuned"] == vars(CHOSEN)
    assert distance(weights(tmp_path / "plain"), weights(tmp_path / "tuned")) < 1e-4
    (remembered,) = tunings.of_machine(tmp_path / "tuned" / "home", processor())
    assert remembered.choice == CHOSEN and remembered.subject["rows_per_step"] == 8
    assert "rows of 32: rows_per_device=2 attention=masked" in machine.tuning(stage_settings().runtime, [remembered]).figure


def test_it_measures_a_real_stage_and_what_has_a_value_stays(home: Home, tmp_path: Path) -> None:
    options = {"deterministic": False, "tune": "auto", "attention": "records", "loss_chunk_tokens": 64, "compile": False}
    found = run(home, tmp_path, **options)
    assert found["tuned"]["attention"] == "records" and found["tuned"]["loss_chunk_tokens"] == 64
    assert found["tuned"]["rows_per_device"] in (1, 2, 4, 8) and found["tuned"]["compile"] is False
    assert found["steps"] == 2


def test_the_doctor_says_that_tuning_and_determinism_contradict_each_other() -> None:
    assert machine.tuning(stage_settings().runtime, []).ok
    contradicting = machine.tuning(stage_settings(tune="auto").runtime, [])
    assert not contradicting.ok and "runtime.deterministic=false" in str(contradicting)
    assert machine.tuning(stage_settings(tune="auto", deterministic=False).runtime, []).ok


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
