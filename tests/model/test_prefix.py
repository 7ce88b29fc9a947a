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
from ttrain.model.adapter_layers import PrefixModel
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
        ids, labels = (
            torch.from_numpy(a[:, places]) for a in (batch.input_ids_BT, batch.labels_BT)
        )
        output = PeftModelForCausalLM.forward(model, input_ids=ids, use_cache=False)
        total = total + token_loss_sum(output.logits, labels)
    return total


@pytest.mark.parametrize(
    ("shape", "chunk_tokens"), [*((shape, None) for shape in SHAPES), ("llama", 0)]
)
def test_records_in_a_row_have_the_loss_and_gradient_that_peft_gives_each(
    shape: str, chunk_tokens: int | None
) -> None:
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


def test_a_fresh_prefix_is_keys_and_values_of_every_layer_random_under_the_seed() -> None:
    configs = [settings(kind="prefix", seed=seed) for seed in (1, 1, 2)]
    first, same, different = (weight(adapters.attach(tiny_model(), config)) for config in configs)
    assert torch.equal(first, same) and not torch.equal(first, different)
    assert 0.8 < float(first.std()) < 1.2
    model = adapters.attach(tiny_model(kv_heads=1), settings(kind="prefix", virtual_tokens=5))
    assert isinstance(model, PrefixModel)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["prompt_encoder.default.embedding.weight"]
    assert weight(model).shape == (5, 2 * 2 * 8), "keys and values of two layers, one head of eight"


@pytest.mark.parametrize("shape", ["llama", "gpt2", "experts"])
def test_token_by_token_is_as_all_at_once_also_with_a_mask_and_positions(shape: str) -> None:
    model = disturb(adapters.attach(tiny_model(**SHAPES[shape]), settings(kind="prefix"))).eval()
    ids = random_ids(3, 2, 9)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for is_masked in (False, True):
            past = None
            for t in range(9):
                mask, positions = torch.ones(2, t + 1), torch.full((2, 1), t)
                more = {"attention_mask": mask, "position_ids": positions} if is_masked else {}
                more |= {"cache": past, "use_cache": True}
                out = model(input_ids=ids[:, t : t + 1], **more)
                past = out.cache
                torch.testing.assert_close(out.logits[:, 0], whole[:, t], rtol=1e-5, atol=1e-5)


RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8}
FIELDS = {**RANKS, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT = {"kind": "deepseek_v3", "moe": {"experts": 4}, "fields": FIELDS}


@pytest.mark.parametrize("options", [{"kind": "mamba"}, LATENT])
def test_an_architecture_that_cannot_take_a_prefix_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"is prefix, .* {options['kind']} .*; set lora.kind=lora"):
        adapters.attach(tiny_model(**options), settings(kind="prefix"))


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
