"""A two-layer model, trainers of it, ranks, and what watches a training."""

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny_data import VOCAB
from torch import Tensor, nn

from ttrain.config import Model, Optim, Schedule, Training
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.data.packing import Batch, Rows
from ttrain.evaluate import perplexity
from ttrain.model import factory
from ttrain.train import precision
from ttrain.train.callbacks import Callback, LogRecord, StepRecord
from ttrain.train.checkpoint import Checkpoints
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.optim import Optimizers
from ttrain.train.task import LossSum, TrainingTask
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Origin, Speed, TrainerOptions, Validation

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
SPARSE = Cadence(log=3, checkpoint=10)
PLAIN = Speed()


def tiny_model(*, seed: int = 1, vocab: int = VOCAB, **settings: Any) -> Any:
    config = Model(**{"hidden_size": 16, "layers": 2, "heads": 2, "max_length": 128, **settings})
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return factory.build(config, vocab_size=vocab, ids=ids, stop_ids=[3, 8], seed=seed)


def sequence(seed: int, length: int) -> perplexity.Tokens:
    """Random ids, of which about 7 in 10 count; the first is context only."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, VOCAB, (length,), generator=generator).tolist()
    return ids, [False, *(torch.rand(length - 1, generator=generator) < 0.7).tolist()]


def score_of(
    model: nn.Module, sequences: Sequence[perplexity.Tokens], length: int, stride: int, **more: Any
) -> perplexity.Score:
    options = {"device": CPU, "progress": lambda done, total: None, **more}
    scores = perplexity.score_each(model, sequences, length=length, stride=stride, **options)
    nats = sum(score.nats for score in scores)
    return perplexity.Score(nats, sum(score.tokens for score in scores))


def settings_of_training(**changes: Any) -> Training:
    values: dict[str, Any] = {"tokens": 20 * 96, "tokens_per_step": 96, "row_length": 16}
    values |= {"optim": Optim(lr=1e-2), "schedule": Schedule(warmup_steps=3)}
    return Training(**{"precision": "fp32", **values, **changes})


@dataclass
class Held:
    model: nn.Module

    def state(self) -> dict[str, Tensor]:
        return factory.state(self.model)  # type: ignore[arg-type]

    def load(self, weights: dict[str, Tensor]) -> None:
        factory.overwrite(self.state(), weights)


class WatchedOptimizers(Optimizers):
    def __init__(self, inner: Optimizers) -> None:
        super().__init__(inner.optimizers, inner.names)
        self.gradients: list[dict[str, Tensor]] = []

    def step(self) -> None:
        trained = [(p, p.grad) for p in self.parameters if p.grad is not None]
        self.gradients.append({self.names[p]: gradient.clone() for p, gradient in trained})
        super().step()


class WatchedTask(LanguageModeling):  # type: ignore[misc]  # which is final
    """Language modelling with watched optimizers; `spoil(step)` multiplies the step's loss."""

    def __init__(
        self, config: Training, model: nn.Module, spoil: Callable[[int], float] = lambda step: 1.0
    ) -> None:
        super().__init__(config, model)
        self._spoil = spoil
        self.passes = 0
        self.optimizers: WatchedOptimizers | None = None

    def build_optimizer(self, model: nn.Module) -> Optimizers:
        self.optimizers = WatchedOptimizers(super().build_optimizer(model))
        return self.optimizers

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        self.passes += 1
        return replace(loss, total=loss.total * self._spoil(self.passes))


class PlainSgd(WatchedTask):
    def build_optimizer(self, model: nn.Module) -> Optimizers:
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        inner = Optimizers([torch.optim.SGD(list(names), lr=0.1)], names)
        self.optimizers = WatchedOptimizers(inner)
        return self.optimizers


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.records: list[LogRecord] = []
        self.steps: list[StepRecord] = []

    def start(self, step: int, steps: int) -> None:
        self.events.append(("start", step, steps))

    def log(self, record: LogRecord) -> None:
        self.records.append(record)
        name = "validation" if "validation_loss" in record.metrics else "log"
        self.events.append((name, record.step))

    def step_end(self, record: StepRecord) -> None:
        self.steps.append(record)

    def saved(self, step: int) -> None:
        self.events.append(("saved", step))

    def end(self, step: int) -> None:
        self.events.append(("end", step))

    def failed(self, error: BaseException) -> None:
        self.events.append(("failed", type(error).__name__))

    def figures(self, name: str) -> list[float]:
        return [record.metrics[name] for record in self.records if name in record.metrics]

    def rows(self) -> dict[int, list[int]]:
        return {record.step: record.rows().tolist() for record in self.steps}


def stop_after_steps(steps: int | None, loader: Loader) -> Callable[[], bool]:
    """Ask for a stop after so many steps of this run, counted from the first call."""
    steps_before: list[int] = []

    def is_time() -> bool:
        steps_before.append(loader.consumed)
        return steps is not None and loader.consumed - steps_before[0] >= steps

    return is_time


def make_trainer(
    config: Training,
    model: nn.Module,
    rows: Rows,
    *,
    rows_per_device: int = 4,
    directory: Path | None = None,
    callbacks: Sequence[Callback] = (),
    cadence: Cadence = SPARSE,
    total_rows: int | None = None,
    stop_after: int | None = None,
    validation: Sequence[Batch] = (),
    task: TrainingTask | None = None,
    ranks: Ranks = ALONE,
    keep: int = 2,
    how: Speed = PLAIN,
    weights: Any = None,
    quiet_hours: Any = None,
    **origin: Any,
) -> Trainer:
    steps = -(-(config.tokens or 0) // config.tokens_per_step)
    total_rows = total_rows or steps * config.rows_per_step
    order = ShuffledOrder(len(rows), config.rows_per_step, total_rows, config.seed, rows.row_length)
    place = {"rank": ranks.rank, "world": ranks.world}
    loader = Loader(rows, order, rows_per_device=rows_per_device, **place)
    options = TrainerOptions(
        weights or Held(model),
        ranks,
        precision.resolve_precision(config.precision, ranks.device),
        Checkpoints(directory, files=dict, keep=keep) if directory else None,
        Validation(validation, ()),
        cadence,
        Origin(**origin),
        how,
        quiet_hours,
        stop_after_steps(stop_after, loader),
    )
    return Trainer(task or LanguageModeling(config, model), loader, options, callbacks)


def in_ranks(
    world: int, directory: Path, work: Callable[[Ranks], Any], *, compiles: bool = False
) -> list[Any]:
    """What `work` returns on each rank; ranks are forks of this process that talk through gloo.

    One thread each: OpenMP's do not survive forks. They are killed after five minutes.
    """
    if compiles:  # import what that needs, once: in each fork it would take 2 s
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()
        torch._dynamo.reset()
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / f"store-{world}-{len(list(directory.iterdir()))}"

    def begin(rank: int) -> None:
        status = 1
        try:
            torch.set_num_threads(1)
            os.environ["LOCAL_WORLD_SIZE"] = str(world)
            address = f"file://{store}"
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
            result = pickle.dumps(work(Ranks(rank, world, CPU)))
            store.with_suffix(f".{rank}").write_bytes(result)
            dist.barrier()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=begin, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * world
    return [pickle.loads(store.with_suffix(f".{rank}").read_bytes()) for rank in range(world)]
