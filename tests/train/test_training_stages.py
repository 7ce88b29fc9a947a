"""Stages that train: a small suite meanwhile, which leaves no trace, and extended budgets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, curve, logged_steps, same
from support.tiny_data import NumberedRows, chats, documents
from support.tiny_stages import Home, stage_settings
from support.tiny_trainers import ALONE, Recorder, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of

from ttrain.config.evaluate import ChatsTask, Suite, TextTask
from ttrain.config.loading import load
from ttrain.core.files import ProgressWriter
from ttrain.core.hashing import sha256_file
from ttrain.data.encoder import Encoder
from ttrain.engine import planner as plan
from ttrain.engine.graph import Rerun
from ttrain.engine.resume import begun_at
from ttrain.errors import UsageError
from ttrain.evaluate import run
from ttrain.evaluate.items import Items
from ttrain.evaluate.results import Results
from ttrain.evaluate.suites import LoadedSuite
from ttrain.flows.full import full
from ttrain.inference.loading import LoadedModel, with_tokenizer
from ttrain.model import factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import PRETRAIN
from ttrain.tasks.common import callbacks
from ttrain.tasks.common.job import StageContext
from ttrain.train.callbacks import LogRecord
from ttrain.train.distributed import Ranks
from ttrain.train.periodic_evaluation import PeriodicEvaluation
from ttrain.train.trainer import QUICK
from ttrain.train.training_options import Cadence

TASKS = "tasks:\n  sums: {kind: choices, file: sums.jsonl}\n"
SUITE = f"{TASKS}  documents: {{kind: text, row_length: 32, stride: 16}}\n"
LIMITED = "tasks:\n  a: {kind: text, limit: 2, max_bytes: 50}\n  b: {kind: chats, limit: 9}\n"
SUM = '{"question": "1 + %d =", "choices": ["%d", "nothing at all"], "answer": 0}\n'
MODELS: Mapping[str, Mapping[str, Any]] = {
    "moyun": {"kind": "moyun"},  # no cache, a table of positions that it keeps
    "tinyseek": {"kind": "tinyseek", "moe": {"experts": 6, "shared_experts": 1, "expert_size": 8}},
    "dynamic": {"rope_type": "dynamic", "rope_factor": 2.0},  # angles grow with what it reads
}


def ask(items: Sequence[Items[Any]], subject: LoadedModel) -> dict[str, float]:
    answers = run.ask(items, subject, lambda *done: None)
    return callbacks.figures_of(Results(answers, callbacks.RULE))


def job_of(shards: Path, runtime: Any) -> StageContext:
    progress = ProgressWriter(None)
    return StageContext({"shards": shards}, {}, {}, shards, runtime, progress, lambda: False)


def test_pretraining_logs_the_figures_of_its_own_model(stage_home: Home, tmp_path: Path) -> None:
    """With samples and quick validations, too."""
    suite, output = tmp_path / "mine.yaml", tmp_path / "output"
    suite.write_text(SUITE)
    (tmp_path / "sums.jsonl").write_text("".join(SUM % (number, number + 1) for number in range(9)))
    options = {"eval_every_steps": 4, "eval_suite": str(suite), "eval_limit": 4, "guards": "off"}
    settings = stage_settings(6, sample_every_steps=3, quick_validations=4, **options)
    result = stage_home.pretrain(settings, output)
    job = job_of(stage_home.documents.path, settings.runtime)
    items = callbacks.read_items(settings.pretrain, job)
    own = ask(items, with_tokenizer("model", factory.load(output / "model"), output / "model"))
    assert {"sums/accuracy", "documents/bits_per_byte"} <= {*own}
    lines = curve(output / "run" / "metrics.jsonl")
    assert logged_steps(lines, "eval/sums/accuracy") == [4, 6]
    logged = {name: value for line in lines[-3:] for name, value in line["metrics"].items()}
    assert {name: logged[f"eval/{name}"] for name in own} == pytest.approx(own, rel=1e-5)
    written = json.loads((output / "run" / "evaluations" / "step-00000006.json").read_text())
    assert {task["task"]: task["items"] for task in written["tasks"]} == {"sums": 4, "documents": 4}
    quick = {line["step"]: line["metrics"][QUICK] for line in lines if QUICK in line["metrics"]}
    assert [*quick] == [0, 2, 3, 5, 6] and quick[5] < quick[2]
    assert logged_steps(lines, "validation_loss") == [6], "which alone decides"
    assert quick[6] == result["validation_loss"]
    texts = sorted((output / "run" / "samples").iterdir())
    assert [path.name for path in texts] == ["step-00000003.txt", "step-00000006.txt"]


def train(
    encoder: Encoder, is_evaluated: bool, ranks: Ranks = ALONE, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], list[LogRecord]]:
    """Losses, weights, and the records of the evaluations."""
    turns = [{"messages": [vars(turn) for turn in messages]} for messages in chats(3)]
    parts = {"documents": [{"text": text} for text in documents(3)], "chats": turns}
    text = TextTask(row_length=32, stride=16, max_bytes=300)
    suite = Suite(tasks={"text": text, "talk": ChatsTask(new_tokens=8, row_length=32, stride=16)})
    items = run.read([LoadedSuite("tiny", suite, None, Path())], parts)
    model = tiny_model(dropout=0.2, vocab=len(encoder), **options)

    def measure(step: int) -> Mapping[str, float]:
        with callbacks.generation_mode(model, encoder) as subject:
            return ask(items, subject)

    recorder, evaluations = Recorder(), Recorder()
    evaluation = PeriodicEvaluation(model, measure, [evaluations], every=2)
    settings: dict[str, Any] = {"rows_per_device": 3, "ranks": ranks, "cadence": Cadence(log=1)}
    settings["callbacks"] = [recorder, evaluation] if is_evaluated else [recorder]
    trainer = make_trainer(settings_of(tokens=3 * 96), model, NumberedRows(52), **settings)
    trainer.fit()
    return recorder.figures("loss"), copies(trainer.weights.state()), evaluations.records


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_moves_no_shape_of_a_model(encoder: Encoder, name: str) -> None:
    losses, weights, _ = train(encoder, False, **MODELS[name])
    evaluated, after, records = train(encoder, True, **MODELS[name])
    assert losses == evaluated and len(losses) == 3
    assert same(weights, after)
    assert [record.step for record in records] == [2, 3]
    assert len({record.metrics["eval/text/bits_per_byte"] for record in records}) == 2


def test_two_ranks_wait_for_the_first(encoder: Encoder, tmp_path: Path) -> None:
    results = in_ranks(
        2, tmp_path, lambda ranks: [train(encoder, is_on, ranks) for is_on in (False, True)]
    )
    for (losses, weights, _), (evaluated, after, _) in results:
        assert losses == evaluated and same(weights, after)
    assert [len(records) for _, (_, _, records) in results] == [2, 0], "rank 0 alone evaluates"


def test_an_unknown_suite_is_refused_by_the_plan(tmp_path: Path) -> None:
    overrides = ["runtime.eval_suite=englsh", "runtime.eval_every_steps=5"]
    settings = load(overrides, environment={}).settings
    with pytest.raises(UsageError, match="english"):
        plan.plan(full(settings), settings, ArtifactStore(tmp_path))


def test_a_stage_is_evaluated_on_what_it_holds_out_itself(stage_home: Home, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(LIMITED)
    settings = stage_settings(eval_every_steps=1, eval_limit=4, eval_suite=str(path))
    jobs = [job_of(a.path, settings.runtime) for a in (stage_home.documents, stage_home.chats)]
    (text,) = callbacks.read_items(settings.pretrain, jobs[0])
    assert text.task == "a" and len(text.items) <= 2
    assert text.spec.max_bytes == 50  # type: ignore[union-attr]
    (chat,) = callbacks.read_items(settings.sft, jobs[1])
    assert (chat.task, len(chat.items)) == ("b", 4)
    with pytest.raises(UsageError, match="domain"):
        callbacks.read_items(settings.lora, jobs[1])


def test_a_stage_is_without_effect_where_its_curve_ends_as_it_began(tmp_path: Path) -> None:
    path, last = tmp_path / "metrics.jsonl", {"validation_loss": 9.0, QUICK: 9.0}
    for losses, expected in (
        ([5.0, 2.1, 2.0, 2.02, 2.05], False),  # learns at once
        ([5.0, 5.02, 4.99, 5.01, 4.995], True),  # to and fro
        ([5.0, 5.0], False),  # too few to tell
    ):
        metrics: list[Any] = [*({QUICK: loss} for loss in losses), last]
        lines = [json.dumps({"step": n, "metrics": row}) + "\n" for n, row in enumerate(metrics)]
        path.write_text("".join(lines))
        assert callbacks.is_without_effect(path) == expected


WEIGHTS = Path("model") / "model.safetensors"
WARM = {"schedule": {"warmup_steps": 2}}
UNPACKED = {**WARM, "packing": "none"}
EPOCHS = {"tokens": None, "schedule": {"kind": "constant"}}
# name: settings of both, of the short one, of the long one, the step where the extension begins
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "before the decay": (WARM, {"tokens": 8 * 256}, {"tokens": 10 * 256}, 4),
    # The run ends within a step, which a longer run fills up: it begins one checkpoint before.
    "a last step cut short": (EPOCHS, {"epochs": 0.2}, {"epochs": 0.3}, 0),
    "rows that are not packed": (UNPACKED, {"tokens": 1000}, {"tokens": 2000}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_an_extended_stage_has_the_same_bytes(stage_home: Home, tmp_path: Path, name: str) -> None:
    common, short, long, begins = CASES[name]
    store, inputs = stage_home.store, stage_home.pretrain_inputs()
    first, second = (
        stage_settings(pretrain=common | budget, keep_checkpoints=9) for budget in (short, long)
    )
    planned = plan.plan_stage(PRETRAIN, first, store, inputs)
    assert planned.key is not None
    result = stage_home.pretrain(first, tmp_path / "short")
    if not begins:
        assert result["steps"] * 256 > result["tokens"], "the last step is a part of one"
        begins = 4 * ((result["steps"] - 1) // 4)
    manifest = {"result": result, "ingredients": planned.ingredients, "inputs": {}}
    store.publish("pretrain", planned.key, tmp_path / "short", manifest)
    extension = plan.plan_stage(PRETRAIN, second, store, inputs, Rerun(extend=True))
    assert extension.start_from is not None
    assert extension.start_from.name == f"step-{begins:08d}"
    start = extension.start_from.parents[1]
    output = begun_at(store, extension, start, extension.first_step) / "output"
    extended = stage_home.pretrain(second, output)
    straight = stage_home.pretrain(second, tmp_path / "straight")
    assert extended["resumed_from_step"] == begins
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(output / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
