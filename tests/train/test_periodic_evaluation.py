"""A small suite while a model trains: at its steps, with the figures that the model itself gives, and without a trace."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import PERFORMANCE, copies, curve, logged_steps, same
from support.tiny_data import NumberedRows, chats, documents
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import (
    ALONE,
    CPU,
    PLAIN,
    Recorder,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.config import MultiToken, Runtime
from ttrain.config.evaluate import ChatsTask, Suite, TextTask
from ttrain.config.loading import load
from ttrain.core.files import ProgressWriter
from ttrain.data.encoder import Encoder
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.engine import planner as plan
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.evaluate import run
from ttrain.evaluate.items import Items
from ttrain.evaluate.results import Results
from ttrain.evaluate.suites import LoadedSuite
from ttrain.flows.full import full
from ttrain.inference.loading import LoadedModel, with_tokenizer
from ttrain.model import factory, multi_token
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks.common import callbacks
from ttrain.tasks.common.job import StageContext
from ttrain.tasks.common.training import TrainableModel
from ttrain.train.callbacks import Callback, LogRecord
from ttrain.train.distributed import Ranks
from ttrain.train.periodic_evaluation import TIMED, PeriodicEvaluation
from ttrain.train.precision import resolve_precision
from ttrain.train.trainer import QUICK, QUICK_ACCURACY
from ttrain.train.training_options import Cadence, Speed, TrainerOptions

SUITE = "tasks:\n  sums: {kind: choices, file: sums.jsonl}\n  documents: {kind: text, row_length: 32, stride: 16}\n"
SUM = '{"question": "1 + %d =", "choices": ["%d", "nothing at all"], "answer": 0}\n'
MODELS: Mapping[str, Mapping[str, Any]] = {
    "moyun": {"kind": "moyun"},  # no cache, a table of positions that it keeps
    "tinyseek": {
        "kind": "tinyseek",
        "moe": {"experts": 6, "top_k": 2, "shared_experts": 1, "expert_size": 8},
    },
    "dynamic": {"rope_type": "dynamic", "rope_factor": 2.0},  # angles that grow with what it reads
    "two heads": {"second_head": True},
}


def lines_of(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    hidden = {*PERFORMANCE, *TIMED, QUICK, QUICK_ACCURACY}
    evaluated, others = [], []
    for line in curve(directory / "run" / "metrics.jsonl"):
        metrics = {name: value for name, value in line["metrics"].items() if name not in hidden}
        if metrics:
            of_kind = evaluated if any(name.startswith("eval/") for name in metrics) else others
            of_kind.append({"step": line["step"], **metrics})
    return evaluated, others


def test_pretraining_with_a_suite_samples_and_quick_validations_has_the_same_files_and_the_models_own_figures(
    stage_home: Home, tmp_path: Path
) -> None:
    assert Runtime().quick_validations == 8
    (tmp_path / "mine.yaml").write_text(SUITE)
    (tmp_path / "sums.jsonl").write_text("".join(SUM % (number, number + 1) for number in range(9)))
    watched = {
        "eval_every_steps": 4,
        "eval_suite": str(tmp_path / "mine.yaml"),
        "eval_limit": 4,
        "sample_every_steps": 3,
        "quick_validations": 4,
        "guards": "off",
    }
    first, second = tmp_path / "without", tmp_path / "with"
    plain = stage_home.pretrain(stage_settings(6, quick_validations=0), first)
    result = stage_home.pretrain(settings := stage_settings(6, **watched), second)
    evaluated, others = lines_of(second)
    assert ([], others) == lines_of(first)
    for path in (first / "model").iterdir():
        assert path.read_bytes() == (second / "model" / path.name).read_bytes(), path.name
    assert [line["step"] for line in evaluated] == [4, 6]
    written = json.loads((second / "run" / "evaluations" / "step-00000006.json").read_text())
    assert {task["task"]: task["items"] for task in written["tasks"]} == {"sums": 4, "documents": 4}
    items = callbacks.read_items(
        settings.pretrain, job_of(stage_home.documents.path, settings.runtime)
    )
    own = asked(items, with_tokenizer("model", factory.load(second / "model"), second / "model"))
    logged = {
        name.removeprefix("eval/"): value for name, value in evaluated[-1].items() if name != "step"
    }
    assert logged == pytest.approx(own, rel=1e-5) and {
        "sums/accuracy",
        "documents/bits_per_byte",
    } <= {*logged}
    lines = curve(second / "run" / "metrics.jsonl")
    quick = {line["step"]: line["metrics"][QUICK] for line in lines if QUICK in line["metrics"]}
    assert [*quick] == [0, 2, 3, 5, 6] and logged_steps(lines, "validation_loss") == [6], (
        "which alone decides"
    )
    assert quick[5] < quick[2] and quick[6] == result["validation_loss"] == plain["validation_loss"]
    texts = sorted((second / "run" / "samples").iterdir())
    assert [path.name for path in texts] == ["step-00000003.txt", "step-00000006.txt"]
    assert texts[-1].read_text(encoding="utf-8").count("=== ") == 2, (
        "beginnings of held-out documents"
    )
    assert plain["guard_warnings"] == {} and not (first / "run" / "samples").exists()


def asked(items: Sequence[Items[Any]], subject: LoadedModel) -> dict[str, float]:
    return callbacks.figures_of(
        Results(run.ask(items, subject, lambda *told: None), callbacks.RULE)
    )


def job_of(shards: Path, runtime: Any) -> StageContext:
    return StageContext(
        {"shards": shards}, {}, {}, shards, runtime, ProgressWriter(None), lambda: False
    )


def measure_of(model: Any, encoder: Encoder) -> Callable[[int], Mapping[str, float]]:
    talks = [{"messages": [vars(turn) for turn in messages]} for messages in chats(3)]
    parts = {"documents": [{"text": text} for text in documents(3)], "chats": talks}
    tasks = {
        "text": TextTask(row_length=32, stride=16, max_bytes=300),
        "talk": ChatsTask(new_tokens=8, row_length=32, stride=16),
    }
    items = run.read([LoadedSuite("tiny", Suite(tasks=tasks), None, Path())], parts)

    def measure(step: int) -> Mapping[str, float]:
        with callbacks.generation_mode(model, encoder) as subject:
            return asked(items, subject)

    return measure


def train(
    encoder: Encoder,
    evaluated: bool,
    ranks: Ranks = ALONE,
    how: Speed = PLAIN,
    second_head: bool = False,
    **model: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[LogRecord]]:
    learner, recorder, told = (
        tiny_model(dropout=0.2, vocab=len(encoder), **model),
        Recorder(),
        Recorder(),
    )
    if second_head:
        multi_token.attach(learner, MultiToken(weight=0.3), seed=1)
    callbacks: list[Callback] = [recorder]
    if evaluated:
        callbacks.append(PeriodicEvaluation(learner, measure_of(learner, encoder), [told], every=2))
    trainer = make_trainer(
        settings_of_training(tokens=3 * 96),
        learner,
        NumberedRows(52),
        rows_per_device=3,
        ranks=ranks,
        how=how,
        callbacks=callbacks,
        cadence=Cadence(log=1),
    )
    trainer.fit()
    return recorder.figures("loss"), copies(trainer.weights.state()), told.records


@pytest.mark.parametrize("name", MODELS)
def test_no_shape_of_a_model_is_moved(encoder: Encoder, name: str) -> None:
    losses, weights, _ = train(encoder, False, **MODELS[name])
    evaluated, after, told = train(encoder, True, **MODELS[name])
    assert losses == evaluated and len(losses) == 3
    assert same(weights, after)
    assert [record.step for record in told] == [2, 3]
    assert told[0].metrics["eval/text/bits_per_byte"] != told[1].metrics["eval/text/bits_per_byte"]


def test_two_ranks_wait_for_the_first_and_neither_is_moved(
    encoder: Encoder, tmp_path: Path
) -> None:
    found = in_ranks(
        2, tmp_path, lambda ranks: [train(encoder, evaluated, ranks) for evaluated in (False, True)]
    )
    for (losses, weights, _), (evaluated, after, _) in found:
        assert losses == evaluated and same(weights, after)
    assert [(len(losses), len(told)) for _, (losses, _, told) in found] == [(3, 2), (0, 0)], (
        "the first alone tells"
    )


def test_what_cannot_be_asked_is_refused_before_the_first_stage_and_the_path_of_a_suite_is_recorded_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fix in (("englsh", "english"), (str(tmp_path / "no.yaml"), "no suite file")):
        settings = load(
            [f"runtime.eval_suite={name}", "runtime.eval_every_steps=5"], environment={}
        ).settings
        with pytest.raises(UsageError, match=fix):
            plan.plan(full(settings), settings, ArtifactStore(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(SUITE)
    settings = load(["runtime.eval_suite=mine.yaml"], environment={}).settings
    assert with_absolute_paths(settings).runtime.eval_suite == str(tmp_path / "mine.yaml")


def test_a_suite_is_asked_without_what_other_stages_hold_out(
    stage_home: Home, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "tasks:\n  a: {kind: text, limit: 2, max_bytes: 50}\n  b: {kind: chats, limit: 9}\n"
    )
    settings = stage_settings(
        eval_every_steps=1, eval_limit=4, eval_suite=str(tmp_path / "mine.yaml")
    )
    chats = job_of(stage_home.chats.path, settings.runtime)
    (text,) = callbacks.read_items(
        settings.pretrain, job_of(stage_home.documents.path, settings.runtime)
    )
    assert (text.task, len(text.items) <= 2, text.spec.max_bytes) == ("a", True, 50)  # type: ignore[union-attr]
    (talk,) = callbacks.read_items(settings.sft, chats)
    assert (talk.task, len(talk.items)) == ("b", 4)
    with pytest.raises(UsageError, match=r"held out domain"):
        callbacks.read_items(settings.lora, chats)


def test_shards_of_a_model_cannot_be_asked(encoder: Encoder, stage_home: Home) -> None:
    settings = stage_settings(eval_every_steps=1, parallel="fsdp")
    job = job_of(stage_home.documents.path, settings.runtime)
    order = ShuffledOrder(8, 2, 8, seed=1)
    loader = Loader(NumberedRows(8), order, rows_per_device=1, rank=0, world=2)
    model = tiny_model()
    options = TrainerOptions(
        TrainableModel(model, model.state_dict, {}),
        Ranks(0, 2, CPU),
        resolve_precision("fp32", CPU),
    )
    with pytest.raises(
        UsageError, match=r"runtime\.parallel=fsdp no rank holds a whole one; set both to 0"
    ):
        callbacks.language_model_callbacks(settings.pretrain, job, loader, options, model, encoder)


def test_a_rate_that_does_not_move_the_validation_loss_is_told(
    stage_home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = stage_settings(4, {"optim": {"kind": "adamw", "lr": 1e-9}})
    assert stage_home.pretrain(settings, tmp_path)["guard_warnings"] == {"no_effect": 1}
    assert "pretrain.optim.lr is 1e-09" in caplog.text


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0, 2.1, 2.0, 2.02, 2.05], False),
        ([5.0, 5.02, 4.99, 5.01, 4.995], True),
        ([5.0, 5.0], False),
    ],
    ids=["learnt at once", "to and fro", "too few to tell"],
)
def test_a_stage_is_without_effect_where_its_curve_ends_as_it_began(
    tmp_path: Path, losses: list[float], expected: bool
) -> None:
    rows = (
        {"step": step, "metrics": {"validation_loss_quick": loss}}
        for step, loss in enumerate(losses)
    )
    of_all_rows = {
        "step": len(losses),
        "metrics": {"validation_loss": 9.0, "validation_loss_quick": 9.0},
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (*rows, of_all_rows))
    )
    assert callbacks.is_without_effect(tmp_path / "metrics.jsonl") == expected
