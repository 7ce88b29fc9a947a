"""Our scores against those of lm-evaluation-harness, item by item: the same items and model, its own Hugging Face backend.

    python bench/harness.py --items eval/ --model RUN
    python bench/harness.py --items poems.jsonl --model random-gpt2 --dtype bf16

Files or directories of `{"question", "choices", "answer"}` or `{"context", "target"}`. `random-gpt2` is a small GPT-2 of
random weights with a tokenizer trained on the items. The harness reads the file, writes the prompts and judges by itself; it
takes its softmax in fp32 (`softmax_dtype`), since in bf16 it rounds a log-likelihood of 100 nats to half a nat.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

NATS_A_TOKEN = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}  # by which the two may differ
METRICS = {"accuracy": "acc", "accuracy_characters": "acc_norm", "accuracy_bytes": "acc_bytes"}


def main() -> int:
    """Print a line for each file; 1 where an item is judged otherwise."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--items", nargs="+", required=True, type=Path)
    found.add_argument("--model", default="random-gpt2")
    found.add_argument("--dtype", choices=sorted(NATS_A_TOKEN), default="fp32")
    found.add_argument("--limit", type=int, help="the first items of each file alone")
    found.add_argument("--batch-size", type=int, default=8, help="of the harness")
    found.add_argument("--alone", action="store_true", help="share nothing between our rows")
    options = found.parse_args()
    if not common.has("lm_eval"):
        return 0
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    files = [file for path in options.items for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    with tempfile.TemporaryDirectory(prefix="ttrain-bench-") as directory:
        return _compare(options, [file for file in files if _kind(file)], Path(directory))


def _compare(options: argparse.Namespace, files: Sequence[Path], directory: Path) -> int:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model
    from ttrain.pipeline import names

    os.environ["HF_DATASETS_CACHE"] = str(directory / "cache")
    name = str(random_gpt2(files, directory / "model")) if options.model == "random-gpt2" else options.model
    reference = names.resolve(name)
    subject = as_evaluated_model(loading.load(reference, device="cpu", dtype=options.dtype))
    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(
            reference.model, dtype=loading.DTYPES[options.dtype], trust_remote_code=True
        ),
        tokenizer=AutoTokenizer.from_pretrained(reference.tokenizer),
        batch_size=options.batch_size, device="cpu", softmax_dtype="float32", max_length=subject.max_length,
    )  # fmt: skip
    header = ("file", "items", "accuracy ours / theirs", "judged otherwise", "most nats apart", "least margin there")
    print(f"{subject.name} in {options.dtype}\n{header[0]:<30}{header[1]:>6}{header[2]:>26}", *header[3:], sep="   ")
    failed = False
    for file in files:
        failed |= _one(file, options, subject, theirs, directory)
    return int(failed)


def _one(file: Path, options: argparse.Namespace, subject: Any, theirs: Any, directory: Path) -> bool:
    """A line of the table; whether an item is judged otherwise, or a score is too far away."""
    from ttrain.config.evaluate import ChoicesTask, LastWordTask
    from ttrain.evaluate import choices
    from ttrain.evaluate.items import SuiteFiles
    from ttrain.evaluate.log_likelihood import log_likelihoods

    part = directory / file.name
    part.write_text("".join(f"{line}\n" for line in file.read_text().split("\n")[: options.limit]))
    places = SuiteFiles(directory)
    if _kind(file) == "choices":
        items: Any = choices.read_choices("items", ChoicesTask(file=part.name), places)
        texts = choices.choice_texts(items.items)
        rows = [_row(one) for one in items.items]
    else:
        items = choices.read_passages("items", LastWordTask(file=part.name), places)
        texts = choices.passage_texts(items.items)
        rows = [{"context": context, "target": target, "delimiter": ""} for context, target in texts]
    ours = iter(log_likelihoods(subject, texts, lambda done, total: None, alone=options.alone))
    samples = harness_samples(theirs, rows, directory / f"{file.stem}.items.jsonl")
    right, otherwise, apart, margins = [0.0, 0.0], 0, 0.0, []
    for row, sample in zip(rows, samples, strict=True):
        scored = [next(ours) for _ in row.get("choices", [0])]
        nats = [-float(response[0]) for response in sample["filtered_resps"]]
        apart = max(apart, *(abs(one.nats - other) / one.tokens for one, other in zip(scored, nats, strict=True)))
        if "choices" in row:
            chosen = choices.chosen_by(row["choices"], scored)
            judged = {metric: float(chosen[key] == row["answer"]) for key, metric in
                      (("none", "acc"), ("characters", "acc_norm"), ("bytes", "acc_bytes"))}  # fmt: skip
        else:
            judged = {"acc": float(scored[0].greedy)}
        right = [right[0] + judged["acc"], right[1] + sample["acc"]]
        if any(sample[metric] != value for metric, value in judged.items()):
            otherwise += 1
            margins.append(sorted(nats)[1] - min(nats) if len(nats) > 1 else 0.0)
    shares = f"{right[0] / len(rows):.4f} / {right[1] / len(rows):.4f}"
    print(f"{file.name:<30}{len(rows):>6}{shares:>26}{otherwise:>19}{apart:>18.1e} a token", *margins[:3], flush=True)
    return otherwise > 0 or apart > NATS_A_TOKEN[options.dtype]


def _row(asked: Any) -> dict[str, Any]:
    """A question for the harness, whose choices follow after what stands before ours."""
    choice = asked.choice
    (delimiter,) = {ours.removesuffix(one) for ours, one in zip(asked.continuations, choice.choices, strict=True)}
    return {"question": asked.context, "choices": list(choice.choices), "answer": choice.answer, "delimiter": delimiter}


def harness_samples(model: Any, rows: Sequence[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """What the harness makes of the rows with that model: its samples, in the order of the rows.

    A task of the harness has one delimiter for all of its rows, ours none after scripts without spaces: a task for each.
    """
    found: list[dict[str, Any]] = [{}] * len(rows)
    for delimiter in sorted({row["delimiter"] for row in rows}):
        numbers = [number for number, row in enumerate(rows) if row["delimiter"] == delimiter]
        some = _samples(model, [rows[number] for number in numbers], delimiter, path)
        for number, sample in zip(numbers, some, strict=True):
            found[number] = sample
    return found


def _samples(model: Any, rows: Sequence[dict[str, Any]], delimiter: str, path: Path) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    several = "choices" in rows[0]
    task = {
        "task": "items", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test",
        "output_type": "multiple_choice" if several else "loglikelihood",
        "doc_to_text": "{{question}}" if several else "{{context}}",
        "doc_to_target": "{{answer}}" if several else "{{target}}", "target_delimiter": delimiter,
        **({"doc_to_choice": "{{choices}}"} if several else {}),
        "metric_list": [{"metric": name} for name in (METRICS.values() if several else ("acc", "perplexity"))],
    }  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):  # its bars
        found = simple_evaluate(
            model=model, tasks=[task], bootstrap_iters=0, task_manager=TaskManager(include_defaults=False)
        )
    samples: list[dict[str, Any]] = sorted(found["samples"]["items"], key=lambda sample: sample["doc_id"])
    return samples


def random_gpt2(files: Sequence[Path], directory: Path) -> Path:
    """A directory with a GPT-2 of random weights, of 512 positions, and a tokenizer of the files' text."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from ttrain.data import tokenizer
    from ttrain.data.encoder import Encoder

    tokenizer.save(tokenizer.train([line for file in files for line in file.read_text().split("\n")], 2000), directory)
    encoder = Encoder(directory)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(encoder), n_positions=512, n_embd=128, n_layer=3, n_head=4, initializer_range=0.1,
        bos_token_id=encoder.bos_id, eos_token_id=encoder.eos_id, pad_token_id=encoder.pad_id,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def _kind(file: Path) -> str:
    """choices or last_word; empty for a file of something else."""
    first = json.loads(file.read_text().split("\n", 1)[0])
    return "choices" if "choices" in first else "last_word" if "target" in first else ""


if __name__ == "__main__":
    raise SystemExit(main())
