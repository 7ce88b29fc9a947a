"""`ttrain doctor`: each check passes on sound parts, and finds the fault that is planted."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.chat_templates import CHATML, take
from support.data_commands import Run, in_process
from support.shard_sets import write_lines
from support.tiny_data import LINES, VOCAB, NumberedRows, make_shards, make_tokenizer, write_shards
from support.tiny_trainers import CPU, Held, settings_of_training, tiny_model
from torch import nn

from ttrain.config import Optim, Runtime, Schedule, Training
from ttrain.config.loading import load
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.doctor import data as labels
from ttrain.doctor import inputs, machine, model, run, timing
from ttrain.doctor.data import Data
from ttrain.doctor.parts import Finding, Learner
from ttrain.errors import TTrainError, UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks.common.rows import open_rows
from ttrain.train import timing as steps
from ttrain.train.checkpoint import WEIGHTS
from ttrain.train.language_modeling import LanguageModeling, segment_mask
from ttrain.train.losses import token_loss_sum
from ttrain.train.precision import Precision
from ttrain.train.task import LossSum, TrainingTask
from ttrain.train.trainer import Trainer

FP32 = Precision("fp32", CPU)
ROWS = NumberedRows(12)
RUNTIME = Runtime(device="cpu", rows_per_device=4)
MB = 10**6
FOOTPRINT = {"weights": 100 * MB, "gradients": 100 * MB, "optimizer": 200 * MB}
FOOTPRINT["activations"] = 600 * MB
MODEL = ("model.hidden_size=32", "model.layers=2", "tokenizer.vocab_size=300")
STEPS = ("row_length=64", "tokens_per_step=256", "tokens=20000", "precision=fp32")
PRETRAIN = ("data.pretrain=docs.jsonl", *(f"pretrain.{value}" for value in STEPS))
TINY = (*PRETRAIN, *MODEL, "runtime.device=cpu", "runtime.threads=1")


@dataclass
class Subject(Held):
    files: dict[str, bytes] = field(default_factory=dict)
    weights_file: str = WEIGHTS


def build(**settings: Any) -> Subject:
    return Subject(tiny_model(**settings))


class Faulty(LanguageModeling):
    """Language modelling whose loss is changed; its validation is a step of training."""

    def __init__(
        self, config: Training, module: nn.Module, runtime: Runtime, change: Any = None
    ) -> None:
        super().__init__(config, module)
        self.change = change or (lambda loss: loss)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        loss: LossSum = self.change(super().train_step(model, batch, device))
        return loss

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


MEAN_OF_MEANS = partial(Faulty, change=lambda loss: LossSum(loss.total / max(1, loss.count), 1))
TRAINED = partial(Faulty, change=lambda loss: LossSum(loss.total / 2, loss.count))


class Masked(Faulty):
    mask: Any = staticmethod(segment_mask)

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        causal: Any = model.causal
        mask = self.mask(torch.from_numpy(batch.segments_BT))
        ids_BT = torch.from_numpy(batch.input_ids_BT)
        logits_BTV = causal(input_ids=ids_BT, attention_mask=mask, use_cache=False).logits
        labels_BT = torch.from_numpy(batch.labels_BT)
        return LossSum(token_loss_sum(logits_BTV, labels_BT), batch.live_tokens)


class SeesTheFuture(Masked):
    mask = staticmethod(lambda s_BT: (s_BT[:, :, None] == s_BT[:, None, :])[:, None])


class SeesOtherRecords(Masked):
    mask = staticmethod(lambda segments_BT: segment_mask(torch.zeros_like(segments_BT)))


def forgetful_trainer(*arguments: Any, **options: Any) -> Trainer:
    """A trainer whose optimizer starts without the state that it loaded."""
    trainer = Trainer(*arguments, **options)
    for optimizer in trainer.optimizers.optimizers:
        optimizer.state.clear()
    return trainer


def language(config: Training, module: nn.Module, runtime: Runtime) -> TrainingTask:
    return LanguageModeling(config, module)


SOUND = Learner(settings_of_training(), RUNTIME, partial(build, dropout=0.1), language, ROWS, FP32)


def check(finding: Finding | None, *parts: str, ok: bool = True) -> None:
    """Check that the finding is as expected and names these parts."""
    assert finding is not None
    assert finding.ok == ok, finding
    text = f"{finding.measured} {finding.fix}"
    assert [part for part in parts if part not in text] == []


fails = partial(check, ok=False)


def test_a_model_that_sees_what_it_should_not_fails() -> None:
    check(model.future(replace(SOUND, task=Masked)))
    check(model.documents(replace(SOUND, task=Masked)))
    fails(model.future(replace(SOUND, task=SeesTheFuture)), "changes logits before it")
    check(model.documents(replace(SOUND, task=SeesTheFuture)))
    check(model.future(replace(SOUND, task=SeesOtherRecords)))
    fails(model.documents(replace(SOUND, task=SeesOtherRecords)), "record 1 sees record 0")


def test_a_first_loss_is_near_the_logarithm_of_the_vocabulary_or_of_a_trained_base_below() -> None:
    check(model.first_loss(SOUND), f"{np.log(VOCAB):.3f}")
    fails(model.first_loss(replace(SOUND, build=partial(build, init_std=1.0))))
    uneven = partial(build, init_std=0.5)
    fails(model.first_loss(replace(SOUND, build=uneven, is_trained=True)))
    check(model.first_loss(replace(SOUND, task=TRAINED, is_trained=True)))


def test_a_gradient_that_depends_on_how_rows_are_divided_fails_also_without_masks() -> None:
    check(model.accumulation(SOUND))
    unmasked = NumberedRows(12, live=[16] * 12)
    fails(model.accumulation(replace(SOUND, task=MEAN_OF_MEANS, rows=unmasked)))


def test_state_that_a_checkpoint_does_not_restore_fails() -> None:
    check(model.resume(SOUND))
    fails(model.resume(replace(SOUND, trainer=forgetful_trainer)), "weights")


def test_one_batch_is_learnt_with_a_fitting_learning_rate_only() -> None:
    def with_rate(lr: float) -> Learner:
        optim = Optim().model_copy(update={"lr": lr})  # settings end at 1
        config = settings_of_training(optim=optim, schedule=Schedule(warmup_steps=1000))
        return replace(SOUND, config=config, build=partial(build, layers=1))

    check(model.learns(with_rate(1e-2)), "gradient: none")
    for lr, fix in ((1e-7, "raise training"), (1.0, "lower training"), (1e3, "to inf")):
        fails(model.learns(with_rate(lr)), fix)


def test_too_little_memory_or_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda learner: FOOTPRINT)
    learner = replace(SOUND, steps=1000, home=tmp_path / "not" / "there")

    def finding_of(check: Any, available: float, **runtime: Any) -> Any:
        usage = SimpleNamespace(free=available)
        monkeypatch.setattr(machine, "available_bytes", lambda device: available)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
        return check(replace(learner, runtime=RUNTIME.model_copy(update=runtime)))

    check(finding_of(machine.memory, 1.1e9))
    fails(finding_of(machine.memory, 1.9e9, devices=2))
    fails(finding_of(machine.memory, 0.9e9), "rows_per_device=2")
    # 2 kept, the best, one being written, one where the decay begins: 5 of 0.3 GB, and the model.
    check(finding_of(machine.disk, 1.8e9), "1.6 GB of 1.8 GB free: 5 checkpoints")
    fails(finding_of(machine.disk, 1.5e9))


def test_a_check_that_raises_is_a_finding_but_a_mistake_in_the_settings_rises() -> None:
    def finding_of(error: Exception) -> Finding:
        checks = {"a": (Mock(side_effect=error), "")}
        return dict(run.run_checks(checks, SOUND))["a"]

    fails(finding_of(TTrainError("why")), "why")
    with pytest.raises(UsageError):
        finding_of(UsageError("no"))


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run a command in a directory with docs.jsonl."""
    monkeypatch.setenv("TTRAIN_HOME", str(tmp_path / "home"))
    for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"{n} is a number, and {n * 7} is another one"} for n in range(400)]
    write_lines(tmp_path / "docs.jsonl", texts)
    yield in_process(capsys)
    torch.use_deterministic_algorithms(False)


@pytest.mark.soak
def test_the_command_examines_a_training_from_end_to_end(command: Run, tmp_path: Path) -> None:
    result = command("doctor", "--json", *TINY)
    checks = result.json["checks"]
    assert result.code == 0 and len(checks) == 11
    assert {(check["ok"], check["fix"]) for check in checks} == {(True, None)}
    stages = [artifact.stage for artifact in ArtifactStore(tmp_path / "home").artifacts()]
    assert stages == ["shards-pretrain", "tokenizer"], "as a run finds them"


def test_the_command_prints_each_check(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {"labels": Finding(True, "all"), "disk": Finding(False, "too small", "buy one")}
    monkeypatch.setattr(run, "examine", lambda stage, plan: iter(findings.items()))
    monkeypatch.setattr(inputs, "missing_data", lambda stage, plan: [])
    result = command("doctor", *TINY)
    assert result.code == 1
    shown = ("BAD disk", "too small", "buy one", "1 of 2", "takes about")
    assert [text for text in shown if text not in result.out] == []
    tree = command("doctor", "--json", *TINY).json
    disk = {"name": "disk", "ok": False, "measured": "too small", "fix": "buy one"}
    assert tree["checks"][1] == disk
    assert any(stage["passes"] for stage in tree["estimate"]["stages"])


@pytest.mark.parametrize("stage", ["pretrain", "lora"])
def test_steps_are_timed(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SECONDS", 0.01)
    small = ["model.hidden_size=32", "model.layers=1", "model.heads=2"]
    settings = load([*small, "runtime.threads=1"]).settings
    config = getattr(settings, stage).resolved(100)
    measured = timing.measure_stage(stage, config, settings, {}, tmp_path)
    assert measured is not None and 0 < measured.row < measured.step


Spoil = Callable[[Any, Any, Any], None]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Data:
    directory = tmp_path_factory.mktemp("documents")
    encoder = make_tokenizer(directory / "tokenizer")
    make_shards(directory, encoder, "documents", 30)
    config = settings_of_training(row_length=96, packing="stream")
    rows = open_rows(directory / "heldout", encoder, config, heldout=True)
    return Data("documents", encoder, rows, rows, [])


@pytest.fixture(scope="module")
def talks(documents: Data, tmp_path_factory: pytest.TempPathFactory) -> Data:
    directory = tmp_path_factory.mktemp("chats")
    encoder = documents.encoder
    talks = [
        (Message("user", f"Number {n}?"), Message("assistant", f"Here it comes: {n * 37}."))
        for n in range(12)
    ]
    encoded = [encode_chat(encoder, talk) for talk in talks]
    identity = {"vocab_size": len(encoder), "tokenizer": encoder.digest}
    write_shards(directory, encoded, kind="chats", **identity)  # type: ignore[arg-type]
    rows = open_rows(directory, encoder, settings_of_training(row_length=96), heldout=True)
    return Data("chats", encoder, rows, rows, records_of(talks))


def records_of(conversations: Sequence[Messages]) -> list[dict[str, Any]]:
    return [{"messages": [message.to_json() for message in messages]} for messages in conversations]


class Spoilt(Rows):
    """Rows whose labels are spoilt by `spoil(ids, labels, segments)`."""

    def __init__(self, rows: Rows, spoil: Spoil) -> None:
        self.rows, self.spoil = rows, spoil
        self.row_length, self.pad_id = rows.row_length, rows.pad_id

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        self.rows.fill(rows, batch, lines)
        for at in lines.tolist():
            self.spoil(batch.input_ids_BT[at], batch.labels_BT[at], batch.segments_BT[at])

    def counts(self) -> Counts:
        return self.rows.counts()


def unshifted(ids: Any, labels: Any, segments: Any) -> None:
    labels[:] = np.where(labels == IGNORE, IGNORE, ids)


def nothing_live(ids: Any, labels: Any, segments: Any) -> None:
    labels[:] = IGNORE


def all_live(ids: Any, labels: Any, segments: Any) -> None:
    labels[:-1] = ids[1:]  # also into the next record


def without(number: int) -> Spoil:
    return lambda ids, labels, segments: np.copyto(labels, IGNORE, where=labels == number)


def test_labels_of_documents_are_all_tokens_but_the_first(documents: Data) -> None:
    check(labels.labels(documents))
    ends = without(documents.encoder.eos_id)
    for spoil in (unshifted, nothing_live, ends, all_live):
        fails(labels.labels(replace(documents, rows=Spoilt(documents.rows, spoil))))
    masked = replace(documents, masked=True, rows=Spoilt(documents.rows, ends))
    check(labels.labels(masked))


def test_labels_of_chats_are_the_answers_with_their_ends(talks: Data) -> None:
    check(labels.labels(talks), "tokens in", "held out: ")
    for spoil in (unshifted, nothing_live, without(talks.encoder.end_id), all_live):
        fails(labels.labels(replace(talks, rows=Spoilt(talks.rows, spoil))))
    fails(labels.labels(replace(talks, records=talks.records[1:])), "no assistant says")


class Lossy(Encoder):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        basic = ["".join(letter for letter in text if ord(letter) < 0x10000) for text in texts]
        return super().encode(basic)


class Forgeable(Encoder):
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode_markup(texts[0])] if len(texts) == 1 else super().encode(texts)


def test_bad_tokenizers_fail(documents: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = documents.encoder.directory
    fails(labels.round_trip(replace(documents, encoder=Lossy(directory))), "U+10000")
    monkeypatch.setattr(labels, "END", 0x20000)
    data = replace(documents, records=[{"text": "Grüße 東京 🙂"}])
    check(labels.round_trip(data))
    fails(labels.round_trip(replace(data, encoder=Forgeable(directory))), "text that spells <|")


def test_an_answer_is_trained_on_where_the_prompt_for_it_ends(tmp_path: Path) -> None:
    answer = (Message("assistant", "Blue."), Message("user", "?"))
    talks = records_of([(Message("user", text), *answer) for text in LINES])
    rows = NumberedRows(1)
    check(labels.template(Data("chats", take(tmp_path / "sound", CHATML), rows, rows, talks)))
    # A prompt with a space behind it, which no conversation has.
    spaced = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n ' }}{% endif %}")
    fails(labels.template(Data("chats", take(tmp_path / "spaced", spaced), rows, rows, talks)))
