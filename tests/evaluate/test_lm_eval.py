"""lm-evaluation-harness judges our models item by item as through its own Hugging Face backend."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import quiet
from support.tiny_data import LINES
from support.tiny_models import speaker, write_model

from ttrain.config.evaluate import ChoicesTask, HarnessTask
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import choices, lm_eval_tasks, run
from ttrain.evaluate.items import Items, SuiteFiles
from ttrain.inference.loading import LoadedModel

lm_eval = pytest.importorskip("lm_eval")
ITEMS = 12
SHOTS = 2
ROWS = [
    {
        "question": f"{number}. {LINES[number % 6]}",
        "choices": [LINES[(number + k) % 6][: 5 + k] for k in range(2 + number % 3)],
        "answer": number % 2,
        "text": f"{number} {LINES[number % 6] * 4}",
    }
    for number in range(ITEMS)
]
METRICS = {  # of each task; Matthews' correlation, mcc, is no mean over items
    "choices": ["acc", "acc_norm", "acc_bytes", "mcc"],
    "words": ["perplexity", "acc"],
    "texts": ["word_perplexity", "bits_per_byte"],
    "answers": ["exact_match"],
}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": SHOTS,
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
    },
    "words": {"output_type": "loglikelihood", "doc_to_target": " {{choices[0]}}"},
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [" ", "e"], "max_gen_toks": 12, "do_sample": False},
    },
}


def task_file(name: str, rows: Path) -> str:
    content = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metric_list": [{"metric": metric} for metric in METRICS.get(name, ["acc"])],
    }
    return json.dumps({**content, **TASKS.get(name, TASKS["words"])})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("harness")
    write_model(directory / "model")
    (directory / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in TASKS:
        (directory / f"{name}.yaml").write_text(task_file(name, directory / "items.jsonl"))
    (directory / "broken.yaml").write_text(task_file("broken", directory / "absent.jsonl"))
    return directory


@pytest.fixture(scope="module")
def subject(directory: Path) -> LoadedModel:
    return speaker(directory / "model")


@pytest.fixture(scope="module", autouse=True)
def cache(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The harness knows these tasks alone: its own 14,000 files take 8 s to read."""
    import datasets

    index = lm_eval_tasks.TaskManager(include_path=directory, include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(lm_eval_tasks, "task_index", lambda: index)
        yield


def read(directory: Path, name: str) -> Items[lm_eval_tasks.HarnessItem]:
    return lm_eval_tasks.read("theirs", HarnessTask(task=name), SuiteFiles(directory))


@pytest.fixture(scope="module")
def theirs(directory: Path, cache: None) -> dict[str, Any]:
    """The results of the harness's own backend: {"results": ..., "samples": ...} by task."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    with pytest.MonkeyPatch.context() as patch:
        # Its processes ask pip and git: 1.5 s.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        results: dict[str, Any] = lm_eval.simple_evaluate(
            HFLM(model, tokenizer=tokenizer, batch_size=4, device="cpu"),
            tasks=[json.loads((directory / f"{name}.yaml").read_text()) for name in TASKS],
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
    for samples in results["samples"].values():
        samples.sort(key=lambda sample: sample["doc_id"])
    return results


@pytest.mark.parametrize("name", TASKS)
def test_every_item_is_judged_as_by_its_own_backend(
    directory: Path, subject: LoadedModel, name: str, theirs: dict[str, Any]
) -> None:
    result = lm_eval_tasks.run(read(directory, name), subject, quiet)
    assert len(set(result.items.digests)) == ITEMS
    metrics = {metric.name: metric for metric in result.figures}
    for metric in (metrics[name] for name in METRICS[name] if name != "mcc"):
        value = theirs["results"][name][f"{metric.name},none"]
        assert metric.value == pytest.approx(value, rel=1e-4)
        if metric.shown is None and metric.factor == 1:
            samples = theirs["samples"][name]
            assert metric.sums == tuple(sample[metric.name] for sample in samples)


def test_our_multiple_choice(directory: Path, subject: LoadedModel, theirs: dict[str, Any]) -> None:
    spec = ChoicesTask(file="items.jsonl", delimiter=" ", shots=SHOTS)
    items = choices.read("ours", spec, SuiteFiles(directory))
    metrics = {each.name: each for each in choices.score_choices(items, subject, quiet).figures}
    samples = theirs["samples"]["choices"]
    names = {"accuracy": "acc", "accuracy_characters": "acc_norm", "accuracy_bytes": "acc_bytes"}
    for name, theirs_name in names.items():
        assert metrics[name].sums == tuple(sample[theirs_name] for sample in samples)
    harness = lm_eval_tasks.run(read(directory, "choices"), subject, quiet).figures[-1]
    bits = metrics["bits_per_byte"]
    assert (harness.sums, harness.sizes) == (bits.sums, bits.sizes)


def test_data_and_names_that_the_harness_does_not_have_are_refused(directory: Path) -> None:
    with pytest.raises(DataError, match=r"tasks.theirs.task"):
        read(directory, "broken")
    evil = directory / "evil.txt"
    evil.write_text("task: mine\nprocess_docs: !function evil.run\n")
    for name in ("wordz", str(evil), str(directory)):
        with pytest.raises(UsageError, match=rf"theirs\.task is {name}, "):
            read(directory, name)


def test_the_harness_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "ttrain.evaluate.lm_eval_tasks")
    monkeypatch.delattr("ttrain.evaluate.lm_eval_tasks")
    with pytest.raises(UsageError, match=r"ttrain\[harness\]"):
        run.functions_of(HarnessTask(task="arc_easy"))
