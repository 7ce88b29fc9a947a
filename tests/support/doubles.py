"""Small stand-ins for what training reads: a corpus, a tokenizer, shards, a two-layer model, rows without files."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.planned_homes import remember_modules
from support.waiting import hanging
from torch import Tensor, nn

from ttrain.config import Model, Optim, PretrainConfig, Runtime, Schedule, Section, Settings, Training
from ttrain.core.files import ProgressWriter, write_json
from ttrain.data import tokenizer
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.loader import Loader, ShuffledOrder
from ttrain.data.packing import Array, Batch, Rows
from ttrain.data.shards import Column, write_index, write_shard
from ttrain.evaluate import perplexity
from ttrain.model import factory
from ttrain.pipeline.processes import StageObserver
from ttrain.pipeline.recipe import Planned
from ttrain.stages import STAGES, Stage, pretrain
from ttrain.stages.job import StageContext
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.train import precision
from ttrain.train.callbacks import Callback, LogRecord
from ttrain.train.checkpoint import Checkpoints, Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.monitor import PERFORMANCE
from ttrain.train.optim import Optimizers
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Cadence, Trainer, TrainerOptions

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)
VOCAB = 61
SPARSE, PLAIN = Cadence(log=3, checkpoint=10), TrainerOptions()
LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "A list is a sequence of items; a tuple is one that cannot change.",
    "Return the number of elements in the container.",
    "Grüße an 東京 und 🙂, said the byte to the character.",
    "def add(a, b):\n    return a + b\n",
    "Nothing is learnt where nothing is masked in.",
)


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of one to nine lines of the six-line corpus."""
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(LINES, size=generator.integers(1, 10))) for _ in range(count)]


def chats(count: int, seed: int = 0) -> list[tuple[Message, ...]]:
    """Questions with an answer each, from the same lines."""
    generator = np.random.default_rng(seed)
    pairs = [generator.choice(LINES, size=2) for _ in range(count)]
    return [(Message("user", str(question)), Message("assistant", str(answer))) for question, answer in pairs]


def make_tokenizer(directory: Path) -> Encoder:
    """The smallest that trains: 256 bytes, the special tokens and a few merges."""
    tokenizer.save(tokenizer.train(LINES, 300), directory)
    return Encoder(directory)


def write_shards(
    directory: Path,
    records: Sequence[tuple[Sequence[int], Sequence[bool]]],
    *,
    kind: str,
    vocab_size: int = VOCAB,
    tokenizer: str = "t",
    tokens_per_shard: int = 10**6,
    groups: Sequence[int] = (),
    weights: Sequence[float] = (),
) -> dict[str, Any]:
    """One set of shards with these (ids, live) records; a shard ends with the record that fills it. Returns the index."""
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    start, size = 0, 0
    for end, (ids, _) in enumerate(records, start=1):
        size += len(ids)
        if size < tokens_per_shard and end < len(records):
            continue
        some = records[start:end]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in some)])
        live = np.concatenate([np.asarray(mask, np.uint8) for _, mask in some]) if kind == "chats" else None
        column = Column(np.concatenate([np.asarray(ids) for ids, _ in some]), offsets, live)
        entry = write_shard(directory / f"{len(entries):016x}.arrow", column, vocab_size)
        entries.append({**entry, "bytes": 2 * size, "group": groups[len(entries)] if groups else 0})
        start, size = end, 0
    more = {"weights": list(weights)} if weights else {}
    return write_index(directory, kind=kind, vocab_size=vocab_size, tokenizer=tokenizer, shards=entries, **more)


def make_shards(directory: Path, encoder: Encoder, kind: str, train: int, heldout: int = 12) -> None:
    """`train/` and `heldout/` of documents or chats, as the shards stage leaves them."""
    for seed, (part, count) in enumerate((("train", train), ("heldout", heldout))):
        if kind == "documents":
            texts = documents(count, seed)
            rows = [([encoder.bos_id, *ids, encoder.eos_id], ()) for ids in encoder.encode(texts)]
            records: list[dict[str, Any]] = [{"text": text} for text in texts]
        else:
            talks = chats(count, seed)
            rows = [encode_chat(encoder, messages) for messages in talks]
            records = [{"messages": [vars(message) for message in messages]} for messages in talks]
        common = {"vocab_size": len(encoder), "tokenizer": encoder.digest, "tokens_per_shard": 4096}
        index = write_shards(directory / part, rows, kind=kind, **common)
        lines = [json.dumps(record) + "\n" for record in records]
        first = 0
        for shard in index["shards"]:
            shard["records"] = shard["file"].replace(".arrow", ".jsonl")
            (directory / part / shard["records"]).write_text("".join(lines[first : first + shard["rows"]]))
            first += shard["rows"]
        write_json(directory / part / "index.json", index)


def tiny_model(*, seed: int = 1, vocab: int = VOCAB, **settings: Any) -> Any:
    """Two layers, 16 wide, two heads."""
    sizes = {"hidden_size": 16, "layers": 2, "heads": 2, "max_length": 128, **settings}
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return factory.build(Model(**sizes), vocab_size=vocab, ids=ids, stop_ids=[3, 8], seed=seed)


def sequence(seed: int, length: int) -> perplexity.Tokens:
    """Random ids, of which about 7 in 10 count; the first is context only."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, VOCAB, (length,), generator=generator).tolist()
    return ids, [False, *(torch.rand(length - 1, generator=generator) < 0.7).tolist()]


def score_of(
    model: nn.Module, sequences: Sequence[perplexity.Tokens], length: int, stride: int, **more: Any
) -> perplexity.Score:
    """What all sequences together cost the model."""
    found = perplexity.score_each(
        model, sequences, length=length, stride=stride, device=CPU,
        progress=lambda done, total: None, **more,
    )  # fmt: skip
    return perplexity.Score(sum(one.nats for one in found), sum(one.tokens for one in found))


def settings_of_training(**changes: Any) -> Training:
    """Twenty steps of six rows of sixteen tokens, in fp32."""
    values: dict[str, Any] = {
        "tokens": 20 * 96, "tokens_per_step": 96, "row_length": 16, "precision": "fp32",
        "optim": Optim(lr=1e-2), "schedule": Schedule(warmup_steps=3), **changes,
    }  # fmt: skip
    return Training(**values)


class NumberedRows(Rows):
    """Row n is random tokens under the seed n, in two segments, some labels masked; `asked` notes what was read."""

    pad_id = 0

    def __init__(self, count: int, row_length: int = 16, live: Sequence[int] | None = None, vocab: int = VOCAB) -> None:
        self.count, self.row_length, self.vocab = count, row_length, vocab
        self._live = live  # live tokens of each row; None: about two thirds of them
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for row, at in zip(rows.tolist(), lines.tolist(), strict=True):
            self._fill(row, batch, at)

    def _fill(self, row: int, batch: Batch, at: int) -> None:
        self.asked.append(row)
        generator = np.random.default_rng(row)
        T = self.row_length
        ids = generator.integers(9, self.vocab, T + 1)
        border = int(generator.integers(1, T))
        live = generator.random(T) < 2 / 3 if self._live is None else np.arange(T) < self._live[row]
        batch.input_ids_BT[at] = ids[:-1]
        batch.labels_BT[at] = np.where(live, ids[1:], -100)
        batch.positions_BT[at] = np.concatenate([np.arange(border), np.arange(T - border)])
        batch.segments_BT[at] = np.arange(T) >= border

    def counts(self) -> dict[str, int | float]:
        return {"rows": self.count}


@dataclass
class Held:
    """The `Weights` of a model."""

    model: nn.Module

    def state(self) -> dict[str, Tensor]:
        return factory.state(self.model)  # type: ignore[arg-type]

    def load(self, weights: dict[str, Tensor]) -> None:
        factory.load_state(self.model, weights)  # type: ignore[arg-type]


class WatchedOptimizers(Optimizers):
    """Keeps the gradients with which each step was made, by name, and the parameters after it."""

    def __init__(self, inner: Optimizers) -> None:
        super().__init__(inner.optimizers, inner.names)
        self.gradients: list[dict[str, Tensor]] = []

    def step(self) -> None:
        found = {self.names[p]: p.grad.clone() for p in self.parameters if p.grad is not None}  # type: ignore[index]
        self.gradients.append(found)
        super().step()


class WatchedTask(TrainingTask):
    """Language modelling whose optimizers are watched; `spoil(step) -> factor` multiplies the loss of a training step."""

    def __init__(self, config: Training, model: nn.Module, spoil: Callable[[int], float] | None = None) -> None:
        self.config, self._inner, self._spoil = config, LanguageModeling(config, model), spoil
        self.optimizers: WatchedOptimizers | None = None
        self.passes = 0

    def build_model(self) -> nn.Module:
        return self._inner.build_model()

    def build_optimizer(self, model: nn.Module) -> Optimizers:
        self.optimizers = WatchedOptimizers(self._inner.build_optimizer(model))
        return self.optimizers

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        return self._inner.build_scheduler(steps)

    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._inner.build_criterion()

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> Any:
        loss = self._inner.train_step(model, batch, device)
        self.passes += 1
        if self._spoil is None:
            return loss
        return type(loss)(loss.total * self._spoil(self.passes), loss.count)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> Any:
        return self._inner.validation_step(model, batch, device)

    def after_step(self, sums: Mapping[str, Sequence[float]]) -> None:
        self._inner.after_step(sums)

    def figures(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        return self._inner.figures(sums)


class PlainSgd(WatchedTask):
    """Stochastic gradient descent, which unlike AdamW and Muon does not magnify rounding."""

    def build_optimizer(self, model: nn.Module) -> Optimizers:
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = WatchedOptimizers(Optimizers([torch.optim.SGD(list(names), lr=0.1)], names))
        return self.optimizers


class Recorder(Callback):
    """Notes every event in its order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.records: list[LogRecord] = []

    def start(self, step: int, steps: int) -> None:
        self.events.append(("start", step, steps))

    def log(self, record: LogRecord) -> None:
        self.records.append(record)
        self.events.append(("validation" if "validation_loss" in record.metrics else "log", record.step))

    def saved(self, step: int) -> None:
        self.events.append(("saved", step))

    def end(self, step: int) -> None:
        self.events.append(("end", step))

    def failed(self, error: BaseException) -> None:
        self.events.append(("failed", type(error).__name__))

    def figures(self, name: str) -> list[float]:
        """Values of one metric, in their order."""
        return [record.metrics[name] for record in self.records if name in record.metrics]


class StopAfter:
    """Asks for a stop in step number `steps` of this run, as a signal would."""

    def __init__(self, steps: int, loader: Loader) -> None:
        self.steps, self.loader = steps, loader
        self.first: int | None = None  # the step at which the run begins, when it is asked for the first time

    def __call__(self) -> bool:
        if self.first is None:
            self.first = self.loader.consumed
        return self.loader.consumed - self.first >= self.steps


def make_trainer(
    config: Training, model: nn.Module, rows: Rows, *, rows_per_device: int = 4, directory: Path | None = None,
    callbacks: Sequence[Callback] = (), cadence: Cadence = SPARSE, total_rows: int | None = None,
    stop_after: int | None = None, start: Snapshot | None = None, validation: Sequence[Batch] = (),
    task: TrainingTask | None = None, ranks: Ranks = ALONE, keep: int = 2, how: TrainerOptions = PLAIN, weights: Any = None,
    **options: Any,
) -> Trainer:  # fmt: skip
    """A trainer of the model on the rows; checkpoints go under `directory` where there is one."""
    assert config.tokens is not None
    steps = -(-config.tokens // config.tokens_per_step)
    order = ShuffledOrder(len(rows), config.rows_per_step, total_rows or steps * config.rows_per_step, config.seed)
    checkpoints = Checkpoints(directory, files=dict, keep=keep) if directory else None
    loader = Loader(rows, order, rows_per_device=rows_per_device, rank=ranks.rank, world=ranks.world)
    return Trainer(
        task or LanguageModeling(config, model),
        loader,
        ranks=ranks, precision=precision.resolve_precision(config.precision, ranks.device), weights=weights or Held(model),
        checkpoints=checkpoints, validation=validation, callbacks=callbacks, cadence=cadence, start=start,
        stop_requested=StopAfter(stop_after, loader) if stop_after else lambda: False, options=how, **options,
    )  # fmt: skip


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether names and every bit are equal."""
    return {*first} == {*second} and all(torch.equal(first[name], second[name]) for name in first)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two sets of tensors, relative to the first."""
    assert {*first} == {*second}
    difference = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in first.values())) ** 0.5


def curve(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without what the clock gives."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timed = {*PERFORMANCE}
    return [
        {"step": line["step"], "metrics": {k: v for k, v in line["metrics"].items() if k not in timed}} for line in lines
    ]


def logged_steps(lines: list[dict[str, Any]], figure: str) -> list[int]:
    """The steps of those lines of a curve that hold the figure."""
    return [line["step"] for line in lines if figure in line["metrics"]]


def in_ranks(world: int, directory: Path, work: Callable[[Ranks], Any], *, seconds: float = 60) -> list[Any]:
    """What `work` returns on each of `world` ranks, which are forks of this process and talk through gloo.

    They hang where none of them has computed for `seconds`. A fork costs nothing where torch is loaded already; one thread
    each, since OpenMP's threads do not survive it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    store = directory / f"store-{world}-{len(list(directory.iterdir()))}"

    def begin(rank: int) -> None:
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            found = work(Ranks(rank, world, CPU))
            store.with_suffix(f".{rank}").write_bytes(pickle.dumps(found))
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
    late = hanging(processes, seconds)
    for process in late:
        process.kill()
    for process in processes:
        process.join()
    assert not late, f"{len(late)} of {world} ranks hang"
    assert [process.exitcode for process in processes] == [0] * world
    return [pickle.loads(store.with_suffix(f".{rank}").read_bytes()) for rank in range(world)]


# --- whole stages -------------------------------------------------------------------------------------------------------


@dataclass
class Home:
    """A store that holds a tokenizer, shards of documents and shards of chats."""

    store: ArtifactStore
    tokenizer: Artifact
    documents: Artifact
    chats: Artifact

    @classmethod
    def make(cls, root: Path) -> Home:
        remember_modules(root)
        store = ArtifactStore(root)
        encoder = make_tokenizer(root / "a")
        make_shards(root / "b", encoder, "documents", 60)
        make_shards(root / "c", encoder, "chats", 60)
        manifest: dict[str, Any] = {"result": {}, "ingredients": {}, "inputs": {}}
        return cls(
            store,
            store.publish("tokenizer", "0" * 64, root / "a", manifest),
            store.publish("shards-pretrain", "1" * 64, root / "b", manifest),
            store.publish("shards-sft", "2" * 64, root / "c", manifest),
        )

    def pretrain_inputs(self) -> dict[str, Artifact]:
        return {"tokenizer": self.tokenizer, "shards": self.documents}

    @property
    def paths(self) -> dict[str, Path]:
        """The inputs of the stage `pretrain`."""
        return {name: artifact.path for name, artifact in self.pretrain_inputs().items()}

    def pretrain(self, settings: Settings, output: Path, more: Mapping[str, Path] | None = None, **job: Any) -> Any:
        """Run the stage `pretrain` in this process, with `more` inputs; returns its figures."""
        config = PretrainConfig(model=settings.model, pretrain=settings.pretrain)
        return run_here(pretrain, config, output, {**self.paths, **(more or {})}, settings.runtime, **job)


def stage_settings(steps: int = 12, pretrain: Mapping[str, Any] | None = None, **runtime: Any) -> Settings:
    """A pretraining of `steps` steps of 8 rows of 32 tokens, an SFT and an adapter, each in well under a second."""
    speed = {
        "device": "cpu",
        "threads": 1,
        "rows_per_device": 4,
        "log_every_steps": 1,
        "checkpoint_every_steps": 4,
        **runtime,
    }
    common = {"tokens_per_step": 256, "row_length": 32, "validation_rows": 8, "precision": "fp32"}
    return Settings.model_validate({
        "model": {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 64, "dropout": 0.1},
        "pretrain": {"tokens": steps * 256, **common, **(pretrain or {})},
        "sft": {"epochs": 1.0, **common},
        "lora": {"epochs": 1.0, "rank": 2, **common},
        "evaluate": {"row_length": 32, "stride": 16, "new_tokens": 8},
        "runtime": {**speed, **runtime},
    })  # fmt: skip


def run_here(module: Any, config: Section, output: Path, inputs: Mapping[str, Path], runtime: Runtime, **job: Any) -> Any:
    """Run a stage's module in this process; returns its figures.

    The state of the random numbers is another every time, and must not matter.
    """
    torch.seed()
    try:
        return module.run(config, StageContext(inputs, {}, {}, output, runtime, ProgressWriter(None), lambda: False, **job))
    finally:
        torch.set_num_threads(1)


def bytes_kept(run: Callable[[], object]) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage once."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def flip_bit(path: Path) -> None:
    """As a disk may do: one bit is another, and no time tells."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(times.st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def planned(*names: str) -> list[Planned]:
    """The plan of stages that are to run."""
    return [Planned(STAGES[name], "run", ()) for name in names]


@dataclass
class Watcher(StageObserver):
    """An observer of a launched stage; `act(line)` sees every line of its log. Setting `signum` asks for a stop.

    `impatient`: the stop was asked for twice.
    """

    act: Callable[[str], None] = lambda line: None
    signum: int = 0
    impatient: bool = False
    lines: list[str] = field(default_factory=list)

    def logged(self, stage: Stage, line: str) -> None:
        self.lines.append(line)
        self.act(line)

    def waiting(self, stage: Stage, who: str) -> None:
        self.lines.append(f"waiting for {who}")

    def fetching(self, stage: Stage, line: str) -> None:
        self.lines.append(line)

    def stop_signal(self) -> int:
        return self.signum

    def at_once(self) -> bool:
        return self.impatient

    def stop(self) -> None:
        """As SIGTERM to the launching process does."""
        self.signum = signal.SIGTERM
