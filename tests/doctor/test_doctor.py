"""`ttrain doctor`: each check passes on sound parts, and finds the fault that is planted in one of them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.data_commands import in_process
from support.shard_sets import write_lines
from support.tiny_data import VOCAB, NumberedRows
from support.tiny_trainers import CPU, Held, settings_of_training, tiny_model
from torch import nn

from ttrain.config import Optim, Runtime, Schedule, Training
from ttrain.data.packing import Batch
from ttrain.doctor import inputs, machine, model, run
from ttrain.doctor.parts import Finding, Learner
from ttrain.errors import TTrainError, UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.train.checkpoint import WEIGHTS
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
    """Language modelling whose batches and losses are changed."""

    def __init__(
        self,
        config: Training,
        module: nn.Module,
        runtime: Runtime,
        batch: Any = None,
        loss: Any = None,
    ) -> None:
        super().__init__(config, module)
        self._change_batch, self._change_loss = batch, loss

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        given = self._change_batch(batch) if self._change_batch else batch
        loss = super().train_step(model, given, device)
        return self._change_loss(loss) if self._change_loss else loss

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


MEAN_OF_MEANS = partial(Faulty, loss=lambda loss: LossSum(loss.total / max(1, loss.count), 1))
HALF = partial(
    Faulty, loss=lambda loss: LossSum(loss.total / 2, loss.count)
)  # as if its model were trained
# Without its discovery the check would pass whatever the mask does.
BLIND = partial(
    Faulty, batch=lambda batch: replace(batch, input_ids_BT=np.full_like(batch.input_ids_BT, 9))
)


def language(config: Training, module: nn.Module, runtime: Runtime) -> TrainingTask:
    return LanguageModeling(config, module)


SOUND = Learner(
    settings_of_training(optim=Optim(lr=1e-2)),
    RUNTIME,
    partial(build, dropout=0.1),
    language,
    ROWS,
    FP32,
)


class Masked(Faulty):
    mask: Any = staticmethod(segment_mask)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        causal: Any = model.causal
        mask, ids_BT = (
            self.mask(torch.from_numpy(batch.segments_BT)),
            torch.from_numpy(batch.input_ids_BT),
        )
        logits_BTV = causal(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits
        return LossSum(
            token_loss_sum(logits_BTV, torch.from_numpy(batch.labels_BT)), batch.live_tokens
        )


class SeesTheFuture(Masked):
    mask = staticmethod(
        lambda segments_BT: (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    )


class SeesOtherRecords(Masked):
    mask = staticmethod(lambda segments_BT: segment_mask(torch.zeros_like(segments_BT)))


class NoiseOfItsOwn(Faulty):
    def __init__(self, config: Training, module: nn.Module, runtime: Runtime) -> None:
        super().__init__(config, module, runtime)
        self.generator = torch.Generator().manual_seed(1)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        return LossSum(
            loss.total * (1 + 0.1 * torch.rand((), generator=self.generator)), loss.count
        )


def forget_the_optimizer(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers.optimizers:
        optimizer.state.clear()


def changed(change: Callable[[Trainer], None]) -> Callable[..., Trainer]:
    def make(*arguments: Any, **options: Any) -> Trainer:
        trainer = Trainer(*arguments, **options)
        change(trainer)
        return trainer

    return make


def ok(found: Finding | None) -> bool:
    assert found is not None
    return found.ok


@pytest.mark.parametrize(
    ("task", "future", "documents"),
    [
        (Masked, "", ""),
        (SeesTheFuture, "changes logits before it", ""),
        (SeesOtherRecords, "", "record 1 sees record 0"),
        (BLIND, "does not see", ""),
    ],
)
def test_a_model_that_sees_what_it_should_not_is_found(
    task: Any, future: str, documents: str
) -> None:
    learner = replace(SOUND, task=task)
    for check, fault in ((model.future, future), (model.documents, documents)):
        found = check(learner)
        assert ok(found) == (not fault) and fault in found.measured


def test_the_loss_at_the_start_is_near_the_logarithm_of_the_vocabulary_and_that_of_a_trained_base_below_it() -> (
    None
):
    found = model.first_loss(SOUND)
    assert ok(found) and f"{np.log(VOCAB):.3f}" in found.measured
    assert not ok(model.first_loss(replace(SOUND, build=partial(build, init_std=1.0))))
    assert not ok(
        model.first_loss(replace(SOUND, build=partial(build, init_std=0.5), is_trained=True))
    )
    assert ok(model.first_loss(replace(SOUND, task=HALF, is_trained=True)))


def test_a_gradient_that_depends_on_how_rows_are_divided_is_found_also_where_the_data_masks_nothing() -> (
    None
):
    assert ok(model.accumulation(SOUND))
    assert not ok(
        model.accumulation(
            replace(SOUND, task=MEAN_OF_MEANS, rows=NumberedRows(12, live=[16] * 12))
        )
    )


def test_what_a_checkpoint_does_not_restore_is_found() -> None:
    assert ok(model.resume(SOUND))
    for fault, differs in (
        ({"trainer": changed(forget_the_optimizer)}, "weights"),
        ({"task": NoiseOfItsOwn}, "losses"),
    ):
        found = model.resume(replace(SOUND, **fault))  # type: ignore[arg-type]
        assert not ok(found) and differs in found.measured


def test_one_batch_is_learnt_with_a_fitting_learning_rate_only() -> None:
    def with_rate(lr: float) -> Learner:
        optim = Optim().model_copy(update={"lr": lr})  # settings end at 1
        config = settings_of_training(optim=optim, schedule=Schedule(warmup_steps=1000))
        return replace(SOUND, config=config, build=partial(build, layers=1))

    found = model.learns(with_rate(1e-2))
    assert ok(found) and found.measured.endswith("gradient: none")
    slow, fast = (model.learns(with_rate(lr)) for lr in (1e-7, 1.0))
    assert not ok(slow) and "raise training.optim.lr" in slow.fix
    assert not ok(fast) and "lower training.optim.lr" in fast.fix
    nothing = model.learns(with_rate(1e3))
    assert not ok(nothing) and "to inf in " in nothing.measured


class LeavesOutALayer(Faulty):
    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        causal: Any = model.causal
        hook = causal.model.layers[0].mlp.register_forward_hook(
            lambda module, given, out: out.detach()
        )
        try:
            return super().train_step(model, batch, device)
        finally:
            hook.remove()


def test_a_weight_without_a_gradient_is_found() -> None:
    found = model.learns(replace(SOUND, task=LeavesOutALayer))
    assert not ok(found) and "layers.0.mlp.gate_proj.weight" in found.measured


SMALL = {
    "weights": 100_000_000,
    "gradients": 100_000_000,
    "optimizer": 200_000_000,
    "activations": 600_000_000,
}


def test_memory_and_a_disk_that_do_not_suffice_are_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measure", lambda learner: SMALL)
    learner = replace(SOUND, steps=1000, home=tmp_path / "not" / "there")

    def found(check: Any, available: float, **runtime: Any) -> Finding:
        monkeypatch.setattr(machine, "available_bytes", lambda device: available)
        monkeypatch.setattr(
            machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=available)
        )
        finding: Finding = check(replace(learner, runtime=RUNTIME.model_copy(update=runtime)))
        return finding

    assert ok(found(machine.memory, 1.1e9)) and not ok(found(machine.memory, 1.9e9, devices=2))
    assert "rows_per_device=2" in found(machine.memory, 0.9e9).fix
    assert not ok(found(machine.memory, 2e9, memory_limit_gb=0.5))
    # 2 kept, the best, one being written, one where the decay begins: 5 of 0.3 GB, and the model.
    assert found(machine.disk, 1.8e9).measured.startswith("1.6 GB of 1.8 GB free: 5 checkpoints")
    assert ok(found(machine.disk, 1.8e9)) and not ok(found(machine.disk, 1.5e9))
    assert not ok(found(machine.disk, 1.8e9, keep_every_steps=100))


def test_the_memory_of_a_step_is_measured_and_drawn_to_all_its_rows() -> None:
    config = settings_of_training(row_length=128, tokens_per_step=128 * 512)
    wide = replace(
        SOUND,
        config=config,
        runtime=Runtime(rows_per_device=1024),
        build=partial(build, hidden_size=64),
    )
    found = machine.measure(replace(wide, rows=NumberedRows(3, row_length=128)))
    parameters = sum(p.numel() for p in build(hidden_size=64).model.parameters())
    assert found["weights"] == found["gradients"] == 4 * parameters
    assert 8 * parameters <= found["optimizer"] <= 8.1 * parameters + 1000
    # A row keeps at least the inputs of 14 matrices of 64 to 192 numbers a position: 500 kB. A step has no more than 512.
    assert 512 * 100_000 < found["activations"] < 512 * 20_000_000


def test_a_check_that_raises_is_a_finding_but_a_mistake_in_the_settings_rises() -> None:
    def fails(error: Exception) -> Finding | None:
        def fail(learner: Learner) -> Finding:
            raise error

        return dict(run.run_checks({"a": (fail, "")}, SOUND))["a"]

    assert not ok(fails(TTrainError("no")))
    found = fails(ValueError("why\nmore"))
    assert not ok(found) and found is not None and found.measured == "ValueError: why"
    with pytest.raises(UsageError):
        fails(UsageError("no"))


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.use_deterministic_algorithms(False)


TINY = (
    *(
        "model.hidden_size=32",
        "model.layers=2",
        "tokenizer.vocab_size=300",
        "pretrain.row_length=64",
        "runtime.device=cpu",
    ),
    *(
        "pretrain.tokens_per_step=256",
        "pretrain.tokens=20000",
        "pretrain.precision=fp32",
        "runtime.threads=1",
    ),
)


@pytest.mark.soak
def test_the_command_examines_a_training_from_end_to_end(
    surroundings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(
        surroundings / "docs.jsonl",
        [{"text": f"{n} is a number, and {n * 7} is another one"} for n in range(400)],
    )
    done = in_process(capsys)("doctor", "--json", "data.pretrain=docs.jsonl", *TINY)
    checks = done.json["checks"]
    assert [check["name"] for check in checks] == [
        "data",
        "tokenizer round trip",
        "labels and mask",
        "no future leak",
        "records apart",
        "loss at the start",
        "memory",
        "disk",
        "accumulation",
        "save and resume",
        "one batch is learnt",
    ]
    assert [check for check in checks if not check["ok"]] == []
    assert all(
        {*check} == {"name", "ok", "measured", "fix"} and check["fix"] is None for check in checks
    )
    assert done.code == 0
    store = ArtifactStore(surroundings / "home")
    assert [artifact.stage for artifact in store.artifacts()] == ["shards-pretrain", "tokenizer"], (
        "as a run finds them"
    )


def test_the_command_prints_a_line_for_each_check_and_what_the_plan_estimates(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = in_process(capsys)
    assert command("doctor", "pretrain.precision=tf32", "runtime.device=cpu").code == 2
    findings = {"labels": Finding(True, "all"), "disk": Finding(False, "too small", "buy one")}
    monkeypatch.setattr(run, "examine", lambda stage, plan: iter(findings.items()))
    monkeypatch.setattr(inputs, "missing_data", lambda stage, plan: [])
    write_lines(surroundings / "docs.jsonl", [{"text": "one"}])
    done = command("doctor", "data.pretrain=docs.jsonl", *TINY)
    assert done.code == 1 and all(part in done.out for part in ("BAD disk", "too small", "buy one"))
    assert all(part in done.out for part in ("1 of 2", "takes about", "passes)"))
    done = command("doctor", "--json", "data.pretrain=docs.jsonl", *TINY)
    assert done.json["checks"][1] == {
        "name": "disk",
        "ok": False,
        "measured": "too small",
        "fix": "buy one",
    }
    assert any(stage["passes"] for stage in done.json["estimate"]["stages"])
