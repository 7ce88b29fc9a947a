"""An exponential moving average of the weights, which is the model that is saved."""
# With averaging, a constant learning rate reaches the loss of a decayed one (arXiv:2405.18392), and
# a model that is trained on one kind of text after another forgets less (arXiv:2203.05482).

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ttrain.train.distributed import Tensors, local_part, shard_like

ITERATE = "iterate"
COUNT = "averaged"  # names of its state: weights as the optimizer left them, and averaged steps
# Warm-up: step t (from 0) enters the average with at least the weight 9 / (10 + t), so that the
# initial weights fade out. In a run from scratch this bound usually sets the weight of every step,
# so that a run and its later extension end with the same average.
FIRST_STEPS = 9


class MovingAverage:
    """The average over all steps, also those of a continued plateau."""

    def __init__(self, names: Mapping[Tensor, str], share: float | None, steps: int) -> None:
        """`share`: the half-life, as a fraction of the steps; None: there is no average."""
        self._names = dict(names) if share else {}
        self._decay = 0.5 ** (1 / max(1, round(share * steps))) if share else 0.0
        # A tensor once the device alone knows which steps were prevented.
        self._count: int | Tensor = 0
        self._averages: list[Tensor] = []

    def update(self, prevented: Tensor | None = None) -> None:
        """Add the weights of a step, except where `prevented` (on the device) is 1.0."""
        if not self._names:
            return
        newest = _parts(self._names)
        if not self._averages:
            self._averages = [tensor.detach().clone() for tensor in self._names]
        share = FIRST_STEPS / (1 + FIRST_STEPS + self._count)  # of the newest weights
        if prevented is None:
            torch._foreach_lerp_(_parts(self._averages), newest, max(1 - self._decay, float(share)))
            self._count += 1
            return
        applied = 1 - prevented
        share = torch.as_tensor(share).clamp(min=1 - self._decay) * applied
        torch._foreach_lerp_(_parts(self._averages), newest, [share] * len(newest))
        self._count = self._count + applied

    @contextlib.contextmanager
    def as_weights(self) -> Iterator[None]:
        """Let the parameters hold the average inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def end(self) -> None:
        """Let the parameters hold the average from now on."""
        self._swap()
        self._averages = []

    def state(self) -> Tensors:
        """Named tensors for the optimizer's file; call it while the parameters hold the average."""
        if not self._averages:
            return {}
        newest = {
            f"{ITERATE}|{name}": held
            for name, held in zip(self._names.values(), self._averages, strict=True)
        }
        return {
            **newest,
            **{f"{COUNT}|{name}": torch.tensor(int(self._count)) for name in self._names.values()},
        }

    def load_state(self, tensors: Tensors) -> Tensors:
        """Restore what `state` returned; returns the other tensors, which are the optimizer's."""
        own = {
            name: value
            for name, value in tensors.items()
            if name.partition("|")[0] in (ITERATE, COUNT)
        }
        averages = {name: own.get(f"{ITERATE}|{name}") for name in self._names.values()}
        if self._names and None not in averages.values():
            self._averages = [
                shard_like(own[f"{ITERATE}|{name}"], tensor) for tensor, name in self._names.items()
            ]
            self._count = int(own[f"{COUNT}|{next(iter(averages))}"])
            self._swap()
        return {name: value for name, value in tensors.items() if name not in own}

    @torch.no_grad()
    def _swap(self) -> None:
        if self._averages:
            weights = _parts(self._names)
            averages = _parts(self._averages)
            held = [tensor.clone() for tensor in weights]
            torch._foreach_copy_(weights, averages)
            torch._foreach_copy_(averages, held)


def _parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_part(tensor).detach() for tensor in tensors]
