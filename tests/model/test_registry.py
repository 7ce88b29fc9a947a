"""Architectures by name: each takes the settings' sizes, keeps to the past and to its record of a row, and opens again."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES, IDS, advised, builds, config_of, model_of, verdict
from support.tiny_data import VOCAB
from support.tiny_trainers import settings_of_training
from torch.nn import functional as F

from ttrain.config import Model
from ttrain.config.loading import load
from ttrain.errors import UsageError
from ttrain.model import factory, registry, shape_check
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss
from ttrain.train.losses import token_loss_sum

LENGTHS = (9, 8, 7)


T = sum(LENGTHS)


def packed() -> tuple[torch.Tensor, ...]:
    """One row of three records: input ids, positions, segments, labels; the last of a record has none."""
    ids = torch.randint(9, VOCAB, (1, T), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    labels = ids.roll(-1, 1)
    labels[0, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return ids, positions, segments, labels


def loss_of(model: Any, *row: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = NextTokenLoss(model, token_loss_sum)(*row, next_only=True)[0]
    return found


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_packed_row_costs_what_its_records_cost_alone(options: dict[str, Any]) -> None:
    """The masks are ours, and those of a record alone are transformers': windows, chunks and all."""
    model = model_of(options)
    ids, positions, segments, labels = packed()
    with torch.no_grad():
        together = loss_of(model, ids, positions, segments, labels)
        alone = sum(
            F.cross_entropy(model(record, use_cache=False).logits[0, :-1], record[0, 1:], reduction="sum")
            for record in ids.split(LENGTHS, 1)
        )
    assert float(together) == pytest.approx(float(alone), abs=1e-4)


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_what_comes_later_or_stands_in_another_record_moves_no_loss(options: dict[str, Any]) -> None:
    """To the last bit, but for experts, whose products are grouped in another way: there to 1e-5."""
    model = model_of(options)
    ids, positions, segments, labels = packed()
    t = LENGTHS[0] + 4  # in the second record
    other = ids.clone()
    other[0, t] = (ids[0, t] - 9 + 1) % (VOCAB - 9) + 9
    before, own, after = (torch.full_like(labels, -100) for _ in range(3))
    before[0, :t] = labels[0, :t]
    own[0, t : LENGTHS[0] + LENGTHS[1]] = labels[0, t : LENGTHS[0] + LENGTHS[1]]
    after[0, LENGTHS[0] + LENGTHS[1] :] = labels[0, LENGTHS[0] + LENGTHS[1] :]
    tolerance = 1e-5 if any("experts" in name for name, _ in model.named_parameters()) else 0.0
    with torch.no_grad():
        losses = [[loss_of(model, some, positions, segments, of) for some in (ids, other)] for of in (before, own, after)]
    moved = [abs(float(one - two)) for one, two in losses]
    assert moved[0] <= tolerance, "a position sees a later one"
    assert moved[1] > 1e-3, "a position sees what is before it in its record"
    assert moved[2] <= tolerance, "a record sees another"


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_training_step_reaches_every_parameter_the_same_with_gradient_checkpointing(options: dict[str, Any]) -> None:
    """In bf16 as in fp32: the masks of eager attention are scores, which autocast must not spoil."""
    found = []
    for again in (False, True):
        model = model_of(options).train()
        objective = LanguageModeling(settings_of_training(), model, gradient_checkpointing=again).build_model()
        with torch.autocast("cpu", torch.bfloat16):
            loss = objective(*packed())[0]
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    with torch.no_grad():
        assert float(loss.detach()) == pytest.approx(float(objective(*packed())[0]), rel=1e-3)
    for name, gradient in found[0].items():
        assert gradient is not None and bool(gradient.isfinite().all()), name
        assert torch.equal(gradient, found[1][name]), name


def refused(**settings: Any) -> str:
    with pytest.raises(UsageError) as raised:
        factory.build(Model(**settings), vocab_size=VOCAB, ids=IDS, stop_ids=[3], seed=1)
    return str(raised.value)


SIZES = {"hidden_size": 96, "layers": 3, "heads": 4, "max_length": 77, "init_std": 0.01, "intermediate_size": 160}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "initializer_range",
                   "intermediate_size")),
        ("gpt2", ("n_embd", "n_layer", "n_head", "n_positions", "initializer_range", "n_inner")),
        ("opt", ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "init_std",
                 "ffn_dim")),
        ("falcon", ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                    "initializer_range", "ffn_hidden_size")),
    ],
)  # fmt: skip
def test_sizes_have_the_architectures_own_names(kind: str, names: tuple[str, ...]) -> None:
    found = config_of(kind=kind, **SIZES)
    assert [found[name] for name in names] == list(SIZES.values())
    assert (found["vocab_size"], found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (VOCAB, 2, 3, 0)


def test_grouped_queries_and_the_width_of_a_head_follow_the_settings() -> None:
    found = config_of(kind="qwen3", hidden_size=96, heads=4, kv_heads=2)
    assert (found["num_key_value_heads"], found["head_dim"]) == (2, 24)
    assert config_of(kind="qwen3", hidden_size=96, heads=4)["num_key_value_heads"] == 4
    assert config_of(kind="llama", fields={"head_dim": 8})["head_dim"] == 8


def test_no_architecture_brings_a_dropout_that_nobody_asked_for() -> None:
    found = config_of(kind="gpt2")
    assert [found[name] for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")] == [0, 0, 0]
    found = config_of(kind="gpt2", dropout=0.2, fields={"resid_pdrop": 0.1})
    assert [found[name] for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")] == [0.2, 0.1, 0]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"kind": "lama"}, ["model.kind is 'lama'", "did you mean llama"]),
        ({"kind": "zzzz"}, ["model.kind is 'zzzz'", "ttrain models size --kinds"]),
        ({"kind": "gemma3"}, ["made of several models", "model.kind=gemma3_text"]),
        ({"kind": "bart"}, ["has an encoder", "llama"]),
        ({"kind": "roberta"}, ["counts positions from pad_token_id"]),
        ({"kind": "gpt2", "kv_heads": 1}, ["model.kv_heads is 1", "gpt2 has no such setting", "leave it empty"]),
        ({"kind": "gpt2", "rope_theta": 5.0}, ["model.rope_theta is 5.0", "leave it at 10000.0"]),
        ({"kind": "gpt2", "rope_type": "linear", "rope_factor": 2}, ["model.rope_type is linear", "gpt2"]),
        ({"rope_theta": 5.0, "fields": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}},
         ["model.rope_theta is set", "model.fields.rope_parameters"]),
        ({"fields": {"hiden_act": "silu"}}, ["model.fields.hiden_act", "did you mean hidden_act"]),
        ({"fields": {"hidden_act": 3}}, ["'hidden_act' expected str, got int"]),
        ({"fields": {"attention_bias": "perhaps"}}, ["'attention_bias' expected bool"]),
        ({"fields": {"num_hidden_layers": 3}}, ["model.fields.num_hidden_layers", "model.layers", "leave it out"]),
        ({"kind": "gpt2", "fields": {"hidden_size": 3}}, ["model.fields.hidden_size", "model.hidden_size"]),
        ({"fields": {"vocab_size": 3}}, ["model.fields.vocab_size", "tokenizer"]),
        ({"fields": {"dtype": "float16"}}, ["model.fields.dtype is not a field"]),
        ({"fields": {"hidden_act": "nothing"}}, ["model.kind is qwen3", "nothing"]),
        ({"kind": "dots1"}, ["model.kind is dots1", "model.fields"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_an_architecture_cannot_be_is_refused_by_name(settings: dict[str, Any], parts: list[str]) -> None:
    message = refused(**settings)
    assert [part for part in parts if part not in message] == [], message


OTHER_SIZES = [
    {"intermediate_size": 33}, {"layers": 1, "max_length": 16}, {"tie_embeddings": False, "dropout": 0.1},
    {"rope_theta": 0.5, "init_std": 1.0, "scaled_residuals": True}, {"hidden_size": 8, "heads": 4}, {"preset": "1m"},
]  # fmt: skip


# Widths that heads divide, which is our own rule; and no heads of one number, which broadcasting makes two wide.
GRID = [
    {"kind": kind, "hidden_size": width, "heads": heads, "kv_heads": kv_heads, "layers": 2}
    for kind in registry.RULED_KINDS
    for width, heads, kv_heads in product((24, 25, 36, 48, 129, 132), (1, 2, 3, 4, 6, 8, 12, 24), (None, 1, 2, 3))
    if width % heads == 0 and width > heads
]


@pytest.mark.parametrize("settings", [*GRID[::29], *OTHER_SIZES], ids=str)
def test_the_settings_accept_exactly_the_shapes_that_can_be_built(settings: dict[str, Any]) -> None:
    assert (verdict(settings) == "") == builds(settings), verdict(settings)


@pytest.mark.soak
def test_the_settings_accept_exactly_the_shapes_of_a_grid_that_can_be_built() -> None:
    """But for 3 heads of keys beside 8 of 48 units, which torch computes as 2: nobody means that."""
    differing = [settings for settings in GRID if (verdict(settings) == "") != builds(settings)]
    assert [settings for settings in differing if "must divide model.heads" not in verdict(settings)] == []
    assert len(differing) <= 2


def planned(settings: dict[str, Any], *advised: str) -> str:
    """Why a plan refuses these settings with what was advised after them; "" where it does not."""
    overrides = [f"model.{name}={'null' if value is None else value}" for name, value in settings.items()]
    try:
        return shape_check.problem_of(load([*overrides, *advised], environment={}).settings.model)
    except UsageError as error:
        return str(error)


WRONG_SIZES = [
    {"kind": kind, "hidden_size": width, "heads": heads, "kv_heads": kv_heads, "layers": 1}
    for kind, (width, heads, kv_heads) in product(
        ("llama", "qwen3", "phi3", "gpt2", "moyun"), [(128, 3, 2), (129, 3, 2), (132, 3, 2), (128, 6, 4), (129, 3, None)]
    )
]


@pytest.mark.parametrize("settings", WRONG_SIZES, ids=str)
def test_what_is_advised_for_a_shape_is_planned_at_once(settings: dict[str, Any]) -> None:
    message = planned(settings)
    assert not message or planned(settings, *advised(message)) == "", message
