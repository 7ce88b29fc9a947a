"""Checks of a model with the task that trains it: what a position sees, and the loss that it starts with.

Letters in names: B rows, T positions, V entries of the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ttrain.data.packing import IGNORE, Batch, Rows
from ttrain.doctor.check import Check, judged
from ttrain.doctor.parts import Learner, held
from ttrain.train.precision import Precision
from ttrain.train.task import TrainingTask

LOSS_ROWS = 8
SLACK = 0.1  # of ln(vocabulary), and half a nat at least: logits of a deviation s cost about s^2/2 nats
COLLAPSED = 0.7  # entropy of a router's choices as a share of the largest; all tokens to 2 of 8 experts: 0.33
ALONE = "batched_mm"  # experts by token: in groups, the last bits of a token follow how many others are in its group
IS_WRONG = "a position sees what it should predict, so that the loss means nothing"


def future(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Another token at t leaves all logits before t as they are, to the last bit, at several t at once."""
    row = held(rows, 1, positions=None).whole.input_ids_BT[0]
    T = len(row)
    places = sorted({1, T // 4, T // 2, T // 2 + 1, T - 1} & set(range(1, T)))
    before_BT = np.tile(row, (len(places), 1))
    after_BT = before_BT.copy()
    for line, t in enumerate(places):
        after_BT[line, t] = _other(after_BT[line, t])
    as_one_BT = np.zeros_like(before_BT)
    before, after = _logits(learner, precision, [before_BT, after_BT], as_one_BT)
    leaks = [t for line, t in enumerate(places) if not torch.equal(before[line, :t], after[line, :t])]
    blind = [t for line, t in enumerate(places) if torch.equal(before[line, t:], after[line, t:])]
    where = ", ".join(map(str, leaks or blind))
    figure = (
        f"another token at {where} changes logits before it" if leaks
        else f"another token at {where} changes nothing: the model does not see its input" if blind
        else f"tokens altered at {len(places)} of {T} positions, logits before them the same to the last bit"
    )  # fmt: skip
    return judged("no future leak", not (leaks or blind), figure, f"mend the model's causal mask: {IS_WRONG}")


def documents(learner: Learner, rows: Rows, precision: Precision) -> Check:
    """Other tokens in one record of a packed row leave the logits of the others as they are, to the last bit."""
    row = held(rows, 1, positions=None).whole.input_ids_BT[0]
    T = len(row)
    of_record_T = np.arange(T) * 3 // T
    before_BT = np.tile(row, (3, 1))
    segments_BT = np.tile(of_record_T, (3, 1))
    after_BT = np.where(segments_BT == np.arange(3)[:, None], _other(before_BT), before_BT)
    before, after = _logits(learner, precision, [before_BT, after_BT], segments_BT)
    seen = [
        (changed, other) for changed in range(3) for other in range(3)
        if changed != other and not torch.equal(before[changed, of_record_T == other], after[changed, of_record_T == other])
    ]  # fmt: skip
    figure = (
        "; ".join(f"record {other} sees record {changed}" for changed, other in seen)
        or "3 records in a row, each replaced in turn: the others' logits are the same to the last bit"
    )
    return judged("records apart", not seen, figure, "mend the model's document mask: what shares a row by chance is learnt")


def first_loss(learner: Learner, rows: Rows, precision: Precision, *, trained: bool) -> Check:
    """A new model's loss is near ln(vocabulary), which is the loss of knowing nothing; a `trained` one's is below."""
    subject = learner.build()
    task = learner.task(learner.config, subject.model, learner.runtime)
    model = task.build_model().to(precision.device).eval()
    with precision.autocast():
        found = task.validation_step(model, held(rows, LOSS_ROWS).whole, precision.device)
    loss, nothing = float(found.total) / max(1, found.count), math.log(_head(model).weight.shape[0])
    slack = max(0.5, SLACK * nothing)
    if trained:
        figure = f"{loss:.3f} nats a token, below ln(vocabulary) = {nothing:.3f}"
        ok, cure = (
            loss < nothing,
            "train the base for longer, on text more like this, or look for what broke it: it is surer than right",
        )
    else:
        figure = f"{loss:.3f} nats a token, ln(vocabulary) = {nothing:.3f}"
        ok, cure = abs(loss - nothing) <= slack, "set model.init_std nearer to 0.02: a new model should know nothing, surely"
    if not ok:
        figure = figure.replace("below", "not below")
    return judged("loss at the start", ok and math.isfinite(loss), figure, cure)


def routers(learner: Learner, rows: Rows, precision: Precision) -> Check | None:
    """How evenly the routers of a mixture of experts spread the tokens; None where the model has none."""
    subject = learner.build()
    found = [(name, module) for name, module in subject.model.named_modules() if type(module).__name__.endswith("Router")]
    if not found:
        return None
    chosen: dict[str, tuple[Tensor, int]] = {}

    def watch(name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            experts = max(part.shape[-1] for part in parts)
            numbers = next((part for part in parts if not part.is_floating_point()), None)
            chosen[name] = (parts[0].argmax(-1) if numbers is None else numbers, experts)

        return note

    for name, module in found:
        module.register_forward_hook(watch(name))
    task = learner.task(learner.config, subject.model, learner.runtime)
    with precision.autocast():
        task.validation_step(task.build_model().to(precision.device).eval(), held(rows, LOSS_ROWS).whole, precision.device)
    evenness = {name: _evenness(numbers, experts) for name, (numbers, experts) in chosen.items()}
    worst = min(evenness, key=lambda name: evenness[name])
    figure = f"{len(evenness)} routers, the least even at {evenness[worst]:.2f} of an even spread ({worst})"
    return judged("routers balanced", evenness[worst] >= COLLAPSED, figure, "raise the weight of the load-balancing loss")


def _evenness(numbers: Tensor, experts: int) -> float:
    """Entropy of the experts' shares of the tokens, as a part of the largest that there is."""
    shares = torch.bincount(numbers.flatten().cpu(), minlength=experts).double()
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * shares.log()).sum()) / math.log(experts) if experts > 1 else 1.0


def _logits(learner: Learner, precision: Precision, inputs: list[np.ndarray[Any, Any]], segments_BT: Any) -> list[Tensor]:
    """[B, T, V] logits for each of the inputs, as the task's own forward pass makes them, mask and all."""
    subject = learner.build()
    task: TrainingTask = learner.task(learner.config, subject.model, learner.runtime)
    model = task.build_model().to(precision.device).eval()
    hidden: list[Tensor] = []
    causal: Any = getattr(model, "causal", model)
    if getattr(causal.config, "_experts_implementation", None) not in (None, "eager"):
        causal.set_experts_implementation(ALONE)
    hook = causal.get_decoder().register_forward_hook(lambda module, given, out: hidden.append(out.last_hidden_state))
    starts = np.maximum.accumulate(
        np.where(np.diff(segments_BT, axis=1, prepend=-1) != 0, np.arange(segments_BT.shape[1]), 0), 1
    )
    positions_BT = np.arange(segments_BT.shape[1]) - starts
    found = []
    with torch.no_grad(), precision.autocast():
        for input_ids_BT in inputs:
            labels_BT = np.full_like(input_ids_BT, IGNORE)
            labels_BT[:, :-1] = input_ids_BT[:, 1:]
            task.validation_step(model, Batch(input_ids_BT, labels_BT, positions_BT, segments_BT), precision.device)
            found.append(_head(model)(hidden.pop()))
    hook.remove()
    return found


def _head(model: nn.Module) -> Any:
    named: Any = model
    return named.get_output_embeddings()


def _other(ids: Any) -> Any:
    """Another id for each, which every vocabulary has."""
    return np.where(ids == 1, 0, 1) if isinstance(ids, np.ndarray) else (0 if ids == 1 else 1)
