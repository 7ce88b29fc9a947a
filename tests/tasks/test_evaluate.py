"""The stage `evaluate`: every figure from the records behind it."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import shard_sets
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import in_ranks, score_of

from ttrain.config import Reading
from ttrain.data.encoder import Encoder
from ttrain.evaluate import baselines, task_result
from ttrain.model import factory
from ttrain.tasks import evaluate, lora, sft
from ttrain.tasks.shards import heldout_records, recipe_of
from ttrain.train.distributed import Ranks

HALF = Reading(heldout_fraction=0.5)


def read_scores(directory: Path, metric: str) -> Any:
    return task_result.read_scores(directory / task_result.SCORES)[metric]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The evaluation of three tiny models, by the stages; every path that it read."""
    root = tmp_path_factory.mktemp("evaluated")
    home, few = Home.make(root / "home"), {"epochs": 0.3}
    sections = {"sft": few, "lora": few, "evaluate": {"new_tokens": 2}}
    settings = stage_settings(steps=4).replaced(sections)
    paths = {"base": root / "base", "sft": root / "sft", "lora": root / "lora"}
    chats, runtime = home.chats.path, settings.runtime
    home.pretrain(settings, paths["base"])
    run_here(sft, settings, paths["sft"], {"base": paths["base"], "shards": chats}, runtime)
    run_here(lora, settings, paths["lora"], {"base": paths["sft"], "shards": chats}, runtime)
    answers = {"chosen": "This one.", "rejected": "None."}
    rows = [{"prompt": f"Which {number}?", **answers} for number in range(30)]
    file = shard_sets.write_lines(root / "pairs.jsonl", rows)
    recipe = recipe_of(HALF, home.tokenizer.path, "pairs")
    shard_sets.build(root / "pairs", [file], recipe, HALF)
    sets = {"documents": home.documents.path, "chats": chats, "domain": chats}
    inputs = {**paths, **sets, "pairs": root / "pairs"}
    (root / "output").mkdir()
    result = run_here(evaluate, settings, root / "output", inputs, runtime)
    return SimpleNamespace(root=root, inputs=inputs, settings=settings, result=result)


def test_the_preference_accuracy_has_an_interval_and_a_paired_test(evaluated: Any) -> None:
    pairs = [*heldout_records(evaluated.inputs["pairs"])]
    metrics = evaluated.result["metrics"]
    for model in ("base", "sft", "lora"):
        name = f"preference_accuracy/{model}"
        recorded = read_scores(evaluated.root / "output", name)
        assert recorded.higher_is_better and set(recorded.sums) <= {0.0, 0.5, 1.0}
        assert len(recorded.sums) == len(set(recorded.records)) == len(pairs)
        assert metrics[name] == sum(recorded.sums) / len(pairs)
        low, high = evaluated.result["intervals"][name]
        assert low <= metrics[name] <= high
    test = evaluated.result["paired"]["preference_accuracy/sft"]
    difference = metrics["preference_accuracy/sft"] - metrics["preference_accuracy/base"]
    assert (test["against"], test["difference"]) == ("base", pytest.approx(difference))
    assert evaluated.result["paired"]["chat_loss_lora"]["against"] == "sft"


def test_bits_per_byte_are_those_of_the_held_out_text(evaluated: Any) -> None:
    """By hand: every document after its first token, its own tokens only, over its bytes."""
    metrics, counts = evaluated.result["metrics"], evaluated.result["counts"]
    output, base = evaluated.root / "output", evaluated.inputs["base"] / "model"
    for metric in (name for name in metrics if name.split("_")[-1] not in baselines.BASELINES):
        scores = read_scores(output, metric)
        assert len(scores.sums) == len(scores.sizes) == len(scores.records) > 1
        assert scores.value == metrics[metric], metric
    compressed = read_scores(output, "bits_per_byte_xz")
    assert compressed.records == (), "a compressor reads all as one stream"
    texts = [record["text"] for record in heldout_records(evaluated.inputs["documents"])]
    encoder, model = Encoder(base), factory.load(base)
    all_ids = [[encoder.special("<|bos|>"), *ids] for ids in encoder.encode(texts)]
    sequences = [(ids, [False] + [True] * (len(ids) - 1)) for ids in all_ids]
    size = sum(len(text.encode()) for text in texts)
    whole = score_of(model, sequences, 32, 16).nats / math.log(2)
    alone = score_of(model, sequences[:1], 32, 16).nats / math.log(2)
    by_document = read_scores(output, "bits_per_byte")
    assert by_document.factor * by_document.sums[0] == pytest.approx(alone, rel=1e-6)
    assert by_document.sizes[0] == len(texts[0].encode())
    assert metrics["bits_per_byte"] == pytest.approx(whole / size, rel=1e-6)
    assert counts["document_bytes"] == size
    assert counts["document_tokens"] == sum(len(ids) - 1 for ids in all_ids)
    index = json.loads((evaluated.inputs["chats"] / "heldout" / "index.json").read_text())
    assert counts["chat_tokens"] == index["live_tokens"]
    order0 = baselines.adaptive_bits("".join(texts).encode(), 0).mean()
    assert metrics["bits_per_byte_order0"] == order0


def test_an_adapter_is_measured_on_its_own_model(evaluated: Any, tmp_path: Path) -> None:
    """Of another SFT model than the night's. Records have the same names, so that they pair."""
    base, sft_model = evaluated.inputs["base"], evaluated.inputs["sft"]
    inputs = {**evaluated.inputs, "sft": base, "base_of_lora": sft_model}
    del inputs["pairs"]
    settings = evaluated.settings
    metrics = run_here(evaluate, settings, tmp_path, inputs, settings.runtime)["metrics"]
    assert metrics["domain_loss_lora"] == evaluated.result["metrics"]["domain_loss_lora"]
    assert metrics["chat_loss_sft"] != evaluated.result["metrics"]["chat_loss_sft"]
    ours = read_scores(evaluated.root / "output", "chat_loss_sft")
    theirs = read_scores(tmp_path, "chat_loss_sft")
    assert (ours.sizes, ours.records) == (theirs.sizes, theirs.records) and ours.sums != theirs.sums


def test_two_ranks_leave_the_bytes_of_one(evaluated: Any, tmp_path: Path, monkeypatch: Any) -> None:
    output = tmp_path / "output"
    output.mkdir()

    def work(ranks: Ranks) -> Any:
        # in a fork of this process
        monkeypatch.setattr(evaluate, "join_ranks", lambda runtime: ranks)
        settings = evaluated.settings
        return run_here(evaluate, settings, output, evaluated.inputs, settings.runtime)

    first, second = in_ranks(2, tmp_path / "ranks", work)
    assert (first, second) == (evaluated.result, {})
    for name in ("evaluation.json", "scores.json"):
        assert (output / name).read_bytes() == (evaluated.root / "output" / name).read_bytes()
