"""Checks of a model with its task: what a position sees, loss, gradients, ranks, resuming."""

# Letters in names: B rows, T positions, V entries of the vocabulary.

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttrain.core.files import temporary_directory
from ttrain.core.text import first_of
from ttrain.data.order import ShuffledOrder
from ttrain.data.packing import IGNORE, Array, Batch
from ttrain.doctor.parts import (
    DROPOUT,
    Finding,
    Learner,
    LossRecorder,
    silence,
    trainer_of,
)
from ttrain.train.checkpoint import Checkpoints, read
from ttrain.train.checkpoint_format import list_checkpoints
from ttrain.train.distributed import Ranks, full_tensor
from ttrain.train.memory_rows import InMemoryRows, select_rows, unevenly_masked
from ttrain.train.precision import Precision
from ttrain.train.step_figures import NonFinite
from ttrain.train.timing import NEVER
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Origin

Tensors = Mapping[str, Tensor]
Step = tuple[float, Tensors]  # loss (of rank 0, NaN on others), and gradients by name

LOSS_ROWS = 8
SLACK = 0.1  # of ln(V), and half a nat at least: logits of a deviation s cost about s^2/2 nats
# Experts by token: in groups, the last bits of a token follow how many others are in its group.
ALONE = "batched_mm"
ROWS = 7
ODD = 3  # of a step, which 3 do not divide
GRADIENTS = 1e-6
LOSSES = 1e-5  # largest relative distance in fp32
LEARNT_STEPS = 10
LEARNT = 0.02  # steps on one batch, and the share by which they lower its loss
STEPS = 4
ROWS_PER_STEP = 3
ROWS_PER_DEVICE = 2


def future(learner: Learner) -> Finding:
    """Whether another token at t leaves all logits before t the same, to the last bit."""
    row_T = select_rows(learner.rows, 1, positions=None).whole.input_ids_BT[0]
    T = len(row_T)
    positions = sorted({1, T // 4, T // 2, T // 2 + 1, T - 1} & set(range(1, T)))
    altered_BT = np.arange(T) == np.array(positions)[:, None]
    moved_BT = _moved(learner, row_T, altered_BT, np.zeros_like(row_T))
    for t, moved_T in zip(positions, moved_BT, strict=True):
        if moved_T[:t].any():
            return Finding(False, f"another token at {t} changes logits before it")
        if not moved_T[t:].any():
            return Finding(False, f"the model does not see another token at {t}: nothing changes")
    return Finding(True, f"{len(positions)} of {T} tokens altered, all logits before are the same")


def documents(learner: Learner) -> Finding:
    """Whether other tokens in a record of a row leave the logits of the others the same."""
    row_T = select_rows(learner.rows, 1, positions=None).whole.input_ids_BT[0]
    record_T = np.arange(len(row_T)) * 3 // len(row_T)
    moved_BT = _moved(learner, row_T, record_T == np.arange(3)[:, None], record_T)
    leaks = [
        f"record {record_T[place]} sees record {changed}"
        for changed, place in np.argwhere(moved_BT)
        if record_T[place] != changed
    ]
    return Finding(
        not leaks,
        "; ".join(dict.fromkeys(leaks))
        or "3 records in a row, each replaced in turn: the logits of the others are the same",
    )


def first_loss(learner: Learner) -> Finding:
    """Whether a new model's loss is near ln(V), that of guessing, and a trained one's below it."""
    task, model = learner.prepared()
    batch = select_rows(learner.rows, LOSS_ROWS).whole
    with learner.precision.autocast():
        loss_sum = task.validation_step(model, batch, learner.precision.device)
    loss = float(loss_sum.total) / max(1, loss_sum.count)
    uniform = math.log(model.get_output_embeddings().weight.shape[0])
    measured = f"{loss:.3f} nats a token, ln(vocabulary) = {uniform:.3f}"
    if learner.is_trained:
        return Finding(
            loss < uniform, measured, "train the base for longer, or on text more like this"
        )
    fix = "set model.init_std nearer to 0.02: a new model should find all tokens equally likely"
    return Finding(abs(loss - uniform) <= max(0.5, SLACK * uniform), measured, fix)


def _moved(learner: Learner, row_T: Array, altered_BT: Array, segments_T: Array) -> Any:
    # Which positions, [B, T], have other logits where the marked tokens of the row are others, by
    # the # task's own forward pass, mask and all.
    task, model = learner.prepared()
    causal: Any = getattr(model, "causal", model)
    if getattr(causal.config, "_experts_implementation", None) not in (None, "eager"):
        causal.set_experts_implementation(ALONE)
    hidden: list[Tensor] = []
    hook = causal.get_decoder().register_forward_hook(
        lambda module, decoder_inputs, out: hidden.append(out.last_hidden_state)
    )
    _, firsts, lengths = np.unique(segments_T, return_index=True, return_counts=True)
    before_BT = np.broadcast_to(row_T, altered_BT.shape)
    after_BT = np.where(altered_BT, np.where(before_BT == 1, 0, 1), before_BT)
    segments_BT = np.broadcast_to(segments_T, altered_BT.shape)
    positions_BT = np.arange(len(row_T)) - np.broadcast_to(firsts.repeat(lengths), altered_BT.shape)
    logits = []
    with torch.no_grad(), learner.precision.autocast():
        for ids_BT in (before_BT, after_BT):
            labels_BT = np.full_like(ids_BT, IGNORE)
            labels_BT[:, :-1] = ids_BT[:, 1:]
            batch = Batch(ids_BT.copy(), labels_BT, positions_BT, segments_BT.copy())
            task.validation_step(model, batch, learner.precision.device)
            logits.append(model.get_output_embeddings()(hidden.pop()))
    hook.remove()
    return np.asarray((logits[0] != logits[1]).any(-1).cpu())


def accumulation(learner: Learner) -> Finding:
    """Whether one micro-batch, single rows, and unequal parts give the same gradient in fp32."""
    sample = unevenly_masked(select_rows(learner.rows, ROWS))
    step = partial(first_step, learner, sample, Ranks(0, 1, learner.precision.device))
    others = [step(rows_per_device=size) for size in (1, ODD)]
    return agreement(
        step(rows_per_device=ROWS), others, f"{ROWS} rows at once, one by one, and {ODD} at a time"
    )


def agreement(expected: Step, steps: Iterable[Step], how: str) -> Finding:
    """Whether the steps have the expected loss and gradients."""
    gradient = loss = 0.0
    for step_loss, gradients in steps:
        gradient = max(gradient, distance(expected[1], gradients))
        if not math.isnan(step_loss):  # as on other ranks: the trainer refuses such a loss
            loss = max(loss, abs(expected[0] - step_loss) / max(1.0, abs(expected[0])))
    return Finding(
        gradient <= GRADIENTS and loss <= LOSSES,
        f"gradients {gradient:.1e}, losses {loss:.1e} apart: {how}",
    )


def resume(learner: Learner) -> Finding:
    """Whether four steps equal, to the bit, two, a checkpoint, and two of one that loads it."""
    rows = select_rows(learner.rows, STEPS * ROWS_PER_STEP)
    order = ShuffledOrder(len(rows), ROWS_PER_STEP, STEPS * ROWS_PER_STEP, learner.config.seed)
    make = partial(trainer_of, learner, rows=rows, order=order, rows_per_device=ROWS_PER_DEVICE)
    half = STEPS // 2
    subject = learner.build()
    straight = LossRecorder()
    with temporary_directory("doctor") as directory:
        checkpoints = Checkpoints(
            directory,
            files=lambda: subject.files,
            weights_file=subject.weights_file,
            keep=STEPS,
        )
        first = make(
            subject,
            callbacks=[straight],
            checkpoints=checkpoints,
            cadence=Cadence(log=NEVER, checkpoint=half),
        )
        first.fit()
        checkpoints.close()
        snapshot = read(list_checkpoints(directory)[0], subject.weights_file)
    resumed = learner.build()
    continued = LossRecorder()
    torch.seed()  # what random numbers were drawn before must not matter
    second = make(resumed, callbacks=[continued], origin=Origin(snapshot))
    second.fit()
    same = {
        "weights": _same(subject.state(), resumed.state()),
        "optimizer state": _same(first.optimizers.state(), second.optimizers.state()),
        "losses": straight.losses[half:] == continued.losses,
    }
    differing = [name for name, is_same in same.items() if not is_same]
    verdict = f"{half}, a checkpoint and {half} {'differ' if differing else 'are the same'}"
    return Finding(
        not differing, f"{', '.join(differing or same)} of {STEPS} steps, and of {verdict}"
    )


def learns(learner: Learner) -> Finding:
    """Whether ten steps on one batch, at the peak rate, lower its loss and reach every weight."""
    flat = {"kind": "constant", "warmup_steps": 0, "hold_steps": 0}
    learner = learner.changed(schedule=learner.config.schedule.model_copy(update=flat))
    rows = select_rows(learner.rows, ROWS_PER_STEP)
    subject = learner.build()
    recorder = LossRecorder()
    silence(subject.model, *DROPOUT)
    trainer = trainer_of(
        learner,
        subject,
        rows,
        ShuffledOrder(len(rows), len(rows), LEARNT_STEPS * len(rows), learner.config.seed),
        rows_per_device=len(rows),
        callbacks=[recorder],
    )
    reached: set[str] = set()

    def note(name: str, gradient: Tensor) -> None:
        if gradient.any():
            reached.add(name)

    names = _watch_gradients(trainer, note)
    try:
        trainer.fit()
    except NonFinite:
        recorder.losses.append(math.inf)
    first = recorder.losses[0]
    last = recorder.losses[-1]
    # A preference is trained with small steps: its loss has to fall at all.
    least = LEARNT if rows.whole.divisible else 0.0
    is_lower = last < first - least * abs(first)
    unreached = [name for name in names if name not in reached]
    change, length = ("raise", "short") if last <= first else ("lower", "long")
    fix = f"{change} {learner.config.section}.optim.lr: the steps are too {length}"
    if unreached and is_lower:
        fix = "find out why the loss does not depend on these weights"
    losses = f"loss {first:.4g} to {last:.4g} in {len(recorder.losses)} steps on it"
    measured = f"{losses}; weights without a gradient: {first_of(unreached, 3) or 'none'}"
    return Finding(is_lower and not unreached, measured, fix)


def distance(first: Tensors, second: Tensors) -> float:
    """Norm of the difference of two sets, relative to the first."""
    differences = (first[name].double() - second[name].double() for name in first)
    squared_distance = sum(float(tensor.square().sum()) for tensor in differences)
    size = sum(float(tensor.double().square().sum()) for tensor in first.values())
    return math.sqrt(squared_distance / size) if size else math.inf


def _same(first: Tensors, second: Tensors) -> bool:
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def first_step(learner: Learner, rows: InMemoryRows, ranks: Ranks, *, rows_per_device: int) -> Step:
    """(loss, gradients before any clip) of a step on all the rows, in fp32 without dropout."""
    learner = learner.changed(optim=learner.config.optim.model_copy(update={"clip": None}))
    subject = learner.build()
    recorder = LossRecorder()
    silence(subject.model, *DROPOUT, "noise_scale")  # routers' noise follows micro-batches, too
    trainer = trainer_of(
        replace(learner, precision=Precision("fp32", ranks.device)),
        subject,
        rows,
        ShuffledOrder(len(rows), len(rows), len(rows), learner.config.seed),
        rows_per_device=rows_per_device,
        ranks=ranks,
        callbacks=[recorder],
    )
    gradients: dict[str, Tensor] = {}

    def note(name: str, gradient: Tensor) -> None:
        gradients[name] = full_tensor(gradient).detach().cpu().clone()

    _watch_gradients(trainer, note)
    trainer.fit()
    return recorder.losses[0] if recorder.losses else math.nan, gradients


def _watch_gradients(trainer: Trainer, note: Callable[[str, Tensor], object]) -> list[str]:
    # Call `note` with each gradient before each step; returns the names of trained weights.
    trained = {id(parameter) for parameter in trainer.optimizers.parameters}
    named = {name: p for name, p in trainer.bare.named_parameters() if id(p) in trained}

    def note_all(*hook_arguments: Any) -> None:
        for name, parameter in named.items():
            if parameter.grad is not None:
                note(name, parameter.grad)

    trainer.optimizers.optimizers[0].register_step_pre_hook(note_all)
    return list(named)
