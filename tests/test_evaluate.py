"""Evaluation: every token once, whatever the batch; known bits for known models; greedy as transformers does it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import CPU, VOCAB, Home, run_here, stage_settings, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ttrain.config import EvaluateConfig, LoraConfig, PretrainConfig, SftConfig
from ttrain.data.encoder import Encoder
from ttrain.evaluate import baselines, samples
from ttrain.evaluate.perplexity import IGNORE, Score, score_each, windows
from ttrain.evaluate.scores import sums_of
from ttrain.model import factory
from ttrain.stages import evaluate, lora, pretrain, sft

pytestmark = pytest.mark.usefixtures("one_thread")


class Uniform(nn.Module):
    """Finds every one of `vocab` tokens equally likely."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocab))


def score_of(model: nn.Module, sequences: Any, length: int, stride: int) -> Score:
    """All sequences together."""
    found = score_each(
        model, sequences, length=length, stride=stride, autocast=contextlib.nullcontext, device=CPU,
        progress=lambda done, total: None,
    )  # fmt: skip
    return Score(sum(one.nats for one in found), sum(one.tokens for one in found))


def sequence(seed: int, length: int) -> tuple[list[int], list[bool]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, VOCAB, (length,), generator=generator).tolist()
    return ids, [False, *(torch.rand(length - 1, generator=generator) < 0.7).tolist()]


LENGTHS = st.integers(1, 12).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@given(st.lists(st.booleans(), max_size=60), LENGTHS)
def test_every_live_token_is_scored_once_with_the_tokens_before_it(live: list[bool], sizes: tuple[int, int]) -> None:
    length, stride = sizes
    ids = list(range(1000, 1000 + len(live)))  # each token is its own position
    scored: list[int] = []
    for inputs, labels in windows(ids, live, length, stride):
        assert len(inputs) == len(labels) <= length
        assert inputs == list(range(inputs[0], inputs[0] + len(inputs))), "the context has no gap"
        for at, label in enumerate(labels):
            if label != IGNORE:
                assert label == inputs[at] + 1
                context = at + 1
                assert context >= min(label - 1000, length - stride + 1), "all but the first window score their end"
                scored.append(label)
    assert scored == [1000 + t for t in range(1, len(live)) if live[t]]


@pytest.mark.parametrize(
    ("length", "stride", "expected"),
    [
        (4, 2, [([0, 1, 2, 3], [1, 2, 3, 4]), ([2, 3, 4, 5], [-100, -100, 5, 6]), ([3, 4, 5, 6], [-100, -100, -100, 7])]),
        (4, 4, [([0, 1, 2, 3], [1, 2, 3, 4]), ([3, 4, 5, 6], [-100, 5, 6, 7])]),
        (9, 1, [([0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7])]),
    ],
)
def test_windows_follow_the_table(length: int, stride: int, expected: Any) -> None:
    assert list(windows(range(8), [True] * 8, length, stride)) == expected


def test_windows_without_a_live_token_are_left_out() -> None:
    assert list(windows([5], [True], 4, 2)) == []
    assert list(windows([], [], 4, 2)) == []
    (only,) = windows(range(8), [False] * 7 + [True], 4, 2)
    assert only[1] == [-100, -100, -100, 7]


def test_a_text_that_fits_into_a_window_costs_what_a_naive_sum_says() -> None:
    model = tiny_model().eval()
    sequences = [sequence(seed, length) for seed, length in enumerate((5, 30, 17, 2, 1))]
    nats, count = 0.0, 0
    for ids, live in sequences:
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for t in range(1, len(ids)):
            if live[t]:
                nats, count = nats - float(logs[t - 1, ids[t]]), count + 1
    found = score_of(model, sequences, length=32, stride=16)
    assert found.tokens == count
    assert found.nats == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_longer_text_costs_what_each_token_costs_after_its_window(stride: int) -> None:
    """Each token on its own, after just the context that its window shows."""
    model, length = tiny_model().eval(), 16
    ids, live = sequence(3, 50)
    nats = 0.0
    for t in range(1, 50):
        if not live[t]:
            continue
        end = length + 1 if t <= length else min(50, length + 1 + stride * -(-(t - length) // stride))
        context = ids[max(0, end - length - 1) : t]
        with torch.no_grad():
            logs = model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1)
        nats -= float(logs[ids[t]])
    assert score_of(model, [(ids, live)], length, stride).nats == pytest.approx(nats, rel=1e-6)


def test_a_score_does_not_depend_on_the_order_nor_on_the_others() -> None:
    model = tiny_model()
    sequences = [sequence(seed, 3 + 7 * seed % 60) for seed in range(40)]
    whole = score_of(model, sequences, 24, 12)
    back = score_of(model, sequences[::-1], 24, 12)
    apart = [score_of(model, [one], 24, 12) for one in sequences if any(one[1])]
    assert whole.tokens == back.tokens == sum(one.tokens for one in apart)
    assert back.nats == pytest.approx(whole.nats, rel=1e-6)
    assert sum(one.nats for one in apart) == pytest.approx(whole.nats, rel=1e-6)


def test_scoring_switches_dropout_off() -> None:
    sequences = [sequence(1, 40)]
    model = tiny_model(dropout=0.5).train()
    assert score_of(model, sequences, 24, 12) == score_of(model, sequences, 24, 12)


@pytest.mark.parametrize("vocab", [64, 1000])
def test_a_uniform_model_costs_log2_of_the_vocabulary_for_each_token(vocab: int) -> None:
    sequences = [sequence(seed, 20 + seed) for seed in range(5)]
    found = score_of(Uniform(vocab), sequences, 16, 8)
    tokens = sum(sum(live) for _, live in sequences)
    assert found.tokens == tokens
    assert found.nats / evaluate.LN2 == pytest.approx(tokens * math.log2(vocab), rel=1e-6)


# --- baselines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "bits"),
    [(b"aaaa", 0.0), (b"abab", 1.0), (b"abcd" * 9, 2.0), (bytes(range(256)), 8.0), (b"aaab", 0.811278124459), (b"a", 0.0)],
)
def test_the_entropy_of_known_bytes(data: bytes, bits: float) -> None:
    assert baselines.order0(data) == pytest.approx(bits, abs=1e-11)


def test_compressors_beat_the_order_of_bytes_on_repeated_text_and_not_on_noise() -> None:
    text = baselines.bits_per_byte(b"the quick brown fox " * 200)
    assert text["xz"] < 1 and text["zlib"] < 1 < text["order0"]
    noise = baselines.bits_per_byte(
        bytes(torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(1)).tolist())
    )
    assert noise["xz"] > 8 and noise["zlib"] > 8 > noise["order0"] > 7.9
    assert baselines.bits_per_byte(b"") == {}


# --- samples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_says_what_transformers_generates(kind: str) -> None:
    model = tiny_model(kind=kind, init_std=0.5).eval()
    stopped = 0
    for seed in range(12):
        prompt = sequence(seed, 6)[0]
        free = samples.greedy(model, prompt, new_tokens=20, stop_ids=(), device=CPU)
        stops = [free[9]] if seed % 2 else [1]  # a token that will be said, or one that perhaps is not
        said = samples.greedy(model, prompt, new_tokens=20, stop_ids=stops, device=CPU)
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 6, dtype=torch.long), max_new_tokens=20, do_sample=False,
            eos_token_id=stops, pad_token_id=0,
        )[0, 6:].tolist()  # fmt: skip
        if theirs[-1] in stops:
            stopped += 1
            theirs = theirs[:-1]
        assert said == theirs
        assert said == free[: len(said)]
    assert stopped >= 6


class Counts(nn.Module):
    """Says the number after the last one."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        logits = nn.functional.one_hot(input_ids + 1, 40).float()
        return SimpleNamespace(logits=logits, past_key_values=None)


@pytest.mark.parametrize(
    ("stops", "new_tokens", "said"),
    [((), 3, [6, 7, 8]), ((8, 9), 9, [6, 7]), ((6,), 9, []), ((3,), 2, [6, 7]), ((), 0, [])],
)
def test_greedy_ends_at_a_stop_id_without_saying_it(stops: Sequence[int], new_tokens: int, said: list[int]) -> None:
    assert samples.greedy(Counts(), [4, 5], new_tokens=new_tokens, stop_ids=stops, device=CPU) == said


# --- the stage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The evaluation of three tiny models, by the stages; every path that it read."""
    root = tmp_path_factory.mktemp("evaluated")
    home, settings = Home.make(root / "home"), stage_settings(steps=4)
    paths = {"base": root / "base", "sft": root / "sft", "lora": root / "lora"}
    chats, runtime = home.chats.path, settings.runtime
    documents = {"tokenizer": home.tokenizer.path, "shards": home.documents.path}
    run_here(pretrain, PretrainConfig(model=settings.model, pretrain=settings.pretrain), paths["base"], documents, runtime)
    run_here(sft, SftConfig(sft=settings.sft), paths["sft"], {"base": paths["base"], "shards": chats}, runtime)
    run_here(lora, LoraConfig(lora=settings.lora), paths["lora"], {"base": paths["sft"], "shards": chats}, runtime)
    inputs = {**paths, "documents": home.documents.path, "chats": chats, "domain": chats}
    (root / "output").mkdir()
    result = run_here(evaluate, EvaluateConfig(evaluate=settings.evaluate), root / "output", inputs, runtime)
    return SimpleNamespace(root=root, inputs=inputs, settings=settings, result=result)


def held_out_texts(evaluated: Any) -> list[str]:
    files = sorted((evaluated.inputs["documents"] / "heldout").glob("*.jsonl"))
    return [json.loads(line)["text"] for path in files for line in path.read_text(encoding="utf-8").splitlines()]


def test_bits_per_byte_are_those_of_the_held_out_text(evaluated: Any) -> None:
    """By hand: every document after its first token, its own tokens only, over the bytes of the text."""
    texts = held_out_texts(evaluated)
    encoder, model = Encoder(evaluated.inputs["base"] / "model"), factory.load(evaluated.inputs["base"] / "model")
    sequences = [([encoder.special("<|bos|>"), *ids], [False] + [True] * len(ids)) for ids in encoder.encode(texts)]
    size = sum(len(text.encode()) for text in texts)
    bits = score_of(model, sequences, 32, 16).nats / math.log(2) / size
    metrics, counts = evaluated.result["metrics"], evaluated.result["counts"]
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert counts["document_bytes"] == size
    assert counts["document_tokens"] == sum(len(ids) - 1 for ids, _ in sequences)
    assert metrics["bits_per_byte_order0"] == pytest.approx(baselines.order0("".join(texts).encode()))


def test_the_evaluation_has_every_figure_and_gives_the_same_ones_again(evaluated: Any, tmp_path: Path) -> None:
    names = {*evaluated.result["metrics"]}
    assert {"bits_per_byte", "bits_per_byte_sft", "bits_per_byte_lora"} < names
    assert {f"{part}_loss_{model}" for part in ("chat", "domain") for model in ("base", "sft", "lora")} < names
    assert all(math.isfinite(value) for value in evaluated.result["metrics"].values())
    config = EvaluateConfig(evaluate=evaluated.settings.evaluate)
    again = run_here(evaluate, config, tmp_path, evaluated.inputs, evaluated.settings.runtime)
    assert again == evaluated.result
    for name in ("evaluation.json", "samples.json", "scores.json"):
        assert (tmp_path / name).read_bytes() == (evaluated.root / "output" / name).read_bytes()


def test_chats_cost_what_the_assistants_tokens_cost(evaluated: Any) -> None:
    counts, metrics = evaluated.result["counts"], evaluated.result["metrics"]
    index = json.loads((evaluated.inputs["chats"] / "heldout" / "index.json").read_text())
    assert counts["chat_tokens"] == index["live_tokens"]
    assert metrics["chat_loss_sft"] == metrics["domain_loss_sft"], "both parts are the same chats here"
    assert metrics["chat_loss_sft"] < metrics["chat_loss_base"], "the fine-tuned model knows chats better than its base"


def test_the_records_behind_a_figure_give_it_and_each_costs_what_it_costs_alone(evaluated: Any) -> None:
    metrics, output = evaluated.result["metrics"], evaluated.root / "output"
    for metric in (name for name in metrics if name.split("_")[-1] not in ("zlib", "xz", "order0")):
        found = sums_of(output, metric)
        assert found is not None
        sums, sizes, records = found
        assert len(sums) == len(sizes) == len(records) > 1
        assert sum(sums) / sum(sizes) == pytest.approx(metrics[metric], rel=1e-12), metric
    assert sums_of(output, "bits_per_byte_xz") is None, "a compressor reads all as one stream"
    model = factory.load(evaluated.inputs["base"] / "model")
    (text, *_), encoder = held_out_texts(evaluated), Encoder(evaluated.inputs["base"] / "model")
    ids = encoder.encode([text])[0]
    alone = score_of(model, [([encoder.bos_id, *ids], [False] + [True] * len(ids))], 32, 16).nats / math.log(2)
    sums, sizes, _ = sums_of(output, "bits_per_byte") or ([], [], [])
    assert (sums[0], sizes[0]) == (pytest.approx(alone, rel=1e-6), len(text.encode()))


def test_records_are_named_by_what_they_say_whoever_is_scored(evaluated: Any, tmp_path: Path) -> None:
    """Another model on the same data has the same names in the same order, so that two evaluations can be paired."""
    inputs = {**evaluated.inputs, "base": evaluated.inputs["sft"]}
    run_here(evaluate, EvaluateConfig(evaluate=evaluated.settings.evaluate), tmp_path, inputs, evaluated.settings.runtime)
    ours, theirs = sums_of(evaluated.root / "output", "bits_per_byte"), sums_of(tmp_path, "bits_per_byte")
    assert ours is not None and theirs is not None
    assert ours[1:] == theirs[1:]
    assert ours[0] != theirs[0]
