"""What runs in the process of `ttrain gate train`: experts are scored on records, a router learns which of them is best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from ttrain.config import Gate, GateConfig
from ttrain.core.hashing import sha256_file
from ttrain.errors import DataError
from ttrain.evaluate import routing
from ttrain.evaluate.routing import Flags, Ints
from ttrain.inference import gate_files
from ttrain.inference.gate_files import GateFile
from ttrain.inference.gate_router import Ids, Router, padded, run_ids
from ttrain.stages import gate_records, trainable_model, user_task
from ttrain.stages.job import Job
from ttrain.train import optim, schedules
from ttrain.train.custom_task import UserTask
from ttrain.train.task import LossSum

log = logging.getLogger("ttrain")


def run(config: GateConfig, job: Job) -> dict[str, Any]:
    """Leaves `gate.json` beside what the training of a task leaves; returns its figures.

    No weight of an expert is touched: they are loaded to be scored, and gone before the router is made.
    """
    settings = config.gate
    allow = user_task.allowed(config.allow, Gate)
    ranks = trainable_model.start(job.runtime)
    records = gate_records.read(config.data, settings)
    losses = gate_records.score(config.experts, records, settings, job, ranks.device)
    scored = losses.tokens_RE.min(axis=1) > 0
    records, unscored = [record for record, live in zip(records, scored, strict=True) if live], int((~scored).sum())
    if not records:
        raise DataError("--data: no record has a token to score")
    if unscored:
        log.warning("%d records are left out: an expert has no token to score in them", unscored)
    nats_RE, tokens_RE = losses.nats_RE[scored], losses.tokens_RE[scored]
    texts, best_R = [gate_records.text_of(record) for record in records], routing.best(nats_RE)
    heldout_R = gate_records.heldout(records, settings)
    if len(set(best_R[~heldout_R].tolist())) < 2:
        only = config.experts[best_R[0]].reference
        log.warning("%s has the least loss on every record to learn from: a gate cannot gain anything here", only)

    task = Routing(settings, len(config.experts), texts, best_R, heldout_R)
    identity = {
        "experts": ", ".join(map(gate_files.digest, config.experts)),
        "records": gate_records.content_digest(records),
    }
    router, figures = user_task.train(task, job, ranks, identity=identity, allow=allow)
    assert isinstance(router, Router), "it is what the task builds"

    heldout = [text for text, out in zip(texts, heldout_R.tolist(), strict=True) if out]
    bytes_R = np.array([gate_records.bytes_of(record) for record in records])
    chosen_R = router.probabilities(heldout).argmax(-1).numpy()
    found = routing.figures(nats_RE[heldout_R], tokens_RE[heldout_R], bytes_R[heldout_R], chosen_R)
    gate_files.check(config.experts)
    gate_files.write(job.output, GateFile(config.experts, settings, found, sha256_file(job.output / gate_files.WEIGHTS)))
    return {**figures, "routing": found, "unscored_records": unscored}


@final
class Routing(UserTask):
    """Which expert has the least loss on a text: a classification, by its cross entropy."""

    config: Gate

    def __init__(self, config: Gate, experts: int, texts: Sequence[str], best_R: Ints, heldout_R: Flags) -> None:
        super().__init__(config)
        self._experts = experts
        rows = list(zip(texts, best_R.tolist(), heldout_R.tolist(), strict=True))
        self._parts = {part: [(text, best) for text, best, out in rows if out == part] for part in (False, True)}

    def rows(self) -> Labelled:
        return Labelled(self._parts[False], self.config)

    def heldout_rows(self) -> Labelled:
        return Labelled(self._parts[True], self.config)

    def collate(self, rows: list[tuple[Ids, int]]) -> tuple[Tensor, Tensor]:
        return padded([ids for ids, _ in rows]), torch.tensor([best for _, best in rows])

    def build_model(self) -> nn.Module:
        return Router(self.config, self._experts)

    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        return optim.build(model, self.config.optim)

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        return schedules.schedule(self.config.schedule, steps)

    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.CrossEntropyLoss(reduction="sum")

    def train_step(self, model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> LossSum:
        ids_BL, best_B = (part.to(device) for part in batch)
        return LossSum(self.criterion(model(ids_BL), best_B), count=len(best_B))

    def validation_step(self, model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


@final
class Labelled:
    """Texts as the ids that the router reads, each with the number of its best expert."""

    def __init__(self, rows: Sequence[tuple[str, int]], settings: Gate) -> None:
        self._rows, self._settings = rows, settings

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> tuple[Ids, int]:
        text, best = self._rows[row]
        return run_ids(text, self._settings), best
