"""The loop: accumulation, masking, resuming, extending, callbacks, precision; each against a reference."""

from __future__ import annotations

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
from support.tiny_trainers import CPU, SPARSE, Recorder, WatchedTask, make_trainer, settings_of_training, tiny_model

from ttrain.config import Optim, Schedule
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import TTrainError
from ttrain.model import factory
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback, LogRecord, MetricsFile
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import token_loss_sum
from ttrain.train.trainer import Cadence, Trainer

NO_CLIP = Optim(lr=1e-2, clip=1e9)
UNEVEN = [60, 5, 30, 2]


def gradients_of_one_step(rows: int, rows_per_device: int, live: list[int] | None = None, T: int = 16) -> dict[str, Any]:
    """The gradients of one step over all of the rows, and its logged loss under the name of `loss`."""
    config = settings_of_training(tokens=rows * T, tokens_per_step=rows * T, row_length=T, optim=NO_CLIP)
    model = tiny_model()
    task, recorder = WatchedTask(config, model), Recorder()
    trainer = make_trainer(
        config, model, NumberedRows(rows, T, live), rows_per_device=rows_per_device, task=task, callbacks=[recorder]
    )
    trainer.fit()
    assert task.optimizers is not None
    assert task.passes == -(-rows // rows_per_device)
    (found,) = task.optimizers.gradients
    return {**found, "loss": torch.tensor(recorder.figures("loss"))}


@pytest.mark.parametrize(
    ("rows", "rows_per_device", "live", "T"),
    [(32, 8, None, 16), (32, 1, None, 16), (33, 32, None, 16), (33, 4, None, 16), (4, 4, UNEVEN, 64), (4, 1, UNEVEN, 64)],
)
def test_a_step_has_the_loss_and_the_gradient_of_its_sum_over_its_live_targets(
    rows: int, rows_per_device: int, live: list[int] | None, T: int
) -> None:
    """Whatever the micro-batches: not over all tokens, and not the mean of the means."""
    found = gradients_of_one_step(rows, rows_per_device, live, T)
    task = LanguageModeling(settings_of_training(), tiny_model())
    module, batch = task.build_model(), NumberedRows(rows, T, live).batch(range(rows))
    loss = task.train_step(module, batch, CPU)
    assert loss.count == int((batch.labels_BT != IGNORE).sum()) < rows * T
    mean = loss.total / loss.count
    mean.backward()  # type: ignore[no-untyped-call]
    assert float(found.pop("loss")) == pytest.approx(float(mean), rel=1e-6)
    assert distance({name: p.grad for name, p in module.named_parameters() if p.grad is not None}, found) < 1e-6


def test_masked_tokens_do_not_move_the_loss() -> None:
    model = tiny_model()
    task = LanguageModeling(settings_of_training(), model)
    batch = NumberedRows(3).batch(range(3))
    logits = torch.randn(3, 16, VOCAB, generator=torch.Generator().manual_seed(0))
    labels = torch.from_numpy(batch.labels_BT)
    spoilt = torch.where((labels == IGNORE)[..., None], torch.full_like(logits, 1e4), logits)
    assert torch.equal(token_loss_sum(logits, labels), token_loss_sum(spoilt, labels))
    one_less = batch.labels_BT.copy()
    one_less[0, np.flatnonzero(one_less[0] != IGNORE)[0]] = IGNORE
    fewer = task.validation_step(task.build_model(), dataclasses.replace(batch, labels_BT=one_less), CPU)
    full = task.validation_step(task.build_model(), batch, CPU)
    assert fewer.count == full.count - 1
    assert float(fewer.total) < float(full.total)


def test_padding_does_not_move_the_loss() -> None:
    model = tiny_model()
    task = LanguageModeling(settings_of_training(), model)
    short = NumberedRows(3).batch(range(3))
    for pad_id in (0, 7):
        padding = (
            np.full((3, 5), pad_id), np.full((3, 5), IGNORE), np.zeros((3, 5), np.int64), np.full((3, 5), -1),
        )  # fmt: skip
        parts = zip(vars(short).values(), padding, strict=True)
        padded = Batch(*(np.concatenate([array, pad], axis=1) for array, pad in parts))
        first, second = (task.validation_step(task.build_model(), batch, CPU) for batch in (short, padded))
        assert first.count == second.count
        assert float(first.total) == pytest.approx(float(second.total), rel=1e-6)


def test_all_labels_ignored_give_0_with_0_gradients() -> None:
    model = tiny_model()
    task = LanguageModeling(settings_of_training(), model)
    loss = task.train_step(task.build_model(), NumberedRows(2).batch([0, 1]).without_targets(), CPU)
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert (float(loss.total.detach()), loss.count) == (0.0, 0)
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters())


def test_a_step_without_a_target_is_an_error_that_says_so() -> None:
    config, model = settings_of_training(), tiny_model()
    with pytest.raises(TTrainError, match="step 1 has no token to learn from"):
        make_trainer(config, model, NumberedRows(12, live=[0] * 12)).fit()


# --- resuming -----------------------------------------------------------------------------------------------------------


def run(directory: Path, config: Any, *, stop_after: int | None = None, seed: int = 1, **options: Any) -> Trainer:
    """Train a model with dropout in `directory`, from where it stands there; 52 rows, so that an epoch ends in a step."""
    model = tiny_model(seed=seed, dropout=0.1)
    trainer = make_trainer(
        config, model, NumberedRows(52), directory=directory / "checkpoints", stop_after=stop_after,
        callbacks=[MetricsFile(directory / "metrics.jsonl")], validation=[NumberedRows(3).batch(range(3))], **options,
    )  # fmt: skip
    trainer.result = trainer.fit()  # type: ignore[attr-defined]
    return trainer


@pytest.mark.parametrize(("kind", "precision"), [("adamw", "bf16"), ("muon", "fp32")])
def test_resumed_equals_uninterrupted(tmp_path: Path, kind: Any, precision: str) -> None:
    torch.set_num_threads(2)
    config = settings_of_training(optim=Optim(kind=kind, lr=1e-2), precision=precision)
    cadence = Cadence(log=3, checkpoint=10, validate=4)
    straight = run(tmp_path / "straight", config, cadence=cadence)
    stopped = run(tmp_path / "stopped", config, cadence=cadence, stop_after=10)
    assert (stopped.result.stop_reason, stopped.result.step) == ("interrupted", 10)  # type: ignore[attr-defined]
    again = run(tmp_path / "stopped", config, cadence=cadence, stop_after=4, seed=2)
    assert again.result.step == 14  # type: ignore[attr-defined]
    assert again.counters.window.steps == 2, "the window of the curve is open at this checkpoint"
    resumed = run(tmp_path / "stopped", config, cadence=cadence, seed=3)
    assert resumed.result.resumed_from_step == 14  # type: ignore[attr-defined]
    assert same(straight.weights.state(), resumed.weights.state())
    assert same(straight.optimizers.state(), resumed.optimizers.state())
    assert curve(tmp_path / "straight" / "metrics.jsonl") == curve(tmp_path / "stopped" / "metrics.jsonl")
    first, second = (dataclasses.asdict(trainer.result) for trainer in (straight, resumed))  # type: ignore[attr-defined]
    for timed in ("seconds", "resumed_from_step"):
        del first[timed], second[timed]
    assert first == second


def test_resumed_equals_uninterrupted_where_the_process_died_between_two_checkpoints(tmp_path: Path) -> None:
    """The curve beyond the checkpoint is cut off and written again, and the rows are the same."""

    class Dies(Callback):
        def log(self, record: LogRecord) -> None:
            if record.step == 15:
                raise KeyboardInterrupt

    config = settings_of_training()
    straight = run(tmp_path / "straight", config)
    model = tiny_model(dropout=0.1)
    dying = make_trainer(
        config, model, NumberedRows(52), directory=tmp_path / "dead" / "checkpoints",
        callbacks=[MetricsFile(tmp_path / "dead" / "metrics.jsonl"), Dies()],
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        dying.fit()
    assert dying.checkpoints is not None
    dying.checkpoints.close()
    with (tmp_path / "dead" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "metr')  # half a line, as a kill leaves it
    resumed = run(tmp_path / "dead", config, seed=2)
    assert resumed.result.resumed_from_step == 10  # type: ignore[attr-defined]
    assert same(straight.weights.state(), resumed.weights.state())
    assert curve(tmp_path / "straight" / "metrics.jsonl") == curve(tmp_path / "dead" / "metrics.jsonl")


def test_a_validation_does_not_move_the_training(tmp_path: Path) -> None:
    config = settings_of_training(tokens=8 * 96)
    often = run(tmp_path / "often", config, cadence=Cadence(log=3, checkpoint=10, validate=1))
    never = run(tmp_path / "never", config)
    assert same(often.weights.state(), never.weights.state())


def test_own_checkpoints_win_over_the_one_to_start_from(tmp_path: Path) -> None:
    run(tmp_path / "short", settings_of_training(), keep=3)
    start = checkpoint.read(tmp_path / "short" / "checkpoints" / "step-00000010")
    config = settings_of_training(tokens=24 * 96)
    run(tmp_path / "long", config, start=start, stop_after=3)
    resumed = run(tmp_path / "long", config, start=start)
    assert resumed.result.resumed_from_step == 13  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_checkpoint_shows_the_step_it_was_taken_at_however_slow_the_writer(tmp_path: Path, precision: str) -> None:
    """One writer is waited for at once; the other one begins to write when training is two steps on."""
    config = settings_of_training(tokens=14 * 96, precision=precision, schedule=Schedule(kind="constant"))
    moved_on = threading.Event()

    class Waits(Callback):
        def saved(self, step: int) -> None:
            prompt.checkpoints.wait()  # type: ignore[union-attr]

    class Tells(Callback):
        def log(self, record: LogRecord) -> None:
            if record.step == 12:
                moved_on.set()

    def late() -> dict[str, bytes]:
        assert moved_on.wait(20)
        return {}

    cadence = Cadence(log=4, checkpoint=10)
    prompt = make_trainer(
        config, tiny_model(), NumberedRows(52), directory=tmp_path / "prompt", callbacks=[Waits()], cadence=cadence
    )
    slow = make_trainer(
        config, tiny_model(), NumberedRows(52), directory=tmp_path / "slow", callbacks=[Tells()], cadence=cadence
    )
    slow.checkpoints.files = late  # type: ignore[union-attr]
    for trainer in (prompt, slow):
        trainer.fit()
    wanted, found = (checkpoint.read(tmp_path / name / "step-00000010") for name in ("prompt", "slow"))
    assert wanted.state["counters"]["window"]["steps"] == 2
    assert found.state == wanted.state
    assert same(found.weights, wanted.weights)
    assert same(found.optimizer, wanted.optimizer)


# --- what is told -------------------------------------------------------------------------------------------------------


def test_the_validation_loss_does_not_depend_on_the_batch() -> None:
    rows, model = NumberedRows(12, live=[1 + n for n in range(12)]), tiny_model()
    found = []
    for size in (1, 5, 12):
        batches = [rows.batch(range(start, min(12, start + size))) for start in range(0, 12, size)]
        found.append(make_trainer(settings_of_training(), model, rows, validation=batches).validate(batches))
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    logits = model(torch.from_numpy(rows.batch([0]).input_ids_BT)).logits
    assert math.isfinite(found[0]) and logits.shape[-1] == VOCAB


def test_the_logged_rate_is_that_of_the_schedule() -> None:
    recorder, config = Recorder(), settings_of_training(optim=Optim(kind="muon", lr=1e-2, muon_lr=3e-2))
    trainer = make_trainer(config, tiny_model(), NumberedRows(52), callbacks=[recorder], cadence=Cadence(log=1))
    trainer.fit()
    factors = [trainer.factor(step) for step in range(20)]
    assert recorder.figures("lr_adamw") == pytest.approx([1e-2 * factor for factor in factors])
    assert recorder.figures("lr_muon") == pytest.approx([3e-2 * factor for factor in factors])


def test_the_norm_is_logged_before_the_clip_and_applied_after_it() -> None:
    clip = 0.05
    config, model, recorder = settings_of_training(tokens=6 * 96, optim=Optim(clip=clip)), tiny_model(), Recorder()
    task = WatchedTask(config, model)
    make_trainer(config, model, NumberedRows(52), callbacks=[recorder], cadence=Cadence(log=1), task=task).fit()
    assert task.optimizers is not None
    applied = [float(torch.cat([g.flatten() for g in grads.values()]).norm()) for grads in task.optimizers.gradients]
    assert max(applied) <= clip * (1 + 1e-5)
    assert min(recorder.figures("grad_norm")) > 2 * clip
    whole = settings_of_training(optim=NO_CLIP, tokens=96)
    model = tiny_model()
    task = WatchedTask(whole, model)
    make_trainer(whole, model, NumberedRows(52), task=task).fit()
    assert task.optimizers is not None
    unclipped = float(torch.cat([g.flatten() for g in task.optimizers.gradients[0].values()]).norm())
    assert recorder.figures("grad_norm")[0] == pytest.approx(unclipped, rel=1e-5)


def test_no_figure_of_a_metrics_file_is_not_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.start(0, 2)
    file.log(LogRecord(1, 2, 96, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5}))
    file.end(1)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["metrics"] == {"loss": None, "grad_norm": None, "lr": 0.5}


# --- precision in the loop ----------------------------------------------------------------------------------------------


def test_fp16_skips_a_step_that_overflows_and_halves_the_scale() -> None:
    config, model = settings_of_training(precision="fp16", tokens=3 * 96), tiny_model()
    task = WatchedTask(config, model, spoil=lambda passes: math.inf if passes == 2 else 1.0)
    seen: list[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    class Looks(Callback):
        def log(self, record: LogRecord) -> None:
            seen.append((trainer.loss_scale.scale, copies(factory.state(model)), copies(trainer.optimizers.state())))

    trainer = make_trainer(
        config, model, NumberedRows(52), rows_per_device=6, task=task, callbacks=[Looks()], cadence=Cadence(log=1)
    )
    result = trainer.fit()
    (scale, weights, state), (halved, kept, kept_state), (still, moved, _) = seen
    assert (scale, halved, still) == (2.0**16, 2.0**15, 2.0**15)
    assert same(weights, kept)
    assert same(state, kept_state)
    assert not same(kept, moved)
    assert (result.skipped_steps, result.step) == (1, 3)
    assert all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in model.parameters())


def test_the_scale_of_fp16_and_its_count_of_good_steps_survive_a_stop(tmp_path: Path) -> None:
    config = settings_of_training(precision="fp16")

    def spoil(passes: int) -> float:
        return math.inf if passes == 2 else 1.0

    for stop_after in (4, None):
        model = tiny_model()
        trainer = make_trainer(
            config, model, NumberedRows(52), rows_per_device=6, directory=tmp_path, stop_after=stop_after,
            task=WatchedTask(config, model, spoil if stop_after else None),
        )  # fmt: skip
        result = trainer.fit()
    assert (trainer.loss_scale.scale, trainer.loss_scale.good_steps) == (2.0**15, 18)
    assert result.skipped_steps == 1


def test_bf16_stays_within_1_percent_of_fp32_and_its_master_weights_are_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        model = tiny_model()
        rows = NumberedRows(13)
        trainer = make_trainer(
            settings_of_training(precision=precision), model, rows, cadence=SPARSE, validation=[rows.batch(range(13))]
        )
        losses[precision] = trainer.fit().validation_loss
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {t.dtype for t in trainer.optimizers.state().values()} == {torch.float32}
    assert losses["fp32"] != losses["bf16"], "bf16 computes in another precision"
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["fp32"] < math.log(VOCAB) - 0.2, "something was learnt"


def losses_of_one_row(dropout: float) -> list[float]:
    """The losses of six steps over the same row, at a learning rate that moves no weight that fp32 can tell."""
    config = settings_of_training(tokens=6 * 16, tokens_per_step=16, optim=Optim(lr=1e-12, clip=1e9))
    recorder = Recorder()
    trainer = make_trainer(
        config, tiny_model(dropout=dropout), NumberedRows(1), callbacks=[recorder], cadence=Cadence(log=1, checkpoint=0)
    )
    trainer.fit()
    return recorder.figures("loss")


def test_dropout_differs_from_step_to_step() -> None:
    assert len({round(loss, 5) for loss in losses_of_one_row(0.0)}) == 1, "without dropout every step is the same"
    assert len({round(loss, 5) for loss in losses_of_one_row(0.5)}) == 6


def test_validation_runs_in_the_precision_of_training() -> None:
    validation = [NumberedRows(6).batch(range(6))]
    losses = {}
    for precision in ("fp32", "bf16"):
        model = tiny_model()
        config = settings_of_training(precision=precision)
        losses[precision] = make_trainer(config, model, NumberedRows(12), validation=validation).validate(validation)
        task = LanguageModeling(config, model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = task.validation_step(task.build_model().eval(), validation[0], CPU)
        assert losses[precision] == pytest.approx(float(loss.total) / loss.count, rel=1e-7)
    assert losses["bf16"] != losses["fp32"]
