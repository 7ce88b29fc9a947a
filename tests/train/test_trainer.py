"""The loop: accumulation, masking, resuming, extending, callbacks, precision; each against a
reference."""

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import copies, curve, distance, same
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_trainers import CPU, Recorder, WatchedTask, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config import Optim, Schedule
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import TTrainError
from ttrain.model import factory
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback, LogRecord, MetricsFile
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import token_loss_sum
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

UNEVEN = [60, 5, 30, 2]
EVERY_STEP = Cadence(log=1)


@pytest.mark.parametrize(
    ("rows", "rows_per_device", "live", "T"),
    [(8, 4, None, 16), (9, 8, None, 16), (9, 2, None, 16), (4, 4, UNEVEN, 64), (4, 1, UNEVEN, 64)],
)
def test_a_step_has_the_loss_and_the_gradient_of_its_sum_over_its_live_targets(
    rows: int, rows_per_device: int, live: list[int] | None, T: int
) -> None:
    """Whatever the micro-batches: not over all tokens, and not the mean of the means."""
    budget = {"tokens": rows * T, "tokens_per_step": rows * T, "row_length": T}
    config = settings_of(**budget, optim=Optim(lr=1e-2, clip=1e9))
    model, recorder, numbered = tiny_model(), Recorder(), NumberedRows(rows, T, live)
    watched = WatchedTask(config, model)
    options: dict[str, Any] = {"rows_per_device": rows_per_device, "callbacks": [recorder]}
    make_trainer(config, model, numbered, task=watched, **options).fit()
    assert watched.passes == -(-rows // rows_per_device) and watched.optimizers is not None
    (gradients,) = watched.optimizers.gradients
    task = LanguageModeling(settings_of(), tiny_model())
    module, batch = task.build_model(), numbered.batch(range(rows))
    loss = task.train_step(module, batch, CPU)
    assert loss.count == int((batch.labels_BT != IGNORE).sum()) < rows * T
    mean = loss.total / loss.count
    mean.backward()  # type: ignore[no-untyped-call]
    assert recorder.figures("loss") == [pytest.approx(float(mean.detach()), rel=1e-6)]
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert distance(expected, gradients) < 1e-6


def test_neither_masked_tokens_nor_padding_move_the_loss() -> None:
    task = LanguageModeling(settings_of(), tiny_model())
    batch = NumberedRows(3).batch(range(3))
    logits = torch.randn(3, 16, VOCAB, generator=torch.Generator().manual_seed(0))
    labels = torch.from_numpy(batch.labels_BT)
    spoilt = torch.where((labels == IGNORE)[..., None], torch.full_like(logits, 1e4), logits)
    assert torch.equal(token_loss_sum(logits, labels), token_loss_sum(spoilt, labels))

    def loss_of(batch: Batch) -> tuple[float, int]:
        loss = task.validation_step(task.build_model(), batch, CPU)
        return float(loss.total), loss.count

    full, count = loss_of(batch)
    one_less = batch.labels_BT.copy()
    one_less[0, np.flatnonzero(one_less[0] != IGNORE)[0]] = IGNORE
    fewer, count_of_fewer = loss_of(dataclasses.replace(batch, labels_BT=one_less))
    assert count_of_fewer == count - 1 and fewer < full
    for pad_id in (0, 7):
        pads = zip(vars(batch).values(), (pad_id, IGNORE, 0, -1), strict=True)
        arrays = [np.pad(array, ((0, 0), (0, 5)), constant_values=pad) for array, pad in pads]
        assert loss_of(Batch(*arrays)) == (pytest.approx(full, rel=1e-6), count)


def test_a_step_without_a_target_is_an_error_that_says_so() -> None:
    config, model = settings_of(), tiny_model()
    with pytest.raises(TTrainError, match=r"step 1\b"):
        make_trainer(config, model, NumberedRows(12, live=[0] * 12)).fit()


def run(directory: Path, config: Any, *, seed: int = 1, **options: Any) -> Any:
    """Train a model with dropout in `directory`, from where it stands there."""
    options |= {"directory": directory / "checkpoints"}
    options |= {"validation": [NumberedRows(3).batch([0, 1, 2])]}
    options |= {"callbacks": [MetricsFile(directory / "metrics.jsonl")]}
    model, rows = tiny_model(seed=seed, dropout=0.1), NumberedRows(52)  # an epoch ends in a step
    trainer: Any = make_trainer(config, model, rows, **options)
    trainer.result = trainer.fit()
    return trainer


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    muon = Optim(kind="muon", lr=1e-2)
    config = settings_of(optim=muon, precision="bf16", tokens=10 * 96)
    cadence = Cadence(log=3, checkpoint=4, validate=4)
    straight = run(tmp_path / "straight", config, cadence=cadence)
    stopped = run(tmp_path / "stopped", config, cadence=cadence, stop_after=4)
    assert (stopped.result.stop_reason, stopped.result.step) == ("interrupted", 4)
    again = run(tmp_path / "stopped", config, cadence=cadence, stop_after=1, seed=2)
    assert again.result.step == 5
    assert again.counters.window.steps == 2, "the window of the curve is open at this checkpoint"
    resumed = run(tmp_path / "stopped", config, cadence=cadence, seed=3)
    assert resumed.result.resumed_from_step == 5
    assert same(straight.weights.state(), resumed.weights.state())
    assert same(straight.optimizers.state(), resumed.optimizers.state())
    curves = [curve(tmp_path / name / "metrics.jsonl") for name in ("straight", "stopped")]
    assert curves[0] == curves[1]
    first, second = (dataclasses.asdict(trainer.result) for trainer in (straight, resumed))
    for timed in ("seconds", "resumed_from_step"):
        del first[timed], second[timed]
    assert first == second


def test_own_checkpoints_win_over_the_one_to_start_from(tmp_path: Path) -> None:
    cadence = Cadence(log=3, checkpoint=3)
    run(tmp_path / "short", settings_of(tokens=5 * 96), cadence=cadence)
    start = checkpoint.read(tmp_path / "short" / "checkpoints" / "step-00000003")
    config = settings_of(tokens=8 * 96)
    run(tmp_path / "long", config, start=start, stop_after=2, cadence=cadence)
    resumed = run(tmp_path / "long", config, start=start, cadence=cadence)
    assert resumed.result.resumed_from_step == 5


def test_a_checkpoint_shows_the_step_it_was_taken_at(tmp_path: Path) -> None:
    """One writer is waited for at once; the other one writes when training is two steps on."""
    constant, moved_on = Schedule(kind="constant"), threading.Event()
    config = settings_of(tokens=7 * 96, precision="fp16", schedule=constant)

    class Waits(Callback):
        def saved(self, step: int) -> None:
            prompt.checkpoints.wait()  # type: ignore[union-attr]

    class MovesOn(Callback):
        def log(self, record: LogRecord) -> None:
            if record.step == 6:
                moved_on.set()

    def late() -> dict[str, bytes]:
        assert moved_on.wait(20)
        return {}

    def trainer_of(name: str, callback: Callback) -> Trainer:
        options: dict[str, Any] = {"directory": tmp_path / name, "callbacks": [callback]}
        cadence = Cadence(log=3, checkpoint=5)
        return make_trainer(config, tiny_model(), NumberedRows(52), cadence=cadence, **options)

    prompt, slow = trainer_of("prompt", Waits()), trainer_of("slow", MovesOn())
    slow.checkpoints.files = late  # type: ignore[union-attr]
    for trainer in (prompt, slow):
        trainer.fit()
    steps = [tmp_path / name / "step-00000005" for name in ("prompt", "slow")]
    expected, late_one = map(checkpoint.read, steps)
    assert expected.state["counters"]["window"]["steps"] == 2
    assert late_one.state == expected.state
    assert same(late_one.weights, expected.weights)
    assert same(late_one.optimizer, expected.optimizer)


def test_the_logged_rate_is_that_of_the_schedule() -> None:
    optim, recorder = Optim(kind="muon", lr=1e-2, muon_lr=3e-2), Recorder()
    config = settings_of(optim=optim, tokens=6 * 96)
    options: dict[str, Any] = {"callbacks": [recorder], "cadence": EVERY_STEP}
    trainer = make_trainer(config, tiny_model(), NumberedRows(52), **options)
    trainer.fit()
    factors = [trainer.factor(step) for step in range(6)]
    assert len({*factors}) > 3
    assert recorder.figures("lr_adamw") == pytest.approx([1e-2 * factor for factor in factors])
    assert recorder.figures("lr_muon") == pytest.approx([3e-2 * factor for factor in factors])


def test_the_norm_is_logged_before_the_clip_and_applied_after_it() -> None:
    def norms(clip: float | None, steps: int) -> tuple[list[float], list[float]]:
        """Of the gradients with which steps were made, and the logged ones."""
        config = settings_of(tokens=steps * 96, optim=Optim(clip=clip))
        recorder, task = Recorder(), WatchedTask(config, model := tiny_model())
        options: dict[str, Any] = {"callbacks": [recorder], "cadence": EVERY_STEP, "task": task}
        make_trainer(config, model, NumberedRows(52), **options).fit()
        assert task.optimizers is not None
        flat = [torch.nn.utils.parameters_to_vector(g.values()) for g in task.optimizers.gradients]
        return [float(gradient.norm()) for gradient in flat], recorder.figures("grad_norm")

    applied, logged = norms(0.05, 4)
    assert max(applied) <= 0.05 * (1 + 1e-5) and min(logged) > 2 * 0.05
    (unclipped,), _ = norms(None, 1)
    assert logged[0] == pytest.approx(unclipped, rel=1e-5)
    with pytest.raises(ValueError, match="than 0"):
        Optim(clip=0)


def test_no_figure_of_a_metrics_file_is_not_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.start(0, 2)
    file.log(LogRecord(1, 2, 96, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5}))
    file.end(1)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {"loss": None, "grad_norm": None, "lr": 0.5}


def test_fp16_skips_a_step_that_overflows_and_halves_the_scale() -> None:
    config, model = settings_of(precision="fp16", tokens=3 * 96), tiny_model()
    task = WatchedTask(config, model, spoil=lambda passes: math.inf if passes == 2 else 1.0)
    logged: list[Any] = []

    class Copies(Callback):
        def log(self, record: LogRecord) -> None:
            tensors = copies(factory.state(model)), copies(trainer.optimizers.state())
            logged.append((trainer.loss_scale.scale, *tensors))

    options: dict[str, Any] = {"callbacks": [Copies()], "cadence": EVERY_STEP, "task": task}
    trainer = make_trainer(config, model, NumberedRows(52), rows_per_device=6, **options)
    result = trainer.fit()
    (scale, weights, state), (halved, kept, kept_state), (still, moved, _) = logged
    assert (scale, halved, still) == (2.0**16, 2.0**15, 2.0**15)
    assert same(weights, kept)
    assert same(state, kept_state)
    assert not same(kept, moved)
    assert (result.skipped_steps, result.step) == (1, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_bf16_stays_within_1_percent_of_fp32_and_its_master_weights_are_fp32() -> None:
    losses, rows = {}, NumberedRows(6)
    batch = rows.batch(range(6))
    for precision in ("fp32", "bf16"):
        config = settings_of(precision=precision, tokens=12 * 96, optim=Optim(lr=1e-2))
        model = tiny_model()
        trainer = make_trainer(config, model, rows, rows_per_device=6, validation=[batch])
        losses[precision] = trainer.fit().validation_loss
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {t.dtype for t in trainer.optimizers.state().values()} == {torch.float32}
        task = LanguageModeling(config, model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = task.validation_step(task.build_model().eval(), batch, CPU)
        expected = float(loss.total) / loss.count
        assert losses[precision] == pytest.approx(expected, rel=1e-7), "validated in that precision"
    assert losses["fp32"] != losses["bf16"], "bf16 computes in another precision"
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["fp32"] < math.log(VOCAB) - 0.2, "the model has learned"


@pytest.mark.parametrize(("dropout", "different"), [(0.0, 1), (0.5, 4)])
def test_dropout_differs_from_step_to_step(dropout: float, different: int) -> None:
    """Of four steps, whose rate moves no weight."""
    optim = Optim(lr=1e-12, clip=1e9)
    config = settings_of(tokens=4 * 16, tokens_per_step=16, optim=optim)
    recorder, model = Recorder(), tiny_model(dropout=dropout)
    options: dict[str, Any] = {"callbacks": [recorder], "cadence": Cadence(log=1, checkpoint=0)}
    make_trainer(config, model, NumberedRows(1), **options).fit()
    assert len({round(loss, 5) for loss in recorder.figures("loss")}) == different
