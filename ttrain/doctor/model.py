"""Checks of a model with the task that trains it: what a position sees, and the loss that it starts with.

Letters in names: B rows, T positions, V entries of the vocabulary.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from ttrain.core.files import temporary_directory
from ttrain.core.machine import SAFE_PATH
from ttrain.core.signals import end_with_parent
from ttrain.data.packing import IGNORE, Array, Batch, Rows
from ttrain.doctor.parts import (
    Check,
    InMemoryRows,
    Learner,
    LossRecorder,
    make_check,
    select_rows,
    trainer_of,
    unevenly_masked,
    without_dropout,
)
from ttrain.errors import TTrainError
from ttrain.stages.trainable_model import TrainableModel
from ttrain.train.checkpoint import Checkpoints, read
from ttrain.train.checkpoint_format import list_checkpoints as checkpoints_in
from ttrain.train.checkpoint_format import step_of
from ttrain.train.distributed import Ranks, full_tensor
from ttrain.train.precision import Precision
from ttrain.train.step_figures import NonFinite
from ttrain.train.training_options import Origin

LOSS_ROWS = 8

SLACK = 0.1  # of ln(vocabulary), and half a nat at least: logits of a deviation s cost about s^2/2 nats

COLLAPSED = 0.7  # entropy of a router's choices as a share of the largest; all tokens to 2 of 8 experts: 0.33

ALONE = "batched_mm"  # experts by token: in groups, the last bits of a token follow how many others are in its group

IS_WRONG = "a position sees what it should predict, so that the loss means nothing"


def future(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Whether another token at t leaves all logits before t the same, to the last bit, at several t at once."""
    row = select_rows(rows, 1, positions=None).whole.input_ids_BT[0]
    T = len(row)
    positions = sorted({1, T // 4, T // 2, T // 2 + 1, T - 1} & set(range(1, T)))
    before_BT = np.tile(row, (len(positions), 1))
    after_BT = before_BT.copy()
    for line, t in enumerate(positions):
        after_BT[line, t] = _different_id(after_BT[line, t])
    as_one_BT = np.zeros_like(before_BT)
    logits_before, logits_after = _logits(learner, precision, [before_BT, after_BT], as_one_BT)
    leaks = [t for line, t in enumerate(positions) if not torch.equal(logits_before[line, :t], logits_after[line, :t])]
    blind = [t for line, t in enumerate(positions) if torch.equal(logits_before[line, t:], logits_after[line, t:])]
    position_text = ", ".join(map(str, leaks or blind))
    figure = (
        f"another token at {position_text} changes logits before it" if leaks
        else f"another token at {position_text} changes nothing: the model does not see its input" if blind
        else f"tokens altered at {len(positions)} of {T} positions, logits before them the same to the last bit"
    )  # fmt: skip
    return make_check("no future leak", not (leaks or blind), figure, f"fix the model's causal mask: {IS_WRONG}")


def documents(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Whether other tokens in one record of a packed row leave the logits of the others the same, to the last bit."""
    row = select_rows(rows, 1, positions=None).whole.input_ids_BT[0]
    T = len(row)
    of_record_T = np.arange(T) * 3 // T
    before_BT = np.tile(row, (3, 1))
    segments_BT = np.tile(of_record_T, (3, 1))
    after_BT = np.where(segments_BT == np.arange(3)[:, None], _different_id(before_BT), before_BT)
    logits_before, logits_after = _logits(learner, precision, [before_BT, after_BT], segments_BT)
    leaks = [
        (changed, observer) for changed in range(3) for observer in range(3)
        if changed != observer and not torch.equal(
            logits_before[changed, of_record_T == observer], logits_after[changed, of_record_T == observer]
        )
    ]  # fmt: skip
    figure = (
        "; ".join(f"record {observer} sees record {changed}" for changed, observer in leaks)
        or "3 records in a row, each replaced in turn: the others' logits are the same to the last bit"
    )
    return make_check(
        "records apart", not leaks, figure, "fix the model's document mask: what shares a row by chance is learnt"
    )


def first_loss(learner: Learner, rows: Rows, precision: Precision, *, trained: bool) -> Check:
    """Whether a new model's loss is near ln(vocabulary), the loss of uniform guessing, and a `trained` one's below it."""
    task, model = learner.prepared(precision.device)
    with precision.autocast():
        loss_sum = task.validation_step(model, select_rows(rows, LOSS_ROWS).whole, precision.device)
    loss, nothing = float(loss_sum.total) / max(1, loss_sum.count), math.log(_head(model).weight.shape[0])
    slack = max(0.5, SLACK * nothing)
    if trained:
        ok = loss < nothing
        figure = f"{loss:.3f} nats a token, {'' if ok else 'not '}below ln(vocabulary) = {nothing:.3f}"
        fix = "train the base for longer, on text more like this, or look for what broke it: it is overconfident"
    else:
        figure = f"{loss:.3f} nats a token, ln(vocabulary) = {nothing:.3f}"
        ok = abs(loss - nothing) <= slack
        fix = "set model.init_std nearer to 0.02: to a new model all tokens should be about equally likely"
    return make_check("loss at the start", ok and math.isfinite(loss), figure, fix)


def routers(learner: Learner, rows: Rows, precision: Precision) -> Check | None:
    """How evenly the routers of a mixture of experts spread the tokens; None where the model has none."""
    subject = learner.build()
    router_modules = [
        (name, module) for name, module in subject.model.named_modules() if type(module).__name__.endswith("Router")
    ]
    if not router_modules:
        return None
    chosen: dict[str, tuple[Tensor, int]] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        numbers = next((tensor for tensor in parts if not tensor.is_floating_point()), parts[0].argmax(-1))
        chosen[name] = numbers, max(tensor.shape[-1] for tensor in parts)

    for name, module in router_modules:
        module.register_forward_hook(partial(note, name))
    task, model = learner.prepared(precision.device, subject.model)
    with precision.autocast():
        task.validation_step(model, select_rows(rows, LOSS_ROWS).whole, precision.device)
    evenness = {name: _evenness(numbers, experts) for name, (numbers, experts) in chosen.items()}
    worst = min(evenness, key=lambda name: evenness[name])
    figure = f"{len(evenness)} routers, the least even at {evenness[worst]:.2f} of an even spread ({worst})"
    return make_check(
        "routers balanced", evenness[worst] >= COLLAPSED, figure, "raise the weight of the load-balancing loss"
    )


def _evenness(numbers: Tensor, experts: int) -> float:
    """Entropy of the experts' shares of the tokens, as a share of the largest possible."""
    shares = torch.bincount(numbers.flatten().cpu(), minlength=experts).double()
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * shares.log()).sum()) / math.log(experts) if experts > 1 else 1.0


def _logits(learner: Learner, precision: Precision, inputs: Sequence[Array], segments_BT: Array) -> list[Tensor]:
    """[B, T, V] logits for each of the inputs, as the task's own forward pass makes them, mask and all."""
    task, model = learner.prepared(precision.device)
    hidden: list[Tensor] = []
    causal: Any = getattr(model, "causal", model)
    if getattr(causal.config, "_experts_implementation", None) not in (None, "eager"):
        causal.set_experts_implementation(ALONE)
    hook = causal.get_decoder().register_forward_hook(
        lambda module, decoder_inputs, out: hidden.append(out.last_hidden_state)
    )
    starts = np.maximum.accumulate(
        np.where(np.diff(segments_BT, axis=1, prepend=-1) != 0, np.arange(segments_BT.shape[1]), 0), 1
    )
    positions_BT = np.arange(segments_BT.shape[1]) - starts
    logits = []
    with torch.no_grad(), precision.autocast():
        for input_ids_BT in inputs:
            labels_BT = np.full_like(input_ids_BT, IGNORE)
            labels_BT[:, :-1] = input_ids_BT[:, 1:]
            task.validation_step(model, Batch(input_ids_BT, labels_BT, positions_BT, segments_BT), precision.device)
            logits.append(_head(model)(hidden.pop()))
    hook.remove()
    return logits


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


def _different_id(ids: Any) -> Any:
    """A different id for each id, which every vocabulary has."""
    return np.where(ids == 1, 0, 1)


Tensors = Mapping[str, Tensor]

Step = tuple[float, Tensors]  # loss (of rank 0, NaN on others), and gradients by name

CPU = torch.device("cpu")

ROWS, ODD = 7, 3  # of a step, which 3 do not divide

GRADIENTS, LOSSES = 1e-6, 1e-5  # largest relative distance in fp32

RANKS, RANK_TIMEOUT = 2, timedelta(minutes=5)

LEARNT_STEPS, LEARNT = 10, 0.02  # steps on one batch, and by which share they lower its loss at least

STEPS, ROWS_PER_STEP, ROWS_PER_DEVICE = 4, 3, 2

THE_TASK = "its train_step must return the sum of its losses and the number of targets, never a mean"


def accumulation(learner: Learner, rows: Rows, device: torch.device) -> Check:
    """Whether one micro-batch, rows one by one, and unequal parts give the same gradient, in fp32, with uneven masks."""
    sample = unevenly_masked(select_rows(rows, ROWS))
    one_rank = Ranks(0, 1, device)
    loss, together = first_step(learner, sample, one_rank, rows_per_device=ROWS)
    furthest = largest = 0.0
    for size in (1, ODD):
        other_loss, gradients = first_step(learner, sample, one_rank, rows_per_device=size)
        furthest, largest = max(furthest, distance(together, gradients)), max(largest, _apart(loss, other_loss))
    figure = f"gradients {furthest:.1e}, losses {largest:.1e} apart: {ROWS} rows at once, one by one, and {ODD} at a time"
    ok = furthest <= GRADIENTS and largest <= LOSSES
    return make_check("accumulation", ok, figure, f"fix the loss of the task: {THE_TASK}")


def two_ranks(learner: Learner, rows: Rows) -> Check:
    """Whether two processes take the same step as one alone, in fp32 on the CPU, with uneven masks."""
    sample = unevenly_masked(select_rows(rows, ROWS))
    loss, gradients = first_step(learner, sample, Ranks(0, 1, CPU), rows_per_device=1)
    rank_steps = spawned(learner, sample)
    apart = max(distance(gradients, others) for _, others in rank_steps)
    largest = _apart(loss, rank_steps[0][0])
    figure = f"gradients {apart:.1e}, losses {largest:.1e} apart: one process and {len(rank_steps)} that share {ROWS} rows"
    ok = apart <= GRADIENTS and largest <= LOSSES
    return make_check(
        "two ranks equal one", ok, figure, f"fix the loss of the task, or how gradients are summed: {THE_TASK}"
    )


def resume(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Whether four steps equal, to the bit, two steps, a checkpoint, and two steps of another trainer that loads it."""
    sample, one_rank = select_rows(rows, STEPS * ROWS_PER_STEP), Ranks(0, 1, precision.device)
    with temporary_directory("doctor") as directory:
        subject = learner.build()
        checkpoints = Checkpoints(directory, files=lambda: subject.files, weights_file=subject.weights_file, keep=STEPS)
        straight = LossRecorder()
        common: dict[str, Any] = {
            "ranks": one_rank, "precision": precision, "steps": STEPS,
            "rows_per_step": ROWS_PER_STEP, "rows_per_device": ROWS_PER_DEVICE,
        }  # fmt: skip
        first = trainer_of(
            learner, subject, sample, callbacks=[straight], checkpoints=checkpoints, save_every=STEPS // 2, **common
        )
        first.fit()
        checkpoints.close()
        saved = next(path for path in checkpoints_in(directory) if step_of(path) == STEPS // 2)
        snapshot = read(saved, subject.weights_file)
    resumed, continued = learner.build(), LossRecorder()
    torch.seed()  # what random numbers were drawn before must not matter
    second = trainer_of(learner, resumed, sample, callbacks=[continued], origin=Origin(snapshot), **common)
    second.fit()
    differ = [
        state_name for state_name, expected, actual in (
            ("weights", subject.state(), resumed.state()),
            ("optimizer state", first.optimizers.state(), second.optimizers.state()),
        ) if not same(expected, actual)
    ]  # fmt: skip
    if straight.losses[STEPS // 2 :] != continued.losses:
        differ.append("losses")
    figure = (
        f"{', '.join(differ)} of {STEPS} steps differ from those of {STEPS // 2}, a checkpoint, and {STEPS // 2}" if differ
        else f"weights, optimizer state and losses of {STEPS} steps equal those of {STEPS // 2} and {STEPS // 2}, to the bit"
    )  # fmt: skip
    fix = "set runtime.deterministic=true, or fix what the task keeps between steps: a checkpoint does not hold it"
    return make_check("save and resume", not differ, figure, fix)


def learns(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Whether ten steps on one batch, at the peak learning rate, lower its loss."""
    name, section = "one batch is learnt", learner.config.section
    too_long = f"lower {section}.optim.lr: the steps are too long"
    recorder = LossRecorder()
    try:
        learn_batch(learner, learner.build(), select_rows(rows, ROWS_PER_STEP), precision, recorder)
    except NonFinite:
        return Check(name, False, f"the loss of step {len(recorder.losses) + 1} on it is not finite", too_long)
    first, last = recorder.losses[0], recorder.losses[-1]
    too_short = f"raise {section}.optim.lr, or look for what keeps gradients from the weights"
    ok = last <= (1 - LEARNT) * first
    figure = f"loss {first:.3f} to {last:.3f} in {LEARNT_STEPS} steps on it"
    return make_check(name, ok, figure, too_short if last <= first else too_long)


def learn_batch(
    learner: Learner, subject: TrainableModel, rows: InMemoryRows, precision: Precision, recorder: LossRecorder
) -> None:
    """Take LEARNT_STEPS steps on all the rows at the peak learning rate, without dropout."""
    without_dropout(subject.model)
    schedule = learner.config.schedule.model_copy(update={"kind": "constant", "warmup_steps": 0, "hold_steps": 0})
    trainer_of(
        learner, subject, rows, ranks=Ranks(0, 1, precision.device), precision=precision, steps=LEARNT_STEPS,
        rows_per_step=len(rows), rows_per_device=len(rows), callbacks=[recorder], changes={"schedule": schedule},
    ).fit()  # fmt: skip


def distance(first: Tensors, second: Tensors) -> float:
    """Norm of the difference of two sets of tensors, relative to the first; infinite where names differ."""
    if {*first} != {*second}:
        return math.inf
    squared_distance = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    size = sum(float(tensor.double().square().sum()) for tensor in first.values())
    return math.sqrt(squared_distance / size) if size else math.inf


def same(first: Tensors, second: Tensors) -> bool:
    """Whether names and every bit are equal."""
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def first_step(learner: Learner, rows: InMemoryRows, ranks: Ranks, *, rows_per_device: int) -> Step:
    """(loss, gradients before any clip) of a step on all the rows, in fp32 without dropout; the loss on rank 0 only."""
    subject, recorder = learner.build(), LossRecorder()
    without_dropout(subject.model)
    optim = learner.config.optim.model_copy(update={"clip": None})
    trainer = trainer_of(
        learner, subject, rows, ranks=ranks, precision=Precision("fp32", ranks.device), steps=1, rows_per_step=len(rows),
        rows_per_device=rows_per_device, callbacks=[recorder], changes={"optim": optim},
    )  # fmt: skip
    gradients: dict[str, Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, *hook_arguments: Any) -> None:
        held_by = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in trainer.bare.named_parameters():
            if id(parameter) in held_by and parameter.grad is not None:
                gradients[name] = full_tensor(parameter.grad).detach().cpu().clone()

    for optimizer in trainer.optimizers.optimizers:
        optimizer.register_step_pre_hook(note)
    trainer.fit()
    return recorder.losses[0] if recorder.losses else math.nan, gradients


def spawned(learner: Learner, rows: InMemoryRows) -> list[Step]:
    """A first step that RANKS processes share, as each of them computes it. Raises TTrainError where one fails."""
    added = SAFE_PATH.keys() - os.environ.keys()
    os.environ |= SAFE_PATH  # the interpreters are started without -P
    with temporary_directory("doctor") as directory:
        try:
            # Not forked: a fork of a process with threads hangs.
            spawn(_be_rank, (os.getpid(), directory, learner, rows), RANKS)  # type: ignore[no-untyped-call]
        except (ProcessRaisedException, ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise TTrainError(f"{RANKS} processes did not take a step together: {reason}") from None
        finally:
            for name in added:  # what else this process starts is not ours
                del os.environ[name]
        return [
            (json.loads((directory / f"loss{rank}").read_text()), load_file(directory / f"gradients{rank}"))
            for rank in range(RANKS)
        ]


def _be_rank(rank: int, parent: int, directory: Path, learner: Learner, rows: InMemoryRows) -> None:
    """One of the processes; it leaves its gradients and its loss in the directory."""
    end_with_parent(parent)
    warnings.simplefilter("ignore")  # what is wrong with a rank is in its error, and the doctor gave the others
    logging.getLogger("ttrain").setLevel(logging.ERROR)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=RANK_TIMEOUT)
    ranks = Ranks(rank, RANKS, CPU)
    loss, gradients = first_step(learner, rows, ranks, rows_per_device=1)
    save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, directory / f"gradients{rank}")
    (directory / f"loss{rank}").write_text(json.dumps(loss))
    ranks.barrier()
    ranks.leave()


def _apart(first: float, second: float) -> float:
    return abs(first - second) / max(1.0, abs(first))
