"""lm-evaluation-harness judges our models as it judges them through its own Hugging Face backend, item by item."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_data import LINES
from support.tiny_models import speaker, write_model

from ttrain.config.evaluate import ChoicesTask, HarnessTask
from ttrain.errors import DataError, UsageError
from ttrain.evaluate import choices, lm_eval_tasks, run
from ttrain.evaluate.items import Items, SuiteFiles
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel

lm_eval = pytest.importorskip("lm_eval")
ITEMS, SHOTS = 12, 2
ROWS = [
    {
        "question": f"{number}. {LINES[number % 6]}",
        "choices": [LINES[(number + k) % 6][: 5 + k] for k in range(2 + number % 3)],
        "answer": number % 2,
        "text": f"{number} {LINES[number % 6] * 4}",
    }
    for number in range(ITEMS)
]
COMMON = {"dataset_path": "json", "test_split": "test"}
COMMON["doc_to_text"] = "{{question}}"
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": SHOTS,
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes", "mcc")],
    },
    "words": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [" ", "e"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("harness")
    write_model(directory / "model")
    (directory / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"data_files": {"test": str(directory / "items.jsonl")}}
    absent = {
        **TASKS["words"],
        "dataset_kwargs": {"data_files": {"test": str(directory / "absent.jsonl")}},
    }
    for name, task in {**TASKS, "broken": absent}.items():
        content = {"task": name, **COMMON, "dataset_kwargs": data, **task}
        (directory / f"{name}.yaml").write_text(json.dumps(content))
    (directory / "both.yaml").write_text("group: both\ntask:\n- words\n- answers\n")
    return directory


@pytest.fixture(scope="module")
def subject(place: Path) -> LoadedModel:
    return speaker(place / "model")


@pytest.fixture(scope="module", autouse=True)
def cache(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of `datasets` go away with the tests, and nothing is asked of the Hub. The harness
    knows these tasks alone: its own 14,000 files take 8 s to read."""
    import datasets

    index = lm_eval_tasks.TaskManager(include_path=place, include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(lm_eval_tasks, "task_index", lambda: index)
        yield


def read(place: Path, name: str, **settings: Any) -> Items[lm_eval_tasks.HarnessItem]:
    return lm_eval_tasks.read("theirs", HarnessTask(task=name, **settings), SuiteFiles(place))


def asked(place: Path, name: str, subject: LoadedModel, **settings: Any) -> TaskResult:
    return lm_eval_tasks.run(read(place, name, **settings), subject, lambda done, total: None)


@pytest.fixture(scope="module")
def theirs(place: Path, cache: None) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(place / "model")
    backend = HFLM(
        model, tokenizer=AutoTokenizer.from_pretrained(place / "model"), batch_size=4, device="cpu"
    )
    tasks = [json.loads((place / f"{name}.yaml").read_text()) for name in TASKS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lm_eval.evaluator.add_env_info", lambda results: None
        )  # processes that ask pip and git: 1.5 s
        found: dict[str, Any] = lm_eval.simple_evaluate(
            backend,
            tasks=tasks,
            bootstrap_iters=0,
            task_manager=TaskManager(include_defaults=False),
        )
    samples = {
        name: sorted(found["samples"][name], key=lambda one: one["doc_id"]) for name in TASKS
    }
    return {name: {"figures": found["results"][name], "samples": samples[name]} for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_every_item_is_judged_as_by_its_own_backend(
    place: Path, subject: LoadedModel, name: str, theirs: dict[str, Any]
) -> None:
    outcome, found = asked(place, name, subject), theirs[name]
    assert len(outcome.items.digests) == len(set(outcome.items.digests)) == ITEMS
    figures = [
        figure for figure in outcome.figures if name == "texts" or figure.name != "bits_per_byte"
    ]
    for figure in figures:
        assert figure.value == pytest.approx(found["figures"][f"{figure.name},none"], rel=1e-4)
        if figure.shown is None and figure.factor == 1:
            assert figure.sums == tuple(sample[figure.name] for sample in found["samples"])
    assert [figure.name for figure in figures] == [
        metric["metric"] for metric in TASKS[name]["metric_list"] if metric["metric"] != "mcc"
    ]  # Matthews' correlation is no mean over items


def test_our_multiple_choice_is_the_harness_s(
    place: Path, subject: LoadedModel, theirs: dict[str, Any]
) -> None:
    spec = ChoicesTask(file="items.jsonl", delimiter=" ", shots=SHOTS)
    ours = choices.score_choices(
        choices.read("ours", spec, SuiteFiles(place)), subject, lambda done, total: None
    )
    samples = theirs["choices"]["samples"]
    for name, metric in (
        ("accuracy", "acc"),
        ("accuracy_characters", "acc_norm"),
        ("accuracy_bytes", "acc_bytes"),
    ):
        (figure,) = (figure for figure in ours.figures if figure.name == name)
        assert figure.sums == tuple(sample[metric] for sample in samples)
    harness = asked(place, "choices", subject).figures[-1]
    bits = next(figure for figure in ours.figures if figure.name == "bits_per_byte")
    right = tuple(-sample["resps"][sample["target"]][0][0] for sample in samples)
    assert harness.name == "bits_per_byte" and harness.sums == pytest.approx(right, abs=1e-4)
    assert bits.sums == pytest.approx(right, abs=1e-4) and bits.sizes == harness.sizes
    for row, sample in zip(ours.rows, samples, strict=True):
        assert row["nats"] == pytest.approx([-one[0] for one in sample["filtered_resps"]], abs=1e-4)


def test_data_and_names_that_the_harness_does_not_have_are_refused(place: Path) -> None:
    with pytest.raises(DataError, match=r"tasks.theirs.task is broken, which cannot be loaded"):
        read(place, "broken")
    (place / "evil.txt").write_text("task: mine\nprocess_docs: !function evil.run\n")
    for name in ("wordz", str(place / "evil.txt"), str(place)):
        with pytest.raises(
            UsageError, match=rf"theirs\.task is {name}, .* does not know; `lm-eval ls tasks` lists"
        ):
            read(place, name)


def test_a_group_counts_every_item_and_shows_each_task(place: Path, subject: LoadedModel) -> None:
    outcome = asked(place, "both", subject)
    assert outcome.items.groups == {
        "task=words": tuple(range(ITEMS)),
        "task=answers": tuple(range(ITEMS, 2 * ITEMS)),
    }
    accuracy, exact = (
        next(one for one in outcome.figures if one.name == name) for name in ("acc", "exact_match")
    )
    assert (sum(accuracy.sizes), sum(exact.sizes)) == (ITEMS, ITEMS)
    of_one_task = asked(place, "both", subject, limit=1)
    assert (len(of_one_task.items.digests), of_one_task.items.groups) == (1, {})
    assert all(figure.sizes == (1.0,) for figure in of_one_task.figures)


def test_without_the_harness_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "ttrain.evaluate.lm_eval_tasks")
    monkeypatch.delattr("ttrain.evaluate.lm_eval_tasks")
    with pytest.raises(UsageError, match=r"task arc_easy needs .* pip install 'ttrain\[harness\]'"):
        run.functions_of(HarnessTask(task="arc_easy"))
