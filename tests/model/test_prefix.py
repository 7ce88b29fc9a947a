"""Prefix tuning: in packed rows as for each record alone, token by token as at once, from a start
that is a text."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModelForCausalLM
from support.tiny_adapters import CPU, SHAPES, disturb, random_ids, settings
from support.tiny_trainers import tiny_model
from torch import Tensor

from ttrain.config import Settings
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import UsageError
from ttrain.model import adapters
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import token_loss_sum

T = 30


def weight(model: Any) -> Tensor:
    return adapters.state(model)["prompt_embeddings"]


def packed(lengths: tuple[int, ...]) -> Batch:
    ids = random_ids(7, 1, T).numpy()
    labels, segments = np.full((1, T), IGNORE), np.full((1, T), -1)
    positions = np.zeros((1, T), dtype=np.int64)
    start = 0
    for number, length in enumerate(lengths):
        rows = slice(start, start + length)
        labels[0, start : start + length - 1] = ids[0, start + 1 : start + length]
        positions[0, rows], segments[0, rows] = np.arange(length), number
        start += length
    return Batch(ids, labels, positions, segments)


def alone(model: Any, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for number in range(int(batch.segments_BT.max()) + 1):
        places = batch.segments_BT[0] == number
        ids = torch.from_numpy(batch.input_ids_BT[:, places])
        output = PeftModelForCausalLM.forward(model, input_ids=ids, use_cache=False)
        total += token_loss_sum(output.logits, torch.from_numpy(batch.labels_BT[:, places]))
    return total


@pytest.mark.parametrize(
    ("shape", "chunk_tokens"), [*((shape, None) for shape in SHAPES), ("llama", 0)]
)
def test_records_in_a_row_have_the_loss_of_each_alone(shape: str, chunk_tokens: int | None) -> None:
    config = settings(kind="prefix")
    model = disturb(adapters.attach(tiny_model(**SHAPES[shape]), config))
    batch = packed((11, 4, 12))
    task = LanguageModeling(config, model, chunk_tokens=chunk_tokens)
    losses = [task.train_step(task.build_model(), batch, CPU).total, alone(model, batch)]
    ours, theirs = (torch.autograd.grad(loss, weight(model))[0] for loss in losses)
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_of_the_keys_and_values_of_a_text_is_that_text(shape: str) -> None:
    base, text, ids = tiny_model(**SHAPES[shape]).eval(), random_ids(2, 1, 4), random_ids(3, 1, 9)
    with torch.no_grad():
        expected = base(input_ids=torch.cat([text, ids], 1)).logits[:, 4:]
        layers = base(input_ids=text, use_cache=True).cache.layers
        model = adapters.attach(base, settings(kind="prefix")).eval()
        states = [state for layer in layers for state in (layer.keys, layer.values)]
        weight(model).copy_(torch.cat([s[0].transpose(0, 1).flatten(1) for s in states], 1))
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_fresh_prefix_is_random_under_the_seed() -> None:
    configs = [settings(kind="prefix", seed=seed) for seed in (1, 1, 2)]
    first, same, different = (weight(adapters.attach(tiny_model(), config)) for config in configs)
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert 0.8 < float(first.std()) < 1.2
    assert first.shape == (4, 2 * 2 * 16), "keys and values of two layers"


@pytest.mark.parametrize("is_masked", [False, True])
def test_token_by_token_is_as_all_at_once(is_masked: bool) -> None:
    model = disturb(adapters.attach(tiny_model(), settings(kind="prefix"))).eval()
    ids, more = random_ids(3, 2, 9), dict[str, Any]()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for t in range(9):
            if is_masked:
                more |= {"attention_mask": torch.ones(2, t + 1)}
                more |= {"position_ids": torch.full((2, 1), t)}
            output = model(input_ids=ids[:, t : t + 1], use_cache=True, **more)
            more["cache"] = output.cache
            torch.testing.assert_close(output.logits[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


def test_an_architecture_that_cannot_take_a_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match=r"is prefix, .* mamba .*; set lora.kind=lora"):
        adapters.attach(tiny_model(kind="mamba"), settings(kind="prefix"))


def test_settings_leave_room_for_the_prefix_before_rows_that_are_as_long_as_the_model() -> None:
    rows = {name: {"row_length": 32} for name in ("pretrain", "sft", "lora", "evaluate")}
    tree: dict[str, Any] = {"model": {"max_length": 64}, **rows, "lora": {"row_length": 64}}
    tree["evaluate"]["stride"] = 32
    Settings.model_validate(tree)
    tree["lora"]["kind"] = "prefix"
    with pytest.raises(ValueError, match=r"row_length.*lora\.virtual_tokens.*max_length=72"):
        Settings.model_validate(tree)


def test_computing_layers_again_and_merging_are_refused_with_a_prefix() -> None:
    model = adapters.attach(tiny_model(), settings(kind="prefix"))
    with pytest.raises(UsageError, match=r"runtime\.gradient_checkpointing.*lora\.kind"):
        LanguageModeling(settings(kind="prefix"), model, gradient_checkpointing=True)
    with pytest.raises(UsageError, match="merged"):
        adapters.merge(model)
