"""Checks of the trainer: the gradient of a step does not depend on how its rows are divided, a run continues to the bit,
and one batch can be learnt."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from ttrain.core.parent_process import end_with_parent
from ttrain.data.packing import Rows
from ttrain.doctor.check import Check, judged
from ttrain.doctor.parts import HeldRows, Learner, Losses, held, trainer_of, unevenly_masked, without_dropout
from ttrain.errors import TTrainError
from ttrain.train.checkpoint import Checkpoints, read
from ttrain.train.checkpoint_format import found as checkpoints_in
from ttrain.train.checkpoint_format import step_of
from ttrain.train.distributed import Ranks
from ttrain.train.dtensor import whole
from ttrain.train.non_finite import NonFinite
from ttrain.train.precision import Precision

Step = tuple[float, dict[str, Tensor]]  # loss (of rank 0, NaN on others), and gradients by name
Launch = Callable[[Learner, HeldRows], list[Step]]

CPU = torch.device("cpu")
ROWS, ODD = 7, 3  # of a step, which 3 do not divide
GRADIENTS, LOSSES = 1e-6, 1e-5  # largest relative distance in fp32
RANKS, RANK_SECONDS, POLL_SECONDS = 2, 300.0, 0.2
LEARNT_STEPS, LEARNT = 10, 0.02  # steps on one batch, and by which share they lower its loss at least
STEPS, ROWS_PER_STEP, ROWS_PER_DEVICE = 4, 3, 2
THE_TASK = "its train_step must return the sum of its losses and the number of targets, never a mean"


def accumulation(learner: Learner, rows: Rows, device: torch.device) -> Check:
    """The same rows as one micro-batch, one by one, and in unequal parts: one gradient, in fp32, with uneven masks."""
    few = unevenly_masked(held(rows, ROWS))
    alone = Ranks(0, 1, device)
    loss, together = first_step(learner, few, alone, rows_per_device=ROWS)
    furthest = largest = 0.0
    for size in (1, ODD):
        other, gradients = first_step(learner, few, alone, rows_per_device=size)
        furthest, largest = max(furthest, distance(together, gradients)), max(largest, _apart(loss, other))
    figure = f"gradients {furthest:.1e}, losses {largest:.1e} apart: {ROWS} rows at once, one by one, and {ODD} at a time"
    ok = furthest <= GRADIENTS and largest <= LOSSES
    return judged("accumulation", ok, figure, f"mend the loss of the task: {THE_TASK}")


def two_ranks(learner: Learner, rows: Rows, launch: Launch | None = None) -> Check:
    """Two processes that talk through gloo take the same step as one alone, in fp32 on the CPU, with uneven masks."""
    few = unevenly_masked(held(rows, ROWS))
    loss, gradients = first_step(learner, few, Ranks(0, 1, CPU), rows_per_device=1)
    found = (launch or spawned)(learner, few)
    apart = max(distance(gradients, others) for _, others in found)
    largest = _apart(loss, found[0][0])
    figure = f"gradients {apart:.1e}, losses {largest:.1e} apart: one process and {len(found)} that share {ROWS} rows"
    ok = apart <= GRADIENTS and largest <= LOSSES
    return judged("two ranks equal one", ok, figure, f"mend the loss of the task, or how gradients are summed: {THE_TASK}")


def resume(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Four steps are, to the bit, two steps, a checkpoint, and two steps of another trainer that loads it."""
    few, alone = held(rows, STEPS * ROWS_PER_STEP), Ranks(0, 1, precision.device)
    with tempfile.TemporaryDirectory(prefix="ttrain-doctor-") as directory:
        subject = learner.build()
        checkpoints = Checkpoints(
            Path(directory), files=lambda: subject.files, weights_file=subject.weights_file, keep=STEPS
        )
        straight = Losses()
        common: dict[str, Any] = {
            "ranks": alone, "precision": precision, "steps": STEPS,
            "rows_per_step": ROWS_PER_STEP, "rows_per_device": ROWS_PER_DEVICE,
        }  # fmt: skip
        first = trainer_of(
            learner, subject, few, callbacks=[straight], checkpoints=checkpoints, save_every=STEPS // 2, **common
        )
        first.fit()
        checkpoints.close()
        saved = next(path for path in checkpoints_in(Path(directory)) if step_of(path) == STEPS // 2)
        snapshot = read(saved, subject.weights_file)
    other, continued = learner.build(), Losses()
    torch.seed()  # what random numbers were drawn before must not matter
    second = trainer_of(learner, other, few, callbacks=[continued], start=snapshot, **common)
    second.fit()
    differ = [
        what for what, left, right in (
            ("weights", subject.state(), other.state()),
            ("optimizer state", first.optimizers.state(), second.optimizers.state()),
        ) if not same(left, right)
    ]  # fmt: skip
    if straight.found[STEPS // 2 :] != continued.found:
        differ.append("losses")
    figure = (
        f"{', '.join(differ)} of {STEPS} steps differ from those of {STEPS // 2}, a checkpoint, and {STEPS // 2}" if differ
        else f"weights, optimizer state and losses of {STEPS} steps equal those of {STEPS // 2} and {STEPS // 2}, to the bit"
    )  # fmt: skip
    cure = "set runtime.deterministic=true, or mend what the task keeps between steps: a checkpoint does not hold it"
    return judged("save and resume", not differ, figure, cure)


def learns(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Ten steps on one batch, at the peak learning rate, lower its loss."""
    name, section = "one batch is learnt", learner.config.section
    too_long = f"lower {section}.optim.lr: the steps are too long"
    few, losses, subject = held(rows, ROWS_PER_STEP), Losses(), learner.build()
    without_dropout(subject.model)
    schedule = learner.config.schedule.model_copy(update={"kind": "constant", "warmup_steps": 0, "hold_steps": 0})
    trainer = trainer_of(
        learner, subject, few, ranks=Ranks(0, 1, precision.device), precision=precision, steps=LEARNT_STEPS,
        rows_per_step=ROWS_PER_STEP, rows_per_device=ROWS_PER_STEP, callbacks=[losses], schedule=schedule,
    )  # fmt: skip
    try:
        trainer.fit()
    except NonFinite:
        return Check(name, False, f"the loss of step {len(losses.found) + 1} on it is no number", too_long)
    first, last = losses.found[0], losses.found[-1]
    too_short = f"raise {section}.optim.lr, or look for what keeps gradients from the weights"
    ok = last <= (1 - LEARNT) * first
    figure = f"loss {first:.3f} to {last:.3f} in {LEARNT_STEPS} steps on it"
    return judged(name, ok, figure, too_short if last <= first else too_long)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two sets of tensors, relative to the first; infinite where names differ."""
    if {*first} != {*second}:
        return math.inf
    between = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    size = sum(float(tensor.double().square().sum()) for tensor in first.values())
    return math.sqrt(between / size) if size else math.inf


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether names and every bit are equal."""
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def first_step(learner: Learner, rows: HeldRows, ranks: Ranks, *, rows_per_device: int) -> Step:
    """(loss, gradients before any clip) of a step on all the rows, in fp32 without dropout; the loss on rank 0 only."""
    subject, losses = learner.build(), Losses()
    without_dropout(subject.model)
    optim = learner.config.optim.model_copy(update={"clip": None})
    trainer = trainer_of(
        learner, subject, rows, ranks=ranks, precision=Precision("fp32", ranks.device), steps=1, rows_per_step=len(rows),
        rows_per_device=rows_per_device, callbacks=[losses], optim=optim,
    )  # fmt: skip
    gradients: dict[str, Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        held_by = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in trainer.bare.named_parameters():
            if id(parameter) in held_by and parameter.grad is not None:
                gradients[name] = whole(parameter.grad).detach().cpu().clone()

    for optimizer in trainer.optimizers.optimizers:
        optimizer.register_step_pre_hook(note)
    trainer.fit()
    return losses.found[0] if losses.found else math.nan, gradients


def spawned(learner: Learner, rows: HeldRows) -> list[Step]:
    """A first step that RANKS processes share, as each of them has it. Raises TTrainError where one fails."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads hangs
    with tempfile.TemporaryDirectory(prefix="ttrain-doctor-") as name:
        directory = Path(name)
        arguments = [(os.getpid(), directory, rank, learner, rows) for rank in range(RANKS)]
        processes = [context.Process(target=_be_rank, args=given, daemon=True) for given in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + RANK_SECONDS
        try:
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                if any(process.exitcode for process in processes):
                    break
                time.sleep(POLL_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
        reasons = [path.read_text() for path in sorted(directory.glob("error*"))]
        if reasons or any(process.exitcode for process in processes):
            ended = f"exit codes {[process.exitcode for process in processes]} within {RANK_SECONDS:.0f} s"
            raise TTrainError(f"{RANKS} processes did not take a step together: {reasons[0] if reasons else ended}")
        return [
            (json.loads((directory / f"loss{rank}").read_text()), load_file(directory / f"gradients{rank}"))
            for rank in range(RANKS)
        ]


def _be_rank(parent: int, directory: Path, rank: int, learner: Learner, rows: HeldRows) -> None:
    """One of the processes; it leaves its gradients and its loss in the directory, or the error."""
    end_with_parent(parent)
    warnings.simplefilter("ignore")  # what is wrong with a rank is in its error
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
        ranks = Ranks(rank, RANKS, CPU)
        loss, gradients = first_step(learner, rows, ranks, rows_per_device=1)
        save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, directory / f"gradients{rank}")
        (directory / f"loss{rank}").write_text(json.dumps(loss))
        ranks.barrier()
        ranks.leave()
    except Exception as error:
        (directory / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _apart(first: float, second: float) -> float:
    return abs(first - second) / max(1.0, abs(first))
