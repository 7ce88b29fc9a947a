"""`ttrain doctor`: each check passes on sound parts, and finds the fault that is planted in one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.data_commands import in_process
from support.shard_sets import write_lines
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_trainers import CPU, Held, in_ranks, settings_of_training, tiny_model
from torch import nn

from ttrain import api
from ttrain.config import Optim, Runtime, Schedule, Training
from ttrain.core.machine import usable_cores
from ttrain.data.packing import IGNORE, Batch
from ttrain.doctor import machine, model
from ttrain.doctor.parts import Check, InMemoryRows, Learner, run_check, select_rows, unevenly_masked
from ttrain.doctor.run import Doctor
from ttrain.errors import TTrainError, UsageError
from ttrain.pipeline.estimate import Estimate, StageEstimate
from ttrain.train import native
from ttrain.train.checkpoint import WEIGHTS
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling, segment_mask
from ttrain.train.losses import token_loss_sum
from ttrain.train.precision import Precision
from ttrain.train.task import LossSum, TrainingTask
from ttrain.train.trainer import Trainer

FP32 = Precision("fp32", CPU)
ROWS = NumberedRows(12)
RUNTIME = Runtime(device="cpu", rows_per_device=4)


@dataclass
class Subject(Held):
    files: dict[str, bytes] = field(default_factory=dict)
    weights_file: str = WEIGHTS


def build(**settings: Any) -> Subject:
    return Subject(tiny_model(**settings))


class Faulty(LanguageModeling):
    """Language modelling, to be changed in one place."""

    def __init__(self, config: Training, module: nn.Module, runtime: Runtime) -> None:
        super().__init__(config, module)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


def language(config: Training, module: nn.Module, runtime: Runtime) -> TrainingTask:
    return LanguageModeling(config, module)


SOUND = Learner(settings_of_training(optim=Optim(lr=1e-2)), RUNTIME, partial(build, dropout=0.1), language)


class Masked(Faulty):
    """Attends as a mask of its own says."""

    mask: Any = staticmethod(segment_mask)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        causal: Any = model.causal
        mask, ids_BT = self.mask(torch.from_numpy(batch.segments_BT)), torch.from_numpy(batch.input_ids_BT)
        logits_BTV = causal(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits
        return LossSum(token_loss_sum(logits_BTV, torch.from_numpy(batch.labels_BT)), batch.live_tokens)


class SeesTheFuture(Masked):
    mask = staticmethod(lambda segments_BT: (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None])


class SeesOtherRecords(Masked):
    mask = staticmethod(lambda segments_BT: segment_mask(torch.zeros_like(segments_BT)))


class MeanOfMeans(Faulty):
    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        return LossSum(loss.total / max(1, loss.count), 1)


class NoiseOfItsOwn(Faulty):
    """Draws from a generator that no checkpoint holds."""

    def __init__(self, config: Training, module: nn.Module, runtime: Runtime) -> None:
        super().__init__(config, module, runtime)
        self.generator = torch.Generator().manual_seed(1)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        return LossSum(loss.total * (1 + 0.1 * torch.rand((), generator=self.generator)), loss.count)


def forget_the_optimizer(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers.optimizers:
        optimizer.state.clear()


def average_over_ranks(trainer: Trainer) -> None:
    trainer.parallel.loss_factor /= trainer.ranks.world


def never_synchronise(trainer: Trainer) -> None:
    before_backward = trainer.parallel.before_backward
    trainer.parallel.before_backward = lambda *, last: before_backward(last=False)  # type: ignore[method-assign]


def changed(change: Callable[[Trainer], None]) -> Callable[..., Trainer]:
    """Makes trainers with a fault."""

    def make(*arguments: Any, **options: Any) -> Trainer:
        trainer = Trainer(*arguments, **options)
        change(trainer)
        return trainer

    return make


def ok(check: Check | None) -> bool:
    """Whether a check is ok; it has a cure where it is not, and only there."""
    assert check is not None
    assert (check.cure is None) == check.ok
    assert json.loads(json.dumps(asdict(check))) == asdict(check)
    return check.ok


# --- what a position sees, and the loss at the start ------------------------------------------------------------------


class Blind(Faulty):
    """Without its discovery the check would pass whatever the mask does."""

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        return super().train_step(model, replace(batch, input_ids_BT=np.full_like(batch.input_ids_BT, 9)), device)


@pytest.mark.parametrize(
    ("task", "future", "documents"),
    [
        (language, "", ""),
        (Masked, "", ""),
        (SeesTheFuture, "changes logits before it", ""),
        (SeesOtherRecords, "", "record 1 sees record 0"),
        (Blind, "does not see", ""),
    ],
)
def test_a_model_that_sees_what_it_should_not_is_found(task: Any, future: str, documents: str) -> None:
    learner = replace(SOUND, task=task)
    for examine, fault in ((model.future, future), (model.documents, documents)):
        found = examine(learner, ROWS, FP32)
        assert ok(found) == (not fault) and fault in str(found.figure)


def test_the_loss_at_the_start_is_near_the_logarithm_of_the_vocabulary_and_that_of_a_trained_base_below_it() -> None:
    found = model.first_loss(SOUND, ROWS, FP32, trained=False)
    assert ok(found) and f"{np.log(VOCAB):.3f}" in str(found.figure)
    assert not ok(model.first_loss(replace(SOUND, build=partial(build, init_std=1.0)), ROWS, FP32, trained=False))
    assert not ok(model.first_loss(replace(SOUND, build=partial(build, init_std=0.5)), ROWS, FP32, trained=True))
    assert ok(model.first_loss(replace(SOUND, build=knowing), ROWS, FP32, trained=True))


def knowing() -> Subject:
    """Knows which ids there are: those from 9 on."""
    subject = build(tie_embeddings=False)
    subject.model.model.norm.weight.data.fill_(0.0)
    head = nn.Linear(subject.model.lm_head.in_features, VOCAB)
    head.weight.data.zero_()
    head.bias.data.copy_(torch.where(torch.arange(VOCAB) < 9, -5.0, 0.0))
    subject.model.lm_head = head
    return subject


def mixture(*, collapsed: bool = False) -> Subject:
    subject = build(moe={"experts": 8, "top_k": 2}, init_std=0.2)
    if collapsed:
        gate = subject.model.model.layers[1].mlp.gate
        gate.weight.data.zero_()
        gate.register_forward_pre_hook(lambda module, given: (given[0] * 0,))
    return subject


def test_routers_are_checked_where_there_are_some() -> None:
    assert model.routers(SOUND, ROWS, FP32) is None
    assert ok(model.routers(replace(SOUND, build=mixture), ROWS, FP32))
    found = model.routers(replace(SOUND, build=partial(mixture, collapsed=True)), ROWS, FP32)
    assert found is not None and not ok(found) and "layers.1" in str(found.figure)


# --- gradients, ranks, resuming, learning -----------------------------------------------------------------------------


def test_a_gradient_that_depends_on_how_rows_are_divided_is_found_also_where_the_data_masks_nothing() -> None:
    assert ok(model.accumulation(SOUND, ROWS, CPU))
    assert not ok(model.accumulation(replace(SOUND, task=MeanOfMeans), NumberedRows(12, live=[16] * 12), CPU))


def test_the_environment_is_as_it_was_after_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that this process starts later would find no module beside them."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen: list[str] = []

    def spawn(*_: object) -> None:
        seen.append(os.environ["PYTHONSAFEPATH"])
        raise model.ProcessRaisedException("a rank failed", 0, 1)

    monkeypatch.setattr(model, "spawn", spawn)
    with pytest.raises(TTrainError, match="did not take a step together: a rank failed"):
        model.spawned(SOUND, ROWS)
    assert seen == ["1"] and "PYTHONSAFEPATH" not in os.environ


def test_two_ranks_are_one_unless_gradients_are_averaged_or_not_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners = [SOUND, *(replace(SOUND, trainer=changed(fault)) for fault in (average_over_ranks, never_synchronise))]
    sample = unevenly_masked(select_rows(ROWS, model.ROWS))

    def steps(ranks: Ranks) -> list[model.Step]:
        return [model.first_step(learner, sample, ranks, rows_per_device=1) for learner in learners]

    of_ranks = in_ranks(2, tmp_path, steps)  # two forks of this process instead of two that import torch anew
    for learner, sound, *both in zip(learners, (True, False, False), *of_ranks, strict=True):
        monkeypatch.setattr(model, "spawned", lambda learner, rows, both=both: both)
        assert ok(model.two_ranks(learner, ROWS)) == sound


@pytest.mark.parametrize(
    ("fault", "differs"),
    [
        pytest.param({}, "", id="sound, with dropout"),
        pytest.param({"trainer": changed(forget_the_optimizer)}, "weights", id="optimizer state is not restored"),
        pytest.param({"task": NoiseOfItsOwn}, "losses", id="random numbers are not restored"),
    ],
)
def test_what_a_checkpoint_does_not_restore_is_found(fault: dict[str, Any], differs: str) -> None:
    found = model.resume(replace(SOUND, **fault), ROWS, FP32)
    assert ok(found) == (not differs) and differs in str(found.figure)


def test_one_batch_is_learnt_with_a_fitting_learning_rate_only() -> None:
    def with_rate(lr: float) -> Learner:
        optim = Optim().model_copy(update={"lr": lr})  # settings end at 1
        config = settings_of_training(optim=optim, schedule=Schedule(warmup_steps=1000))
        return replace(SOUND, config=config, build=partial(build, layers=1))

    assert ok(model.learns(with_rate(1e-2), ROWS, FP32))
    slow, fast = (model.learns(with_rate(lr), ROWS, FP32) for lr in (1e-7, 1.0))
    assert not ok(slow) and "raise training.optim.lr" in str(slow.cure)
    assert not ok(fast) and "lower training.optim.lr" in str(fast.cure)
    nothing = model.learns(with_rate(1e3), ROWS, FP32)
    assert not ok(nothing) and "is not finite" in str(nothing.figure)


def test_the_few_rows_are_cut_around_what_is_learnt_and_masks_are_uneven_and_within_the_old_ones() -> None:
    late = InMemoryRows(Batch(*(np.arange(400).reshape(1, 400) for _ in range(4))))
    late.whole.labels_BT[0, :300] = IGNORE
    few = select_rows(late, 2, positions=50)
    assert few.whole.input_ids_BT.shape == (2, 50)
    assert (few.whole.labels_BT != IGNORE).sum() == 2 * 25
    assert few.whole.input_ids_BT[0, 25] == 300
    few = select_rows(NumberedRows(8, row_length=64, live=[64] * 8), 8)
    live_B = (unevenly_masked(few).whole.labels_BT != IGNORE).sum(1)
    assert live_B.tolist() == [64, 32, 16, 8] * 2
    assert (few.whole.labels_BT != IGNORE).all()


# --- the machine ------------------------------------------------------------------------------------------------------

SMALL = machine.Footprint(weights=100_000_000, gradients=100_000_000, optimizer=200_000_000, activations=600_000_000)


def test_memory_that_does_not_suffice_is_told_before_it_runs_out() -> None:
    assert ok(machine.memory(SMALL, RUNTIME, CPU, 1.1e9))
    found = machine.memory(SMALL, RUNTIME, CPU, 0.9e9)
    assert not ok(found) and "rows_per_device=2" in str(found.cure)
    two, limited = RUNTIME.model_copy(update={"devices": 2}), RUNTIME.model_copy(update={"memory_limit_gb": 0.5})
    assert [ok(machine.memory(SMALL, two, CPU, available)) for available in (1.9e9, 2.1e9)] == [False, True]
    assert not ok(machine.memory(SMALL, limited, CPU, 2e9))


def test_the_memory_of_a_step_is_measured_and_drawn_to_all_its_rows() -> None:
    config = settings_of_training(row_length=128, tokens_per_step=128 * 512)
    wide = replace(SOUND, config=config, runtime=Runtime(rows_per_device=1024), build=partial(build, hidden_size=64))
    found = machine.measure(wide, NumberedRows(3, row_length=128), FP32)
    parameters = sum(p.numel() for p in build(hidden_size=64).model.parameters())
    assert found.weights == found.gradients == 4 * parameters
    assert 8 * parameters <= found.optimizer <= 8.1 * parameters + 1000
    # A row keeps at least the inputs of 14 matrices of 64 to 192 numbers a position: 500 kB. A step has no more than 512.
    assert 512 * 100_000 < found.activations < 512 * 20_000_000


def test_a_disk_too_small_is_found(tmp_path: Path) -> None:
    config, kept = settings_of_training(tokens=1000 * 96), RUNTIME.model_copy(update={"keep_every_steps": 100})
    found = machine.disk(SMALL, config, RUNTIME, 100, 0.0, 1.8e9)
    assert ok(found)  # 2 kept, the best, one being written, one where the decay begins: 5 of 0.3 GB, and the model
    assert str(found.figure).startswith("1.6 GB of 1.8 GB free: 5 checkpoints")
    for runtime, unmade, free in ((RUNTIME, 0.0, 1.5e9), (RUNTIME, 0.3e9, 1.8e9), (kept, 0.0, 1.8e9)):
        assert not ok(machine.disk(SMALL, config, runtime, 100, unmade, free))
    assert machine.free_bytes(tmp_path / "not" / "there") == pytest.approx(machine.free_bytes(tmp_path), rel=0.1)


def test_a_number_format_that_is_emulated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.matmul_seconds(torch.float32, CPU) > 0

    def seconds(dtype: torch.dtype, device: torch.device) -> float:
        return {torch.float32: 1.0, torch.bfloat16: 0.6, torch.float16: 9.0}[dtype]

    monkeypatch.setattr(machine, "matmul_seconds", seconds)
    found = machine.chosen_precision("auto", Precision("bf16", CPU))
    assert ok(found) and "1.7 x" in str(found.figure)
    assert not ok(machine.chosen_precision("fp16", Precision("fp16", CPU)))
    assert ok(machine.chosen_precision("auto", FP32))


def test_native_kernels_that_are_missing_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def figure(word: str, *compiled: torch.dtype, suits: bool = True) -> str:
        monkeypatch.setattr(native, "suits_machine", lambda: suits)
        monkeypatch.setattr(native, "kernels", lambda: {dtype: {} for dtype in compiled})
        return str(machine.native_kernels(Precision(word, CPU)).figure)

    assert figure("bf16", torch.bfloat16, torch.float32) == "used, for bf16"
    assert "with gcc 10 or newer" in figure("bf16")
    assert "not for bf16 on this CPU" in figure("bf16", torch.float32) == figure("bf16", suits=False)


def test_more_threads_than_cores_are_found() -> None:
    assert ok(machine.threads(Runtime(), 2)) and ok(machine.threads(Runtime(devices=2), 2))
    assert not ok(machine.threads(Runtime(devices=2, threads=2), 2)) and not ok(machine.threads(Runtime(devices=4), 2))
    assert usable_cores() >= 1


def test_versions_that_are_missing_or_out_of_range_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        try:
            return {"torch": "2.13.0+cpu", "numpy": "2.1", "rich": "14.0"}[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)
    required = ["torch>=2.13", "numpy>=2", "rich", 'prefect-dask>=0.3; extra == "dask"']
    for names, pins, sound, figure in (
        (required, {"torch": "2.13.0", "numpy": "2.1", "dask": "1"}, True, "0 of 3 differ"),
        (required, {"torch": "2.12.0"}, True, "torch 2.13.0+cpu (tested: 2.12.0)"),
        (["torch>=2.14"], {}, False, "torch 2.13.0+cpu"),
        (["transformers"], {}, False, "transformers is missing"),
    ):
        found = machine.versions(names, pins)
        assert ok(found) == sound and figure in str(found.figure)
    (tmp_path / "constraints.txt").write_text("# tested\ntorch==2.13.0\n\nnumpy==2.1 # why\n")
    assert machine.pins_of(tmp_path / "constraints.txt") == {"torch": "2.13.0", "numpy": "2.1"}
    assert machine.pins_of(tmp_path / "none") == {}


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_finding_but_a_mistake_in_the_settings_rises() -> None:
    def fail(error: Exception) -> Check:
        raise error

    assert not ok(run_check("a", lambda: fail(TTrainError("no"))))
    found = run_check("a", lambda: fail(ValueError("why\nmore")))
    assert not ok(found) and found.figure == "ValueError: why"
    with pytest.raises(UsageError):
        run_check("a", lambda: fail(UsageError("no")))


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home that must stay as it is; what the command sets in this process is put back."""
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GLIBC_TUNABLES", os.environ.get("GLIBC_TUNABLES", ""))
    monkeypatch.setenv("GOMP_SPINCOUNT", os.environ.get("GOMP_SPINCOUNT", "10000"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)


TINY = (
    *("model.hidden_size=32", "model.layers=2", "tokenizer.vocab_size=300", "pretrain.row_length=64", "runtime.device=cpu"),
    *("pretrain.tokens_per_step=256", "pretrain.tokens=20000", "pretrain.precision=fp32", "runtime.threads=1"),
)


@pytest.mark.soak
def test_the_command_examines_a_training_from_end_to_end(surroundings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(surroundings / "docs.jsonl", [{"text": f"{n} is a number, and {n * 7} is another one"} for n in range(400)])
    done = in_process(capsys)("doctor", "--json", "data.pretrain=docs.jsonl", *TINY)
    checks = done.json["checks"]
    assert [check["name"] for check in checks] == [
        "versions", "precision", "native kernels", "threads", "data",
        "tokenizer round trip", "labels and mask", "memory", "disk",
        "no future leak", "records apart", "loss at the start", "accumulation", "two ranks equal one", "save and resume",
        "one batch is learnt",
    ]  # fmt: skip
    assert [check for check in checks if not check["ok"]] == []
    assert all({*check} == {"name", "ok", "figure", "cure"} and check["cure"] is None for check in checks)
    assert done.code == 0
    assert [path.name for path in surroundings.iterdir()] == ["docs.jsonl"]


def test_in_a_home_with_artifacts_it_ends_with_the_passes_and_the_time_of_the_plan(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = Estimate((StageEstimate("pretrain", 120.0, 20_000, 3.4),), "the quickstart's rate")
    monkeypatch.setattr(api, "plan", lambda pipeline, settings: SimpleNamespace(stages=(), estimate=estimate))
    monkeypatch.setattr(Doctor, "checks", lambda self: iter([Check("disk", True, "enough")]))
    write_lines(surroundings / "docs.jsonl", [{"text": "one"}])
    run = in_process(capsys)
    assert "takes about" not in run("doctor", "data.pretrain=docs.jsonl", *TINY).out
    (surroundings / "home" / "store").mkdir(parents=True)
    assert "by the quickstart's rate: pretrain 2 min (3.4 passes)" in run("doctor", "data.pretrain=docs.jsonl", *TINY).out
    done = run("doctor", "--json", "data.pretrain=docs.jsonl", *TINY)
    assert done.json["estimate"]["stages"][0]["passes"] == 3.4


def test_a_failure_exits_with_1_and_wrong_settings_with_2(surroundings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(surroundings / "docs.jsonl", [{"txt": "no"}] * 9)
    run = in_process(capsys)
    done = run("doctor", "data.pretrain=docs.jsonl", *TINY)
    assert done.code == 1 and "BAD data" in done.out and "; fix: " in done.out and "1 of 5 checks" in done.out
    assert run("doctor", "pretrain.precision=tf32", "runtime.device=cpu").code == 2
