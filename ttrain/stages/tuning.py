"""`runtime.tune=auto` of a stage: which settings that change only speed are fastest here, measured or remembered.

One axis after the other is tried on forward and backward passes over rows of the run; the model stays as it is. All ranks
measure together, and the first one decides. What came near the fastest is compared with it and the settings once more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ttrain.config import Runtime
from ttrain.core.machine import VERSION, processor, versions
from ttrain.core.text import format_duration
from ttrain.data.loader import BatchSource, Order
from ttrain.data.packing import Rows
from ttrain.model.factory import count_parameters
from ttrain.stages.job import StageContext
from ttrain.stages.trainable_model import compiles
from ttrain.store import tunings
from ttrain.store.tunings import Choice
from ttrain.train.compiling import CompiledLayers
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import default_chunk_tokens
from ttrain.train.precision import Precision
from ttrain.train.resource_limits import cap_at_available_memory, is_out_of_memory
from ttrain.train.task import TrainingTask

BUDGET_SECONDS = 60.0
LONGEST_SECONDS = 2 * BUDGET_SECONDS  # that another process of the home is waited for
WARMUPS, REPEATS = 1, 3  # micro-batches of a trial
STATES = 2  # numbers that an optimizer keeps for each one that is trained
FINAL_ROUNDS, FINALISTS, NEAR = 3, 5, 1.05  # in turns: the settings, and what came within 5 % of the fastest
LEAST_GAIN = 1.02  # less is noise
COMPILING_PAYS_SECONDS = 240.0  # of a run without it: layers compile in 8 s on an H200, in 9 on an EPYC, here and in the run
OUT_OF_MEMORY = "out of memory"
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)

TUNED = tuple(field.name for field in fields(Choice))
SHAPE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "num_experts", "num_local_experts",
)  # fmt: skip
SETTINGS = (
    "rows_per_device", "attention", "loss_chunk_tokens", "compile", "gradient_checkpointing", "memory_limit_gb", "threads",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "peft")

log = logging.getLogger("ttrain")

Measure = Callable[[Choice], float]  # seconds of a step; raises an error where it cannot be computed


@dataclass(frozen=True)
class Axis:
    """Values of a setting in the order in which they are tried. `climbs`: on the way in a direction while it gains."""

    name: str
    values: Sequence[Any]
    climbs: bool = False


@dataclass
class Search:
    """The search of one machine: what was measured, and until when. `stop`: whether the run is to stop."""

    measure: Measure
    ranks: Ranks
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    seconds: dict[Choice, float] = field(default_factory=dict)  # of a step; infinite where it could not be computed
    too_large: set[Choice] = field(default_factory=set)  # for the memory of a rank
    stopped: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()

    def run(self, start: Choice, axes: Sequence[Axis]) -> tuple[Choice, float]:
        """The fastest choice that was met, and how many times as fast as the start it is; the start, if that is noise."""
        best = start
        if not self.try_one(start):
            return start, 1.0
        for axis in axes:
            for values in _directions(axis, getattr(best, axis.name)):
                best = self._walk(best, axis, values)
        return self._fastest(start)

    def fitting(self, start: Choice) -> Choice:
        """The start, with half as many rows as often as there is no memory for them."""
        fewer = start
        while not self.try_one(fewer) and fewer in self.too_large and fewer.rows_per_device > 1:
            fewer = replace(fewer, rows_per_device=fewer.rows_per_device // 2)
        return fewer if self.try_one(fewer) else start

    def try_one(self, choice: Choice) -> bool:
        """Measure a choice on all ranks; False where there is no time for it, or any rank failed."""
        if choice in self.seconds:
            return self.seconds[choice] < float("inf")
        if not self._goes_on():
            return False
        self.seconds[choice] = self._measured(choice)
        log.info("tuning: %s: %s", choice, _rate(self.seconds[choice]))
        return self.seconds[choice] < float("inf")

    def _walk(self, best: Choice, axis: Axis, values: Sequence[Any]) -> Choice:
        for value in values:
            candidate: Choice = replace(best, **{axis.name: value})
            if candidate == best:
                continue
            can_be_computed = self.try_one(candidate)
            if axis.climbs and (not can_be_computed or self.seconds[candidate] > LEAST_GAIN * self.seconds[best]):
                break
            if can_be_computed and self.seconds[candidate] < self.seconds[best]:
                best = candidate
        return best

    def _fastest(self, start: Choice) -> tuple[Choice, float]:
        """The fastest of the start and what came near it, measured in turns: beside other programs a machine is slower at
        times, and several gains of a hundredth are no noise together.
        """
        ranking = sorted(self.seconds, key=self.seconds.__getitem__)[:FINALISTS]
        least = {start: self.seconds.get(start, float("inf"))}
        least |= {one: self.seconds[one] for one in ranking if self.seconds[one] <= NEAR * self.seconds[ranking[0]]}
        for _ in range(FINAL_ROUNDS if len(least) > 1 else 0):
            for choice in least:
                if self._goes_on():
                    least[choice] = min(least[choice], self._measured(choice))
        best = min(least, key=least.__getitem__)
        gain = least[start] / least[best] if best != start else 1.0
        return (best, gain) if gain >= LEAST_GAIN else (start, 1.0)

    def _measured(self, choice: Choice) -> float:
        """Mean seconds over the ranks; infinite on all of them where any rank cannot compute it."""
        seconds, failure = 0.0, ""
        try:
            seconds = self.measure(choice)
        except (RuntimeError, MemoryError) as error:
            failure = OUT_OF_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {error}".splitlines()[0]
        if failure:
            log.info("tuning: %s: %s", choice, failure)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        total, failures, large = self.ranks.sum([seconds, float(bool(failure)), float(failure == OUT_OF_MEMORY)])
        if large:
            self.too_large.add(choice)
        return float("inf") if failures else total / self.ranks.world

    def _goes_on(self) -> bool:
        """Whether there is time left by the clock of the first rank, and none was asked to stop."""
        over = self.ranks.first and self.clock() - self.began >= BUDGET_SECONDS
        stops, late = self.ranks.sum([float(self.stop()), float(over)])
        self.stopped = self.stopped or stops > 0
        return not (self.stopped or late)


def _directions(axis: Axis, value: Any) -> list[Sequence[Any]]:
    """The ways to go from a value: up and down where the axis is climbed, else all other values."""
    if not axis.climbs:
        return [axis.values]
    return [[other for other in axis.values if other > value], [other for other in reversed(axis.values) if other < value]]


def _rate(seconds: float) -> str:
    return f"{format_duration(seconds)} a step" if seconds < float("inf") else "cannot be computed"


# --- the user's run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What is measured: the task and its rows, on this rank."""

    task: TrainingTask
    rows: BatchSource
    order: Order
    precision: Precision
    ranks: Ranks

    def seconds_of_a_step(self, choice: Choice) -> float:
        """Of the forward and backward passes of the rank that has most of them; weights and random numbers stay as they are.

        The fastest of some passes after others that warm up, times their number. What the optimizer will keep is allocated
        meanwhile, so that a choice which fits here fits in training.
        """
        module: Any = self.task.build_model().to(self.ranks.device)
        module.configure(choice.loss_chunk_tokens, choice.attention)
        passes = CompiledLayers(module).used if choice.compile else contextlib.nullcontext
        module.train()
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        reserved = torch.empty(STATES * trained, device=self.ranks.device)
        seconds: list[float] = []
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                for number in range(WARMUPS + REPEATS):
                    batch = self.rows.batch(self.row_numbers(number, choice.rows_per_device))
                    with passes(), _timed(self.ranks.device, seconds):
                        self._pass(module, batch)
        finally:
            module.zero_grad(set_to_none=True)
            del reserved
        parts = -(-self.order.rows_per_step // choice.rows_per_device)
        return min(seconds[WARMUPS:]) * -(-parts // self.ranks.world)

    def row_numbers(self, number: int, count: int) -> Any:
        """The rows of a micro-batch: of the first steps of the run, this rank's share."""
        numbers = self.order.step_rows(number % self.order.steps)
        first = self.ranks.rank * count % max(1, len(numbers) - count + 1)
        return numbers[first : first + count]

    def _pass(self, module: Any, batch: Any) -> None:
        with self.precision.autocast():
            loss = self.task.train_step(module, batch, self.ranks.device)
        (loss.total / max(1, loss.count)).backward()  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def _timed(device: torch.device, seconds: list[float]) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds.append(time.perf_counter() - began)


def axes_of(start: Choice, *, fixed: frozenset[str], rows: int, row_length: int) -> list[Axis]:
    """The axes to try. `fixed`: settings that have a value; `rows`: of a step, for one rank."""
    sizes = [1 << power for power in range(max(1, rows).bit_length()) if rows % (1 << power) == 0]
    axes = [
        Axis("attention", tunings.ATTENTIONS),
        Axis("rows_per_device", sorted({*sizes, start.rows_per_device}), climbs=True),
        Axis("loss_chunk_tokens", [chunk for chunk in CHUNKS if chunk < 2 * rows * row_length], climbs=True),
        Axis("compile", [not start.compile]),
    ]
    return [axis for axis in axes if axis.name not in fixed]


def tune(
    subject: Subject,
    start: Choice,
    axes: Sequence[Axis],
    described: Mapping[str, Any],
    *,
    home: Path | None,
    stop: Callable[[], bool],
) -> Choice:
    """The choice that is remembered for what is described, or one that is measured now and remembered.

    Where another process measures, it is waited for, and its choice taken: two that measure at once disturb each other.
    """
    ranks = subject.ranks
    with ranks.busy("tuning"), contextlib.ExitStack() as stack:
        if ranks.first and home is not None:
            stack.enter_context(_alone(home, stop))
        remembered = tunings.recall(home, described) if ranks.first and home is not None else None
        choice = _agreed(remembered.choice if remembered else None, ranks)
        if choice is not None:
            log.info("tuning: remembered for this machine and shape: %s", remembered)
            return choice
        search = Search(subject.seconds_of_a_step, ranks, stop)
        with cap_at_available_memory(ranks.device, ranks.world):
            start = search.fitting(start)
            tuned, gain = search.run(start, _affordable(axes, subject, start, search))
        took = format_duration(search.clock() - search.began)
        log.info("tuning: took %s: %s, %.2f times the speed of the settings", took, tuned, gain)
        if ranks.first and home is not None and not search.stopped:
            tunings.remember(home, described, tuned, gain)
        return _agreed(tuned, ranks) or start


def _affordable(axes: Sequence[Axis], subject: Subject, start: Choice, search: Search) -> list[Axis]:
    """The axes without compiling, where the run is too short for it."""
    if not search.try_one(start):
        return []
    estimated = search.seconds[start] * subject.order.steps
    return [axis for axis in axes if axis.name != "compile" or estimated >= COMPILING_PAYS_SECONDS]


def _agreed(choice: Choice | None, ranks: Ranks) -> Choice | None:
    """The choice of the first rank, on all ranks."""
    values = [0.0] * 5
    if ranks.first and choice is not None:
        attention = tunings.ATTENTIONS.index(choice.attention)
        values = [1.0, *map(float, (choice.rows_per_device, attention, choice.loss_chunk_tokens, choice.compile))]
    exists, rows, attention_number, chunk_tokens, compiles = ranks.sum(values)
    if not exists:
        return None
    return Choice(int(rows), tunings.ATTENTIONS[int(attention_number)], int(chunk_tokens), bool(compiles))


@contextlib.contextmanager
def _alone(home: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Measure alone among the processes of a home; after `LONGEST_SECONDS`, or where it cannot be locked, beside others."""
    import filelock

    path = home / tunings.LOCK
    lock = filelock.FileLock(path, mode=0o600)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + LONGEST_SECONDS
        while not stop():
            try:
                lock.acquire(timeout=0.2)
                break
            except filelock.Timeout:
                if time.monotonic() >= deadline:
                    log.warning("tuning: another process has measured for %g s; measuring beside it", LONGEST_SECONDS)
                    break
    except OSError as error:
        log.warning("tuning: %s cannot be locked: %s", path, error)
    try:
        yield
    finally:
        lock.release()


# --- the stage ----------------------------------------------------------------------------------------------------------


def tuned(
    task: LanguageModeling, rows: Rows, order: Order, job: StageContext, ranks: Ranks, precision: Precision
) -> Runtime:
    """The stage's runtime settings; with `tune=auto` those that are fastest here, as which the task is configured too.

    Every axis changes the order of sums, and so the last bits of the weights: in deterministic mode nothing is tuned.
    """
    runtime = job.runtime
    if runtime.tune == "off" or order.steps == 0:
        return runtime
    if reason := _reason_against(runtime, ranks):
        log.warning("runtime.tune is auto, but nothing is tuned: %s", reason)
        return runtime
    rows_of_a_rank = -(-order.rows_per_step // ranks.world)
    chunk_tokens = runtime.loss_chunk_tokens
    start = Choice(
        min(runtime.rows_per_device, rows_of_a_rank),
        "masked" if runtime.attention == "masked" else "records",
        default_chunk_tokens(ranks.device) if chunk_tokens is None else chunk_tokens,
        compiles(runtime, ranks.device, rows, order.steps),
    )
    values = {
        "attention": runtime.attention != "auto",
        "loss_chunk_tokens": chunk_tokens is not None,
        "compile": runtime.compile is not None or rows.trimmed,
    }
    fixed = frozenset(name for name, is_fixed in values.items() if is_fixed)
    axes = axes_of(start, fixed=fixed, rows=rows_of_a_rank, row_length=rows.row_length)
    choice = tune(
        Subject(task, rows, order, precision, ranks),
        start,
        axes,
        _described(task, rows, order, runtime, ranks, precision),
        home=job.home,
        stop=job.stop_requested,
    )
    task.build_model().configure(choice.loss_chunk_tokens, choice.attention)
    return runtime.model_copy(update=vars(choice))


def _reason_against(runtime: Runtime, ranks: Ranks) -> str | None:
    """Why nothing can be tuned, with the setting to change."""
    if runtime.deterministic:
        return "each choice would change the last bits of the weights; set runtime.deterministic=false"
    if runtime.parallel == "fsdp" and ranks.world > 1:
        return "a model that is sharded cannot be measured on one rank; set runtime.parallel=ddp"
    if runtime.reduction == "tree":
        return "runtime.reduction is tree, which promises equal bits; set runtime.reduction=fast"
    return None


def _described(
    task: LanguageModeling, rows: Rows, order: Order, runtime: Runtime, ranks: Ranks, precision: Precision
) -> Mapping[str, Any]:
    """All on which the fastest choice depends, as JSON: another machine, shape, version or setting is measured anew."""
    module = task.build_model()
    causal: Any = module.causal
    installed = versions()
    is_cuda = ranks.device.type == "cuda"
    return {
        "processor": processor(),
        "device": torch.cuda.get_device_name(ranks.device) if is_cuda else ranks.device.type,
        "ranks": ranks.world,
        "versions": {"ttrain": VERSION, **{name: installed.get(name) for name in LIBRARIES}},
        "model": type(causal).__name__,
        "shape": {name: value for name in SHAPE if isinstance(value := getattr(causal.config, name, None), int)},
        "parameters": count_parameters(module),
        "trained": count_parameters(module, trained=True),
        "row_length": rows.row_length,
        "trimmed": rows.trimmed,
        "rows_per_step": order.rows_per_step,
        "steps": 1 << order.steps.bit_length(),  # about: whether compiling pays
        "precision": precision.word,
        "settings": {name: getattr(runtime, name) for name in SETTINGS},
    }
