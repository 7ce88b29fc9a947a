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
from support.doubles import (
    CPU,
    VOCAB,
    NumberedRows,
    Recorder,
    WatchedTask,
    curve,
    distance,
    make_trainer,
    same,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Optim, Schedule
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import TTrainError
from ttrain.train import checkpoint
from ttrain.train.callbacks import Callback, LogRecord, MetricsFile
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import token_loss_sum
from ttrain.train.trainer import Cadence, Trainer

NO_CLIP = Optim(lr=1e-2, clip=1e9)


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
    ("rows", "rows_per_device"), [(32, 8), (32, 4), (32, 1), (33, 32), (33, 8), (33, 4)], ids=lambda value: str(value)
)
def test_accumulation_keeps_the_gradient(rows: int, rows_per_device: int) -> None:
    whole = gradients_of_one_step(rows, rows)
    parts = gradients_of_one_step(rows, rows_per_device)
    assert distance(whole, parts) < 1e-6


def test_accumulation_keeps_the_gradient_where_micro_batches_have_60_5_30_and_2_targets() -> None:
    live = [60, 5, 30, 2]
    whole = gradients_of_one_step(4, 4, live, T=64)
    parts = gradients_of_one_step(4, 1, live, T=64)
    assert distance(whole, parts) < 1e-6
    rows, model = NumberedRows(4, 64, live), tiny_model()
    task = LanguageModeling(settings_of_training(), model)
    module = task.build_model()
    mean = torch.stack([task.train_step(module, rows.batch([n]), CPU).total / live[n] for n in range(4)]).mean()
    mean.backward()  # type: ignore[no-untyped-call]
    of_means = {name: p.grad for name, p in module.named_parameters()}
    assert distance({name: whole[name] for name in of_means}, of_means) > 0.1, "the mean of the means is another gradient"


@pytest.mark.parametrize("rows_per_device", [4, 1])
def test_the_gradient_is_that_of_the_loss_over_the_live_targets(rows_per_device: int) -> None:
    """Not over the tokens of a step, of which 159 of 256 are masked here."""
    live = [60, 5, 30, 2]
    gradients = gradients_of_one_step(4, rows_per_device, live, T=64)
    task = LanguageModeling(settings_of_training(), tiny_model())
    module = task.build_model()
    loss = task.train_step(module, NumberedRows(4, 64, live).batch(range(4)), CPU)
    assert loss.count == sum(live)
    (loss.total / sum(live)).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert distance({name: gradients[name] for name in expected}, expected) < 1e-6


def test_the_loss_of_a_step_is_its_sum_over_its_targets() -> None:
    found = gradients_of_one_step(33, 4)["loss"]
    rows, model = NumberedRows(33), tiny_model()
    batch = rows.batch(range(33))
    task = LanguageModeling(settings_of_training(), model)
    loss = task.validation_step(task.build_model(), batch, CPU)
    assert loss.count == int((batch.labels_BT != IGNORE).sum()) < 33 * 16
    assert float(found) == pytest.approx(float(loss.total) / loss.count, rel=1e-6)


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


def test_dropout_is_on_in_these_tests() -> None:
    """What makes the two tests above say something about random numbers."""
    batch = NumberedRows(2).batch([0, 1])
    model = tiny_model(dropout=0.1).train()
    task = LanguageModeling(settings_of_training(), model)
    torch.manual_seed(1)
    losses = {float(task.validation_step(task.build_model(), batch, CPU).total) for _ in range(3)}
    assert len(losses) == 3


def test_a_validation_does_not_move_the_training(tmp_path: Path) -> None:
    often = run(tmp_path / "often", settings_of_training(), cadence=Cadence(log=3, checkpoint=10, validate=1))
    never = run(tmp_path / "never", settings_of_training())
    assert same(often.weights.state(), never.weights.state())


def test_the_rows_of_a_run_and_its_continuation_are_each_read_once_an_epoch(tmp_path: Path) -> None:
    config = settings_of_training(tokens=26 * 96)
    consumed: list[int] = []

    class Counts(WatchedTask):
        def train_step(self, model: Any, batch: Batch, device: Any) -> Any:
            consumed.extend(known[row.tobytes()] for row in batch.input_ids_BT)
            return super().train_step(model, batch, device)

    rows = NumberedRows(52)
    known = {row.tobytes(): number for number, row in enumerate(rows.batch(range(52)).input_ids_BT)}
    assert len(known) == 52
    for stop_after in (7, 9, None):  # 26 steps of 6 rows are three epochs of 52 rows
        model = tiny_model()
        task = Counts(config, model)
        make_trainer(config, model, rows, directory=tmp_path, stop_after=stop_after, task=task).fit()
    epochs = [sorted(consumed[start : start + 52]) for start in range(0, 156, 52)]
    assert epochs == [list(range(52))] * 3
    assert len(consumed) == 156
    assert consumed[:52] != consumed[52:104], "each epoch has an order of its own"


def test_extended_equals_straight(tmp_path: Path) -> None:
    def config(steps: int) -> Any:
        return settings_of_training(tokens=steps * 96)

    run(tmp_path / "short", config(20), keep=3)
    start = checkpoint.read(tmp_path / "short" / "checkpoints" / "step-00000010")  # where the decay begins
    straight = run(tmp_path / "straight", config(40))
    extended = run(tmp_path / "extended", config(40), start=start, seed=2)
    assert extended.result.resumed_from_step == 10  # type: ignore[attr-defined]
    assert same(straight.weights.state(), extended.weights.state())
    assert same(straight.optimizers.state(), extended.optimizers.state())
    before, after = (curve(tmp_path / name / "metrics.jsonl") for name in ("straight", "extended"))
    assert [line for line in before if line["step"] > 10] == after


def test_own_checkpoints_win_over_the_one_to_start_from(tmp_path: Path) -> None:
    run(tmp_path / "short", settings_of_training(), keep=3)
    start = checkpoint.read(tmp_path / "short" / "checkpoints" / "step-00000010")
    config = settings_of_training(tokens=40 * 96)
    run(tmp_path / "long", config, start=start, stop_after=3)
    resumed = run(tmp_path / "long", config, start=start)
    assert resumed.result.resumed_from_step == 13  # type: ignore[attr-defined]


def test_weights_in_memory_are_those_of_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = run(tmp_path, settings_of_training())
    last = checkpoint.read(tmp_path / "checkpoints" / "step-00000020")
    assert same(last.weights, trainer.weights.state())
    assert all(tensor.dtype == torch.float32 for tensor in {**last.weights, **last.optimizer}.values())


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


def test_checkpoints_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, settings_of_training())
    wider = tiny_model(vocab=VOCAB + 1)
    with pytest.raises(TTrainError, match=r"do not fit the model:\n  mis-shaped: model\.embed_tokens\.weight"):
        make_trainer(settings_of_training(), wider, NumberedRows(52), directory=tmp_path / "checkpoints")


# --- what is told -------------------------------------------------------------------------------------------------------


def test_a_logged_loss_is_the_mean_over_the_tokens_since_the_last() -> None:
    """Against a second run that logs every step: rows have one to sixteen targets, so that means of means differ."""
    live = [1 + 15 * (n % 3 == 0) for n in range(52)]
    config = settings_of_training()

    def logged(every: int) -> tuple[list[float], list[int]]:
        recorder, rows = Recorder(), NumberedRows(52, live=live)
        trainer = make_trainer(config, tiny_model(), rows, callbacks=[recorder], cadence=Cadence(log=every))
        trainer.fit()
        counts = [sum(live[row] for row in trainer.loader.order.step_rows(step)) for step in range(20)]
        assert trainer.counters.live_tokens == sum(counts)
        return recorder.figures("loss"), counts

    each, counts = logged(1)
    by_four, _ = logged(4)
    assert len(set(counts)) > 3
    for number, value in enumerate(by_four):
        steps = range(4 * number, 4 * number + 4)
        assert value == pytest.approx(sum(each[s] * counts[s] for s in steps) / sum(counts[s] for s in steps), rel=1e-9)


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
    config, model, recorder = settings_of_training(optim=Optim(clip=clip)), tiny_model(), Recorder()
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
