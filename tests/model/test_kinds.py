"""Architectures by name: each takes the settings' sizes, keeps to its record of a row, learns, and
opens again."""

import json
from typing import Any

import pytest
import torch
from support.tiny_data import VOCAB
from support.tiny_trainers import settings_of_training, tiny_model
from torch.nn import functional as F

from ttrain.config import Lora, Model
from ttrain.errors import UsageError
from ttrain.model import factory, kinds
from ttrain.model.architecture import build_config
from ttrain.model.factory import residual_weights
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss

IDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
WINDOW = {"sliding_window": 5}
ARCHITECTURES: tuple[dict[str, Any], ...] = (
    {"kind": "llama"},
    {"kind": "gpt2"},
    {"kind": "gpt_neox"},
    {"kind": "gemma3_text", "layers": 6, "fields": WINDOW},
    {"kind": "mistral", "fields": WINDOW},
    {"kind": "gpt_oss", "fields": {**WINDOW, "num_local_experts": 4}},
    {"kind": "llama4_text", "fields": {"attention_chunk_size": 5}},
    {"kind": "mixtral"},
    {"kind": "moyun"},
)


def model_of(options: dict[str, Any]) -> Any:
    return tiny_model(**{"hidden_size": 32, **options}).eval()


LENGTHS = (9, 8, 7)
T = sum(LENGTHS)


def packed() -> tuple[torch.Tensor, ...]:
    ids = torch.randint(9, VOCAB, (1, T), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    segments = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    labels = ids.roll(-1, 1)
    labels[0, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return ids, positions, segments, labels


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_packed_row_costs_what_its_records_cost_alone(options: dict[str, Any]) -> None:
    """The masks are ours, and those of a record alone are transformers': windows, chunks and
    all."""
    model = model_of(options)
    ids, positions, segments, labels = packed()
    with torch.no_grad():
        together = NextTokenLoss(model)(ids, positions, segments, labels, next_only=True)[0]
        alone = 0.0
        for record in ids.split(LENGTHS, 1):
            logits = model(record, use_cache=False).logits[0, :-1]
            alone += float(F.cross_entropy(logits, record[0, 1:], reduction="sum"))
    assert float(together) == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("options", ARCHITECTURES, ids=lambda options: options["kind"])
def test_a_step_reaches_every_parameter_with_checkpointing_too(options: dict[str, Any]) -> None:
    """In bf16 as in fp32: the masks of eager attention are scores, which autocast must not
    spoil."""
    gradients = []
    for checkpoints in (False, True):
        model, config = model_of(options).train(), settings_of_training()
        task = LanguageModeling(config, model, gradient_checkpointing=checkpoints)
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.build_model()(*packed())[0]
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    with torch.no_grad():
        exact = task.build_model()(*packed())[0]
    assert float(loss.detach()) == pytest.approx(float(exact), rel=1e-3)
    for name, gradient in gradients[0].items():
        assert gradient is not None and bool(gradient.isfinite().all()), name
        assert torch.equal(gradient, gradients[1][name]), name


def config_of(**settings: Any) -> dict[str, Any]:
    config: dict[str, Any] = build_config(Model(**settings), vocab_size=VOCAB, ids=IDS).to_dict()
    return config


SIZES = {"hidden_size": 96, "layers": 3, "heads": 4, "max_length": 77}
SIZES |= {"init_std": 0.01, "intermediate_size": 160}
USUAL = "hidden_size num_hidden_layers num_attention_heads max_position_embeddings "
OWN_NAMES = {
    "llama": f"{USUAL} initializer_range intermediate_size",
    "gpt2": "n_embd n_layer n_head n_positions initializer_range n_inner",
    "opt": f"{USUAL} init_std ffn_dim",
}


@pytest.mark.parametrize("kind", OWN_NAMES)
def test_sizes_have_the_architectures_own_names(kind: str) -> None:
    config = config_of(kind=kind, **SIZES)
    assert [config[name] for name in OWN_NAMES[kind].split()] == list(SIZES.values())
    assert {"vocab_size": VOCAB, **IDS}.items() <= config.items()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"kind": "lama"}, ["'lama'", "llama"]),
        ({"kind": "bart"}, ["encoder", "llama"]),
        ({"kind": "gpt2", "kv_heads": 1}, ["model.kv_heads is 1", "gpt2"]),
        ({"fields": {"hiden_act": "silu"}}, ["model.fields.hiden_act", "hidden_act"]),
        ({"fields": {"num_hidden_layers": 3}}, ["model.fields.num_hidden_layers", "model.layers"]),
        ({"kind": "dots1"}, ["model.kind is dots1", "model.fields"]),
        ({"kind": "tinyseek", "fields": {"rope_head_dim": 3}}, ["rope_head_dim is 3"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_no_architecture_has_is_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        factory.build(Model(**settings), vocab_size=VOCAB, ids=IDS, stop_ids=[3], seed=1)
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_building_a_config_leaves_the_settings_as_they_are() -> None:
    """transformers completes mappings in place; what enters a key would change with the first
    build."""
    model = Model(fields={"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    before = model.model_dump(mode="json")
    build_config(model, vocab_size=VOCAB, ids=IDS)
    assert model.model_dump(mode="json") == before


def test_targets_are_compared_with_the_layers_of_the_usual_kinds() -> None:
    tied = Model(tie_embeddings=True)
    for model, targets in ((Model(), ("no_such_layer", "q_proj")), (tied, ("lm_head",))):
        with pytest.raises(UsageError, match=targets[0]):
            kinds.check_targets("lora", Lora(targets=targets), model)
    kinds.check_targets("lora", Lora(targets=("attention", "mlp.down_proj")), Model())


def test_rope_follows_its_base_type_and_factor() -> None:
    def frequencies(**settings: Any) -> Any:
        return tiny_model(**settings).model.rotary_emb.inv_freq

    plain = frequencies()
    expected = torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)])
    torch.testing.assert_close(frequencies(rope_theta=100.0), expected)
    torch.testing.assert_close(frequencies(rope_type="linear", rope_factor=4.0), plain / 4)
    for kind in ("yarn", "llama3"):
        scaled = frequencies(rope_type=kind, rope_factor=4.0) / plain
        # What turns fast within the trained length stays; what never turned there is stretched.
        assert [float(scaled[0]), float(scaled[-1])] == pytest.approx([1.0, 0.25])


EXPERTS = {"kind": "tinyseek", "moe": {"experts": 6, "expert_size": 8}}


@pytest.mark.parametrize("options", [{"kind": "llama"}, {"kind": "gpt2"}, EXPERTS], ids=str)
def test_scaled_residuals_are_smaller_by_the_root_of_twice_the_layers(options: Any) -> None:
    sizes = {**options, "hidden_size": 64, "layers": 8, "init_std": 0.05}
    scaled, plain = tiny_model(**sizes, scaled_residuals=True), tiny_model(**sizes)
    writers, unscaled = residual_weights(scaled), dict(plain.named_parameters())
    assert len(writers) == 16, "attention's and the feed-forward layer's, of every layer"
    for name, parameter in scaled.named_parameters():
        if name in writers:
            assert float(parameter.detach().std()) == pytest.approx(0.05 / 4, rel=0.1), name
        else:
            assert torch.equal(parameter, unscaled[name]), name
